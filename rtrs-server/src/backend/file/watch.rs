//! Looks whether the target still is what was exported: how long, and what its path leads to.
//!
//! A target that has grown makes its device larger, which clients notice by themselves
//! (`daemon/sizes.rs`). A write past the end of a file that was made shorter would make it longer
//! again, with zeroes where data was. So a thread examines each target once a second, off the
//! shards, since that can block where the file system is remote (`watcher.rs`); and a flush ends
//! with a look of its own (`queue.rs`). Below the lowest end seen, IO goes on; beyond it IO fails
//! until the target is exported anew or resized by command, whatever length it has by then. What
//! was cut off may have been acknowledged and not flushed: one flush fails for each cut, and the
//! engine informs the other sessions. What changed is logged once.
//!
//! A path may come to lead to another file (`mv new.img vol.img`, as rsync, restores and editors
//! do), to another device (udev makes nodes anew), or nowhere. The export keeps what it has open.
//! An export that no session has open is opened again by its path (`daemon/targets.rs`).

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Instant;

use rtrs_core::block::{Lost, TargetName, TargetSize};
use rtrs_core::rt::blkdev;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Duration;

use super::shared::Shared;
use super::watcher::{Examine, Watch, Watcher};
use crate::backend::target::SIZE_MAX;

/// Time for changes beyond the new end of a file that is made shorter.
const CHANGES_MAX: Duration = Duration::from_secs(10);

/// Of all targets of the process.
static WATCHER: Watcher<Shared> = Watcher::new();

/// Has a target examined from now on.
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

/// Bytes that a target has now, and whether it has a name.
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

    /// Notes that the target has so many bytes, and whether it has a name.
    pub(super) fn note(&self, len: u64, named: bool) {
        if self.is_news(len) {
            let _turn = self.resizing.lock();
            // What a shard has found may be older than the last resize.
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

    /// Compares what the path leads to with what is open, and logs a change.
    fn examine_name(&self) {
        let name = match self.name_now() {
            Ok(name) => name,
            Err(error) => return self.cannot_look(&error),
        };
        if self.name.swap(name) == name {
            return;
        }
        let path = self.path.display();
        match name {
            TargetName::Kept => {
                tracing::info!(%path, "the path leads to the exported target again")
            }
            TargetName::Replaced => tracing::error!(
                %path,
                "the path leads to another file or device than the exported one: clients use the \
                 old one until all have closed it; what they write is lost then if it has no \
                 other name: copy it through a client before that"
            ),
            TargetName::Missing => tracing::error!(
                %path,
                "the path leads nowhere: the exported target was renamed or deleted; if it was \
                 deleted, its content is lost when the server ends: copy it through a client \
                 before that"
            ),
        }
    }

    /// What the path leads to.
    fn name_now(&self) -> io::Result<TargetName> {
        let own = self.file.metadata()?;
        let found = match fs::metadata(&self.path) {
            Ok(found) => found,
            Err(error) => {
                let gone = [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory];
                let deleted = !self.device && own.nlink() == 0;
                return match deleted || gone.contains(&error.kind()) {
                    true => Ok(TargetName::Missing),
                    false => Err(error),
                };
            }
        };
        let same = match self.device {
            true => found.file_type().is_block_device() && found.rdev() == own.rdev(),
            false => (found.dev(), found.ino()) == (own.dev(), own.ino()),
        };
        Ok(if same { TargetName::Kept } else { TargetName::Replaced })
    }

    /// Has the target examined, and waits for that so long.
    pub(super) fn look_within(&self, within: Duration) {
        let end = Instant::now() + within;
        let begun = self.looks_begun.load(Ordering::SeqCst);
        self.look();
        while self.looks_ended.load(Ordering::SeqCst) <= begun && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// True for a length that the device has to follow.
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

    /// The target has another length, which is news. `resizing` is held.
    fn take_length(&self, len: u64) {
        let (path, had) = (self.path.display(), self.size.get());
        if len < had {
            self.end.store(len, Ordering::SeqCst);
            tracing::error!(
                bytes = len,
                exported = had,
                "{path}: was made shorter while exported; IO beyond its end fails until the server \
                 exports it anew, or until `export resize --force`"
            );
        } else {
            let size = self.whole_blocks(len);
            self.size.set(size);
            tracing::info!(size, had, "{path}: has grown");
        }
    }

    /// What the target has now.
    pub(super) fn target_size(&self) -> io::Result<TargetSize> {
        let (len, _) = measure(&self.file, self.device)?;
        let cut = Some(self.end.load(Ordering::SeqCst)).filter(|end| *end != u64::MAX);
        Ok(TargetSize { bytes: self.whole_blocks(len), was_cut: cut })
    }

    /// True when the target was made shorter, and no resize has accepted that.
    pub(super) fn is_cut(&self) -> bool {
        self.end.load(Ordering::Relaxed) != u64::MAX
    }

    /// Gives device and target another size; see `BlockSource::resize`.
    pub(super) fn resize(&self, size: u64, lost: &Lost<'_>) -> io::Result<()> {
        let _turn = self.resizing.lock();
        let had = self.size.get();
        let (len, _) = measure(&self.file, self.device)?;
        let has = self.whole_blocks(len);
        let refuse = |why: String| Err(io::Error::new(io::ErrorKind::Unsupported, why));
        if has != size && self.device {
            return refuse(format!(
                "it is a block device of {has} bytes; resize the device itself first, and then the \
                 export without --size"
            ));
        }
        if has != size && self.geometry.read_only {
            return refuse(format!("it is a file of {has} bytes that was opened read-only"));
        }
        // It has grown since it was measured, or is longer than the export is to be: making the
        // export larger cuts nothing of it.
        let is_cut = self.end.load(Ordering::SeqCst) != u64::MAX;
        if size >= had && has > size && !is_cut {
            return refuse(format!(
                "its file has {has} bytes, and would be cut; leave --size out to export all of it"
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
                "writes beyond the new end have not ended in time; nothing is changed, try again",
            )),
        };
        let noted = || if size < had || self.is_cut_unreported() { lost() } else { Ok(()) };
        let set_len = || if has == size { Ok(()) } else { self.file.set_len(size) };
        if let Err(error) = ended().and_then(|()| noted()).and_then(|()| set_len()) {
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
