//! Memory of zeroes that a signal handler maps over lost pages.
//!
//! The handler must not fail because the process has run short of something:
//! - The zeroes are those of a sparse in-memory file, mapped as shared memory. The kernel counts
//!   only the pages that are touched against the limit on committed memory. It would count a
//!   private mapping as a whole, and refuse one that is as large as a guest under
//!   `vm.overcommit_memory=2`.
//! - A process may have used up its mappings (`vm.max_map_count`). So some mappings are held in
//!   reserve, and the handler gives them up.
//!
//! Each page of the address space has its own page in the file, so that no two regions share one.

use std::io;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};

pub(super) const PAGE: usize = 4096;
/// End of the address space of a process.
const FILE_LEN: u64 = 1 << 56;
/// Number of mappings in reserve. A replacement needs at most two, unless other threads use the
/// mappings that were given up.
pub(super) const RESERVED: usize = 64;

/// Descriptor of the file, open until the process exits; -1 before [`prepare`].
static FILE: AtomicI32 = AtomicI32::new(-1);

/// Addresses of the mappings in reserve; 0 for one that was given up.
static RESERVE: [AtomicUsize; RESERVED] = [const { AtomicUsize::new(0) }; RESERVED];

/// Creates the file and the reserve. A process that may not create the file has neither, and maps
/// private zeroes.
pub(super) fn prepare() {
    if FILE.load(Ordering::SeqCst) < 0 {
        let file = match create() {
            Ok(file) => file,
            Err(error) => {
                tracing::debug!(
                    "cannot share the zero pages that replace lost guest memory: {error}"
                );
                return;
            }
        };
        let fd = file.as_fd().as_raw_fd();
        if FILE.compare_exchange(-1, fd, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            // Open until the process exits.
            let _ = file.into_raw_fd();
        }
    }
    refill();
}

fn create() -> io::Result<OwnedFd> {
    // Beyond this limit (RLIMIT_FSIZE), the kernel would also send SIGXFSZ, which ends the process.
    if file_size_limit() < FILE_LEN {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let file = memfd_create("rtrs-zeroes", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, FILE_LEN)?;
    Ok(file)
}

/// Returns the maximum length of files that this process may create.
fn file_size_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit stores one rlimit, for which `limit` has room.
    let code = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    if code == 0 { limit.rlim_cur } else { 0 }
}

/// Restores the reserve, as far as the kernel allows. Does nothing before [`prepare`].
pub(super) fn refill() {
    let fd = FILE.load(Ordering::SeqCst);
    if fd < 0 {
        return;
    }
    for (at, place) in RESERVE.iter().enumerate() {
        if place.load(Ordering::SeqCst) != 0 {
            continue;
        }
        // Neighbors are not contiguous in the file, so the kernel does not merge them.
        let offset = libc::off_t::try_from(2 * at * PAGE).unwrap_or(0);
        // SAFETY: a mapping at an address chosen by the kernel overlaps no existing memory. No
        // access to its page is allowed.
        let page = unsafe {
            libc::mmap(ptr::null_mut(), PAGE, libc::PROT_NONE, libc::MAP_SHARED, fd, offset)
        };
        if page == libc::MAP_FAILED {
            return;
        }
        let address = page.expose_provenance();
        if place.compare_exchange(0, address, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            unmap(address);
        }
    }
}

/// Gives up a mapping from the reserve. Returns false if none is left.
fn give_up() -> bool {
    let taken = RESERVE.iter().map(|place| place.swap(0, Ordering::SeqCst)).find(|page| *page != 0);
    taken.map(unmap).is_some()
}

fn unmap(address: usize) {
    // SAFETY: the page belongs to the reserve, from which this thread has removed it.
    unsafe { libc::munmap(ptr::with_exposed_provenance_mut(address), PAGE) };
}

