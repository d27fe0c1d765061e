//! Internal errors: states that only a bug can cause.
//!
//! Such a state is logged and ends the connection that it concerns; the process keeps running,
//! since it serves other volumes too. Memory that the device may still write to is never reused: a
//! row with IO at the device keeps its memory, and its connection is kept until the device has
//! completed that IO. [`Bridge::check`](crate::Bridge::check) fails for every such state, so that
//! tests and the simulator find the cause.

use super::{Shared, row_of};
use crate::requests::ConnId;

/// Internal errors of a shard.
#[derive(Debug, Default)]
pub(crate) struct InternalErrors {
    count: u64,
    /// Connections to be closed.
    conns: Vec<ConnId>,
}

impl InternalErrors {
    /// Counts an error, and notes the connection that it concerns.
    fn add(&mut self, conn: Option<ConnId>) {
        self.count += 1;
        self.conns.extend(conn);
    }

    /// Returns the next connection to close.
    pub(crate) fn next_conn(&mut self) -> Option<ConnId> {
        self.conns.pop()
    }

    /// Number of internal errors since startup.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }
}

impl Shared {
    /// Reports an impossible state, and closes the row's connection.
    pub(crate) fn internal_error(&mut self, row: u32, what: &'static str) {
        let (export, shard) = (self.terms.name(), self.seat.shard);
        tracing::error!(export, shard, row, what, "internal error");
        let conn = self.requests.live(row).map(|row| row.conn);
        self.internal_errors.add(conn);
    }

    /// Checks that the IO with this tag is in flight at the device, so that the device may report
    /// on it. Otherwise reports an internal error.
    pub(super) fn is_at_device(&mut self, tag: u64, what: &'static str) -> bool {
        let (index, fragment) = row_of(tag);
        let has = self.requests.live(index).is_some_and(|row| match fragment {
            Some(which) => row.fragments.is_at_device(which),
            None => !row.is_idle(),
        });
        if !has {
            self.internal_error(index, what);
        }
        has
    }

    /// Prepares a row to be freed. Returns false if the row must be kept because its IO is still at
    /// the device.
    pub(super) fn leave_tables(&mut self, index: u32) -> bool {
        let row = self.requests.row(index);
        if row.progress.pending() > 0 {
            self.internal_error(index, "a row was freed in use");
            return false;
        }
        if !row.overlaps.is_listed() {
            return true;
        }
        self.internal_error(index, "a row was freed in a table");
        self.leave_queues(index);
        self.orphaned_writes.remove(index, self.requests.row(index));
        true
    }
}
