//! Session configuration, limits granted by the server, and state of a path shared by shards.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rtrs_core::identity::{ExportId, Identity};
use rtrs_core::ids::{PermitId, ProviderIndex, SessionId};
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::AccessMode;

use super::prover::Prover;
pub use crate::settings::{Failover, NoPath, Policy, SlowIo};

/// Maximum number of paths in a session (kernel rtrs-srv.c, `__alloc_path`).
pub(crate) const PATHS_MAX: usize = 128;

/// Maximum number of volumes in a session.
pub const VOLUMES_MAX: usize = 128;
/// Usual value of [`SessionConfig::path_run`].
pub const PATH_RUN: u32 = 32;

/// Control shard's permit for opening and closing volumes.
pub(crate) const CONTROL: PermitId = PermitId(0);

/// Heartbeat settings of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeartbeatSettings {
    /// Silence after which a heartbeat is sent.
    pub interval: Duration,
    /// Further intervals without any traffic after which a path is dead.
    pub missed_max: u32,
    /// Further intervals if the server meanwhile answers on another path (`silence.rs`); at most
    /// `missed_max`.
    pub confirmed_missed_max: u32,
    /// Maximum to which the interval of an idle path grows, if the server supports it.
    pub idle_max: Duration,
}

impl HeartbeatSettings {
    /// Longest silence of a path that is alive.
    pub(crate) fn silence_max(self) -> Duration {
        self.interval * (self.missed_max + 1)
    }
}

/// Reason why a host has no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unresolved(pub String);

/// Addresses of a host.
pub(crate) type Resolved = Result<Vec<SocketAddr>, Unresolved>;

/// Path to try: its addresses and its provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathTarget {
    /// Name as the user wrote it, for messages and listings.
    pub name: String,
    /// Source address, if one was given.
    pub local: Option<IpAddr>,
    /// Server addresses; each attempt uses the next. Empty only while the host is `unresolved`.
    pub remotes: Vec<SocketAddr>,
    /// Reason why the host has no address yet. Attempts fail with it.
    pub unresolved: Option<Unresolved>,
    /// Name that the server's certificate must contain; None if it must contain the address.
    pub peer_name: Option<Arc<str>>,
    /// Transport of the path: the scheme of its portal.
    pub transport: &'static str,
    /// Provider of the path on each shard.
    pub provider: ProviderIndex,
    /// Whether each read gets its own key, which is invalidated before the data is used; otherwise
    /// the IO buffers have one key as long as the path lives.
    pub invalidate_reads: bool,
    /// Heartbeats for a path to `rtrs-server`.
    pub heartbeat: HeartbeatSettings,
    /// Whether both ends authenticate on this path, if the client has a [`Prover`].
    pub proves: bool,
}

impl PathTarget {
    /// Whether the other path has the same local address and reaches every address that this path
    /// does, so that this path adds no redundancy.
    pub(crate) fn duplicates(&self, other: &Self) -> bool {
        let origin = |path: &Self| (path.provider, path.local);
        origin(self) == origin(other)
            && !self.remotes.is_empty()
            && self.remotes.iter().all(|remote| other.remotes.contains(remote))
    }

    /// Replaces the addresses, or the reason why there are none, and returns whether the addresses
    /// have changed. Known addresses outlast a resolver that fails. A different order does not
    /// count as a change, because resolvers rotate it.
    pub(crate) fn resolved(&mut self, found: Resolved) -> bool {
        match found {
            Ok(found) => {
                let is_known = |address: &SocketAddr| self.remotes.contains(address);
                let same = found.len() == self.remotes.len() && found.iter().all(is_known);
                if !same && !found.is_empty() {
                    (self.remotes, self.unresolved) = (found, None);
                    return true;
                }
            }
            Err(why) if self.remotes.is_empty() => self.unresolved = Some(why),
            Err(_) => {}
        }
        false
    }

    /// Server address for an attempt, counted from 0; attempts rotate through the addresses.
    pub(crate) fn remote(&self, attempt: u32) -> SocketAddr {
        let unspecified = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        let at = attempt as usize % self.remotes.len().max(1);
        self.remotes.get(at).copied().unwrap_or(unspecified)
    }
}

