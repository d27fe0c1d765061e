//! Sending half of the stream machine. Work requests are encoded into frames only when the socket
//! is ready, so that one system call carries as many as fit.
//!
//! A batch is a list of slices: headers, checksums and small payloads in the staging memory, large
//! payloads in place. Only pieces of at most 256 bytes are copied, and nothing is allocated. The
//! segments of a message are contiguous; read responses come between messages.

use super::ddp::{self, Untagged, queue};
use super::mpa::{self, Features};
use super::progress::Source;
use super::qp::{ItemState, QpMachine, ReadWait, TX_STAGE};
use super::rdmap::{ReadRequest, opcode};
use super::state::CoreState;
use crate::fabric::WrOp;
use crate::mem::{IoVecs, MemSlice, crc32c_append};

/// Maximum payload of a frame; a multiple of 4096 below the largest MULPDU.
pub(super) const SEGMENT_MAX: usize = 61440;
/// Maximum number of slices in a batch.
pub(super) const BATCH_SLICES: usize = 128;
/// Number of bytes after which a batch is full.
const BATCH_BYTES: usize = 256 << 10;
/// Pieces up to this length are copied into staging, next to their header.
const INLINE_MAX: usize = 256;
/// Maximum staging used by one frame: header, prefix, two small pieces, padding, checksum.
const STAGE_PER_FRAME: usize = 20 + 8 + 2 * INLINE_MAX + 8;
/// Maximum number of slices used by one frame: staging between two pieces, and after them.
const SLICES_PER_FRAME: usize = 5;

/// Batch under construction.
struct Batch<'a> {
    stage: MemSlice,
    iov: &'a mut IoVecs,
    /// End of the used staging, and start of the part not yet in the list.
    at: usize,
    run: usize,
    bytes: usize,
    sum: u32,
    crc: bool,
}

impl Batch<'_> {
    fn has_room(&self) -> bool {
        self.bytes < BATCH_BYTES
            && TX_STAGE - self.at >= STAGE_PER_FRAME
            && self.iov.room() >= SLICES_PER_FRAME
    }

    fn put(&mut self, bytes: &[u8]) {
        self.stage.copy_in(self.at, bytes);
        if self.crc {
            self.sum = crc32c_append(self.sum, bytes);
        }
        self.at += bytes.len();
    }

    /// Starts a frame with its length field and header.
    fn begin(&mut self, header: &[u8]) {
        self.sum = 0;
        self.put(header);
    }

    fn push_run(&mut self) {
        if self.at > self.run {
            if let Some(part) = self.stage.slice(self.run, self.at - self.run) {
                self.bytes += part.len();
                self.iov.push(part);
            }
            self.run = self.at;
        }
    }

    /// Adds a part of local memory as payload.
    fn payload(&mut self, part: MemSlice) {
        if self.crc {
            self.sum = part.crc32c(self.sum);
        }
        if part.len() <= INLINE_MAX {
            let from = part.region();
            self.stage.region().copy_from(
                self.stage.offset() + self.at,
                from,
                part.offset(),
                part.len(),
            );
            self.at += part.len();
            return;
        }
        self.push_run();
        self.bytes += part.len();
        self.iov.push(part);
    }

    /// Ends a frame whose ULPDU has this length.
    fn end(&mut self, ulpdu_len: usize) {
        let pad = mpa::pad_len(ulpdu_len);
        self.put(&[0; 3][..pad]);
        // If both sides work without CRC, the field remains and is zero (RFC 5044 section 4.4).
        let sum = if self.crc { self.sum } else { 0 };
        self.stage.copy_in(self.at, &sum.to_le_bytes());
        self.at += mpa::CRC_LEN;
    }
}

impl QpMachine {
    /// Encodes the next batch into `iov`. Returns its length; 0 if there is nothing to send. Must
    /// not be called again before `tx_done`.
    pub(super) fn tx_prepare(&mut self, iov: &mut IoVecs) -> usize {
        iov.clear();
        let Some(terms) = self.terms else { return 0 };
        let Some(stage) = self.send_stage.slice(0, TX_STAGE) else { return 0 };
        let mut batch = Batch { stage, iov, at: 0, run: 0, bytes: 0, sum: 0, crc: terms.crc };
        if let Some(failure) = &mut self.failure {
            if let Some(terminate) = failure.terminate.take() {
                let (payload, len) = terminate.encode();
                let fields = Untagged { invalidate: 0, qn: queue::TERMINATE, msn: 1, mo: 0 };
                batch.begin(&ddp::untagged(opcode::TERMINATE, true, fields, len));
                batch.put(&payload[..len]);
                batch.end(ddp::UNTAGGED_LEN + len);
            }
            batch.push_run();
            return batch.bytes;
        }
        if self.tx.rtr_due {
            self.tx.rtr_due = false;
            batch.begin(&ddp::tagged(opcode::WRITE, true, 1, 0, 0));
            batch.end(ddp::TAGGED_LEN);
        }
        while self.tx.may_send && batch.has_room() {
            let response = self.tx.responses_encoded < self.responses.len();
            let send = self.send_ready(terms.ord);
            let source = match self.tx.half {
                Some(source) => source,
                None if response && !(send && self.tx.after_response) => Source::Response,
                None if send => Source::SendQueue,
                None => break,
            };
            let finished = match source {
                Source::Response => self.encode_response(&mut batch),
                Source::SendQueue => self.encode_send(&mut batch, terms.features),
            };
            self.tx.half = (!finished).then_some(source);
            self.tx.after_response = source == Source::Response;
        }
        batch.push_run();
        batch.bytes
    }

