//! Exports: names and the block sources behind them.
//!
//! Owns [`Export`] and [`ExportTable`], which all shards share. Only OPEN messages refer to an
//! export by name; all other code uses its [`ExportIndex`]. Names match exactly, except that
//! leading slashes are ignored, because kernel clients write the name as part of a device path.
//!
//! The operator and a [`Finder`] (`--search-path`) add and remove exports while the server runs, so
//! the table consists of slots. A slot is not reused while any shard still has the device of its
//! previous export open, so an index is always unambiguous.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use rtrs_core::block::{BlockSource, Geometry, TargetName};
use rtrs_core::identity::ExportId;
use rtrs_core::ranges::Ranges;

use crate::access_list::AccessPolicy;
use crate::backend::FileId;
use crate::engine::epoch::SyncEpoch;
use crate::engine::finder::{Examiner, Finder};
use crate::engine::io::change_watch::ChangeWatch;
use crate::engine::io::overlap::OrphanedWrites;
use crate::engine::io::throttle::Throttle;
use crate::engine::saved_writers::SavedWriters;
use crate::engine::sync_failures::SyncFailures;
use crate::segments::Segments;
use crate::stats::ExportCounters;

/// Maximum number of exports found under the search path that may be open at once.
pub const FOUND_MAX: usize = 64;

/// Maximum number of exports on a server, including those about to be released.
pub const EXPORTS_MAX: usize = u16::MAX as usize;

/// Index of a slot in the [`ExportTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExportIndex(pub u16);

impl ExportIndex {
    /// Returns the number as a `usize`.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A name and the block source behind it.
#[derive(Debug)]
pub struct Export {
    /// Name that clients open, 1 to 254 bytes.
    pub name: String,
    /// Description of the backing file or device for display.
    pub backing: String,
    /// Block source that serves the export.
    pub source: Arc<dyn BlockSource>,
    /// File behind the source, if it has one.
    pub(crate) file: Option<FileId>,
    /// Whether to refuse all changes, even if the source is writable.
    pub read_only: bool,
    /// Whether to refuse opens for migration, which allow a second client to write.
    pub deny_migration: bool,
    /// Identity of the disk or file as reported to clients; None if unknown.
    pub id: Option<ExportId>,
    /// Counts failed syncs.
    pub epoch: Arc<SyncEpoch>,
    /// Last writers, including those of earlier processes.
    pub(crate) writers: SavedWriters,
    /// Log lines about failed syncs.
    pub(crate) sync_failures: SyncFailures,
    /// IO counters for all users.
    pub counters: Arc<ExportCounters>,
    /// Rate limits.
    pub throttle: Throttle,
    /// Set while the operator forbids opens for writing.
    pub frozen: AtomicBool,
    /// Size last announced to users.
    pub known_size: AtomicU64,
    /// Set once the file has been deleted and no other file is at its path.
    pub(crate) orphaned: AtomicBool,
    /// Whether the last examination of the target did not finish in time.
    pub(crate) unexamined: AtomicBool,
    /// Ranges for changes that must be serialized; created when a shard opens the export.
    pub(crate) turns: OnceLock<Arc<Ranges>>,
    /// Watch for changes that invalidate known extents; created when a shard opens the export.
    pub(crate) changes: OnceLock<Arc<ChangeWatch>>,
}

impl Export {
    /// Creates a writable export without an ID, whose epoch is not saved.
    pub fn new(name: impl Into<String>, source: Arc<dyn BlockSource>) -> Self {
        let size = source.geometry().size;
        Self {
            name: name.into(),
            backing: String::new(),
            source,
            file: None,
            read_only: false,
            deny_migration: false,
            id: None,
            epoch: Arc::default(),
            writers: SavedWriters::default(),
            sync_failures: SyncFailures::default(),
            counters: Arc::default(),
            throttle: Throttle::default(),
            frozen: AtomicBool::new(false),
            known_size: AtomicU64::new(size),
            orphaned: AtomicBool::new(false),
            unexamined: AtomicBool::new(false),
            turns: OnceLock::new(),
            changes: OnceLock::new(),
        }
    }

    /// Returns the ranges for changes that must be serialized, on a server with `shards` shards.
    pub(crate) fn turns(&self, shards: u16) -> Arc<Ranges> {
        Arc::clone(self.turns.get_or_init(|| Arc::new(Ranges::new(usize::from(shards)))))
    }

