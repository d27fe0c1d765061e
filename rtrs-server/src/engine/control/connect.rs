//! Connection requests of clients: the checks, and the resources of a new path.
//!
//! On a device that pins memory, registering chunks takes too long for a shard
//! (`Fabric::register_async`), so a different thread registers them. Until the chunks are
//! registered, the path's connections wait unanswered, so that they can still be refused with the
//! reason. Everything else continues, including the path's timeout; memory registered for a path
//! that has ended is released. On other devices memory is available immediately.

use std::net::IpAddr;
use std::sync::Arc;

use rtrs_core::fabric::{
    AsyncRegistration, ConnRequest, Fabric, PdUse, ProtectionDomain, RegisterError,
};
use rtrs_core::identity::ServerId;
use rtrs_core::ids::{ConnIndex, CoreIndex, ProviderIndex};
use rtrs_core::limits::{CONNECTION_BUFFERS_MAX, Limits, PATHS_PER_SESSION_MAX};
use rtrs_core::mem::{Counting, MemoryMeter};
use rtrs_core::proto::quota::Source;
use rtrs_core::time::Instant;
use rtrs_core::wire::{ClientExtensions, ConnReq, Extensions};

use super::chunk_pool::CachedChunks;
use super::client_log::ClientLog;
use super::handshake::Held;
use super::limiter::{Limiter, Newcomer};
use super::memory::{Memory, SessionMemory};
use super::path::Path;
use super::registry::{Registry, Session};
use crate::engine::control::refusal::{Refusal, acceptance};
use crate::engine::ctx::Ctx;
use crate::engine::message::{AcceptOrder, ShardMessage};
use crate::engine::session::{SessionParams, SessionShared};
use crate::export::ExportTable;
use crate::path::chunks::{ChunkPool, MessageBuffers};
use crate::path::{PathEnd, PathKey, PathOrigin, PathResources, PathShared, core_of};
use crate::stats::MemorySnapshot;

/// Maximum number of a session's dead paths whose block IO may still be running, or whose
/// connections may still be closing. Further paths are refused, because their memory would add up.
pub const DRAINING_MAX: usize = 4;

/// A connection request, with what admission knows about it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attempt<'a> {
    pub(super) provider: ProviderIndex,
    pub(super) request: &'a ConnRequest,
    /// The decoded private data of the request.
    pub(super) conn: &'a ConnReq,
    /// Whether the client must still authenticate on the path.
    pub(super) must_authenticate: bool,
}

/// Tables that a new path changes.
#[derive(Debug)]
pub(super) struct Tables<'a> {
    pub(super) registry: &'a mut Registry,
    pub(super) limiter: &'a mut Limiter,
}

/// Checks connection requests and creates paths.
#[derive(Debug)]
pub(super) struct Connector {
    params: SessionParams,
    exports: Arc<ExportTable>,
    memory: Memory,
}

impl Connector {
    pub(super) fn new(params: SessionParams, exports: Arc<ExportTable>) -> Self {
        let memory = Memory::new(params.memory_max);
        Self { params, exports, memory }
    }

    /// Memory used by chunks, and its limit, excluding the chunks of unauthenticated paths.
    pub(super) fn memory(&self) -> MemorySnapshot {
        self.memory.snapshot()
    }

    /// Meter for the chunks of all paths whose clients are known.
    pub(super) fn meter(&self) -> &Arc<MemoryMeter> {
        self.memory.meter()
    }

    /// Shard of a session's connection.
    pub(super) fn shard_of(&self, cid: ConnIndex, session: &SessionShared) -> CoreIndex {
        core_of(cid, session.first_shard, self.params.cores)
    }

    /// Resources requested by the path of a client that must authenticate. None if the connection
    /// joins an existing path.
    pub(super) fn newcomer(
        &self,
        attempt: Attempt<'_>,
        registry: &Registry,
        ctx: &Ctx<'_>,
    ) -> Result<Option<Newcomer>, Refusal> {
        let Attempt { provider, request, conn, .. } = attempt;
        let peer = request.peer.ip();
        let mut paths = registry.paths_of(conn.session_id);
        if paths.any(|path| path.is_named(conn) && path.is_connect(conn, peer)) {
            return Ok(None);
        }
        // Do not end a path for a connection that would be refused anyway, for another reason.
        check_session_exists(conn, registry)?;
        Self::check_path(attempt, registry)?;
        // Other devices commit memory when it is written.
        let bytes = match ctx.fabrics[provider.index()].capabilities().pins_memory {
            true => ChunkPool::bytes(self.limits_of(conn, registry)?) as u64,
            false => 0,
        };
        Ok(Some(Newcomer { session: conn.session_id, source: Source::of(peer), bytes }))
    }

