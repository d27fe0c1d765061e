//! Parses received bytes into requests for the device.
//!
//! Each step consumes one item of the received bytes: an option, a header, or a piece of payload. A
//! step that lacks bytes, rows, memory or room in the device queue changes nothing and is retried
//! in a later turn.

use std::ops::Range;

use rtrs_core::rt::Port;

use super::input::PIECE_ALIGN;
use super::{Conn, Phase};
use crate::buffers::{PIECE_MAX, Part};
use crate::proto::reply::Form;
use crate::proto::wire::ExtendedRequest;
use crate::proto::{AfterRefusal, Op, Outcome, Request, Validated};
use crate::requests::{Command, Late, STATUS_MEMORY};
use crate::shared::Shared;

/// Rest of a read, from the start of a piece.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) len: u64,
    /// Block size of the device.
    pub(super) block: u64,
    /// Whether the read must be answered with one chunk.
    pub(super) one_chunk: bool,
}

impl Conn {
    /// Performs one parsing step. Returns false if more bytes, rows or memory are needed.
    pub(super) fn step(&mut self, port: &Port, shared: &mut Shared) -> bool {
        let is_between = matches!(self.phase, Phase::Header | Phase::Starved(_));
        if is_between && self.output.first_dropped().is_some() {
            return false;
        }
        match self.phase {
            Phase::Ended => false,
            Phase::Handshake(_) => self.step_handshake(port, shared),
            Phase::Starved(request) => {
                if shared.queue.is_congested() {
                    return false;
                }
                self.phase = Phase::Header;
                self.start_request(request, port, shared)
            }
            Phase::Skip { left } => {
                let count = self.input.available().min(left as usize);
                self.input.consume(count);
                let left = left - u32::try_from(count).unwrap_or(left);
                self.phase = if left == 0 { Phase::Header } else { Phase::Skip { left } };
                left == 0
            }
            Phase::Header => self.step_header(port, shared),
            Phase::Payload { row, left } => self.step_payload(row, left, shared),
        }
    }

    fn step_handshake(&mut self, port: &Port, shared: &mut Shared) -> bool {
        let available = self.input.available();
        if available == 0 || self.output.is_greeting_full() {
            return false;
        }
        let mut bytes = vec![0; available];
        if !self.input.peek(&mut bytes, &shared.buffers) {
            return false;
        }
        let Phase::Handshake(handshake) = &mut self.phase else { return false };
        let (used, outcome) = handshake.feed(&bytes, shared, self.output.greeting());
        self.input.consume(used);
        match outcome {
            Outcome::NeedMore => false,
            Outcome::Reply => true,
            Outcome::Ready(terms) => {
                self.rules = Some(terms.rules());
                self.phase = Phase::Header;
                shared.stats.negotiated += 1;
                true
            }
            Outcome::Abort => {
                self.depart(port, shared);
                false
            }
            Outcome::Close(error) => {
                tracing::debug!("NBD handshake ended: {error}");
                self.depart(port, shared);
                false
            }
        }
    }

    fn step_header(&mut self, port: &Port, shared: &mut Shared) -> bool {
        let header = self.form().request_len();
        if self.input.available() < header
            || !self.gate.passes(&shared.seat)
            || shared.queue.is_congested()
        {
            return false;
        }
        let Some(rules) = self.rules else { return false };
        let mut bytes = [0; ExtendedRequest::LEN];
        if !self.input.peek(&mut bytes[..header], &shared.buffers) {
            return false;
        }
        let decoded = if rules.extended() {
            ExtendedRequest::decode(&bytes)
        } else {
            Request::decode(&bytes).map(Into::into)
        };
        let Ok(request) = decoded else {
            tracing::debug!("closing the connection: NBD request with wrong magic");
            self.abort(port, shared);
            return false;
        };
        match rules.check_extended(&request, shared.queue.geometry().size) {
            Ok(valid) => {
                self.input.consume(header);
                self.input.note_request(valid.payload());
                self.start_request(valid, port, shared)
            }
            Err(refusal) => {
                let Some(row) = shared.requests.take(self.rows) else { return false };
                self.input.consume(header);
                self.rows += 1;
                let entry = shared.requests.row(row);
                (entry.conn, entry.command) =
                    (self.id, Command::refused(request.cookie, request.offset));
                entry.reply.refuse(refusal.error, refusal.reason);
                self.output.push(row);
                match refusal.after {
                    AfterRefusal::Continue => {}
                    AfterRefusal::Skip(left) => self.phase = Phase::Skip { left },
                    AfterRefusal::Close => self.depart(port, shared),
                }
                true
            }
        }
    }

    /// Starts a valid request. Returns false if it has to wait, or was the last one.
    fn start_request(&mut self, request: Validated, port: &Port, shared: &mut Shared) -> bool {
        if request.op == Op::Disconnect {
            self.in_order = true;
            // A client that is not waiting for any reply has received all reports of losses.
            if self.rows == 0 {
                self.reports.leave(shared.losses.as_deref());
            }
            self.depart(port, shared);
            return false;
        }
        let command = Command::new(&request, self.min_block());
        let fragments = command.cut().fragments();
        let room = fragments == 0 || shared.turns.has_room();
        let Some(row) = room.then(|| shared.requests.take(self.rows)).flatten() else {
            self.phase = Phase::Starved(request);
            return false;
        };
        let Some(piece) = self.take_memory(&command, row, shared) else {
            shared.requests.give(row, self.rows);
            self.phase = Phase::Starved(request);
            return false;
        };
        self.rows += 1;
        let entry = shared.requests.row(row);
        (entry.conn, entry.command) = (self.id, command);
        if fragments > 0 {
            let memory = entry.parts.pop();
            entry.fragments.set_memory(memory);
        }
        self.begin_row(row, piece, shared);
        true
    }

