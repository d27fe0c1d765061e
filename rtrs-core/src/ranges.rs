//! Ranges of a device in which changes are serialized across all its shards.
//!
//! A change to part of a block is a *fragment*: the block is read, the bytes are replaced, and the
//! block is written. No other change to that block may run in the meantime, or it would be undone.
//! The server supports such writes (`rtrs-server`, `engine/io/turns.rs`); for servers that do not,
//! the NBD front end performs them (`nbd-bridge`, `shared/fragments.rs`). A fragment enters its
//! block here, and begins when
//! - every shard has since scanned its changes in flight and entered those that overlap;
//! - no overlapping change is running, and no overlapping change came before.
//!
//! Any change that overlaps an entry is entered too and waits in the same way, so that all are
//! processed in order of arrival. A change that overlaps nothing is not entered: as long as no
//! fragment is in the list, it costs only one load. Reads never wait.
//!
//! No change is missed, because a shard reads the count before it submits a change to the device.
//! If the count is 0, the shard's next scan happens later, and finds the change in flight or
//! already ended. A shard without open devices has nothing in flight and need not scan.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

/// Round of a shard that has nothing in flight and has not joined.
const ABSENT: u64 = u64::MAX;

/// Part of a row that an entry represents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// One of the row's fragments, by index.
    Fragment(usize),
    /// Part of the row that is ready but has not been handed to the device.
    Queued,
    /// Part of the row that has been handed to the device.
    Running,
}

/// Owner of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Index of the shard, from 0.
    pub shard: usize,
    /// Number of the request on that shard.
    pub row: u64,
    /// Part of the request.
    pub piece: Piece,
}

#[derive(Debug)]
struct Entry {
    key: Key,
    bytes: Range<u64>,
    /// Whether the change may have reached the device; overlapping changes wait for it.
    runs: bool,
    /// The change begins when all shards have scanned in this round.
    round: u64,
}

impl Entry {
    fn overlaps(&self, bytes: &Range<u64>) -> bool {
        self.bytes.start < bytes.end && bytes.start < self.bytes.end
    }
}

/// Shared list of ranges, with the progress of the shards' scans.
pub struct Ranges {
    /// Number of entries in the list.
    count: AtomicUsize,
    /// Entries in order of arrival.
    list: Mutex<Vec<Entry>>,
    /// Round of the newest fragment.
    round: AtomicU64,
    /// Last round in which each shard has scanned its changes in flight.
    looked: Box<[AtomicU64]>,
}

impl Ranges {
    /// Creates an empty list for `shards` shards, none of which has joined.
    pub fn new(shards: usize) -> Self {
        Self {
            count: AtomicUsize::new(0),
            list: Mutex::default(),
            round: AtomicU64::new(0),
            looked: (0..shards).map(|_| AtomicU64::new(ABSENT)).collect(),
        }
    }

    /// Adds a shard. Must be called before the shard's first change is in flight.
    pub fn join(&self, shard: usize) {
        let looked = &self.looked[shard];
        if looked.load(Ordering::SeqCst) == ABSENT {
            looked.store(self.round.load(Ordering::SeqCst), Ordering::SeqCst);
        }
    }

    /// Removes a shard, which must have nothing in flight and nothing in the list.
    pub fn leave(&self, shard: usize) {
        self.looked[shard].store(ABSENT, Ordering::SeqCst);
    }

    /// Returns true if no change needs to check the list.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    /// Enters a fragment, and wakes the other shards that must scan for it.
    pub fn enter(&self, key: Key, bytes: Range<u64>, mut wake: impl FnMut(usize)) {
        let round = {
            let mut list = self.list.lock();
            let round = self.round.load(Ordering::SeqCst) + 1;
            list.push(Entry { key, bytes, runs: false, round });
            self.count.store(list.len(), Ordering::SeqCst);
            self.round.store(round, Ordering::SeqCst);
            round
        };
        for (shard, looked) in self.looked.iter().enumerate() {
            if shard != key.shard && looked.load(Ordering::SeqCst) < round {
                wake(shard);
            }
        }
    }

