//! Log messages and audit events about clients: opens, refusals and their reasons.
//!
//! A refused client may retry forever. Its lines are rate limited by source and reason
//! ([`LogLimits`]), so that the log has room for others.

use std::net::SocketAddr;

use rtrs_core::fabric::{ProofError, Who};
use rtrs_core::identity::{ExportId, SessionTag};
use rtrs_core::ids::SessionId;
use rtrs_core::log_limit::LogLimits;
use rtrs_core::proto::quota::Source;
use rtrs_core::time::Instant;
use rtrs_core::wire::{AccessMode, Name, errno, errno_name};

use super::path::Path;
use super::refusal::{Refusal, RefusedCounts};
use super::registry::{Registry, Session};
use crate::audit::{AuditEvent, AuditKind, AuditResult, AuditSink};
use crate::engine::device_table::DeviceId;
use crate::engine::session::SessionShared;
use crate::export::{ExportTable, Lookup};
use crate::path::{PathEnd, PathShared};
use crate::stats::Access;

/// Key of the rate limit: the source, the kind of event, and details that a client cannot invent.
type Kind = (Source, &'static str, String);

/// Maximum number of kinds that are held back; the limiter tracks the same number.
const HELD_MAX: usize = 64;
/// Maximum length of a detail in bytes.
const DETAIL_MAX: usize = 96;

/// Rate-limited log of client events.
#[derive(Debug, Default)]
pub(super) struct ClientLog {
    limits: LogLimits<Kind>,
    audit: AuditSink,
    /// First suppressed event of each kind since the last line of the kind. If no further event is
    /// recorded, this event is recorded with the number of suppressed events.
    held: Vec<(Kind, AuditEvent)>,
    /// Numbers of refused connections and opens, and of sessions evicted to admit others.
    pub(super) refused: RefusedCounts,
}

/// A client that requests an export, with its known attributes.
#[derive(Clone, Debug)]
pub(super) struct Opener {
    /// Name that the client gave its session.
    pub(super) name: Option<Name>,
    pub(super) session: SessionId,
    pub(super) peer: SocketAddr,
    pub(super) who: Who,
}

/// A client's request for an export.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    export: Name,
    pub(super) access: AccessMode,
    found: Lookup,
}

impl Asked {
    pub(super) fn new(export: Name, access: AccessMode, exports: &ExportTable) -> Self {
        Self { export, access, found: exports.lookup(export.as_bytes()) }
    }

    pub(super) fn export(&self) -> &Name {
        &self.export
    }
}

impl Opener {
    /// Returns the client of a session that sends a request from `peer`.
    pub(super) fn of(session: SessionId, peer: SocketAddr, registry: &Registry) -> Self {
        let at = registry.session(session);
        let who = at.map(|at| at.shared().name_of_client()).unwrap_or_default();
        Self { name: at.and_then(Session::name), session, peer, who }
    }

    /// Returns the client of a path; an unproven path yields no name and no identity.
    pub(super) fn of_path(path: &Path, registry: &Registry) -> Self {
        let shared = path.shared();
        let of_session = Self::of(shared.session.id, shared.origin.peer, registry);
        match path.is_unproved() {
            true => Self { name: None, who: Who::Anonymous, ..of_session },
            false => of_session,
        }
    }

    fn event(&self, event: AuditKind, result: AuditResult) -> AuditEvent {
        AuditEvent {
            identity: self.who.name().map(str::to_owned),
            address: Some(self.peer),
            session: Some(SessionTag::of(self.session).to_string()),
            session_name: self.name.map(|name| name.to_string()),
            ..AuditEvent::new(event, result)
        }
    }
}

impl ClientLog {
    /// Sets the sink for audit events.
    pub(super) fn set_audit(&mut self, audit: AuditSink) {
        self.audit = audit;
    }

    /// Records a session event other than an open.
    pub(super) fn happened(&self, kind: AuditKind, client: &Opener, reason: Option<&str>) {
        self.audit.record(|| AuditEvent {
            reason: reason.map(str::to_owned),
            ..client.event(kind, AuditResult::Ok)
        });
    }

    /// Records the end of a path if the operator ended it.
    pub(super) fn ended(&mut self, client: &Opener, end: &PathEnd) {
        let kind = match end {
            PathEnd::NotAllowed | PathEnd::Unknown | PathEnd::Evicted => AuditKind::Evict,
            PathEnd::Operator => AuditKind::SessionDisconnect,
            _ => return,
        };
        self.release_connect(client);
        self.happened(kind, client, Some(&end.to_string()));
    }

