//! Regular files and block devices on io_uring: opening a path and determining its capabilities.
//!
//! A path is checked once, here, with a clear error for anything that cannot be exported; its
//! capabilities are queried from the system, not assumed. Every shard then opens a
//! `queue::FileDevice` over a duplicate of the one descriptor, so a flush on one shard covers the
//! writes of all shards.
//!
//! - Block devices bypass the page cache if they allow it (`direct=auto`). Regular files use it,
//!   with blocks of 512 bytes; an incomplete last block is not exported. With `direct=on` the block
//!   size is at least what O_DIRECT requires on that file system.
//! - Files in memory (tmpfs, ramfs, hugetlbfs) are read and written directly on the calling shard:
//!   io_uring would pass every such copy to a worker thread, which costs more than the copy. They
//!   have no durability, so their flush completes immediately.
//! - A writable target is locked (`flock`), and a writable block device is claimed (O_EXCL), so
//!   that no other server or mount changes it in the meantime (`lock.rs`). qemu's image locks keep
//!   virtual machines from writing to it (`image_lock.rs`).

mod bounce;
mod image_lock;
mod inflight;
mod lock;
mod queue;
mod regions;
mod shared;
mod shrink;
mod sysfs;
mod thread;
mod watch;
mod watcher;
mod workers;

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rtrs_core::block::{
    BlockDevice, BlockSource, Core, Geometry, Lost, SharedErrors, SharedSize, TargetName,
    TargetSize,
};
use rtrs_core::mem::Region;
use rtrs_core::rt::blkdev::{self, DirectAlign, OpenMode};

use self::lock::Locks;
use self::queue::FileDevice;
use self::shared::{NameCell, Shared, ZEROES};
use self::shrink::Shrinks;
use super::target::{BackendError, Direct, whole_blocks};

/// Largest physical block size to announce, in bytes; RNBD's field has 16 bits.
const PHYSICAL_MAX: u32 = 32 << 10;

/// Options for exporting a path.
#[derive(Clone, Copy, Debug, Default)]
pub struct FileOptions {
    /// Whether to refuse writes.
    pub read_only: bool,
    /// Whether to bypass the page cache.
    pub direct: Direct,
    /// Requested logical block size in bytes, a power of two.
    pub block: Option<u32>,
    /// Whether to export for writing even if the file system has no locks, and without image locks.
    pub no_lock: bool,
}

/// Identity of an open file, the same under all its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    pub(crate) fn of(meta: &Metadata) -> Self {
        Self { device: meta.dev(), inode: meta.ino() }
    }
}

/// A regular file or a block device.
#[derive(Clone, Debug)]
pub struct FileSource {
    shared: Arc<Shared>,
}

impl FileSource {
    /// Opens a path.
    ///
    /// # Errors
    /// An error whose message describes the problem with the path.
    pub fn open(path: &Path, how: FileOptions) -> Result<Self, BackendError> {
        Self::open_at(path, path, how)
    }

    /// Opens `at` like [`open`](Self::open); `path` is used only as its name.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open).
    pub fn open_at(path: &Path, at: &Path, how: FileOptions) -> Result<Self, BackendError> {
        Self::open_with(path, at, how, &lock::SYSTEM)
    }

    fn open_with(
        path: &Path,
        at: &Path,
        how: FileOptions,
        locks: &Locks,
    ) -> Result<Self, BackendError> {
        let FileOptions { read_only, no_lock, .. } = how;
        let opened = Opened::open(path, at, how)?;
        if !read_only {
            opened.check_writable()?;
        }
        locks.guard(path, &opened.file, read_only, no_lock)?;
        if !no_lock {
            image_lock::guard(path, &opened.file, read_only)?;
        }
        let in_memory = blkdev::lives_in_memory(&opened.file).unwrap_or(false) && !opened.device;
        let blocks = !in_memory && !opened.device && !blkdev::tells_blocking(&opened.file);
        let logical = opened.logical_block(how.block)?;
        let base = Geometry {
            logical_block: logical,
            read_only,
            write_cache: true,
            extents: true,
            ..Geometry::plain(opened.exported_size(logical)?)
        };
        let (geometry, punch) = opened.geometry(&base);
        let Opened { file, device, align, .. } = opened;
        let spare = if read_only || in_memory { None } else { open_again(&file).ok() };
        let zeroes = Region::new(ZEROES)
            .map_err(failed(path, "cannot be opened: no memory for a buffer of zeroes"))?;
        let source = Self {
            shared: Arc::new(Shared {
                path: path.to_owned(),
                file,
                spare,
                size: SharedSize::new(geometry.size),
                geometry,
                follows: AtomicBool::new(true),
                shrinks: Shrinks::default(),
                resizing: Mutex::new(()),
                align,
                in_memory,
                blocks,
                punch,
                zero_range: AtomicBool::new(true),
                zeroes,
                thread: OnceLock::new(),
                device,
                exclusive: !no_lock,
                end: AtomicU64::new(u64::MAX),
                reported: AtomicU64::new(u64::MAX),
                name: NameCell::default(),
                looks_begun: AtomicU64::new(0),
                looks_ended: AtomicU64::new(0),
                watch: OnceLock::new(),
            }),
        };
        let watch =
            watch::start(&source.shared).map_err(failed(path, "cannot be watched for changes"))?;
        // The cell is new, so it cannot be set already.
        let _ = source.shared.watch.set(watch);
        Ok(source)
    }