    /// Enters a change if its bytes overlap an entry. Returns false if they do not.
    pub fn queue(&self, key: Key, bytes: Range<u64>) -> bool {
        let mut list = self.list.lock();
        let waits = list.iter().any(|entry| entry.overlaps(&bytes));
        if waits {
            list.push(Entry { key, bytes, runs: false, round: 0 });
            self.count.store(list.len(), Ordering::SeqCst);
        }
        waits
    }

    /// Extends a waiting change up to this byte, because more of it is ready.
    pub fn extend(&self, key: Key, end: u64) {
        let mut list = self.list.lock();
        for entry in list.iter_mut().filter(|entry| entry.key == key) {
            entry.bytes.end = end;
        }
    }

    /// Starts this entry if it may run. Returns true if it was started.
    pub fn start(&self, key: Key) -> bool {
        let mut list = self.list.lock();
        let Some(at) = list.iter().position(|entry| entry.key == key) else { return false };
        let Entry { bytes, round, .. } = &list[at];
        let free = list.iter().enumerate().all(|(other, entry)| {
            other == at || !entry.overlaps(bytes) || (other > at && !entry.runs)
        });
        let looked = self.looked.iter().all(|looked| looked.load(Ordering::SeqCst) >= *round);
        let starts = looked && free || crate::mutated!(NbdTurnsSkipped);
        list[at].runs = starts;
        if starts && key.piece == Piece::Queued {
            // More of the row may be queued separately.
            list[at].key.piece = Piece::Running;
        }
        starts
    }

    /// Returns the round in which this shard must scan, if there is one.
    pub fn due(&self, shard: usize) -> Option<u64> {
        let round = self.round.load(Ordering::SeqCst);
        (self.looked[shard].load(Ordering::Relaxed) < round).then_some(round)
    }

    /// Checks a change in flight on a scanning shard, and enters it if it overlaps a fragment that
    /// waits for this shard. Returns true if it does.
    pub fn meets(&self, key: Key, bytes: &Range<u64>) -> bool {
        let looked = self.looked[key.shard].load(Ordering::Relaxed);
        let mut list = self.list.lock();
        let waits = list.iter().any(|entry| entry.round > looked && entry.overlaps(bytes));
        if waits {
            list.push(Entry { key, bytes: bytes.clone(), runs: true, round: 0 });
            self.count.store(list.len(), Ordering::SeqCst);
        }
        waits
    }

    /// Records that this shard has entered its changes in flight, and wakes the shards that may
    /// have been waiting for it.
    pub fn has_looked(&self, shard: usize, round: u64, wake: impl FnMut(usize)) {
        let list = self.list.lock();
        self.looked[shard].store(round, Ordering::SeqCst);
        wake_waiting(&list, shard, wake);
    }

    /// Removes the matching entries of a shard, which have ended. Does nothing if there are none.
    pub fn end(&self, shard: usize, is: impl Fn(&Key) -> bool, wake: impl FnMut(usize)) {
        let mut list = self.list.lock();
        let before = list.len();
        list.retain(|entry| entry.key.shard != shard || !is(&entry.key));
        if list.len() < before {
            self.count.store(list.len(), Ordering::SeqCst);
            wake_waiting(&list, shard, wake);
        }
    }
}

/// Wakes the other shards that have waiting entries in the list.
fn wake_waiting(list: &[Entry], own: usize, mut wake: impl FnMut(usize)) {
    for (at, entry) in list.iter().enumerate() {
        let shard = entry.key.shard;
        let waits = |entry: &Entry| entry.key.shard == shard && !entry.runs;
        if shard != own && waits(entry) && !list[..at].iter().any(waits) {
            wake(shard);
        }
    }
}

