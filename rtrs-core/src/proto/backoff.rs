//! Exponential backoff with jitter, for reconnects.
//!
//! The wait before attempt n (from 0) is drawn uniformly between half and all of `min * 2^n`,
//! capped at `max`. The clients of a restarted server thus spread out their reconnects.

use crate::time::Duration;

/// The state of an exponential backoff.
#[derive(Clone, Debug)]
pub struct Backoff {
    min: Duration,
    max: Duration,
    next: Duration,
    state: u64,
}

impl Backoff {
    /// Creates a backoff whose bound grows from `min` to `max`, with jitter from `seed`.
    pub fn new(min: Duration, max: Duration, seed: u64) -> Self {
        let max = max.max(min);
        Self { min, max, next: min, state: seed | 1 }
    }

    /// Changes the bounds, starting with the next wait.
    pub fn set_bounds(&mut self, min: Duration, max: Duration) {
        let max = max.max(min);
        (self.min, self.max, self.next) = (min, max, self.next.clamp(min, max));
    }

    /// Returns the wait before the next attempt. The first wait is at most `min`.
    pub fn wait(&mut self) -> Duration {
        let whole = u64::try_from(self.next.as_nanos()).unwrap_or(u64::MAX);
        self.next = (self.next * 2).min(self.max);
        // xorshift64 is enough to spread out the waits.
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        Duration::from_nanos(whole / 2 + self.state % (whole / 2 + 1))
    }

    /// Starts over with short waits after a successful attempt.
    pub fn reset(&mut self) {
        self.next = self.min;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_maximum_and_restart() {
        let (min, max) = (Duration::from_millis(100), Duration::from_secs(1));
        let mut backoff = Backoff::new(min, max, 7);
        let mut bound = min;
        for _ in 0..10 {
            let wait = backoff.wait();
            assert!(wait >= bound / 2 && wait <= bound, "{wait:?} for {bound:?}");
            bound = (bound * 2).min(max);
        }
        backoff.reset();
        assert!(backoff.wait() <= min);
    }

    /// Models a thousand clients of one restarted server with very similar seeds.
    #[test]
    fn delays_spread_over_the_upper_half() {
        let min = Duration::from_secs(1);
        for attempt in 0..4 {
            let mut tenths = [0; 10];
            for seed in 0..1000_u64 {
                // `rtrs-client` draws seeds at random and mixes in the path number.
                let mut backoff = Backoff::new(min, min, seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                let waits: Vec<Duration> = (0..=attempt).map(|_| backoff.wait()).collect();
                let over = (waits[attempt] - min / 2).as_nanos();
                tenths[usize::try_from(over / 50_000_001).unwrap()] += 1;
            }
            assert!(tenths.iter().all(|&n| (60..=140).contains(&n)), "{attempt}: {tenths:?}");
        }
    }

    #[test]
    fn delays_differ_by_seed() {
        let min = Duration::from_secs(1);
        let mut a = Backoff::new(min, min, 1);
        let mut b = Backoff::new(min, min, 99);
        assert!((0..8).any(|_| a.wait() != b.wait()));
    }
}
