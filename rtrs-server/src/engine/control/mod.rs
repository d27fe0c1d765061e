//! The control core's part: which sessions and paths exist, and what becomes of them.
//!
//! Rare and careful. Sessions are found by `paths_uuid`, paths by `sess_uuid`; connection
//! requests are judged here and handed to the core they belong to; INFO_REQ is taken, chunk pools
//! are made, heartbeats counted, half-open paths timed out, and the ends of paths collected from
//! all cores. Beside it: exports are opened and closed in `open.rs`, the operator's commands
//! answered in `admin.rs`, the server's end stands in `drain.rs`. Every state change of a path goes
//! through its table and is published to the cores. Runs on core 0 only; knows time only as an
//! argument.

pub mod access;
mod admin;
mod chunk_pool;
mod close;
mod drain;
mod ended;
mod fence;
mod open;
mod registration;

use std::collections::BTreeMap;
use std::sync::Arc;

use rtrs_core::fabric::{ConnRequest, PdUse};
use rtrs_core::ids::{ConnIndex, CoreIndex, SessionId};
use rtrs_core::limits::{CONNECTION_BUFFERS_MAX, PATHS_PER_SESSION_MAX};
use rtrs_core::proto::{Heartbeat, HeartbeatAction, step};
use rtrs_core::time::{Instant, earliest};
use rtrs_core::wire::{ConnReq, Name};

use self::access::AccessBook;
use self::admin::Evicted;
use self::chunk_pool::{Spare, Spares};
use self::close::Closings;
use self::drain::Stop;
use self::ended::Ended;
use self::fence::Asker;
use self::registration::{Making, refuse};
use crate::engine::ctx::Ctx;
use crate::engine::message::{
    AcceptOrder, AdminReply, ControlAnswer, ControlMessage, ShardMessage,
};
use crate::engine::session::{SessionParams, SessionShared};
use crate::export::ExportTable;
use crate::listener::{Refusal, acceptance};
use crate::path::chunks::{ChunkPool, MessageBuffers};
use crate::path::handshake::{InfoError, Joining};
use crate::path::state::PathState;
use crate::path::{PathEnd, PathKey, PathOrigin, PathShared, PeerFault, core_of};
use crate::stats::IoTotals;

/// Dead paths of a session whose block IO may run, or whose connections may be closing yet.
/// One more is not let in: their memory would add up.
pub const DRAINING_MAX: usize = 4;

#[derive(Debug)]
pub(super) struct Path {
    shared: Arc<PathShared>,
    state: PathState,
    recon_cnt: u16,
    /// Since its first connection.
    since: Instant,
    joining: Option<Joining>,
    /// What its chunks wait for; its connections wait with them.
    making: Option<Making>,
    heartbeat: Option<Heartbeat>,
    /// Cores that were given a connection of it, with what they still owe.
    cores: Vec<CoreDebt>,
    /// Who is told when nothing of it begins any more.
    fenced_by: Vec<Asker>,
}

/// What a core has not yet told about a path.
#[derive(Clone, Copy, Debug)]
pub(super) struct CoreDebt {
    core: CoreIndex,
    finished: bool,
    stopped: bool,
    drained: bool,
}

#[derive(Debug)]
pub(super) struct Session {
    shared: Arc<SessionShared>,
    name: Option<Name>,
    paths: Vec<PathKey>,
    /// Since its first connection.
    since: Instant,
    /// What its paths did that are gone.
    gone: IoTotals,
    /// What they left for those that come.
    spares: Spares,
}

/// Sessions and paths of a server.
#[derive(Debug)]
pub struct Control {
    params: SessionParams,
    exports: Arc<ExportTable>,
    access: AccessBook,
    sessions: BTreeMap<SessionId, Session>,
    paths: BTreeMap<PathKey, Path>,
    evicted: Evicted,
    closings: Closings,
    ended: Ended,
    stop: Option<Stop>,
    /// Who asked for a drain.
    drain: Option<AdminReply>,
    last_key: u32,
    next: Option<Instant>,
}

impl Control {
    /// A server without sessions.
    pub fn new(params: SessionParams, exports: Arc<ExportTable>) -> Self {
        Self {
            params,
            access: AccessBook::new(exports.len()),
            exports,
            sessions: BTreeMap::new(),
            paths: BTreeMap::new(),
            evicted: Evicted::default(),
            closings: Closings::default(),
            ended: Ended::default(),
            stop: None,
            drain: None,
            last_key: 0,
            next: None,
        }
    }

    /// True from the moment a stop was asked for.
    pub fn is_stopping(&self) -> bool {
        self.stop.is_some()
    }

