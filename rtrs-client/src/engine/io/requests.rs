//! IOs that a shard has accepted, and the requests that carry them.
//!
//! An IO is issued as one or more requests, each of which holds a permit, that is, a chunk on the
//! server. IOs without a permit or a path wait, in order per device (`waiting.rs`); devices share
//! the permits. A request whose path died retains its permit: it awaits the fence of that path, and
//! is then ready to be resent. All tables are allocated once, when the server's limits are known or
//! a volume is added; issuing and finishing a request allocates nothing.

use std::ops::Range;

use rtrs_core::block::{Io, IoOp};
use rtrs_core::ids::{PathId, PermitId};
use rtrs_core::mem::MemSlice;
use rtrs_core::shares::Shares;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

use super::failed_ios::FailedIos;
use super::permits::Permits;
use super::syncs::Sync;
use super::waiting::{IoRow, Waiting};
use crate::engine::cache_epoch::FlushMark;
use crate::engine::device_set::{DeviceIndex, DeviceSet};
use crate::engine::device_table::IOS_MAX;
use crate::engine::session::VOLUMES_MAX;
use crate::path::io::Request as IoRequest;

/// Row of a request: the index of its permit among the shard's permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RequestRow(u16);

impl RequestRow {
    fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// Part of an IO carried by one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IoPart {
    /// Start of the part in bytes, relative to the start of the IO.
    pub(super) at: u32,
    pub(super) len: u32,
}

/// Form of an IO's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryUse {
    /// No memory, or registered memory in one piece.
    Direct,
    /// Pieces of memory that is not registered.
    Scattered,
}

/// IO that was submitted and has not ended.
#[derive(Debug)]
pub(super) struct TakenIo {
    pub(super) device: DeviceIndex,
    pub(super) io: Io,
    /// Coverage of a flush; unused by other operations.
    pub(super) mark: FlushMark,
    /// Position of a flush or a write with FUA in the order of syncs, from when it is sent until
    /// its result is known.
    pub(super) sync: Option<Sync>,
    /// Cache epoch of the path that answered a flush.
    pub(super) epoch: u64,
    pub(super) submitted: Instant,
    pub(super) status: IoStatus,
    /// Number of bytes already issued.
    issued: u32,
    /// Number of requests in flight.
    pending: u32,
    /// For an IO of several parts, the number of losses of acknowledged writes before its first
    /// part finished, or `PART_LOST`.
    pub(super) losses: Option<u64>,
    /// Whether the IO is queued for issue.
    queued: bool,
    /// Whether the IO was reported as failed; its requests may still take effect on the server.
    pub(super) given_up: bool,
}

impl TakenIo {
    /// Creates an IO that has not been issued. The IO ends immediately only if `status` is an
    /// error.
    pub(super) fn new(
        device: DeviceIndex,
        io: Io,
        status: IoStatus,
        mark: FlushMark,
        submitted: Instant,
    ) -> Self {
        Self {
            device,
            io,
            mark,
            sync: None,
            epoch: 0,
            submitted,
            status,
            issued: 0,
            pending: 0,
            losses: None,
            queued: false,
            given_up: false,
        }
    }

    /// Part to issue next, for requests that carry at most `max` bytes.
    pub(super) fn next_part(&self, max: u32, block: u32) -> IoPart {
        let left = self.io.len - self.issued;
        let len = match self.io.op {
            IoOp::Read | IoOp::Write => part_len(left, max, block),
            IoOp::Flush => 0,
            IoOp::Discard | IoOp::WriteZeroes | IoOp::Extents => left,
        };
        IoPart { at: self.issued, len }
    }

    /// Memory of a part.
    fn memory(&self, part: IoPart) -> Option<MemSlice> {
        match self.io.op {
            IoOp::Extents => self.io.buf.clone(),
            _ => self.io.buf.as_ref()?.slice(part.at as usize, part.len as usize),
        }
    }

    pub(super) fn memory_use(&self) -> MemoryUse {
        match &self.io.buf {
            Some(buf) if buf.region().is_scattered() => MemoryUse::Scattered,
            _ => MemoryUse::Direct,
        }
    }

    /// Memory in several pieces that receives the answer to a part, if the IO has such memory.
    pub(super) fn scattered_answer(&self, part: IoPart) -> Option<MemSlice> {
        if self.memory_use() == MemoryUse::Direct {
            return None;
        }
        matches!(self.io.op, IoOp::Read | IoOp::Extents).then(|| self.memory(part))?
    }

