//! Protection against files that are truncated while they are mapped.
//!
//! An access to a page beyond the end of its file raises SIGBUS, which ends the process. A process
//! that shares memory with a daemon, such as the monitor of a guest, can truncate the file at any
//! time, which must not affect other users' volumes. Such regions are mapped with a
//! [`TruncationAlarm`] and registered here. The handler that [`survive_truncations`] installs maps
//! zeroes over the lost pages of a registered region and sets its alarm. SIGBUS on other memory
//! ends the process as usual. Daemons install the handler; a library leaves the signals of its
//! program alone.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use rustix::event::{EventfdFlags, eventfd};

/// Maximum number of registered regions in the process.
const ENTRIES: usize = 16_384;
/// Value of an entry's start when the entry has no region.
const FREE: usize = 0;
/// Value of an entry's start while the entry changes.
const TAKEN: usize = 1;
const PAGE: usize = 4096;

/// Flag and event that are set when the file of a registered region is truncated.
#[derive(Debug)]
pub struct TruncationAlarm {
    is_set: AtomicBool,
    event: OwnedFd,
}

impl TruncationAlarm {
    /// Creates an alarm that is not set.
    ///
    /// # Errors
    /// The system's error if there is no descriptor left.
    pub fn new() -> io::Result<Arc<Self>> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self { is_set: AtomicBool::new(false), event }))
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
}

static ENTRY_TABLE: [Entry; ENTRIES] = [const {
    Entry {
        start: AtomicUsize::new(FREE),
        end: AtomicUsize::new(0),
        alarm: AtomicPtr::new(ptr::null_mut()),
    }
}; ENTRIES];

/// Number of entries at the start of the table that have ever been in use.
static ENTRIES_USED: AtomicUsize = AtomicUsize::new(0);

/// Registration of a region. Dropped before the memory is unmapped.
pub(super) struct Watch {
    entry: &'static Entry,
    alarm: Arc<TruncationAlarm>,
}

impl Watch {
    /// Registers the memory of a mapping.
    pub(super) fn new(base: usize, len: usize, alarm: &Arc<TruncationAlarm>) -> io::Result<Self> {
        for (at, entry) in ENTRY_TABLE.iter().enumerate() {
            let order = Ordering::SeqCst;
            if entry.start.compare_exchange(FREE, TAKEN, order, order).is_err() {
                continue;
            }
            ENTRIES_USED.fetch_max(at + 1, Ordering::SeqCst);
            entry.alarm.store(Arc::as_ptr(alarm).cast_mut(), Ordering::SeqCst);
            entry.end.store(base + len, Ordering::SeqCst);
            entry.start.store(base, Ordering::SeqCst);
            return Ok(Self { entry, alarm: Arc::clone(alarm) });
        }
        Err(io::Error::other("too many regions of memory are shared with other processes"))
    }

    pub(super) fn alarm(&self) -> &TruncationAlarm {
        &self.alarm
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Entry { start, end, alarm } = self.entry;
        start.store(TAKEN, Ordering::SeqCst);
        end.store(0, Ordering::SeqCst);
        alarm.store(ptr::null_mut(), Ordering::SeqCst);
        start.store(FREE, Ordering::SeqCst);
    }
}

/// Registered region that contains an address.
struct Found {
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
        // An entry that has changed meanwhile is not the one sought: the region being accessed is
        // still registered.
        let is_same = entry.start.load(Ordering::SeqCst) == start;
        let fits = start > TAKEN && (start..end).contains(&address);
        (is_same && fits).then_some(Found { start, end, alarm })
    })
}

