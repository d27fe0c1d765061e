//! Control shard's part of one path: its state, attempts and end.
//!
//! Decisions that depend on other paths are made elsewhere. Methods that fail return the reason why
//! the path has to end.

mod prove;
mod retry;

use std::sync::Arc;

use rtrs_core::fabric::{
    CloseReason, Fabric, FabricError, RemoteMem, WcOp, WcStatus, WorkCompletion,
};
use rtrs_core::identity::{ServerId, ServerProcess};
use rtrs_core::ids::{ConnIndex, CoreIndex, PathId, PathUuid, PermitId, ProviderIndex, QpNum};
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::{Challenge, Extensions};

use super::change::ChangeError;
use super::connections::Connections;
use super::due::{Due, End};
use super::heartbeat::{Finding, HeartbeatMonitor};
use super::leave::{Leave, Why};
use super::network::NetworkRetry;
use super::path_fence::{Carried, PathFence};
use super::reconnect::Reconnect;
use super::status::PathStatus;
use super::terms::Terms;
use crate::engine::ctx::Ctx;
use crate::engine::message::ShardMessage;
use crate::engine::path_end::PathEnd;
use crate::engine::session::{Failover, Granted, PathTarget, SessionConfig, Tuning};
use crate::path::handshake::{Claims, ServiceConnection, ServiceEvent};
use crate::path::state::PathState;

/// Time limit for each step of opening the device, and for a fence. A kernel server opens its disk
/// before it processes anything else on the connection, including heartbeats. `rtrs-server` answers
/// heartbeats meanwhile, so they reveal a silent path (`silence.rs`).
pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for ending all connections of a path; afterwards they are aborted once more.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Properties that the server reported in the last attempt that it accepted.
#[derive(Debug)]
struct ServerInfo {
    /// Whether the server supports FENCE.
    fences: bool,
    id: Option<ServerId>,
    process: ServerProcess,
    /// Whether the server has accepted the path before, and may be asked to create the session
    /// anew.
    accepted: bool,
    /// Longest heartbeat interval of an idle path that the server accepts; zero for only the usual
    /// one.
    idle_max: Duration,
}

impl ServerInfo {
    const UNKNOWN: Self = Self {
        fences: false,
        id: None,
        process: ServerProcess::NONE,
        accepted: false,
        idle_max: Duration::ZERO,
    };
}

#[derive(Debug)]
pub(super) struct Path {
    config: Arc<SessionConfig>,
    id: PathId,
    target: PathTarget,
    state: PathState,
    /// Deadline of the state.
    until: Instant,
    connections: Connections,
    server: ServerInfo,
    /// Chunks of the path, until it is connected.
    pub(super) opening: Option<Arc<[RemoteMem]>>,
    /// Outstanding challenge to the server.
    challenge: Option<Challenge>,
    pub(super) terms: Terms,
    pub(super) fence: PathFence,
    pub(super) heartbeat: HeartbeatMonitor,
    reconnect: Reconnect,
    network: NetworkRetry,
    leave: Option<Leave>,
    /// Permanently removed: no longer listed, and the slot may be reused.
    removed: bool,
    last_end: Option<PathEnd>,
    /// Number of impossible states encountered, which are bugs of this end.
    internal_errors: u64,
}

