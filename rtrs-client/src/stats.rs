//! Counters of one shard's part of a session.

use hdrhistogram::Histogram;
use rtrs_core::block::{Io, IoOp};
use rtrs_core::metrics::Times;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Duration;
use serde::{Deserialize, Serialize};

use crate::parts::{Parts, ServerTimes};

/// Counts of one kind of IO.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpCount {
    /// Finished, well or not.
    pub count: u64,
    /// Bytes of those that ended well.
    pub bytes: u64,
    /// Ended with an error.
    pub errors: u64,
}

impl OpCount {
    fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.bytes += other.bytes;
        self.errors += other.errors;
    }
}

/// Counts of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathCount {
    /// Requests issued on it.
    pub requests: u64,
    /// Requests answered.
    pub answers: u64,
    /// Bytes of data in answered requests.
    pub bytes: u64,
    /// Answers that told an error.
    pub errors: u64,
    /// Requests that were in flight when it died and went to another path, or to this one anew.
    pub failovers: u64,
    /// Requests that waited for the fence of this path when it died.
    pub fence_waits: u64,
    /// Requests that were not answered within the IO timeout although the path lived.
    pub slow_requests: u64,
}

/// What a shard did for a volume since it was added.
#[derive(Clone, Debug)]
pub struct DeviceStats {
    /// By operation: read, write, flush, discard, write zeroes.
    pub ops: [OpCount; 6],
    /// Time from submit to completion, by operation.
    pub times: [Times; 6],
    /// IOs that found the whole queue depth in use.
    pub queue_full: u64,
    /// Requests that were not answered within the IO timeout although their path lived.
    pub slow_requests: u64,
    /// Time from submit to completion in nanoseconds.
    pub latency: Histogram<u64>,
}

impl Default for DeviceStats {
    fn default() -> Self {
        Self {
            ops: Default::default(),
            times: Default::default(),
            queue_full: 0,
            slow_requests: 0,
            latency: latencies(),
        }
    }
}

impl DeviceStats {
    pub(crate) fn io_done(&mut self, io: &Io, status: IoStatus, latency: Duration) {
        let op = op_index(io.op);
        self.times[op].record(nanos(latency));
        let count = &mut self.ops[op];
        count.count += 1;
        if status.is_ok() {
            count.bytes += u64::from(io.len);
        } else {
            count.errors += 1;
        }
        self.latency.saturating_record(nanos(latency));
    }

    /// Adds the counts of another shard, or of another volume.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.ops.iter_mut().zip(&other.ops) {
            mine.add(theirs);
        }
        for (mine, theirs) in self.times.iter_mut().zip(&other.times) {
            mine.add(theirs);
        }
        self.queue_full += other.queue_full;
        self.slow_requests += other.slow_requests;
        add_latency(&mut self.latency, &other.latency);
    }
}

fn add_latency(mine: &mut Histogram<u64>, theirs: &Histogram<u64>) {
    if let Err(error) = mine.add(theirs) {
        tracing::debug!("histograms of different bounds: {error}");
    }
}

/// What a shard did over the session's paths since start.
#[derive(Clone, Debug)]
pub struct ShardStats {
    /// By path, in the session's order.
    pub paths: Vec<PathCount>,
    /// By path, the time from a request to its answer in nanoseconds.
    pub path_latency: Vec<Histogram<u64>>,
    /// By path, where the time of its requests went.
    pub(crate) path_parts: Vec<Parts>,
    /// The same of earlier paths whose places others have.
    earlier_parts: Parts,
}

/// The names of `ShardStats::ops`, in its order.
pub(crate) const OP_NAMES: [&str; 6] =
    ["read", "write", "flush", "discard", "write-zeroes", "extents"];

const fn op_index(op: IoOp) -> usize {
    match op {
        IoOp::Read => 0,
        IoOp::Write => 1,
        IoOp::Flush => 2,
        IoOp::Discard => 3,
        IoOp::WriteZeroes => 4,
        IoOp::Extents => 5,
    }
}

/// No time yet: 1 us to 100 s, two digits, in memory that is fixed and made once.
fn latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1_000, 100_000_000_000, 2)
        .unwrap_or_else(|e| panic!("constant histogram bounds: {e}"))
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl ShardStats {
    pub(crate) fn new(paths: usize) -> Self {
        Self {
            paths: vec![PathCount::default(); paths],
            path_latency: vec![latencies(); paths],
            path_parts: vec![Parts::default(); paths],
            earlier_parts: Parts::default(),
        }
    }

    /// Counts of a path that was added begin here.
    pub(crate) fn add_path(&mut self, path: usize) {
        let paths = self.paths.len().max(path + 1);
        self.paths.resize(paths, PathCount::default());
        self.paths[path] = PathCount::default();
        self.path_latency.resize_with(paths, latencies);
        self.path_latency[path].reset();
        self.path_parts.resize_with(paths, Parts::default);
        let before = std::mem::take(&mut self.path_parts[path]);
        self.earlier_parts.add(&before);
    }

    /// Where the time of all requests went.
    pub(crate) fn parts(&self) -> Parts {
        let mut sum = self.earlier_parts.clone();
        self.path_parts.iter().for_each(|parts| sum.add(parts));
        sum
    }

    pub(crate) fn request_issued(&mut self, path: usize) {
        self.paths[path].requests += 1;
    }

    /// A request went on elsewhere when this path died.
    pub(crate) fn request_moved(&mut self, path: usize) {
        self.paths[path].failovers += 1;
    }

    /// A request waits for the fence of this path, which died.
    pub(crate) fn request_awaits_fence(&mut self, path: usize) {
        self.paths[path].fence_waits += 1;
    }

    /// A request on this path became slow.
    pub(crate) fn request_slow(&mut self, path: usize) {
        self.paths[path].slow_requests += 1;
    }

    /// A request was answered: so long it was queued, and so long ago it was sent, of which it was
    /// at the server as long as that says.
    pub(crate) fn request_done(
        &mut self,
        path: usize,
        len: u32,
        status: IoStatus,
        (queued, latency): (Duration, Duration),
        server: Option<ServerTimes>,
    ) {
        self.path_latency[path].saturating_record(nanos(latency));
        self.path_parts[path].record(queued, latency, server);
        let count = &mut self.paths[path];
        count.answers += 1;
        if status.is_ok() {
            count.bytes += u64::from(len);
        } else {
            count.errors += 1;
        }
    }

    /// Adds another shard's counts.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.paths.iter_mut().zip(&other.paths) {
            mine.requests += theirs.requests;
            mine.answers += theirs.answers;
            mine.bytes += theirs.bytes;
            mine.errors += theirs.errors;
            mine.failovers += theirs.failovers;
            mine.fence_waits += theirs.fence_waits;
            mine.slow_requests += theirs.slow_requests;
        }
        for (mine, theirs) in self.path_parts.iter_mut().zip(&other.path_parts) {
            mine.add(theirs);
        }
        self.earlier_parts.add(&other.earlier_parts);
        for (mine, theirs) in self.path_latency.iter_mut().zip(&other.path_latency) {
            add_latency(mine, theirs);
        }
    }
}
