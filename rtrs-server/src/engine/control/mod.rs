//! The control engine, which runs only on shard 0 and manages sessions and paths.
//!
//! The engine handles rare events, and favors safety over speed. Each part owns its state and does
//! not depend on the others; this file connects them:
//!
//! - `registry.rs`: table of sessions and paths; `path.rs`: lifecycle of one path, with
//!   `handshake.rs` and `path_shards.rs`;
//! - `admit.rs`: admission of connections; `info.rs`: INFO_REQ, which ends the handshake;
//!   `authenticate.rs`: authentication of clients, with `proofs.rs` and `proving.rs`;
//! - `permission.rs`: checks of the access lists; `limiter`: limits for clients that have proved
//!   nothing; `refusal.rs`: reasons for refusals; `known.rs`: addresses of sessions;
//! - `connect.rs`: resources of a path; `memory.rs`: queue depth of a session; `chunk_pool.rs`:
//!   memory of earlier paths;
//! - `client_log.rs`: log messages about clients;
//! - `open.rs`: opens and closes of exports, with `open_modes.rs`, `close.rs` and `ended.rs`;
//! - `exports.rs` changes to exports; `removed.rs` removed exports that sessions had open;
//!   `announce.rs`: devices that clients must reopen;
//! - `backlog.rs`: queue of client requests; `requests.rs`: scheduling of client requests;
//! - `discover.rs`: DISCOVER; `fence.rs`: FENCE; `gateway.rs`: MOVE;
//! - `ends.rs`: ends of paths and sessions;
//! - `admin.rs`: the operator's commands; `drain.rs`: the shutdown of the server.

mod admin;
mod admit;
mod announce;
mod authenticate;
mod backlog;
mod chunk_pool;
mod client_log;
mod close;
mod connect;
mod discover;
mod drain;
mod ended;
mod ends;
mod exports;
mod fence;
mod gateway;
mod handshake;
mod info;
mod known;
mod limiter;
mod memory;
mod open;
pub mod open_modes;
mod path;
mod path_shards;
mod permission;
mod proofs;
mod proving;
mod refusal;
mod registry;
mod removed;
mod requests;
mod writers;

use std::net::SocketAddr;
use std::sync::Arc;

use rtrs_core::gateway::GatewayEvent;
use rtrs_core::ids::{CoreIndex, ProviderIndex};
use rtrs_core::proto::Heartbeat;
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::{AccessMode, Name, OpenRefusal, errno};

pub use self::connect::DRAINING_MAX;
pub(crate) use self::refusal::REASONS;

use self::admin::{Evicted, lost_portals};
use self::backlog::{Backlog, Waiting};
use self::client_log::{Asked, ClientLog, Opener};
use self::connect::Connector;
use self::discover::Lists;
use self::drain::{Drain, Order};
use self::fence::{Fencing, Own, fence};
use self::known::KnownPeers;
use self::limiter::Limiter;
use self::open::Opens;
use self::permission::{OpenCheck, check_open, identities, revoked, to_end};
use self::proofs::{NOT_PROVED, Proofs};
use self::registry::Registry;
use crate::audit::AuditSink;
use crate::engine::authenticator::Authenticator;
use crate::engine::ctx::Ctx;
use crate::engine::finder::{OpenMode, Search};
use crate::engine::message::{
    AdminReply, AdminReplyTo, AdminRequest, ControlAnswer, ControlMessage, ControlRequest, ReplyTo,
    ShardMessage,
};
use crate::engine::session::{SessionParams, SessionShared};
use crate::export::{Export, ExportTable, Lookup};
use crate::path::state::PathState;
use crate::path::{PathEnd, PathKey};
use crate::stats::{MemorySnapshot, SessionSnapshot};

/// Interval between checks of whether a device with cached memory was removed.
const LOOK_FOR_REMOVED: Duration = Duration::from_secs(1);

/// Path over which a session opened an export.
#[derive(Clone, Copy)]
struct OpenedBy<'a> {
    session: &'a SessionShared,
    path: PathKey,
    /// Address of the client.
    peer: SocketAddr,
}

