//! Volumes that move between servers: selects when a volume moves to another server, and to which.
//!
//! A server that shares an export with others reports its standing when a path opens the volume
//! (`rtrs_core::gateway`). A path to a standby server is connected but does not serve the volume.
//! When no path to the active server is left, a path to a standby carries MOVE, at most once per
//! [`MOVE_EVERY`]. The server sends CHANGED when it is active, and the path opens the volume again.
//! From then on, requests sent to other servers have no effect any more, so they need no
//! fence (`fence.rs`).
//!
//! Two servers may both claim to be active until one learns that it is not. The higher term wins.

use rtrs_core::ids::PathId;
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::{AccessMode, errno, errno_name};

use super::SessionControl;
use super::change::ChangeError;
use super::moving::BUSY_EVERY;
use super::path::Path;
use super::paths::Paths;
use super::volume::Volume;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceIndex;
use crate::engine::session::CONTROL;
use crate::path::state::PathState;

/// Minimum time between two takeover requests.
const MOVE_EVERY: Duration = Duration::from_secs(10);
/// Time for which the active server may be unreachable before another is asked: a path may return.
const GRACE: Duration = Duration::from_millis(200);
/// Time limit for the active server to step down. A server that cannot reach the store does not.
const LEAVE_MAX: Duration = Duration::from_secs(5);
/// Interval before the next request to a server that wrongly claims to be active.
const STALE_EVERY: Duration = Duration::from_secs(1);

/// Time at which a server has to be asked to take over a volume.
fn due(volume: &Volume, paths: &Paths) -> Option<Instant> {
    let (moving, at) = (&volume.moving, volume.index());
    let writes = volume.access() != AccessMode::ReadOnly;
    if !(moving.moves && volume.is_wanted() && writes) {
        return None;
    }
    let standby = |path: &Path| path.is_connected() && path.terms.is_standby(at);
    if !paths.iter().any(standby) {
        return None;
    }
    let certain = paths.listed().all(|path| {
        standby(path) || matches!(path.state(), PathState::Disconnected | PathState::Gone)
    });
    let grace = if certain { Duration::ZERO } else { GRACE };
    let since = moving.lost.map(|at| at + grace).or(moving.leaves_by)?;
    Some(since.max(moving.next))
}

/// Selects the path over which a server is asked. Prefers servers other than the one that served
/// the volume last and the one asked last.
fn choose(volume: &Volume, paths: &Paths) -> Option<PathId> {
    let (moving, at) = (&volume.moving, volume.index());
    let able = |path: &&Path| path.is_free() && path.terms.is_standby(at);
    let rank = |path: &&Path| {
        let was_active = moving.server.is_some() && path.server() == moving.server;
        (was_active, moving.asked == Some(path.id()))
    };
    paths.iter().filter(able).min_by_key(rank).map(Path::id)
}

impl SessionControl {
    /// Requests takeovers that are due. Returns whether a server was asked.
    pub(super) fn ask_moves(&mut self, ctx: &mut Ctx<'_>) -> bool {
        if !self.is_running() {
            return false;
        }
        for volume in self.volumes.iter_mut().filter(|volume| volume.moving.moves) {
            let served = self.paths.iter().any(|path| path.has(volume.index()));
            let moving = &mut volume.moving;
            moving.lost = if served { None } else { Some(moving.lost.unwrap_or(ctx.now)) };
        }
        let is_due = |volume: &&Volume| due(volume, &self.paths).is_some_and(|at| ctx.now >= at);
        let Some(volume) = self.volumes.iter().find(is_due) else { return false };
        let (at, export) = (volume.index(), volume.export().to_owned());
        // An event ends each of these conditions.
        let free = !self.paths.is_using(CONTROL) && self.paths.first(PathState::Opening).is_none();
        let Some(id) = choose(volume, &self.paths).filter(|_| free) else { return false };
        let moving = &mut self.volumes[at].moving;
        (moving.next, moving.asked) = (ctx.now + MOVE_EVERY, Some(id));
        moving.leaves_by = None;
        tracing::info!(path = %self.paths[id].name(), %export, "asking this gateway to take over");
        let asked = self.paths[id].ask_move(at, false, ctx);
        self.end_if_failed(id, asked, ctx);
        true
    }

