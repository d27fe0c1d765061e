//! What paths did: counters per path and shard, added up when somebody asks.
//!
//! Each shard writes its own counters only, so that counting costs a plain add; readers see each
//! number whole, and different numbers from slightly different moments.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rtrs_core::block::IoOp;
use rtrs_core::choices;
use rtrs_core::fabric::FabricCounters;
use rtrs_core::ids::CoreIndex;
use rtrs_core::metrics::{Bucket, TIME_BUCKETS, Times, bucket_of};
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::AccessMode;
use serde::{Deserialize, Serialize};

use crate::access_list::AccessRule;
use crate::path::state::PathState;

/// One number with one writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds; by the shard that owns it only.
    pub fn add(&self, by: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
    }

    /// Takes away; by the shard that owns it only.
    pub fn sub(&self, by: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_sub(by), Ordering::Relaxed);
    }

    /// The present value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])+ $name:ident,)+) => {
        /// What one shard did for one path. A cache line or more of its own.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub struct ShardCounters {
            $($(#[$doc])+ pub $name: Counter,)+
        }

        /// A sum of [`ShardCounters`].
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct IoTotals {
            $($(#[$doc])+ pub $name: u64,)+
        }

        impl IoTotals {
            /// Adds another sum to this one.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)+
            }

            fn count(&mut self, counters: &ShardCounters) {
                $(self.$name += counters.$name.get();)+
            }
        }
    };
}

counters! {
    /// Reads answered.
    reads,
    /// Bytes of reads that succeeded.
    read_bytes,
    /// Writes answered.
    writes,
    /// Bytes of writes that succeeded.
    write_bytes,
    /// Writes answered that had to be durable with their answer (FUA).
    fua_writes,
    /// Flushes answered.
    flushes,
    /// Discards answered.
    discards,
    /// Write zeroes answered.
    write_zeroes,
    /// Session info, open, close and extents answered.
    controls,
    /// Requests answered with an error.
    errors,
    /// Times that the disk or file failed a request, or a step of one.
    device_errors,
    /// States that cannot happen and have ended a path: bugs of this server.
    internal_errors,
    /// Requests that waited for their original on another path.
    replays,
    /// Requests now in flight that wait for an older write to the same place, which a path that is
    /// closed has left at the disk.
    blocked,
    /// Requests now in flight.
    inflight,
    /// Nanoseconds from arrival to answer, summed over all requests.
    busy_ns,
    /// Of these, nanoseconds at the disk or file.
    backend_ns,
}

impl ShardCounters {
    /// A request of so many bytes is about to be answered, with success if `good`. `io`: what it
    /// did, and whether it had to be durable.
    pub fn answered(&self, good: bool, io: Option<(IoOp, bool)>, bytes: u32, took: ServerTimes) {
        self.busy_ns.add(took.total_ns());
        self.backend_ns.add(took.backend_ns);
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
            Some((IoOp::Extents, _)) | None => self.controls.add(1),
        }
    }
}

/// What all shards did for one path.
#[derive(Debug)]
pub struct PathCounters {
    cores: Box<[ShardCounters]>,
}

impl PathCounters {
    /// Zeroes for that many shards.
    pub fn new(cores: u16) -> Self {
        Self { cores: (0..cores.max(1)).map(|_| ShardCounters::default()).collect() }
    }

    /// One shard's counters. A shard past the end shares the last one's.
    pub fn core(&self, core: CoreIndex) -> &ShardCounters {
        &self.cores[core.index().min(self.cores.len() - 1)]
    }

    /// The sum over all shards.
    pub fn totals(&self) -> IoTotals {
        let mut sum = IoTotals::default();
        self.cores.iter().for_each(|core| sum.count(core));
        sum
    }
}

/// The operations of an export, in the order of [`ExportTotals::ops`].
pub const OP_NAMES: [&str; 6] = ["read", "write", "flush", "discard", "write-zeroes", "extents"];

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

/// Where the time of a request went at the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerTimes {
    /// Nanoseconds at the server and not at the disk: it waited for its permit, for an older write,
    /// for room at the disk, for syncs that decide about it, or for room in the send queue.
    pub queue_ns: u64,
    /// Nanoseconds at the disk or file, over all its steps.
    pub backend_ns: u64,
}

