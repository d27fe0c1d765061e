//! Requests in flight on a shard, and the IOs that they consist of.
//!
//! Data passes through buffers, and is copied between the buffers and the guest's memory. The guest
//! may change its memory at any time: data that is sent has a checksum and may be sent again, and
//! data that is received is compared with its checksum where it was placed. A mismatch would end
//! the path, with all volumes on it. A request that is larger than a buffer is split at blocks of
//! the device.

use std::io;
use std::sync::Arc;

use rtrs_core::block::{BlockDevice, Completion, Io, IoOp};
use rtrs_core::losses::Losses;
use rtrs_core::mem::{MemSlice, Pool};
use rtrs_core::mutated;
use rtrs_core::status::IoStatus;

use crate::fault::Fault;
use crate::memory::GuestMemory;
use crate::pieces::Pieces;
use crate::request::{Command, Status};
use crate::shared::GivenUp;
use crate::vring::Vring;

/// Length of a buffer.
pub(crate) const BUFFER_LEN: usize = 256 << 10;
/// Number of pieces that a request initially has room for.
const USUAL_PIECES: usize = 130;

/// Request that a ring waits for.
#[derive(Debug)]
pub(crate) struct Unanswered {
    /// First descriptor of the request, by which the ring identifies it.
    pub(crate) head: u16,
    /// Memory of the status byte.
    pub(crate) status: MemSlice,
    /// Memory of the guest from which the request was taken.
    pub(crate) memory: Arc<GuestMemory>,
    /// Losses that had been reported to the guest when it offered the request.
    pub(crate) reported: u64,
}

/// Answer to a request.
#[derive(Clone, Copy)]
pub(crate) struct Answer<'a> {
    pub(crate) status: Status,
    /// Number of bytes written to the request's data memory.
    pub(crate) written: u32,
    /// Memory to which data may have been written.
    pub(crate) data: &'a [MemSlice],
}

impl Answer<'_> {
    /// Returns an answer without data.
    pub(crate) fn of(status: Status) -> Self {
        Self { status, written: 0, data: &[] }
    }
}

impl Unanswered {
    /// Answers the request. The dirty log has the data and the status before the ring has the
    /// answer.
    pub(crate) fn answer(&self, vring: &mut Vring, answer: Answer<'_>) -> Result<(), Fault> {
        let Answer { status, written, data } = answer;
        if mutated!(VhostStatusLate) {
            vring.answer(self.head, written.saturating_add(1))?;
        }
        self.status.copy_in(0, &[status.byte()]);
        vring.mark(&self.memory, data);
        vring.mark(&self.memory, std::slice::from_ref(&self.status));
        if mutated!(VhostStatusLate) {
            return Ok(());
        }
        vring.answer(self.head, written.saturating_add(1))
    }
}

/// Request of a driver, while it is in flight.
#[derive(Debug)]
pub(crate) struct Request {
    /// Ring of the shard.
    pub(crate) ring: usize,
    command: Command,
    /// Memory of the data.
    data: Vec<MemSlice>,
    /// Answer that is due. None while no request has this place.
    unanswered: Option<Unanswered>,
    /// Whether to flush once the IO is done, because the device cannot combine the two.
    then_flush: bool,
    /// First failure.
    pub(crate) outcome: IoStatus,
    /// Whether the request was answered before its IO ended.
    pub(crate) is_abandoned: bool,
    /// Whether later requests wait for the end of this one.
    is_given_up: bool,
    /// Whether all IO was submitted.
    is_submitted: bool,
    /// Number of bytes that were submitted.
    done: u64,
    /// Losses that concern any write, when the request was begun.
    losses: u64,
    /// Losses that have been reported to the guest once it has the answer.
    report: u64,
    /// Number of IOs that have not ended.
    parts: u32,
}

/// IO in flight.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    request: u32,
    /// Offset in the request.
    from: u64,
    len: usize,
    /// Whether to copy from the buffer to the request's memory at the end.
    is_copied: bool,
    /// Whether the IO has not ended.
    is_running: bool,
}

