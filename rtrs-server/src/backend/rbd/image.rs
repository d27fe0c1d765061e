//! Ceph block device (RBD) images: opening an image, determining its capabilities, and a shard's IO
//! queue.
//!
//! An export has one cluster client with one open image (`rtrs_core::rbd`); each shard starts its
//! IOs on that image and receives their completions from its own queue. A writable export holds the
//! image's lock while it is open, so that no other client can write. There is no cache:
//! acknowledged data is on the OSDs. IOs have no time limit, because a slow OSD is not a dead one.
//!
//! Blocking operations run elsewhere: opening on a thread with a time limit, size queries on a
//! thread that librbd wakes, and resizing on the command's thread.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::thread;

use parking_lot::Mutex;
use rtrs_core::block::{
    BlockDevice, BlockSource, Completion, Core, Geometry, Io, IoOp, Lost, SharedErrors, SharedSize,
    TargetSize,
};
use rtrs_core::extents;
use rtrs_core::identity::ExportId;
use rtrs_core::rbd::{Image, ImageAddress, ImageFacts, ImageIo, ImageQueue, RbdError, RbdStep};
use rtrs_core::status::{IoStatus, Outcome};
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::errno;

use crate::backend::immediate::Done;
use crate::backend::off_shard::within;
use crate::backend::target::{BackendError, INFLIGHT_MAX, whole_blocks};

/// Minimum unit that an OSD stores; librbd ignores smaller discards.
const DISCARD_GRANULARITY: u32 = 64 << 10;
/// Bounds of the announced maximum IO size, which otherwise equals the object size.
const IO_MAX: (u64, u64) = (1 << 20, 32 << 20);
/// Additional time to open an image if the monitors answer late.
const OSD_MAX: Duration = Duration::from_secs(1);
/// Maximum time to take the lock: a dead client still holds it for 30 s.
const LOCK_MAX: Duration = Duration::from_secs(45);

pub(super) const NO_LOCK_FEATURE: &str =
    "lacks the exclusive-lock feature, which prevents a second writer";

/// Callback that runs on a shard when the cluster refuses a client or its lock is lost.
pub(super) struct Refused(pub(super) Box<dyn Fn() + Send + Sync>);

impl fmt::Debug for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Refused")
    }
}

/// Options for exporting an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdOptions {
    /// Address of the image.
    pub address: ImageAddress,
    /// Requested logical block size in bytes, a power of two.
    pub block: u32,
    /// Whether to export for writing without taking the image's lock.
    pub no_lock: bool,
}

/// An exported image.
#[derive(Debug)]
pub struct RbdSource(pub(super) Arc<Shared>);

#[derive(Debug)]
pub(super) struct Shared {
    /// Name for display.
    name: String,
    pub(super) image: Image,
    geometry: Geometry,
    size: SharedSize,
    /// Smallest size of the image observed below `size`; `u64::MAX` if none.
    end: AtomicU64,
    /// Held to change `size` and `end`.
    resizing: Mutex<()>,
    /// Whether it has already been reported that the cluster refuses this client.
    refused: AtomicBool,
    /// Callback of a gateway, called when the cluster refuses this client.
    refused_to: Option<Refused>,
    /// Whether the image is writable and locked, by the export or by its gateway.
    exclusive: bool,
}

/// Properties of an exported image.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Size in bytes, in whole blocks.
    size: u64,
    block: u32,
    read_only: bool,
    exclusive: bool,
}

impl RbdSource {
    /// Opens an image, and takes its lock for writing.
    ///
    /// # Errors
    /// A message for display that describes the problem.
    pub fn open(name: &str, how: &RbdOptions) -> Result<Self, BackendError> {
        let image = open_image(name, &how.address)?;
        let locks = !how.address.read_only && !how.no_lock;
        let image = if locks { lock(name, image)? } else { image };
        Self::of(name, image, how, None)
    }

    /// Creates a source from an open image.
    pub(super) fn of(
        name: &str,
        image: Image,
        how: &RbdOptions,
        refused_to: Option<Refused>,
    ) -> Result<Self, BackendError> {
        let (block, read_only) = (how.block, how.address.read_only);
        let size = image.size().map_err(|error| system(name, error))?;
        let exported = whole_blocks(name, size, u64::from(block));
        if exported == 0 {
            let problem = format!("has {size} bytes, less than one block of {block}");
            let hint = "give it a size first, as in `rbd resize --size 1G IMAGE`";
            return Err(BackendError::new(name, problem, hint));
        }
        let exclusive = refused_to.is_some() || !how.no_lock;
        let shape = Shape { size: exported, block, read_only, exclusive };
        let made = Self::new(name, image, shape, refused_to);
        made.map_err(|error| system(name, error))
    }

