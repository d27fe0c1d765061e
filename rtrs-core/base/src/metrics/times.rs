//! IO times, counted in fixed buckets.

use serde::{Deserialize, Serialize};

/// Upper bounds of the buckets, in nanoseconds and, as text for the metrics, in seconds. The last
/// bucket has no bound.
pub(super) const BOUNDS: [(u64, &str); 21] = [
    (10_000, "1e-05"),
    (25_000, "2.5e-05"),
    (50_000, "5e-05"),
    (100_000, "0.0001"),
    (250_000, "0.00025"),
    (500_000, "0.0005"),
    (1_000_000, "0.001"),
    (2_500_000, "0.0025"),
    (5_000_000, "0.005"),
    (10_000_000, "0.01"),
    (25_000_000, "0.025"),
    (50_000_000, "0.05"),
    (100_000_000, "0.1"),
    (250_000_000, "0.25"),
    (500_000_000, "0.5"),
    (1_000_000_000, "1"),
    (2_500_000_000, "2.5"),
    (5_000_000_000, "5"),
    (10_000_000_000, "10"),
    (30_000_000_000, "30"),
    (60_000_000_000, "60"),
];

/// Number of buckets, including the one without a bound.
pub const TIME_BUCKETS: usize = BOUNDS.len() + 1;

/// First bucket that can contain a time, by the number of bits in the time.
const FIRST: [u8; 65] = {
    let (mut first, mut bits) = ([0; 65], 1);
    while bits <= 64 {
        first[bits] = first[bits - 1];
        while (first[bits] as usize) < BOUNDS.len()
            && BOUNDS[first[bits] as usize].0 < 1 << (bits - 1)
        {
            first[bits] += 1;
        }
        bits += 1;
    }
    first
};

/// Returns the bucket for a time: the first whose bound is not below it. At most one bound
/// separates times with the same number of bits.
pub fn bucket_of(nanos: u64) -> usize {
    let first = usize::from(FIRST[64 - nanos.leading_zeros() as usize]);
    match BOUNDS.get(first) {
        Some((bound, _)) => first + usize::from(*bound < nanos),
        None => first,
    }
}

/// Number of times in one bucket of a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// Lower bound in nanoseconds.
    pub from: u64,
    /// Upper bound in nanoseconds.
    pub to: u64,
    /// Number of times since the daemon started.
    pub count: u64,
}

/// Number of times in each bucket, and the sum of all times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Counts per bucket, not cumulative.
    pub buckets: [u64; TIME_BUCKETS],
    /// Sum in nanoseconds.
    pub nanos: u64,
}

impl Times {
    /// Records a time.
    pub fn record(&mut self, nanos: u64) {
        self.buckets[bucket_of(nanos)] += 1;
        self.nanos = self.nanos.saturating_add(nanos);
    }

    /// Adds the counts of another histogram.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += theirs;
        }
        self.nanos = self.nanos.saturating_add(other.nanos);
    }

    /// Returns the non-empty buckets in ascending order. The last bucket has no upper bound; its
    /// lower bound is returned for both.
    pub fn filled(&self) -> impl Iterator<Item = Bucket> {
        let bound = |at: usize| BOUNDS.get(at).map(|(nanos, _)| *nanos);
        let all = self.buckets.iter().enumerate().map(move |(at, count)| {
            let from = at.checked_sub(1).and_then(bound).unwrap_or(0);
            Bucket { from, to: bound(at).unwrap_or(from), count: *count }
        });
        all.filter(|bucket| bucket.count > 0)
    }

    /// Returns the number of recorded times.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_increase_and_match_their_labels() {
        assert!(BOUNDS.is_sorted_by(|a, b| a.0 < b.0));
        for (nanos, text) in BOUNDS {
            let seconds: f64 = text.parse().unwrap();
            assert!((seconds * 1e9 - nanos as f64).abs() < 1e-3, "{text}");
        }
    }

    #[test]
    fn bucket_lookup_matches_a_search() {
        let bounds = BOUNDS.iter().flat_map(|(bound, _)| [bound - 1, *bound, bound + 1]);
        let powers = (0..64).flat_map(|bit| [(1_u64 << bit) - 1, 1 << bit]);
        for nanos in bounds.chain(powers).chain([u64::MAX]) {
            let found = BOUNDS.partition_point(|(bound, _)| *bound < nanos);
            assert_eq!(bucket_of(nanos), found, "{nanos}");
        }
    }

    #[test]
    fn a_time_is_counted_in_the_smallest_bucket_that_fits() {
        for (nanos, bucket) in [
            (0, 0),
            (10_000, 0),
            (10_001, 1),
            (1_000_000_000, 15),
            (60_000_000_000, 20),
            (60_000_000_001, 21),
            (u64::MAX, 21),
        ] {
            assert_eq!(bucket_of(nanos), bucket, "{nanos}");
        }
        let mut times = Times::default();
        [5, 10_000, 20_000, u64::MAX].into_iter().for_each(|nanos| times.record(nanos));
        assert_eq!((times.buckets[0], times.buckets[1], times.buckets[21]), (2, 1, 1));
        assert_eq!((times.count(), times.nanos), (4, u64::MAX));
        let bucket = |from, to, count| Bucket { from, to, count };
        let last = 60_000_000_000;
        let filled = [bucket(0, 10_000, 2), bucket(10_000, 25_000, 1), bucket(last, last, 1)];
        assert_eq!(times.filled().collect::<Vec<_>>(), filled);
        let mut sum = times;
        sum.add(&times);
        assert_eq!(sum.count(), 8);
    }
}
