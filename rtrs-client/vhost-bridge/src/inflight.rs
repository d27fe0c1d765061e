//! Record of the requests in flight, in memory that outlives the process.
//!
//! The monitor holds the memory and passes it to the next process, which repeats the requests that
//! the record names. The layout is the one that the protocol defines for split rings. The monitor
//! can write to the memory, so every value is checked before use.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rtrs_core::mem::TruncationAlarm;
use rtrs_core::mutated;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vm_memory::{AtomicAccess, Bytes, MemoryRegionAddress};

use crate::fault::Fault;
use crate::memory::{FilePart, GuestRegion};

const VERSION: u16 = 1;

/// Offset of the record's feature word, which the protocol leaves to the device. The first ring's
/// record holds the cache mode there.
const FEATURES_AT: u64 = 0;
const WRITE_THROUGH: u64 = 1;
const VERSION_AT: u64 = 8;
const COUNT_AT: u64 = 10;
const LAST_AT: u64 = 12;
const USED_AT: u64 = 14;
const ENTRIES_AT: u64 = 16;

const ENTRY_LEN: u64 = 16;
/// Offset of the mark of an unreadable request, in a byte that the protocol leaves unused.
const ENTRY_REFUSED: u64 = 1;
const ENTRY_COUNTER: u64 = 8;

/// Memory with the records of all rings.
#[derive(Clone, Debug)]
pub(crate) struct Area {
    memory: Arc<GuestRegion>,
    /// Number of descriptors per ring.
    descriptors: u16,
    rings: u16,
}

/// Size of an area.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AreaSize {
    pub(crate) rings: u16,
    pub(crate) descriptors: u16,
}

impl AreaSize {
    /// Returns the length of a ring's record.
    fn record(self) -> u64 {
        (ENTRIES_AT + ENTRY_LEN * u64::from(self.descriptors)).next_multiple_of(64)
    }

    /// Returns the length of the area.
    pub(crate) fn bytes(self) -> u64 {
        self.record() * u64::from(self.rings)
    }
}

impl Area {
    /// Creates an area and the file that holds it.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn create(size: AreaSize, alarm: &Arc<TruncationAlarm>) -> io::Result<(Self, File)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("rtrs-inflight", flags)?);
        ftruncate(&file, size.bytes())?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self::map(size, &file, 0, alarm)?, file))
    }

    /// Maps the area of an earlier process.
    ///
    /// # Errors
    /// The system's error; `InvalidInput` if the file is shorter than the area.
    pub(crate) fn map(
        size: AreaSize,
        file: &File,
        offset: u64,
        alarm: &Arc<TruncationAlarm>,
    ) -> io::Result<Self> {
        let part = FilePart { file, offset, len: size.bytes() };
        let memory = Arc::new(GuestRegion::map(0, part, alarm)?);
        Ok(Self { memory, descriptors: size.descriptors, rings: size.rings })
    }

    /// Whether the guest turned off its write cache while an earlier process served it.
    pub(crate) fn is_write_through(&self) -> bool {
        let features = self.memory.load(MemoryRegionAddress(FEATURES_AT), Ordering::Acquire);
        features.is_ok_and(|features: u64| features & WRITE_THROUGH != 0)
    }

    /// Notes the cache mode for the next process.
    pub(crate) fn note_write_through(&self, is_write_through: bool) {
        let features = if is_write_through { WRITE_THROUGH } else { 0 };
        let at = MemoryRegionAddress(FEATURES_AT);
        let noted = self.memory.store(features, at, Ordering::Release);
        // An area has at least one record, whose start is aligned.
        debug_assert!(noted.is_ok(), "{noted:?}");
    }

    /// Returns the record of a ring.
    pub(crate) fn record(&self, ring: u16) -> Option<Record> {
        let size = AreaSize { rings: self.rings, descriptors: self.descriptors };
        (ring < self.rings).then(|| Record {
            memory: Arc::clone(&self.memory),
            start: size.record() * u64::from(ring),
            descriptors: self.descriptors,
            counter: 0,
        })
    }
}

/// Requests that an earlier process left in flight.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Left {
    /// Requests to be repeated, oldest first.
    pub(crate) repeated: Vec<u16>,
    /// Requests that could not be read; they remain in flight forever.
    pub(crate) refused: Vec<u16>,
}

/// Record of one ring's requests in flight.
#[derive(Debug)]
pub(crate) struct Record {
    memory: Arc<GuestRegion>,
    start: u64,
    descriptors: u16,
    /// Number of requests taken; gives their order.
    counter: u64,
}

