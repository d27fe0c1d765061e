//! How the paths of a session are shown in listings.

use serde::Serialize;

use super::control::SessionControl;
use crate::path::state::PathState;

/// A path as listings show it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PathStatus {
    /// As the user wrote it.
    pub path: String,
    /// What carries it: `tcp` or `rdma`.
    pub transport: &'static str,
    /// The server's address of this attempt, or of the last.
    pub address: String,
    /// Where it stands.
    pub state: PathState,
    /// Connections of the path, the service connection included.
    pub connections: u16,
    /// Times it was connected again.
    pub reconnects: u64,
    /// Last heartbeat round trip in microseconds; absent while unknown.
    pub heartbeat_us: Option<u64>,
    /// Why it ended last.
    pub last_error: Option<String>,
}

impl SessionControl {
    /// All paths as listings show them.
    pub(crate) fn status(&self) -> Vec<PathStatus> {
        let named = self.paths.iter().zip(&self.config.paths);
        named
            .map(|(path, target)| PathStatus {
                path: target.name.clone(),
                transport: target.transport,
                address: path.remote.to_string(),
                state: path.state,
                connections: self.config.cores + 1,
                reconnects: path.connects.saturating_sub(1),
                heartbeat_us: match path.shared.latency_ns() {
                    0 => None,
                    ns => Some(ns / 1000),
                },
                last_error: path.last_error.clone(),
            })
            .collect()
    }
}
