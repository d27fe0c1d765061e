//! One shard's queue of a file or block device.
//!
//! An accepted IO takes a slot and passes through phases, one operation of the ring at a time: a
//! short transfer is continued; write zeroes tries the fastest method of the target and falls back
//! to writing zeroes in pieces; a discard or write zeroes with FUA ends with `fdatasync`, and a
//! write with FUA uses RWF_DSYNC. Slots, tables and bounce buffers are allocated once. With
//! O_DIRECT, a buffer with an unaligned address uses a bounce buffer, of which there are few;
//! without a free one the IO is returned.
//!
//! Some operations block in a worker thread of the ring: syncs, holes, and direct IO that finds no
//! free tag at the device. All exports of a shard share these threads. Each export has its own
//! share ([`WORKERS`]), so that a hanging export cannot take all; operations beyond it wait here.
//! Direct IO is first submitted so that it fails instead of blocking.
//!
//! Two kinds of transfers may block and are not limited. On a device without NOWAIT (dm-crypt,
//! dm-thin, bcache, DRBD) direct IO holds a thread until it completes, so a limit would be one on
//! requests in flight. Reads and writes of files through the page cache block on file systems
//! without nonblocking reads (NFS, FUSE). An export that hangs in these cases can delay the others
//! of its shard. Writes to a block device through the page cache are limited, even on kernels that
//! have no nonblocking writes (Linux 6.1: EOPNOTSUPP).

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Weak};

use rtrs_core::block::{BlockDevice, Completion, Geometry, Io, IoFlags, IoOp, WakeHandle};
use rtrs_core::extents;
use rtrs_core::mem::{MemSlice, Pool, Region};
use rtrs_core::rt::blkdev::{FileFacts, PUNCH_HOLE, ZERO_RANGE};
use rtrs_core::rt::{Completed, Fd, Op, Port, Ring};
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant, earliest};

use super::shared::{Shared, ZEROES};
use super::shrink::Changes;
use super::thread::{Answer, Job, Reply, Work};
use crate::backend::immediate::Done;
use crate::backend::target::INFLIGHT_MAX;

/// Maximum number of operations that may occupy worker threads of the ring at once. All exports of
/// a shard share the threads, and each adds as many as it may occupy, so that a hanging export
/// leaves those of the others free.
pub(super) const WORKERS: usize = 32;
const WORKERS_SIGNED: i32 = 32;
const BOUNCE_COUNT: u32 = 16;
const BOUNCE: usize = 128 << 10;
/// Maximum number of repetitions of an operation that the system interrupted.
const RETRIES_MAX: u8 = 16;
/// Pause before a job is offered again to a thread with a full queue.
const FULL_PAUSE: Duration = Duration::from_millis(1);
/// Interval between checks for dropped regions.
const SWEEP: Duration = Duration::from_secs(1);

/// Phase of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Transfer,
    Punch,
    ZeroRange,
    WriteZeroes,
    Discard,
    Extents,
    /// A sync; after a flush also an examination of the file's length.
    Sync,
}

#[derive(Debug)]
struct Slot {
    tag: u64,
    op: IoOp,
    flags: IoFlags,
    offset: u64,
    len: usize,
    buf: Option<MemSlice>,
    /// Number of bytes done.
    done: usize,
    phase: Phase,
    bounce: Option<u32>,
    retries: u8,
    /// Whether its operation was submitted so that it fails instead of blocking.
    tried: bool,
    /// Whether it would block, so that the next operation may wait in a worker thread.
    may_block: bool,
    /// Whether it holds one of the [`WORKERS`].
    worker: bool,
}

/// The queue's connection to the target's thread.
struct ThreadEnd {
    reply: Reply,
    answers: Receiver<Answer>,
    /// Slots whose job found the thread's queue full.
    queued: VecDeque<u32>,
}

impl ThreadEnd {
    fn answer(&self) -> Option<Answer> {
        self.answers.try_recv().ok()
    }
}

