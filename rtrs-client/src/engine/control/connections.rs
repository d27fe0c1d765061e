//! A path's connections: connection 0 is managed here, the others through messages to their shards.

use std::net::SocketAddr;
use std::sync::Arc;

use rtrs_core::ids::{ConnIndex, CoreIndex, PathId, PathUuid, ProviderIndex, QpNum};
use rtrs_core::time::Instant;

use crate::engine::ctx::Ctx;
use crate::engine::message::{Connect, Outbox, ShardMessage};
use crate::engine::path_end::PathEnd;
use crate::engine::session::{PathShared, PathTarget, SessionConfig};
use crate::path::handshake::{Claims, Endpoints, ServiceConnection, conn_request};

/// Connections of the current or last attempt of a path.
#[derive(Debug)]
pub(super) struct Connections {
    path: PathId,
    uuid: PathUuid,
    provider: ProviderIndex,
    /// Attempt number, by which shards distinguish attempts.
    epoch: u32,
    /// Attempt number, as counted by the server.
    recon_cnt: u16,
    remote: SocketAddr,
    started: Instant,
    service: Option<ServiceConnection>,
    /// Claims of connection 0; those of the others may differ only in `first_conn`.
    claims: Claims,
    /// Whether each connection, by number, is up or being established.
    open: Vec<bool>,
    /// Connection that is being established.
    next: ConnIndex,
    shared: Arc<PathShared>,
}

impl Connections {
    /// Creates the connections of a path that has never been tried. `epoch` is the last attempt
    /// number used in this path's slot.
    pub(super) fn new(
        path: PathId,
        uuid: PathUuid,
        target: &PathTarget,
        epoch: u32,
        shards: u16,
    ) -> Self {
        Self {
            path,
            uuid,
            provider: target.provider,
            epoch,
            recon_cnt: 0,
            remote: target.remote(0),
            started: Instant::ZERO,
            service: None,
            claims: Claims { first_conn: true, queue_depth: 0, proves: false },
            open: vec![false; usize::from(shards) + 1],
            next: ConnIndex(0),
            shared: Arc::default(),
        }
    }

    pub(super) fn uuid(&self) -> PathUuid {
        self.uuid
    }

    pub(super) fn epoch(&self) -> u32 {
        self.epoch
    }

    pub(super) fn recon_cnt(&self) -> u16 {
        self.recon_cnt
    }

    pub(super) fn remote(&self) -> SocketAddr {
        self.remote
    }

    pub(super) fn started(&self) -> Instant {
        self.started
    }

    pub(super) fn shared(&self) -> &PathShared {
        &self.shared
    }

    /// Number of connections of the path.
    pub(super) fn count(&self) -> u16 {
        self.shards() + 1
    }

    /// Number of shards with a connection, not counting connection 0.
    pub(super) fn shards(&self) -> u16 {
        u16::try_from(self.open.len() - 1).unwrap_or(u16::MAX)
    }

    pub(super) fn service(&self) -> Option<&ServiceConnection> {
        self.service.as_ref()
    }

    pub(super) fn service_mut(&mut self) -> Option<&mut ServiceConnection> {
        self.service.as_mut()
    }

    /// Whether this is the queue pair of connection 0.
    pub(super) fn is(&self, provider: ProviderIndex, qp: QpNum) -> bool {
        self.provider == provider && self.service.as_ref().is_some_and(|s| s.qp() == qp)
    }

    /// Whether connection 0 was accepted in this attempt.
    pub(super) fn is_accepted(&self) -> bool {
        self.next.0 > 0
    }

    /// Starts an attempt with connection 0.
    pub(super) fn start(
        &mut self,
        target: &PathTarget,
        claims: Claims,
        config: &SessionConfig,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        self.remote = target.remote(self.epoch);
        self.epoch += 1;
        self.recon_cnt = self.recon_cnt.wrapping_add(1);
        self.started = ctx.now;
        self.next = ConnIndex(0);
        self.shared = Arc::default();
        self.claims = claims;
        if let Some(why) = &target.unresolved {
            return Err(why.clone().into());
        }
        let request = conn_request(config, self.uuid, self.recon_cnt, self.next, claims);
        let fabric = ctx.fabrics[self.provider.index()].as_mut();
        let (local, remote, path) = (target.local, self.remote, self.path);
        let ends = Endpoints { local, remote, peer_name: target.peer_name.clone(), path };
        let timeout = config.connect_timeout;
        self.service = Some(ServiceConnection::connect(ctx.now, ends, request, timeout, fabric)?);
        self.open[0] = true;
        Ok(())
    }

    /// Whether a shard's new connection is the one that was requested last.
    pub(super) fn is_next(&self, epoch: u32, cid: ConnIndex) -> bool {
        self.epoch == epoch && self.next == cid
    }

    /// Requests the next connection. Returns false if all are up, or None without connection 0.
    pub(super) fn connect_next(
        &mut self,
        config: &SessionConfig,
        out: &mut Outbox,
    ) -> Option<bool> {
        let service = self.service.as_ref()?;
        self.next.0 += 1;
        let cid = self.next;
        if cid.0 > self.shards() {
            return Some(false);
        }
        self.open[cid.index()] = true;
        let claims = Claims { first_conn: true, ..self.claims };
        let message = ShardMessage::Connect(Box::new(Connect {
            path: self.path,
            epoch: self.epoch,
            cid,
            remote: self.remote,
            pd: service.domain(),
            private_data: conn_request(config, self.uuid, self.recon_cnt, cid, claims),
            shared: Arc::clone(&self.shared),
            timed: service.is_timed(),
        }));
        out.shard(CoreIndex(cid.0 - 1), message);
        Some(true)
    }

    /// Ends connection 0, immediately or gracefully, and makes the shards end the others.
    pub(super) fn end(&mut self, in_order: bool, ctx: &mut Ctx<'_>) {
        if let Some(service) = self.service.as_mut() {
            service.end(ctx.now, in_order, ctx.fabrics[self.provider.index()].as_mut());
        }
        let message = ShardMessage::Disconnect { path: self.path, epoch: self.epoch, in_order };
        ctx.out.all_shards(self.shards(), &message);
    }

    pub(super) fn ended(&mut self, cid: ConnIndex) {
        self.open[cid.index()] = false;
        if cid.0 == 0 {
            self.service = None;
        }
    }

    pub(super) fn are_closed(&self) -> bool {
        self.open.iter().all(|open| !open)
    }
}
