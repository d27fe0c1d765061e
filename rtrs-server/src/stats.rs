//! What paths did: counters per path and core, added up when somebody asks.
//!
//! Each core writes its own counters only, so that counting costs a plain add; readers see each
//! number whole, and different numbers from slightly different moments.

use std::sync::atomic::{AtomicU64, Ordering};

use rtrs_core::ids::CoreIndex;
use rtrs_core::time::Duration;
use serde::Serialize;

use crate::path::state::PathState;

/// One number with one writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds; by the core that owns it only.
    pub fn add(&self, by: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
    }

    /// Takes away; by the core that owns it only.
    pub fn sub(&self, by: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_sub(by), Ordering::Relaxed);
    }

    /// The present value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What one core did for one path. A cache line or more of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct CoreCounters {
    /// Reads answered.
    pub reads: Counter,
    /// Bytes of reads that succeeded.
    pub read_bytes: Counter,
    /// Writes answered.
    pub writes: Counter,
    /// Bytes of writes that succeeded.
    pub write_bytes: Counter,
    /// Writes answered that had to be durable with their answer (FUA).
    pub fua_writes: Counter,
    /// Flushes answered.
    pub flushes: Counter,
    /// Discards answered.
    pub discards: Counter,
    /// Write zeroes answered.
    pub write_zeroes: Counter,
    /// Session info, open and close answered.
    pub controls: Counter,
    /// Requests answered with an error.
    pub errors: Counter,
    /// Requests that waited for their original on another path.
    pub replays: Counter,
    /// Requests now in flight.
    pub inflight: Counter,
    /// Nanoseconds from arrival to answer, summed over all requests.
    pub busy_ns: Counter,
}

/// What all cores did for one path.
#[derive(Debug)]
pub struct PathCounters {
    cores: Box<[CoreCounters]>,
}

/// A sum of [`CoreCounters`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct IoTotals {
    /// Reads answered.
    pub reads: u64,
    /// Bytes of reads that succeeded.
    pub read_bytes: u64,
    /// Writes answered.
    pub writes: u64,
    /// Bytes of writes that succeeded.
    pub write_bytes: u64,
    /// Writes answered that had to be durable with their answer (FUA).
    pub fua_writes: u64,
    /// Flushes answered.
    pub flushes: u64,
    /// Discards answered.
    pub discards: u64,
    /// Write zeroes answered.
    pub write_zeroes: u64,
    /// Session info, open and close answered.
    pub controls: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Requests that waited for their original on another path.
    pub replays: u64,
    /// Requests now in flight.
    pub inflight: u64,
    /// Nanoseconds from arrival to answer, summed over all requests.
    pub busy_ns: u64,
}

impl PathCounters {
    /// Zeroes for that many cores.
    pub fn new(cores: u16) -> Self {
        Self { cores: (0..cores.max(1)).map(|_| CoreCounters::default()).collect() }
    }

    /// One core's counters. A core past the end shares the last one's.
    pub fn core(&self, core: CoreIndex) -> &CoreCounters {
        &self.cores[core.index().min(self.cores.len() - 1)]
    }

    /// The sum over all cores.
    pub fn totals(&self) -> IoTotals {
        let mut sum = IoTotals::default();
        for core in &self.cores {
            sum.reads += core.reads.get();
            sum.read_bytes += core.read_bytes.get();
            sum.writes += core.writes.get();
            sum.write_bytes += core.write_bytes.get();
            sum.fua_writes += core.fua_writes.get();
            sum.flushes += core.flushes.get();
            sum.discards += core.discards.get();
            sum.write_zeroes += core.write_zeroes.get();
            sum.controls += core.controls.get();
            sum.errors += core.errors.get();
            sum.replays += core.replays.get();
            sum.inflight += core.inflight.get();
            sum.busy_ns += core.busy_ns.get();
        }
        sum
    }
}

/// One path as statistics show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PathSnapshot {
    /// What the client calls it.
    pub uuid: String,
    /// Where it is in its life.
    pub state: PathState,
    /// What carries it: `tcp` or `rdma`.
    pub transport: &'static str,
    /// The client's address.
    pub peer: String,
    /// Our address.
    pub local: String,
    /// Connections it has when complete.
    pub connections: u16,
    /// Round trip time of the last heartbeat in microseconds, if one was measured.
    pub heartbeat_us: Option<u64>,
    /// What it did.
    pub io: IoTotals,
}

/// One session as statistics show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SessionSnapshot {
    /// The client's random number for it.
    pub id: String,
    /// Its name, once a path was admitted.
    pub name: Option<String>,
    /// RNBD version agreed on.
    pub version: u8,
    /// Permits held now.
    pub permits_held: usize,
    /// Names of the exports it has open.
    pub exports: Vec<String>,
    /// Its paths.
    pub paths: Vec<PathSnapshot>,
}

/// Microseconds of a duration.
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
