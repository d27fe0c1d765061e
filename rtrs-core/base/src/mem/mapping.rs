//! Mapped shared memory: 32-bit words and bytes, addressed by offset.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Access mode of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protection {
    Read,
    ReadWrite,
}

/// Memory of a file, shared with other processes. Rust references to it are only to atomic words,
/// and bytes are only copied, so concurrent writes are sound.
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a plain shared mapping; all access uses atomic words or copies bytes.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of a file that cannot shrink.
    pub(super) fn new(fd: BorrowedFd<'_>, len: usize, protection: Protection) -> io::Result<Self> {
        let write = match protection {
            Protection::Read => 0,
            Protection::ReadWrite => libc::PROT_WRITE,
        };
        // SAFETY: a shared mapping at an address chosen by the kernel overlaps no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | write,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| io::Error::other("mmap returned a null address"))?;
        Ok(Self { base, len })
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the word at an offset. Panics if the offset is unaligned or outside the memory, both
    /// of which are bugs in the caller.
    pub(super) fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(
            offset.is_multiple_of(4) && offset + 4 <= self.len,
            "no word at {offset} of {}",
            self.len
        );
        // SAFETY: the word is inside the mapping, which is page-aligned and lives as long as `self`
        // is borrowed; atomics may be shared with other processes.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Returns the double word at an offset, like [`Self::word`].
    pub(super) fn long(&self, offset: usize) -> &AtomicU64 {
        assert!(
            offset.is_multiple_of(8) && offset + 8 <= self.len,
            "no double word at {offset} of {}",
            self.len
        );
        // SAFETY: as for words.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Copies bytes to an offset. Within a process, the caller uses an atomic word to order this
    /// before reads of the bytes. Panics if the range is outside the memory.
    pub(super) fn write_bytes(&self, offset: usize, bytes: &[u8]) {
        let to = self.bytes(offset, bytes.len());
        // SAFETY: the target is inside the mapping, to which no Rust references to bytes exist; the
        // source is other memory, since it is borrowed.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// Copies bytes from an offset, the counterpart of [`Self::write_bytes`]. Concurrent changes by
    /// another process may or may not be copied.
    pub(super) fn read_bytes(&self, offset: usize, bytes: &mut [u8]) {
        let from = self.bytes(offset, bytes.len());
        // SAFETY: as for writes. All bytes are valid values, and each is read once.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Appends `len` bytes from an offset to a vector.
    pub(super) fn append_bytes(&self, offset: usize, len: usize, bytes: &mut Vec<u8>) {
        let from = self.bytes(offset, len);
        bytes.reserve(len);
        let begin = bytes.len();
        // SAFETY: the vector has room for `len` more bytes, which are initialized before they
        // become part of it.
        unsafe {
            from.copy_to_nonoverlapping(bytes.as_mut_ptr().add(begin), len);
            bytes.set_len(begin + len);
        }
    }

    fn bytes(&self, offset: usize, len: usize) -> *mut u8 {
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(is_inside, "no {len} bytes at {offset} of {}", self.len);
        self.base.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this object owns the mapping, and it is not borrowed anymore.
        unsafe {
            libc::munmap(self.base.as_ptr().cast(), self.len);
        }
    }
}
