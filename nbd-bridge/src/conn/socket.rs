//! Receiving into registered buffers, and sending heads and data of replies.

use std::ops::Range;

use rtrs_core::mem::IoVecs;
use rtrs_core::rt::{Op as RingOp, PeerEnd, Port, peer_end};
use rtrs_core::time::{Duration, Instant};

use super::{Conn, Phase, REPLIES_MAX, SEND_RATE_MIN, STALL_TIMEOUT, TOKEN_SEND};
use crate::buffers::BUFFER_LEN;
use crate::proto::wire::NbdError;
use crate::proto::{Op, Request, reply};
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
        self.receiving = None;
        if matches!(self.phase, Phase::Ended) {
            // Canceled or too late: further bytes are dropped.
            return;
        }
        match result {
            Ok(count) if *count > 0 => {
                self.fill += count;
                self.backlog.received += *count as u64;
                self.heard = now;
                shared.stats.bytes_received += *count as u64;
            }
            // At the end of the stream, requests in flight are still answered if the client only
            // shut down its sending side.
            Ok(_) if peer_end(&self.fd) == PeerEnd::Gone => self.abort(port, shared),
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
        self.sending = None;
        let failed = match result {
            Ok(count) if *count > 0 => {
                shared.stats.bytes_sent += *count as u64;
                vecs.advance(*count);
                if !vecs.is_empty() && !self.broken {
                    self.submit_send(now, vecs, port);
                    return;
                }
                false
            }
            _ => true,
        };
        vecs.clear();
        self.vecs = Some(vecs);
        while let Some(row) = self.in_send.pop() {
            self.told(row, shared);
        }
        if failed {
            self.abort(port, shared);
        }
    }

    /// Starts the next receive. Returns true when one was started.
    pub(crate) fn receive(&mut self, now: Instant, port: &Port, shared: &mut Shared) -> bool {
        if self.receiving.is_some() || self.broken {
            return false;
        }
        if let Some(buffer) = self.buffer
            && self.start == self.fill
            && shared.buffers.is_sole_holder(buffer)
        {
            // The bytes before are no longer needed: start over at the warm beginning.
            (self.start, self.fill) = (0, 0);
        }
        let Some((need, most)) = self.wanted(shared) else { return false };
        let Some(buffer) = self.make_room(need, shared) else { return false };
        let end = (self.start + most).min(BUFFER_LEN);
        let buf = shared.buffers.slice(buffer, self.fill, end - self.fill);
        let op = RingOp::Recv { fd: self.fd.clone(), buf };
        self.receiving = Some(port.submit(op, self.id.slot as u64));
        self.heard = now;
        true
    }

    /// Returns the number of bytes from `start` that must be in one buffer before the next step,
    /// and the maximum number to receive beyond those. Returns None when the next step does not
    /// wait for bytes.
    fn wanted(&self, shared: &mut Shared) -> Option<(usize, usize)> {
        let available = self.fill - self.start;
        let (need, most) = match self.phase {
            Phase::Ended | Phase::Starved(_) => return None,
            // Both take all available bytes; the rest waits for the greeting to be sent.
            Phase::Handshake(_) | Phase::Skip { .. } => (1, BUFFER_LEN),
            Phase::Header if self.large > 0 => (Request::LEN, Request::LEN),
            Phase::Header => (Request::LEN, BUFFER_LEN),
            Phase::Payload { row, left } => {
                let entry = shared.requests.row(row);
                let to = entry.command.offset() + u64::from(entry.command.len() - left);
                let block = self.min_block();
                let here = Self::piece(self.start, left, to, block);
                let need = if here == 0 { Self::piece(0, left, to, block) } else { here };
                let last = need == left as usize;
                let most = if self.large == 0 {
                    BUFFER_LEN
                } else if last {
                    need + Request::LEN
                } else {
                    need
                };
                (need, most)
            }
        };
        let complete = available >= need && self.start + need <= BUFFER_LEN;
        (!complete).then_some((need, most))
    }

    /// Returns a buffer with room for `need` bytes from `start`.
    fn make_room(&mut self, need: usize, shared: &mut Shared) -> Option<u32> {
        let Some(buffer) = self.buffer else {
            let fresh = shared.buffers.take_receiver()?;
            self.buffer = Some(fresh);
            (self.start, self.fill) = (0, 0);
            return Some(fresh);
        };
        if self.start + need <= BUFFER_LEN {
            return Some(buffer);
        }
        let available = self.fill - self.start;
        let fresh = if shared.buffers.is_sole_holder(buffer) {
            shared.buffers.copy((buffer, self.start), (buffer, 0), available);
            buffer
        } else {
            shared.buffers.exchange(buffer, self.start, available)?
        };
        shared.stats.bytes_moved += available as u64;
        self.buffer = Some(fresh);
        (self.start, self.fill) = (0, available);
        Some(fresh)
    }

    /// Sends what is ready. Returns true when a send was started.
    pub(crate) fn send(&mut self, now: Instant, port: &Port, shared: &mut Shared) -> bool {
        if self.sending.is_some() || self.broken {
            return false;
        }
        if self.greeting.is_empty() && self.replies.is_empty() {
            return false;
        }
        if self.is_cut_short(shared) {
            tracing::debug!("a read failed when a part of its data was sent: closing");
            self.abort(port, shared);
            return true;
        }
        let Some(mut vecs) = self.vecs.take() else { return false };
        let mut used = 0;
        if !self.greeting.is_empty() {
            used = self.greeting.len().min(self.staging.len());
            self.stage(0, &self.greeting[..used], &mut vecs);
            self.greeting.drain(..used);
        }
        self.gather_replies(used, &mut vecs, shared);
        if vecs.is_empty() {
            self.vecs = Some(vecs);
            return false;
        }
        vecs.advance(std::mem::take(&mut self.sent_before));
        self.submit_send(now, vecs, port);
        true
    }

    /// Appends heads and data of as many finished requests as fit. The first `used` bytes of the
    /// staging memory are taken.
    fn gather_replies(&mut self, mut used: usize, vecs: &mut IoVecs, shared: &mut Shared) {
        let structured = self.structured();
        while let Some(&index) = self.next_reply() {
            let row = shared.requests.row(index);
            if self.in_send.len() == REPLIES_MAX
                || self.staging.len() - used < reply::ROOM
                || vecs.room() < row.parts.len() + 1
            {
                break;
            }
            let (op, cookie) = (row.command.op(), row.command.cookie());
            let complete = row.progress.is_complete();
            let mut error = row.reply.error();
            let mut statuses = None;
            if op == Op::BlockStatus && error.is_none_or(|(e, _)| e == NbdError::NotSup) {
                statuses = row.statuses();
                let none = (NbdError::Io, "the device does not say what it holds");
                error = statuses.is_none().then_some(none);
            }
            let head = match error {
                Some((error, why)) => reply::failure(structured, cookie, error, why),
                None if op == Op::Read => {
                    let Range { start, end } = row.asked();
                    let len = u32::try_from(end - start).unwrap_or(0);
                    reply::read_head(structured, cookie, start, len, complete)
                }
                None => match &statuses {
                    Some((_, count)) => reply::status_head(cookie, *count),
                    None => reply::success(cookie),
                },
            };
            // A simple reply has one head, before the data of its first piece.
            if structured || row.progress.current_piece().start == 0 {
                self.stage(used, &head, vecs);
                used += head.len();
            }
            if error.is_none() && op == Op::Read {
                row.data(|slice| vecs.push(slice));
            }
            if let Some((list, _)) = statuses {
                vecs.push(list);
            }
            self.cut_short = (!structured && !complete).then_some(index);
            if self.replies.front() == Some(&index) {
                self.replies.pop_front();
            } else {
                self.replies.retain(|reply| *reply != index);
            }
            self.in_send.push(index);
            self.note_sent(index);
        }
    }

    pub(super) fn structured(&self) -> bool {
        self.rules.is_some_and(|rules| rules.structured_replies())
    }

    /// Returns the next reply to send. After a piece of a simple reply, only the next piece of that
    /// reply may follow.
    fn next_reply(&self) -> Option<&u32> {
        match self.cut_short {
            Some(row) => self.replies.iter().find(|reply| **reply == row),
            None => self.replies.front(),
        }
    }

    /// Whether the rest of a simple reply failed; the protocol has no way to report that to the
    /// client.
    fn is_cut_short(&self, shared: &mut Shared) -> bool {
        let next = self.cut_short.and_then(|_| self.next_reply());
        next.is_some_and(|row| !shared.requests.row(*row).reply.status().is_ok())
    }

    /// Copies bytes into the staging memory at `at` and appends them to what is sent.
    fn stage(&self, at: usize, bytes: &[u8], vecs: &mut IoVecs) {
        let room = self.staging.len();
        let Some(slice) = self.staging.slice(at, bytes.len()) else {
            panic!("{at}+{} is outside the {room} bytes of staging", bytes.len());
        };
        slice.copy_in(0, bytes);
        vecs.push(slice);
    }

    fn submit_send(&mut self, now: Instant, vecs: Box<IoVecs>, port: &Port) {
        let seconds = vecs.remaining() as u64 / SEND_RATE_MIN;
        self.send_by = now + STALL_TIMEOUT + Duration::from_secs(seconds);
        let op = RingOp::SendMsg { fd: self.fd.clone(), iov: vecs };
        self.sending = Some(port.submit(op, TOKEN_SEND | self.id.slot as u64));
    }
}
