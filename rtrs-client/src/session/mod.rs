//! A client session: one device of one server, over several paths, on several cores.
//!
//! `control.rs` is the home core's part (rare, careful): paths, handshakes, heartbeats, opening
//! the device. `shard.rs` is every core's part (every IO): permits, the choice of a path, work
//! requests and their answers. Neither reads a clock nor touches a socket; they work on a
//! `Fabric` that is handed to them and run unchanged in the simulator. Between cores only the
//! messages of this file pass.

mod block;
mod cache;
pub(crate) mod control;
pub(crate) mod device;
mod fence;
mod heartbeat;
mod identity;
mod links;
mod online;
mod pace;
pub(crate) mod permits;
pub(crate) mod policy;
pub(crate) mod probe;
mod reconnect;
pub(crate) mod replay;
pub(crate) mod shard;
pub(crate) mod status;
#[cfg(test)]
mod tests;
pub(crate) mod zeroes;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rtrs_core::block::Geometry;
use rtrs_core::fabric::{CloseReason, ConnectFailure, PrivateData, ProtectionDomain, RemoteMem};
use rtrs_core::identity::{ExportId, Identity};
use rtrs_core::ids::{ConnIndex, CoreIndex, PathId, PermitId, SessionId};
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::AccessMode;

pub(crate) use cache::CacheWatch;
pub(crate) use identity::ANOTHER;

pub use block::SessionDevice;
pub(crate) use online::PATHS_MAX;
pub use online::{Change, Leaving};
pub use policy::{Failover, NoPath, Policy};

/// How a path's heartbeat goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rhythm {
    /// Silence after which a heartbeat is sent.
    pub interval: Duration,
    /// Further intervals without any traffic after which a path is dead.
    pub missed_max: u32,
    /// The same where the server answers on another path meanwhile (`heartbeat.rs`): at most
    /// `missed_max`.
    pub witnessed_max: u32,
}

impl Rhythm {
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
    /// What carries it: the scheme of its portal.
    pub transport: &'static str,
    /// Which of the cores' providers carries it.
    pub provider: usize,
    /// The server gets a key of its own for each read, dead before the data is used; otherwise
    /// one key for the IO buffers as long as the path lives.
    pub invalidate_reads: bool,
    /// Heartbeats where the server is one of ours.
    pub heartbeat: Rhythm,
}

impl PathTarget {
    /// The server's address for an attempt, from 0: each takes the next in turn.
    pub(crate) fn remote(&self, attempt: u32) -> SocketAddr {
        let unspecified = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        let at = attempt as usize % self.remotes.len().max(1);
        self.remotes.get(at).copied().unwrap_or(unspecified)
    }
}

/// Everything a session needs to know before it starts.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// Name told to the server; unique among the server's sessions.
    pub name: String,
    /// The export to open.
    pub export: String,
    /// Access asked for.
    pub access: AccessMode,
    /// When writing is refused because the export is read-only, open it read-only.
    pub read_only_fallback: bool,
    /// How long, from the start on, a session that cannot open tries again: who takes over from a
    /// process that died has to wait until the server has done with that one's session.
    pub open_patience: Duration,
    /// Of a session that takes over from a process that died: in which life of the server's cache
    /// that one may have left writes that were not flushed, 0 when that is not known. They count
    /// as this session's own.
    pub inherited_life: Option<u64>,
    /// How long, from the first open on, requests may come again that the process that died had
    /// taken and not answered.
    pub resent_for: Duration,
    /// Which server's export it has to be; None: that of the first path that opens.
    pub identity: Option<Identity>,
    /// The session's identity, the same on all paths.
    pub id: SessionId,
    /// Paths in order of preference; at least one.
    pub paths: Vec<PathTarget>,
    /// Cores that carry IO; connection k belongs to core k - 1.
    pub cores: u16,
    /// How a path is chosen.
    pub policy: Policy,
    /// Heartbeats where the server is a kernel's; and how long any connection may owe an answer.
    pub heartbeat: Rhythm,
    /// Bound of one connection's start.
    pub connect_timeout: Duration,
    /// Shortest wait before a reconnect.
    pub reconnect_min: Duration,
    /// Longest wait before a reconnect.
    pub reconnect_max: Duration,
    /// Bound of one request on one path: afterwards the path is ended, and the request goes to
    /// another.
    pub io_timeout: Duration,
    /// What happens to IO while no path is connected.
    pub no_path: NoPath,
    /// When requests of a dead path go on at a server that cannot fence it off.
    pub failover: Failover,
    /// Most requests in flight over all cores, besides the server's queue depth.
    pub queue_depth_limit: u16,
    /// Seed of the reconnect jitter.
    pub seed: u64,
}

