//! Memory that one process writes and others read: 32-bit words, addressed by offset.
//!
//! The writer creates it ([`SharedMemory::create`]) and passes its descriptor on; no other process
//! can map it for writing, or change its size. Readers may wait until a word changes. All Rust
//! references to it are to atomic words, so concurrent writes are sound.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate};
use rustix::io::Errno;
use rustix::thread::futex;

use crate::time::Duration;

/// Mapped shared memory.
pub struct SharedMemory {
    base: NonNull<u8>,
    len: usize,
    fd: OwnedFd,
    is_writer: bool,
}

// SAFETY: a plain shared mapping; all access uses atomic words.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates `len` bytes of zeroes that only this process can write.
    ///
    /// # Errors
    /// The system's error; `InvalidInput` for a length of zero.
    pub fn create(name: &str, len: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags)?;
        ftruncate(&fd, len as u64)?;
        let memory = Self::map(fd, len, true)?;
        // Seal after mapping, since the existing mapping stays writable.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        fcntl_add_seals(&memory.fd, seals)?;
        Ok(memory)
    }

    /// Maps memory that another process has created.
    ///
    /// # Errors
    /// The system's error; `InvalidData` for memory that could be shortened while readers use it.
    pub fn open(fd: OwnedFd) -> io::Result<Self> {
        if !fcntl_get_seals(&fd)?.contains(SealFlags::SHRINK) {
            let text = "the memory is not sealed against shrinking";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let len = usize::try_from(fstat(&fd)?.st_size).map_err(io::Error::other)?;
        Self::map(fd, len, false)
    }

    fn map(fd: OwnedFd, len: usize, is_writer: bool) -> io::Result<Self> {
        let write = if is_writer { libc::PROT_WRITE } else { 0 };
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
        Ok(Self { base, len, fd, is_writer })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always returns false.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the word at an offset. Panics outside the memory and at unaligned offsets, which are
    /// bugs of the caller.
    fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(
            offset.is_multiple_of(4) && offset + 4 <= self.len,
            "no word at {offset} of {}",
            self.len
        );
        // SAFETY: the word lies in the mapping, which is page-aligned and lives as long as `self`
        // is borrowed; atomics may be shared with other processes.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Reads a word, with all writes that its writer made before it.
    pub fn load(&self, offset: usize) -> u32 {
        self.word(offset).load(Ordering::Acquire)
    }

    /// Writes a word after all earlier writes. Panics for readers.
    pub fn store(&self, offset: usize, value: u32) {
        assert!(self.is_writer, "a reader does not write");
        self.word(offset).store(value, Ordering::Release);
    }

    /// Waits until a word differs from `value` and its writer has called [`wake`](Self::wake), for
    /// at most `limit`. Spurious wakeups are possible.
    ///
    /// # Errors
    /// `Interrupted` by a signal.
    pub fn wait(&self, offset: usize, value: u32, limit: Option<Duration>) -> io::Result<()> {
        let limit = limit.and_then(|limit| futex::Timespec::try_from(limit).ok());
        match futex::wait(self.word(offset), futex::Flags::empty(), value, limit.as_ref()) {
            Ok(()) | Err(Errno::AGAIN | Errno::TIMEDOUT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Wakes all threads that wait for a word.
    pub fn wake(&self, offset: usize) {
        // Fails only for an invalid address.
        let _ = futex::wake(self.word(offset), futex::Flags::empty(), i32::MAX.cast_unsigned());
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: this object owns the mapping, and it is not borrowed anymore.
        unsafe {
            libc::munmap(self.base.as_ptr().cast(), self.len);
        }
    }
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedMemory").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn pair(len: usize) -> (Arc<SharedMemory>, Arc<SharedMemory>) {
        let writer = SharedMemory::create("test", len).unwrap();
        let fd = writer.as_fd().try_clone_to_owned().unwrap();
        (Arc::new(writer), Arc::new(SharedMemory::open(fd).unwrap()))
    }

    #[test]
    fn writes_are_visible_to_readers() {
        let (writer, reader) = pair(8192);
        writer.store(8188, 7);
        assert_eq!((reader.load(8188), reader.load(0)), (7, 0));
        assert_eq!((reader.len(), reader.is_empty()), (8192, false));
        // No other process can write to it or truncate it.
        let fd = reader.as_fd();
        assert!(rustix::io::pwrite(fd, &[1], 0).is_err());
        assert!(ftruncate(fd, 0).is_err());
        assert!(SharedMemory::map(fd.try_clone_to_owned().unwrap(), 8192, true).is_err());
        let plain = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(SharedMemory::open(plain).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_reader_waits_for_a_change() {
        let (writer, reader) = pair(4096);
        reader.wait(0, 5, None).unwrap();
        reader.wait(0, 0, Some(Duration::from_millis(1))).unwrap();
        let waiting = Arc::clone(&reader);
        let thread = std::thread::spawn(move || {
            while waiting.load(0) == 0 {
                waiting.wait(0, 0, Some(Duration::from_secs(20))).unwrap();
            }
        });
        writer.store(0, 1);
        writer.wake(0);
        thread.join().unwrap();
    }

    #[test]
    #[should_panic(expected = "no word at 4096")]
    fn words_stay_within_the_memory() {
        pair(4096).1.load(4096);
    }
}
