//! `BlockDevice`: the one trait in the middle.
//!
//! A file backend is a `BlockDevice`, a client session is one, a wrapper around either is one.
//! nbd-bridge serves any of them over NBD, rtrs-server serves any of them over RTRS. Each shard
//! has its own object for a device and there are no locks between them: a [`BlockSource`] is the
//! shareable description from which every shard opens its own [`BlockDevice`].
//!
//! Contract: `submit` takes an [`Io`] or gives it back when the device is full; each accepted IO
//! yields exactly one [`Completion`] with its tag, in any order. The buffer stays untouched by
//! the submitter until then, also if the device has meanwhile given the IO up
//! ([`BlockDevice::take_given_up`]).

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::extents;
use crate::gateway::Gateway;
use crate::identity::ExportId;
use crate::ids::CoreIndex;
use crate::losses::Losses;
use crate::mem::{MemSlice, Region};
use crate::rt::Ring;
use crate::status::IoStatus;
use crate::time::Instant;

/// What an IO does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoOp {
    /// Fill the buffer from the device.
    Read,
    /// Store the buffer on the device.
    Write,
    /// Make every write completed before this was submitted durable.
    Flush,
    /// The range's content is no longer wanted; it may read as anything afterwards.
    Discard,
    /// The range reads as zeroes afterwards.
    WriteZeroes,
    /// Fill the buffer with the extents of the range ([`crate::extents`]), as far as it takes them
    /// or the device looks; at least the first.
    Extents,
}

impl IoOp {
    /// True for what changes the content of a device.
    pub const fn changes(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes)
    }
}

/// Modifiers of an IO.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct IoFlags {
    /// The write, discard or write zeroes is durable when it completes.
    pub fua: bool,
    /// Write zeroes must leave the range allocated (NBD NO_HOLE, kernel NOUNMAP).
    pub no_unmap: bool,
    /// Write zeroes must fail with `Unsupported` unless it is quicker than writing zeroes.
    pub fast_only: bool,
    /// The write changes a part of one block and leaves the rest of it as it is, whoever changes
    /// that meanwhile. Its offset and length are in bytes.
    pub partial: bool,
}

/// One IO on its way to a device.
#[derive(Clone, Debug)]
pub struct Io {
    /// Chosen by the submitter, returned in the completion, not validated.
    pub tag: u64,
    /// What to do.
    pub op: IoOp,
    /// How to do it.
    pub flags: IoFlags,
    /// First byte on the device. 0 for a flush.
    pub offset: u64,
    /// Length in bytes. 0 for a flush.
    pub len: u32,
    /// Source of a write or target of a read, exactly `len` bytes; room for the answer of extents;
    /// None for the other ops.
    pub buf: Option<MemSlice>,
}

/// The end of one IO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The tag of the IO.
    pub tag: u64,
    /// How it ended.
    pub status: IoStatus,
}

/// Size, limits and abilities of a device. Byte units unless the name says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Geometry {
    /// Size of the device in bytes; a multiple of `logical_block`.
    pub size: u64,
    /// Smallest unit of IO: offset and length of every IO are multiples of it.
    pub logical_block: u32,
    /// Unit the device prefers; a power of two, at least `logical_block`.
    pub physical_block: u32,
    /// Largest read or write taken in one `Io`. Callers split above it.
    pub io_max: u32,
    /// Largest discard taken in one `Io`.
    pub discard_max: u32,
    /// Largest write zeroes taken in one `Io`.
    pub zeroes_max: u32,
    /// No write, discard or write zeroes is accepted.
    pub read_only: bool,
    /// There is a volatile cache: completed writes need a flush to be durable.
    pub write_cache: bool,
    /// `IoFlags::fua` is honored.
    pub fua: bool,
    /// `IoOp::Discard` is accepted and does something.
    pub discard: bool,
    /// Granularity of discards; 0 when there are none.
    pub discard_granularity: u32,
    /// Offset of the first discard-aligned byte.
    pub discard_alignment: u32,
    /// Discarded ranges cannot be recovered (secure erase).
    pub secure_discard: bool,
    /// `IoOp::WriteZeroes` is accepted.
    pub write_zeroes: bool,
    /// Write zeroes is quicker than writing zeroes (holes).
    pub fast_zero: bool,
    /// Seeks are slow (spinning disk).
    pub rotational: bool,
    /// `IoOp::Extents` is answered.
    pub extents: bool,
    /// `IoFlags::partial` is honored.
    pub partial_writes: bool,
}

impl Geometry {
    /// A plain device of `size` bytes with 512-byte blocks, flush, FUA, and no discard.
    pub fn plain(size: u64) -> Self {
        Self {
            size,
            logical_block: 512,
            physical_block: 4096,
            io_max: 32 << 20,
            discard_max: 1 << 30,
            zeroes_max: 1 << 30,
            write_cache: true,
            fua: true,
            ..Self::default()
        }
    }

