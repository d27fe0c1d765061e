//! The end of a session: the device is closed in order, then every path ends.
//!
//! The close uses the permit of all opens, so it waits for an open that is under way.

use rtrs_core::fabric::FabricError;
use rtrs_core::time::Duration;

use super::SessionControl;
use super::due::End;
use super::path::Path;
use crate::engine::ctx::Ctx;
use crate::engine::message::ShardMessage;
use crate::engine::session::CONTROL;

/// How long the close of the device may take, the wait for its permit included.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

impl SessionControl {
    /// Starts to end the session: closes the device in order, then every path.
    pub(crate) fn detach(&mut self, ctx: &mut Ctx<'_>) {
        if std::mem::replace(&mut self.detaching, true) {
            return;
        }
        self.notify_all(&ShardMessage::Closed, ctx);
        if !self.is_open() {
            return self.end_all(ctx);
        }
        self.device.close(ctx.now + CLOSE_TIMEOUT);
        self.send_close(ctx);
    }

    /// Sends the close that is to be sent, once the permit of all opens is free. True when anything
    /// was done.
    pub(super) fn send_close(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let Some(device) = self.device.to_close() else { return false };
        let connected = self.paths.are_connected();
        let free = self.paths.iter().find(|path| path.is_connected() && path.is_idle());
        let free = free.filter(|_| !self.paths.is_using(CONTROL)).map(Path::id);
        let sent = match free {
            Some(id) => self.paths[id].try_post(ctx, |s, fabric| s.post_close(device, fabric)),
            // An open or a fence is under way, which has its bound.
            None if connected => return false,
            None => Err(FabricError::QpState),
        };
        match (sent, free) {
            (Ok(()), Some(id)) => self.device.close_sent(id),
            _ => self.end_all(ctx),
        }
        true
    }

    pub(super) fn end_all(&mut self, ctx: &mut Ctx<'_>) {
        self.device.end();
        self.notify_all(&ShardMessage::GiveUp, ctx);
        for id in self.paths.ids() {
            if self.paths[id].detach() {
                self.end_path(id, End::ASKED, ctx);
            }
        }
    }
}
