//! Examines a target: its length, and whether its path still leads to it.
//!
//! When a target grows, its device grows too, and clients are informed (`daemon/sizes.rs`). A write
//! past the end of a truncated file would extend it again, with zeroes in place of the data. A
//! thread therefore examines each target once a second, off the shards, because an examination can
//! block on a remote file system (`watcher.rs`); a flush also ends with an examination
//! (`queue.rs`). IO below the lowest observed end continues; IO beyond it fails until the target is
//! exported again or resized by command, whatever the target's length is by then. The truncated
//! data may have been acknowledged but not flushed: one flush fails for each truncation, and the
//! engine informs the other sessions. Each change is logged once.
//!
//! A path may later lead to a different file (`mv new.img vol.img`, as done by rsync, restores and
//! editors), to a different device (udev recreates nodes), or to nothing. The export keeps the
//! target that it has open. An unused export is reopened by its path (`daemon/targets.rs`).

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rtrs_core::block::{Lost, TargetName, TargetSize};
use rtrs_core::rt::blkdev;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Duration;

use super::shared::Shared;
use super::watcher::{Examine, Watch, Watcher};
use crate::backend::target::SIZE_MAX;

/// Maximum time to wait for changes beyond the new end of a file that is being shrunk.
const CHANGES_MAX: Duration = Duration::from_secs(10);

/// Watches all of the process's targets.
static WATCHER: Watcher<Shared> = Watcher::new();

/// Starts examining a target periodically.
pub(super) fn start(shared: &Arc<Shared>) -> io::Result<Watch> {
    WATCHER.add(shared)
}

impl Examine for Shared {
    fn examine_target(&self) {
        let number = self.looks_begun.fetch_add(1, Ordering::SeqCst) + 1;
        self.examine();
        self.examine_name();
        self.looks_ended.fetch_max(number, Ordering::SeqCst);
    }
}

/// Returns a target's current size in bytes, and whether it has a name.
fn measure(file: &File, device: bool) -> io::Result<(u64, bool)> {
    if device {
        return Ok((blkdev::device_size(file)?, true));
    }
    let meta = file.metadata()?;
    Ok((meta.len(), meta.nlink() > 0))
}

impl Shared {
    /// Examines the target, and records and reports changes.
    pub(super) fn examine(&self) {
        match measure(&self.file, self.device) {
            Ok((len, named)) => self.note(len, named),
            Err(error) => self.cannot_look(&error),
        }
    }

    /// Logs that the target could not be examined, which does not indicate a change.
    pub(super) fn cannot_look(&self, error: &io::Error) {
        tracing::debug!("{}: cannot be examined: {error}", self.path.display());
    }

    /// Records the current size of the target in bytes, and whether it has a name.
    pub(super) fn note(&self, len: u64, named: bool) {
        if self.is_news(len) {
            let _turn = self.resizing.lock();
            // A shard's result may be older than the last resize.
            match measure(&self.file, self.device) {
                Ok((len, _)) if self.is_news(len) => self.take_length(len),
                Ok(_) => {}
                Err(error) => self.cannot_look(&error),
            }
        }
        if !named && self.name.get() == TargetName::Kept {
            self.look();
        }
    }

    /// Compares the path's target with the open one, and logs a change.
    fn examine_name(&self) {
        let (name, is_deleted) = match self.name_now() {
            Ok(found) => found,
            Err(error) => return self.cannot_look(&error),
        };
        if self.name.swap(name, is_deleted) == name {
            return;
        }
        let path = self.path.display();
        match name {
            TargetName::Kept => {
                tracing::info!(%path, "the path refers to the exported target again")
            }
            TargetName::Replaced => tracing::error!(
                %path,
                "the path now refers to another file or device: clients use the old target until \
                 all of them close it. Unless the old target has another name, its content is then \
                 lost: copy it through a client first"
            ),
            TargetName::Missing => tracing::error!(
                %path,
                "the path no longer exists: the exported target was renamed or deleted. The \
                 content of a deleted target is lost when the server stops: copy it through a \
                 client first"
            ),
        }
    }

    /// Compares the path with the open target. Also returns whether the target is deleted.
    fn name_now(&self) -> io::Result<(TargetName, bool)> {
        let own = self.file.metadata()?;
        let deleted = !self.device && own.nlink() == 0;
        let found = match fs::metadata(&self.path) {
            Ok(found) => found,
            Err(error) => {
                let gone = [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory];
                return match deleted || gone.contains(&error.kind()) {
                    true => Ok((TargetName::Missing, deleted)),
                    false => Err(error),
                };
            }
        };
        let same = match self.device {
            true => found.file_type().is_block_device() && found.rdev() == own.rdev(),
            false => (found.dev(), found.ino()) == (own.dev(), own.ino()),
        };
        Ok((if same { TargetName::Kept } else { TargetName::Replaced }, deleted))
    }

    /// Requests an examination of the target, and returns its number. An examination that is
    /// already running may have seen an older state.
    pub(super) fn request_look(&self) -> u64 {
        let number = self.looks_begun.load(Ordering::SeqCst) + 1;
        self.look();
        number
    }

    /// Whether the examination with this number, or a later one, has finished.
    pub(super) fn has_looked(&self, number: u64) -> bool {
        self.looks_ended.load(Ordering::SeqCst) >= number
    }

