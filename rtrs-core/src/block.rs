//! Block devices: the interface between front ends and backends.
//!
//! File backends, client sessions and wrappers around either are all `BlockDevice`s. nbd-bridge
//! serves any block device over NBD, rtrs-server over RTRS. Each shard has its own object for a
//! device and there are no locks between them: a [`BlockSource`] is the shareable description from
//! which every shard opens its own [`BlockDevice`].
//!
//! Contract: `submit` accepts an [`Io`], or returns it if the device is full; each accepted IO
//! yields exactly one [`Completion`] with its tag, in any order. The submitter does not touch the
//! buffer until then, even if the device has meanwhile given up on the IO
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
use crate::status::{IoStatus, Outcome};
use crate::time::Instant;

/// Operation of an IO.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoOp {
    /// Fill the buffer from the device.
    Read,
    /// Write the buffer to the device.
    Write,
    /// Make all writes that completed before this IO was submitted durable.
    Flush,
    /// Discard the content of the range, which may read as anything afterwards.
    Discard,
    /// Make the range read as zeroes.
    WriteZeroes,
    /// Fill the buffer with the extents of the range ([`crate::extents`]): at least the first, and
    /// as many more as fit or as the device examines.
    Extents,
}

impl IoOp {
    /// Returns true if the operation changes the content of a device.
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
    /// The write changes part of one block and leaves the rest of the block intact, even if the
    /// rest is written concurrently. Offset and length are in bytes.
    pub partial: bool,
}

/// IO submitted to a device.
#[derive(Clone, Debug)]
pub struct Io {
    /// Tag chosen by the submitter and returned in the completion; not validated.
    pub tag: u64,
    /// Operation.
    pub op: IoOp,
    /// Modifiers.
    pub flags: IoFlags,
    /// Offset of the first byte on the device. 0 for a flush.
    pub offset: u64,
    /// Length in bytes. 0 for a flush.
    pub len: u32,
    /// Source of a write or target of a read, exactly `len` bytes long; for extents, the buffer for
    /// the answer; None for other operations. Memory in several pieces is a buffer of a scattered
    /// pool ([`Pool::assign`](crate::mem::Pool::assign)).
    pub buf: Option<MemSlice>,
}

/// Completion of an IO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Tag of the IO.
    pub tag: u64,
    /// Status.
    pub status: IoStatus,
    /// Errno for the log ([`Outcome::errno`]).
    pub errno: u16,
}

impl Completion {
    /// Creates the completion of the IO with this tag.
    pub fn new(tag: u64, outcome: impl Into<Outcome>) -> Self {
        let Outcome { status, errno } = outcome.into();
        Self { tag, status, errno }
    }
}

/// Size, limits and capabilities of a device, in bytes unless the name says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Geometry {
    /// Size of the device in bytes; a multiple of `logical_block`.
    pub size: u64,
    /// Logical block size: offset and length of every IO are multiples of this value.
    pub logical_block: u32,
    /// IO unit that the device prefers; a power of two, at least `logical_block`.
    pub physical_block: u32,
    /// Largest read or write accepted in one `Io`. Callers split larger ones.
    pub io_max: u32,
    /// Largest discard accepted in one `Io`.
    pub discard_max: u32,
    /// Largest write zeroes accepted in one `Io`.
    pub zeroes_max: u32,
    /// No write, discard or write zeroes is accepted.
    pub read_only: bool,
    /// The device has a volatile cache: completed writes need a flush to be durable.
    pub write_cache: bool,
    /// `IoFlags::fua` is honored.
    pub fua: bool,
    /// `IoOp::Discard` is accepted and has an effect.
    pub discard: bool,
    /// Granularity of discards; 0 if discards are not supported.
    pub discard_granularity: u32,
    /// Offset of the first discard-aligned byte.
    pub discard_alignment: u32,
    /// Discarded ranges cannot be recovered (secure erase).
    pub secure_discard: bool,
    /// `IoOp::WriteZeroes` is accepted.
    pub write_zeroes: bool,
    /// Write zeroes is quicker than writing zeroes as data (holes).
    pub fast_zero: bool,
    /// Seeks are slow (spinning disk).
    pub rotational: bool,
    /// `IoOp::Extents` is answered.
    pub extents: bool,
    /// `IoFlags::partial` is honored.
    pub partial_writes: bool,
}

impl Geometry {
    /// Geometry of a plain device of `size` bytes: 512-byte blocks, flush and FUA, no discard.
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

    /// Validates an IO against this geometry: range, alignment, buffer, read-only, capabilities.
    /// `Ok` means that a device may run the IO unchanged.
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

/// Returns true if the `len` bytes at `offset` are within one block.
pub const fn is_part_of_block(offset: u64, len: u64, block: u64) -> bool {
    offset % block + len <= block
}

/// Size of a device, shared by all shards that have it open; it can change while the device is
/// open.
#[derive(Debug)]
pub struct SharedSize(AtomicU64);

impl SharedSize {
    /// Creates a shared size.
    pub fn new(bytes: u64) -> Self {
        Self(AtomicU64::new(bytes))
    }