/// Settings that may change while a session runs; each field as in [`SessionConfig`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields of SessionConfig")]
pub struct Tuning {
    pub policy: Policy,
    pub no_path: NoPath,
    pub io_timeout: Duration,
    pub connect_timeout: Duration,
    pub reconnect_min: Duration,
    pub reconnect_max: Duration,
    pub heartbeat: HeartbeatSettings,
    /// Heartbeats for paths to `rtrs-server`, by transport.
    pub own_heartbeats: Vec<(&'static str, HeartbeatSettings)>,
}

impl Tuning {
    /// Heartbeats of a path with this transport, for kernel servers and for `rtrs-server`.
    pub(crate) fn heartbeats(&self, transport: &str) -> [HeartbeatSettings; 2] {
        let known = self.own_heartbeats.iter().find(|(carries, _)| *carries == transport);
        [self.heartbeat, known.map_or(self.heartbeat, |(_, settings)| *settings)]
    }
}

/// Volume of a session: an export of its server, and how to open it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeConfig {
    /// Export to open; unique within the session.
    pub export: String,
    /// Requested access.
    pub access: AccessMode,
    /// Whether to open a read-only export read-only when write access is refused.
    pub read_only_fallback: bool,
    /// Whether access `Migration` becomes exclusive once the device's user claims the device
    /// (`BlockDevice::claim`) and no other session has the export open for writing.
    pub promotes: bool,
    /// Server cache epoch in which a dead process may have left unflushed writes, for a session
    /// that takes over from that process; 0 if unknown. These writes count as this session's own.
    pub inherited_epoch: Option<u64>,
    /// Export to which that epoch belongs, if known. For another export, no loss is reported.
    pub inherited_export: Option<ExportId>,
    /// Required server and export; None for those of the first path that opens the volume.
    pub identity: Option<Identity>,
}

/// Configuration of a session.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// Name reported to the server; unique among the server's sessions.
    pub name: String,
    /// Initial volumes, by index: at least one and at most [`VOLUMES_MAX`].
    pub volumes: Vec<VolumeConfig>,
    /// Time from the start during which a session that cannot open retries. After the death of a
    /// process, its successor has to wait until the server has finished with the old session.
    pub open_patience: Duration,
    /// Time from the first open during which users may resend requests that the dead process did
    /// not answer.
    pub resent_for: Duration,
    /// Identity of the session, the same on all paths.
    pub id: SessionId,
    /// Paths in order of preference; at least one.
    pub paths: Vec<PathTarget>,
    /// Number of shards that carry IO; connection k belongs to shard k - 1.
    pub shards: u16,
    /// Path selection policy.
    pub policy: Policy,
    /// Maximum number of successive requests on one of several equal paths under `MinInflight`; 1
    /// selects a path for each request.
    pub path_run: u32,
    /// Heartbeats for kernel servers, and the time that any connection may take to answer.
    pub heartbeat: HeartbeatSettings,
    /// Time limit for establishing one connection.
    pub connect_timeout: Duration,
    /// Shortest wait before a reconnect.
    pub reconnect_min: Duration,
    /// Longest wait before a reconnect.
    pub reconnect_max: Duration,
    /// Time limit for one request on one path. After that, a path that shows no sign of life is
    /// ended, and the request moves to another.
    pub io_timeout: Duration,
    /// Treatment of requests that exceed `io_timeout` on a path that is alive.
    pub slow_io: SlowIo,
    /// Treatment of IO while no path is connected.
    pub no_path: NoPath,
    /// Condition for repeating requests of a dead path at a server that cannot fence it off.
    pub failover: Failover,
    /// Maximum number of requests in flight on all shards; the server's queue depth applies too.
    pub queue_depth_limit: u16,
    /// Prover of the client's identity on paths without TLS.
    pub prover: Option<Prover>,
    /// Seed of the reconnect jitter.
    pub seed: u64,
}

impl SessionConfig {
    /// Returns the current values of the settings that may change.
    pub fn tuning(&self) -> Tuning {
        let own = self.paths.iter().map(|path| (path.transport, path.heartbeat));
        Tuning {
            policy: self.policy,
            no_path: self.no_path,
            io_timeout: self.io_timeout,
            connect_timeout: self.connect_timeout,
            reconnect_min: self.reconnect_min,
            reconnect_max: self.reconnect_max,
            heartbeat: self.heartbeat,
            own_heartbeats: own.collect(),
        }
    }

