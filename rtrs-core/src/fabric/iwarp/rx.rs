//! Receiving half of the stream machine: parses, validates, places and delivers frames.
//!
//! Small frames are collected in the staging memory, many per system call, and copied to
//! their targets after their checksum has been verified. The part of a large tagged frame that has
//! not arrived yet is received straight into the registered memory; its checksum is computed along
//! the way and determines delivery, as RFC 5041 allows (placement may precede delivery). While
//! large frames keep coming, staging receives no more than the next header, so that nearly all
//! bytes go straight to their target.

mod plain;

use std::sync::Arc;

use super::ddp::{self, Place, Segment, TaggedTarget, queue};
use super::mpa::{self, Features};
use super::progress::{Direct, Tagged};
use super::qp::{Fault, QpMachine, RX_STAGE};
use super::rdmap::{Blame, ReadRequest, TermCode, Terminate, opcode};
use super::sender::Response;
use super::stag::{REMOTE_READ, REMOTE_WRITE, StagFault};
use super::state::CoreState;
use crate::fabric::{CloseReason, WcOp, WcStatus};
use crate::ids::Rkey;
use crate::mem::{IoVecs, MemSlice, Region};

/// Maximum number of memory parts that receive the remainder of a frame in one call.
const RX_PARTS: usize = 16;
/// Maximum number of slices that `rx_prepare` needs.
pub(super) const RX_SLICES: usize = RX_PARTS + 1;
/// Remainders larger than this are received straight into their target.
const DIRECT_MIN: usize = 4096;
/// Payload size from which a frame counts as large.
const LARGE: usize = 16 << 10;
/// Staging bytes requested in bulk mode: an immediate and the next header.
const BULK_TAIL: usize = 32 + 16;
/// Number of small frames after which bulk mode ends.
const BULK_FRAMES: u8 = 8;

fn fault(code: TermCode, blame: Blame, text: &'static str) -> Fault {
    Fault { terminate: Terminate { code, blame }, text }
}

fn write_fault(why: StagFault, blame: Blame) -> Fault {
    let code = match why {
        StagFault::Invalid => TermCode::TAGGED_STAG,
        StagFault::Bounds => TermCode::TAGGED_BOUNDS,
        StagFault::Access => TermCode::ACCESS,
        StagFault::Foreign => TermCode::TAGGED_FOREIGN,
        StagFault::Wrap => TermCode::TAGGED_WRAP,
        StagFault::Early => {
            let text = "a write beyond the memory that the sender may use before OPEN";
            return fault(TermCode::ACCESS, blame, text);
        }
    };
    fault(code, blame, "refused write")
}

/// Returns the target of a peer's write, if the peer may already use that memory.
fn admitted(region: &Arc<Region>, offset: usize, len: usize) -> Result<MemSlice, StagFault> {
    if !region.admit_write(offset, len) {
        return Err(StagFault::Early);
    }
    region.slice(offset, len).ok_or(StagFault::Invalid)
}

fn read_fault(why: StagFault, blame: Blame) -> Fault {
    let code = match why {
        StagFault::Invalid => TermCode::READ_STAG,
        StagFault::Bounds => TermCode::READ_BOUNDS,
        StagFault::Access | StagFault::Early => TermCode::ACCESS,
        StagFault::Foreign => TermCode::READ_FOREIGN,
        StagFault::Wrap => TermCode::READ_WRAP,
    };
    fault(code, blame, "refused read")
}

/// Start of a frame, copied out of staging before it is validated.
struct Head {
    bytes: [u8; 2 + ddp::UNTAGGED_LEN],
    /// Length of the ULPDU.
    len: usize,
}

impl Head {
    /// Returns the header for a Terminate, truncated to its actual length.
    fn blame(&self, segment: &Segment) -> Blame {
        Blame::ddp(&self.bytes[2..2 + segment.header_len()], self.len as u16)
    }
}

