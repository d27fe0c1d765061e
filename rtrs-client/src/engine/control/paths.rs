//! Paths of a session, by slot.

use std::ops::{Index, IndexMut};
use std::sync::Arc;

use rtrs_core::fabric::WorkCompletion;
use rtrs_core::ids::{PathId, PermitId, ProviderIndex, QpNum};
use rtrs_core::time::{Duration, Instant};

use super::change::ChangeError;
use super::path::Path;
use super::path_volumes::STEP_TIMEOUT;
use crate::engine::path_end::PathEnd;
use crate::engine::session::{PATHS_MAX, PathTarget, SessionConfig, Tuning};
use crate::path::io::WrId;
use crate::path::state::PathState;

/// Maximum time that other paths wait for the one that asks the server to create the session. A
/// kernel server allocates and registers all its chunks before it answers.
pub(in crate::engine) const OPENER_TIME_MAX: Duration = Duration::from_secs(2);

/// All paths, including removed ones until their slot is reused.
#[derive(Debug)]
pub(super) struct Paths {
    config: Arc<SessionConfig>,
    rows: Vec<Path>,
}

impl Paths {
    pub(super) fn new(now: Instant, config: &Arc<SessionConfig>, uuids: &[[u8; 16]]) -> Self {
        let named = (0u16..).zip(&config.paths).zip(uuids);
        let path = |((id, target), uuid): ((_, &PathTarget), &_)| {
            Path::new(now, PathId(id), 0, target.clone(), *uuid, config)
        };
        Self { rows: named.map(path).collect(), config: Arc::clone(config) }
    }

    /// Applies new settings, which also apply to paths that are added later.
    pub(super) fn tune(&mut self, now: Instant, config: &Arc<SessionConfig>, tuning: &Tuning) {
        self.config = Arc::clone(config);
        self.rows.iter_mut().for_each(|path| path.tune(now, config, tuning));
    }

    /// Adds a path in the slot of a removed path or in a new slot. The path may lead to the same
    /// addresses as the paths that it `replaces`.
    pub(super) fn add(
        &mut self,
        now: Instant,
        target: PathTarget,
        uuid: [u8; 16],
        replaces: &[String],
    ) -> Result<PathId, ChangeError> {
        if let Some(path) = self.named(&target.name) {
            let leaving = self[path].is_leaving();
            return Err(ChangeError::PathExists { name: target.name, leaving });
        }
        let duplicated =
            |other: &&PathTarget| !replaces.contains(&other.name) && target.duplicates(other);
        let existing = self.listed().map(|path| path.channel.target()).find(duplicated);
        if let Some(existing) = existing.map(|existing| existing.name.clone()) {
            return Err(ChangeError::DuplicatePath { name: target.name, existing });
        }
        if self.listed().count() >= PATHS_MAX {
            return Err(ChangeError::TooManyPaths);
        }
        let free = |path: &Path| !path.is_listed() && !path.volumes.fence.is_awaited();
        let place = self.rows.iter().position(free).unwrap_or(self.rows.len());
        let id = u16::try_from(place).map(PathId).map_err(|_| ChangeError::NoSlot)?;
        // Shards use the epoch to tell a slot's attempts apart, so it must keep growing.
        let epoch = self.rows.get(place).map_or(0, Path::epoch);
        let path = Path::new(now, id, epoch, target, uuid, &self.config);
        match self.rows.get_mut(place) {
            Some(before) => *before = path,
            None => self.rows.push(path),
        }
        Ok(id)
    }

