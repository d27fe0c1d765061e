//! Paths and volumes of a session, and which path serves which volume.

use std::sync::Arc;

use rtrs_core::ids::PathId;
use rtrs_core::time::{Duration, Instant};

use super::failure::SessionFailure;
use super::path::Path;
use super::paths::Paths;
use super::volumes::Volumes;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceIndex;
use crate::engine::message::ShardMessage;
use crate::engine::path_end::PathEnd;
use crate::engine::session::{CONTROL, SessionConfig, Tuning};
use crate::path::state::PathState;

/// Interval before the next request to a server that wrongly claims to be active.
const STALE_EVERY: Duration = Duration::from_secs(1);

/// Paths and volumes of a session.
#[derive(Debug)]
pub(super) struct Routes {
    pub(super) paths: Paths,
    pub(super) volumes: Volumes,
    shards: u16,
}

impl Routes {
    pub(super) fn new(now: Instant, config: &Arc<SessionConfig>, uuids: &[[u8; 16]]) -> Self {
        Self {
            paths: Paths::new(now, config, uuids),
            volumes: Volumes::new(now, config),
            shards: config.shards,
        }
    }

    /// Applies new settings.
    pub(super) fn tune(&mut self, now: Instant, config: &Arc<SessionConfig>, tuning: &Tuning) {
        self.paths.tune(now, config, tuning);
        self.volumes.tune(config);
    }

    /// Queues a message for all shards.
    pub(super) fn notify(&self, message: &ShardMessage, ctx: &mut Ctx<'_>) {
        ctx.out.all_shards(self.shards, message);
    }

    /// Whether the permit for opens is free and no connecting path needs it first.
    pub(super) fn may_ask(&self) -> bool {
        !self.paths.is_using(CONTROL) && self.paths.first(PathState::Opening).is_none()
    }

    /// Opens a volume over a path, or reopens it if the path has it open.
    pub(super) fn open(
        &mut self,
        id: PathId,
        at: DeviceIndex,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        let (path, volume) = (&mut self.paths[id], &mut self.volumes[at]);
        if path.volumes.terms.serves(at) && volume.promotion.due().is_some_and(|at| at <= ctx.now) {
            volume.promotion.begin(ctx.now);
            return path.volumes.promote(volume, &mut path.channel, ctx);
        }
        if path.volumes.terms.serves(at) || path.volumes.terms.is_standby(at) {
            path.volumes.open_again(volume, &mut path.channel, ctx)
        } else {
            path.open(volume, None, ctx)
        }
    }

    /// Records that a device has changed on the server; it may not be open yet. Returns whether a
    /// volume must be reopened.
    pub(super) fn changed(&mut self, id: PathId, device: u32, now: Instant) -> bool {
        let path = &mut self.paths[id];
        let mut any = false;
        for volume in self.volumes.used() {
            let last = volume.last().map(|last| last.device_id);
            let (at, terms) = (volume.index(), &path.volumes.terms);
            let known = terms.device_id(at).or_else(|| terms.standby_id(at)).or(last);
            if known.is_none_or(|known| known == device) {
                path.volumes.terms.reopen(volume.index()).changed(now);
                any = true;
            }
        }
        any
    }

    /// Updates a volume after a path has stopped serving it.
    pub(super) fn check_lost(&mut self, at: DeviceIndex, ctx: &mut Ctx<'_>) {
        let volume = &mut self.volumes[at];
        if !volume.is_open() && !volume.is_settling() {
            return;
        }
        // A connected path that still waits for fences cannot carry IO.
        if !self.paths.iter().any(|path| path.carries(at)) {
            volume.no_path.begin(ctx.now);
        }
        if volume.is_settling() {
            return;
        }
        // The server closes the volume with the last path of the session.
        if !self.paths.iter().any(|path| path.has(at)) {
            volume.lost();
            volume.no_path.begin(ctx.now);
            self.notify(&ShardMessage::Closed(at), ctx);
        }
    }