    fn new(
        name: &str,
        image: Image,
        shape: Shape,
        refused_to: Option<Refused>,
    ) -> io::Result<Self> {
        let Shape { size, block, read_only, exclusive } = shape;
        let changes = !read_only;
        let object = image.facts().object_size.clamp(IO_MAX.0, IO_MAX.1);
        let geometry = Geometry {
            logical_block: block,
            io_max: u32::try_from(object).unwrap_or(u32::MAX),
            read_only,
            write_cache: false,
            discard: changes,
            discard_granularity: if changes { DISCARD_GRANULARITY } else { 0 },
            write_zeroes: changes,
            fast_zero: changes,
            extents: true,
            ..Geometry::plain(size)
        };
        let (resized, changed) = mpsc::sync_channel(1);
        let mut image = image;
        image.watch(move || {
            // If the channel is full, the thread has yet to handle the previous wakeup.
            let _ = resized.try_send(());
        })?;
        let shared = Arc::new(Shared {
            name: name.to_owned(),
            image,
            size: SharedSize::new(size),
            geometry,
            end: AtomicU64::new(u64::MAX),
            resizing: Mutex::new(()),
            refused: AtomicBool::new(false),
            refused_to,
            exclusive,
        });
        let target = Arc::downgrade(&shared);
        thread::Builder::new().name("rbd-watch".into()).spawn(move || watch(&target, &changed))?;
        Ok(Self(shared))
    }
}

/// Opens an image without taking its lock.
pub(super) fn open_image(name: &str, address: &ImageAddress) -> Result<Image, BackendError> {
    // The monitors are given the configured time, and the OSDs a little longer.
    let (at, limit) = (address.clone(), address.connect_max + OSD_MAX);
    let image = within("rbd-open", limit, move || Image::open(&at));
    let image = image.map_err(|error| system(name, error))?;
    let image = match image {
        Some(image) => image.map_err(|error| refused(name, address, error))?,
        None => {
            let problem = format!("was not opened within {} s", limit.as_secs());
            let hint = "check monitors and OSDs with `ceph -s`, or set connect-timeout";
            return Err(BackendError::new(name, problem, hint));
        }
    };
    let facts = image.facts();
    if facts.write_back && !address.read_only {
        let problem = "would lose acknowledged writes: its pool or image sets a write cache";
        let hint = "see `rbd config image ls`, and remove rbd_cache or \
                    rbd_persistent_cache_mode there";
        return Err(BackendError::new(name, problem, hint));
    }
    Ok(image)
}

/// Takes an image's lock.
fn lock(name: &str, image: Image) -> Result<Image, BackendError> {
    // Used only in the log and the error.
    let owner = image.lock_owner().ok().flatten();
    if let Some(owner) = &owner {
        tracing::warn!("{name}: waiting for the image lock held by {owner}");
    }
    let locked = within("rbd-lock", LOCK_MAX, move || {
        let locked = image.lock();
        (image, locked)
    });
    let holder = owner.unwrap_or_else(|| "another client".to_owned());
    let in_use = |problem| {
        let hint = "stop the other client (`rbd status IMAGE`, `rbd lock ls IMAGE`), or export it \
                    with `ro`";
        BackendError::new(name, problem, hint)
    };
    match locked.map_err(|error| system(name, error))? {
        Some((image, Ok(()))) => Ok(image),
        Some((_, Err(error))) if error.raw_os_error() == Some(libc::EINVAL) => {
            let hint = "`rbd feature enable IMAGE exclusive-lock`, or set no-lock if no other \
                        program writes to it";
            Err(BackendError::new(name, NO_LOCK_FEATURE, hint))
        }
        Some((_, Err(error))) if error.raw_os_error() == Some(libc::EROFS) => {
            Err(in_use(format!("is in use: {holder} still holds the lock")))
        }
        Some((_, Err(error))) => {
            let hint = "check the cluster with `ceph -s`";
            Err(BackendError::new(name, "cannot be locked", hint).because(error))
        }
        None => {
            let seconds = LOCK_MAX.as_secs();
            Err(in_use(format!("is in use: {holder} has not released its lock within {seconds} s")))
        }
    }
}

pub(super) fn system(name: &str, error: io::Error) -> BackendError {
    BackendError::new(name, "cannot be opened", "try again").because(error)
}

