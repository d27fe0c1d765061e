//! States that only a bug can cause.
//!
//! Such a state ends the connection that it concerns and is logged; the process, which serves other
//! volumes too, goes on. What may still be written to by the device is never used again: a row
//! with IO at the device keeps its memory, and its connection stays until the device has ended that
//! IO. [`Bridge::check`](crate::Bridge::check) fails for every such state, so that tests and the
//! simulator find what causes them.

use super::{Shared, row_of};
use crate::requests::ConnId;

/// Internal errors of a shard.
#[derive(Debug, Default)]
pub(crate) struct InternalErrors {
    count: u64,
    /// Connections to be closed.
    conns: Vec<ConnId>,
}

impl Shared {
    /// Reports a state that cannot be, and has the connection of a row closed.
    pub(crate) fn internal_error(&mut self, row: u32, what: &'static str) {
        tracing::error!(export = self.name, shard = self.seat.shard, row, what, "internal error");
        self.internal_errors.count += 1;
        if let Some(row) = self.requests.live(row) {
            self.internal_errors.conns.push(row.conn);
        }
    }

    /// The next connection that has to be closed for an internal error.
    pub(crate) fn take_failed(&mut self) -> Option<ConnId> {
        self.internal_errors.conns.pop()
    }

    /// Internal errors since start.
    pub(crate) fn internal_errors(&self) -> u64 {
        self.internal_errors.count
    }

    /// Whether the device may report on the IO with this tag, which it then has. Anything else is
    /// an internal error.
    pub(super) fn is_at_device(&mut self, tag: u64, what: &'static str) -> bool {
        let (index, fragment) = row_of(tag);
        let has = self.requests.live(index).is_some_and(|row| match fragment {
            Some(which) => row.fragments.get(which).is_some_and(|state| state.is_at_device()),
            None => !row.is_idle(),
        });
        if !has {
            self.internal_error(index, what);
        }
        has
    }

    /// Prepares a row to be given back. False when it must stay, as the device has some of it.
    pub(super) fn leave_tables(&mut self, index: u32) -> bool {
        let row = self.requests.row(index);
        if row.pending > 0 {
            self.internal_error(index, "a row given back in use");
            return false;
        }
        if !row.is_listed() {
            return true;
        }
        self.internal_error(index, "a row given back in a table");
        self.backlog.retain(|row| *row != index);
        self.undefer(index);
        self.drop_turns(index);
        self.leave_orphans(index);
        true
    }
}
