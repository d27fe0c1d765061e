//! An export's extents that a shard knows from earlier searches.
//!
//! Programs such as qemu-img request one extent after another, and a search costs a handoff to
//! another thread and calls that may read the disk. So while a client requests extents in sequence,
//! the device searches ahead, up to [`COUNT_MAX`] extents, and the shard answers from the list. A
//! change by any session invalidates the lists on all shards (`change_watch.rs`). After that, a
//! search covers only what is requested, until lists prove useful again: under constant writes,
//! searching ahead would be wasted.
//!
//! Only exports whose source is the sole writer of its content use this module
//! ([`BlockSource::is_sole_writer`](rtrs_core::block::BlockSource::is_sole_writer)). Memory is
//! allocated on the first request for extents.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use rtrs_core::block::{BlockDevice, BlockSource, Completion, Geometry, Io, IoOp};
use rtrs_core::extents::{self, Extent, ExtentList};
use rtrs_core::mem::{MemSlice, Region};
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

use super::change_watch::{ChangeWatch, ShardChanges, Stamp};

/// Number of lists, and thus of clients that request extents in sequence at the same time.
const LISTS: usize = 4;
/// Maximum number of extents in a list.
const COUNT_MAX: usize = extents::LEN_MAX / 8 - 1;
/// Maximum value of [`List::level`].
const LEVEL_MAX: u32 = 3;

/// An extent that begins where the previous one ends.
#[derive(Clone, Copy, Debug)]
struct Known {
    end: u64,
    hole: bool,
}

/// A search submitted to the device.
#[derive(Debug)]
struct Search {
    /// Request that the search will answer.
    io: Io,
    /// Stamp of the search's list.
    stamp: Stamp,
    /// Size of the device.
    size: u64,
    /// Whether the search goes beyond the request.
    is_ahead: bool,
}

/// Contiguous extents that start at an offset.
#[derive(Debug)]
struct List {
    /// Buffer for searches.
    room: MemSlice,
    search: Option<Search>,
    /// Present if the list is valid as long as its stamp is current.
    stamp: Option<Stamp>,
    start: u64,
    known: Vec<Known>,
    /// Offsets at which a request continues the last answer.
    next: Range<u64>,
    /// Number of useful lists before this one; each makes the next search go further ahead.
    level: u32,
    /// Time of the last use, in requests.
    used: u64,
}

impl List {
    fn new(room: MemSlice) -> Self {
        Self {
            room,
            search: None,
            stamp: None,
            start: 0,
            known: Vec::with_capacity(COUNT_MAX),
            next: 0..0,
            level: 0,
            used: 0,
        }
    }

    fn end(&self) -> u64 {
        self.known.last().map_or(self.start, |last| last.end)
    }

    /// Whether the list contains the extent at `offset` and no change has begun since its search.
    fn covers(&self, offset: u64, watch: &ChangeWatch) -> bool {
        (self.start..self.end()).contains(&offset)
            && self.stamp.is_some_and(|stamp| watch.is_current(stamp))
    }

    /// Answers a request covered by the list with as many extents as fit.
    fn answer(&mut self, io: &Io) {
        let Some(room) = &io.buf else { return };
        let mut list = ExtentList::new(room);
        let (mut at, to) = (io.offset, io.offset + u64::from(io.len));
        let first = self.known.partition_point(|known| known.end <= at);
        for known in &self.known[first..] {
            if at >= to || !list.push(Extent { len: known.end - at, hole: known.hole }) {
                break;
            }
            at = known.end;
        }
        self.next = at.min(to)..at + 1;
    }

    /// Takes the extents listed by the device, up to the end of the device: a file may be longer
    /// than its exported part. Returns false if the list is invalid.
    fn take(&mut self, search: &Search) -> bool {
        self.known.clear();
        self.start = search.io.offset;
        let mut end = self.start;
        let known = &mut self.known;
        let is_valid = extents::read_all(&self.room, |Extent { len, hole }| {
            end = end.saturating_add(len).min(search.size);
            known.push(Known { end, hole });
            end < search.size
        });
        self.stamp = is_valid.then_some(search.stamp);
        is_valid
    }

    /// Plans a search for a request; at level 1 or higher, it extends beyond the request. The
    /// device has `size` bytes in blocks of `block` bytes.
    fn plan(&self, io: &Io, level: u32, size: u64, block: u64) -> Io {
        let own = extents::count_in(io.buf.as_ref().map_or(0, MemSlice::len));
        let count = (own << (3 * level)).min(COUNT_MAX);
        let most = u64::from(u32::MAX).min(size.saturating_sub(io.offset)) / block * block;
        let len = (u64::from(io.len) << (6 * level)).min(most);
        let buf = self.room.slice(0, extents::room_for(count));
        // This fits because `len` is at most `most`.
        Io { len: u32::try_from(len).unwrap_or(io.len), buf, ..io.clone() }
    }
}