impl QpMachine {
    /// Adds the destination of the next received bytes to `iov`.
    pub(super) fn rx_prepare(&mut self, iov: &mut IoVecs) {
        iov.clear();
        if self.failure.is_some() {
            (self.rx.read, self.rx.write) = (0, 0);
        }
        let rx = &mut self.rx;
        let staged = rx.write - rx.read;
        let mut want = RX_STAGE;
        if let Some(direct) = &rx.direct {
            // Staging is empty, because all of its contents belonged to this frame.
            let len = direct.rest.len_of_parts(direct.rest.len(), RX_PARTS);
            if let Some(part) = direct.rest.slice(0, len).filter(|_| len < direct.rest.len()) {
                return iov.push(part);
            }
            iov.push(direct.rest.clone());
            (rx.read, rx.write) = if staged == 0 { (0, 0) } else { (rx.read, rx.write) };
            if rx.bulk > 0 {
                want = (direct.trailer + BULK_TAIL).saturating_sub(staged);
            }
        } else if staged == 0 {
            (rx.read, rx.write) = (0, 0);
            if rx.bulk > 0 {
                want = BULK_TAIL;
            }
        } else {
            let mut field = [0; 2];
            let missing = if staged >= 2 {
                self.stage.copy_out(rx.read, &mut field);
                mpa::fpdu_len(usize::from(u16::from_be_bytes(field))).saturating_sub(staged)
            } else {
                BULK_TAIL
            };
            if RX_STAGE - rx.write < missing.max(4096) {
                self.stage.copy_from(0, &self.stage, rx.read, staged);
                (rx.read, rx.write) = (0, staged);
            }
            if rx.bulk > 0 {
                // Receive only the header of a tagged frame first, so that the remainder can bypass
                // staging.
                let tagged_head = 16 + BULK_TAIL;
                want = if staged < 16 { tagged_head } else { missing + BULK_TAIL };
            }
        }
        let room = (RX_STAGE - rx.write).min(want);
        if let Some(tail) = self.stage.slice(rx.write, room) {
            iov.push(tail);
        }
    }

    /// Handles `count` bytes received as `rx_prepare` requested; 0 means the end of the stream.
    pub(super) fn rx_done(&mut self, core: &mut CoreState, count: usize) {
        if count == 0 {
            let whole = self.rx.direct.is_none() && self.rx.read == self.rx.write;
            let reason = if whole {
                CloseReason::Peer
            } else {
                CloseReason::Lost("the stream ended inside a frame".into())
            };
            self.end(reason, None);
            return;
        }
        if self.failure.is_some() {
            return;
        }
        let mut staged = count;
        if let Some(direct) = &mut self.rx.direct {
            let placed = direct.rest.len().min(count);
            if let (Some(got), Some(rest)) = (
                direct.rest.slice(0, placed),
                direct.rest.slice(placed, direct.rest.len() - placed),
            ) {
                if self.terms.is_some_and(|terms| terms.crc) {
                    direct.sum = got.crc32c(direct.sum);
                }
                direct.rest = rest;
            }
            core.counters.bytes_direct += placed as u64;
            staged -= placed;
        }
        self.rx.write += staged;
        if let Err(fault) = self.parse(core) {
            if fault.terminate.code == TermCode::CRC {
                core.counters.crc_errors += 1;
            }
            self.fail(&fault);
        }
    }

    /// Processes all whole frames in staging.
    fn parse(&mut self, core: &mut CoreState) -> Result<(), Fault> {
        while self.failure.is_none() {
            if self.rx.direct.is_some() {
                if !self.finish_direct(core)? {
                    break;
                }
                continue;
            }
            let staged = self.rx.write - self.rx.read;
            if staged < 2 {
                break;
            }
            let mut head = Head { bytes: [0; 20], len: 0 };
            self.stage.copy_out(self.rx.read, &mut head.bytes[..staged.min(20)]);
            head.len = usize::from(u16::from_be_bytes([head.bytes[0], head.bytes[1]]));
            if head.len < mpa::ULPDU_MIN {
                return Err(fault(TermCode::OTHER, Blame::NONE, "a frame too short for a header"));
            }
            if staged < mpa::fpdu_len(head.len) {
                if staged >= 16 && 2 + head.len > staged + DIRECT_MIN {
                    self.start_direct(core, &head, staged)?;
                }
                break;
            }
            self.take_frame(core, &head)?;
        }
        Ok(())
    }

    fn note_size(&mut self, payload_len: usize) {
        self.rx.heard = true;
        self.sender.permit();
        if payload_len >= LARGE {
            self.rx.bulk = BULK_FRAMES;
        } else {
            self.rx.bulk = self.rx.bulk.saturating_sub(1);
        }
    }

    fn check_sum(&self, sum: u32, at: usize) -> Result<(), Fault> {
        let mut field = [0; 4];
        self.stage.copy_out(at, &mut field);
        if u32::from_le_bytes(field) == sum {
            Ok(())
        } else {
            Err(fault(TermCode::CRC, Blame::NONE, "a damaged frame"))
        }
    }

