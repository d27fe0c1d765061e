//! Migration of a guest for tests: the dirty log, and the copy of the guest's memory.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use rtrs_core::mem::TruncationAlarm;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::VhostUserVirtioFeatures;
use vhost::{VhostBackend, VhostUserDirtyLogRegion};
use vm_memory::{GuestMemoryRegion, MemoryRegionAddress, VolatileMemory};

use super::{GUEST_AT, Guest, GuestRing, MEMORY_LEN, PAGE};
use crate::memory::{FilePart, GuestRegion};

/// Number of pages below the end of the guest's memory.
const PAGES: u64 = (GUEST_AT + MEMORY_LEN) / PAGE;

/// Dirty log that a monitor shares with the device.
#[derive(Debug)]
pub struct GuestLog {
    file: File,
    bitmap: GuestRegion,
}

impl Default for GuestLog {
    /// Makes a log that covers the guest's memory.
    fn default() -> Self {
        Self::of(PAGES / 8)
    }
}

impl GuestLog {
    /// Makes a log of this many bytes.
    pub fn of(len: u64) -> Self {
        let file = File::from(memfd_create("log", MemfdFlags::CLOEXEC).expect("a memfd"));
        ftruncate(&file, len).expect("memory");
        let alarm = TruncationAlarm::new().expect("an alarm");
        let part = FilePart { file: &file, offset: 0, len };
        let bitmap = GuestRegion::map(0, part, &alarm).expect("a mapping");
        Self { file, bitmap }
    }

    /// Returns the log as messages describe it, with this length.
    pub fn region(&self, len: u64) -> VhostUserDirtyLogRegion {
        let mmap_handle = self.file.as_raw_fd();
        VhostUserDirtyLogRegion { mmap_size: len, mmap_offset: 0, mmap_handle }
    }

    /// File that holds the log.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Takes the marked pages of the guest's memory, by number.
    ///
    /// # Panics
    /// If a page that the guest does not have is marked.
    pub fn take(&self) -> BTreeSet<u64> {
        let mut pages = BTreeSet::new();
        let slice = self.bitmap.get_slice(MemoryRegionAddress(0), self.bitmap.len() as usize);
        let slice = slice.expect("the bitmap");
        for at in (0..self.bitmap.len() as usize).step_by(8) {
            let word = slice.get_atomic_ref::<AtomicU64>(at).expect("an aligned word");
            let word = word.swap(0, Ordering::SeqCst).to_le();
            let bits = (0..64).filter(|bit| word >> bit & 1 != 0);
            pages.extend(bits.map(|bit| at as u64 * 8 + bit));
        }
        let first = GUEST_AT / PAGE;
        assert!(pages.iter().all(|page| *page >= first), "a page below the guest's memory");
        pages.into_iter().map(|page| page - first).collect()
    }

    /// Whether the page that holds this byte of the guest's memory is marked.
    pub fn has(&self, at: u64) -> bool {
        let page = (GUEST_AT + at) / PAGE;
        let byte = MemoryRegionAddress(page / 8);
        let slice = self.bitmap.get_slice(byte, 1).expect("a byte of the bitmap");
        let mut bits = [0_u8];
        slice.copy_to(&mut bits);
        bits[0] >> (page % 8) & 1 != 0
    }
}

impl Guest {
    /// Begins to log the writes of the device, in the order in which monitors do so.
    pub fn start_log(&mut self, log: &GuestLog, rings: &[GuestRing]) {
        let region = log.region(PAGES / 8);
        self.monitor().set_log_base(0, Some(region)).expect("the log");
        self.set_logging(true);
        rings.iter().for_each(|ring| ring.set_addresses(self.monitor(), true));
    }

    /// Stops a ring, which continues where the device has stopped.
    pub fn stop(&mut self, ring: &mut GuestRing) {
        let base = self.monitor().get_vring_base(ring.index.into()).expect("a stopped ring");
        ring.base = Some(u16::try_from(base).expect("an index"));
    }

    /// Ends the log of a migration that was cancelled.
    pub fn stop_log(&mut self, rings: &[GuestRing]) {
        self.set_logging(false);
        rings.iter().for_each(|ring| ring.set_addresses(self.monitor(), false));
    }

    /// Sets whether the driver's features include the log.
    pub fn set_logging(&mut self, is_logging: bool) {
        self.try_features(is_logging).expect("features");
    }

    /// Begins to log writes, whether or not the device accepts that.
    ///
    /// # Errors
    /// An error if the device has cut the connection.
    pub fn try_logging(&mut self) -> vhost::Result<()> {
        self.try_features(true)
    }

    fn try_features(&mut self, is_logging: bool) -> vhost::Result<()> {
        let log = if is_logging { VhostUserVirtioFeatures::LOG_ALL.bits() } else { 0 };
        let features = self.features | log;
        self.monitor().set_features(features)
    }

    /// Logs writes to a used ring at this address of the log.
    ///
    /// # Errors
    /// An error if the device has cut the connection.
    pub fn try_used_log(&mut self, ring: &GuestRing, address: u64) -> vhost::Result<()> {
        ring.try_addresses(self.monitor(), Some(address))
    }

    /// Takes the pages that the guest itself has written, by number.
    pub fn take_written(&self) -> BTreeSet<u64> {
        std::mem::take(&mut self.written.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Copies pages of this guest's memory to another guest.
    pub fn copy_pages(&self, to: &Self, pages: &BTreeSet<u64>) {
        pages.iter().for_each(|page| to.write(page * PAGE, &self.read(page * PAGE, PAGE as usize)));
    }

    /// Returns the numbers of the pages that differ from those of another guest.
    pub fn different_pages(&self, other: &Self) -> Vec<u64> {
        let [one, other] = [self, other].map(|guest| guest.read(0, MEMORY_LEN as usize));
        let pages = one.chunks(PAGE as usize).zip(other.chunks(PAGE as usize));
        (0..).zip(pages).filter(|(_, (one, other))| one != other).map(|(page, _)| page).collect()
    }
}

impl GuestRing {
    /// Returns the ring of the guest on its new host.
    pub fn moved(&self) -> Self {
        let Self { index, size, next, seen, base, .. } = *self;
        Self { seen, base, ..Self::new(index, size, next) }
    }
}
