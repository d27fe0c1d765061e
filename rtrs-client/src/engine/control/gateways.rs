//! Volumes that move between servers: decides when a volume moves, and to which server.
//!
//! A server that shares an export with others reports whether it is active or a standby when a path
//! opens the volume (`rtrs_core::gateway`). A path to a standby server is connected but does not
//! serve the volume. When no path to the active server is left, MOVE is sent over a path to a
//! standby, at limited intervals (`moving.rs`). The server sends CHANGED once it is active, and the
//! path reopens the volume. From then on, requests sent to other servers no longer have any effect,
//! so they need no fence (`fence.rs`).
//!
//! Two servers may both claim to be active until one learns that it is not. The higher term wins.

use rtrs_core::ids::PathId;
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::{AccessMode, errno, errno_name};

use super::change::ChangeError;
use super::path::Path;
use super::paths::Paths;
use super::routes::Routes;
use super::volume::Volume;
use crate::engine::device_set::DeviceIndex;
use crate::path::state::PathState;

/// Time for which the active server may be unreachable before a different server is asked, because
/// a path may come back.
const GRACE: Duration = Duration::from_millis(200);

/// A request to a server to take over a volume, or to give it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Takeover {
    pub(super) path: PathId,
    pub(super) volume: DeviceIndex,
}

/// Time at which a server must be asked to take over a volume.
fn due(volume: &Volume, paths: &Paths) -> Option<Instant> {
    let (moving, at) = (&volume.moving, volume.index());
    let writes = volume.access() != AccessMode::ReadOnly;
    if !(moving.moves() && volume.is_wanted() && writes) {
        return None;
    }
    let standby = |path: &Path| path.is_connected() && path.volumes.terms.is_standby(at);
    if !paths.iter().any(standby) {
        return None;
    }
    let certain = paths.listed().all(|path| {
        standby(path) || matches!(path.state(), PathState::Disconnected | PathState::Gone)
    });
    moving.due(if certain { Duration::ZERO } else { GRACE })
}

/// Selects the path over which to ask a server.
fn choose(volume: &Volume, paths: &Paths) -> Option<PathId> {
    let at = volume.index();
    let able = |path: &&Path| path.is_free() && path.volumes.terms.is_standby(at);
    let rank = |path: &&Path| volume.moving.rank(path.id(), path.channel.server());
    paths.iter().filter(able).min_by_key(rank).map(Path::id)
}

/// Takes the next takeover request that is due.
pub(super) fn next_takeover(routes: &mut Routes, now: Instant) -> Option<Takeover> {
    for volume in routes.volumes.iter_mut().filter(|volume| volume.moving.moves()) {
        let served = routes.paths.iter().any(|path| path.has(volume.index()));
        volume.moving.set_served(served, now);
    }
    let is_due = |volume: &&Volume| due(volume, &routes.paths).is_some_and(|at| now >= at);
    let volume = routes.volumes.iter().find(is_due)?;
    // Each of these conditions ends with an event.
    let path = choose(volume, &routes.paths).filter(|_| routes.may_ask())?;
    let (volume, export) = (volume.index(), volume.export());
    let name = routes.paths[path].channel.name();
    tracing::info!(path = %name, export, "asking this gateway to take over");
    routes.volumes[volume].moving.asked(path, now);
    Some(Takeover { path, volume })
}

/// Time at which a server must next be asked; None if no server may be asked until an event occurs.
pub(super) fn deadline(routes: &Routes) -> Option<Instant> {
    let volumes = routes.volumes.iter().filter(|_| routes.may_ask());
    let due = volumes.filter_map(|volume| {
        choose(volume, &routes.paths)?;
        due(volume, &routes.paths)
    });
    due.min()
}

/// Handles the answer to MOVE on a path: an errno, or 0.
pub(super) fn answered(routes: &mut Routes, moved: Takeover, code: u16, now: Instant) {
    let Takeover { path, volume } = moved;
    if routes.volumes.get(volume).is_none() {
        return;
    }
    let volume = &mut routes.volumes[volume];
    match code {
        0 => {}
        errno::EAGAIN => volume.moving.busy(now),
        code => tracing::warn!(
            path = %routes.paths[path].channel.name(),
            export = volume.export(),
            errno = errno_name(code),
            "this gateway refused to take over"
        ),
    }
}

/// Selects the path over which to ask the active server to give up a volume, so that a different
/// server takes it over.
pub(super) fn send_away(
    routes: &mut Routes,
    export: &str,
    now: Instant,
) -> Result<Takeover, ChangeError> {
    let Some(at) = routes.volumes.named(export) else {
        return Err(ChangeError::NoVolume(export.to_owned()));
    };
    if !routes.volumes[at].moving.moves() {
        return Err(ChangeError::OneGateway(export.to_owned()));
    }
    let standby = |path: &Path| path.is_connected() && path.volumes.terms.is_standby(at);
    if !routes.paths.iter().any(standby) {
        return Err(ChangeError::NoOtherGateway(export.to_owned()));
    }
    let able = |path: &&Path| path.is_free() && path.has(at);
    let path = routes.paths.iter().find(able).map(Path::id).filter(|_| routes.may_ask());
    let path = path.ok_or(ChangeError::Busy)?;
    routes.volumes[at].moving.sent_away(now);
    Ok(Takeover { path, volume: at })
}
