//! Table of steering tags (STags): maps keys to memory ranges, protection domains and access
//! rights.
//!
//! One table serves all shards of a process, because memory registered once is reachable through
//! queue pairs on any shard. Looking up a key takes no lock: an entry is a handful of atomics, and
//! copied values are used only while the entry's `placing` count is held, which blocks binds and
//! revokes. Registering and dropping regions take locks, but are rare. Binding or revoking a window
//! updates one entry and takes effect immediately.
//!
//! A key is a 24-bit index (drawn at random, RFC 5042 section 6.1.1) and an 8-bit part that changes
//! at each bind. 0 is never issued. Addresses are not real memory addresses: each registration has
//! its own origin, so a key used with the wrong address is refused.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::BuildHasher;
#[cfg(not(loom))]
use std::hash::RandomState;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};

use crate::fabric::{Access, FabricError, Sge};
use crate::ids::Rkey;
use crate::mem::{MemSlice, Region};
use crate::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};
use crate::sync::{Mutex, RwLock};

/// Entries per slab, and slabs per table: 2^24 keys in total. The loom model needs only a few.
const SLAB_LEN: usize = if cfg!(loom) { 4 } else { 4096 };
const SLABS: usize = if cfg!(loom) { 1 } else { 4096 };
/// Loom needs the same numbers in each run.
#[cfg(loom)]
type RandomState = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;

const LOCAL_WRITE: u16 = 1;
pub(super) const REMOTE_WRITE: u16 = 2;
pub(super) const REMOTE_READ: u16 = 4;
const WINDOW: u16 = 8;
const PARENT_WRITE: u16 = 16;

fn access_bits(access: Access) -> u16 {
    (if access.local_write { LOCAL_WRITE } else { 0 })
        | (if access.remote_write { REMOTE_WRITE } else { 0 })
        | (if access.remote_read { REMOTE_READ } else { 0 })
}

/// Reason why a peer's access is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StagFault {
    /// The key does not exist.
    Invalid,
    /// The range exceeds the key's range.
    Bounds,
    /// The key does not allow this access.
    Access,
    /// The key belongs to another protection domain.
    Foreign,
    /// Address plus length overflows.
    Wrap,
    /// The region's owner does not let the peer write there yet ([`Region::limit_writes`]).
    Early,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Entry>() == 64, "an entry fills a cache line");

/// Entry of one key. `state` holds a generation (high half) and the valid STag (low half, 0 when
/// dead); the other fields change only while the key is dead, `placing` is zero and `binding` is
/// held.
#[repr(align(64))]
#[derive(Default)]
struct Entry {
    state: AtomicU64,
    /// Address of the region's first byte.
    origin: AtomicU64,
    /// First byte of the region that the key covers.
    offset: AtomicU64,
    len: AtomicU64,
    region: AtomicU64,
    pd: AtomicU64,
    access: AtomicU16,
    /// A bind is in progress.
    binding: AtomicBool,
    /// Number of accesses in progress.
    placing: AtomicU32,
    /// The last valid STag, kept when the key is dead.
    last: AtomicU32,
}

impl Entry {
    /// Makes the key `stag` dead for new accesses; a later key of the entry stays valid. Returns
    /// true if no access is in progress.
    fn kill(&self, stag: u32) -> bool {
        let state = self.state.load(Ordering::SeqCst);
        if state as u32 == stag {
            let dead = ((state >> 32).wrapping_add(1) & u64::from(u32::MAX)) << 32;
            // A failure means that another shard has just killed it.
            let _ = self.state.compare_exchange(state, dead, Ordering::SeqCst, Ordering::SeqCst);
        }
        self.is_idle()
    }

    /// Returns true if no access is in progress. This is a read-modify-write like the one in
    /// [`StagTable::acquire`]: the second of the two sees everything done before the first, so an
    /// access is either counted here or finds the key dead.
    fn is_idle(&self) -> bool {
        self.placing.fetch_add(0, Ordering::SeqCst) == 0
    }