    /// Returns the error with which opening the path would fail, if another program holds the
    /// image. Takes no locks on the image, and does not open it for writing.
    ///
    /// # Errors
    /// Returns an error if that cannot be determined, for example because the path does not exist.
    pub(crate) fn image_holder(
        path: &Path,
        read_only: bool,
    ) -> Result<Option<BackendError>, BackendError> {
        let how = FileOptions { read_only: true, direct: Direct::Off, ..FileOptions::default() };
        let opened = Opened::open(path, path, how)?;
        image_lock::holder(path, &opened.file, read_only)
            .map_err(failed(path, "cannot be queried for its locks"))
    }

    /// Identity of the open file; `None` if the system does not provide it.
    pub(crate) fn file_id(&self) -> Option<FileId> {
        self.shared.file.metadata().ok().map(|meta| FileId::of(&meta))
    }

    /// Whether the target bypasses the page cache.
    pub fn is_direct(&self) -> bool {
        self.shared.align.is_some()
    }
}

impl BlockSource for FileSource {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.shared.size.get(), ..self.shared.geometry.clone() }
    }

    fn is_exclusive(&self) -> bool {
        self.shared.exclusive
    }

    /// A read-only target has no lock, so other programs may write to it. For a device this does
    /// not matter, because it has no holes.
    fn is_sole_writer(&self) -> bool {
        self.shared.exclusive && !self.shared.geometry.read_only && !self.shared.device
    }

    fn target_size(&self) -> io::Result<TargetSize> {
        self.shared.target_size()
    }

    fn is_cut(&self) -> bool {
        self.shared.is_cut()
    }

    fn target_name(&self) -> Option<TargetName> {
        Some(self.shared.name.get())
    }

    fn is_deleted(&self) -> bool {
        self.shared.name.is_deleted()
    }

    fn examine_name(&self) -> u64 {
        self.shared.request_look()
    }

    fn is_examined(&self, number: u64) -> bool {
        self.shared.has_looked(number)
    }

    fn resize(&self, size: u64, lost: &Lost<'_>) -> io::Result<()> {
        self.shared.resize(size, lost)
    }

    fn open(&self, core: &Core) -> io::Result<Box<dyn BlockDevice>> {
        let Some(ring) = &core.ring else {
            let text = format!("{} needs a shard with a ring", self.shared.path.display());
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        };
        Ok(Box::new(FileDevice::new(&self.shared, ring, core.wake.clone())?))
    }

    /// With direct IO, each write reports its own error. A truncated file is reported to one flush,
    /// whichever comes first.
    fn shared_errors(&self) -> SharedErrors {
        if self.is_direct() || self.shared.in_memory {
            SharedErrors::Flushes
        } else {
            SharedErrors::Syncs
        }
    }

    fn settle(&self) -> io::Result<()> {
        if self.shared.geometry.read_only {
            return Ok(());
        }
        self.shared.examine();
        if self.shared.is_cut_unreported() {
            return Err(io::Error::other(
                "the target shrank, and no flush has reported the loss yet",
            ));
        }
        if self.shared.in_memory {
            return Ok(());
        }
        // This sync uses its own descriptor: the kernel reports a failed write once per open file
        // description, and a client's flush must not miss it because it was reported here.
        match (open_again(&self.shared.file), &self.shared.spare) {
            (Ok(file), _) => file.sync_data(),
            // A server that has dropped its privileges may not be able to reopen the file. The
            // spare descriptor can report a failure that a client already knows about, but never
            // hides one.
            (Err(_), Some(spare)) => spare.sync_data(),
            (Err(error), None) => Err(error),
        }
    }
}