    /// Receives the remainder of a frame straight into its target, if the frame is tagged.
    fn start_direct(
        &mut self,
        core: &mut CoreState,
        head: &Head,
        staged: usize,
    ) -> Result<(), Fault> {
        if !ddp::is_tagged(head.bytes[2]) {
            return Ok(());
        }
        let Some(segment) = Segment::decode(&head.bytes[2..16]) else { return Ok(()) };
        let Place::Tagged { stag, addr } = segment.place else { return Ok(()) };
        if !segment.ddp_version_good || !segment.rdmap_version_good {
            return Err(validate_version(&segment));
        }
        let len = head.len - ddp::TAGGED_LEN;
        let (target, kind, placing) = match segment.opcode {
            opcode::WRITE => {
                let placement = core
                    .stags
                    .acquire(self.pd, stag, addr, len, REMOTE_WRITE)
                    .map_err(|why| write_fault(why, head.blame(&segment)))?;
                let placing = core.stags.keep(placement);
                let target = core
                    .regions
                    .get(&core.stags, placement.region)
                    .ok_or(StagFault::Invalid)
                    .and_then(|region| admitted(region, placement.offset, len))
                    .map_err(|why| write_fault(why, head.blame(&segment)))?;
                (target, Tagged::Write, Some(placing))
            }
            opcode::READ_RESPONSE => {
                let target = self.response_target(head, &segment, len)?;
                let Some(target) = target else { return Ok(()) };
                (target, Tagged::Response { last: segment.last }, None)
            }
            _ => return Ok(()),
        };
        let here = staged - 16;
        let (Some(first), Some(rest)) = (target.slice(0, here), target.slice(here, len - here))
        else {
            return Ok(());
        };
        let from = self.rx.read;
        first.region().copy_from(first.offset(), &self.stage, from + 16, here);
        core.counters.bytes_copied += here as u64;
        let crc = self.terms.is_some_and(|terms| terms.crc);
        let sum = if crc { self.stage.crc32c(0, from, staged) } else { 0 };
        (self.rx.read, self.rx.write) = (0, 0);
        let trailer = mpa::pad_len(head.len) + mpa::CRC_LEN;
        if len >= LARGE {
            self.rx.bulk = BULK_FRAMES;
        }
        self.rx.direct =
            Some(Direct { rest, sum, payload_len: len, trailer, kind, _placing: placing });
        Ok(())
    }

    /// Finishes a directly received frame. Returns false if bytes are still missing.
    fn finish_direct(&mut self, core: &mut CoreState) -> Result<bool, Fault> {
        let staged = self.rx.write - self.rx.read;
        let Some(direct) = &self.rx.direct else { return Ok(true) };
        if !direct.rest.is_empty() || staged < direct.trailer {
            return Ok(false);
        }
        let (sum, trailer) = (direct.sum, direct.trailer);
        let (kind, payload_len) = (direct.kind, direct.payload_len);
        let pad = trailer - mpa::CRC_LEN;
        if self.terms.is_some_and(|terms| terms.crc) {
            let sum = self.stage.crc32c(sum, self.rx.read, pad);
            self.check_sum(sum, self.rx.read + pad)?;
        }
        self.rx.direct = None;
        self.rx.read += trailer;
        self.note_size(payload_len);
        if let Tagged::Response { last } = kind {
            self.response_placed(core, payload_len, last);
        }
        Ok(true)
    }

    /// Processes a whole frame in staging.
    fn take_frame(&mut self, core: &mut CoreState, head: &Head) -> Result<(), Fault> {
        let start = self.rx.read;
        let total = mpa::fpdu_len(head.len);
        if self.terms.is_some_and(|terms| terms.crc) {
            let sum = self.stage.crc32c(0, start, total - mpa::CRC_LEN);
            self.check_sum(sum, start + total - mpa::CRC_LEN)?;
        }
        let Some(segment) = Segment::decode(&head.bytes[2..2 + head.len.min(18)]) else {
            return Err(fault(TermCode::OTHER, Blame::NONE, "a frame too short for its header"));
        };
        if !segment.ddp_version_good || !segment.rdmap_version_good {
            return Err(validate_version(&segment));
        }
        let header_len = segment.header_len();
        let payload_at = start + 2 + header_len;
        let payload_len = head.len - header_len;
        match segment.place {
            Place::Tagged { stag, addr } => {
                let target = TaggedTarget { stag, addr, payload_at, payload_len };
                self.take_tagged(core, head, &segment, target)?;
            }
            Place::Untagged { qn, msn, mo, invalidate } => {
                let message = Arrived { qn, msn, mo, invalidate, payload_at, payload_len };
                self.take_untagged(core, head, &segment, message)?;
            }
        }
        self.rx.read += total;
        self.note_size(payload_len);
        Ok(())
    }

