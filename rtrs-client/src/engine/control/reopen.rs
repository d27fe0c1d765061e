//! Reopens a volume on a connected path after the server reports a change.
//!
//! A server may send any number of notifications. Each path opens at most once per [`PAUSE`], and
//! remembers only that an open is due.

use rtrs_core::time::{Duration, Instant};

/// Minimum time between two opens on a connected path.
pub(super) const PAUSE: Duration = Duration::from_millis(100);

/// A volume's pending reopen.
#[derive(Debug, Default)]
pub(super) struct Reopen {
    /// Time of the next open.
    due: Option<Instant>,
    /// Whether an open is in progress.
    asked: bool,
    /// Earliest time of the next open.
    not_before: Instant,
}

impl Reopen {
    /// Records a change to the device.
    pub(super) fn changed(&mut self, now: Instant) {
        self.due.get_or_insert_with(|| now.max(self.not_before));
    }

    #[cfg(test)]
    fn is_due(&self, now: Instant) -> bool {
        self.due().is_some_and(|due| now >= due)
    }

    /// Records the start of an open.
    pub(super) fn begin(&mut self, now: Instant) {
        *self = Self { due: None, asked: true, not_before: now + PAUSE };
    }

    pub(super) fn answered(&mut self) {
        self.asked = false;
    }

    /// Time of the next open; None while one is in progress.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due.filter(|_| !self.asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_changes_causes_one_open_at_a_time() {
        let at = |ms| Instant::ZERO + Duration::from_millis(ms);
        let mut reopen = Reopen::default();
        assert!(!reopen.is_due(at(0)));
        assert_eq!(reopen.due(), None);
        (0..100).for_each(|_| reopen.changed(at(5)));
        assert!(reopen.is_due(at(5)));
        reopen.begin(at(5));
        reopen.changed(at(6));
        assert!(!reopen.is_due(at(500)), "one is under way");
        assert_eq!(reopen.due(), None);
        reopen.answered();
        assert!(!reopen.is_due(at(104)) && reopen.is_due(at(105)));
        assert_eq!(reopen.due(), Some(at(105)));
    }
}
