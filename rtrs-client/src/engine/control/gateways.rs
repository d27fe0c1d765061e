//! Volumes that move between servers: which server is asked to take one over, and when.
//!
//! A server that shares an export with others says how it stands when a path opens a volume
//! (`rtrs_core::gateway`). A path to a standby is connected and serves nothing of it. When no path
//! is left to the active server, a path to a standby carries MOVE, at most once in
//! [`MOVE_EVERY`]; the server sends CHANGED when it is active, and the path opens the volume once
//! more. From then on what was sent to others has no effect any more, so nothing of it needs a
//! fence (`fence.rs`).
//!
//! Two servers may call themselves active while one does not know yet that it is not. The higher
//! term counts.

use rtrs_core::ids::PathId;
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::{AccessMode, errno, errno_name};

use super::SessionControl;
use super::moving::BUSY_EVERY;
use super::path::Path;
use super::paths::Paths;
use super::volume::Volume;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceIndex;
use crate::engine::session::CONTROL;
use crate::path::state::PathState;

/// A take-over is asked for at most once in this time.
const MOVE_EVERY: Duration = Duration::from_secs(10);
/// So long the active server may be unreachable before another is asked: a path may come back.
const GRACE: Duration = Duration::from_millis(200);
/// How long the active server may take to leave. One that does not reach the store cannot.
const LEAVE_MAX: Duration = Duration::from_secs(5);
/// A server that calls itself active and is not is asked again after this time.
const STALE_EVERY: Duration = Duration::from_secs(1);

/// When a server is to be asked to take a volume over.
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

/// The path over which a server is asked: not to the one that served the volume last, nor that
/// which was asked last, if there are others.
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
    /// Asks servers to take volumes over, where that is due. True when one was asked.
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
        // What ends that is an event.
        let free = !self.paths.is_using(CONTROL) && self.paths.first(PathState::Opening).is_none();
        let Some(id) = choose(volume, &self.paths).filter(|_| free) else { return false };
        let moving = &mut self.volumes[at].moving;
        (moving.next, moving.asked) = (ctx.now + MOVE_EVERY, Some(id));
        moving.leaves_by = None;
        tracing::info!(path = %self.paths[id].name(), %export, "asks this gateway to take over");
        let asked = self.paths[id].ask_move(at, false, ctx);
        self.end_if_failed(id, asked, ctx);
        true
    }

    /// When a server is to be asked next. None while none may: what ends that is an event.
    pub(super) fn move_deadline(&self) -> Option<Instant> {
        let free = !self.paths.is_using(CONTROL) && self.paths.first(PathState::Opening).is_none();
        let volumes = self.volumes.iter().filter(|_| free && self.is_running());
        let due = volumes.filter_map(|volume| {
            choose(volume, &self.paths)?;
            due(volume, &self.paths)
        });
        due.min()
    }

    /// A server has answered MOVE.
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
                "this gateway does not take over"
            ),
        }
    }

    /// A path to the active server serves a volume: those to others do not any more.
    pub(super) fn displace(&mut self, id: PathId, at: DeviceIndex, ctx: &mut Ctx<'_>) {
        let server = self.paths[id].server();
        let stale = |path: &&Path| path.has(at) && path.server() != server;
        let stale: Vec<PathId> = self.paths.others(id).filter(stale).map(Path::id).collect();
        for other in stale {
            self.stand_by(other, at, ctx);
            self.paths[other].terms.reopen(at).changed(ctx.now + STALE_EVERY);
        }
    }

    /// A path that served a volume does not any more: its server is standby.
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

    /// Has the active server give a volume up, so that another takes it over.
    pub(super) fn switch(&mut self, export: &str, ctx: &mut Ctx<'_>) -> Result<(), String> {
        let Some(at) = self.volumes.named(export) else {
            return Err(format!("the session has no volume {export}"));
        };
        let volume = &self.volumes[at];
        if !volume.moving.moves {
            return Err(format!("the export of {export} has one server (see its option gateway)"));
        }
        let standby = |path: &Path| path.is_connected() && path.terms.is_standby(at);
        if !self.paths.iter().any(standby) {
            return Err(format!("no path to another gateway of {export} is connected"));
        }
        let able = |path: &&Path| path.is_free() && path.has(at);
        let free = !self.paths.is_using(CONTROL) && self.paths.first(PathState::Opening).is_none();
        let Some(id) = self.paths.iter().find(able).map(Path::id).filter(|_| free) else {
            return Err("the session is busy; try again".to_owned());
        };
        // Asked for by hand: at once.
        let moving = &mut self.volumes[at].moving;
        (moving.next, moving.leaves_by) = (ctx.now, Some(ctx.now + LEAVE_MAX));
        let asked = self.paths[id].ask_move(at, true, ctx);
        self.end_if_failed(id, asked, ctx);
        Ok(())
    }
}
