//! Page-aligned regions of memory that the kernel and remote peers may write at any time.
//!
//! A [`Region`] is mapped once and unmapped when its last owner is dropped. No Rust reference into
//! it exists while there is any other holder of the region: bytes are copied in and out through raw
//! pointers, because a peer or the kernel may change them at any time. Code that validates bytes
//! copies them out first. [`MemSlice`] names a part of a region and keeps the region alive; an
//! operation in flight owns its slices until its completion, so memory in use by the kernel is
//! never unmapped. [`IoVecs`] is the reusable vector form that `sendmsg` and `recvmsg` take.

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::usage::{Counting, MemoryMeter, RegionUsage};

/// Number of bytes copied at a time for a checksum: they stay in the L1 cache.
const CRC_PIECE: usize = 8 << 10;

/// 64 bits never wrap, although peers can cause more than 2^32 regions: a process cannot map 2^64
/// regions.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Numbers the next region from `id`, unless the numbers are already higher.
#[cfg(any(test, feature = "test-util"))]
pub fn skip_ids_to(id: u64) {
    NEXT_ID.fetch_max(id, Ordering::Relaxed);
}

/// Page-aligned anonymous memory of fixed length.
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    stride: usize,
    id: u64,
    usage: Option<Box<RegionUsage>>,
}

