//! How long IO waits while no path carries it.

use rtrs_core::time::{Duration, Instant};

use crate::engine::session::NoPath;

/// Since when no path carries IO.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoPathClock {
    policy: NoPath,
    since: Option<Instant>,
    given_up: bool,
}

impl NoPathClock {
    pub(super) fn new(policy: NoPath) -> Self {
        Self { policy, since: None, given_up: false }
    }

    /// The last path is gone.
    pub(super) fn begin(&mut self, now: Instant) {
        // A path that came and went without carrying anything changes nothing.
        self.since.get_or_insert(now);
    }

    /// A path carries IO.
    pub(super) fn stop(&mut self) {
        *self = Self::new(self.policy);
    }

    /// When IO that waits for a path ends with an error.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let since = self.since.filter(|_| !self.given_up)?;
        match self.policy {
            NoPath::Queue => None,
            NoPath::QueueFor(time) => Some(since + time),
            NoPath::Fail => Some(since),
        }
    }

    /// True, once, when the deadline is over.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        if self.deadline().is_none_or(|at| now < at) {
            return false;
        }
        self.given_up = true;
        let waited: Duration = self.since.map_or(Duration::ZERO, |since| now.since(since));
        tracing::error!("no path for {} ms: IO ends with errors now", waited.as_millis());
        true
    }
}