/// Counters of IO.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IoCounters {
    pub(crate) completed: u64,
    pub(crate) failed: u64,
    pub(crate) bytes_written: u64,
    pub(crate) bytes_read: u64,
}

/// Requests of a shard, and its device.
#[derive(Debug)]
pub(crate) struct Ios {
    device: Box<dyn BlockDevice>,
    /// Buffers; the number of a buffer is the tag of its IO.
    pool: Pool,
    /// Use of each buffer.
    parts: Vec<Part>,
    requests: Vec<Request>,
    free: Vec<u32>,
    /// Written requests that wait for their flush to be submitted.
    due: Vec<u32>,
    /// Requests that have ended without a further completion.
    ended: Vec<u32>,
    /// IO that the device has refused because it was full.
    refused: Option<Io>,
    /// Tags of IOs that were prepared but will not be submitted.
    withdrawn: Vec<u64>,
    counters: IoCounters,
    given_up: GivenUp,
    losses: Option<Arc<Losses>>,
}

impl Ios {
    /// Takes over the device, with this much memory, for this many rings.
    ///
    /// # Errors
    /// The system's error if the memory cannot be allocated or registered.
    pub(crate) fn new(
        mut device: Box<dyn BlockDevice>,
        memory: usize,
        rings: usize,
        given_up: &GivenUp,
    ) -> io::Result<Self> {
        let buffers = u32::try_from((memory / BUFFER_LEN).max(1)).unwrap_or(u32::MAX);
        let pool = Pool::new(buffers, BUFFER_LEN)?;
        device.attach_region(pool.region())?;
        let parts = vec![Part::default(); buffers as usize];
        // Each request has a buffer, except for one per ring that waits for its next buffer.
        let count = buffers + u32::try_from(rings).unwrap_or(0);
        let requests = (0..count).map(|_| Request::free()).collect();
        let free = (0..count).rev().collect();
        let [due, ended] = [0; 2].map(|_| Vec::with_capacity(count as usize));
        let counters = IoCounters::default();
        let losses = device.take_losses();
        Ok(Self {
            device,
            pool,
            parts,
            requests,
            free,
            due,
            ended,
            refused: None,
            withdrawn: Vec::new(),
            counters,
            given_up: given_up.clone(),
            losses,
        })
    }

    /// Device of the shard.
    pub(crate) fn device(&self) -> &dyn BlockDevice {
        &*self.device
    }

    /// Device of the shard, to be polled.
    pub(crate) fn device_mut(&mut self) -> &mut dyn BlockDevice {
        &mut *self.device
    }

    /// Losses of the device's acknowledged writes, if flushes do not report them by themselves.
    pub(crate) fn losses(&self) -> Option<&Losses> {
        self.losses.as_deref()
    }

    /// Counters since the start.
    pub(crate) fn counters(&self) -> IoCounters {
        self.counters
    }

    /// Whether a request can be begun.
    pub(crate) fn has_room(&self) -> bool {
        let is_free = self.pool.available() > 0 && !self.free.is_empty();
        is_free && self.refused.is_none() && self.due.is_empty() && !self.given_up.any()
    }

    /// Number of requests that have not ended.
    pub(crate) fn inflight(&self) -> usize {
        self.requests.len() - self.free.len()
    }

    /// Begins a request and takes its memory from `data`. [`Self::advance`] submits the request.
    ///
    /// # Errors
    /// Returns the request if there is no room for it.
    pub(crate) fn begin(
        &mut self,
        ring: usize,
        command: Command,
        unanswered: Unanswered,
        data: &mut Vec<MemSlice>,
    ) -> Result<u32, Unanswered> {
        let Some(id) = self.free.pop() else { return Err(unanswered) };
        let request = &mut self.requests[id as usize];
        std::mem::swap(&mut request.data, data);
        (request.ring, request.command) = (ring, command);
        (request.unanswered, request.outcome) = (Some(unanswered), IoStatus::Ok);
        (request.is_abandoned, request.is_submitted, request.done) = (false, false, 0);
        request.report = 0;
        request.losses = self.losses.as_ref().map_or(0, |losses| losses.shared());
        let geometry = self.device.geometry();
        let is_volatile = geometry.write_cache && !geometry.fua;
        let then_flush = command.flags.fua && is_volatile;
        request.then_flush = then_flush && !mutated!(VhostPostflushDropped);
        request.command.flags.fua &= geometry.fua;
        Ok(id)
    }