    /// Records that a session closed one export, or all.
    pub(super) fn closed(
        &self,
        client: &Opener,
        session: &SessionShared,
        exports: &ExportTable,
        device: Option<DeviceId>,
    ) {
        let devices = &session.devices;
        for id in devices.ids().filter(|id| device.is_none_or(|device| *id == device)) {
            let Some(entry) = devices.get(id) else { continue };
            let Some(export) = exports.get(entry.export) else { continue };
            let mode = if entry.writable { Access::Rw } else { Access::Ro };
            self.audit.record(|| AuditEvent {
                export: Some(export.name.clone()),
                mode: Some(mode),
                ..client.event(AuditKind::Close, AuditResult::Ok)
            });
        }
    }

    /// Decides whether to log a line about a client that has opened nothing. Returns the number of
    /// lines suppressed since the last logged line.
    pub(super) fn admit(
        &mut self,
        now: Instant,
        peer: SocketAddr,
        what: &'static str,
    ) -> Option<u64> {
        self.limits.admit(now, (Source::of(peer.ip()), what, String::new()))
    }

    /// Does the same as [`Self::admit`] for a line that is also an audit event, and records the
    /// event or holds it back. The connect of a client's session is recorded first.
    fn admit_event(
        &mut self,
        now: Instant,
        kind: Kind,
        client: Option<&Opener>,
        event: impl FnOnce() -> AuditEvent,
    ) -> Option<u64> {
        let admitted = self.limits.admit(now, kind.clone());
        if let Some(client) = client.filter(|_| admitted.is_some()) {
            self.release_connect(client);
        }
        let at = self.held.iter().position(|(held, _)| *held == kind);
        match (admitted, at) {
            (Some(left_out), at) => {
                at.map(|at| self.held.swap_remove(at));
                self.audit.record(|| AuditEvent { left_out, ..event() });
            }
            (None, None) => {
                if self.held.len() >= HELD_MAX {
                    self.held.remove(0);
                }
                self.held.push((kind, event()));
            }
            (None, Some(_)) => {}
        }
        admitted
    }

    /// Logs the number of suppressed lines for kinds without recent events. Returns true if there
    /// were any.
    pub(super) fn close(&mut self, now: Instant) -> bool {
        // Called in each turn; usually nothing is overdue.
        let Some(first) = self.limits.overdue(now) else { return false };
        let (mut overdue, mut due) = (Some(first), Vec::new());
        while let Some((kind, count)) = overdue {
            let at = self.held.iter().position(|(held, _)| *held == kind);
            due.extend(at.map(|at| (self.held.swap_remove(at).1, count)));
            overdue = self.limits.overdue(now);
        }
        // The connect of a session precedes its other events.
        due.sort_by_key(|(event, _)| event.event != AuditKind::Connect);
        due.into_iter().for_each(|(event, count)| self.record_held(event, count));
        true
    }

    /// Logs and records a held event, which is among the `count` suppressed events of its kind.
    fn record_held(&self, event: AuditEvent, count: u64) {
        let left_out = count.saturating_sub(1);
        let reason = event.reason.as_deref().unwrap_or(match event.event {
            AuditKind::Disconnect => "disconnected",
            _ => "connected",
        });
        let (client, identity) = (shown(event.address), event.identity.as_deref());
        let identity = identity.unwrap_or("-");
        if left_out == 0 {
            tracing::info!(%client, identity, reason, "delayed because of similar lines");
        } else {
            tracing::info!(
                %client, identity, reason, left_out,
                "repeated; left_out counts the similar lines that were suppressed"
            );
        }
        self.audit.record(|| AuditEvent { left_out, ..event });
    }

    /// Records the connect of a client's session, if it is held, before the session's next event.
    fn release_connect(&mut self, client: &Opener) {
        let session = SessionTag::of(client.session).to_string();
        let is_connect = |(_, event): &(Kind, AuditEvent)| {
            event.event == AuditKind::Connect && event.session.as_ref() == Some(&session)
        };
        if let Some(at) = self.held.iter().position(is_connect) {
            let (kind, event) = self.held.swap_remove(at);
            let count = self.limits.take(&kind);
            self.record_held(event, count);
        }
    }