impl Record {
    fn load<T: AtomicAccess>(&self, at: u64) -> Result<T, Fault> {
        let at = MemoryRegionAddress(self.start + at);
        self.memory.load(at, Ordering::Acquire).map_err(|_| Fault::Inflight)
    }

    fn store<T: AtomicAccess>(&self, at: u64, value: T) -> Result<(), Fault> {
        let at = MemoryRegionAddress(self.start + at);
        self.memory.store(value, at, Ordering::Release).map_err(|_| Fault::Inflight)
    }

    fn entry(&self, head: u16) -> Result<u64, Fault> {
        let inside = head < self.descriptors;
        inside.then(|| ENTRIES_AT + ENTRY_LEN * u64::from(head)).ok_or(Fault::Inflight)
    }

    /// Starts recording and returns the requests that an earlier process left in flight, or None if
    /// the record is new. `used` is the ring's index of answers.
    ///
    /// # Errors
    /// [`Fault::Inflight`] if the record does not fit a ring of this size.
    pub(crate) fn begin(&mut self, used: u16, size: u16) -> Result<Option<Left>, Fault> {
        if self.descriptors < size {
            return Err(Fault::Inflight);
        }
        let version: u16 = self.load(VERSION_AT)?;
        if version == 0 {
            self.store(COUNT_AT, self.descriptors)?;
            // Not 0: a ring may resume at any index.
            self.store(USED_AT, if mutated!(VhostFreshAtZero) { 0 } else { used })?;
            self.store(VERSION_AT, VERSION)?;
            return Ok(None);
        }
        if version != VERSION || self.load::<u16>(COUNT_AT)? != self.descriptors {
            return Err(Fault::Inflight);
        }
        if self.load::<u16>(USED_AT)? != used {
            // The process died after answering the last request but before recording that.
            let last = self.load(LAST_AT)?;
            let entry = self.entry(last)?;
            if !mutated!(VhostAnsweredAgain) {
                self.store(entry, 0_u8)?;
            }
            fence(Ordering::SeqCst);
            self.store(USED_AT, used)?;
        }
        self.left(size).map(Some)
    }

    /// Returns the recorded requests. The counter continues after the newest of them.
    fn left(&mut self, size: u16) -> Result<Left, Fault> {
        let (mut left, mut refused) = (Vec::new(), Vec::new());
        for head in 0..self.descriptors {
            let entry = self.entry(head)?;
            if self.load::<u8>(entry)? == 0 {
                continue;
            }
            if head >= size {
                return Err(Fault::Inflight);
            }
            match self.load::<u8>(entry + ENTRY_REFUSED)? {
                0 => left.push((self.load::<u64>(entry + ENTRY_COUNTER)?, head)),
                _ => refused.push(head),
            }
        }
        if !mutated!(VhostRepeatedUnordered) {
            left.sort_unstable();
        }
        self.counter = left.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(Left { repeated: left.into_iter().map(|(_, head)| head).collect(), refused })
    }

    /// Records that a request is in flight.
    ///
    /// # Errors
    /// [`Fault::Inflight`] if the record has no entry for `head`.
    pub(crate) fn take(&mut self, head: u16) -> Result<(), Fault> {
        let entry = self.entry(head)?;
        self.store(entry + ENTRY_REFUSED, 0_u8)?;
        self.store(entry + ENTRY_COUNTER, self.counter)?;
        self.counter = self.counter.wrapping_add(1);
        self.store(entry, 1_u8)
    }

    /// Records that a request in flight cannot be read, so that the next process does not repeat
    /// it. The request stays in flight, because the ring counts it.
    ///
    /// # Errors
    /// See [`Self::take`].
    pub(crate) fn refuse(&self, head: u16) -> Result<(), Fault> {
        self.store(self.entry(head)? + ENTRY_REFUSED, 1_u8)
    }

    /// Records that a request is about to be answered. Must be called before the answer enters the
    /// ring.
    ///
    /// # Errors
    /// See [`Self::take`].
    pub(crate) fn answering(&self, head: u16) -> Result<(), Fault> {
        if !mutated!(VhostLastUnrecorded) {
            self.store(LAST_AT, head)?;
        }
        fence(Ordering::SeqCst);
        Ok(())
    }

