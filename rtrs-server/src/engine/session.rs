//! A session on the server: the state shared by all its paths and shards, and its parameters.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use rtrs_core::fabric::{ProtectionDomain, Who};
use rtrs_core::identity::{EvictionKey, ServerId, ServerProcess};
use rtrs_core::ids::{CoreIndex, SessionId};
use rtrs_core::limits::Limits;
use rtrs_core::proto::ping::PingServerConfig;
use rtrs_core::settings::AutoSwitch;
use rtrs_core::time::Duration;

use super::device_table::DeviceTable;
use super::io::permits::PermitTable;

/// Numbers that tell clients what a server may have lost since they were last connected to it; 0 if
/// unknown. A process that ends loses nothing that it passed to the system; a host that restarts
/// may lose all unflushed data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerInstance {
    /// Number of the host's current boot.
    pub boot: u64,
    /// Number of this process.
    pub process: u64,
}

impl ServerInstance {
    /// Process number, as reported to clients; None if there is no number.
    pub fn process(self) -> Option<ServerProcess> {
        Some(ServerProcess::new(self.process)).filter(|process| *process != ServerProcess::NONE)
    }
}

/// Parameters of all sessions of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionParams {
    /// Queue depth and chunk size.
    pub limits: Limits,
    /// Whether to use a fresh key for each request (the kernel's `always_invalidate`). `Auto` does
    /// so on devices that have windows.
    pub always_invalidate: AutoSwitch,
    /// Silence before a heartbeat is sent.
    pub heartbeat_interval: Duration,
    /// Number of periods that a heartbeat may remain unanswered.
    pub heartbeat_missed_max: u32,
    /// Maximum time between two heartbeats of an idle path that clients may announce. If it does
    /// not exceed the interval, clients announce nothing.
    pub heartbeat_idle_max: Duration,
    /// Maximum time from the first connection of a path to its INFO_REQ.
    pub handshake_timeout: Duration,
    /// Maximum time from the start of a session, or its last OPEN, to a successful OPEN.
    pub open_timeout: Duration,
    /// Maximum number of connections of sessions that have opened no export.
    pub half_open_max: u32,
    /// Maximum number of sessions.
    pub sessions_max: u32,
    /// Number of bytes that the chunks of all sessions may use before new sessions get fewer chunks
    /// or none.
    pub memory_max: u64,
    /// Whether to refuse sessions and only answer pings.
    pub ping_only: bool,
    /// Whether to list the exports to clients that ask.
    pub discovery: bool,
    /// Limits on pings.
    pub pings: PingServerConfig,
    /// Time that running requests have to complete at shutdown.
    pub shutdown_grace: Duration,
    /// Number of shards. Connection k >= 1 of a path is on shard (k - 1 + n) % shards, where n is
    /// specific to the session.
    pub cores: u16,
    /// This server's process, and the boot of its host.
    pub instance: ServerInstance,
    /// Identity of this server, as reported to clients; None if unknown.
    pub server_id: Option<ServerId>,
    /// Key that the eviction secrets of sessions are derived from.
    pub eviction_key: EvictionKey,
}

impl Default for SessionParams {
    fn default() -> Self {
        Self {
            limits: Limits::DEFAULT,
            always_invalidate: AutoSwitch::Auto,
            heartbeat_interval: Duration::from_millis(500),
            heartbeat_missed_max: 5,
            heartbeat_idle_max: Duration::from_secs(30),
            handshake_timeout: Duration::from_secs(5),
            open_timeout: Duration::from_secs(60),
            half_open_max: 1024,
            sessions_max: 128,
            memory_max: u64::MAX,
            ping_only: false,
            discovery: true,
            pings: PingServerConfig::default(),
            shutdown_grace: Duration::from_secs(5),
            cores: 1,
            instance: ServerInstance::default(),
            server_id: None,
            eviction_key: EvictionKey::default(),
        }
    }
}

impl SessionParams {
    /// Maximum time between heartbeats of an idle path in milliseconds, as announced to clients.
    pub(crate) fn idle_ms(&self) -> Option<u32> {
        let idle = self.heartbeat_idle_max;
        (idle > self.heartbeat_interval)
            .then(|| u32::try_from(idle.as_millis()).unwrap_or(u32::MAX))
    }

    /// Whether a path in this domain uses fresh keys. If they are required and the device has no
    /// windows, the path is refused when its windows are created.
    pub fn fresh_keys(&self, pd: &dyn ProtectionDomain) -> bool {
        match self.always_invalidate {
            AutoSwitch::On => true,
            AutoSwitch::Auto => pd.has_windows(),
            AutoSwitch::Off => false,
        }
    }
}

/// State shared by the paths and shards of a session.
#[derive(Debug)]
pub struct SessionShared {
    /// ID of the session.
    pub id: SessionId,
    /// Queue depth and chunk size. The depth may be smaller than the server's.
    pub limits: Limits,
    /// Holders of the permits.
    pub permits: PermitTable,
    /// Open devices.
    pub devices: DeviceTable,
    /// Shard of each path's first IO connection.
    pub first_shard: CoreIndex,
    /// Identity of the client, which all paths have proved. Unset until one path has.
    who: OnceLock<Who>,
    version: AtomicU8,
    opened: AtomicBool,
    compares: AtomicBool,
}

impl SessionShared {
    /// Creates a session without paths or devices. `who` is its client, if known.
    pub fn new(id: SessionId, limits: Limits, who: Option<Who>, first_shard: CoreIndex) -> Self {
        Self {
            id,
            who: who.map(OnceLock::from).unwrap_or_default(),
            limits,
            permits: PermitTable::new(limits.queue_depth()),
            devices: DeviceTable::default(),
            first_shard,
            version: AtomicU8::new(0),
            opened: AtomicBool::new(false),
            compares: AtomicBool::new(false),
        }
    }

    /// Identity of the client; None until a path has proved it.
    pub fn who(&self) -> Option<&Who> {
        self.who.get()
    }

    /// Identity of the client for display: anonymous until it is known.
    pub(crate) fn name_of_client(&self) -> Who {
        self.who().cloned().unwrap_or_default()
    }

    /// Records the identity that a path has proved. Returns false if the session belongs to another
    /// client. For the control shard only.
    pub(crate) fn prove(&self, who: &Who) -> bool {
        self.who.get_or_init(|| who.clone()) == who
    }

    /// Whether the session has ever opened an export.
    pub fn has_opened(&self) -> bool {
        self.opened.load(Ordering::Relaxed)
    }

    /// Records that the session opened an export. For the control shard only.
    pub fn note_open(&self) {
        self.opened.store(true, Ordering::Relaxed);
    }

    /// Whether the client compares the identities of exports it opens, unlike kernel clients.
    pub fn compares(&self) -> bool {
        self.compares.load(Ordering::Relaxed)
    }

    /// Records that the client compares identities. For the control shard only.
    pub fn note_compares(&self) {
        self.compares.store(true, Ordering::Relaxed);
    }

    /// Negotiated RNBD version; 0 before SESS_INFO.
    pub fn version(&self) -> u8 {
        self.version.load(Ordering::Relaxed)
    }

    /// Negotiates the version on SESS_INFO: the lower one applies.
    pub fn agree_version(&self, peer: u8, ours: u8) -> u8 {
        let version = peer.min(ours);
        self.version.store(version, Ordering::Relaxed);
        version
    }
}
