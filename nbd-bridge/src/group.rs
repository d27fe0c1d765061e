//! State shared by the bridges of one device: the orphaned writes of disconnected NBD clients, and
//! the rounds in which all shards check for disconnected clients.
//!
//! A client may close a connection with requests unanswered, and write the same blocks again over
//! another connection on another shard. The old writes must not land after the new ones. So when a
//! client disconnects, its shard drops what has not begun and adds the rest to the table of
//! orphaned writes. Overlapping requests received afterwards wait until those writes have ended
//! (`shared`). In addition, before the first request of a connection is handled, every shard checks
//! its sockets once, so that a close that preceded the connection is seen first, even when unread
//! bytes of the old connection remain (`Conn::look`).
//!
//! A shard that makes no progress holds up only new connections, for at most [`ROUND_TIMEOUT`].
//! After that, those connections are closed, since serving them would not be safe. The kernel's
//! connections keep waiting.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rtrs_core::orphans::Orphans;
use rtrs_core::ranges::Ranges;
use rtrs_core::time::Duration;

/// Maximum time that a new connection waits for a shard that does not check its sockets.
pub(crate) const ROUND_TIMEOUT: Duration = Duration::from_secs(15);
/// Interval at which a shard rechecks what it is waiting for.
pub(crate) const RECHECK: Duration = Duration::from_millis(1);
/// Last round of a shard without a bridge, which has no connections to check.
const ABSENT: u64 = u64::MAX;

/// A round in which a shard must check its sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Due {
    pub(crate) round: u64,
    /// The shard has already checked for every earlier round.
    pub(crate) only: bool,
}

/// State shared by the bridges of one device, one bridge per shard.
pub struct Group {
    /// Orphaned writes, identified by shard and row.
    pub(crate) orphans: Orphans<(usize, u32)>,
    /// Changes to parts of blocks, and the requests that are serialized with them.
    pub(crate) ranges: Ranges,
    /// Number of the last round that was requested.
    round: AtomicU64,
    /// The last round in which each shard checked its sockets.
    looked: Box<[AtomicU64]>,
    wake: Box<dyn Fn(usize) + Send + Sync>,
}

impl Group {
    /// Creates a group of `shards` shards. `wake` schedules another shard's bridge to run.
    pub fn new(shards: usize, wake: impl Fn(usize) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            orphans: Orphans::default(),
            ranges: Ranges::new(shards),
            round: AtomicU64::new(0),
            looked: (0..shards).map(|_| AtomicU64::new(ABSENT)).collect(),
            wake: Box::new(wake),
        })
    }

    /// Returns the number of writes of disconnected clients, on all shards, that may still land.
    pub fn orphaned_writes(&self) -> usize {
        self.orphans.len()
    }

    /// Schedules another shard's bridge to run.
    pub(crate) fn wake(&self, shard: usize) {
        (self.wake)(shard);
    }

    /// Adds the bridge of a shard, which has no connections yet.
    pub(crate) fn join(&self, shard: usize) {
        self.looked[shard].store(self.round.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// Removes the bridge of a shard, whose connections are already closed.
    pub(crate) fn leave(&self, shard: usize) {
        self.looked[shard].store(ABSENT, Ordering::SeqCst);
        self.ranges.leave(shard);
    }

    /// Requests that all shards check their sockets. Returns the round.
    pub(crate) fn ask(&self, shard: usize) -> u64 {
        let round = self.round.fetch_add(1, Ordering::SeqCst) + 1;
        for (other, looked) in self.looked.iter().enumerate() {
            if other != shard && looked.load(Ordering::SeqCst) < round {
                self.wake(other);
            }
        }
        round
    }

    /// Returns the round in which this shard must check its sockets, if any.
    pub(crate) fn due(&self, shard: usize) -> Option<Due> {
        let round = self.round.load(Ordering::SeqCst);
        let looked = self.looked[shard].load(Ordering::Relaxed);
        (looked < round).then(|| Due { round, only: looked + 1 == round })
    }

    /// Records that a shard has checked its sockets. Its findings are in the table.
    pub(crate) fn has_looked(&self, shard: usize, round: u64) {
        self.looked[shard].store(round, Ordering::SeqCst);
    }

    /// Whether all shards have checked their sockets.
    pub(crate) fn is_over(&self, round: u64) -> bool {
        self.looked.iter().all(|looked| looked.load(Ordering::SeqCst) >= round)
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("orphans", &self.orphans)
            .field("ranges", &self.ranges)
            .field("round", &self.round)
            .field("looked", &self.looked)
            .finish_non_exhaustive()
    }
}

/// Identifies a bridge within its group.
#[derive(Clone, Debug)]
pub struct Seat {
    /// Group of the device.
    pub group: Arc<Group>,
    /// Index of the bridge's shard.
    pub shard: usize,
}

impl Seat {
    /// Creates the seat of a device's only shard.
    pub fn alone() -> Self {
        Self { group: Group::new(1, |_| ()), shard: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_ends_when_all_shards_with_a_bridge_have_checked() {
        let (woken, wakes) = std::sync::mpsc::channel();
        let group = Group::new(3, move |shard| woken.send(shard).unwrap());
        assert!(group.is_over(group.ask(0)), "there is no connection");
        group.join(0);
        group.join(2);
        let round = group.ask(0);
        assert_eq!(wakes.try_iter().collect::<Vec<_>>(), [2], "shards with a bridge are woken");
        let due = Some(Due { round, only: true });
        assert_eq!((group.due(0), group.due(1), group.due(2)), (due, None, due));
        group.has_looked(0, round);
        assert!(!group.is_over(round) && group.due(0).is_none());
        group.leave(2);
        assert!(group.is_over(round), "its connections have ended");
        group.join(2);
        assert_eq!(group.due(2), None, "a new bridge has no earlier rounds to catch up on");
    }

    #[test]
    fn a_round_requested_by_one_shard_differs_from_a_shared_one() {
        let group = Group::new(2, |_| ());
        group.join(0);
        group.join(1);
        // Shard 1 has requested a round, and shard 0 requests one itself before checking.
        group.ask(1);
        let round = group.ask(0);
        assert_eq!(group.due(0), Some(Due { round, only: false }));
        group.has_looked(0, round);
        let round = group.ask(0);
        assert_eq!(group.due(0), Some(Due { round, only: true }));
    }
}
