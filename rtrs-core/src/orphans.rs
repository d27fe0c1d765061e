//! Orphaned writes: writes that may still change a device although their requester is gone.
//!
//! A later request for the same bytes must not run before such a write has ended, because the older
//! write could undo or contradict it. The server keeps a table of the writes that closed paths left
//! behind at an export; a client's front end keeps a table of those that ended NBD connections left
//! behind in the session. All shards share a table. It is normally empty, in which case a request
//! costs one load of the count; a lock protects the list.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// Orphaned writes of a device, each identified by a key that the owner chooses.
pub struct Orphans<K> {
    /// Number of entries in the list.
    count: AtomicUsize,
    list: Mutex<Vec<(K, Range<u64>)>>,
}

impl<K> Default for Orphans<K> {
    fn default() -> Self {
        Self { count: AtomicUsize::new(0), list: Mutex::default() }
    }
}

impl<K> fmt::Debug for Orphans<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Orphans").field("count", &self.len()).finish_non_exhaustive()
    }
}

impl<K> Orphans<K> {
    /// Returns the number of orphaned writes.
    pub fn len(&self) -> usize {
        // Acquire pairs with the releases below: the effects of an ended write are visible.
        self.count.load(Ordering::Acquire)
    }

    /// Returns true if there are no orphaned writes, which is the normal case.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true if there is a matching write.
    pub fn any(&self, is: impl Fn(&K, &Range<u64>) -> bool) -> bool {
        !self.is_empty() && self.list.lock().iter().any(|(key, bytes)| is(key, bytes))
    }

    /// Returns true if an orphaned write may still change some of these bytes.
    pub fn touch(&self, bytes: &Range<u64>) -> bool {
        self.any(|_, own| own.start < bytes.end && bytes.start < own.end)
    }

    /// Adds a write that may still change these bytes but has no requester anymore.
    pub fn enter(&self, key: K, bytes: Range<u64>) {
        let mut list = self.list.lock();
        list.push((key, bytes));
        self.count.store(list.len(), Ordering::Release);
    }

    /// Removes the matching writes, which have ended. Does nothing if there are none.
    pub fn leave(&self, is: impl Fn(&K) -> bool) {
        let mut list = self.list.lock();
        list.retain(|(key, _)| !is(key));
        self.count.store(list.len(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orphaned_writes_match_overlapping_ranges() {
        let orphans = Orphans::default();
        assert!(orphans.is_empty() && !orphans.touch(&(0..u64::MAX)));
        orphans.enter(1, 4096..8192);
        orphans.enter(2, 0..512);
        assert_eq!(orphans.len(), 2);
        for (bytes, touched) in [
            (0..512, true),
            (511..512, true),
            (512..4096, false),
            (512..4097, true),
            (8191..8192, true),
            (8192..9000, false),
            (0..u64::MAX, true),
        ] {
            assert_eq!(orphans.touch(&bytes), touched, "{bytes:?}");
        }
        orphans.leave(|key| *key == 3);
        assert_eq!(orphans.len(), 2);
        orphans.leave(|key| *key == 1);
        assert!(orphans.any(|key, _| *key == 2) && !orphans.any(|key, _| *key == 1));
        assert!(!orphans.touch(&(4096..8192)) && orphans.touch(&(0..1)));
        orphans.leave(|key| *key == 2);
        assert!(orphans.is_empty() && !orphans.touch(&(0..u64::MAX)));
    }
}
