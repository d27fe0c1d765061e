//! Decides when the control shard checks what is due.
//!
//! A check visits every path, which is too slow to do in every turn under load. A check is needed
//! when something has happened on this shard, when a deadline has passed, and for things that
//! shards record without sending a message: receipts, uses and the state of the cache. Such records
//! are noticed within [`NOTICED_AFTER`] as long as the shard takes turns.

use rtrs_core::time::{Duration, Instant};

/// Minimum interval between checks for things that shards have recorded.
const NOTICED_AFTER: Duration = Duration::from_millis(1);

/// Extent of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Check {
    /// Everything except opening and closing volumes, which only events and deadlines trigger.
    Paths,
    All,
}

/// Deadlines found by a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deadlines {
    /// Deadline of the next open.
    pub(super) open: Option<Instant>,
    /// Earliest deadline, including that of the next open.
    pub(super) first: Option<Instant>,
}

/// A session's checks.
#[derive(Debug, Default)]
pub(super) struct Checks {
    /// Time and result of the last check, unless something has happened since.
    last: Option<(Instant, Deadlines)>,
}

impl Checks {
    /// Makes the next turn check everything, since something has happened.
    pub(super) fn wake(&mut self) {
        self.last = None;
    }

    /// Extent of the check that the current turn must make, if any.
    pub(super) fn due(&self, now: Instant) -> Option<Check> {
        match self.last {
            Some((_, found)) if found.first.is_none_or(|at| now < at) => {}
            _ => return Some(Check::All),
        }
        self.last.filter(|(at, _)| now.since(*at) >= NOTICED_AFTER).map(|_| Check::Paths)
    }

    /// Records a check that found nothing to do.
    pub(super) fn done(&mut self, now: Instant, found: Deadlines) {
        self.last = Some((now, found));
    }

    /// Deadlines found by the last check; None if something has happened since.
    pub(super) fn deadlines(&self) -> Option<Deadlines> {
        self.last.map(|(_, found)| found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_follow_events_deadlines_and_records_of_shards() {
        let at = |us: u64| Instant::from_nanos(us * 1000);
        let mut checks = Checks::default();
        assert_eq!((checks.due(at(5)), checks.deadlines()), (Some(Check::All), None));
        let found = Deadlines { open: None, first: Some(at(2500)) };
        checks.done(at(5), found);
        assert_eq!((checks.due(at(5)), checks.due(at(1004))), (None, None));
        assert_eq!(
            (checks.due(at(1005)), checks.due(at(2499))),
            (Some(Check::Paths), Some(Check::Paths))
        );
        assert_eq!((checks.due(at(2500)), checks.deadlines()), (Some(Check::All), Some(found)));
        checks.done(at(2000), found);
        assert_eq!((checks.due(at(2499)), checks.due(at(2500))), (None, Some(Check::All)));
        checks.wake();
        assert_eq!((checks.due(at(2000)), checks.deadlines()), (Some(Check::All), None));
        checks.done(at(2000), Deadlines { open: None, first: None });
        assert_eq!(checks.due(at(9_000_000)), Some(Check::Paths), "without a deadline");
    }
}