    /// Takes memory for a read, for the extents or for the fragments. Returns the length of the
    /// pieces of a read, or None if memory is short.
    fn take_memory(&mut self, command: &Command, row: u32, shared: &mut Shared) -> Option<u64> {
        let (op, block, whole) = (command.op(), command.cut().block, command.whole_len());
        let bytes = match op {
            Op::Read => {
                let piece = Piece { len: whole, block, one_chunk: command.one_chunk() };
                return self.take_piece(row, piece, shared);
            }
            Op::BlockStatus => STATUS_MEMORY as u64,
            _ => 2 * block * command.cut().fragments() as u64,
        };
        (bytes == 0 || self.take_bytes(row, bytes, shared)).then_some(whole)
    }

    fn take_bytes(&mut self, row: u32, bytes: u64, shared: &mut Shared) -> bool {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        shared.take_read(self.id.slot, row, bytes, &mut self.memory)
    }

    /// Takes memory for a piece of a read. Returns the length of the piece, or None if memory is
    /// short.
    pub(super) fn take_piece(&mut self, row: u32, of: Piece, shared: &mut Shared) -> Option<u64> {
        let piece_of = |most: usize| {
            let pieces = of.len.div_ceil(most as u64).max(1);
            of.len.div_ceil(pieces).next_multiple_of(PIECE_ALIGN.max(of.block)).min(of.len)
        };
        let piece = piece_of(PIECE_MAX);
        if self.take_bytes(row, piece, shared) {
            return Some(piece);
        }
        // A simple reply can no longer report an error once its first piece has been sent.
        if self.form() == Form::Simple || of.one_chunk {
            return None;
        }
        // The memory for a long piece may be held by other bridges, or by a client that is not
        // reading its replies.
        let mut smaller = piece_of(shared.buffers.guaranteed_piece());
        if smaller >= piece && shared.first_reader.beside_unread && self.memory.is_empty() {
            smaller = piece_of(shared.buffers.available_piece());
        }
        (smaller < piece && self.take_bytes(row, smaller, shared)).then_some(smaller)
    }

    /// Submits a new row to the device, or finishes it if there is nothing for the device to do.
    fn begin_row(&mut self, row: u32, piece: u64, shared: &mut Shared) {
        let entry = shared.requests.row(row);
        let (op, len) = (entry.command.op(), entry.command.len());
        let whole = entry.command.whole_len();
        match op {
            Op::Write => {
                entry.progress.expect_payload();
                let left = u32::try_from(len).unwrap_or(u32::MAX);
                self.phase = Phase::Payload { row, left };
            }
            Op::Cache => shared.finish_if_done(row),
            Op::Flush if rtrs_core::mutated!(NbdFlushSkipped) => shared.finish_if_done(row),
            // The trim covers no whole block.
            Op::Trim if whole == 0 => shared.finish_if_done(row),
            Op::Read => {
                entry.begin_read(piece);
                shared.submit(row);
            }
            _ => {
                entry.progress.set_ready(if op == Op::Flush { 1 } else { whole });
                let losses = shared.losses.as_deref();
                let reported = self.reports.reported_before(self.input.parsed(), losses);
                entry.loss_marks.set_reported(reported);
                shared.submit(row);
                shared.zero_fragments(row);
            }
        }
    }

    /// Minimum block size of the export; 1 until the negotiation has ended.
    pub(super) fn min_block(&self) -> u32 {
        self.rules.map_or(1, |rules| rules.min_block())
    }

    /// Submits received payload to the device. Returns false if more has to arrive.
    fn step_payload(&mut self, row: u32, left: u32, shared: &mut Shared) -> bool {
        let Some(buffer) = self.input.buffer() else { return false };
        if shared.queue.is_congested() {
            return false;
        }
        let entry = shared.requests.row(row);
        let to = entry.command.offset() + entry.command.len() - u64::from(left);
        let piece = self.input.piece(left, to, self.min_block());
        if piece == 0 || self.input.available() < piece {
            return false;
        }
        // Part of the payload in that range: its position in the buffer and its length.
        let (from, start) = (to, self.input.start());
        let part = |bytes: &Range<u64>| {
            let (first, end) = (bytes.start.max(from), bytes.end.min(from + piece as u64));
            let len = usize::try_from(end.saturating_sub(first)).unwrap_or(0);
            let at = usize::try_from(first - from).unwrap_or(0);
            (start + at, len)
        };
        let cut = entry.command.cut();
        let ((at, len), rest) = (part(&cut.whole), cut.rest.each_ref().map(part));
        self.input.consume(piece);
        let left = left - u32::try_from(piece).unwrap_or(left);
        if len > 0 {
            shared.buffers.hold(buffer);
            entry.parts.push(Part { buffer, slice: shared.buffers.slice(buffer, at, len) });
            entry.progress.add_ready(len as u64);
        }
        self.phase = if left == 0 {
            entry.progress.set_complete();
            Phase::Header
        } else {
            Phase::Payload { row, left }
        };
        shared.submit(row);
        for (which, (at, len)) in rest.into_iter().enumerate() {
            if len > 0 && shared.requests.row(row).reply.late() != Late::GivenUp {
                let payload = shared.buffers.slice(buffer, at, len);
                if let Some((_, bytes)) = shared.requests.row(row).fragment_memory(which) {
                    bytes.copy_from(&payload);
                }
                shared.begin_fragment(row, which);
            }
        }
        true
    }
}
