//! Memory of a guest: regions of files that the monitor shares, by guest address.
//!
//! The regions are those of `rtrs-core`, which stay mapped until the last request that names them
//! has ended. Rings access them through the traits of `vm-memory`, which performs the atomic
//! accesses.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};

use rtrs_core::mem::{MemSlice, Region, TruncationAlarm};
use vm_memory::guest_memory::Error;
use vm_memory::{
    Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestMemoryRegionBytes,
    GuestRegionCollection, MemoryRegionAddress, VolatileSlice,
};

use crate::fault::Fault;

/// Maximum number of regions of a guest.
pub(crate) const REGIONS_MAX: usize = 512;

/// Maximum total length of the regions that a front end maps: enough for two tables of a guest with
/// 8 TiB, because a new table comes before the last request that uses the earlier one has ended.
/// More would use up the address space, which all volumes of the process share.
pub(crate) const MAPPED_MAX: u64 = 16 << 40;

/// Maximum number of regions that a front end maps.
const MAPPED_COUNT_MAX: usize = 2 * REGIONS_MAX;

/// Type of the file system of huge pages, in `statfs` (linux/magic.h).
const HUGETLBFS_MAGIC: rustix::fs::FsWord = 0x9584_58f6;

/// Maximum number of pieces of memory that a request may have to read or to write: a descriptor has
/// one piece for each region that it spans.
const PIECES_MAX: usize = 2048;

/// Memory of a guest, sorted by address.
pub(crate) type GuestMemory = GuestRegionCollection<GuestRegion>;

/// Part of a file, mapped at a guest address.
#[derive(Debug)]
pub(crate) struct GuestRegion {
    start: GuestAddress,
    len: u64,
    memory: Arc<Region>,
}

/// Part of a file that a monitor shares.
#[derive(Clone, Copy)]
pub(crate) struct FilePart<'a> {
    pub(crate) file: &'a File,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl GuestRegion {
    /// Maps a part of a file. Truncation of the file sets the alarm.
    ///
    /// # Errors
    /// The system's error; `InvalidInput` for a part beyond the end of the file.
    pub(crate) fn map(
        start: u64,
        part: FilePart<'_>,
        alarm: &Arc<TruncationAlarm>,
    ) -> io::Result<Self> {
        let FilePart { file, offset, len } = part;
        let bad = |text| io::Error::new(io::ErrorKind::InvalidInput, text);
        let end =
            offset.checked_add(len).ok_or_else(|| bad("a region beyond the address space"))?;
        let found = file.metadata()?;
        if !found.is_file() || found.len() < end {
            return Err(bad("a region beyond the end of its file"));
        }
        // The kernel maps and unmaps whole huge pages, whatever the length.
        let system = rustix::fs::fstatfs(file)?;
        let page = u64::try_from(system.f_bsize).map_err(io::Error::other)?.max(1);
        let is_whole = offset.is_multiple_of(page) && len.is_multiple_of(page);
        if system.f_type == HUGETLBFS_MAGIC && !is_whole {
            return Err(bad(
                "a region of huge pages whose offset or size is not a multiple of the page size",
            ));
        }
        let length = usize::try_from(len).map_err(io::Error::other)?;
        let memory = Region::watched(file.as_fd(), offset, length, alarm)?;
        Ok(Self { start: GuestAddress(start), len, memory })
    }

    /// Returns the guest address of a piece of memory, if the piece is in this region.
    pub(crate) fn address_of(&self, piece: &MemSlice) -> Option<u64> {
        let offset = u64::try_from(piece.offset()).ok()?;
        let is_here = Arc::ptr_eq(&self.memory, piece.region());
        is_here.then(|| self.start.raw_value().saturating_add(offset))
    }
}

/// Regions that a front end has mapped for its monitors. A region counts until the last request
/// that names it has ended.
#[derive(Debug, Default)]
pub(crate) struct MappedRegions(Vec<Weak<Region>>);

impl MappedRegions {
    /// Maps a region.
    ///
    /// # Errors
    /// See [`GuestRegion::map`]; `OutOfMemory` if the front end maps too much.
    pub(crate) fn map(
        &mut self,
        start: u64,
        part: FilePart<'_>,
        alarm: &Arc<TruncationAlarm>,
    ) -> io::Result<GuestRegion> {
        self.0.retain(|region| region.strong_count() > 0);
        let lengths = self.0.iter().filter_map(Weak::upgrade).map(|region| region.len() as u64);
        let mapped = lengths.fold(part.len, u64::saturating_add);
        if mapped > MAPPED_MAX || self.0.len() >= MAPPED_COUNT_MAX {
            let text = "more than 16 TiB or 1024 regions of memory are mapped for the front end";
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, text));
        }
        let region = GuestRegion::map(start, part, alarm)?;
        self.0.push(Arc::downgrade(&region.memory));
        Ok(region)
    }
}

