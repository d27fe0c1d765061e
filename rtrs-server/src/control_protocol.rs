//! Requests and replies on a running server's control socket: one line of JSON each way
//! (docs/reference/control-socket.md). The reply to a refused request is `{"error": WHY}`
//! (`rtrs_core::local`).

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::access_list::ListChange;
use crate::settings::{AccessRule, ExportSpec};
use crate::stats::{ExportSnapshot, ExportUser, MemorySnapshot, Revoked, SessionSnapshot};

/// Maximum time that a command waits for IO requests, in milliseconds.
pub(crate) const WITHIN_MS_MAX: u64 = 600_000;

/// A request to a running server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "command")]
pub(crate) enum Request {
    /// Describe the server: [`Status`].
    Status {
        /// Whether to include the [`Load`], which the control shard has to determine.
        #[serde(default)]
        load: bool,
    },
    /// Return the settings of the server: [`SettingValues`](rtrs_core::settings::SettingValues).
    Get,
    /// Change settings of the server; the reply contains the changed settings.
    Set {
        /// New values, as in the configuration file.
        settings: BTreeMap<String, String>,
    },
    /// Return all metrics: [`Samples`](rtrs_core::metrics::Samples).
    Metrics,
    /// List the sessions: [`Sessions`].
    SessionList,
    /// End paths of a session: [`Ended`].
    SessionDisconnect {
        /// Name or number of the session.
        session: String,
        /// Path to end; all paths of the session by default.
        #[serde(default)]
        path: Option<u64>,
    },
    /// End a session and refuse its reconnects: [`Ended`].
    SessionEvict {
        /// Name or number of the session.
        session: String,
    },
    /// Shut down the server without loss. The reply is [`Drained`] once that is done.
    Drain {
        /// Maximum time, in milliseconds.
        within_ms: u64,
        /// Whether to shut down even if the first flush fails.
        #[serde(default)]
        force: bool,
    },
    /// List the exports: [`ExportList`].
    ExportList,
    /// Add an export: [`Changed`].
    ExportAdd {
        /// The export, as text or as a map.
        export: Box<ExportSpec>,
        /// Whether to add the export even if its access list makes other clients lose access.
        #[serde(default)]
        force: bool,
    },
    /// Remove an export. The reply is [`Removed`] once the export is closed.
    ExportRemove {
        /// Name of the export.
        name: String,
        /// Whether to remove the export even if sessions have it open.
        #[serde(default)]
        force: bool,
        /// Maximum time to wait for the export's last requests, in milliseconds.
        within_ms: u64,
        /// Whether to report only what would happen.
        #[serde(default)]
        dry_run: bool,
    },
    /// Make another gateway serve an export. The reply is [`ExportDrained`] once this server no
    /// longer serves it.
    ExportDrain {
        /// Name of the export.
        name: String,
        /// Maximum time to wait for the export's last requests, in milliseconds.
        within_ms: u64,
    },
    /// Change options of an export: [`Changed`].
    ExportSet {
        /// Name of the export.
        name: String,
        /// Options in the text form of an export.
        options: Vec<String>,
        /// Whether to change the access list even if clients lose access.
        #[serde(default)]
        force: bool,
        /// Whether to report only what would happen.
        #[serde(default)]
        dry_run: bool,
    },
    /// Change the size of an export: [`Resized`].
    ExportResize {
        /// Name of the export.
        name: String,
        /// New size in bytes; the current size of the target by default.
        #[serde(default)]
        size: Option<u64>,
        /// Whether to resize the export even if data is lost.
        #[serde(default)]
        force: bool,
    },
    /// Reload the configuration: [`Reloaded`].
    Reload {
        /// Whether to apply its access lists even if clients lose access.
        #[serde(default)]
        force: bool,
    },
    /// Report what a reload would do: [`Reloaded`].
    ReloadPreview,
    /// Return the settings of the running exports: [`SavedExports`].
    ExportSave,
    /// Return where the configuration defines an export: [`Origin`].
    ExportOrigin {
        /// Name of the export.
        name: String,
    },
}

