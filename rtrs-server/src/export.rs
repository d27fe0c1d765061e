//! What is exported: names and the block sources behind them.
//!
//! Owns [`Export`] and [`ExportTable`], made at start and shared by all shards. An export is known
//! by its [`ExportIndex`] everywhere but in an OPEN message. Names match exactly; a leading slash,
//! which kernel clients write as part of a device path, is left out of the comparison.
//!
//! Behind the named exports the table has places for those that a [`Finder`] finds while the server
//! runs (`--search-path`). The control shard fills and empties them. A place that was emptied is
//! not used again until no shard has the device of its former export open: an index means one thing
//! at a time.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rtrs_core::block::{BlockSource, Geometry};
use rtrs_core::identity::ExportId;

use crate::engine::epoch::SyncEpoch;
use crate::engine::finder::Finder;
use crate::engine::io::overlap::OrphanedWrites;
use crate::stats::ExportCounters;

/// Exports found below the search path that may be open at once.
pub const FOUND_MAX: usize = 64;

/// A place in the [`ExportTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExportIndex(pub u16);

impl ExportIndex {
    /// The number as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// One name and what is behind it.
#[derive(Clone, Debug)]
pub struct Export {
    /// What clients open, 1 to 254 bytes.
    pub name: String,
    /// What serves it.
    pub source: Arc<dyn BlockSource>,
    /// Refuse every change, whatever the source can do.
    pub read_only: bool,
    /// Refuse opens for migration, which let a second client write.
    pub deny_migration: bool,
    /// Which disk or file it is, as clients know it; None when unknown.
    pub id: Option<ExportId>,
    /// How often a sync of it has failed.
    pub epoch: Arc<SyncEpoch>,
    /// What its users did.
    pub counters: Arc<ExportCounters>,
}

impl Export {
    /// Size, limits and abilities as clients see them.
    pub fn geometry(&self) -> Geometry {
        let mut geometry = self.source.geometry();
        geometry.read_only |= self.read_only;
        geometry
    }
}

/// A place for what was found.
#[derive(Debug)]
enum Slot {
    /// A session has it open.
    Open(Arc<Export>),
    /// None has; shards may still have its device.
    Left(Weak<Export>),
}

/// All exports of a server, at most 65535.
#[derive(Debug, Default)]
pub struct ExportTable {
    exports: Vec<Arc<Export>>,
    finder: Option<Box<dyn Finder>>,
    found: Mutex<Vec<Slot>>,
    /// By place. None is left there when a place is used again: a shard has the device open as long
    /// as something runs at it.
    orphaned: Box<[OrphanedWrites]>,
}

impl ExportTable {
    /// A table of these exports. Exports past the 65535th are left out.
    pub fn new(exports: Vec<Export>) -> Arc<Self> {
        Self::with_finder(exports, None)
    }

    /// The same, with somebody to ask for other names.
    pub fn with_finder(exports: Vec<Export>, finder: Option<Box<dyn Finder>>) -> Arc<Self> {
        let max = usize::from(u16::MAX) - if finder.is_some() { FOUND_MAX } else { 0 };
        let exports = exports.into_iter().take(max).map(Arc::new).collect();
        let found = Mutex::default();
        let mut table = Self { exports, finder, found, orphaned: Box::default() };
        table.orphaned = (0..table.len()).map(|_| OrphanedWrites::default()).collect();
        Arc::new(table)
    }

    /// How many places there are; those for what is found count, whether in use or not.
    pub fn len(&self) -> usize {
        self.exports.len() + if self.finder.is_some() { FOUND_MAX } else { 0 }
    }

    /// True when nothing is exported, nor will be.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The export at a place.
    pub fn get(&self, index: ExportIndex) -> Option<Arc<Export>> {
        if let Some(export) = self.exports.get(index.index()) {
            return Some(Arc::clone(export));
        }
        match self.found.lock().get(index.index() - self.exports.len())? {
            Slot::Open(export) => Some(Arc::clone(export)),
            Slot::Left(_) => None,
        }
    }

    /// What closed paths have left running at the export at a place.
    pub fn orphaned_writes(&self, index: ExportIndex) -> &OrphanedWrites {
        &self.orphaned[index.index()]
    }

    /// The export of a name.
    pub fn find(&self, name: &[u8]) -> Option<ExportIndex> {
        let bare = |name: &[u8]| -> usize { name.iter().take_while(|&&b| b == b'/').count() };
        let wanted = &name[bare(name)..];
        if wanted.is_empty() {
            return None;
        }
        let at = self.exports.iter().position(|export| {
            let have = export.name.as_bytes();
            &have[bare(have)..] == wanted
        })?;
        u16::try_from(at).ok().map(ExportIndex)
    }

