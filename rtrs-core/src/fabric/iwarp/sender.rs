//! Sender of a stream machine: posted work requests and responses to the peer's reads, from posting
//! to completion.
//!
//! The segments of a message are contiguous; read responses come between messages. An entry is
//! encoded, then handed to TCP, then done (a read once its response is complete), and leaves the
//! queue in posting order.

use std::collections::VecDeque;

use super::batch::{Batch, SEGMENT_MAX, payload_len};
use super::ddp::{self, Untagged, queue};
use super::mpa::{Features, Terms};
use super::rdmap::{ReadRequest, opcode};
use super::stag::Placing;
use crate::fabric::{WcStatus, WorkRequest, WrOp};
use crate::mem::MemSlice;

/// Progress of a send queue entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ItemState {
    /// Payload remains to be encoded.
    Payload,
    /// Only the immediate remains.
    Immediate,
    /// Fully encoded; a read waits for its response.
    Encoded,
    /// Finished; will be reported in order.
    Done,
}

/// Entry of the send queue.
#[derive(Debug)]
pub(super) struct SendItem {
    pub(super) wr: WorkRequest,
    /// Payload bytes on the wire, including the prefix.
    pub(super) len: usize,
    sent: usize,
    state: ItemState,
    /// Sink address of a read.
    pub(super) sink: u64,
}

/// Read that is waiting for the peer's response.
#[derive(Clone, Copy, Debug)]
struct ReadWait {
    /// Sequence number of its send queue entry.
    sequence: u64,
    received: usize,
}

/// Response to a peer's read.
#[derive(Debug)]
pub(super) struct Response {
    pub(super) slice: Option<MemSlice>,
    pub(super) _placing: Option<Placing>,
    pub(super) stag: u32,
    pub(super) addr: u64,
    pub(super) len: usize,
    pub(super) sent: usize,
}

/// Source of the message being encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    SendQueue,
    Response,
}

/// Sending half of a queue pair.
#[derive(Debug)]
pub(super) struct Sender {
    queue: VecDeque<SendItem>,
    /// Sequence number of the first entry of `queue`.
    base: u64,
    /// Number of fully encoded entries, from the front.
    encoded: usize,
    /// Number of encoded entries that have been handed to TCP.
    handed: usize,
    reads: VecDeque<ReadWait>,
    /// The peer refused the oldest pending read.
    read_refused: bool,
    responses: VecDeque<Response>,
    responses_encoded: usize,
    /// Whether this end may send; a responder must first receive a frame.
    may_send: bool,
    /// The promised ready-to-receive frame has not been sent.
    rtr_due: bool,
    half: Option<Source>,
    after_response: bool,
    msn: [u32; 3],
}

impl Sender {
    /// Creates a sender with room for `send_max` work requests; it sends nothing before `open`.
    pub(super) fn new(send_max: usize) -> Self {
        Self {
            queue: VecDeque::with_capacity(send_max),
            base: 0,
            encoded: 0,
            handed: 0,
            reads: VecDeque::new(),
            read_refused: false,
            responses: VecDeque::new(),
            responses_encoded: 0,
            may_send: false,
            rtr_due: false,
            half: None,
            after_response: false,
            msn: [1; 3],
        }
    }

    /// Begins full operation under these terms.
    pub(super) fn open(&mut self, terms: Terms) {
        self.reads.reserve_exact(usize::from(terms.ord));
        self.responses.reserve_exact(2 * usize::from(terms.ird));
        self.may_send = terms.initiator;
        self.rtr_due = terms.rtr_write;
    }

    /// Permits sending, because the peer has sent a frame.
    pub(super) fn permit(&mut self) {
        self.may_send = true;
    }

    /// Returns the number of work requests in the queue.
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Queues a work request with `len` bytes on the wire; `sink` is the sink address of a read.
    pub(super) fn push(&mut self, wr: WorkRequest, len: usize, sink: u64) {
        let state = match wr.op {
            WrOp::RdmaWrite { imm: Some(_), .. } if len == 0 => ItemState::Immediate,
            _ => ItemState::Payload,
        };
        self.queue.push_back(SendItem { wr, len, sent: 0, state, sink });
    }

    /// Queues the response to a read by the peer.
    pub(super) fn respond(&mut self, response: Response) {
        self.responses.push_back(response);
    }

    /// Returns the number of the peer's reads that are still being served (RFC 5040 section 5.5: at
    /// most IRD).
    pub(super) fn responses_held(&self) -> usize {
        self.responses.len() - self.responses_encoded
    }

    /// Returns true if everything queued has been handed to TCP and no read is pending.
    pub(super) fn is_drained(&self) -> bool {
        self.queue.is_empty() && self.responses.is_empty() && !self.rtr_due
    }

    /// Returns true if `encode` would add a frame.
    pub(super) fn has_output(&self, ord: u16) -> bool {
        self.rtr_due
            || (self.may_send
                && (self.responses_encoded < self.responses.len() || self.send_ready(ord)))
    }