impl ServerTimes {
    /// Of a request that arrived at one time, is answered at the other, and was at the disk for
    /// so many nanoseconds.
    pub const fn new(arrived: Instant, answered: Instant, backend_ns: u64) -> Self {
        let total = answered.as_nanos().saturating_sub(arrived.as_nanos());
        Self { queue_ns: total.saturating_sub(backend_ns), backend_ns }
    }

    /// Nanoseconds altogether.
    pub const fn total_ns(self) -> u64 {
        self.queue_ns.saturating_add(self.backend_ns)
    }
}

/// Times by bucket, with one writer.
#[derive(Debug, Default)]
struct TimeCounters {
    buckets: [Counter; TIME_BUCKETS],
    nanos: Counter,
}

impl TimeCounters {
    fn record(&self, nanos: u64) {
        self.buckets[bucket_of(nanos)].add(1);
        self.nanos.add(nanos);
    }

    fn get(&self) -> Times {
        let buckets = std::array::from_fn(|at| self.buckets[at].get());
        Times { buckets, nanos: self.nanos.get() }
    }
}

/// What one shard did of one operation of an export.
#[derive(Debug, Default)]
struct OpCounters {
    times: TimeCounters,
    bytes: Counter,
    errors: Counter,
}

/// What one shard did for one export.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct ShardExportCounters {
    ops: [OpCounters; 6],
    queue: TimeCounters,
    backend: TimeCounters,
    /// Times that the disk or file failed a request, or a step of one.
    pub device_errors: Counter,
    /// Requests that found the queue of the device full.
    pub queue_full: Counter,
}

impl ShardExportCounters {
    /// An IO of so many bytes is about to be answered, with success if `good`.
    pub fn answered(&self, op: IoOp, good: bool, bytes: u32, took: ServerTimes) {
        self.queue.record(took.queue_ns);
        self.backend.record(took.backend_ns);
        let op = &self.ops[op_index(op)];
        op.times.record(took.total_ns());
        op.bytes.add(if good { u64::from(bytes) } else { 0 });
        op.errors.add(u64::from(!good));
    }
}

/// What all shards did of one operation of an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpTotals {
    /// Times from arrival to answer.
    pub times: Times,
    /// Bytes of IOs that succeeded.
    pub bytes: u64,
    /// IOs answered with an error.
    pub errors: u64,
}

/// What all shards did for one export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportTotals {
    /// By operation.
    pub ops: [OpTotals; 6],
    /// Times at the server and not at the disk.
    pub queue: Times,
    /// Times at the disk or file.
    pub backend: Times,
    /// Times that the disk or file failed a request, or a step of one.
    pub device_errors: u64,
    /// Requests that found the queue of the device full.
    pub queue_full: u64,
}

impl ExportTotals {
    /// Adds another sum to this one.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.ops.iter_mut().zip(&other.ops) {
            mine.times.add(&theirs.times);
            mine.bytes += theirs.bytes;
            mine.errors += theirs.errors;
        }
        self.queue.add(&other.queue);
        self.backend.add(&other.backend);
        self.device_errors += other.device_errors;
        self.queue_full += other.queue_full;
    }
}

/// The counters of an export: those of each shard that has opened its device.
#[derive(Debug, Default)]
pub struct ExportCounters(Mutex<BTreeMap<CoreIndex, Arc<ShardExportCounters>>>);

impl ExportCounters {
    /// The counters of a shard, which it keeps as long as it has the device open.
    pub fn shard(&self, core: CoreIndex) -> Arc<ShardExportCounters> {
        Arc::clone(self.0.lock().entry(core).or_default())
    }

    /// The sum over all shards.
    pub fn totals(&self) -> ExportTotals {
        let mut sum = ExportTotals::default();
        for shard in self.0.lock().values() {
            for (sum, op) in sum.ops.iter_mut().zip(&shard.ops) {
                sum.times.add(&op.times.get());
                sum.bytes += op.bytes.get();
                sum.errors += op.errors.get();
            }
            sum.queue.add(&shard.queue.get());
            sum.backend.add(&shard.backend.get());
            sum.device_errors += shard.device_errors.get();
            sum.queue_full += shard.queue_full.get();
        }
        sum
    }
}