    /// Sessions that exist.
    pub fn session_count(&self) -> usize {
        self.sessions.len()
    }

    /// A peer asks for a connection on the provider of that index: it is handed to its core, or
    /// refused.
    pub fn handle_request(&mut self, provider: u8, request: ConnRequest, ctx: &mut Ctx<'_>) {
        match self.admit_connection(provider, &request, ctx) {
            Ok((path, conn)) => {
                let waiting = self.paths.get_mut(&path.key).and_then(|path| path.making.as_mut());
                match waiting {
                    Some(making) => making.hold(conn.cid, request),
                    None => self.accept(path, conn.cid, request, ctx),
                }
            }
            Err(refusal) => refuse(provider, request, &refusal, ctx),
        }
    }

    /// Lets a connection's core accept it.
    pub(super) fn accept(
        &self,
        path: Arc<PathShared>,
        cid: ConnIndex,
        request: ConnRequest,
        ctx: &mut Ctx<'_>,
    ) {
        let core = core_of(cid, self.params.cores);
        let SessionParams { limits, always_invalidate, server_id, .. } = self.params;
        let response = acceptance(limits, always_invalidate, server_id);
        let order = AcceptOrder { path, cid, request, response };
        ctx.out.shard(core, ShardMessage::Accept(Box::new(order)));
    }

    fn admit_connection(
        &mut self,
        provider: u8,
        request: &ConnRequest,
        ctx: &mut Ctx<'_>,
    ) -> Result<(Arc<PathShared>, ConnReq), Refusal> {
        let conn = ConnReq::decode(request.private_data.as_bytes()).map_err(Refusal::Wire)?;
        if self.stop.is_some() {
            return Err(Refusal::Stopping);
        }
        if self.params.ping_only {
            return Err(Refusal::PingOnly);
        }
        if self.evicted.contains(conn.session_id) {
            return Err(Refusal::Evicted(self.params.eviction_key.secret(conn.session_id)));
        }
        let half_open = self.half_open();
        if half_open >= self.params.half_open_max {
            return Err(Refusal::HalfOpen(half_open));
        }
        if !self.sessions.contains_key(&conn.session_id) {
            if !conn.first_conn {
                return Err(Refusal::NoSession);
            }
            let sessions = u32::try_from(self.sessions.len()).unwrap_or(u32::MAX);
            if sessions >= self.params.sessions_max {
                return Err(Refusal::Sessions(sessions));
            }
        }
        let key = match self.path_by_uuid(&conn) {
            Some(key) => key,
            None => self.new_path(provider, request, &conn, ctx)?,
        };
        let Some(path) = self.paths.get_mut(&key) else { return Err(Refusal::PathExists) };
        let Some(joining) = path.joining.as_mut().filter(|_| path.state == PathState::Connecting)
        else {
            // The client says itself that the path we hold is dead: make room for the next try.
            let newer = conn.recon_cnt > path.recon_cnt && !rtrs_core::mutated!(OldPathKept);
            if newer && path.state == PathState::Connected {
                self.end_path(key, &PathEnd::Replaced, ctx);
            }
            return Err(Refusal::PathExists);
        };
        joining.join(conn.cid, conn.cid_num).map_err(Refusal::Join)?;
        let core = core_of(conn.cid, self.params.cores);
        if !path.cores.iter().any(|debt| debt.core == core) {
            let debt = CoreDebt { core, finished: false, stopped: false, drained: false };
            path.cores.push(debt);
        }
        Ok((Arc::clone(&path.shared), conn))
    }

    /// The path of a connection request that still has, or is losing, its connections.
    fn path_by_uuid(&self, conn: &ConnReq) -> Option<PathKey> {
        let session = self.sessions.get(&conn.session_id)?;
        session.paths.iter().copied().find(|key| {
            self.paths
                .get(key)
                .is_some_and(|path| path.shared.uuid == conn.path_uuid && path.state.may_begin())
        })
    }

