//! Seeded random number generator for the simulator and for tests: the same seed gives the same
//! numbers on every machine, and there is no global state.
//!
//! xoshiro256** (Blackman and Vigna, public domain), with its state filled by splitmix64. Not for
//! secrets.

use std::ops::RangeInclusive;

use crate::time::Duration;

/// Probability of `num` in `den`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ratio {
    /// Numerator.
    pub num: u32,
    /// Denominator; zero means never.
    pub den: u32,
}

impl Ratio {
    /// Never.
    pub const ZERO: Self = Self { num: 0, den: 1 };
    /// Always.
    pub const ONE: Self = Self { num: 1, den: 1 };

    /// Creates the probability `num` in `den`.
    pub const fn new(num: u32, den: u32) -> Self {
        Self { num, den }
    }
}

/// Random number generator.
#[derive(Clone, Debug)]
pub struct Prng {
    state: [u64; 4],
}

impl Prng {
    /// Creates a generator whose output is determined by `seed`.
    pub fn new(seed: u64) -> Self {
        let mut x = seed;
        let mut next = || {
            x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = x;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        };
        Self { state: [next(), next(), next(), next()] }
    }

    /// Returns 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// Returns 32 random bits.
    #[allow(clippy::cast_possible_truncation, reason = "the upper half is wanted")]
    pub fn next_u32(&mut self) -> u32 {
        (self.next_u64() >> 32) as u32
    }

    /// Returns a number below `bound`, or 0 if `bound` is 0.
    #[allow(clippy::cast_possible_truncation, reason = "the upper half of the product is wanted")]
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns a number in the range, including both ends, or its start if the range is empty.
    pub fn range(&mut self, range: RangeInclusive<u64>) -> u64 {
        let (start, end) = range.into_inner();
        match end.saturating_sub(start).checked_add(1) {
            Some(count) => start + self.below(count),
            None => self.next_u64(),
        }
    }

    /// Returns an index into a collection of `len` entries, or 0 if there are none.
    #[allow(clippy::cast_possible_truncation, reason = "below a usize")]
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// Returns a duration in the range, including both ends.
    pub fn duration(&mut self, range: RangeInclusive<Duration>) -> Duration {
        let nanos = |d: &Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(self.range(nanos(range.start())..=nanos(range.end())))
    }

    /// Returns true with the given probability.
    pub fn chance(&mut self, ratio: Ratio) -> bool {
        self.below(u64::from(ratio.den)) < u64::from(ratio.num) && ratio.den != 0
    }

    /// Fills a buffer with random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let random = self.next_u64().to_le_bytes();
            chunk.copy_from_slice(&random[..chunk.len()]);
        }
    }

    /// Creates a separate generator, so that its use does not change the sequence of this one.
    pub fn fork(&mut self) -> Self {
        Self::new(self.next_u64())
    }
}

#[cfg(test)]
mod tests {
    use super::{Prng, Ratio};

    #[test]
    fn the_same_seed_yields_the_same_numbers() {
        let draw = |seed| {
            let mut prng = Prng::new(seed);
            (0..100).map(|_| prng.next_u64()).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn the_sequence_is_known() {
        // splitmix64 of seed 0 starts with e220a8397b1dcdaf 6e789e6aa1b965f4 06c45d188009454f; the
        // first output scrambles the second word.
        let expected = 0x6e78_9e6a_a1b9_65f4_u64.wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        assert_eq!(Prng::new(0).next_u64(), expected);
    }

    #[test]
    fn numbers_stay_within_bounds() {
        let mut prng = Prng::new(1);
        let mut seen = [0_u32; 6];
        for _ in 0..6000 {
            seen[prng.index(6)] += 1;
            assert!((3..=5).contains(&prng.range(3..=5)));
        }
        assert!(seen.iter().all(|&n| (800..1200).contains(&n)), "{seen:?}");
        assert_eq!(prng.range(4..=4), 4);
        assert_eq!(prng.below(0), 0);
        prng.range(0..=u64::MAX);
        let hits = (0..10_000).filter(|_| prng.chance(Ratio::new(1, 4))).count();
        assert!((2300..2700).contains(&hits), "{hits}");
        assert!(!prng.chance(Ratio::ZERO) && prng.chance(Ratio::ONE));
        assert!(!prng.chance(Ratio::new(1, 0)));
    }
}
