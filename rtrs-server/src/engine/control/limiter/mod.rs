//! Limits on the resources that clients use before they have proven anything.
//!
//! A session is *unproven* until it opens an export (`sessions.rs`), and a path is unauthenticated
//! until its client has proven its identity, if it must (`paths.rs`). Both are evicted for
//! newcomers once a limit is reached. Admission asks the limiter which sessions and paths to evict,
//! and ends them itself. Every later event of a session or path is reported to the limiter.

mod paths;
mod sessions;

use std::sync::Arc;

use rtrs_core::ids::SessionId;
use rtrs_core::mem::{MemoryMeter, Region};
use rtrs_core::proto::quota::Source;
use rtrs_core::time::Instant;

pub(super) use self::paths::Newcomer;
pub(super) use self::sessions::{Candidate, Decision};

use self::paths::UnprovedPaths;
use self::sessions::UnprovenSessions;
use super::path::Path;
use super::refusal::Refusal;
use super::registry::{Registry, Session};
use crate::engine::session::SessionParams;
use crate::path::{PathEnd, PathKey, PathShared};

/// Unproven sessions, and the resources of unauthenticated paths.
#[derive(Debug)]
pub(super) struct Limiter {
    sessions: UnprovenSessions,
    paths: UnprovedPaths,
}

impl Limiter {
    pub(super) fn new(params: &SessionParams) -> Self {
        Self {
            sessions: UnprovenSessions::new(params),
            paths: UnprovedPaths::new(params.memory_max),
        }
    }

    /// Decides whether a connection may join its session, or begin one.
    pub(super) fn decide(
        &mut self,
        candidate: Candidate,
        registry: &Registry,
        now: Instant,
    ) -> Result<Decision, Refusal> {
        let exists = registry.session(candidate.session).map(Session::has_opened);
        self.sessions.decide(candidate, exists, registry.session_count(), now)
    }

    /// Selects the paths that must end to make room for a path whose client must authenticate.
    pub(super) fn room(
        &self,
        newcomer: Newcomer,
        registry: &Registry,
        now: Instant,
    ) -> Result<Vec<PathKey>, Refusal> {
        self.paths.room(newcomer, registry, now)
    }

    /// Records an admitted connection; `opened` says whether its session has opened an export.
    pub(super) fn joined(&mut self, candidate: Candidate, opened: bool) {
        self.sessions.joined(candidate, opened);
    }

    /// Records that a session is being evicted.
    pub(super) fn evicting(&mut self, id: SessionId) {
        self.sessions.evicting(id);
    }

    /// Records that the client of a path has authenticated. `meter` counts the path's memory from
    /// now on.
    pub(super) fn authenticated(&mut self, path: &PathShared, meter: &Arc<MemoryMeter>) {
        self.paths.proved(path, meter);
        self.sessions.proved(path.session.id);
    }

    /// Records that a session has opened an export.
    pub(super) fn opened(&mut self, id: SessionId) {
        self.sessions.opened(id);
    }

    /// Records the end of a path.
    pub(super) fn path_ended(&mut self, path: &Path, end: &PathEnd, now: Instant) {
        self.paths.ended(path, end, now);
    }

    /// Records the end of a session; `opened` says whether it had opened an export.
    pub(super) fn session_ended(&mut self, id: SessionId, opened: bool) {
        self.sessions.ended(id, opened);
    }

    /// Counts the memory of an unauthenticated path.
    pub(super) fn count(&mut self, key: PathKey, source: Source, region: &Arc<Region>) {
        self.paths.count(key, source, region);
    }

    /// Bytes in the chunks of unauthenticated paths.
    pub(super) fn bytes(&self) -> u64 {
        self.paths.bytes()
    }
}
