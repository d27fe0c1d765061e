//! Holders of a session's permits: one atomic word per permit, shared by paths and shards.
//!
//! A request claims its permit before any of its work begins and releases it when its answer is
//! posted or its path is closed. If the same path already holds the permit, the peer violates the
//! protocol. If another path holds it, the request is a replay of one that may still be running:
//! the replay waits, and the other path is closed. Writes that a closed path leaves running on the
//! disk are entered in a separate table (`overlap.rs`) before their permits are released. A replay
//! therefore never overtakes its original.
//!
//! A word is 0 if free, otherwise the path's number (48 bits, never 0) and the shard (16 bits).

use rtrs_core::ids::{CoreIndex, PermitId};
use rtrs_core::sync::atomic::{AtomicU64, Ordering};

/// Holder of a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Number of the path, unique in this process and never 0.
    pub path: u64,
    /// Shard of the request.
    pub core: CoreIndex,
}

impl Holder {
    fn word(self) -> u64 {
        self.path << 16 | u64::from(self.core.0)
    }

    #[allow(clippy::cast_possible_truncation, reason = "the word was made from these widths")]
    fn of(word: u64) -> Self {
        Self { path: word >> 16, core: CoreIndex(word as u16) }
    }
}

/// Outcome of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// The claimer now holds the permit.
    Granted,
    /// The claiming path already holds the permit: the peer reuses a permit in flight.
    Own,
    /// Another path holds the permit.
    Other(Holder),
}

/// Permits of one session.
#[derive(Debug)]
pub struct PermitTable {
    words: Box<[AtomicU64]>,
}

impl PermitTable {
    /// Creates a table of `count` free permits.
    pub fn new(count: u16) -> Self {
        Self { words: (0..count).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Tries to claim a permit, whose number must be less than the table's count.
    pub fn claim(&self, permit: PermitId, holder: Holder) -> Claim {
        assert!((1..1 << 48).contains(&holder.path), "path {} has 1 to 48 bits", holder.path);
        let word = &self.words[permit.index()];
        // Acquire pairs with the release below: the previous holder's work is complete.
        match word.compare_exchange(0, holder.word(), Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Claim::Granted,
            Err(_) if rtrs_core::mutated!(ReplayWithoutPermit) => Claim::Granted,
            Err(held) if Holder::of(held).path == holder.path => Claim::Own,
            Err(held) => Claim::Other(Holder::of(held)),
        }
    }

    /// Releases a permit. Panics if a different holder holds it, which is a bug in this server.
    pub fn release(&self, permit: PermitId, holder: Holder) {
        if rtrs_core::mutated!(ReplayWithoutPermit) && self.holder(permit) != Some(holder) {
            return;
        }
        let held = self.words[permit.index()].swap(0, Ordering::Release);
        assert_eq!(held, holder.word(), "permit {permit} released by another holder");
    }

    /// Current holder of a permit.
    pub fn holder(&self, permit: PermitId) -> Option<Holder> {
        match self.words.get(permit.index())?.load(Ordering::Relaxed) {
            0 => None,
            word => Some(Holder::of(word)),
        }
    }

    /// Number of permits that are held.
    pub fn held(&self) -> usize {
        self.words.iter().filter(|word| word.load(Ordering::Relaxed) != 0).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permit_has_one_holder_at_a_time() {
        let table = PermitTable::new(4);
        let permit = PermitId(3);
        let a = Holder { path: 1, core: CoreIndex(0) };
        let b = Holder { path: 1, core: CoreIndex(7) };
        let c = Holder { path: (1 << 48) - 1, core: CoreIndex(u16::MAX) };
        assert_eq!(table.claim(permit, a), Claim::Granted);
        assert_eq!(table.claim(permit, b), Claim::Own);
        assert_eq!(table.claim(permit, c), Claim::Other(a));
        assert_eq!((table.holder(permit), table.held()), (Some(a), 1));
        table.release(permit, a);
        assert_eq!(table.claim(permit, c), Claim::Granted);
        assert_eq!(table.holder(permit), Some(c));
        assert_eq!(table.holder(PermitId(4)), None);
    }

    #[test]
    #[should_panic(expected = "released by another")]
    fn only_the_holder_releases_a_permit() {
        let table = PermitTable::new(1);
        table.claim(PermitId(0), Holder { path: 1, core: CoreIndex(0) });
        table.release(PermitId(0), Holder { path: 2, core: CoreIndex(0) });
    }
}

#[cfg(all(test, loom))]
mod loom_model {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;
    use rtrs_core::sync::model;

    use super::*;

    const PERMIT: PermitId = PermitId(0);

    /// One permit, and memory that only its holder may touch: loom reports concurrent accesses, and
    /// accesses that do not see those of the previous holder.
    struct Request {
        table: PermitTable,
        memory: UnsafeCell<()>,
    }

    impl Request {
        /// Claims the permit twice, as two requests would. Returns the number of successful claims.
        fn run(&self, holder: Holder) -> usize {
            let claims = [(); 2].map(|()| match self.table.claim(PERMIT, holder) {
                Claim::Granted => {
                    self.memory.with_mut(|_| ());
                    self.table.release(PERMIT, holder);
                    1
                }
                Claim::Other(other) => {
                    assert_ne!(other.path, holder.path, "another path");
                    0
                }
                Claim::Own => panic!("it released what it held"),
            });
            claims.iter().sum()
        }
    }

    #[test]
    fn the_next_holder_sees_the_previous_ones_writes() {
        model(|| {
            let (table, memory) = (PermitTable::new(1), UnsafeCell::new(()));
            let request = Arc::new(Request { table, memory });
            let paths = [1, 2].map(|path| {
                let request = Arc::clone(&request);
                thread::spawn(move || request.run(Holder { path, core: CoreIndex(0) }))
            });
            let own = request.run(Holder { path: 3, core: CoreIndex(1) });
            let others: usize = paths.into_iter().map(|path| path.join().unwrap()).sum();
            assert!(own + others > 0, "a free permit is granted");
            assert_eq!(request.table.held(), 0);
        });
    }
}