// SAFETY: a Region is a plain mapping; all access uses raw copies that tolerate concurrent changes
// (no references into the mapping are created).
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `len` bytes (rounded up to whole pages) of zeroed memory. Pages are backed by real
    /// memory when first touched.
    ///
    /// # Errors
    /// The system's error if the mapping is refused; `InvalidInput` for a length of zero.
    pub fn new(len: usize) -> io::Result<Arc<Self>> {
        Self::with_stride(len, 0)
    }

    /// Maps memory for buffers, none of which crosses a multiple of `stride`.
    ///
    /// # Errors
    /// See [`Region::new`].
    pub fn with_stride(len: usize, stride: usize) -> io::Result<Arc<Self>> {
        Self::map(len, stride).map(Arc::new)
    }

    /// Maps memory that counts against a limit, for buffers that lie `stride` apart.
    ///
    /// # Errors
    /// See [`Region::new`].
    pub fn metered(
        len: usize,
        stride: usize,
        meter: &Arc<MemoryMeter>,
        counting: Counting,
    ) -> io::Result<Arc<Self>> {
        let mut region = Self::map(len, stride)?;
        region.usage = Some(Box::new(RegionUsage::new(meter, region.len, stride, counting)));
        Ok(Arc::new(region))
    }

    fn map(len: usize, stride: usize) -> io::Result<Self> {
        if len == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a region of zero bytes"));
        }
        let len = len
            .checked_next_multiple_of(4096)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "region too large"))?;
        // SAFETY: an anonymous private mapping at an address chosen by the kernel overlaps no
        // existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| io::Error::other("mmap returned a null address"))?;
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Ok(Self { base, len, stride, id, usage: None })
    }

    /// Returns the number of bytes that count against the limit of [`Region::metered`]; 0 without a
    /// limit.
    pub fn counted(&self) -> u64 {
        self.usage.as_ref().map_or(0, |usage| usage.bytes())
    }

    /// Counts the region against this limit instead of the previous one. Does nothing if it counts
    /// against none.
    pub fn count_for(&self, meter: &Arc<MemoryMeter>) {
        self.usage.iter().for_each(|usage| usage.count_for(meter));
    }

    /// Sets the total number of units that peers may write, including those already written: a unit
    /// is a buffer, or as many small ones as fit in 256 KiB. `u32::MAX` means any number. Does
    /// nothing unless written units are counted.
    pub fn limit_writes(&self, units: u32) {
        self.usage.iter().for_each(|usage| usage.limit(units));
    }

    /// Must be called before placing a peer's bytes in memory that counts once written. Returns
    /// false if the peer may not write there.
    pub fn admit_write(&self, offset: usize, len: usize) -> bool {
        self.usage.as_ref().is_none_or(|usage| usage.admit(offset, len))
    }

    /// Returns the length in bytes, a multiple of the page size.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns a number of which no buffer of this region crosses a multiple; 0 if unknown.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Always returns false: a region has at least one page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the number of this region, unique within the process.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the slice `offset..offset + len` of this region. None if it does not lie inside.
    pub fn slice(self: &Arc<Self>, offset: usize, len: usize) -> Option<MemSlice> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        Some(MemSlice { region: Arc::clone(self), offset, len })
    }

    /// Returns the whole region as a slice.
    pub fn whole(self: &Arc<Self>) -> MemSlice {
        MemSlice { region: Arc::clone(self), offset: 0, len: self.len }
    }

    /// Copies bytes out of the region, starting at `offset`. Panics if the range exceeds the
    /// region: callers must first check lengths that come from a peer.
    pub fn copy_out(&self, offset: usize, to: &mut [u8]) {
        assert!(offset <= self.len && to.len() <= self.len - offset, "copy outside the region");
        // SAFETY: the range was just checked; `to` cannot overlap the mapping because no reference
        // into the mapping exists. Concurrent writers only change the copied values.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.base.as_ptr().add(offset),
                to.as_mut_ptr(),
                to.len(),
            );
        }
    }

    /// Copies bytes into the region at `offset`. Panics if the range exceeds the region.
    pub fn copy_in(&self, offset: usize, from: &[u8]) {
        assert!(offset <= self.len && from.len() <= self.len - offset, "copy outside the region");
        // SAFETY: as in `copy_out`, in the other direction.
        unsafe {
            std::ptr::copy_nonoverlapping(
                from.as_ptr(),
                self.base.as_ptr().add(offset),
                from.len(),
            );
        }
    }

    /// Copies `len` bytes from another (or this) region. Panics if either range exceeds its region.
    pub fn copy_from(&self, offset: usize, from: &Self, from_offset: usize, len: usize) {
        assert!(offset <= self.len && len <= self.len - offset, "copy outside the region");
        assert!(
            from_offset <= from.len && len <= from.len - from_offset,
            "copy outside the source"
        );
        // SAFETY: both ranges were checked; `copy` allows them to overlap.
        unsafe {
            std::ptr::copy(
                from.base.as_ptr().add(from_offset),
                self.base.as_ptr().add(offset),
                len,
            );
        }
    }

    /// Returns all bytes, for work in place. The exclusive borrow, from `Arc::get_mut`, proves that
    /// there is no slice and therefore no kernel operation; a registration for peers also holds the
    /// region.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has this length and is initialized (with zeroes at first). The kernel
        // and devices write only for operations and registrations, which hold the region, and the
        // caller is its only holder.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    /// Fills a range with one byte. Panics if the range exceeds the region.
    pub fn fill(&self, offset: usize, len: usize, byte: u8) {
        assert!(offset <= self.len && len <= self.len - offset, "fill outside the region");
        // SAFETY: the range was just checked.
        unsafe { std::ptr::write_bytes(self.base.as_ptr().add(offset), byte, len) }
    }

    /// Continues a CRC32C over a range of the region. Panics if the range exceeds the region.
    pub fn crc32c(&self, seed: u32, offset: usize, len: usize) -> u32 {
        assert!(offset <= self.len && len <= self.len - offset, "crc outside the region");
        // Compute the checksum of a copy, since the bytes may change concurrently. The copy stays
        // in the cache.
        let mut piece = [MaybeUninit::<u8>::uninit(); CRC_PIECE];
        let (mut sum, mut at) = (seed, offset);
        while at < offset + len {
            let count = (offset + len - at).min(CRC_PIECE);
            // SAFETY: the range was just checked and is mapped; `piece` does not overlap the region
            // and has room, and the copy initializes that many bytes.
            let bytes = unsafe {
                let from = self.base.as_ptr().add(at);
                std::ptr::copy_nonoverlapping(from, piece.as_mut_ptr().cast::<u8>(), count);
                std::slice::from_raw_parts(piece.as_ptr().cast::<u8>(), count)
            };
            sum = super::crc::crc32c_append(sum, bytes);
            at += count;
        }
        sum
    }

    /// Returns the address of the byte at `offset`, for the kernel and for RDMA devices.
    pub fn address(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len, "address outside the region");
        // SAFETY: the offset was just checked; one past the end is allowed by `add`.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: this region owns the mapping, and no slice or operation holds it anymore.
        unsafe {
            libc::munmap(self.base.as_ptr().cast(), self.len);
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("id", &self.id).field("len", &self.len).finish()
    }
}

/// Part of a [`Region`], which it keeps alive. Cloning only increments an atomic counter.
#[derive(Clone)]
pub struct MemSlice {
    region: Arc<Region>,
    offset: usize,
    len: usize,
}