    fn publish(&self, stag: u32) {
        self.last.store(stag, Ordering::Relaxed);
        let generation = (self.state.load(Ordering::Relaxed) >> 32).wrapping_add(1) << 32;
        self.state.store(generation | u64::from(stag), Ordering::SeqCst);
    }
}

/// Range that a peer may access while the placing count is held.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placement {
    index: u32,
    /// Region ID.
    pub(super) region: u64,
    /// Offset of the first byte in the region.
    pub(super) offset: usize,
}

/// Holds the placing count of a key beyond a single call.
#[derive(Debug)]
pub(super) struct Placing {
    table: Arc<StagTable>,
    index: u32,
}

impl Drop for Placing {
    fn drop(&mut self) {
        self.table.release_index(self.index);
    }
}

struct Free {
    entries: VecDeque<u32>,
    slabs: Vec<u16>,
}

/// All keys of a process.
pub(super) struct StagTable {
    slabs: Box<[OnceLock<Box<[Entry]>>]>,
    free: Mutex<Free>,
    regions: RwLock<HashMap<u64, (Arc<Region>, usize)>>,
    /// Incremented whenever a region is dropped, so that caches release it.
    epoch: AtomicU64,
    random: RandomState,
    /// Not used for ordering, so no model has to interleave it.
    draws: AtomicUsize,
}

