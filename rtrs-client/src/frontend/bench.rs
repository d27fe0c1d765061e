//! Workload that runs directly on a session, without NBD, to measure the transport itself.
//!
//! One job per shard keeps `iodepth` IOs in flight on that shard's part of the session until time
//! is up, then waits for the outstanding answers. Buffers and the latency histogram are allocated
//! before the clock starts.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

use hdrhistogram::Histogram;
use parking_lot::Mutex;
use rtrs_core::block::{BlockDevice, Io, IoFlags, IoOp};
use rtrs_core::ids::CoreIndex;
use rtrs_core::mem::{MemSlice, Pool, Region};
use rtrs_core::time::{Duration, Instant};

use super::front_end::{FrontEnd, FrontRequest, FrontSocket, MakeFrontEnds, Place};
use crate::engine::SessionDevice;
use crate::settings::BenchMode;

/// Parameters common to all jobs of a run.
#[derive(Debug)]
pub(crate) struct Workload {
    pub(crate) mode: BenchMode,
    /// Bytes per IO.
    pub(crate) block: u32,
    /// IOs in flight per job.
    pub(crate) iodepth: u32,
    pub(crate) runtime: Duration,
    /// Number of bytes of the device to use; None for all.
    pub(crate) size: Option<u64>,
    /// Number of pieces of memory per IO.
    pub(crate) pieces: u32,
    /// Share of reads in randrw, 0 to 100.
    pub(crate) read_percent: u32,
    pub(crate) jobs: u32,
    /// Number of finished IOs, for the progress line.
    pub(crate) finished: AtomicU64,
    /// Receiver of the jobs' results.
    pub(crate) results: Mutex<mpsc::Sender<JobResult>>,
}

/// Result of a job.
#[derive(Debug)]
pub(crate) struct JobResult {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) errors: u64,
    pub(crate) elapsed: Duration,
    /// Time from submission to completion in nanoseconds.
    pub(crate) latency: Histogram<u64>,
}

/// Buffers of a job, each in one piece or in several.
#[derive(Debug)]
struct Buffers {
    pool: Pool,
    /// Memory of the pieces, if there are several per buffer.
    memory: Option<Arc<Region>>,
    block: usize,
    pieces: usize,
}

impl Buffers {
    fn new(workload: &Workload) -> io::Result<Self> {
        let (depth, block) = (workload.iodepth, workload.block as usize);
        let (pool, memory) = if workload.pieces == 1 {
            (Pool::new(depth, block)?, None)
        } else {
            let memory = Region::new(2 * block * depth as usize)?;
            (Pool::scattered(depth, block)?, Some(memory))
        };
        let mut buffers = Self { pool, memory, block, pieces: workload.pieces as usize };
        while let Some(slot) = buffers.pool.take() {
            // Not all zeroes, so that no layer can take shortcuts.
            buffers.buffer(slot).iter().for_each(|memory| memory.fill(0x5a));
        }
        (0..depth).for_each(|slot| buffers.pool.give(slot));
        Ok(buffers)
    }

    /// Returns the memory of a buffer that was taken from the pool.
    fn buffer(&mut self, slot: u32) -> Option<MemSlice> {
        let Self { pool, memory, block, pieces } = self;
        let Some(memory) = memory else { return Some(pool.slice(slot)) };
        // Each piece is followed by a gap of the same length.
        let first = 2 * *block * slot as usize;
        let cut = |piece: usize| *block * piece / *pieces;
        let piece = |at| memory.slice(first + 2 * cut(at), cut(at + 1) - cut(at));
        pool.assign(slot, (0..*pieces).filter_map(piece)).ok()
    }
}

/// One shard's share of a workload.
#[derive(Debug)]
struct Job {
    workload: Arc<Workload>,
    device: Box<dyn BlockDevice>,
    buffers: Buffers,
    started: Vec<Instant>,
    is_read: Vec<bool>,
    blocks: u64,
    next: u64,
    random: u64,
    begin: Instant,
    end: Instant,
    inflight: u32,
    /// Set when the time is up: the job only waits for answers, which wake the shard themselves.
    over: bool,
    result: Option<JobResult>,
}

impl Job {
    fn new(
        now: Instant,
        shard: CoreIndex,
        workload: Arc<Workload>,
        mut device: Box<dyn BlockDevice>,
    ) -> io::Result<Self> {
        let geometry = device.geometry();
        let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
        if !workload.block.is_multiple_of(geometry.logical_block) {
            return Err(invalid(format!(
                "--bs {} is not a multiple of the device's block size {}",
                workload.block, geometry.logical_block
            )));
        }
        if workload.mode.writes() && geometry.read_only {
            return Err(invalid("the device is read-only: use --rw read or randread".into()));
        }
        let size = workload.size.map_or(geometry.size, |s| s.min(geometry.size));
        let blocks = size / u64::from(workload.block);
        if blocks == 0 {
            return Err(invalid(format!(
                "the device of {size} bytes holds no block of {} bytes",
                workload.block
            )));
        }
        let buffers = Buffers::new(&workload)?;
        device.attach_region(buffers.pool.region())?;
        let latency = Histogram::new_with_bounds(1_000, 100_000_000_000, 3)
            .map_err(|e| io::Error::other(e.to_string()))?;
        let depth = workload.iodepth as usize;
        let share = blocks / u64::from(workload.jobs.max(1)) * u64::from(shard.0);
        Ok(Self {
            device,
            buffers,
            started: vec![now; depth],
            is_read: vec![false; depth],
            blocks,
            next: share,
            random: 0x9e37_79b9_7f4a_7c15 ^ (u64::from(shard.0) + 1).wrapping_mul(0x2545_f491),
            begin: now,
            end: now + workload.runtime,
            inflight: 0,
            over: false,
            result: Some(JobResult {
                reads: 0,
                writes: 0,
                errors: 0,
                elapsed: Duration::ZERO,
                latency,
            }),
            workload,
        })
    }

