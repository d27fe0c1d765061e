//! A table that grows in place: rows have fixed addresses, and can be read without a lock while
//! another thread adds rows.

use std::fmt;
use std::sync::OnceLock;

/// Number of rows per allocation.
const SEGMENT: usize = 256;

/// Rows of `T`, allocated when a row of the same segment is first used.
pub(crate) struct Segments<T>(Box<[OnceLock<Box<[T]>>]>);

impl<T: Default> Segments<T> {
    /// Creates a table for at most `max` rows, without allocating any.
    pub(crate) fn new(max: usize) -> Self {
        Self((0..max.div_ceil(SEGMENT)).map(|_| OnceLock::new()).collect())
    }

    /// Returns a row if its segment is allocated.
    pub(crate) fn get(&self, row: usize) -> Option<&T> {
        self.0.get(row / SEGMENT)?.get()?.get(row % SEGMENT)
    }

    /// Returns a row, allocating its segment if necessary. Returns None past the end.
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
    fn rows_are_allocated_by_segment_and_never_freed() {
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