    /// Validates an IO against this geometry: range, alignment, buffer, read-only, abilities.
    /// `Ok` means that a device may run it as it is.
    pub fn check(&self, io: &Io) -> IoStatus {
        if io.op == IoOp::Flush {
            return IoStatus::Ok;
        }
        if io.op.changes() && self.read_only {
            return IoStatus::ReadOnly;
        }
        let block = u64::from(self.logical_block);
        let len = u64::from(io.len);
        let fits_blocks = if io.flags.partial {
            io.op == IoOp::Write && is_part_of_block(io.offset, len, block)
        } else {
            io.offset.is_multiple_of(block) && len.is_multiple_of(block)
        };
        if !fits_blocks || len == 0 {
            return IoStatus::Invalid;
        }
        match io.offset.checked_add(len) {
            Some(end) if end <= self.size => {}
            _ if !io.op.changes() => return IoStatus::Invalid,
            _ => return IoStatus::NoSpace,
        }
        match io.op {
            IoOp::Write if io.flags.partial && !self.partial_writes => IoStatus::Unsupported,
            IoOp::Read | IoOp::Write => {
                let fits = io.buf.as_ref().is_some_and(|b| b.len() == io.len as usize);
                if !fits || io.len > self.io_max { IoStatus::Invalid } else { IoStatus::Ok }
            }
            IoOp::Extents if !self.extents => IoStatus::Unsupported,
            IoOp::Extents => {
                let fits = io.buf.as_ref().is_some_and(|buf| buf.len() >= extents::LEN_MIN);
                if fits { IoStatus::Ok } else { IoStatus::Invalid }
            }
            IoOp::Discard if !self.discard => IoStatus::Unsupported,
            IoOp::WriteZeroes if !self.write_zeroes => IoStatus::Unsupported,
            IoOp::WriteZeroes if io.flags.fast_only && !self.fast_zero => IoStatus::Unsupported,
            IoOp::Discard if io.len > self.discard_max => IoStatus::Invalid,
            IoOp::WriteZeroes if io.len > self.zeroes_max => IoStatus::Invalid,
            _ => IoStatus::Ok,
        }
    }
}

/// True when so many bytes from there on lie in one block.
pub const fn is_part_of_block(offset: u64, len: u64, block: u64) -> bool {
    offset % block + len <= block
}

/// The size of a device that may change while shards have it open: one number for all of them.
#[derive(Debug)]
pub struct SharedSize(AtomicU64);

impl SharedSize {
    /// A size in bytes.
    pub fn new(bytes: u64) -> Self {
        Self(AtomicU64::new(bytes))
    }

    /// The size as it is now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    /// From now on it is this one.
    pub fn set(&self, bytes: u64) {
        self.0.store(bytes, Ordering::SeqCst);
    }
}

/// What is known of a target whose size may differ from that of its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetSize {
    /// Bytes that it has now, in whole blocks.
    pub bytes: u64,
    /// It was shorter meanwhile, to this end: what lay beyond is lost.
    pub was_cut: Option<u64>,
}

/// What a shard gives a device that opens on it.
#[derive(Clone, Debug)]
pub struct Core {
    /// Which shard of this process, from 0.
    pub index: CoreIndex,
    /// The shard's ring. None in the simulator, where only memory devices run.
    pub ring: Option<Rc<Ring>>,
    /// For a device whose operations end on another thread.
    pub wake: WakeHandle,
}

impl Core {
    /// A shard that polls its devices and has no ring, as in the simulator.
    pub fn without_ring(index: CoreIndex) -> Self {
        Self { index, ring: None, wake: WakeHandle::idle() }
    }
}

/// Makes a shard poll its devices soon, from any thread.
///
/// A device that has completed something on another thread puts that where its `poll` finds it, and
/// wakes then: the shard may be asleep. No `deadline` is needed for that.
#[derive(Clone)]
pub struct WakeHandle(Arc<dyn Fn() + Send + Sync>);

impl WakeHandle {
    /// Wakes by calling this.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(wake))
    }

    /// Of a shard that polls its devices whether it is woken or not.
    pub fn idle() -> Self {
        Self::new(|| {})
    }

    /// Has the shard poll its devices after this call.
    pub fn wake(&self) {
        (self.0)();
    }
}

impl fmt::Debug for WakeHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WakeHandle")
    }
}

/// One shard's queue of a block device.
pub trait BlockDevice: fmt::Debug {
    /// Size, limits and abilities.
    fn geometry(&self) -> &Geometry;

    /// Takes over the present size of its source, before `geometry` is used. One load.
    fn refresh(&mut self) {}

    /// Makes a region known whose slices will be used as buffers, so that the device can
    /// register it where that helps or is needed. A slice of an unknown region may be refused
    /// with `Invalid`.
    ///
    /// # Errors
    /// The system's error when memory cannot be registered.
    fn attach_region(&mut self, _region: &Arc<Region>) -> std::io::Result<()> {
        Ok(())
    }

    /// Takes an IO.
    ///
    /// # Errors
    /// Gives the IO back when the device is full; try again after a completion.
    fn submit(&mut self, io: Io) -> Result<(), Io>;

