//! What a dead path sent must not land late; and how long IO waits for a path.
//!
//! When a path that carried IO dies, what it sent may still be on its way or wait at the server.
//! Nothing of it may be sent again over another path, and no path that comes up anew may carry
//! anything, before the server has said over a living path that the dead one is fenced off (FENCE,
//! `rtrs-core/src/wire/fence.rs`). A path that is admitted anew was fenced off by that: the server
//! ends the old one first. Servers without FENCE are kernels; there `Failover` says what is done.

use std::sync::Arc;

use rtrs_core::fabric::{Fabric, FabricError, RemoteMem};
use rtrs_core::ids::PathId;
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::Fence;

use super::ToShard;
use super::control::{DeviceState, Path, STEP_TIMEOUT, SessionControl};
use super::policy::{Failover, NoPath};
use crate::path::state::PathState;

/// A path's last epoch that carried IO, while that may still be delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lost {
    epoch: u32,
    recon_cnt: u16,
    /// The path over which the server was asked to fence it off, and until when that may take.
    asked: Option<(PathId, Instant)>,
}

/// Since when no path carries IO.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NoPathClock {
    since: Option<Instant>,
    given_up: bool,
}

impl NoPathClock {
    /// The last path is gone.
    pub(super) fn begin(&mut self, now: Instant) {
        // A path that came and went without carrying anything changes nothing.
        self.since.get_or_insert(now);
    }
}

/// What a path carries, and what it may still deliver of what it carried before it died.
#[derive(Debug, Default)]
pub(super) struct PathFence {
    /// Its chunks while it is connected and waits for the fences of other paths.
    held: Option<Arc<[RemoteMem]>>,
    /// The shards were told to use it.
    carries: bool,
    lost: Option<Lost>,
}

impl PathFence {
    /// The path is connected, and carries IO once no other path awaits its fence.
    pub(super) fn connected(&mut self, chunks: Arc<[RemoteMem]>) {
        self.held = Some(chunks);
    }

    /// The path leaves: it is given no IO any more.
    pub(super) fn withhold(&mut self) {
        self.held = None;
    }

    /// All that the path carried was answered: nothing has to be fenced off.
    pub(super) fn drained(&mut self) {
        self.carries = false;
    }

    /// The path dies, in this epoch and after so many connects: what it carried awaits a fence.
    pub(super) fn died(&mut self, epoch: u32, recon_cnt: u16) {
        self.held = None;
        if std::mem::take(&mut self.carries) && !rtrs_core::mutated!(LostUnnoted) {
            self.lost = Some(Lost { epoch, recon_cnt, asked: None });
        }
    }

    /// True while what the path carried may still be delivered.
    pub(super) fn is_awaited(&self) -> bool {
        self.lost.is_some()
    }
}

impl SessionControl {
    /// A path is no longer of use: what that means for the device.
    pub(super) fn on_path_lost(&mut self, now: Instant, id: PathId) {
        self.review_cache();
        match self.device {
            DeviceState::Closing { path, ref mut deadline } if path == id => {
                *deadline = Instant::ZERO;
            }
            DeviceState::Open { .. } => {
                // One that is connected and only waits for fences is of no use to IO.
                if !self.paths.iter().any(|path| path.fence.carries) {
                    self.no_path.begin(now);
                }
                // The server closes the device with the last path it has of us.
                if !self.paths.iter().any(|p| p.state == PathState::Connected) {
                    self.device = DeviceState::Closed;
                    self.no_path.begin(now);
                    self.tell_all(ToShard::Closed);
                }
            }
            _ => {}
        }
    }

    /// A path is connected anew: the server has ended what it was before.
    pub(super) fn readmitted(&mut self, index: usize) {
        self.cleared(index);
    }

    fn cleared(&mut self, index: usize) {
        let path = self.paths[index].id;
        if let Some(Lost { epoch, .. }) = self.paths[index].fence.lost.take() {
            self.tell_all(ToShard::Fenced { path, epoch });
        }
    }

    /// The server answered a FENCE on path `over`.
    pub(super) fn on_fence_answer(
        &mut self,
        now: Instant,
        over: PathId,
        fabrics: &mut [Box<dyn Fabric>],
    ) {
        let meant = self.paths.iter().position(|path| {
            path.fence.lost.is_some_and(|lost| lost.asked.is_some_and(|(asked, _)| asked == over))
        });
        if let Some(index) = meant {
            tracing::debug!(path = %self.paths[index].target.name, "fenced off");
            self.cleared(index);
        }
        self.advance_fences(now, fabrics);
    }