/// Opened file or block device that is not yet exported.
struct Opened<'a> {
    path: &'a Path,
    file: File,
    meta: Metadata,
    /// Whether this is a block device, not a regular file.
    device: bool,
    /// Present with direct IO.
    align: Option<DirectAlign>,
}

impl<'a> Opened<'a> {
    /// Opens `at`, and checks that the kind of file did not change in the meantime.
    fn open(path: &'a Path, at: &Path, how: FileOptions) -> Result<Self, BackendError> {
        let FileOptions { read_only, direct, .. } = how;
        let found = std::fs::metadata(at).map_err(|error| refused(path, read_only, error))?;
        let device = kind(path, &found)?;
        let (file, align) = open_file(path, at, read_only, direct, device)?;
        let meta = file.metadata().map_err(failed(path, "cannot be examined"))?;
        if kind(path, &meta)? != device || meta.rdev() != found.rdev() {
            return Err(BackendError::path(path, "changed while it was being opened", "try again"));
        }
        Ok(Self { path, file, meta, device, align })
    }

    fn check_writable(&self) -> Result<(), BackendError> {
        if self.device && blkdev::is_read_only(&self.file).unwrap_or(false) {
            let problem = "is a read-only device";
            return Err(BackendError::path(self.path, problem, "export it with `ro`"));
        }
        if !self.device && blkdev::is_on_hugetlbfs(&self.file).unwrap_or(false) {
            let problem = "is on hugetlbfs, where files cannot be written";
            let hint = "use a file on tmpfs, or mem:SIZE";
            return Err(BackendError::path(self.path, problem, hint));
        }
        Ok(())
    }

    /// Returns the logical block size: the requested one, or the smallest possible.
    fn logical_block(&self, requested: Option<u32>) -> Result<u32, BackendError> {
        let smallest = if self.device {
            let known = blkdev::logical_block(&self.file);
            known.map_err(failed(self.path, "has no known block size"))?
        } else {
            512
        };
        let smallest = smallest.max(self.align.map_or(0, |align| align.offset));
        let logical = requested.unwrap_or(smallest);
        if logical < smallest {
            let problem = format!("needs blocks of {smallest} bytes or more, not {logical}");
            let hint = "leave block-size out, or try direct=off";
            return Err(BackendError::path(self.path, problem, hint));
        }
        Ok(logical)
    }

    /// Returns the size in bytes, rounded down to whole blocks. Less than one block is an error.
    fn exported_size(&self, logical: u32) -> Result<u64, BackendError> {
        let size = if self.device {
            let known = blkdev::device_size(&self.file);
            known.map_err(failed(self.path, "has no known size"))?
        } else {
            self.meta.len()
        };
        let exported = whole_blocks(&self.path.display().to_string(), size, u64::from(logical));
        if exported == 0 {
            let problem = format!("has {size} bytes, less than one block of {logical}");
            let hint = "restore its data, or set its size if it is new";
            return Err(BackendError::path(self.path, problem, hint));
        }
        Ok(exported)
    }

    /// Returns the capabilities, and whether ranges can be zeroed without transferring zeroes.
    fn geometry(&self, base: &Geometry) -> (Geometry, bool) {
        if self.device {
            device_geometry(&self.file, &self.meta, base, self.align.is_some())
        } else {
            file_geometry(&self.file, &self.meta, base)
        }
    }
}

/// Returns a function that converts a system error into an error about the path.
fn failed(path: &Path, problem: &'static str) -> impl FnOnce(io::Error) -> BackendError {
    move |error| BackendError::path(path, problem, "check the device").because(error)
}

/// Opens a file again under a new descriptor, for syncs.
fn open_again(file: &File) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Returns true for a block device, false for a regular file, and an error otherwise.
fn kind(path: &Path, meta: &Metadata) -> Result<bool, BackendError> {
    let kind = meta.file_type();
    if kind.is_file() || kind.is_block_device() {
        return Ok(kind.is_block_device());
    }
    let is = if kind.is_dir() {
        "is a directory"
    } else if kind.is_fifo() {
        "is a pipe"
    } else if kind.is_socket() {
        "is a socket"
    } else {
        "is a character device"
    };
    Err(BackendError::path(path, is, "export a regular file or a block device"))
}

