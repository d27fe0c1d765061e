//! Protection against files that are truncated while they are mapped.
//!
//! An access to a page beyond the end of its file raises SIGBUS, which ends the process. A process
//! that shares memory with a daemon, such as the monitor of a guest, can truncate the file at any
//! time, which must not affect other users' volumes. Such regions are mapped with a
//! [`TruncationAlarm`] and registered here. The handler that [`survive_truncations`] installs maps
//! zeroes over the lost pages of a registered region and sets its alarm. SIGBUS on other memory
//! ends the process as usual. Daemons install the handler; a library leaves its program's signals
//! alone. `zeroes` provides the memory, and `share` limits the regions of each front end.

mod share;
mod zeroes;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use rustix::event::{EventfdFlags, eventfd};

pub use share::RegionShare;
use share::{REGIONS_MAX, RegionPart};
use zeroes::PAGE;

/// Value of an entry's `start` if the entry has no region.
const FREE: usize = 0;
/// Value of an entry's `start` while the entry is being changed.
const TAKEN: usize = 1;
/// Value of an entry's `lost` while no page has been replaced.
const NONE_LOST: usize = usize::MAX;

/// Flag and event that are set when the file of a registered region is truncated.
#[derive(Debug)]
pub struct TruncationAlarm {
    is_set: AtomicBool,
    event: OwnedFd,
    /// Share to which the regions registered with this alarm belong.
    share: Arc<RegionShare>,
}

impl TruncationAlarm {
    /// Creates an alarm that is not set.
    ///
    /// # Errors
    /// The system's error if there are no descriptors left.
    pub fn new() -> io::Result<Arc<Self>> {
        Self::of(RegionShare::common())
    }

