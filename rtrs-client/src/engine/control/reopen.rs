//! When a connected path opens a volume once more, because the server says that it has changed.
//!
//! A server may say so as often as it likes: each path asks at most once in [`PAUSE`], and keeps
//! nothing but that it has to ask.

use rtrs_core::time::{Duration, Instant};

/// Least time between two opens of a connected path.
pub(super) const PAUSE: Duration = Duration::from_millis(100);

/// What a path has still to ask.
#[derive(Debug, Default)]
pub(super) struct Reopen {
    /// When to open again.
    due: Option<Instant>,
    /// An open is under way.
    asked: bool,
    /// Not before that.
    not_before: Instant,
}

impl Reopen {
    /// The server says that the device has changed.
    pub(super) fn changed(&mut self, now: Instant) {
        self.due.get_or_insert_with(|| now.max(self.not_before));
    }

    #[cfg(test)]
    fn is_due(&self, now: Instant) -> bool {
        self.due().is_some_and(|due| now >= due)
    }

    /// An open is under way.
    pub(super) fn begin(&mut self, now: Instant) {
        *self = Self { due: None, asked: true, not_before: now + PAUSE };
    }

    /// The open was answered.
    pub(super) fn answered(&mut self) {
        self.asked = false;
    }

    /// When the next open is due, unless one is under way.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due.filter(|_| !self.asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_one_open_at_a_time_and_not_soon() {
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