    /// Encodes frames until the batch is full or nothing is left.
    pub(super) fn encode(&mut self, batch: &mut Batch<'_>, terms: &Terms) {
        if self.rtr_due {
            self.rtr_due = false;
            batch.begin(&ddp::tagged(opcode::WRITE, true, 1, 0, 0));
            batch.end(ddp::TAGGED_LEN);
        }
        while self.may_send && batch.has_room() {
            let response = self.responses_encoded < self.responses.len();
            let send = self.send_ready(terms.ord);
            let source = match self.half {
                Some(source) => source,
                None if response && !(send && self.after_response) => Source::Response,
                None if send => Source::SendQueue,
                None => break,
            };
            let finished = match source {
                Source::Response => self.encode_response(batch),
                Source::SendQueue => self.encode_send(batch, terms.features),
            };
            self.half = (!finished).then_some(source);
            self.after_response = source == Source::Response;
        }
    }

    /// Records that TCP has accepted everything encoded.
    pub(super) fn hand_over(&mut self) {
        for index in self.handed..self.encoded {
            let item = &mut self.queue[index];
            if !matches!(item.wr.op, WrOp::RdmaRead { .. }) {
                item.state = ItemState::Done;
            }
        }
        self.handed = self.encoded;
        self.responses.drain(..self.responses_encoded);
        self.responses_encoded = 0;
    }

    /// Removes the oldest entry if it is done. Call this until it returns None.
    pub(super) fn pop_done(&mut self) -> Option<SendItem> {
        if self.handed > 0
            && self.queue.front().is_some_and(|item| item.state == ItemState::Done)
            && let Some(item) = self.queue.pop_front()
        {
            self.base += 1;
            self.handed -= 1;
            self.encoded -= 1;
            return Some(item);
        }
        if self.queue.is_empty() {
            // Restart at the beginning of the buffer, so that a light load touches little memory.
            self.queue.clear();
        }
        None
    }

    /// Returns the oldest pending read, and the number of bytes received for it.
    pub(super) fn oldest_read(&self) -> Option<(&SendItem, usize)> {
        let wait = self.reads.front()?;
        let index = usize::try_from(wait.sequence.checked_sub(self.base)?).ok()?;
        Some((self.queue.get(index)?, wait.received))
    }

    /// Records `len` more bytes of the response to the oldest read. Returns true if they were the
    /// `last`; entries may then be done.
    pub(super) fn response_placed(&mut self, len: usize, last: bool) -> bool {
        let Some(wait) = self.reads.front_mut() else { return false };
        wait.received += len;
        if !last {
            return false;
        }
        let index = wait.sequence.checked_sub(self.base).and_then(|at| usize::try_from(at).ok());
        self.reads.pop_front();
        if let Some(item) = index.and_then(|index| self.queue.get_mut(index)) {
            item.state = ItemState::Done;
        }
        true
    }

    /// Records that the peer refused the oldest pending read, if there is one.
    pub(super) fn refuse_read(&mut self) {
        self.read_refused = !self.reads.is_empty();
    }

    /// Removes all entries, oldest first, passing each with its status to `report`.
    pub(super) fn flush(&mut self, mut report: impl FnMut(&SendItem, WcStatus)) {
        let first_read = self.reads.front().map(|wait| wait.sequence);
        let mut sequence = self.base;
        while let Some(item) = self.queue.pop_front() {
            let refused = self.read_refused && Some(sequence) == first_read;
            report(&item, if refused { WcStatus::RemoteAccess } else { WcStatus::Flushed });
            sequence += 1;
        }
        self.reads.clear();
        self.responses.clear();
    }

    fn send_ready(&self, ord: u16) -> bool {
        self.queue.get(self.encoded).is_some_and(|item| match item.wr.op {
            WrOp::RdmaRead { .. } => self.reads.len() < usize::from(ord),
            _ => true,
        })
    }

    fn next_msn(&mut self, qn: u32) -> u32 {
        let slot = &mut self.msn[qn as usize];
        let msn = *slot;
        *slot = slot.wrapping_add(1);
        msn
    }

    /// Encodes one frame of the response to the peer's oldest read. Returns true if it was the
    /// last.
    fn encode_response(&mut self, batch: &mut Batch<'_>) -> bool {
        let response = &mut self.responses[self.responses_encoded];
        let left = response.len - response.sent;
        let len = payload_len(response.slice.as_ref(), response.sent, left);
        let last = response.sent + len == response.len;
        let addr = response.addr.wrapping_add(response.sent as u64);
        batch.begin(&ddp::tagged(opcode::READ_RESPONSE, last, response.stag, addr, len));
        if let Some(part) = response.slice.as_ref().and_then(|s| s.slice(response.sent, len)) {
            batch.payload(part);
        }
        batch.end(ddp::TAGGED_LEN + len);
        response.sent += len;
        if last {
            self.responses_encoded += 1;
        }
        last
    }

