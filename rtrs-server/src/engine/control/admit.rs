//! Admission of connections, and INFO_REQ, which ends the handshake of a path.

use std::sync::Arc;

use rtrs_core::fabric::{ConnRequest, Who};
use rtrs_core::identity::SessionTag;
use rtrs_core::ids::{ConnIndex, CoreIndex, ProviderIndex, SessionId};
use rtrs_core::limits::Limits;
use rtrs_core::proto::quota::Source;
use rtrs_core::time::Instant;
use rtrs_core::wire::{ClientExtensions, ConnReq, Name};

use super::Control;
use super::admission::{Candidate, Room};
use super::backlog::CONNECT;
use super::client_log::Opener;
use super::connect::{Attempt, refuse};
use super::path::Path;
use super::permission::{check_connect, check_session};
use super::refusal::Refusal;
use super::registry::Session;
use crate::engine::ctx::Ctx;
use crate::engine::message::ShardMessage;
use crate::path::{PathEnd, PathKey, PathShared, PeerFault};

impl Control {
    /// Processes a connection request: passes the connection to its shard, or refuses it.
    pub fn handle_request(
        &mut self,
        provider: ProviderIndex,
        request: ConnRequest,
        ctx: &mut Ctx<'_>,
    ) {
        self.backlog.spend(CONNECT);
        match self.admit(provider, &request, ctx) {
            Ok((path, cid)) => {
                let waiting = self.registry.path_mut(path.key);
                let request = waiting.and_then(|waiting| waiting.hold(cid, request));
                if let Some(request) = request {
                    self.connector.accept(path, cid, request, ctx);
                }
            }
            Err(refusal) => {
                self.refused.count(refusal.reason());
                self.log.refused(ctx.now, request.peer, &request.identity.who, &refusal);
                refuse(provider, request, &refusal, ctx);
            }
        }
    }

    fn admit(
        &mut self,
        provider: ProviderIndex,
        request: &ConnRequest,
        ctx: &mut Ctx<'_>,
    ) -> Result<(Arc<PathShared>, ConnIndex), Refusal> {
        let conn = ConnReq::decode(request.private_data.as_bytes()).map_err(Refusal::Wire)?;
        // Checked first, so that a client without access learns nothing else.
        let can = self.authenticator.is_some() && request.identity.who == Who::Anonymous;
        let asks = ClientExtensions::decode(&conn.ext).authenticates;
        let must_authenticate =
            can && asks && ctx.fabrics[provider.index()].capabilities().takes_proofs;
        let attempt = Attempt { provider, request, conn: &conn, must_authenticate };
        let id = conn.session_id;
        check_connect(&self.exports, attempt, &self.registry).map_err(|refusal| match refusal {
            Refusal::NotAllowed(why) if can => Refusal::Nameless(why),
            refusal => refusal,
        })?;
        if self.is_stopping() {
            return Err(Refusal::Stopping);
        }
        if self.params.ping_only {
            return Err(Refusal::PingOnly);
        }
        if self.evicted.contains(conn.session_id) {
            return Err(Refusal::Evicted(self.params.eviction_key.secret(conn.session_id)));
        }
        let source = Source::of(request.peer.ip());
        let crowd = match must_authenticate {
            true => self.connector.room_unproved(attempt, &self.registry, ctx)?,
            false => Vec::new(),
        };
        let candidate = Candidate { session: id, source, must_authenticate };
        self.make_room(&conn, candidate, ctx)?;
        let known = self.registry.session(id).is_some();
        let (key, deadline) = self.connector.path_of(attempt, &mut self.registry, ctx)?;
        self.registry.arm(key, deadline);
        // Not earlier, when the path might still be refused: they would end in vain.
        for other in crowd {
            self.refused.count("strangers-ended");
            self.end_path(other, &PathEnd::CrowdedUnproved, ctx);
        }
        let path = self.registry.path_mut(key).ok_or(Refusal::PathExists)?;
        let shard = self.connector.shard_of(conn.cid, &path.shared().session);
        if !must_authenticate && path.is_replaced_by(&conn) {
            // Makes room for the next attempt.
            self.end_path(key, &PathEnd::Replaced, ctx);
            return Err(Refusal::PathExists);
        }
        if path.shared().origin.identity.proof != request.identity.proof
            || path.is_unproved() != must_authenticate
        {
            return Err(Refusal::Identity(request.identity.who.clone()));
        }
        path.join(&conn, shard)?;
        let shared = Arc::clone(path.shared());
        let opened = self.registry.session(id).is_some_and(Session::has_opened);
        self.admission.joined(candidate, opened);
        if !must_authenticate {
            self.end_others(id, ctx);
        }
        if !known {
            self.log_depth(attempt, shared.session.limits, ctx.now);
        }
        Ok((shared, conn.cid))
    }