/// What the server granted: the bounds that all cores work with.
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

    /// The permits that all cores share in.
    pub(crate) fn depth(&self, config: &SessionConfig) -> u16 {
        self.queue_depth.min(config.queue_depth_limit)
    }

    /// The permit of FENCE: one of its own, so that a fence never waits for an open that is under
    /// way over another path. Where there is just a permit for each core it has to.
    pub(crate) fn fence_permit(&self, config: &SessionConfig) -> PermitId {
        PermitId(u16::from(self.fences && self.depth(config) > config.cores + 1))
    }
}

/// The device as the server described it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OpenDevice {
    pub(crate) device_id: u32,
    pub(crate) geometry: Geometry,
    /// The life of the server's cache; 0 when it does not say.
    pub(crate) cache_id: u64,
    /// With that life all content ends.
    pub(crate) volatile: bool,
    /// Which export it is, if the server says.
    pub(crate) export_id: Option<ExportId>,
}

/// Numbers about a path that all cores write or read without asking each other.
#[derive(Debug, Default)]
pub(crate) struct PathShared {
    last_received_ns: AtomicU64,
    latency_ns: AtomicU64,
}

impl PathShared {
    /// Something arrived on one of the path's connections.
    pub(crate) fn received(&self, now: Instant) {
        self.last_received_ns.fetch_max(now.as_nanos(), Ordering::Relaxed);
    }

    /// When something last arrived.
    pub(crate) fn last_received(&self) -> Instant {
        Instant::from_nanos(self.last_received_ns.load(Ordering::Relaxed))
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

/// From the home core to a core.
#[derive(Clone, Debug)]
pub(crate) enum ToShard {
    /// The server's bounds, before the first `Connect` above connection 0 completes.
    Granted(Granted),
    /// Start this core's connection of a path.
    Connect(Box<Connect>),
    /// The path's handshake is complete: its chunks, in order of permits, and the life of the
    /// server's cache.
    PathUp { path: PathId, epoch: u32, chunks: Arc<[RemoteMem]>, cache_id: u64 },
    /// End this core's connection of the path, at once or in order.
    Disconnect { path: PathId, epoch: u32, in_order: bool },
    /// Who is to be told of writes and flushes, from a server that says what it has lost.
    Cache(Arc<CacheWatch>),
    /// IO may flow to this device.
    Open(Arc<OpenDevice>),
    /// The device is not open at the server any more; IO waits.
    Closed,
    /// Nothing that this path's connections sent up to that epoch can begin at the server any
    /// more: what was in flight on it may be sent again.
    Fenced { path: PathId, epoch: u32 },
    /// What waits ends with an error, and so does what comes, until a path is up.
    GiveUp,
    /// A path that was added. It takes the place of one that is gone, if there was one.
    AddPath { path: PathId, target: Box<PathTarget> },
    /// Give this path no more requests, and say when it has none.
    Retire { path: PathId, epoch: u32 },
    /// Choose paths by this policy from now on.
    Policy(Policy),
}

/// What a core needs to start its connection of a path.
#[derive(Clone, Debug)]
pub(crate) struct Connect {
    pub(crate) path: PathId,
    pub(crate) epoch: u32,
    pub(crate) cid: ConnIndex,
    /// The address that connection 0 came up with.
    pub(crate) remote: SocketAddr,
    pub(crate) pd: Arc<dyn ProtectionDomain>,
    pub(crate) private_data: PrivateData,
    pub(crate) shared: Arc<PathShared>,
}

/// From a core to the home core, about one of its connections.
#[derive(Clone, Debug)]
pub(crate) enum ToHome {
    /// A connection was accepted.
    Up { path: PathId, epoch: u32, cid: ConnIndex },
    /// A connection was refused or did not come about.
    Failed { path: PathId, epoch: u32, cid: ConnIndex, failure: ConnectFailure },
    /// A connection ended; all its requests have been accounted for.
    Closed { path: PathId, epoch: u32, cid: ConnIndex, reason: CloseReason },
    /// Nothing of a path that is to go is in flight here any more.
    Retired { path: PathId, epoch: u32, core: CoreIndex },
}

/// Messages on their way to other cores, in order.
pub(crate) type Outbox = Vec<(CoreIndex, ToShard)>;
