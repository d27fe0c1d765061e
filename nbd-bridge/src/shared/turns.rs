//! Turns of a shard's fragments, and of changes that overlap any shard's fragments.
//!
//! All turns are in the device's list, [`Ranges`](rtrs_core::ranges::Ranges). This module manages
//! the shard's own entries.

use std::ops::Range;

use rtrs_core::ranges::{Key, Piece};

use crate::group::Seat;
use crate::requests::{NbdRow, Requests};

/// Maximum number of open fragments on a shard. Beyond that, requests with fragments wait.
const FRAGMENTS_MAX: usize = 128;

/// Decision on a row's ready bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// The bytes overlap no entry and may be submitted.
    Now,
    /// The bytes must wait.
    Queued,
    /// The bytes join earlier bytes of the row, which are already waiting.
    Joined,
}

/// A shard's entries in the list of ranges that take turns.
#[derive(Debug)]
pub(crate) struct Turns {
    seat: Seat,
    /// Number of open fragments.
    open: usize,
    /// Rows with a part waiting for its turn or, during its turn, for room in the device queue.
    waiting: Vec<u32>,
}

impl Turns {
    /// Creates the turns of a shard with `rows` rows.
    pub(super) fn new(seat: Seat, rows: usize) -> Self {
        Self { seat, open: 0, waiting: Vec::with_capacity(rows) }
    }

    /// Whether more fragments may begin.
    pub(crate) fn has_room(&self) -> bool {
        self.open < FRAGMENTS_MAX
    }

    /// Rows with a waiting part, in order.
    pub(super) fn waiting(&self) -> &[u32] {
        &self.waiting
    }

    /// Adds a row to the list of those with a waiting part.
    pub(super) fn wait(&mut self, index: u32) {
        if !self.waiting.contains(&index) {
            self.waiting.push(index);
        }
    }

    /// Removes the row at this index of the list.
    pub(super) fn remove_at(&mut self, at: usize) {
        self.waiting.remove(at);
    }

    /// Removes a row from the list of those with a waiting part.
    pub(super) fn remove(&mut self, index: u32) {
        self.waiting.retain(|row| *row != index);
    }

    fn key(&self, row: u32, piece: Piece) -> Key {
        Key { shard: self.seat.shard, row: row.into(), piece }
    }

    /// Enters a new fragment that changes part of `block`.
    pub(super) fn enter_fragment(&mut self, index: u32, which: usize, block: Range<u64>) {
        self.open += 1;
        let (key, group) = (self.key(index, Piece::Fragment(which)), &self.seat.group);
        group.ranges.enter(key, block, |shard| group.wake(shard));
    }

    /// Removes a fragment that has ended.
    pub(super) fn end_fragment(&mut self, index: u32, which: usize) {
        self.open -= 1;
        self.end(index, Piece::Fragment(which));
    }

    /// Enters IO in flight on this shard that overlaps fragments added since the last call. Returns
    /// true if there were such fragments.
    pub(crate) fn look(&self, requests: &mut Requests) -> bool {
        let (group, shard) = (&self.seat.group, self.seat.shard);
        let Some(round) = group.ranges.due(shard) else { return false };
        for (index, row) in requests.in_flight() {
            let queued = row.overlaps.is_queued();
            let end = if queued { row.progress.handed() } else { row.progress.ready() };
            let key = self.key(index, Piece::Running);
            let meets = group.ranges.meets(key, &row.blocks(0, end));
            row.overlaps.await_if(meets);
        }
        group.ranges.has_looked(shard, round, |shard| group.wake(shard));
        true
    }

    /// Queues a row's ready bytes if they overlap ranges that must take turns.
    pub(super) fn queue(&mut self, index: u32, row: &mut NbdRow) -> Turn {
        let key = self.key(index, Piece::Queued);
        let ranges = &self.seat.group.ranges;
        let bytes = row.blocks(row.progress.handed(), row.progress.ready());
        if row.overlaps.is_queued() {
            ranges.extend(key, bytes.end);
            return Turn::Joined;
        }
        let changes = row.command.changes();
        if !changes || ranges.is_empty() || bytes.is_empty() || !ranges.queue(key, bytes) {
            return Turn::Now;
        }
        row.overlaps.queue();
        self.wait(index);
        Turn::Queued
    }

    /// Whether the turn of this part of a row has come; if so, the part now counts as running.
    pub(super) fn start(&self, index: u32, piece: Piece) -> bool {
        self.seat.group.ranges.start(self.key(index, piece))
    }

    /// Removes the queued bytes of a row, if any.
    pub(super) fn end_queued(&self, index: u32, row: &mut NbdRow) {
        if row.overlaps.take_queued() {
            self.end(index, Piece::Queued);
        }
    }

    /// Lets fragments stop waiting for a row that has no IO left at the device.
    pub(super) fn end_running(&self, index: u32, row: &mut NbdRow) {
        let none_left = row.progress.all_handed() || row.overlaps.is_queued();
        if row.overlaps.is_awaited() && row.is_idle() && none_left {
            row.overlaps.end_awaited();
            self.end(index, Piece::Running);
        }
    }

    fn end(&self, index: u32, piece: Piece) {
        let (key, group) = (self.key(index, piece), &self.seat.group);
        group.ranges.end(key.shard, |own| *own == key, |shard| group.wake(shard));
    }
}
