//! Waits between a request and those that overlap it.

use rtrs_core::time::{Duration, Instant};

/// Whether a request waits for overlapping requests, and whether any of those wait for it.
#[derive(Debug)]
pub(crate) struct Overlaps {
    /// Waiting for orphaned writes; no part has been submitted.
    deferred: bool,
    /// The request is itself an orphaned write, and is listed in the group's table.
    orphaned: bool,
    /// The ready bytes wait for changes to parts of blocks.
    queued: bool,
    /// Changes to parts of blocks wait for IOs of this request.
    awaited: bool,
    /// Time when the request was first seen deferred or waiting for its turn.
    since: Option<Instant>,
}

impl Overlaps {
    pub(crate) const fn none() -> Self {
        Self { deferred: false, orphaned: false, queued: false, awaited: false, since: None }
    }

    /// Whether the request is in one of the shard's or the group's tables.
    pub(crate) fn is_listed(&self) -> bool {
        self.deferred || self.orphaned || self.queued || self.awaited
    }

    pub(crate) fn is_deferred(&self) -> bool {
        self.deferred
    }

    pub(crate) fn defer(&mut self) {
        self.deferred = true;
    }

    /// Ends the wait for orphaned writes. Returns true if the request was deferred.
    pub(crate) fn undefer(&mut self) -> bool {
        let deferred = std::mem::take(&mut self.deferred);
        if deferred {
            self.since = None;
        }
        deferred
    }

    pub(crate) fn is_orphaned(&self) -> bool {
        self.orphaned
    }

    pub(crate) fn set_orphaned(&mut self) {
        self.orphaned = true;
    }

    /// Clears the mark of an orphaned write. Returns whether it was set.
    pub(crate) fn take_orphaned(&mut self) -> bool {
        std::mem::take(&mut self.orphaned)
    }

    pub(crate) fn is_queued(&self) -> bool {
        self.queued
    }

    pub(crate) fn queue(&mut self) {
        self.queued = true;
    }

    /// Clears the mark of queued bytes. Returns whether it was set.
    pub(crate) fn take_queued(&mut self) -> bool {
        std::mem::take(&mut self.queued)
    }

    /// Records that it is the queued bytes' turn; changes behind them wait.
    pub(crate) fn start_turn(&mut self) {
        (self.queued, self.awaited) = (false, true);
    }

    pub(crate) fn is_awaited(&self) -> bool {
        self.awaited
    }

    /// Records that changes to parts of blocks wait for this request, if `awaited`.
    pub(crate) fn await_if(&mut self, awaited: bool) {
        self.awaited |= awaited;
    }

    pub(crate) fn end_awaited(&mut self) {
        self.awaited = false;
    }

    /// Returns the time since this was first called after the wait began.
    pub(crate) fn waited(&mut self, now: Instant) -> Duration {
        now.since(*self.since.get_or_insert(now))
    }

    /// Forgets how long the request has waited.
    pub(crate) fn stop_waiting(&mut self) {
        self.since = None;
    }
}