    /// Returns the current size.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    /// Sets the size.
    pub fn set(&self, bytes: u64) {
        self.0.store(bytes, Ordering::SeqCst);
    }
}

/// Size of a target, which may differ from that of its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetSize {
    /// Current size in bytes, rounded down to whole blocks.
    pub bytes: u64,
    /// Shortest size to which the target was truncated from outside, if it was: data beyond it is
    /// lost.
    pub was_cut: Option<u64>,
    /// Whether [`BlockSource::resize`] can only adopt the size, not change it.
    pub is_fixed: bool,
}

/// Environment that a shard provides to a device it opens.
#[derive(Clone, Debug)]
pub struct Core {
    /// Index of the shard within this process, from 0.
    pub index: CoreIndex,
    /// The shard's ring. None in the simulator, where only memory devices run.
    pub ring: Option<Rc<Ring>>,
    /// Wakes the shard; for devices whose operations complete on another thread.
    pub wake: WakeHandle,
}

impl Core {
    /// Environment of a shard that polls its devices and has no ring, as in the simulator.
    pub fn without_ring(index: CoreIndex) -> Self {
        Self { index, ring: None, wake: WakeHandle::idle() }
    }
}

/// Makes a shard poll its devices soon; callable from any thread.
///
/// A device that completes an operation on another thread first stores the result where its `poll`
/// finds it, then wakes the shard, which may be asleep. No `deadline` is needed for that.
#[derive(Clone)]
pub struct WakeHandle(Arc<dyn Fn() + Send + Sync>);

impl WakeHandle {
    /// Creates a handle that calls `wake`.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(wake))
    }

    /// Handle for a shard that polls its devices regardless of wakes.
    pub fn idle() -> Self {
        Self::new(|| {})
    }

    /// Makes the shard poll its devices after this call.
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
    /// Returns size, limits and capabilities.
    fn geometry(&self) -> &Geometry;

    /// Adopts the current size of the source; called before `geometry` is used. Costs one load.
    fn refresh(&mut self) {}

    /// Announces a region whose slices will be used as buffers, so that the device can register it
    /// where that helps or is required. A slice of an unannounced region may be refused with
    /// `Invalid`.
    ///
    /// # Errors
    /// Returns the system's error if the memory cannot be registered; `Unsupported` for a scattered
    /// region unless the device takes memory in pieces.
    fn attach_region(&mut self, region: &Arc<Region>) -> std::io::Result<()> {
        refuse_scattered(region)
    }

    /// Submits an IO.
    ///
    /// # Errors
    /// Returns the IO if the device is full; try again after a completion.
    fn submit(&mut self, io: Io) -> Result<(), Io>;

    /// Makes progress. Returns true if anything happened. Must be called in each turn unless the
    /// device [rests](Self::rests), and occasionally when it does.
    fn poll(&mut self, now: Instant) -> bool;

    /// Returns the tag of an IO that is taking too long, so that its user can be given an error.
    /// The IO continues: a change may still take effect, and its completion still arrives. Must be
    /// called before `reap`, which discards tags that were not taken.
    fn take_given_up(&mut self) -> Option<u64> {
        None
    }

    /// Returns the next completed IO.
    fn reap(&mut self) -> Option<Completion>;

    /// Cancels IOs whose tags match and that have definitely not begun; they complete with
    /// `Aborted`. An IO that has partly begun starts nothing more. A device may ignore this call.
    fn cancel(&mut self, _fits: &dyn Fn(u64) -> bool) {}

    /// Returns the number of IOs that are accepted and not yet reaped.
    fn inflight(&self) -> usize;

    /// Returns true if nothing will happen here until the next IO. False for a device with
    /// background work, such as one that maintains a connection.
    fn rests(&self) -> bool {
        self.inflight() == 0 && self.deadline().is_none()
    }

    /// Transfers the reporting of losses to a caller that answers flushes of several users. Later
    /// flushes of this device then complete as the device completed them, and [`Losses::judge`]
    /// reports losses to their users. None if the flushes themselves report everything.
    fn take_losses(&mut self) -> Option<Arc<Losses>> {
        None
    }

    /// Requests exclusive use of the device, and returns whether no other session can write to it.
    /// Until then the caller submits no IO. Only a device that was opened for a migration is not
    /// exclusive immediately: it becomes exclusive when the session of the old host has ended.
    fn claim(&mut self) -> bool {
        true
    }

    /// Withdraws the request of [`claim`](Self::claim) while the device is not exclusive yet. The
    /// old host keeps it then.
    fn release_claim(&mut self) {}

    /// Returns the number of losses as of the end of the flush that [`reap`](Self::reap) returned
    /// last. Later losses may concern writes acknowledged after that. None after other IO.
    fn losses_at_end(&self) -> Option<u64> {
        None
    }

    /// Returns the time by which `poll` must be called even if nothing happens.
    fn deadline(&self) -> Option<Instant> {
        None
    }
}

