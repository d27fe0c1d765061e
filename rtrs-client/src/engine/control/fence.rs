//! Fencing of dead paths, so that none of their requests takes effect late.
//!
//! When a path that carried IO dies, its requests may still be in transit or queued on the server.
//! They must not be repeated over another path, and no newly connected path may carry IO, until the
//! server has confirmed over a working path that the dead path is fenced off (FENCE,
//! `rtrs-core/src/wire/fence.rs`). Readmitting a path fences it off as well: the server first ends
//! the old one. Kernel servers do not support FENCE; for them, `Failover` selects the behavior.

use rtrs_core::fabric::FabricError;
use rtrs_core::ids::{PathId, PermitId};
use rtrs_core::time::{Instant, earliest};
use rtrs_core::wire::Fence;

use super::path::Path;
use super::path_volumes::STEP_TIMEOUT;
use super::paths::Paths;
use super::routes::Routes;
use super::volume::Volume;
use super::volumes::Volumes;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceIndex;
use crate::engine::path_end::PathEnd;
use crate::engine::session::Failover;
use crate::path::state::PathState;

/// Outcome of an attempt to fence a path.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fencing {
    /// The fence cannot be requested now, or has already been requested.
    Waits,
    /// The fence was requested.
    Asked,
    /// No fence is needed; `Failover` decides what happens to the remaining requests.
    NotNeeded,
    /// The request failed on this path, which must end.
    End(PathId, PathEnd),
}

/// Abandons a fence request whose path has failed or has not answered in time. In the latter case,
/// returns the path, which must end.
pub(super) fn expire(paths: &mut Paths, path: PathId, now: Instant) -> Option<PathId> {
    let (over, until) = paths[path].volumes.fence.asked()?;
    let connected = paths[over].is_connected();
    if connected && now < until {
        return None;
    }
    paths[path].volumes.fence.set_asked(None);
    connected.then_some(over)
}

/// Requests a fence for a path over any other connected path, using this permit.
pub(super) fn ask(
    paths: &mut Paths,
    path: PathId,
    volumes: &Volumes,
    permit: PermitId,
    failover: Failover,
    ctx: &mut Ctx<'_>,
) -> Fencing {
    let fence = &paths[path].volumes.fence;
    let (Some(recon_cnt), None) = (fence.recon_cnt(), fence.asked()) else {
        return Fencing::Waits;
    };
    let fence = Fence { path: paths[path].channel.uuid(), recon_cnt, process: fence.process() };
    let free = !paths.is_using(permit);
    let closed = paths[path].state() != PathState::Closing;
    // A different server knows nothing about the dead path.
    let server = paths[path].volumes.fence.lost_at().and_then(|(server, _)| server);
    let same = |other: &Path| other.channel.server() == server;
    let up = |other: &&Path| other.is_connected() && other.id() != path && same(other);
    let idle = |other: &&Path| free && other.channel.fences() && other.channel.is_idle();
    let lost = &paths[path];
    let same_process = |other: &&Path| !other.channel.process().differs(fence.process);
    let there = paths.iter().filter(up).any(|other| same_process(&other));
    let answers = |other: &&Path| match there {
        true => same_process(other),
        false => may_answer(lost, other, volumes),
    };
    let over = paths.iter().filter(up).filter(answers).find(idle).map(Path::id);
    if let Some(over) = over {
        let posted =
            paths[over].channel.try_post(ctx, |s, fabric| s.post_fence(&fence, permit, fabric));
        return match posted {
            Ok(()) => {
                paths[path].volumes.fence.set_asked(Some((over, ctx.now + STEP_TIMEOUT)));
                Fencing::Asked
            }
            Err(FabricError::QueueFull) => Fencing::Waits,
            Err(error) => Fencing::End(over, error.into()),
        };
    }
    let kernel = paths.iter().filter(up).any(|other| !other.channel.fences());
    if kernel && closed && failover == Failover::Fast {
        return Fencing::NotNeeded;
    }
    Fencing::Waits
}

/// Whether the process behind `over` may answer for the process behind the dead path. It may if
/// both are the same process, or if it was asked to open each volume that the dead path carried and
/// has not refused the fence. Volumes that are being closed are not opened there. A process that
/// does not open a volume accepts no writes to that volume from the dead path.
fn may_answer(lost: &Path, over: &Path, volumes: &Volumes) -> bool {
    let process = over.channel.process();
    let opened = || {
        let carried = lost.volumes.fence.lost_at().map(|(_, carried)| carried);
        let wanted = |at: &DeviceIndex| volumes.get(*at).is_some_and(Volume::is_wanted);
        let tried = |at| over.volumes.terms.is_tried(at);
        carried.is_none_or(|carried| carried.iter().filter(wanted).all(tried))
    };
    !process.differs(lost.volumes.fence.process())
        || !lost.volumes.fence.is_refused_by(process) && opened()
}

