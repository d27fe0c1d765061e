//! Delays between attempts to connect, as in the kernel: the first attempt is immediate, and each
//! later one follows a random delay whose upper bound doubles. The peers of a node that returns
//! therefore do not all reconnect at the same time.

use rtrs_base::prng::Prng;
use rtrs_base::time::Duration;

use super::tuning::Tuning;

/// Delays before attempts to connect.
#[derive(Debug)]
pub(super) struct Backoff {
    tuning: Tuning,
    /// Maximum of the next delay; `None` before the first attempt.
    next: Option<Duration>,
    prng: Prng,
}

impl Backoff {
    pub(super) fn new(tuning: Tuning, prng: Prng) -> Self {
        Self { tuning, next: None, prng }
    }

    /// Returns the delay before the next attempt: none at first, then at most the minimum, twice
    /// that, and so on up to the maximum.
    pub(super) fn wait(&mut self) -> Duration {
        let Some(longest) = self.next else {
            self.next = Some(self.tuning.reconnect_min());
            return Duration::ZERO;
        };
        // The maximum may have changed.
        let longest = longest.min(self.longest());
        self.next = Some((longest * 2).min(self.longest()));
        self.prng.duration(Duration::ZERO..=longest)
    }

    /// Same as [`Self::wait`], without the immediate first attempt.
    pub(super) fn wait_later(&mut self) -> Duration {
        if self.next.is_none() {
            self.next = Some(self.tuning.reconnect_min());
        }
        self.wait()
    }

    /// Returns the maximum delay.
    pub(super) fn longest(&self) -> Duration {
        self.tuning.reconnect_max()
    }

    /// Resets the delays after a useful connection.
    pub(super) fn reset(&mut self) {
        self.next = None;
    }
}

#[cfg(test)]
mod tests {
    use super::super::tuning::Tunable;
    use super::*;

    #[test]
    fn the_first_attempt_is_immediate_and_later_ones_spread_out() {
        let (min, max) = (Duration::from_millis(1), Duration::from_secs(1));
        let mut backoff = Backoff::new(Tuning::default(), Prng::new(1));
        for _ in 0..2 {
            assert_eq!(backoff.wait(), Duration::ZERO);
            let mut bound = min;
            for _ in 0..12 {
                assert!(backoff.wait() <= bound);
                bound = (bound * 2).min(max);
            }
            assert_eq!(bound, max);
            backoff.reset();
        }
        assert!(!backoff.wait_later().is_zero());
        assert!((0..20).any(|_| backoff.wait() > max / 2), "up to the longest wait");
    }

    #[test]
    fn changed_limits_apply_from_the_next_delay() {
        let tuning = Tuning::default();
        let mut backoff = Backoff::new(tuning.clone(), Prng::new(1));
        for _ in 0..20 {
            backoff.wait();
        }
        tuning.set(Tunable::ReconnectMax, 5_000_000);
        assert!((0..20).all(|_| backoff.wait() <= Duration::from_millis(5)));
        tuning.set(Tunable::ReconnectMax, 60_000_000_000);
        assert!((0..40).any(|_| backoff.wait() > Duration::from_secs(5)));
    }
}
