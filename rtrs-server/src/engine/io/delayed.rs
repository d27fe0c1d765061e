//! A shard's requests that are delayed by their export's rate limits.
//!
//! A delayed request keeps its permit and its chunk, like every request in flight, and waits in a
//! queue for its shard and direction. Only the first request of a queue is charged to the limits
//! ahead of time. Thus the queues of all shards take turns, dropping a request wastes nothing, and
//! changed limits apply to every waiting request. Flushes and requests for extents transfer no data
//! and never wait. An export without limits has no queues; the check costs one branch per request.

use std::collections::VecDeque;
use std::sync::Arc;

use rtrs_core::time::{Instant, earliest};

use super::progress::IoProgress;
use super::table::{PathRow, RequestRef};
use super::throttle::{Budget, Charge, Direction, Throttle};

/// A request that has left its queue, and how long it waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Released {
    pub(super) request: RequestRef,
    pub(super) waited_ns: u64,
}

/// A delayed request.
#[derive(Clone, Copy, Debug)]
struct Entry {
    request: RequestRef,
    charge: Charge,
    since: Instant,
}

impl Entry {
    fn release(self, now: Instant) -> Released {
        let waited_ns = now.as_nanos().saturating_sub(self.since.as_nanos());
        Released { request: self.request, waited_ns }
    }
}

/// Delayed requests of one direction, in order of arrival.
#[derive(Debug, Default)]
struct Queue {
    entries: VecDeque<Entry>,
    /// Earliest start of the first request, once it has been charged.
    start: Option<Instant>,
}

impl Queue {
    /// Charges the first request if it has not been charged. Returns its earliest start.
    fn start(&mut self, budget: Option<&Budget>, now: Instant) -> Option<Instant> {
        let first = self.entries.front()?;
        let take = || budget.map_or(Instant::ZERO, |budget| budget.take(first.charge, now));
        Some(*self.start.get_or_insert_with(take))
    }

    fn pop(&mut self, now: Instant) -> Option<Released> {
        self.start = None;
        self.entries.pop_front().map(|first| first.release(now))
    }

    /// Time at which the queue must be checked next.
    fn deadline(&self) -> Option<Instant> {
        self.entries.front().map(|_| self.start.unwrap_or(Instant::ZERO))
    }

    /// Removes the requests of a path. Refunds the first request's charge if it is removed.
    fn remove(&mut self, path: PathRow, budget: Option<&Budget>) -> Vec<Entry> {
        let is_removed = |entry: &Entry| entry.request.path == path;
        if let Some(first) = self.entries.front().filter(|first| is_removed(first))
            && self.start.take().is_some()
        {
            budget.into_iter().for_each(|budget| budget.give_back(first.charge));
        }
        let removed = self.entries.iter().copied().filter(is_removed).collect();
        self.entries.retain(|entry| !is_removed(entry));
        removed
    }
}

/// Delayed requests of an export on one shard.
#[derive(Debug, Default)]
pub(super) struct Delayed {
    /// None once the limits have been removed.
    budget: Option<Arc<Budget>>,
    reads: Queue,
    writes: Queue,
}

impl Delayed {
    /// Creates the queues for an export that is opened on a shard; None if it has no limits.
    pub(super) fn new(throttle: &Throttle) -> Option<Box<Self>> {
        let budget = Some(throttle.budget()?);
        Some(Box::new(Self { budget, ..Self::default() }))
    }

    /// Applies the current limits of an export to its queues.
    pub(super) fn apply(delayed: &mut Option<Box<Self>>, throttle: &Throttle) {
        match delayed {
            Some(delayed) => delayed.change(throttle.budget()),
            None => *delayed = Self::new(throttle),
        }
    }

    /// Returns whether an IO must wait, and queues its request if so. Otherwise charges the IO.
    pub(super) fn delays(&mut self, request: RequestRef, io: &IoProgress, now: Instant) -> bool {
        let Some(charge) = Charge::of(io.op, io.len) else { return false };
        let queue = match charge.direction {
            Direction::Read => &mut self.reads,
            Direction::Write => &mut self.writes,
        };
        if queue.entries.is_empty() {
            let start = self.budget.as_ref().map(|budget| budget.take(charge, now));
            match start.filter(|start| *start > now) {
                None => return false,
                start => queue.start = start,
            }
        }
        queue.entries.push_back(Entry { request, charge, since: now });
        true
    }

    /// Removes the next request that may start.
    pub(super) fn next(&mut self, now: Instant) -> Option<Released> {
        let Self { budget, reads, writes } = self;
        let budget = budget.as_deref();
        let read = reads.start(budget, now);
        let write = writes.start(budget, now);
        if earliest(read, write)? > now {
            return None;
        }
        match (read, write) {
            (Some(read), Some(write)) if write < read => writes.pop(now),
            (Some(_), _) => reads.pop(now),
            (None, _) => writes.pop(now),
        }
    }

    /// Replaces the limits. The first request of each queue is charged again.
    fn change(&mut self, budget: Option<Arc<Budget>>) {
        self.budget = budget;
        (self.reads.start, self.writes.start) = (None, None);
    }

    /// Removes the requests of a path.
    pub(super) fn remove(&mut self, path: PathRow, now: Instant) -> Vec<Released> {
        let Self { budget, reads, writes } = self;
        let mut removed = reads.remove(path, budget.as_deref());
        removed.extend(writes.remove(path, budget.as_deref()));
        removed.into_iter().map(|entry| entry.release(now)).collect()
    }

    /// Time at which the queues must be checked next.
    pub(super) fn deadline(&self) -> Option<Instant> {
        earliest(self.reads.deadline(), self.writes.deadline())
    }

    /// Whether no request is waiting.
    pub(super) fn is_empty(&self) -> bool {
        self.reads.entries.is_empty() && self.writes.entries.is_empty()
    }

    /// Whether the limits were removed and no request is waiting.
    pub(super) fn is_over(&self) -> bool {
        self.budget.is_none() && self.is_empty()
    }

    /// Whether this request is waiting.
    pub(super) fn contains(&self, request: RequestRef) -> bool {
        self.reads.entries.iter().chain(&self.writes.entries).any(|one| one.request == request)
    }
}

#[cfg(test)]
mod tests;
