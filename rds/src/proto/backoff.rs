//! The times between attempts to connect, as the kernel has them: the first at once, then at random
//! within a time that doubles. Many peers of one node that returns do not come back as a herd.

use rtrs_core::prng::Prng;
use rtrs_core::time::Duration;

/// The waits before attempts.
#[derive(Debug)]
pub(super) struct Backoff {
    min: Duration,
    max: Duration,
    /// The longest next wait; `None` before the first attempt.
    next: Option<Duration>,
    prng: Prng,
}

impl Backoff {
    pub(super) fn new(min: Duration, max: Duration, prng: Prng) -> Self {
        Self { min, max: max.max(min), next: None, prng }
    }

    /// The wait before the next attempt: none, then at most `min`, twice that, up to `max`.
    pub(super) fn wait(&mut self) -> Duration {
        let Some(longest) = self.next else {
            self.next = Some(self.min);
            return Duration::ZERO;
        };
        self.next = Some((longest * 2).min(self.max));
        self.prng.duration(Duration::ZERO..=longest)
    }

    /// The same where nothing is to be tried at once.
    pub(super) fn wait_later(&mut self) -> Duration {
        if self.next.is_none() {
            self.next = Some(self.min);
        }
        self.wait()
    }

    /// A connection is up: the next attempt is a first one.
    pub(super) fn reset(&mut self) {
        self.next = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_attempt_is_at_once_and_later_ones_spread_out() {
        let (min, max) = (Duration::from_millis(1), Duration::from_secs(1));
        let mut backoff = Backoff::new(min, max, Prng::new(1));
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
}
