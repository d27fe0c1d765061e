//! Control shard's part of a session: its paths, and the volumes that they open.
//!
//! Each path establishes its connections one after the other (connection 0 here, the others on
//! their shards, by message), sends INFO_REQ, receives its chunks, opens a volume and then carries
//! IO while it opens the others. Every path opens every volume, not only the first path: a server
//! that lost the session while another path seemed alive (a restart behind a silent link) must not
//! receive IO for a volume that it does not know. When the last path that serves a volume ends, the
//! volume counts as closed. When a path ends, all its connections are ended on all shards; then it
//! waits for a backoff with jitter and starts over.
//!
//! Each part owns its state and knows nothing about the others; this file connects them:
//!
//! - `paths.rs`: the set of paths;
//! - `path.rs`: one path, with `due.rs`, made of `channel.rs` (`connections.rs` and
//!   `heartbeat.rs`), `path_volumes.rs` (`path_fence.rs` and `terms.rs`: the terms agreed on for
//!   each volume, with `reopen.rs`), `attempts.rs` (`reconnect.rs` and `network.rs`),
//!   `path_proof.rs` and `leave.rs`;
//! - `fence.rs`, `silence.rs` and `path_admin.rs`: decisions about a path that depend on other
//!   paths;
//! - `volumes.rs`: the set of volumes; `volume.rs`: one volume, made of `identity.rs` (the server
//!   and export it is pinned to), `cache_epoch.rs` (the epoch of the server's cache) and
//!   `no_path.rs` (how long its IO waits);
//! - `routes.rs`: the paths and the volumes, and which path serves which volume;
//! - `opening.rs`: the order in which paths open volumes, and the answers to opens; `closing.rs`:
//!   closing of volumes and the end of the session; `steps.rs`: how these and fences affect other
//!   parts;
//! - `change.rs`: changes on request; `checks.rs`: when a turn checks what is due;
//! - `gateways.rs`: selection of the server for a volume that moves; `moving.rs`: its location;
//! - `hosts.rs`: host names that the process resolves;
//! - `bounds.rs`: limits granted by the server; `failure.rs`: failures;
//! - `view.rs`: read access for listings (`status.rs`).

mod attempts;
mod bounds;
mod cache_epoch;
pub(crate) mod change;
mod channel;
mod checks;
mod closing;
mod connections;
mod due;
pub(crate) mod failure;
mod fence;
mod gateways;
mod heartbeat;
mod hosts;
pub(crate) mod identity;
mod leave;
mod link_down;
mod moving;
pub(crate) mod network;
pub(in crate::engine) mod no_path;
mod opening;
mod path;
mod path_admin;
mod path_fence;
mod path_proof;
mod path_volumes;
pub(in crate::engine) mod paths;
mod promotion;
mod reconnect;
mod reopen;
mod routes;
mod silence;
pub(crate) mod status;
mod steps;
mod terms;
pub(in crate::engine) mod view;
mod volume;
mod volumes;

use std::net::IpAddr;
use std::sync::Arc;

use rtrs_core::fabric::{CloseReason, WorkCompletion};
use rtrs_core::identity::ServerId;
use rtrs_core::ids::{ConnIndex, PathId, ProviderIndex, QpNum};
use rtrs_core::time::{Duration, Instant, earliest};

use self::bounds::Bounds;
use self::change::{Change, ChangeError, Leaving};
use self::checks::{Check, Checks, Deadlines};
use self::closing::Closing;
use self::due::{Due, End};
use self::failure::SessionFailure;
use self::gateways::Takeover;
use self::heartbeat::Finding;
use self::hosts::Hosts;
use self::identity::PinnedServer;
use self::leave::Why;
use self::opening::{OpenAnswer, OpenRefused, Opening};
use self::routes::Routes;
use self::view::SessionView;
use self::volumes::first_server;
use crate::engine::ctx::Ctx;
use crate::engine::message::{ConnectionEnd, ControlMessage, ShardMessage};
use crate::engine::path_end::PathEnd;
use crate::engine::session::SessionConfig;
use crate::path::handshake::{ServiceEvent, conn_response};
use crate::path::refusal::eviction;
use crate::path::state::PathState;

/// Interval at which a path checks whether it may connect, while another path asks the server to
/// create the session.
const OPENER_POLL: Duration = Duration::from_millis(5);