    /// Handles the completed transfer of a whole batch to TCP.
    pub(super) fn tx_done(&mut self, core: &mut CoreState) {
        for index in self.tx.handed..self.tx.encoded {
            let item = &mut self.send_queue[index];
            if !matches!(item.wr.op, WrOp::RdmaRead { .. }) {
                item.state = ItemState::Done;
            }
        }
        self.tx.handed = self.tx.encoded;
        self.responses.drain(..self.tx.responses_encoded);
        self.tx.responses_encoded = 0;
        self.retire(core);
    }

    /// Returns true if `tx_prepare` would return data.
    pub(super) fn has_output(&self) -> bool {
        let Some(terms) = self.terms else { return false };
        match &self.failure {
            Some(failure) => failure.terminate.is_some(),
            None => {
                self.tx.rtr_due
                    || (self.tx.may_send
                        && (self.tx.responses_encoded < self.responses.len()
                            || self.send_ready(terms.ord)))
            }
        }
    }

    /// Returns true if everything posted has been handed to TCP and no read is pending.
    pub(super) fn is_drained(&self) -> bool {
        self.send_queue.is_empty() && self.responses.is_empty() && !self.tx.rtr_due
    }

    /// Returns the number of the peer's reads that are still being served (RFC 5040 section 5.5: at
    /// most IRD).
    pub(super) fn responses_held(&self) -> usize {
        self.responses.len() - self.tx.responses_encoded
    }

    fn send_ready(&self, ord: u16) -> bool {
        self.send_queue.get(self.tx.encoded).is_some_and(|item| match item.wr.op {
            WrOp::RdmaRead { .. } => self.reads.len() < usize::from(ord),
            _ => true,
        })
    }

    fn next_msn(&mut self, qn: u32) -> u32 {
        let slot = &mut self.tx.msn[qn as usize];
        let msn = *slot;
        *slot = slot.wrapping_add(1);
        msn
    }

    /// Encodes one frame of the response to the peer's oldest read. Returns true if it was the
    /// last.
    fn encode_response(&mut self, batch: &mut Batch<'_>) -> bool {
        let response = &mut self.responses[self.tx.responses_encoded];
        let len = (response.len - response.sent).min(SEGMENT_MAX);
        let last = response.sent + len == response.len;
        let addr = response.addr.wrapping_add(response.sent as u64);
        batch.begin(&ddp::tagged(opcode::READ_RESPONSE, last, response.stag, addr, len));
        if let Some(part) = response.slice.as_ref().and_then(|s| s.slice(response.sent, len)) {
            batch.payload(part);
        }
        batch.end(ddp::TAGGED_LEN + len);
        response.sent += len;
        if last {
            self.tx.responses_encoded += 1;
        }
        last
    }

    /// Encodes one frame of the next send queue entry. Returns true if it was the last.
    fn encode_send(&mut self, batch: &mut Batch<'_>, features: Features) -> bool {
        let index = self.tx.encoded;
        let op = self.send_queue[index].wr.op;
        let finished = match op {
            WrOp::RdmaRead { .. } => {
                self.encode_read(batch);
                true
            }
            WrOp::RdmaWrite { imm, .. } => {
                if self.send_queue[index].state == ItemState::Immediate {
                    self.encode_immediate(batch, imm.unwrap_or(0));
                    true
                } else {
                    self.encode_write(batch) && imm.is_none()
                }
            }
            WrOp::Send { .. } => self.encode_message(batch, features),
        };
        if finished {
            self.send_queue[index].state = ItemState::Encoded;
            self.tx.encoded += 1;
        }
        finished
    }

    fn encode_write(&mut self, batch: &mut Batch<'_>) -> bool {
        let item = &mut self.send_queue[self.tx.encoded];
        let WrOp::RdmaWrite { remote, .. } = item.wr.op else { return true };
        let len = (item.len - item.sent).min(SEGMENT_MAX);
        let last = item.sent + len == item.len;
        let addr = remote.addr.wrapping_add(item.sent as u64);
        batch.begin(&ddp::tagged(opcode::WRITE, last, remote.rkey.0, addr, len));
        put_pieces(batch, &item.wr.sges, item.sent, len);
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
        let item = &self.send_queue[self.tx.encoded];
        let WrOp::Send { imm, invalidate } = item.wr.op else { return true };
        let (sent, total) = (item.sent, item.len);
        let msn = self.tx.msn[queue::SEND as usize];
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
        let item = &mut self.send_queue[self.tx.encoded];
        put_pieces(batch, &item.wr.sges, from, payload);
        batch.end(ddp::UNTAGGED_LEN + len);
        item.sent += len;
        if last {
            self.next_msn(queue::SEND);
        }
        last
    }

    fn encode_read(&mut self, batch: &mut Batch<'_>) {
        let sequence = self.send_base + self.tx.encoded as u64;
        let msn = self.next_msn(queue::READ_REQUEST);
        let item = &self.send_queue[self.tx.encoded];
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

/// Adds the bytes `from..from + len` of a list of pieces as payload.
fn put_pieces(
    batch: &mut Batch<'_>,
    sges: &crate::fabric::SgeList,
    mut from: usize,
    mut len: usize,
) {
    for sge in sges.iter() {
        let whole = sge.slice.len();
        if from >= whole {
            from -= whole;
            continue;
        }
        let take = (whole - from).min(len);
        if take > 0
            && let Some(part) = sge.slice.slice(from, take)
        {
            batch.payload(part);
        }
        from = 0;
        len -= take;
    }
}