pub(super) struct FileDevice {
    shared: Arc<Shared>,
    geometry: Geometry,
    fd: Fd,
    port: Port,
    /// Slots allocated on demand, because most exports have little load.
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    done: Done,
    /// Whether operations on the target can fail instead of blocking (RWF_NOWAIT).
    pub(super) nowait: bool,
    /// Whether the target is a block device through the page cache.
    pub(super) cached_device: bool,
    /// Number of free workers of the [`WORKERS`].
    workers: usize,
    /// Slots that wait for a worker.
    waiting: VecDeque<u32>,
    bounce: Option<Pool>,
    thread: ThreadEnd,
    /// Unused result buffers of flushes.
    facts: Vec<FileFacts>,
    changes: Changes,
    /// Regions attached to the ring by this queue, by ID.
    regions: Vec<(u64, Weak<Region>)>,
    now: Instant,
    sweep_at: Instant,
    /// All operations in the order of submission.
    #[cfg(test)]
    pub(super) trace: Vec<String>,
}

impl FileDevice {
    pub(super) fn new(shared: &Arc<Shared>, ring: &Rc<Ring>, wake: WakeHandle) -> io::Result<Self> {
        let (answer, answers) = channel();
        let queued = VecDeque::with_capacity(INFLIGHT_MAX);
        let thread = ThreadEnd { reply: Reply { answer, wake }, answers, queued };
        let bounce = match shared.align {
            Some(_) => Some(Pool::new(BOUNCE_COUNT, BOUNCE)?),
            None => None,
        };
        if let Err(error) = ring.add_workers(WORKERS_SIGNED) {
            tracing::warn!(
                %error,
                "cannot set the number of worker threads; an export that hangs may delay others"
            );
        }
        Ok(Self {
            geometry: shared.geometry.clone(),
            fd: Fd::new(shared.file.try_clone()?),
            port: ring.port(),
            slots: Vec::new(),
            free: Vec::new(),
            done: Done::new(),
            nowait: shared.align.is_some() || shared.device,
            cached_device: shared.align.is_none() && shared.device,
            workers: WORKERS,
            waiting: VecDeque::with_capacity(INFLIGHT_MAX),
            bounce,
            thread,
            facts: Vec::new(),
            changes: shared.shrinks.join(),
            regions: Vec::new(),
            now: Instant::ZERO,
            sweep_at: Instant::ZERO,
            shared: Arc::clone(shared),
            #[cfg(test)]
            trace: Vec::new(),
        })
    }

