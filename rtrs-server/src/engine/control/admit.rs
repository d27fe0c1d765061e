//! Admission of connections: from the bytes of CON_REQ to joining a path, or a refusal.
//!
//! [`admit`] reads from top to bottom. The order of the checks determines what a client learns: a
//! client without access learns nothing else, and no session or path is closed for a connection
//! that an earlier check refuses. The checks themselves are in `permission.rs` (access), `limiter`
//! (limits for clients that have proved nothing), `connect.rs` (paths and memory) and `path.rs`
//! (connections of a path).

use std::sync::Arc;

use rtrs_core::fabric::{ConnRequest, Who};
use rtrs_core::identity::SessionTag;
use rtrs_core::ids::{ConnIndex, ProviderIndex, SessionId};
use rtrs_core::limits::Limits;
use rtrs_core::proto::quota::Source;
use rtrs_core::wire::{ClientExtensions, ConnReq};

use super::Control;
use super::backlog::CONNECT;
use super::connect::{Attempt, Connector, Tables, check_session_exists, refuse};
use super::info::end_others;
use super::limiter::{Candidate, Decision};
use super::permission::check_connect;
use super::refusal::Refusal;
use super::registry::Session;
use crate::engine::ctx::Ctx;
use crate::path::{PathEnd, PathKey, PathShared};

/// Path of an admitted connection, and the connection's index.
#[derive(Debug)]
struct Admitted {
    path: Arc<PathShared>,
    cid: ConnIndex,
}

impl Control {
    /// Processes a connection request: passes the connection to its shard, or refuses it.
    pub fn handle_request(
        &mut self,
        provider: ProviderIndex,
        request: ConnRequest,
        ctx: &mut Ctx<'_>,
    ) {
        self.backlog.spend(CONNECT);
        match admit(self, provider, &request, ctx) {
            Ok(Admitted { path, cid }) => {
                let waiting = self.registry.path_mut(path.key);
                let request = waiting.and_then(|waiting| waiting.handshake.hold(cid, request));
                if let Some(request) = request {
                    self.connector.accept(path, cid, request, ctx);
                }
            }
            Err(refusal) => {
                self.log.refused.count(refusal.reason());
                self.log.refused(ctx.now, request.peer, &request.identity.who, &refusal);
                refuse(provider, request, &refusal, ctx);
            }
        }
    }
}

/// Decides on a connection request.
fn admit(
    control: &mut Control,
    provider: ProviderIndex,
    request: &ConnRequest,
    ctx: &mut Ctx<'_>,
) -> Result<Admitted, Refusal> {
    let conn = ConnReq::decode(request.private_data.as_bytes()).map_err(Refusal::Wire)?;
    let id = conn.session_id;
    let can_authenticate = control.proofs.are_possible() && request.identity.who == Who::Anonymous;
    let must_authenticate = can_authenticate
        && ClientExtensions::decode(&conn.ext).authenticates
        && ctx.fabrics[provider.index()].capabilities().takes_proofs;
    let attempt = Attempt { provider, request, conn: &conn, must_authenticate };
    let source = Source::of(request.peer.ip());
    let candidate = Candidate { session: id, source, must_authenticate };

    check_connect(&control.exports, attempt, &control.registry)
        .map_err(|refusal| refusal.with_hint(can_authenticate))?;
    check_server(control, id)?;
    let yielding = paths_that_yield(control, attempt, ctx)?;
    check_session_exists(&conn, &control.registry)?;
    // Checked before making room, so that a refused connection costs no other session anything.
    check_path(control, attempt, ctx)?;
    make_room(control, candidate, ctx)?;

    let is_new = control.registry.session(id).is_none();
    let Control { registry, limiter, connector, .. } = control;
    let (key, deadline) = connector.path_of(attempt, Tables { registry, limiter }, ctx)?;
    control.registry.arm(key, deadline);
    // The other paths are closed only now: until here, the new path could have been refused, and
    // the other paths would have been closed for nothing.
    for other in yielding {
        control.log.refused.count("strangers-ended");
        control.end_path(other, &PathEnd::CrowdedUnproved, ctx);
    }
    let path = join(control, key, &conn)?;

    let opened = control.registry.session(id).is_some_and(Session::has_opened);
    control.limiter.joined(candidate, opened);
    if !must_authenticate {
        end_others(control, id, ctx);
    }
    if is_new {
        log_depth(control, attempt, path.session.limits, ctx);
    }
    Ok(Admitted { path, cid: conn.cid })
}