/// Parts of the control shard.
#[derive(Debug)]
pub struct Control {
    params: SessionParams,
    exports: Arc<ExportTable>,
    registry: Registry,
    limiter: Limiter,
    known: KnownPeers,
    connector: Connector,
    opens: Opens,
    backlog: Backlog,
    lists: Lists,
    evicted: Evicted,
    drain: Drain,
    log: ClientLog,
    proofs: Proofs,
    next: Option<Instant>,
}

impl Control {
    /// Creates the control engine for a server without sessions.
    pub fn new(params: SessionParams, exports: Arc<ExportTable>) -> Self {
        Self {
            params,
            registry: Registry::default(),
            limiter: Limiter::new(&params),
            known: KnownPeers::default(),
            connector: Connector::new(params, Arc::clone(&exports)),
            opens: Opens::new(params, Arc::clone(&exports)),
            exports,
            backlog: Backlog::default(),
            lists: Lists::default(),
            evicted: Evicted::default(),
            drain: Drain::default(),
            log: ClientLog::default(),
            proofs: Proofs::default(),
            next: None,
        }
    }

    /// Panics if there was an internal error, which would be a bug.
    pub fn check(&self) {
        let early = rtrs_core::mutated!(SessionReleasedEarly);
        assert!(early || self.internal_errors() == 0, "internal errors, see the log");
    }

    /// Number of messages about paths that do not exist; each is a bug.
    pub fn internal_errors(&self) -> u64 {
        self.registry.internal_errors()
    }

    /// Sets the sink for audit events of clients.
    pub fn set_audit(&mut self, audit: AuditSink) {
        self.log.set_audit(audit);
    }

    /// Requires clients that can authenticate to do so.
    pub fn set_authenticator(&mut self, authenticator: Arc<dyn Authenticator>) {
        self.proofs.set_authenticator(authenticator);
    }

    /// Whether a stop was requested.
    pub fn is_stopping(&self) -> bool {
        self.drain.is_stopping()
    }

    /// State of all sessions and paths, for people and programs.
    pub fn snapshot(&self, now: Instant) -> Vec<SessionSnapshot> {
        let (registry, opens) = (&self.registry, &self.opens);
        let all = registry.sessions();
        all.map(|session| self.evicted.snapshot(session, registry, opens, now)).collect()
    }

    /// Processes a message from a shard.
    pub fn handle_message(&mut self, message: ControlMessage, ctx: &mut Ctx<'_>) {
        match message {
            ControlMessage::Info { path, bytes } => {
                self.backlog.spend(backlog::CONNECT);
                self.info(path, &bytes, ctx);
            }
            ControlMessage::Serving { path } => {
                let SessionParams { heartbeat_interval, heartbeat_missed_max, .. } = self.params;
                if let Some(path) = self.registry.live_path(path) {
                    let beat = Heartbeat::new(heartbeat_interval, heartbeat_missed_max, ctx.now);
                    let (key, next) = (path.key(), path.serving(beat));
                    self.registry.arm(key, next);
                    // The open timeout of a session that has not opened an export yet.
                    let since = self.registry.unopened_since(key);
                    let until = since.map(|since| since + self.params.open_timeout);
                    self.next = earliest(self.next, until);
                }
            }
            ControlMessage::Announced { path, at, next } => {
                let next = next.min(self.params.heartbeat_idle_max);
                if let Some(path) = self.registry.live_path(path) {
                    let (key, next) = (path.key(), path.announced(at, next));
                    self.registry.arm_anew(key, next);
                }
            }
            ControlMessage::Request { reply_to, request } => {
                self.backlog.spend(backlog::TAKE);
                let waiting = Waiting { reply_to, request, draft: None };
                self.backlog.put_off(waiting, &mut self.registry);
            }
            ControlMessage::Found(found) => {
                let (search, result) = *found;
                self.found(&search, result, ctx);
            }
            ControlMessage::Proof(done) => self.proof_done(*done, ctx),
            ControlMessage::Retired { close } => self.opens.retired(close, ctx.out),
            ControlMessage::HeartbeatAck { path, at } => {
                let path = self.registry.live_path(path);
                path.into_iter().for_each(|path| path.heartbeat_acked(at));
            }
            ControlMessage::Resized(export) => {
                let changed = exports::devices_of(export, &self.opens, &self.registry);
                exports::announce(&changed, &mut self.registry, ctx.out);
            }
            ControlMessage::Gateway(export, GatewayEvent::Active) => {
                let changed = exports::devices_of(export, &self.opens, &self.registry);
                exports::announce(&changed, &mut self.registry, ctx.out);
            }
            ControlMessage::Gateway(export, GatewayEvent::Standby) => {
                let users = self.opens.users(export).to_vec();
                for (id, _) in users {
                    self.end_all(self.registry.keys_of(id), &PathEnd::Moved, ctx);
                }
            }
            ControlMessage::Broken { path, end } => self.end_path(path, &end, ctx),
            ControlMessage::Ending { path, core, report } => self.report(path, core, report, ctx),
            // A signal accelerates a drain.
            ControlMessage::Shutdown => self.stop(Duration::ZERO, self.params.shutdown_grace, ctx),
            ControlMessage::Admin { request, reply } => self.admin(request, reply, ctx),
        }
    }

