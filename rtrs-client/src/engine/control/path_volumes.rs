//! OPEN and CLOSE of volumes on one path.
//!
//! A connecting path tries one volume after another until an open succeeds; then it is connected.
//! The path opens the others while already carrying IO, as well as volumes that are added or
//! changed, and closes volumes. One request is outstanding at a time, and the path ends when an
//! answer takes too long.

use std::sync::Arc;

use rtrs_core::fabric::{FabricError, RemoteMem};
use rtrs_core::time::Instant;
use rtrs_core::wire::Move;

use super::path::{Path, STEP_TIMEOUT};
use super::terms::{Ask, Asked};
use super::volume::Volume;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceIndex;
use crate::engine::message::{Served, ShardMessage};
use crate::engine::path_end::PathEnd;
use crate::path::state::PathState;

impl Path {
    /// Opens a volume for the first time in this attempt. With `until`, repeats the open with other
    /// access, within the time of the first request.
    pub(super) fn open(
        &mut self,
        volume: &Volume,
        until: Option<Instant>,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        match (self.state(), until) {
            (PathState::Opening, None) => self.postpone(ctx.now + STEP_TIMEOUT),
            (PathState::Opening, Some(_)) | (PathState::Connected, _) => {}
            _ => return Err(self.internal_error("an open on a path that is not opening")),
        }
        let until = until.unwrap_or(ctx.now + STEP_TIMEOUT);
        let ask = Ask::Open(volume.access());
        self.terms.ask(Asked { volume: volume.index(), ask, until });
        self.post_open(volume, ctx)
    }

    /// Opens a volume again to learn what has changed.
    pub(super) fn open_again(&mut self, volume: &Volume, ctx: &mut Ctx<'_>) -> Result<(), PathEnd> {
        self.terms.reopen(volume.index()).begin(ctx.now);
        let until = ctx.now + STEP_TIMEOUT;
        self.terms.ask(Asked { volume: volume.index(), ask: Ask::Again, until });
        self.post_open(volume, ctx)
    }

    fn post_open(&mut self, volume: &Volume, ctx: &mut Ctx<'_>) -> Result<(), PathEnd> {
        let (export, access) = (volume.export(), volume.access());
        let returns = volume.pinned.was_open_at(self.server(), self.process());
        self.post(ctx, |service, fabric| service.post_open(export, access, returns, fabric))
    }

    /// Closes a volume that the path serves.
    pub(super) fn close(&mut self, volume: &Volume, ctx: &mut Ctx<'_>) -> Result<(), FabricError> {
        let device = self.terms.device_id(volume.index()).ok_or(FabricError::QpState)?;
        self.try_post(ctx, |service, fabric| service.post_close(device, fabric))?;
        let until = ctx.now + STEP_TIMEOUT;
        self.terms.ask(Asked { volume: volume.index(), ask: Ask::Close, until });
        Ok(())
    }

    /// Asks this server to take over a volume that the path has open, or with `away` to give it up.
    pub(super) fn ask_move(
        &mut self,
        volume: DeviceIndex,
        away: bool,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        let device_id = self.terms.device_id(volume).or_else(|| self.terms.standby_id(volume));
        let Some(device_id) = device_id else {
            return Err(self.internal_error("a move of a volume that is not open"));
        };
        self.terms.ask(Asked { volume, ask: Ask::Move, until: ctx.now + STEP_TIMEOUT });
        self.post(ctx, |service, fabric| service.post_move(Move { device_id, away }, fabric))
    }

    /// Takes the request that the received answer belongs to.
    pub(super) fn answered(&mut self) -> Result<Asked, PathEnd> {
        let asked = self.terms.answered();
        asked.ok_or_else(|| self.internal_error("an answer without a request"))
    }

    /// Whether the path is connected and can send a request.
    pub(super) fn is_free(&self) -> bool {
        self.is_connected() && !self.is_leaving() && self.is_idle()
    }

    /// Connects the path once its first volume is open.
    pub(super) fn connected(&mut self, now: Instant) -> Result<(), PathEnd> {
        let chunks = self.opening.take().filter(|_| self.state() == PathState::Opening);
        let Some(chunks) = chunks else {
            return Err(self.internal_error("a volume opened on a path that is not opening"));
        };
        self.advance_connected(now, chunks);
        Ok(())
    }

    /// Starts to carry IO. Returns the message for the shards.
    pub(super) fn bring_up(&mut self) -> Option<ShardMessage> {
        let chunks: Arc<[RemoteMem]> = self.fence.release()?;
        let served: Arc<[Served]> = self.terms.served().collect();
        Some(ShardMessage::PathUp { path: self.id(), epoch: self.epoch(), chunks, served })
    }

    /// Lets shards use another open volume over the path. Returns the message for them.
    pub(super) fn serves(&mut self, volume: DeviceIndex) -> Option<ShardMessage> {
        self.fence.notified(volume);
        let served = self.terms.served().find(|served| served.device == volume)?;
        let (path, epoch) = (self.id(), self.epoch());
        self.fence.carries().then_some(ShardMessage::Serves { path, epoch, served })
    }

    /// Stops serving a volume. Returns the message for the shards if the path carries IO to it.
    pub(super) fn leaves(&mut self, device: DeviceIndex) -> Option<ShardMessage> {
        let (path, epoch) = (self.id(), self.epoch());
        let known = self.fence.notified(device) && self.fence.carries();
        known.then_some(ShardMessage::Leaves { path, epoch, device })
    }

    /// Whether IO to a volume can use the path.
    pub(super) fn carries(&self, volume: DeviceIndex) -> bool {
        let is_reported = self.fence.carries() && !self.fence.unreported().contains(volume);
        is_reported && self.is_connected() && self.terms.serves(volume)
    }

    /// Whether the path is connected and serves a volume.
    pub(super) fn has(&self, volume: DeviceIndex) -> bool {
        self.is_connected() && self.terms.serves(volume)
    }
}