impl StagTable {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            slabs: (0..SLABS).map(|_| OnceLock::new()).collect(),
            free: Mutex::new(Free { entries: VecDeque::new(), slabs: (0..SLABS as u16).collect() }),
            regions: RwLock::new(HashMap::new()),
            epoch: AtomicU64::new(0),
            random: RandomState::new(),
            draws: AtomicUsize::new(0),
        })
    }

    /// Returns a number that peers cannot predict: SipHash of a counter, keyed by the system.
    fn draw(&self) -> u64 {
        self.random.hash_one(self.draws.fetch_add(1, Ordering::Relaxed))
    }

    fn entry(&self, index: u32) -> Option<&Entry> {
        let slab = self.slabs.get(index as usize / SLAB_LEN)?.get()?;
        slab.get(index as usize % SLAB_LEN)
    }

    fn alloc(&self) -> Result<u32, FabricError> {
        let free = &mut *self.free.lock();
        // An entry that an access still holds must keep its fields, so take a different entry.
        for _ in 0..free.entries.len() {
            let Some(index) = free.entries.pop_front() else { break };
            if self.entry(index).is_some_and(Entry::is_idle) {
                return Ok(index);
            }
            free.entries.push_back(index);
        }
        self.add_slab(free)?;
        free.entries.pop_back().ok_or(FabricError::NoKey)
    }

    /// Adds the entries of a new slab to the free list, in random order.
    fn add_slab(&self, free: &mut Free) -> Result<(), FabricError> {
        if free.slabs.is_empty() {
            return Err(FabricError::NoKey);
        }
        let pick = (self.draw() % free.slabs.len() as u64) as usize;
        let slab = free.slabs.swap_remove(pick);
        let _ =
            self.slabs[usize::from(slab)].set((0..SLAB_LEN).map(|_| Entry::default()).collect());
        let first = u32::from(slab) * SLAB_LEN as u32;
        // Index 0 with key 0 would be STag 0.
        let mut fresh: Vec<u32> =
            (first..first + SLAB_LEN as u32).filter(|index| *index != 0).collect();
        for i in (1..fresh.len()).rev() {
            fresh.swap(i, (self.draw() % (i as u64 + 1)) as usize);
        }
        free.entries.extend(fresh);
        Ok(())
    }

    fn give_back(&self, index: u32) {
        if let Some(entry) = self.entry(index) {
            entry.kill(entry.last.load(Ordering::Acquire));
        }
        self.free.lock().entries.push_back(index);
    }

    /// Returns the next STag of an entry: same index, different key.
    fn next_stag(&self, index: u32, last: u32) -> u32 {
        let step = (self.draw() % 255) as u32 + 1;
        index << 8 | (last.wrapping_add(step) & 0xff)
    }

    fn hold_region(&self, region: &Arc<Region>) {
        let mut regions = self.regions.write();
        regions.entry(region.id()).or_insert_with(|| (Arc::clone(region), 0)).1 += 1;
    }

    fn drop_region(&self, id: u64) {
        let mut regions = self.regions.write();
        if let Some(held) = regions.get_mut(&id) {
            held.1 -= 1;
            if held.1 == 0 {
                regions.remove(&id);
                self.epoch.fetch_add(1, Ordering::SeqCst);
            }
        }
    }

    /// Registers a whole region. Returns its STag and the address of its first byte.
    pub(super) fn register(
        &self,
        pd: u64,
        region: &Arc<Region>,
        access: Access,
    ) -> Result<(u32, u64), FabricError> {
        let index = self.alloc()?;
        let Some(entry) = self.entry(index) else { return Err(FabricError::NoKey) };
        self.hold_region(region);
        let page = (self.draw() & 0xf_ffff) << 12;
        let origin = (u64::from(index) << 32) + page + 4096;
        entry.origin.store(origin, Ordering::Relaxed);
        entry.offset.store(0, Ordering::Relaxed);
        entry.len.store(region.len() as u64, Ordering::Relaxed);
        entry.region.store(region.id(), Ordering::Relaxed);
        entry.pd.store(pd, Ordering::Relaxed);
        entry.access.store(access_bits(access), Ordering::Relaxed);
        let stag = self.next_stag(index, entry.last.load(Ordering::Relaxed));
        entry.publish(stag);
        Ok((stag, origin))
    }

    /// Ends a registration.
    pub(super) fn deregister(&self, stag: u32, region: u64) {
        self.give_back(stag >> 8);
        self.drop_region(region);
    }

    /// Creates an unbound window over the registration `parent`. Returns its index.
    pub(super) fn make_window(&self, pd: u64, parent: u32) -> Result<u32, FabricError> {
        let of = self.entry(parent >> 8).ok_or(FabricError::LocalMemory)?;
        let access = of.access.load(Ordering::Relaxed);
        let valid = of.state.load(Ordering::Acquire) as u32 == parent;
        if !valid || of.pd.load(Ordering::Relaxed) != pd || access & WINDOW != 0 {
            return Err(FabricError::LocalMemory);
        }
        let index = self.alloc()?;
        let Some(entry) = self.entry(index) else { return Err(FabricError::NoKey) };
        entry.origin.store(of.origin.load(Ordering::Relaxed), Ordering::Relaxed);
        entry.region.store(of.region.load(Ordering::Relaxed), Ordering::Relaxed);
        entry.pd.store(pd, Ordering::Relaxed);
        let parent_write = if access & LOCAL_WRITE != 0 { PARENT_WRITE } else { 0 };
        entry.access.store(WINDOW | parent_write, Ordering::Relaxed);
        let stag = self.next_stag(index, entry.last.load(Ordering::Relaxed));
        entry.last.store(stag, Ordering::Release);
        Ok(index)
    }

    pub(super) fn drop_window(&self, index: u32) {
        self.give_back(index);
    }

    /// Returns the current, or last, STag of an index.
    pub(super) fn last_stag(&self, index: u32) -> u32 {
        self.entry(index).map_or(0, |entry| entry.last.load(Ordering::Acquire))
    }

    fn window_entry(&self, pd: u64, rkey: Rkey) -> Result<&Entry, FabricError> {
        let entry = self.entry(rkey.0 >> 8).ok_or(FabricError::LocalMemory)?;
        let window = entry.access.load(Ordering::Relaxed) & WINDOW != 0;
        let ours = entry.pd.load(Ordering::Relaxed) == pd;
        if !window || !ours || entry.last.load(Ordering::Acquire) != rkey.0 {
            return Err(FabricError::LocalMemory);
        }
        Ok(entry)
    }

    /// Assigns a new range and a new key to the window whose current or last key is `rkey`.
    pub(super) fn bind(
        &self,
        pd: u64,
        rkey: Rkey,
        slice: &MemSlice,
        access: Access,
    ) -> Result<Rkey, FabricError> {
        let entry = self.window_entry(pd, rkey)?;
        let kept = entry.access.load(Ordering::Relaxed) & (WINDOW | PARENT_WRITE);
        if entry.region.load(Ordering::Relaxed) != slice.region().id()
            || (access.remote_write && kept & PARENT_WRITE == 0)
        {
            return Err(FabricError::LocalMemory);
        }
        if entry.binding.swap(true, Ordering::SeqCst) {
            return Err(FabricError::QpState);
        }
        // Another bind may have replaced the key since it was validated.
        if entry.last.load(Ordering::Relaxed) != rkey.0 || !entry.kill(rkey.0) {
            entry.binding.store(false, Ordering::SeqCst);
            return Err(FabricError::QpState);
        }
        entry.offset.store(slice.offset() as u64, Ordering::Relaxed);
        entry.len.store(slice.len() as u64, Ordering::Relaxed);
        entry.access.store(kept | access_bits(access), Ordering::Relaxed);
        let stag = self.next_stag(rkey.0 >> 8, rkey.0);
        entry.publish(stag);
        entry.binding.store(false, Ordering::SeqCst);
        Ok(Rkey(stag))
    }

    /// Revokes a window's key. Returns `QpState` while an access through it is in progress; the key
    /// is dead for new accesses in any case, and a later retry succeeds.
    pub(super) fn revoke(&self, pd: u64, rkey: Rkey) -> Result<Rkey, FabricError> {
        let entry = self.window_entry(pd, rkey)?;
        if entry.kill(rkey.0) { Ok(rkey) } else { Err(FabricError::QpState) }
    }

    /// Handles a peer's Send with Invalidate (RFC 5040 section 5.3). Only windows can be
    /// invalidated. Invalidating a dead window of this domain succeeds.
    pub(super) fn invalidate(&self, pd: u64, stag: u32) -> Result<(), StagFault> {
        match self.window_entry(pd, Rkey(stag)) {
            Ok(entry) => {
                entry.kill(stag);
                Ok(())
            }
            Err(_) => Err(StagFault::Invalid),
        }
    }

    /// Validates a peer's access to `len` bytes (one or more) at `addr`, and starts it. The caller
    /// ends it with [`StagTable::release`] or turns it into a [`Placing`].
    pub(super) fn acquire(
        &self,
        pd: u64,
        stag: u32,
        addr: u64,
        len: usize,
        need: u16,
    ) -> Result<Placement, StagFault> {
        let index = stag >> 8;
        let Some(entry) = self.entry(index) else { return Err(StagFault::Invalid) };
        // Validate once without the count, so that wrong keys never delay an owner's revoke.
        if stag == 0 || entry.state.load(Ordering::Relaxed) as u32 != stag {
            return Err(StagFault::Invalid);
        }
        if entry.pd.load(Ordering::Relaxed) != pd {
            return Err(StagFault::Foreign);
        }
        entry.placing.fetch_add(1, Ordering::SeqCst);
        let validated = if entry.state.load(Ordering::SeqCst) as u32 != stag {
            Err(StagFault::Invalid)
        } else {
            Self::validate(entry, pd, addr, len, need)
        };
        match validated {
            Ok(offset) => {
                Ok(Placement { index, region: entry.region.load(Ordering::Relaxed), offset })
            }
            Err(fault) => {
                entry.placing.fetch_sub(1, Ordering::SeqCst);
                Err(fault)
            }
        }
    }

    fn validate(
        entry: &Entry,
        pd: u64,
        addr: u64,
        len: usize,
        need: u16,
    ) -> Result<usize, StagFault> {
        if entry.pd.load(Ordering::Relaxed) != pd {
            return Err(StagFault::Foreign);
        }
        let end = addr.checked_add(len as u64).ok_or(StagFault::Wrap)?;
        let origin = entry.origin.load(Ordering::Relaxed);
        let offset = entry.offset.load(Ordering::Relaxed);
        let first = origin + offset;
        if addr < first || end > first + entry.len.load(Ordering::Relaxed) {
            return Err(StagFault::Bounds);
        }
        if entry.access.load(Ordering::Relaxed) & need != need {
            return Err(StagFault::Access);
        }
        Ok((addr - origin) as usize)
    }

    fn release_index(&self, index: u32) {
        if let Some(entry) = self.entry(index) {
            entry.placing.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Ends an access.
    pub(super) fn release(&self, placement: Placement) {
        self.release_index(placement.index);
    }

    /// Extends an access for as long as the guard lives.
    pub(super) fn keep(self: &Arc<Self>, placement: Placement) -> Placing {
        Placing { table: Arc::clone(self), index: placement.index }
    }

    /// Validates a work request's local memory. Returns the address that a peer would use for it.
    pub(super) fn check_local(&self, pd: u64, sge: &Sge, write: bool) -> Option<u64> {
        let entry = self.entry(sge.lkey >> 8)?;
        if sge.lkey == 0 || entry.state.load(Ordering::Acquire) as u32 != sge.lkey {
            return None;
        }
        let access = entry.access.load(Ordering::Relaxed);
        let good = entry.pd.load(Ordering::Relaxed) == pd
            && entry.region.load(Ordering::Relaxed) == sge.slice.region().id()
            && access & WINDOW == 0
            && (!write || access & LOCAL_WRITE != 0);
        good.then(|| entry.origin.load(Ordering::Relaxed) + sge.slice.offset() as u64)
    }
}

impl fmt::Debug for StagTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slabs = self.slabs.iter().filter(|slab| slab.get().is_some()).count();
        f.debug_struct("StagTable").field("slabs", &slabs).finish_non_exhaustive()
    }
}