    /// Time at which a server has to be asked next; None while no server may be asked. An event
    /// ends that state.
    pub(super) fn move_deadline(&self) -> Option<Instant> {
        let free = !self.paths.is_using(CONTROL) && self.paths.first(PathState::Opening).is_none();
        let volumes = self.volumes.iter().filter(|_| free && self.is_running());
        let due = volumes.filter_map(|volume| {
            choose(volume, &self.paths)?;
            due(volume, &self.paths)
        });
        due.min()
    }

    /// Handles the answer to MOVE.
    pub(super) fn on_moves(&mut self, id: PathId, at: DeviceIndex, code: u16, ctx: &Ctx<'_>) {
        if self.volumes.get(at).is_none() {
            return;
        }
        let volume = &mut self.volumes[at];
        match code {
            0 => {}
            errno::EAGAIN => volume.moving.next = ctx.now + BUSY_EVERY,
            code => tracing::warn!(
                path = %self.paths[id].name(),
                export = volume.export(),
                errno = errno_name(code),
                "this gateway refused to take over"
            ),
        }
    }

    /// Stops serving a volume over paths to other servers once a path to the active server serves
    /// it.
    pub(super) fn displace(&mut self, id: PathId, at: DeviceIndex, ctx: &mut Ctx<'_>) {
        let server = self.paths[id].server();
        let stale = |path: &&Path| path.has(at) && path.server() != server;
        let stale: Vec<PathId> = self.paths.others(id).filter(stale).map(Path::id).collect();
        for other in stale {
            self.stand_by(other, at, ctx);
            self.paths[other].terms.reopen(at).changed(ctx.now + STALE_EVERY);
        }
    }

    /// Stops serving a volume over a path whose server has become standby.
    pub(super) fn stand_by(&mut self, id: PathId, at: DeviceIndex, ctx: &mut Ctx<'_>) {
        let path = &mut self.paths[id];
        let leaves = path.leaves(at).filter(|_| path.terms.serves(at));
        if let Some(device) = path.terms.device_id(at) {
            path.terms.stand_by(at, device);
        }
        if let Some(message) = leaves {
            self.notify_all(&message, ctx);
        }
        self.check_lost(at, ctx);
    }

    /// Has the active server give up a volume, so that another takes it over.
    pub(super) fn switch(&mut self, export: &str, ctx: &mut Ctx<'_>) -> Result<(), ChangeError> {
        let Some(at) = self.volumes.named(export) else {
            return Err(ChangeError::NoVolume(export.to_owned()));
        };
        let volume = &self.volumes[at];
        if !volume.moving.moves {
            return Err(ChangeError::OneGateway(export.to_owned()));
        }
        let standby = |path: &Path| path.is_connected() && path.terms.is_standby(at);
        if !self.paths.iter().any(standby) {
            return Err(ChangeError::NoOtherGateway(export.to_owned()));
        }
        let able = |path: &&Path| path.is_free() && path.has(at);
        let free = !self.paths.is_using(CONTROL) && self.paths.first(PathState::Opening).is_none();
        let Some(id) = self.paths.iter().find(able).map(Path::id).filter(|_| free) else {
            return Err(ChangeError::Busy);
        };
        // A manual request takes effect at once.
        let moving = &mut self.volumes[at].moving;
        (moving.next, moving.leaves_by) = (ctx.now, Some(ctx.now + LEAVE_MAX));
        let asked = self.paths[id].ask_move(at, true, ctx);
        self.end_if_failed(id, asked, ctx);
        Ok(())
    }
}