/// Explains why a path could not be opened.
fn refused(path: &Path, read_only: bool, error: io::Error) -> BackendError {
    let (problem, hint) = match error.kind() {
        io::ErrorKind::NotFound => {
            ("does not exist", "check the path, and whether its file system is mounted")
        }
        io::ErrorKind::PermissionDenied if read_only => {
            ("cannot be read", "run as a user who may read it")
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => (
            "cannot be opened for writing",
            "export it with `ro`, or run as a user who may write to it",
        ),
        io::ErrorKind::ResourceBusy => {
            ("is in use, mounted or part of another device", "unmount it, or export it with `ro`")
        }
        _ => ("cannot be opened", "check the path"),
    };
    BackendError::path(path, problem, hint).because(error)
}

/// Opens a file with or without the page cache, as requested and possible.
fn open_file(
    path: &Path,
    at: &Path,
    read_only: bool,
    direct: Direct,
    device: bool,
) -> Result<(File, Option<DirectAlign>), BackendError> {
    let mode = OpenMode { write: !read_only, direct: true, exclusive: device && !read_only };
    if direct == Direct::On || (direct == Direct::Auto && device) {
        let opened = blkdev::open(at, mode).and_then(|file| {
            let memory = !device && blkdev::lives_in_memory(&file)?;
            let align = if memory { None } else { blkdev::direct_align(&file)? };
            Ok((file, align.filter(|align| align.memory <= 4096)))
        });
        match opened {
            Ok((file, Some(align))) => return Ok((file, Some(align))),
            Err(e) if e.kind() != io::ErrorKind::InvalidInput => {
                return Err(refused(path, read_only, e));
            }
            // O_DIRECT is not supported here.
            Ok((_, None)) | Err(_) if direct == Direct::On => {
                let problem = "does not support direct IO (O_DIRECT)";
                return Err(BackendError::path(path, problem, "use direct=auto or direct=off"));
            }
            Ok((_, None)) | Err(_) => {}
        }
    }
    match blkdev::open(at, OpenMode { direct: false, ..mode }) {
        Ok(file) => Ok((file, None)),
        Err(error) => Err(refused(path, read_only, error)),
    }
}

/// Capabilities of a regular file, and whether holes can be punched in it.
fn file_geometry(file: &File, meta: &Metadata, base: &Geometry) -> (Geometry, bool) {
    let logical = base.logical_block;
    // Punching a hole past the end of the file changes nothing, but fails without hole support.
    let past = meta.len().checked_next_multiple_of(1 << 20);
    let punch = !base.read_only
        && past.is_some_and(|at| blkdev::fallocate(file, blkdev::PUNCH_HOLE, at, 4096).is_ok());
    let unit = u32::try_from(meta.blksize()).unwrap_or(4096);
    let physical = if unit.is_power_of_two() { unit } else { 4096 };
    let physical = physical.clamp(logical, PHYSICAL_MAX.max(logical));
    let geometry = Geometry {
        physical_block: physical,
        discard: punch,
        discard_granularity: if punch { physical } else { 0 },
        write_zeroes: !base.read_only,
        fast_zero: punch,
        rotational: sysfs::queue(meta.dev(), "rotational") == Some(1),
        ..base.clone()
    };
    (geometry, punch)
}

/// Capabilities of a block device, and whether it writes zeroes without transferring them.
fn device_geometry(
    file: &File,
    meta: &Metadata,
    base: &Geometry,
    direct: bool,
) -> (Geometry, bool) {
    let (dev, logical) = (meta.rdev(), base.logical_block);
    let physical = blkdev::physical_block(file).ok().filter(|bytes| bytes.is_power_of_two());
    let discard = !base.read_only && sysfs::queue(dev, "discard_max_bytes").unwrap_or(0) > 0;
    let punch = !base.read_only && sysfs::queue(dev, "write_zeroes_max_bytes").unwrap_or(0) > 0;
    let small = |value: Option<u64>| value.and_then(|v| u32::try_from(v).ok()).unwrap_or(0);
    let through = sysfs::queue_text(dev, "write_cache").is_some_and(|mode| mode == "write through");
    let geometry = Geometry {
        physical_block: physical.unwrap_or(4096).clamp(logical, PHYSICAL_MAX.max(logical)),
        write_cache: !(direct && through),
        discard,
        discard_granularity: if discard {
            small(sysfs::queue(dev, "discard_granularity")).max(logical)
        } else {
            0
        },
        discard_alignment: small(sysfs::device(dev, "discard_alignment")),
        write_zeroes: !base.read_only,
        fast_zero: punch,
        rotational: sysfs::queue(dev, "rotational") == Some(1),
        ..base.clone()
    };
    (geometry, punch)
}

#[cfg(test)]
mod tests;
