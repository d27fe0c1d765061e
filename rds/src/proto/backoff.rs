//! Delays between attempts to connect, as in the kernel: the first attempt is immediate, the next
//! ones after a random delay whose upper bound doubles. Peers of a node that returns do not all
//! reconnect at the same time.

use rtrs_base::prng::Prng;
use rtrs_base::time::Duration;

/// Delays before attempts to connect.
#[derive(Debug)]
pub(super) struct Backoff {
    min: Duration,
    max: Duration,
    /// Maximum of the next delay; `None` before the first attempt.
    next: Option<Duration>,
    prng: Prng,
}

impl Backoff {
    pub(super) fn new(min: Duration, max: Duration, prng: Prng) -> Self {
        Self { min, max: max.max(min), next: None, prng }
    }

    /// Returns the delay before the next attempt: none at first, then at most `min`, twice that,
    /// and so on up to `max`.
    pub(super) fn wait(&mut self) -> Duration {
        let Some(longest) = self.next else {
            self.next = Some(self.min);
            return Duration::ZERO;
        };
        self.next = Some((longest * 2).min(self.max));
        self.prng.duration(Duration::ZERO..=longest)
    }

    /// Same as [`Self::wait`], without the immediate first attempt.
    pub(super) fn wait_later(&mut self) -> Duration {
        if self.next.is_none() {
            self.next = Some(self.min);
        }
        self.wait()
    }

    /// Returns the maximum delay.
    pub(super) fn longest(&self) -> Duration {
        self.max
    }

    /// Resets the delays after a connection has been of use.
    pub(super) fn reset(&mut self) {
        self.next = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_attempt_is_immediate_and_later_ones_spread_out() {
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