    /// Time of the next call of [`Self::close`].
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.limits.deadline()
    }

    /// Records a path that is up. Returns whether to log it: clients that have neither a name nor
    /// an open export can connect any number of times, so their lines are limited.
    pub(super) fn connected(&mut self, now: Instant, client: &Opener, is_known: bool) -> bool {
        if is_known || client.who.name().is_some() {
            self.happened(AuditKind::Connect, client, None);
            return true;
        }
        let kind = (Source::of(client.peer.ip()), "up", String::new());
        let event = || client.event(AuditKind::Connect, AuditResult::Ok);
        self.admit_event(now, kind, None, event).is_some()
    }

    /// Records the end of a client's last path, under the same condition as [`Self::connected`].
    pub(super) fn disconnected(&mut self, now: Instant, client: &Opener, is_known: bool) {
        if is_known || client.who.name().is_some() {
            self.release_connect(client);
            return self.happened(AuditKind::Disconnect, client, None);
        }
        let kind = (Source::of(client.peer.ip()), "gone", String::new());
        let event = || client.event(AuditKind::Disconnect, AuditResult::Ok);
        let _left_out = self.admit_event(now, kind, Some(client), event);
    }

    /// Logs a refused connection.
    pub(super) fn refused(&mut self, now: Instant, peer: SocketAddr, who: &Who, refusal: &Refusal) {
        let detail = match refusal {
            // The text contains an authenticated name or an address.
            Refusal::NotAllowed(why) | Refusal::Nameless(why) => detail(why),
            _ => String::new(),
        };
        let kind = (Source::of(peer.ip()), refusal.reason(), detail);
        let event = || AuditEvent {
            identity: who.name().map(str::to_owned),
            address: Some(peer),
            reason: Some(refusal.to_string()),
            ..AuditEvent::new(AuditKind::Connect, AuditResult::Refused)
        };
        let Some(left_out) = self.admit_event(now, kind, None, event) else { return };
        let errno = errno_name(refusal.errno());
        if refusal.is_ours() || refusal.is_denied() {
            tracing::warn!(%peer, errno, reason = %refusal, left_out, "refused a connection");
        } else {
            tracing::info!(%peer, errno, reason = %refusal, left_out, "refused a connection");
        }
    }

    /// Counts and logs a client that failed to authenticate.
    pub(super) fn authentication_failed(
        &mut self,
        now: Instant,
        peer: SocketAddr,
        why: &ProofError,
    ) {
        self.refused.count("authenticate");
        let refusal = Refusal::Unproved(why.clone());
        // The text may contain data that the peer sent: keys, names, numbers.
        let kind = (Source::of(peer.ip()), refusal.reason(), why.kind().to_owned());
        let event = || AuditEvent {
            address: Some(peer),
            reason: Some(refusal.to_string()),
            ..AuditEvent::new(AuditKind::Authenticate, AuditResult::Refused)
        };
        let Some(left_out) = self.admit_event(now, kind, None, event) else { return };
        tracing::warn!(%peer, reason = %refusal, left_out, "client authentication failed");
    }

    /// Records that the client of the session `name` has authenticated on a path.
    pub(super) fn proved(&self, path: &PathShared, name: Name) {
        let (identity, peer) = (path.identity(), path.origin.peer);
        self.audit.record(|| AuditEvent {
            identity: identity.who.name().map(str::to_owned),
            address: Some(peer),
            session: Some(SessionTag::of(path.session.id).to_string()),
            session_name: Some(name.to_string()),
            cipher: identity.cipher,
            ..AuditEvent::new(AuditKind::Authenticate, AuditResult::Ok)
        });
        let who = &identity.who;
        tracing::info!(path = %path.key, %peer, identity = %who, "client authenticated");
    }

    /// Records and logs an open.
    pub(super) fn opened(&mut self, client: &Opener, asked: Asked, id: Option<ExportId>) {
        let Asked { export, access, .. } = asked;
        self.release_connect(client);
        self.audit.record(|| AuditEvent {
            export: Some(export.to_string()),
            mode: Some(access.into()),
            ..client.event(AuditKind::Open, AuditResult::Ok)
        });
        let Opener { name, session, peer, who: identity } = client;
        let session = SessionTag::of(*session);
        let (client, export_id) = (shown(*name), shown(id));
        let (export, access_name) = (export.to_string(), access.name());
        if access == AccessMode::Migration {
            // Two clients may write now.
            tracing::warn!(
                export, %client, %peer, %session, %identity, %export_id, access = access_name,
                "opened"
            );
        } else {
            tracing::info!(
                export, %client, %peer, %session, %identity, %export_id, access = access_name,
                "opened"
            );
        }
    }

    /// Logs a refused open.
    pub(super) fn open_refused(
        &mut self,
        now: Instant,
        client: &Opener,
        asked: Asked,
        errno: u16,
        why: Option<&str>,
    ) {
        let Opener { name, session, peer, .. } = *client;
        let Asked { export, access, .. } = asked;
        let what = errno_name(errno);
        let reason = match errno {
            _ if why.is_some() => why.unwrap_or_default(),
            errno::EPERM => "another session has the export open for writing",
            errno::EACCES => "the export is read-only, or not accessible below search-path",
            errno::ENOENT => match asked.found {
                Lookup::Failed => "the export has failed: its target could not be opened",
                Lookup::Changing => "the export is temporarily closed for a change",
                Lookup::Named(_) | Lookup::Unknown => "there is no export of that name",
            },
            errno::EBUSY => "requests of its previous open are still running",
            errno::ESTALE => "the session was evicted",
            errno::EBADE => {
                "another client has opened the export for writing since this client last had it \
                 open"
            }
            errno::EINVAL => "the name is not valid",
            errno::ENOMEM => "too many exports are open",
            _ => "see the preceding log lines",
        };
        // A client can request any number of nonexistent names.
        let known = asked.found != Lookup::Unknown;
        let detail_of_open = known.then(|| detail(&format!("{reason}: {export}")));
        let kind = (Source::of(peer.ip()), what, detail_of_open.unwrap_or_default());
        let event = || AuditEvent {
            export: Some(export.to_string()),
            mode: Some(access.into()),
            reason: Some(format!("{what}: {reason}")),
            ..client.event(AuditKind::Open, AuditResult::Refused)
        };
        let Some(left_out) = self.admit_event(now, kind, Some(client), event) else { return };
        let (client, session) = (shown(name), SessionTag::of(session));
        let (export, access) = (export.to_string(), access.name());
        tracing::info!(
            export, %client, %peer, %session, access, errno = what, reason, left_out,
            "refused an open"
        );
    }
}

