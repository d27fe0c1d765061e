//! Counters per path and shard, summed when they are read.
//!
//! Each shard writes only its own counters, so counting costs only a plain addition. A reader never
//! sees a torn number, but different numbers may come from slightly different times.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
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
use crate::rate_limits::RateLimits;

/// A counter with a single writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds a number. Only the shard that owns the counter may call this.
    pub fn add(&self, by: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
    }

    /// Subtracts a number. Only the shard that owns the counter may call this.
    pub fn sub(&self, by: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_sub(by), Ordering::Relaxed);
    }

    /// Returns the current value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])+ $name:ident,)+) => {
        /// Counters of one shard for one path, aligned to separate cache lines.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub struct ShardCounters {
            $($(#[$doc])+ pub $name: Counter,)+
        }

        /// Sum of [`ShardCounters`].
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
    /// FUA writes answered.
    fua_writes,
    /// Flushes answered.
    flushes,
    /// Discards answered.
    discards,
    /// Write zeroes answered.
    write_zeroes,
    /// Session info, open, close and extents requests answered.
    controls,
    /// Requests answered with an error.
    errors,
    /// Requests, or steps of requests, that failed at the disk or file.
    device_errors,
    /// Impossible states that ended a path: bugs of this server.
    internal_errors,
    /// Requests that waited for the original request on another path.
    replays,
    /// Requests now in flight that are waiting for an older write to the same range, which a closed
    /// path left running.
    blocked,
    /// Requests now in flight.
    inflight,
    /// Nanoseconds from arrival to answer, summed over all requests.
    busy_ns,
    /// Portion of `busy_ns` that was spent at the disk or file.
    backend_ns,
}

impl ShardCounters {
    /// Records an answer, before it is sent. `good` says whether it reports success, `io` is the
    /// operation and whether it had to be durable, and `bytes` is the length.
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

/// Counters of all shards for one path.
#[derive(Debug)]
pub struct PathCounters {
    cores: Box<[ShardCounters]>,
}

impl PathCounters {
    /// Creates counters for `cores` shards.
    pub fn new(cores: u16) -> Self {
        Self { cores: (0..cores.max(1)).map(|_| ShardCounters::default()).collect() }
    }

    /// Returns the counters of a shard. Shards past the end share the counters of the last shard.
    pub fn core(&self, core: CoreIndex) -> &ShardCounters {
        &self.cores[core.index().min(self.cores.len() - 1)]
    }

    /// Returns the sum over all shards.
    pub fn totals(&self) -> IoTotals {
        let mut sum = IoTotals::default();
        self.cores.iter().for_each(|core| sum.count(core));
        sum
    }
}

/// Operations of an export, in the order of [`ExportTotals::ops`].
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

/// Breakdown of a request's time on the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerTimes {
    /// Nanoseconds on the server but not at the disk: waiting for its permit, for an older write,
    /// for room at the disk, for syncs that decide its result, or for room in the send queue.
    pub queue_ns: u64,
    /// Nanoseconds at the disk or file, over all steps.
    pub backend_ns: u64,
}

impl ServerTimes {
    /// Computes the times of a request that spent `backend_ns` at the disk.
    pub const fn new(arrived: Instant, answered: Instant, backend_ns: u64) -> Self {
        let total = answered.as_nanos().saturating_sub(arrived.as_nanos());
        Self { queue_ns: total.saturating_sub(backend_ns), backend_ns }
    }

    /// Total time in nanoseconds.
    pub const fn total_ns(self) -> u64 {
        self.queue_ns.saturating_add(self.backend_ns)
    }
}

/// Latency histogram with a single writer.
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

/// Counters of one shard for one operation of an export.
#[derive(Debug, Default)]
struct OpCounters {
    times: TimeCounters,
    bytes: Counter,
    errors: Counter,
}

/// Counters of one shard for one export.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct ShardExportCounters {
    ops: [OpCounters; 6],
    queue: TimeCounters,
    backend: TimeCounters,
    /// Requests, or steps of requests, that failed at the disk or file.
    pub device_errors: Counter,
    /// Requests that found the device's queue full.
    pub queue_full: Counter,
    /// Requests that were delayed by rate limits.
    pub throttled: Counter,
    /// Nanoseconds by which rate limits delayed requests, counted when each wait ends.
    pub throttled_ns: Counter,
}

impl ShardExportCounters {
    /// Records an answer to an IO, before it is sent. `good` says whether it reports success.
    pub fn answered(&self, op: IoOp, good: bool, bytes: u32, took: ServerTimes) {
        self.queue.record(took.queue_ns);
        self.backend.record(took.backend_ns);
        let op = &self.ops[op_index(op)];
        op.times.record(took.total_ns());
        op.bytes.add(if good { u64::from(bytes) } else { 0 });
        op.errors.add(u64::from(!good));
    }
}

/// Totals of all shards for one operation of an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpTotals {
    /// Latencies from arrival to answer.
    pub times: Times,
    /// Bytes of IOs that succeeded.
    pub bytes: u64,
    /// IOs answered with an error.
    pub errors: u64,
}

