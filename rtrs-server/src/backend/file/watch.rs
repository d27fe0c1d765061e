//! Looks whether the target still is what was exported: as long, and with a name.
//!
//! A write past the end of a file that was made shorter would make it longer again, with zeroes
//! where data was. So each target has a thread that examines it once a second, off the shards,
//! since that can block where the file system is remote; and a flush ends with a look of its own
//! (`queue.rs`). Below the lowest end seen, IO goes on; beyond it IO fails until the target is
//! exported anew, whatever length it has by then. What was cut off may have been acknowledged and
//! not flushed: one flush fails for each cut, and the engine informs the other sessions. What
//! changed is logged once. The thread ends within a second of its target.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::{self, Thread};
use std::{fs::File, io, time::Duration};

use rtrs_core::rt::blkdev;
use rtrs_core::status::IoStatus;

use super::shared::Shared;

/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Starts the thread of a target.
pub(super) fn start(shared: &Arc<Shared>) -> io::Result<Thread> {
    let target = Arc::downgrade(shared);
    let thread = thread::Builder::new().name("watch-file".into()).spawn(move || watch(&target))?;
    Ok(thread.thread().clone())
}

fn watch(target: &Weak<Shared>) {
    loop {
        thread::park_timeout(LOOK_EVERY);
        let Some(shared) = target.upgrade() else { return };
        shared.examine();
    }
}

/// Bytes that a target has now, and whether a name leads to it.
fn measure(file: &File, device: bool) -> io::Result<(u64, bool)> {
    if device {
        return Ok((blkdev::device_size(file)?, true));
    }
    let meta = file.metadata()?;
    Ok((meta.len(), meta.nlink() > 0))
}

impl Shared {
    /// Looks at the target, notes and reports what has changed.
    pub(super) fn examine(&self) {
        match measure(&self.file, self.device) {
            Ok((len, named)) => self.note(len, named),
            Err(error) => self.cannot_look(&error),
        }
    }

    /// The target could not be examined. That is no sign of a change.
    pub(super) fn cannot_look(&self, error: &io::Error) {
        tracing::debug!("{}: cannot be examined: {error}", self.path.display());
    }

    /// The target has so many bytes, and perhaps a name.
    pub(super) fn note(&self, len: u64, named: bool) {
        let path = self.path.display();
        if len < self.geometry.size && len < self.end.fetch_min(len, Ordering::SeqCst) {
            tracing::error!(
                bytes = len,
                exported = self.geometry.size,
                "{path}: was made shorter while exported; IO beyond its end fails until the server \
                 exports it anew"
            );
        }
        if !named && !self.deleted.swap(true, Ordering::Relaxed) {
            tracing::error!(
                "{path}: was deleted while exported; what is written is lost when the server ends"
            );
        }
    }

    /// How a flush ends that was good so far: it fails when the target was made shorter and no
    /// flush has failed for that.
    pub(super) fn flushed(&self) -> IoStatus {
        let end = self.end.load(Ordering::SeqCst);
        if self.reported.fetch_min(end, Ordering::SeqCst) > end {
            IoStatus::Io
        } else {
            IoStatus::Ok
        }
    }

    /// True when the target was made shorter and no flush has failed for that.
    pub(super) fn is_cut_unreported(&self) -> bool {
        self.reported.load(Ordering::SeqCst) > self.end.load(Ordering::SeqCst)
    }

    /// True for IO that ends beyond the target's end.
    pub(super) fn is_beyond(&self, end: u64) -> bool {
        end > self.end.load(Ordering::Relaxed)
    }
}
