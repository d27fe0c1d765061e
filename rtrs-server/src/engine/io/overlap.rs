//! Orphaned writes: what the disk still works on for paths that are closed.
//!
//! Nobody learns how such a request ends, and its client may take it for failed by now: a write
//! that lands late must not land over a newer one. So when a shard closes its part of a path, it
//! enters what the device may still change there. It does so before it tells the control shard
//! that it has stopped serving the path: before a FENCE for it is answered, and before the client
//! can connect it again. A later change to the same bytes, on any shard, path or session, waits
//! until the orphaned write has ended (`pipeline.rs`). Everything else goes on: reads, changes
//! elsewhere, other exports. An orphaned write gives its permit back, since this table protects
//! more exactly.
//!
//! One table per export, shared by all shards and sessions. Usual IO reads one number of it.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use rtrs_core::ids::{PermitId, SessionId};

use crate::path::key::PathKey;

/// A request of a closed path, and the bytes that it may still change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrphanedWrite {
    /// Its session.
    pub session: SessionId,
    /// Its path.
    pub path: PathKey,
    /// The permit that it had.
    pub permit: PermitId,
    /// What it may change.
    pub bytes: Range<u64>,
}

/// The orphaned writes of an export.
#[derive(Debug, Default)]
pub struct OrphanedWrites {
    /// How many are in the list.
    count: AtomicUsize,
    list: Mutex<Vec<OrphanedWrite>>,
}

impl OrphanedWrites {
    /// How many there are.
    pub fn len(&self) -> usize {
        // Acquire pairs with the releases below: what an orphaned write that has ended did is done.
        self.count.load(Ordering::Acquire)
    }

    /// True when there is none, as usual.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True when there is one like this.
    pub fn any(&self, is: impl FnMut(&OrphanedWrite) -> bool) -> bool {
        !self.is_empty() && self.list.lock().iter().any(is)
    }

    /// True when one may still change some of these bytes.
    pub fn touch(&self, bytes: &Range<u64>) -> bool {
        self.any(|write| write.touches(bytes))
    }

    /// A path is closed while this request of it runs.
    pub fn enter(&self, write: OrphanedWrite) {
        let mut list = self.list.lock();
        list.push(write);
        self.count.store(list.len(), Ordering::Release);
    }

    /// It has ended. Nothing happens if it was not entered.
    pub fn leave(&self, path: PathKey, permit: PermitId) {
        let mut list = self.list.lock();
        list.retain(|write| (write.path, write.permit) != (path, permit));
        self.count.store(list.len(), Ordering::Release);
    }
}

impl OrphanedWrite {
    /// True when it may still change some of these bytes.
    pub fn touches(&self, bytes: &Range<u64>) -> bool {
        if rtrs_core::mutated!(DeferredByStart) {
            return self.bytes.start == bytes.start;
        }
        self.bytes.start < bytes.end && bytes.start < self.bytes.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orphaned_writes_block_what_overlaps_them() {
        let orphaned = OrphanedWrites::default();
        assert!(orphaned.is_empty() && !orphaned.touch(&(0..u64::MAX)));
        let write = |path, bytes| {
            let (session, permit) = (SessionId([1; 16]), PermitId(6));
            OrphanedWrite { session, path: PathKey(path), permit, bytes }
        };
        orphaned.enter(write(1, 4096..8192));
        orphaned.enter(write(2, 0..512));
        assert_eq!(orphaned.len(), 2);
        for (bytes, meets) in [
            (0..512, true),
            (511..512, true),
            (512..4096, false),
            (512..4097, true),
            (8191..8192, true),
            (8192..9000, false),
            (0..u64::MAX, true),
        ] {
            assert_eq!(orphaned.touch(&bytes), meets, "{bytes:?}");
        }
        // Of another path, or another permit: they stay.
        orphaned.leave(PathKey(1), PermitId(7));
        orphaned.leave(PathKey(3), PermitId(6));
        assert_eq!(orphaned.len(), 2);
        orphaned.leave(PathKey(1), PermitId(6));
        assert!(orphaned.any(|write| write.path == PathKey(2)));
        assert!(!orphaned.any(|write| write.path == PathKey(1)));
        assert!(!orphaned.touch(&(4096..8192)) && orphaned.touch(&(0..1)));
        orphaned.leave(PathKey(2), PermitId(6));
        assert!(orphaned.is_empty() && !orphaned.touch(&(0..u64::MAX)));
    }
}
