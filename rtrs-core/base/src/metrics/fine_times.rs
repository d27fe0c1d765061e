//! IO times in buckets that are fine enough for percentiles.
//!
//! Recording a time takes a handful of instructions and touches one bucket and the sum, so that
//! several can be recorded per IO. The width of a bucket is at most 1/16 of the times in it.

use super::times::{Bucket, Times, bucket_of};

/// Number of bits of a time, in microseconds, that distinguish the buckets within a power of two.
const FINE_BITS: u32 = 4;
const FINE: usize = 1 << FINE_BITS;
/// Time in microseconds (134 s) from which on all times share the last bucket.
const END_US: u64 = 1 << 27;
const BUCKETS: usize = (END_US.ilog2() - FINE_BITS + 1) as usize * FINE;

/// Number of times in each bucket, their sum, and the longest time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FineTimes {
    buckets: [u64; BUCKETS],
    nanos: u64,
    max: u64,
}

impl Default for FineTimes {
    fn default() -> Self {
        Self { buckets: [0; BUCKETS], nanos: 0, max: 0 }
    }
}

impl FineTimes {
    /// Records a time.
    pub fn record(&mut self, nanos: u64) {
        self.buckets[fine_bucket_of(nanos / 1000)] += 1;
        self.nanos = self.nanos.saturating_add(nanos);
        self.max = self.max.max(nanos);
    }

    /// Adds the counts of another histogram.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += theirs;
        }
        self.nanos = self.nanos.saturating_add(other.nanos);
        self.max = self.max.max(other.max);
    }

    /// Returns the number of recorded times.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Returns the longest time, in microseconds.
    #[must_use]
    pub fn max_us(&self) -> u64 {
        self.max / 1000
    }

    /// Returns the time in microseconds that the given share of all times does not exceed, to
    /// within a bucket; 0 if no times were recorded.
    #[must_use]
    pub fn quantile_us(&self, share: f64) -> u64 {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
        let wanted = (self.count() as f64 * share).ceil() as u64;
        let mut seen = 0;
        for (at, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted.max(1) {
                return highest_us(at).min(self.max_us());
            }
        }
        0
    }

    /// Returns the non-empty buckets in ascending order. The last bucket counts as its lower bound.
    pub fn filled(&self) -> impl Iterator<Item = Bucket> {
        let all = self.buckets.iter().enumerate().map(|(at, count)| {
            let from = at.checked_sub(1).map_or(0, |before| highest_us(before) + 1) * 1000;
            let to = if at + 1 == BUCKETS { from } else { highest_us(at) * 1000 + 999 };
            Bucket { from, to, count: *count }
        });
        all.filter(|bucket| bucket.count > 0)
    }

    /// Converts to the coarse buckets of a histogram in the text format. A time is counted in the
    /// first coarse bucket that contains its whole fine bucket.
    #[must_use]
    pub fn times(&self) -> Times {
        let mut times = Times { nanos: self.nanos, ..Times::default() };
        for (at, count) in self.buckets.iter().enumerate().filter(|(_, count)| **count > 0) {
            let last = at + 1 == BUCKETS;
            let highest = if last { u64::MAX } else { highest_us(at) * 1000 + 999 };
            times.buckets[bucket_of(highest)] += count;
        }
        times
    }
}

const fn fine_bucket_of(us: u64) -> usize {
    if us < FINE as u64 {
        return us as usize;
    }
    let us = if us < END_US { us } else { END_US - 1 };
    let shift = us.ilog2() - FINE_BITS;
    (shift as usize) * FINE + (us >> shift) as usize
}

/// Returns the longest time that a bucket other than the last can contain, in microseconds.
const fn highest_us(bucket: usize) -> u64 {
    if bucket < FINE {
        return bucket as u64;
    }
    let shift = bucket / FINE - 1;
    ((FINE + bucket % FINE + 1) << shift) as u64 - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_ordered_and_narrow() {
        assert_eq!((fine_bucket_of(0), fine_bucket_of(END_US - 1)), (0, BUCKETS - 1));
        assert_eq!(fine_bucket_of(u64::MAX), BUCKETS - 1);
        for bucket in 0..BUCKETS - 1 {
            let highest = highest_us(bucket);
            assert_eq!(fine_bucket_of(highest), bucket);
            assert_eq!(fine_bucket_of(highest + 1), bucket + 1);
            let width = highest_us(bucket + 1) - highest;
            assert!(width <= 1.max(highest / FINE as u64 + 1), "bucket {bucket}: {width}");
        }
    }

    #[test]
    fn percentiles_are_within_a_bucket() {
        let mut times = FineTimes::default();
        assert_eq!((times.quantile_us(0.5), times.max_us(), times.count()), (0, 0, 0));
        (1..=1000).for_each(|us| times.record(us * 1000 + 7));
        for (share, exact) in [(0.0, 1), (0.001, 1), (0.5, 500), (0.99, 990), (1.0, 1000)] {
            let found = times.quantile_us(share);
            assert!((exact..=exact + exact / 16).contains(&found), "{share}: {found}");
        }
        assert_eq!((times.quantile_us(1.0), times.max_us()), (1000, 1000), "never above the max");
        let mut sum = times.clone();
        sum.add(&times);
        assert_eq!((sum.count(), sum.quantile_us(0.5)), (2000, times.quantile_us(0.5)));
    }

    #[test]
    fn coarse_buckets_lose_nothing() {
        let mut times = FineTimes::default();
        let all = [0, 9_999, 10_000, 999_000, 1_000_000, 70_000_000_000, u64::MAX];
        all.into_iter().for_each(|nanos| times.record(nanos));
        let coarse = times.times();
        assert_eq!((coarse.count(), coarse.nanos), (7, u64::MAX));
        // 10 us is in the bucket up to 11 us, so it counts as more than 10 us.
        assert_eq!(coarse.buckets[..3], [2, 1, 0]);
        assert_eq!(coarse.buckets[21], 2, "beyond all bounds");
    }
}