/// Known extents of an export, and changes in flight, on one shard.
#[derive(Debug)]
pub(super) struct KnownExtents {
    source: Arc<dyn BlockSource>,
    watch: Arc<ChangeWatch>,
    changes: ShardChanges,
    /// Empty until the first request for extents.
    lists: Vec<List>,
    /// Requests answered without using the device.
    answered: VecDeque<Completion>,
    /// Whether a request was resubmitted since the device was polled.
    resubmitted: bool,
    /// Number of requests.
    clock: u64,
}

impl KnownExtents {
    pub(super) fn new(source: Arc<dyn BlockSource>, watch: Arc<ChangeWatch>, shard: usize) -> Self {
        let (changes, answered) = (ShardChanges::new(shard), VecDeque::new());
        Self { source, watch, changes, lists: Vec::new(), answered, resubmitted: false, clock: 0 }
    }

    /// Submits an IO to the device, or answers it from a list.
    ///
    /// # Errors
    /// The IO, if the device is full.
    pub(super) fn submit(&mut self, io: Io, device: &mut dyn BlockDevice) -> Result<(), Io> {
        if io.op.changes() {
            self.changes.begin(&self.watch);
            return device.submit(io).inspect_err(|_| self.changes.end(&self.watch));
        }
        if io.op == IoOp::Extents { self.submit_extents(io, device) } else { device.submit(io) }
    }

    /// Ends a change that the device has completed.
    pub(super) fn end_change(&mut self) {
        self.changes.end(&self.watch);
    }

    /// Returns the next IO completed by the device, or the next request answered without it.
    pub(super) fn reap(&mut self, device: &mut dyn BlockDevice) -> Option<Completion> {
        if let Some(answered) = self.answered.pop_front() {
            return Some(answered);
        }
        loop {
            let done = device.reap()?;
            let is_for =
                |list: &&mut List| list.search.as_ref().is_some_and(|s| s.io.tag == done.tag);
            let Some(list) = self.lists.iter_mut().find(is_for) else { return Some(done) };
            let Some(search) = list.search.take() else { return Some(done) };
            if !done.status.is_ok() {
                // The error may concern only the part beyond the request.
                if search.is_ahead && device.submit(search.io).is_ok() {
                    self.resubmitted = true;
                    continue;
                }
                return Some(done);
            }
            if !list.take(&search) {
                return Some(Completion::new(done.tag, IoStatus::Io));
            }
            list.answer(&search.io);
            return Some(done);
        }
    }

    /// Records that the device is polled.
    pub(super) fn polled(&mut self) {
        self.resubmitted = false;
    }

    /// Whether an answered request is waiting to be reaped.
    pub(super) fn has_answered(&self) -> bool {
        !self.answered.is_empty()
    }

    /// Time of the poll that will reap answered requests and execute resubmitted ones.
    pub(super) fn deadline(&self) -> Option<Instant> {
        (self.has_answered() || self.resubmitted).then_some(Instant::ZERO)
    }

    fn submit_extents(&mut self, io: Io, device: &mut dyn BlockDevice) -> Result<(), Io> {
        // The device refuses invalid requests. If the file is truncated, another program has
        // changed it.
        let is_valid = device.geometry().check(&io).is_ok();
        if !is_valid || self.source.is_cut() || self.prepare(device).is_err() {
            return device.submit(io);
        }
        let Self { watch, lists, answered, clock, .. } = self;
        *clock += 1;
        if let Some(list) = lists.iter_mut().find(|list| list.covers(io.offset, watch)) {
            list.answer(&io);
            list.used = *clock;
            answered.push_back(Completion::new(io.tag, IoStatus::Ok));
            return Ok(());
        }
        let idle = || lists.iter().enumerate().filter(|(_, list)| list.search.is_none());
        let follows = idle().find(|(_, list)| list.next.contains(&io.offset));
        let at = follows.or_else(|| idle().min_by_key(|(_, list)| list.used)).map(|(at, _)| at);
        let (Some(at), Some(stamp)) = (at, watch.begin_search()) else {
            return device.submit(io);
        };
        let was_useful = |list: &List| list.stamp.is_some_and(|stamp| watch.is_current(stamp));
        let level = follows.filter(|(_, list)| was_useful(list)).map(|(_, list)| list.level + 1);
        let level = level.unwrap_or(0).min(LEVEL_MAX);
        let Geometry { size, logical_block, .. } = *device.geometry();
        let list = &mut lists[at];
        let planned = list.plan(&io, level, size, logical_block.max(1).into());
        let is_ahead = planned.len > io.len;
        if device.submit(planned).is_err() {
            return Err(io);
        }
        (list.level, list.used, list.stamp) = (level, *clock, None);
        list.search = Some(Search { io, stamp, size, is_ahead });
        Ok(())
    }

    /// Allocates the lists, once, and registers their memory with the device.
    fn prepare(&mut self, device: &mut dyn BlockDevice) -> io::Result<()> {
        if !self.lists.is_empty() {
            return Ok(());
        }
        let region = Region::new(LISTS * extents::LEN_MAX)?;
        device.attach_region(&region)?;
        let room = |at| region.slice(at * extents::LEN_MAX, extents::LEN_MAX);
        self.lists = (0..LISTS).filter_map(room).map(List::new).collect();
        Ok(())
    }
}
