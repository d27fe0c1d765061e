//! Tracks changes to an export, which invalidate the extent lists that shards keep.
//!
//! A list that misses a write makes a backup skip the written data. A list is therefore kept only
//! if no change was in flight when its search began, and used only while no change has begun since:
//! at any moment it equals the result of a new search.
//!
//! A change first marks its shard, then reads the state. A search first sets `WATCHED` in the
//! state, then reads the marks of all shards. At least one of the two sees the other: either the
//! change finds the state watched and advances it, so that the list is invalid, or the search finds
//! the mark, or the change has ended and the search finds its data. Without lists, a change costs
//! one load and its shard's mark.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bit in the state: a list may exist that the next change must invalidate.
const WATCHED: u64 = 1;

/// Whether changes are in flight on a shard; on its own cache line.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Changing(AtomicBool);

/// State that an extent list belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp(u64);

/// Tracks changes to an export; shared by all shards.
#[derive(Debug)]
pub struct ChangeWatch {
    /// Advances with a change that begins while it is odd (`WATCHED`); never decreases.
    state: AtomicU64,
    changing: Box<[Changing]>,
}

impl ChangeWatch {
    /// Creates the watch for a server with this number of shards.
    pub(crate) fn new(shards: u16) -> Self {
        let changing = (0..shards).map(|_| Changing::default()).collect();
        Self { state: AtomicU64::new(0), changing }
    }

    /// Begins a search for extents. Returns None if a change is in flight, so that the list must
    /// not be kept.
    pub(super) fn begin_search(&self) -> Option<Stamp> {
        let stamp = Stamp(self.state.fetch_or(WATCHED, Ordering::SeqCst) | WATCHED);
        let is_quiet = self.changing.iter().all(|shard| !shard.0.load(Ordering::SeqCst));
        (is_quiet || rtrs_core::mutated!(ExtentsBesideChange)).then_some(stamp)
    }

    /// Whether no change has begun since the search with this stamp.
    pub(super) fn is_current(&self, stamp: Stamp) -> bool {
        self.state.load(Ordering::SeqCst) == stamp.0 || rtrs_core::mutated!(ExtentsKept)
    }

    /// Records whether a shard has changes in flight.
    fn mark(&self, shard: usize, is_changing: bool) {
        self.changing[shard].0.store(is_changing, Ordering::SeqCst);
    }

    /// Invalidates all lists, before a change can take effect.
    pub(crate) fn invalidate(&self) {
        if self.state.load(Ordering::SeqCst) & WATCHED != 0 {
            self.state.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// Changes in flight on one shard.
#[derive(Debug)]
pub(super) struct ShardChanges {
    count: u32,
    shard: usize,
}

impl ShardChanges {
    pub(super) fn new(shard: usize) -> Self {
        Self { count: 0, shard }
    }

    /// Begins a change, before it is submitted.
    pub(super) fn begin(&mut self, watch: &ChangeWatch) {
        if self.count == 0 {
            watch.mark(self.shard, true);
        }
        self.count += 1;
        watch.invalidate();
    }

    /// Ends a change that has taken effect or was not submitted.
    pub(super) fn end(&mut self, watch: &ChangeWatch) {
        debug_assert!(self.count > 0, "a change has ended twice");
        self.count = self.count.saturating_sub(1);
        if self.count == 0 {
            watch.mark(self.shard, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_kept_until_a_change_begins() {
        let watch = ChangeWatch::new(2);
        let mut shards = [ShardChanges::new(0), ShardChanges::new(1)];
        let first = watch.begin_search().expect("no change");
        let second = watch.begin_search().expect("no change");
        assert!(watch.is_current(first) && watch.is_current(second));
        shards[1].begin(&watch);
        assert!(!watch.is_current(first) && !watch.is_current(second));
        assert_eq!(watch.begin_search(), None, "a change is in flight");
        shards[1].begin(&watch);
        shards[1].end(&watch);
        assert_eq!(watch.begin_search(), None, "another one still is");
        shards[1].end(&watch);
        let third = watch.begin_search().expect("all have ended");
        assert!(watch.is_current(third) && !watch.is_current(first));
        for shard in &mut shards {
            shard.begin(&watch);
            shard.end(&watch);
            assert!(!watch.is_current(third));
        }
        assert!(watch.begin_search().is_some_and(|stamp| watch.is_current(stamp)));
    }
}
