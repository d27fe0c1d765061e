//! Steps of a session that involve several of its parts: opens and their answers, fences, closes.

use rtrs_core::ids::PathId;
use rtrs_core::wire::errno;

use super::SessionControl;
use super::closing::CloseStep;
use super::due::End;
use super::failure::SessionFailure;
use super::fence::{Fencing, ask, expire, is_moved, release};
use super::opening::{
    Next, OpenAnswer, OpenRefused, next_connected, next_connecting, refuse, refused,
};
use super::routes::Routes;
use super::terms::{Ask, Asked};
use super::volume::Volume;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceIndex;
use crate::engine::message::ShardMessage;
use crate::engine::path_end::PathEnd;

// Opens.
impl SessionControl {
    /// Starts the next open on a connecting path. Returns whether one was started.
    pub(super) fn open_next(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let next = if self.is_running() { next_connecting(&self.routes) } else { None };
        let Some((id, volume)) = next else { return false };
        let asked = self.routes.open(id, volume, ctx);
        self.end_if_failed(id, asked, ctx);
        true
    }

    /// Starts the next due open on a connected path. Returns whether one was started.
    pub(super) fn open_beside(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let next = if self.is_running() { next_connected(&self.routes, ctx.now) } else { None };
        let Some((id, volume)) = next else { return false };
        let asked = self.routes.open(id, volume, ctx);
        self.end_if_failed(id, asked, ctx);
        true
    }

    /// Handles a successful open, unless the session is being ended. An error ends the path.
    pub(super) fn on_opened(
        &mut self,
        answer: OpenAnswer<'_>,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        if self.closing.is_detaching() {
            return Ok(());
        }
        let next = self.opening.opened(answer, &mut self.routes, ctx)?;
        self.proceed(answer.path, next, ctx)
    }

    /// Handles a refused open. An error ends the path.
    pub(super) fn on_open_refused(
        &mut self,
        id: PathId,
        asked: Asked,
        refusal: OpenRefused,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        let at = asked.volume;
        let was_open =
            matches!(asked.ask, Ask::Again | Ask::Promote) || self.routes.volumes[at].was_open();
        let lost = match refusal.errno {
            errno::EIDRM if was_open => Some(SessionFailure::Removed),
            errno::EBADE if was_open => Some(SessionFailure::Displaced),
            _ => None,
        };
        let next = if let Some(failure) = lost {
            self.on_lost(at, &failure, Some(id), ctx);
            let why = PathEnd::from(failure);
            if self.failure().is_some() {
                return Err(why);
            }
            refuse(id, at, why, &mut self.routes, ctx)?
        } else {
            refused(id, asked, refusal, &mut self.routes, ctx)?
        };
        self.proceed(id, next, ctx)
    }

    /// Does the work that remains after an answer to an open on this path.
    fn proceed(&mut self, id: PathId, next: Next, ctx: &mut Ctx<'_>) -> Result<(), PathEnd> {
        let is_connected = self.routes.paths[id].is_connected();
        match next {
            Next::Nothing => {}
            Next::CheckAttach => self.check_attach(ctx.now),
            Next::OpenConnecting => {
                self.open_next(ctx);
            }
            Next::Serve | Next::StandBy if !is_connected => return self.connect(id, ctx),
            Next::Serve => {
                self.advance_fences(ctx);
                self.open_beside(ctx);
            }
            Next::StandBy | Next::OpenConnected => {
                self.open_beside(ctx);
            }
        }
        Ok(())
    }

    /// Connects a path after its first open.
    fn connect(&mut self, id: PathId, ctx: &mut Ctx<'_>) -> Result<(), PathEnd> {
        self.routes.paths[id].connected(ctx.now)?;
        // The server has ended the path's previous connections, if they were to this server.
        let path = &self.routes.paths[id];
        let has_gateways = self.opening.server().has_gateways();
        let is_there = |(server, _)| server == path.channel.server() || !has_gateways;
        if path.volumes.fence.lost_at().is_none_or(is_there) {
            self.routes.fenced(id, ctx);
        }
        if self.routes.paths[id].is_leaving() {
            self.end_path(id, End::ASKED, ctx);
        } else {
            self.advance_fences(ctx);
        }
        Ok(())
    }

    /// Ends an open volume whose export was removed by the server's operator, or opened for writing
    /// by another client. The export that now has the name is not the one that its users know, so
    /// no path tries again.
    pub(super) fn on_lost(
        &mut self,
        at: DeviceIndex,
        failure: &SessionFailure,
        over: Option<PathId>,
        ctx: &mut Ctx<'_>,
    ) {
        let gone = self.routes.volumes.get(at).is_none_or(|volume| volume.failure().is_some());
        let over_already = gone || self.failure().is_some() || self.closing.is_detaching();
        if over_already || rtrs_core::mutated!(RemovedIgnored) {
            return;
        }
        self.routes.volumes[at].end_with(failure.clone());
        self.routes.notify(&ShardMessage::GiveUp(at), ctx);
        let ends = self.failure().is_some();
        for other in self.routes.paths.ids().filter(|other| Some(*other) != over) {
            let why = failure.clone().into();
            if ends || self.routes.withdraw(other, at, why, ctx) {
                self.end_path(other, End::failed(failure.clone()), ctx);
            }
        }
    }
}