    /// Stops serving a removed volume over a path that has it open. Returns whether a connected
    /// path is of no further use.
    pub(super) fn withdraw(
        &mut self,
        id: PathId,
        at: DeviceIndex,
        why: PathEnd,
        ctx: &mut Ctx<'_>,
    ) -> bool {
        if !self.paths[id].volumes.terms.is_tried(at) {
            return false;
        }
        let path = &mut self.paths[id];
        let epoch = path.epoch();
        let served = path.volumes.terms.serves(at);
        let leaves = path.volumes.leaves(at, epoch).filter(|_| served);
        path.volumes.terms.refuse(at, why, ctx.now);
        if let Some(message) = leaves {
            self.notify(&message, ctx);
        }
        self.check_lost(at, ctx);
        self.paths[id].is_connected() && !self.paths[id].volumes.terms.is_of_use()
    }

    /// Updates the volumes after a path became unusable.
    pub(super) fn path_lost(&mut self, id: PathId, ctx: &mut Ctx<'_>) {
        for volume in self.volumes.iter() {
            let epoch = |path: &Path| {
                Some((path.volumes.terms.cache_id(volume.index())?, path.channel.started()))
            };
            let connected = self.paths.iter().filter(|path| path.is_connected());
            volume.cache.review(connected.filter_map(epoch));
        }
        for volume in self.volumes.ids() {
            self.volumes[volume].moving.path_lost(id, ctx.now);
            self.check_lost(volume, ctx);
        }
    }

    /// Stops serving a volume over a path whose server has become standby.
    pub(super) fn stand_by(&mut self, id: PathId, at: DeviceIndex, ctx: &mut Ctx<'_>) {
        let path = &mut self.paths[id];
        let epoch = path.epoch();
        let served = path.volumes.terms.serves(at);
        let leaves = path.volumes.leaves(at, epoch).filter(|_| served);
        if let Some(device) = path.volumes.terms.device_id(at) {
            path.volumes.terms.stand_by(at, device);
        }
        if let Some(message) = leaves {
            self.notify(&message, ctx);
        }
        self.check_lost(at, ctx);
    }

    /// Stops serving a volume over paths to other servers once a path to the active server serves
    /// it.
    pub(super) fn displace(&mut self, id: PathId, at: DeviceIndex, ctx: &mut Ctx<'_>) {
        let server = self.paths[id].channel.server();
        let stale = |path: &&Path| path.has(at) && path.channel.server() != server;
        let stale: Vec<PathId> = self.paths.others(id).filter(stale).map(Path::id).collect();
        for other in stale {
            self.stand_by(other, at, ctx);
            self.paths[other].volumes.terms.reopen(at).changed(ctx.now + STALE_EVERY);
        }
    }

    /// Ends the wait for a path's fence, if there is one: the server can no longer start any of its
    /// old requests. Returns whether shards were notified.
    pub(super) fn fenced(&mut self, id: PathId, ctx: &mut Ctx<'_>) -> bool {
        let message = self.paths[id].fenced();
        if let Some(message) = &message {
            self.notify(message, ctx);
        }
        message.is_some()
    }

    /// Fails waiting and new IO of all volumes.
    pub(super) fn give_up(&self, ctx: &mut Ctx<'_>) {
        for volume in self.volumes.iter() {
            self.notify(&ShardMessage::GiveUp(volume.index()), ctx);
        }
    }

    /// Frees the index of a volume that is closed on the server.
    pub(super) fn remove(&mut self, at: DeviceIndex) {
        for path in self.paths.iter_mut() {
            path.volumes.terms.forget(at);
            path.volumes.fence.forget(at);
        }
        self.volumes.remove(at);
    }

    /// Fails volumes that were never open if a path is connected and every path has failed or had
    /// its open refused.
    pub(super) fn fail_refused(&mut self, now: Instant) {
        let connected = self.paths.are_connected();
        for volume in self.volumes.iter_mut().filter(|_| connected) {
            if volume.was_open() || volume.failure().is_some() || volume.is_patient(now) {
                continue;
            }
            let refusal =
                |path: &Path| path.volumes.terms.refusal(volume.index()).map(ToString::to_string);
            let mut paths = self.paths.listed();
            if paths.all(|path| path.has_failed() || refusal(path).is_some()) {
                let why = self.paths.listed().filter_map(|path| {
                    Some(format!("{}: {}", path.channel.name(), refusal(path)?))
                });
                let why = why.collect::<Vec<_>>().join("; ");
                volume.fail(SessionFailure::Unreachable(why));
            }
        }
    }
}
