//! Which sessions and paths there are. Sessions are found by `paths_uuid`, paths by `sess_uuid`.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::net::SocketAddr;
use std::sync::Arc;

use rtrs_core::identity::SessionTag;
use rtrs_core::ids::{CoreIndex, SessionId};
use rtrs_core::limits::Limits;
use rtrs_core::time::Instant;
use rtrs_core::wire::Name;

use super::chunk_pool::ChunkCache;
use super::path::Path;
use crate::engine::session::SessionShared;
use crate::path::chunks::ChunkPool;
use crate::path::{PathKey, PathShared};
use crate::stats::{IoTotals, PathSnapshot};

/// One session.
#[derive(Debug)]
pub(super) struct Session {
    shared: Arc<SessionShared>,
    /// Since its first connection.
    since: Instant,
    name: Option<Name>,
    /// When it last asked for an export; its begin until then.
    asked: Instant,
    paths: Vec<PathKey>,
    /// Where its client last had a path of which it is known whose it is.
    peer: Option<SocketAddr>,
    /// Until then a client may prove who it is: there is no other path.
    orphaned: Option<Instant>,
    /// What its paths did that are gone.
    gone: IoTotals,
    /// Memory of paths that are gone, for those that come.
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

    /// Its name, once a path was admitted.
    pub(super) fn name(&self) -> Option<Name> {
        self.name
    }

    /// It has opened an export, whatever it has open now.
    pub(super) fn has_opened(&self) -> bool {
        self.shared.has_opened()
    }

    /// When it last asked for an export; its begin until then.
    pub(super) fn asked(&self) -> Instant {
        self.asked
    }

    pub(super) fn set_asked(&mut self, now: Instant) {
        self.asked = now;
    }

    pub(super) fn set_name(&mut self, name: Name) {
        self.name = Some(name);
    }

    /// A path of it is known to be its client's. That decides what the session is, if nothing has
    /// before.
    pub(super) fn adopt(&mut self, path: &PathShared) {
        if self.shared.who().is_none() {
            self.shared = Arc::clone(&path.session);
        }
        (self.orphaned, self.peer) = (None, Some(path.origin.peer));
    }

    /// Whether a path is of what the session is.
    pub(super) fn is_of(&self, path: &Path) -> bool {
        Arc::ptr_eq(&self.shared, &path.shared().session)
    }

    /// Where its client last had a path; None while it is not known who that is.
    pub(super) fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// Until when a client may prove who it is; None while there is a path whose client is known.
    pub(super) fn orphaned(&self) -> Option<Instant> {
        self.orphaned
    }

    /// What its paths did, those included that are gone.
    pub(super) fn totals(&self, paths: &[PathSnapshot]) -> IoTotals {
        let mut io = self.gone;
        paths.iter().for_each(|path| io.add(&path.io));
        io
    }
}

/// The sessions and paths of a server.
#[derive(Debug, Default)]
pub(super) struct Registry {
    sessions: BTreeMap<SessionId, Session>,
    paths: BTreeMap<PathKey, Path>,
    /// When each path is to be looked at, once for each that is.
    timers: BTreeSet<(Instant, PathKey)>,
    last_key: u64,
    /// Sessions that there were.
    begun: u64,
    /// What paths did that are gone.
    gone: IoTotals,
}

impl Registry {
    /// The sessions that there were, and what all paths did.
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

    /// The session of that id, which is made if there is none.
    pub(super) fn session_or(&mut self, id: SessionId, new: impl FnOnce() -> Session) -> &Session {
        let begun = &mut self.begun;
        self.sessions.entry(id).or_insert_with(|| {
            *begun += 1;
            new()
        })
    }

    /// The shard of the first connections of a session: each begins at the next one, so that those
    /// with fewer connections than there are shards use all shards together.
    pub(super) fn first_shard(&self, id: SessionId, cores: u16) -> CoreIndex {
        let next = || u16::try_from(self.begun % u64::from(cores.max(1))).unwrap_or(0);
        self.session(id).map_or_else(|| CoreIndex(next()), |session| session.shared.first_shard)
    }

    /// What a path of a session shares with the others. Until it is known who the client is, paths
    /// share it only if they have the same limits: whoever comes first decides nothing for those
    /// that come later.
    pub(super) fn shared_for(&self, id: SessionId, limits: Limits) -> Option<Arc<SessionShared>> {
        let shared = self.session(id)?.shared();
        if shared.who().is_some() {
            return Some(Arc::clone(shared));
        }
        let live = self.paths_of(id).filter(|path| !path.state().is_ending());
        let all = live.map(|path| &path.shared().session).chain([shared]);
        all.into_iter().find(|one| one.who().is_none() && one.limits == limits).map(Arc::clone)
    }

