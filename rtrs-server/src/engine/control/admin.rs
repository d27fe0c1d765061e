//! The operator's commands: listing, ending paths, evicting sessions.
//!
//! A path that was ended reconnects if its client wants to; that is the purpose of `disconnect`. An
//! evicted session cannot reconnect: this server refuses its ID (ESTALE) from then on. The
//! session's name is available immediately. Its exports are released only once none of its requests
//! is running: a write on which the backend is still working must not take effect after the writes
//! of a session that takes over the export. Nothing here waits for a backend. This code runs on the
//! control shard.

use std::collections::VecDeque;

use rtrs_core::fabric::Fabric;
use rtrs_core::identity::SessionTag;
use rtrs_core::ids::SessionId;
use rtrs_core::time::Instant;
use rtrs_core::wire::Name;

use super::open::Opens;
use super::path::Path;
use super::registry::{Registry, Session};
use crate::engine::ctx::Ctx;
use crate::engine::message::AdminReply;
use crate::path::{PathEnd, PathKey};
use crate::stats::{PathSnapshot, PathStage, SessionSnapshot, SessionState, millis};

/// Maximum number of remembered evicted sessions; the oldest is dropped first.
const EVICTED_MAX: usize = 1024;

/// Sessions that may not reconnect.
#[derive(Debug, Default)]
pub(super) struct Evicted(VecDeque<SessionId>);

impl Evicted {
    pub(super) fn contains(&self, id: SessionId) -> bool {
        self.0.contains(&id)
    }

    pub(super) fn add(&mut self, id: SessionId) {
        if self.contains(id) {
            return;
        }
        if self.0.len() >= EVICTED_MAX {
            self.0.pop_front();
        }
        self.0.push_back(id);
    }
}

/// Paths that a command ends, and the reason.
pub(super) struct Ends {
    pub(super) session: SessionId,
    pub(super) paths: Vec<PathKey>,
    pub(super) why: PathEnd,
}

impl Ends {
    /// Returns the answer to the command.
    pub(super) fn answer(&self) -> AdminReply {
        let paths = self.paths.iter().map(|key| key.0).collect();
        AdminReply::Ended { session: self.session.to_string(), paths }
    }
}

impl Evicted {
    /// Ends one path of a session, or all its paths. The error text is shown to the operator.
    pub(super) fn disconnect(
        &self,
        wanted: &str,
        path: Option<u64>,
        registry: &Registry,
    ) -> Result<Ends, String> {
        let session = self.find(wanted, registry)?.id();
        let live = registry.paths_of(session).filter(|path| path.state().may_begin());
        let asked = |key: &PathKey| path.is_none_or(|path| key.0 == path);
        let paths: Vec<PathKey> = live.map(Path::key).filter(asked).collect();
        match (path, &paths[..]) {
            (Some(path), []) => Err(format!(
                "session {wanted} has no path {path} that is up; `session list` shows the paths"
            )),
            _ => Ok(Ends { session, paths, why: PathEnd::Operator }),
        }
    }

    /// Whether a different session has the name. An evicted session remains until its IO has ended,
    /// but its name is available immediately.
    pub(super) fn is_taken(&self, name: Name, session: SessionId, registry: &Registry) -> bool {
        registry.sessions().any(|other| {
            other.id() != session && other.name() == Some(name) && !self.contains(other.id())
        })
    }

    /// Ends a session and refuses its reconnects.
    pub(super) fn evict(&mut self, wanted: &str, registry: &Registry) -> Result<Ends, String> {
        let session = self.find(wanted, registry)?.id();
        tracing::warn!(session = %SessionTag::of(session), "evicted by the operator");
        self.add(session);
        let paths = registry.paths_of(session).map(Path::key).collect();
        Ok(Ends { session, paths, why: PathEnd::Evicted })
    }

    /// Finds a session by its UUID, its ID in the log or its name, in that order.
    fn find<'a>(&self, wanted: &str, registry: &'a Registry) -> Result<&'a Session, String> {
        let named = |session: &&Session| {
            session.name().is_some_and(|name| name.as_bytes() == wanted.as_bytes())
        };
        let by_uuid = registry.sessions().find(|session| session.id().to_string() == wanted);
        let is_logged_as = |session: &&Session| SessionTag::of(session.id()).to_string() == wanted;
        // If an evicted session and its successor have the same name, select the successor.
        let evicted = |session: &&Session| self.contains(session.id());
        by_uuid
            .or_else(|| registry.sessions().find(is_logged_as))
            .or_else(|| registry.sessions().filter(named).min_by_key(evicted))
            .ok_or_else(|| format!("there is no session {wanted}; `session list` shows all"))
    }

    /// State of a session for statistics.
    pub(super) fn snapshot(
        &self,
        session: &Session,
        registry: &Registry,
        opens: &Opens,
        now: Instant,
    ) -> SessionSnapshot {
        let id = session.id();
        let paths: Vec<PathSnapshot> =
            registry.paths_of(id).map(|path| path.snapshot(now)).collect();
        let is = |state| paths.iter().any(|path: &PathSnapshot| path.state == state);
        let state = match () {
            () if self.contains(id) => SessionState::Evicted,
            () if is(PathStage::Connected) => SessionState::Up,
            () if is(PathStage::Connecting) || is(PathStage::Authenticating) => {
                SessionState::Connecting
            }
            () => SessionState::Ending,
        };
        SessionSnapshot {
            id: id.to_string(),
            log_id: SessionTag::of(id).to_string(),
            name: session.name().map(|n| String::from_utf8_lossy(n.as_bytes()).into_owned()),
            identity: match session.shared().who() {
                Some(who) => who.to_string(),
                None => "unproved".to_owned(),
            },
            state,
            version: session.shared().version(),
            age_ms: millis(now.since(session.since())),
            queue_depth: session.shared().limits.queue_depth(),
            memory_bytes: registry.memory_of(id),
            permits_held: session.shared().permits.held(),
            opens: opens.snapshot(session.shared()),
            io: session.totals(&paths),
            paths,
        }
    }
}

/// Portals that are not served because their device was removed.
pub(super) fn lost_portals(ctx: &Ctx<'_>) -> Vec<String> {
    let lost = |fabric: &dyn Fabric| -> Vec<String> {
        let scheme = fabric.capabilities().scheme;
        fabric.lost_listeners().into_iter().map(|at| format!("{scheme}://{at}")).collect()
    };
    ctx.fabrics.iter().flat_map(|fabric| lost(&**fabric)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_remembered_evictions_is_bounded() {
        let mut evicted = Evicted::default();
        let id = |n: usize| SessionId((n as u128).to_be_bytes());
        for n in 0..EVICTED_MAX {
            evicted.add(id(n));
            evicted.add(id(n));
        }
        assert!(evicted.contains(id(0)) && evicted.0.len() == EVICTED_MAX);
        evicted.add(id(EVICTED_MAX));
        assert!(!evicted.contains(id(0)), "the oldest is forgotten");
        assert!(evicted.contains(id(1)) && evicted.contains(id(EVICTED_MAX)));
        assert_eq!(evicted.0.len(), EVICTED_MAX);
    }
}
