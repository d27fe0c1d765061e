//! A path's channel to its server: connections, properties that the server reported, and
//! heartbeats.

use std::net::{IpAddr, SocketAddr};

use rtrs_core::fabric::{Fabric, FabricError, WcOp, WcStatus, WorkCompletion};
use rtrs_core::identity::{ServerId, ServerProcess};
use rtrs_core::ids::{ConnIndex, PathId, PathUuid, PermitId, ProviderIndex, QpNum};
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::Extensions;

use super::connections::Connections;
use super::heartbeat::{Finding, HeartbeatMonitor};
use crate::engine::ctx::Ctx;
use crate::engine::path_end::PathEnd;
use crate::engine::session::{Granted, PathTarget, SessionConfig};
use crate::path::handshake::{Claims, ServiceConnection, ServiceEvent};

/// Properties that the server reported in the last attempt that it accepted.
#[derive(Debug)]
struct ServerInfo {
    /// Whether the server supports FENCE.
    fences: bool,
    id: Option<ServerId>,
    process: ServerProcess,
    /// Whether the server has already accepted the path, and may be asked to recreate the session.
    accepted: bool,
    /// Longest heartbeat interval of an idle path that the server accepts; zero if the server
    /// accepts only the usual interval.
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

/// A path's channel to its server. Methods that fail return the reason why the path must end.
#[derive(Debug)]
pub(super) struct Channel {
    target: PathTarget,
    connections: Connections,
    server: ServerInfo,
    pub(super) heartbeat: HeartbeatMonitor,
    /// Number of impossible states encountered, which are bugs on this side.
    internal_errors: u64,
}

impl Channel {
    /// Creates the channel of a path that has never been tried. `epoch` is the last attempt number
    /// used in the path's slot.
    pub(super) fn new(
        path: PathId,
        uuid: [u8; 16],
        epoch: u32,
        target: PathTarget,
        config: &SessionConfig,
    ) -> Self {
        let uuid = PathUuid(uuid);
        Self {
            connections: Connections::new(path, uuid, &target, epoch, config.shards),
            server: ServerInfo::UNKNOWN,
            heartbeat: HeartbeatMonitor::new([config.heartbeat, target.heartbeat]),
            internal_errors: 0,
            target,
        }
    }

    pub(super) fn uuid(&self) -> PathUuid {
        self.connections.uuid()
    }

    /// Name of the path as the user wrote it.
    pub(super) fn name(&self) -> &str {
        &self.target.name
    }

    pub(super) fn target(&self) -> &PathTarget {
        &self.target
    }

    pub(super) fn target_mut(&mut self) -> &mut PathTarget {
        &mut self.target
    }

    pub(super) fn connections(&self) -> &Connections {
        &self.connections
    }

    /// Whether the server supports FENCE, as last reported.
    pub(super) fn fences(&self) -> bool {
        self.server.fences
    }

    /// Server ID, as last reported.
    pub(super) fn server(&self) -> Option<ServerId> {
        self.server.id
    }

    /// Server process, as last reported.
    pub(super) fn process(&self) -> ServerProcess {
        self.server.process
    }

    /// Time at which the last attempt began.
    pub(super) fn started(&self) -> Instant {
        self.connections.started()
    }

    /// Address of the server in the last attempt.
    pub(super) fn remote(&self) -> SocketAddr {
        self.connections.remote()
    }

    /// Address of this end of connection 0, if there is one.
    pub(super) fn local_ip(&self, ctx: &Ctx<'_>) -> Option<IpAddr> {
        let service = self.connections.service()?;
        ctx.fabrics[self.target.provider.index()].local_ip(service.qp())
    }

    /// Whether connection 0 has this queue pair.
    pub(super) fn is(&self, provider: ProviderIndex, qp: QpNum) -> bool {
        self.connections.is(provider, qp)
    }

    /// Whether a request of the control shard is using this permit.
    pub(super) fn is_using(&self, permit: PermitId) -> bool {
        self.connections.service().is_some_and(|service| service.is_using(permit))
    }

    /// Whether connection 0 exists and no request of the control shard is in flight on it.
    pub(super) fn is_idle(&self) -> bool {
        self.connections.service().is_some_and(ServiceConnection::is_idle)
    }

    /// Whether the server announced extensions, which kernel servers do not.
    pub(super) fn has_extensions(&self) -> bool {
        self.connections.service().is_some_and(ServiceConnection::has_extensions)
    }

    /// Whether the server must prove its identity on this connection.
    pub(super) fn is_challenged(&self) -> bool {
        self.connections.service().is_some_and(ServiceConnection::is_challenged)
    }

    /// Whether the provider knows that the peer's system has acknowledged all data sent.
    pub(super) fn peer_has_all(&self, ctx: &Ctx<'_>) -> bool {
        let fabric = ctx.fabrics[self.target.provider.index()].as_ref();
        let service = self.connections.service();
        service.is_some_and(|service| fabric.peer_has_all(service.qp()) == Some(true))
    }

    pub(super) fn is_rdma(&self, ctx: &Ctx<'_>) -> bool {
        ctx.fabrics[self.target.provider.index()].capabilities().scheme == "rdma"
    }

