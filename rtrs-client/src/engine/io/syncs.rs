//! Order of syncs: a successful flush waits for the syncs that overlap it.
//!
//! The server reports a loss in the answer to one flush, and a flush that began after that report
//! succeeds. If its answer arrives first, over a faster path, the session does not know of the loss
//! yet, and the flush's user, perhaps another NBD connection, would take its lost writes for
//! durable. So a flush that succeeds is held back until every flush and every write with FUA that
//! was in flight when its answer arrived has ended on all shards (`rtrs_core::sync_order`). Only
//! then is it compared with the losses (`cache_epoch.rs`).

use rtrs_core::block::IoOp;
use rtrs_core::ids::CoreIndex;
use rtrs_core::status::IoStatus;
use rtrs_core::sync_order::ShardSyncs;
use rtrs_core::time::{Duration, Instant};

use super::Shard;
use super::waiting::IoRow;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceIndex;
use crate::engine::message::ShardMessage;
use crate::engine::session::SlowIo;

/// Number of outstanding syncs of a device for which room is made in advance.
const SYNCS: usize = 64;

/// Successful flush that waits for overlapping syncs.
#[derive(Clone, Copy, Debug)]
struct HeldFlush {
    row: IoRow,
    /// Syncs with lower numbers must have ended.
    horizon: u64,
    /// Number of syncs that had ended without an answer.
    unanswered: u64,
    since: Instant,
}

/// Outstanding syncs of a shard, and the flushes that it holds back.
#[derive(Debug)]
pub(super) struct Syncs {
    shard: CoreIndex,
    /// Outstanding syncs by device.
    outstanding: Vec<ShardSyncs>,
    held: Vec<HeldFlush>,
    /// Whether a sync has ended for which other shards may hold back flushes.
    wakes_others: bool,
}

impl Syncs {
    pub(super) fn new(shard: CoreIndex) -> Self {
        Self { shard, outstanding: Vec::new(), held: Vec::new(), wakes_others: false }
    }

    /// Makes room for a device. Nothing is left of an earlier one with this number.
    pub(super) fn add_device(&mut self, device: DeviceIndex) {
        let count = device.index() + 1;
        if self.outstanding.len() < count {
            let none = || ShardSyncs::with_capacity(self.shard, SYNCS);
            self.outstanding.resize_with(count, none);
        }
    }
}

impl Shard {
    /// Draws a number for a sync that is about to be sent for the first time. Returns whether it
    /// was drawn.
    pub(super) fn begin_sync(&mut self, row: IoRow) -> bool {
        let taken = self.requests.io_mut(row);
        let is_sync = taken.io.op == IoOp::Flush || taken.io.flags.fua;
        let Some(cache) = self.devices.cache(taken.device).filter(|_| is_sync) else {
            return false;
        };
        if taken.sync.is_some() {
            return false;
        }
        let outstanding = &mut self.syncs.outstanding[taken.device.index()];
        taken.sync = Some(outstanding.draw(cache.order()));
        true
    }

    /// Records that the result of a sync is known, or that the sync was not sent. Returns whether
    /// the IO had a number.
    pub(super) fn return_sync(&mut self, row: IoRow) -> bool {
        let taken = self.requests.io_mut(row);
        let cache = self.devices.cache(taken.device);
        let Some((number, cache)) = taken.sync.take().zip(cache) else { return false };
        let outstanding = &mut self.syncs.outstanding[taken.device.index()];
        self.syncs.wakes_others |= outstanding.back(cache.order(), number);
        true
    }

    /// Handles the end of an IO. Returns whether it is a flush that must be held back.
    pub(super) fn end_sync(&mut self, row: IoRow) -> bool {
        if !self.return_sync(row) {
            return false;
        }
        let taken = self.requests.io(row);
        let is_good_flush = taken.io.op == IoOp::Flush && taken.status.is_ok();
        let Some(cache) = self.devices.cache(taken.device).filter(|_| is_good_flush) else {
            return false;
        };
        // Read after the number has returned: later syncs began after this end.
        let horizon = cache.order().horizon();
        if cache.order().is_clear(horizon) || rtrs_core::mutated!(FlushOvertakes) {
            return false;
        }
        cache.order().count_waiting(true);
        let unanswered = cache.unanswered();
        self.syncs.held.push(HeldFlush { row, horizon, unanswered, since: self.now });
        true
    }

    /// Completes the held flushes whose overlapping syncs have ended, and makes other shards check
    /// theirs. Returns whether any was completed.
    pub(super) fn release_flushes(&mut self, ctx: &mut Ctx<'_>) -> bool {
        if std::mem::take(&mut self.syncs.wakes_others) {
            let others = (0..self.config.shards).filter(|shard| *shard != self.index.0);
            others.for_each(|shard| ctx.out.shard(CoreIndex(shard), ShardMessage::Wake));
        }
        self.end_held(|shard, held| {
            let cache = shard.devices.cache(shard.requests.io(held.row).device)?;
            cache.order().is_clear(held.horizon).then(|| match cache.unanswered() {
                same if same == held.unanswered => IoStatus::Ok,
                // The answer that did not arrive may have reported a loss.
                _ => IoStatus::TimedOut,
            })
        })
    }

    /// Fails the flushes that are held back for too long.
    pub(super) fn sweep_held_flushes(&mut self, now: Instant) -> bool {
        self.end_held(|shard, held| {
            let device = shard.requests.io(held.row).device;
            let is_over = shard.held_max(device).is_some_and(|max| now.since(held.since) >= max);
            is_over.then_some(IoStatus::TimedOut)
        })
    }

    /// Maximum time for which a flush of a device is held back; None if it is unlimited.
    fn held_max(&self, device: DeviceIndex) -> Option<Duration> {
        match self.config.slow_io {
            SlowIo::Fail if self.paths.serve(device) => Some(self.config.io_timeout),
            SlowIo::Wait | SlowIo::Fail => self.age_max(),
        }
    }

    /// Completes the held flushes for which `end` returns a status. Returns whether there was any.
    fn end_held(&mut self, end: impl Fn(&Self, HeldFlush) -> Option<IoStatus>) -> bool {
        let (mut at, before) = (0, self.syncs.held.len());
        while let Some(held) = self.syncs.held.get(at).copied() {
            let Some(status) = end(self, held) else {
                at += 1;
                continue;
            };
            self.syncs.held.remove(at);
            let taken = self.requests.io_mut(held.row);
            taken.status = status;
            if let Some(cache) = self.devices.cache(taken.device) {
                cache.order().count_waiting(false);
            }
            self.complete(held.row);
        }
        self.syncs.held.len() < before
    }
}
