//! One shard's queue of a file or block device.
//!
//! An accepted IO takes a slot and passes through phases, one ring operation at a time: a short
//! transfer is continued; write zeroes tries the fastest method of the target and falls back to
//! writing zeroes in pieces; a discard or write zeroes with FUA ends with `fdatasync`, and a write
//! with FUA uses RWF_DSYNC. Slots, tables and bounce buffers are allocated once. With O_DIRECT, IO
//! on an unaligned buffer uses one of a few bounce buffers; if none is free, the IO is returned.
//!
//! Some operations block in a worker thread of the ring: syncs, hole punching, and direct IO that
//! finds no free tag on the device. All exports of a shard share these threads. Each export has its
//! own share (`workers.rs`), so that a hanging export cannot take all of them; further operations
//! wait in the queue. Direct IO is first submitted so that it fails instead of blocking. Files on
//! file systems without nonblocking reads (NFS, FUSE) are read and written in worker threads from
//! the start, because there the submission itself may block, and would block the shard.
//!
//! One kind of transfer may block and is not limited: on a device without NOWAIT (dm-crypt,
//! dm-thin, bcache, DRBD) direct IO holds a thread until it completes, so a limit on threads would
//! limit the requests in flight. If such an export hangs, it can delay the others on its shard.
//! Writes to a block device through the page cache are limited, even on kernels that have no
//! nonblocking writes (Linux 6.1: EOPNOTSUPP).

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use rtrs_core::block::{BlockDevice, Completion, Geometry, Io, IoOp, WakeHandle, refuse_scattered};
use rtrs_core::extents;
use rtrs_core::mem::Region;
use rtrs_core::rt::blkdev::FileFacts;
use rtrs_core::rt::{Completed, Fd, Op, Port, Ring};
use rtrs_core::status::{IoStatus, Outcome};
use rtrs_core::time::{Duration, Instant, earliest};

use super::bounce::Bounce;
use super::inflight::{AfterError, InFlight, Phase, Slot};
use super::regions::Regions;
use super::shared::Shared;
use super::shrink::Changes;
use super::thread::{Answer, Job, Reply, Work};
use super::workers::{Submission, Workers};
use crate::backend::immediate::Done;
use crate::backend::target::INFLIGHT_MAX;

/// Pause before a job is offered again to a thread with a full queue.
const FULL_PAUSE: Duration = Duration::from_millis(1);
/// The queue's connection to the target's thread.
struct ThreadEnd {
    reply: Reply,
    answers: Receiver<Answer>,
    /// Slots whose jobs found the thread's queue full.
    queued: VecDeque<u32>,
    /// Time of the last poll.
    now: Instant,
}

impl ThreadEnd {
    fn new(wake: WakeHandle) -> Self {
        let (answer, answers) = channel();
        let queued = VecDeque::with_capacity(INFLIGHT_MAX);
        Self { reply: Reply { answer, wake }, answers, queued, now: Instant::ZERO }
    }

    fn answer(&self) -> Option<Answer> {
        self.answers.try_recv().ok()
    }

    /// Passes a slot's job to the thread. Returns false if the thread's queue is full; the job is
    /// then resent later.
    fn send(&mut self, shared: &Shared, index: u32, slot: &Slot) -> io::Result<bool> {
        let work = match &slot.buf {
            Some(room) => Work::Extents(room.clone(), shared.geometry.logical_block),
            None => Work::Discard,
        };
        let (offset, len) = (slot.offset, slot.len as u64);
        let job = Job { work, offset, len, slot: index, reply: self.reply.clone() };
        let sent = shared.thread()?.send(job);
        if !sent {
            self.queued.push_back(index);
        }
        Ok(sent)
    }

    fn deadline(&self) -> Option<Instant> {
        (!self.queued.is_empty()).then(|| self.now + FULL_PAUSE)
    }
}

pub(super) struct FileDevice {
    shared: Arc<Shared>,
    geometry: Geometry,
    fd: Fd,
    port: Port,
    inflight: InFlight,
    done: Done,
    pub(super) workers: Workers,
    bounce: Bounce,
    thread: ThreadEnd,
    /// Unused result buffers of flushes.
    facts: Vec<FileFacts>,
    changes: Changes,
    regions: Regions,
    /// All operations in the order of submission.
    #[cfg(test)]
    pub(super) trace: Vec<String>,
}

impl FileDevice {
    pub(super) fn new(shared: &Arc<Shared>, ring: &Rc<Ring>, wake: WakeHandle) -> io::Result<Self> {
        Ok(Self {
            geometry: shared.geometry.clone(),
            fd: Fd::new(shared.file.try_clone()?),
            port: ring.port(),
            inflight: InFlight::default(),
            done: Done::new(),
            bounce: Bounce::new(shared.align)?,
            workers: Workers::new(shared, ring),
            thread: ThreadEnd::new(wake),
            facts: Vec::new(),
            changes: shared.shrinks.join(),
            regions: Regions::default(),
            shared: Arc::clone(shared),
            #[cfg(test)]
            trace: Vec::new(),
        })
    }

    /// Whether zeroes must be written fast but the target has no method that is guaranteed to be
    /// fast. This includes a block device that must keep the range allocated: if the device does
    /// not support that, the kernel writes the zeroes itself without reporting it.
    fn would_be_slow(&self, io: &Io) -> bool {
        io.op == IoOp::WriteZeroes
            && io.flags.fast_only
            && match Phase::first(io, &self.shared) {
                Phase::Punch => false,
                Phase::ZeroRange => self.shared.device,
                _ => true,
            }
    }

