//! The control shard's part of a session: its paths, and the device that they open.
//!
//! Each path connects one connection after the other (connection 0 here, the others on their
//! shards, by message), sends INFO_REQ, gets its chunks, opens the device and then carries IO.
//! Every path opens the device, not only the first: a server that lost the session while another
//! path seemed alive (a restart behind a silent link) must not get IO for a device it does not
//! know. When the last path goes the device counts as closed. A path that ends first gets all its
//! connections ended on all shards, then waits by a backoff with jitter and starts over.
//!
//! Each part owns its state and knows nothing of the others; this file wires them together:
//!
//! - `paths.rs` which paths there are;
//! - `path.rs` one path, with `due.rs`, of `connections.rs`, `path_fence.rs`, `heartbeat.rs`,
//!   `reconnect.rs`, `network.rs` and `leave.rs`;
//! - `fence.rs`, `silence.rs` and `path_admin.rs` what is decided about a path beside others;
//! - `again.rs` and `reopen.rs` when a connected path opens the device once more;
//! - `authenticate.rs` what the server says to proofs;
//! - `open.rs` the device; `identity.rs` which server and export it has to be; `cache_epoch.rs`
//!   the epoch of the server's cache; `no_path.rs` how long IO waits; `status.rs` listings;
//! - `detach.rs` the end of all.

mod again;
mod authenticate;
mod cache_epoch;
mod connections;
mod detach;
mod due;
mod fence;
mod heartbeat;
pub(crate) mod identity;
mod leave;
pub(crate) mod network;
pub(in crate::engine) mod no_path;
pub(crate) mod open;
mod path;
pub(crate) mod path_admin;
mod path_fence;
pub(in crate::engine) mod paths;
mod reconnect;
mod reopen;
mod silence;
pub(crate) mod status;

use std::sync::Arc;

use rtrs_core::fabric::{CloseReason, WorkCompletion};
use rtrs_core::identity::{EvictionSecret, Identity, ServerId};
use rtrs_core::ids::{ConnIndex, PathId, ProviderIndex, QpNum};
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::{errno, errno_name};

use self::cache_epoch::CacheEpoch;
use self::due::{Due, End};
use self::fence::Fencing;
use self::heartbeat::Finding;
use self::identity::Pinned;
use self::leave::Why;
use self::no_path::{NoPathClock, NoPathWait};
use self::open::{Device, SessionFailure};
use self::path::Path;
use self::path_admin::{Change, Leaving};
use self::paths::Paths;
use self::status::PathStatus;
use crate::engine::ctx::Ctx;
use crate::engine::device_table::{DeviceIndex, OpenDevice};
use crate::engine::message::{ConnectionEnd, ControlMessage, ShardMessage};
use crate::engine::session::{CONTROL, SessionConfig};
use crate::path::handshake::{self, ServiceEvent};
use crate::path::state::PathState;

/// How often a path looks whether it may connect, while another asks for the session.
const OPENER_POLL: Duration = Duration::from_millis(5);

/// The parts of the control shard.
#[derive(Debug)]
pub(crate) struct SessionControl {
    config: Arc<SessionConfig>,
    paths: Paths,
    device: Device,
    pinned: Pinned,
    cache: CacheEpoch,
    no_path: NoPathClock,
    detaching: bool,
}

impl SessionControl {
    pub(crate) fn new(now: Instant, config: Arc<SessionConfig>, uuids: &[[u8; 16]]) -> Self {
        Self {
            paths: Paths::new(now, &config, uuids),
            device: Device::new(now, &config),
            pinned: Pinned::new(config.identity),
            cache: CacheEpoch::new(&config),
            no_path: NoPathClock::new(config.no_path),
            detaching: false,
            config,
        }
    }

    /// The device while it is open at the server.
    pub(crate) fn device(&self) -> Option<&Arc<OpenDevice>> {
        self.device.get()
    }

    /// True while the device is open at the server.
    pub(crate) fn is_open(&self) -> bool {
        self.device().is_some()
    }

    /// Why the session cannot go on.
    pub(crate) fn failure(&self) -> Option<&SessionFailure> {
        self.device.failure()
    }

    /// Why the session cannot go on, or what was in the way when it was last tried.
    pub(crate) fn obstacle(&self) -> Option<&SessionFailure> {
        self.device.obstacle()
    }

