//! Accounting of the memory that peers use, and limits for their writes to a region.
//!
//! A [`MemoryMeter`] is a limit with the number of bytes that count against it. A region created
//! with [`Region::metered`](super::Region::metered) counts until it is unmapped: the whole region,
//! or only the parts that peers have written. In the second case the region is divided into units,
//! and the first write to a unit counts the whole unit; code that places a peer's bytes must first
//! call [`Region::admit_write`](super::Region::admit_write). A write to a unit that already counts
//! costs one division and one load.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;

/// Size of a unit in bytes if buffers are smaller.
const UNIT: usize = 256 << 10;

/// Returns the distance between units of a region whose buffers are `stride` apart: one buffer, or
/// as many buffers as fit in 256 KiB. The system may back a whole unit as soon as one byte is used
/// (`rt/fixed.rs` pins it).
pub(crate) const fn unit_of(stride: usize) -> usize {
    if stride < UNIT { stride * (UNIT / stride) } else { stride }
}

/// Memory limit with the number of bytes that count against it. The owner enforces the limit;
/// counting continues beyond it.
#[derive(Debug)]
pub struct MemoryMeter {
    max: u64,
    used: AtomicU64,
}

impl MemoryMeter {
    /// Creates a limit of `max` bytes, with no bytes in use.
    pub fn new(max: u64) -> Arc<Self> {
        Arc::new(Self { max, used: AtomicU64::new(0) })
    }

    /// Returns the limit in bytes.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Returns the number of bytes in use.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes left below the limit.
    pub fn room(&self) -> u64 {
        self.max.saturating_sub(self.used())
    }