/// Whether other servers now serve all volumes that the path carried before it died, so that its
/// requests no longer have any effect (`rtrs_core::gateway`).
pub(super) fn is_moved(paths: &Paths, path: PathId) -> bool {
    let Some((server, carried)) = paths[path].volumes.fence.lost_at() else { return false };
    let elsewhere = |other: &&Path| other.is_connected() && other.channel.server() != server;
    let moved = |volume| paths.iter().filter(elsewhere).any(|other| other.has(volume));
    paths.iter().any(|other| elsewhere(&other)) && carried.iter().all(moved)
}

/// Whether a fence can be requested: another path to the same server is connected and leads to a
/// process that may answer.
pub(super) fn is_awaited(paths: &Paths, volumes: &Volumes) -> bool {
    paths.iter().any(|path| {
        let lost = path.volumes.fence.lost_at();
        let up = |other: &Path, server| other.is_connected() && other.channel.server() == server;
        lost.is_some_and(|(server, _)| {
            paths.iter().any(|other| up(other, server) && may_answer(path, other, volumes))
        })
    })
}

/// Path for which a fence was requested over `over`.
pub(super) fn answered(paths: &Paths, over: PathId) -> Option<PathId> {
    let asked = |path: &&Path| path.volumes.fence.asked().is_some_and(|(asked, _)| asked == over);
    paths.iter().find(asked).map(Path::id)
}

/// Handles a refused fence: the process behind `over` cannot answer for the dead path's process.
pub(super) fn refused(paths: &mut Paths, over: PathId) {
    let by = paths[over].channel.process();
    let Some(lost) = answered(paths, over) else { return };
    tracing::warn!(
        path = %paths[lost].channel.name(),
        "the server was restarted and cannot determine whether this path's requests still run, \
         because an export has no lock; IO waits until the path reconnects"
    );
    paths[lost].volumes.fence.refuse(by);
}

/// Whether a connected path that is waiting for fences may carry IO. Its own requests to other
/// servers must no longer have any effect, and no other path to its server may await a fence,
/// unless the server does not support fences.
pub(super) fn may_carry(paths: &Paths, path: PathId) -> bool {
    let fences = || paths[path].channel.fences() && !rtrs_core::mutated!(UpBeforeFence);
    let server = paths[path].channel.server();
    let lost = |other: &Path| other.volumes.fence.lost_at().is_some_and(|(at, _)| at == server);
    let awaited = || paths.iter().any(lost);
    let fence = &paths[path].volumes.fence;
    fence.is_held() && !fence.is_awaited() && !(fences() && awaited())
}

/// Whether shards may use a volume that a path has just opened while carrying IO. As with
/// [`may_carry`], they may not while another path to the same server that carried the volume awaits
/// its fence: a copy of a failed IO may still be on the server.
pub(super) fn may_serve(paths: &Paths, path: PathId, volume: DeviceIndex) -> bool {
    let server = paths[path].channel.server();
    let lost = |other: &Path| {
        let lost = other.volumes.fence.lost_at();
        lost.is_some_and(|(at, carried)| at == server && carried.contains(volume))
    };
    let awaited = paths[path].channel.fences() && paths.iter().any(lost);
    !awaited
}

/// Time at which the answer to a fence becomes overdue.
pub(super) fn deadline(paths: &Paths) -> Option<Instant> {
    let asked = |path: &Path| path.volumes.fence.asked().map(|(_, until)| until);
    paths.iter().map(asked).fold(None, earliest)
}

/// Releases connected paths that are not waiting for a fence, and volumes that were opened over
/// paths already carrying IO. Returns whether anything was released.
pub(super) fn release(routes: &mut Routes, ctx: &mut Ctx<'_>) -> bool {
    let mut any = false;
    for id in routes.paths.ids() {
        let epoch = routes.paths[id].epoch();
        if may_carry(&routes.paths, id)
            && let Some(message) = routes.paths[id].volumes.bring_up(epoch)
        {
            for served in routes.paths[id].volumes.terms.served() {
                routes.volumes[served.device].no_path.stop();
            }
            routes.notify(&message, ctx);
            any = true;
        }
    }
    for id in routes.paths.ids() {
        let epoch = routes.paths[id].epoch();
        for volume in routes.paths[id].volumes.fence.unreported().iter() {
            if may_serve(&routes.paths, id, volume)
                && let Some(message) = routes.paths[id].volumes.serves(volume, epoch)
            {
                routes.volumes[volume].no_path.stop();
                routes.notify(&message, ctx);
                any = true;
            }
        }
    }
    any
}