    /// How IO stands while no path carries it.
    pub(crate) fn no_path(&self, now: Instant) -> Option<NoPathWait> {
        self.no_path.wait(now)
    }

    /// True when a detach has ended everything.
    pub(crate) fn is_done(&self) -> bool {
        self.detaching && self.paths.iter().all(|path| path.state() == PathState::Gone)
    }

    /// What the session is pinned to, if to anything.
    pub(crate) fn pinned_identity(&self) -> Option<Identity> {
        self.pinned.identity()
    }

    /// The epoch of the server's cache, for the process that takes over if this one dies.
    pub(crate) fn saved_epoch(&self) -> Option<u64> {
        self.cache.kept()
    }

    /// All paths as listings show them.
    pub(crate) fn status(&self) -> Vec<PathStatus> {
        self.paths.listed().map(Path::status).collect()
    }

    /// Names of all paths by their place, those that were removed included.
    pub(crate) fn path_names(&self) -> Vec<String> {
        self.paths.iter().map(|path| path.name().to_owned()).collect()
    }

    /// As it is now.
    pub(crate) fn config(&self) -> &SessionConfig {
        &self.config
    }

    fn notify_all(&self, message: &ShardMessage, ctx: &mut Ctx<'_>) {
        ctx.out.all_shards(self.config.shards, message);
    }

    /// True while paths may connect.
    fn is_running(&self) -> bool {
        !self.detaching && self.failure().is_none()
    }

    /// Begins a change. The error says why it cannot be made.
    pub(crate) fn change(&mut self, change: Change, ctx: &mut Ctx<'_>) -> Result<(), String> {
        if self.detaching {
            return Err("the session is being detached".into());
        }
        if !self.device.was_open() {
            return Err("the session is still attaching; try again when it is open".into());
        }
        // No path is tried any more, so nothing would come of it.
        if let Some(failure) = self.failure() {
            return Err(failure.to_string());
        }
        match change {
            Change::Add { target, uuid } => {
                let path = self.paths.add(ctx.now, target.clone(), uuid)?;
                tracing::info!(path = %target.name, "path added");
                self.notify_all(&ShardMessage::AddPath { path, target: Box::new(target) }, ctx);
                Ok(())
            }
            Change::Remove(leaving) => self.leave(Why::Remove, &leaving, ctx),
            Change::Disconnect(leaving) => self.leave(Why::Disconnect, &leaving, ctx),
            Change::Reconnect(leaving) => self.leave(Why::Reconnect, &leaving, ctx),
            Change::Tune(tuning) => {
                let config = Arc::new(self.config.tuned(&tuning));
                self.paths.tune(ctx.now, &config, &tuning);
                self.no_path.set_policy(config.no_path);
                self.notify_all(&ShardMessage::Config(Arc::clone(&config)), ctx);
                self.config = config;
                Ok(())
            }
        }
    }

    fn leave(&mut self, why: Why, leaving: &Leaving, ctx: &mut Ctx<'_>) -> Result<(), String> {
        let (id, ends) = path_admin::leave(&mut self.paths, (why, leaving), &self.config, ctx)?;
        if ends {
            self.end_path(id, End::ASKED, ctx);
        }
        tracing::info!(path = %self.paths[id].name(), "{} on request", why.name());
        Ok(())
    }

    /// Something in this host's network is up or was added; `what` says what, for the log.
    pub(crate) fn on_network_change(&mut self, what: &str, ctx: &mut Ctx<'_>) {
        if !self.is_running() {
            return;
        }
        for path in self.paths.iter_mut() {
            path.network_changed(what, ctx);
        }
        self.poll_network(ctx);
    }

    fn poll_network(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let mut any = false;
        for id in self.paths.ids() {
            let retry = self.paths[id].poll_network(ctx.now, self.device.was_open());
            if retry == Some(true) {
                self.end_path(id, End::RESTART, ctx);
            }
            any |= retry.is_some();
        }
        any
    }

    /// Moves everything on whose time has come. True when anything happened.
    pub(crate) fn poll(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let mut any = self.open_next(ctx) | self.open_again(ctx) | self.send_close(ctx);
        any |= self.poll_network(ctx);
        for id in self.paths.ids() {
            any |= self.poll_path(id, ctx);
        }
        any |= self.advance_fences(ctx);
        if !self.detaching && self.no_path.expire(ctx.now) {
            self.notify_all(&ShardMessage::GiveUp, ctx);
            any = true;
        }
        self.cache.keep(ctx.now);
        if self.device.close_deadline().is_some_and(|deadline| ctx.now >= deadline) {
            self.end_all(ctx);
            any = true;
        }
        any
    }

