//! How the paths of a session are shown in listings.

use rtrs_core::ids::PathId;
use rtrs_core::time::Duration;
use serde::Serialize;

use super::control::SessionControl;
use super::heartbeat::HeartbeatCount;
use super::online::Leave;
use super::policy::Policy;
use super::shard::ShardSession;
use crate::path::state::PathState;

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
    /// Why it ended last.
    pub last_error: Option<String>,
}

impl SessionControl {
    /// All paths as listings show them.
    pub(crate) fn status(&self) -> Vec<PathStatus> {
        let listed = self.paths.iter().filter(|path| !path.removed);
        listed
            .map(|path| PathStatus {
                id: path.id,
                path: path.target.name.clone(),
                transport: path.target.transport,
                address: path.remote.to_string(),
                state: path.state,
                leaving: path.leave.as_ref().map(Leave::name),
                connections: self.config.cores + 1,
                reconnects: path.reconnect.reconnects(),
                ends: path.reconnect.failed(),
                heartbeat_us: match path.shared.latency_ns() {
                    0 => None,
                    ns => Some(ns / 1000),
                },
                silence_max_ms: path.heartbeat.is_running().then(|| {
                    let silence = path.rhythm(&self.config).silence_max();
                    u64::try_from(silence.as_millis()).unwrap_or(u64::MAX)
                }),
                heartbeats: path.heartbeat.count(),
                last_error: path.last_error.clone(),
            })
            .collect()
    }

    /// Names of all paths by their place, those that were removed included.
    pub(crate) fn path_names(&self) -> Vec<String> {
        self.paths.iter().map(|path| path.target.name.clone()).collect()
    }

    /// How a path is chosen.
    pub(crate) fn policy(&self) -> Policy {
        self.policy
    }
}

impl ShardSession {
    /// Requests in flight by path.
    pub(crate) fn path_inflight(&self) -> Vec<u32> {
        self.paths.iter().map(|path| path.inflight).collect()
    }

    /// By path, whether this core leaves it out because it is slow.
    pub(crate) fn path_slow(&self) -> Vec<bool> {
        self.paths.iter().map(|path| self.chooser.paces.is_slow(path.id())).collect()
    }

    /// A request over a path took so long.
    pub(super) fn on_pace(&mut self, path: usize, took: Duration) {
        let id = self.paths[path].id();
        let paces = &mut self.chooser.paces;
        if !paces.answered(id, self.now, took) {
            return;
        }
        while let Some(turned) = paces.next_turned() {
            let what = if paces.is_slow(turned) {
                "far slower than others: it gets few requests until it is quick again"
            } else {
                "as quick as others again"
            };
            let path = self.paths[turned.index()].name();
            tracing::info!(%path, shard = self.core.0, "{what}");
        }
    }
}
