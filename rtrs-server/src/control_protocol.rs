//! The requests and replies of a running server's control socket: one line of JSON each way
//! (docs/OPERATING.md). A refused request gets `{"error": WHY}` (`rtrs_core::local`).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::stats::{MemorySnapshot, SessionSnapshot};

/// Longest time a command waits for IO requests, in milliseconds.
pub(crate) const WITHIN_MS_MAX: u64 = 600_000;

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "command")]
pub(crate) enum Request {
    /// Describe the server: [`Status`].
    Status,
    /// All metrics: [`Samples`](rtrs_core::metrics::Samples).
    Metrics,
    /// List the sessions: [`Sessions`].
    SessionList,
    /// End paths of a session: [`Ended`].
    SessionDisconnect {
        /// Its name or number.
        session: String,
        /// This path only.
        #[serde(default)]
        path: Option<u64>,
    },
    /// End a session for good: [`Ended`].
    SessionEvict {
        /// Its name or number.
        session: String,
    },
    /// End the server without loss: [`Drained`], when that is done.
    Drain {
        /// Maximum time, in milliseconds.
        within_ms: u64,
    },
}

/// What a server is.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Status {
    /// Its name.
    pub(crate) name: String,
    /// Its process.
    pub(crate) pid: u32,
    /// Its version.
    pub(crate) version: String,
    /// Where it listens.
    pub(crate) portals: Vec<String>,
    /// A drain has begun.
    pub(crate) draining: bool,
}

/// The sessions of a server.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Sessions {
    /// All of them.
    pub(crate) sessions: Vec<SessionSnapshot>,
    /// The memory of their chunks.
    #[serde(default)]
    pub(crate) memory: MemorySnapshot,
    /// Portals that are not listened on, since their device is gone.
    #[serde(default)]
    pub(crate) lost_portals: Vec<String>,
    /// Connections refused and sessions ended for others since start, by reason.
    #[serde(default)]
    pub(crate) refused: BTreeMap<String, u64>,
}

/// Paths that are ending.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ended {
    /// The number of their session.
    pub(crate) session: String,
    /// Their numbers.
    pub(crate) paths: Vec<u64>,
}

/// A drain is complete.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Drained {
    /// True.
    pub(crate) drained: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_what_the_manual_says() {
        for (text, request) in [
            (r#"{"command":"status"}"#, Request::Status),
            (r#"{"command":"metrics"}"#, Request::Metrics),
            (r#"{"command":"session-list"}"#, Request::SessionList),
            (
                r#"{"command":"session-disconnect","session":"s","path":3}"#,
                Request::SessionDisconnect { session: "s".into(), path: Some(3) },
            ),
            (
                r#"{"command":"session-disconnect","session":"s"}"#,
                Request::SessionDisconnect { session: "s".into(), path: None },
            ),
            (
                r#"{"command":"session-evict","session":"s"}"#,
                Request::SessionEvict { session: "s".into() },
            ),
            (r#"{"command":"drain","within_ms":5000}"#, Request::Drain { within_ms: 5000 }),
        ] {
            assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request);
        }
        serde_json::from_str::<Request>(r#"{"command":"stop"}"#).unwrap_err();
    }
}