    /// Returns the watch for changes, on a server with `shards` shards.
    pub(crate) fn changes(&self, shards: u16) -> Arc<ChangeWatch> {
        Arc::clone(self.changes.get_or_init(|| Arc::new(ChangeWatch::new(shards))))
    }

    /// Makes shards look up their known extents again.
    pub(crate) fn forget_extents(&self) {
        if let Some(changes) = self.changes.get() {
            changes.invalidate();
        }
    }

    /// Size, limits and capabilities as reported to clients.
    pub fn geometry(&self) -> Geometry {
        let mut geometry = self.source.geometry();
        geometry.read_only |= self.read_only || self.frozen.load(Ordering::Relaxed);
        geometry
    }

    /// Records the current size. Returns whether it changed since the last call.
    pub fn note_size(&self) -> bool {
        let size = self.source.geometry().size;
        self.known_size.swap(size, Ordering::Relaxed) != size
    }

    /// Records whether the file has been deleted and no other file is at its path.
    pub(crate) fn note_orphan(&self) {
        let is_missing = self.source.target_name() == Some(TargetName::Missing);
        if is_missing && self.source.is_deleted() {
            self.orphaned.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the file has been deleted and no other file had taken its path by then.
    pub(crate) fn is_orphan(&self) -> bool {
        self.orphaned.load(Ordering::Relaxed) && self.source.is_deleted()
    }

    /// Records whether an examination of the target finished in time.
    pub(crate) fn note_examined(&self, ended: bool) {
        self.unexamined.store(!ended, Ordering::Relaxed);
    }

    /// Whether the last examination of the target did not finish in time, so its state is unknown.
    pub(crate) fn is_unexamined(&self) -> bool {
        self.unexamined.load(Ordering::Relaxed)
    }

    /// Forbids opens for writing, or permits them again.
    pub fn freeze(&self, frozen: bool) {
        self.frozen.store(frozen, Ordering::Relaxed);
    }
}

/// Reason why an export cannot be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// Another export has the same name, ignoring leading slashes.
    #[error("there is already an export with this name")]
    NameTaken,
    /// The name is empty or consists only of slashes.
    #[error("the name is empty")]
    NoName,
    /// All slots are in use.
    #[error("there are already {EXPORTS_MAX} exports, the maximum")]
    Full,
}

/// A slot of the table.
#[derive(Debug)]
enum Slot {
    /// Added by name.
    Named(Arc<Export>),
    /// Found under the search path; a session has it open.
    Found(Arc<Export>),
    /// Removed, but sessions still have it open.
    Ending(Arc<Export>),
    /// No session has it open; shards may still have its device open.
    Left(Weak<Export>),
}

impl Slot {
    fn export(&self) -> Option<&Arc<Export>> {
        match self {
            Self::Named(export) | Self::Found(export) | Self::Ending(export) => Some(export),
            Self::Left(_) => None,
        }
    }

    fn is_free(&self) -> bool {
        matches!(self, Self::Left(former) if former.strong_count() == 0)
    }

    /// Empties the slot because no session has the export open. Returns the contents, to be dropped
    /// by the caller after releasing the lock.
    fn leave(&mut self) -> Option<Arc<Export>> {
        let left = Self::Left(self.export().map_or_else(Weak::new, Arc::downgrade));
        match std::mem::replace(self, left) {
            Self::Named(export) | Self::Found(export) | Self::Ending(export) => Some(export),
            former @ Self::Left(_) => {
                *self = former;
                None
            }
        }
    }
}

#[derive(Debug, Default)]
struct Places {
    slots: Vec<Slot>,
    /// Named exports, by name without leading slashes.
    names: BTreeMap<Vec<u8>, ExportIndex>,
    /// Names of configured exports that could not be opened, without leading slashes.
    failed: BTreeSet<Vec<u8>>,
    /// Names of exports that are being changed, without leading slashes.
    changing: BTreeSet<Vec<u8>>,
}

/// Result of looking up a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    Named(ExportIndex),
    /// The export could not be opened.
    Failed,
    /// The export is closed, and about to be reopened.
    Changing,
    /// There is no named export.
    Unknown,
}

/// Keeps the name of an export that is being changed from resolving to a file under the search
/// path.
#[derive(Debug)]
pub(crate) struct Reserved {
    table: Arc<ExportTable>,
    name: Vec<u8>,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.table.places.lock().changing.remove(&self.name);
    }
}