/// Keeps the process alive when files of registered regions become shorter. Call it in daemons
/// only.
///
/// # Errors
/// The system's error.
pub fn survive_truncations() -> io::Result<()> {
    // SAFETY: all zeroes make a sigaction with an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handle as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the handler is a function of the type that SA_SIGINFO asks for, and only makes calls
    // that are allowed in handlers. It replaces the standard library's handler, which only
    // distinguishes stack overflows from other faults.
    let code = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Handles SIGBUS, then returns to the access, which now succeeds or ends the process.
extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes information on the signal, which includes an address if the code is
    // that of a fault; errno belongs to the thread.
    let (code, address, errno) =
        unsafe { ((*info).si_code, (*info).si_addr() as usize, libc::__errno_location()) };
    // SAFETY: the location is valid as long as the thread runs.
    let before = unsafe { *errno };
    if code != libc::BUS_ADRERR || !replace_lost(address) {
        // SAFETY: both calls take numbers. The signal is blocked until the handler has returned,
        // and then has its default action.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }
    // SAFETY: as above.
    unsafe { *errno = before };
}

/// Maps zeroes over a registered region from the page of `address` to its end: pages after a lost
/// page are lost too. Returns false if there is no such region.
fn replace_lost(address: usize) -> bool {
    let Some(Found { start, end, alarm }) = find(address) else { return false };
    let lost = (address & !(PAGE - 1)).max(start);
    // Pages of other sizes can only be replaced as a whole.
    if !map_zeroes(lost, end) && !map_zeroes(start, end) {
        return false;
    }
    // SAFETY: the thread was accessing the region, whose owner holds its registration and with it
    // the alarm.
    unsafe { (*alarm).set() };
    true
}

fn map_zeroes(start: usize, end: usize) -> bool {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the range is within the mapping of a region. Other processes may change that memory
    // at any time, and the region unmaps it as a whole.
    let mapped = unsafe {
        libc::mmap(ptr::with_exposed_provenance_mut(start), end - start, access, flags, -1, 0)
    };
    mapped != libc::MAP_FAILED
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::mem::Region;

    const LEN: usize = 8 * PAGE;
    /// Environment variable that is set in the process that accesses unregistered memory.
    const UNREGISTERED: &str = "RTRS_TEST_UNREGISTERED";

    fn memory() -> OwnedFd {
        let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, LEN as u64).unwrap();
        file
    }

    #[test]
    fn lost_pages_are_zeroes_and_set_the_alarm() {
        survive_truncations().unwrap();
        let file = memory();
        let alarms = [0; 2].map(|_| TruncationAlarm::new().unwrap());
        let map = |alarm: &Arc<_>| Region::watched(file.as_fd(), 0, LEN, alarm).unwrap();
        let [region, other] = [&alarms[0], &alarms[1]].map(map);
        region.fill(0, LEN, 7);
        ftruncate(&file, PAGE as u64 + 5).unwrap();
        assert!(!region.is_truncated(), "no page was used");
        assert_eq!(region.slice(PAGE - 1, 7).unwrap().to_vec(), [7, 7, 7, 7, 7, 7, 0]);
        assert!(!region.is_truncated(), "the page still exists");
        assert_eq!(region.slice(3 * PAGE - 1, 2).unwrap().to_vec(), [0; 2]);
        assert!(region.is_truncated() && alarms[0].is_set());
        let mut count = [0; 8];
        rustix::io::read(alarms[0].event(), &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1, "one fault for all pages from there on");
        region.copy_in(LEN - 3, b"abc");
        region.copy_in(2 * PAGE, b"x");
        assert_eq!(region.slice(LEN - 3, 3).unwrap().to_vec(), b"abc");
        assert_eq!(region.slice(0, 1).unwrap().to_vec(), [7]);
        assert!(!other.is_truncated());
        drop(region);
        // The entry in the table is reused.
        let region = map(&alarms[0]);
        drop(other);
        assert_eq!(region.slice(PAGE, 1).unwrap().to_vec(), [7]);
    }

    #[test]
    fn other_memory_has_the_default_action() {
        let name = "mem::truncation::tests::other_memory_has_the_default_action";
        if std::env::var_os(UNREGISTERED).is_some() {
            survive_truncations().unwrap();
            let file = memory();
            let region = Region::shared(file.as_fd(), 0, LEN).unwrap();
            ftruncate(&file, 0).unwrap();
            region.slice(0, 1).unwrap().to_vec();
            return;
        }
        let exe = std::env::current_exe().unwrap();
        let mut command = Command::new(exe);
        command.args(["--exact", name, "--nocapture"]).env(UNREGISTERED, "1");
        let status = command.output().unwrap().status;
        assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
    }

    #[test]
    fn a_signal_without_a_fault_has_the_default_action() {
        const SENT: &str = "RTRS_TEST_SENT";
        let name = "mem::truncation::tests::a_signal_without_a_fault_has_the_default_action";
        if std::env::var_os(SENT).is_some() {
            survive_truncations().unwrap();
            // SAFETY: raise takes a number.
            unsafe { libc::raise(libc::SIGBUS) };
            return;
        }
        let exe = std::env::current_exe().unwrap();
        let mut command = Command::new(exe);
        command.args(["--exact", name, "--nocapture"]).env(SENT, "1");
        let status = command.output().unwrap().status;
        assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
    }
}