    /// Limits of a new path.
    fn limits_of(&self, conn: &ConnReq, registry: &Registry) -> Result<Limits, Refusal> {
        let full = self.params.limits;
        let session = registry.session(conn.session_id).map(Session::shared);
        match session.filter(|session| session.who().is_some()).map(|session| session.limits) {
            Some(of) => Memory::check_depth(full, of, conn).map(|()| of),
            None => {
                let reserved = registry.reserved_by_others(conn.session_id);
                self.memory.limits_of_new(full, conn, reserved)
            }
        }
    }

    /// Checks whether a session with `paths` paths of known clients may have one more path. A
    /// session is always permitted as many paths as it has had at one time; further paths are
    /// permitted only if all of the session's chunks fit into memory-max.
    pub(super) fn check_memory(
        &self,
        session: &Session,
        paths: usize,
        registry: &Registry,
    ) -> Result<(), Refusal> {
        if paths == 0 || paths < session.cache.paths_max() {
            return Ok(());
        }
        let id = session.id();
        self.memory.check_further_path(&SessionMemory {
            paths,
            path_bytes: ChunkPool::bytes(session.shared().limits) as u64,
            used: registry.memory_of(id),
            reserved_by_others: registry.reserved_by_others(id),
        })
    }

    /// Returns the path to which a connection request belongs, if the path exists.
    pub(super) fn path_to_join<'a>(
        attempt: Attempt<'_>,
        registry: &'a Registry,
    ) -> Option<&'a Path> {
        let Attempt { request, conn, must_authenticate, .. } = attempt;
        // An unauthenticated connection joins only a path from its own address.
        let peer = request.peer.ip();
        let same = |path: &Path| match must_authenticate {
            true => path.is_connect(conn, peer),
            false => !path.is_unproved(),
        };
        registry.paths_of(conn.session_id).find(|path| path.is_named(conn) && same(path))
    }

    /// Checks whether a new path may be created, except for checks that only the device can make.
    pub(super) fn check_new_path(
        &self,
        attempt: Attempt<'_>,
        registry: &Registry,
        ctx: &Ctx<'_>,
    ) -> Result<(), Refusal> {
        let Attempt { provider, conn, .. } = attempt;
        Self::check_path(attempt, registry)?;
        check_buffers(&*ctx.fabrics[provider.index()], conn)?;
        self.limits_of(conn, registry)?;
        self.check_further_path(attempt, registry)
    }

    /// Returns the path of a connection request and, for a new path, the deadline of its handshake.
    /// Creates the path if necessary, after [`Self::check_new_path`] has accepted it.
    pub(super) fn path_of(
        &self,
        attempt: Attempt<'_>,
        tables: Tables<'_>,
        ctx: &mut Ctx<'_>,
    ) -> Result<(PathKey, Option<Instant>), Refusal> {
        if let Some(path) = Self::path_to_join(attempt, tables.registry) {
            return Ok((path.key(), None));
        }
        let deadline = ctx.now + self.params.handshake_timeout;
        let key = self.new_path(attempt, tables, ctx)?;
        Ok((key, Some(deadline)))
    }

    fn check_path(attempt: Attempt<'_>, registry: &Registry) -> Result<(), Refusal> {
        let Attempt { provider, request, conn, must_authenticate } = attempt;
        let paths = || registry.paths_of(conn.session_id);
        let known = || paths().filter(|path| !path.is_unproved());
        let live = || known().filter(|path| path.state().may_begin());
        let count = live().count();
        if count >= PATHS_PER_SESSION_MAX {
            return Err(Refusal::Paths(count));
        }
        let draining = known().count() - count;
        if draining >= DRAINING_MAX {
            return Err(Refusal::Draining(draining));
        }
        // Two transports between the same addresses count as two routes.
        let route = (provider, request.peer.ip(), request.local.ip());
        // An authenticating path may replace the path with the same UUID.
        let passed_over = |path: &Path| must_authenticate && path.is_named(conn);
        if live().any(|path| !passed_over(path) && route_of(&path.shared().origin) == route) {
            return Err(Refusal::SameAddresses);
        }
        Ok(())
    }

    /// Checks whether the session of a new path, if the session exists, may have one more path.
    fn check_further_path(&self, attempt: Attempt<'_>, registry: &Registry) -> Result<(), Refusal> {
        let Attempt { conn, must_authenticate, .. } = attempt;
        let Some(session) = registry.session(conn.session_id) else { return Ok(()) };
        // An authenticating path may replace the path with the same UUID.
        let live = registry.paths_of(conn.session_id).filter(|path| {
            let replaced = must_authenticate && path.is_named(conn);
            path.state().may_begin() && !path.is_unproved() && !replaced
        });
        self.check_memory(session, live.count(), registry)
    }

    fn new_path(
        &self,
        attempt: Attempt<'_>,
        tables: Tables<'_>,
        ctx: &mut Ctx<'_>,
    ) -> Result<PathKey, Refusal> {
        let Tables { registry, limiter } = tables;
        let Attempt { provider, request, conn, must_authenticate } = attempt;
        let fabric = &mut *ctx.fabrics[provider.index()];
        let cores = self.params.cores;
        let id = conn.session_id;
        let limits = self.limits_of(conn, registry)?;
        let session = registry.session_mut(id);
        let from = must_authenticate.then(|| request.peer.ip());
        let fits = |pd: &Arc<dyn ProtectionDomain>| fabric.fits(pd, request);
        let cached = session.and_then(|session| session.cache.take(provider, from, fits));
        let pd = match cached.as_ref().and_then(CachedChunks::domain) {
            Some(pd) => Arc::clone(pd),
            None => fabric.alloc_pd(PdUse::Accept(request)).map_err(Refusal::memory)?,
        };
        let fresh_keys = self.params.fresh_keys(&*pd);
        let messages = MessageBuffers::new(limits.queue_depth(), &pd).map_err(Refusal::memory)?;
        let wanted = match cached {
            Some(cached) => Some(cached.into_order(limits, &pd, fresh_keys)),
            // Registered early if the registration is likely to fail, so that the refusal can still
            // reach the peer.
            None if fabric.capabilities().pins_memory => {
                let meter = self.memory.meter();
                Some(ChunkPool::fresh(limits, &pd, fresh_keys, meter, Counting::Whole)?)
            }
            None => None,
        };
        let key = registry.next_key();
        let (mut held, mut early) = (None, None);
        if let Some(mut wanted) = wanted {
            if must_authenticate {
                limiter.count(key, Source::of(request.peer.ip()), &wanted.region);
            }
            let waits = Held::default();
            wanted.wanted = Some(waits.wanted());
            match fabric.register_async(key.0, wanted) {
                Some(registered) => early = Some(ChunkPool::new(limits, registered?)),
                None => held = Some(waits),
            }
        }
        let session = registry.shared_for(id, limits);
        let session = session.unwrap_or_else(|| {
            let first = registry.first_shard(id, cores);
            Arc::new(SessionShared::new(id, limits, None, first))
        });
        registry.session_or(id, || Session::new(Arc::clone(&session), ctx.now));
        let origin = origin_of(attempt, fabric.capabilities().scheme);
        let resources = PathResources { pd, fresh_keys, messages };
        let shared = PathShared::new(key, session, origin, resources, cores);
        early.into_iter().for_each(|pool| give_chunks(&shared, pool));
        if !must_authenticate {
            shared.session.prove(&shared.origin.identity.who);
            registry.session_mut(id).into_iter().for_each(|session| session.adopt(&shared));
        }
        let deadline = ctx.now + self.params.handshake_timeout;
        registry.add(Path::new(shared, conn.recon_cnt, ctx.now, deadline, held));
        tracing::debug!(path = %key, peer = %request.peer, cons = conn.cid_num, "path connecting");
        Ok(key)
    }

    /// Makes a connection's shard accept the connection.
    pub(super) fn accept(
        &self,
        path: Arc<PathShared>,
        cid: ConnIndex,
        request: ConnRequest,
        ctx: &mut Ctx<'_>,
    ) {
        let says = Extensions {
            identity: Some(self.params.server_id.map_or([0; 16], ServerId::bytes)),
            discover: self.params.discovery,
            gateways: self.exports.has_gateways(),
            idle_ms: self.params.idle_ms(),
            process: self.params.instance.process(),
            times: path.times,
            authenticate: path.is_unproved(),
            ..Extensions::OURS
        };
        let response = acceptance(path.session.limits, path.fresh_keys, says);
        let shard = self.shard_of(cid, &path.session);
        let order = AcceptOrder { path, cid, request, response };
        ctx.out.shard(shard, ShardMessage::Accept(Box::new(order)));
    }

    /// Processes chunks that a different thread registered, or failed to register. Returns the path
    /// and the reason if the path must end.
    pub(super) fn registered(
        &self,
        provider: ProviderIndex,
        made: AsyncRegistration,
        registry: &mut Registry,
        log: &mut ClientLog,
        ctx: &mut Ctx<'_>,
    ) -> Option<(PathKey, PathEnd)> {
        let AsyncRegistration { id, pd, result, took } = made;
        let key = PathKey(id);
        let path = registry.path_mut(key);
        // The client can continue now.
        let deadline = ctx.now + self.params.handshake_timeout;
        // An ended path no longer waits.
        let held = path.and_then(|path| {
            let shared = Arc::clone(path.shared());
            Some((shared, path.take_held(ctx.now, deadline)?))
        });
        let Some((path, held)) = held else {
            pd.free_later(Box::new(result));
            return None;
        };
        match result {
            Ok(registered) => {
                tracing::debug!(path = %key, "chunks created in {} ms", took.as_millis());
                give_chunks(&path, ChunkPool::new(path.session.limits, registered));
                registry.note_paths(path.session.id);
                for (cid, request) in held {
                    self.accept(Arc::clone(&path), cid, request, ctx);
                }
                None
            }
            Err(error) => {
                let refusal = Refusal::from(error);
                for (_, request) in held {
                    log.refused(ctx.now, request.peer, &request.identity.who, &refusal);
                    refuse(provider, request, &refusal, ctx);
                }
                Some((key, PathEnd::Unserved(refusal.to_string())))
            }
        }
    }

    /// Creates the chunks of a path that has none, synchronously. The path's domain is fixed, so
    /// only the memory of a cached pool can be used.
    pub(super) fn make_chunks(
        &self,
        path: &PathShared,
        tables: Tables<'_>,
    ) -> Result<(), RegisterError> {
        let Tables { registry, limiter } = tables;
        if path.chunks.get().is_some() {
            return Ok(());
        }
        let limits = path.session.limits;
        let id = path.session.id;
        let session = registry.session_mut(id);
        let (provider, peer) = (path.origin.provider, path.origin.peer.ip());
        let from = path.is_unproved().then_some(peer);
        let cached = session.and_then(|session| session.cache.take(provider, from, |_| false));
        let wanted = match cached {
            Some(cached) => cached.into_order(limits, &path.pd, path.fresh_keys),
            None => {
                let meter = self.memory.meter();
                ChunkPool::fresh(limits, &path.pd, path.fresh_keys, meter, Counting::Written)?
            }
        };
        if path.is_unproved() {
            limiter.count(path.key, Source::of(peer), &wanted.region);
        }
        give_chunks(path, ChunkPool::new(limits, wanted.register()?));
        tracing::debug!(path = %path.key, "chunks: made");
        registry.note_paths(id);
        Ok(())
    }
}

