//! One NBD connection on one core.
//!
//! Bytes are received into a buffer of the registered pool. A write's payload goes to the device
//! from where it was received: while large writes arrive, each receive is bounded so that the
//! payload fills a fresh buffer and only the next header follows it; small ones are received in
//! bulk, many to a buffer. Only a request that straddles the end of a buffer is moved, and for a
//! large write that is at most its header. Reads are answered from the memory that the device
//! filled. Replies go out in the order in which requests finish, many to a system call.

use std::collections::VecDeque;
use std::fmt;

use rtrs_core::block::{Io, IoFlags, IoOp};
use rtrs_core::mem::{IoVecs, MemSlice, Region};
use rtrs_core::rt::{Fd, Op as RingOp, OpId, Port};
use rtrs_core::time::{Duration, Instant};

use crate::bridge::Shared;
use crate::buffers::{BUFFER_LEN, PART_MAX, Part};
use crate::proto::{AfterRefusal, Handshake, Op, Outcome, Request, Rules, Validated, reply};
use crate::status::{nbd_error, reason};

/// From here on a write counts as large, and receives are bounded to fit it.
const LARGE: usize = 32 * 1024;
/// Bound of the whole handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(15);
/// Bound between two receives in the middle of a message.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Replies that go out in one system call at most.
const REPLIES_MAX: usize = 64;
/// Slices of one system call: a 32 MiB read in parts, or many small ones.
const SLICES_MAX: usize = 320;
/// Handshake answers that may wait to be sent before more options are looked at.
const GREETING_MAX: usize = 64 * 1024;
/// Tokens of this connection's operations, above the slot number.
pub(crate) const TOKEN_SEND: u64 = 1 << 32;

/// What is being received at the moment.
#[derive(Debug)]
enum Phase {
    Handshake(Box<Handshake>),
    Header,
    /// Payload of this row: bytes still to come, and the offset on the device they go to.
    Payload {
        row: u32,
        left: u32,
        offset: u64,
        fua: bool,
    },
    /// Payload that nobody wants.
    Skip {
        left: u32,
    },
    /// A read that waits for memory.
    Starved(Validated),
    /// Nothing more is taken from the client.
    Ended,
}

/// One connection.
pub(crate) struct Conn {
    pub(crate) fd: Fd,
    pub(crate) slot: usize,
    pub(crate) generation: u32,
    phase: Phase,
    rules: Option<Rules>,
    /// Buffer we receive into, first byte not yet consumed, end of what was received.
    buffer: Option<u32>,
    start: usize,
    fill: usize,
    large: bool,
    receiving: Option<OpId>,
    sending: Option<OpId>,
    vecs: Option<Box<IoVecs>>,
    staging: MemSlice,
    /// Handshake bytes to be sent.
    greeting: Vec<u8>,
    replies: VecDeque<u32>,
    in_send: Vec<u32>,
    /// Rows that belong to this connection.
    pub(crate) rows: usize,
    last_progress: Instant,
    /// The socket is unusable: send and receive no more.
    broken: bool,
}

impl Conn {
    pub(crate) fn new(
        fd: Fd,
        slot: usize,
        generation: u32,
        now: Instant,
        shared: &Shared,
    ) -> std::io::Result<Self> {
        let mut greeting = Vec::with_capacity(1024);
        let handshake = Box::new(Handshake::start(&mut greeting));
        Ok(Self {
            fd,
            slot,
            generation,
            phase: Phase::Handshake(handshake),
            rules: None,
            buffer: None,
            start: 0,
            fill: 0,
            large: false,
            receiving: None,
            sending: None,
            vecs: Some(IoVecs::new(SLICES_MAX)),
            staging: Region::new(REPLIES_MAX * reply::ROOM)?.whole(),
            greeting,
            replies: VecDeque::with_capacity(shared.rows_max),
            in_send: Vec::with_capacity(REPLIES_MAX),
            rows: 0,
            last_progress: now,
            broken: false,
        })
    }

