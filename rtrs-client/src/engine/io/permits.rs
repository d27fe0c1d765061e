//! A shard's permits: the server's chunks that only this shard may use.
//!
//! The session's permits are divided into one range per shard, so no permit ever moves between
//! shards and no lock is needed. The most recently returned permit is taken next, because its chunk
//! is most likely cached. A shard with enough permits reserves one for probes (`probe.rs`), so that
//! it can prove that a connection is alive even while the disk holds up every request.

use std::ops::Range;

use rtrs_core::ids::{CoreIndex, PermitId};

/// Minimum number of permits a shard must have to reserve one for probes.
const KEEPS_FROM: usize = 4;

/// Free permits of one shard.
#[derive(Debug)]
pub(crate) struct Permits {
    range: Range<u16>,
    /// Number of permits reserved for probes.
    kept: usize,
    free: Vec<PermitId>,
}

impl Permits {
    /// Creates the permits of `range`, all free.
    pub(crate) fn new(range: Range<u16>) -> Self {
        let free = range.clone().rev().map(PermitId).collect();
        let kept = usize::from(range.len() >= KEEPS_FROM);
        Self { range, kept, free }
    }

    pub(crate) fn take(&mut self) -> Option<PermitId> {
        if self.has_any() { self.free.pop() } else { None }
    }

    /// Takes a permit for a probe, even the reserved one.
    pub(crate) fn take_for_probe(&mut self) -> Option<PermitId> {
        self.free.pop()
    }

    /// Whether a permit is free for a request.
    pub(crate) fn has_any(&self) -> bool {
        self.free.len() > self.kept
    }

    /// Number of free permits for requests.
    pub(crate) fn for_requests(&self) -> usize {
        self.free.len().saturating_sub(self.kept)
    }

    pub(crate) fn give(&mut self, permit: PermitId) {
        assert!(self.range.contains(&permit.0), "permit {permit} belongs to another shard");
        assert!(self.free.len() < self.range.len(), "more permits returned than exist");
        debug_assert!(!self.free.contains(&permit), "permit {permit} returned twice");
        self.free.push(permit);
    }

    /// Number of free permits, including the one reserved for probes.
    pub(crate) fn available(&self) -> usize {
        self.free.len()
    }

    /// Range of the shard's permits; rows and keys are relative to its start.
    pub(crate) fn range(&self) -> Range<u16> {
        self.range.clone()
    }
}

/// Returns the range of the `queue_depth` permits that belongs to shard `shard` of `shards`. The
/// first `own` are for the control shard's own requests. Every shard gets at least one if enough
/// permits are left.
pub(crate) fn share(queue_depth: u16, own: u16, shards: u16, shard: CoreIndex) -> Range<u16> {
    let at = |index: u32| {
        let cut = u32::from(queue_depth.saturating_sub(own)) * index / u32::from(shards.max(1));
        u16::try_from(cut + u32::from(own)).unwrap_or(u16::MAX)
    };
    let first = if rtrs_core::mutated!(PermitsShared) { 0 } else { u32::from(shard.0) };
    at(first)..at(u32::from(shard.0) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_every_permit_once() {
        for (depth, shards) in [(512, 2), (512, 3), (5, 4), (5, 3), (3, 2), (2, 1), (65535, 64)] {
            let own = if depth > shards + 1 { 2 } else { 1 };
            let mut next = own;
            for shard in 0..shards {
                let range = share(depth, own, shards, CoreIndex(shard));
                assert_eq!(range.start, next);
                assert!(!range.is_empty(), "shard {shard} of {shards} has none of {depth}");
                next = range.end;
            }
            assert_eq!(next, depth);
        }
    }

    #[test]
    fn a_returned_permit_is_taken_next() {
        let mut permits = Permits::new(4..6);
        let (a, b) = (permits.take().unwrap(), permits.take().unwrap());
        assert_ne!(a, b);
        assert_eq!(permits.take(), None);
        permits.give(a);
        assert_eq!(permits.take(), Some(a));
    }

    #[test]
    fn one_permit_of_four_or_more_is_kept_for_probes() {
        for (range, most) in [(0..3, 3), (4..8, 3), (0..256, 255)] {
            let mut permits = Permits::new(range);
            let taken: Vec<_> = std::iter::from_fn(|| permits.take()).collect();
            assert_eq!((taken.len(), permits.has_any()), (most, false));
            let probe = permits.take_for_probe();
            assert_eq!(probe.is_some(), most != 3 || taken[0].0 == 4, "{probe:?}");
            permits.give(taken[0]);
            // The permit of the unanswered probe is missing; the next permit returned replaces it.
            assert_eq!(permits.has_any(), probe.is_none());
        }
    }

    #[test]
    #[should_panic(expected = "belongs to another shard")]
    fn returning_another_shards_permit_panics() {
        Permits::new(4..6).give(PermitId(9));
    }
}
