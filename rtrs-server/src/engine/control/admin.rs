//! The operator's commands: what there is, ending paths, evicting a session.
//!
//! A path that is ended comes back if its client wants it; that is what `disconnect` is for. An
//! evicted session does not come back: this server refuses its number (ESTALE) from then on. Its
//! name is free at once. Its opens are given back when nothing of it runs any more, not before: a
//! write of it that the backend still works on must not land after those of a session that takes
//! the export over. Nothing here waits for a backend. Runs on the control core.

use std::collections::VecDeque;

use rtrs_core::ids::SessionId;
use rtrs_core::proto::Heartbeat;
use rtrs_core::time::{Duration, Instant};

use super::{Control, Session};
use crate::engine::ctx::Ctx;
use crate::engine::message::{AdminAnswer, AdminAsk, AdminReply};
use crate::path::state::PathState;
use crate::path::{PathEnd, PathKey};
use crate::stats::{OpenSnapshot, PathSnapshot, SessionSnapshot, SessionState, micros};

/// Evicted sessions that are remembered; the oldest is forgotten for one more.
const EVICTED_MAX: usize = 1024;

/// Sessions that may not come back.
#[derive(Debug, Default)]
pub(super) struct Evicted(VecDeque<SessionId>);

impl Evicted {
    pub(super) fn contains(&self, id: SessionId) -> bool {
        self.0.contains(&id)
    }

    fn add(&mut self, id: SessionId) {
        if self.contains(id) {
            return;
        }
        if self.0.len() >= EVICTED_MAX {
            self.0.pop_front();
        }
        self.0.push_back(id);
    }
}

impl Control {
    /// Does what the operator asks.
    pub(super) fn admin(&mut self, ask: AdminAsk, reply: AdminReply, ctx: &mut Ctx<'_>) {
        let answer = match ask {
            AdminAsk::Sessions => AdminAnswer::Sessions(self.snapshot(ctx.now)),
            AdminAsk::Disconnect { session, path } => self.disconnect(&session, path, ctx),
            AdminAsk::Evict { session } => self.evict(&session, ctx),
            AdminAsk::Drain { within } => return self.drain(within, reply, ctx),
        };
        reply.send(answer);
    }

    fn disconnect(&mut self, wanted: &str, path: Option<u32>, ctx: &mut Ctx<'_>) -> AdminAnswer {
        let session = match self.session_of(wanted) {
            Ok(session) => session,
            Err(refusal) => return AdminAnswer::Refused(refusal),
        };
        let id = session.shared.id;
        let live = |key: &&PathKey| {
            let path = self.paths.get(key);
            path.is_some_and(|path| path.state.may_begin())
        };
        let asked = |key: &&PathKey| path.is_none_or(|path| key.0 == path);
        let keys: Vec<PathKey> = session.paths.iter().filter(asked).filter(live).copied().collect();
        if let (Some(path), []) = (path, &keys[..]) {
            return AdminAnswer::Refused(format!(
                "session {wanted} has no path {path} that is up; `session list` numbers them"
            ));
        }
        for key in &keys {
            self.end_path(*key, &PathEnd::Operator, ctx);
        }
        ended(id, &keys)
    }

    fn evict(&mut self, wanted: &str, ctx: &mut Ctx<'_>) -> AdminAnswer {
        let session = match self.session_of(wanted) {
            Ok(session) => session,
            Err(refusal) => return AdminAnswer::Refused(refusal),
        };
        let (id, keys) = (session.shared.id, session.paths.clone());
        tracing::warn!(session = %id, "evicted by the operator");
        self.evicted.add(id);
        for key in &keys {
            self.end_path(*key, &PathEnd::Evicted, ctx);
        }
        ended(id, &keys)
    }

    /// A session by its number, or else by its name.
    fn session_of(&self, wanted: &str) -> Result<&Session, String> {
        let named = |session: &&Session| {
            session.name.is_some_and(|name| name.as_bytes() == wanted.as_bytes())
        };
        let by_id = self.sessions.values().find(|session| session.shared.id.to_string() == wanted);
        // Of an evicted one and the one that took its name, the latter is meant.
        let evicted = |session: &&Session| self.evicted.contains(session.shared.id);
        by_id
            .or_else(|| self.sessions.values().filter(named).min_by_key(evicted))
            .ok_or_else(|| format!("there is no session {wanted}; `session list` shows all"))
    }

    /// Everything there is, for people and programs.
    pub fn snapshot(&self, now: Instant) -> Vec<SessionSnapshot> {
        self.sessions.values().map(|session| self.snapshot_of(now, session)).collect()
    }

    fn snapshot_of(&self, now: Instant, session: &Session) -> SessionSnapshot {
        let shared = &session.shared;
        let paths: Vec<PathSnapshot> =
            session.paths.iter().filter_map(|key| self.path_snapshot(now, *key)).collect();
        let mut io = session.gone;
        for path in &paths {
            io.add(&path.io);
        }
        let is = |state| paths.iter().any(|path: &PathSnapshot| path.state == state);
        let state = match () {
            () if self.evicted.contains(shared.id) => SessionState::Evicted,
            () if is(PathState::Connected) => SessionState::Up,
            () if is(PathState::Connecting) => SessionState::Connecting,
            () => SessionState::Ending,
        };
        SessionSnapshot {
            id: shared.id.to_string(),
            name: session.name.map(|n| String::from_utf8_lossy(n.as_bytes()).into_owned()),
            state,
            version: shared.version(),
            age_ms: millis(now.since(session.since)),
            permits_held: shared.permits.held(),
            opens: self.opens_of(session),
            io,
            paths,
        }
    }

    fn opens_of(&self, session: &Session) -> Vec<OpenSnapshot> {
        let devices = &session.shared.devices;
        let open = devices.ids().filter_map(|id| devices.get(id)).map(|entry| entry.export);
        // What it has closed it holds until nothing of it runs there any more.
        open.chain(self.closings.of(session.shared.id))
            .filter_map(|at| {
                let export = self.exports.get(at)?;
                let mut opens = self.access.opens(at).iter();
                let (_, mode) = *opens.find(|(who, _)| *who == session.shared.id)?;
                let (export, id) = (export.name.clone(), export.id.map(|id| id.to_string()));
                Some(OpenSnapshot { export, access: mode.into(), id })
            })
            .collect()
    }

    fn path_snapshot(&self, now: Instant, key: PathKey) -> Option<PathSnapshot> {
        let path = self.paths.get(&key)?;
        let shared = &path.shared;
        Some(PathSnapshot {
            path: key.0,
            uuid: shared.uuid.to_string(),
            state: path.state,
            transport: shared.transport,
            peer: shared.peer.to_string(),
            local: shared.local.to_string(),
            connections: shared.cid_num,
            age_ms: millis(now.since(path.since)),
            heartbeat_us: path.heartbeat.as_ref().and_then(Heartbeat::rtt).map(micros),
            io: shared.counters.totals(),
        })
    }
}

fn ended(id: SessionId, keys: &[PathKey]) -> AdminAnswer {
    AdminAnswer::Ended { session: id.to_string(), paths: keys.iter().map(|key| key.0).collect() }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_evicted_sessions_are_remembered_as_may_be() {
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
