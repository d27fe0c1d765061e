//! Requests in flight on a path that died: they await the fence of the path, and are then sent
//! again on another.

use rtrs_core::fabric::FabricError;
use rtrs_core::ids::PathId;
use rtrs_core::status::IoStatus;

use super::Shard;
use super::requests::{RequestRow, Standing};
use super::retry::TRIES_MAX;
use super::zeroes::unsupported;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceSet;
use crate::engine::session::Granted;

impl Shard {
    /// Makes a request wait for the fence of its path after its connection has ended.
    pub(super) fn await_fence(&mut self, row: RequestRow, epoch: u32) {
        self.end_slow(row);
        let request = self.requests.request_mut(row);
        let (path, io) = (request.path, request.io);
        request.sent = self.now;
        request.standing = Standing::AwaitingFence { epoch };
        self.paths[path].request_left();
        self.stats.request_awaits_fence(path.index());
        let early = rtrs_core::mutated!(ResendBeforeFence)
            || rtrs_core::mutated!(GivenUpBeforeFence) && self.requests.io(io).given_up;
        if early || self.retries.is_fenced(path, epoch) {
            self.ready(row);
        }
    }

    /// Handles the fence of a path: its requests up to this epoch can no longer start at the
    /// server.
    pub(super) fn on_fenced(&mut self, path: PathId, epoch: u32) {
        self.retries.fenced(path, epoch);
        self.free_probes();
        let fenced = self.requests.rows(|request| {
            let awaits = request.standing;
            request.path == path
                && matches!(awaits, Standing::AwaitingFence { epoch: e } if e <= epoch)
        });
        for row in fenced {
            self.ready(row);
        }
    }

    /// Makes a request ready to be sent again.
    fn ready(&mut self, row: RequestRow) {
        let request = self.requests.request_mut(row);
        let (io, turn) = (request.io, request.turn);
        request.standing = Standing::Ready;
        if request.tries >= TRIES_MAX {
            tracing::error!("a request failed after its path ended {TRIES_MAX} times");
            return self.end_request(row, IoStatus::Aborted);
        }
        if self.requests.io(io).given_up {
            // The user has the error already, and the IO can no longer take effect late.
            return self.end_request(row, IoStatus::TimedOut);
        }
        self.retries.push(turn, row);
    }

    /// Sends requests that are ready to be sent again. Returns whether anything was sent or ended.
    pub(super) fn send_again(&mut self, granted: &Granted, ctx: &mut Ctx<'_>) -> bool {
        let age_max = self.age_max();
        let serving = self.devices.serving();
        let mut blocked = DeviceSet::default();
        let (mut place, mut any) = (0, false);
        while let Some(row) = self.retries.get(place) {
            let request = self.requests.request(row);
            let taken = self.requests.io(request.io);
            let may_go = serving.contains(taken.device) && !blocked.contains(taken.device);
            let path = if may_go { self.paths.choose(self.now, taken.device) } else { None };
            let Some(path) = path else {
                blocked.insert(taken.device);
                place += 1;
                continue;
            };
            let device = self.devices.info(taken.device);
            any = true;
            let is_over = age_max.is_some_and(|max| self.now.since(taken.submitted) >= max);
            if taken.given_up || is_over {
                self.retries.remove_at(place);
                self.end_request(row, IoStatus::TimedOut);
                continue;
            }
            if unsupported(&taken.io, device) {
                self.retries.remove_at(place);
                self.end_request(row, IoStatus::Unsupported);
                continue;
            }
            let target = &mut self.paths[path];
            let device_id = target.device_id(taken.device);
            let again = taken.request(request.part, self.requests.permit_of(row), device_id);
            let fabric = ctx.fabrics[target.provider().index()].as_mut();
            match target.post(again, granted, fabric) {
                Ok(()) => {
                    let request = self.requests.request_mut(row);
                    self.stats.request_moved(request.path.index());
                    self.stats.request_issued(path.index());
                    (request.path, request.sent) = (path, self.now);
                    request.standing = Standing::Sent;
                    request.tries = request.tries.saturating_add(1);
                    self.path_used(path, ctx);
                    self.retries.remove_at(place);
                }
                Err(FabricError::QpState | FabricError::QueueFull) => self.abandon_path(path, ctx),
                Err(error) => {
                    tracing::error!("request could not be posted again: {error}");
                    self.retries.remove_at(place);
                    self.end_request(row, IoStatus::Io);
                }
            }
        }
        any
    }
}
