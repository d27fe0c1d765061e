//! Settings of the process itself: its terminal, its memory, and how the kernel treats it.
//!
//! A process that serves a kernel block device must not wait for that device: neither for one of
//! its own pages that was written there, nor for memory that is freed by writing there. The
//! necessary calls are made once at startup, before threads are created, because threads inherit
//! the settings.
//!
//! A server started by root can switch to another user ([`Account`], [`become_account`]).

use std::ffi::CString;
use std::io;
use std::marker::PhantomData;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;

use super::syscall::check;

/// Detaches from the terminal and the process group of the caller (`setsid`), and leaves the
/// current directory, whose file system could not otherwise be unmounted. Paths must be absolute
/// from here on.
///
/// # Errors
/// The system's error, except EPERM, which means that the process already leads its group.
pub fn become_daemon() -> io::Result<()> {
    // SAFETY: setsid takes no arguments and accesses no memory.
    if unsafe { libc::setsid() } < 0 {
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EPERM) {
            return Err(error);
        }
    }
    std::env::set_current_dir("/")
}

/// Resets signal settings that a program may have inherited: no signal is blocked, and children can
/// be waited for (SIGCHLD is not ignored). A write beyond the file size limit fails with EFBIG
/// instead of killing the program (SIGXFSZ).
pub fn reset_signals() {
    let mut none = mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initializes the set, which pthread_sigmask reads. No handler is replaced:
    // this runs at the start of the program, and neither action runs any of its code. With these
    // arguments, none of the calls fails.
    unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), ptr::null_mut());
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// Excludes the memory of the process, including its keys, from core dumps and from access by other
/// processes of its user (PR_SET_DUMPABLE).
///
/// # Errors
/// The system's error.
pub fn forbid_dumps() -> io::Result<()> {
    const OFF: libc::c_ulong = 0;
    // SAFETY: this prctl takes numbers and accesses no memory of this process.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, OFF, OFF, OFF, OFF) })
}

/// Returns true if [`forbid_dumps`] is in effect.
fn dumps_are_forbidden() -> bool {
    const UNUSED: libc::c_ulong = 0;
    // SAFETY: as above.
    unsafe { libc::prctl(libc::PR_GET_DUMPABLE, UNUSED, UNUSED, UNUSED, UNUSED) == 0 }
}

/// Makes `file` the standard error of the process, for all threads.
///
/// # Errors
/// The system's error.
pub fn replace_stderr(file: &impl AsRawFd) -> io::Result<()> {
    // SAFETY: dup2 takes descriptors and accesses no memory; `file` is open, and standard error is
    // used by its number everywhere.
    if unsafe { libc::dup2(file.as_raw_fd(), libc::STDERR_FILENO) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Keeps programs that are executed from now on from inheriting any descriptors except the standard
/// streams (FD_CLOEXEC). They receive only what is passed to them, and not what this process itself
/// inherited, such as a shell's lock or pipe.
///
/// # Errors
/// The system's error if /proc cannot be read.
pub fn close_descriptors_on_exec() -> io::Result<()> {
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.parse::<libc::c_int>().ok());
        let Some(fd) = number.filter(|fd| *fd > libc::STDERR_FILENO) else { continue };
        // SAFETY: this fcntl takes numbers and accesses no memory of this process. The descriptor
        // stays open; if another thread has closed it since, the call fails, which does no harm.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    Ok(())
}

/// Duplicates a descriptor that the process inherited under this number. The duplicate is closed on
/// exec.
///
/// # Errors
/// The system's error; EBADF if no such descriptor is open.
pub fn duplicate_inherited(number: RawFd) -> io::Result<OwnedFd> {
    if number < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: the borrow ends with this statement, which only passes the number to fcntl. The
    // number is not -1, and a number that is not open makes the call fail.
    unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned()
}

/// Returns a number that identifies the host's current boot, never 0. `None` if the kernel does not
/// provide it.
pub fn boot_number() -> Option<u64> {
    let id = std::fs::read("/proc/sys/kernel/random/boot_id").ok()?;
    // FNV-1a: the ID is random, so spreading suffices.
    let hash = id.trim_ascii().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    });
    (!id.is_empty()).then_some(hash | 1)
}

/// Returns a random number that no other process is expected to draw, never 0.
pub fn random_number() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish() | 1
}

/// Returns the size of a memory page in bytes.
pub fn page_size() -> usize {
    // SAFETY: sysconf takes a number and accesses no memory of this process.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).ok().filter(|bytes| bytes.is_power_of_two()).unwrap_or(4096)
}

/// Privileges of the process that are relevant here (capabilities(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Privileges {
    /// CAP_IPC_LOCK: lock more memory than RLIMIT_MEMLOCK.
    pub ipc_lock: bool,
    /// CAP_SYS_ADMIN: connect block devices.
    pub sys_admin: bool,
}

