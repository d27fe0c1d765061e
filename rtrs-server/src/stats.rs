//! What paths did: counters per path and core, added up when somebody asks.
//!
//! Each core writes its own counters only, so that counting costs a plain add; readers see each
//! number whole, and different numbers from slightly different moments.

use std::sync::atomic::{AtomicU64, Ordering};

use rtrs_core::block::IoOp;
use rtrs_core::ids::CoreIndex;
use rtrs_core::time::Duration;
use rtrs_core::wire::AccessMode;
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
    /// States of requests that cannot happen; each has ended the path.
    pub internal_errors: Counter,
    /// Requests that waited for their original on another path.
    pub replays: Counter,
    /// Requests that wait now for an older write that a closed path has left at the disk.
    pub barred: Counter,
    /// Requests now in flight.
    pub inflight: Counter,
    /// Nanoseconds from arrival to answer, summed over all requests.
    pub busy_ns: Counter,
}

impl CoreCounters {
    /// A request of so many bytes is about to be answered, with success if `good`. `io`: what it
    /// did, and whether it had to be durable.
    pub fn answered(&self, good: bool, io: Option<(IoOp, bool)>, bytes: u32, nanos: u64) {
        self.busy_ns.add(nanos);
        self.errors.add(u64::from(!good));
        let bytes = if good { u64::from(bytes) } else { 0 };
        match io {
            Some((IoOp::Read, _)) => {
                self.reads.add(1);
                self.read_bytes.add(bytes);
            }
            Some((IoOp::Write, durable)) => {
                self.writes.add(1);
                self.fua_writes.add(u64::from(durable));
                self.write_bytes.add(bytes);
            }
            Some((IoOp::Flush, _)) => self.flushes.add(1),
            Some((IoOp::Discard, _)) => self.discards.add(1),
            Some((IoOp::WriteZeroes, _)) => self.write_zeroes.add(1),
            None => self.controls.add(1),
        }
    }
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
    /// States that cannot happen and have ended a path: bugs of this server.
    pub internal_errors: u64,
    /// Requests that waited for their original on another path.
    pub replays: u64,
    /// Requests now in flight that wait for an older write to the same place, which a path that is
    /// closed has left at the disk.
    pub barred: u64,
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
            sum.internal_errors += core.internal_errors.get();
            sum.replays += core.replays.get();
            sum.barred += core.barred.get();
            sum.inflight += core.inflight.get();
            sum.busy_ns += core.busy_ns.get();
        }
        sum
    }
}

impl IoTotals {
    /// Adds another sum to this one.
    pub fn add(&mut self, other: &Self) {
        self.reads += other.reads;
        self.read_bytes += other.read_bytes;
        self.writes += other.writes;
        self.write_bytes += other.write_bytes;
        self.fua_writes += other.fua_writes;
        self.flushes += other.flushes;
        self.discards += other.discards;
        self.write_zeroes += other.write_zeroes;
        self.controls += other.controls;
        self.errors += other.errors;
        self.internal_errors += other.internal_errors;
        self.replays += other.replays;
        self.barred += other.barred;
        self.inflight += other.inflight;
        self.busy_ns += other.busy_ns;
    }
}

/// One path as statistics show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PathSnapshot {
    /// Its number at this server, never used again.
    pub path: u32,
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
    /// Milliseconds since its first connection.
    pub age_ms: u64,
    /// Round trip time of the last heartbeat in microseconds, if one was measured.
    pub heartbeat_us: Option<u64>,
    /// What it did.
    pub io: IoTotals,
}

/// Where a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SessionState {
    /// Its first path connects.
    Connecting,
    /// At least one path carries IO.
    Up,
    /// No path is up; the last ones end.
    Ending,
    /// The operator evicted it; IO of it still runs.
    Evicted,
}

/// How a session has an export open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// For reading.
    Ro,
    /// For writing, alone.
    Rw,
    /// For writing, beside another writer.
    Migration,
}

impl From<AccessMode> for Access {
    fn from(mode: AccessMode) -> Self {
        match mode {
            AccessMode::ReadOnly => Self::Ro,
            AccessMode::ReadWrite => Self::Rw,
            AccessMode::Migration => Self::Migration,
        }
    }
}

/// An open export of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OpenSnapshot {
    /// The export's name.
    pub export: String,
    /// What for.
    pub access: Access,
    /// The export's id, as clients are told it.
    pub id: Option<String>,
}

/// One session as statistics show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SessionSnapshot {
    /// The client's random number for it.
    pub id: String,
    /// Its name, once a path was admitted.
    pub name: Option<String>,
    /// Where it is.
    pub state: SessionState,
    /// RNBD version agreed on.
    pub version: u8,
    /// Milliseconds since its first connection.
    pub age_ms: u64,
    /// Permits held now.
    pub permits_held: usize,
    /// The exports it has open.
    pub opens: Vec<OpenSnapshot>,
    /// What its paths did, also those that are gone.
    pub io: IoTotals,
    /// Its paths.
    pub paths: Vec<PathSnapshot>,
}

/// Microseconds of a duration.
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