/// Checks whether this server accepts connections, and whether it accepts connections of this
/// session.
fn check_server(control: &Control, id: SessionId) -> Result<(), Refusal> {
    if control.is_stopping() {
        return Err(Refusal::Stopping);
    }
    if control.params.ping_only {
        return Err(Refusal::PingOnly);
    }
    if control.evicted.contains(id) {
        return Err(Refusal::Evicted(control.params.eviction_key.secret(id)));
    }
    Ok(())
}

/// Selects the unauthenticated paths that must end if a connection is admitted.
fn paths_that_yield(
    control: &Control,
    attempt: Attempt<'_>,
    ctx: &Ctx<'_>,
) -> Result<Vec<PathKey>, Refusal> {
    let Control { registry, limiter, connector, .. } = control;
    if !attempt.must_authenticate {
        return Ok(Vec::new());
    }
    match connector.newcomer(attempt, registry, ctx)? {
        Some(newcomer) => limiter.room(newcomer, registry, ctx.now),
        None => Ok(Vec::new()),
    }
}

/// Checks whether the connection can join its path, or whether its session may have the new path.
fn check_path(
    control: &mut Control,
    attempt: Attempt<'_>,
    ctx: &mut Ctx<'_>,
) -> Result<(), Refusal> {
    let Attempt { request, conn, must_authenticate, .. } = attempt;
    let Control { registry, connector, .. } = &*control;
    let Some(path) = Connector::path_to_join(attempt, registry) else {
        return connector.check_new_path(attempt, registry, ctx);
    };
    if !must_authenticate && path.is_replaced_by(conn) {
        // Make room for the next attempt.
        let key = path.key();
        control.end_path(key, &PathEnd::Replaced, ctx);
        return Err(Refusal::PathExists);
    }
    if path.shared().origin.identity.proof != request.identity.proof
        || path.is_unproved() != must_authenticate
    {
        return Err(Refusal::Identity(request.identity.who.clone()));
    }
    path.check_join(conn)
}

/// Makes room for a connection by evicting unproven sessions, if necessary and possible.
fn make_room(
    control: &mut Control,
    candidate: Candidate,
    ctx: &mut Ctx<'_>,
) -> Result<(), Refusal> {
    loop {
        match control.limiter.decide(candidate, &control.registry, ctx.now)? {
            Decision::Accept => return Ok(()),
            Decision::AcceptAfterEvicting(session) => {
                control.limiter.evicting(session);
                control.log.refused.count("strangers-ended");
                control.end_all(control.registry.keys_of(session), &PathEnd::Crowded, ctx);
            }
        }
    }
}

/// Adds a connection to its path.
fn join(control: &mut Control, key: PathKey, conn: &ConnReq) -> Result<Arc<PathShared>, Refusal> {
    let path = control.registry.path_mut(key).ok_or(Refusal::PathExists)?;
    let shard = control.connector.shard_of(conn.cid, &path.shared().session);
    path.join(conn, shard)?;
    Ok(Arc::clone(path.shared()))
}

/// Logs that a new session has a smaller queue depth than the server offers, unless its client
/// asked for one.
fn log_depth(control: &mut Control, attempt: Attempt<'_>, limits: Limits, ctx: &Ctx<'_>) {
    let Attempt { request, conn, .. } = attempt;
    let (depth, full) = (limits.queue_depth(), control.params.limits.queue_depth());
    let asked = ClientExtensions::decode(&conn.ext).queue_depth;
    if asked == 0
        && depth < full
        && let Some(left_out) = control.log.admit(ctx.now, request.peer, "depth")
    {
        let session = SessionTag::of(conn.session_id);
        tracing::info!(
            %session, depth, left_out,
            "reduced the queue depth of a new session (memory-max)"
        );
    }
}