/// State of a server.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Status {
    /// Name of the server.
    pub(crate) name: String,
    /// Process ID.
    pub(crate) pid: u32,
    /// Version of the server.
    pub(crate) version: String,
    /// Version, with the revision and features of the build, as printed by `--version`.
    #[serde(default)]
    pub(crate) build: String,
    /// Milliseconds since the server became ready.
    #[serde(default)]
    pub(crate) uptime_ms: u64,
    /// Portals that the server listens on.
    pub(crate) portals: Vec<String>,
    /// Whether a drain has begun.
    pub(crate) draining: bool,
    /// Address at which metrics are served, if they are.
    #[serde(default)]
    pub(crate) metrics: Option<String>,
    /// Exports, sessions and memory, if requested.
    #[serde(flatten)]
    pub(crate) load: Option<Load>,
}

/// Exports, sessions and memory of a server.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Load {
    /// Listening addresses.
    pub(crate) listeners: Vec<Listener>,
    /// Number of exports by state.
    pub(crate) exports: BTreeMap<String, usize>,
    /// Number of sessions by state.
    pub(crate) sessions: BTreeMap<String, usize>,
    /// Number of paths by state.
    pub(crate) paths: BTreeMap<String, usize>,
    /// Memory used by the chunks of all sessions.
    pub(crate) memory: MemorySnapshot,
}

/// A listening address of a server.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Listener {
    /// Portal, as SCHEME://ADDRESS:PORT.
    pub(crate) portal: String,
    /// Transport: `tcp` or `rdma`.
    pub(crate) transport: String,
    /// Whether TLS encrypts the connections.
    pub(crate) tls: bool,
    /// False if the device of the portal was removed.
    pub(crate) serving: bool,
    /// Whether the service manager opened the port, and keeps it open.
    #[serde(default)]
    pub(crate) activated: bool,
}

/// Sessions of a server.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Sessions {
    /// All sessions.
    pub(crate) sessions: Vec<SessionSnapshot>,
    /// Memory used by the chunks of all sessions.
    #[serde(default)]
    pub(crate) memory: MemorySnapshot,
    /// Portals that are not served because their device was removed.
    #[serde(default)]
    pub(crate) lost_portals: Vec<String>,
    /// Number of connections refused, and of sessions evicted to admit others, by reason.
    #[serde(default)]
    pub(crate) refused: BTreeMap<String, u64>,
}

/// Paths that are being closed.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ended {
    /// Number of the session.
    pub(crate) session: String,
    /// Numbers of the paths.
    pub(crate) paths: Vec<u64>,
}

/// Exports of a server.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ExportList {
    /// All exports, sorted by name.
    pub(crate) exports: Vec<ExportSnapshot>,
    /// Access list of the server, which applies to exports without a list of their own.
    #[serde(default)]
    pub(crate) access: Vec<AccessRule>,
    /// Whether everyone has full access because there is no access list and never was one.
    #[serde(default)]
    pub(crate) open_to_everyone: bool,
    /// Whether all authenticated clients have full access, because certificates or keys but no
    /// access lists are configured.
    #[serde(default)]
    pub(crate) open_to_named: bool,
}

/// Reply to a resize request, sent even if the export already had that size.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Resized {
    /// Name of the export.
    pub(crate) export: String,
    /// Size in bytes.
    pub(crate) size: u64,
    /// Previous size in bytes.
    pub(crate) size_before: u64,
    /// Length in bytes to which the target had been truncated, so that IO past it failed.
    #[serde(default)]
    pub(crate) was_cut: Option<u64>,
    /// File in which the command saved the export (`--save`).
    #[serde(default)]
    pub(crate) saved: Option<PathBuf>,
}

/// Running exports of a server, in the form of its configuration.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedExports {
    /// Exports, sorted by name.
    pub(crate) exports: Vec<ExportSpec>,
}

