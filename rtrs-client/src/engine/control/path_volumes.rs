//! Volumes on one path: OPEN and CLOSE, and the IO that the path carries.
//!
//! A connecting path tries one volume after another until an open succeeds; then it is connected.
//! While already carrying IO, the path opens the other volumes and any volumes that are added or
//! changed, and closes volumes. Only one request is outstanding at a time, and the path ends when
//! an answer takes too long.

use std::sync::Arc;

use rtrs_core::fabric::{FabricError, RemoteMem};
use rtrs_core::ids::PathId;
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::{AccessMode, Move, OpenFlags};

use super::channel::Channel;
use super::path_fence::PathFence;
use super::terms::{Ask, Asked, Terms};
use super::volume::Volume;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceIndex;
use crate::engine::message::{Served, ShardMessage};
use crate::engine::path_end::PathEnd;

/// Time limit for each step of opening the device, and for a fence. A kernel server opens its disk
/// before it processes anything else on the connection, including heartbeats. `rtrs-server` answers
/// heartbeats in the meantime, so they reveal a silent path (`silence.rs`).
pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(10);

/// Volumes that a path has open, and whether shards may use the path.
#[derive(Debug)]
pub(super) struct PathVolumes {
    path: PathId,
    pub(super) terms: Terms,
    pub(super) fence: PathFence,
}

impl PathVolumes {
    pub(super) fn new(path: PathId, waits: (Duration, Duration), seed: u64) -> Self {
        Self { path, terms: Terms::new(waits, seed), fence: PathFence::default() }
    }

    /// Opens a volume for the first time in this attempt. With `until`, repeats the open with a
    /// different access mode, within the time limit of the first request.
    pub(super) fn open(
        &mut self,
        volume: &Volume,
        until: Option<Instant>,
        channel: &mut Channel,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        let until = until.unwrap_or(ctx.now + STEP_TIMEOUT);
        let ask = Ask::Open(volume.access());
        self.terms.ask(Asked { volume: volume.index(), ask, until });
        post_open(volume, volume.access(), channel, ctx)
    }

    /// Opens a volume again with exclusive access.
    pub(super) fn promote(
        &mut self,
        volume: &Volume,
        channel: &mut Channel,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        let until = ctx.now + STEP_TIMEOUT;
        self.terms.ask(Asked { volume: volume.index(), ask: Ask::Promote, until });
        post_open(volume, AccessMode::ReadWrite, channel, ctx)
    }

    /// Opens a volume again to learn what has changed.
    pub(super) fn open_again(
        &mut self,
        volume: &Volume,
        channel: &mut Channel,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        self.terms.reopen(volume.index()).begin(ctx.now);
        let until = ctx.now + STEP_TIMEOUT;
        self.terms.ask(Asked { volume: volume.index(), ask: Ask::Again, until });
        post_open(volume, volume.access(), channel, ctx)
    }

    /// Closes a volume that the path serves.
    pub(super) fn close(
        &mut self,
        volume: &Volume,
        channel: &mut Channel,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), FabricError> {
        let device = self.terms.device_id(volume.index()).ok_or(FabricError::QpState)?;
        channel.try_post(ctx, |service, fabric| service.post_close(device, fabric))?;
        let until = ctx.now + STEP_TIMEOUT;
        self.terms.ask(Asked { volume: volume.index(), ask: Ask::Close, until });
        Ok(())
    }

    /// Asks this server to take over a volume that the path has open, or, with `away`, to give up
    /// the volume.
    pub(super) fn ask_move(
        &mut self,
        volume: DeviceIndex,
        away: bool,
        channel: &mut Channel,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        let device_id = self.terms.device_id(volume).or_else(|| self.terms.standby_id(volume));
        let Some(device_id) = device_id else {
            return Err(channel.internal_error("a move of a volume that is not open"));
        };
        self.terms.ask(Asked { volume, ask: Ask::Move, until: ctx.now + STEP_TIMEOUT });
        channel.post(ctx, |service, fabric| service.post_move(Move { device_id, away }, fabric))
    }

    /// Begins to carry IO in this attempt. Returns the message for the shards.
    pub(super) fn bring_up(&mut self, epoch: u32) -> Option<ShardMessage> {
        let chunks: Arc<[RemoteMem]> = self.fence.release()?;
        let served: Arc<[Served]> = self.terms.served().collect();
        Some(ShardMessage::PathUp { path: self.path, epoch, chunks, served })
    }

    /// Lets shards use an additional open volume over the path. Returns the message for the shards.
    pub(super) fn serves(&mut self, volume: DeviceIndex, epoch: u32) -> Option<ShardMessage> {
        self.fence.notified(volume);
        let served = self.terms.served().find(|served| served.device == volume)?;
        let path = self.path;
        self.fence.carries().then_some(ShardMessage::Serves { path, epoch, served })
    }

    /// Stops serving a volume. Returns the message for the shards if the path carries IO to it.
    pub(super) fn leaves(&mut self, device: DeviceIndex, epoch: u32) -> Option<ShardMessage> {
        let path = self.path;
        let known = self.fence.notified(device) && self.fence.carries();
        known.then_some(ShardMessage::Leaves { path, epoch, device })
    }

    /// Whether IO to a volume can use the path.
    pub(super) fn carries(&self, volume: DeviceIndex) -> bool {
        let is_reported = self.fence.carries() && !self.fence.unreported().contains(volume);
        is_reported && self.terms.serves(volume)
    }
}

fn post_open(
    volume: &Volume,
    access: AccessMode,
    channel: &mut Channel,
    ctx: &mut Ctx<'_>,
) -> Result<(), PathEnd> {
    let export = volume.export();
    let returns = volume.pinned.was_open_at(channel.server(), channel.process());
    let waits = access == AccessMode::Migration && volume.promotion.is_pending();
    let flags = OpenFlags { returns, waits };
    channel.post(ctx, |service, fabric| service.post_open(export, access, flags, fabric))
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOLUME: DeviceIndex = DeviceIndex::FIRST;
    const OTHER: DeviceIndex = DeviceIndex(1);

    #[test]
    fn shards_learn_of_each_open_volume_once_the_path_carries_io() {
        let waits = (Duration::from_secs(1), Duration::from_secs(1));
        let mut volumes = PathVolumes::new(PathId(3), waits, 0);
        volumes.terms.agree(VOLUME, 7, 0);
        volumes.fence.opened(VOLUME);
        assert!(volumes.serves(VOLUME, 1).is_none(), "the path carries no IO yet");
        volumes.fence.connected(Vec::new().into());
        let up = volumes.bring_up(1);
        assert!(matches!(up, Some(ShardMessage::PathUp { served, .. }) if served.len() == 1));
        assert!(volumes.carries(VOLUME) && !volumes.carries(OTHER));
        volumes.terms.agree(OTHER, 8, 0);
        volumes.fence.opened(OTHER);
        assert!(!volumes.carries(OTHER), "shards do not know of it");
        assert!(volumes.leaves(OTHER, 1).is_none(), "shards never knew it");
        volumes.fence.opened(OTHER);
        let served = volumes.serves(OTHER, 1);
        assert!(matches!(served, Some(ShardMessage::Serves { path: PathId(3), epoch: 1, .. })));
        assert!(volumes.carries(OTHER));
        assert!(matches!(volumes.leaves(OTHER, 1), Some(ShardMessage::Leaves { .. })));
    }
}