    /// Returns a request in flight.
    pub(crate) fn request(&self, id: u32) -> &Request {
        &self.requests[id as usize]
    }

    /// Submits IO of a request. Returns whether all IO was submitted; false means no room.
    pub(crate) fn advance(&mut self, id: u32) -> bool {
        loop {
            let request = &self.requests[id as usize];
            if request.is_submitted {
                return true;
            }
            if self.refused.is_some() {
                return false;
            }
            let Some(buffer) = self.pool.take() else { return false };
            let io = self.next_io(id, buffer);
            let request = &mut self.requests[id as usize];
            // Memory that the guest has lost reads as zeroes, which must not be written.
            if io.op == IoOp::Write && request.is_torn() {
                request.cut();
                self.withdrawn.push(io.tag);
            } else {
                self.submit(io);
            }
        }
    }

    fn submit(&mut self, io: Io) {
        self.refused = self.device.submit(io).err();
    }

    /// Submits the IO that was refused. Returns whether there was one and it was accepted.
    pub(crate) fn retry(&mut self) -> bool {
        let Some(io) = self.refused.take() else { return false };
        self.submit(io);
        self.refused.is_none()
    }

    /// Prepares the next IO of a request, in this buffer.
    fn next_io(&mut self, id: u32, buffer: u32) -> Io {
        let has_data = matches!(self.requests[id as usize].command.op, IoOp::Read | IoOp::Write);
        let (len, buf) = match has_data {
            true => self.next_data(id, buffer),
            false => {
                let from = self.requests[id as usize].done;
                let is_copied = false;
                self.parts[buffer as usize] =
                    Part { request: id, from, len: 0, is_copied, is_running: true };
                (self.requests[id as usize].command.len, None)
            }
        };
        let request = &mut self.requests[id as usize];
        let Command { op, flags, offset, .. } = request.command;
        let offset = offset + request.done;
        request.done += len;
        request.is_submitted = request.done >= request.command.len;
        request.parts += 1;
        // Commands without data may be as long as the device allows, within 32 bits.
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        Io { tag: buffer.into(), op, flags, offset, len, buf }
    }

    /// Prepares the memory of the next IO that has data. Returns the length, and the memory.
    fn next_data(&mut self, id: u32, buffer: u32) -> (u64, Option<MemSlice>) {
        let Self { pool, parts, requests, device, .. } = self;
        let request = &requests[id as usize];
        let geometry = device.geometry();
        let block = geometry.logical_block as usize;
        let max = BUFFER_LEN.min(geometry.io_max as usize) / block * block;
        let left = request.command.len - request.done;
        let len = usize::try_from(left).map_or(max, |left| left.min(max));
        let from = request.done;
        let is_copied = request.command.op == IoOp::Read;
        let buf = pool.slice(buffer).slice(0, len);
        if let Some(buf) = buf.as_ref().filter(|_| !is_copied) {
            Pieces { all: &request.data, from }.copy_to(buf);
        }
        parts[buffer as usize] = Part { request: id, from, len, is_copied, is_running: true };
        (len as u64, buf)
    }