    /// True when the connection holds nothing any more and may be dropped.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self.phase, Phase::Ended)
            && self.rows == 0
            && self.receiving.is_none()
            && self.sending.is_none()
            && (self.broken || (self.greeting.is_empty() && self.replies.is_empty()))
    }

    /// Takes no more requests; what is in flight is still answered. In the middle of a payload
    /// that is all: the rest will not come, and nothing is answered any more.
    pub(crate) fn end(&mut self, port: &Port, shared: &mut Shared) {
        let phase = std::mem::replace(&mut self.phase, Phase::Ended);
        if let Some(id) = self.receiving {
            port.cancel(id);
        }
        if let Phase::Payload { row, .. } = phase {
            shared.requests.row(row).complete = true;
            shared.finish_if_done(row);
            self.abort(port, shared);
        }
    }

    /// Gives the connection up: cancels what runs and answers nothing more.
    pub(crate) fn abort(&mut self, port: &Port, shared: &mut Shared) {
        self.broken = true;
        if !matches!(self.phase, Phase::Ended) {
            self.end(port, shared);
        }
        if let Some(id) = self.sending {
            port.cancel(id);
        }
        while let Some(row) = self.replies.pop_front() {
            self.rows -= 1;
            shared.free_row(row);
        }
    }

    /// Releases what a connection that is gone still held.
    pub(crate) fn release(&mut self, shared: &mut Shared) {
        if let Some(buffer) = self.buffer.take() {
            shared.buffers.release(buffer);
        }
    }

    /// Bytes arrived, or the stream ended.
    pub(crate) fn on_received(
        &mut self,
        now: Instant,
        result: &std::io::Result<usize>,
        port: &Port,
        shared: &mut Shared,
    ) {
        self.receiving = None;
        match result {
            Ok(count) if *count > 0 => {
                self.fill += count;
                self.last_progress = now;
                shared.stats.bytes_received += *count as u64;
            }
            // End of stream, cancelled or broken: requests in flight are still answered if the
            // client only closed its sending side.
            Ok(_) => self.end(port, shared),
            Err(_) => self.abort(port, shared),
        }
    }

    /// Bytes left.
    pub(crate) fn on_sent(
        &mut self,
        now: Instant,
        mut vecs: Box<IoVecs>,
        result: &std::io::Result<usize>,
        port: &Port,
        shared: &mut Shared,
    ) {
        self.sending = None;
        match result {
            Ok(count) if *count > 0 => {
                self.last_progress = now;
                shared.stats.bytes_sent += *count as u64;
                vecs.advance(*count);
                if !vecs.is_empty() && !self.broken {
                    let op = RingOp::SendMsg { fd: self.fd.clone(), iov: vecs };
                    self.sending = Some(port.submit(op, TOKEN_SEND | self.slot as u64));
                    return;
                }
            }
            _ => self.broken = true,
        }
        vecs.clear();
        self.vecs = Some(vecs);
        for row in self.in_send.drain(..) {
            self.rows -= 1;
            shared.free_row(row);
        }
        if self.broken {
            self.abort(port, shared);
        }
    }

    /// A row of this connection is finished and wants its reply.
    pub(crate) fn on_finished(&mut self, row: u32, shared: &mut Shared) {
        if self.broken {
            self.rows -= 1;
            shared.free_row(row);
        } else {
            self.replies.push_back(row);
        }
    }

    /// Does what can be done: parse, submit, send, receive. True when anything happened.
    pub(crate) fn turn(&mut self, now: Instant, port: &Port, shared: &mut Shared) -> bool {
        let mut any = false;
        while self.receiving.is_none() && self.step(port, shared) {
            any = true;
        }
        self.check_time(now, port, shared);
        any |= self.send(port, shared);
        any | self.receive(port, shared)
    }

    fn check_time(&mut self, now: Instant, port: &Port, shared: &mut Shared) {
        if self.deadline().is_some_and(|at| at <= now) {
            tracing::debug!("NBD client stopped in the middle of a message");
            self.abort(port, shared);
        }
    }

    /// When the client has to have gone on.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let middle = match self.phase {
            Phase::Handshake(_) => return Some(self.last_progress + HANDSHAKE_TIMEOUT),
            Phase::Payload { .. } | Phase::Skip { .. } => true,
            Phase::Header => self.fill > self.start,
            Phase::Starved(_) | Phase::Ended => false,
        };
        let stuck = self.sending.is_some() || (middle && self.receiving.is_some());
        stuck.then(|| self.last_progress + STALL_TIMEOUT)
    }

    /// One step of parsing. False when more bytes, rows or memory are needed.
    fn step(&mut self, port: &Port, shared: &mut Shared) -> bool {
        match self.phase {
            Phase::Ended => false,
            Phase::Handshake(_) => self.step_handshake(port, shared),
            Phase::Starved(request) => {
                self.phase = Phase::Header;
                self.start_request(request, port, shared)
                    && !matches!(self.phase, Phase::Starved(_))
            }
            Phase::Skip { left } => {
                let count = (self.fill - self.start).min(left as usize);
                self.start += count;
                let left = left - u32::try_from(count).unwrap_or(left);
                self.phase = if left == 0 { Phase::Header } else { Phase::Skip { left } };
                left == 0
            }
            Phase::Header => self.step_header(port, shared),
            Phase::Payload { .. } => self.step_payload(shared),
        }
    }

    fn step_handshake(&mut self, port: &Port, shared: &mut Shared) -> bool {
        let available = self.fill - self.start;
        if available == 0 || self.greeting.len() > GREETING_MAX {
            return false;
        }
        let Some(buffer) = self.buffer else { return false };
        let bytes = shared.buffers.slice(buffer, self.start, available).to_vec();
        let Phase::Handshake(handshake) = &mut self.phase else { return false };
        let (used, outcome) = handshake.feed(&bytes, shared, &mut self.greeting);
        self.start += used;
        match outcome {
            Outcome::NeedMore => false,
            Outcome::Reply => true,
            Outcome::Ready(terms) => {
                self.rules = Some(terms.rules());
                self.phase = Phase::Header;
                shared.stats.negotiated += 1;
                true
            }
            Outcome::Abort | Outcome::Close(_) => {
                if let Outcome::Close(error) = outcome {
                    tracing::debug!("NBD handshake ended: {error}");
                }
                self.end(port, shared);
                false
            }
        }
    }

    fn step_header(&mut self, port: &Port, shared: &mut Shared) -> bool {
        if self.fill - self.start < Request::LEN || shared.is_congested() {
            return false;
        }
        let Some(buffer) = self.buffer else { return false };
        let mut bytes = [0; Request::LEN];
        shared.buffers.slice(buffer, self.start, Request::LEN).copy_out(0, &mut bytes);
        let Ok(request) = Request::decode(&bytes) else {
            tracing::debug!("NBD request with a wrong magic: closing the connection");
            self.abort(port, shared);
            return false;
        };
        let Some(rules) = self.rules else { return false };
        match rules.check(&request) {
            Ok(valid) => {
                self.start += Request::LEN;
                self.large = valid.payload() as usize >= LARGE;
                self.start_request(valid, port, shared)
            }
            Err(refusal) => {
                let Some(row) = shared.requests.take() else { return false };
                self.start += Request::LEN;
                self.open_row(row, request.cookie, Op::Flush, 0, 0, shared);
                shared.requests.row(row).refusal = Some((refusal.error, refusal.reason));
                self.replies.push_back(row);
                match refusal.after {
                    AfterRefusal::Continue => {}
                    AfterRefusal::Skip(left) => self.phase = Phase::Skip { left },
                    AfterRefusal::Close => self.end(port, shared),
                }
                true
            }
        }
    }

    fn open_row(
        &mut self,
        row: u32,
        cookie: u64,
        op: Op,
        offset: u64,
        len: u32,
        shared: &mut Shared,
    ) {
        self.rows += 1;
        let fresh = shared.requests.row(row);
        (fresh.conn, fresh.generation) = (self.slot, self.generation);
        (fresh.cookie, fresh.op, fresh.offset, fresh.len) = (cookie, op, offset, len);
    }

    /// Begins a valid request. False when it has to wait.
    fn start_request(&mut self, request: Validated, port: &Port, shared: &mut Shared) -> bool {
        if request.op == Op::Disconnect {
            self.end(port, shared);
            return false;
        }
        let Some(row) = shared.requests.take() else {
            self.phase = Phase::Starved(request);
            return false;
        };
        if request.op == Op::Read
            && !shared.buffers.take_read(request.len as usize, &mut shared.requests.row(row).parts)
        {
            shared.requests.give(row);
            self.phase = Phase::Starved(request);
            return false;
        }
        let Validated { op, cookie, offset, len, .. } = request;
        self.open_row(row, cookie, op, offset, len, shared);
        match op {
            Op::Read => shared.submit_read(row),
            Op::Write => {
                shared.requests.row(row).complete = false;
                self.phase = Phase::Payload { row, left: len, offset, fua: request.fua };
            }
            Op::Flush => shared.submit_bare(row, IoOp::Flush, IoFlags::default()),
            Op::Trim => {
                let flags = IoFlags { fua: request.fua, ..IoFlags::default() };
                shared.submit_bare(row, IoOp::Discard, flags);
            }
            Op::WriteZeroes => {
                let flags = IoFlags {
                    fua: request.fua,
                    no_unmap: request.no_hole,
                    fast_only: request.fast_only,
                };
                shared.submit_bare(row, IoOp::WriteZeroes, flags);
            }
            // A hint: there is no cache to fill.
            Op::Cache | Op::Disconnect => shared.finish_if_done(row),
        }
        true
    }

    /// Hands payload that has arrived to the device. False when more has to come.
    fn step_payload(&mut self, shared: &mut Shared) -> bool {
        let Phase::Payload { row, left, offset, fua } = self.phase else { return false };
        let (Some(buffer), want) = (self.buffer, left as usize) else { return false };
        if shared.is_congested() {
            return false;
        }
        let available = self.fill - self.start;
        let room = BUFFER_LEN - self.start;
        let block = shared.export.min_block as usize;
        let piece = if want <= room {
            want
        } else if want <= BUFFER_LEN {
            // It fits a fresh buffer: `receive` moves what little is here.
            return false;
        } else {
            room / block * block
        };
        if piece == 0 || available < piece {
            return false;
        }
        let slice = shared.buffers.slice(buffer, self.start, piece);
        shared.buffers.hold(buffer);
        let entry = shared.requests.row(row);
        entry.parts.push(Part { buffer, slice: slice.clone() });
        entry.pending += 1;
        self.start += piece;
        let count = u32::try_from(piece).unwrap_or(left);
        let left = left - count;
        self.phase = if left == 0 {
            entry.complete = true;
            Phase::Header
        } else {
            Phase::Payload { row, left, offset: offset + u64::from(count), fua }
        };
        shared.submit(Io {
            tag: u64::from(row),
            op: IoOp::Write,
            flags: IoFlags { fua, ..IoFlags::default() },
            offset,
            len: count,
            buf: Some(slice),
        });
        true
    }

    /// Starts the next receive. True when one was started.
    fn receive(&mut self, port: &Port, shared: &mut Shared) -> bool {
        if self.receiving.is_some() || self.broken {
            return false;
        }
        let available = self.fill - self.start;
        // What must be contiguous in one buffer, from `start` on.
        let (need, limit) = match self.phase {
            Phase::Ended | Phase::Starved(_) => return false,
            Phase::Handshake(_) => (available + 1, BUFFER_LEN),
            Phase::Skip { .. } => (1, BUFFER_LEN),
            Phase::Header if available >= Request::LEN => return false,
            Phase::Header if self.large => (Request::LEN, self.start + Request::LEN),
            Phase::Header => (Request::LEN, BUFFER_LEN),
            Phase::Payload { left, .. } => {
                let want = left as usize;
                let block = shared.export.min_block as usize;
                let need = if want <= BUFFER_LEN { want } else { block };
                if available >= want
                    || (want > BUFFER_LEN && self.fill == BUFFER_LEN && available >= block)
                {
                    // Enough is here; the device or the rows are what it waits for.
                    return false;
                }
                let end = if self.large { self.start + want + Request::LEN } else { BUFFER_LEN };
                (need, end)
            }
        };
        let mut limit = limit.min(BUFFER_LEN);
        let Some(buffer) = self.buffer else {
            let Some(fresh) = shared.take_buffer() else { return false };
            self.buffer = Some(fresh);
            (self.start, self.fill) = (0, 0);
            return self.receive(port, shared);
        };
        if self.start + need > BUFFER_LEN || self.fill >= BUFFER_LEN {
            let Some(fresh) = shared.take_buffer() else { return false };
            shared.buffers.copy((buffer, self.start), (fresh, 0), available);
            shared.stats.bytes_moved += available as u64;
            shared.buffers.release(buffer);
            self.buffer = Some(fresh);
            (self.start, self.fill) = (0, available);
            return self.receive(port, shared);
        }
        if available == 0 && shared.buffers.is_sole_holder(buffer) && self.start > 0 {
            // Nobody needs what was before: start over at the warm beginning.
            limit -= self.start;
            (self.start, self.fill) = (0, 0);
            if !self.large {
                limit = BUFFER_LEN;
            }
        }
        let limit = limit.max(self.fill + 1).min(BUFFER_LEN);
        let buf = shared.buffers.slice(buffer, self.fill, limit - self.fill);
        let op = RingOp::Recv { fd: self.fd.clone(), buf };
        self.receiving = Some(port.submit(op, self.slot as u64));
        true
    }

    /// Sends what is ready. True when a send was started.
    fn send(&mut self, port: &Port, shared: &mut Shared) -> bool {
        if self.sending.is_some() || self.broken {
            return false;
        }
        if self.greeting.is_empty() && self.replies.is_empty() {
            return false;
        }
        let Some(mut vecs) = self.vecs.take() else { return false };
        vecs.clear();
        let mut used = 0;
        if !self.greeting.is_empty() {
            let count = self.greeting.len().min(self.staging.len());
            let slice = self.staging.slice(0, count).unwrap_or_else(|| unreachable!("checked"));
            slice.copy_in(0, &self.greeting[..count]);
            self.greeting.drain(..count);
            vecs.push(slice);
            used = count;
        }
        let structured = self.rules.is_some_and(|r| r.structured_replies());
        while let Some(&index) = self.replies.front() {
            let row = shared.requests.row(index);
            if self.in_send.len() == REPLIES_MAX
                || self.staging.len() - used < reply::ROOM
                || vecs.room() < row.parts.len() + 1
            {
                break;
            }
            let mut head = [0; reply::ROOM];
            let error =
                row.refusal.or_else(|| nbd_error(row.status).map(|e| (e, reason(row.status))));
            let written = match error {
                Some((error, why)) => reply::failure(&mut head, structured, row.cookie, error, why),
                None if row.op == Op::Read => {
                    reply::read_head(&mut head, structured, row.cookie, row.offset, row.len)
                }
                None => reply::success(&mut head, row.cookie),
            };
            let len =
                written.unwrap_or_else(|e| panic!("a reply head of {} bytes: {e}", head.len()));
            let slice = self.staging.slice(used, len).unwrap_or_else(|| unreachable!("checked"));
            slice.copy_in(0, &head[..len]);
            used += len;
            vecs.push(slice);
            if error.is_none() && row.op == Op::Read {
                for part in &row.parts {
                    vecs.push(part.slice.clone());
                }
            }
            self.replies.pop_front();
            self.in_send.push(index);
        }
        let op = RingOp::SendMsg { fd: self.fd.clone(), iov: vecs };
        self.sending = Some(port.submit(op, TOKEN_SEND | self.slot as u64));
        true
    }
}

impl fmt::Debug for Conn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conn")
            .field("slot", &self.slot)
            .field("phase", &self.phase)
            .field("rows", &self.rows)
            .finish_non_exhaustive()
    }
}

/// The part size of a read; kept here so that the two ends of the arithmetic stand together.
const _: () = assert!(PART_MAX <= BUFFER_LEN && LARGE < BUFFER_LEN);
