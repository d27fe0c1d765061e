//! Table of the sessions and paths. Sessions are identified by `paths_uuid`, paths by `sess_uuid`.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::net::SocketAddr;
use std::sync::Arc;

use rtrs_core::identity::SessionTag;
use rtrs_core::ids::{CoreIndex, SessionId};
use rtrs_core::limits::Limits;
use rtrs_core::time::Instant;
use rtrs_core::wire::{Fence, Name};

use super::chunk_pool::ChunkCache;
use super::known::PeerAddress;
use super::path::Path;
use crate::engine::ctx::Ctx;
use crate::engine::session::SessionShared;
use crate::path::chunks::ChunkPool;
use crate::path::{PathKey, PathShared};
use crate::stats::{IoTotals, PathSnapshot};

/// A session.
#[derive(Debug)]
pub(super) struct Session {
    shared: Arc<SessionShared>,
    /// Time of the session's first connection.
    since: Instant,
    name: Option<Name>,
    /// Time when the session last requested an export; initially its start.
    asked: Instant,
    paths: Vec<PathKey>,
    /// Address of the last path whose client was known.
    peer: Option<SocketAddr>,
    /// Time by which a client must authenticate, while no path of a known client exists.
    orphaned: Option<Instant>,
    /// IO of paths that have ended.
    gone: IoTotals,
    /// Memory of paths that have ended, for reuse by new paths.
    pub(super) cache: ChunkCache,
}

impl Session {
    pub(super) fn new(shared: Arc<SessionShared>, since: Instant) -> Self {
        Self {
            shared,
            since,
            name: None,
            asked: since,
            paths: Vec::new(),
            peer: None,
            orphaned: None,
            gone: IoTotals::default(),
            cache: ChunkCache::default(),
        }
    }

    pub(super) fn shared(&self) -> &Arc<SessionShared> {
        &self.shared
    }

    pub(super) fn id(&self) -> SessionId {
        self.shared.id
    }

    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// Name of the session, once a path has been admitted.
    pub(super) fn name(&self) -> Option<Name> {
        self.name
    }

    /// Whether the session has ever opened an export.
    pub(super) fn has_opened(&self) -> bool {
        self.shared.has_opened()
    }

    /// Time when the session last requested an export; initially its start.
    pub(super) fn asked(&self) -> Instant {
        self.asked
    }

    pub(super) fn set_asked(&mut self, now: Instant) {
        self.asked = now;
    }

    pub(super) fn set_name(&mut self, name: Name) {
        self.name = Some(name);
    }

    /// Records a path whose client is known. The path determines the session's state unless an
    /// earlier path did.
    pub(super) fn adopt(&mut self, path: &PathShared) {
        if self.shared.who().is_none() {
            self.shared = Arc::clone(&path.session);
        }
        (self.orphaned, self.peer) = (None, Some(path.origin.peer));
    }

    /// Whether a path shares the state of the session.
    pub(super) fn is_of(&self, path: &Path) -> bool {
        Arc::ptr_eq(&self.shared, &path.shared().session)
    }

    /// Address of the last path whose client was known, if any.
    pub(super) fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// Time by which a client must authenticate; None while a path of a known client exists.
    pub(super) fn orphaned(&self) -> Option<Instant> {
        self.orphaned
    }

    /// Totals of all paths, including those that have ended.
    pub(super) fn totals(&self, paths: &[PathSnapshot]) -> IoTotals {
        let mut io = self.gone;
        paths.iter().for_each(|path| io.add(&path.io));
        io
    }
}

/// Sessions and paths of a server.
#[derive(Debug, Default)]
pub(super) struct Registry {
    sessions: BTreeMap<SessionId, Session>,
    paths: BTreeMap<PathKey, Path>,
    /// Times at which paths must be checked, one for each path with a timer.
    timers: BTreeSet<(Instant, PathKey)>,
    last_key: u64,
    /// Number of sessions that have begun so far.
    begun: u64,
    /// Totals of paths that have ended.
    gone: IoTotals,
    /// Number of messages about a path that does not exist, which is a bug in this server.
    internal_errors: u64,
}

