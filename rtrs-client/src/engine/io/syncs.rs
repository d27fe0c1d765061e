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
use rtrs_core::time::Instant;

use super::Shard;
use super::waiting::IoRow;
use crate::engine::cache_epoch::CacheWatch;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceIndex;
use crate::engine::device_table::IOS_MAX;
use crate::engine::message::ShardMessage;
use crate::engine::session::SlowIo;

/// Place of a sync in the order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sync {
    number: u64,
    /// Number of syncs that had ended without an answer when this one was sent.
    unanswered: u64,
    /// Whether its failure was reported because the disk is slow.
    given_up: bool,
}

/// Successful flush that waits for overlapping syncs.
#[derive(Clone, Copy, Debug)]
struct HeldFlush {
    row: IoRow,
    /// Syncs with lower numbers must have ended.
    horizon: u64,
    /// Number of syncs that had ended without an answer when the flush was sent.
    unanswered: u64,
    since: Instant,
    /// Whether other shards wake this one, since the flush waits for them too.
    woken: bool,
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
        Self {
            shard,
            outstanding: Vec::new(),
            held: Vec::with_capacity(IOS_MAX),
            wakes_others: false,
        }
    }

    /// Makes room for a device. Nothing is left of an earlier one with this number.
    pub(super) fn add_device(&mut self, device: DeviceIndex) {
        let count = device.index() + 1;
        if self.outstanding.len() < count {
            let none = || ShardSyncs::with_capacity(self.shard, IOS_MAX);
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
        let (number, unanswered) = (outstanding.draw(cache.order()), cache.unanswered());
        taken.sync = Some(Sync { number, unanswered, given_up: false });
        true
    }

    /// Records that the failure of an outstanding IO is reported because the disk is slow.
    pub(super) fn give_sync_up(&mut self, row: IoRow) {
        let taken = self.requests.io_mut(row);
        if let (Some(sync), Some(cache)) = (&mut taken.sync, self.devices.cache(taken.device)) {
            sync.given_up = true;
            cache.count_given_up(true);
        }
    }

    /// Records that the result of a sync is known, or that the sync was not sent. Returns its place
    /// in the order.
    pub(super) fn return_sync(&mut self, row: IoRow) -> Option<Sync> {
        let taken = self.requests.io_mut(row);
        let (sync, cache) = taken.sync.take().zip(self.devices.cache(taken.device))?;
        if sync.given_up {
            cache.count_given_up(false);
        }
        let outstanding = &mut self.syncs.outstanding[taken.device.index()];
        self.syncs.wakes_others |= outstanding.back(cache.order(), sync.number);
        Some(sync)
    }

    /// Handles the end of an IO. Returns whether it is a flush that must be held back.
    pub(super) fn end_sync(&mut self, row: IoRow) -> bool {
        let Some(Sync { unanswered, .. }) = self.return_sync(row) else { return false };
        let taken = self.requests.io_mut(row);
        let is_good_flush = taken.io.op == IoOp::Flush && taken.status.is_ok();
        let Some(cache) = self.devices.cache(taken.device).filter(|_| is_good_flush) else {
            return false;
        };
        // Read after the number has returned: later syncs began after this end.
        let (order, horizon) = (cache.order(), cache.order().horizon());
        if order.is_clear(horizon) || rtrs_core::mutated!(FlushOvertakes) {
            taken.status = verdict(cache, unanswered);
            return false;
        }
        let woken = !order.is_clear_elsewhere(self.index, horizon);
        if woken {
            order.count_waiting(true);
        }
        self.syncs.held.push(HeldFlush { row, horizon, unanswered, since: self.now, woken });
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
            cache.order().is_clear(held.horizon).then(|| verdict(cache, held.unanswered))
        })
    }

    /// Fails the flushes that are held back for too long: longer than an IO may take, or, behind a
    /// slow disk whose delay is an error, as long as that may take to answer.
    pub(super) fn sweep_held_flushes(&mut self, now: Instant) -> bool {
        let age_max = self.age_max();
        let fails_slow = self.config.slow_io == SlowIo::Fail;
        self.end_held(|shard, held| {
            let taken = shard.requests.io(held.row);
            let cache = shard.devices.cache(taken.device)?;
            let is_old = age_max.is_some_and(|max| now.since(taken.submitted) >= max);
            let is_slow = fails_slow
                && cache.has_given_up()
                && now.since(held.since) >= shard.config.io_timeout;
            (is_old || is_slow).then_some(IoStatus::TimedOut)
        })
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
            if let (true, Some(cache)) = (held.woken, self.devices.cache(taken.device)) {
                cache.order().count_waiting(false);
            }
            self.complete(held.row);
        }
        self.syncs.held.len() < before
    }
}

/// Result of a successful flush once its overlapping syncs have ended, of which one may have ended
/// without an answer that would have reported a loss.
fn verdict(cache: &CacheWatch, unanswered: u64) -> IoStatus {
    if cache.unanswered() == unanswered { IoStatus::Ok } else { IoStatus::TimedOut }
}