/// What a shard reports of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardReport {
    /// What its providers did, by scheme.
    pub fabrics: Vec<(&'static str, FabricCounters)>,
    /// States that cannot happen: bugs of this server.
    pub internal_errors: u64,
}

/// One path as statistics show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathSnapshot {
    /// Its number at this server, never used again.
    pub path: u64,
    /// What the client calls it.
    pub uuid: String,
    /// Where it is in its life.
    pub state: PathStage,
    /// What carries it: `tcp`, `tls` or `rdma`.
    pub transport: String,
    /// The cipher suite; none where it is not encrypted.
    #[serde(default)]
    pub cipher: Option<String>,
    /// How its client has proved who it is; none if it has not.
    #[serde(default)]
    pub auth: Option<PathAuth>,
    /// The client's address.
    pub peer: String,
    /// Our address.
    pub local: String,
    /// Connections it has when complete.
    pub connections: u16,
    /// Each request gets a fresh key to its chunk (`always-invalidate`).
    #[serde(default)]
    pub fresh_keys: bool,
    /// Milliseconds since its first connection.
    pub age_ms: u64,
    /// Round trip time of the last heartbeat in microseconds, if one was measured.
    pub heartbeat_us: Option<u64>,
    /// What it did.
    pub io: IoTotals,
}

choices! {
    /// How the client of a path has proved who it is.
    pub enum PathAuth as "authentication" {
        /// By the handshake of TLS.
        Tls = "tls",
        /// By signatures, on a path without TLS.
        Signed = "signed",
        /// It has to, and has not yet.
        Pending = "pending",
    }
}

choices! {
    /// Where a path is in its life.
    pub enum PathStage as "path state" {
        /// Its handshake goes on.
        Connecting = "connecting",
        /// Its client has to prove who it is, and has not yet.
        Authenticating = "authenticating",
        /// It is up.
        Connected = "connected",
        /// It answers what it has, and ends.
        Finishing = "finishing",
        /// Its connections are being closed.
        Closing = "closing",
        /// Connections or block IO of it are left.
        Draining = "draining",
        /// Nothing of it is left.
        Gone = "gone",
    }
}

impl PathStage {
    /// That of a path in a state, whose client has to prove who it is or not.
    pub fn new(state: PathState, unproved: bool) -> Self {
        match state {
            PathState::Connecting => Self::Connecting,
            PathState::Connected if unproved => Self::Authenticating,
            PathState::Connected => Self::Connected,
            PathState::Finishing => Self::Finishing,
            PathState::Closing => Self::Closing,
            PathState::Draining => Self::Draining,
            PathState::Gone => Self::Gone,
        }
    }
}

choices! {
    /// Where a session is.
    pub enum SessionState as "session state" {
        /// Its first path connects.
        Connecting = "connecting",
        /// At least one path carries IO.
        Up = "up",
        /// No path is up; the last ones end.
        Ending = "ending",
        /// The operator evicted it; IO of it still runs.
        Evicted = "evicted",
    }
}

choices! {
    /// How a session has an export open.
    pub enum Access as "access" {
        /// For reading.
        Ro = "ro",
        /// For writing, alone.
        Rw = "rw",
        /// For writing, beside another writer.
        Migration = "migration",
    }
}

impl Access {
    /// True for both kinds of writing.
    pub const fn may_write(self) -> bool {
        !matches!(self, Self::Ro)
    }
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenSnapshot {
    /// The export's name.
    pub export: String,
    /// What for.
    pub access: Access,
    /// The export's id, as clients see it.
    pub id: Option<String>,
}

choices! {
    /// Where an export is.
    pub enum ExportState as "export state" {
        /// No session has it open.
        Unused = "unused",
        /// Sessions have it open.
        Open = "open",
        /// Its file or disk was made shorter from outside: IO beyond the new end fails.
        Cut = "cut",
        /// Its path leads to another file or device than the one that clients have open.
        Replaced = "replaced",
        /// Its path leads nowhere; the file that was opened is still exported.
        Missing = "missing",
        /// Another server serves it, and this one can take over.
        Standby = "standby",
        /// It is removed, and what sessions have begun there still runs.
        Removing = "removing",
    }
}

/// A session that has an export open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportUser {
    /// The session's number.
    pub session: String,
    /// Its name.
    pub name: Option<String>,
    /// What for.
    pub access: Access,
}

