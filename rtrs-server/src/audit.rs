//! Audit events for clients and the operator: connections, opens, refusals and disconnections.
//!
//! [`AuditEvent`] is one line of the audit log, and [`AuditSink`] is the destination of events.
//! Without a sink, no events are recorded. Session UUIDs are secrets, because knowing one is enough
//! to join its session; events contain a hash instead.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::Serialize;

use crate::access_list::ListChange;
use crate::stats::Access;

/// Kind of an audit event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AuditKind {
    /// A client has authenticated on a path, or failed to.
    Authenticate,
    /// A path of a session came up, or its connection was refused.
    Connect,
    /// A session opened an export, or was refused.
    Open,
    /// A session has closed an export, or ended while it had the export open.
    Close,
    /// The last path of a session has ended.
    Disconnect,
    /// The operator evicted a session, or a change to the access lists, certificates or keys ended
    /// some of its paths.
    Evict,
    /// A command ended a path; the client may reconnect it.
    SessionDisconnect,
    /// The configuration was reread.
    Reload,
    /// An export could not be opened at startup, or was opened later.
    ExportOpen,
    /// A command added an export.
    ExportAdd,
    /// A command changed an export.
    ExportSet,
    /// A command removed an export; the reason names the sessions that had it open.
    ExportRemove,
    /// A command changed the size of an export; the reason gives both sizes.
    ExportResize,
    /// A command made a different gateway serve an export.
    ExportDrain,
    /// A command drains the server, which then exits.
    Drain,
}

/// Outcome of an audited action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AuditResult {
    /// The action succeeded.
    Ok,
    /// The action partly succeeded; the reason states what failed.
    Partly,
    /// The action was refused or failed, and nothing changed.
    Refused,
}

/// One line of the audit log, without the time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AuditEvent {
    /// Kind of the event.
    pub event: AuditKind,
    /// Outcome of the event.
    pub result: AuditResult,
    /// Authenticated name of the client; None if the client has no name.
    pub identity: Option<String>,
    /// Address of the client.
    pub address: Option<SocketAddr>,
    /// Hash of the session's UUID, as shown in the log and by `session list`.
    pub session: Option<String>,
    /// Name that the client gave the session.
    pub session_name: Option<String>,
    /// Cipher suite of the path; None if the path is not encrypted.
    pub cipher: Option<&'static str>,
    /// Name of the export.
    pub export: Option<String>,
    /// Mode in which the export is open, or was to be opened.
    pub mode: Option<Access>,
    /// Reason for the outcome.
    pub reason: Option<String>,
    /// Access lists that a reload changed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub access_changed: Vec<ListChange>,
    /// Number of similar refusals that have been suppressed since the last recorded one.
    pub left_out: u64,
}

impl AuditEvent {
    /// Creates an event without a client or an export.
    pub(crate) const fn new(event: AuditKind, result: AuditResult) -> Self {
        Self {
            event,
            result,
            identity: None,
            address: None,
            session: None,
            session_name: None,
            cipher: None,
            export: None,
            mode: None,
            reason: None,
            access_changed: Vec::new(),
            left_out: 0,
        }
    }
}

type Take = dyn Fn(AuditEvent) + Send + Sync;

/// Destination of audit events. It must not block, because the control shard calls it.
#[derive(Clone, Default)]
pub struct AuditSink(Option<Arc<Take>>);

impl AuditSink {
    /// Creates a sink that passes events to `take`.
    pub fn new(take: impl Fn(AuditEvent) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(take)))
    }

    /// Records an event.
    pub(crate) fn record(&self, event: impl FnOnce() -> AuditEvent) {
        if let Some(take) = &self.0 {
            take(event());
        }
    }
}

impl fmt::Debug for AuditSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AuditSink")
    }
}