    /// Returns the next request whose IO has ended. The request stays until [`Self::end`].
    pub(crate) fn reap(&mut self) -> Option<u32> {
        if let Some(id) = self.ended.pop() {
            return Some(id);
        }
        while let Some(done) = self.next_completion() {
            let Ok(buffer) = u32::try_from(done.tag) else { continue };
            let part = self.parts[buffer as usize];
            self.parts[buffer as usize].is_running = false;
            let status = self.judge(part, done.status);
            let request = &self.requests[part.request as usize];
            self.counters.count(request.command.op, part.len, status);
            let is_placed = !request.is_abandoned && !mutated!(VhostReadUnplaced);
            if part.is_copied && status.is_ok() && is_placed {
                let read = self.pool.slice(buffer).slice(0, part.len);
                let pieces = Pieces { all: &request.data, from: part.from };
                read.iter().for_each(|read| pieces.copy_from(read));
            }
            self.pool.give(buffer);
            if self.requests[part.request as usize].part_ended(status) {
                return Some(part.request);
            }
            if self.requests[part.request as usize].is_flush_due() {
                self.due.push(part.request);
            }
        }
        None
    }

    /// Returns the status of an IO, which is a failure for a flush that reports a loss.
    fn judge(&mut self, part: Part, status: IoStatus) -> IoStatus {
        let request = &mut self.requests[part.request as usize];
        let Some(losses) = &self.losses else { return status };
        let Some(Unanswered { reported, .. }) = request.unanswered else { return status };
        let Command { op, flags, len, .. } = request.command;
        // A loss that concerned the first part may have been reported before the last one ended.
        let is_part = op == IoOp::Write && !flags.fua && (part.len as u64) < len;
        if is_part && status.is_ok() && losses.shared() != request.losses {
            losses.add();
        }
        if op != IoOp::Flush {
            return status;
        }
        let count = self.device.losses_at_end().unwrap_or_else(|| losses.count());
        let (status, reported) = losses.judge(status, reported, count);
        request.report = reported;
        status
    }

    /// Records that the driver has the answer to a request. Not earlier: another shard could
    /// otherwise take a flush for one that was offered after the report.
    pub(crate) fn note_answered(&self, id: u32) {
        if let Some(losses) = &self.losses {
            losses.report_common(self.requests[id as usize].report);
        }
    }

    fn next_completion(&mut self) -> Option<Completion> {
        match self.withdrawn.pop() {
            Some(tag) => Some(Completion::new(tag, IoStatus::Aborted)),
            None => self.device.reap(),
        }
    }

    /// Submits flushes that follow writes. Returns whether any was submitted.
    pub(crate) fn submit_due(&mut self) -> bool {
        let mut any = false;
        while let Some(id) = self.due.pop() {
            if !self.advance(id) {
                self.due.push(id);
                break;
            }
            any = true;
        }
        any
    }

    /// Ends a request and frees its place.
    pub(crate) fn end(&mut self, id: u32) {
        let request = &mut self.requests[id as usize];
        request.data.clear();
        request.unanswered = None;
        if std::mem::take(&mut request.is_given_up) {
            self.given_up.remove();
        }
        self.free.push(id);
    }

    /// Gives up the requests of a ring that were not given up before: their memory is no longer
    /// used. Calls `each` with them.
    pub(crate) fn abandon(&mut self, ring: usize, mut each: impl FnMut(&Request)) {
        for id in 0..self.requests.len() {
            let request = &mut self.requests[id];
            if request.unanswered.is_none() || request.ring != ring {
                continue;
            }
            if !std::mem::replace(&mut request.is_abandoned, true) {
                each(request);
            }
            (request.is_submitted, request.then_flush) = (true, false);
            if request.parts > 0 && request.command.op.changes() && !request.is_given_up {
                request.is_given_up = true;
                self.given_up.add();
            }
            if request.parts == 0 {
                let id = u32::try_from(id).unwrap_or_else(|_| unreachable!("counted in 32 bits"));
                self.due.retain(|due| *due != id);
                self.end(id);
            }
        }
        let Self { device, parts, requests, .. } = self;
        let is_left = |tag: u64| {
            let part = usize::try_from(tag).ok().and_then(|buffer| parts.get(buffer));
            let is_running = |part: &&Part| part.is_running;
            part.filter(is_running).is_some_and(|part| requests[part.request as usize].ring == ring)
        };
        device.cancel(&is_left);
        if self.refused.as_ref().is_some_and(|io| is_left(io.tag)) {
            self.withdraw();
        }
    }