impl MemSlice {
    /// Returns the region of this slice.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the offset of the first byte in the region.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the slice has zero bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the part `from..from + len` of this slice. None if it does not lie inside.
    pub fn slice(&self, from: usize, len: usize) -> Option<Self> {
        if from.checked_add(len)? > self.len {
            return None;
        }
        Some(Self { region: Arc::clone(&self.region), offset: self.offset + from, len })
    }

    /// Copies bytes out, starting `from` bytes into the slice. Panics outside the slice.
    pub fn copy_out(&self, from: usize, to: &mut [u8]) {
        assert!(from <= self.len && to.len() <= self.len - from, "copy outside the slice");
        self.region.copy_out(self.offset + from, to);
    }

    /// Copies bytes in, starting `at` bytes into the slice. Panics outside the slice.
    pub fn copy_in(&self, at: usize, from: &[u8]) {
        assert!(at <= self.len && from.len() <= self.len - at, "copy outside the slice");
        self.region.copy_in(self.offset + at, from);
    }

    /// Copies from another slice of the same length. Panics if the lengths differ.
    pub fn copy_from(&self, from: &Self) {
        assert_eq!(self.len, from.len, "slices of different length");
        self.region.copy_from(self.offset, &from.region, from.offset, self.len);
    }

    /// Fills the slice with one byte.
    pub fn fill(&self, byte: u8) {
        self.region.fill(self.offset, self.len, byte);
    }

    /// Continues a CRC32C over the slice.
    pub fn crc32c(&self, seed: u32) -> u32 {
        self.region.crc32c(seed, self.offset, self.len)
    }

    /// Returns a copy of the bytes, for tests and for rare control messages.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_out(0, &mut bytes);
        bytes
    }

    /// Returns the address of the first byte, for the kernel and for RDMA devices.
    pub fn address(&self) -> *mut u8 {
        self.region.address(self.offset)
    }
}

impl fmt::Debug for MemSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemSlice({}:{}+{})", self.region.id, self.offset, self.len)
    }
}

/// Reusable list of slices in the form that `sendmsg` and `recvmsg` take.
///
/// Its users box it and move it into the operation; the completion returns it.
pub struct IoVecs {
    slices: Vec<MemSlice>,
    raw: Vec<libc::iovec>,
    header: libc::msghdr,
    first: usize,
}

// SAFETY: the raw pointers refer to regions that `slices` keeps alive; regions are Send.
unsafe impl Send for IoVecs {}

impl IoVecs {
    /// Creates an empty list with room for `capacity` slices; it never grows beyond that.
    pub fn new(capacity: usize) -> Box<Self> {
        // SAFETY: msghdr is plain data, for which all zeroes is the empty header.
        let header: libc::msghdr = unsafe { std::mem::zeroed() };
        Box::new(Self {
            slices: Vec::with_capacity(capacity),
            raw: Vec::with_capacity(capacity),
            header,
            first: 0,
        })
    }

    /// Drops all slices and keeps the allocation.
    pub fn clear(&mut self) {
        self.slices.clear();
        self.raw.clear();
        self.first = 0;
    }

    /// Returns how many more slices fit.
    pub fn room(&self) -> usize {
        self.slices.capacity() - self.slices.len()
    }

    /// Appends a slice. Empty slices are ignored, and a slice that continues the previous one in
    /// memory extends it. Panics if there is no room.
    pub fn push(&mut self, slice: MemSlice) {
        if slice.is_empty() {
            return;
        }
        if let (Some(last), Some(raw)) = (self.slices.last_mut(), self.raw.last_mut())
            && last.region.id == slice.region.id
            && last.offset + last.len == slice.offset
        {
            last.len += slice.len;
            raw.iov_len += slice.len;
            return;
        }
        assert!(self.room() > 0, "no room in the vector list");
        self.raw.push(libc::iovec { iov_base: slice.address().cast(), iov_len: slice.len });
        self.slices.push(slice);
    }

    /// Returns the number of bytes not yet skipped by [`IoVecs::advance`].
    pub fn remaining(&self) -> usize {
        self.raw[self.first..].iter().map(|v| v.iov_len).sum()
    }

    /// Returns true if no bytes remain.
    pub fn is_empty(&self) -> bool {
        self.first == self.raw.len()
    }