/// Checks that the session of a connection exists, or that its client asks to create it.
pub(super) fn check_session_exists(conn: &ConnReq, registry: &Registry) -> Result<(), Refusal> {
    match conn.first_conn || registry.session(conn.session_id).is_some() {
        true => Ok(()),
        false => Err(Refusal::NoSession),
    }
}

/// Checks that the buffers of a path's connections take a bounded amount of memory.
fn check_buffers(fabric: &dyn Fabric, conn: &ConnReq) -> Result<(), Refusal> {
    let bytes = fabric.capabilities().connection_bytes * u64::from(conn.cid_num);
    if bytes > CONNECTION_BUFFERS_MAX {
        let (connections, max) = (conn.cid_num, CONNECTION_BUFFERS_MAX);
        return Err(Refusal::Connections { connections, bytes, max });
    }
    Ok(())
}

/// Describes a new path from its first connection, which arrived over `transport`.
fn origin_of(attempt: Attempt<'_>, transport: &'static str) -> PathOrigin {
    let Attempt { provider, request, conn, must_authenticate } = attempt;
    let extensions = ClientExtensions::decode(&conn.ext);
    PathOrigin {
        uuid: conn.path_uuid,
        cid_num: conn.cid_num,
        provider,
        transport,
        peer: request.peer,
        local: request.local,
        takes_changed: extensions.changed,
        takes_standby: extensions.gateways,
        takes_times: extensions.times,
        takes_info_refusals: extensions.info_refusals,
        must_authenticate,
        identity: request.identity.clone(),
    }
}

/// Provider and addresses of a path.
pub(super) fn route_of(path: &PathOrigin) -> (ProviderIndex, IpAddr, IpAddr) {
    (path.provider, path.peer.ip(), path.local.ip())
}

/// Refuses a connection and sends the reason.
pub(super) fn refuse(
    provider: ProviderIndex,
    request: ConnRequest,
    refusal: &Refusal,
    ctx: &mut Ctx<'_>,
) {
    ctx.fabrics[provider.index()].reject(ctx.now, request, &refusal.response());
}

/// Sets the chunks of a path, once.
fn give_chunks(path: &PathShared, pool: ChunkPool) {
    pool.let_write(path.session.has_opened() && !path.is_unproved());
    if path.chunks.set(pool).is_err() {
        tracing::error!(path = %path.key, "chunks were created twice; the first are used");
    }
}
