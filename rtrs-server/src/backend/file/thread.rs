//! A thread per target for blocking operations that the ring does not support: discards on a
//! device, and searches for holes in a file.
//!
//! BLKDISCARD blocks until the device has finished, and lseek may wait for the file system, so no
//! shard may call them. Shards put jobs into a bounded queue; the thread runs them in order,
//! answers the requesting queue and wakes its shard. The thread exits when the target and all its
//! queues are dropped.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use rtrs_core::block::WakeHandle;
use rtrs_core::extents::{Extent, ExtentList};
use rtrs_core::mem::MemSlice;
use rtrs_core::rt::blkdev;
use rtrs_core::status::{IoStatus, Outcome};

/// Time after which a search returns the extents found so far.
const SEARCH_MAX: Duration = Duration::from_millis(20);
/// Maximum number of queued jobs from all shards.
const JOBS_MAX: usize = 256;

/// Slot in the requesting queue, and the result of its job.
pub(super) type Answer = (u32, Outcome);

/// Destination of a queue's answers.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    pub(super) answer: Sender<Answer>,
    pub(super) wake: WakeHandle,
}

impl Reply {
    fn send(&self, answer: Answer) {
        // The queue may have been dropped.
        if self.answer.send(answer).is_ok() {
            self.wake.wake();
        }
    }
}

/// An operation on a range.
#[derive(Debug)]
pub(super) enum Work {
    Discard,
    /// Lists the extents in this buffer, in whole blocks of this many bytes.
    Extents(MemSlice, u32),
}

/// A queued operation, with the queue and slot that receive the answer.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) work: Work,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) slot: u32,
    pub(super) reply: Reply,
}

/// Handle to the thread.
#[derive(Debug)]
pub(super) struct TargetThread {
    jobs: SyncSender<Job>,
}

impl TargetThread {
    /// Starts the thread for a target.
    pub(super) fn start(file: File) -> io::Result<Self> {
        let (jobs, inbox) = sync_channel(JOBS_MAX);
        std::thread::Builder::new().name("target".into()).spawn(move || serve(&file, &inbox))?;
        Ok(Self { jobs })
    }

    /// Queues a job. Returns false if the queue is full; the caller must retry soon.
    pub(super) fn send(&self, job: Job) -> bool {
        match self.jobs.try_send(job) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => false,
            Err(TrySendError::Disconnected(job)) => {
                // Only a bug in this server can have stopped the thread.
                job.reply.send((job.slot, IoStatus::Io.into()));
                true
            }
        }
    }
}

fn serve(file: &File, inbox: &Receiver<Job>) {
    while let Ok(Job { work, offset, len, slot, reply }) = inbox.recv() {
        let done = match work {
            Work::Discard => blkdev::discard(file, offset, len),
            Work::Extents(room, block) => {
                find_holes(file, &(offset..offset + len), u64::from(block), &room)
            }
        };
        let outcome: Outcome = match &done {
            Ok(()) => IoStatus::Ok.into(),
            Err(error) => error.into(),
        };
        reply.send((slot, outcome));
    }
}

/// Lists the extents of a range: as many as fit and are found in time, but at least one; the last
/// one may extend beyond the range. Only whole blocks count as holes. Nothing past the end of the
/// file is a hole, because it cannot be read.
fn find_holes(file: &File, range: &Range<u64>, block: u64, room: &MemSlice) -> io::Result<()> {
    let mut list = ExtentList::new(room);
    let (mut at, to) = (range.start, range.end);
    let begun = Instant::now();
    while at < to && (at == range.start || begun.elapsed() < SEARCH_MAX) {
        let data = match blkdev::next_data(file, at) {
            Ok(data) => data,
            // The file system does not support holes.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Some(at),
            // The extents found before the error are a valid answer.
            Err(_) if at > range.start => break,
            Err(error) => return Err(error),
        };
        let hole_end = match data {
            Some(data) => data,
            None => file.metadata()?.len(),
        };
        let hole_end = (hole_end / block * block).max(at);
        if !list.push(Extent { len: hole_end - at, hole: true }) || hole_end >= to {
            break;
        }
        let data_end = match data {
            Some(data) => blkdev::next_hole(file, data).unwrap_or(None).unwrap_or(to),
            None => to,
        };
        // At least one block, even if the data has been discarded since it was found.
        let data_end = data_end.next_multiple_of(block).max(hole_end).max(at + block);
        if !list.push(Extent { len: data_end - hole_end, hole: false }) {
            break;
        }
        at = data_end;
    }
    Ok(())
}
