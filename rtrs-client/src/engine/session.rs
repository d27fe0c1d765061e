//! How a session is configured, what its server granted, and what its shards share of a path.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rtrs_core::identity::Identity;
use rtrs_core::ids::{PermitId, ProviderIndex, SessionId};
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::AccessMode;

use super::prover::Prover;
pub use crate::settings::{Failover, NoPath, Policy, SlowIo};

/// Most paths of a session (kernel rtrs-srv.c, `__alloc_path`).
pub(crate) const PATHS_MAX: usize = 128;

/// Most volumes of a session.
pub const VOLUMES_MAX: usize = 128;

/// The control shard's permit for opening and closing volumes.
pub(crate) const CONTROL: PermitId = PermitId(0);

/// How a path's heartbeat goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeartbeatSettings {
    /// Silence after which a heartbeat is sent.
    pub interval: Duration,
    /// Further intervals without any traffic after which a path is dead.
    pub missed_max: u32,
    /// The same where the server answers on another path meanwhile (`silence.rs`): at most
    /// `missed_max`.
    pub confirmed_missed_max: u32,
    /// While a path is idle the interval grows, up to this, at servers that take it.
    pub idle_max: Duration,
}

impl HeartbeatSettings {
    /// The longest silence of a path that lives.
    pub(crate) fn silence_max(self) -> Duration {
        self.interval * (self.missed_max + 1)
    }
}

/// One path to try: its addresses and the provider that carries it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathTarget {
    /// As the user wrote it, for messages and listings.
    pub name: String,
    /// Source address, if one was named.
    pub local: Option<IpAddr>,
    /// The server, at least one address: each attempt takes the next.
    pub remotes: Vec<SocketAddr>,
    /// The name that the server's certificate must have; None for its address.
    pub peer_name: Option<Arc<str>>,
    /// What carries it: the scheme of its portal.
    pub transport: &'static str,
    /// Which of the shards' providers carries it.
    pub provider: ProviderIndex,
    /// The server gets a key of its own for each read, dead before the data is used; otherwise
    /// one key for the IO buffers as long as the path lives.
    pub invalidate_reads: bool,
    /// Heartbeats where the server is one of ours.
    pub heartbeat: HeartbeatSettings,
    /// Both ends prove who they are on it, if the client has a [`Prover`].
    pub proves: bool,
}

impl PathTarget {
    /// The server's address for an attempt, from 0: each takes the next in turn.
    pub(crate) fn remote(&self, attempt: u32) -> SocketAddr {
        let unspecified = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        let at = attempt as usize % self.remotes.len().max(1);
        self.remotes.get(at).copied().unwrap_or(unspecified)
    }
}

/// What may change of a session's configuration while it runs; each field as in [`SessionConfig`].
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
    /// Heartbeats where the server is one of ours, by what carries the path.
    pub own_heartbeats: Vec<(&'static str, HeartbeatSettings)>,
}

impl Tuning {
    /// Heartbeats of a path that this carries: where the server is a kernel's and where it is ours.
    pub(crate) fn heartbeats(&self, transport: &str) -> [HeartbeatSettings; 2] {
        let known = self.own_heartbeats.iter().find(|(carries, _)| *carries == transport);
        [self.heartbeat, known.map_or(self.heartbeat, |(_, settings)| *settings)]
    }
}

/// A volume of a session: an export of its server, and how that is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeConfig {
    /// The export to open; no other volume of the session has the same.
    pub export: String,
    /// Access asked for.
    pub access: AccessMode,
    /// When writing is refused because the export is read-only, open it read-only.
    pub read_only_fallback: bool,
    /// Of a session that takes over from a process that died: in which epoch of the server's cache
    /// that one may have left writes that were not flushed, 0 when that is not known. They count
    /// as this session's own.
    pub inherited_epoch: Option<u64>,
    /// Which server's export it has to be; None: that of the first path that opens it.
    pub identity: Option<Identity>,
}