    /// Serves a request from a client. Returns `None` if the answer is sent later or is not needed.
    fn request(
        &mut self,
        reply_to: ReplyTo,
        request: ControlRequest,
        ctx: &mut Ctx<'_>,
    ) -> Option<ControlAnswer> {
        self.registry.live_path(reply_to.path)?;
        let path = self.registry.path(reply_to.path)?;
        let session = Arc::clone(&path.shared().session);
        match request {
            ControlRequest::Open { name, mode } => self.serve_open(reply_to, &name, mode, ctx),
            ControlRequest::Move(wanted) => Some(gateway::answer(wanted, &session, &self.exports)),
            ControlRequest::Close { device } => {
                let client = Opener::of(session.id, path.shared().origin.peer, &self.registry);
                self.log.closed(&client, &session, &self.exports, Some(device));
                self.opens.close(&session, device, reply_to, ctx)
            }
            // Served separately (`requests.rs`).
            ControlRequest::Discover { .. } => Some(ControlAnswer::Refused(errno::EINVAL)),
            ControlRequest::Challenge { challenge, room } => {
                self.proofs.challenge(reply_to, challenge, room, &mut self.registry)
            }
            ControlRequest::Auth { version, proof } => {
                let peer = path.shared().origin.peer;
                let answer = self.proofs.auth(reply_to, version, proof, &mut self.registry);
                answer.unwrap_or_else(|why| {
                    self.log.authentication_failed(ctx.now, peer, &why);
                    NOT_PROVED
                })
            }
            ControlRequest::Fence(asked) => {
                let own = Own::of(&self.params, &self.exports);
                let unproved = self.registry.unproved_covered(session.id, &asked);
                match fence(path, &asked, &self.registry, &own) {
                    Fencing::Answer(answer) => {
                        if answer == ControlAnswer::Done {
                            self.end_all(unproved, &PathEnd::Fenced, ctx);
                        }
                        Some(answer)
                    }
                    Fencing::End(key) => {
                        self.end_all(unproved, &PathEnd::Fenced, ctx);
                        self.registry
                            .path_mut(key)
                            .into_iter()
                            .for_each(|p| p.shards.fence(reply_to));
                        self.end_path(key, &PathEnd::Fenced, ctx);
                        rtrs_core::mutated!(FenceBeforeStopped).then_some(ControlAnswer::Done)
                    }
                }
            }
        }
    }