    /// Returns the configuration with these settings. Paths keep their own (`Path::tune`).
    pub(crate) fn tuned(&self, tuning: &Tuning) -> Self {
        let Tuning { policy, no_path, io_timeout, connect_timeout, .. } = *tuning;
        let Tuning { reconnect_min, reconnect_max, heartbeat, .. } = *tuning;
        Self {
            policy,
            no_path,
            io_timeout,
            connect_timeout,
            reconnect_min,
            reconnect_max,
            heartbeat,
            ..self.clone()
        }
    }
}

/// Limits granted by the server, for all shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Granted {
    pub(crate) queue_depth: u16,
    pub(crate) max_io_size: u32,
    /// Size of a chunk in bytes: the largest request and its header.
    pub(crate) chunk_size: u32,
    /// Whether discards and write zeroes clear the full length requested.
    pub(crate) keeps_lengths: bool,
    /// Whether the server supports FENCE.
    pub(crate) fences: bool,
}

impl Granted {
    /// Values that must not change during a session.
    pub(crate) fn bounds(&self) -> (u16, u32, u32) {
        (self.queue_depth, self.max_io_size, self.chunk_size)
    }

    /// Number of permits for all shards together.
    pub(crate) fn depth(&self, config: &SessionConfig) -> u16 {
        self.queue_depth.min(config.queue_depth_limit)
    }

    /// Permit of FENCE. It is separate, so that a fence never waits for an open in progress over
    /// another path. With just one permit for each shard, fences and opens share a permit.
    pub(crate) fn fence_permit(&self, config: &SessionConfig) -> PermitId {
        PermitId(u16::from(self.fences && self.depth(config) > config.shards + 1))
    }
}

impl NoPath {
    /// Maximum time of a whole IO whose requests may take `io_timeout` each; None if it is
    /// unlimited. The kernel is given slightly more (`request_seconds` in `plan/attach.rs`).
    pub(crate) fn io_age_max(self, io_timeout: Duration) -> Option<Duration> {
        match self {
            Self::Queue => None,
            Self::QueueFor(time) => Some(time + io_timeout * 2),
            Self::Fail => Some(io_timeout * 2),
        }
    }
}

/// State of a path that all shards read and write without synchronization.
#[derive(Debug, Default)]
pub(crate) struct PathShared {
    last_received_ns: AtomicU64,
    last_waited_ns: AtomicU64,
    latency_ns: AtomicU64,
    /// Whether heartbeats are sent less often because the path is idle.
    idle: AtomicBool,
}

impl PathShared {
    /// Sets whether heartbeats are sent less often.
    pub(crate) fn set_idle(&self, idle: bool) {
        self.idle.store(idle, Ordering::Relaxed);
    }

    /// Ends the idle state when a request is sent. Returns true once, when the control shard must
    /// be notified.
    pub(crate) fn ends_idle(&self) -> bool {
        self.idle.load(Ordering::Relaxed) && self.idle.swap(false, Ordering::Relaxed)
    }

    /// Records that one of the path's connections received something other than a heartbeat.
    pub(crate) fn received(&self, now: Instant) {
        self.last_received_ns.fetch_max(now.as_nanos(), Ordering::Relaxed);
    }

    /// Time at which something other than a heartbeat was last received.
    pub(crate) fn last_received(&self) -> Instant {
        Instant::from_nanos(self.last_received_ns.load(Ordering::Relaxed))
    }

    /// Records that a request is waiting for its answer on one of the connections.
    pub(crate) fn waits(&self, now: Instant) {
        self.last_waited_ns.fetch_max(now.as_nanos(), Ordering::Relaxed);
    }

    /// Time of the last use, as far as the control shard knows.
    pub(crate) fn last_used(&self) -> Instant {
        let waited = Instant::from_nanos(self.last_waited_ns.load(Ordering::Relaxed));
        self.last_received().max(waited)
    }

    /// Sets the last heartbeat round trip; zero while unknown.
    pub(crate) fn set_latency(&self, latency: Duration) {
        let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.latency_ns.store(nanos, Ordering::Relaxed);
    }

    /// Last heartbeat round trip in nanoseconds; zero while unknown.
    pub(crate) fn latency_ns(&self) -> u64 {
        self.latency_ns.load(Ordering::Relaxed)
    }
}