    /// Cancels all IO that has not begun. No further IO of the requests is submitted.
    pub(crate) fn cancel_all(&mut self) {
        self.device.cancel(&|_| true);
        self.withdraw();
        self.due.clear();
        for (id, request) in (0..).zip(&mut self.requests) {
            if request.unanswered.is_some() && request.cut() && request.parts == 0 {
                self.ended.push(id);
            }
        }
    }

    /// Ends the IO that the device has refused.
    fn withdraw(&mut self) {
        self.withdrawn.extend(self.refused.take().map(|io| io.tag));
    }

    /// Whether [`Self::reap`] returns something that no event reports.
    pub(crate) fn has_ended(&self) -> bool {
        !self.withdrawn.is_empty() || !self.ended.is_empty()
    }
}

impl IoCounters {
    fn count(&mut self, op: IoOp, bytes: usize, status: IoStatus) {
        self.completed += 1;
        match op {
            _ if !status.is_ok() => self.failed += 1,
            IoOp::Read => self.bytes_read += bytes as u64,
            IoOp::Write => self.bytes_written += bytes as u64,
            _ => {}
        }
    }
}

impl Request {
    /// Returns a free place for a request.
    fn free() -> Self {
        Self {
            ring: 0,
            command: Command::FLUSH,
            data: Vec::with_capacity(USUAL_PIECES),
            unanswered: None,
            then_flush: false,
            outcome: IoStatus::Ok,
            is_abandoned: false,
            is_given_up: false,
            is_submitted: true,
            done: 0,
            losses: 0,
            report: 0,
            parts: 0,
        }
    }

    /// First descriptor of the request, by which the ring identifies it.
    pub(crate) fn head(&self) -> u16 {
        self.unanswered.as_ref().map_or(0, |unanswered| unanswered.head)
    }

    /// Answers the request.
    pub(crate) fn answer(&self, vring: &mut Vring, status: Status) -> Result<(), Fault> {
        let written = match (status, self.command.op) {
            (Status::Ok, IoOp::Read) => u32::try_from(self.command.len).unwrap_or(u32::MAX),
            _ => 0,
        };
        // A failed read may have written a part of its data.
        let data = if self.command.op == IoOp::Read { &self.data[..] } else { &[] };
        let answer = Answer { status, written, data };
        let unanswered = self.unanswered.as_ref();
        unanswered.map_or(Ok(()), |unanswered| unanswered.answer(vring, answer))
    }

    /// Whether memory of the guest was taken away.
    fn is_torn(&self) -> bool {
        // All memory of a guest shares one alarm.
        self.data.first().is_some_and(|piece| piece.region().is_truncated())
    }

    /// Drops the IO that was not submitted. Returns whether there was any.
    fn cut(&mut self) -> bool {
        let is_cut = !self.is_submitted || self.then_flush;
        if is_cut && self.outcome.is_ok() {
            self.outcome = IoStatus::Aborted;
        }
        (self.is_submitted, self.then_flush) = (true, false);
        is_cut
    }

    /// Records the end of an IO. Returns whether the request has ended.
    fn part_ended(&mut self, status: IoStatus) -> bool {
        self.parts -= 1;
        if !status.is_ok() && !mutated!(VhostErrorDropped) {
            if self.outcome.is_ok() {
                self.outcome = status;
            }
            // The rest is not submitted.
            (self.is_submitted, self.then_flush) = (true, false);
        }
        self.parts == 0 && self.is_submitted && !self.then_flush
    }

    /// Turns a written request into its flush, if one follows and the write has ended.
    fn is_flush_due(&mut self) -> bool {
        let is_due = self.parts == 0 && self.is_submitted && self.then_flush;
        if is_due {
            (self.command, self.done) = (Command::FLUSH, 0);
            (self.is_submitted, self.then_flush) = (false, false);
        }
        is_due
    }
}