    /// Asks for fences that are due, and lets paths carry IO that wait for none. True when
    /// anything was done.
    pub(super) fn advance_fences(&mut self, now: Instant, fabrics: &mut [Box<dyn Fabric>]) -> bool {
        if !self.paths.iter().any(|path| path.fence.is_awaited() || path.fence.held.is_some()) {
            return false;
        }
        let mut any = false;
        for index in 0..self.paths.len() {
            if self.paths[index].fence.is_awaited() {
                any |= self.advance_fence(now, index, fabrics);
            }
        }
        for index in 0..self.paths.len() {
            if self.paths[index].fence.held.is_some() && !self.waits_for_fences(index) {
                self.bring_up(index);
                any = true;
            }
        }
        any
    }

    fn advance_fence(
        &mut self,
        now: Instant,
        index: usize,
        fabrics: &mut [Box<dyn Fabric>],
    ) -> bool {
        let Some(mut lost) = self.paths[index].fence.lost else { return false };
        if let Some((over, until)) = lost.asked {
            if self.paths[over.index()].state == PathState::Connected {
                if now < until {
                    return false;
                }
                let why = "a fence was not answered in time";
                self.end_path(now, over.index(), Some(why.into()), fabrics);
            }
            lost.asked = None;
            self.paths[index].fence.lost = Some(lost);
        }
        let up = |path: &&mut Path| path.state == PathState::Connected && path.id.index() != index;
        let fence = Fence { path: self.paths[index].uuid, recon_cnt: lost.recon_cnt };
        let permit = self.fence_permit();
        let free = !self.is_using(permit);
        let idle =
            |path: &Path| free && path.service.as_ref().is_some_and(|s| s.fences() && s.is_idle());
        if let Some(over) = self.paths.iter_mut().filter(up).find(|path| idle(path)) {
            let id = over.id;
            let fabric = fabrics[over.target.provider].as_mut();
            let Some(service) = over.service.as_mut() else { return false };
            match service.post_fence(&fence, permit, fabric) {
                Ok(()) => {
                    lost.asked = Some((id, now + STEP_TIMEOUT));
                    self.paths[index].fence.lost = Some(lost);
                }
                Err(FabricError::QueueFull) => return false,
                Err(error) => {
                    self.end_path(now, id.index(), Some(error.to_string()), fabrics);
                }
            }
            return true;
        }
        let fences = |path: &Path| path.service.as_ref().is_some_and(|service| service.fences());
        let kernel = self.paths.iter_mut().filter(up).any(|path| !fences(path));
        let closed = self.paths[index].state != PathState::Closing;
        if kernel && closed && self.config.failover == Failover::Fast {
            self.cleared(index);
            return true;
        }
        false
    }

    /// True while a connected path may not carry IO yet: the server can tell when a dead one is
    /// fenced off, and has not.
    fn waits_for_fences(&self, index: usize) -> bool {
        let fences = self.paths[index].service.as_ref().is_some_and(|service| service.fences());
        let fences = fences && !rtrs_core::mutated!(UpBeforeFence);
        fences && self.paths.iter().any(|path| path.fence.is_awaited())
    }

    fn bring_up(&mut self, index: usize) {
        let path = &mut self.paths[index];
        let Some(chunks) = path.fence.held.take() else { return };
        path.fence.carries = true;
        let (path, epoch, cache_id) = (path.id, path.epoch, path.cache_id);
        self.no_path = NoPathClock::default();
        self.tell_all(ToShard::PathUp { path, epoch, chunks, cache_id });
    }

    pub(super) fn fence_deadline(&self) -> Option<Instant> {
        let asked =
            |path: &Path| path.fence.lost.and_then(|lost| lost.asked).map(|(_, until)| until);
        self.paths.iter().map(asked).fold(None, earliest)
    }

    /// When IO that waits for a path ends with an error.
    pub(super) fn no_path_deadline(&self) -> Option<Instant> {
        let since = self.no_path.since.filter(|_| !self.no_path.given_up && !self.detaching)?;
        match self.config.no_path {
            NoPath::Queue => None,
            NoPath::QueueFor(time) => Some(since + time),
            NoPath::Fail => Some(since),
        }
    }

    pub(super) fn poll_no_path(&mut self, now: Instant) -> bool {
        if self.no_path_deadline().is_none_or(|at| now < at) {
            return false;
        }
        self.no_path.given_up = true;
        let waited: Duration = self.no_path.since.map_or(Duration::ZERO, |since| now.since(since));
        tracing::error!("no path for {} ms: IO ends with errors now", waited.as_millis());
        self.tell_all(ToShard::GiveUp);
        true
    }
}