    /// Moves work on. True when anything happened. To be called in each turn unless the device
    /// [rests](Self::rests), and at times when it does.
    fn poll(&mut self, now: Instant) -> bool;

    /// The tag of an IO that takes too long: its user is to be told that it has failed. The IO goes
    /// on, a change of it may still take effect, and its completion comes all the same. To be taken
    /// before `reap`, which forgets what was not.
    fn take_given_up(&mut self) -> Option<u64> {
        None
    }

    /// The next finished IO.
    fn reap(&mut self) -> Option<Completion>;

    /// Takes back what has certainly not begun of the IOs whose tags fit: such an IO ends with
    /// `Aborted`, and one that has begun in part begins nothing more. A device may ignore it.
    fn cancel(&mut self, _fits: &dyn Fn(u64) -> bool) {}

    /// Accepted and not yet reaped.
    fn inflight(&self) -> usize;

    /// Nothing happens here until the next IO. False for a device that has more to do, such as one
    /// that keeps a connection.
    fn rests(&self) -> bool {
        self.inflight() == 0 && self.deadline().is_none()
    }

    /// Hands over the reporting of losses, to a caller that answers flushes of several users. A
    /// later flush of this device ends as the device ended it, and [`Losses::judge`] reports
    /// losses to its user. None where the flushes themselves report everything.
    fn take_losses(&mut self) -> Option<Arc<Losses>> {
        None
    }

    /// When `poll` wants to be called even if nothing happens.
    fn deadline(&self) -> Option<Instant> {
        None
    }
}

/// Which syncs (flushes, and writes with FUA) may take the report of a lost write from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedErrors {
    /// None: each sync gets every error that concerns it.
    None,
    /// A flush may, from another flush.
    Flushes,
    /// Any may, from any other.
    Syncs,
}

/// What the path of a target leads to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum TargetName {
    /// The file or device that is open.
    #[default]
    Kept,
    /// Another file or device.
    Replaced,
    /// Nothing.
    Missing,
}

/// Notes that a resize is about to lose data; see [`BlockSource::resize`].
pub type Lost<'a> = dyn Fn() -> std::io::Result<()> + 'a;

/// A device that every shard can open for itself.
pub trait BlockSource: Send + Sync + fmt::Debug {
    /// Size, limits and abilities.
    fn geometry(&self) -> Geometry;

    /// Which one it is, where it knows that itself.
    fn identity(&self) -> Option<ExportId> {
        None
    }

    /// The size of what is behind it. May block; an error is the system's.
    ///
    /// # Errors
    /// The system's error when that cannot be examined.
    fn target_size(&self) -> std::io::Result<TargetSize> {
        Ok(TargetSize { bytes: self.geometry().size, was_cut: None })
    }

    /// True when what is behind it was made shorter from outside, as far as is known. Never blocks.
    fn is_cut(&self) -> bool {
        false
    }

    /// What the path of the target leads to, as far as is known; `None` for a source without a
    /// path. Never blocks.
    fn target_name(&self) -> Option<TargetName> {
        None
    }

    /// Examines what the path leads to now. Blocks for at most about this long.
    fn examine_name(&self, _within: crate::time::Duration) {}

    /// Gives it another size, in whole blocks, with what is behind it. May block. If something is
    /// lost by that, `lost` is called: after nothing is written beyond the new end any more, and
    /// before what lies there is gone. If that fails, nothing is lost, and it has its former size.
    ///
    /// # Errors
    /// Why that cannot be; then it is as it was.
    fn resize(&self, _size: u64, _lost: &Lost<'_>) -> std::io::Result<()> {
        Err(std::io::Error::new(std::io::ErrorKind::Unsupported, "its size is fixed"))
    }

    /// True when the content ends with this process, flushed or not.
    fn is_volatile(&self) -> bool {
        false
    }

    /// Whether no write of an earlier process of the server can take effect any more: that process
    /// held a lock until its last write had ended, and this one holds the lock now. True too where
    /// the content ended with that process.
    fn is_exclusive(&self) -> bool {
        true
    }

    /// Where the error of a lost write is reported to one sync only, whichever comes first, the
    /// success of a sync says something only when those beside it are known.
    fn shared_errors(&self) -> SharedErrors {
        SharedErrors::Syncs
    }

    /// Set where several servers share it, of which one serves it at a time.
    fn gateway(&self) -> Option<&dyn Gateway> {
        None
    }

    /// Opens this shard's queue.
    ///
    /// # Errors
    /// The system's error when the device cannot be opened.
    fn open(&self, core: &Core) -> std::io::Result<Box<dyn BlockDevice>>;

    /// Makes durable what was written on any shard, and returns when that is done: it may wait for
    /// the disk, so no shard calls it. An error here takes none away from a later flush. Nothing to
    /// do where nothing is durable.
    ///
    /// # Errors
    /// The system's error when something could not be written.
    fn settle(&self) -> std::io::Result<()> {
        Ok(())
    }
}