/// Returns the effective privileges of the process.
///
/// # Errors
/// The system's error if /proc cannot be read.
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

/// Keeps all memory of the process from being written out: memory mapped now, including the
/// program's code, is read in and locked; memory mapped later is locked page by page on first use,
/// so that large buffers cost only the part in use (`mlockall`).
///
/// Call it early, when little is mapped. The limit on locked memory is raised if permitted.
///
/// # Errors
/// The system's error; `PermissionDenied`, with nothing locked, if the limit (RLIMIT_MEMLOCK) would
/// remain in force: later mappings would fail under it.
pub fn lock_memory() -> io::Result<()> {
    if unbound_locked_memory().is_err() && !privileges()?.ipc_lock {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    // SAFETY: mlockall changes no contents; locked memory is used like any other.
    check(unsafe { libc::mlockall(libc::MCL_CURRENT) })?;
    let later = libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT;
    // SAFETY: as above.
    check(unsafe { libc::mlockall(later) })
}

/// Removes the limit on locked memory (RLIMIT_MEMLOCK), which applies to a process without
/// CAP_IPC_LOCK.
///
/// # Errors
/// The system's error; `PermissionDenied` without CAP_SYS_RESOURCE.
pub fn unbound_locked_memory() -> io::Result<()> {
    let unbounded = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: setrlimit reads one rlimit.
    check(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const unbounded) })
}

/// Returns the limit on locked memory (RLIMIT_MEMLOCK) in bytes; `None` if there is none.
#[must_use]
pub fn locked_memory_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit stores one rlimit, for which `limit` has room.
    let code = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (code == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Informs the kernel that this thread, and those it starts, perform IO that frees memory: when
/// they need memory, the kernel does not wait for IO to free some (`PR_SET_IO_FLUSHER`, Linux 5.6).
///
/// # Errors
/// The system's error; EPERM without CAP_SYS_RESOURCE, EINVAL if the kernel is too old.
pub fn become_io_flusher() -> io::Result<()> {
    /// `linux/prctl.h`
    const PR_SET_IO_FLUSHER: libc::c_int = 57;
    const ON: libc::c_ulong = 1;
    const UNUSED: libc::c_ulong = 0;
    // SAFETY: this prctl takes numbers and accesses no memory of this process.
    check(unsafe { libc::prctl(PR_SET_IO_FLUSHER, ON, UNUSED, UNUSED, UNUSED) })
}

/// Raises the limit on open descriptors (RLIMIT_NOFILE) to this process's maximum, and returns it.
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

/// Exempts this process from being killed when memory is short.
///
/// # Errors
/// The system's error; `PermissionDenied` without CAP_SYS_RESOURCE.
pub fn refuse_oom_kill() -> io::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "-1000")
}

/// Returns the effective user of the process.
#[must_use]
pub fn effective_user() -> u32 {
    // SAFETY: geteuid takes no arguments and always succeeds.
    unsafe { libc::geteuid() }
}

/// System user, with a primary group and all groups of which it is a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// Name.
    pub name: String,
    /// User ID.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
    /// All groups, including `gid`, sorted.
    pub groups: Vec<u32>,
}

/// Maximum size of an entry in the user and group databases; the entry of a group with many members
/// is long.
const ENTRY_BYTES_MAX: usize = 4 << 20;
/// Maximum number of groups of a user (`NGROUPS_MAX`).
const GROUPS_MAX: usize = 65536;

impl Account {
    /// Looks up a user and its groups. `group` replaces the user's primary group.
    ///
    /// # Errors
    /// `NotFound`, with the name, for a user or group that does not exist; otherwise the system's
    /// error.
    pub fn find(name: &str, group: Option<&str>) -> io::Result<Self> {
        let missing = |what: &str, name: &str| {
            io::Error::new(io::ErrorKind::NotFound, format!("there is no {what} {name:?}"))
        };
        let user = CString::new(name)?;
        let ids = entry(|buffer| {
            // SAFETY: all zeroes make a passwd of null pointers and numbers.
            let (mut entry, mut found) = (unsafe { mem::zeroed() }, ptr::null_mut());
            let (at, size) = (buffer.as_mut_ptr(), buffer.len());
            // SAFETY: `user` ends with a NUL; the call writes to the entry, the buffer within its
            // size, and the pointer, all of which outlive it.
            let code = unsafe {
                libc::getpwnam_r(user.as_ptr(), &raw mut entry, at, size, &raw mut found)
            };
            (code, (!found.is_null()).then_some((entry.pw_uid, entry.pw_gid)))
        })?;
        let (uid, own) = ids.ok_or_else(|| missing("user", name))?;
        let gid = match group {
            None => own,
            Some(group) => group_id(group)?.ok_or_else(|| missing("group", group))?,
        };
        let mut groups = vec![0; 64];
        loop {
            let mut count = libc::c_int::try_from(groups.len()).unwrap_or(libc::c_int::MAX);
            let at = groups.as_mut_ptr();
            // SAFETY: `user` ends with a NUL; `at` has room for `count` groups.
            let code = unsafe { libc::getgrouplist(user.as_ptr(), gid, at, &raw mut count) };
            if code >= 0 {
                groups.truncate(usize::try_from(count).unwrap_or(0));
                break;
            }
            if groups.len() >= GROUPS_MAX {
                return Err(io::Error::other(format!("user {name:?} is in too many groups")));
            }
            groups.resize(groups.len() * 4, 0);
        }
        groups.sort_unstable();
        groups.dedup();
        Ok(Self { name: name.to_owned(), uid, gid, groups })
    }
}