    fn poll_path(&mut self, id: PathId, ctx: &mut Ctx<'_>) -> bool {
        let may_start = self.is_running();
        let path = &mut self.paths[id];
        match path.due(ctx.now, may_start) {
            Due::Nothing => return false,
            Due::Leave => return path.finish_leave(ctx.now),
            Due::Heartbeat => return self.poll_heartbeat(id, ctx),
            Due::Close => path.abort(ctx),
            Due::End(why) => self.end_path(id, End::failed(why), ctx),
            Due::Start if self.paths.another_opens_the_session(ctx.now, id) => {
                self.paths[id].postpone(ctx.now + OPENER_POLL);
            }
            Due::Start => {
                let first_conn = !self.paths.are_known();
                let started = self.paths[id].start((first_conn, self.device.queue_depth()), ctx);
                self.end_if_failed(id, started, ctx);
            }
        }
        true
    }

    fn poll_heartbeat(&mut self, id: PathId, ctx: &mut Ctx<'_>) -> bool {
        match self.paths[id].look(ctx.now) {
            Finding::Fine => false,
            Finding::Due => {
                self.send_heartbeat(id, ctx);
                true
            }
            Finding::Silent(_) if rtrs_core::mutated!(ClientKeepsSilent) => false,
            Finding::Silent(silence) => {
                let confirmed = silence::confirm(&mut self.paths, id, ctx.now);
                let confirmed = confirmed.unwrap_or_else(|others| {
                    others.iter().for_each(|other| self.send_heartbeat(*other, ctx));
                    false
                });
                let patience = self.config.heartbeat.silence_max();
                let why = silence::judge(&self.paths[id], silence, confirmed, patience, ctx);
                let Some(why) = why else { return false };
                self.end_path(id, End::failed(why), ctx);
                true
            }
        }
    }

    fn send_heartbeat(&mut self, id: PathId, ctx: &mut Ctx<'_>) {
        let sent = self.paths[id].send_heartbeat(ctx);
        self.end_if_failed(id, sent, ctx);
    }

    /// A queue pair of this shard got ready. True when it was a service connection.
    pub(crate) fn handle_established(
        &mut self,
        provider: ProviderIndex,
        qp: QpNum,
        private_data: &[u8],
        ctx: &mut Ctx<'_>,
    ) -> bool {
        let Some(id) = self.paths.find(provider, qp) else { return false };
        // Otherwise we gave the attempt up while its answer was on the way.
        if self.paths[id].state() == PathState::Connecting {
            let accepted = self.on_accepted(id, private_data, ctx);
            self.end_if_failed(id, accepted, ctx);
        }
        true
    }

    fn on_accepted(&mut self, id: PathId, data: &[u8], ctx: &mut Ctx<'_>) -> Result<(), String> {
        let (granted, extensions) = handshake::conn_response(data)?;
        let server = extensions.identity.and_then(ServerId::from_bytes);
        if let Some(why) = self.pinned.refuses_server(server) {
            return Err(why);
        }
        if self.device.grant(granted)? {
            self.notify_all(&ShardMessage::Granted(granted), ctx);
        }
        self.paths[id].accepted((granted, extensions), server, ctx)
    }

    /// A message of a shard.
    pub(crate) fn handle_message(&mut self, message: ControlMessage, ctx: &mut Ctx<'_>) {
        match message {
            ControlMessage::Up { path, epoch, cid } => {
                let asked = self.paths[path].shard_connected((epoch, cid), ctx);
                self.end_if_failed(path, asked, ctx);
            }
            ControlMessage::Retired { path, epoch, shard } => {
                if self.paths[path].retired(epoch, shard) {
                    self.end_path(path, End::ASKED, ctx);
                }
            }
            ControlMessage::Removed => self.on_removed(None, ctx),
            ControlMessage::InternalError { path } => self.paths[path].count_internal_error(),
            ControlMessage::Failed { path, epoch, cid, failure } => {
                let why = handshake::describe_failure(&failure);
                self.on_shard_closed(path, (epoch, cid), (&why, false), ctx);
            }
            ControlMessage::Closed { path, epoch, cid, reason } => {
                let why = self.paths[path].describe_end(&reason);
                let in_order = reason == CloseReason::Peer;
                self.on_shard_closed(path, (epoch, cid), (&why, in_order), ctx);
            }
        }
    }