/// Refuses a scattered region for a device that takes memory only in one piece.
///
/// # Errors
/// `Unsupported` for a scattered region.
pub fn refuse_scattered(region: &Region) -> std::io::Result<()> {
    if region.is_scattered() {
        let text = "the device does not take memory in several pieces";
        return Err(std::io::Error::new(std::io::ErrorKind::Unsupported, text));
    }
    Ok(())
}

/// Scope within which one sync (a flush, or a write with FUA) can consume the error report of a
/// write that must also reach others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedErrors {
    /// Each sync receives every error that concerns it.
    None,
    /// A flush can consume the report meant for another flush.
    Flushes,
    /// Any sync can consume the report meant for any other.
    Syncs,
}

/// State of a target's path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum TargetName {
    /// The path names the open file or device.
    #[default]
    Kept,
    /// The path names a different file or device.
    Replaced,
    /// Nothing exists at the path.
    Missing,
}

/// Callback that records that a resize is about to lose data; see [`BlockSource::resize`].
pub type Lost<'a> = dyn Fn() -> std::io::Result<()> + 'a;

/// Description of a device from which every shard opens its own queue.
pub trait BlockSource: Send + Sync + fmt::Debug {
    /// Returns size, limits and capabilities.
    fn geometry(&self) -> Geometry;

    /// Returns the identity of the device, if the source knows it.
    fn identity(&self) -> Option<ExportId> {
        None
    }

    /// Returns the size of the underlying target. May block.
    ///
    /// # Errors
    /// Returns the system's error if the target cannot be examined.
    fn target_size(&self) -> std::io::Result<TargetSize> {
        Ok(TargetSize { bytes: self.geometry().size, was_cut: None, is_fixed: false })
    }

    /// Returns true if the target was truncated from outside, as far as is known. Never blocks.
    fn is_cut(&self) -> bool {
        false
    }

    /// Returns the last known state of the target's path; `None` for a source without a path. Never
    /// blocks.
    fn target_name(&self) -> Option<TargetName> {
        None
    }

    /// Returns true if the target was deleted, as far as is known: its content is lost when it is
    /// closed. Never blocks.
    fn is_deleted(&self) -> bool {
        false
    }

    /// Requests an examination of the target's path. Returns the number to pass to
    /// [`is_examined`](Self::is_examined). Never blocks.
    fn examine_name(&self) -> u64 {
        0
    }

    /// Returns true if the examination with this number has ended. Never blocks.
    fn is_examined(&self, _number: u64) -> bool {
        true
    }

    /// Returns why the target cannot be reached at present; its IO waits. Never blocks.
    fn outage(&self) -> Option<String> {
        None
    }

    /// Resizes the device and its target to `size` bytes, a multiple of the block size. May block.
    /// If that loses data, `lost` is called after the last write beyond the new end and before the
    /// data there is discarded. If `lost` fails, no data is lost and the size does not change.
    ///
    /// # Errors
    /// Returns the reason if the device cannot be resized; its size is then unchanged.
    fn resize(&self, _size: u64, _lost: &Lost<'_>) -> std::io::Result<()> {
        Err(std::io::Error::new(std::io::ErrorKind::Unsupported, "its size is fixed"))
    }

    /// Returns true if the content is lost when this process ends, flushed or not.
    fn is_volatile(&self) -> bool {
        false
    }

    /// Returns true if no write of an earlier server process can still take effect: that process
    /// held a lock until its last write had ended, and this process holds the lock now. Also true
    /// if the content was lost with that process.
    fn is_exclusive(&self) -> bool {
        true
    }

    /// Returns true if only devices of this source change the content, at any time. A known extent
    /// list then holds until the next change of one of these devices.
    fn is_sole_writer(&self) -> bool {
        false
    }

    /// Returns how errors of lost writes are shared between syncs. Where an error is reported only
    /// to the first sync, the success of a sync is conclusive only together with the concurrent
    /// ones.
    fn shared_errors(&self) -> SharedErrors {
        SharedErrors::Syncs
    }

    /// Returns the gateway if several servers share the device and only one serves it at a time.
    fn gateway(&self) -> Option<&dyn Gateway> {
        None
    }

    /// Opens this shard's queue.
    ///
    /// # Errors
    /// Returns the system's error if the device cannot be opened.
    fn open(&self, core: &Core) -> std::io::Result<Box<dyn BlockDevice>>;

    /// Makes the writes of all shards durable and returns when that is done. This may wait for the
    /// disk, so no shard calls it. An error reported here is still reported to a later flush. Does
    /// nothing if the device has no durable storage.
    ///
    /// # Errors
    /// Returns the system's error if something could not be written.
    fn settle(&self) -> std::io::Result<()> {
        Ok(())
    }
}
