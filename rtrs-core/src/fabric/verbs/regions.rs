//! Table of local keys and their access, which a shard checks before it posts.
//!
//! A device responds to a wrong local key by failing the queue pair; the contract requires that
//! such a request be refused instead. Registrations change the shared table, which is rare; each
//! shard keeps a sorted copy and checks a counter to see whether the copy is current, so a post
//! takes no lock.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::fabric::{Access, FabricError, Sge};

/// Domain number and local key, since keys are unique only per device.
type Key = (u64, u32);

#[derive(Clone, Copy, Debug)]
struct Entry {
    region: u64,
    local_write: bool,
}

/// All registrations of a process.
#[derive(Debug, Default)]
pub(super) struct Regions {
    version: AtomicU64,
    entries: Mutex<BTreeMap<Key, Entry>>,
}

impl Regions {
    pub(super) fn add(&self, pd: u64, lkey: u32, region: u64, access: Access) {
        let entry = Entry { region, local_write: access.local_write };
        let mut entries = self.entries.lock();
        entries.insert((pd, lkey), entry);
        self.version.fetch_add(1, Ordering::Release);
    }

    pub(super) fn remove(&self, pd: u64, lkey: u32) {
        let mut entries = self.entries.lock();
        entries.remove(&(pd, lkey));
        self.version.fetch_add(1, Ordering::Release);
    }
}

/// A shard's copy of the table.
#[derive(Debug, Default)]
pub(super) struct RegionCache {
    version: u64,
    sorted: Vec<(Key, Entry)>,
}

impl RegionCache {
    /// Updates the copy. Costs one atomic load if nothing has changed.
    pub(super) fn refresh(&mut self, regions: &Regions) {
        if regions.version.load(Ordering::Acquire) == self.version {
            return;
        }
        let entries = regions.entries.lock();
        self.version = regions.version.load(Ordering::Acquire);
        self.sorted.clear();
        self.sorted.extend(entries.iter().map(|(key, entry)| (*key, *entry)));
    }

    /// Checks that a request in this domain may use the local memory.
    pub(super) fn check(&self, pd: u64, sge: &Sge, write: bool) -> Result<(), FabricError> {
        let found = self.sorted.binary_search_by_key(&(pd, sge.lkey), |(key, _)| *key);
        let Ok(at) = found else { return Err(FabricError::LocalMemory) };
        let entry = self.sorted[at].1;
        if entry.region != sge.slice.region().id() || (write && !entry.local_write) {
            return Err(FabricError::LocalMemory);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Region;

    #[test]
    fn keys_are_valid_only_for_their_domain_region_and_access() {
        let (regions, mut cache) = (Regions::default(), RegionCache::default());
        let (one, two) = (Region::new(4096).unwrap(), Region::new(4096).unwrap());
        regions.add(1, 7, one.id(), Access::LOCAL);
        regions.add(2, 7, two.id(), Access::LOCAL_READ);
        cache.refresh(&regions);
        let sge = |region: &std::sync::Arc<Region>, lkey| Sge { slice: region.whole(), lkey };
        assert!(cache.check(1, &sge(&one, 7), true).is_ok());
        assert!(cache.check(2, &sge(&two, 7), false).is_ok());
        for (pd, bad, write) in [
            (1, sge(&two, 7), false),
            (2, sge(&one, 7), false),
            (2, sge(&two, 7), true),
            (1, sge(&one, 6), false),
            (3, sge(&one, 7), false),
        ] {
            let checked = cache.check(pd, &bad, write);
            assert!(matches!(checked, Err(FabricError::LocalMemory)), "{pd} {bad:?}");
        }
        regions.remove(1, 7);
        assert!(cache.check(1, &sge(&one, 7), true).is_ok(), "the copy is unchanged");
        cache.refresh(&regions);
        assert!(cache.check(1, &sge(&one, 7), true).is_err());
    }
}