fn group_id(name: &str) -> io::Result<Option<u32>> {
    let group = CString::new(name)?;
    entry(|buffer| {
        // SAFETY: all zeroes make a group of null pointers and numbers.
        let (mut entry, mut found) = (unsafe { mem::zeroed() }, ptr::null_mut());
        let (at, size) = (buffer.as_mut_ptr(), buffer.len());
        // SAFETY: as for a user.
        let code =
            unsafe { libc::getgrnam_r(group.as_ptr(), &raw mut entry, at, size, &raw mut found) };
        (code, (!found.is_null()).then_some(entry.gr_gid))
    })
}

/// Reads an entry of a database, with a buffer that is large enough for it.
fn entry<T>(
    mut read: impl FnMut(&mut [libc::c_char]) -> (libc::c_int, Option<T>),
) -> io::Result<Option<T>> {
    let mut buffer = vec![0; 4096];
    loop {
        match read(&mut buffer) {
            (0, found) => return Ok(found),
            (libc::ERANGE, _) if buffer.len() < ENTRY_BYTES_MAX => {
                buffer.resize(buffer.len() * 4, 0);
            }
            // Some implementations report a missing entry as an error (getpwnam(3)).
            (libc::ENOENT | libc::ESRCH, _) => return Ok(None),
            (code, _) => return Err(io::Error::from_raw_os_error(code)),
        }
    }
}

/// Sets whether this process receives SIGTERM when the thread that started it ends
/// (`PR_SET_PDEATHSIG`).
///
/// # Errors
/// The system's error.
pub fn end_with_starter(ends: bool) -> io::Result<()> {
    const UNUSED: libc::c_ulong = 0;
    let signal = if ends { libc::SIGTERM } else { 0 };
    // SAFETY: this prctl takes numbers and accesses no memory of this process.
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal, UNUSED, UNUSED, UNUSED) })
}

/// Prevents programs executed by this thread, or by threads that it starts, from gaining more
/// privileges than the process (`PR_SET_NO_NEW_PRIVS`). Call it before there are other threads.
///
/// # Errors
/// The system's error.
pub fn forbid_new_privileges() -> io::Result<()> {
    const ON: libc::c_ulong = 1;
    const UNUSED: libc::c_ulong = 0;
    // SAFETY: this prctl takes numbers and accesses no memory of this process.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, ON, UNUSED, UNUSED, UNUSED) })
}

/// Switches the whole process permanently to an account and its groups; for root, this drops all
/// capabilities. The C library makes these system calls on every thread. Open files stay open.
///
/// # Errors
/// The system's error, or an error if the process can still become root. The process should then
/// exit.
pub fn become_account(account: &Account) -> io::Result<()> {
    let Account { uid, gid, groups, .. } = account;
    let dumps_are_forbidden = dumps_are_forbidden();
    // SAFETY: setgroups reads as many groups as there are.
    check(unsafe { libc::setgroups(groups.len(), groups.as_ptr()) })?;
    // SAFETY: these take numbers and access no memory of this process.
    check(unsafe { libc::setresgid(*gid, *gid, *gid) })?;
    // SAFETY: as above.
    check(unsafe { libc::setresuid(*uid, *uid, *uid) })?;
    // SAFETY: as above.
    if unsafe { libc::setuid(0) } == 0 {
        return Err(io::Error::other("the process can still become root"));
    }
    // Changing the user may have permitted dumps (fs.suid_dumpable).
    if dumps_are_forbidden { forbid_dumps() } else { Ok(()) }
}

/// While this guard exists, its thread opens, creates and removes files as an account, with only
/// that account's rights, and the files that it creates belong to the account. Threads started in
/// that time do so permanently.
#[derive(Debug)]
pub struct FilesAs {
    before: (u32, u32),
    /// Binds the guard to its thread.
    _thread: PhantomData<*const ()>,
}