    fn draw(&mut self) -> u64 {
        // xorshift64*: fast, and uniform enough to pick blocks.
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn next_block(&mut self) -> u64 {
        match self.workload.mode {
            BenchMode::Read | BenchMode::Write => {
                let block = self.next % self.blocks;
                self.next += 1;
                block
            }
            _ => self.draw() % self.blocks,
        }
    }

    /// Starts and ends IOs. Returns whether anything happened.
    fn turn(&mut self, now: Instant) -> bool {
        let mut any = self.device.poll(now);
        let Some(mut result) = self.result.take() else { return any };
        while let Some(done) = self.device.reap() {
            any = true;
            self.inflight -= 1;
            let slot = usize::try_from(done.tag).unwrap_or(0);
            let nanos = u64::try_from(now.since(self.started[slot]).as_nanos());
            result.latency.saturating_record(nanos.unwrap_or(u64::MAX));
            match (done.status.is_ok(), self.is_read[slot]) {
                (false, _) => result.errors += 1,
                (true, true) => result.reads += 1,
                (true, false) => result.writes += 1,
            }
            #[allow(clippy::cast_possible_truncation, reason = "slots are counted in 32 bits")]
            self.buffers.pool.give(slot as u32);
            self.workload.finished.fetch_add(1, Ordering::Relaxed);
        }
        while now < self.end && self.submit_one(now) {
            any = true;
        }
        self.over = now >= self.end;
        if self.over && self.inflight == 0 {
            result.elapsed = now.since(self.begin);
            if self.workload.results.lock().send(result).is_err() {
                tracing::debug!("results dropped: the benchmark has stopped waiting");
            }
            return true;
        }
        self.result = Some(result);
        any
    }

    fn submit_one(&mut self, now: Instant) -> bool {
        let Some(slot) = self.buffers.pool.take() else { return false };
        let block = self.next_block();
        let read = match self.workload.mode {
            BenchMode::Read | BenchMode::RandRead => true,
            BenchMode::Write | BenchMode::RandWrite => false,
            BenchMode::RandRw => self.draw() % 100 < u64::from(self.workload.read_percent),
        };
        self.started[slot as usize] = now;
        self.is_read[slot as usize] = read;
        let io = Io {
            tag: u64::from(slot),
            op: if read { IoOp::Read } else { IoOp::Write },
            flags: IoFlags::default(),
            offset: block * u64::from(self.workload.block),
            len: self.workload.block,
            buf: self.buffers.buffer(slot),
        };
        if self.device.submit(io).is_err() {
            self.buffers.pool.give(slot);
            return false;
        }
        self.inflight += 1;
        true
    }
}

/// Returns front ends that run this workload, with one job on each shard.
pub(crate) fn workload(workload: Arc<Workload>) -> MakeFrontEnds {
    Box::new(move |shards| {
        shards.each(|_| {
            let workload = Arc::clone(&workload);
            Box::new(move || Box::new(Bench { workload, job: None }))
        })
    })
}

struct Bench {
    workload: Arc<Workload>,
    job: Option<Job>,
}

impl FrontEnd for Bench {
    fn open(&mut self, now: Instant, place: &Place<'_>, device: SessionDevice) -> io::Result<()> {
        let workload = Arc::clone(&self.workload);
        self.job = Some(Job::new(now, place.shard, workload, Box::new(device))?);
        Ok(())
    }

    /// A workload has no clients.
    fn take_socket(&mut self, _now: Instant, _socket: FrontSocket) {}

    fn turn(&mut self, now: Instant) -> bool {
        self.job.as_mut().is_some_and(|job| job.turn(now))
    }

    fn next_request(&mut self) -> Option<FrontRequest> {
        None
    }

    fn deadline(&self) -> Option<Instant> {
        let job = self.job.as_ref().filter(|job| job.result.is_some() && !job.over);
        job.map(|job| job.end)
    }

    fn stop(&mut self) {
        if let Some(job) = &mut self.job {
            job.end = job.begin;
        }
    }

    /// IO in flight ends with the session.
    fn abort(&mut self) {}

    fn is_idle(&self) -> bool {
        self.job.as_ref().is_none_or(|job| job.inflight == 0)
    }
}
