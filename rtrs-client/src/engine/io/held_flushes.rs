//! Completion of flushes and writes with FUA; `syncs.rs` explains why flushes are held back.

use rtrs_core::block::IoOp;
use rtrs_core::status::IoStatus;

use super::ios::Ios;
use super::limits::TimeLimits;
use super::syncs::{HeldFlush, Sync};
use super::waiting::IoRow;
use crate::engine::cache_epoch::CacheWatch;

impl Ios {
    /// Records that the result of a sync is known, or that the sync was not sent. Returns the
    /// sync's position in the order.
    pub(super) fn return_sync(&mut self, row: IoRow) -> Option<Sync> {
        let taken = self.requests.io_mut(row);
        let (sync, cache) = taken.sync.take().zip(self.devices.cache(taken.device))?;
        self.syncs.back(taken.device, sync, cache);
        Some(sync)
    }

    /// Handles the end of an IO in the order of syncs. Returns whether it is a flush that must be
    /// held back.
    pub(super) fn is_held(&mut self, row: IoRow) -> bool {
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

    /// Completes the held flushes whose overlapping syncs have ended. Returns whether there were
    /// any.
    pub(super) fn release_flushes(&mut self) -> bool {
        self.end_held(|_, held, cache| held.is_free(cache).then(|| held.sync.verdict(cache)))
    }

    /// Fails flushes that have been held back for too long. Returns whether there were any.
    pub(super) fn fail_late_flushes(&mut self, limits: &TimeLimits) -> bool {
        self.end_held(|ios, held, cache| {
            let submitted = ios.requests.io(held.row).submitted;
            let fails = limits.fails_held(submitted, held.since, cache.has_given_up(), ios.now);
            fails.then_some(IoStatus::TimedOut)
        })
    }

    /// Completes the held flushes for which `end` returns a status. Returns whether there were any.
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
