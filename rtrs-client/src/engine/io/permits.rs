//! A shard's permits: the chunks of the server that this shard alone may use.
//!
//! The session's permits are cut into one range per shard, so no permit ever moves between shards
//! and none is locked. The last one given back is the next one taken: its chunk is the warmest.

use std::ops::Range;

use rtrs_core::ids::{CoreIndex, PermitId};

/// The free permits of one shard.
#[derive(Debug)]
pub(crate) struct Permits {
    range: Range<u16>,
    free: Vec<PermitId>,
}

impl Permits {
    /// All permits of `range`, free.
    pub(crate) fn new(range: Range<u16>) -> Self {
        let free = range.clone().rev().map(PermitId).collect();
        Self { range, free }
    }

    /// Takes a permit.
    pub(crate) fn take(&mut self) -> Option<PermitId> {
        self.free.pop()
    }

    /// Gives a permit back.
    pub(crate) fn give(&mut self, permit: PermitId) {
        assert!(self.range.contains(&permit.0), "permit {permit} is not of this shard");
        assert!(self.free.len() < self.range.len(), "more permits than there are");
        debug_assert!(!self.free.contains(&permit), "permit {permit} given back twice");
        self.free.push(permit);
    }

    /// Free permits.
    pub(crate) fn available(&self) -> usize {
        self.free.len()
    }

    /// First permit of the range; rows and keys are kept relative to it.
    pub(crate) fn range(&self) -> Range<u16> {
        self.range.clone()
    }
}

/// The part of `queue_depth` permits that belongs to `shard` of `shards`. The first `own` are the
/// control shard's own, for control requests. Every shard gets at least one when there are more
/// others than shards.
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
    fn permits_come_home() {
        let mut permits = Permits::new(4..6);
        let (a, b) = (permits.take().unwrap(), permits.take().unwrap());
        assert_ne!(a, b);
        assert_eq!(permits.take(), None);
        permits.give(a);
        assert_eq!(permits.take(), Some(a));
    }

    #[test]
    #[should_panic(expected = "not of this shard")]
    fn a_foreign_permit_is_our_own_fault() {
        Permits::new(4..6).give(PermitId(9));
    }
}
