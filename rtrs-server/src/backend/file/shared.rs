//! State of one opened file or block device, shared by all shards.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rtrs_core::block::{Geometry, SharedSize, TargetName};
use rtrs_core::mem::Region;
use rtrs_core::rt::blkdev::DirectAlign;

use super::shrink::Shrinks;
use super::thread::TargetThread;
use super::watcher::Watch;

/// Number of zero bytes written at a time if there is no faster method.
pub(super) const ZEROES: usize = 1 << 20;

/// State of one opened target, shared by all shards.
pub(super) struct Shared {
    pub(super) path: PathBuf,
    pub(super) file: File,
    /// Separately opened descriptor for syncs, used if the target cannot be reopened.
    pub(super) spare: Option<File>,
    /// Geometry at the time of opening.
    pub(super) geometry: Geometry,
    /// Current size, in whole blocks.
    pub(super) size: SharedSize,
    /// Whether the size grows with the target, which is the case until the target is shrunk.
    pub(super) follows: AtomicBool,
    /// Shrinks, which wait for changes past the new end.
    pub(super) shrinks: Shrinks,
    /// Held to change `size`, `follows`, `end` and `reported`.
    pub(super) resizing: Mutex<()>,
    /// Set when O_DIRECT is in use.
    pub(super) align: Option<DirectAlign>,
    pub(super) in_memory: bool,
    /// Whether the submission of a read or write may block: the target is a file whose file system
    /// cannot report that an operation would block (`rt::blkdev::tells_blocking`).
    pub(super) blocks: bool,
    /// Whether holes can be punched; for a device, whether zeroes can be written without
    /// transferring them.
    pub(super) punch: bool,
    /// Whether to use ZERO_RANGE: false once the file system has refused it.
    pub(super) zero_range: AtomicBool,
    pub(super) zeroes: Arc<Region>,
    /// Thread for blocking operations, started when first needed.
    pub(super) thread: OnceLock<TargetThread>,
    /// Whether the target is a block device.
    pub(super) device: bool,
    /// Whether the target is writable and locked.
    pub(super) exclusive: bool,
    /// Lowest end observed below the size, or `u64::MAX`.
    pub(super) end: AtomicU64,
    /// End of the target for which a flush last failed, or `u64::MAX`.
    pub(super) reported: AtomicU64,
    /// The path's target as of the last examination.
    pub(super) name: NameCell,
    /// Numbers of the last examination to begin and of the last to finish.
    pub(super) looks_begun: AtomicU64,
    pub(super) looks_ended: AtomicU64,
    /// Watcher of the target.
    pub(super) watch: OnceLock<Watch>,
}

/// A [`TargetName`] that threads share, and whether the target is deleted.
#[derive(Debug, Default)]
pub(super) struct NameCell(AtomicU8);

impl NameCell {
    /// Set if the target has no name left.
    const DELETED: u8 = 1 << 7;

    pub(super) fn get(&self) -> TargetName {
        Self::name(self.0.load(Ordering::Relaxed))
    }

    /// Whether the target has no name left, so that closing it loses its content.
    pub(super) fn is_deleted(&self) -> bool {
        self.0.load(Ordering::Relaxed) & Self::DELETED != 0
    }

    /// Records the state of the path and of the target. Returns the path's previous state.
    pub(super) fn swap(&self, name: TargetName, is_deleted: bool) -> TargetName {
        let deleted = if is_deleted { Self::DELETED } else { 0 };
        Self::name(self.0.swap(name as u8 | deleted, Ordering::Relaxed))
    }

    const fn name(number: u8) -> TargetName {
        match number & !Self::DELETED {
            1 => TargetName::Replaced,
            2 => TargetName::Missing,
            _ => TargetName::Kept,
        }
    }
}

impl Shared {
    /// Returns the thread for blocking operations, starting it if necessary.
    pub(super) fn thread(&self) -> io::Result<&TargetThread> {
        if let Some(thread) = self.thread.get() {
            return Ok(thread);
        }
        // Another shard may do the same; in that case one of the two threads exits immediately.
        let started = TargetThread::start(self.file.try_clone()?)?;
        Ok(self.thread.get_or_init(|| started))
    }

    /// Requests that the target be examined soon.
    pub(super) fn look(&self) {
        if let Some(watch) = self.watch.get() {
            watch.look();
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("File").field("path", &self.path).finish_non_exhaustive()
    }
}