    fn on_shard_closed(
        &mut self,
        id: PathId,
        (epoch, cid): (u32, ConnIndex),
        (why, in_order): (&str, bool),
        ctx: &mut Ctx<'_>,
    ) {
        if self.paths[id].epoch() == epoch {
            self.paths[id].connection_ended(cid);
            let why = Some(format!("connection {cid}: {why}"));
            self.end_path(id, End { why, in_order }, ctx);
        }
    }

    /// A service connection failed or ended. True when it was one.
    pub(crate) fn handle_closed(
        &mut self,
        provider: ProviderIndex,
        qp: QpNum,
        end: &ConnectionEnd,
        ctx: &mut Ctx<'_>,
    ) -> bool {
        let Some(id) = self.paths.find(provider, qp) else { return false };
        let mut why = match end {
            ConnectionEnd::Failed(failure) => handshake::describe_failure(failure),
            ConnectionEnd::Closed(reason) => self.paths[id].describe_end(reason),
        };
        self.paths[id].connection_ended(ConnIndex(0));
        if let ConnectionEnd::Failed(failure) = end
            && let Some(secret) = handshake::eviction(failure)
        {
            if self.pinned.is_proof(secret) {
                self.on_evicted(id, ctx);
            } else {
                why = handshake::UNPROVEN_EVICTION.to_owned();
            }
        }
        let in_order = matches!(end, ConnectionEnd::Closed(CloseReason::Peer));
        self.end_path(id, End { why: Some(why), in_order }, ctx);
        true
    }

    /// The server says to a path that it will not let this session in again. No IO waits for that,
    /// and no path tries again.
    fn on_evicted(&mut self, id: PathId, ctx: &mut Ctx<'_>) {
        self.device.ended(SessionFailure::Evicted);
        self.notify_all(&ShardMessage::GiveUp, ctx);
        for other in self.paths.ids().filter(|other| *other != id) {
            self.end_path(other, End::failed("the session was evicted"), ctx);
        }
    }

    /// The server's operator has removed the export while it was open. Whatever is exported by that
    /// name later is not what the session's users know, so no path tries again.
    fn on_removed(&mut self, over: Option<PathId>, ctx: &mut Ctx<'_>) {
        if self.failure().is_some() || self.detaching || rtrs_core::mutated!(RemovedIgnored) {
            return;
        }
        self.device.ended(SessionFailure::Removed);
        self.notify_all(&ShardMessage::GiveUp, ctx);
        for other in self.paths.ids().filter(|other| Some(*other) != over) {
            self.end_path(other, End::failed(SessionFailure::Removed.to_string()), ctx);
        }
    }

    /// A completion of this shard. True when it was of a service connection.
    pub(crate) fn handle_completion(
        &mut self,
        provider: ProviderIndex,
        wc: &WorkCompletion,
        ctx: &mut Ctx<'_>,
    ) -> bool {
        let Some(id) = self.paths.find(provider, wc.qp) else { return false };
        let event = self.paths[id].on_completion(wc, ctx);
        let done = event.and_then(|event| self.on_service_event(id, event, ctx));
        self.end_if_failed(id, done, ctx);
        true
    }