    fn take_tagged(
        &mut self,
        core: &mut CoreState,
        head: &Head,
        segment: &Segment,
        target: TaggedTarget,
    ) -> Result<(), Fault> {
        let TaggedTarget { stag, addr, payload_at: at, payload_len: len } = target;
        match segment.opcode {
            // A zero-length write needs no valid STag (RFC 5040 section 5.2).
            opcode::WRITE if len == 0 => Ok(()),
            opcode::WRITE => {
                let placement = core
                    .stags
                    .acquire(self.pd, stag, addr, len, REMOTE_WRITE)
                    .map_err(|why| write_fault(why, head.blame(segment)))?;
                let placed = match core.regions.get(&core.stags, placement.region) {
                    Some(region) if region.admit_write(placement.offset, len) => {
                        region.copy_from(placement.offset, &self.stage, at, len);
                        Ok(())
                    }
                    Some(_) => Err(StagFault::Early),
                    None => Err(StagFault::Invalid),
                };
                core.stags.release(placement);
                placed.map_err(|why| write_fault(why, head.blame(segment)))?;
                core.counters.bytes_copied += len as u64;
                Ok(())
            }
            opcode::READ_RESPONSE => {
                if let Some(target) = self.response_target(head, segment, len)? {
                    target.region().copy_from(target.offset(), &self.stage, at, len);
                    core.counters.bytes_copied += len as u64;
                }
                self.response_placed(core, len, segment.last);
                Ok(())
            }
            _ => Err(fault(TermCode::OPCODE, Blame::NONE, "an unexpected tagged message")),
        }
    }

    /// Validates a response to the oldest pending read. Returns None if there is no payload.
    fn response_target(
        &self,
        head: &Head,
        segment: &Segment,
        len: usize,
    ) -> Result<Option<MemSlice>, Fault> {
        let Place::Tagged { stag, addr } = segment.place else { return Ok(None) };
        let Some((item, received)) = self.sender.oldest_read() else {
            return Err(fault(TermCode::OPCODE, Blame::NONE, "a response without a pending read"));
        };
        let blame = head.blame(segment);
        let bad = |code| Err(fault(code, blame, "a response that does not match its read"));
        let complete = received + len == item.len;
        if received + len > item.len || segment.last != complete {
            return bad(TermCode::TAGGED_BOUNDS);
        }
        let Some(sge) = &item.wr.sges.first else { return Ok(None) };
        if len == 0 {
            return Ok(None);
        }
        if stag != sge.lkey {
            return bad(TermCode::TAGGED_STAG);
        }
        if addr != item.sink.wrapping_add(received as u64) {
            return bad(TermCode::TAGGED_BOUNDS);
        }
        Ok(sge.slice.slice(received, len))
    }

    fn response_placed(&mut self, core: &mut CoreState, len: usize, last: bool) {
        if self.sender.response_placed(len, last) {
            self.retire(core);
        }
    }

    fn take_untagged(
        &mut self,
        core: &mut CoreState,
        head: &Head,
        segment: &Segment,
        message: Arrived,
    ) -> Result<(), Fault> {
        let blame = head.blame(segment);
        let wanted = match segment.opcode {
            opcode::SEND..=opcode::SEND_SE_INV => queue::SEND,
            opcode::IMMEDIATE | opcode::IMMEDIATE_SE if self.features().immediate => queue::SEND,
            opcode::READ_REQUEST => queue::READ_REQUEST,
            opcode::TERMINATE => queue::TERMINATE,
            _ => return Err(fault(TermCode::OPCODE, Blame::NONE, "an unexpected message")),
        };
        if message.qn != wanted {
            return Err(fault(TermCode::QN, blame, "a message on the wrong queue"));
        }
        if wanted == queue::TERMINATE {
            let mut bytes = [0; Terminate::LEN_MAX];
            let len = message.payload_len.min(bytes.len());
            self.stage.copy_out(message.payload_at, &mut bytes[..len]);
            self.peer_terminated(&bytes[..len]);
            return Ok(());
        }
        let expected = self.rx.received[wanted as usize].wrapping_add(1);
        if message.msn != expected {
            return Err(fault(TermCode::MSN, blame, "a message out of sequence"));
        }
        match segment.opcode {
            opcode::READ_REQUEST => self.take_read(core, head, segment, message),
            opcode::IMMEDIATE | opcode::IMMEDIATE_SE => {
                self.take_immediate(core, blame, segment, message)
            }
            _ => self.take_send(core, blame, segment, message),
        }
    }