/// Truncates a detail that is too long.
fn detail(text: &str) -> String {
    let mut end = text.len().min(DETAIL_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

fn shown<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn failed_proofs_are_grouped_by_kind_and_not_by_content() {
        let mut log = ClientLog::default();
        let reasons: Arc<Mutex<Vec<String>>> = Arc::default();
        let kept = Arc::clone(&reasons);
        log.set_audit(AuditSink::new(move |event| kept.lock().extend(event.reason)));
        let peer = SocketAddr::from(([10, 0, 0, 1], 1));
        for n in 0..50 {
            let made_up: String = std::iter::repeat_n('x', n).collect();
            for kind in ["the name is another", "the key is another"] {
                let why = ProofError::new(kind, format!("it says {made_up} (1: 2)"));
                log.authentication_failed(Instant::ZERO, peer, &why);
            }
        }
        let reasons = std::mem::take(&mut *reasons.lock());
        assert_eq!(reasons.len(), 2, "{reasons:?}");
    }

    #[test]
    fn the_connect_of_a_session_is_recorded_before_its_refused_open() {
        let mut log = ClientLog::default();
        let events: Arc<Mutex<Vec<_>>> = Arc::default();
        let kept = Arc::clone(&events);
        log.set_audit(AuditSink::new(move |event| {
            kept.lock().push((event.event, event.result, event.session.unwrap()));
        }));
        let client = |n: u8| {
            let (peer, session) = (SocketAddr::from(([10, 0, 0, 1], 1)), SessionId([n; 16]));
            Opener { name: None, session, peer, who: Who::Anonymous }
        };
        assert!(log.connected(Instant::ZERO, &client(1), false));
        assert!(!log.connected(Instant::ZERO, &client(2), false), "it is held back");
        let export = Name::new(b"vol0").unwrap();
        let asked = Asked { export, access: AccessMode::ReadWrite, found: Lookup::Unknown };
        log.open_refused(Instant::ZERO, &client(2), asked, errno::ENOENT, None);
        let [first, second] = [1, 2].map(|n| SessionTag::of(SessionId([n; 16])).to_string());
        let expected = [
            (AuditKind::Connect, AuditResult::Ok, first),
            (AuditKind::Connect, AuditResult::Ok, second.clone()),
            (AuditKind::Open, AuditResult::Refused, second),
        ];
        assert_eq!(*events.lock(), expected);
    }
}