    /// Encodes one frame of the next send queue entry. Returns true if it was the last.
    fn encode_send(&mut self, batch: &mut Batch<'_>, features: Features) -> bool {
        let index = self.encoded;
        let op = self.queue[index].wr.op;
        let finished = match op {
            WrOp::RdmaRead { .. } => {
                self.encode_read(batch);
                true
            }
            WrOp::RdmaWrite { imm, .. } => {
                if self.queue[index].state == ItemState::Immediate {
                    self.encode_immediate(batch, imm.unwrap_or(0));
                    true
                } else {
                    self.encode_write(batch) && imm.is_none()
                }
            }
            WrOp::Send { .. } => self.encode_message(batch, features),
        };
        if finished {
            self.queue[index].state = ItemState::Encoded;
            self.encoded += 1;
        }
        finished
    }

    fn encode_write(&mut self, batch: &mut Batch<'_>) -> bool {
        let item = &mut self.queue[self.encoded];
        let WrOp::RdmaWrite { remote, .. } = item.wr.op else { return true };
        let memory = item.wr.sges.first.as_ref().map(|sge| &sge.slice);
        let len = payload_len(memory, item.sent, item.len - item.sent);
        let last = item.sent + len == item.len;
        let addr = remote.addr.wrapping_add(item.sent as u64);
        batch.begin(&ddp::tagged(opcode::WRITE, last, remote.rkey.0, addr, len));
        batch.pieces(&item.wr.sges, item.sent, len);
        batch.end(ddp::TAGGED_LEN + len);
        item.sent += len;
        if last {
            item.state = ItemState::Immediate;
        }
        last
    }

    /// Encodes an immediate. RFC 7306 section 6 defines eight bytes; RTRS puts the 32 bits first,
    /// followed by zeroes.
    fn encode_immediate(&mut self, batch: &mut Batch<'_>, imm: u32) {
        let msn = self.next_msn(queue::SEND);
        let fields = Untagged { invalidate: 0, qn: queue::SEND, msn, mo: 0 };
        let mut frame = [0; 20 + 8];
        frame[..20].copy_from_slice(&ddp::untagged(opcode::IMMEDIATE, true, fields, 8));
        frame[20..24].copy_from_slice(&imm.to_be_bytes());
        batch.begin(&frame);
        batch.end(ddp::UNTAGGED_LEN + 8);
    }

    fn encode_message(&mut self, batch: &mut Batch<'_>, features: Features) -> bool {
        let item = &self.queue[self.encoded];
        let WrOp::Send { imm, invalidate } = item.wr.op else { return true };
        let (sent, total) = (item.sent, item.len);
        let msn = self.msn[queue::SEND as usize];
        let kind = if invalidate.is_some() { opcode::SEND_INV } else { opcode::SEND };
        let len = (total - sent).min(SEGMENT_MAX);
        let last = sent + len == total;
        let invalidate = invalidate.map_or(0, |key| key.0);
        let fields = Untagged { invalidate, qn: queue::SEND, msn, mo: sent as u32 };
        batch.begin(&ddp::untagged(kind, last, fields, len));
        let prefix = if features.send_prefix { Features::PREFIX_LEN } else { 0 };
        if prefix > 0 && sent == 0 {
            let mut bytes = [0; Features::PREFIX_LEN];
            bytes[0] = u8::from(imm.is_some());
            bytes[4..8].copy_from_slice(&imm.unwrap_or(0).to_be_bytes());
            batch.put(&bytes);
        }
        let from = sent.saturating_sub(prefix);
        let payload = if sent == 0 { len - prefix } else { len };
        let item = &mut self.queue[self.encoded];
        batch.pieces(&item.wr.sges, from, payload);
        batch.end(ddp::UNTAGGED_LEN + len);
        item.sent += len;
        if last {
            self.next_msn(queue::SEND);
        }
        last
    }

    fn encode_read(&mut self, batch: &mut Batch<'_>) {
        let sequence = self.base + self.encoded as u64;
        let msn = self.next_msn(queue::READ_REQUEST);
        let item = &self.queue[self.encoded];
        let WrOp::RdmaRead { remote } = item.wr.op else { return };
        let request = ReadRequest {
            sink_stag: item.wr.sges.first.as_ref().map_or(0, |sge| sge.lkey),
            sink_addr: item.sink,
            size: item.len as u32,
            source_stag: remote.rkey.0,
            source_addr: remote.addr,
        };
        let fields = Untagged { invalidate: 0, qn: queue::READ_REQUEST, msn, mo: 0 };
        batch.begin(&ddp::untagged(opcode::READ_REQUEST, true, fields, ReadRequest::LEN));
        batch.put(&request.encode());
        batch.end(ddp::UNTAGGED_LEN + ReadRequest::LEN);
        self.reads.push_back(ReadWait { sequence, received: 0 });
    }
}