    /// Whether the device must adapt to a length.
    fn is_news(&self, len: u64) -> bool {
        let (size, end) = (self.size.get(), self.end.load(Ordering::SeqCst));
        if len < size {
            return len < end;
        }
        let grows = end == u64::MAX && self.follows.load(Ordering::SeqCst);
        grows && self.whole_blocks(len) > size
    }

    fn whole_blocks(&self, len: u64) -> u64 {
        len.min(SIZE_MAX) / u64::from(self.geometry.logical_block)
            * u64::from(self.geometry.logical_block)
    }

    /// Adapts to a changed length. The caller must hold `resizing`.
    fn take_length(&self, len: u64) {
        let (path, had) = (self.path.display(), self.size.get());
        if len < had {
            self.end.store(len, Ordering::SeqCst);
            tracing::error!(
                bytes = len,
                exported = had,
                "{path}: shrunk while exported; IO beyond the new end fails until the target is \
                 exported again or resized with `export resize` (with --force while it is open)"
            );
        } else {
            let size = self.whole_blocks(len);
            self.size.set(size);
            tracing::info!(size, had, "{path}: has grown");
        }
    }

    /// Current size of the target.
    pub(super) fn target_size(&self) -> io::Result<TargetSize> {
        let (len, _) = measure(&self.file, self.device)?;
        let cut = Some(self.end.load(Ordering::SeqCst)).filter(|end| *end != u64::MAX);
        let is_fixed = self.device || self.geometry.read_only;
        Ok(TargetSize { bytes: self.whole_blocks(len), was_cut: cut, is_fixed })
    }

    /// Whether the target has been truncated and no resize has accepted that.
    pub(super) fn is_cut(&self) -> bool {
        self.end.load(Ordering::Relaxed) != u64::MAX
    }

    /// Resizes the device and its target; see `BlockSource::resize`.
    pub(super) fn resize(&self, size: u64, lost: &Lost<'_>) -> io::Result<()> {
        let _turn = self.resizing.lock();
        let had = self.size.get();
        let (len, _) = measure(&self.file, self.device)?;
        let has = self.whole_blocks(len);
        let refuse = |why: String| Err(io::Error::new(io::ErrorKind::Unsupported, why));
        if has != size && self.device {
            return refuse(format!(
                "the target is a block device of {has} bytes; resize the device first, then the \
                 export without --size"
            ));
        }
        if has != size && self.geometry.read_only {
            return refuse(format!("the target is a file of {has} bytes, opened read-only"));
        }
        // The target has grown since it was measured, or is longer than the requested size:
        // enlarging the export must not truncate it.
        let is_cut = self.end.load(Ordering::SeqCst) != u64::MAX;
        if size >= had && has > size && !is_cut {
            return refuse(format!(
                "its file has {has} bytes and would be truncated; leave out --size to export the \
                 whole file"
            ));
        }
        let followed = self.follows.swap(false, Ordering::SeqCst);
        if size < had {
            self.size.set(size);
        }
        let ended = || match size >= had || self.shrinks.wait(size, CHANGES_MAX) {
            true => Ok(()),
            false => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "writes beyond the new end did not finish in time; nothing was changed; try again",
            )),
        };
        let loses = size < had || has > size || self.is_cut_unreported();
        let noted = || if loses { lost() } else { Ok(()) };
        let set = ended().and_then(|()| noted()).and_then(|()| self.set_len(size, loses));
        if let Err(error) = set {
            self.size.set(had);
            self.follows.store(followed, Ordering::SeqCst);
            return Err(error);
        }
        self.follows.store(size >= had, Ordering::SeqCst);
        self.end.store(u64::MAX, Ordering::SeqCst);
        self.reported.store(u64::MAX, Ordering::SeqCst);
        self.size.set(size);
        Ok(())
    }

    /// Sets the length of a file. A file that has grown since it was measured is truncated only if
    /// `may_truncate`.
    pub(super) fn set_len(&self, size: u64, may_truncate: bool) -> io::Result<()> {
        if self.device {
            return Ok(());
        }
        let (len, _) = measure(&self.file, false)?;
        let has = self.whole_blocks(len);
        if has > size && !may_truncate {
            let why = format!("its file has grown to {has} bytes in the meantime; try again");
            return Err(io::Error::other(why));
        }
        if has == size { Ok(()) } else { self.file.set_len(size) }
    }

    /// Returns the result of an otherwise successful flush, which fails if the target was truncated
    /// and no flush has failed for that reason yet.
    pub(super) fn flushed(&self) -> IoStatus {
        let end = self.end.load(Ordering::SeqCst);
        if self.reported.fetch_min(end, Ordering::SeqCst) > end {
            IoStatus::Io
        } else {
            IoStatus::Ok
        }
    }

    /// Whether the target was truncated and no flush has failed for that reason yet.
    pub(super) fn is_cut_unreported(&self) -> bool {
        self.reported.load(Ordering::SeqCst) > self.end.load(Ordering::SeqCst)
    }

    /// Whether an IO ends beyond the target's end.
    pub(super) fn is_beyond(&self, end: u64) -> bool {
        end > self.end.load(Ordering::Relaxed)
    }
}
