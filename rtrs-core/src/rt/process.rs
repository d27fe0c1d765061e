//! What a process does about itself: its terminal, its memory, its place in the kernel's eyes.
//!
//! A process that serves a block device of the kernel must not wait for that device: not for a page
//! of its own that was written there, not for memory that is freed by writing there. The calls for
//! that are made once at start, before there are threads, which inherit them.

use std::io;
use std::os::fd::AsRawFd;

use super::check;

/// Leaves the terminal and the process group of whoever started us (`setsid`), and the directory,
/// whose file system could not be unmounted else. Paths must be absolute from here on.
///
/// # Errors
/// The system's error; EPERM, which a process that leads its group already gets, is none.
pub fn become_daemon() -> io::Result<()> {
    // SAFETY: setsid takes nothing and touches no memory.
    if unsafe { libc::setsid() } < 0 {
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EPERM) {
            return Err(error);
        }
    }
    std::env::set_current_dir("/")
}

/// Makes `file` the standard error of the process, for all threads.
///
/// # Errors
/// The system's error.
pub fn replace_stderr(file: &impl AsRawFd) -> io::Result<()> {
    // SAFETY: dup2 takes descriptors and touches no memory; `file` is open, and standard error is
    // used by its number everywhere.
    if unsafe { libc::dup2(file.as_raw_fd(), libc::STDERR_FILENO) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A number for the running system, another after each start of the host, never 0. `None` where
/// the kernel does not tell it.
pub fn boot_number() -> Option<u64> {
    let id = std::fs::read("/proc/sys/kernel/random/boot_id").ok()?;
    // FNV-1a: the id is random, spread is all that is asked for.
    let hash = id.trim_ascii().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    });
    (!id.is_empty()).then_some(hash | 1)
}

/// A number that no other process will draw, never 0.
pub fn random_number() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish() | 1
}

/// Bytes of a page of memory.
pub fn page_size() -> usize {
    // SAFETY: sysconf takes a number and touches no memory of ours.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).ok().filter(|bytes| bytes.is_power_of_two()).unwrap_or(4096)
}

/// What the process may do, as far as it matters here (capabilities(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Privileges {
    /// CAP_IPC_LOCK: lock more memory than RLIMIT_MEMLOCK.
    pub ipc_lock: bool,
    /// CAP_SYS_ADMIN: connect block devices.
    pub sys_admin: bool,
}

/// The effective capabilities of the process.
///
/// # Errors
/// The system's error when /proc cannot be read.
pub fn privileges() -> io::Result<Privileges> {
    const CAP_IPC_LOCK: u32 = 14;
    const CAP_SYS_ADMIN: u32 = 21;
    let status = std::fs::read_to_string("/proc/self/status")?;
    let set = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|text| u64::from_str_radix(text.trim(), 16).ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no CapEff in /proc"))?;
    let has = |bit: u32| set >> bit & 1 == 1;
    Ok(Privileges { ipc_lock: has(CAP_IPC_LOCK), sys_admin: has(CAP_SYS_ADMIN) })
}

/// Keeps all memory of the process from being written out: what is mapped now is read in and
/// locked, the program's code included; what is mapped later is locked page by page as it is used,
/// so that large buffers cost only what was used of them (`mlockall`).
///
/// Call it early, when little is mapped. A bound on locked memory is raised if that is allowed.
///
/// # Errors
/// The system's error; `PermissionDenied`, and nothing is locked, where the bound
/// (RLIMIT_MEMLOCK) would hold: with it, later mappings would fail.
pub fn lock_memory() -> io::Result<()> {
    let unbounded = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: setrlimit reads one rlimit.
    let raised = check(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const unbounded) });
    if raised.is_err() && !privileges()?.ipc_lock {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    // SAFETY: mlockall changes no contents; locked memory is used like any other.
    check(unsafe { libc::mlockall(libc::MCL_CURRENT) })?;
    let later = libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT;
    // SAFETY: as above.
    check(unsafe { libc::mlockall(later) })
}

/// Tells the kernel that this thread, and those it starts, carry IO that frees memory: when they
/// need memory, the kernel does not wait for IO to free some (`PR_SET_IO_FLUSHER`, Linux 5.6).
///
/// # Errors
/// The system's error; EPERM without CAP_SYS_RESOURCE, EINVAL for a kernel that is too old.
pub fn become_io_flusher() -> io::Result<()> {
    /// `linux/prctl.h`
    const PR_SET_IO_FLUSHER: libc::c_int = 57;
    const ON: libc::c_ulong = 1;
    const UNUSED: libc::c_ulong = 0;
    // SAFETY: this prctl takes numbers and touches no memory of ours.
    check(unsafe { libc::prctl(PR_SET_IO_FLUSHER, ON, UNUSED, UNUSED, UNUSED) })
}

/// Raises the bound of open descriptors (RLIMIT_NOFILE) to the most that this process may have, and
/// returns it.
///
/// # Errors
/// The system's error.
pub fn raise_open_files() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit stores one rlimit, for which `limit` has room.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) })?;
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: setrlimit reads one rlimit.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })?;
    Ok(limit.rlim_cur)
}

/// Tells the kernel not to kill this process when memory is short.
///
/// # Errors
/// The system's error; `PermissionDenied` without CAP_SYS_RESOURCE.
pub fn refuse_oom_kill() -> io::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "-1000")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_files_are_bounded_by_the_hard_limit_alone() {
        let limits = || {
            let text = std::fs::read_to_string("/proc/self/limits").unwrap();
            let line = text.lines().find(|line| line.starts_with("Max open files")).unwrap();
            let words: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
            (words[0], words[1])
        };
        let (_, hard) = limits();
        assert_eq!(raise_open_files().unwrap(), hard);
        assert_eq!(limits(), (hard, hard));
    }

    #[test]
    fn the_process_knows_itself() {
        assert!(page_size() >= 4096);
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let Privileges { ipc_lock, sys_admin } = privileges().unwrap();
        let bits = u64::from(ipc_lock) << 14 | u64::from(sys_admin) << 21;
        let line = status.lines().find(|line| line.starts_with("CapEff:")).unwrap();
        let set = u64::from_str_radix(line.trim_start_matches("CapEff:").trim(), 16).unwrap();
        assert_eq!(set & (1 << 14 | 1 << 21), bits);
    }
}
