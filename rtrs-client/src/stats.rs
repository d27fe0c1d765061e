//! Counters of one shard's part of a session.

use hdrhistogram::Histogram;
use rtrs_core::block::{Io, IoOp};
use rtrs_core::metrics::Times;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Duration;
use serde::{Deserialize, Serialize};

use crate::parts::{Parts, RequestTimes};

/// Counters of one kind of IO.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpCount {
    /// Number of finished IOs, successful or not.
    pub count: u64,
    /// Bytes of the successful IOs.
    pub bytes: u64,
    /// Number of failed IOs.
    pub errors: u64,
}

impl OpCount {
    pub(crate) fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.bytes += other.bytes;
        self.errors += other.errors;
    }
}

/// Counters of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathCount {
    /// Number of requests sent.
    pub requests: u64,
    /// Number of requests answered.
    pub answers: u64,
    /// Bytes of data in requests that were answered without an error.
    pub bytes: u64,
    /// Number of answers with an error.
    pub errors: u64,
    /// Number of requests in flight when the path died, which moved to another path or were
    /// repeated on this path.
    pub failovers: u64,
    /// Number of requests that waited for the path's fence when it died.
    pub fence_waits: u64,
    /// Number of requests not answered within the IO timeout although the path was alive.
    pub slow_requests: u64,
    /// Number of requests whose data was copied through registered memory.
    pub bounced: u64,
}

/// Counters of a volume on a shard, since the volume was added.
#[derive(Clone, Debug)]
pub struct DeviceStats {
    /// Counters by operation: read, write, flush, discard, write zeroes, extents.
    pub ops: [OpCount; 6],
    /// Time from submission to completion, by operation.
    pub times: [Times; 6],
    /// Number of IOs that found the queue full.
    pub queue_full: u64,
    /// Number of requests not answered within the IO timeout although their path was alive.
    pub slow_requests: u64,
    /// Time from submission to completion in nanoseconds.
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

/// Outcome of a counted IO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Done {
    Succeeded,
    Failed,
}

impl DeviceStats {
    /// Counts as errors the flushes that succeeded at the server but failed for the caller.
    pub(crate) fn count_failed_flushes(&mut self, count: u64) {
        self.ops[op_index(IoOp::Flush)].errors += count;
    }

    pub(crate) fn io_done(&mut self, io: &Io, status: IoStatus, latency: Duration) -> Done {
        let op = op_index(io.op);
        self.times[op].record(nanos(latency));
        self.latency.saturating_record(nanos(latency));
        let count = &mut self.ops[op];
        count.count += 1;
        if status.is_ok() {
            count.bytes += u64::from(io.len);
            Done::Succeeded
        } else {
            count.errors += 1;
            Done::Failed
        }
    }

    /// Adds the counters of another shard or volume.
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
        tracing::debug!("histograms with different bounds: {error}");
    }
}

/// Counters of the session's paths on a shard, since the session started.
#[derive(Clone, Debug)]
pub struct ShardStats {
    /// Counters by path, in the session's order.
    pub paths: Vec<PathCount>,
    /// Time from a request to its answer in nanoseconds, by path.
    pub path_latency: Vec<Histogram<u64>>,
    /// Breakdown of request times, by path.
    pub(crate) path_parts: Vec<Parts>,
    /// Breakdown for earlier paths whose slots were reused.
    earlier_parts: Parts,
}

/// Names of `ShardStats::ops`, in the same order.
pub(crate) const OP_NAMES: [&str; 6] =
    ["read", "write", "flush", "discard", "write-zeroes", "extents"];

/// Returns an operation's name in messages and replies.
pub(crate) const fn op_name(op: IoOp) -> &'static str {
    OP_NAMES[op_index(op)]
}

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

/// Empty histogram: 1 us to 100 s, two significant digits, in memory that is allocated once.
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

    /// Starts the counters for a path that was added.
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

    /// Breakdown of the times of all requests.
    pub(crate) fn parts(&self) -> Parts {
        let mut sum = self.earlier_parts.clone();
        self.path_parts.iter().for_each(|parts| sum.add(parts));
        sum
    }

    pub(crate) fn request_issued(&mut self, path: usize) {
        self.paths[path].requests += 1;
    }

    /// Counts a request whose data is copied through registered memory.
    pub(crate) fn request_bounced(&mut self, path: usize) {
        self.paths[path].bounced += 1;
    }

    /// Counts a request that was in flight when this path died.
    pub(crate) fn request_moved(&mut self, path: usize) {
        self.paths[path].failovers += 1;
    }

    /// Counts a request that waits for the fence of this dead path.
    pub(crate) fn request_awaits_fence(&mut self, path: usize) {
        self.paths[path].fence_waits += 1;
    }

    /// Counts a request that became slow on this path.
    pub(crate) fn request_slow(&mut self, path: usize) {
        self.paths[path].slow_requests += 1;
    }

    /// Counts an answered request.
    pub(crate) fn request_done(
        &mut self,
        path: usize,
        len: u32,
        status: IoStatus,
        times: RequestTimes,
    ) {
        self.path_latency[path].saturating_record(nanos(times.round_trip));
        self.path_parts[path].record(times);
        let count = &mut self.paths[path];
        count.answers += 1;
        if status.is_ok() {
            count.bytes += u64::from(len);
        } else {
            count.errors += 1;
        }
    }

    /// Adds another shard's counters.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.paths.iter_mut().zip(&other.paths) {
            mine.requests += theirs.requests;
            mine.answers += theirs.answers;
            mine.bytes += theirs.bytes;
            mine.errors += theirs.errors;
            mine.failovers += theirs.failovers;
            mine.fence_waits += theirs.fence_waits;
            mine.slow_requests += theirs.slow_requests;
            mine.bounced += theirs.bounced;
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
