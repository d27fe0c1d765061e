//! Keys, registrations, windows and protection domains of a simulated node.
//!
//! Each node has one table of keys, as a device does, shared by its shards. Keys are drawn from the
//! seed; they are never zero, and unique while in use. Addresses given to peers are artificial,
//! because real ones would not be reproducible from the seed. All the checks of a real device are
//! done here: known key, same protection domain, bounds, access rights.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::fabric::{
    Access, FabricError, MemoryRegistration, ProtectionDomain, RemoteMem, Sge, Window,
};
use crate::ids::Rkey;
use crate::mem::{MemSlice, Region};
use crate::prng::Prng;

/// Kind of access that a peer requests with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    Read,
    Write,
}

/// Access granted by a remote key.
#[derive(Debug)]
struct Grant {
    pd: u64,
    addr: u64,
    slice: MemSlice,
    access: Access,
    window: bool,
}

/// Memory that a local key refers to.
#[derive(Debug)]
struct Local {
    pd: u64,
    region: u64,
    len: usize,
    access: Access,
}

/// All keys of one node.
#[derive(Debug)]
pub(super) struct Keys {
    prng: Prng,
    remote: BTreeMap<u32, Grant>,
    local: BTreeMap<u32, Local>,
    next_base: u64,
    next_pd: u64,
    bounces: bool,
}

impl Keys {
    pub(super) fn new(mut prng: Prng, bounces: bool) -> Self {
        let next_base = 0x7000_0000_0000 + (prng.below(1 << 20) << 12);
        let (remote, local) = (BTreeMap::new(), BTreeMap::new());
        Self { prng, remote, local, next_base, next_pd: 1, bounces }
    }

    /// Returns the memory in which data for this slice is placed.
    pub(super) fn reached(&self, slice: &MemSlice) -> MemSlice {
        let bounce = slice.bounce().filter(|_| self.bounces);
        bounce.unwrap_or_else(|| slice.clone())
    }

    fn fresh(&mut self) -> u32 {
        loop {
            let key = self.prng.next_u32();
            if key != 0 && !self.remote.contains_key(&key) && !self.local.contains_key(&key) {
                return key;
            }
        }
    }

    /// Returns the number of registered bytes; a region counts once for each of its registrations.
    pub(super) fn registered(&self) -> usize {
        self.local.values().map(|local| local.len).sum()
    }

    /// Validates a piece of local memory for use on a queue pair of `pd`.
    pub(super) fn check_local(&self, pd: u64, sge: &Sge, write: bool) -> bool {
        self.local.get(&sge.lkey).is_some_and(|local| {
            local.pd == pd
                && local.region == sge.slice.region().id()
                && (local.access.local_write || !write)
        })
    }

    /// Validates a peer's access to one or more bytes and returns the accessed memory.
    pub(super) fn check_remote(
        &self,
        pd: u64,
        remote: RemoteMem,
        len: usize,
        want: Want,
    ) -> Result<MemSlice, &'static str> {
        let grant = self.remote.get(&remote.rkey.0).ok_or("unknown key")?;
        if grant.pd != pd {
            return Err("key of another protection domain");
        }
        let granted = match want {
            Want::Read => grant.access.remote_read,
            Want::Write => grant.access.remote_write,
        };
        if !granted {
            return Err("access not granted");
        }
        remote
            .addr
            .checked_sub(grant.addr)
            .and_then(|offset| usize::try_from(offset).ok())
            .and_then(|offset| grant.slice.slice(offset, len))
            .ok_or("outside the bounds of the key")
    }

    /// Handles a peer's send with invalidate. Only windows can be revoked remotely.
    pub(super) fn invalidate(&mut self, pd: u64, key: Rkey) -> Result<(), &'static str> {
        match self.remote.get(&key.0) {
            Some(grant) if grant.pd == pd && grant.window => {
                self.remote.remove(&key.0);
                Ok(())
            }
            _ => Err("key cannot be invalidated"),
        }
    }
}

/// Protection domain of a simulated node.
#[derive(Debug)]
pub(super) struct SimPd {
    pub(super) id: u64,
    pub(super) keys: Arc<Mutex<Keys>>,
}

impl SimPd {
    pub(super) fn new(keys: Arc<Mutex<Keys>>) -> Self {
        let mut table = keys.lock();
        let id = table.next_pd;
        table.next_pd += 1;
        drop(table);
        Self { id, keys }
    }
}