impl Registry {
    /// Returns a path that cannot have ended, because a shard still has its part of the path.
    /// Returning None counts as an internal error.
    pub(super) fn live_path(&mut self, key: PathKey) -> Option<&mut Path> {
        let path = self.paths.get_mut(&key);
        if path.is_none() {
            tracing::error!(path = %key, "internal error: message about an unknown path");
            self.internal_errors += 1;
        }
        path
    }

    /// Counts an impossible state, which is a bug in this server.
    pub(super) fn count_internal_error(&mut self) {
        self.internal_errors += 1;
    }

    pub(super) fn internal_errors(&self) -> u64 {
        self.internal_errors
    }

    /// Paths that satisfy a condition.
    pub(super) fn keys(&self, which: impl Fn(&Path) -> bool) -> Vec<PathKey> {
        self.paths().filter(|path| which(path)).map(Path::key).collect()
    }

    /// Paths of a session.
    pub(super) fn keys_of(&self, id: SessionId) -> Vec<PathKey> {
        self.paths_of(id).map(Path::key).collect()
    }

    /// Unauthenticated connection attempts of the path that a FENCE covers.
    pub(super) fn unproved_covered(&self, id: SessionId, fence: &Fence) -> Vec<PathKey> {
        let covered = |path: &&Path| path.is_unproved() && path.is_covered_by(fence);
        self.paths_of(id).filter(covered).map(Path::key).collect()
    }

    /// Makes the addresses of a session's paths known, after it has opened an export or another
    /// path has come up. Returns an address for each path that had not made its address known.
    pub(super) fn make_known(&mut self, id: SessionId) -> Vec<PeerAddress> {
        let keys = self.keys_of(id);
        keys.into_iter().filter_map(|key| self.path_mut(key).and_then(Path::make_known)).collect()
    }

    /// Time of the last request for an export, if the session of a path has not opened any.
    pub(super) fn unopened_since(&self, key: PathKey) -> Option<Instant> {
        let session = self.session(self.path(key)?.shared().session.id)?;
        (!session.has_opened()).then(|| session.asked())
    }

    /// Probes the clients of these sessions now instead of at the next heartbeat of an idle path,
    /// because another client is waiting for one of their resources. `but` is the session of the
    /// waiting client.
    pub(super) fn hurry(&mut self, sessions: &[SessionId], but: SessionId, ctx: &mut Ctx<'_>) {
        let asked = sessions.iter().filter(|id| **id != but);
        for id in asked.filter(|_| !rtrs_core::mutated!(IdleSessionUnprobed)) {
            for key in self.keys_of(*id) {
                let path = self.path_mut(key);
                let next = path.and_then(|path| path.hurry(ctx.now, ctx.out));
                self.arm(key, next);
            }
        }
    }

    /// Number of sessions so far, and the totals of all paths.
    pub(super) fn totals(&self) -> (u64, IoTotals) {
        let mut io = self.gone;
        self.paths.values().for_each(|path| io.add(&path.shared().counters.totals()));
        (self.begun, io)
    }

    pub(super) fn session_count(&self) -> usize {
        self.sessions.len()
    }

    pub(super) fn sessions(&self) -> impl Iterator<Item = &Session> {
        self.sessions.values()
    }

    pub(super) fn session(&self, id: SessionId) -> Option<&Session> {
        self.sessions.get(&id)
    }

    pub(super) fn session_mut(&mut self, id: SessionId) -> Option<&mut Session> {
        self.sessions.get_mut(&id)
    }

    /// Returns the session with this ID, creating it if necessary.
    pub(super) fn session_or(&mut self, id: SessionId, new: impl FnOnce() -> Session) -> &Session {
        let begun = &mut self.begun;
        self.sessions.entry(id).or_insert_with(|| {
            *begun += 1;
            new()
        })
    }

    /// Shard of the first IO connections of a session. Each session begins at the next shard, so
    /// that sessions with fewer connections than shards use all shards together.
    pub(super) fn first_shard(&self, id: SessionId, cores: u16) -> CoreIndex {
        let next = || u16::try_from(self.begun % u64::from(cores.max(1))).unwrap_or(0);
        self.session(id).map_or_else(|| CoreIndex(next()), |session| session.shared.first_shard)
    }

