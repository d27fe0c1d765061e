//! Dirty log of a live migration: a bitmap of the guest's pages that the device has written.
//!
//! The monitor shares the bitmap. It clears bits and then copies their pages, so a bit is set after
//! its page was written. Bits are set without reading them first: the monitor may clear a bit that
//! is still set here before it sees the write, and would then copy the old page.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use rtrs_core::mem::{MemSlice, TruncationAlarm};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress, VolatileMemory};

use crate::memory::{FilePart, GuestMemory, GuestRegion, MappedRegions};

/// Length of the page that a bit stands for, as the protocol defines it.
const PAGE: u64 = 4096;

/// Bitmap that a monitor shares.
#[derive(Debug)]
pub(crate) struct DirtyLog(GuestRegion);

impl DirtyLog {
    /// Maps a bitmap.
    ///
    /// # Errors
    /// See [`MappedRegions::map`].
    pub(crate) fn map(
        part: FilePart<'_>,
        regions: &mut MappedRegions,
        alarm: &Arc<TruncationAlarm>,
    ) -> io::Result<Self> {
        regions.map(0, part, alarm).map(Self)
    }

    /// Whether there is a bit for each page below this guest address.
    pub(crate) fn covers(&self, end: u64) -> bool {
        end.div_ceil(PAGE).div_ceil(8) <= self.0.len()
    }

    /// Marks the pages of a guest range. Pages beyond the end of the log are left out.
    pub(crate) fn mark(&self, start: u64, len: u64) {
        let Some(last) = len.checked_sub(1).map(|more| start.saturating_add(more) / PAGE) else {
            return;
        };
        let first = start / PAGE;
        let Some(end) = self.0.len().checked_sub(1) else { return };
        for byte in first / 8..=(last / 8).min(end) {
            let from = first.saturating_sub(byte * 8).min(7);
            let to = (last - byte * 8).min(7);
            self.set(byte, (0xff << from) & (0xff >> (7 - to)));
        }
    }

    fn set(&self, byte: u64, bits: u8) {
        let slice = self.0.get_slice(MemoryRegionAddress(byte), 1);
        // A byte is always aligned, and the caller has checked the end.
        if let Ok(slice) = slice
            && let Ok(bitmap) = slice.get_atomic_ref::<AtomicU8>(0)
        {
            bitmap.fetch_or(bits, Ordering::SeqCst);
        }
    }

    /// Marks memory that was written, of the guest that these regions belong to.
    pub(crate) fn mark_pieces(&self, memory: &GuestMemory, pieces: &[MemSlice]) {
        for piece in pieces {
            if let Some(address) = memory.iter().find_map(|region| region.address_of(piece)) {
                self.mark(address, piece.len() as u64);
            }
        }
    }

    /// Marks all memory of the guest.
    pub(crate) fn mark_all(&self, memory: &GuestMemory) {
        memory.iter().for_each(|region| self.mark(region.start_addr().0, region.len()));
    }
}

/// Dirty log, as one ring uses it.
#[derive(Clone, Debug)]
pub(crate) struct RingLog {
    pub(crate) log: Arc<DirtyLog>,
    /// Address in the log of the used ring, if writes to the used ring are logged.
    pub(crate) used: Option<u64>,
}

