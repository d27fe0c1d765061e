//! Memory that a program registers with a volume.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use rtrs_core::mem::{MemSlice, Region};

use crate::error::{Error, ErrorKind};

/// Program memory that requests use in place, including over RDMA, once it is registered with
/// [`Volume::register`](crate::Volume::register).
///
/// Requests name [`Part`]s. As with a file that several threads write to, bytes are copied in and
/// out, and may change at any time: no references to them exist. A clone is another handle to the
/// same memory.
///
/// ```no_run
/// # use std::time::Duration;
/// # use rtrs::{Error, Memory, Queue, Request, Volume};
/// # fn example(volume: &Volume, queue: &mut Queue) -> Result<(), Error> {
/// let memory = Memory::new(16 << 20)?;
/// volume.register(&memory)?;
/// let block = memory.part(4096..8192).expect("a part inside");
/// queue.submit(1, Request::read_to(0, &block))?;
/// queue.poll(&mut Vec::new(), 1, 1, Duration::from_secs(60))?;
/// let mut bytes = [0; 4096];
/// block.copy_to(&mut bytes);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Memory(Arc<Region>);

impl Memory {
    /// Allocates whole pages of zeroed memory.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if the system refuses the mapping, or the length is 0.
    pub fn new(len: usize) -> Result<Self, Error> {
        let failed = |error| Error::new(ErrorKind::System, format!("cannot map memory: {error}"));
        Region::new(len).map(Self).map_err(failed)
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns a part of the memory; None if the range is not within it.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Option<Part> {
        let len = range.end.checked_sub(range.start)?;
        self.0.slice(range.start, len).map(Part)
    }

    /// Returns a part like [`part`](Self::part) that drops `owner` after the library has last used
    /// it, for `librtrs`.
    #[doc(hidden)]
    #[must_use]
    pub fn part_with(&self, range: Range<usize>, owner: impl Any + Send + Sync) -> Option<Part> {
        let len = range.end.checked_sub(range.start)?;
        Region::alias(&self.0, owner).slice(range.start, len).map(Part)
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.0
    }
}

impl From<Arc<Region>> for Memory {
    /// Wraps one of the engine's regions, for `librtrs`.
    fn from(region: Arc<Region>) -> Self {
        Self(region)
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes)", self.len())
    }
}

/// Part of a [`Memory`], for requests. A clone refers to the same bytes.
#[derive(Clone)]
pub struct Part(MemSlice);

impl Part {
    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Copies `bytes` to the part. Changing bytes of a write in flight invalidates its checksum.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    pub fn copy_from(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len(), "bytes and part of different lengths");
        self.0.copy_in(0, bytes);
    }

    /// Copies the part to `bytes`.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    pub fn copy_to(&self, bytes: &mut [u8]) {
        assert_eq!(bytes.len(), self.len(), "bytes and part of different lengths");
        self.0.copy_out(0, bytes);
    }

    pub(crate) fn slice(&self) -> &MemSlice {
        &self.0
    }
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Part({} bytes)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_inside_their_memory() {
        let memory = Memory::new(5000).unwrap();
        assert_eq!((memory.len(), memory.is_empty()), (8192, false));
        let part = memory.part(100..104).unwrap();
        part.copy_from(b"abcd");
        let mut bytes = [0; 2];
        memory.clone().part(101..103).unwrap().copy_to(&mut bytes);
        assert_eq!(&bytes, b"bc");
        #[allow(clippy::reversed_empty_ranges, reason = "an invalid range")]
        for wrong in [8192..8193, 5..4, usize::MAX..usize::MAX] {
            assert!(memory.part(wrong.clone()).is_none(), "{wrong:?}");
        }
        assert_eq!(Memory::new(0).unwrap_err().kind(), ErrorKind::System);
    }

    #[test]
    fn a_part_drops_its_owner_after_the_last_use() {
        let (memory, owner) = (Memory::new(4096).unwrap(), Arc::new(()));
        let part = memory.part_with(0..512, Arc::clone(&owner)).unwrap();
        let slice = part.slice().clone();
        drop(part);
        assert_eq!((Arc::strong_count(&owner), slice.region().id()), (2, memory.region().id()));
        drop(slice);
        assert_eq!(Arc::strong_count(&owner), 1);
    }
}