/// Totals of all shards for one export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportTotals {
    /// Totals of each operation, in the order of [`OP_NAMES`].
    pub ops: [OpTotals; 6],
    /// Times on the server but not at the disk.
    pub queue: Times,
    /// Times at the disk or file.
    pub backend: Times,
    /// Requests, or steps of requests, that failed at the disk or file.
    pub device_errors: u64,
    /// Requests that found the device's queue full.
    pub queue_full: u64,
    /// Requests that were delayed by rate limits.
    pub throttled: u64,
    /// Nanoseconds by which rate limits delayed requests, counted when each wait ends.
    pub throttled_ns: u64,
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
        self.throttled += other.throttled;
        self.throttled_ns += other.throttled_ns;
    }
}

/// Counters of an export, for each shard that has opened its device.
#[derive(Debug, Default)]
pub struct ExportCounters(Mutex<BTreeMap<CoreIndex, Arc<ShardExportCounters>>>);

impl ExportCounters {
    /// Returns the counters of a shard, which the shard keeps as long as it has the device open.
    pub fn shard(&self, core: CoreIndex) -> Arc<ShardExportCounters> {
        Arc::clone(self.0.lock().entry(core).or_default())
    }

    /// Returns the sum over all shards.
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
            sum.throttled += shard.throttled.get();
            sum.throttled_ns += shard.throttled_ns.get();
        }
        sum
    }
}

/// A shard's report about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardReport {
    /// Counters of the shard's providers, by scheme.
    pub fabrics: Vec<(&'static str, FabricCounters)>,
    /// Impossible states: bugs of this server.
    pub internal_errors: u64,
}

/// A path, as shown in statistics.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathSnapshot {
    /// Number of the path on this server, never reused.
    pub path: u64,
    /// UUID that the client gave the path.
    pub uuid: String,
    /// State of the path.
    pub state: PathStage,
    /// Transport: `tcp`, `tls` or `rdma`.
    pub transport: String,
    /// Cipher suite; None if the path is not encrypted.
    #[serde(default)]
    pub cipher: Option<String>,
    /// Authentication method; None if the client did not authenticate.
    #[serde(default)]
    pub auth: Option<PathAuth>,
    /// Address of the client.
    pub peer: String,
    /// Address of the server.
    pub local: String,
    /// Number of connections of the complete path.
    pub connections: u16,
    /// Whether each request uses a fresh key for its chunk (`always-invalidate`).
    #[serde(default)]
    pub fresh_keys: bool,
    /// Milliseconds since the first connection.
    pub age_ms: u64,
    /// Round-trip time of the last heartbeat in microseconds, if one was measured.
    pub heartbeat_us: Option<u64>,
    /// IO of the path.
    pub io: IoTotals,
}

choices! {
    /// How the client of a path authenticated.
    pub enum PathAuth as "authentication" {
        /// TLS handshake.
        Tls = "tls",
        /// Signatures, on a path without TLS.
        Signed = "signed",
        /// The client must authenticate, but has not yet done so.
        Pending = "pending",
    }
}

choices! {
    /// State of a path.
    pub enum PathStage as "path state" {
        /// The handshake is in progress.
        Connecting = "connecting",
        /// The client must authenticate, but has not yet done so.
        Authenticating = "authenticating",
        /// The path is up.
        Connected = "connected",
        /// The path answers its running requests and then ends.
        Finishing = "finishing",
        /// The connections are being closed.
        Closing = "closing",
        /// Connections or block IO of the path remain.
        Draining = "draining",
        /// Nothing of the path remains.
        Gone = "gone",
    }
}

impl PathStage {
    /// Converts the state of a path. `unproved` says whether its client must still authenticate.
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
    /// State of a session.
    pub enum SessionState as "session state" {
        /// The first path is connecting.
        Connecting = "connecting",
        /// At least one path carries IO.
        Up = "up",
        /// No path is up; the last ones are ending.
        Ending = "ending",
        /// Evicted by the operator; some IO still runs.
        Evicted = "evicted",
    }
}

choices! {
    /// Mode in which a session has an export open.
    pub enum Access as "access" {
        /// For reading.
        Ro = "ro",
        /// Exclusively for writing.
        Rw = "rw",
        /// For writing, alongside another writer.
        Migration = "migration",
    }
}

impl Access {
    /// Whether the mode permits writing.
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

/// An export that a session has open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenSnapshot {
    /// Name of the export.
    pub export: String,
    /// Mode in which it is open.
    pub access: Access,
    /// ID of the export, as reported to clients.
    pub id: Option<String>,
    /// Whether the export has rate limits.
    #[serde(default)]
    pub limited: bool,
}

choices! {
    /// State of an export.
    pub enum ExportState as "export state" {
        /// No session has it open.
        Unused = "unused",
        /// Sessions have it open.
        Open = "open",
        /// The file or disk was truncated from outside: IO beyond the new end fails.
        Cut = "cut",
        /// The path leads to a file or device other than the one that clients have open.
        Replaced = "replaced",
        /// The path leads nowhere; the opened file is still exported.
        Missing = "missing",
        /// Another server serves it, and this one can take over.
        Standby = "standby",
        /// Removed, but requests of sessions still run.
        Removing = "removing",
        /// Cannot be opened.
        Failed = "failed",
    }
}