/// Location where the configuration defines, or can define, an export.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Origin {
    /// Directory of files with exports (`exports-dir`), if there is one.
    pub(crate) exports_dir: Option<PathBuf>,
    /// Configuration file, if there is one.
    pub(crate) config: Option<PathBuf>,
    /// Whether the configuration file or a flag, not a file in the directory, defines the export.
    pub(crate) elsewhere: bool,
    /// Access list of the running export; empty if it has none.
    #[serde(default)]
    pub(crate) access: Vec<AccessRule>,
    /// Whether a server started without an access list for this export would admit all clients,
    /// while the running server refuses those not named in any list.
    #[serde(default)]
    pub(crate) opens_without_list: bool,
    /// Whether the file has changes to the export that the running server has not applied.
    #[serde(default)]
    pub(crate) edited: bool,
    /// Number of the most recently started reload.
    #[serde(default)]
    pub(crate) configuration: u64,
    /// Whether a reload is running.
    #[serde(default)]
    pub(crate) reloading: bool,
}

/// Reply to a request that adds or changes an export.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Changed {
    /// Name of the export.
    pub(crate) export: String,
    /// Whether anything changed.
    pub(crate) changed: bool,
    /// Warnings about the export's access list that a restart would log.
    #[serde(default)]
    pub(crate) warnings: Vec<String>,
    /// Access that clients have lost.
    #[serde(flatten)]
    pub(crate) losses: Losses,
    /// Whether the change must be forced because of the access list.
    #[serde(default)]
    pub(crate) needs_force: bool,
    /// File in which the command saved the export (`--save`).
    #[serde(default)]
    pub(crate) saved: Option<PathBuf>,
}

/// Access that clients lose when access lists, certificates or keys change.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Losses {
    /// Exports that no client can open anymore.
    #[serde(default)]
    pub(crate) closed: Vec<String>,
    /// Sessions that lose paths.
    #[serde(default)]
    pub(crate) revoked: Vec<Revoked>,
}

impl Losses {
    /// Returns the reason to refuse an unforced change to access lists, with a hint, if clients
    /// would lose access.
    pub(crate) fn refusal(&self) -> Option<String> {
        let texts = self.texts("would lose");
        let hint = match self.closed.is_empty() {
            true => "add these clients to the access lists",
            false => {
                "to keep these exports accessible, first `reload` a configuration with access \
                 lists for these exports or for the server (access)"
            }
        };
        (!texts.is_empty()).then(|| format!("{}; {hint}, or use --force", texts.join("; ")))
    }

    /// Descriptions of the losses; empty if there are none. `lost` is the verb for lost paths.
    pub(crate) fn texts(&self, lost: &str) -> Vec<String> {
        let sessions: Vec<&str> = self.revoked.iter().map(|one| &*one.session).collect();
        let mut texts = Vec::new();
        if !self.closed.is_empty() {
            texts.push(format!("exports that no client may open: {}", self.closed.join(", ")));
        }
        if !sessions.is_empty() {
            texts.push(format!("sessions that {lost} paths: {}", sessions.join(", ")));
        }
        texts
    }
}

/// Change in access to exports without a list of their own.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct UnlistedChange {
    /// Clients that had access before.
    pub(crate) before: String,
    /// Clients that have access now.
    pub(crate) after: String,
}

/// Reply to a request to drain an export, which is now on standby.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ExportDrained {
    /// Name of the export.
    pub(crate) standby: String,
}

/// Reply to a request that removes an export.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Removed {
    /// Name of the export.
    pub(crate) removed: String,
    /// Sessions that had the export open.
    pub(crate) ended: Vec<String>,
    /// Sessions that had the export open, with their clients.
    #[serde(default)]
    pub(crate) users: Vec<ExportUser>,
    /// Sessions that lose paths because only the export's access list admitted their clients.
    #[serde(default)]
    pub(crate) revoked: Vec<Revoked>,
    /// Whether the removal must be forced because sessions have the export open, or because its
    /// file was deleted.
    #[serde(default)]
    pub(crate) needs_force: bool,
    /// Description of the data that the removal would destroy, if any.
    #[serde(default)]
    pub(crate) lost: Option<String>,
    /// Reason why the removed export could not be flushed, or is not closed yet.
    #[serde(default)]
    pub(crate) not_closed: Option<String>,
    /// File from which the command removed the export (`--save`).
    #[serde(default)]
    pub(crate) saved: Option<PathBuf>,
}

