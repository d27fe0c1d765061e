//! Counters shared between processes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::mapping::Mapping;

/// Counters in memory that any process with the memory's descriptor can change: 32-bit words that
/// wrap, addressed by number.
///
/// Accesses are ordered for all processes. If one process writes a word elsewhere and then reads a
/// counter, and another process changes the counter and then reads the word, at least one of the
/// two sees the other's change.
pub struct SharedCounters {
    mapping: Arc<Mapping>,
    count: usize,
}

impl SharedCounters {
    /// Uses the first `count` words of a mapping.
    pub(super) fn new(mapping: Arc<Mapping>, count: usize) -> Self {
        Self { mapping, count }
    }

    fn word(&self, number: usize) -> &std::sync::atomic::AtomicU32 {
        assert!(number < self.count, "no counter {number} of {}", self.count);
        self.mapping.word(number * 4)
    }

    /// Returns a counter.
    pub fn get(&self, number: usize) -> u32 {
        fence(Ordering::SeqCst);
        self.word(number).load(Ordering::SeqCst)
    }

    /// Adds to a counter. Returns the counter's previous value.
    pub fn add(&self, number: usize, amount: u32) -> u32 {
        let before = self.word(number).fetch_add(amount, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        before
    }
}

impl fmt::Debug for SharedCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedCounters").field("count", &self.count).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::super::message_ring::{RingSizes, create_ring, open_ring};

    const SIZES: RingSizes = RingSizes { counters: 2, ring: 4096, long: 4096 };

    #[test]
    fn each_holder_changes_the_counters() {
        let ends = create_ring("test", SIZES).unwrap();
        let (first, second) = (ends.counters, open_ring(ends.fd.as_fd(), SIZES).unwrap().counters);
        assert_eq!((first.add(0, 7), second.add(0, u32::MAX)), (0, 7));
        assert_eq!((first.get(0), second.get(0), second.get(1)), (6, 6, 0));
        std::thread::scope(|scope| {
            for counters in [&first, &second, &first, &second] {
                scope.spawn(|| (0..1000).map(|_| counters.add(1, 1)).max());
            }
        });
        assert_eq!(first.get(1), 4000);
    }

    #[test]
    #[should_panic(expected = "no counter 2 of 2")]
    fn counters_do_not_reach_into_the_ring() {
        create_ring("test", SIZES).unwrap().counters.get(2);
    }
}