    /// Whether the path's configured source address is among `addresses`.
    pub(super) fn comes_from(&self, addresses: &[IpAddr]) -> bool {
        self.target.local.is_some_and(|local| addresses.contains(&local))
    }

    /// Whether the path has a configured source address that is not among `addresses`.
    pub(super) fn comes_from_elsewhere(&self, addresses: &[IpAddr]) -> bool {
        self.target.local.is_some_and(|local| !addresses.contains(&local))
    }

    /// Reports an impossible state, which is a bug. Returns the reason why the path must end.
    pub(super) fn internal_error(&mut self, what: &'static str) -> PathEnd {
        tracing::error!(path = %self.target.name, what, "internal error");
        self.internal_errors += 1;
        PathEnd::Internal(what)
    }

    /// Counts an impossible state in a shard, after which the shard ended its connection.
    pub(super) fn count_internal_error(&mut self) {
        self.internal_errors += 1;
    }

    pub(super) fn internal_errors(&self) -> u64 {
        self.internal_errors
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

    /// Posts a work request on connection 0.
    pub(super) fn post(
        &mut self,
        ctx: &mut Ctx<'_>,
        post: impl FnOnce(&mut ServiceConnection, &mut dyn Fabric) -> Result<(), FabricError>,
    ) -> Result<(), PathEnd> {
        Ok(self.try_post(ctx, post)?)
    }

    /// Starts an attempt with connection 0. The attempt may also create the session if the server
    /// has accepted the path before.
    pub(super) fn start(
        &mut self,
        claims: Claims,
        config: &SessionConfig,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        let first_conn = claims.first_conn || self.server.accepted;
        let claims = Claims { first_conn, ..claims };
        self.connections.start(&self.target, claims, config, ctx)
    }

    /// Records the properties that the server reported when it accepted connection 0.
    pub(super) fn accepted(
        &mut self,
        granted: Granted,
        extensions: Extensions,
        id: Option<ServerId>,
    ) -> Result<(), PathEnd> {
        let Some(service) = self.connections.service_mut() else {
            return Err(self.internal_error("an accepted path without connection 0"));
        };
        service.granted(granted, extensions);
        let idle_max = Duration::from_millis(extensions.idle_ms.unwrap_or_default().into());
        let fences = extensions.fence;
        let process = extensions.process.unwrap_or(ServerProcess::NONE);
        self.server = ServerInfo { fences, id, process, accepted: true, idle_max };
        Ok(())
    }

    /// Requests the next connection. Returns false if all are up.
    pub(super) fn connect_next(
        &mut self,
        config: &SessionConfig,
        ctx: &mut Ctx<'_>,
    ) -> Result<bool, PathEnd> {
        let next = self.connections.connect_next(config, ctx.out);
        next.ok_or_else(|| self.internal_error("a path without connection 0"))
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
        // A heartbeat from the server tests only one direction: it would be sent even if nothing
        // from this end arrived. Answers to this end's heartbeats are counted separately from use.
        let beat =
            matches!(event, Ok(ServiceEvent::HeartbeatAsked | ServiceEvent::HeartbeatAnswered));
        if received && wc.status == WcStatus::Success && !beat {
            self.connections.shared().received(ctx.now);
        }
        Ok(event?)
    }

    /// Starts the heartbeats.
    pub(super) fn watch(&mut self, now: Instant) {
        self.heartbeat.start(now, self.server.fences, self.server.idle_max);
    }

    pub(super) fn send_heartbeat(&mut self, ctx: &mut Ctx<'_>) -> Result<(), PathEnd> {
        self.heartbeat.sent();
        let (next_ms, idle) = self.heartbeat.announces().unwrap_or_default();
        self.connections.shared().set_idle(idle);
        self.post(ctx, |service, fabric| service.post_heartbeat(next_ms, fabric))
    }

    pub(super) fn heartbeat_answered(&mut self, now: Instant) {
        if let Some(latency) = self.heartbeat.on_answer(now) {
            self.connections.shared().set_latency(latency);
        }
    }

    /// Checks the heartbeats. `used` is the time when the session was last used.
    pub(super) fn look(&mut self, now: Instant, used: Instant) -> Finding {
        if used >= now && self.heartbeat.begin_io(now) {
            return Finding::Due;
        }
        self.heartbeat.look(now, self.connections.shared().last_received(), used)
    }

    /// Time at which a shard last used the path.
    pub(super) fn last_used(&self) -> Instant {
        self.connections.shared().last_used()
    }

    /// Ends all connections, immediately or in order, and the heartbeats.
    pub(super) fn end(&mut self, in_order: bool, ctx: &mut Ctx<'_>) {
        self.heartbeat.stop();
        self.connections.shared().set_latency(Duration::ZERO);
        self.connections.end(in_order, ctx);
    }

    /// Immediately ends connections that take too long to end.
    pub(super) fn abort(&mut self, ctx: &mut Ctx<'_>) {
        self.connections.end(false, ctx);
    }

    pub(super) fn connection_ended(&mut self, cid: ConnIndex) {
        self.connections.ended(cid);
    }
}
