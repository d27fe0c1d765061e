//! The control shard's part of one path: its state, its attempts and how it ends.
//!
//! Decisions that depend on other paths are made elsewhere. Methods that fail return the reason why
//! the path must end.

use std::sync::Arc;

use rtrs_core::fabric::{CloseReason, RemoteMem};
use rtrs_core::identity::ServerId;
use rtrs_core::ids::{ConnIndex, CoreIndex, PathId, PermitId};
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::{Extensions, errno};

use super::attempts::{Attempt, Attempts};
use super::change::ChangeError;
use super::channel::Channel;
use super::due::{Due, End};
use super::leave::{Departure, Leave, Why};
use super::path_fence::Carried;
use super::path_proof::PathProof;
use super::path_volumes::{PathVolumes, STEP_TIMEOUT};
use super::status::{PathErrors, PathProgress, PathStatus};
use super::terms::Asked;
use super::volume::Volume;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceIndex;
use crate::engine::message::ShardMessage;
use crate::engine::path_end::PathEnd;
use crate::engine::prover::AuthError;
use crate::engine::session::{Failover, Granted, PathTarget, Resolved, SessionConfig, Tuning};
use crate::path::handshake::{Claims, Proof};
use crate::path::state::PathState;

/// Time limit for closing all of a path's connections; after that they are aborted once more.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Path {
    config: Arc<SessionConfig>,
    id: PathId,
    state: PathState,
    pub(super) channel: Channel,
    /// Chunks of the path, until it is connected.
    pub(super) opening: Option<Arc<[RemoteMem]>>,
    proof: PathProof,
    pub(super) volumes: PathVolumes,
    attempts: Attempts,
    departure: Departure,
    /// Reason why the path last ended, until it reconnects.
    last_end: Option<PathEnd>,
    errors: PathErrors,
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
        let prover = config.prover.clone().filter(|_| target.proves);
        Self {
            config: Arc::clone(config),
            id,
            state: PathState::Waiting,
            opening: None,
            proof: PathProof::new(prover),
            volumes: PathVolumes::new(id, waits, seed),
            attempts: Attempts::new(now, target.remotes.len(), waits, seed),
            departure: Departure::default(),
            last_end: None,
            errors: PathErrors::default(),
            channel: Channel::new(id, uuid, epoch, target, config),
        }
    }

    pub(super) fn id(&self) -> PathId {
        self.id
    }

    pub(super) fn state(&self) -> PathState {
        self.state
    }

    pub(super) fn is_connected(&self) -> bool {
        self.state == PathState::Connected
    }

    /// Whether listings show the path; false after its removal.
    pub(super) fn is_listed(&self) -> bool {
        !self.departure.is_final()
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.departure.is_begun()
    }

    /// Number of the last attempt.
    pub(super) fn epoch(&self) -> u32 {
        self.channel.connections().epoch()
    }

    /// Whether silence proves nothing: a kernel server answers no heartbeats while it opens or
    /// closes a device.
    pub(super) fn may_be_silent(&self) -> bool {
        self.volumes.terms.asked().is_some() && !self.channel.fences()
    }

    /// Reason why the path last ended, unless it is connected.
    pub(super) fn last_end(&self) -> Option<&PathEnd> {
        self.last_end.as_ref()
    }

    /// Whether the path is waiting because all its addresses were tried without success.
    pub(super) fn has_failed(&self) -> bool {
        self.state == PathState::Waiting && self.attempts.reconnect.has_tried_all()
    }

    /// Whether the server knows the session through this path: its first connection was accepted.
    pub(super) fn is_known(&self) -> bool {
        match self.state {
            PathState::Connecting => self.channel.connections().is_accepted(),
            state => state.is_up(),
        }
    }

    /// Whether this path is using this permit of the control shard.
    pub(super) fn is_using(&self, permit: PermitId) -> bool {
        matches!(self.state, PathState::Opening | PathState::Connected)
            && self.channel.is_using(permit)
    }

    /// Starts an attempt. `first_conn` means that the server may create the session; `queue_depth`
    /// is the session's, 0 if it has none yet.
    pub(super) fn start(
        &mut self,
        first_conn: bool,
        queue_depth: u16,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        self.state.advance(PathState::Connecting);
        self.attempts.until = ctx.now + self.config.connect_timeout * 2;
        let claims = Claims { first_conn, queue_depth, proves: self.proof.is_needed() };
        self.channel.start(claims, &self.config, ctx)
    }

    /// Postpones the next attempt.
    pub(super) fn postpone(&mut self, until: Instant) {
        self.attempts.until = until;
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
        self.proof.check(extensions)?;
        self.channel.accepted(granted, extensions, id)?;
        self.connect_next(ctx)
    }

    /// Handles a shard's established connection.
    pub(super) fn shard_connected(
        &mut self,
        epoch: u32,
        cid: ConnIndex,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        if self.state == PathState::Connecting && self.channel.connections().is_next(epoch, cid) {
            return self.connect_next(ctx);
        }
        Ok(())
    }

    /// Requests the next connection, or sends INFO_REQ when all are up.
    fn connect_next(&mut self, ctx: &mut Ctx<'_>) -> Result<(), PathEnd> {
        self.attempts.until = ctx.now + self.config.connect_timeout * 2;
        if self.channel.connect_next(&self.config, ctx)? {
            return Ok(());
        }
        self.state.advance(PathState::InfoExchange);
        let session = &self.config.name;
        self.channel.post(ctx, |service, fabric| service.post_info(session, fabric))
    }

    /// Returns why the path must end after one of its connections has ended.
    pub(super) fn closed(&self, reason: CloseReason) -> PathEnd {
        match self.state {
            PathState::InfoExchange => {
                let has_extensions = self.channel.has_extensions();
                PathEnd::InfoUnanswered {
                    reason,
                    session: self.config.name.clone(),
                    has_extensions,
                }
            }
            _ => PathEnd::Closed(reason),
        }
    }

    /// Handles INFO_RSP. The path opens the device when its turn comes, at `until` at the latest.
    pub(super) fn on_info(
        &mut self,
        answer: Result<Arc<[RemoteMem]>, u16>,
        until: Instant,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        if self.state != PathState::InfoExchange {
            return Err(self.channel.internal_error("unexpected INFO_RSP"));
        }
        let refused = |errno| PathEnd::SessionRefused { errno, session: self.config.name.clone() };
        let chunks = answer.map_err(refused)?;
        self.opening = Some(chunks);
        self.channel.watch(ctx.now);
        if self.channel.is_challenged() {
            self.state.advance(PathState::Authenticating);
            self.attempts.until = ctx.now + STEP_TIMEOUT;
            return self.proof.challenge(&mut self.channel, ctx);
        }
        self.state.advance(PathState::Opening);
        self.attempts.until = until;
        Ok(())
    }

    /// Handles an answer to CHALLENGE or AUTH. Returns whether the server has accepted the client:
    /// the path then opens the device when its turn comes, at `until` at the latest.
    pub(super) fn on_proof(
        &mut self,
        proof: Proof,
        until: Instant,
        ctx: &mut Ctx<'_>,
    ) -> Result<bool, PathEnd> {
        match proof {
            Proof::Server(answer) if self.state == PathState::Authenticating => {
                let session = self.config.id;
                self.proof.challenged(session, &answer, &mut self.channel, ctx)?;
                Ok(false)
            }
            Proof::Accepted if self.state == PathState::Authenticating => {
                self.state.advance(PathState::Opening);
                self.attempts.until = until;
                Ok(true)
            }
            Proof::Server(_) => Err(self.channel.internal_error("an answer without a challenge")),
            Proof::Accepted => Err(self.channel.internal_error("an answer without a proof")),
            // The server compares the session's name with others only after the proof.
            Proof::Refused(errno @ errno::EEXIST) => {
                Err(PathEnd::SessionRefused { errno, session: self.config.name.clone() })
            }
            Proof::Refused(errno) => {
                let asked = self.proof.is_asked();
                Err(AuthError::Refused { errno, asked }.into())
            }
        }
    }

    /// Opens a volume for the first time in this attempt. If `until` is set, repeats the open with
    /// other access, within the first request's time limit.
    pub(super) fn open(
        &mut self,
        volume: &Volume,
        until: Option<Instant>,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        match (self.state, until) {
            (PathState::Opening, None) => self.attempts.until = ctx.now + STEP_TIMEOUT,
            (PathState::Opening, Some(_)) | (PathState::Connected, _) => {}
            _ => {
                let what = "an open on a path that is not opening";
                return Err(self.channel.internal_error(what));
            }
        }
        self.volumes.open(volume, until, &mut self.channel, ctx)
    }

    /// Takes the request to which the received answer belongs.
    pub(super) fn answered(&mut self) -> Result<Asked, PathEnd> {
        let asked = self.volumes.terms.answered();
        asked.ok_or_else(|| self.channel.internal_error("an answer without a request"))
    }

    /// Whether the path is connected and can send a request.
    pub(super) fn is_free(&self) -> bool {
        self.is_connected() && !self.is_leaving() && self.channel.is_idle()
    }

    /// Whether the path is connected and serves a volume.
    pub(super) fn has(&self, volume: DeviceIndex) -> bool {
        self.is_connected() && self.volumes.terms.serves(volume)
    }

    /// Whether IO to a volume can use the path.
    pub(super) fn carries(&self, volume: DeviceIndex) -> bool {
        let carries = self.volumes.carries(volume);
        // Both end at the same time when the path ends.
        debug_assert!(!carries || self.is_connected(), "{:?} carries IO", self.state);
        carries
    }

    /// Connects the path once its first volume is open.
    pub(super) fn connected(&mut self, now: Instant) -> Result<(), PathEnd> {
        let chunks = self.opening.take().filter(|_| self.state == PathState::Opening);
        let Some(chunks) = chunks else {
            let what = "a volume opened on a path that is not opening";
            return Err(self.channel.internal_error(what));
        };
        tracing::info!(path = %self.channel.name(), "path connected");
        self.state.advance(PathState::Connected);
        // A leaving path reconnects only to prove that none of its requests remain.
        if !self.is_leaving() {
            self.attempts.reconnect.connected();
            self.last_end = None;
            self.channel.watch(now);
            self.volumes.fence.connected(chunks);
        }
        Ok(())
    }

    /// Ends the wait for the path's fence, if there is one. Returns the message for the shards.
    pub(super) fn fenced(&mut self) -> Option<ShardMessage> {
        if self.state == PathState::Closing && self.channel.target().invalidate_reads {
            // Over a connection that is still open, the server may place data that it has begun to
            // send into the memory of a read.
            self.volumes.fence.answered();
            return None;
        }
        let epoch = self.volumes.fence.fenced()?;
        Some(ShardMessage::Fenced { path: self.id, epoch })
    }

    /// Applies new settings.
    pub(super) fn tune(&mut self, now: Instant, config: &Arc<SessionConfig>, tuning: &Tuning) {
        self.config = Arc::clone(config);
        self.attempts.reconnect.set_waits(config.reconnect_min, config.reconnect_max);
        self.volumes.terms.set_waits(config.reconnect_min, config.reconnect_max);
        let heartbeats = tuning.heartbeats(self.channel.target().transport);
        self.channel.heartbeat.tune(now, heartbeats);
    }

    /// Acts on a network change that is due, if any. Returns Some(true) if the current attempt must
    /// end so that a new one can start, which happens only once the device `was_open`.
    pub(super) fn poll_network(&mut self, now: Instant, was_open: bool) -> Option<bool> {
        let connections = self.channel.connections();
        let attempt = Attempt {
            path: self.channel.name(),
            epoch: connections.epoch(),
            started: connections.started(),
        };
        self.attempts.poll_network(now, self.state, attempt, was_open)
    }

    /// Handles a network change that may help the path.
    pub(super) fn network_changed(&mut self, what: &str, ctx: &Ctx<'_>) {
        if !self.channel.is_rdma(ctx) {
            self.attempts.network_changed(ctx.now, self.state, what);
        }
    }

    /// Next action of the path.
    pub(super) fn due(&self, now: Instant, may_start: bool) -> Due {
        let over = now >= self.attempts.until;
        match self.state {
            PathState::Waiting if self.is_leaving() && !self.volumes.fence.is_awaited() => {
                Due::Leave
            }
            PathState::Waiting if over && may_start => Due::Start,
            PathState::Connecting | PathState::InfoExchange if over => {
                Due::End(PathEnd::ConnectTimeout)
            }
            PathState::Closing if over => Due::Close,
            PathState::Opening if over => Due::End(PathEnd::OpenTimeout),
            PathState::Authenticating if over => Due::End(PathEnd::AuthTimeout),
            PathState::Connected if self.departure.deadline().is_some_and(|at| now >= at) => {
                Due::End(PathEnd::LeaveTimeout)
            }
            state if state.has_service() => match self.volumes.terms.late(now) {
                Some(why) if state == PathState::Connected => Due::End(why),
                _ => Due::Heartbeat,
            },
            _ => Due::Nothing,
        }
    }

    /// Time at which `due` must be rechecked.
    pub(super) fn deadline(&self, may_start: bool) -> Option<Instant> {
        let own = match self.state {
            PathState::Connected => {
                let asked = self.volumes.terms.asked().map(|asked| asked.until);
                let heartbeat = self.channel.heartbeat.deadline();
                earliest(earliest(heartbeat, self.departure.deadline()), asked)
            }
            state if state.has_service() => {
                earliest(self.channel.heartbeat.deadline(), Some(self.attempts.until))
            }
            PathState::Disconnected | PathState::Gone => None,
            PathState::Waiting if !may_start => None,
            _ => Some(self.attempts.until),
        };
        earliest(own, self.attempts.network_deadline())
    }

    /// Takes the path out of use. Returns whether its connections must be closed now.
    pub(super) fn leave(&mut self, leave: Leave, ctx: &mut Ctx<'_>) -> Result<bool, ChangeError> {
        let why = leave.why();
        match self.state {
            PathState::Connected => {
                if !self.departure.begin_or_replace(leave) {
                    self.volumes.fence.withhold();
                    let message = ShardMessage::Retire { path: self.id, epoch: self.epoch() };
                    ctx.out.all_shards(self.config.shards, &message);
                }
            }
            PathState::Connecting
            | PathState::InfoExchange
            | PathState::Authenticating
            | PathState::Opening => {
                self.departure.set(Some(leave).filter(|_| why != Why::Reconnect));
                return Ok(self.is_leaving());
            }
            PathState::Closing => self.departure.set(Some(leave)),
            PathState::Waiting => {
                self.departure.set(Some(leave));
                self.finish_leave(ctx.now);
            }
            PathState::Disconnected => match why {
                Why::Remove => {
                    self.state.advance(PathState::Gone);
                    self.departure.remove();
                }
                Why::Disconnect => {}
                Why::Reconnect => {
                    self.state.advance(PathState::Waiting);
                    self.attempts.begin_anew(ctx.now);
                }
            },
            // `Standby` occurs only in listings.
            PathState::Gone | PathState::Standby => {
                return Err(ChangeError::PathEnded(self.channel.name().to_owned()));
            }
        }
        Ok(false)
    }

    /// Records that a shard has no requests in flight on the path. Returns whether that was the
    /// last shard, so that the connections must be closed now.
    pub(super) fn retired(&mut self, epoch: u32, shard: CoreIndex) -> bool {
        let leaves = self.epoch() == epoch && self.is_connected();
        let all = leaves && self.departure.retired(shard);
        if all {
            self.volumes.fence.drained();
        }
        all
    }

    /// Finishes leaving once all connections are closed. Returns whether the path has left and
    /// reached its final state.
    pub(super) fn finish_leave(&mut self, now: Instant) -> bool {
        let Some(why) = self.departure.why() else { return false };
        // Without a fence, only a reconnect proves that none of the path's requests remain.
        let strict = self.config.failover == Failover::Strict && !self.channel.fences();
        match why {
            Why::Reconnect => {
                if self.state != PathState::Waiting {
                    self.state.advance(PathState::Waiting);
                }
                self.attempts.begin_anew(now);
            }
            _ if strict && self.volumes.fence.is_awaited() => return false,
            Why::Disconnect => self.state.advance(PathState::Disconnected),
            Why::Remove => {
                self.state.advance(PathState::Gone);
                self.departure.remove();
                tracing::info!(path = %self.channel.name(), "path removed");
            }
        }
        self.departure.set(None);
        true
    }

    /// Ends the connections on all shards. Returns false if there are no connections or they are
    /// already ending.
    pub(super) fn end(&mut self, end: End, detaching: bool, ctx: &mut Ctx<'_>) -> bool {
        if !self.state.is_up() {
            return false;
        }
        if let Some(mut why) = end.why {
            if self.channel.target().remotes.len() > 1 {
                why = PathEnd::At(self.channel.remote(), Box::new(why));
            }
            if !detaching && self.last_end.as_ref() != Some(&why) {
                tracing::warn!(path = %self.channel.name(), "path down: {why}");
            }
            self.errors.add(ctx.now, &why);
            self.last_end = Some(why);
        }
        self.state.advance(PathState::Closing);
        self.attempts.until = ctx.now + CLOSE_TIMEOUT;
        self.opening = None;
        self.proof.end();
        let carried = Carried {
            server: self.channel.server(),
            process: self.channel.process(),
            volumes: self.volumes.terms.end(),
        };
        let recon_cnt = self.channel.connections().recon_cnt();
        self.volumes.fence.died(self.epoch(), recon_cnt, carried);
        self.channel.end(end.in_order, ctx);
        true
    }

    /// Aborts connections that take too long to close.
    pub(super) fn abort(&mut self, ctx: &mut Ctx<'_>) {
        self.attempts.until = ctx.now + CLOSE_TIMEOUT;
        self.channel.abort(ctx);
    }

    /// Finishes ending the path once all connections are closed: it is gone, stays disconnected, or
    /// waits for its next attempt. Returns whether all its addresses have failed, so that the host
    /// should be resolved again.
    pub(super) fn finish_end(&mut self, now: Instant, detaching: bool) -> bool {
        if self.state != PathState::Closing || !self.channel.connections().are_closed() {
            return false;
        }
        let at_once = self.attempts.ended();
        if detaching {
            self.state.advance(PathState::Gone);
        } else if !self.finish_leave(now) {
            self.state.advance(PathState::Waiting);
            self.attempts.schedule(now, at_once);
            return self.attempts.reconnect.is_round_over();
        }
        false
    }

    /// Adopts the host's current addresses. A waiting path tries new ones immediately.
    pub(super) fn resolved(&mut self, now: Instant, found: Resolved) {
        if self.channel.target_mut().resolved(found) {
            let target = self.channel.target();
            tracing::info!(path = %target.name, addresses = ?target.remotes, "host resolved");
            self.attempts.use_addresses(now, target.remotes.len());
        }
    }

    /// Ends the path with its session, unless it has connections. Returns whether its connections
    /// must be closed first.
    pub(super) fn detach(&mut self) -> bool {
        if matches!(self.state, PathState::Waiting | PathState::Disconnected) {
            self.state.advance(PathState::Gone);
        }
        self.state.is_up()
    }
}

