//! Order of the flushes and writes with FUA of a shard; `syncs.rs` explains why flushes are held
//! back.

use rtrs_core::block::IoOp;
use rtrs_core::ids::CoreIndex;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

use super::Shard;
use super::syncs::{HeldFlush, Sync};
use super::waiting::IoRow;
use crate::engine::cache_epoch::CacheWatch;
use crate::engine::ctx::Ctx;
use crate::engine::message::ShardMessage;
use crate::engine::session::SlowIo;

impl Shard {
    /// Draws a number for a sync that is about to be sent for the first time. Returns whether it
    /// was drawn.
    pub(super) fn begin_sync(&mut self, row: IoRow) -> bool {
        let taken = self.requests.io_mut(row);
        let begins = (taken.io.op == IoOp::Flush || taken.io.flags.fua) && taken.sync.is_none();
        let Some(cache) = self.devices.cache(taken.device).filter(|_| begins) else {
            return false;
        };
        taken.sync = Some(self.syncs.draw(taken.device, cache));
        true
    }

    /// Records that the failure of an outstanding IO is reported because the disk is slow.
    pub(super) fn give_sync_up(&mut self, row: IoRow) {
        let taken = self.requests.io_mut(row);
        if let (Some(sync), Some(cache)) = (&mut taken.sync, self.devices.cache(taken.device)) {
            sync.give_up(cache);
        }
    }

    /// Records that the result of a sync is known, or that the sync was not sent. Returns its place
    /// in the order.
    pub(super) fn return_sync(&mut self, row: IoRow) -> Option<Sync> {
        let taken = self.requests.io_mut(row);
        let (sync, cache) = taken.sync.take().zip(self.devices.cache(taken.device))?;
        self.syncs.back(taken.device, sync, cache);
        Some(sync)
    }

    /// Handles the end of an IO. Returns whether it is a flush that must be held back.
    pub(super) fn end_sync(&mut self, row: IoRow) -> bool {
        let Some(sync) = self.return_sync(row) else { return false };
        let taken = self.requests.io_mut(row);
        let is_good_flush = taken.io.op == IoOp::Flush && taken.status.is_ok();
        let Some(cache) = self.devices.cache(taken.device).filter(|_| is_good_flush) else {
            return false;
        };
        let is_held = self.syncs.hold(row, sync, cache, self.now);
        if !is_held {
            taken.status = sync.verdict(cache);
        }
        is_held
    }

    /// Completes the held flushes whose overlapping syncs have ended, and makes other shards check
    /// theirs. Returns whether any was completed.
    pub(super) fn release_flushes(&mut self, ctx: &mut Ctx<'_>) -> bool {
        if self.syncs.take_wake() {
            let others = (0..self.config.shards).filter(|shard| *shard != self.index.0);
            others.for_each(|shard| ctx.out.shard(CoreIndex(shard), ShardMessage::Wake));
        }
        self.end_held(|_, held, cache| held.is_free(cache).then(|| held.sync.verdict(cache)))
    }

    /// Fails flushes that are held back longer than an IO may take, or longer than `io_timeout`
    /// behind a slow disk whose delay is an error.
    pub(super) fn sweep_held_flushes(&mut self, now: Instant) -> bool {
        let (age_max, io_timeout) = (self.age_max(), self.config.io_timeout);
        let fails_slow = self.config.slow_io == SlowIo::Fail;
        self.end_held(|shard, held, cache| {
            let age = now.since(shard.requests.io(held.row).submitted);
            let is_old = age_max.is_some_and(|max| age >= max);
            let is_slow = fails_slow && cache.has_given_up() && now.since(held.since) >= io_timeout;
            (is_old || is_slow).then_some(IoStatus::TimedOut)
        })
    }

    /// Completes the held flushes for which `end` returns a status. Returns whether there was any.
    fn end_held(
        &mut self,
        end: impl Fn(&Self, HeldFlush, &CacheWatch) -> Option<IoStatus>,
    ) -> bool {
        let (mut at, mut any) = (0, false);
        while let Some(held) = self.syncs.held(at) {
            let device = self.requests.io(held.row).device;
            let Some(cache) = self.devices.cache(device) else { return any };
            let Some(status) = end(self, held, cache) else {
                at += 1;
                continue;
            };
            self.syncs.release(at, cache);
            self.requests.io_mut(held.row).status = status;
            self.complete(held.row);
            any = true;
        }
        any
    }
}
