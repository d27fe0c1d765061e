//! Paths that come and go while the session runs, and the policy that changes under it.
//!
//! A path that is to go takes no new request; its cores say when what it carried has come home, and
//! only then its connections are closed, so that nothing of it has to be sent again. What is still
//! in flight when its time is over goes to the other paths as when a path dies, fence and all. The
//! place of a removed path in the tables is given to the next one that is added.

use rtrs_core::fabric::Fabric;
use rtrs_core::ids::{CoreIndex, PathId};
use rtrs_core::time::{Duration, Instant};

use super::control::{Path, SessionControl};
use super::policy::{Failover, NoPath, Policy};
use super::shard::ShardSession;
use super::{PathTarget, ToHome, ToShard};
use crate::path::shard::PathShard;
use crate::path::state::PathState;

/// Most paths of a session (kernel rtrs-srv.c, `__alloc_path`).
pub(crate) const PATHS_MAX: usize = 128;

/// What is changed while a session runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// One more path, under an identity that no path of the session had before.
    Add {
        /// Where it leads.
        target: PathTarget,
        /// Its identity at the server.
        uuid: [u8; 16],
    },
    /// The path is not listed any more when it is gone.
    Remove(Leaving),
    /// The path stays down until it is told to connect again.
    Disconnect(Leaving),
    /// The path is connected anew: at once where it is down, after its requests where it is up.
    Reconnect(Leaving),
    /// How a path is chosen.
    Policy(Policy),
}

/// A path that is to go, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaving {
    /// Its name, as listings show it.
    pub path: String,
    /// Time for what it carries; then that goes to the other paths.
    pub within: Duration,
    /// Also when IO then has to wait for a path.
    pub force: bool,
}

/// Why a path goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    Remove,
    Disconnect,
    Reconnect,
}

/// A path that is being taken out of use.
#[derive(Clone, Debug)]
pub(super) struct Leave {
    why: Why,
    deadline: Instant,
    /// By core: nothing of the path is in flight there any more.
    retired: Vec<bool>,
}

impl Leave {
    pub(super) fn name(&self) -> &'static str {
        match self.why {
            Why::Remove => "remove",
            Why::Disconnect => "disconnect",
            Why::Reconnect => "reconnect",
        }
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }
}

impl SessionControl {
    /// Begins a change. The error says why it cannot be made.
    pub(crate) fn change(
        &mut self,
        now: Instant,
        change: Change,
        fabrics: &mut [Box<dyn Fabric>],
    ) -> Result<(), String> {
        if self.detaching {
            return Err("the session is being detached".into());
        }
        if !self.opened_once {
            return Err("the session is still attaching; try again when it is open".into());
        }
        // No path is tried any more, so nothing would come of it.
        if let Some(failure) = &self.failure {
            return Err(failure.to_string());
        }
        match change {
            Change::Add { target, uuid } => self.add_path(now, target, uuid),
            Change::Remove(leaving) => self.leave(now, Why::Remove, &leaving, fabrics),
            Change::Disconnect(leaving) => self.leave(now, Why::Disconnect, &leaving, fabrics),
            Change::Reconnect(leaving) => self.leave(now, Why::Reconnect, &leaving, fabrics),
            Change::Policy(policy) => {
                self.policy = policy;
                self.tell_all(ToShard::Policy(policy));
                Ok(())
            }
        }
    }

    fn add_path(&mut self, now: Instant, target: PathTarget, uuid: [u8; 16]) -> Result<(), String> {
        let name = &target.name;
        if let Some(path) = self.paths.iter().find(|p| !p.removed && p.target.name == *name) {
            let still = if path.leave.is_some() { " and has not left yet" } else { "" };
            return Err(format!("path {name} is there already{still}"));
        }
        if self.paths.iter().filter(|path| !path.removed).count() >= PATHS_MAX {
            return Err(format!("the session has {PATHS_MAX} paths, and no more are possible"));
        }
        let free = |path: &Path| path.removed && !path.fence.is_awaited();
        let index = self.paths.iter().position(free).unwrap_or(self.paths.len());
        let Ok(id) = u16::try_from(index).map(PathId) else {
            return Err("no place for another path".into());
        };
        tracing::info!(path = %name, "path added");
        self.tell_all(ToShard::AddPath { path: id, target: Box::new(target.clone()) });
        let path = Path::new(now, id, target, uuid, &self.config);
        match self.paths.get_mut(index) {
            // Cores tell the attempts of a place apart by its epoch: it goes on.
            Some(place) => *place = Path { epoch: place.epoch, ..path },
            None => self.paths.push(path),
        }
        Ok(())
    }