    /// What a completion of the path's service connection meant. The error ends the path.
    fn on_service_event(
        &mut self,
        id: PathId,
        event: ServiceEvent,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), String> {
        let path = &mut self.paths[id];
        match event {
            ServiceEvent::Nothing => {}
            ServiceEvent::HeartbeatAsked => {
                return path.post(ctx, |service, fabric| service.post_heartbeat(true, fabric));
            }
            ServiceEvent::HeartbeatAnswered => path.heartbeat_answered(ctx.now),
            ServiceEvent::Changed { device } => self.on_changed(id, device, ctx),
            ServiceEvent::Info { chunks } => {
                let until = self.turn_until(ctx.now);
                self.paths[id].on_info(chunks, until, ctx)?;
                self.open_next(ctx);
            }
            ServiceEvent::Proof(proof) => return self.on_proof(id, proof, ctx),
            ServiceEvent::Opened { device, .. } if path.reopen.answered() => {
                return self.on_opened_again(id, &device, ctx);
            }
            ServiceEvent::OpenRefused(code, _) if path.reopen.answered() => {
                if code == errno::EIDRM {
                    self.on_removed(Some(id), ctx);
                    return Err(SessionFailure::Removed.to_string());
                }
                let (path, errno) = (path.name(), errno_name(code));
                tracing::warn!(%path, errno, "cannot learn how the device has changed");
            }
            ServiceEvent::Opened { device, secret } if !self.detaching => {
                return self.on_opened(id, &device, secret, ctx);
            }
            ServiceEvent::Opened { .. } => {}
            ServiceEvent::OpenRefused(code, why) => {
                let asked = path.asked_access()?;
                if code == errno::EIDRM && self.device.was_open() {
                    self.on_removed(Some(id), ctx);
                    return Err(SessionFailure::Removed.to_string());
                }
                self.device.refused(ctx.now, (code, why), asked)?;
                return path.open(self.device.access(), ctx);
            }
            ServiceEvent::Fenced => {
                if let Some(fenced) = fence::answered(&self.paths, id) {
                    tracing::debug!(path = %self.paths[fenced].name(), "fenced off");
                    self.on_fenced(fenced, ctx);
                }
                self.advance_fences(ctx);
            }
            ServiceEvent::Closed => {
                if self.device.is_closing_over(id) {
                    self.end_all(ctx);
                }
            }
            // A session does not ask for them.
            ServiceEvent::Discovered(_) | ServiceEvent::DiscoverRefused(_) => {}
        }
        Ok(())
    }

    /// Lets the next path open the device, one after the other: all use the same permit, and to a
    /// kernel server that is the same memory, whichever path a request comes over (6.1,
    /// rtrs-srv.c:get_or_create_srv). True when one began.
    fn open_next(&mut self, ctx: &mut Ctx<'_>) -> bool {
        if !self.is_running() || self.paths.is_using(CONTROL) {
            return false;
        }
        let Some(id) = self.paths.first(PathState::Opening) else { return false };
        let asked = self.paths[id].open(self.device.access(), ctx);
        self.end_if_failed(id, asked, ctx);
        true
    }

    /// The server says that a device has changed, which may be one that is not open yet.
    fn on_changed(&mut self, id: PathId, device: u32, ctx: &mut Ctx<'_>) {
        if self.device.last().is_none_or(|last| last.device_id == device) {
            self.paths[id].reopen.changed(ctx.now);
            self.open_again(ctx);
        }
    }

    /// Lets the next path that is due open the device once more. True when one began.
    fn open_again(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let next = again::next(&self.paths, ctx.now).filter(|_| self.is_running());
        let Some(id) = next else { return false };
        let asked = self.paths[id].open_again(self.device.access(), ctx);
        self.end_if_failed(id, asked, ctx);
        true
    }

    /// A connected path has opened the device once more.
    fn on_opened_again(
        &mut self,
        id: PathId,
        device: &OpenDevice,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), String> {
        let Some(last) = self.device.get().filter(|_| !self.detaching) else { return Ok(()) };
        if again::judge(&self.paths[id], &self.pinned, last, device)? {
            let device = self.device.fit(device)?;
            if self.device.opened(&device) {
                self.notify_all(&ShardMessage::Open(DeviceIndex::FIRST, device), ctx);
            }
        }
        self.open_again(ctx);
        Ok(())
    }

    /// A path has opened the device.
    fn on_opened(
        &mut self,
        id: PathId,
        device: &OpenDevice,
        secret: Option<EvictionSecret>,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), String> {
        let chunks = self.paths[id].opened()?;
        let (server, export) = (self.paths[id].server(), device.export_id);
        let cache_id = device.cache_id;
        let why = self.pinned.refuses(server, self.device.last(), device).or_else(|| {
            let beside = self.paths.are_connected();
            self.pinned.refuses_beside(server, export).filter(|_| beside)
        });
        if let Some(why) = why {
            return Err(why);
        }
        let device = self.device.fit(device)?;
        self.cache.compare(self.device.last(), &device);
        self.pinned.meet((server, export), secret);
        if let Some(watch) = self.cache.meet(ctx.now, &device) {
            self.notify_all(&ShardMessage::Cache(DeviceIndex::FIRST, watch), ctx);
        }
        if self.device.opened(&device) {
            self.notify_all(&ShardMessage::Open(DeviceIndex::FIRST, device), ctx);
        }
        self.paths[id].connected(ctx.now, chunks, cache_id);
        // The server has ended what the path was before.
        self.on_fenced(id, ctx);
        if self.paths[id].is_leaving() {
            self.end_path(id, End::ASKED, ctx);
        } else {
            self.advance_fences(ctx);
        }
        Ok(())
    }

