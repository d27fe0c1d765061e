//! Requests in flight on a path that died: they await the path's fence and are then resent on a
//! different path.

use rtrs_core::fabric::FabricError;
use rtrs_core::ids::PathId;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

use super::Shard;
use super::requests::{RequestRow, Standing};
use super::zeroes::unsupported;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceSet;
use crate::engine::session::Granted;

impl Shard {
    /// Takes a request off its path after the connection has ended. The request then awaits the
    /// path's fence.
    pub(super) fn lose_request(&mut self, row: RequestRow, epoch: u32, now: Instant) {
        let request = self.ios.requests.request_mut(row);
        self.paths.end_slow(request, now);
        let path = request.path;
        self.paths[path].request_left();
        self.paths.stats.request_awaits_fence(path.index());
        self.ios.await_fence(row, epoch);
    }

    /// Handles a path's fence: the path's requests up to this epoch can no longer start on the
    /// server.
    pub(super) fn on_fenced(&mut self, path: PathId, epoch: u32) {
        self.ios.retries.fenced(path, epoch);
        self.free_probes();
        self.ios.fenced(path, epoch);
    }

    /// Resends requests that are ready. Returns whether any was sent or ended.
    pub(super) fn send_again(&mut self, granted: &Granted, ctx: &mut Ctx<'_>) -> bool {
        let serving = self.ios.devices.serving();
        let mut blocked = DeviceSet::default();
        let (mut place, mut any) = (0, false);
        while let Some(row) = self.ios.retries.get(place) {
            let request = self.ios.requests.request(row);
            let taken = self.ios.requests.io(request.io);
            let may_go = serving.contains(taken.device) && !blocked.contains(taken.device);
            let path = if may_go { self.paths.choose(ctx.now, taken.device) } else { None };
            let Some(path) = path else {
                blocked.insert(taken.device);
                place += 1;
                continue;
            };
            let device = self.ios.devices.info(taken.device);
            any = true;
            if taken.given_up || self.limits.is_over(taken.submitted, ctx.now) {
                self.ios.retries.remove_at(place);
                self.ios.fail_request(row, IoStatus::TimedOut);
                continue;
            }
            if unsupported(&taken.io, device) {
                self.ios.retries.remove_at(place);
                self.ios.fail_request(row, IoStatus::Unsupported);
                continue;
            }
            let target = &mut self.paths[path];
            let device_id = target.device_id(taken.device);
            let (part, memory) = (request.part, taken.memory_use());
            let again = taken.request(part, self.ios.requests.permit_of(row), device_id);
            let fabric = ctx.fabrics[target.provider().index()].as_mut();
            match target.post(again, granted, fabric) {
                Ok(()) => {
                    let request = self.ios.requests.request_mut(row);
                    self.paths.stats.request_moved(request.path.index());
                    (request.path, request.sent) = (path, ctx.now);
                    request.standing = Standing::Sent;
                    request.tries = request.tries.saturating_add(1);
                    self.paths.issued(path, part.len, memory, ctx);
                    self.ios.retries.remove_at(place);
                }
                Err(FabricError::QpState | FabricError::QueueFull) => self.paths.abandon(path, ctx),
                Err(error) => {
                    tracing::error!("request could not be posted again: {error}");
                    self.ios.retries.remove_at(place);
                    self.ios.fail_request(row, IoStatus::Io);
                }
            }
        }
        any
    }
}