impl Places {
    /// Stores an export in a free slot.
    fn put(&mut self, slot: Slot) -> Option<ExportIndex> {
        let at = self.slots.iter().position(Slot::is_free).unwrap_or(self.slots.len());
        let index = u16::try_from(at).ok().filter(|_| at < EXPORTS_MAX).map(ExportIndex)?;
        match self.slots.get_mut(at) {
            Some(free) => *free = slot,
            None => self.slots.push(slot),
        }
        Some(index)
    }
}

/// Closes exports found under the search path.
pub(crate) trait Closer: fmt::Debug + Send + Sync {
    /// Closes an export that no session has open anymore, without blocking. The export is flushed
    /// before it is closed, unless a search finds it again before that.
    fn close(&self, export: Arc<Export>);
}

/// All exports of a server.
#[derive(Debug)]
pub struct ExportTable {
    finder: Option<Box<dyn Finder>>,
    examiner: OnceLock<Box<dyn Examiner>>,
    closer: OnceLock<Box<dyn Closer>>,
    /// Whether any export has ever been able to move between servers.
    gateways: AtomicBool,
    /// Access lists; replaced by the operator's threads.
    access: Mutex<Arc<AccessPolicy>>,
    places: Mutex<Places>,
    /// Incremented whenever named exports or access lists change.
    version: AtomicU64,
    /// Orphaned writes by slot. Always empty when a slot is reused, because a shard keeps the
    /// device open as long as it has requests.
    orphaned: Segments<OrphanedWrites>,
    /// Number of partial writes that have entered the turn list of any export.
    partial_writes: AtomicU64,
    /// Test callback, run after each change to exports or access lists.
    #[cfg(test)]
    watch: Watch,
}

/// Test callback, run after each change to a table.
#[cfg(test)]
#[derive(Default)]
struct Watch(Mutex<Option<Arc<dyn Fn() + Send + Sync>>>);

#[cfg(test)]
impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}

/// Strips leading slashes from a name.
pub(crate) fn bare(name: &[u8]) -> &[u8] {
    let slashes = name.iter().take_while(|&&byte| byte == b'/').count();
    &name[slashes..]
}

impl ExportTable {
    /// Creates a table of these exports. Exports beyond the 65535th and those with a duplicate name
    /// are dropped.
    pub fn new(exports: Vec<Export>) -> Arc<Self> {
        Self::with_finder(exports, None)
    }

    /// Creates a table of these exports, which looks up other names with `finder`.
    pub fn with_finder(exports: Vec<Export>, finder: Option<Box<dyn Finder>>) -> Arc<Self> {
        let orphaned = Segments::new(EXPORTS_MAX);
        let (gateways, access, places) =
            (AtomicBool::default(), Mutex::default(), Mutex::default());
        let (examiner, closer) = (OnceLock::new(), OnceLock::new());
        let table = Self {
            finder,
            examiner,
            closer,
            gateways,
            access,
            places,
            version: AtomicU64::new(0),
            orphaned,
            partial_writes: AtomicU64::new(0),
            #[cfg(test)]
            watch: Watch::default(),
        };
        for export in exports {
            let export = Arc::new(export);
            if let Err(error) = table.add(&export) {
                tracing::warn!(export = &*export.name, "not exported: {error}");
            }
        }
        Arc::new(table)
    }

    /// Adds an export under its name.
    ///
    /// # Errors
    /// [`AddError`] if the name is empty or taken, or the table is full.
    pub fn add(&self, export: &Arc<Export>) -> Result<ExportIndex, AddError> {
        let name = bare(export.name.as_bytes()).to_vec();
        if name.is_empty() {
            return Err(AddError::NoName);
        }
        let mut places = self.places.lock();
        if places.names.contains_key(&name) {
            return Err(AddError::NameTaken);
        }
        let index = places.put(Slot::Named(Arc::clone(export))).ok_or(AddError::Full)?;
        self.orphaned.make(index.index());
        if export.source.gateway().is_some() {
            self.gateways.store(true, Ordering::Relaxed);
        }
        places.names.insert(name, index);
        drop(places);
        self.changed();
        Ok(index)
    }