    /// Logs that a new session has a smaller queue depth than the server offers, unless its client
    /// asked for one.
    fn log_depth(&mut self, attempt: Attempt<'_>, limits: Limits, now: Instant) {
        let Attempt { request, conn, .. } = attempt;
        let (depth, full) = (limits.queue_depth(), self.params.limits.queue_depth());
        let asked = ClientExtensions::decode(&conn.ext).queue_depth;
        if asked == 0
            && depth < full
            && let Some(left_out) = self.log.admit(now, request.peer, "depth")
        {
            let session = SessionTag::of(conn.session_id);
            tracing::info!(%session, depth, left_out, "memory-max: a smaller queue depth");
        }
    }

    /// Makes room for a connection by ending unproven sessions, if possible.
    fn make_room(
        &mut self,
        conn: &ConnReq,
        candidate: Candidate,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), Refusal> {
        loop {
            let exists = self.registry.session(candidate.session).map(Session::has_opened);
            if exists.is_none() && !conn.first_conn {
                return Err(Refusal::NoSession);
            }
            let sessions = self.registry.session_count();
            match self.admission.room(candidate, exists, sessions, ctx.now)? {
                Room::Free => return Ok(()),
                Room::After(stranger) => {
                    self.admission.crowded_out(stranger);
                    self.refused.count("strangers-ended");
                    self.end_session(stranger, &PathEnd::Crowded, ctx);
                }
            }
        }
    }

    /// Ends paths that disagree with the session, now that its client is known.
    pub(super) fn end_others(&mut self, id: SessionId, ctx: &mut Ctx<'_>) {
        let Some(session) = self.registry.session(id) else { return };
        let others = self.registry.paths_of(id).filter(|path| !session.is_of(path));
        let others: Vec<PathKey> = others.map(Path::key).collect();
        others.iter().for_each(|key| self.end_path(*key, &PathEnd::OtherClient, ctx));
    }

    /// Refuses a path because another session has the requested name.
    pub(super) fn refuse_name(&mut self, key: PathKey, name: Name, who: &Who, ctx: &mut Ctx<'_>) {
        let Some(path) = self.registry.path(key) else { return };
        let (id, peer) = (path.shared().session.id, path.shared().origin.peer);
        let of_name = |session: &&Session| session.name() == Some(name);
        let has: Vec<_> = self.registry.sessions().filter(of_name).map(Session::id).collect();
        self.hurry(&has, id, ctx);
        let refusal = Refusal::NameTaken(String::from_utf8_lossy(name.as_bytes()).into_owned());
        self.refused.count(refusal.reason());
        self.log.refused(ctx.now, peer, who, &refusal);
        let Refusal::NameTaken(name) = refusal else { return };
        self.end_path(key, &PathEnd::NameTaken(name), ctx);
    }

    /// Processes INFO_REQ: validates it, creates the chunks, and lets the shard of connection 0
    /// answer.
    pub(super) fn info(&mut self, key: PathKey, bytes: &[u8], ctx: &mut Ctx<'_>) {
        let Some(path) = self.live_path(key) else { return };
        // No INFO_REQ is expected if the path is already ending.
        let Some(admitted) = path.admit(bytes) else { return };
        let shared = Arc::clone(path.shared());
        let name = match admitted {
            Ok(name) => name,
            Err(error) => return self.end_path(key, &PathEnd::Peer(PeerFault::Info(error)), ctx),
        };
        let id = shared.session.id;
        let unproved = shared.is_unproved();
        // A client that has not authenticated must not learn which names exist.
        if !unproved && self.evicted.is_taken(name, id, &self.registry) {
            let who = shared.session.name_of_client();
            return self.refuse_name(key, name, &who, ctx);
        }
        let client = shared.client();
        if !unproved
            && check_session(&self.exports.access(), &self.exports, client, id, &self.registry)
                .is_err()
        {
            return self.end_path(key, &PathEnd::NotAllowed, ctx);
        }
        if let Err(error) = self.connector.make_chunks(&shared, &mut self.registry) {
            return self.end_path(key, &PathEnd::Unserved(error.to_string()), ctx);
        }
        let Some(path) = self.registry.path_mut(key) else { return };
        path.connected();
        ctx.out.shard(CoreIndex(0), ShardMessage::Serve { path: key });
        if let Some(proving) = path.proving_mut() {
            // Until then the path belongs to no client, and changes nothing in the session.
            proving.begin(name);
            return;
        }
        self.path_up(&shared, name, ctx);
    }

    /// Completes the handshake of a path whose client is known.
    pub(super) fn path_up(&mut self, shared: &PathShared, name: Name, ctx: &mut Ctx<'_>) {
        let (id, key) = (shared.session.id, shared.key);
        let (peer, transport) = (shared.origin.peer, shared.origin.transport);
        if shared.identity().cipher.is_some() {
            self.log.proved(shared);
        }
        let who = shared.session.name_of_client();
        let client = Opener { name: Some(name), session: id, peer, who };
        if self.log.connected(ctx.now, &client, shared.session.has_opened()) {
            let session = SessionTag::of(id);
            tracing::info!(path = %key, transport, %peer, %session, %name, "path connected");
        }
        let Some(session) = self.registry.session_mut(id) else { return };
        session.set_name(name);
        if session.has_opened() {
            self.make_known(id, ctx);
        }
    }
}