    /// Ends a session for which nobody has proved in time that he is its client. What is left of
    /// its paths ends, and nobody waits for that.
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

    /// Has a path looked at then, or earlier if that is due already.
    pub(super) fn arm(&mut self, key: PathKey, at: Option<Instant>) {
        let armed = self.path(key).and_then(Path::timer);
        self.arm_anew(key, at.filter(|at| armed.is_none_or(|armed| *at < armed)));
    }

    /// Has a path looked at then and not before: nothing else of it is due.
    pub(super) fn arm_anew(&mut self, key: PathKey, at: Option<Instant>) {
        let (Some(at), Some(path)) = (at, self.paths.get_mut(&key)) else { return };
        if let Some(before) = path.set_timer(at) {
            self.timers.remove(&(before, key));
        }
        self.timers.insert((at, key));
    }

    /// When the next path is to be looked at.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// A path that is to be looked at, and to be armed again.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<&mut Path> {
        self.next_timer().filter(|at| *at <= now)?;
        let (_, key) = self.timers.pop_first()?;
        let path = self.paths.get_mut(&key)?;
        path.timer_over();
        Some(path)
    }

    pub(super) fn path(&self, key: PathKey) -> Option<&Path> {
        self.paths.get(&key)
    }

    pub(super) fn path_mut(&mut self, key: PathKey) -> Option<&mut Path> {
        self.paths.get_mut(&key)
    }

    /// The paths of a session, in the order in which they came.
    pub(super) fn paths_of(&self, id: SessionId) -> impl Iterator<Item = &Path> {
        let keys = self.sessions.get(&id).map(|session| &session.paths[..]).unwrap_or_default();
        keys.iter().filter_map(|key| self.paths.get(key))
    }

    /// Bytes of a session's chunks that count against the server's limit, those included that are
    /// kept of paths that are gone.
    pub(super) fn memory_of(&self, id: SessionId) -> u64 {
        let chunks = self.paths_of(id).filter_map(|path| path.shared().chunks.get());
        let kept = self.sessions.get(&id).map_or(0, |session| session.cache.counted());
        chunks.map(|pool| pool.region().counted()).sum::<u64>() + kept
    }

    /// Bytes that sessions other than `but` may need for paths that they had, and whose memory is
    /// not there at present.
    pub(super) fn reserved_beside(&self, but: SessionId) -> u64 {
        let of = |session: &Session| {
            let there = self.paths_of(session.id()).filter(|path| path.has_memory()).count();
            let there = there + session.cache.kept();
            let missing = session.cache.paths_max().saturating_sub(there);
            missing as u64 * ChunkPool::bytes(session.shared.limits) as u64
        };
        self.sessions().filter(|session| session.id() != but).map(of).sum()
    }

    /// A number for a new path.
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

    /// Notes in the session's cache how many paths have chunks of which it is known whose they are.
    pub(super) fn note_paths(&mut self, id: SessionId) {
        let live = self.paths_of(id).filter(|path| path.has_chunks()).count();
        if let Some(session) = self.sessions.get_mut(&id) {
            session.cache.note_paths(live);
        }
    }

    /// Takes a path that is gone from its session, which keeps its memory. The last one takes the
    /// session with it, which is returned. If none is left of which it is known whose it is, others
    /// may be for so long.
    pub(super) fn remove(&mut self, key: PathKey, grace: Instant) -> Option<Session> {
        let path = self.paths.remove(&key)?;
        if let Some(at) = path.timer() {
            self.timers.remove(&(at, key));
        }
        let unproved = path.is_unproved();
        let path = path.into_shared();
        let (id, io) = (path.session.id, path.counters.totals());
        self.gone.add(&io);
        // Of one that has opened nothing there is nothing to tell.
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
                "a path is gone"
            );
        }
        let live = self.paths_of(id).filter(|path| path.has_chunks()).count();
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

    /// Frees what sessions keep that is registered with devices that were removed. True while any
    /// session keeps memory on other such devices, so that this has to be called again.
    pub(super) fn drop_removed(&mut self) -> bool {
        let mut any = false;
        for session in self.sessions.values_mut() {
            any |= session.cache.drop_removed();
        }
        any
    }

    /// True while a session keeps memory on a device that can be removed.
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

    /// After 2^32 paths numbers go on: each is new, and can hold permits.
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
