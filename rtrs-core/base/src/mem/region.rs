//! Regions of memory that the kernel and remote peers may write at any time.
//!
//! A [`Region`] is mapped once and unmapped when its last owner is dropped. No Rust reference into
//! it exists while there is any other holder of the region: bytes are copied in and out through raw
//! pointers, because a peer or the kernel may change them at any time. Code that validates bytes
//! copies them out first. [`MemSlice`] names a part of a region and keeps the region alive; an
//! operation in flight owns its slices until its completion, so memory in use by the kernel is
//! never unmapped. That includes memory owned by others ([`Region::foreign`], [`Region::shared`]):
//! its owner drops the region, and the memory is released after the last IO that uses it.

use std::any::Any;
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::truncation::{TruncationAlarm, Watch};
use super::usage::{Counting, MemoryMeter, RegionUsage};

/// Number of bytes copied at a time for a checksum: they stay in the L1 cache.
const CRC_PIECE: usize = 8 << 10;

/// 64 bits never wrap, although peers can cause more than 2^32 regions: a process cannot map 2^64
/// regions.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Makes the IDs of new regions start at `id`, unless they are already higher.
#[cfg(any(test, feature = "test-util"))]
pub fn skip_ids_to(id: u64) {
    NEXT_ID.fetch_max(id, Ordering::Relaxed);
}

/// Memory behind a region.
enum Backing {
    /// Mapping of this region, which only this process and its peers access.
    Private,
    /// Mapping of this region, which other processes access too.
    Shared { watch: Option<Watch> },
    /// Memory of an owner, which is dropped with the region.
    Foreign { _owner: Box<dyn Any + Send + Sync> },
    /// Parts of other regions; the base is that of the bounce memory.
    Scattered(Arc<dyn Parts>),
}

/// Parts of memory that hold the bytes of a scattered region.
pub(super) trait Parts: Send + Sync {
    /// Returns contiguous memory of the same length.
    fn bounce(&self) -> &Arc<Region>;

    /// Returns the memory of the longest prefix of a nonempty range that is in one part.
    fn first_part(&self, offset: usize, len: usize) -> MemSlice;

    /// Calls `act` for each part of a range, in order, with the number of bytes before it.
    fn each(&self, offset: usize, len: usize, act: &mut dyn FnMut(usize, &MemSlice)) {
        let mut done = 0;
        while done < len {
            let part = self.first_part(offset + done, len - done);
            act(done, &part);
            done += part.len;
        }
    }

    /// Returns the length of the longest prefix of a range that is in at most `count` parts.
    fn len_of(&self, count: usize, offset: usize, len: usize) -> usize {
        let mut done = 0;
        for _ in 0..count {
            if done < len {
                done += self.first_part(offset + done, len - done).len;
            }
        }
        done
    }
}