    /// Fills the slices in order, as a receive would; returns the number of bytes that fit. For
    /// machines driven without a socket, before any `advance`.
    pub fn fill_from(&self, bytes: &[u8]) -> usize {
        let mut at = 0;
        for slice in &self.slices {
            let take = slice.len.min(bytes.len() - at);
            slice.copy_in(0, &bytes[at..at + take]);
            at += take;
        }
        at
    }

    /// Appends a copy of all bytes to `into`, as a send would take them; the counterpart of
    /// `fill_from`.
    pub fn gather(&self, into: &mut Vec<u8>) {
        for slice in &self.slices {
            let at = into.len();
            into.resize(at + slice.len, 0);
            slice.copy_out(0, &mut into[at..]);
        }
    }

    /// Copies remaining bytes into `to`, as many as fit, and skips them. Returns their number.
    pub fn take_into(&mut self, to: &mut [u8]) -> usize {
        let mut at = 0;
        while at < to.len() && self.first < self.raw.len() {
            let (slice, left) = (&self.slices[self.first], self.raw[self.first].iov_len);
            let take = left.min(to.len() - at);
            slice.copy_out(slice.len - left, &mut to[at..at + take]);
            at += take;
            self.advance(take);
        }
        at
    }

    /// Skips `count` bytes that were sent or received. Panics past the end.
    pub fn advance(&mut self, mut count: usize) {
        while count > 0 {
            let raw = &mut self.raw[self.first];
            if count < raw.iov_len {
                raw.iov_base = raw.iov_base.cast::<u8>().wrapping_add(count).cast();
                raw.iov_len -= count;
                return;
            }
            count -= raw.iov_len;
            raw.iov_len = 0;
            self.first += 1;
        }
    }

    /// Returns the message header for the remaining bytes; valid until the box is moved from or
    /// changed.
    pub fn header(&mut self) -> *mut libc::msghdr {
        self.header.msg_iov = self.raw[self.first..].as_mut_ptr();
        self.header.msg_iovlen = self.raw.len() - self.first;
        &raw mut self.header
    }
}

impl fmt::Debug for IoVecs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.slices[self.first.min(self.slices.len())..]).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{IoVecs, Region};

    #[test]
    fn slices_stay_within_their_region() {
        let region = Region::new(5000).unwrap();
        assert_eq!(region.len(), 8192);
        assert!(region.slice(8192, 0).is_some());
        assert!(region.slice(8192, 1).is_none());
        assert!(region.slice(usize::MAX, 2).is_none());
        let slice = region.slice(100, 10).unwrap();
        assert!(slice.slice(5, 6).is_none());
        slice.copy_in(0, b"0123456789");
        assert_eq!(slice.slice(5, 5).unwrap().to_vec(), b"56789");
        assert_eq!(slice.crc32c(0), crc32c::crc32c(b"0123456789"));
    }

    #[test]
    fn vectors_merge_and_advance() {
        let region = Region::new(4096).unwrap();
        let mut vecs = IoVecs::new(2);
        vecs.push(region.slice(0, 10).unwrap());
        vecs.push(region.slice(10, 10).unwrap());
        vecs.push(region.slice(100, 5).unwrap());
        assert_eq!((vecs.room(), vecs.remaining()), (0, 25));
        vecs.advance(19);
        assert_eq!(vecs.remaining(), 6);
        vecs.advance(1);
        assert_eq!(vecs.remaining(), 5);
        vecs.advance(5);
        assert!(vecs.is_empty());
    }

    #[test]
    fn vectors_are_consumed_in_parts() {
        let region = Region::new(4096).unwrap();
        region.copy_in(0, b"0123456789");
        let mut vecs = IoVecs::new(2);
        vecs.push(region.slice(0, 3).unwrap());
        vecs.push(region.slice(5, 5).unwrap());
        let mut part = [0; 4];
        assert_eq!((vecs.take_into(&mut part), &part), (4, b"0125"));
        assert_eq!((vecs.take_into(&mut part), &part), (4, b"6789"));
        assert_eq!(vecs.take_into(&mut part), 0);
        assert!(vecs.is_empty());
    }

    #[test]
    fn only_a_sole_owner_gets_mutable_bytes() {
        let mut region = Region::new(4096).unwrap();
        let slice = region.slice(0, 1).unwrap();
        assert!(Arc::get_mut(&mut region).is_none());
        drop(slice);
        Arc::get_mut(&mut region).unwrap().bytes_mut()[7] = 9;
        assert_eq!(region.slice(7, 1).unwrap().to_vec(), [9]);
    }
}
