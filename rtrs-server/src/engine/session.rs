//! A session at the server: what all its paths and all shards share, and what it is made with.

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

/// Numbers that say what a server may have lost since a client last met it; 0 where one is not
/// known. A process that ends loses nothing that it had given to the system; a host that starts
/// anew may have lost all that was not flushed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerInstance {
    /// Of the host, from one start of its system to the next.
    pub boot: u64,
    /// Of this process.
    pub process: u64,
}

impl ServerInstance {
    /// The process, as clients know it; None if it has no number.
    pub fn process(self) -> Option<ServerProcess> {
        Some(ServerProcess::new(self.process)).filter(|process| *process != ServerProcess::NONE)
    }
}

/// What every session of a server is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionParams {
    /// Queue depth and chunk size.
    pub limits: Limits,
    /// A fresh key per request (the kernel's `always_invalidate`). With `Auto`, on devices that
    /// have windows.
    pub always_invalidate: AutoSwitch,
    /// Silence before a heartbeat is sent.
    pub heartbeat_interval: Duration,
    /// Periods a heartbeat may stay unanswered.
    pub heartbeat_missed_max: u32,
    /// The longest time between two heartbeats of an idle path that clients may announce. If it is
    /// not more than the interval, they announce nothing.
    pub heartbeat_idle_max: Duration,
    /// From the first connection of a path to its INFO_REQ.
    pub handshake_timeout: Duration,
    /// From the begin of a session, or its last OPEN, to an OPEN that succeeds.
    pub open_timeout: Duration,
    /// Connections of sessions that have opened no export.
    pub half_open_max: u32,
    /// Sessions at once.
    pub sessions_max: u32,
    /// Bytes that chunks of all sessions may take before new sessions get fewer of them or none.
    pub memory_max: u64,
    /// Refuse sessions, answer pings.
    pub ping_only: bool,
    /// List the exports to clients that ask.
    pub discovery: bool,
    /// What pings may take.
    pub pings: PingServerConfig,
    /// Time running requests have at shutdown.
    pub shutdown_grace: Duration,
    /// Shards of this server. Connection k >= 1 of a path lives on shard (k - 1 + n) % shards; n is
    /// the session's own.
    pub cores: u16,
    /// Which start of the host and which process this server is.
    pub instance: ServerInstance,
    /// Which server this is, as its clients know it; None when unknown.
    pub server_id: Option<ServerId>,
    /// What the eviction secrets of sessions are made from.
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
    /// Announced to clients: the longest time between heartbeats of an idle path, in milliseconds.
    pub(crate) fn idle_ms(&self) -> Option<u32> {
        let idle = self.heartbeat_idle_max;
        (idle > self.heartbeat_interval)
            .then(|| u32::try_from(idle.as_millis()).unwrap_or(u32::MAX))
    }

    /// Whether a path in this domain gets fresh keys. If they are demanded and the device has no
    /// windows, the path is refused when its windows are made.
    pub fn fresh_keys(&self, pd: &dyn ProtectionDomain) -> bool {
        match self.always_invalidate {
            AutoSwitch::On => true,
            AutoSwitch::Auto => pd.has_windows(),
            AutoSwitch::Off => false,
        }
    }
}

/// What the paths and shards of a session share.
#[derive(Debug)]
pub struct SessionShared {
    /// Who it is.
    pub id: SessionId,
    /// Its queue depth and chunk size. The depth may be smaller than the server's.
    pub limits: Limits,
    /// Who holds each permit.
    pub permits: PermitTable,
    /// What each device id means.
    pub devices: DeviceTable,
    /// The shard of the first connection of its paths that carries IO.
    pub first_shard: CoreIndex,
    /// Who its client is: all its paths have proved the same. Unknown while none has.
    who: OnceLock<Who>,
    version: AtomicU8,
    opened: AtomicBool,
    compares: AtomicBool,
}

impl SessionShared {
    /// A session without paths and devices. Its client, if that is known.
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

    /// Who its client is; None while no path of it has proved that.
    pub fn who(&self) -> Option<&Who> {
        self.who.get()
    }

    /// The same, for people: anonymous until it is known.
    pub(crate) fn name_of_client(&self) -> Who {
        self.who().cloned().unwrap_or_default()
    }

    /// A path has proved who its client is. False if the session has another; the control shard
    /// only.
    pub(crate) fn prove(&self, who: &Who) -> bool {
        self.who.get_or_init(|| who.clone()) == who
    }

    /// True when it has opened an export, even if it has closed it since.
    pub fn has_opened(&self) -> bool {
        self.opened.load(Ordering::Relaxed)
    }

    /// It opened an export; the control shard only.
    pub fn note_open(&self) {
        self.opened.store(true, Ordering::Relaxed);
    }

    /// True when its client compares the exports that it opens, which no kernel does.
    pub fn compares(&self) -> bool {
        self.compares.load(Ordering::Relaxed)
    }

    /// Its client compares the exports that it opens; the control shard only.
    pub fn note_compares(&self) {
        self.compares.store(true, Ordering::Relaxed);
    }

    /// The RNBD version agreed on; 0 until SESS_INFO came.
    pub fn version(&self) -> u8 {
        self.version.load(Ordering::Relaxed)
    }

    /// SESS_INFO came: the lower version counts.
    pub fn agree_version(&self, peer: u8, ours: u8) -> u8 {
        let version = peer.min(ours);
        self.version.store(version, Ordering::Relaxed);
        version
    }
}
