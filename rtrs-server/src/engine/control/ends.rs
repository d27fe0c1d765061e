//! Termination of paths and sessions: causes, shard reports and timeouts.

use std::net::SocketAddr;

use rtrs_core::fabric::ProofError;
use rtrs_core::identity::SessionTag;
use rtrs_core::ids::CoreIndex;
use rtrs_core::time::earliest;

use super::client_log::Opener;
use super::known::report_address;
use super::path::Path;
use super::registry::Session;
use super::{Control, LOOK_FOR_REMOVED};
use crate::engine::ctx::Ctx;
use crate::engine::message::{ControlAnswer, EndReport};
use crate::path::state::PathState;
use crate::path::{PathEnd, PathKey};

impl Control {
    /// Starts closing a path, unless it is already closing.
    pub(super) fn end_path(&mut self, key: PathKey, end: &PathEnd, ctx: &mut Ctx<'_>) {
        let Some(path) = self.registry.path_mut(key) else { return };
        // After a refused INFO_REQ, the client closes the path.
        let refused = path.handshake.refused().cloned();
        let end = refused.as_ref().unwrap_or(end);
        let peer = path.shared().origin.peer;
        let is_loud = path.shared().session.has_opened() && !path.is_unproved()
            || path.state().is_ending()
            || self.log.admit(ctx.now, peer, "end").is_some();
        if !path.close(end, is_loud, ctx.out) {
            return;
        }
        self.backlog.forget(key);
        if *end == PathEnd::Unproved {
            let why = ProofError::from("the client did not authenticate in time");
            self.log.authentication_failed(ctx.now, peer, &why);
        }
        if let Some(path) = self.registry.path(key) {
            self.limiter.path_ended(path, end, ctx.now);
            self.log.ended(&Opener::of_path(path, &self.registry), end);
        }
        self.advance_end(key, ctx);
    }

    /// Starts closing several paths.
    pub(super) fn end_all(&mut self, keys: Vec<PathKey>, end: &PathEnd, ctx: &mut Ctx<'_>) {
        keys.into_iter().for_each(|key| self.end_path(key, end, ctx));
    }

    /// Handles a shard's report on a closing path.
    pub(super) fn report(
        &mut self,
        key: PathKey,
        shard: CoreIndex,
        report: EndReport,
        ctx: &mut Ctx<'_>,
    ) {
        let Some(path) = self.registry.live_path(key) else { return };
        if path.report(shard, report) {
            self.end_path(key, &PathEnd::Shutdown, ctx);
        } else {
            self.advance_end(key, ctx);
        }
        self.advance_drain(ctx);
    }

    /// Advances the shutdown of a path. A session ends with its last path.
    pub(super) fn advance_end(&mut self, key: PathKey, ctx: &mut Ctx<'_>) {
        let Some(path) = self.registry.live_path(key) else { return };
        let (fenced, gone) = path.advance();
        let id = path.shared().session.id;
        for reply_to in fenced {
            reply_to.answer(ControlAnswer::Done, ctx.out);
        }
        self.open_proved(id, ctx);
        if !gone {
            return;
        }
        let Some(path) = self.registry.live_path(key) else { return };
        let peer = path.shared().origin.peer;
        let place = path.known_place();
        if let Some(place) = place.and_then(|place| self.known.path_ended(place)) {
            report_address(place, false, ctx);
        }
        let ended = self.registry.remove(key, ctx.now + self.params.handshake_timeout);
        let orphaned = self.registry.session(id).and_then(Session::orphaned);
        self.next = earliest(self.next, orphaned);
        if self.registry.keeps_removable() {
            self.next = earliest(self.next, Some(ctx.now + LOOK_FOR_REMOVED));
        }
        ended.into_iter().for_each(|session| self.session_gone(&session, peer, ctx));
    }

    /// Cleans up after a session that has ended, whose last path came from `last`.
    pub(super) fn session_gone(&mut self, session: &Session, last: SocketAddr, ctx: &mut Ctx<'_>) {
        let (name, id) = (session.name(), session.id());
        let who = session.shared().name_of_client();
        let client = Opener { name, session: id, peer: session.peer().unwrap_or(last), who };
        self.log.closed(&client, session.shared(), &self.exports, None);
        self.limiter.session_ended(id, session.has_opened());
        self.opens.session_ended(session.shared(), ctx.now, ctx.out);
        // A session without a name never had a connected path.
        if name.is_some() {
            self.log.disconnected(ctx.now, &client, session.has_opened());
        }
        if session.has_opened() {
            tracing::info!(session = %SessionTag::of(id), "session ended");
        } else {
            tracing::debug!(session = %SessionTag::of(id), "session ended");
        }
    }

    /// Ends sessions for which no client has authenticated in time. Otherwise, anyone could keep
    /// sessions and their open exports alive by connecting paths without authenticating.
    pub(super) fn end_orphaned(&mut self, ctx: &mut Ctx<'_>) {
        let orphaned = |session: &Session| session.orphaned().map(|until| (until, session.id()));
        let orphaned: Vec<_> = self.registry.sessions().filter_map(orphaned).collect();
        for (until, id) in orphaned {
            if ctx.now < until {
                self.next = earliest(self.next, Some(until));
                continue;
            }
            let peer = self.registry.session(id).and_then(Session::peer);
            self.end_all(self.registry.keys_of(id), &PathEnd::Orphaned, ctx);
            // The session may have ended along with its paths.
            if let Some((session, peer)) = self.registry.abandon(id, ctx.now).zip(peer) {
                self.session_gone(&session, peer, ctx);
            }
        }
    }

    /// Ends sessions that have not opened an export in time.
    pub(super) fn end_unopened(&mut self, ctx: &mut Ctx<'_>) {
        let mut late = Vec::new();
        for session in self.registry.sessions().filter(|session| !session.has_opened()) {
            let until = session.asked() + self.params.open_timeout;
            match until <= ctx.now {
                true => late.push(session.id()),
                false => self.next = earliest(self.next, Some(until)),
            }
        }
        for id in late {
            // A session without a connected path is subject to the handshake timeout.
            let up = |path: &Path| path.state() == PathState::Connected;
            if self.registry.paths_of(id).any(up) {
                self.log.refused.count("not-opened");
                self.end_all(self.registry.keys_of(id), &PathEnd::Unopened, ctx);
            }
        }
    }
}