// Fences.
impl SessionControl {
    /// Requests fences that are due, and releases paths that wait for none. Returns whether
    /// anything was done.
    pub(super) fn advance_fences(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let mut any = false;
        let (permit, failover) = (self.bounds.fence_permit(), self.config.failover);
        for id in self.routes.paths.ids() {
            if let Some(over) = expire(&mut self.routes.paths, id, ctx.now) {
                self.end_path(over, End::failed(PathEnd::FenceTimeout), ctx);
            }
            if self.routes.paths[id].volumes.fence.is_answered() || is_moved(&self.routes.paths, id)
            {
                any |= self.routes.fenced(id, ctx);
                continue;
            }
            let Routes { paths, volumes, .. } = &mut self.routes;
            match ask(paths, id, volumes, permit, failover, ctx) {
                Fencing::Waits => continue,
                Fencing::Asked => {}
                Fencing::NotNeeded => {
                    self.routes.fenced(id, ctx);
                }
                Fencing::End(over, why) => self.end_path(over, End::failed(why), ctx),
            }
            any = true;
        }
        any | release(&mut self.routes, ctx)
    }
}

// Closes.
impl SessionControl {
    /// Starts ending the session: closes the volumes in order, then every path.
    pub(crate) fn detach(&mut self, ctx: &mut Ctx<'_>) {
        if !self.closing.begin() {
            return;
        }
        self.checks.wake();
        let are_open = self.routes.volumes.iter().any(Volume::is_open);
        for volume in self.routes.volumes.iter_mut() {
            ctx.out.all_shards(self.config.shards, &ShardMessage::Closed(volume.index()));
            volume.close();
        }
        if !are_open {
            return self.end_all(ctx);
        }
        self.closing.await_closes(ctx.now);
        self.send_close(ctx);
    }

    /// Sends the next pending close once the permit shared with opens is free. Returns whether
    /// anything was done.
    pub(super) fn send_close(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let mut any = false;
        for at in self.routes.volumes.ids() {
            match self.closing.step(&self.routes, at) {
                CloseStep::Skip => {}
                CloseStep::Wait => return any,
                CloseStep::Finish => {
                    self.on_volume_closed(at, ctx);
                    any = true;
                }
                CloseStep::Send(id) => {
                    let Routes { paths, volumes, .. } = &mut self.routes;
                    let path = &mut paths[id];
                    match path.volumes.close(&volumes[at], &mut path.channel, ctx) {
                        Ok(()) => volumes[at].close_sent(id),
                        Err(_) if self.closing.is_detaching() => self.end_all(ctx),
                        Err(error) => self.end_path(id, End::failed(error), ctx),
                    }
                    return true;
                }
            }
        }
        any
    }

    /// Finishes a volume that the server has closed, or that no path can close any longer.
    pub(super) fn on_volume_closed(&mut self, at: DeviceIndex, ctx: &mut Ctx<'_>) {
        if !self.closing.is_detaching() {
            self.routes.remove(at);
            self.advance_fences(ctx);
            self.open_beside(ctx);
            return;
        }
        self.routes.volumes[at].end();
        if !self.routes.volumes.are_closing() {
            self.end_all(ctx);
        }
    }

    pub(super) fn end_all(&mut self, ctx: &mut Ctx<'_>) {
        self.closing.finish();
        self.routes.volumes.iter_mut().for_each(Volume::end);
        self.routes.give_up(ctx);
        for id in self.routes.paths.ids() {
            if self.routes.paths[id].detach() {
                self.end_path(id, End::ASKED, ctx);
            }
        }
    }
}