/// Explains why an image could not be opened.
fn refused(name: &str, at: &ImageAddress, error: RbdError) -> BackendError {
    let (step, error) = match error {
        RbdError::Library(why) => {
            let hint = "install the Debian package librbd1, or librbd of Ceph 15 or later";
            return BackendError::new(name, format!("needs librbd.so.1: {why}"), hint);
        }
        RbdError::Step(step, error) => (step, error),
    };
    let ImageAddress { pool, user, .. } = at;
    let (problem, hint) = match (step, error.kind()) {
        (RbdStep::Configuration, io::ErrorKind::NotFound) if at.configuration.is_none() => {
            ("has no Ceph configuration".to_owned(), "write /etc/ceph/ceph.conf, or set conf=PATH")
        }
        (RbdStep::Configuration, _) => {
            let file = at.configuration.as_deref().map(|path| path.display().to_string());
            let file = file.unwrap_or_else(|| "ceph.conf".to_owned());
            (format!("cannot use {file}"), "correct that file, or set conf=PATH")
        }
        (RbdStep::Connect, io::ErrorKind::TimedOut) => (
            format!("cannot reach a monitor within {} s", at.connect_max.as_secs()),
            "check mon_host in ceph.conf and the network, or set connect-timeout",
        ),
        (RbdStep::Connect, io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => (
            format!("cannot connect as client.{user}"),
            "check `user`, the keyring of that user, and mon_host in ceph.conf",
        ),
        (RbdStep::Connect, _) => ("cannot connect to the cluster".to_owned(), "check ceph.conf"),
        (RbdStep::Pool, io::ErrorKind::NotFound) => (
            format!("names the pool {pool:?}, which does not exist"),
            "check the name (`ceph osd pool ls`)",
        ),
        (RbdStep::Image, io::ErrorKind::NotFound) => (
            "does not exist".to_owned(),
            "check the names of namespace, image and snapshot (`rbd ls POOL`, `rbd snap ls`)",
        ),
        (_, io::ErrorKind::PermissionDenied) => (
            format!("may not be opened by client.{user}"),
            "give that user the capabilities `mon 'profile rbd' osd 'profile rbd pool=POOL'`, or \
             set user=USER",
        ),
        _ => ("cannot be opened".to_owned(), "check the cluster with `ceph -s`"),
    };
    BackendError::new(name, problem, hint).because(error)
}

/// Follows the size of an image until its watch, which holds the sender, is closed.
fn watch(target: &Weak<Shared>, changed: &mpsc::Receiver<()>) {
    for () in changed {
        let Some(shared) = target.upgrade() else { return };
        shared.examine();
    }
}

impl Shared {
    /// Checks the current size of the image: adopts growth, and reports a shrink.
    pub(super) fn examine(&self) {
        let _turn = self.resizing.lock();
        let (name, had) = (&self.name, self.size.get());
        let has = match self.image_size() {
            Ok(has) => has,
            Err(error) => return tracing::warn!("{name}: cannot be examined: {error}"),
        };
        if has > had && !self.is_cut() {
            self.size.set(has);
            tracing::info!(size = has, had, "{name}: has grown");
        } else if has < had && self.end.fetch_min(has, Ordering::SeqCst) > has {
            tracing::error!(
                bytes = has,
                exported = had,
                "{name}: shrunk while exported; IO beyond the new end fails until `export resize \
                 --force`"
            );
        }
    }

    /// Returns the image's size in whole blocks. Blocks the thread.
    fn image_size(&self) -> io::Result<u64> {
        let block = u64::from(self.geometry.logical_block);
        Ok(self.image.size()? / block * block)
    }

    fn is_cut(&self) -> bool {
        self.end.load(Ordering::Relaxed) != u64::MAX
    }

    /// Converts the result of an IO.
    fn outcome(&self, op: IoOp, result: isize, len: u32) -> Outcome {
        if result >= 0 {
            let short =
                op == IoOp::Read && !usize::try_from(result).is_ok_and(|n| n == len as usize);
            return if short { IoStatus::Beyond.into() } else { IoStatus::Ok.into() };
        }
        let errno = errno::fit(i32::try_from(result).unwrap_or(i32::MIN));
        // Ceph's EBLOCKLISTED.
        let refused = errno == errno::ESHUTDOWN;
        if let Some(Refused(report)) = &self.refused_to
            && (refused || errno == errno::EROFS)
        {
            if !self.refused.swap(true, Ordering::Relaxed) {
                report();
            }
            return IoStatus::Moved.into();
        }
        if !refused {
            return Outcome { status: IoStatus::from_errno(errno), errno };
        }
        if !self.refused.swap(true, Ordering::Relaxed) {
            tracing::error!(
                "{}: the cluster has blocklisted this server, because another client took the \
                 image; all IO fails until the export is removed and added again",
                self.name
            );
        }
        Outcome { status: IoStatus::NoDevice, errno }
    }
}

impl BlockSource for RbdSource {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.0.size.get(), ..self.0.geometry.clone() }
    }

    fn identity(&self) -> Option<ExportId> {
        let ImageFacts { fsid, pool, image, snapshot, .. } = self.0.image.facts();
        let snapshot = snapshot.map(|number| number.to_string()).unwrap_or_default();
        let parts = [fsid.as_bytes(), &pool.to_le_bytes(), image.as_bytes(), snapshot.as_bytes()];
        Some(ExportId::stable("rbd", &parts))
    }

    fn target_size(&self) -> io::Result<TargetSize> {
        let cut = Some(self.0.end.load(Ordering::SeqCst)).filter(|_| self.0.is_cut());
        let is_fixed = self.0.geometry.read_only;
        Ok(TargetSize { bytes: self.0.image_size()?, was_cut: cut, is_fixed })
    }

    fn is_cut(&self) -> bool {
        self.0.is_cut()
    }

    fn resize(&self, size: u64, lost: &Lost<'_>) -> io::Result<()> {
        let Shared { image, end, geometry, resizing, size: own, .. } = &*self.0;
        let _turn = resizing.lock();
        let (had, has) = (own.get(), self.0.image_size()?);
        if has != size && geometry.read_only {
            let why = format!("the target is an image of {has} bytes, opened read-only");
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        if size >= had && has > size && !self.0.is_cut() {
            let why = format!(
                "its image has {has} bytes and would be truncated; leave out --size to export the \
                 whole image"
            );
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        if size < had {
            own.set(size);
        }
        let loses = size < had || has > size || self.0.is_cut();
        let noted = if loses { lost() } else { Ok(()) };
        let resized = noted.and_then(|()| if has == size { Ok(()) } else { image.resize(size) });
        resized.inspect_err(|_| own.set(had))?;
        end.store(u64::MAX, Ordering::SeqCst);
        own.set(size);
        Ok(())
    }

    fn is_exclusive(&self) -> bool {
        self.0.exclusive
    }

    /// No errors are shared: each IO has its own.
    fn shared_errors(&self) -> SharedErrors {
        SharedErrors::None
    }

    fn open(&self, core: &Core) -> io::Result<Box<dyn BlockDevice>> {
        Ok(Box::new(RbdDevice {
            geometry: self.geometry(),
            queue: self.0.image.queue(INFLIGHT_MAX, core.wake.clone()),
            unused: Vec::with_capacity(INFLIGHT_MAX),
            started: 0,
            done: Done::new(),
            shared: Arc::clone(&self.0),
        }))
    }
}

/// A shard's queue.
#[derive(Debug)]
struct RbdDevice {
    geometry: Geometry,
    queue: Arc<ImageQueue>,
    /// Boxed, because librbd holds their addresses while they run.
    #[allow(clippy::vec_box)]
    unused: Vec<Box<ImageIo>>,
    started: usize,
    done: Done,
    shared: Arc<Shared>,
}

impl BlockDevice for RbdDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn refresh(&mut self) {
        self.geometry.size = self.shared.size.get();
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.inflight() >= INFLIGHT_MAX {
            return Err(io);
        }
        self.refresh();
        let mut status = self.geometry.check(&io);
        let ends = io.offset.saturating_add(u64::from(io.len));
        if status.is_ok() && ends > self.shared.end.load(Ordering::Relaxed) {
            status = IoStatus::Beyond;
        }
        // Allocation is never fast.
        if io.op == IoOp::WriteZeroes && io.flags.fast_only && io.flags.no_unmap {
            status = IoStatus::Unsupported;
        }
        match (status, io.op, &io.buf) {
            (IoStatus::Ok, IoOp::Extents, Some(room)) => {
                extents::all_data(room, self.geometry.size - io.offset);
            }
            (IoStatus::Ok, IoOp::Flush, _) if self.geometry.read_only => {}
            (IoStatus::Ok, ..) => {
                let slot = self.unused.pop().unwrap_or_else(ImageIo::unused);
                self.started += 1;
                self.shared.image.start(slot, io, &self.queue);
                return Ok(());
            }
            _ => {}
        }
        self.done.push(io.tag, status);
        Ok(())
    }

    fn poll(&mut self, _now: Instant) -> bool {
        let before = self.done.len();
        self.queue.look();
        while let Some(slot) = self.queue.take() {
            self.done.push(slot.tag, self.shared.outcome(slot.op, slot.result, slot.len));
            self.started -= 1;
            self.unused.push(slot);
        }
        self.done.len() > before
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop()
    }

    fn inflight(&self) -> usize {
        self.started + self.done.len()
    }

    fn deadline(&self) -> Option<Instant> {
        self.done.deadline()
    }
}