    /// Serves an OPEN. Returns `None` if the answer is sent later or is not needed.
    fn serve_open(
        &mut self,
        reply_to: ReplyTo,
        name: &Name,
        mode: OpenMode,
        ctx: &mut Ctx<'_>,
    ) -> Option<ControlAnswer> {
        let path = self.registry.path(reply_to.path)?;
        let session = Arc::clone(&path.shared().session);
        let origin = &path.shared().origin;
        let (peer, takes_standby) = (origin.peer, origin.takes_standby);
        // The session may have sent the request before it was evicted.
        if self.evicted.contains(session.id) {
            return Some(ControlAnswer::Refused(errno::ESTALE));
        }
        let asking = self.registry.session_mut(session.id);
        let session_name = asking.and_then(|asking| {
            asking.set_asked(ctx.now);
            asking.name()
        });
        // Looked up before the access lists are checked: they may already apply to the next export
        // of that name.
        let found = self.exports.lookup(name.as_bytes());
        if found == Lookup::Changing && self.opens.waits(reply_to, name, mode) {
            return None;
        }
        let named = found != Lookup::Unknown;
        let (id, access) = (session.id, mode.access);
        let asked = OpenCheck { session: id, name, named, access };
        // A removed export has no access list, and its users must learn of the removal.
        if !self.opens.is_removed(id, name, mode)
            && let Some(answer) = self.deny(asked, peer, ctx)
        {
            return Some(answer);
        }
        if !takes_standby && gateway::is_standby(name, &self.exports) {
            let asked = Asked::new(*name, mode.access, &self.exports);
            let client = Opener::of(session.id, peer, &self.registry);
            let why = Some(gateway::STANDBY);
            self.log.open_refused(ctx.now, &client, asked, errno::EBUSY, why);
            return Some(ControlAnswer::Refused(errno::EBUSY));
        }
        let asked = (reply_to, (name, found), mode);
        let answer = self.opens.open(&session, session_name, asked, ctx)?;
        let asked = Asked::new(*name, mode.access, &self.exports);
        let by = OpenedBy { session: &session, path: reply_to.path, peer };
        self.opened(by, asked, &answer, ctx);
        Some(answer)
    }

    /// Processes the finder's result.
    fn found(&mut self, search: &Search, result: Result<Arc<Export>, u16>, ctx: &mut Ctx<'_>) {
        let Search { reply_to, mode, .. } = *search;
        // There is no path to answer: dropping this last reference closes the export.
        let Some(found_for) = self.registry.path(reply_to.path) else { return };
        let session = Arc::clone(&found_for.shared().session);
        let peer = found_for.shared().origin.peer;
        let (name, access) = (&search.name, mode.access);
        let asked = OpenCheck { session: session.id, name, named: false, access };
        if let Some(answer) = self.deny(asked, peer, ctx) {
            return reply_to.answer(answer, ctx.out);
        }
        let answer = match self.evicted.contains(session.id) {
            true => ControlAnswer::Refused(errno::ESTALE),
            false => self.opens.found(&session, mode, result, ctx),
        };
        let asked = Asked::new(search.name, mode.access, &self.exports);
        let by = OpenedBy { session: &session, path: reply_to.path, peer };
        self.opened(by, asked, &answer, ctx);
        reply_to.answer(answer, ctx.out);
    }

    /// Checks an open against the access lists. Returns the refusal if they do not allow it.
    fn deny(
        &mut self,
        asked: OpenCheck<'_>,
        peer: SocketAddr,
        ctx: &mut Ctx<'_>,
    ) -> Option<ControlAnswer> {
        let why = check_open(&self.exports, &self.registry, asked).err()?;
        let client = Opener::of(asked.session, peer, &self.registry);
        let asked = Asked::new(*asked.name, asked.access, &self.exports);
        self.log.refused.count("access");
        self.log.open_refused(ctx.now, &client, asked, errno::EACCES, Some(&why));
        Some(ControlAnswer::RefusedWith(errno::EACCES, OpenRefusal::new(&why).encode()))
    }

