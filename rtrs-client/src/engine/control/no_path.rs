//! Time limit for IO while no path carries it.

use rtrs_core::time::{Duration, Instant};

use crate::engine::session::NoPath;

/// Treatment of IO while no path carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoPathWait {
    /// IO waits until a path returns.
    Queues,
    /// IO waits for at most this much longer.
    QueuesFor(Duration),
    /// IO fails.
    Fails,
}

/// Clock that measures the time since any path last carried IO.
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

    /// Applies a different policy. The time without a path still counts from its start.
    pub(super) fn set_policy(&mut self, policy: NoPath) {
        if policy != self.policy {
            (self.policy, self.given_up) = (policy, false);
        }
    }

    /// Starts the clock when the last path ends.
    pub(super) fn begin(&mut self, now: Instant) {
        // A path that connected and ended without carrying IO does not restart the clock.
        self.since.get_or_insert(now);
    }

    /// Stops the clock when a path carries IO.
    pub(super) fn stop(&mut self) {
        *self = Self::new(self.policy);
    }

    /// Treatment of IO; None while a path carries it.
    pub(super) fn wait(&self, now: Instant) -> Option<NoPathWait> {
        self.since?;
        Some(match (self.given_up, self.deadline()) {
            (true, _) => NoPathWait::Fails,
            (false, Some(at)) => NoPathWait::QueuesFor(at.since(now)),
            (false, None) => NoPathWait::Queues,
        })
    }

    /// Time at which IO waiting for a path fails.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let since = self.since.filter(|_| !self.given_up)?;
        match self.policy {
            NoPath::Queue => None,
            NoPath::QueueFor(time) => Some(since + time),
            NoPath::Fail => Some(since),
        }
    }

    /// Returns true once, after the deadline has passed.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        if self.deadline().is_none_or(|at| now < at) {
            return false;
        }
        self.given_up = true;
        let waited: Duration = self.since.map_or(Duration::ZERO, |since| now.since(since));
        tracing::error!("no path for {} ms: IO fails now", waited.as_millis());
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn io_waits_until_the_time_is_over_and_then_fails() {
        let at = |millis| Instant::ZERO + Duration::from_millis(millis);
        let minute = Duration::from_secs(60);
        let mut clock = NoPathClock::new(NoPath::QueueFor(minute));
        assert_eq!(clock.wait(at(0)), None);
        clock.begin(at(1000));
        let left = NoPathWait::QueuesFor(Duration::from_secs(40));
        assert_eq!(clock.wait(at(21_000)), Some(left));
        assert!(clock.expire(at(61_000)));
        assert_eq!(clock.wait(at(62_000)), Some(NoPathWait::Fails));
        clock.stop();
        assert_eq!(clock.wait(at(63_000)), None);

        let mut clock = NoPathClock::new(NoPath::Queue);
        clock.begin(at(0));
        assert_eq!(clock.wait(at(90_000)), Some(NoPathWait::Queues));
    }
}
