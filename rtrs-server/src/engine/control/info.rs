//! INFO_REQ, which completes a path's handshake.

use std::sync::Arc;

use rtrs_core::fabric::Who;
use rtrs_core::identity::SessionTag;
use rtrs_core::ids::{CoreIndex, SessionId};
use rtrs_core::wire::Name;

use super::Control;
use super::client_log::Opener;
use super::connect::Tables;
use super::path::Path;
use super::permission::check_session;
use super::refusal::Refusal;
use super::registry::Session;
use crate::engine::ctx::Ctx;
use crate::engine::message::ShardMessage;
use crate::path::{PathEnd, PathKey, PathShared, PeerFault};

impl Control {
    /// Processes INFO_REQ: validates it, creates the chunks, and lets the shard of connection 0
    /// answer.
    pub(super) fn info(&mut self, key: PathKey, bytes: &[u8], ctx: &mut Ctx<'_>) {
        let Some(path) = self.registry.live_path(key) else { return };
        // A path that is already ending expects no INFO_REQ.
        let Some(admitted) = path.admit(bytes) else { return };
        let shared = Arc::clone(path.shared());
        let name = match admitted {
            Ok(name) => name,
            Err(error) => {
                return refuse_info(self, key, &PathEnd::Peer(PeerFault::Info(error)), ctx);
            }
        };
        let id = shared.session.id;
        let unproved = shared.is_unproved();
        // A client that has not authenticated must not learn which names exist.
        if !unproved && self.evicted.is_taken(name, id, &self.registry) {
            let who = shared.session.name_of_client();
            return refuse_name(self, key, name, &who, ctx);
        }
        let client = shared.client();
        if !unproved
            && check_session(&self.exports.access(), &self.exports, client, id, &self.registry)
                .is_err()
        {
            return refuse_info(self, key, &PathEnd::NotAllowed, ctx);
        }
        let tables = Tables { registry: &mut self.registry, limiter: &mut self.limiter };
        if let Err(error) = self.connector.make_chunks(&shared, tables) {
            return refuse_info(self, key, &PathEnd::Unserved(error.to_string()), ctx);
        }
        let Some(path) = self.registry.path_mut(key) else { return };
        path.connected();
        ctx.out.shard(CoreIndex(0), ShardMessage::Serve { path: key });
        if let Some(proving) = path.proving_mut() {
            // Until its client has authenticated, the path belongs to no client and must not change
            // the session.
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
            self.log.proved(shared, name);
        }
        let who = shared.session.name_of_client();
        let client = Opener { name: Some(name), session: id, peer, who };
        if self.log.connected(ctx.now, &client, shared.session.has_opened()) {
            let session = SessionTag::of(id);
            tracing::info!(
                path = %key, transport, %peer, %session, client = %name, "path connected"
            );
        }
        let Some(session) = self.registry.session_mut(id) else { return };
        session.set_name(name);
        if session.has_opened() {
            self.known.paths_up(self.registry.make_known(id), ctx);
        }
    }
}

/// Ends paths that belong to other clients, now that the session's client is known.
pub(super) fn end_others(control: &mut Control, id: SessionId, ctx: &mut Ctx<'_>) {
    let Some(session) = control.registry.session(id) else { return };
    let others = control.registry.paths_of(id).filter(|path| !session.is_of(path));
    let others = others.map(Path::key).collect();
    control.end_all(others, &PathEnd::OtherClient, ctx);
}

/// Returns the refusal for a name that another session has, and requests a prompt check of whether
/// that session's client is dead. `id` is the session that requested the name.
pub(super) fn name_taken(
    control: &mut Control,
    name: Name,
    id: SessionId,
    ctx: &mut Ctx<'_>,
) -> Refusal {
    let of_name = |session: &&Session| session.name() == Some(name);
    let has: Vec<_> = control.registry.sessions().filter(of_name).map(Session::id).collect();
    control.registry.hurry(&has, id, ctx);
    Refusal::NameTaken(String::from_utf8_lossy(name.as_bytes()).into_owned())
}

/// Refuses a path because another session has the requested name.
pub(super) fn refuse_name(
    control: &mut Control,
    key: PathKey,
    name: Name,
    who: &Who,
    ctx: &mut Ctx<'_>,
) {
    let Some(path) = control.registry.path(key) else { return };
    let (id, peer) = (path.shared().session.id, path.shared().origin.peer);
    let refusal = name_taken(control, name, id, ctx);
    control.log.refused.count(refusal.reason());
    control.log.refused(ctx.now, peer, who, &refusal);
    let Refusal::NameTaken(name) = refusal else { return };
    refuse_info(control, key, &PathEnd::NameTaken(name), ctx);
}

/// Refuses INFO_REQ: reports the reason to a client that supports it, or ends the path.
fn refuse_info(control: &mut Control, key: PathKey, why: &PathEnd, ctx: &mut Ctx<'_>) {
    let path = control.registry.path_mut(key);
    if !path.is_some_and(|path| path.refuse_info(why, ctx.out)) {
        control.end_path(key, why, ctx);
    }
}