    /// Logs and records an open that arrived over a path, before the answer is sent.
    fn opened(
        &mut self,
        by: OpenedBy<'_>,
        asked: Asked,
        answer: &ControlAnswer,
        ctx: &mut Ctx<'_>,
    ) {
        let OpenedBy { session, path, peer } = by;
        let device = self.opens.device_of(session, asked.export(), answer);
        exports::opened_again(path, device, &mut self.registry, ctx.out);
        self.note_open(session, answer, ctx);
        let client = Opener::of(session.id, peer, &self.registry);
        match answer {
            ControlAnswer::Refused(errno) => {
                let migrates = asked.access == AccessMode::Migration;
                let denied = migrates && self.opens.denies_migration(asked.export());
                let why = (denied && *errno == errno::EPERM)
                    .then_some("the export does not allow migration");
                if *errno == errno::EPERM {
                    let users = self.opens.users_of(asked.export());
                    self.registry.hurry(&users, session.id, ctx);
                }
                self.log.open_refused(ctx.now, &client, asked, *errno, why);
            }
            ControlAnswer::RefusedWith(errno, _) => {
                self.log.open_refused(ctx.now, &client, asked, *errno, None);
            }
            ControlAnswer::Opened(_) => {
                gateway::note_writer(asked.export(), asked.access, session, &self.exports);
                let identity = self.opens.identity(session, asked.export());
                self.log.opened(&client, asked, identity);
            }
            _ => {}
        }
    }

    /// Records an OPEN before the answer is sent. After the session's first successful open, its
    /// client may use all chunks of its paths, and the session counts as proven.
    fn note_open(&mut self, session: &SessionShared, answer: &ControlAnswer, ctx: &mut Ctx<'_>) {
        if !matches!(answer, ControlAnswer::Opened(_)) || session.has_opened() {
            return;
        }
        session.note_open();
        let paths = self.registry.paths_of(session.id);
        let paths = paths.filter(|path| !path.is_unproved());
        paths.filter_map(|path| path.shared().chunks.get()).for_each(|pool| pool.let_write(true));
        self.limiter.opened(session.id);
        self.known.paths_up(self.registry.make_known(session.id), ctx);
    }

    /// Executes a request from the operator.
    fn admin(&mut self, request: AdminRequest, reply: AdminReplyTo, ctx: &mut Ctx<'_>) {
        let ends = match request {
            AdminRequest::Sessions => return reply.send(self.list_sessions(ctx)),
            AdminRequest::Disconnect { session, path } => {
                self.evicted.disconnect(&session, path, &self.registry)
            }
            AdminRequest::Evict { session } => self.evicted.evict(&session, &self.registry),
            AdminRequest::Identities => return reply.send(identities(&self.registry)),
            AdminRequest::CheckAccess
            | AdminRequest::EndUnknown(_)
            | AdminRequest::WouldEnd { .. } => {
                return reply.send(self.revoke_access(request, ctx));
            }
            AdminRequest::Exports => {
                return reply.send(exports::list(&self.exports, &self.opens, &self.registry));
            }
            AdminRequest::Holders(names) => {
                return reply.send(exports::holders(&self.exports, &self.opens, names));
            }
            AdminRequest::ExportRemove { name, force } => {
                let found = exports::find(&self.exports, &name);
                let Self { opens, registry, .. } = self;
                return reply.send(found.map_or_else(AdminReply::Refused, |found| {
                    exports::remove(&found, force, opens, registry, ctx.out)
                }));
            }
            AdminRequest::ExportFreeze { name, frozen } => {
                let found = exports::find(&self.exports, &name);
                return reply.send(found.map_or_else(AdminReply::Refused, |found| {
                    exports::freeze(&found, frozen, &self.opens, &self.registry)
                }));
            }
            AdminRequest::ExportLimit { name, limits } => {
                let found = exports::find(&self.exports, &name);
                return reply.send(found.map_or_else(AdminReply::Refused, |found| {
                    exports::limit(&found, limits, &self.opens, ctx.out)
                }));
            }
            AdminRequest::Drain { .. } if self.is_stopping() => {
                Err("the server is already stopping".to_owned())
            }
            AdminRequest::Drain { within } => {
                let (sessions, within_ms) = (self.registry.session_count(), within.as_millis());
                tracing::info!(sessions, within_ms, "draining");
                // The answer is sent when the drain is complete.
                self.drain.set_reply(reply);
                return self.stop(within / 2, within, ctx);
            }
        };
        reply.send(match ends {
            Ok(ends) => {
                let answer = ends.answer();
                self.end_all(ends.paths, &ends.why, ctx);
                answer
            }
            Err(refusal) => AdminReply::Refused(refusal),
        });
    }