    /// State that a path of a session shares with the other paths. Until the client is known, paths
    /// share the state only if they have the same limits: the first path decides nothing for later
    /// paths.
    pub(super) fn shared_for(&self, id: SessionId, limits: Limits) -> Option<Arc<SessionShared>> {
        let shared = self.session(id)?.shared();
        if shared.who().is_some() {
            return Some(Arc::clone(shared));
        }
        let live = self.paths_of(id).filter(|path| !path.state().is_ending());
        let all = live.map(|path| &path.shared().session).chain([shared]);
        all.into_iter().find(|one| one.who().is_none() && one.limits == limits).map(Arc::clone)
    }

    /// Ends a session for which no client has authenticated in time. Its remaining paths end on
    /// their own.
    pub(super) fn abandon(&mut self, id: SessionId, now: Instant) -> Option<Session> {
        let mut session = self.sessions.remove(&id)?;
        let first = session.shared.first_shard;
        let new = SessionShared::new(id, session.shared.limits, None, first);
        let mut rest = Session::new(Arc::new(new), now);
        rest.paths = mem::take(&mut session.paths);
        self.sessions.insert(id, rest);
        session.cache.clear();
        Some(session)
    }

    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.paths.values()
    }

    /// Schedules a check of a path at time `at`, unless an earlier check is scheduled.
    pub(super) fn arm(&mut self, key: PathKey, at: Option<Instant>) {
        let armed = self.path(key).and_then(Path::timer);
        self.arm_anew(key, at.filter(|at| armed.is_none_or(|armed| *at < armed)));
    }

    /// Schedules a check of a path at time `at`, replacing any other.
    pub(super) fn arm_anew(&mut self, key: PathKey, at: Option<Instant>) {
        let (Some(at), Some(path)) = (at, self.paths.get_mut(&key)) else { return };
        if let Some(before) = path.set_timer(Some(at)) {
            self.timers.remove(&(before, key));
        }
        self.timers.insert((at, key));
    }

    /// Time of the next check of any path.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Returns a path that is due for a check. The caller must arm it again.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<&mut Path> {
        self.next_timer().filter(|at| *at <= now)?;
        let (_, key) = self.timers.pop_first()?;
        let path = self.paths.get_mut(&key)?;
        path.set_timer(None);
        Some(path)
    }

    pub(super) fn path(&self, key: PathKey) -> Option<&Path> {
        self.paths.get(&key)
    }

    pub(super) fn path_mut(&mut self, key: PathKey) -> Option<&mut Path> {
        self.paths.get_mut(&key)
    }

    /// Paths of a session, in the order of their creation.
    pub(super) fn paths_of(&self, id: SessionId) -> impl Iterator<Item = &Path> {
        let keys = self.sessions.get(&id).map(|session| &session.paths[..]).unwrap_or_default();
        keys.iter().filter_map(|key| self.paths.get(key))
    }

    /// Bytes of a session's chunks that count against the server's limit, including cached memory
    /// of ended paths.
    pub(super) fn memory_of(&self, id: SessionId) -> u64 {
        let chunks = self.paths_of(id).filter_map(|path| path.shared().chunks.get());
        let kept = self.sessions.get(&id).map_or(0, |session| session.cache.counted());
        chunks.map(|pool| pool.region().counted()).sum::<u64>() + kept
    }

    /// Bytes that sessions other than `but` may need for paths that they once had and whose memory
    /// is not currently allocated.
    pub(super) fn reserved_by_others(&self, but: SessionId) -> u64 {
        let of = |session: &Session| {
            let there = self.paths_of(session.id()).filter(|path| path.has_memory()).count();
            let there = there + session.cache.kept();
            let missing = session.cache.paths_max().saturating_sub(there);
            missing as u64 * ChunkPool::bytes(session.shared.limits) as u64
        };
        self.sessions().filter(|session| session.id() != but).map(of).sum()
    }

    /// Assigns a number to a new path.
    pub(super) fn next_key(&mut self) -> PathKey {
        self.last_key += 1;
        PathKey(self.last_key)
    }

    /// Adds a path to its session.
    pub(super) fn add(&mut self, path: Path) {
        let (id, key) = (path.shared().session.id, path.key());
        if let Some(session) = self.sessions.get_mut(&id) {
            session.paths.push(key);
        }
        self.paths.insert(key, path);
        self.note_paths(id);
    }

    /// Records in the session's cache how many paths of known clients have chunks.
    pub(super) fn note_paths(&mut self, id: SessionId) {
        let live =
            self.paths_of(id).filter(|path| path.state().may_begin() && path.has_memory()).count();
        if let Some(session) = self.sessions.get_mut(&id) {
            session.cache.note_paths(live);
        }
    }

    /// Removes a path from its session, which keeps the path's memory. If it was the last path,
    /// removes and returns the session. If no path of a known client remains, the other paths may
    /// stay until `grace`.
    pub(super) fn remove(&mut self, key: PathKey, grace: Instant) -> Option<Session> {
        let path = self.paths.remove(&key)?;
        if let Some(at) = path.timer() {
            self.timers.remove(&(at, key));
        }
        let unproved = path.is_unproved();
        let path = path.into_shared();
        let (id, io) = (path.session.id, path.counters.totals());
        self.gone.add(&io);
        // Paths that opened nothing are not logged.
        if path.session.has_opened() && !unproved {
            tracing::info!(
                path = %key,
                session = %SessionTag::of(id),
                reads = io.reads,
                writes = io.writes,
                fua_writes = io.fua_writes,
                flushes = io.flushes,
                discards = io.discards,
                write_zeroes = io.write_zeroes,
                errors = io.errors,
                replays = io.replays,
                "path closed"
            );
        }
        let live =
            self.paths_of(id).filter(|path| path.state().may_begin() && path.has_memory()).count();
        let others = self.paths_of(id).filter(|path| path.key() != key);
        let orphaned = others.into_iter().all(Path::is_unproved);
        let session = self.sessions.get_mut(&id)?;
        session.gone.add(&io);
        session.paths.retain(|other| *other != key);
        if !session.paths.is_empty() {
            if orphaned && session.shared.who().is_some() {
                session.orphaned.get_or_insert(grace);
            }
            if unproved {
                ChunkCache::free(path);
            } else {
                session.cache.keep(path, live);
            }
            return None;
        }
        let mut session = self.sessions.remove(&id)?;
        session.cache.end(path);
        Some(session)
    }

    /// Frees cached memory that is registered with removed devices. Returns true while any session
    /// caches memory on other removable devices, so that this must be called again.
    pub(super) fn drop_removed(&mut self) -> bool {
        let mut any = false;
        for session in self.sessions.values_mut() {
            any |= session.cache.drop_removed();
        }
        any
    }

    /// Whether any session caches memory on a removable device.
    pub(super) fn keeps_removable(&self) -> bool {
        self.sessions.values().any(|session| session.cache.has_removable())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::io::permits::{Claim, Holder, PermitTable};
    use crate::path::core_of;
    use rtrs_core::ids::{ConnIndex, PermitId};

    #[test]
    fn sessions_with_few_connections_use_all_shards() {
        let mut registry = Registry::default();
        let mut counts = [0; 4];
        for n in 0..8 {
            let id = SessionId([n; 16]);
            let first = registry.first_shard(id, 4);
            let shared = Arc::new(SessionShared::new(id, Limits::DEFAULT, None, first));
            registry.session_or(id, || Session::new(shared, Instant::ZERO));
            assert_eq!(registry.first_shard(id, 4), first, "the same for its next path");
            let shards = [1, 2].map(|cid| core_of(ConnIndex(cid), first, 4).index());
            assert_eq!((shards[0] + 1) % 4, shards[1]);
            shards.iter().for_each(|shard| counts[*shard] += 1);
            assert_eq!(core_of(ConnIndex(0), first, 4), CoreIndex(0), "the control shard's");
        }
        assert_eq!(counts, [4; 4]);
    }

    /// Path numbers keep increasing beyond 2^32: each is new, and can hold permits.
    #[test]
    fn path_numbers_do_not_wrap_at_32_bits() {
        let mut registry = Registry { last_key: (1 << 32) - 2, ..Registry::default() };
        let permits = PermitTable::new(1);
        let mut last = PathKey(0);
        for _ in 0..4 {
            let key = registry.next_key();
            assert!(key > last, "{key} after {last}");
            last = key;
            let holder = Holder { path: key.0, core: CoreIndex(3) };
            assert_eq!(permits.claim(PermitId(0), holder), Claim::Granted);
            assert_eq!(permits.holder(PermitId(0)), Some(holder));
            permits.release(PermitId(0), holder);
        }
    }
}
