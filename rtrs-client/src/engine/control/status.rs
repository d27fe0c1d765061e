//! Paths and volumes of a session, as shown in listings.

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
pub struct VolumeStatus {
    /// Device of the volume on each shard.
    pub device: DeviceIndex,
    /// Export name.
    pub export: String,
    /// Whether the volume has a user; false from its release until the session has closed it.
    pub used: bool,
    /// Whether the volume is open on the server.
    pub open: bool,
    /// Whether the volume has failed.
    pub failed: bool,
    /// Reason for the failure, or the problem found when the volume was last tried.
    pub obstacle: Option<SessionFailure>,
    /// Errno with which the server refuses exclusive access to a volume whose user waits for it.
    pub(crate) held_by: Option<u16>,
    /// Treatment of IO while no path carries it.
    pub(crate) no_path: Option<NoPathWait>,
    /// Identity that the volume is pinned to.
    pub(crate) identity: Option<Identity>,
    /// Whether the content of the export is lost when its server's process ends.
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

/// Status of a path, as shown in listings.
#[derive(Clone, Debug)]
pub struct PathStatus {
    /// Slot of the path in the session's tables.
    pub(crate) id: PathId,
    /// Name as the user wrote it.
    pub path: String,
    /// Transport of the path: `tcp` or `rdma`.
    pub(crate) transport: &'static str,
    /// Server address of the current or last attempt.
    pub(crate) address: String,
    /// State of the path.
    pub(crate) state: PathState,
    /// Reason why the path is being taken out of use: `remove`, `disconnect` or `reconnect`.
    pub(crate) leaving: Option<&'static str>,
    /// Number of volumes that the path serves.
    pub volumes: usize,
    /// Number of connections, including the service connection.
    pub(crate) connections: u16,
    /// Number of reconnects.
    pub reconnects: u64,
    /// Number of failed attempts and lost connections.
    pub(crate) ends: u64,
    /// Last heartbeat round trip in microseconds; absent while unknown.
    pub(crate) heartbeat_us: Option<u64>,
    /// Longest silence after which the path is still considered alive; absent while the path is not
    /// connected.
    pub(crate) silence_max_ms: Option<u64>,
    /// Heartbeats sent by this end.
    pub(crate) heartbeats: HeartbeatCount,
    /// Number of impossible states encountered, which are bugs at this end.
    pub(crate) internal_errors: u64,
    /// Reason why the path last ended, unless it is connected.
    pub(crate) last_end: Option<PathEnd>,
    /// Errors of the path since it was added.
    pub(crate) errors: PathErrors,
}

impl PathStatus {
    /// Whether the path is connected, whatever it serves.
    pub fn is_connected(&self) -> bool {
        matches!(self.state, PathState::Connected | PathState::Standby)
    }

    /// Whether the path is being taken out of use by hand.
    pub fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }

    /// Name of the state, as in listings.
    pub fn state_name(&self) -> String {
        self.state.to_string()
    }

    /// Reason why the path last ended, unless it is connected.
    pub fn last_error(&self) -> Option<String> {
        self.last_end.as_ref().map(ToString::to_string)
    }
}
