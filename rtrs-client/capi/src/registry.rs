//! Memory that the program has registered with a volume.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rtrs::{Memory, Part};

use crate::entry::Failure;
use crate::memory::{Hold, Piece, Span};

/// Registered memory of a volume.
#[derive(Debug, Default)]
pub(crate) struct Registry(RwLock<Vec<Entry>>);

#[derive(Debug)]
struct Entry {
    /// Addresses.
    range: Range<usize>,
    /// None while it is being released.
    memory: Option<Memory>,
    /// Set when requests no longer use the registration.
    is_leaving: bool,
    /// Set once nothing in the library holds the memory.
    is_released: Arc<AtomicBool>,
}

impl Entry {
    fn is_within(&self, range: &Range<usize>) -> bool {
        range.start <= self.range.start && self.range.end <= range.end
    }
}

/// Sets a flag when it is dropped.
#[derive(Debug)]
struct Release(Arc<AtomicBool>);

impl Drop for Release {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn unknown() -> Failure {
    Failure::invalid("there is no registration of this memory")
}

impl Registry {
    fn read(&self) -> RwLockReadGuard<'_, Vec<Entry>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Entry>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds memory, which must not overlap other memory. Requests use it from now on.
    pub(crate) fn add(&self, span: Span) -> Result<Memory, Failure> {
        let range = span.addresses();
        let mut entries = self.write();
        if entries.iter().any(|one| one.range.start < range.end && range.start < one.range.end) {
            let text = "the memory overlaps memory that is registered";
            return Err(Failure::new(libc::EEXIST, text));
        }
        let is_released = Arc::<AtomicBool>::default();
        let memory = span.memory(Release(Arc::clone(&is_released)));
        let kept = Some(memory.clone());
        entries.push(Entry { range, memory: kept, is_leaving: false, is_released });
        Ok(memory)
    }

    /// Returns the memory of a request as a part of registered memory; None if it is not one piece
    /// of such memory.
    pub(crate) fn find(&self, spans: &[Span], hold: &Arc<Hold>) -> Option<Part> {
        let [span] = spans else { return None };
        let range = span.addresses();
        let entries = self.read();
        let entry = entries.iter().find(|one| {
            !one.is_leaving && one.range.start <= range.start && range.end <= one.range.end
        })?;
        let from = range.start - entry.range.start;
        entry.memory.as_ref()?.part_with(from..from + range.len(), Piece::new(hold))
    }

    /// Stops requests from using the registration of this memory. Returns the memory; None if it is
    /// being released.
    pub(crate) fn begin_removal(&self, at: &Range<usize>) -> Result<Option<Memory>, Failure> {
        let mut entries = self.write();
        let entry = entries.iter_mut().find(|one| one.range == *at).ok_or_else(unknown)?;
        entry.is_leaving = true;
        Ok(entry.memory.clone())
    }

    /// Begins to release memory within these addresses, whose registration or session has ended.
    pub(crate) fn release(&self, within: &Range<usize>) {
        for entry in self.write().iter_mut().filter(|one| one.is_within(within)) {
            (entry.memory, entry.is_leaving) = (None, true);
        }
    }

    /// Forgets released memory. Returns the number of pieces within these addresses that the
    /// library still holds.
    pub(crate) fn unreleased(&self, within: &Range<usize>) -> usize {
        let mut entries = self.write();
        entries.retain(|one| one.memory.is_some() || !one.is_released.load(Ordering::SeqCst));
        entries.iter().filter(|one| one.is_within(within)).count()
    }
}