/// What all sessions did with an export.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ExportIo {
    /// Reads answered.
    pub reads: u64,
    /// Bytes of reads that succeeded.
    pub read_bytes: u64,
    /// Writes answered.
    pub writes: u64,
    /// Bytes of writes that succeeded.
    pub write_bytes: u64,
    /// Flushes, discards and write zeroes answered.
    pub others: u64,
    /// IOs answered with an error.
    pub errors: u64,
    /// Nanoseconds from arrival to answer, summed over all IOs.
    pub busy_ns: u64,
    /// The same by time.
    pub times: Vec<Bucket>,
}

impl From<&ExportTotals> for ExportIo {
    fn from(totals: &ExportTotals) -> Self {
        let [read, write, ..] = &totals.ops;
        let mut times = Times::default();
        totals.ops.iter().for_each(|op| times.add(&op.times));
        let (reads, writes) = (read.times.count(), write.times.count());
        Self {
            reads,
            read_bytes: read.bytes,
            writes,
            write_bytes: write.bytes,
            others: times.count() - reads - writes,
            errors: totals.ops.iter().map(|op| op.errors).sum(),
            busy_ns: times.nanos,
            times: times.filled().collect(),
        }
    }
}

/// One export as statistics show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportSnapshot {
    /// What clients open.
    pub name: String,
    /// What is behind it.
    pub backing: String,
    /// Bytes.
    pub size: u64,
    /// Bytes of a logical block.
    pub block_size: u32,
    /// Nobody may open it for writing.
    pub read_only: bool,
    /// Which file or disk it is, as clients see it.
    pub id: Option<String>,
    /// Where it is.
    pub state: ExportState,
    /// A client found it below the search path.
    pub found: bool,
    /// The sessions that have it open.
    pub open_by: Vec<ExportUser>,
    /// Times that the disk or file has failed a request.
    pub device_errors: u64,
    /// What sessions did there since it was exported.
    #[serde(default)]
    pub io: ExportIo,
    /// How often a sync has failed, counted over restarts.
    pub epoch: u64,
    /// Its own access list; without one it follows that of the server.
    #[serde(default)]
    pub access: Vec<AccessRule>,
    /// What counts besides the lists, if anything does.
    #[serde(default)]
    pub access_limit: Option<AccessLimit>,
}

/// Limit of access to an export that is not as the configuration says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AccessLimit {
    /// The export left the configuration: sessions that had it open then may use it.
    Holders,
    /// The export could not be changed: the access lists before count too.
    Before,
}

/// Memory of the chunks of all sessions as statistics show it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySnapshot {
    /// Bytes in use: over TCP of chunks that were written, over RDMA of all.
    pub used_bytes: u64,
    /// Bytes from which on new sessions get fewer chunks or are refused (`memory-max`).
    pub max_bytes: u64,
}

/// One session as statistics show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionSnapshot {
    /// The client's random number for it.
    pub id: String,
    /// How logs name it: a hash of that number.
    #[serde(default)]
    pub log_id: String,
    /// Its name, once a path was admitted.
    pub name: Option<String>,
    /// Who its client has proved to be: `anonymous`, `certificate:NAME` or `key:NAME`.
    #[serde(default)]
    pub identity: String,
    /// Where it is.
    pub state: SessionState,
    /// RNBD version agreed on.
    pub version: u8,
    /// Milliseconds since its first connection.
    pub age_ms: u64,
    /// Chunks of each of its paths.
    #[serde(default)]
    pub queue_depth: u16,
    /// Bytes of its chunks that count against `memory-max`.
    #[serde(default)]
    pub memory_bytes: u64,
    /// Permits held now.
    pub permits_held: usize,
    /// The exports it has open.
    pub opens: Vec<OpenSnapshot>,
    /// What its paths did, also those that are gone.
    pub io: IoTotals,
    /// Its paths.
    pub paths: Vec<PathSnapshot>,
}

/// Milliseconds of a duration.
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Microseconds of a duration.
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// A session that loses paths because access lists, certificates or keys have changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revoked {
    /// Its name, or the hash of its UUID.
    pub session: String,
    /// Who its client is; none if it has not proved it.
    pub identity: Option<String>,
    /// The paths that it loses.
    pub paths: usize,
    /// The paths that it keeps. Without any, it ends.
    pub paths_left: usize,
}