impl Path {
    /// Creates a path that is due to connect now. `epoch` is the last attempt number used in its
    /// slot.
    pub(super) fn new(
        now: Instant,
        id: PathId,
        epoch: u32,
        target: PathTarget,
        uuid: [u8; 16],
        config: &Arc<SessionConfig>,
    ) -> Self {
        let seed = config.seed ^ u64::from(id.0 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let waits = (config.reconnect_min, config.reconnect_max);
        let uuid = PathUuid(uuid);
        Self {
            config: Arc::clone(config),
            id,
            state: PathState::Waiting,
            until: now,
            connections: Connections::new(id, uuid, &target, epoch, config.shards),
            server: ServerInfo::UNKNOWN,
            opening: None,
            challenge: None,
            terms: Terms::new(waits, seed),
            fence: PathFence::default(),
            heartbeat: HeartbeatMonitor::new([config.heartbeat, target.heartbeat]),
            reconnect: Reconnect::new(target.remotes.len(), waits, seed),
            network: NetworkRetry::default(),
            leave: None,
            removed: false,
            last_end: None,
            internal_errors: 0,
            target,
        }
    }

    pub(super) fn id(&self) -> PathId {
        self.id
    }

    pub(super) fn uuid(&self) -> PathUuid {
        self.connections.uuid()
    }

    /// Name as the user wrote it.
    pub(super) fn name(&self) -> &str {
        &self.target.name
    }

    pub(super) fn state(&self) -> PathState {
        self.state
    }

    pub(super) fn is_connected(&self) -> bool {
        self.state == PathState::Connected
    }

    /// Whether listings show the path; false after its removal.
    pub(super) fn is_listed(&self) -> bool {
        !self.removed
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.leave.is_some()
    }

    /// Number of the last attempt.
    pub(super) fn epoch(&self) -> u32 {
        self.connections.epoch()
    }

    /// Time at which the last attempt began.
    pub(super) fn started(&self) -> Instant {
        self.connections.started()
    }

    /// Whether connection 0 has this queue pair.
    pub(super) fn is(&self, provider: ProviderIndex, qp: QpNum) -> bool {
        self.connections.is(provider, qp)
    }

    /// Whether the server supports FENCE, as last reported.
    pub(super) fn fences(&self) -> bool {
        self.server.fences
    }

    /// Whether silence proves nothing: a kernel server answers no heartbeat while it opens or
    /// closes a device.
    pub(super) fn may_be_silent(&self) -> bool {
        self.terms.asked().is_some() && !self.server.fences
    }

    /// Server ID, as last reported.
    pub(super) fn server(&self) -> Option<ServerId> {
        self.server.id
    }

    /// Server process, as last reported.
    pub(super) fn process(&self) -> ServerProcess {
        self.server.process
    }

    /// Reason for the last end of the path.
    pub(super) fn last_end(&self) -> Option<&PathEnd> {
        self.last_end.as_ref()
    }

    /// Whether the path is waiting after each of its addresses was tried without success.
    pub(super) fn has_failed(&self) -> bool {
        self.state == PathState::Waiting && self.reconnect.has_tried_all()
    }

    /// Whether the server knows the session through this path: its first connection was accepted.
    pub(super) fn is_known(&self) -> bool {
        match self.state {
            PathState::Connecting => self.connections.is_accepted(),
            state => state.is_up(),
        }
    }

    /// Whether this path is using this permit of the control shard.
    pub(super) fn is_using(&self, permit: PermitId) -> bool {
        matches!(self.state, PathState::Opening | PathState::Connected)
            && self.connections.service().is_some_and(|service| service.is_using(permit))
    }

    /// Whether no request of the control shard is in flight on this path.
    pub(super) fn is_idle(&self) -> bool {
        self.connections.service().is_some_and(ServiceConnection::is_idle)
    }

    /// Whether the provider knows that the peer's system has acknowledged everything sent.
    pub(super) fn peer_has_all(&self, ctx: &Ctx<'_>) -> bool {
        let fabric = ctx.fabrics[self.target.provider.index()].as_ref();
        let service = self.connections.service();
        service.is_some_and(|service| fabric.peer_has_all(service.qp()) == Some(true))
    }

    /// Reports an impossible state, which is a bug. Returns the reason why the path has to end.
    pub(super) fn internal_error(&mut self, what: &'static str) -> PathEnd {
        tracing::error!(path = %self.target.name, what, "internal error");
        self.internal_errors += 1;
        PathEnd::Internal(what)
    }

    /// Counts an impossible state of a shard, after which the shard ended its connection.
    pub(super) fn count_internal_error(&mut self) {
        self.internal_errors += 1;
    }

    pub(super) fn try_post(
        &mut self,
        ctx: &mut Ctx<'_>,
        post: impl FnOnce(&mut ServiceConnection, &mut dyn Fabric) -> Result<(), FabricError>,
    ) -> Result<(), FabricError> {
        let fabric = ctx.fabrics[self.target.provider.index()].as_mut();
        let Some(service) = self.connections.service_mut() else {
            self.internal_error("a path without connection 0");
            return Err(FabricError::QpState);
        };
        post(service, fabric)
    }

    /// Posts on connection 0. The error is the reason why the path has to end.
    pub(super) fn post(
        &mut self,
        ctx: &mut Ctx<'_>,
        post: impl FnOnce(&mut ServiceConnection, &mut dyn Fabric) -> Result<(), FabricError>,
    ) -> Result<(), PathEnd> {
        Ok(self.try_post(ctx, post)?)
    }

    /// Starts an attempt. `first_conn` says that the server may create the session; `queue_depth`
    /// is the session's, 0 if there is none yet.
    pub(super) fn start(
        &mut self,
        first_conn: bool,
        queue_depth: u16,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        self.state.advance(PathState::Connecting);
        self.until = ctx.now + self.config.connect_timeout * 2;
        let claims = Claims {
            first_conn: first_conn || self.server.accepted,
            queue_depth,
            proves: self.target.proves && self.config.prover.is_some(),
        };
        Ok(self.connections.start(&self.target, claims, &self.config, ctx)?)
    }

    /// Postpones the next attempt.
    pub(super) fn postpone(&mut self, until: Instant) {
        self.until = until;
    }

    /// Handles the acceptance of connection 0: the server's identity, its limits and its
    /// extensions.
    pub(super) fn accepted(
        &mut self,
        granted: Granted,
        extensions: Extensions,
        id: Option<ServerId>,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        self.check_proofs(extensions)?;
        let Some(service) = self.connections.service_mut() else {
            return Err(self.internal_error("an accepted path without connection 0"));
        };
        service.granted(granted, extensions);
        let idle_max = Duration::from_millis(extensions.idle_ms.unwrap_or_default().into());
        let fences = extensions.fence;
        let process = extensions.process.unwrap_or(ServerProcess::NONE);
        self.server = ServerInfo { fences, id, process, accepted: true, idle_max };
        self.connect_next(ctx)
    }

    /// Handles a shard's established connection.
    pub(super) fn shard_connected(
        &mut self,
        epoch: u32,
        cid: ConnIndex,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        if self.state == PathState::Connecting && self.connections.is_next(epoch, cid) {
            return self.connect_next(ctx);
        }
        Ok(())
    }

    /// Requests the next connection, or sends INFO_REQ when all are up.
    fn connect_next(&mut self, ctx: &mut Ctx<'_>) -> Result<(), PathEnd> {
        self.until = ctx.now + self.config.connect_timeout * 2;
        match self.connections.connect_next(&self.config, ctx.out) {
            Some(true) => Ok(()),
            Some(false) => {
                self.state.advance(PathState::InfoExchange);
                let config = Arc::clone(&self.config);
                self.post(ctx, |service, fabric| service.post_info(&config.name, fabric))
            }
            None => Err(self.internal_error("a path without connection 0")),
        }
    }

    /// Returns why the path has to end after the end of a connection.
    pub(super) fn closed(&self, reason: CloseReason) -> PathEnd {
        match self.state {
            PathState::InfoExchange => {
                PathEnd::InfoUnanswered { reason, session: self.config.name.clone() }
            }
            _ => PathEnd::Closed(reason),
        }
    }

    /// Handles a completion of connection 0.
    pub(super) fn on_completion(
        &mut self,
        wc: &WorkCompletion,
        ctx: &mut Ctx<'_>,
    ) -> Result<ServiceEvent, PathEnd> {
        let fabric = ctx.fabrics[self.target.provider.index()].as_mut();
        let Some(service) = self.connections.service_mut() else {
            return Err(self.internal_error("a completion without a connection"));
        };
        let received = matches!(wc.op, WcOp::Recv | WcOp::RecvRdmaWithImm);
        let event = service.on_completion(wc, fabric);
        // A heartbeat from the server tests one direction only: it would be sent even if nothing
        // from this end arrived. Answers to this end's heartbeats are counted separately from use.
        let beat =
            matches!(event, Ok(ServiceEvent::HeartbeatAsked | ServiceEvent::HeartbeatAnswered));
        if received && wc.status == WcStatus::Success && !beat {
            self.connections.shared().received(ctx.now);
        }
        Ok(event?)
    }

    /// Handles INFO_RSP. The path opens the device when its turn comes, at `until` at the latest.
    pub(super) fn on_info(
        &mut self,
        answer: Result<Arc<[RemoteMem]>, u16>,
        until: Instant,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        if self.state != PathState::InfoExchange {
            return Err(self.internal_error("unexpected INFO_RSP"));
        }
        let refused = |errno| PathEnd::SessionRefused { errno, session: self.config.name.clone() };
        let chunks = answer.map_err(refused)?;
        self.opening = Some(chunks);
        self.heartbeat.start(ctx.now, self.server.fences, self.server.idle_max);
        if self.connections.service().is_some_and(ServiceConnection::is_challenged) {
            return self.challenge(ctx);
        }
        self.state.advance(PathState::Opening);
        self.until = until;
        Ok(())
    }

    /// Completes the connect after the first volume was opened.
    pub(super) fn advance_connected(&mut self, now: Instant, chunks: Arc<[RemoteMem]>) {
        tracing::info!(path = %self.target.name, "path connected");
        self.state.advance(PathState::Connected);
        // A leaving path reconnected only to prove that none of its requests is left.
        if self.leave.is_none() {
            self.reconnect.connected();
            self.last_end = None;
            self.heartbeat.start(now, self.server.fences, self.server.idle_max);
            self.fence.connected(chunks);
        }
    }

    /// Ends the wait for the path's fence, if there is one. Returns the message for the shards.
    pub(super) fn fenced(&mut self) -> Option<ShardMessage> {
        if self.state == PathState::Closing && self.target.invalidate_reads {
            // Over a connection that is still open, the server may place data that it has begun to
            // send into the memory of a read.
            self.fence.answered();
            return None;
        }
        let epoch = self.fence.fenced()?;
        Some(ShardMessage::Fenced { path: self.id, epoch })
    }

    /// Applies other settings.
    pub(super) fn tune(&mut self, now: Instant, config: &Arc<SessionConfig>, tuning: &Tuning) {
        self.config = Arc::clone(config);
        self.reconnect.set_waits(config.reconnect_min, config.reconnect_max);
        self.terms.set_waits(config.reconnect_min, config.reconnect_max);
        self.heartbeat.tune(now, tuning.heartbeats(self.target.transport));
    }

    pub(super) fn send_heartbeat(&mut self, ctx: &mut Ctx<'_>) -> Result<(), PathEnd> {
        self.heartbeat.sent();
        let (next_ms, idle) = self.heartbeat.announces().unwrap_or_default();
        self.connections.shared().set_idle(idle);
        self.post(ctx, |service, fabric| service.post_heartbeat(next_ms, fabric))
    }

    /// Records a request of an idle session. Returns whether a heartbeat has to be sent.
    pub(super) fn begin_io(&mut self, now: Instant) -> bool {
        self.heartbeat.begin_io(now)
    }

    pub(super) fn heartbeat_answered(&mut self, now: Instant) {
        if let Some(latency) = self.heartbeat.on_answer(now) {
            self.connections.shared().set_latency(latency);
        }
    }

    /// Time of the last use.
    pub(super) fn last_used(&self, now: Instant) -> Instant {
        // A request of the control shard is outstanding.
        let asks = self.is_connected() && !self.is_idle();
        if asks { now } else { self.connections.shared().last_used() }
    }

    /// Checks the heartbeats. `used` is the last use of the session.
    pub(super) fn look(&mut self, now: Instant, used: Instant) -> Finding {
        if used >= now && self.heartbeat.begin_io(now) {
            return Finding::Due;
        }
        self.heartbeat.look(now, self.connections.shared().last_received(), used)
    }

    /// Next action of the path.
    pub(super) fn due(&self, now: Instant, may_start: bool) -> Due {
        let over = now >= self.until;
        match self.state {
            PathState::Waiting if self.is_leaving() && !self.fence.is_awaited() => Due::Leave,
            PathState::Waiting if over && may_start => Due::Start,
            PathState::Connecting | PathState::InfoExchange if over => {
                Due::End(PathEnd::ConnectTimeout)
            }
            PathState::Closing if over => Due::Close,
            PathState::Opening if over => Due::End(PathEnd::OpenTimeout),
            PathState::Authenticating if over => Due::End(PathEnd::AuthTimeout),
            PathState::Connected if self.leave.as_ref().is_some_and(|l| now >= l.deadline()) => {
                Due::End(PathEnd::LeaveTimeout)
            }
            state if state.has_service() => match self.terms.late(now) {
                Some(why) if state == PathState::Connected => Due::End(why),
                _ => Due::Heartbeat,
            },
            _ => Due::Nothing,
        }
    }

    /// Time at which `due` must be checked again.
    pub(super) fn deadline(&self, may_start: bool) -> Option<Instant> {
        let own = match self.state {
            PathState::Connected => {
                let leave = self.leave.as_ref().map(Leave::deadline);
                let asked = self.terms.asked().map(|asked| asked.until);
                earliest(earliest(self.heartbeat.deadline(), leave), asked)
            }
            state if state.has_service() => earliest(self.heartbeat.deadline(), Some(self.until)),
            PathState::Disconnected | PathState::Gone => None,
            PathState::Waiting if !may_start => None,
            _ => Some(self.until),
        };
        earliest(own, self.network.deadline())
    }

    /// Takes the path out of use. Returns whether its connections have to be ended now.
    pub(super) fn leave(&mut self, leave: Leave, ctx: &mut Ctx<'_>) -> Result<bool, ChangeError> {
        let why = leave.why();
        match self.state {
            PathState::Connected => match self.leave.as_mut() {
                Some(before) => before.replace(&leave),
                None => {
                    self.leave = Some(leave);
                    self.fence.withhold();
                    let message = ShardMessage::Retire { path: self.id, epoch: self.epoch() };
                    ctx.out.all_shards(self.config.shards, &message);
                }
            },
            PathState::Connecting
            | PathState::InfoExchange
            | PathState::Authenticating
            | PathState::Opening => {
                self.leave = Some(leave).filter(|_| why != Why::Reconnect);
                return Ok(self.is_leaving());
            }
            PathState::Closing => self.leave = Some(leave),
            PathState::Waiting => {
                self.leave = Some(leave);
                self.finish_leave(ctx.now);
            }
            PathState::Disconnected => match why {
                Why::Remove => {
                    self.state.advance(PathState::Gone);
                    self.removed = true;
                }
                Why::Disconnect => {}
                Why::Reconnect => {
                    self.state.advance(PathState::Waiting);
                    self.begin_anew(ctx.now);
                }
            },
            // `Standby` occurs in listings only.
            PathState::Gone | PathState::Standby => {
                return Err(ChangeError::PathEnded(self.target.name.clone()));
            }
        }
        Ok(false)
    }

    /// Records that a shard has no requests of the path in flight. Returns whether that was the
    /// last shard, so that the connections have to be ended now.
    pub(super) fn retired(&mut self, epoch: u32, shard: CoreIndex) -> bool {
        let leaves = self.epoch() == epoch && self.is_connected();
        let Some(leave) = self.leave.as_mut().filter(|_| leaves) else { return false };
        let all = leave.retired(shard);
        if all {
            self.fence.drained();
        }
        all
    }

    /// Finishes leaving once all connections are closed. Returns whether the path left and has its
    /// final state.
    pub(super) fn finish_leave(&mut self, now: Instant) -> bool {
        let Some(leave) = self.leave.as_ref() else { return false };
        // Without a fence, only a reconnect proves that none of the path's requests is left.
        let strict = self.config.failover == Failover::Strict && !self.server.fences;
        match leave.why() {
            Why::Reconnect => {
                if self.state != PathState::Waiting {
                    self.state.advance(PathState::Waiting);
                }
                self.begin_anew(now);
            }
            _ if strict && self.fence.is_awaited() => return false,
            Why::Disconnect => self.state.advance(PathState::Disconnected),
            Why::Remove => {
                self.state.advance(PathState::Gone);
                self.removed = true;
                tracing::info!(path = %self.target.name, "path removed");
            }
        }
        self.leave = None;
        true
    }

    /// Makes the next attempt due now, as if it were the first.
    fn begin_anew(&mut self, now: Instant) {
        self.until = now;
        self.reconnect.forget_failures();
    }

    /// Ends the connections on all shards. Returns false when there are none or they are ending
    /// already.
    pub(super) fn end(&mut self, end: End, detaching: bool, ctx: &mut Ctx<'_>) -> bool {
        if !self.state.is_up() {
            return false;
        }
        if let Some(mut why) = end.why {
            if self.target.remotes.len() > 1 {
                why = PathEnd::At(self.connections.remote(), Box::new(why));
            }
            if !detaching && self.last_end.as_ref() != Some(&why) {
                tracing::warn!(path = %self.target.name, "path down: {why}");
            }
            self.last_end = Some(why);
        }
        self.state.advance(PathState::Closing);
        self.until = ctx.now + CLOSE_TIMEOUT;
        self.heartbeat.stop();
        (self.opening, self.challenge) = (None, None);
        let carried = Carried {
            server: self.server.id,
            process: self.server.process,
            volumes: self.terms.end(),
        };
        self.fence.died(self.connections.epoch(), self.connections.recon_cnt(), carried);
        self.connections.shared().set_latency(Duration::ZERO);
        self.connections.end(end.in_order, ctx);
        true
    }

    /// Aborts connections whose end takes too long.
    pub(super) fn abort(&mut self, ctx: &mut Ctx<'_>) {
        self.until = ctx.now + CLOSE_TIMEOUT;
        self.connections.end(false, ctx);
    }

    pub(super) fn connection_ended(&mut self, cid: ConnIndex) {
        self.connections.ended(cid);
    }

    /// Finishes the end once all connections are closed: the path ends, stays disconnected, or
    /// waits for its next attempt.
    pub(super) fn finish_end(&mut self, now: Instant, detaching: bool) {
        if self.state != PathState::Closing || !self.connections.are_closed() {
            return;
        }
        self.reconnect.ended();
        let at_once = self.network.take_at_once();
        if detaching {
            self.state.advance(PathState::Gone);
        } else if !self.finish_leave(now) {
            self.state.advance(PathState::Waiting);
            self.until = self.reconnect.next_attempt(now, at_once);
        }
    }

    /// Ends the path with its session, unless it has connections. Returns whether they have to be
    /// ended first.
    pub(super) fn detach(&mut self) -> bool {
        if matches!(self.state, PathState::Waiting | PathState::Disconnected) {
            self.state.advance(PathState::Gone);
        }
        self.state.is_up()
    }

    /// State of the path for listings.
    pub(super) fn status(&self) -> PathStatus {
        PathStatus {
            id: self.id,
            path: self.target.name.clone(),
            transport: self.target.transport,
            address: self.connections.remote().to_string(),
            state: match self.state {
                PathState::Connected if self.terms.are_standby() => PathState::Standby,
                state => state,
            },
            leaving: self.leave.as_ref().map(|leave| leave.why().name()),
            volumes: self.terms.served().count(),
            connections: self.connections.count(),
            reconnects: self.reconnect.reconnects(),
            ends: self.reconnect.failed(),
            heartbeat_us: match self.connections.shared().latency_ns() {
                0 => None,
                ns => Some(ns / 1000),
            },
            silence_max_ms: self.heartbeat.silence_max_ms(),
            heartbeats: self.heartbeat.count(),
            internal_errors: self.internal_errors,
            last_end: self.last_end.clone(),
        }
    }
}