    /// Passes a slot's worker to the slot that has waited longest. Slots that no longer need one,
    /// because NOWAIT turned out to be unsupported, start as well.
    fn release_worker(&mut self, index: u32) {
        if !self.workers.release(self.inflight.get_mut(index)) {
            return;
        }
        while let Some(next) = self.workers.next_waiting() {
            self.step(next);
        }
    }

    /// Starts the next operation of a slot.
    fn step(&mut self, index: u32) {
        let slot = self.inflight.get_mut(index);
        let Some(submission) = self.workers.admit(index, slot) else { return };
        let Some(op) = slot.next_op(&self.fd, &self.shared, &self.bounce) else {
            self.send_job(index);
            return;
        };
        #[cfg(test)]
        self.trace.push(format!("{op:?}, {submission:?}"));
        match submission {
            Submission::Inline => self.port.run_inline(op, u64::from(index)),
            Submission::Nowait => {
                self.port.submit_nowait(op, u64::from(index));
            }
            Submission::Blocking => {
                self.port.submit(op, u64::from(index));
            }
            Submission::Worker => {
                self.port.submit_to_worker(op, u64::from(index));
            }
        }
    }

    /// Passes a job to the target's thread. Returns false if the thread's queue is full.
    fn send_job(&mut self, index: u32) -> bool {
        match self.thread.send(&self.shared, index, self.inflight.get(index)) {
            Ok(sent) => sent,
            Err(error) => {
                self.finish(index, &error);
                true
            }
        }
    }

    fn finish(&mut self, index: u32, outcome: impl Into<Outcome>) {
        self.release_worker(index);
        let slot = self.inflight.remove(index);
        if let Some(bounce) = slot.bounce {
            self.bounce.give(bounce);
        }
        if slot.op.changes() {
            self.changes.end();
        }
        self.done.push(slot.tag, outcome);
    }

    /// Processes a completed discard or write zeroes; with FUA it must still be made durable.
    fn changed(&mut self, index: u32) {
        let in_memory = self.shared.in_memory;
        let slot = self.inflight.get_mut(index);
        if slot.flags.fua && !in_memory {
            slot.phase = Phase::Sync;
            self.step(index);
        } else {
            self.finish(index, IoStatus::Ok);
        }
    }

    /// Processes a completed operation.
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
        let phase = self.inflight.get(index).phase;
        match phase {
            Phase::Transfer => self.moved(index, count),
            Phase::WriteZeroes => {
                let slot = self.inflight.get_mut(index);
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
        if self.inflight.get(index).op != IoOp::Flush {
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
        if count == 0 {
            // The file ends here, before its exported size.
            self.shared.look();
            return self.finish(index, IoStatus::Io);
        }
        if self.inflight.get_mut(index).transferred(count, &self.bounce) {
            self.finish(index, IoStatus::Ok);
        } else {
            self.step(index);
        }
    }

    fn failed(&mut self, index: u32, error: &io::Error) {
        let slot = self.inflight.get_mut(index);
        let unsupported = IoStatus::from_io_error(error) == IoStatus::Unsupported;
        if slot.tried && (error.kind() == io::ErrorKind::WouldBlock || unsupported) {
            slot.may_block = true;
            self.workers.nowait &= !unsupported;
            return self.step(index);
        }
        match slot.after_error(error, &self.shared) {
            AfterError::Continue => self.step(index),
            AfterError::End(outcome) => self.finish(index, outcome),
        }
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
        while let Some((index, outcome)) = self.thread.answer() {
            any = true;
            if outcome.status.is_ok() && self.inflight.get(index).phase == Phase::Discard {
                self.changed(index);
            } else {
                self.finish(index, outcome);
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

    /// Returns the status of an IO that takes no slot: a refused IO, a flush of a read-only or
    /// in-memory target, or an extent request to a block device, which has no holes.
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
}

impl BlockDevice for FileDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn refresh(&mut self) {
        self.geometry.size = self.shared.size.get();
    }

    /// Attaches the region to the ring if O_DIRECT is in use: parts are registered as they are
    /// used, and IO on them needs no page pinning. A refusal only costs performance. The
    /// registration ends with this queue, or soon after the region is dropped.
    fn attach_region(&mut self, region: &Arc<Region>) -> io::Result<()> {
        refuse_scattered(region)?;
        let ring = self.port.ring();
        self.regions.sweep(ring);
        if self.shared.align.is_some() {
            self.regions.attach(ring, region);
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
        let phase = Phase::first(&io, &self.shared);
        let mut bounce = None;
        if phase == Phase::Transfer && self.bounce.is_needed(&io) {
            bounce = self.bounce.take();
            if bounce.is_none() {
                if changes {
                    self.changes.end();
                }
                return Err(io);
            }
        }
        let index = self.inflight.add(Slot::new(io, phase, bounce));
        self.step(index);
        if self.shared.in_memory {
            self.drain();
        }
        Ok(())
    }

    fn poll(&mut self, now: Instant) -> bool {
        self.thread.now = now;
        self.regions.poll(self.port.ring(), now);
        let ended = self.drain();
        let any = self.drain_thread() || ended;
        self.changes.report(&self.shared.shrinks, |end| self.inflight.change_beyond(end));
        any
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop()
    }

    fn inflight(&self) -> usize {
        self.inflight.len() + self.done.len()
    }

    fn deadline(&self) -> Option<Instant> {
        earliest(self.done.deadline(), self.thread.deadline())
    }
}

impl Drop for FileDevice {
    fn drop(&mut self) {
        let ring = self.port.ring();
        self.regions.detach_all(ring);
        self.workers.close(ring);
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
