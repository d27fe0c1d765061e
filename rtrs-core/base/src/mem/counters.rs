//! Counters that several processes change.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate};

use super::mapping::{Mapping, Protection};

/// Counters in memory that each process with its descriptor can change: 32-bit words that wrap,
/// addressed by number.
///
/// Accesses are ordered for all processes. If one process writes a word elsewhere and then reads a
/// counter, and another changes the counter and then reads the word, then at least one of them sees
/// the change of the other.
pub struct SharedCounters(Mapping);

impl SharedCounters {
    /// Creates `count` counters of zero. Returns them with the descriptor for other processes.
    ///
    /// # Errors
    /// The system's error; `InvalidInput` for a count of zero.
    pub fn create(name: &str, count: usize) -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags)?;
        let len = count * 4;
        ftruncate(&fd, len as u64)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self(Mapping::new(fd.as_fd(), len, Protection::ReadWrite)?), fd))
    }

    /// Maps the counters that another process has created. The descriptor is not needed afterwards.
    ///
    /// # Errors
    /// The system's error; `InvalidData` for memory that could be shortened while it is used, or
    /// with fewer counters.
    pub fn open(fd: BorrowedFd<'_>, count: usize) -> io::Result<Self> {
        let is_sealed = fcntl_get_seals(fd)?.contains(SealFlags::SHRINK);
        let len = usize::try_from(fstat(fd)?.st_size).map_err(io::Error::other)?;
        if !is_sealed || len < count * 4 {
            let text = "the memory does not hold the counters";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Ok(Self(Mapping::new(fd, len, Protection::ReadWrite)?))
    }

    /// Returns a counter.
    pub fn get(&self, number: usize) -> u32 {
        fence(Ordering::SeqCst);
        self.0.word(number * 4).load(Ordering::SeqCst)
    }

    /// Adds to a counter. Returns its former value.
    pub fn add(&self, number: usize, amount: u32) -> u32 {
        let before = self.0.word(number * 4).fetch_add(amount, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        before
    }
}

impl fmt::Debug for SharedCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedCounters").field("len", &self.0.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_holder_changes_the_counters() {
        let (first, fd) = SharedCounters::create("test", 2).unwrap();
        let second = SharedCounters::open(fd.as_fd(), 2).unwrap();
        assert_eq!((first.add(0, 7), second.add(0, u32::MAX)), (0, 7));
        assert_eq!((first.get(0), second.get(0), second.get(1)), (6, 6, 0));
        std::thread::scope(|scope| {
            for counters in [&first, &second, &first, &second] {
                scope.spawn(|| (0..1000).map(|_| counters.add(1, 1)).max());
            }
        });
        assert_eq!(first.get(1), 4000);
    }

    #[test]
    fn memory_that_could_shrink_or_is_too_short_is_refused() {
        let (_, fd) = SharedCounters::create("test", 2).unwrap();
        assert!(ftruncate(&fd, 0).is_err());
        let error = SharedCounters::open(fd.as_fd(), 3).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let plain = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&plain, 8).unwrap();
        assert!(SharedCounters::open(plain.as_fd(), 2).is_err());
    }
}