impl ProtectionDomain for SimPd {
    fn register(
        &self,
        region: &Arc<Region>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegistration>, FabricError> {
        let mut keys = self.keys.lock();
        if keys.bounces && region.is_scattered() && access.remote_read {
            return Err(FabricError::Unsupported("reads of scattered memory by a peer"));
        }
        let (lkey, base) = (keys.fresh(), keys.next_base);
        let local = Local { pd: self.id, region: region.id(), len: region.len(), access };
        keys.local.insert(lkey, local);
        let gap = keys.prng.below(16) << 12;
        keys.next_base += region.len() as u64 + gap;
        let rkey = keys.fresh();
        if access.remote_read || access.remote_write {
            let slice = keys.reached(&region.whole());
            let grant = Grant { pd: self.id, addr: base, slice, access, window: false };
            keys.remote.insert(rkey, grant);
        }
        drop(keys);
        let keys = Arc::clone(&self.keys);
        Ok(Arc::new(SimRegistration { keys, lkey, rkey, base, region: Arc::clone(region) }))
    }

    fn window(&self, parent: &Arc<dyn MemoryRegistration>) -> Result<Arc<dyn Window>, FabricError> {
        let mut keys = self.keys.lock();
        if keys.local.get(&parent.lkey()).is_none_or(|local| local.pd != self.id) {
            return Err(FabricError::LocalMemory);
        }
        let key = AtomicU32::new(keys.fresh());
        drop(keys);
        Ok(Arc::new(SimWindow {
            pd: self.id,
            keys: Arc::clone(&self.keys),
            parent: Arc::clone(parent),
            key,
        }))
    }

    fn is_idle(&self) -> bool {
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[derive(Debug)]
struct SimRegistration {
    keys: Arc<Mutex<Keys>>,
    lkey: u32,
    rkey: u32,
    base: u64,
    region: Arc<Region>,
}

impl MemoryRegistration for SimRegistration {
    fn lkey(&self) -> u32 {
        self.lkey
    }

    fn rkey(&self) -> Rkey {
        Rkey(self.rkey)
    }

    fn base(&self) -> u64 {
        self.base
    }

    fn region(&self) -> &Arc<Region> {
        &self.region
    }

    fn collect(&self, slice: &MemSlice) {
        if self.keys.lock().bounces {
            slice.drain_bounce();
        }
    }
}

impl Drop for SimRegistration {
    fn drop(&mut self) {
        let mut keys = self.keys.lock();
        keys.local.remove(&self.lkey);
        keys.remote.remove(&self.rkey);
    }
}

/// Window over parts of a registration.
#[derive(Debug)]
pub(super) struct SimWindow {
    pd: u64,
    keys: Arc<Mutex<Keys>>,
    parent: Arc<dyn MemoryRegistration>,
    /// Last key drawn; valid while it is in the table.
    key: AtomicU32,
}

impl SimWindow {
    /// Returns true if a queue pair of `pd` may bind this window to `slice`.
    pub(super) fn covers(&self, pd: u64, slice: &MemSlice) -> bool {
        self.belongs(pd) && slice.region().id() == self.parent.region().id()
    }

    /// Returns true if the window belongs to this protection domain.
    pub(super) fn belongs(&self, pd: u64) -> bool {
        self.pd == pd
    }

    /// Draws the key for the next bind; it grants nothing yet.
    pub(super) fn draw_key(&self) -> Rkey {
        Rkey(self.keys.lock().fresh())
    }

    /// Makes `key` valid for `slice` and revokes the previous key.
    pub(super) fn put(&self, key: Rkey, slice: &MemSlice, access: Access) {
        let mut keys = self.keys.lock();
        keys.remote.remove(&self.key.load(Ordering::Relaxed));
        let addr = self.parent.base() + slice.offset() as u64;
        let slice = keys.reached(slice);
        let grant = Grant { pd: self.pd, addr, slice, access, window: true };
        keys.remote.insert(key.0, grant);
        self.key.store(key.0, Ordering::Relaxed);
    }

    /// Revokes the key.
    pub(super) fn take(&self) {
        self.keys.lock().remote.remove(&self.key.load(Ordering::Relaxed));
    }
}

impl Window for SimWindow {
    fn rkey(&self) -> Rkey {
        Rkey(self.key.load(Ordering::Relaxed))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for SimWindow {
    fn drop(&mut self) {
        self.take();
    }
}
