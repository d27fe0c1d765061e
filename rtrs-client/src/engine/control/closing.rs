//! Closing of volumes, and the end of a session: its volumes are closed in order, then every path
//! ends.
//!
//! A single volume is closed once its IO has ended. A close uses the same permit as all opens, so
//! it waits for an open in progress. It is sent over one path, after which the server may reuse the
//! volume's number. If that path dies, the close is therefore repeated only once the path is fenced
//! off, and no other volume is opened in the meantime. A volume that no path serves any more may
//! still be open at the server: it is opened once more and then closed.

use rtrs_core::ids::{CoreIndex, PathId};
use rtrs_core::time::{Duration, Instant};

use super::SessionControl;
use super::change::ChangeError;
use super::due::End;
use super::path::Path;
use super::volume::Volume;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceIndex;
use crate::engine::message::ShardMessage;
use crate::engine::session::CONTROL;

/// Time limit for closes when a session ends, including the wait for their permit.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

impl SessionControl {
    /// Starts to close a volume that its user has released.
    pub(super) fn close_volume(
        &mut self,
        export: &str,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), ChangeError> {
        let Some(at) = self.volumes.named(export) else {
            return Err(ChangeError::NoVolume(export.to_owned()));
        };
        if self.volumes.used().nth(1).is_none() {
            return Err(ChangeError::LastVolume(export.to_owned()));
        }
        tracing::info!(%export, "volume closed on request");
        self.volumes[at].settle(self.config.shards);
        self.notify_all(&ShardMessage::CloseDevice(at), ctx);
        Ok(())
    }

    /// Records that a shard's IO of a volume that is being closed has ended.
    pub(super) fn on_settled(&mut self, at: DeviceIndex, shard: CoreIndex, ctx: &mut Ctx<'_>) {
        if self.volumes.get(at).is_some() && self.volumes[at].settled(shard) {
            self.send_close(ctx);
        }
    }

    /// Starts to end the session: closes the volumes in order, then every path.
    pub(crate) fn detach(&mut self, ctx: &mut Ctx<'_>) {
        if std::mem::replace(&mut self.detaching, true) {
            return;
        }
        self.next_open = None;
        let are_open = self.volumes.iter().any(Volume::is_open);
        for volume in self.volumes.iter_mut() {
            ctx.out.all_shards(self.config.shards, &ShardMessage::Closed(volume.index()));
            volume.close();
        }
        if !are_open {
            return self.end_all(ctx);
        }
        self.close_deadline = Some(ctx.now + CLOSE_TIMEOUT);
        self.send_close(ctx);
    }

    /// Sends the next pending close once the permit shared with opens is free. Returns whether
    /// anything was done.
    pub(super) fn send_close(&mut self, ctx: &mut Ctx<'_>) -> bool {
        if !self.volumes.iter().any(Volume::is_to_close) {
            return false;
        }
        let mut any = false;
        for at in self.volumes.ids() {
            if !self.volumes[at].is_to_close() || self.may_be_opened(at) {
                continue;
            }
            if !self.paths.iter().any(|path| path.has(at)) {
                self.on_volume_closed(at, ctx);
                any = true;
                continue;
            }
            let awaited = self.paths.iter().any(|path| path.fence.is_awaited());
            if self.paths.is_using(CONTROL) || awaited && !self.detaching {
                // An open or a fence is in progress, and has its own timeout.
                return any;
            }
            let free = |path: &&Path| path.has(at) && path.is_idle();
            let Some(id) = self.paths.iter().find(free).map(Path::id) else { return any };
            match self.paths[id].close(&self.volumes[at], ctx) {
                Ok(()) => self.volumes[at].close_sent(id),
                Err(_) if self.detaching => self.end_all(ctx),
                Err(error) => self.end_path(id, End::failed(error), ctx),
            }
            return true;
        }
        any
    }

    /// Whether no path has the closing volume open yet but one may soon.
    fn may_be_opened(&self, at: DeviceIndex) -> bool {
        if self.detaching || self.paths.iter().any(|path| path.has(at)) {
            return false;
        }
        let opens = |path: &Path| path.asked.is_some_and(|asked| asked.volume == at);
        let untried = |path: &Path| path.is_connected() && !path.terms.is_tried(at);
        let wanted = self.volumes[at].is_wanted();
        let waits = !self.paths.are_connected() || self.paths.iter().any(untried);
        self.paths.iter().any(opens) || wanted && waits
    }

    /// Handles the answer to a close on this path.
    pub(super) fn on_closed(&mut self, id: PathId, ctx: &mut Ctx<'_>) {
        if let Some(at) = self.volumes.closing_over(id) {
            self.on_volume_closed(at, ctx);
            self.send_close(ctx);
        }
    }

    /// Finishes a volume that the server has closed, or that no path can close any more.
    fn on_volume_closed(&mut self, at: DeviceIndex, ctx: &mut Ctx<'_>) {
        if !self.detaching {
            for path in self.paths.iter_mut() {
                path.terms.forget(at);
                path.fence.forget(at);
            }
            self.volumes.remove(at);
            self.advance_fences(ctx);
            self.open_beside(ctx);
            return;
        }
        self.volumes[at].end();
        if !self.volumes.are_closing() {
            self.end_all(ctx);
        }
    }

    /// Handles the loss of the path that was to answer a close.
    pub(super) fn close_lost(&mut self, id: PathId) {
        let Some(at) = self.volumes.closing_over(id) else { return };
        if self.detaching {
            self.close_deadline = Some(Instant::ZERO);
        } else {
            self.volumes[at].close_lost();
        }
    }

    pub(super) fn end_all(&mut self, ctx: &mut Ctx<'_>) {
        self.close_deadline = None;
        self.volumes.iter_mut().for_each(Volume::end);
        self.give_all_up(ctx);
        for id in self.paths.ids() {
            if self.paths[id].detach() {
                self.end_path(id, End::ASKED, ctx);
            }
        }
    }
}
