//! One thread per block device for its discards.
//!
//! BLKDISCARD blocks until the device is done, so no shard may call it. Shards leave jobs in a
//! bounded queue; the thread runs them in order, answers the device that asked and wakes its shard.
//! The thread ends when the target and all its queues are gone.

use std::fs::File;
use std::io;
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, sync_channel};

use rtrs_core::block::WakeHandle;
use rtrs_core::rt::blkdev;
use rtrs_core::status::IoStatus;

/// Jobs that wait, over all shards.
const JOBS_MAX: usize = 256;

/// The answer: slot of the asking queue, and how it ended.
pub(super) type Answer = (u32, IoStatus);

/// The way of answers to a device.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    pub(super) answer: Sender<Answer>,
    pub(super) wake: WakeHandle,
}

impl Reply {
    fn send(&self, answer: Answer) {
        // The device may be gone.
        if self.answer.send(answer).is_ok() {
            self.wake.wake();
        }
    }
}

/// One range to discard.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) slot: u32,
    pub(super) reply: Reply,
}

/// The shards' end.
#[derive(Debug)]
pub(super) struct DiscardThread {
    jobs: SyncSender<Job>,
}

impl DiscardThread {
    /// Starts the thread for a device.
    pub(super) fn start(file: File) -> io::Result<Self> {
        let (jobs, inbox) = sync_channel(JOBS_MAX);
        std::thread::Builder::new().name("discard".into()).spawn(move || serve(&file, &inbox))?;
        Ok(Self { jobs })
    }

    /// Leaves a job. False when the queue is full: try again soon.
    pub(super) fn send(&self, job: Job) -> bool {
        match self.jobs.try_send(job) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => false,
            Err(TrySendError::Disconnected(job)) => {
                // The thread can only have died of a fault of ours.
                job.reply.send((job.slot, IoStatus::Io));
                true
            }
        }
    }
}

fn serve(file: &File, inbox: &Receiver<Job>) {
    while let Ok(job) = inbox.recv() {
        let status = match blkdev::discard(file, job.offset, job.len) {
            Ok(()) => IoStatus::Ok,
            Err(error) => IoStatus::from_io_error(&error),
        };
        job.reply.send((job.slot, status));
    }
}
