//! Paths and volumes of a session, as listings show them.

use rtrs_core::identity::Identity;
use rtrs_core::ids::PathId;
use rtrs_core::time::Instant;

use super::failure::SessionFailure;
use super::heartbeat::HeartbeatCount;
use super::no_path::NoPathWait;
use crate::engine::device_set::{DeviceIndex, DeviceSet};
use crate::engine::path_end::PathEnd;
use crate::path::state::PathState;

/// Status of a volume, as known to the control shard.
#[derive(Clone, Debug)]
pub(crate) struct VolumeStatus {
    pub(crate) device: DeviceIndex,
    /// Export name.
    pub(crate) export: String,
    /// Whether a user has the volume; false once it was released.
    pub(crate) used: bool,
    /// Whether the volume is open at the server.
    pub(crate) open: bool,
    /// Whether the volume has failed.
    pub(crate) failed: bool,
    /// Reason for the failure, or the problem found when it was last tried.
    pub(crate) obstacle: Option<SessionFailure>,
    /// Treatment of IO while no path carries it.
    pub(crate) no_path: Option<NoPathWait>,
    /// Identity that the volume is pinned to.
    pub(crate) identity: Option<Identity>,
    /// Whether the content of the export ends with the process of its server.
    pub(crate) memory: bool,
    /// Reasons why connected paths do not serve the volume, by path name.
    pub(crate) refusals: Vec<(String, PathEnd)>,
}

/// Progress of a path on which an attach depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PathProgress {
    pub(super) id: PathId,
    pub(super) state: PathState,
    /// Number of failed attempts and lost connections.
    pub(super) ends: u64,
    /// Volumes that the path does not serve although it is connected.
    pub(super) refused: DeviceSet,
}

/// Errors that have ended a path or an attempt, since the path was added.
#[derive(Clone, Debug, Default)]
pub(crate) struct PathErrors {
    pub(crate) count: u64,
    /// Last error and its time.
    pub(crate) last: Option<(Instant, PathEnd)>,
}

impl PathErrors {
    pub(super) fn add(&mut self, now: Instant, why: &PathEnd) {
        self.count += 1;
        self.last = Some((now, why.clone()));
    }
}

/// Status of a path, as listings show it.
#[derive(Clone, Debug)]
pub(crate) struct PathStatus {
    /// Slot of the path in the session's tables.
    pub id: PathId,
    /// Name as the user wrote it.
    pub path: String,
    /// Transport of the path: `tcp` or `rdma`.
    pub transport: &'static str,
    /// Server address of the current or last attempt.
    pub address: String,
    /// State of the path.
    pub state: PathState,
    /// Reason why the path is being taken out of use: `remove`, `disconnect` or `reconnect`.
    pub leaving: Option<&'static str>,
    /// Number of volumes that the path serves.
    pub volumes: usize,
    /// Number of connections, including the service connection.
    pub connections: u16,
    /// Number of reconnects.
    pub reconnects: u64,
    /// Number of failed attempts and lost connections.
    pub ends: u64,
    /// Last heartbeat round trip in microseconds; absent while unknown.
    pub heartbeat_us: Option<u64>,
    /// Longest silence of a path that counts as alive; absent while it is not connected.
    pub silence_max_ms: Option<u64>,
    /// Heartbeats sent by this end.
    pub heartbeats: HeartbeatCount,
    /// Number of impossible states encountered, which are bugs of this end.
    pub internal_errors: u64,
    /// Reason for the last end of the path, unless it is connected.
    pub last_end: Option<PathEnd>,
    /// Errors of the path since it was added.
    pub errors: PathErrors,
}