/// Result of a reload.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Reloaded {
    /// Exports that were added.
    pub(crate) added: Vec<String>,
    /// Exports that were removed.
    pub(crate) removed: Vec<String>,
    /// Exports that were changed.
    pub(crate) changed: Vec<String>,
    /// Exports left as they were although the configuration differs.
    pub(crate) kept: Vec<Kept>,
    /// Exports that could not be opened or closed.
    pub(crate) failed: Vec<Kept>,
    /// Changed settings that need a restart.
    pub(crate) restart: Vec<String>,
    /// Number of exports that match the configuration.
    pub(crate) unchanged: usize,
    /// Access lists that changed.
    #[serde(default)]
    pub(crate) access_changed: Vec<ListChange>,
    /// Certificate and key files that changed; for the list of clients, the changed clients.
    #[serde(default)]
    pub(crate) keys_changed: Vec<String>,
    /// Access to exports without a list of their own, if it changed.
    #[serde(default)]
    pub(crate) unlisted_changed: Option<UnlistedChange>,
    /// Access that clients have lost.
    #[serde(flatten)]
    pub(crate) losses: Losses,
    /// Whether the reload must be forced because of its access lists.
    #[serde(default)]
    pub(crate) needs_force: bool,
    /// Problem with the server's certificate, which remains in use.
    #[serde(default)]
    pub(crate) certificate: Option<String>,
    /// Warnings that a restart with these settings would log.
    #[serde(default)]
    pub(crate) warnings: Vec<String>,
}

/// An export that does not match the configuration.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// Name of the export.
    pub(crate) name: String,
    /// Reason for the difference.
    pub(crate) why: String,
}

/// Reply to a drain request, sent when the drain is complete.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Drained {
    /// Always true.
    pub(crate) drained: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_match_the_manual() {
        for (text, request) in [
            (r#"{"command":"status"}"#, Request::Status { load: false }),
            (r#"{"command":"status","load":true}"#, Request::Status { load: true }),
            (r#"{"command":"metrics"}"#, Request::Metrics),
            (r#"{"command":"get"}"#, Request::Get),
            (
                r#"{"command":"set","settings":{"log":"debug"}}"#,
                Request::Set { settings: [("log".into(), "debug".into())].into() },
            ),
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
            (
                r#"{"command":"drain","within_ms":5000}"#,
                Request::Drain { within_ms: 5000, force: false },
            ),
            (r#"{"command":"export-list"}"#, Request::ExportList),
            (
                r#"{"command":"export-add","export":"v=mem:1M,ro"}"#,
                Request::ExportAdd {
                    export: Box::new("v=mem:1M,ro".parse().unwrap()),
                    force: false,
                },
            ),
            (
                r#"{"command":"export-remove","name":"v","within_ms":5}"#,
                Request::ExportRemove {
                    name: "v".into(),
                    force: false,
                    within_ms: 5,
                    dry_run: false,
                },
            ),
            (
                r#"{"command":"export-drain","name":"v","within_ms":5}"#,
                Request::ExportDrain { name: "v".into(), within_ms: 5 },
            ),
            (
                r#"{"command":"export-set","name":"v","options":["ro"]}"#,
                Request::ExportSet {
                    name: "v".into(),
                    options: vec!["ro".into()],
                    force: false,
                    dry_run: false,
                },
            ),
            (
                r#"{"command":"export-set","name":"v","options":["ro"],"dry_run":true}"#,
                Request::ExportSet {
                    name: "v".into(),
                    options: vec!["ro".into()],
                    force: false,
                    dry_run: true,
                },
            ),
            (
                r#"{"command":"export-resize","name":"v","size":4096}"#,
                Request::ExportResize { name: "v".into(), size: Some(4096), force: false },
            ),
            (r#"{"command":"reload"}"#, Request::Reload { force: false }),
            (r#"{"command":"reload","force":true}"#, Request::Reload { force: true }),
            (r#"{"command":"reload-preview"}"#, Request::ReloadPreview),
            (r#"{"command":"export-save"}"#, Request::ExportSave),
            (
                r#"{"command":"export-origin","name":"v"}"#,
                Request::ExportOrigin { name: "v".into() },
            ),
        ] {
            assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request);
        }
        serde_json::from_str::<Request>(r#"{"command":"stop"}"#).unwrap_err();
    }
}