    fn new_path(
        &mut self,
        provider: u8,
        request: &ConnRequest,
        conn: &ConnReq,
        ctx: &mut Ctx<'_>,
    ) -> Result<PathKey, Refusal> {
        let fabric = &mut *ctx.fabrics[usize::from(provider)];
        if let Some(session) = self.sessions.get(&conn.session_id) {
            let paths = || session.paths.iter().filter_map(|key| self.paths.get(key));
            let live = paths().filter(|path| path.state.may_begin()).count();
            if live >= PATHS_PER_SESSION_MAX {
                return Err(Refusal::Paths(live));
            }
            let draining = paths().count() - live;
            if draining >= DRAINING_MAX {
                return Err(Refusal::Draining(draining));
            }
            let ends = (request.peer.ip(), request.local.ip());
            // Two transports between two addresses are two ways.
            let same = |path: &Path| {
                path.shared.provider == provider
                    && (path.shared.peer.ip(), path.shared.local.ip()) == ends
            };
            if paths().any(|path| path.state.may_begin() && same(path)) {
                return Err(Refusal::SameAddresses);
            }
        }
        let bytes = fabric.connection_bytes() * u64::from(conn.cid_num);
        if bytes > CONNECTION_BUFFERS_MAX {
            let (connections, max) = (conn.cid_num, CONNECTION_BUFFERS_MAX);
            return Err(Refusal::Connections { connections, bytes, max });
        }
        let SessionParams { limits, always_invalidate, .. } = self.params;
        let depth = limits.queue_depth();
        let session = self.sessions.get_mut(&conn.session_id);
        let spare = session.and_then(|s| s.spares.take(provider, |pd| fabric.fits(pd, request)));
        let pd = match spare.as_ref().and_then(Spare::domain) {
            Some(pd) => Arc::clone(pd),
            None => fabric.alloc_pd(PdUse::Accept(request)).map_err(Refusal::memory)?,
        };
        let messages = MessageBuffers::new(depth, &pd).map_err(Refusal::memory)?;
        let wanted = match spare {
            Some(spare) => Some(spare.into_order(limits, &pd, always_invalidate)),
            // Where it may well be refused the peer can still be told.
            None if fabric.pins_memory() => Some(ChunkPool::fresh(limits, &pd, always_invalidate)?),
            None => None,
        };
        self.last_key += 1;
        let key = PathKey(self.last_key);
        let (mut making, mut early) = (None, None);
        if let Some(wanted) = wanted {
            match fabric.register_aside(u64::from(key.0), wanted) {
                Some(registered) => early = Some(ChunkPool::new(limits, registered?)),
                None => making = Some(Making::default()),
            }
        }
        let exports = self.exports.len();
        let session = self.sessions.entry(conn.session_id).or_insert_with(|| Session {
            shared: Arc::new(SessionShared::new(conn.session_id, depth, exports)),
            name: None,
            paths: Vec::new(),
            since: ctx.now,
            gone: IoTotals::default(),
            spares: Spares::default(),
        });
        session.paths.push(key);
        let origin = PathOrigin {
            uuid: conn.path_uuid,
            cid_num: conn.cid_num,
            provider,
            transport: fabric.scheme(),
            peer: request.peer,
            local: request.local,
        };
        let (shared, cores) = (Arc::clone(&session.shared), self.params.cores);
        let shared = PathShared::new(key, shared, origin, pd, messages, cores);
        if let Some(pool) = early {
            let _ = shared.chunks.set(pool);
        }
        let deadline = ctx.now + self.params.handshake_timeout;
        let path = Path {
            shared,
            state: PathState::Connecting,
            recon_cnt: conn.recon_cnt,
            since: ctx.now,
            joining: Some(Joining::new(conn.cid_num, deadline)),
            making,
            heartbeat: None,
            cores: Vec::new(),
            fenced_by: Vec::new(),
        };
        self.paths.insert(key, path);
        self.note_paths(conn.session_id);
        self.wake(deadline);
        tracing::debug!(path = %key, peer = %request.peer, cons = conn.cid_num, "a path connects");
        Ok(key)
    }

    /// Connections of paths whose handshake is not over.
    fn half_open(&self) -> u32 {
        let joining = self.paths.values().filter_map(|path| path.joining.as_ref());
        joining.map(|joining| u32::from(joining.present())).sum()
    }

    /// Takes a message of a shard.
    pub fn handle_message(&mut self, message: ControlMessage, ctx: &mut Ctx<'_>) {
        match message {
            ControlMessage::Info { path, bytes } => self.info(path, &bytes, ctx),
            ControlMessage::Serving { path } => self.serving(path, ctx.now),
            ControlMessage::Request { path, core, permit, request } => {
                self.request(path, core, permit, request, ctx);
            }
            ControlMessage::Found(found) => {
                let (search, result) = *found;
                self.found(&search, result, ctx);
            }
            ControlMessage::Retired { close } => self.retired(close, ctx),
            ControlMessage::HeartbeatAck { path, at } => {
                if let Some(beat) = self.paths.get_mut(&path).and_then(|p| p.heartbeat.as_mut()) {
                    beat.on_ack(at);
                }
            }
            ControlMessage::Broken { path, end } => self.end_path(path, &end, ctx),
            ControlMessage::Finished { path, core } => self.settle(path, core, ctx, |debt| {
                debt.finished = true;
            }),
            ControlMessage::Stopped { path, core } => self.settle(path, core, ctx, |debt| {
                debt.stopped = true;
            }),
            ControlMessage::Drained { path, core } => self.settle(path, core, ctx, |debt| {
                debt.drained = true;
            }),
            ControlMessage::Shutdown => self.shutdown(ctx),
            ControlMessage::Admin { ask, reply } => self.admin(ask, reply, ctx),
        }
    }