    /// Removes a named export, so that it can no longer be opened. Sessions that have it open keep
    /// it until [`leave`](Self::leave).
    pub fn remove(&self, index: ExportIndex, open: bool) -> Option<Arc<Export>> {
        let mut places = self.places.lock();
        let slot = places.slots.get_mut(index.index())?;
        let Slot::Named(export) = slot else { return None };
        let export = Arc::clone(export);
        *slot = match open {
            true => Slot::Ending(Arc::clone(&export)),
            false => Slot::Left(Arc::downgrade(&export)),
        };
        places.names.remove(bare(export.name.as_bytes()));
        self.version.fetch_add(1, Ordering::Release);
        Some(export)
    }

    /// Releases all exports, which closes their sources. Called at the end of the process, when no
    /// shard is running anymore.
    pub(crate) fn clear(&self) {
        let last = std::mem::take(&mut *self.places.lock());
        // Dropped without the lock, because closing may be slow.
        drop(last);
    }

    /// All current exports, including removed ones that sessions still have open, with their
    /// indexes.
    pub fn all(&self) -> Vec<(ExportIndex, Arc<Export>)> {
        let places = self.places.lock();
        let slots = (0..).map(ExportIndex).zip(&places.slots);
        slots.filter_map(|(at, slot)| Some((at, Arc::clone(slot.export()?)))).collect()
    }

    /// Up to `max` named exports whose names follow `name`, in order of name, with their indexes.
    pub fn named_after(&self, name: &[u8], max: usize) -> Vec<(ExportIndex, Arc<Export>)> {
        let places = self.places.lock();
        let after = (Bound::Excluded(bare(name)), Bound::Unbounded);
        let found = places.names.range::<[u8], _>(after).take(max).filter_map(|(_, at)| {
            let export = places.slots.get(at.index())?.export()?;
            Some((*at, Arc::clone(export)))
        });
        found.collect()
    }

    /// Whether the export at an index was found under the search path.
    pub fn is_found(&self, index: ExportIndex) -> bool {
        let places = self.places.lock();
        matches!(places.slots.get(index.index()), Some(Slot::Found(_)))
    }

    /// Whether the export at an index was removed while sessions still have it open.
    pub fn is_ending(&self, index: ExportIndex) -> bool {
        let places = self.places.lock();
        matches!(places.slots.get(index.index()), Some(Slot::Ending(_)))
    }

    /// Number of slots that have ever been used.
    pub fn len(&self) -> usize {
        self.places.lock().slots.len()
    }

    /// Whether no slot has ever been used.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the export at an index.
    pub fn get(&self, index: ExportIndex) -> Option<Arc<Export>> {
        self.places.lock().slots.get(index.index())?.export().map(Arc::clone)
    }

    /// Orphaned writes that closed paths left at an export. Panics if the index was never used.
    pub fn orphaned_writes(&self, index: ExportIndex) -> &OrphanedWrites {
        let writes = self.orphaned.get(index.index());
        writes.unwrap_or_else(|| panic!("{index:?} was never exported"))
    }

    /// Counts a partial write that has entered its export's turn list.
    pub(crate) fn note_partial_write(&self) {
        self.partial_writes.fetch_add(1, Ordering::SeqCst);
    }

    /// Number of partial writes that have entered the turn list of any export.
    pub(crate) fn partial_writes(&self) -> u64 {
        self.partial_writes.load(Ordering::SeqCst)
    }

    /// Finds a named export.
    pub fn find(&self, name: &[u8]) -> Option<ExportIndex> {
        self.places.lock().names.get(bare(name)).copied()
    }

    /// Looks up a name that a client wants to open.
    pub(crate) fn lookup(&self, name: &[u8]) -> Lookup {
        let (name, places) = (bare(name), self.places.lock());
        match places.names.get(name) {
            Some(index) => Lookup::Named(*index),
            None if places.failed.contains(name) => Lookup::Failed,
            None if places.changing.contains(name) => Lookup::Changing,
            None => Lookup::Unknown,
        }
    }

    /// Whether any export has ever been able to move between servers.
    pub fn has_gateways(&self) -> bool {
        self.gateways.load(Ordering::Relaxed)
    }

