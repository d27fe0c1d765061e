//! Order of overlapping syncs of one device across shards.
//!
//! A device reports a cache error only once, to one of several overlapping syncs. A successful sync
//! therefore proves nothing until the results of all syncs that began before it ended are known:
//! one of them may have consumed the error. Every sync draws a number before it is submitted, each
//! shard publishes the lowest of its outstanding numbers, and the success of a sync counts once all
//! numbers drawn before it ended have returned.
//!
//! The server applies this order to the syncs of an export, and the client to the syncs of a
//! volume, whose answers may arrive over different paths, not in the order in which the server sent
//! them.

use std::collections::VecDeque;
use std::sync::OnceLock;

use crate::ids::CoreIndex;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Value published by a shard with no outstanding syncs.
const NONE_OUT: u64 = u64::MAX;

/// One shard's lowest outstanding number, on its own cache line.
#[derive(Debug)]
#[repr(align(64))]
struct Lowest(AtomicU64);

/// Numbers of the syncs of one device, shared by all shards.
#[derive(Debug, Default)]
pub struct SyncOrder {
    next: AtomicU64,
    lowest: OnceLock<Box<[Lowest]>>,
    /// Number of successful syncs that wait for others.
    waiting: AtomicU32,
}

impl SyncOrder {
    /// Allocates room for `count` shards. Must be called before all other methods; later calls have
    /// no effect.
    pub fn set_shards(&self, count: u16) {
        let none = |_| Lowest(AtomicU64::new(NONE_OUT));
        self.lowest.get_or_init(|| (0..count.max(1)).map(none).collect());
    }

    fn lowest(&self) -> &[Lowest] {
        self.lowest.get().map_or(&[], |all| all)
    }

    /// Returns the exclusive upper bound of all numbers drawn so far.
    pub fn horizon(&self) -> u64 {
        self.next.load(Ordering::SeqCst)
    }

    /// Returns true if all numbers below the horizon have returned.
    pub fn is_clear(&self, horizon: u64) -> bool {
        self.lowest().iter().all(|own| own.0.load(Ordering::SeqCst) >= horizon)
    }

    /// Returns true if all numbers below the horizon have returned on the other shards.
    pub fn is_clear_elsewhere(&self, shard: CoreIndex, horizon: u64) -> bool {
        let others = self.lowest().iter().enumerate().filter(|(at, _)| *at != shard.index());
        others.into_iter().all(|(_, other)| other.0.load(Ordering::SeqCst) >= horizon)
    }

    /// Counts a sync that begins or stops waiting for others. The caller must check
    /// [`Self::is_clear`] after this call.
    pub fn count_waiting(&self, begins: bool) {
        if begins {
            self.waiting.fetch_add(1, Ordering::SeqCst);
        } else {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Outstanding syncs of one shard.
#[derive(Debug)]
pub struct ShardSyncs {
    shard: CoreIndex,
    /// Numbers of the outstanding syncs, lowest first.
    numbers: VecDeque<u64>,
}

impl ShardSyncs {
    /// Creates the list for a shard, with room for `count` syncs.
    pub fn with_capacity(shard: CoreIndex, count: usize) -> Self {
        Self { shard, numbers: VecDeque::with_capacity(count) }
    }

    /// Draws a number for a sync that is about to be submitted.
    pub fn draw(&mut self, order: &SyncOrder) -> u64 {
        // Published before it is drawn: every thread that sees a higher `next` also sees this.
        if let (true, Some(own)) = (self.numbers.is_empty(), order.lowest().get(self.shard.index()))
        {
            own.0.store(order.next.load(Ordering::SeqCst), Ordering::SeqCst);
        }
        let number = order.next.fetch_add(1, Ordering::SeqCst);
        self.numbers.push_back(number);
        number
    }

    /// Records that the result of a sync was processed, including a loss that it reported. Returns
    /// whether other syncs wait for that result, perhaps on other shards.
    pub fn back(&mut self, order: &SyncOrder, number: u64) -> bool {
        if let Ok(at) = self.numbers.binary_search(&number) {
            self.numbers.remove(at);
        }
        if let Some(own) = order.lowest().get(self.shard.index()) {
            let lowest = self.numbers.front().copied();
            own.0.store(lowest.unwrap_or(NONE_OUT), Ordering::SeqCst);
        }
        order.waiting.load(Ordering::SeqCst) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successful_sync_waits_for_earlier_ones() {
        let order = SyncOrder::default();
        order.set_shards(2);
        let [mut a, mut b] = [0, 1].map(|shard| ShardSyncs::with_capacity(CoreIndex(shard), 4));
        let first = b.draw(&order);
        let own = a.draw(&order);
        assert!(own > first && !a.back(&order, own));
        let horizon = order.horizon();
        assert!(!order.is_clear(horizon), "b's sync may have taken an error");
        let later = b.draw(&order);
        order.count_waiting(true);
        assert!(b.back(&order, first), "a waits");
        assert!(order.is_clear(horizon), "what began later does not matter");
        order.count_waiting(false);
        assert!(!b.back(&order, later) && order.is_clear(order.horizon()));
    }
}