/// Maps zeroes over a range of pages, using only calls that are allowed in signal handlers. Tries
/// each range in turn, then gives up mappings from the reserve and tries again. Returns the range
/// that was mapped.
///
/// # Safety
/// No Rust references to the ranges may exist, and their memory may change at any time.
pub(super) unsafe fn replace(ranges: [(usize, usize); 2]) -> Option<(usize, usize)> {
    loop {
        // SAFETY: as promised by the caller.
        let mapped = ranges.into_iter().find(|(start, end)| unsafe { map(*start, *end, true) });
        if mapped.is_some() || !give_up() {
            return mapped;
        }
    }
}

/// Maps private zeroes over one page, for which the file has no memory.
///
/// # Safety
/// See [`replace`].
pub(super) unsafe fn replace_page(page: usize) -> bool {
    loop {
        // SAFETY: as promised by the caller.
        let is_mapped = unsafe { map(page, page + PAGE, false) };
        if is_mapped || !give_up() {
            return is_mapped;
        }
    }
}

/// # Safety
/// See [`replace`].
unsafe fn map(start: usize, end: usize, is_shared: bool) -> bool {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let fd = FILE.load(Ordering::SeqCst);
    let (flags, fd, offset) = match libc::off_t::try_from(start) {
        Ok(offset) if is_shared && fd >= 0 => (libc::MAP_SHARED, fd, offset),
        _ => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1, 0),
    };
    let flags = flags | libc::MAP_FIXED;
    let start = ptr::with_exposed_provenance_mut(start);
    // SAFETY: as promised by the caller.
    let mapped = unsafe { libc::mmap(start, end - start.addr(), access, flags, fd, offset) };
    mapped != libc::MAP_FAILED
}

/// Frees the file's pages for a range that was replaced, once nothing accesses it anymore.
pub(super) fn release(start: usize, end: usize) {
    let fd = FILE.load(Ordering::SeqCst);
    if fd < 0 {
        return;
    }
    // SAFETY: the descriptor stays open until the process exits.
    let file = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let (start, len) = (start as u64, (end - start) as u64);
    if let Err(error) = fallocate(file, flags, start, len) {
        tracing::debug!("cannot free the memory that replaced lost pages: {error}");
    }
}

/// Number of mappings in reserve.
#[cfg(test)]
pub(super) fn reserved() -> usize {
    RESERVE.iter().filter(|place| place.load(Ordering::SeqCst) != 0).count()
}

/// Returns the memory of the file in bytes.
#[cfg(test)]
pub(super) fn used_bytes() -> u64 {
    // SAFETY: the descriptor stays open until the process exits.
    let file = unsafe { std::os::fd::BorrowedFd::borrow_raw(FILE.load(Ordering::SeqCst)) };
    512 * rustix::fs::fstat(file).expect("a file").st_blocks as u64
}

/// Truncates the file, so that an access to the zeroes finds no memory.
#[cfg(test)]
pub(super) fn lose() {
    // SAFETY: the descriptor stays open until the process exits.
    let file = unsafe { std::os::fd::BorrowedFd::borrow_raw(FILE.load(Ordering::SeqCst)) };
    ftruncate(file, 0).expect("a shorter file");
}

/// Maps pages until the kernel refuses a further mapping. Returns their addresses.
#[cfg(test)]
pub(super) fn use_up_mappings() -> Vec<usize> {
    let mut pages = Vec::with_capacity(1 << 20);
    loop {
        // Neighbors differ in their access, so the kernel does not merge them.
        let access = if pages.len() % 2 == 0 { libc::PROT_NONE } else { libc::PROT_READ };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a mapping at an address chosen by the kernel overlaps no existing memory.
        let page = unsafe { libc::mmap(ptr::null_mut(), PAGE, access, flags, -1, 0) };
        if page == libc::MAP_FAILED || pages.len() == pages.capacity() {
            return pages;
        }
        pages.push(page.expose_provenance());
    }
}

/// Unmaps pages that a test has mapped.
#[cfg(test)]
pub(super) fn unmap_all(pages: &[usize]) {
    pages.iter().for_each(|page| unmap(*page));
}

/// Sends SIGBUS to this thread.
#[cfg(test)]
pub(super) fn raise_bus_error() {
    // SAFETY: raise takes a number.
    unsafe { libc::raise(libc::SIGBUS) };
}