struct ShardConnectionEnd {
    /// Epoch of the path that the connection belonged to.
    epoch: u32,
    cid: ConnIndex,
    why: PathEnd,
    /// Whether the peer closed the connection.
    in_order: bool,
}

/// Control shard's part of a session.
#[derive(Debug)]
pub(crate) struct SessionControl {
    config: Arc<SessionConfig>,
    routes: Routes,
    bounds: Bounds,
    opening: Opening,
    closing: Closing,
    checks: Checks,
    pub(in crate::engine) hosts: Hosts,
}

impl SessionControl {
    pub(crate) fn new(now: Instant, config: Arc<SessionConfig>, uuids: &[[u8; 16]]) -> Self {
        Self {
            routes: Routes::new(now, &config, uuids),
            bounds: Bounds::new(&config),
            opening: Opening::new(PinnedServer::new(first_server(&config))),
            closing: Closing::default(),
            checks: Checks::default(),
            hosts: Hosts::default(),
            config,
        }
    }

    /// State of the session, for listings and decisions outside the engine.
    pub(crate) fn view(&self) -> SessionView<'_> {
        SessionView {
            config: &self.config,
            paths: &self.routes.paths,
            volumes: &self.routes.volumes,
            bounds: &self.bounds,
            server: self.opening.server(),
            detaching: self.closing.is_detaching(),
        }
    }

    /// Failure of the session, if any.
    pub(crate) fn failure(&self) -> Option<&SessionFailure> {
        self.bounds.failure().or_else(|| self.routes.volumes.failure())
    }

    /// Whether paths may connect.
    fn is_running(&self) -> bool {
        !self.closing.is_detaching() && self.failure().is_none()
    }

    /// Starts a change.
    pub(crate) fn change(&mut self, change: Change, ctx: &mut Ctx<'_>) -> Result<(), ChangeError> {
        self.checks.wake();
        if self.closing.is_detaching() {
            return Err(ChangeError::Detaching);
        }
        // A refused volume is removed while the others are still being opened.
        let is_close = matches!(change, Change::CloseVolume { .. });
        if !is_close && !self.routes.volumes.were_open() {
            return Err(ChangeError::Attaching);
        }
        // No path is tried after a failure, so a change would have no effect.
        if let Some(failure) = self.failure() {
            return Err(ChangeError::Failed(failure.clone()));
        }
        match change {
            Change::Add { target, uuid, replaces } => {
                let path = self.routes.paths.add(ctx.now, target.clone(), uuid, &replaces)?;
                tracing::info!(path = %target.name, "path added");
                self.routes.notify(&ShardMessage::AddPath { path, target: Box::new(target) }, ctx);
                Ok(())
            }
            Change::Remove(leaving) => self.leave(Why::Remove, &leaving, ctx),
            Change::Disconnect(leaving) => self.leave(Why::Disconnect, &leaving, ctx),
            Change::Reconnect(leaving) => self.leave(Why::Reconnect, &leaving, ctx),
            Change::Tune(tuning) => {
                let config = Arc::new(self.config.tuned(&tuning));
                self.routes.tune(ctx.now, &config, &tuning);
                self.routes.notify(&ShardMessage::Config(Arc::clone(&config)), ctx);
                self.config = config;
                Ok(())
            }
            Change::AddVolume(volume) => {
                let export = volume.export.clone();
                let server = self.opening.server().id();
                let at = self.routes.volumes.add(ctx.now, volume, server)?;
                tracing::info!(export, "volume added");
                self.routes.notify(&ShardMessage::AddDevice(at, export.into()), ctx);
                self.open_beside(ctx);
                Ok(())
            }
            Change::CloseVolume { export } => {
                let at = self.routes.volumes.settle(&export)?;
                tracing::info!(export, "volume closed on request");
                self.routes.notify(&ShardMessage::CloseDevice(at), ctx);
                Ok(())
            }
            Change::SwitchVolume { export } => {
                let moved = gateways::send_away(&mut self.routes, &export, ctx.now)?;
                let path = &mut self.routes.paths[moved.path];
                let asked = path.volumes.ask_move(moved.volume, true, &mut path.channel, ctx);
                self.end_if_failed(moved.path, asked, ctx);
                Ok(())
            }
        }
    }

    fn leave(&mut self, why: Why, leaving: &Leaving, ctx: &mut Ctx<'_>) -> Result<(), ChangeError> {
        let (id, ends) =
            path_admin::leave(&mut self.routes.paths, why, leaving, &self.config, ctx)?;
        if ends {
            self.end_path(id, End::ASKED, ctx);
        }
        tracing::info!(path = %self.routes.paths[id].channel.name(), "{} on request", why.name());
        Ok(())
    }

    /// Handles a network change of this host that may help paths; `what` describes it for the log.
    pub(crate) fn on_network_change(&mut self, what: &str, ctx: &mut Ctx<'_>) {
        if !self.is_running() {
            return;
        }
        self.checks.wake();
        for path in self.routes.paths.iter_mut() {
            path.network_changed(what, ctx);
        }
        self.poll_network(ctx);
    }

    /// Handles the failure of a link of this host with these addresses; `what` describes it. Paths
    /// that depend on the link end.
    pub(crate) fn on_link_down(&mut self, what: &str, addresses: &[IpAddr], ctx: &mut Ctx<'_>) {
        self.checks.wake();
        for id in link_down::cut_off(&self.routes.paths, addresses, ctx) {
            self.end_path(id, End::failed(PathEnd::LinkDown(what.to_owned())), ctx);
        }
    }

    fn poll_network(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let mut any = false;
        for id in self.routes.paths.ids() {
            let retry =
                self.routes.paths[id].poll_network(ctx.now, self.routes.volumes.were_open());
            if retry == Some(true) {
                self.end_path(id, End::RESTART, ctx);
            }
            any |= retry.is_some();
        }
        any
    }

    /// Performs everything that is due. Returns whether anything happened.
    pub(crate) fn poll(&mut self, ctx: &mut Ctx<'_>) -> bool {
        while let Some((name, found)) = self.hosts.take_found() {
            if let Some(id) = self.routes.paths.named(&name) {
                self.checks.wake();
                self.routes.paths[id].resolved(ctx.now, found);
            }
        }
        let Some(check) = self.checks.due(ctx.now) else { return false };
        let mut any = check == Check::All
            && (self.open_next(ctx) | self.open_beside(ctx) | self.send_close(ctx));
        any |= self.poll_network(ctx);
        let used = self.routes.paths.last_used(ctx.now);
        for id in self.routes.paths.ids() {
            any |= self.poll_path(id, used, ctx);
        }
        any |= self.advance_fences(ctx);
        for at in self.routes.volumes.poll(ctx.now, self.closing.is_detaching()) {
            self.routes.notify(&ShardMessage::GiveUp(at), ctx);
            any = true;
        }
        any |= self.ask_move(ctx);
        if self.closing.is_overdue(ctx.now) {
            self.end_all(ctx);
            any = true;
        }
        if any {
            self.checks.wake();
        } else {
            let known = self.checks.deadlines().filter(|_| check == Check::Paths);
            let found = self.deadlines(known);
            self.checks.done(ctx.now, found);
        }
        any
    }

    /// Sends the next takeover request that is due. Returns whether there was one.
    fn ask_move(&mut self, ctx: &mut Ctx<'_>) -> bool {
        if !self.is_running() {
            return false;
        }
        let Some(moved) = gateways::next_takeover(&mut self.routes, ctx.now) else { return false };
        let path = &mut self.routes.paths[moved.path];
        let asked = path.volumes.ask_move(moved.volume, false, &mut path.channel, ctx);
        self.end_if_failed(moved.path, asked, ctx);
        true
    }

    fn poll_path(&mut self, id: PathId, used: Instant, ctx: &mut Ctx<'_>) -> bool {
        let may_start = self.is_running();
        let path = &mut self.routes.paths[id];
        match path.due(ctx.now, may_start) {
            Due::Nothing => return false,
            Due::Leave => return path.finish_leave(ctx.now),
            Due::Heartbeat => return self.poll_heartbeat(id, used, ctx),
            Due::Close => path.abort(ctx),
            Due::End(why) => {
                path.volumes.terms.mark_overdue(ctx.now);
                self.end_path(id, End::failed(why), ctx);
            }
            Due::Start if self.routes.paths.another_opens_the_session(ctx.now, id) => {
                self.routes.paths[id].postpone(ctx.now + OPENER_POLL);
            }
            Due::Start => {
                let first_conn =
                    !self.routes.paths.are_known() || self.opening.server().has_gateways();
                let started =
                    self.routes.paths[id].start(first_conn, self.bounds.queue_depth(), ctx);
                self.end_if_failed(id, started, ctx);
            }
        }
        true
    }

    fn poll_heartbeat(&mut self, id: PathId, used: Instant, ctx: &mut Ctx<'_>) -> bool {
        match self.routes.paths[id].channel.look(ctx.now, used) {
            Finding::Fine => false,
            Finding::Due => {
                self.send_heartbeat(id, ctx);
                true
            }
            Finding::Silent(_) if rtrs_core::mutated!(ClientKeepsSilent) => false,
            Finding::Silent(_) if self.routes.paths[id].may_be_silent() => false,
            Finding::Silent(silence) => {
                let confirmed = silence::confirm(&mut self.routes.paths, id, ctx.now);
                let confirmed = confirmed.unwrap_or_else(|others| {
                    others.iter().for_each(|other| self.send_heartbeat(*other, ctx));
                    false
                });
                let patience = self.config.heartbeat.silence_max();
                let why = silence::judge(&self.routes.paths[id], silence, confirmed, patience, ctx);
                let Some(why) = why else { return false };
                self.end_path(id, End::failed(why), ctx);
                true
            }
        }
    }

    fn send_heartbeat(&mut self, id: PathId, ctx: &mut Ctx<'_>) {
        let sent = self.routes.paths[id].channel.send_heartbeat(ctx);
        self.end_if_failed(id, sent, ctx);
    }

    /// Handles a queue pair of this shard that became ready. Returns whether it was a service
    /// connection.
    pub(crate) fn handle_established(
        &mut self,
        provider: ProviderIndex,
        qp: QpNum,
        private_data: &[u8],
        ctx: &mut Ctx<'_>,
    ) -> bool {
        let Some(id) = self.routes.paths.find(provider, qp) else { return false };
        self.checks.wake();
        // Otherwise the attempt was abandoned while its answer was in transit.
        if self.routes.paths[id].state() == PathState::Connecting {
            let accepted = self.on_accepted(id, private_data, ctx);
            self.end_if_failed(id, accepted, ctx);
        }
        true
    }

    fn on_accepted(&mut self, id: PathId, data: &[u8], ctx: &mut Ctx<'_>) -> Result<(), PathEnd> {
        let (granted, extensions) = conn_response(data)?;
        let server = extensions.identity.and_then(ServerId::from_bytes);
        self.opening.admit(server, extensions, self.routes.volumes.were_open())?;
        if self.bounds.grant(granted, self.routes.volumes.were_open())? {
            self.routes.notify(&ShardMessage::Granted(granted), ctx);
        }
        self.routes.paths[id].accepted(granted, extensions, server, ctx)
    }

    /// Handles a message from a shard.
    pub(crate) fn handle_message(&mut self, message: ControlMessage, ctx: &mut Ctx<'_>) {
        self.checks.wake();
        match message {
            ControlMessage::Up { path, epoch, cid } => {
                let asked = self.routes.paths[path].shard_connected(epoch, cid, ctx);
                self.end_if_failed(path, asked, ctx);
            }
            ControlMessage::Retired { path, epoch, shard } => {
                if self.routes.paths[path].retired(epoch, shard) {
                    self.end_path(path, End::ASKED, ctx);
                }
            }
            ControlMessage::InUse => {
                for id in self.routes.paths.ids() {
                    if self.routes.paths[id].channel.heartbeat.begin_io(ctx.now) {
                        self.send_heartbeat(id, ctx);
                    }
                }
            }
            ControlMessage::Removed(volume) => {
                self.on_lost(volume, &SessionFailure::Removed, None, ctx);
            }
            ControlMessage::Claim { device, is_made } => {
                self.routes.volumes.claim(device, is_made, ctx.now);
                self.open_beside(ctx);
            }
            ControlMessage::Settled { device, shard } => {
                if self.routes.volumes.settled(device, shard) {
                    self.send_close(ctx);
                }
            }
            ControlMessage::InternalError { path } => {
                self.routes.paths[path].channel.count_internal_error()
            }
            ControlMessage::Failed { path, epoch, cid, failure } => {
                let why = PathEnd::from(&failure);
                let end = ShardConnectionEnd { epoch, cid, why, in_order: false };
                self.on_shard_closed(path, end, ctx);
            }
            ControlMessage::Closed { path, epoch, cid, reason } => {
                let in_order = reason == CloseReason::Peer;
                let why = self.routes.paths[path].closed(reason);
                self.on_shard_closed(path, ShardConnectionEnd { epoch, cid, why, in_order }, ctx);
            }
        }
    }

    fn on_shard_closed(&mut self, id: PathId, end: ShardConnectionEnd, ctx: &mut Ctx<'_>) {
        let ShardConnectionEnd { epoch, cid, why, in_order } = end;
        if self.routes.paths[id].epoch() == epoch {
            self.routes.paths[id].channel.connection_ended(cid);
            let why = Some(PathEnd::Connection(cid, Box::new(why)));
            self.end_path(id, End { why, in_order }, ctx);
        }
    }

    /// Handles a failed or closed queue pair of this shard. Returns whether it was a service
    /// connection.
    pub(crate) fn handle_closed(
        &mut self,
        provider: ProviderIndex,
        qp: QpNum,
        end: &ConnectionEnd,
        ctx: &mut Ctx<'_>,
    ) -> bool {
        let Some(id) = self.routes.paths.find(provider, qp) else { return false };
        self.checks.wake();
        let mut why = match end {
            ConnectionEnd::Failed(failure) => failure.into(),
            ConnectionEnd::Closed(reason) => self.routes.paths[id].closed(reason.clone()),
        };
        self.routes.paths[id].channel.connection_ended(ConnIndex(0));
        if let ConnectionEnd::Failed(failure) = end
            && let Some(secret) = eviction(failure)
        {
            if self.opening.server().is_proof(secret) {
                self.on_evicted(id, ctx);
            } else {
                why = PathEnd::UnprovenEviction;
            }
        }
        let in_order = matches!(end, ConnectionEnd::Closed(CloseReason::Peer));
        self.end_path(id, End { why: Some(why), in_order }, ctx);
        true
    }

    /// Handles an eviction: the server will not admit this session again. Waiting IO fails, and no
    /// path tries again.
    fn on_evicted(&mut self, id: PathId, ctx: &mut Ctx<'_>) {
        self.bounds.ended(SessionFailure::Evicted);
        self.routes.give_up(ctx);
        for other in self.routes.paths.ids().filter(|other| *other != id) {
            self.end_path(other, End::failed(PathEnd::Evicted), ctx);
        }
    }

    /// Handles a completion of this shard. Returns whether it belonged to a service connection.
    pub(crate) fn handle_completion(
        &mut self,
        provider: ProviderIndex,
        wc: &WorkCompletion,
        ctx: &mut Ctx<'_>,
    ) -> bool {
        let Some(id) = self.routes.paths.completed(provider, wc) else { return false };
        self.checks.wake();
        let event = self.routes.paths[id].channel.on_completion(wc, ctx);
        let done = event.and_then(|event| self.on_service_event(id, event, ctx));
        self.end_if_failed(id, done, ctx);
        true
    }

    /// Handles a completion of the path's service connection. An error ends the path.
    fn on_service_event(
        &mut self,
        id: PathId,
        event: ServiceEvent,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        let path = &mut self.routes.paths[id];
        match event {
            ServiceEvent::Nothing => {}
            ServiceEvent::HeartbeatAsked => {
                return path
                    .channel
                    .post(ctx, |service, fabric| service.post_heartbeat_ack(fabric));
            }
            ServiceEvent::HeartbeatAnswered => path.channel.heartbeat_answered(ctx.now),
            ServiceEvent::Changed { device } => {
                if self.routes.changed(id, device, ctx.now) {
                    self.open_beside(ctx);
                }
            }
            ServiceEvent::Info(answer) => {
                let until = self.routes.paths.turn_until(ctx.now);
                self.routes.paths[id].on_info(answer, until, ctx)?;
                self.open_next(ctx);
            }
            ServiceEvent::Proof(proof) => {
                let until = self.routes.paths.turn_until(ctx.now);
                if self.routes.paths[id].on_proof(proof, until, ctx)? {
                    self.open_next(ctx);
                }
            }
            ServiceEvent::Opened(opened) => {
                let asked = path.answered()?;
                return self.on_opened(OpenAnswer { path: id, asked, opened: &opened }, ctx);
            }
            ServiceEvent::OpenRefused(errno, why) => {
                let asked = path.answered()?;
                return self.on_open_refused(id, asked, OpenRefused { errno, why }, ctx);
            }
            ServiceEvent::Fenced => {
                if let Some(fenced) = fence::answered(&self.routes.paths, id) {
                    tracing::debug!(path = %self.routes.paths[fenced].channel.name(), "fenced off");
                    self.routes.fenced(fenced, ctx);
                }
                self.advance_fences(ctx);
            }
            ServiceEvent::FenceRefused => {
                fence::refused(&mut self.routes.paths, id);
                self.advance_fences(ctx);
                self.open_beside(ctx);
            }
            ServiceEvent::Closed => {
                path.answered()?;
                if let Some(at) = self.routes.volumes.closing_over(id) {
                    self.on_volume_closed(at, ctx);
                    self.send_close(ctx);
                }
            }
            ServiceEvent::Moves(code) => {
                let asked = path.answered()?;
                let moved = Takeover { path: id, volume: asked.volume };
                gateways::answered(&mut self.routes, moved, code, ctx.now);
            }
            // A session does not send these requests.
            ServiceEvent::Discovered(_) | ServiceEvent::DiscoverRefused(_) => {}
        }
        Ok(())
    }

    fn end_if_failed(&mut self, id: PathId, done: Result<(), PathEnd>, ctx: &mut Ctx<'_>) {
        if let Err(why) = done {
            self.end_path(id, End::failed(why), ctx);
        }
    }

    /// Closes all of a path's connections, on all shards. Once the last has closed, the path waits
    /// for its next attempt.
    fn end_path(&mut self, id: PathId, end: End, ctx: &mut Ctx<'_>) {
        let detaching = self.closing.is_detaching();
        if self.routes.paths[id].end(end, detaching, ctx) {
            self.closing.path_lost(&mut self.routes, id);
            self.routes.path_lost(id, ctx);
        }
        if self.routes.paths[id].finish_end(ctx.now, detaching) {
            self.hosts.add_unreached(self.routes.paths[id].channel.name());
        }
        self.check_attach(ctx.now);
    }

    /// Fails a session whose paths have all failed, on each of their addresses, before a volume was
    /// ever open: the attach fails immediately with the reasons instead of waiting for a server
    /// that may never come up.
    fn check_attach(&mut self, now: Instant) {
        if !self.is_running() {
            return;
        }
        if self.routes.volumes.were_open() {
            return self.routes.fail_refused(now);
        }
        let is_patient = self.routes.volumes.iter().any(|volume| volume.is_patient(now));
        if let Some(why) = self.routes.paths.why_all_failed(is_patient) {
            self.bounds.fail(SessionFailure::Unreachable(why));
        }
    }

    /// Time at which `poll` must be called even if nothing happens.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.checks.deadlines().unwrap_or_else(|| self.deadlines(None)).first
    }

    /// Current deadlines. The deadline of opens is taken from `known`, if nothing has happened
    /// since `known` was determined.
    fn deadlines(&self, known: Option<Deadlines>) -> Deadlines {
        let detaching = self.closing.is_detaching();
        let no_path = self.routes.volumes.no_path_deadline().filter(|_| !detaching);
        let fence = fence::deadline(&self.routes.paths);
        let soonest = earliest(earliest(self.closing.deadline(), fence), no_path);
        let may_start = self.is_running();
        let open = known.map_or_else(|| self.open_deadline(), |known| known.open);
        let next_move = if may_start { gateways::deadline(&self.routes) } else { None };
        let soonest = earliest(earliest(soonest, open), next_move);
        let paths = self.routes.paths.iter().map(|path| path.deadline(may_start));
        Deadlines { open, first: paths.fold(soonest, earliest) }
    }

    /// Time at which a path is next due to open a volume.
    fn open_deadline(&self) -> Option<Instant> {
        if self.is_running() { opening::deadline(&self.routes) } else { None }
    }
}