    /// Creates an alarm whose regions belong to this share.
    ///
    /// # Errors
    /// The system's error if there are no descriptors left.
    pub fn of(share: Arc<RegionShare>) -> io::Result<Arc<Self>> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self { is_set: AtomicBool::new(false), event, share }))
    }

    /// Whether memory has been lost: data read since then may be zeroes.
    pub fn is_set(&self) -> bool {
        self.is_set.load(Ordering::SeqCst)
    }

    /// Returns a descriptor that is readable once memory has been lost.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Sets the alarm, using only calls that are allowed in signal handlers.
    fn set(&self) {
        self.is_set.store(true, Ordering::SeqCst);
        let one = 1_u64.to_ne_bytes();
        // SAFETY: the kernel reads 8 bytes from an array of 8. A full counter is already readable.
        unsafe { libc::write(self.event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}

/// Entry for a registered region. Only its owner writes to it; the handler may read it at any time.
struct Entry {
    start: AtomicUsize,
    end: AtomicUsize,
    alarm: AtomicPtr<TruncationAlarm>,
    /// Start of the replaced pages, which extend to the end of the region.
    lost: AtomicUsize,
}

impl Entry {
    /// Records that the pages from this address to the end of the region have been replaced.
    fn note_lost(&self, from: usize) {
        self.lost.fetch_min(from, Ordering::SeqCst);
    }
}

static ENTRY_TABLE: [Entry; REGIONS_MAX] = [const {
    Entry {
        start: AtomicUsize::new(FREE),
        end: AtomicUsize::new(0),
        alarm: AtomicPtr::new(ptr::null_mut()),
        lost: AtomicUsize::new(NONE_LOST),
    }
}; REGIONS_MAX];

/// Number of entries at the start of the table that have ever been in use.
static ENTRIES_USED: AtomicUsize = AtomicUsize::new(0);

/// Registration of a region. Dropped before the memory is unmapped.
pub(super) struct Watch {
    entry: &'static Entry,
    alarm: Arc<TruncationAlarm>,
    _part: RegionPart,
}

impl Watch {
    /// Registers the memory of a mapping.
    pub(super) fn new(base: usize, len: usize, alarm: &Arc<TruncationAlarm>) -> io::Result<Self> {
        let part = alarm.share.take()?;
        zeroes::refill();
        for (at, entry) in ENTRY_TABLE.iter().enumerate() {
            let order = Ordering::SeqCst;
            if entry.start.compare_exchange(FREE, TAKEN, order, order).is_err() {
                continue;
            }
            ENTRIES_USED.fetch_max(at + 1, Ordering::SeqCst);
            entry.alarm.store(Arc::as_ptr(alarm).cast_mut(), Ordering::SeqCst);
            entry.lost.store(NONE_LOST, Ordering::SeqCst);
            entry.end.store(base + len, Ordering::SeqCst);
            entry.start.store(base, Ordering::SeqCst);
            return Ok(Self { entry, alarm: Arc::clone(alarm), _part: part });
        }
        Err(io::Error::other("too many regions of memory are shared with other processes"))
    }

    pub(super) fn alarm(&self) -> &TruncationAlarm {
        &self.alarm
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Entry { start, end, alarm, lost } = self.entry;
        let (lost, last) = (lost.load(Ordering::SeqCst), end.load(Ordering::SeqCst));
        if lost < last {
            zeroes::release(lost, last);
        }
        start.store(TAKEN, Ordering::SeqCst);
        end.store(0, Ordering::SeqCst);
        alarm.store(ptr::null_mut(), Ordering::SeqCst);
        start.store(FREE, Ordering::SeqCst);
    }
}

/// Registered region that contains an address.
struct Found {
    entry: &'static Entry,
    start: usize,
    end: usize,
    alarm: *const TruncationAlarm,
}

/// Returns the registered region that contains an address.
fn find(address: usize) -> Option<Found> {
    let used = ENTRIES_USED.load(Ordering::SeqCst);
    ENTRY_TABLE[..used].iter().find_map(|entry| {
        let start = entry.start.load(Ordering::SeqCst);
        let end = entry.end.load(Ordering::SeqCst);
        let alarm = entry.alarm.load(Ordering::SeqCst).cast_const();
        // An entry that has changed in the meantime is not the one sought: the region being
        // accessed is still registered.
        let is_same = entry.start.load(Ordering::SeqCst) == start;
        let fits = start > TAKEN && (start..end).contains(&address);
        (is_same && fits).then_some(Found { entry, start, end, alarm })
    })
}

/// Keeps the process alive when files of registered regions become shorter. Only daemons may call
/// it.
///
/// # Errors
/// The system's error.
pub fn survive_truncations() -> io::Result<()> {
    zeroes::prepare();
    // SAFETY: all zeroes make a sigaction with an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handle as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the handler is a function of the type that SA_SIGINFO requires, and only makes calls
    // that are allowed in handlers. It replaces the standard library's handler, which only
    // distinguishes stack overflows from other faults.
    let code = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Handles SIGBUS, then returns to the access, which now succeeds or ends the process.
extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes information on the signal, which includes an address if the code
    // indicates a fault; errno belongs to the thread.
    let (code, address, errno) =
        unsafe { ((*info).si_code, (*info).si_addr() as usize, libc::__errno_location()) };
    // SAFETY: the location is valid as long as the thread runs.
    let before = unsafe { *errno };
    if code != libc::BUS_ADRERR || !replace_lost(address) {
        // SAFETY: both calls take only numbers. The signal is blocked until the handler has
        // returned, and then has its default action.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }
    // SAFETY: as above.
    unsafe { *errno = before };
}

/// Maps zeroes over a registered region from the page of `address` to its end: pages after a lost
/// page are lost too. Returns false if there is no such region or no memory left.
fn replace_lost(address: usize) -> bool {
    let Some(Found { entry, start, end, alarm }) = find(address) else { return false };
    let page = (address & !(PAGE - 1)).max(start);
    let is_replaced = if entry.lost.load(Ordering::SeqCst) <= page {
        // The page was replaced before: no memory was left for the replacement, or another thread
        // has just replaced it, which makes no difference, as its content does not matter.
        // SAFETY: the page is within a region. Other processes may change that memory at any time,
        // and the region unmaps it as a whole.
        unsafe { zeroes::replace_page(page) }
    } else {
        // Pages of other sizes can only be replaced as a whole.
        // SAFETY: the ranges are within a region, as above.
        let replaced = unsafe { zeroes::replace([(page, end), (start, end)]) };
        replaced.inspect(|(from, _)| entry.note_lost(*from)).is_some()
    };
    if is_replaced {
        // SAFETY: the thread was accessing the region, whose owner holds its registration and with
        // it the alarm.
        unsafe { (*alarm).set() };
    }
    is_replaced
}

#[cfg(test)]
mod tests;