    /// Builds the request for a part, on a path that uses this number for the device.
    pub(super) fn request(&self, part: IoPart, permit: PermitId, device_id: u32) -> IoRequest {
        let IoPart { at, len } = part;
        let buf = self.memory(part);
        let offset = self.io.offset + u64::from(at);
        let (op, flags) = (self.io.op, self.io.flags);
        IoRequest { permit, device_id, op, flags, offset, len, buf }
    }

    /// Whether parts of the IO are unfinished.
    pub(super) fn has_more(&self) -> bool {
        self.pending > 0 || !self.is_all_issued()
    }

    /// Whether each part has been sent at least once.
    pub(super) fn is_all_issued(&self) -> bool {
        self.issued >= self.io.len.max(1)
    }
}

/// State of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// In flight.
    Sent,
    /// Answered; the window of the read target is still being closed.
    Answered(IoStatus),
    /// Answered, but the window of the read target could not be closed. The answer does not count,
    /// and the connection ends.
    Exposed,
    /// The connection has ended, but the path of this epoch may still deliver the request.
    AwaitingFence {
        /// Epoch in which the request was sent.
        epoch: u32,
    },
    /// Ready to be resent.
    Ready,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) io: IoRow,
    pub(super) path: PathId,
    pub(super) part: IoPart,
    /// Time at which the request was sent; later, the time at which it was answered or its
    /// connection ended.
    pub(super) sent: Instant,
    pub(super) standing: Standing,
    /// Position in the order in which requests were first sent; increases with each request.
    pub(super) turn: u64,
    /// Number of times the request has been sent.
    pub(super) tries: u16,
    /// Whether the answer is taking longer than the IO timeout on a path that is alive.
    pub(super) slow: bool,
}

impl Request {
    /// Whether the request is on a connection of this path.
    pub(super) fn is_on(&self, path: PathId) -> bool {
        let on =
            matches!(self.standing, Standing::Sent | Standing::Answered(_) | Standing::Exposed);
        self.path == path && on
    }
}

#[derive(Debug)]
pub(super) struct Requests {
    permits: Permits,
    /// Permits that requests hold, by device.
    shares: Shares,
    rows: Vec<Option<Request>>,
    ios: Vec<Option<TakenIo>>,
    free: Vec<u32>,
    waiting: Waiting,
    turn: u64,
    pub(super) failed: FailedIos,
}

impl Requests {
    /// Creates the tables without permits.
    pub(super) fn new() -> Self {
        Self {
            permits: Permits::new(0..0),
            shares: Shares::new(0),
            rows: Vec::new(),
            ios: (0..IOS_MAX).map(|_| None).collect(),
            free: (0..IOS_MAX as u32).rev().collect(),
            waiting: Waiting::default(),
            turn: 0,
            failed: FailedIos::default(),
        }
    }

    /// Sets the shard's permits.
    pub(super) fn set_permits(&mut self, range: Range<u16>) {
        self.rows = vec![None; range.len()];
        self.permits = Permits::new(range);
        self.shares.set_all(self.permits.for_requests());
    }

    /// Adds a device to those that share the permits.
    pub(super) fn add_device(&mut self, device: DeviceIndex) {
        self.waiting.add_device(device);
        self.shares.add();
    }

    /// Removes a device that has no requests left.
    pub(super) fn remove_device(&mut self) {
        self.shares.remove();
    }

    pub(super) fn range(&self) -> Range<u16> {
        self.permits.range()
    }

    pub(super) fn has_permit(&self) -> bool {
        self.permits.has_any()
    }

    /// Whether a device may take one more permit, if one is free.
    pub(super) fn may_take_permit(&self, device: DeviceIndex) -> bool {
        self.shares.may_take(device.index())
    }

    pub(super) fn take_permit(&mut self) -> Option<PermitId> {
        self.permits.take()
    }

    /// Whether a permit is free for a probe.
    pub(super) fn has_probe_permit(&self) -> bool {
        self.permits.available() > 0
    }

    pub(super) fn take_probe_permit(&mut self) -> Option<PermitId> {
        self.permits.take_for_probe()
    }

    pub(super) fn give_permit(&mut self, permit: PermitId) {
        self.permits.give(permit);
    }

    pub(super) fn permit_of(&self, row: RequestRow) -> PermitId {
        PermitId(self.permits.range().start + row.0)
    }

    /// Takes an IO; it waits to be issued unless it has failed already. There must be a free row.
    pub(super) fn take(&mut self, mut io: TakenIo) -> IoRow {
        let row = self.free.pop().unwrap_or_else(|| panic!("more IOs than rows"));
        io.queued = io.status.is_ok();
        if io.queued {
            self.waiting.push(io.device, IoRow(row));
        }
        self.ios[row as usize] = Some(io);
        IoRow(row)
    }