impl From<&Path> for PathProgress {
    fn from(path: &Path) -> Self {
        Self {
            id: path.id,
            state: path.state,
            ends: path.attempts.reconnect.failed(),
            refused: path.volumes.terms.refused(),
        }
    }
}

impl From<&Path> for PathStatus {
    fn from(path: &Path) -> Self {
        let (target, connections) = (path.channel.target(), path.channel.connections());
        Self {
            id: path.id,
            path: target.name.clone(),
            transport: target.transport,
            address: match target.remotes[..] {
                [] => String::new(),
                _ => connections.remote().to_string(),
            },
            state: match path.state {
                PathState::Connected if path.volumes.terms.are_standby() => PathState::Standby,
                state => state,
            },
            leaving: path.departure.why().map(Why::name),
            volumes: path.volumes.terms.served().count(),
            connections: connections.count(),
            reconnects: path.attempts.reconnect.reconnects(),
            ends: path.attempts.reconnect.failed(),
            heartbeat_us: match connections.shared().latency_ns() {
                0 => None,
                ns => Some(ns / 1000),
            },
            silence_max_ms: path.channel.heartbeat.silence_max_ms(),
            heartbeats: path.channel.heartbeat.count(),
            internal_errors: path.channel.internal_errors(),
            last_end: path.last_end.clone(),
            errors: path.errors.clone(),
        }
    }
}