    /// Takes a slot for one more IO, of which there are at most [`INFLIGHT_MAX`].
    #[allow(clippy::cast_possible_truncation, reason = "INFLIGHT_MAX is small")]
    fn take_slot(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        })
    }

    fn slot(&mut self, index: u32) -> &mut Slot {
        self.slots[index as usize].as_mut().expect("an operation belongs to a taken slot")
    }

    /// Whether O_DIRECT rejects memory at this offset of its region.
    fn is_misaligned(&self, buf: &MemSlice, from: usize) -> bool {
        let align = self.shared.align.map_or(1, |align| align.memory as usize);
        !(buf.offset() + from).is_multiple_of(align)
    }

    fn first_phase(&self, io: &Io) -> Phase {
        match io.op {
            IoOp::Read | IoOp::Write => Phase::Transfer,
            IoOp::Flush => Phase::Sync,
            IoOp::Extents => Phase::Extents,
            IoOp::Discard if self.shared.device => Phase::Discard,
            IoOp::Discard => Phase::Punch,
            IoOp::WriteZeroes if self.shared.punch && !io.flags.no_unmap => Phase::Punch,
            IoOp::WriteZeroes if self.shared.zero_range.load(Ordering::Relaxed) => Phase::ZeroRange,
            IoOp::WriteZeroes => Phase::WriteZeroes,
        }
    }

    /// Whether zeroes must be written fast but the target has no method that is certainly fast.
    /// This includes a block device that must keep the range allocated: if the device does not
    /// support it, the kernel writes the zeroes itself without reporting that.
    fn would_be_slow(&self, io: &Io) -> bool {
        io.op == IoOp::WriteZeroes
            && io.flags.fast_only
            && match self.first_phase(io) {
                Phase::Punch => false,
                Phase::ZeroRange => self.shared.device,
                _ => true,
            }
    }

    /// Next operation of a slot; None if the thread executes it.
    fn next_op(&self, slot: &Slot) -> Option<Op> {
        let fd = self.fd.clone();
        let (offset, len) = (slot.offset, slot.len as u64);
        Some(match slot.phase {
            Phase::Transfer => {
                let (at, left) = (slot.offset + slot.done as u64, slot.len - slot.done);
                let buf = slot.buf.as_ref().expect("a transfer has a buffer");
                let part = match (slot.bounce, &self.bounce) {
                    (Some(index), Some(pool)) => {
                        let part = pool.slice(index).slice(0, left.min(BOUNCE));
                        let part = part.expect("within a bounce buffer");
                        if slot.op == IoOp::Write {
                            let from = buf.slice(slot.done, part.len());
                            part.copy_from(&from.expect("within the IO"));
                        }
                        part
                    }
                    _ => buf.slice(slot.done, left).expect("within the IO"),
                };
                if slot.op == IoOp::Write {
                    let dsync = slot.flags.fua && !self.shared.in_memory;
                    Op::Write { fd, buf: part, offset: at, dsync }
                } else {
                    Op::Read { fd, buf: part, offset: at }
                }
            }
            Phase::Punch => Op::Fallocate { fd, mode: PUNCH_HOLE, offset, len },
            Phase::ZeroRange => Op::Fallocate { fd, mode: ZERO_RANGE, offset, len },
            Phase::WriteZeroes => {
                let piece = (slot.len - slot.done).min(ZEROES);
                let buf = self.shared.zeroes.slice(0, piece).expect("within the zeroes");
                Op::Write { fd, buf, offset: slot.offset + slot.done as u64, dsync: false }
            }
            Phase::Sync => Op::Fsync { fd, data_only: true },
            Phase::Discard | Phase::Extents => return None,
        })
    }

    /// Whether a transfer is limited if it blocks: direct IO with NOWAIT, which blocks when the
    /// device has no free tags, and writes to a device through the page cache.
    fn moves_limited(&self, slot: &Slot) -> bool {
        let direct = self.shared.align.is_some() && self.nowait;
        matches!(slot.phase, Phase::Transfer | Phase::WriteZeroes)
            && (direct || (self.cached_device && slot.op != IoOp::Read))
    }

    /// Whether an operation is submitted so that it fails instead of blocking.
    fn tries_first(&self, slot: &Slot) -> bool {
        self.nowait && self.moves_limited(slot) && !slot.may_block
    }

    /// Whether an operation needs one of the [`WORKERS`]. Reads and writes of a file through the
    /// page cache mostly need no thread, or for writes one per file.
    fn uses_worker(&self, slot: &Slot) -> bool {
        match slot.phase {
            Phase::Transfer | Phase::WriteZeroes => self.moves_limited(slot),
            Phase::Punch | Phase::ZeroRange | Phase::Sync => true,
            Phase::Discard | Phase::Extents => false,
        }
    }

    /// Passes a slot's worker to the slot that has waited longest. Slots that no longer need one,
    /// because NOWAIT turned out to be unsupported, start as well.
    fn release_worker(&mut self, index: u32) {
        if !std::mem::take(&mut self.slot(index).worker) {
            return;
        }
        self.workers += 1;
        while self.workers > 0
            && let Some(next) = self.waiting.pop_front()
        {
            self.step(next);
        }
    }

    /// Starts the next operation of a slot.
    fn step(&mut self, index: u32) {
        let slot = self.slots[index as usize].as_ref().expect("a taken slot");
        let inline = self.shared.in_memory && slot.phase == Phase::Transfer;
        let nowait = self.tries_first(slot);
        if !inline && !nowait && self.uses_worker(slot) && !slot.worker {
            let Some(left) = self.workers.checked_sub(1) else {
                self.waiting.push_back(index);
                return;
            };
            self.workers = left;
            self.slot(index).worker = true;
        }
        self.slot(index).tried = nowait;
        let slot = self.slots[index as usize].as_ref().expect("a taken slot");
        let Some(op) = self.next_op(slot) else {
            self.send_job(index);
            return;
        };
        #[cfg(test)]
        self.trace.push(format!("{op:?}, nowait: {nowait}"));
        if inline {
            self.port.run_inline(op, u64::from(index));
        } else if nowait {
            self.port.submit_nowait(op, u64::from(index));
        } else {
            self.port.submit(op, u64::from(index));
        }
    }

    /// Passes a job to the target's thread. Returns false if its queue is full.
    fn send_job(&mut self, index: u32) -> bool {
        let slot = self.slots[index as usize].as_ref().expect("a taken slot");
        let work = match &slot.buf {
            Some(room) => Work::Extents(room.clone(), self.geometry.logical_block),
            None => Work::Discard,
        };
        let (offset, len) = (slot.offset, slot.len as u64);
        let job = Job { work, offset, len, slot: index, reply: self.thread.reply.clone() };
        let sent = match self.shared.thread() {
            Ok(thread) => thread.send(job),
            Err(error) => {
                self.finish(index, IoStatus::from_io_error(&error));
                return true;
            }
        };
        if !sent {
            self.thread.queued.push_back(index);
        }
        sent
    }

    fn finish(&mut self, index: u32, status: IoStatus) {
        self.release_worker(index);
        let slot = self.slots[index as usize].take().expect("a taken slot");
        if let (Some(bounce), Some(pool)) = (slot.bounce, &mut self.bounce) {
            pool.give(bounce);
        }
        if slot.op.changes() {
            self.changes.end();
        }
        self.free.push(index);
        self.done.push(slot.tag, status);
    }

    /// Processes a completed discard or write zeroes; with FUA it must still be made durable.
    fn changed(&mut self, index: u32) {
        let in_memory = self.shared.in_memory;
        let slot = self.slot(index);
        if slot.flags.fua && !in_memory {
            slot.phase = Phase::Sync;
            self.step(index);
        } else {
            self.finish(index, IoStatus::Ok);
        }
    }

    /// Processes the end of one operation.
    pub(super) fn settle(&mut self, ended: Completed) {
        #[allow(clippy::cast_possible_truncation, reason = "tokens are slot numbers")]
        let index = ended.token as u32;
        let count = ended.count();
        if let Op::Statx { facts, .. } = ended.op {
            match count {
                Ok(_) => self.shared.note(facts.len(), facts.links() > 0),
                Err(error) => self.shared.cannot_look(&error),
            }
            self.facts.push(facts);
            return self.finish(index, self.shared.flushed());
        }
        let count = match count {
            Ok(count) => count,
            Err(error) => return self.failed(index, &error),
        };
        let phase = self.slot(index).phase;
        match phase {
            Phase::Transfer => self.moved(index, count),
            Phase::WriteZeroes => {
                let slot = self.slot(index);
                slot.done += count;
                if count == 0 {
                    self.finish(index, IoStatus::Io);
                } else if slot.done < slot.len {
                    self.step(index);
                } else {
                    self.changed(index);
                }
            }
            Phase::Punch | Phase::ZeroRange | Phase::Discard => self.changed(index),
            Phase::Extents => self.finish(index, IoStatus::Ok),
            Phase::Sync => self.synced(index),
        }
    }

    /// Processes a successful sync. A flush then checks whether the target has kept its length.
    fn synced(&mut self, index: u32) {
        if self.slot(index).op != IoOp::Flush {
            return self.finish(index, IoStatus::Ok);
        }
        if self.shared.device {
            self.shared.examine();
            return self.finish(index, self.shared.flushed());
        }
        let facts = self.facts.pop().unwrap_or_default();
        let op = Op::Statx { fd: self.fd.clone(), facts };
        #[cfg(test)]
        self.trace.push(format!("{op:?}"));
        self.port.submit(op, u64::from(index));
    }

    /// Processes a transfer that returned `count` bytes.
    fn moved(&mut self, index: u32, count: usize) {
        let slot = self.slots[index as usize].as_mut().expect("a taken slot");
        if count == 0 {
            // The file ends here, before its exported size.
            self.shared.look();
            return self.finish(index, IoStatus::Io);
        }
        if let (IoOp::Read, Some(bounce), Some(pool)) = (slot.op, slot.bounce, &self.bounce) {
            let from = pool.slice(bounce).slice(0, count).expect("within a bounce buffer");
            let to = slot.buf.as_ref().and_then(|buf| buf.slice(slot.done, count));
            to.expect("within the IO").copy_from(&from);
        }
        slot.done += count;
        if slot.done == slot.len {
            self.finish(index, IoStatus::Ok);
        } else {
            self.step(index);
        }
    }

    fn failed(&mut self, index: u32, error: &io::Error) {
        let status = IoStatus::from_io_error(error);
        let shared = Arc::clone(&self.shared);
        let slot = self.slot(index);
        if slot.tried
            && (error.kind() == io::ErrorKind::WouldBlock || status == IoStatus::Unsupported)
        {
            slot.may_block = true;
            self.nowait &= status != IoStatus::Unsupported;
            return self.step(index);
        }
        let again = matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
        if again && slot.retries < RETRIES_MAX {
            slot.retries += 1;
            return self.step(index);
        }
        let zeroing = slot.op == IoOp::WriteZeroes && status == IoStatus::Unsupported;
        match slot.phase {
            Phase::Punch if zeroing && !(shared.device && slot.flags.fast_only) => {
                slot.phase = Phase::ZeroRange;
            }
            Phase::ZeroRange if zeroing => {
                shared.zero_range.store(false, Ordering::Relaxed);
                if slot.flags.fast_only {
                    return self.finish(index, status);
                }
                slot.phase = Phase::WriteZeroes;
            }
            _ => {
                // A change with FUA includes a sync, which may fail with the error of an earlier
                // write-back, whatever its errno.
                let syncs = slot.op.changes() && slot.flags.fua && !shared.in_memory;
                let syncs = syncs && matches!(slot.phase, Phase::Transfer | Phase::Sync);
                let lost = syncs && status.is_refusal();
                return self.finish(index, if lost { IoStatus::Io } else { status });
            }
        }
        self.step(index);
    }

    /// Processes all completed operations.
    fn drain(&mut self) -> bool {
        let mut any = false;
        while let Some(ended) = self.port.take() {
            self.settle(ended);
            any = true;
        }
        any
    }

    /// Processes the thread's answers and offers it the jobs that had to wait.
    fn drain_thread(&mut self) -> bool {
        let mut any = false;
        while let Some((index, status)) = self.thread.answer() {
            any = true;
            if status.is_ok() && self.slot(index).phase == Phase::Discard {
                self.changed(index);
            } else {
                self.finish(index, status);
            }
        }
        while let Some(index) = self.thread.queued.pop_front() {
            if !self.send_job(index) {
                break;
            }
            any = true;
        }
        any
    }

    /// Returns the status of an IO that takes no slot: a refused one, a flush of a target without
    /// syncs, and the extents of a block device, which has no holes.
    fn status_at_once(&self, io: &Io) -> Option<IoStatus> {
        let mut status = self.geometry.check(io);
        let moves = io.op != IoOp::Extents;
        if status.is_ok() && moves && self.shared.is_beyond(io.offset + u64::from(io.len)) {
            status = IoStatus::Beyond;
        }
        if status.is_ok() && self.would_be_slow(io) {
            status = IoStatus::Unsupported;
        }
        let idle_flush = io.op == IoOp::Flush && (self.geometry.read_only || self.shared.in_memory);
        if idle_flush && !self.geometry.read_only {
            self.shared.examine();
            status = self.shared.flushed();
        }
        let no_holes = status.is_ok() && io.op == IoOp::Extents && self.shared.device;
        if let (true, Some(room)) = (no_holes, &io.buf) {
            extents::all_data(room, self.geometry.size - io.offset);
        }
        (!status.is_ok() || idle_flush || no_holes).then_some(status)
    }

    /// Whether the IO transfers data from or to memory that direct IO cannot use.
    fn needs_bounce(&self, io: &Io) -> bool {
        self.first_phase(io) == Phase::Transfer
            && io.buf.as_ref().is_some_and(|buf| self.is_misaligned(buf, 0))
    }

    /// Detaches dropped regions, so that their pages are released.
    fn sweep_regions(&mut self) {
        let ring = self.port.ring();
        self.regions.retain(|(id, region)| {
            let alive = region.strong_count() > 0;
            if !alive {
                ring.detach_region(*id);
            }
            alive
        });
    }
}

