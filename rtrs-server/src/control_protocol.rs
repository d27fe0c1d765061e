//! The requests and replies of a running server's control socket: one line of JSON each way
//! (docs/OPERATING.md). A refused request gets `{"error": WHY}` (`rtrs_core::local`).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::access_list::ListChange;
use crate::settings::{AccessRule, ExportSpec};
use crate::stats::{ExportSnapshot, MemorySnapshot, Revoked, SessionSnapshot};

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
    /// List the exports: [`ExportList`].
    ExportList,
    /// Add an export: [`Changed`].
    ExportAdd {
        /// It, as text or as a map.
        export: ExportSpec,
    },
    /// Remove an export: [`Removed`], when it is closed.
    ExportRemove {
        /// Its name.
        name: String,
        /// Also if sessions have it open.
        #[serde(default)]
        force: bool,
        /// Maximum time to wait for its last requests, in milliseconds.
        within_ms: u64,
    },
    /// Have another gateway serve an export: [`ExportDrained`], when this one does not any more.
    ExportDrain {
        /// Its name.
        name: String,
        /// Maximum time to wait for its last requests, in milliseconds.
        within_ms: u64,
    },
    /// Change options of an export: [`Changed`].
    ExportSet {
        /// Its name.
        name: String,
        /// Each as in the text form of an export.
        options: Vec<String>,
    },
    /// Give an export another size: [`Resized`].
    ExportResize {
        /// Its name.
        name: String,
        /// Its new size in bytes. Without it, the size that its target has now.
        #[serde(default)]
        size: Option<u64>,
        /// Also if sessions that have it open lose data by that.
        #[serde(default)]
        force: bool,
    },
    /// Read the configuration again: [`Reloaded`].
    Reload,
    /// What that would do: [`Reloaded`].
    ReloadPreview,
    /// The settings of the exports that run: [`SavedExports`].
    ExportSave,
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

/// The exports of a server.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ExportList {
    /// All of them, by name.
    pub(crate) exports: Vec<ExportSnapshot>,
    /// The access list of the server, which exports without their own follow.
    #[serde(default)]
    pub(crate) access: Vec<AccessRule>,
    /// There is no access list, and there was none: everyone may do everything.
    #[serde(default)]
    pub(crate) open_to_everyone: bool,
    /// There is no access list, and there are certificates or keys: clients that prove who they are
    /// may do everything.
    #[serde(default)]
    pub(crate) open_to_named: bool,
}

/// An export has another size, or has had it already.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Resized {
    /// Its name.
    pub(crate) export: String,
    /// Its size in bytes.
    pub(crate) size: u64,
    /// Its size before.
    pub(crate) size_before: u64,
}

/// The exports of a server as the configuration has them.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedExports {
    /// By name.
    pub(crate) exports: Vec<ExportSpec>,
}

/// An export was added or changed.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Changed {
    /// Its name.
    pub(crate) export: String,
    /// False when it is as it was.
    pub(crate) changed: bool,
    /// What a start would warn of its access list.
    #[serde(default)]
    pub(crate) warnings: Vec<String>,
}

/// An export is standby.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ExportDrained {
    /// Its name.
    pub(crate) standby: String,
}

/// An export was removed.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Removed {
    /// Its name.
    pub(crate) removed: String,
    /// The sessions that had it open.
    pub(crate) ended: Vec<String>,
}

/// What reading the configuration again has done.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Reloaded {
    /// Exports that were added.
    pub(crate) added: Vec<String>,
    /// Exports that were removed.
    pub(crate) removed: Vec<String>,
    /// Exports that were changed.
    pub(crate) changed: Vec<String>,
    /// Exports that stay as they are, though the configuration says otherwise.
    pub(crate) kept: Vec<Kept>,
    /// Exports that the configuration names and that could not be opened or closed.
    pub(crate) failed: Vec<Kept>,
    /// Settings that differ and need a restart.
    pub(crate) restart: Vec<String>,
    /// Exports that are as the configuration says.
    pub(crate) unchanged: usize,
    /// The access lists that are others now.
    #[serde(default)]
    pub(crate) access_changed: Vec<ListChange>,
    /// What of the certificates or keys is different now: the file, and of the list of clients who.
    #[serde(default)]
    pub(crate) keys_changed: Vec<String>,
    /// Sessions that lost paths by that.
    #[serde(default)]
    pub(crate) revoked: Vec<Revoked>,
    /// What is wrong with the certificate of the server, which is in use all the same.
    #[serde(default)]
    pub(crate) certificate: Option<String>,
    /// What a start with these settings would warn of.
    #[serde(default)]
    pub(crate) warnings: Vec<String>,
}

/// An export that is not as the configuration says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// Its name.
    pub(crate) name: String,
    /// Why.
    pub(crate) why: String,
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
            (r#"{"command":"export-list"}"#, Request::ExportList),
            (
                r#"{"command":"export-add","export":"v=mem:1M,ro"}"#,
                Request::ExportAdd { export: "v=mem:1M,ro".parse().unwrap() },
            ),
            (
                r#"{"command":"export-remove","name":"v","within_ms":5}"#,
                Request::ExportRemove { name: "v".into(), force: false, within_ms: 5 },
            ),
            (
                r#"{"command":"export-drain","name":"v","within_ms":5}"#,
                Request::ExportDrain { name: "v".into(), within_ms: 5 },
            ),
            (
                r#"{"command":"export-set","name":"v","options":["ro"]}"#,
                Request::ExportSet { name: "v".into(), options: vec!["ro".into()] },
            ),
            (
                r#"{"command":"export-resize","name":"v","size":4096}"#,
                Request::ExportResize { name: "v".into(), size: Some(4096), force: false },
            ),
            (r#"{"command":"reload"}"#, Request::Reload),
            (r#"{"command":"reload-preview"}"#, Request::ReloadPreview),
            (r#"{"command":"export-save"}"#, Request::ExportSave),
        ] {
            assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request);
        }
        serde_json::from_str::<Request>(r#"{"command":"stop"}"#).unwrap_err();
    }
}