    /// Current access lists.
    pub(crate) fn access(&self) -> Arc<AccessPolicy> {
        Arc::clone(&self.access.lock())
    }

    /// Replaces the access lists. Exports that are already open are not checked
    /// ([`AdminRequest::CheckAccess`](crate::engine::message::AdminRequest::CheckAccess)).
    pub(crate) fn set_access(&self, policy: AccessPolicy) {
        *self.access.lock() = Arc::new(policy);
        self.changed();
    }

    /// Number of changes to named exports and access lists so far.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Sets a callback to run after each change that does not come from the control shard.
    #[cfg(test)]
    pub(crate) fn watch(&self, watch: impl Fn() + Send + Sync + 'static) {
        *self.watch.0.lock() = Some(Arc::new(watch));
    }

    /// Counts a change and runs the test callback.
    fn changed(&self) {
        self.version.fetch_add(1, Ordering::Release);
        #[cfg(test)]
        {
            let watch = self.watch.0.lock().clone();
            watch.into_iter().for_each(|watch| watch());
        }
    }

    /// Sets the closer for exports found under the search path, once.
    pub(crate) fn set_closer(&self, closer: Box<dyn Closer>) {
        self.closer.get_or_init(|| closer);
    }

    /// Reserves the name of an export that is about to be closed and reopened, until the result is
    /// dropped. Only one thread at a time changes an export.
    pub(crate) fn reserve(self: &Arc<Self>, name: &str) -> Reserved {
        let name = bare(name.as_bytes()).to_vec();
        self.places.lock().changing.insert(name.clone());
        Reserved { table: Arc::clone(self), name }
    }

    /// Records whether a configured export could not be opened.
    pub(crate) fn set_failed(&self, name: &str, failed: bool) {
        let (name, mut places) = (bare(name.as_bytes()).to_vec(), self.places.lock());
        let all = &mut places.failed;
        let _ = if failed { all.insert(name) } else { all.remove(&name) };
    }

    /// Names of configured exports that could not be opened.
    pub(crate) fn failed_names(&self) -> Vec<String> {
        let places = self.places.lock();
        places.failed.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect()
    }

    /// Sets the examiner of targets, once.
    pub fn set_examiner(&self, examiner: Box<dyn Examiner>) {
        self.examiner.get_or_init(|| examiner);
    }

    /// Examiner of targets, called before their first open.
    pub fn examiner(&self) -> Option<&dyn Examiner> {
        self.examiner.get().map(|examiner| &**examiner)
    }

    /// Finder for names that are not in the table.
    pub fn finder(&self) -> Option<&dyn Finder> {
        self.finder.as_deref()
    }

    /// Returns the slot of a found export, or assigns one. Returns None if all slots are in use.
    pub fn place(&self, export: &Arc<Export>) -> Option<ExportIndex> {
        let mut places = self.places.lock();
        let has = |slot: &Slot| match slot {
            Slot::Found(other) => Arc::ptr_eq(other, export),
            Slot::Left(other) => std::ptr::eq(other.as_ptr(), Arc::as_ptr(export)),
            Slot::Named(_) | Slot::Ending(_) => false,
        };
        let slot = Slot::Found(Arc::clone(export));
        if let Some(at) = places.slots.iter().position(has) {
            places.slots[at] = slot;
            return u16::try_from(at).ok().map(ExportIndex);
        }
        let found = places.slots.iter().filter(|slot| matches!(slot, Slot::Found(_))).count();
        if found >= FOUND_MAX {
            return None;
        }
        let index = places.put(slot)?;
        self.orphaned.make(index.index());
        Some(index)
    }

    /// Releases a found or removed export that no session has open anymore.
    pub fn leave(&self, index: ExportIndex) {
        let mut places = self.places.lock();
        let slot = places.slots.get_mut(index.index());
        let slot = slot.filter(|slot| matches!(slot, Slot::Found(_) | Slot::Ending(_)));
        let found = slot.as_ref().is_some_and(|slot| matches!(slot, Slot::Found(_)));
        let export = slot.and_then(Slot::leave);
        // The export is closed without the lock, when the last reference is dropped.
        drop(places);
        match (export, self.closer.get()) {
            (Some(export), Some(closer)) if found => closer.close(export),
            (export, _) => drop(export),
        }
    }
}

#[cfg(test)]
mod tests;