impl BlockDevice for FileDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn refresh(&mut self) {
        self.geometry.size = self.shared.size.get();
    }

    /// Attaches the region to the ring when O_DIRECT is in use: used parts are registered
    /// gradually, and IO from them needs no page pinning. A refusal only costs performance. The
    /// registration ends with this queue, and soon after the region is dropped.
    fn attach_region(&mut self, region: &Arc<Region>) -> io::Result<()> {
        self.sweep_regions();
        let known = self.regions.iter().any(|(id, _)| *id == region.id());
        if self.shared.align.is_some() && !known {
            self.port.ring().attach_region(region);
            self.regions.push((region.id(), Arc::downgrade(region)));
        }
        Ok(())
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.inflight() >= INFLIGHT_MAX {
            return Err(io);
        }
        let changes = io.op.changes();
        if changes {
            self.changes.begin();
        }
        self.refresh();
        if let Some(status) = self.status_at_once(&io) {
            if changes {
                self.changes.end();
            }
            self.done.push(io.tag, status);
            return Ok(());
        }
        let mut bounce = None;
        if self.needs_bounce(&io) {
            bounce = self.bounce.as_mut().and_then(Pool::take);
            if bounce.is_none() {
                if changes {
                    self.changes.end();
                }
                return Err(io);
            }
        }
        let index = self.take_slot();
        let slot = Slot {
            tag: io.tag,
            op: io.op,
            flags: io.flags,
            offset: io.offset,
            len: io.len as usize,
            phase: self.first_phase(&io),
            buf: io.buf,
            done: 0,
            bounce,
            retries: 0,
            tried: false,
            may_block: false,
            worker: false,
        };
        self.slots[index as usize] = Some(slot);
        self.step(index);
        if self.shared.in_memory {
            self.drain();
        }
        Ok(())
    }

    fn poll(&mut self, now: Instant) -> bool {
        self.now = now;
        if now >= self.sweep_at {
            self.sweep_at = now + SWEEP;
            self.sweep_regions();
        }
        let ended = self.drain();
        let any = self.drain_thread() || ended;
        self.changes.report(&self.shared.shrinks, |end| {
            let of = self.slots.iter().flatten().filter(|slot| slot.op.changes());
            of.map(|slot| slot.offset + slot.len as u64).any(|at| at > end)
        });
        any
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop()
    }

    fn inflight(&self) -> usize {
        self.slots.len() - self.free.len() + self.done.len()
    }

    fn deadline(&self) -> Option<Instant> {
        let queued = !self.thread.queued.is_empty();
        earliest(self.done.deadline(), queued.then(|| self.now + FULL_PAUSE))
    }
}

impl Drop for FileDevice {
    fn drop(&mut self) {
        for (id, _) in &self.regions {
            self.port.ring().detach_region(*id);
        }
        let _ = self.port.ring().add_workers(-WORKERS_SIGNED);
    }
}

impl fmt::Debug for FileDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileDevice")
            .field("file", &self.shared)
            .field("inflight", &self.inflight())
            .finish_non_exhaustive()
    }
}
