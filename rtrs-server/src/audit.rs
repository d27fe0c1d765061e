//! What is recorded of clients and of the operator: who connected, opened, was refused or ended.
//!
//! Owns [`AuditEvent`], one line of the audit log, and [`AuditSink`], where events go. Without a
//! sink nothing is recorded. Session UUIDs are secrets, since whoever knows one could join its
//! session: events carry their hash.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::Serialize;

use crate::access_list::ListChange;
use crate::stats::Access;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AuditKind {
    /// A client has proved who it is on a path, or has not.
    Authenticate,
    /// A path of a session is up, or its connection was refused.
    Connect,
    /// A session opened an export, or was refused.
    Open,
    /// A session has closed an export, or ended with it open.
    Close,
    /// The last path of a session has ended.
    Disconnect,
    /// The operator, or a change of the access lists, has ended a session or paths of it.
    Evict,
    /// The configuration was read again.
    Reload,
    /// A command has added an export.
    ExportAdd,
    /// A command has changed an export.
    ExportSet,
    /// A command has removed an export; the reason names the sessions that had it open.
    ExportRemove,
    /// A command has changed the size of an export; the reason has both sizes.
    ExportResize,
    /// A command has had another gateway serve an export.
    ExportDrain,
    /// A command drains the server, which then ends.
    Drain,
}

/// How it went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AuditResult {
    /// It was done.
    Ok,
    /// It was done in part; the reason says what was not.
    Partly,
    /// It was refused, or has failed; nothing was done.
    Refused,
}

/// One line of the audit log, without the time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AuditEvent {
    /// What happened.
    pub event: AuditKind,
    /// How it went.
    pub result: AuditResult,
    /// The authenticated name of the client; None for one that has none.
    pub identity: Option<String>,
    /// Where the client is.
    pub address: Option<SocketAddr>,
    /// Hash of the session's UUID, as the log and `session list` show it.
    pub session: Option<String>,
    /// What the client calls its session.
    pub session_name: Option<String>,
    /// What encrypts the path; null where nothing does.
    pub cipher: Option<&'static str>,
    /// The export.
    pub export: Option<String>,
    /// How it is open, or was to be opened.
    pub mode: Option<Access>,
    /// Why.
    pub reason: Option<String>,
    /// The access lists that a reload has changed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub access_changed: Vec<ListChange>,
    /// Refusals of this kind that were left out since the last one that was recorded.
    pub left_out: u64,
}

impl AuditEvent {
    /// An event about nobody in particular.
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

/// Where events go. It must not wait: the control shard calls it.
#[derive(Clone, Default)]
pub struct AuditSink(Option<Arc<Take>>);

impl AuditSink {
    /// Events go to this function.
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