impl fmt::Debug for Ranges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ranges")
            .field("count", &self.count)
            .field("round", &self.round)
            .field("looked", &self.looked)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::Piece::{Fragment, Queued, Running};
    use super::*;

    fn key(shard: usize, row: u64, piece: Piece) -> Key {
        Key { shard, row, piece }
    }

    /// Returns ranges for three shards, the last of which has not joined.
    fn two() -> Ranges {
        let ranges = Ranges::new(3);
        ranges.join(0);
        ranges.join(1);
        ranges
    }

    fn enter(ranges: &Ranges, key: Key, bytes: Range<u64>) -> Vec<usize> {
        let woken = RefCell::new(Vec::new());
        ranges.enter(key, bytes, |shard| woken.borrow_mut().push(shard));
        look(ranges, key.shard);
        woken.into_inner()
    }

    fn look(ranges: &Ranges, shard: usize) {
        if let Some(round) = ranges.due(shard) {
            ranges.has_looked(shard, round, |_| ());
        }
    }

    fn end(ranges: &Ranges, key: Key) -> Vec<usize> {
        let woken = RefCell::new(Vec::new());
        ranges.end(key.shard, |own| *own == key, |shard| woken.borrow_mut().push(shard));
        woken.into_inner()
    }

    #[test]
    fn a_fragment_starts_when_all_shards_with_connections_have_checked() {
        let ranges = two();
        let own = key(0, 7, Fragment(1));
        assert!(ranges.is_empty() && ranges.due(1).is_none());
        assert_eq!(enter(&ranges, own, 512..1024), [1], "the others are woken");
        assert!(!ranges.is_empty() && !ranges.start(own));
        assert_eq!((ranges.due(0), ranges.due(1), ranges.due(2)), (None, Some(1), None));
        // The shard has this in flight.
        let flight = key(1, 3, Running);
        assert!(!ranges.meets(key(1, 4, Running), &(0..512)));
        assert!(ranges.meets(flight, &(0..4096)));
        look(&ranges, 1);
        assert!(!ranges.start(own));
        assert_eq!(end(&ranges, flight), [0], "the waiting shard is woken");
        assert!(ranges.start(own));
        assert!(end(&ranges, own).is_empty() && ranges.is_empty());
    }

    #[test]
    fn a_new_shard_has_nothing_in_flight_and_a_leaving_one_blocks_nothing() {
        let ranges = two();
        let own = key(0, 1, Fragment(0));
        enter(&ranges, own, 0..512);
        ranges.join(2);
        assert_eq!(ranges.due(2), None);
        ranges.join(1);
        assert!(ranges.due(1).is_some() && !ranges.start(own), "it has joined long ago");
        ranges.leave(1);
        assert!(ranges.start(own));
    }

    #[test]
    fn overlapping_ranges_run_in_order() {
        let ranges = two();
        let keys = [key(0, 1, Fragment(0)), key(1, 2, Queued), key(0, 3, Fragment(0))];
        enter(&ranges, keys[0], 0..512);
        assert!(!ranges.queue(keys[1], 512..1024), "next to it");
        assert!(ranges.queue(keys[1], 0..1024));
        enter(&ranges, keys[2], 512..1024);
        look(&ranges, 1);
        assert!(!ranges.start(keys[2]) && !ranges.start(keys[1]) && ranges.start(keys[0]));
        end(&ranges, keys[0]);
        assert!(!ranges.start(keys[2]), "the older one goes first");
        assert!(ranges.start(keys[1]) && !ranges.start(keys[2]));
        // More of that row is queued in addition to the running part.
        assert!(!ranges.queue(keys[1], 2048..4096));
        end(&ranges, key(1, 2, Running));
        assert!(ranges.start(keys[2]));
    }

    #[test]
    fn a_growing_range_waits_for_overlapping_ranges() {
        let ranges = two();
        let first = key(0, 1, Fragment(0));
        let (queued, later) = (key(1, 2, Queued), key(0, 3, Fragment(0)));
        enter(&ranges, first, 0..512);
        assert!(ranges.queue(queued, 0..512));
        enter(&ranges, later, 1024..1536);
        look(&ranges, 1);
        assert!(ranges.start(first) && ranges.start(later));
        ranges.extend(queued, 4096);
        end(&ranges, first);
        assert!(!ranges.start(queued));
        assert_eq!(end(&ranges, later), [1]);
        assert!(ranges.start(queued));
    }
}