    /// Who finds other names.
    pub fn finder(&self) -> Option<&dyn Finder> {
        self.finder.as_deref()
    }

    /// A place for what was found: the one it has, or a new one. None when all are taken.
    pub fn place(&self, export: &Arc<Export>) -> Option<ExportIndex> {
        let mut found = self.found.lock();
        let has = |slot: &Slot| match slot {
            Slot::Open(other) => Arc::ptr_eq(other, export),
            Slot::Left(other) => std::ptr::eq(other.as_ptr(), Arc::as_ptr(export)),
        };
        let free = |slot: &Slot| matches!(slot, Slot::Left(other) if other.strong_count() == 0);
        let at = match found.iter().position(has).or_else(|| found.iter().position(free)) {
            Some(at) => at,
            None if found.len() < FOUND_MAX => {
                found.push(Slot::Left(Weak::new()));
                found.len() - 1
            }
            None => return None,
        };
        found[at] = Slot::Open(Arc::clone(export));
        u16::try_from(self.exports.len() + at).ok().map(ExportIndex)
    }

    /// Nobody has the export open any more: what was found is released.
    pub fn leave(&self, index: ExportIndex) {
        let Some(at) = index.index().checked_sub(self.exports.len()) else { return };
        let mut found = self.found.lock();
        let Some(slot @ Slot::Open(_)) = found.get_mut(at) else { return };
        let Slot::Open(export) = std::mem::replace(slot, Slot::Left(Weak::new())) else { return };
        *slot = Slot::Left(Arc::downgrade(&export));
        // What is closed with the last holder is closed without the lock.
        drop(found);
        drop(export);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::NullSource;
    use crate::engine::finder::Search;

    #[derive(Debug)]
    struct Nobody;

    impl Finder for Nobody {
        fn find(&self, _search: Search) -> bool {
            false
        }
    }

    fn export(name: &str) -> Export {
        let source = Arc::new(NullSource::new(4096, 512));
        Export {
            name: name.into(),
            source,
            read_only: false,
            deny_migration: false,
            id: None,
            epoch: Arc::default(),
            counters: Arc::default(),
        }
    }

    #[test]
    fn what_was_found_keeps_its_place_until_no_core_has_it() {
        let table = ExportTable::with_finder(vec![export("named")], Some(Box::new(Nobody)));
        assert_eq!(table.len(), 1 + FOUND_MAX);
        assert_eq!(table.get(ExportIndex(1)).map(|export| export.name.clone()), None);
        let (a, b) = (Arc::new(export("a")), Arc::new(export("b")));
        assert_eq!(table.place(&a), Some(ExportIndex(1)));
        assert_eq!(table.place(&a), Some(ExportIndex(1)), "it has its place");
        assert_eq!(table.get(ExportIndex(1)).unwrap().name, "a");
        table.leave(ExportIndex(1));
        assert!(table.get(ExportIndex(1)).is_none());
        assert_eq!(table.place(&b), Some(ExportIndex(2)), "a core may still have a's device");
        assert_eq!(table.place(&a), Some(ExportIndex(1)), "the same again");
        table.leave(ExportIndex(1));
        drop(a);
        assert_eq!(table.place(&Arc::new(export("c"))), Some(ExportIndex(1)));
        // Named ones stay.
        table.leave(ExportIndex(0));
        assert_eq!(table.get(ExportIndex(0)).unwrap().name, "named");
        assert_eq!(table.find(b"a"), None, "only named ones are found by name");
    }

    #[test]
    fn the_places_are_bounded() {
        let table = ExportTable::with_finder(Vec::new(), Some(Box::new(Nobody)));
        let all: Vec<_> = (0..FOUND_MAX).map(|n| Arc::new(export(&n.to_string()))).collect();
        assert!(all.iter().all(|export| table.place(export).is_some()));
        assert_eq!(table.place(&Arc::new(export("one more"))), None);
    }

    #[test]
    fn without_a_finder_only_names_count() {
        let table = ExportTable::new(vec![export("/dev/sda")]);
        assert_eq!((table.len(), table.is_empty()), (1, false));
        assert_eq!(table.find(b"dev/sda"), Some(ExportIndex(0)));
        assert!(table.finder().is_none() && ExportTable::new(Vec::new()).is_empty());
    }
}
