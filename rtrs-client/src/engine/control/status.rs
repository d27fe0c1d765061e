//! How the paths and volumes of a session are shown in listings.

use rtrs_core::identity::Identity;
use rtrs_core::ids::PathId;
use serde::Serialize;

use super::failure::SessionFailure;
use super::heartbeat::HeartbeatCount;
use super::no_path::NoPathWait;
use crate::engine::device_set::DeviceIndex;
use crate::path::state::PathState;

/// A volume as the control shard knows it.
#[derive(Clone, Debug)]
pub(crate) struct VolumeStatus {
    pub(crate) device: DeviceIndex,
    /// The name of its export.
    pub(crate) export: String,
    /// False once its user does not have it any more.
    pub(crate) used: bool,
    /// It is open at the server.
    pub(crate) open: bool,
    /// It cannot go on.
    pub(crate) failed: bool,
    /// Why, or what was in the way when it was last tried.
    pub(crate) obstacle: Option<SessionFailure>,
    /// How its IO stands while no path carries it.
    pub(crate) no_path: Option<NoPathWait>,
    /// What it is pinned to.
    pub(crate) identity: Option<Identity>,
    /// By name of path, why connected paths do not serve it.
    pub(crate) refusals: Vec<(String, String)>,
}

/// A path as listings show it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PathStatus {
    /// Its place in the session's tables.
    #[serde(skip)]
    pub id: PathId,
    /// As the user wrote it.
    pub path: String,
    /// What carries it: `tcp` or `rdma`.
    pub transport: &'static str,
    /// The server's address of this attempt, or of the last.
    pub address: String,
    /// Where it stands.
    pub state: PathState,
    /// What it is being taken out of use for, if it is: `remove`, `disconnect` or `reconnect`.
    pub leaving: Option<&'static str>,
    /// Volumes that it serves.
    #[serde(skip)]
    pub volumes: usize,
    /// Connections of the path, the service connection included.
    pub connections: u16,
    /// Times it was connected again.
    pub reconnects: u64,
    /// Attempts that failed, and ends of what was connected.
    pub ends: u64,
    /// Last heartbeat round trip in microseconds; absent while unknown.
    pub heartbeat_us: Option<u64>,
    /// The longest silence of this path that counts as life; absent while it is not connected.
    pub silence_max_ms: Option<u64>,
    /// Heartbeats of this end.
    pub heartbeats: HeartbeatCount,
    /// States of it that cannot be, and were met: bugs of this end.
    pub internal_errors: u64,
    /// Why it ended last.
    pub last_error: Option<String>,
}
