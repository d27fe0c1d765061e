//! A shard's outstanding syncs: flushes and writes with FUA.
//!
//! The server reports a loss in the answer to one flush, and a flush that began after that report
//! succeeds. If the second answer arrives first, over a faster path, the session does not know of
//! the loss yet, and the second flush's user, perhaps another NBD connection, would consider lost
//! writes durable. So a flush that succeeds is held back until every flush and every write with FUA
//! that was in flight when its answer arrived has ended on all shards (`rtrs_core::sync_order`).
//! Only then is it compared with the losses (`cache_epoch.rs`).

use rtrs_core::ids::CoreIndex;
use rtrs_core::status::IoStatus;
use rtrs_core::sync_order::ShardSyncs;
use rtrs_core::time::Instant;

use super::waiting::IoRow;
use crate::engine::cache_epoch::CacheWatch;
use crate::engine::device_set::DeviceIndex;
use crate::engine::device_table::IOS_MAX;

/// Position of a sync in the order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sync {
    number: u64,
    /// Number of syncs that had ended without an answer when this one was sent.
    unanswered: u64,
    /// Whether the sync's failure was reported because the disk is slow.
    given_up: bool,
}

impl Sync {
    /// Records that the sync's failure is reported because the disk is slow.
    pub(super) fn give_up(&mut self, cache: &CacheWatch) {
        if !std::mem::replace(&mut self.given_up, true) {
            cache.count_given_up(true);
        }
    }

    /// Result of a successful flush whose overlapping syncs have ended. The flush fails if a sync
    /// ended without an answer, because that answer may have reported a loss.
    pub(super) fn verdict(self, cache: &CacheWatch) -> IoStatus {
        if cache.unanswered() == self.unanswered { IoStatus::Ok } else { IoStatus::TimedOut }
    }
}

/// Successful flush that is waiting for overlapping syncs.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldFlush {
    pub(super) row: IoRow,
    pub(super) sync: Sync,
    pub(super) since: Instant,
    /// Syncs with lower numbers must have ended.
    horizon: u64,
    /// Whether other shards wake this one, since the flush is waiting for them too.
    woken: bool,
}

impl HeldFlush {
    /// Whether the overlapping syncs have ended.
    pub(super) fn is_free(&self, cache: &CacheWatch) -> bool {
        cache.order().is_clear(self.horizon)
    }
}

/// Outstanding syncs of a shard, and the flushes that it holds back.
#[derive(Debug)]
pub(super) struct Syncs {
    shard: CoreIndex,
    /// Outstanding syncs by device.
    outstanding: Vec<ShardSyncs>,
    held: Vec<HeldFlush>,
    /// Whether a sync has ended for which other shards may be holding back flushes.
    wakes_others: bool,
}

impl Syncs {
    pub(super) fn new(shard: CoreIndex) -> Self {
        let held = Vec::with_capacity(IOS_MAX);
        Self { shard, outstanding: Vec::new(), held, wakes_others: false }
    }

    /// Makes room for a device. An earlier device with this number has no syncs left.
    pub(super) fn add_device(&mut self, device: DeviceIndex) {
        let count = device.index() + 1;
        if self.outstanding.len() < count {
            let none = || ShardSyncs::with_capacity(self.shard, IOS_MAX);
            self.outstanding.resize_with(count, none);
        }
    }

    /// Draws a number for a sync that is about to be sent for the first time.
    pub(super) fn draw(&mut self, device: DeviceIndex, cache: &CacheWatch) -> Sync {
        let number = self.outstanding[device.index()].draw(cache.order());
        Sync { number, unanswered: cache.unanswered(), given_up: false }
    }

    /// Records that the result of a sync is known, or that the sync was not sent.
    pub(super) fn back(&mut self, device: DeviceIndex, sync: Sync, cache: &CacheWatch) {
        if sync.given_up {
            cache.count_given_up(false);
        }
        self.wakes_others |= self.outstanding[device.index()].back(cache.order(), sync.number);
    }

    /// Holds a successful flush back if syncs overlap it; must be called after `back`. Returns
    /// whether it is held.
    pub(super) fn hold(
        &mut self,
        row: IoRow,
        sync: Sync,
        cache: &CacheWatch,
        now: Instant,
    ) -> bool {
        // Read after `back`: later syncs began after this flush ended.
        let (order, horizon) = (cache.order(), cache.order().horizon());
        if order.is_clear(horizon) || rtrs_core::mutated!(FlushOvertakes) {
            return false;
        }
        let woken = !order.is_clear_elsewhere(self.shard, horizon);
        if woken {
            order.count_waiting(true);
        }
        self.held.push(HeldFlush { row, sync, since: now, horizon, woken });
        true
    }

    /// Held flush at this position, oldest first.
    pub(super) fn held(&self, at: usize) -> Option<HeldFlush> {
        self.held.get(at).copied()
    }

    /// Removes the held flush at this position.
    pub(super) fn release(&mut self, at: usize, cache: &CacheWatch) {
        if self.held.remove(at).woken {
            cache.order().count_waiting(false);
        }
    }

    /// Returns true once if other shards must check their held flushes.
    pub(super) fn take_wake(&mut self) -> bool {
        std::mem::take(&mut self.wakes_others)
    }
}