    fn take_read(
        &mut self,
        core: &mut CoreState,
        head: &Head,
        segment: &Segment,
        message: Arrived,
    ) -> Result<(), Fault> {
        let blame = head.blame(segment);
        if message.mo != 0 {
            return Err(fault(TermCode::MO, blame, "a read request with an offset"));
        }
        if message.payload_len != ReadRequest::LEN || !segment.last {
            return Err(fault(TermCode::OTHER, Blame::NONE, "a read request of wrong length"));
        }
        let ird = self.terms.map_or(0, |terms| usize::from(terms.ird));
        if self.sender.responses_held() >= ird {
            return Err(fault(TermCode::NO_BUFFER, blame, "more reads than agreed"));
        }
        let mut bytes = [0; ReadRequest::LEN];
        self.stage.copy_out(message.payload_at, &mut bytes);
        let request = ReadRequest::decode(&bytes);
        let len = request.size as usize;
        let mut response = Response {
            slice: None,
            _placing: None,
            stag: request.sink_stag,
            addr: request.sink_addr,
            len,
            sent: 0,
        };
        if len > 0 {
            let ddp = &head.bytes[2..2 + ddp::UNTAGGED_LEN];
            let blame = Blame::read(ddp, &bytes, head.len as u16);
            if request.sink_addr.checked_add(len as u64).is_none() {
                return Err(read_fault(StagFault::Wrap, blame));
            }
            let (stag, addr) = (request.source_stag, request.source_addr);
            let placement = core
                .stags
                .acquire(self.pd, stag, addr, len, REMOTE_READ)
                .map_err(|why| read_fault(why, blame))?;
            response._placing = Some(core.stags.keep(placement));
            response.slice = core
                .regions
                .get(&core.stags, placement.region)
                .and_then(|region| region.slice(placement.offset, len));
            if response.slice.is_none() {
                return Err(read_fault(StagFault::Invalid, blame));
            }
        }
        self.rx.received[queue::READ_REQUEST as usize] = message.msn;
        self.sender.respond(response);
        Ok(())
    }