/// Memory of fixed length; page-aligned unless it is foreign.
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    stride: usize,
    id: u64,
    usage: Option<Box<RegionUsage>>,
    backing: Backing,
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

    /// Maps memory that counts against a limit, for buffers that are `stride` apart.
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

    /// Maps a part of a file that other processes map too. The offset must be a multiple of the
    /// page size. Only trusted processes may be able to shorten the file: an access beyond its
    /// end kills this process.
    ///
    /// # Errors
    /// See [`Region::new`].
    pub fn shared(file: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Arc<Self>> {
        Self::map_shared(file, offset, len).map(Arc::new)
    }

    /// Maps a part of a file as [`Region::shared`] does. If the process survives truncations
    /// ([`survive_truncations`](super::survive_truncations)), an access beyond the end of the file
    /// finds zeroes and sets the alarm.
    ///
    /// # Errors
    /// See [`Region::new`].
    pub fn watched(
        file: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        alarm: &Arc<TruncationAlarm>,
    ) -> io::Result<Arc<Self>> {
        let mut region = Self::map_shared(file, offset, len)?;
        let watch = Watch::new(region.base.as_ptr().expose_provenance(), region.len, alarm)?;
        region.backing = Backing::Shared { watch: Some(watch) };
        Ok(Arc::new(region))
    }

    /// Whether the alarm of a watched region is set: a file was truncated, and memory beyond its
    /// end was accessed.
    pub fn is_truncated(&self) -> bool {
        match &self.backing {
            Backing::Shared { watch: Some(watch) } => watch.alarm().is_set(),
            _ => false,
        }
    }

    fn map_shared(file: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        let len = whole_pages(len)?;
        let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
        // SAFETY: a mapping at an address chosen by the kernel overlaps no existing memory.
        let base = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(
                std::ptr::null_mut(),
                len,
                access,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                offset,
            )
        };
        Self::of_mapping(base, len, 0, Backing::Shared { watch: None })
    }

    /// Makes a region out of memory that belongs to `owner`, which is dropped when the last holder
    /// of the region is: the memory is in use until then.
    ///
    /// # Safety
    /// The `len` bytes at `base` are mapped for reading and writing until `owner` is dropped, and
    /// no Rust reference to them is used until then.
    pub unsafe fn foreign(
        base: NonNull<u8>,
        len: usize,
        owner: impl Any + Send + Sync,
    ) -> Arc<Self> {
        Arc::new(Self::of(base, len, 0, Backing::Foreign { _owner: Box::new(owner) }))
    }

    /// Creates another handle to a region, with the same ID and bytes. The handle keeps the region
    /// and `owner` alive until the handle's last holder is dropped, so that dropping `owner`
    /// signals the end of one of several uses of the memory. Panics if the region is scattered.
    pub fn alias(of: &Arc<Self>, owner: impl Any + Send + Sync) -> Arc<Self> {
        assert!(!of.is_scattered(), "scattered bytes have no other handle");
        let Self { base, len, stride, id, .. } = **of;
        let backing = Backing::Foreign { _owner: Box::new((Arc::clone(of), owner)) };
        Arc::new(Self { base, len, stride, id, usage: None, backing })
    }

    /// Makes a region whose bytes are in these parts.
    pub(super) fn scattered(parts: Arc<dyn Parts>) -> Arc<Self> {
        let Self { base, len, stride, .. } = **parts.bounce();
        Arc::new(Self::of(base, len, stride, Backing::Scattered(parts)))
    }

    fn map(len: usize, stride: usize) -> io::Result<Self> {
        let len = whole_pages(len)?;
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
        Self::of_mapping(base, len, stride, Backing::Private)
    }

    /// Makes a region from the result of mmap.
    fn of_mapping(
        base: *mut libc::c_void,
        len: usize,
        stride: usize,
        backing: Backing,
    ) -> io::Result<Self> {
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| io::Error::other("mmap returned a null address"))?;
        Ok(Self::of(base, len, stride, backing))
    }

    fn of(base: NonNull<u8>, len: usize, stride: usize, backing: Backing) -> Self {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Self { base, len, stride, id, usage: None, backing }
    }

    /// Returns true if the bytes are in pieces of other regions.
    #[inline]
    pub fn is_scattered(&self) -> bool {
        matches!(self.backing, Backing::Scattered(_))
    }

    #[inline]
    pub(super) fn parts(&self) -> Option<&dyn Parts> {
        match &self.backing {
            Backing::Scattered(parts) => Some(&**parts),
            _ => None,
        }
    }

    /// Returns the number of bytes that count against the limit of [`Region::metered`]; 0 without a
    /// limit.
    pub fn counted(&self) -> u64 {
        self.usage.as_ref().map_or(0, |usage| usage.bytes())
    }

    /// Counts the region against this limit instead of the previous one. Does nothing if the region
    /// counts against none.
    pub fn count_for(&self, meter: &Arc<MemoryMeter>) {
        self.usage.iter().for_each(|usage| usage.count_for(meter));
    }

    /// Sets the total number of units that peers may write, including those already written: a unit
    /// is a buffer, or as many small ones as fit in 256 KiB. `u32::MAX` means any number. Does
    /// nothing unless written units are counted.
    pub fn limit_writes(&self, units: u32) {
        self.usage.iter().for_each(|usage| usage.limit(units));
    }

    /// Must be called before placing a peer's bytes in memory that is counted once written. Returns
    /// false if the peer may not write there.
    pub fn admit_write(&self, offset: usize, len: usize) -> bool {
        self.usage.as_ref().is_none_or(|usage| usage.admit(offset, len))
    }

    /// Returns the length in bytes; a multiple of the page size unless the memory is foreign.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the stride: no buffer of this region crosses a multiple of it. 0 if unknown.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Returns true if the region has zero bytes, which only foreign memory may have.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the ID of this region, unique within the process.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the slice `offset..offset + len` of this region. None if it exceeds the region.
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
        if let Some(parts) = self.parts() {
            return parts.each(offset, to.len(), &mut |at, part| {
                part.copy_out(0, &mut to[at..at + part.len]);
            });
        }
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
        if let Some(parts) = self.parts() {
            return parts.each(offset, from.len(), &mut |at, part| {
                part.copy_in(0, &from[at..at + part.len]);
            });
        }
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
        if let Some(parts) = self.parts() {
            return parts.each(offset, len, &mut |at, part| {
                part.region.copy_from(part.offset, from, from_offset + at, part.len);
            });
        }
        if let Some(parts) = from.parts() {
            return parts.each(from_offset, len, &mut |at, part| {
                self.copy_from(offset + at, &part.region, part.offset, part.len);
            });
        }
        // SAFETY: both ranges were checked; `copy` allows them to overlap.
        unsafe {
            std::ptr::copy(
                from.base.as_ptr().add(from_offset),
                self.base.as_ptr().add(offset),
                len,
            );
        }
    }

    /// Returns all bytes, for in-place work. The exclusive borrow, from `Arc::get_mut`, proves that
    /// there is no slice and therefore no kernel operation; a registration for peers also holds the
    /// region. Panics unless the region has memory of its own.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(matches!(self.backing, Backing::Private), "memory that others access");
        // SAFETY: the mapping has this length and is initialized (with zeroes at first). The kernel
        // and devices write only for operations and registrations, which hold the region, and the
        // caller is its only holder.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    /// Fills a range with one byte. Panics if the range exceeds the region.
    pub fn fill(&self, offset: usize, len: usize, byte: u8) {
        assert!(offset <= self.len && len <= self.len - offset, "fill outside the region");
        if let Some(parts) = self.parts() {
            return parts.each(offset, len, &mut |_, part| part.fill(byte));
        }
        // SAFETY: the range was just checked.
        unsafe { std::ptr::write_bytes(self.base.as_ptr().add(offset), byte, len) }
    }

    /// Continues a CRC32C over a range of the region. Panics if the range exceeds the region.
    pub fn crc32c(&self, seed: u32, offset: usize, len: usize) -> u32 {
        assert!(offset <= self.len && len <= self.len - offset, "crc outside the region");
        if let Some(parts) = self.parts() {
            let mut sum = seed;
            parts.each(offset, len, &mut |_, part| sum = part.crc32c(sum));
            return sum;
        }
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

    /// Returns the address of the byte at `offset`, for the kernel. Panics if the region is
    /// scattered.
    pub fn address(&self, offset: usize) -> *mut u8 {
        assert!(!self.is_scattered(), "scattered bytes have no address");
        self.device_address(offset)
    }

    /// Returns the address at which an RDMA device accesses the byte at `offset`: that of its
    /// bounce memory if the region is scattered ([`MemSlice::fill_bounce`]).
    pub fn device_address(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len, "address outside the region");
        // SAFETY: the offset was just checked; one past the end is allowed by `add`.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Backing::Shared { watch } = &mut self.backing {
            // A later mapping may get the same addresses.
            *watch = None;
        }
        if let Backing::Private | Backing::Shared { .. } = self.backing {
            // SAFETY: this region owns the mapping, and no slice or operation holds it anymore.
            unsafe {
                libc::munmap(self.base.as_ptr().cast(), self.len);
            }
        }
    }
}