impl GuestMemoryRegion for GuestRegion {
    type B = ();

    fn len(&self) -> u64 {
        self.len
    }

    fn start_addr(&self) -> GuestAddress {
        self.start
    }

    fn bitmap(&self) {}

    #[allow(unsafe_code)]
    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> Result<VolatileSlice<'_>, Error> {
        let wrong = || Error::InvalidBackendAddress;
        #[cfg(all(any(test, feature = "test-util"), debug_assertions))]
        if !crate::accesses::may_access() {
            return Err(wrong());
        }
        let at = usize::try_from(offset.raw_value()).map_err(|_| wrong())?;
        let end = at.checked_add(count).ok_or_else(wrong)?;
        if u64::try_from(end).map_err(|_| wrong())? > self.len {
            return Err(wrong());
        }
        let address = self.memory.address(at);
        // SAFETY: the range is inside the region, which the borrow of `self` keeps mapped. All code
        // accesses the memory of a region by copies and without references.
        Ok(unsafe { VolatileSlice::new(address, count) })
    }
}

impl GuestMemoryRegionBytes for GuestRegion {}

/// Appends the memory of a guest range, one piece per region.
///
/// # Errors
/// A fault if the range is not memory of the guest.
pub(crate) fn add_pieces(
    memory: &GuestMemory,
    start: GuestAddress,
    len: u32,
    pieces: &mut Vec<MemSlice>,
) -> Result<(), Fault> {
    let (mut at, mut left) = (start, u64::from(len));
    let outside = Fault::Address(start.raw_value());
    while left > 0 {
        if pieces.len() == PIECES_MAX {
            return Err(Fault::TooLong);
        }
        let region = memory.find_region(at).ok_or(outside)?;
        let offset = at.raw_value() - region.start.raw_value();
        let count = left.min(region.len - offset);
        let slice = match (usize::try_from(offset), usize::try_from(count)) {
            (Ok(offset), Ok(count)) => region.memory.slice(offset, count),
            _ => None,
        };
        pieces.push(slice.ok_or(outside)?);
        left -= count;
        at = match at.checked_add(count) {
            Some(next) => next,
            None if left == 0 => at,
            None => return Err(outside),
        };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use rtrs_core::mem::{RegionShare, survive_truncations};
    use vm_memory::Bytes;

    use super::*;

    fn file(len: u64) -> File {
        let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, len).unwrap();
        File::from(fd)
    }

    fn map(start: u64, file: &File, offset: u64, len: u64) -> io::Result<GuestRegion> {
        GuestRegion::map(start, FilePart { file, offset, len }, &TruncationAlarm::new()?)
    }

    #[test]
    fn a_range_is_split_at_its_regions() {
        let file = file(0x4000);
        let region = |start, offset| map(start, &file, offset, 0x1000).unwrap();
        let memory = GuestMemory::from_regions(vec![
            region(0, 0x1000),
            region(0x1000, 0),
            region(0x3000, 0),
        ])
        .unwrap();
        let mut pieces = Vec::new();
        add_pieces(&memory, GuestAddress(0xff0), 0x20, &mut pieces).unwrap();
        let lens: Vec<_> = pieces.iter().map(|piece| (piece.offset(), piece.len())).collect();
        assert_eq!(lens, [(0xff0, 0x10), (0, 0x10)]);
        memory.write_slice(&[7; 0x20], GuestAddress(0xff0)).unwrap();
        assert_eq!(pieces[1].to_vec(), [7; 0x10]);
        memory.store(0x0102_u16, GuestAddress(0xffe), Ordering::Release).unwrap();
        assert_eq!(pieces[0].to_vec()[14..], [2, 1]);
        for (start, len) in [(0x1fff, 2), (0x2000, 1), (0x4000, 1), (u64::MAX, 2)] {
            let fault = add_pieces(&memory, GuestAddress(start), len, &mut pieces).unwrap_err();
            assert_eq!(fault, Fault::Address(start));
        }
    }

    #[test]
    fn a_request_in_too_many_regions_is_refused() {
        let file = file(0x1000);
        let region = |at: u64| map(at * 0x1000, &file, 0, 0x1000).unwrap();
        let memory = GuestMemory::from_regions((0..300).map(region).collect()).unwrap();
        let mut pieces = Vec::new();
        for _ in 0..6 {
            add_pieces(&memory, GuestAddress(0), 300 * 0x1000, &mut pieces).unwrap();
        }
        let fault = add_pieces(&memory, GuestAddress(0), 300 * 0x1000, &mut pieces);
        assert_eq!((fault, pieces.len()), (Err(Fault::TooLong), PIECES_MAX));
    }

    #[test]
    fn mapped_regions_are_limited_until_their_last_use() {
        let alarm = TruncationAlarm::new().unwrap();
        let mut regions = MappedRegions::default();
        let mut map = |file: &File, len| regions.map(0, FilePart { file, offset: 0, len }, &alarm);
        let huge = file(MAPPED_MAX);
        let first = map(&huge, MAPPED_MAX - 4096).unwrap();
        let last = map(&huge, 4096).unwrap();
        let slice = last.memory.slice(0, 1).unwrap();
        drop(last);
        let refused = map(&huge, 4096).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::OutOfMemory, "a request uses the region");
        drop(slice);
        map(&huge, 4096).unwrap();
        drop(first);
        let small = file(4096);
        let many: Vec<_> = (0..MAPPED_COUNT_MAX).map(|_| map(&small, 4096)).collect();
        assert!(many.iter().all(Result::is_ok));
        assert!(map(&small, 4096).is_err());
    }

    #[test]
    fn huge_pages_are_mapped_as_a_whole() {
        use rustix::fs::MemfdFlags;
        const HUGE: u64 = 2 << 20;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let Ok(file) = rustix::fs::memfd_create("huge", flags).map(File::from) else {
            eprintln!("SKIPPED: the kernel has no huge pages of 2 MiB");
            return;
        };
        rustix::fs::ftruncate(&file, 4 * HUGE).unwrap();
        // Refused whether or not there are free pages.
        for (offset, len) in [(0, 4096), (4096, HUGE), (HUGE, HUGE + 4096), (HUGE / 2, HUGE)] {
            let error = map(0, &file, offset, len).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{offset} {len}");
            assert!(error.to_string().contains("huge pages"), "{error}");
        }
        let free =
            std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
        let free: u64 = free.ok().and_then(|count| count.trim().parse().ok()).unwrap_or(0);
        if free < 2 {
            eprintln!("SKIPPED: {free} huge pages are free; set vm.nr_hugepages to 2 or more");
            return;
        }
        survive_truncations().unwrap();
        let alarm = TruncationAlarm::new().unwrap();
        let part = FilePart { file: &file, offset: HUGE, len: 2 * HUGE };
        let region = GuestRegion::map(0, part, &alarm).unwrap();
        let at = |offset| MemoryRegionAddress(offset);
        region.store(7_u8, at(HUGE), Ordering::Release).unwrap();
        // The handler replaces huge pages too.
        rustix::fs::ftruncate(&file, HUGE).unwrap();
        assert_eq!(region.load::<u8>(at(HUGE + 4096), Ordering::Acquire).unwrap(), 0);
        assert!(alarm.is_set());
    }

    /// Takes regions from all front ends of the process, so it runs in a process of its own.
    #[test]
    fn front_ends_keep_their_share_of_the_regions() {
        const CHILD: &str = "RTRS_TEST_SHARE_CHILD";
        if std::env::var_os(CHILD).is_none() {
            let mut command = std::process::Command::new(std::env::current_exe().unwrap());
            let name = "memory::tests::front_ends_keep_their_share_of_the_regions";
            let status = command.args(["--exact", name, "--nocapture"]).env(CHILD, "1").status();
            return assert!(status.unwrap().success());
        }
        let shares = [0; 2].map(|_| RegionShare::new());
        let [greedy, modest] = shares.map(|share| TruncationAlarm::of(share).unwrap());
        let file = file(4096);
        let part = FilePart { file: &file, offset: 0, len: 4096 };
        let mut taken = Vec::new();
        let refused = loop {
            match GuestRegion::map(0, part, &greedy) {
                Ok(region) => taken.push(region),
                Err(error) => break error,
            }
        };
        assert_eq!(refused.kind(), io::ErrorKind::OutOfMemory);
        assert!(refused.to_string().contains("use fewer and larger regions"), "{refused}");
        assert!(taken.len() > 4096, "{}", taken.len());
        let own: Vec<_> = (0..64).map(|_| GuestRegion::map(0, part, &modest).unwrap()).collect();
        drop((own, taken));
    }

    #[test]
    fn a_region_lies_in_its_file() {
        let file = file(0x2000);
        for (offset, len) in [(0x1000, 0x1001), (0x2000, 1), (u64::MAX, 2), (0, 0), (1, 0x1000)] {
            assert!(map(0, &file, offset, len).is_err(), "{offset} {len}");
        }
        let null = File::open("/dev/null").unwrap();
        assert!(map(0, &null, 0, 1).is_err());
    }
}