    /// INFO_REQ came: judge it, make the chunks, let connection 0's core answer.
    fn info(&mut self, key: PathKey, bytes: &[u8], ctx: &mut Ctx<'_>) {
        let Some(path) = self.paths.get(&key) else { return };
        let (PathState::Connecting, Some(joining)) = (path.state, path.joining.as_ref()) else {
            return;
        };
        let held = path.making.as_ref().map_or(0, Making::held);
        let admitted = if held > 0 { Err(InfoError::Early(held)) } else { joining.admit(bytes) };
        let name = match admitted {
            Ok(admitted) => admitted.name,
            Err(error) => return self.end_path(key, &PathEnd::Peer(PeerFault::Info(error)), ctx),
        };
        let id = path.shared.session.id;
        // One that was evicted stays until its IO has ended, and its name is free at once.
        let taken = |session: &Session| {
            let other = session.shared.id;
            other != id && session.name == Some(name) && !self.evicted.contains(other)
        };
        if self.sessions.values().any(taken) {
            let name = String::from_utf8_lossy(name.as_bytes()).into_owned();
            return self.end_path(key, &PathEnd::Peer(PeerFault::NameTaken(name)), ctx);
        }
        let shared = Arc::clone(&path.shared);
        let made = match shared.chunks.get() {
            Some(_) => Ok(()),
            None => self.make_chunks(&shared),
        };
        drop(shared);
        if let Err(error) = made {
            return self.end_path(key, &PathEnd::Unserved(error.to_string()), ctx);
        }
        let Some(path) = self.paths.get_mut(&key) else { return };
        path.joining = None;
        // Before INFO_RSP goes out: requests may follow it at once, on any core.
        path.go(PathState::Connected);
        ctx.out.shard(CoreIndex(0), ShardMessage::Serve { path: key });
        let (peer, transport) = (path.shared.peer, path.shared.transport);
        tracing::info!(path = %key, transport, %peer, session = %id, %name, "a path is up");
        if let Some(session) = self.sessions.get_mut(&id) {
            session.name = Some(name);
        }
    }

    /// INFO_RSP is on its way: heartbeats begin.
    fn serving(&mut self, key: PathKey, now: Instant) {
        let SessionParams { heartbeat_interval, heartbeat_missed_max, .. } = self.params;
        let Some(path) = self.paths.get_mut(&key) else { return };
        if path.state == PathState::Connected {
            let beat = Heartbeat::new(heartbeat_interval, heartbeat_missed_max, now);
            let deadline = beat.deadline();
            path.heartbeat = Some(beat);
            self.wake(deadline);
        }
    }

    /// Begins the end of a path. Nothing happens to one that ends already.
    pub(super) fn end_path(&mut self, key: PathKey, end: &PathEnd, ctx: &mut Ctx<'_>) {
        let Some(path) = self.paths.get_mut(&key) else { return };
        if matches!(path.state, PathState::Closing | PathState::Draining | PathState::Gone) {
            return;
        }
        let (state, peer) = (path.state, path.shared.peer);
        match end {
            // The peer can do nothing about it, and was not told.
            PathEnd::Internal(_) | PathEnd::Unserved(_) => {
                tracing::warn!(path = %key, %peer, reason = %end, "a path ends")
            }
            _ => tracing::info!(path = %key, %peer, ?state, reason = %end, "a path ends"),
        }
        path.joining = None;
        path.making = None;
        path.heartbeat = None;
        path.go(PathState::Closing);
        for debt in &path.cores {
            let mail = ShardMessage::Close { path: key, abrupt: end.is_abrupt() };
            ctx.out.shard(debt.core, mail);
        }
        if path.cores.is_empty() {
            self.advance_end(key, ctx);
        }
    }

    /// A core told something about the end of a path.
    fn settle(
        &mut self,
        key: PathKey,
        core: CoreIndex,
        ctx: &mut Ctx<'_>,
        note: impl Fn(&mut CoreDebt),
    ) {
        let Some(path) = self.paths.get_mut(&key) else { return };
        if let Some(debt) = path.cores.iter_mut().find(|debt| debt.core == core) {
            note(debt);
        }
        if path.state == PathState::Finishing && path.cores.iter().all(|debt| debt.finished) {
            self.end_path(key, &PathEnd::Shutdown, ctx);
        }
        self.advance_end(key, ctx);
        self.advance_stop(ctx);
    }