    /// Records that a request was answered. `used` is the ring's index of answers after that.
    ///
    /// # Errors
    /// See [`Self::take`].
    pub(crate) fn answered(&self, head: u16, used: u16) -> Result<(), Fault> {
        fence(Ordering::SeqCst);
        self.store(self.entry(head)?, 0_u8)?;
        fence(Ordering::SeqCst);
        self.store(USED_AT, used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: AreaSize = AreaSize { rings: 3, descriptors: 8 };

    fn area() -> (Area, File) {
        Area::create(SIZE, &TruncationAlarm::new().unwrap()).unwrap()
    }

    fn map(file: &File) -> Area {
        Area::map(SIZE, file, 0, &TruncationAlarm::new().unwrap()).unwrap()
    }

    fn repeated(heads: &[u16]) -> Result<Option<Left>, Fault> {
        Ok(Some(Left { repeated: heads.to_vec(), refused: Vec::new() }))
    }

    /// Record of a ring as the next process finds it.
    fn next(file: &File, ring: u16) -> Record {
        map(file).record(ring).unwrap()
    }

    #[test]
    fn requests_without_answer_are_left_in_their_order() {
        let (area, file) = area();
        let mut record = area.record(1).unwrap();
        assert_eq!(record.begin(65_534, 8), Ok(None));
        for head in [5, 0, 3, 7] {
            record.take(head).unwrap();
        }
        record.answering(0).unwrap();
        record.answered(0, 65_535).unwrap();
        record.take(0).unwrap();
        drop((area, record));

        let mut record = next(&file, 1);
        assert_eq!(record.begin(65_535, 8), repeated(&[5, 3, 7, 0]));
        record.take(1).unwrap();
        assert_eq!(next(&file, 1).begin(65_535, 8), repeated(&[5, 3, 7, 0, 1]), "newest last");
        assert_eq!(next(&file, 0).begin(0, 8), Ok(None), "another ring");
        assert!(map(&file).record(3).is_none());
    }

    /// The ring's index of answers shows whether the last answer reached the ring.
    #[test]
    fn a_death_in_the_middle_of_an_answer_repeats_no_answered_request() {
        for (reached_ring, left) in [(false, &[4, 2][..]), (true, &[2])] {
            let (area, file) = area();
            let mut record = area.record(0).unwrap();
            record.begin(10, 8).unwrap();
            record.take(4).unwrap();
            record.take(2).unwrap();
            record.answering(4).unwrap();
            let used = if reached_ring { 11 } else { 10 };
            assert_eq!(next(&file, 0).begin(used, 8), repeated(left), "{reached_ring}");
            assert_eq!(next(&file, 0).begin(used, 8), repeated(left), "again");
        }
    }

    #[test]
    fn a_refused_request_is_counted_and_not_repeated() {
        let (area, file) = area();
        let mut record = area.record(0).unwrap();
        record.begin(0, 8).unwrap();
        for head in [5, 3, 1] {
            record.take(head).unwrap();
        }
        record.refuse(3).unwrap();
        let mut record = next(&file, 0);
        let left = Left { repeated: vec![5, 1], refused: vec![3] };
        assert_eq!(record.begin(0, 8), Ok(Some(left)));
        // The descriptor is reused.
        record.take(3).unwrap();
        assert_eq!(next(&file, 0).begin(0, 8), repeated(&[5, 1, 3]));
        assert_eq!(record.refuse(8), Err(Fault::Inflight));
    }

    #[test]
    fn a_forged_record_is_a_fault() {
        let forge = |at: u64, value: u16| {
            let (area, _file) = area();
            let mut record = area.record(0).unwrap();
            record.begin(0, 8).unwrap();
            record.store(at, value).unwrap();
            record.begin(1, 8)
        };
        assert_eq!(forge(LAST_AT, 7), repeated(&[]));
        for (at, value) in [(VERSION_AT, 2), (COUNT_AT, 9), (COUNT_AT, 0), (LAST_AT, 8)] {
            assert_eq!(forge(at, value), Err(Fault::Inflight), "{at} {value}");
        }
        let (area, _file) = area();
        let mut record = area.record(0).unwrap();
        assert_eq!(record.begin(0, 16), Err(Fault::Inflight), "a larger ring");
        assert_eq!(record.begin(0, 4), Ok(None));
        record.take(6).unwrap();
        assert_eq!(record.begin(0, 4), Err(Fault::Inflight), "a smaller ring");
        assert_eq!(record.take(8), Err(Fault::Inflight));
    }
}
