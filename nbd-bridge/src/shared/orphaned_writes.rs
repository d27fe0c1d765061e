//! A shard's orphaned writes, and its rows that wait for orphaned writes on any shard.

use rtrs_core::block::IoOp;

use crate::group::Seat;
use crate::requests::{NbdRow, Requests};

/// A shard's view of its device's orphaned writes.
#[derive(Debug)]
pub(super) struct OrphanedWrites {
    seat: Seat,
    /// Rows waiting for orphaned writes, in order.
    deferred: Vec<u32>,
}

impl OrphanedWrites {
    /// Creates the view for a shard with `rows` rows.
    pub(super) fn new(seat: Seat, rows: usize) -> Self {
        Self { seat, deferred: Vec::with_capacity(rows) }
    }

    /// Numbers of the waiting rows, in order.
    pub(super) fn deferred(&self) -> &[u32] {
        &self.deferred
    }

    /// Defers a row of which nothing has been submitted if it overlaps an orphaned write. Returns
    /// true if the row begins to wait.
    pub(super) fn defer(&mut self, index: u32, row: &mut NbdRow) -> bool {
        let orphans = &self.seat.group.orphans;
        if orphans.is_empty() || rtrs_core::mutated!(NbdOrphanForgotten) {
            return false;
        }
        let fresh = row.progress.handed() == 0 && !row.overlaps.is_deferred();
        let is_flush = row.command.io() == Some(IoOp::Flush);
        let waits = fresh && !is_flush && orphans.touch(row.bytes());
        if waits {
            row.overlaps.defer();
            self.deferred.push(index);
        }
        waits
    }

    /// Ends the wait of a row.
    pub(super) fn undefer(&mut self, index: u32, row: &mut NbdRow) {
        if row.overlaps.undefer() {
            self.deferred.retain(|row| *row != index);
        }
    }

    /// Ends the wait of the first row, at or after position `at` in the list, whose bytes no
    /// orphaned write can still change. Advances `at` to that row's position.
    pub(super) fn release(&mut self, at: &mut usize, requests: &mut Requests) -> Option<u32> {
        while let Some(&index) = self.deferred.get(*at) {
            let row = requests.row(index);
            if !self.seat.group.orphans.touch(row.bytes()) {
                row.overlaps.undefer();
                self.deferred.remove(*at);
                return Some(index);
            }
            *at += 1;
        }
        None
    }

    /// Adds a row to the orphaned writes if the device may still change bytes on its behalf.
    /// Returns true if it was added.
    pub(super) fn add(&self, index: u32, row: &mut NbdRow) -> bool {
        let bytes = row.may_change().filter(|_| !row.overlaps.is_orphaned());
        let Some(bytes) = bytes else { return false };
        row.overlaps.set_orphaned();
        self.seat.group.orphans.enter((self.seat.shard, index), bytes);
        true
    }

    /// Removes a row from the orphaned writes.
    pub(super) fn remove(&self, index: u32, row: &mut NbdRow) {
        if row.overlaps.take_orphaned() {
            let key = (self.seat.shard, index);
            self.seat.group.orphans.leave(|own| *own == key);
        }
    }
}