/// A session that has an export open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportUser {
    /// ID of the session.
    pub session: String,
    /// Name of the session.
    pub name: Option<String>,
    /// Mode in which the export is open.
    pub access: Access,
    /// Addresses of the session's clients.
    #[serde(default)]
    pub peers: BTreeSet<IpAddr>,
}

/// IO of all sessions to an export.
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
    /// Requests that were delayed by rate limits.
    pub throttled: u64,
    /// Nanoseconds by which rate limits delayed requests, counted when each wait ends.
    pub throttled_ns: u64,
    /// Latency histogram of all IOs.
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
            throttled: totals.throttled,
            throttled_ns: totals.throttled_ns,
            times: times.filled().collect(),
        }
    }
}

/// An export, as shown in statistics.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportSnapshot {
    /// Name that clients open.
    pub name: String,
    /// File, device or other target of the export.
    pub backing: String,
    /// Size in bytes.
    pub size: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Whether opens for writing are refused.
    pub read_only: bool,
    /// Identity of the file or disk, as reported to clients.
    pub id: Option<String>,
    /// State of the export.
    pub state: ExportState,
    /// Whether a client found the export under the search path.
    pub found: bool,
    /// Sessions that have it open.
    pub open_by: Vec<ExportUser>,
    /// Requests that failed at the disk or file.
    pub device_errors: u64,
    /// IO of all sessions since it was exported.
    #[serde(default)]
    pub io: ExportIo,
    /// Number of failed syncs, counted across restarts.
    pub epoch: u64,
    /// Access list of the export; if empty, the server's list applies.
    #[serde(default)]
    pub access: Vec<AccessRule>,
    /// Restriction in addition to the access lists, if any.
    #[serde(default)]
    pub access_limit: Option<AccessLimit>,
    /// Rate limits, if any.
    #[serde(default)]
    pub limits: Option<RateLimits>,
    /// Reason for the state `failed`, or why the target of a served export cannot be reached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether the export's file in `exports-dir` cannot be read: only a reload tries again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unread: bool,
}

impl ExportSnapshot {
    /// Reason, and the server's reaction to it.
    pub(crate) fn explained(&self) -> Option<String> {
        let why = self.reason.as_ref()?;
        Some(if self.unread { why.clone() } else { format!("{why}; {TRIES_AGAIN}") })
    }
}

/// Text after the reason why an export cannot be opened or reached.
pub(crate) const TRIES_AGAIN: &str = "the server tries again";

/// Access restriction of an export that does not match the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AccessLimit {
    /// The export left the configuration: only sessions that had it open at that time may use it.
    Holders,
    /// The export could not be changed: the previous access lists apply too.
    Before,
}

/// Memory of all sessions' chunks, as shown in statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySnapshot {
    /// Bytes in use: chunks that were written over TCP, and all chunks over RDMA.
    pub used_bytes: u64,
    /// Limit above which new sessions get fewer chunks or are refused (`memory-max`).
    pub max_bytes: u64,
}

/// A session, as shown in statistics.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionSnapshot {
    /// Random ID of the session, chosen by the client.
    pub id: String,
    /// Hash of the ID, as used in logs.
    #[serde(default)]
    pub log_id: String,
    /// Name of the session, once a path was admitted.
    pub name: Option<String>,
    /// Identity that the client proved: `anonymous`, `certificate:NAME` or `key:NAME`.
    #[serde(default)]
    pub identity: String,
    /// State of the session.
    pub state: SessionState,
    /// Negotiated RNBD version.
    pub version: u8,
    /// Milliseconds since the first connection.
    pub age_ms: u64,
    /// Number of chunks per path.
    #[serde(default)]
    pub queue_depth: u16,
    /// Bytes of the session's chunks that count against `memory-max`.
    #[serde(default)]
    pub memory_bytes: u64,
    /// Number of permits currently held.
    pub permits_held: usize,
    /// Exports that the session has open.
    pub opens: Vec<OpenSnapshot>,
    /// IO of all paths, including those that have ended.
    pub io: IoTotals,
    /// Paths of the session.
    pub paths: Vec<PathSnapshot>,
}

/// Converts a duration to milliseconds, saturating.
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Converts a duration to microseconds, saturating.
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// A session that loses paths because access lists, certificates or keys changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revoked {
    /// Name of the session, or the hash of its UUID.
    pub session: String,
    /// Identity that the client proved, if any.
    pub identity: Option<String>,
    /// Number of paths that the session loses.
    pub paths: usize,
    /// Number of paths that the session keeps. If none are left, the session ends.
    pub paths_left: usize,
    /// Addresses of the clients of the lost paths.
    #[serde(default)]
    pub peers: BTreeSet<IpAddr>,
}