    /// Handles an immediate (RFC 7306 section 6).
    fn take_immediate(
        &mut self,
        core: &mut CoreState,
        blame: Blame,
        segment: &Segment,
        message: Arrived,
    ) -> Result<(), Fault> {
        if message.mo != 0 || self.rx.message.received != 0 {
            return Err(fault(TermCode::MO, blame, "an immediate with an offset"));
        }
        if message.payload_len != 8 || !segment.last {
            return Err(fault(TermCode::OTHER, Blame::NONE, "an immediate of wrong length"));
        }
        let mut bytes = [0; 8];
        self.stage.copy_out(message.payload_at, &mut bytes);
        if bytes[4..] != [0; 4] {
            return Err(fault(TermCode::OTHER, Blame::NONE, "an immediate beyond 32 bits"));
        }
        let Some(recv) = self.recv_queue.pop() else {
            return Err(fault(TermCode::NO_BUFFER, blame, "an immediate without a receive"));
        };
        self.rx.received[queue::SEND as usize] = message.msn;
        let mut done = self.completion(recv.wr_id, WcOp::RecvRdmaWithImm, WcStatus::Success);
        done.imm = Some(u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        core.complete(done);
        Ok(())
    }

    fn take_send(
        &mut self,
        core: &mut CoreState,
        blame: Blame,
        segment: &Segment,
        message: Arrived,
    ) -> Result<(), Fault> {
        let state = &mut self.rx.message;
        if message.mo != state.received {
            return Err(fault(TermCode::MO, blame, "a gap in a message"));
        }
        if std::mem::take(&mut self.rx.swallow_send) && segment.last && message.payload_len == 0 {
            self.rx.received[queue::SEND as usize] = message.msn;
            return Ok(());
        }
        if state.received == 0 {
            state.opcode = segment.opcode;
            state.prefix = [0; Features::PREFIX_LEN];
        } else if state.opcode != segment.opcode {
            return Err(fault(TermCode::OPCODE, Blame::NONE, "a message with two opcodes"));
        }
        let done = self.place_send(core, blame, message)?;
        if !segment.last {
            // The receive limits `done` to far below 4 GiB.
            self.rx.message.received = done as u32;
            return Ok(());
        }
        self.complete_send(core, segment, message, done)
    }

    /// Length of the prefix before a send's data; 0 if the peer sends none.
    fn prefix_len(&self) -> usize {
        let prefixed = self.terms.is_some_and(|terms| terms.features.send_prefix);
        if prefixed { Features::PREFIX_LEN } else { 0 }
    }

    /// Copies a segment of a send into the first receive. Returns how many bytes of the send have
    /// arrived.
    fn place_send(
        &mut self,
        core: &mut CoreState,
        blame: Blame,
        message: Arrived,
    ) -> Result<usize, Fault> {
        let prefix_len = self.prefix_len();
        let Some(recv) = self.recv_queue.front() else {
            return Err(fault(TermCode::NO_BUFFER, blame, "a message without a receive"));
        };
        let state = &mut self.rx.message;
        let (mut at, mut len) = (message.payload_at, message.payload_len);
        let mut done = state.received as usize;
        if done < prefix_len {
            let take = (prefix_len - done).min(len);
            self.stage.copy_out(at, &mut state.prefix[done..done + take]);
            (at, len, done) = (at + take, len - take, done + take);
        }
        if len == 0 {
            return Ok(done);
        }
        let to = done.saturating_sub(prefix_len);
        let Some(target) = recv.buf.as_ref().and_then(|buf| buf.slice(to, len)) else {
            let wr_id = recv.wr_id;
            self.recv_queue.pop();
            core.complete(self.completion(wr_id, WcOp::Recv, WcStatus::LocalError));
            return Err(fault(TermCode::TOO_LONG, blame, "a message longer than its receive"));
        };
        target.region().copy_from(target.offset(), &self.stage, at, len);
        Ok(done + len)
    }

    /// Completes the receive of a send whose `done` bytes have all arrived.
    fn complete_send(
        &mut self,
        core: &mut CoreState,
        segment: &Segment,
        message: Arrived,
        done: usize,
    ) -> Result<(), Fault> {
        let prefix_len = self.prefix_len();
        let state = &mut self.rx.message;
        let prefix = state.prefix;
        if done < prefix_len || prefix[0] & !1 != 0 || prefix[1..4] != [0; 3] {
            return Err(fault(TermCode::OTHER, Blame::NONE, "a send without the expected prefix"));
        }
        state.received = 0;
        let invalidated = match segment.opcode {
            opcode::SEND_INV | opcode::SEND_SE_INV => {
                core.stags.invalidate(self.pd, message.invalidate).map_err(|_| {
                    fault(TermCode::CANNOT_INVALIDATE, Blame::NONE, "refused invalidation")
                })?;
                Some(Rkey(message.invalidate))
            }
            _ => None,
        };
        self.rx.received[queue::SEND as usize] = message.msn;
        let Some(recv) = self.recv_queue.pop() else { return Ok(()) };
        let mut wc = self.completion(recv.wr_id, WcOp::Recv, WcStatus::Success);
        wc.byte_len = (done - prefix_len) as u32;
        wc.imm = (prefix[0] & 1 != 0)
            .then(|| u32::from_be_bytes([prefix[4], prefix[5], prefix[6], prefix[7]]));
        wc.invalidated = invalidated;
        core.complete(wc);
        Ok(())
    }
}

/// Fields of an untagged segment and the location of its payload in staging.
#[derive(Clone, Copy)]
struct Arrived {
    qn: u32,
    msn: u32,
    mo: u32,
    invalidate: u32,
    payload_at: usize,
    payload_len: usize,
}

fn validate_version(segment: &Segment) -> Fault {
    let code = match (segment.ddp_version_good, segment.place) {
        (true, _) => TermCode::RDMAP_VERSION,
        (false, Place::Tagged { .. }) => TermCode::TAGGED_VERSION,
        (false, Place::Untagged { .. }) => TermCode::UNTAGGED_VERSION,
    };
    fault(code, Blame::NONE, "an unknown version")
}
