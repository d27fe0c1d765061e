//! Counts of refused sends, which programs keep in memory that the node reads.
//!
//! A program checks the board before it sends, so the node does not see refused messages. Each
//! process has counts of its own, which forked children share. The node reads them like a file: it
//! does not map memory that another process has created.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use rtrs_base::mem::SharedMemory;
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

use crate::proto::Refused;

/// Length of the memory in bytes: two words for each count.
const TALLY_LEN: usize = 24;
/// Number of attempts to lock the counts before they are changed anyway: a process may have forked
/// while another thread held the lock.
const LOCK_TRIES: usize = 1000;

/// Reason for a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The send buffer was full.
    QueueFull = 0,
    /// The port was congested, and the call did not wait.
    Congested = 1,
    /// The port was congested, and the call waited.
    CongestedWait = 2,
}

/// Writable counts of a process.
#[derive(Debug)]
pub struct Tally {
    /// Present until the counts are dropped.
    memory: Option<SharedMemory>,
    inode: u64,
    is_locked: AtomicBool,
}

impl Tally {
    /// Creates counts that are all zero.
    ///
    /// # Errors
    /// The system's error.
    pub fn create() -> io::Result<Self> {
        let memory = SharedMemory::create("rds-tally", TALLY_LEN)?;
        let inode = fstat(&memory)?.st_ino;
        Ok(Self { memory: Some(memory), inode, is_locked: AtomicBool::new(false) })
    }

    /// Counts a refusal.
    pub fn add(&self, refusal: Refusal) {
        let Some(memory) = &self.memory else { return };
        let try_lock = || !self.is_locked.swap(true, Ordering::Acquire);
        let _ = (0..LOCK_TRIES).any(|_| try_lock());
        let at = refusal as usize * 8;
        let (low, is_carried) = memory.load(at).overflowing_add(1);
        memory.store(at, low);
        if is_carried {
            memory.store(at + 4, memory.load(at + 4).wrapping_add(1));
        }
        self.is_locked.store(false, Ordering::Release);
    }

    /// Returns the descriptor of the memory.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.memory.as_ref().map(AsFd::as_fd)
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        let is_open = self.fd().is_some_and(|fd| fstat(fd).is_ok_and(|s| s.st_ino == self.inode));
        if !is_open {
            // The program has closed the descriptor. Its number may belong to another file now.
            std::mem::forget(self.memory.take());
        }
    }
}

/// Counts of another process.
#[derive(Debug)]
pub(crate) struct TallyReader(File);

impl TallyReader {
    /// Takes over the memory of a process. Returns `None` for anything but a memfd that cannot
    /// shrink, since other files could block the reader.
    pub(crate) fn new(fd: OwnedFd) -> Option<Self> {
        let seals = fcntl_get_seals(&fd).ok()?;
        seals.contains(SealFlags::SHRINK).then(|| Self(File::from(fd)))
    }

    /// Reads the counts.
    pub(crate) fn read(&self) -> Refused {
        let mut bytes = [0; TALLY_LEN];
        // Shorter memory is not from this library, so its counts are ignored.
        let is_whole = self.0.read_exact_at(&mut bytes, 0).is_ok();
        let mut counts = [0; TALLY_LEN / 8];
        for (count, chunk) in counts.iter_mut().zip(bytes.chunks_exact(8)).filter(|_| is_whole) {
            let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| chunk[at + byte]));
            *count = u64::from(word(4)) << 32 | u64::from(word(0));
        }
        let [queue_full, congested, congested_waits] = counts;
        Refused { queue_full, congested, congested_waits }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(tally: &Tally) -> TallyReader {
        TallyReader::new(tally.fd().unwrap().try_clone_to_owned().unwrap()).unwrap()
    }

    #[test]
    fn another_process_reads_what_is_counted() {
        let tally = Tally::create().unwrap();
        let reader = reader(&tally);
        for (refusal, times) in
            [(Refusal::QueueFull, 3), (Refusal::Congested, 2), (Refusal::CongestedWait, 1)]
        {
            (0..times).for_each(|_| tally.add(refusal));
        }
        tally.memory.as_ref().unwrap().store(0, u32::MAX);
        tally.add(Refusal::QueueFull);
        let expected = Refused { queue_full: 1 << 32, congested: 2, congested_waits: 1 };
        assert_eq!(reader.read(), expected);
    }

    #[test]
    fn foreign_memory_counts_nothing() {
        let file = File::open("/proc/self/status").unwrap();
        assert!(TallyReader::new(file.into()).is_none());
        let short = SharedMemory::create("short", 8).unwrap();
        let reader = TallyReader::new(short.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(reader.read(), Refused::default());
    }

    #[test]
    fn threads_lose_no_count() {
        let tally = Tally::create().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| tally.add(Refusal::Congested)));
            }
        });
        assert_eq!(reader(&tally).read().congested, 4000);
    }
}