impl RingLog {
    /// Marks a part of the used ring.
    pub(crate) fn mark_used(&self, offset: u64, len: u64) {
        if let Some(address) = self.used.and_then(|used| used.checked_add(offset)) {
            self.log.mark(address, len);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU32;
    use std::thread;

    use super::*;
    use crate::driver::migration::GuestLog;
    use crate::driver::{GUEST_AT, Guest, MEMORY_LEN};

    /// Log of a guest, as the device and as the monitor see it.
    fn log(len: u64) -> (DirtyLog, GuestLog) {
        let monitor = GuestLog::of(len);
        let part = FilePart { file: monitor.file(), offset: 0, len };
        let alarm = TruncationAlarm::new().unwrap();
        (DirtyLog::map(part, &mut MappedRegions::default(), &alarm).unwrap(), monitor)
    }

    const ROUNDS: u32 = 5000;
    const ALL: u64 = (GUEST_AT + MEMORY_LEN) / PAGE / 8;

    #[test]
    fn each_page_of_a_range_is_marked() {
        let (log, monitor) = log(ALL);
        let marked = |at: u64, len| {
            log.mark(GUEST_AT + at, len);
            monitor.take().into_iter().collect::<Vec<_>>()
        };
        assert!(marked(0, 0).is_empty());
        assert_eq!(marked(4095, 1), [0_u64]);
        assert_eq!(marked(4095, 2), [0, 1]);
        for (first, last) in [(0, 7), (3, 5), (7, 8), (6, 41), (8, 23)] {
            let pages: Vec<_> = (first..=last).collect();
            assert_eq!(marked(first * PAGE + 17, (last - first) * PAGE), pages);
        }
        let last = MEMORY_LEN / PAGE - 1;
        assert_eq!(marked(MEMORY_LEN - 1, 10 * PAGE), [last], "the rest is left out");
        assert!(marked(MEMORY_LEN, u64::MAX).is_empty());
    }

    #[test]
    fn a_log_covers_whole_bytes_of_pages() {
        let (log, _monitor) = log(3);
        let covered = [0, 1, 24 * PAGE].map(|end| log.covers(end));
        assert_eq!(covered, [true; 3]);
        assert!(!log.covers(24 * PAGE + 1) && !log.covers(u64::MAX));
    }

    /// Shards share the bytes of the log.
    #[test]
    fn no_bit_is_lost_among_threads() {
        let (log, _monitor) = log(8);
        let slice = log.0.get_slice(MemoryRegionAddress(0), 1).unwrap();
        let bitmap = slice.get_atomic_ref::<AtomicU8>(0).unwrap();
        let barrier = Barrier::new(2);
        let found = [0, 1].map(|_| AtomicU32::new(0));
        thread::scope(|scope| {
            for (page, found) in (0..).zip(&found) {
                let (log, barrier) = (&log, &barrier);
                scope.spawn(move || {
                    for _ in 0..ROUNDS {
                        barrier.wait();
                        log.mark(page * PAGE, 1);
                        barrier.wait();
                        let bit = 1 << page;
                        let was_set = bitmap.fetch_and(!bit, Ordering::SeqCst) & bit != 0;
                        found.fetch_add(u32::from(was_set), Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(found.map(AtomicU32::into_inner), [ROUNDS; 2]);
    }

    #[test]
    fn memory_is_marked_by_its_guest_address() {
        let (log, monitor) = log(ALL);
        let guest = Guest::default();
        let part = |offset, len| FilePart { file: guest.file(), offset, len };
        let alarm = TruncationAlarm::new().unwrap();
        let region = |at, part| GuestRegion::map(GUEST_AT + at, part, &alarm).unwrap();
        let high = region(0x10_0000, part(0, 0x4000));
        let low = region(0x2000, part(0x4000, 0x1000));
        let memory = GuestMemory::from_regions(vec![low, high]).unwrap();
        let mut pieces = Vec::new();
        let add = |at, len, pieces: &mut Vec<_>| {
            let start = vm_memory::GuestAddress(GUEST_AT + at);
            crate::memory::add_pieces(&memory, start, len, pieces).unwrap();
        };
        add(0x10_1fff, 2, &mut pieces);
        add(0x2000, 1, &mut pieces);
        log.mark_pieces(&memory, &pieces);
        assert_eq!(monitor.take(), BTreeSet::from([2, 0x101, 0x102]));
        log.mark_all(&memory);
        assert_eq!(monitor.take(), BTreeSet::from([2, 0x100, 0x101, 0x102, 0x103]));
        log.mark_pieces(&GuestMemory::default(), &pieces);
        assert_eq!(monitor.take(), BTreeSet::new(), "memory that the guest does not have");
    }
}
