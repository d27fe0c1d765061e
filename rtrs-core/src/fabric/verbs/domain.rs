//! Protection domains, registrations and windows behind the fabric's traits.

use std::any::Any;
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::hint;
use super::reaper::Reaper;
use super::regions::Regions;
use super::sys::{Context, Mr, Mw, Pd};
use crate::fabric::{Access, FabricError, MemoryRegistration, ProtectionDomain, Window};
use crate::ids::Rkey;
use crate::mem::{MemSlice, Region};

/// Protection domain on a device.
#[derive(Debug)]
pub(super) struct VerbsPd {
    pub(super) pd: Arc<Pd>,
    /// Number of the domain, unique within the process.
    pub(super) id: u64,
    regions: Arc<Regions>,
    reaper: Arc<Reaper>,
    /// Registrations in the domain, by local key, where windows look up their parents.
    registered: Mutex<Vec<(u32, Weak<Mr>, Access)>>,
}

#[derive(Debug)]
struct VerbsMr {
    mr: Arc<Mr>,
    pd: u64,
    regions: Arc<Regions>,
}

/// Memory window and its permitted accesses.
#[derive(Debug)]
pub(super) struct VerbsWindow {
    pub(super) mw: Arc<Mw>,
    /// Whether the registration allows local writes.
    local_write: bool,
    /// Dropped after the window.
    _parent: Arc<dyn MemoryRegistration>,
}

impl VerbsPd {
    pub(super) fn new(
        context: &Arc<Context>,
        id: u64,
        regions: &Arc<Regions>,
        reaper: &Arc<Reaper>,
    ) -> Result<Self, FabricError> {
        let pd = Pd::new(context).map_err(|e| {
            FabricError::system(
                format!("cannot create a protection domain on {}", context.name()),
                e,
            )
        })?;
        Ok(Self {
            pd: Arc::new(pd),
            id,
            regions: Arc::clone(regions),
            reaper: Arc::clone(reaper),
            registered: Mutex::new(Vec::new()),
        })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        self.pd.context()
    }

    fn find(&self, parent: &Arc<dyn MemoryRegistration>) -> Option<(Arc<Mr>, Access)> {
        let registered = self.registered.lock();
        registered.iter().filter(|(lkey, _, _)| *lkey == parent.lkey()).find_map(|entry| {
            let mr = entry.1.upgrade()?;
            Arc::ptr_eq(mr.region(), parent.region()).then_some((mr, entry.2))
        })
    }
}

impl ProtectionDomain for VerbsPd {
    fn register(
        &self,
        region: &Arc<Region>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegistration>, FabricError> {
        if region.is_scattered() && access.remote_read {
            // Nothing would fill the bounce memory before a peer reads it.
            return Err(FabricError::Unsupported("reads of scattered memory by a peer"));
        }
        let start = Instant::now();
        let mr = Mr::new(&self.pd, region, access)
            .map_err(|e| hint::registration(self.context().name(), region.len(), e))?;
        tracing::debug!(bytes = region.len(), took = ?start.elapsed(), "registered memory");
        let mr = Arc::new(mr);
        let mut registered = self.registered.lock();
        registered.retain(|(_, mr, _)| mr.strong_count() > 0);
        registered.push((mr.lkey(), Arc::downgrade(&mr), access));
        drop(registered);
        self.regions.add(self.id, mr.lkey(), region.id(), access);
        Ok(Arc::new(VerbsMr { mr, pd: self.id, regions: Arc::clone(&self.regions) }))
    }

    fn window(&self, parent: &Arc<dyn MemoryRegistration>) -> Result<Arc<dyn Window>, FabricError> {
        let name = self.context().name();
        if !self.has_windows() {
            return Err(hint::no_windows(name));
        }
        let (mr, access) = self.find(parent).ok_or(FabricError::LocalMemory)?;
        let mw = Mw::new(&mr).map_err(|e| {
            FabricError::system(format!("cannot allocate another memory window on {name}"), e)
        })?;
        let (mw, local_write) = (Arc::new(mw), access.local_write);
        Ok(Arc::new(VerbsWindow { mw, local_write, _parent: Arc::clone(parent) }))
    }

    fn has_windows(&self) -> bool {
        self.context().has_windows()
    }

    fn is_idle(&self) -> bool {
        self.pd.queue_pairs() == 0
    }

    fn is_present(&self) -> bool {
        !self.context().is_removed()
    }

    fn is_removable(&self) -> bool {
        true
    }

    fn free_later(&self, what: Box<dyn Any + Send>) {
        self.reaper.take(move || {
            let start = Instant::now();
            drop(what);
            tracing::debug!(took = ?start.elapsed(), "freed memory or keys");
        });
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl MemoryRegistration for VerbsMr {
    fn lkey(&self) -> u32 {
        self.mr.lkey()
    }

    fn rkey(&self) -> Rkey {
        Rkey(self.mr.rkey())
    }

    fn base(&self) -> u64 {
        self.mr.base()
    }

    fn region(&self) -> &Arc<Region> {
        self.mr.region()
    }

    fn collect(&self, slice: &MemSlice) {
        slice.drain_bounce();
    }
}

impl Drop for VerbsMr {
    fn drop(&mut self) {
        // Remove the key first: once the device has freed it, the device may issue it again.
        self.regions.remove(self.pd, self.mr.lkey());
    }
}

impl VerbsWindow {
    /// Checks that the window may be bound to `slice` on a queue pair of `pd`.
    pub(super) fn check(
        &self,
        pd: &Arc<Pd>,
        slice: Option<(&MemSlice, Access)>,
    ) -> Result<(), FabricError> {
        let good = Arc::ptr_eq(self.mw.pd(), pd)
            && slice.is_none_or(|(slice, access)| {
                slice.region().id() == self.mw.mr().region().id()
                    && (self.local_write || !access.remote_write)
            });
        if good { Ok(()) } else { Err(FabricError::LocalMemory) }
    }
}

impl Window for VerbsWindow {
    fn rkey(&self) -> Rkey {
        Rkey(self.mw.key())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