    fn add(&self, bytes: u64) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
    }

    fn sub(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Part of a region that counts toward its meter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counting {
    /// The whole region: its pages are pinned.
    Whole,
    /// The units that peers have written.
    Written,
}

/// Accounting of one region, and the limit for its peers' writes.
#[derive(Debug)]
pub(super) struct RegionUsage {
    meter: Mutex<Arc<MemoryMeter>>,
    /// Length of the region.
    len: usize,
    unit: usize,
    /// One bit for each unit that was written; empty if the whole region counts.
    written: Box<[AtomicU64]>,
    /// Number of units that were written.
    units: AtomicU32,
    /// Maximum number of units that may be written.
    units_max: AtomicU32,
    /// Number of bytes that count.
    bytes: AtomicU64,
}

impl RegionUsage {
    /// Creates the accounting for a region of `len` bytes with buffers that are `stride` apart.
    pub(super) fn new(
        meter: &Arc<MemoryMeter>,
        len: usize,
        stride: usize,
        counting: Counting,
    ) -> Self {
        let unit = unit_of(stride.max(1));
        let (words, bytes) = match counting {
            Counting::Whole => (0, len as u64),
            Counting::Written => (len.div_ceil(unit).div_ceil(64), 0),
        };
        meter.add(bytes);
        Self {
            meter: Mutex::new(Arc::clone(meter)),
            len,
            unit,
            written: (0..words).map(|_| AtomicU64::new(0)).collect(),
            units: AtomicU32::new(0),
            units_max: AtomicU32::new(u32::MAX),
            bytes: AtomicU64::new(bytes),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Counts the region against this meter instead of its previous one.
    pub(super) fn count_for(&self, meter: &Arc<MemoryMeter>) {
        let mut counts = self.meter.lock();
        meter.add(self.bytes());
        counts.sub(self.bytes());
        *counts = Arc::clone(meter);
    }

    /// Sets the number of units that peers may write; `u32::MAX` means any number.
    pub(super) fn limit(&self, units: u32) {
        self.units_max.store(units, Ordering::Release);
    }

    /// Counts a peer's write; must be called before the write. Returns false if the peer is not
    /// allowed to write there.
    pub(super) fn admit(&self, offset: usize, len: usize) -> bool {
        if self.written.is_empty() || len == 0 {
            return true;
        }
        (offset / self.unit..=(offset + len - 1) / self.unit).all(|unit| self.admit_unit(unit))
    }

    fn admit_unit(&self, unit: usize) -> bool {
        let (word, bit) = (&self.written[unit / 64], 1 << (unit % 64));
        if word.load(Ordering::Relaxed) & bit != 0
            || word.fetch_or(bit, Ordering::Relaxed) & bit != 0
        {
            return true;
        }
        if self.units.fetch_add(1, Ordering::Relaxed) >= self.units_max.load(Ordering::Acquire) {
            self.units.fetch_sub(1, Ordering::Relaxed);
            word.fetch_and(!bit, Ordering::Relaxed);
            return false;
        }
        let bytes = self.unit.min(self.len - unit * self.unit) as u64;
        let meter = self.meter.lock();
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        meter.add(bytes);
        true
    }
}

impl Drop for RegionUsage {
    fn drop(&mut self) {
        self.meter.get_mut().sub(*self.bytes.get_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Region;

    #[test]
    fn units_are_buffers_or_groups_of_small_ones() {
        assert_eq!(unit_of(260 << 10), 260 << 10);
        assert_eq!(unit_of(256 << 10), 256 << 10);
        assert_eq!(unit_of(68 << 10), 3 * (68 << 10));
        assert_eq!(unit_of(1 << 24), 1 << 24);
        assert_eq!(unit_of(1), UNIT);
    }

    #[test]
    fn written_units_count_once_until_the_region_is_dropped() {
        let meter = MemoryMeter::new(4 << 20);
        let stride = 260 << 10;
        let make = |counting| Region::metered(stride * 100 - 4096, stride, &meter, counting);
        let region = make(Counting::Written).unwrap();
        let unit = stride as u64;
        assert_eq!((meter.used(), region.counted()), (0, 0));
        for (offset, len, units) in [
            (0, 1, 1),
            (stride - 1, 1, 1),
            (0, 0, 1),
            (70 * stride + 5, 4096, 2),
            (stride - 1, 2, 3),
            (0, stride * 2, 3),
        ] {
            assert!(region.admit_write(offset, len));
            assert_eq!((meter.used(), region.counted()), (units * unit, units * unit));
        }
        assert!(region.admit_write(99 * stride, 1));
        assert_eq!(meter.used(), 4 * unit - 4096, "no gap after the last");
        assert_eq!(meter.room(), (4 << 20) - 4 * unit + 4096);
        let pinned = make(Counting::Whole).unwrap();
        assert!(pinned.admit_write(5, 500));
        assert_eq!(pinned.counted(), pinned.len() as u64);
        assert_eq!(meter.room(), 0);
        drop(pinned);
        drop(region);
        assert_eq!((meter.used(), meter.room()), (0, meter.max()));
    }

    #[test]
    fn a_new_meter_takes_over_all_usage() {
        let (first, second) = (MemoryMeter::new(0), MemoryMeter::new(0));
        let stride = 260 << 10;
        for (counting, counted) in [(Counting::Whole, 4 * stride), (Counting::Written, stride)] {
            let region = Region::metered(stride * 4, stride, &first, counting).unwrap();
            assert!(region.admit_write(0, 1));
            region.count_for(&second);
            assert_eq!((first.used(), second.used()), (0, counted as u64));
            assert!(region.admit_write(0, 4 * stride));
            assert_eq!((first.used(), second.used()), (0, region.len() as u64));
            drop(region);
            assert_eq!((first.used(), second.used()), (0, 0));
        }
    }

    #[test]
    fn a_limit_applies_until_it_is_lifted() {
        let meter = MemoryMeter::new(0);
        let stride = 260 << 10;
        let region = Region::metered(stride * 8, stride, &meter, Counting::Written).unwrap();
        region.limit_writes(2);
        assert!(region.admit_write(0, 4096) && region.admit_write(5 * stride, 1));
        let used = meter.used();
        assert!(!region.admit_write(stride, 1), "a third");
        assert!(!region.admit_write(5 * stride, stride + 1), "reaches into a third");
        assert!(region.admit_write(5 * stride, stride), "one of the two");
        assert_eq!(meter.used(), used, "what is refused does not count");
        region.limit_writes(u32::MAX);
        assert!(region.admit_write(0, stride * 8));
        assert_eq!(meter.used(), region.len() as u64);
    }
}
