//! Count of refused sends. A user sees on the board that a port is congested, so the node learns of
//! a refused send only from this count.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use rtrs_core::time::Duration;

/// Minimum interval between two reports: a program may try again in a loop.
const INTERVAL: Duration = Duration::from_millis(10);

/// Reason why a send was refused, or had to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The port is congested.
    Congested,
    /// The port is congested, and the call waits.
    Waits,
    /// The send buffer is full.
    Full,
}

/// Number of refusals of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) congested: u32,
    pub(super) waits: u32,
    pub(super) full: u32,
}

/// Refusals that the node does not know yet.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    congested: AtomicU32,
    waits: AtomicU32,
    full: AtomicU32,
    reported: Mutex<Option<Instant>>,
}

impl Refusals {
    pub(super) fn add(&self, refusal: Refusal) {
        self.counter(refusal).fetch_add(1, Ordering::Relaxed);
    }

    fn counter(&self, refusal: Refusal) -> &AtomicU32 {
        match refusal {
            Refusal::Congested => &self.congested,
            Refusal::Waits => &self.waits,
            Refusal::Full => &self.full,
        }
    }

    /// Takes the refusals to report now, if there are any and the last report is long enough ago.
    pub(super) fn take_due(&self, now: Instant) -> Option<Counts> {
        // Another thread reports. After a fork, the lock may stay with a thread that is not there.
        let mut reported = self.reported.try_lock().ok()?;
        if reported.is_some_and(|last| now.saturating_duration_since(last) < INTERVAL) {
            return None;
        }
        let take = |refusal| self.counter(refusal).swap(0, Ordering::Relaxed);
        let congested = take(Refusal::Congested);
        let counts = Counts { congested, waits: take(Refusal::Waits), full: take(Refusal::Full) };
        if counts == Counts::default() {
            return None;
        }
        *reported = Some(now);
        Some(counts)
    }

    /// Whether the node does not know all refusals.
    pub(super) fn is_empty(&self) -> bool {
        [Refusal::Congested, Refusal::Waits, Refusal::Full]
            .iter()
            .all(|refusal| self.counter(*refusal).load(Ordering::Relaxed) == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_is_reported_once_in_few_reports() {
        let refusals = Refusals::default();
        let now = Instant::now();
        assert_eq!(refusals.take_due(now), None);
        refusals.add(Refusal::Congested);
        assert_eq!(refusals.take_due(now), Some(Counts { congested: 1, ..Counts::default() }));
        for _ in 0..1000 {
            refusals.add(Refusal::Full);
            refusals.add(Refusal::Waits);
            assert_eq!(refusals.take_due(now), None);
        }
        assert!(!refusals.is_empty());
        let counts = Counts { congested: 0, waits: 1000, full: 1000 };
        assert_eq!(refusals.take_due(now + INTERVAL), Some(counts));
        assert!(refusals.is_empty());
    }
}
