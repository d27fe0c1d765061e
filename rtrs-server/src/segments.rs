//! A table that grows in place: rows have fixed addresses, and are read without a lock while
//! another thread adds some.

use std::fmt;
use std::sync::OnceLock;

/// Rows that are allocated together.
const SEGMENT: usize = 256;

/// Rows of `T`, allocated with the first use of one of their segment.
pub(crate) struct Segments<T>(Box<[OnceLock<Box<[T]>>]>);

impl<T: Default> Segments<T> {
    /// A table for at most `max` rows, none of them allocated.
    pub(crate) fn new(max: usize) -> Self {
        Self((0..max.div_ceil(SEGMENT)).map(|_| OnceLock::new()).collect())
    }

    /// A row, if its segment was ever used.
    pub(crate) fn get(&self, row: usize) -> Option<&T> {
        self.0.get(row / SEGMENT)?.get()?.get(row % SEGMENT)
    }

    /// A row, allocated with its segment unless it is there. None past the end.
    pub(crate) fn make(&self, row: usize) -> Option<&T> {
        let rows = || (0..SEGMENT).map(|_| T::default()).collect();
        self.0.get(row / SEGMENT)?.get_or_init(rows).get(row % SEGMENT)
    }
}

impl<T> fmt::Debug for Segments<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used = self.0.iter().filter(|segment| segment.get().is_some()).count();
        f.debug_struct("Segments").field("used", &used).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn rows_appear_by_segments_and_stay() {
        let table: Segments<AtomicU32> = Segments::new(SEGMENT + 1);
        assert!(table.get(0).is_none());
        table.make(3).unwrap().store(7, Ordering::Relaxed);
        assert_eq!(table.get(3).unwrap().load(Ordering::Relaxed), 7);
        assert!(table.get(SEGMENT).is_none() && table.make(SEGMENT).is_some());
        assert!(table.get(SEGMENT).is_some());
        assert!(table.make(2 * SEGMENT).is_none() && table.get(usize::MAX).is_none());
        assert_eq!(table.make(3).unwrap().load(Ordering::Relaxed), 7, "made once");
    }
}