    fn advance_end(&mut self, key: PathKey, ctx: &mut Ctx<'_>) {
        let Some(path) = self.paths.get_mut(&key) else { return };
        if path.state == PathState::Closing && path.cores.iter().all(|debt| debt.stopped) {
            path.go(PathState::Draining);
            // Each core has stopped serving it: nothing of it can begin.
            for asker in path.fenced_by.drain(..) {
                asker.tell(ControlAnswer::Done, ctx);
            }
        }
        let drained = |debt: &CoreDebt| debt.drained || rtrs_core::mutated!(SessionGoneEarly);
        if path.state == PathState::Draining && path.cores.iter().all(drained) {
            path.go(PathState::Gone);
            let id = path.shared.session.id;
            let io = path.shared.counters.totals();
            if let Some(session) = self.sessions.get_mut(&id) {
                session.gone.add(&io);
            }
            tracing::info!(
                path = %key,
                session = %id,
                reads = io.reads,
                writes = io.writes,
                fua_writes = io.fua_writes,
                flushes = io.flushes,
                discards = io.discards,
                write_zeroes = io.write_zeroes,
                errors = io.errors,
                replays = io.replays,
                "a path is gone"
            );
            let Some(Path { shared, .. }) = self.paths.remove(&key) else { return };
            self.forget_path(id, shared, ctx);
        }
    }

    /// Takes a path from its session, which keeps its memory. The last one takes the session with
    /// it, and its opens.
    fn forget_path(&mut self, id: SessionId, path: Arc<PathShared>, ctx: &mut Ctx<'_>) {
        let live = self.paths_with_chunks(id);
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.paths.retain(|other| *other != path.key);
        if !session.paths.is_empty() {
            return session.spares.keep(path, live);
        }
        if let Some(session) = self.sessions.remove(&id) {
            session.spares.end(path);
            for device in session.shared.devices.ids() {
                let Some(entry) = session.shared.devices.close(device) else { continue };
                let export = self.exports.get(entry.export);
                if let (Some(export), Some(ledger)) =
                    (export, session.shared.devices.ledger(device))
                {
                    self.ended.keep(ctx.now, id, &export, ledger);
                }
                if !rtrs_core::mutated!(ExportKept) {
                    self.give_back(entry.export, id, ctx);
                }
            }
            for export in self.closings.forget(id) {
                self.give_back(export, id, ctx);
            }
            tracing::info!(session = %id, "a session ended");
        }
    }

    /// Looks at the timers. True when anything happened.
    pub fn poll(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let mut busy = false;
        for provider in 0..ctx.fabrics.len() {
            while let Some(made) = ctx.fabrics[provider].next_made() {
                busy = true;
                self.made(u8::try_from(provider).unwrap_or(u8::MAX), made, ctx);
            }
        }
        if self.next.is_none_or(|next| ctx.now < next) {
            return busy;
        }
        self.next = None;
        let mut ends = Vec::new();
        let mut next = None;
        for (key, path) in &mut self.paths {
            if let Some(joining) = &path.joining {
                if joining.deadline() <= ctx.now && !rtrs_core::mutated!(HandshakeKept) {
                    ends.push((*key, PathEnd::HandshakeTimeout));
                } else {
                    next = earliest(next, Some(joining.deadline()));
                }
            }
            if let Some(beat) = &mut path.heartbeat {
                beat.on_traffic(path.shared.heard());
                match beat.poll(ctx.now) {
                    HeartbeatAction::None => {}
                    HeartbeatAction::Send => {
                        ctx.out.shard(CoreIndex(0), ShardMessage::Heartbeat { path: *key });
                    }
                    HeartbeatAction::Dead if rtrs_core::mutated!(ServerKeepsSilent) => {}
                    HeartbeatAction::Dead => ends.push((*key, PathEnd::Silent)),
                }
                next = earliest(next, Some(beat.deadline()));
            }
        }
        self.next = next;
        for (key, end) in ends {
            self.end_path(key, &end, ctx);
        }
        self.advance_stop(ctx);
        true
    }

    /// When to be polled even if nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        self.next
    }

    pub(super) fn wake(&mut self, at: Instant) {
        self.next = earliest(self.next, Some(at));
    }
}

impl Path {
    pub(super) fn go(&mut self, to: PathState) {
        step(&mut self.state, to);
        self.shared.publish(to);
    }
}