/// Everything a session needs to know before it starts.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// Name reported to the server; unique among the server's sessions.
    pub name: String,
    /// The volumes that it begins with, by index: at least one and at most [`VOLUMES_MAX`].
    pub volumes: Vec<VolumeConfig>,
    /// How long, from the start on, a session that cannot open tries again: who takes over from a
    /// process that died has to wait until the server has done with that one's session.
    pub open_patience: Duration,
    /// How long, from the first open on, requests may come again that the process that died had
    /// taken and not answered.
    pub resent_for: Duration,
    /// The session's identity, the same on all paths.
    pub id: SessionId,
    /// Paths in order of preference; at least one.
    pub paths: Vec<PathTarget>,
    /// Shards that carry IO; connection k belongs to shard k - 1.
    pub shards: u16,
    /// How a path is chosen.
    pub policy: Policy,
    /// Heartbeats where the server is a kernel's; and how long any connection may owe an answer.
    pub heartbeat: HeartbeatSettings,
    /// Bound of one connection's start.
    pub connect_timeout: Duration,
    /// Shortest wait before a reconnect.
    pub reconnect_min: Duration,
    /// Longest wait before a reconnect.
    pub reconnect_max: Duration,
    /// Bound of one request on one path. Afterwards a path that nothing shows to be alive is ended,
    /// and the request goes to another.
    pub io_timeout: Duration,
    /// What happens to a request that takes longer over a path that lives.
    pub slow_io: SlowIo,
    /// What happens to IO while no path is connected.
    pub no_path: NoPath,
    /// When requests of a dead path go on at a server that cannot fence it off.
    pub failover: Failover,
    /// Most requests in flight over all shards, besides the server's queue depth.
    pub queue_depth_limit: u16,
    /// With what the client proves who it is on paths without TLS.
    pub prover: Option<Prover>,
    /// Seed of the reconnect jitter.
    pub seed: u64,
}

impl SessionConfig {
    /// What of it may change, as it is.
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

    /// The same, tuned. Paths keep what they have (`Path::tune`).
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

/// What the server granted: the bounds that all shards work with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Granted {
    pub(crate) queue_depth: u16,
    pub(crate) max_io_size: u32,
    /// Bytes of a chunk: the largest request and its header.
    pub(crate) chunk_size: u32,
    /// Its discards and write zeroes clear as much as they are asked to.
    pub(crate) keeps_lengths: bool,
    /// It takes FENCE.
    pub(crate) fences: bool,
}

impl Granted {
    /// What may not change over the life of a session.
    pub(crate) fn bounds(&self) -> (u16, u32, u32) {
        (self.queue_depth, self.max_io_size, self.chunk_size)
    }

    /// The permits that all shards share in.
    pub(crate) fn depth(&self, config: &SessionConfig) -> u16 {
        self.queue_depth.min(config.queue_depth_limit)
    }

    /// The permit of FENCE: one of its own, so that a fence never waits for an open that is under
    /// way over another path. Where there is just a permit for each shard it has to.
    pub(crate) fn fence_permit(&self, config: &SessionConfig) -> PermitId {
        PermitId(u16::from(self.fences && self.depth(config) > config.shards + 1))
    }
}

impl NoPath {
    /// How long a whole IO may take whose requests may take `io_timeout` each, if that is bounded.
    /// The kernel gets a little more than this (`request_seconds` in `plan/attach.rs`).
    pub(crate) fn io_age_max(self, io_timeout: Duration) -> Option<Duration> {
        match self {
            Self::Queue => None,
            Self::QueueFor(time) => Some(time + io_timeout * 2),
            Self::Fail => Some(io_timeout * 2),
        }
    }
}

/// Numbers about a path that all shards write or read without asking each other.
#[derive(Debug, Default)]
pub(crate) struct PathShared {
    last_received_ns: AtomicU64,
    last_waited_ns: AtomicU64,
    latency_ns: AtomicU64,
    /// Heartbeats are sent less often because the path is idle.
    idle: AtomicBool,
}

impl PathShared {
    /// Heartbeats are sent less often from now on, or as often as ever.
    pub(crate) fn set_idle(&self, idle: bool) {
        self.idle.store(idle, Ordering::Relaxed);
    }

    /// A request goes out. True when the path was idle: the control shard is to be notified, once.
    pub(crate) fn ends_idle(&self) -> bool {
        self.idle.load(Ordering::Relaxed) && self.idle.swap(false, Ordering::Relaxed)
    }

    /// Something that was no heartbeat arrived on one of the path's connections.
    pub(crate) fn received(&self, now: Instant) {
        self.last_received_ns.fetch_max(now.as_nanos(), Ordering::Relaxed);
    }

    /// When that was last.
    pub(crate) fn last_received(&self) -> Instant {
        Instant::from_nanos(self.last_received_ns.load(Ordering::Relaxed))
    }

    /// A request on one of them waits for its answer.
    pub(crate) fn waits(&self, now: Instant) {
        self.last_waited_ns.fetch_max(now.as_nanos(), Ordering::Relaxed);
    }

    /// When the path was last in use, as far as the control shard knows.
    pub(crate) fn last_used(&self) -> Instant {
        let waited = Instant::from_nanos(self.last_waited_ns.load(Ordering::Relaxed));
        self.last_received().max(waited)
    }

    /// Sets the last heartbeat round trip; zero while none is known.
    pub(crate) fn set_latency(&self, latency: Duration) {
        let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.latency_ns.store(nanos, Ordering::Relaxed);
    }

    /// The last heartbeat round trip in nanoseconds; zero while none is known.
    pub(crate) fn latency_ns(&self) -> u64 {
        self.latency_ns.load(Ordering::Relaxed)
    }
}
