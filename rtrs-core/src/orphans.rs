//! Orphaned writes: writes that may still change a device although their requester is gone.
//!
//! A later request for the same bytes must not run before such a write has ended, or it would be
//! undone, or contradicted, by an older one. The server keeps a table of what the paths that it
//! closed left at an export, a client's front end one of what NBD connections that ended left in
//! the session. All shards share a table. In normal times it is empty, and a request pays one load
//! of the count; the list behind it has a lock.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// The orphaned writes of a device, each known by a key of the owner's choice.
pub struct Orphans<K> {
    /// How many are in the list.
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
    /// How many there are.
    pub fn len(&self) -> usize {
        // Acquire pairs with the releases below: what a write that has ended did is done.
        self.count.load(Ordering::Acquire)
    }

    /// True when there is none, as usual.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True when there is one like this.
    pub fn any(&self, is: impl Fn(&K, &Range<u64>) -> bool) -> bool {
        !self.is_empty() && self.list.lock().iter().any(|(key, bytes)| is(key, bytes))
    }

    /// True when one may still change some of these bytes.
    pub fn touch(&self, bytes: &Range<u64>) -> bool {
        self.any(|_, own| own.start < bytes.end && bytes.start < own.end)
    }

    /// Nobody waits for this write any more, and it may still change these bytes.
    pub fn enter(&self, key: K, bytes: Range<u64>) {
        let mut list = self.list.lock();
        list.push((key, bytes));
        self.count.store(list.len(), Ordering::Release);
    }

    /// Those have ended. Nothing happens if there is none like this.
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
    fn orphaned_writes_touch_what_overlaps() {
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