    /// Lists the sessions with the memory that they use and the refusals so far.
    fn list_sessions(&self, ctx: &Ctx<'_>) -> AdminReply {
        let silent = ctx.fabrics.iter().map(|fabric| fabric.crowded_out()).sum();
        let MemorySnapshot { used_bytes, max_bytes } = self.connector.memory();
        AdminReply::Sessions {
            sessions: self.snapshot(ctx.now),
            memory: MemorySnapshot { used_bytes: used_bytes + self.limiter.bytes(), max_bytes },
            lost_portals: lost_portals(ctx),
            refused: self.log.refused.all(silent),
        }
    }

    /// Ends the paths that access lists or keys no longer allow, or only reports these paths.
    fn revoke_access(&mut self, request: AdminRequest, ctx: &mut Ctx<'_>) -> AdminReply {
        let looks_only = matches!(request, AdminRequest::WouldEnd { .. });
        let (keys, why) = to_end(request, &self.exports, &self.registry);
        let lost = revoked(&keys, &self.registry);
        if !looks_only {
            self.end_all(keys, &why, ctx);
        }
        AdminReply::Revoked(lost)
    }

    /// Begins the shutdown: all paths finish after `all_in`, and end after `within`.
    fn stop(&mut self, all_in: Duration, within: Duration, ctx: &mut Ctx<'_>) {
        if !self.drain.begin(ctx.now + all_in, ctx.now + within) {
            return;
        }
        let connecting = self.registry.keys(|path| path.state() == PathState::Connecting);
        self.end_all(connecting, &PathEnd::Shutdown, ctx);
        self.advance_drain(ctx);
    }

    fn advance_drain(&mut self, ctx: &mut Ctx<'_>) {
        let wake = match self.drain.advance(ctx.now, &self.registry) {
            Order::Wait(until) => until,
            Order::Finish(keys, until) => {
                for key in keys {
                    let path = self.registry.path_mut(key);
                    path.into_iter().for_each(|path| path.finish(ctx.out));
                }
                Some(until)
            }
            Order::EndAll(until) => {
                self.end_all(self.registry.keys(|_| true), &PathEnd::Shutdown, ctx);
                Some(until)
            }
            Order::Exit => {
                drain::log_totals(&self.registry, self.log.refused.total());
                for core in 0..self.params.cores {
                    ctx.out.shard(CoreIndex(core), ShardMessage::Exit);
                }
                None
            }
        };
        self.next = earliest(self.next, wake);
    }

    /// Checks the timers and the memory registrations. Returns whether anything happened.
    pub fn poll(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let mut busy = false;
        for provider in ProviderIndex::all(ctx.fabrics.len()) {
            while let Some((peer, why)) = ctx.fabrics[provider.index()].next_refused() {
                self.log.authentication_failed(ctx.now, peer, &why);
            }
            while let Some(made) = ctx.fabrics[provider.index()].next_registration() {
                busy = true;
                let Self { connector, registry, log, .. } = self;
                let end = connector.registered(provider, made, registry, log, ctx);
                end.into_iter().for_each(|(key, end)| self.end_path(key, &end, ctx));
            }
        }
        busy |= self.log.close(ctx.now);
        let mut seen = Vec::new();
        while let Some(path) = self.registry.take_due(ctx.now) {
            seen.push((path.key(), path.poll(ctx.now, ctx.out)));
        }
        busy |= !seen.is_empty();
        for (key, (end, next)) in seen {
            self.registry.arm(key, next);
            end.into_iter().for_each(|end| self.end_path(key, &end, ctx));
        }
        busy |= self.serve_backlog(ctx);
        if self.next.is_none_or(|next| ctx.now < next) {
            return busy;
        }
        self.next = self.registry.drop_removed().then(|| ctx.now + LOOK_FOR_REMOVED);
        self.end_unopened(ctx);
        self.end_orphaned(ctx);
        self.advance_drain(ctx);
        true
    }

    /// Time of the next poll if nothing else happens.
    pub fn deadline(&self) -> Option<Instant> {
        earliest(earliest(self.next, self.registry.next_timer()), self.log.deadline())
    }
}
