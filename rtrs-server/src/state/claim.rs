//! The right to write an export's files in the state directory.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rtrs_core::rt::{Account, FilesAs};

use super::disk_file::DiskFile;
use crate::engine::epoch_file::EpochFile;

/// The right to write an export's files, held by one server at a time.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) lock: PathBuf,
    /// Holds the lock until it is closed.
    pub(super) _locked: File,
    pub(super) path: PathBuf,
    /// Opened with the export.
    pub(super) file: Mutex<Option<EpochFile<DiskFile>>>,
    /// Whether a failed save was logged, and no save has succeeded since.
    pub(super) logged: AtomicBool,
}

impl Claim {
    /// Logs that the file is empty because it could not be written, unless that was already logged.
    pub(super) fn log_cleared(&self, number: u64, error: &io::Error) {
        if !self.logged.swap(true, Ordering::Relaxed) {
            tracing::error!(
                epoch = number,
                "cannot write {}: {error}; clients treat the next start of this server as a loss \
                 of unflushed data; free space there",
                self.path.display()
            );
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Removed while the lock is held: a server that waits for the lock then finds the name
        // missing and starts over.
        let _ = fs::remove_file(&self.lock);
    }
}

/// Switches this thread's file accesses to the owner, if there is one.
pub(super) fn files_as(owner: Option<&Account>) -> io::Result<Option<FilesAs>> {
    owner.map(FilesAs::begin).transpose()
}