impl FilesAs {
    /// Switches this thread's file access to the account.
    ///
    /// # Errors
    /// `PermissionDenied` if the process may not act as the account.
    pub fn begin(account: &Account) -> io::Result<Self> {
        // Set the user last, since this drops the capabilities for files (capabilities(7)).
        let gid = set_files_group(account.gid);
        let guard = Self { before: (set_files_user(account.uid), gid), _thread: PhantomData };
        // An invalid ID changes nothing and returns the current one.
        let now = (set_files_user(u32::MAX), set_files_group(u32::MAX));
        if now == (account.uid, account.gid) {
            Ok(guard)
        } else {
            Err(io::ErrorKind::PermissionDenied.into())
        }
    }
}

impl Drop for FilesAs {
    fn drop(&mut self) {
        set_files_user(self.before.0);
        set_files_group(self.before.1);
    }
}

/// Returns the previous ID. There is no error: a change that is not permitted has no effect
/// (setfsuid(2)).
fn set_files_user(uid: u32) -> u32 {
    // SAFETY: setfsuid takes a number and accesses no memory of this process.
    unsafe { libc::setfsuid(uid) }.cast_unsigned()
}

fn set_files_group(gid: u32) -> u32 {
    // SAFETY: setfsgid takes a number and accesses no memory of this process.
    unsafe { libc::setfsgid(gid) }.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_forbids_core_dumps_has_none() {
        forbid_dumps().unwrap();
        assert!(dumps_are_forbidden());
    }

    #[test]
    fn executed_programs_inherit_only_the_standard_streams() {
        let (inherited, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let fd = inherited.as_raw_fd();
        // SAFETY: this fcntl takes numbers and accesses no memory of this process.
        check(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) }).unwrap();
        let path = format!("/proc/self/fd/{fd}");
        let is_passed_on = || {
            let found = std::process::Command::new("test").args(["-e", &path]).status();
            found.unwrap().success()
        };
        assert!(is_passed_on());
        close_descriptors_on_exec().unwrap();
        assert!(!is_passed_on());
    }

    #[test]
    fn accounts_are_found_with_their_groups() {
        let root = Account::find("root", None).unwrap();
        assert_eq!((root.uid, root.gid), (0, 0));
        assert!(root.groups.contains(&0) && root.groups.is_sorted(), "{root:?}");
        for (user, group, text) in [
            ("no-such-user", None, "there is no user \"no-such-user\""),
            ("root", Some("no-such-group"), "there is no group \"no-such-group\""),
        ] {
            let error = Account::find(user, group).unwrap_err();
            assert_eq!((error.kind(), &*error.to_string()), (io::ErrorKind::NotFound, text));
        }
        Account::find("a\0b", None).unwrap_err();
    }

    #[test]
    fn files_are_created_as_another_account_on_one_thread() {
        use std::os::unix::fs::MetadataExt;
        if effective_user() != 0 {
            return crate::skip::skip("not root");
        }
        let account = Account { name: "x".into(), uid: 4321, gid: 4322, groups: vec![] };
        let dir = std::env::temp_dir().join(format!("rtrs-files-as-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        std::os::unix::fs::chown(&dir, Some(4321), Some(4322)).unwrap();
        let owner = |name: &str| {
            std::fs::write(dir.join(name), "").unwrap();
            let meta = std::fs::metadata(dir.join(name)).unwrap();
            (meta.uid(), meta.gid())
        };
        let secret = dir.join("secret");
        std::fs::write(&secret, "").unwrap();
        let closed = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&secret, closed).unwrap();
        {
            let _as = FilesAs::begin(&account).unwrap();
            assert_eq!(owner("a"), (4321, 4322));
            let denied = std::fs::File::open(&secret).unwrap_err();
            assert_eq!(denied.kind(), io::ErrorKind::PermissionDenied);
            std::thread::scope(|scope| scope.spawn(|| ()).join().unwrap());
        }
        assert_eq!(owner("b"), (0, 0));
        std::fs::File::open(&secret).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn open_files_are_limited_only_by_the_hard_limit() {
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
    fn the_process_describes_itself() {
        assert!(page_size() >= 4096);
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let Privileges { ipc_lock, sys_admin } = privileges().unwrap();
        let bits = u64::from(ipc_lock) << 14 | u64::from(sys_admin) << 21;
        let line = status.lines().find(|line| line.starts_with("CapEff:")).unwrap();
        let set = u64::from_str_radix(line.trim_start_matches("CapEff:").trim(), 16).unwrap();
        assert_eq!(set & (1 << 14 | 1 << 21), bits);
    }
}