    /// Nothing that a path carried before can be delivered any more.
    fn on_fenced(&mut self, id: PathId, ctx: &mut Ctx<'_>) {
        if let Some(message) = self.paths[id].fenced() {
            self.notify_all(&message, ctx);
        }
    }

    /// Asks for fences that are due, and lets paths carry IO that wait for none. True when
    /// anything was done.
    fn advance_fences(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let mut any = false;
        let rules = (self.device.fence_permit(), self.config.failover);
        for id in self.paths.ids() {
            if let Some(over) = fence::expire(&mut self.paths, id, ctx.now) {
                self.end_path(over, End::failed("a fence was not answered in time"), ctx);
            }
            match fence::ask(&mut self.paths, id, rules, ctx) {
                Fencing::Waits => continue,
                Fencing::Asked => {}
                Fencing::NotNeeded => self.on_fenced(id, ctx),
                Fencing::End(over, why) => self.end_path(over, End::failed(why), ctx),
            }
            any = true;
        }
        for id in self.paths.ids() {
            if fence::may_carry(&self.paths, id)
                && let Some(message) = self.paths[id].bring_up()
            {
                self.no_path.stop();
                self.notify_all(&message, ctx);
                any = true;
            }
        }
        any
    }

    fn end_if_failed(&mut self, id: PathId, done: Result<(), String>, ctx: &mut Ctx<'_>) {
        if let Err(why) = done {
            self.end_path(id, End::failed(why), ctx);
        }
    }

    /// Ends a path: all its connections on all shards. When the last is gone it waits for its next
    /// attempt.
    fn end_path(&mut self, id: PathId, end: End, ctx: &mut Ctx<'_>) {
        if self.paths[id].end(end, self.detaching, ctx) {
            self.on_path_lost(id, ctx);
        }
        self.paths[id].finish_end(ctx.now, self.detaching);
        self.check_attach(ctx.now);
    }

    /// A path is no longer of use: what that means for the device.
    fn on_path_lost(&mut self, id: PathId, ctx: &mut Ctx<'_>) {
        let connected = self.paths.iter().filter(|path| path.is_connected());
        self.cache.review(connected.map(|path| (path.cache_id(), path.started())));
        if self.device.is_closing_over(id) {
            self.device.close_lost();
        }
        if !self.is_open() {
            return;
        }
        // One that is connected and only waits for fences is of no use to IO.
        if !self.paths.iter().any(|path| path.fence.carries()) {
            self.no_path.begin(ctx.now);
        }
        // The server closes the device with the last path it has of us.
        if !self.paths.are_connected() {
            self.device.lost();
            self.no_path.begin(ctx.now);
            self.notify_all(&ShardMessage::Closed, ctx);
        }
    }

    /// A session whose every path failed, on each of its addresses, before the device was ever
    /// open gives up: the attach fails at once with the reasons instead of waiting for a server
    /// that may never come.
    fn check_attach(&mut self, now: Instant) {
        if self.device.was_open() || !self.is_running() {
            return;
        }
        if let Some(why) = self.paths.why_all_failed(self.device.is_patient(now)) {
            self.device.fail(SessionFailure::Unreachable(why));
        }
    }

    /// When `poll` wants to be called even if nothing happens.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let no_path = self.no_path.deadline().filter(|_| !self.detaching);
        let fence = fence::deadline(&self.paths);
        let soonest = earliest(earliest(self.device.close_deadline(), fence), no_path);
        let may_start = self.is_running();
        let soonest = earliest(soonest, again::deadline(&self.paths).filter(|_| may_start));
        self.paths.iter().fold(soonest, |at, path| earliest(at, path.deadline(may_start)))
    }
}