    fn leave(
        &mut self,
        now: Instant,
        why: Why,
        leaving: &Leaving,
        fabrics: &mut [Box<dyn Fabric>],
    ) -> Result<(), String> {
        let Leaving { path: name, within, force } = leaving;
        let named = |path: &Path| !path.removed && path.target.name == *name;
        let Some(index) = self.paths.iter().position(named) else {
            return Err(format!("no path {name}; see path list"));
        };
        if !force {
            self.judge_leave(why, index)?;
        }
        let leave = Leave { why, deadline: now + *within, retired: self.none_retired() };
        let path = &mut self.paths[index];
        let name = leave.name();
        match path.state {
            PathState::Connected => match path.leave.as_mut() {
                Some(before) => (before.why, before.deadline) = (why, leave.deadline),
                None => {
                    path.leave = Some(leave);
                    path.fence.withhold();
                    let (path, epoch) = (path.id, path.epoch);
                    self.tell_all(ToShard::Retire { path, epoch });
                }
            },
            PathState::Connecting | PathState::Introducing | PathState::Opening => {
                if why == Why::Reconnect {
                    path.leave = None;
                } else {
                    path.leave = Some(leave);
                    self.end_path(now, index, None, fabrics);
                }
            }
            PathState::Closing => path.leave = Some(leave),
            PathState::Waiting => {
                path.leave = Some(leave);
                self.has_left(now, index);
            }
            PathState::Disconnected => match why {
                Why::Remove => {
                    path.state.advance(PathState::Gone);
                    path.removed = true;
                }
                Why::Disconnect => {}
                Why::Reconnect => {
                    path.state.advance(PathState::Waiting);
                    path.begin_anew(now);
                }
            },
            PathState::Gone => return Err(format!("path {} is gone", leaving.path)),
        }
        tracing::info!(path = %self.paths[index].target.name, "{name} on request");
        Ok(())
    }

    /// Refuses what would make IO wait, or fail.
    fn judge_leave(&self, why: Why, index: usize) -> Result<(), String> {
        let stays = |path: &Path| path.state == PathState::Connected && path.leave.is_none();
        let others = self.paths.iter().enumerate().filter(|(at, _)| *at != index);
        if others.clone().any(|(_, path)| stays(path)) {
            return Ok(());
        }
        let path = &self.paths[index];
        let name = &path.target.name;
        let fails = self.config.no_path == NoPath::Fail;
        let last = others.clone().all(|(_, path)| path.removed);
        match why {
            Why::Remove if last => Err(format!(
                "{name} is the last path of the session; add another first, or use --force"
            )),
            Why::Remove | Why::Disconnect if stays(path) => Err(format!(
                "{name} is the only connected path, and IO would wait for another; connect \
                 another first, or use --force"
            )),
            Why::Reconnect if stays(path) && fails => Err(format!(
                "{name} is the only connected path, and with no-path fail IO would end with \
                 errors; connect another first, or use --force"
            )),
            _ => Ok(()),
        }
    }

    fn none_retired(&self) -> Vec<bool> {
        vec![false; usize::from(self.config.cores)]
    }

    /// A core has nothing of the path in flight any more.
    pub(super) fn on_retired(
        &mut self,
        now: Instant,
        index: usize,
        epoch: u32,
        core: CoreIndex,
        fabrics: &mut [Box<dyn Fabric>],
    ) {
        let path = &mut self.paths[index];
        let leaves = path.epoch == epoch && path.state == PathState::Connected;
        let Some(leave) = path.leave.as_mut().filter(|_| leaves) else { return };
        leave.retired[core.index()] = true;
        if leave.retired.iter().all(|retired| *retired) {
            path.fence.drained();
            self.end_path(now, index, None, fabrics);
        }
    }

    /// Ends a path whose time to leave is over. True when it was.
    pub(super) fn poll_leave(
        &mut self,
        now: Instant,
        index: usize,
        fabrics: &mut [Box<dyn Fabric>],
    ) -> bool {
        let over = self.paths[index].leave.as_ref().is_some_and(|leave| now >= leave.deadline);
        if over {
            let why = "what it carried was not answered in the time to leave";
            self.end_path(now, index, Some(why.into()), fabrics);
        }
        over
    }

    /// All connections of a path are closed: true when it left, and has its state.
    pub(super) fn has_left(&mut self, now: Instant, index: usize) -> bool {
        let strict = self.config.failover == Failover::Strict;
        let path = &mut self.paths[index];
        let Some(leave) = path.leave.as_ref() else { return false };
        // Where no fence can be had, only its return shows that nothing of it is left.
        let proof_due = path.fence.is_awaited() && strict && !path.fences;
        match leave.why {
            Why::Reconnect => {
                if path.state != PathState::Waiting {
                    path.state.advance(PathState::Waiting);
                }
                path.begin_anew(now);
            }
            _ if proof_due => return false,
            Why::Disconnect => path.state.advance(PathState::Disconnected),
            Why::Remove => {
                path.state.advance(PathState::Gone);
                path.removed = true;
                tracing::info!(path = %path.target.name, "path removed");
            }
        }
        path.leave = None;
        true
    }
}

impl Path {
    /// The next attempt is due now, as if it were the first.
    fn begin_anew(&mut self, now: Instant) {
        self.until = now;
        self.reconnect.forget_failures();
    }
}

impl ShardSession {
    /// A path that was added, or that takes the place of one that is gone.
    pub(super) fn on_add_path(&mut self, path: PathId, target: PathTarget) {
        let added = PathShard::new(path, target);
        match self.paths.get_mut(path.index()) {
            Some(place) => *place = added,
            None => self.paths.push(added),
        }
        self.chooser.paces.forget(path);
        self.replays.add_path(self.paths.len());
        self.stats.add_path(path.index());
    }

    /// Says of paths that are to go when nothing of them is in flight here any more.
    pub(super) fn tell_retired(&mut self, out: &mut Vec<ToHome>) {
        for path in &mut self.paths {
            let asked = self.probe.is_some_and(|probe| probe.path == path.id().index());
            if path.inflight == 0
                && !asked
                && let Some(epoch) = path.take_retiring()
            {
                out.push(ToHome::Retired { path: path.id(), epoch, core: self.core });
            }
        }
    }
}
