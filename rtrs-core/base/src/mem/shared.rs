//! Memory that one process writes to and others read: 32-bit words, addressed by offset.
//!
//! The writer creates the memory ([`SharedMemory::create`]) and passes its descriptor on; no other
//! process can map it for writing or change its size. Readers may wait until a word changes.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate};
use rustix::io::Errno;
use rustix::thread::futex;

use super::mapping::{Mapping, Protection};
use crate::time::Duration;

/// Mapped shared memory.
pub struct SharedMemory {
    mapping: Mapping,
    fd: OwnedFd,
    is_writer: bool,
}

impl SharedMemory {
    /// Creates `len` zeroed bytes that only this process can write to.
    ///
    /// # Errors
    /// The system's error; `InvalidInput` for a length of zero.
    pub fn create(name: &str, len: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags)?;
        ftruncate(&fd, len as u64)?;
        let memory = Self::map(fd, len, Protection::ReadWrite)?;
        // Seal after mapping, since the existing mapping stays writable.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        fcntl_add_seals(&memory.fd, seals)?;
        Ok(memory)
    }

    /// Maps memory that another process has created.
    ///
    /// # Errors
    /// The system's error; `InvalidData` for memory that could be truncated while readers use it.
    pub fn open(fd: OwnedFd) -> io::Result<Self> {
        if !fcntl_get_seals(&fd)?.contains(SealFlags::SHRINK) {
            let text = "the memory is not sealed against shrinking";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let len = usize::try_from(fstat(&fd)?.st_size).map_err(io::Error::other)?;
        Self::map(fd, len, Protection::Read)
    }

    fn map(fd: OwnedFd, len: usize, protection: Protection) -> io::Result<Self> {
        let mapping = Mapping::new(fd.as_fd(), len, protection)?;
        Ok(Self { mapping, fd, is_writer: protection == Protection::ReadWrite })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Always returns false.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads a word. All writes made before the word was stored are visible afterwards.
    pub fn load(&self, offset: usize) -> u32 {
        self.mapping.word(offset).load(Ordering::Acquire)
    }

    /// Writes a word after all earlier writes. Panics if called by a reader.
    pub fn store(&self, offset: usize, value: u32) {
        assert!(self.is_writer, "a reader does not write");
        self.mapping.word(offset).store(value, Ordering::Release);
    }

    /// Waits until a word differs from `value` and its writer has called [`wake`](Self::wake), for
    /// at most `limit`. Spurious wakeups are possible.
    ///
    /// # Errors
    /// `Interrupted` by a signal.
    pub fn wait(&self, offset: usize, value: u32, limit: Option<Duration>) -> io::Result<()> {
        let limit = limit.and_then(|limit| futex::Timespec::try_from(limit).ok());
        let word = self.mapping.word(offset);
        match futex::wait(word, futex::Flags::empty(), value, limit.as_ref()) {
            Ok(()) | Err(Errno::AGAIN | Errno::TIMEDOUT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Wakes all threads that are waiting for a word.
    pub fn wake(&self, offset: usize) {
        // Fails only for an invalid address.
        let word = self.mapping.word(offset);
        let _ = futex::wake(word, futex::Flags::empty(), i32::MAX.cast_unsigned());
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedMemory").field("len", &self.len()).finish_non_exhaustive()
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
        // No other process can write to the memory or truncate it.
        let fd = reader.as_fd();
        assert!(rustix::io::pwrite(fd, &[1], 0).is_err());
        assert!(ftruncate(fd, 0).is_err());
        assert!(
            SharedMemory::map(fd.try_clone_to_owned().unwrap(), 8192, Protection::ReadWrite)
                .is_err()
        );
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