    /// IO of a row. Panics if there is none, which would be a bug in this crate.
    pub(super) fn io(&self, row: IoRow) -> &TakenIo {
        self.ios[row.0 as usize].as_ref().unwrap_or_else(|| panic!("no IO in {row:?}"))
    }

    /// Mutable IO of a row. Panics like [`Self::io`].
    pub(super) fn io_mut(&mut self, row: IoRow) -> &mut TakenIo {
        self.ios[row.0 as usize].as_mut().unwrap_or_else(|| panic!("no IO in {row:?}"))
    }

    /// Request of a row. Panics if there is none, which would be a bug in this crate.
    pub(super) fn request(&self, row: RequestRow) -> &Request {
        self.rows[row.index()].as_ref().unwrap_or_else(|| panic!("no request in {row:?}"))
    }

    /// Mutable request of a row. Panics like [`Self::request`].
    pub(super) fn request_mut(&mut self, row: RequestRow) -> &mut Request {
        self.rows[row.index()].as_mut().unwrap_or_else(|| panic!("no request in {row:?}"))
    }

    /// Rows of the matching requests, in permit order.
    pub(super) fn rows(&self, fits: impl Fn(&Request) -> bool) -> Vec<RequestRow> {
        self.requests().filter(|(_, request)| fits(request)).map(|(row, _)| row).collect()
    }

    pub(super) fn requests(&self) -> impl Iterator<Item = (RequestRow, &Request)> {
        (0..).zip(&self.rows).filter_map(|(at, row)| Some((RequestRow(at), row.as_ref()?)))
    }

    /// Request on this path that holds a permit, if there is one.
    pub(super) fn find(&self, permit: PermitId, path: PathId) -> Option<RequestRow> {
        let range = self.permits.range();
        if !range.contains(&permit.0) {
            tracing::warn!("answer for permit {permit}, which this connection does not use");
            return None;
        }
        let row = RequestRow(permit.0 - range.start);
        self.rows[row.index()].filter(|request| request.is_on(path)).map(|_| row)
    }

    /// Whether more IOs are waiting than there are free permits.
    pub(super) fn is_full(&self) -> bool {
        self.waiting.len() > self.permits.for_requests()
    }

    /// Device whose IO is issued next, among those that are not blocked.
    pub(super) fn next_device(&self, blocked: DeviceSet) -> Option<DeviceIndex> {
        self.waiting.next(blocked)
    }

    /// Devices with waiting IOs.
    pub(super) fn waiting_devices(&self) -> DeviceSet {
        self.waiting.devices()
    }

    /// The device's waiting IO that is issued next.
    pub(super) fn first_waiting(&self, device: DeviceIndex) -> Option<IoRow> {
        self.waiting.front(device)
    }

    /// Rows of a device's waiting IOs that match.
    pub(super) fn waiting(
        &self,
        device: DeviceIndex,
        fits: impl Fn(&TakenIo) -> bool,
    ) -> Vec<IoRow> {
        self.waiting.of(device).filter(|row| fits(self.io(*row))).collect()
    }

    pub(super) fn ios_of(&self, device: DeviceIndex) -> Vec<IoRow> {
        let ios = (0..).zip(&self.ios).filter_map(|(at, io)| Some((IoRow(at), io.as_ref()?)));
        ios.filter(|(_, io)| io.device == device).map(|(row, _)| row).collect()
    }

    /// Whether a device has unfinished IOs.
    pub(super) fn has_ios(&self, device: DeviceIndex) -> bool {
        self.ios.iter().flatten().any(|io| io.device == device)
    }

    /// Records that the next part of a device's first waiting IO was sent.
    pub(super) fn issued(
        &mut self,
        io: IoRow,
        permit: PermitId,
        path: PathId,
        part: IoPart,
        now: Instant,
    ) {
        self.turn += 1;
        let turn = self.turn;
        let taken = self.io_mut(io);
        taken.issued += part.len.max(u32::from(taken.io.op == IoOp::Flush));
        taken.pending += 1;
        let (device, is_whole) = (taken.device, taken.is_all_issued());
        taken.queued &= !is_whole;
        if is_whole {
            self.waiting.pop_front(device);
        }
        self.waiting.turn_taken(device);
        self.shares.take(device.index());
        let row = usize::from(permit.0 - self.permits.range().start);
        debug_assert!(self.rows[row].is_none(), "permit {permit} is in use");
        let (sent, standing) = (now, Standing::Sent);
        let (tries, slow) = (1, false);
        self.rows[row] = Some(Request { io, path, part, sent, standing, turn, tries, slow });
    }

