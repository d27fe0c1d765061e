//! What the bridges of one device have in common: the orphaned writes of NBD connections that are
//! gone, and the rounds in which all shards look for such connections.
//!
//! A client may close a connection, with requests unanswered, and write the same blocks again over
//! another one, on another shard. The old writes must not land after the new ones. So, when a
//! connection's client is gone, its shard drops what has not begun and enters the rest in the table
//! of orphaned writes; whatever overlaps them and is received afterwards waits until they have
//! ended (`shared`). And before the first request of a connection is handled, every shard has
//! looked at its sockets once, so that a close which came before that connection is seen before it,
//! also where bytes of the old one lie unread (`Conn::look`).
//!
//! A shard that does not turn holds up new connections only, at most [`ROUND_TIMEOUT`]: then they
//! are closed, since serving them would not be safe. The kernel's connections wait on.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rtrs_core::orphans::Orphans;
use rtrs_core::ranges::Ranges;
use rtrs_core::time::Duration;

/// How long a new connection waits for a shard that does not look at its sockets.
pub(crate) const ROUND_TIMEOUT: Duration = Duration::from_secs(15);
/// How often a shard looks whether what it waits for is over.
pub(crate) const RECHECK: Duration = Duration::from_millis(1);
/// The last round of a shard without a bridge: it has no connection to look at.
const ABSENT: u64 = u64::MAX;

/// A round in which a shard has to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Due {
    pub(crate) round: u64,
    /// The shard has looked since every other round was asked for.
    pub(crate) only: bool,
}

/// What the bridges of one device share, one for each shard.
pub struct Group {
    /// Known by shard and row.
    pub(crate) orphans: Orphans<(usize, u32)>,
    /// Changes of parts of blocks, and what takes turns with them.
    pub(crate) ranges: Ranges,
    /// The last round that was asked for.
    round: AtomicU64,
    /// By shard, the last round in which it looked at its sockets.
    looked: Box<[AtomicU64]>,
    wake: Box<dyn Fn(usize) + Send + Sync>,
}

impl Group {
    /// A group of so many shards. `wake` makes the bridge of another shard turn soon.
    pub fn new(shards: usize, wake: impl Fn(usize) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            orphans: Orphans::default(),
            ranges: Ranges::new(shards),
            round: AtomicU64::new(0),
            looked: (0..shards).map(|_| AtomicU64::new(ABSENT)).collect(),
            wake: Box::new(wake),
        })
    }

    /// Writes of connections that are gone, on all shards, which may still land.
    pub fn orphaned_writes(&self) -> usize {
        self.orphans.len()
    }

    /// Makes the bridge of another shard turn soon.
    pub(crate) fn wake(&self, shard: usize) {
        (self.wake)(shard);
    }

    /// This shard has a bridge from now on, without connections.
    pub(crate) fn join(&self, shard: usize) {
        self.looked[shard].store(self.round.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// This shard's bridge is gone, and its connections with it.
    pub(crate) fn leave(&self, shard: usize) {
        self.looked[shard].store(ABSENT, Ordering::SeqCst);
        self.ranges.leave(shard);
    }

    /// Asks all shards to look at their sockets; returns the round.
    pub(crate) fn ask(&self, shard: usize) -> u64 {
        let round = self.round.fetch_add(1, Ordering::SeqCst) + 1;
        for (other, looked) in self.looked.iter().enumerate() {
            if other != shard && looked.load(Ordering::SeqCst) < round {
                self.wake(other);
            }
        }
        round
    }

    /// The round in which this shard has to look, if there is one.
    pub(crate) fn due(&self, shard: usize) -> Option<Due> {
        let round = self.round.load(Ordering::SeqCst);
        let looked = self.looked[shard].load(Ordering::Relaxed);
        (looked < round).then(|| Due { round, only: looked + 1 == round })
    }

    /// This shard has looked; what it found is in the table.
    pub(crate) fn has_looked(&self, shard: usize, round: u64) {
        self.looked[shard].store(round, Ordering::SeqCst);
    }

    /// True when all shards have looked.
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

/// A bridge's place in its group.
#[derive(Clone, Debug)]
pub struct Seat {
    /// The group.
    pub group: Arc<Group>,
    /// Which of its shards.
    pub shard: usize,
}

impl Seat {
    /// The only shard of a device.
    pub fn alone() -> Self {
        Self { group: Group::new(1, |_| ()), shard: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_over_when_all_shards_with_a_bridge_have_looked() {
        let (woken, wakes) = std::sync::mpsc::channel();
        let group = Group::new(3, move |shard| woken.send(shard).unwrap());
        assert!(group.is_over(group.ask(0)), "nobody has a connection");
        group.join(0);
        group.join(2);
        let round = group.ask(0);
        assert_eq!(wakes.try_iter().collect::<Vec<_>>(), [2], "shards with a bridge are woken");
        let due = Some(Due { round, only: true });
        assert_eq!((group.due(0), group.due(1), group.due(2)), (due, None, due));
        group.has_looked(0, round);
        assert!(!group.is_over(round) && group.due(0).is_none());
        group.leave(2);
        assert!(group.is_over(round), "its connections are gone");
        group.join(2);
        assert_eq!(group.due(2), None, "a new bridge has none of before");
    }

    #[test]
    fn a_look_for_the_own_round_alone_differs_from_one_for_others_too() {
        let group = Group::new(2, |_| ());
        group.join(0);
        group.join(1);
        // Shard 1 has asked, and shard 0 asks itself before it has looked.
        group.ask(1);
        let round = group.ask(0);
        assert_eq!(group.due(0), Some(Due { round, only: false }));
        group.has_looked(0, round);
        let round = group.ask(0);
        assert_eq!(group.due(0), Some(Due { round, only: true }));
    }
}