/// A shard's own cache of the regions, so that lookups take no lock.
#[derive(Debug)]
pub(super) struct RegionCache {
    slots: Vec<Option<Arc<Region>>>,
    epoch: u64,
}

impl RegionCache {
    const SLOTS: usize = 256;

    pub(super) fn new() -> Self {
        Self { slots: vec![None; Self::SLOTS], epoch: 0 }
    }

    /// Drops all regions if one has been dropped from the table since the last call.
    pub(super) fn refresh(&mut self, table: &StagTable) {
        let epoch = table.epoch.load(Ordering::Acquire);
        if epoch != self.epoch {
            self.epoch = epoch;
            self.slots.fill(None);
        }
    }

    /// Returns the region with this ID, if it is registered.
    pub(super) fn get(&mut self, table: &StagTable, id: u64) -> Option<&Arc<Region>> {
        self.refresh(table);
        let slot = &mut self.slots[id as usize % Self::SLOTS];
        if slot.as_ref().is_none_or(|region| region.id() != id) {
            *slot = Some(Arc::clone(&table.regions.read().get(&id)?.0));
        }
        slot.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RW: u16 = REMOTE_WRITE;

    /// Numbers that peers can drive up must have more than 32 bits.
    #[test]
    fn region_and_domain_numbers_do_not_wrap() {
        let table = StagTable::new();
        let victim = Region::new(8192).unwrap();
        let (foreign, base) = table.register(1, &victim, Access::REMOTE_WRITE).unwrap();
        // Continue after 2^32 regions and domains.
        let domain = 1 + (1 << 32);
        crate::mem::skip_ids_to(victim.id() + (1 << 32));
        let own = Region::new(8192).unwrap();
        assert!(own.id() > u64::from(u32::MAX));
        let (stag, own_base) = table.register(domain, &own, Access::REMOTE_WRITE).unwrap();
        let place = table.acquire(domain, stag, own_base, 16, RW).unwrap();
        let mut cache = RegionCache::new();
        assert!(Arc::ptr_eq(cache.get(&table, place.region).unwrap(), &own));
        let reached = table.acquire(domain, foreign, base, 16, RW);
        assert_eq!(reached.unwrap_err(), StagFault::Foreign);
        let sge = Sge { slice: own.whole(), lkey: foreign };
        assert_eq!(table.check_local(domain, &sge, false), None);
    }

    #[test]
    fn a_key_grants_access_only_to_its_range() {
        let table = StagTable::new();
        let region = Region::new(8192).unwrap();
        let (stag, base) = table.register(1, &region, Access::REMOTE_WRITE).unwrap();
        assert_ne!(stag, 0);
        let good = table.acquire(1, stag, base + 100, 50, RW).unwrap();
        assert_eq!((good.region, good.offset), (region.id(), 100));
        table.release(good);
        let fault = |pd, stag, addr, len, need| table.acquire(pd, stag, addr, len, need).err();
        assert_eq!(fault(1, stag, base + 8192, 1, RW), Some(StagFault::Bounds));
        assert_eq!(fault(1, stag, base - 1, 1, RW), Some(StagFault::Bounds));
        assert_eq!(fault(1, stag, base + 8000, 193, RW), Some(StagFault::Bounds));
        assert_eq!(fault(1, stag, u64::MAX, 2, RW), Some(StagFault::Wrap));
        assert_eq!(fault(1, stag, base, 1, REMOTE_READ), Some(StagFault::Access));
        assert_eq!(fault(2, stag, base, 1, RW), Some(StagFault::Foreign));
        assert_eq!(fault(1, stag ^ 1, base, 1, RW), Some(StagFault::Invalid));
        assert_eq!(fault(1, stag ^ 0x100, base, 1, RW), Some(StagFault::Invalid));
        assert_eq!(fault(1, 0, base, 1, RW), Some(StagFault::Invalid));
        table.deregister(stag, region.id());
        assert_eq!(fault(1, stag, base, 1, RW), Some(StagFault::Invalid));
        assert!(table.regions.read().is_empty());
    }

    #[test]
    fn a_bind_or_revoke_invalidates_the_window_key() {
        let table = StagTable::new();
        let region = Region::new(8192).unwrap();
        let (parent, base) = table.register(1, &region, Access::LOCAL).unwrap();
        let index = table.make_window(1, parent).unwrap();
        let mut key = Rkey(table.last_stag(index));
        assert!(table.acquire(1, key.0, base, 1, RW).is_err(), "unbound");
        let part = region.slice(4096, 512).unwrap();
        for _ in 0..600 {
            let next = table.bind(1, key, &part, Access::REMOTE_WRITE).unwrap();
            assert_ne!(next, key);
            assert!(table.acquire(1, key.0, base + 4096, 512, RW).is_err());
            let held = table.acquire(1, next.0, base + 4096, 512, RW).unwrap();
            assert!(matches!(table.revoke(1, next), Err(FabricError::QpState)));
            assert!(
                table.acquire(1, next.0, base + 4096, 1, RW).is_err(),
                "a dead key allows no new access"
            );
            table.release(held);
            assert_eq!(table.revoke(1, next).unwrap(), next);
            key = next;
        }
        key = table.bind(1, key, &part, Access::REMOTE_WRITE).unwrap();
        assert!(table.acquire(1, key.0, base + 4095, 2, RW).is_err());
        assert!(table.invalidate(2, key.0).is_err());
        table.invalidate(1, key.0).unwrap();
        table.invalidate(1, key.0).unwrap();
        assert!(table.invalidate(1, parent).is_err(), "registrations are not invalidated");
        assert!(table.acquire(1, key.0, base + 4096, 1, RW).is_err());
        let other = Region::new(4096).unwrap();
        let wrong = table.bind(1, key, &other.whole(), Access::LOCAL);
        assert!(matches!(wrong, Err(FabricError::LocalMemory)));
    }

    #[test]
    fn keys_and_addresses_are_spread_out() {
        let table = StagTable::new();
        let region = Region::new(4096).unwrap();
        let mut seen = std::collections::HashSet::new();
        let mut bases = std::collections::HashSet::new();
        for _ in 0..5000 {
            let (stag, base) = table.register(1, &region, Access::LOCAL).unwrap();
            assert!(seen.insert(stag >> 8) && bases.insert(base));
        }
        let mut list: Vec<u32> = seen.into_iter().collect();
        list.sort_unstable();
        assert!(list.windows(2).any(|w| w[1] - w[0] > 4096), "two slabs far apart");
    }

    #[test]
    fn an_entry_held_by_an_access_is_not_reused() {
        let table = StagTable::new();
        let region = Region::new(4096).unwrap();
        let register = || table.register(1, &region, Access::REMOTE_WRITE).unwrap();
        let (stag, base) = register();
        let held = table.acquire(1, stag, base, 1, RW).unwrap();
        table.deregister(stag, region.id());
        for _ in 0..2 * SLAB_LEN {
            assert_ne!(register().0 >> 8, stag >> 8);
        }
        table.release(held);
        let used = (0..2 * SLAB_LEN).any(|_| register().0 >> 8 == stag >> 8);
        assert!(used, "the entry is free again");
    }

    #[test]
    fn a_window_held_by_an_access_is_not_bound() {
        let table = StagTable::new();
        let region = Region::new(8192).unwrap();
        let (parent, base) = table.register(1, &region, Access::LOCAL).unwrap();
        let index = table.make_window(1, parent).unwrap();
        let part = region.slice(0, 512).unwrap();
        let bind = |key| table.bind(1, key, &part, Access::REMOTE_WRITE);
        let key = bind(Rkey(table.last_stag(index))).unwrap();
        let held = table.acquire(1, key.0, base, 1, RW).unwrap();
        for _ in 0..2 {
            assert!(matches!(bind(key), Err(FabricError::QpState)));
            assert!(
                table.acquire(1, key.0, base, 1, RW).is_err(),
                "a dead key allows no new access"
            );
        }
        table.release(held);
        let next = bind(key).unwrap();
        assert_ne!(next, key);
        table.release(table.acquire(1, next.0, base, 1, RW).unwrap());
    }

    #[test]
    fn a_cache_releases_deregistered_regions() {
        let table = StagTable::new();
        let region = Region::new(4096).unwrap();
        let (stag, _) = table.register(1, &region, Access::LOCAL).unwrap();
        let mut cache = RegionCache::new();
        assert!(cache.get(&table, region.id()).is_some());
        assert_eq!(Arc::strong_count(&region), 3);
        table.deregister(stag, region.id());
        cache.refresh(&table);
        assert_eq!(Arc::strong_count(&region), 1);
        assert!(cache.get(&table, region.id()).is_none());
    }

    #[test]
    fn a_revoke_waits_for_accesses_on_other_cores() {
        // After a successful revoke the owner writes to the memory; a peer's shard must no longer
        // write to it.
        let table = StagTable::new();
        let region = Region::new(4096).unwrap();
        let (parent, base) = table.register(1, &region, Access::LOCAL).unwrap();
        let index = table.make_window(1, parent).unwrap();
        let stop = Arc::new(AtomicU32::new(0));
        let writer = {
            let (table, region, stop) = (Arc::clone(&table), Arc::clone(&region), stop.clone());
            std::thread::spawn(move || {
                let mut hits = 0u32;
                while stop.load(Ordering::Relaxed) == 0 {
                    let key = table.last_stag(index);
                    if let Ok(held) = table.acquire(1, key, base, 8, RW) {
                        region.copy_in(held.offset, b"peer");
                        table.release(held);
                        hits += 1;
                    }
                }
                hits
            })
        };
        let mut key = Rkey(table.last_stag(index));
        for _ in 0..20_000 {
            match table.bind(1, key, &region.whole(), Access::REMOTE_WRITE) {
                Ok(next) => key = next,
                Err(FabricError::QpState) => continue,
                Err(e) => panic!("{e}"),
            }
            if table.revoke(1, key).is_ok() {
                region.copy_in(0, b"mine");
                std::hint::spin_loop();
                let mut seen = [0; 4];
                region.copy_out(0, &mut seen);
                assert_eq!(&seen, b"mine", "a write landed after a revoke");
            }
        }
        stop.store(1, Ordering::Relaxed);
        writer.join().unwrap();
    }
}

#[cfg(all(test, loom))]
#[path = "tests/stag_model.rs"]
mod loom_model;