    /// Ends a request and frees its permit. An error ends the rest of its IO. Returns the request.
    pub(super) fn end_request(&mut self, row: RequestRow, status: IoStatus) -> Request {
        let request = *self.request(row);
        self.rows[row.index()] = None;
        self.permits.give(self.permit_of(row));
        self.shares.give(self.io(request.io).device.index());
        let io = self.io_mut(request.io);
        io.pending -= 1;
        let fails = !status.is_ok() && io.status.is_ok();
        if fails && !rtrs_core::mutated!(RequestErrorDropped) {
            io.status = status;
            self.failed.failed_on(request.io, request.path);
            self.unqueue(request.io);
        } else if !io.status.is_ok() {
            self.unqueue(request.io);
        }
        request
    }

    /// Stops issuing parts of an IO: it fails with this error once its requests have ended.
    pub(super) fn fail(&mut self, row: IoRow, status: IoStatus) {
        self.io_mut(row).status = status;
        self.unqueue(row);
    }

    fn unqueue(&mut self, row: IoRow) {
        let io = self.io_mut(row);
        let device = io.device;
        if std::mem::take(&mut io.queued) {
            self.waiting.remove(device, row);
        }
    }

    /// Whether an IO has no outstanding requests and will send no more.
    pub(super) fn is_ended(&self, row: IoRow) -> bool {
        let io = self.io(row);
        let is_over = io.is_all_issued() || !io.status.is_ok();
        let early = rtrs_core::mutated!(FirstRequestEnds) && io.pending > 0;
        early || io.pending == 0 && is_over
    }

    /// Removes an IO that has ended. Panics like [`Self::io`].
    pub(super) fn take_ended(&mut self, row: IoRow) -> TakenIo {
        self.free.push(row.0);
        let taken = self.ios[row.0 as usize].take();
        let taken = taken.unwrap_or_else(|| panic!("no IO in {row:?}"));
        debug_assert!(!taken.queued, "a finished IO waits for nothing");
        taken
    }

    /// A device's oldest IO, and the request of that IO that was sent first.
    pub(super) fn oldest(&self, device: DeviceIndex) -> Option<(&TakenIo, Option<&Request>)> {
        let ios = (0..).zip(&self.ios).filter_map(|(at, io)| Some((IoRow(at), io.as_ref()?)));
        let ios = ios.filter(|(_, io)| io.device == device);
        let (row, io) = ios.min_by_key(|(_, io)| io.submitted)?;
        let of_it = self.rows.iter().flatten().filter(|request| request.io == row);
        Some((io, of_it.min_by_key(|request| request.turn)))
    }

    /// Number of unfinished IOs.
    pub(super) fn inflight(&self) -> usize {
        IOS_MAX - self.free.len()
    }

    /// Number of permits that requests hold.
    pub(super) fn permits_held(&self) -> usize {
        self.rows.iter().flatten().count()
    }

    /// Panics if the tables are inconsistent; `others` permits are in use, but not by requests.
    pub(super) fn check(&self, others: usize) {
        let held = self.permits_held();
        assert_eq!(held + others + self.permits.available(), self.rows.len(), "every permit");
        let ios = || self.ios.iter().flatten();
        assert_eq!(ios().count() + self.free.len(), IOS_MAX);
        assert_eq!(ios().map(|io| io.pending as usize).sum::<usize>(), held);
        let queued = ios().filter(|io| io.queued).count();
        assert_eq!(queued, self.waiting.len(), "every queued IO waits exactly once");
        for row in self.waiting.iter() {
            let io = self.io(row);
            assert!(io.queued && io.status.is_ok());
        }
        let mut held_by = [0; VOLUMES_MAX];
        for request in self.rows.iter().flatten() {
            held_by[self.io(request.io).device.index()] += 1;
        }
        for (device, held) in DeviceIndex::all().zip(held_by) {
            assert_eq!(self.shares.held(device.index()), held, "permits of {device:?}");
        }
    }
}

/// Length of the next request when `left` bytes remain and one carries at most `most`. Parts have
/// equal lengths, so that an IO just over the limit does not end in a tiny request.
fn part_len(left: u32, most: u32, block: u32) -> u32 {
    let block = block.max(1);
    if left <= most {
        return left;
    }
    let grain = if most >= 8192 { block.max(4096) } else { block };
    let part = left.div_ceil(left.div_ceil(most)).next_multiple_of(grain);
    part.min(most / block * block)
}
