//! Receives into registered buffers, and sends replies.

use rtrs_core::mem::IoVecs;
use rtrs_core::rt::{PeerEnd, Port};
use rtrs_core::time::Instant;

use super::{Conn, Phase};
use crate::buffers::BUFFER_LEN;
use crate::proto::reply::Form;
use crate::shared::Shared;

impl Conn {
    /// Handles received bytes, or the end of the stream.
    pub(crate) fn on_received(
        &mut self,
        now: Instant,
        result: &std::io::Result<usize>,
        port: &Port,
        shared: &mut Shared,
    ) {
        self.link.receive_ended();
        if matches!(self.phase, Phase::Ended) {
            // Canceled or too late: further bytes are dropped.
            return;
        }
        match result {
            Ok(count) if *count > 0 => {
                self.input.add(*count);
                self.link.heard_at(now);
                shared.stats.bytes_received += *count as u64;
            }
            // At the end of the stream, requests in flight are still answered if the client only
            // shut down its sending side.
            Ok(_) if self.link.peer_end() == PeerEnd::Gone => self.on_gone(port, shared),
            Ok(_) => self.depart(port, shared),
            Err(_) => self.abort(port, shared),
        }
    }

    /// Handles bytes that were sent.
    pub(crate) fn on_sent(
        &mut self,
        now: Instant,
        mut vecs: Box<IoVecs>,
        result: &std::io::Result<usize>,
        port: &Port,
        shared: &mut Shared,
    ) {
        self.link.send_ended();
        let failed = match result {
            Ok(count) if *count > 0 => {
                shared.stats.bytes_sent += *count as u64;
                vecs.advance(*count);
                if !vecs.is_empty() && !self.link.is_broken() {
                    self.link.send(now, vecs, port);
                    return;
                }
                false
            }
            _ => true,
        };
        self.output.send_ended(vecs);
        while let Some(row) = self.output.take_sent() {
            self.told(row, shared);
        }
        if failed {
            self.abort(port, shared);
        }
    }

    /// Starts the next receive. Returns true if one was started.
    pub(crate) fn receive(&mut self, now: Instant, port: &Port, shared: &mut Shared) -> bool {
        if self.link.is_receiving() || self.link.is_broken() {
            return false;
        }
        self.input.rewind(&shared.buffers);
        let Some((need, most)) = self.wanted(shared) else { return false };
        let Some(moved) = self.input.make_room(need, &mut shared.buffers) else { return false };
        shared.stats.bytes_moved += moved;
        let Some(memory) = self.input.memory(most, &shared.buffers) else { return false };
        self.link.receive(now, memory, port);
        true
    }

    /// Returns the number of unparsed bytes that must be in one buffer before the next step, and
    /// the maximum number to receive beyond those. Returns None if the next step does not wait for
    /// bytes.
    fn wanted(&self, shared: &mut Shared) -> Option<(usize, usize)> {
        let header = self.form().request_len();
        let (need, most) = match self.phase {
            Phase::Ended | Phase::Starved(_) => return None,
            // Both take all available bytes; what follows waits for the greeting to be sent.
            Phase::Handshake(_) | Phase::Skip { .. } => (1, BUFFER_LEN),
            Phase::Header if self.input.is_limited() => (header, header),
            Phase::Header => (header, BUFFER_LEN),
            Phase::Payload { row, left } => {
                let entry = shared.requests.row(row);
                let to = entry.command.offset() + entry.command.len() - u64::from(left);
                let need = self.input.needed_piece(left, to, self.min_block());
                let last = need == left as usize;
                let most = if !self.input.is_limited() {
                    BUFFER_LEN
                } else if last {
                    need + header
                } else {
                    need
                };
                (need, most)
            }
        };
        (!self.input.has(need)).then_some((need, most))
    }

    /// Sends the data that is ready. Returns true if anything was done.
    pub(crate) fn send(&mut self, now: Instant, port: &Port, shared: &mut Shared) -> bool {
        if self.link.is_sending() || self.link.is_broken() {
            return false;
        }
        if self.output.is_empty() {
            return false;
        }
        if self.output.is_cut_short(&mut shared.requests) {
            tracing::debug!(
                "a read failed after part of its data was sent: closing the connection"
            );
            self.abort(port, shared);
            return true;
        }
        let size = shared.queue.geometry().size;
        let vecs = self.output.gather(self.form(), size, &mut shared.requests);
        if self.reports.unsent().is_some_and(|row| self.output.sends(row)) {
            self.reports.note_sent(self.input.received() + self.link.unread());
        }
        let Some(vecs) = vecs else { return false };
        self.link.send(now, vecs, port);
        true
    }

    /// The negotiated form of replies.
    pub(super) fn form(&self) -> Form {
        match self.rules {
            Some(rules) if rules.extended() => Form::Extended,
            Some(rules) if rules.structured_replies() => Form::Structured,
            _ => Form::Simple,
        }
    }
}