fn too_large() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "region too large")
}

/// Rounds the length of a mapping up to whole pages.
fn whole_pages(len: usize) -> io::Result<usize> {
    if len == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a region of zero bytes"));
    }
    len.checked_next_multiple_of(4096).ok_or_else(too_large)
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

    /// Extends the slice by one that follows it in memory. Returns false if `next` does not, or
    /// holds a different handle to the region: each handle stays until its own use has ended.
    #[inline]
    pub(super) fn extend(&mut self, next: &Self) -> bool {
        if !Arc::ptr_eq(&self.region, &next.region) || self.offset + self.len != next.offset {
            return false;
        }
        self.len += next.len;
        true
    }

    /// Returns the part `from..from + len` of this slice. None if it exceeds the slice.
    pub fn slice(&self, from: usize, len: usize) -> Option<Self> {
        if from.checked_add(len)? > self.len {
            return None;
        }
        Some(Self { region: Arc::clone(&self.region), offset: self.offset + from, len })
    }

    /// Copies bytes out, from offset `from` of the slice. Panics if the range exceeds the slice.
    pub fn copy_out(&self, from: usize, to: &mut [u8]) {
        assert!(from <= self.len && to.len() <= self.len - from, "copy outside the slice");
        self.region.copy_out(self.offset + from, to);
    }

    /// Copies bytes in, at offset `at` of the slice. Panics if the range exceeds the slice.
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

    /// Returns the address of the first byte, for the kernel. Panics if the region is scattered.
    pub fn address(&self) -> *mut u8 {
        self.region.address(self.offset)
    }

    /// Returns the address of the first byte for an RDMA device; see [`Region::device_address`].
    pub fn device_address(&self) -> *mut u8 {
        self.region.device_address(self.offset)
    }

    /// Returns how many of the first `max` bytes are in at most `parts` parts of memory: all unless
    /// the region is scattered.
    pub fn len_of_parts(&self, max: usize, parts: usize) -> usize {
        let len = self.len.min(max);
        self.region.parts().map_or(len, |all| all.len_of(parts, self.offset, len))
    }

    /// Returns the bounce memory of the bytes, if the region is scattered: contiguous memory for a
    /// device that cannot access the pieces.
    pub fn bounce(&self) -> Option<Self> {
        self.region.parts()?.bounce().slice(self.offset, self.len)
    }

    /// Copies the bytes to their bounce memory. Does nothing unless the region is scattered.
    pub fn fill_bounce(&self) {
        if let Some(bounce) = self.bounce() {
            bounce.copy_from(self);
        }
    }

    /// Copies the bytes back from their bounce memory. Does nothing unless the region is scattered.
    pub fn drain_bounce(&self) {
        if let Some(bounce) = self.bounce() {
            self.copy_from(&bounce);
        }
    }
}

impl fmt::Debug for MemSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemSlice({}:{}+{})", self.region.id, self.offset, self.len)
    }
}

#[cfg(test)]
mod tests;