    /// Slots of all paths.
    pub(super) fn ids(&self) -> impl Iterator<Item = PathId> + use<> {
        (0..u16::try_from(self.rows.len()).unwrap_or(u16::MAX)).map(PathId)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Path> + Clone {
        self.rows.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Path> {
        self.rows.iter_mut()
    }

    /// Paths that are shown in listings.
    pub(super) fn listed(&self) -> impl Iterator<Item = &Path> {
        self.iter().filter(|path| path.is_listed())
    }

    /// All paths except this one.
    pub(super) fn others(&self, id: PathId) -> impl Iterator<Item = &Path> {
        self.iter().filter(move |path| path.id() != id)
    }

    /// Listed path with this name.
    pub(super) fn named(&self, name: &str) -> Option<PathId> {
        self.listed().find(|path| path.channel.name() == name).map(Path::id)
    }

    /// Path whose connection 0 has this queue pair.
    pub(super) fn find(&self, provider: ProviderIndex, qp: QpNum) -> Option<PathId> {
        self.iter().find(|path| path.channel.is(provider, qp)).map(Path::id)
    }

    /// Path whose connection 0 a completion belongs to.
    pub(super) fn completed(&self, provider: ProviderIndex, wc: &WorkCompletion) -> Option<PathId> {
        let (_, path) = WrId::decode(wc.wr_id)?;
        self.rows.get(path.index())?.channel.is(provider, wc.qp).then_some(path)
    }

    /// First path in this state.
    pub(super) fn first(&self, state: PathState) -> Option<PathId> {
        self.iter().find(|path| path.state() == state).map(Path::id)
    }

    /// Returns why all paths have failed, on each of their addresses, if they have. With
    /// `is_patient`, only a mismatched server or export counts, since waiting does not fix that.
    pub(super) fn why_all_failed(&self, is_patient: bool) -> Option<String> {
        let another_disk = |path: &Path| path.last_end().is_some_and(PathEnd::is_mismatch);
        let failed = |path: &Path| path.has_failed() && (!is_patient || another_disk(path));
        if !self.iter().all(failed) {
            return None;
        }
        let why = |path: &Path| match path.last_end() {
            Some(end) => format!("{}: {end}", path.channel.name()),
            None => format!("{}: no answer", path.channel.name()),
        };
        Some(self.iter().map(why).collect::<Vec<_>>().join("; "))
    }

    /// Time at which any path was last in use.
    pub(super) fn last_used(&self, now: Instant) -> Instant {
        let last_used = |path: &Path| {
            // A request of the control shard is outstanding.
            let asks = path.is_connected() && !path.channel.is_idle();
            if asks { now } else { path.channel.last_used() }
        };
        self.iter().map(last_used).max().unwrap_or(Instant::ZERO)
    }

    /// Whether a path is connected.
    pub(super) fn are_connected(&self) -> bool {
        self.first(PathState::Connected).is_some()
    }

    /// Whether the server knows the session.
    pub(super) fn are_known(&self) -> bool {
        self.iter().any(Path::is_known)
    }

    /// Whether another path is asking the server to create the session. Two paths that ask at the
    /// same time can each create a session on a kernel server (6.1, rtrs-srv.c:get_or_create_srv
    /// does not hold its lock from the look-up to the insertion). A server that does not answer
    /// delays the others only for a limited time.
    pub(super) fn another_opens_the_session(&self, now: Instant, id: PathId) -> bool {
        let opens = |path: &Path| {
            path.state() == PathState::Connecting
                && now.since(path.channel.started()) < OPENER_TIME_MAX
        };
        !self.are_known() && self.others(id).any(opens)
    }

    /// Latest time at which it is a path's turn to open the device: every path ahead of it has its
    /// own timeout.
    pub(super) fn turn_until(&self, now: Instant) -> Instant {
        let turns = u32::try_from(self.rows.len()).unwrap_or(u32::MAX);
        now + STEP_TIMEOUT * turns
    }

    /// Whether a path is using this permit of the control shard.
    pub(super) fn is_using(&self, permit: PermitId) -> bool {
        self.iter().any(|path| path.is_using(permit))
    }
}

impl Index<PathId> for Paths {
    type Output = Path;

    fn index(&self, path: PathId) -> &Path {
        &self.rows[path.index()]
    }
}

impl IndexMut<PathId> for Paths {
    fn index_mut(&mut self, path: PathId) -> &mut Path {
        &mut self.rows[path.index()]
    }
}
