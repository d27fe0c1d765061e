//! What a process does about itself: its terminal, its memory, its place in the kernel's eyes.
//!
//! A process that serves a block device of the kernel must not wait for that device: not for a page
//! of its own that was written there, not for memory that is freed by writing there. The calls for
//! that are made once at start, before there are threads, which inherit them.
//!
//! A server that is started by root can go on as another user ([`Account`], [`become_account`]).

use std::ffi::CString;
use std::io;
use std::marker::PhantomData;
use std::mem;
use std::os::fd::AsRawFd;
use std::ptr;

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

/// Keeps the memory of the process, and with it its keys, out of core dumps, and from other
/// processes of its user (PR_SET_DUMPABLE).
///
/// # Errors
/// The system's error.
pub fn forbid_dumps() -> io::Result<()> {
    const OFF: libc::c_ulong = 0;
    // SAFETY: this prctl takes numbers and touches no memory of ours.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, OFF, OFF, OFF, OFF) })
}

/// Whether [`forbid_dumps`] holds.
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
    if unbound_locked_memory().is_err() && !privileges()?.ipc_lock {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    // SAFETY: mlockall changes no contents; locked memory is used like any other.
    check(unsafe { libc::mlockall(libc::MCL_CURRENT) })?;
    let later = libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT;
    // SAFETY: as above.
    check(unsafe { libc::mlockall(later) })
}

/// Takes away the bound of locked memory (RLIMIT_MEMLOCK), which holds for a process without
/// CAP_IPC_LOCK.
///
/// # Errors
/// The system's error; `PermissionDenied` without CAP_SYS_RESOURCE.
pub fn unbound_locked_memory() -> io::Result<()> {
    let unbounded = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: setrlimit reads one rlimit.
    check(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const unbounded) })
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

/// The effective user of the process.
#[must_use]
pub fn effective_user() -> u32 {
    // SAFETY: geteuid takes nothing and always succeeds.
    unsafe { libc::geteuid() }
}

/// A user of the system, with a group and all groups that it is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// Its name.
    pub name: String,
    /// The user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// All its groups, `gid` among them, sorted.
    pub groups: Vec<u32>,
}

/// Longest entry of the databases of users and groups; a group with many members is long.
const ENTRY_BYTES_MAX: usize = 4 << 20;
/// Most groups of a user (`NGROUPS_MAX`).
const GROUPS_MAX: usize = 65536;

impl Account {
    /// Looks up a user, and the groups that it is in. `group` takes the place of the group that the
    /// user has there.
    ///
    /// # Errors
    /// `NotFound`, saying of what, for a user or group that does not exist; else the system's
    /// error.
    pub fn find(name: &str, group: Option<&str>) -> io::Result<Self> {
        let missing = |what: &str, name: &str| {
            io::Error::new(io::ErrorKind::NotFound, format!("there is no {what} {name:?}"))
        };
        let user = CString::new(name)?;
        let ids = entry(|buffer| {
            // SAFETY: all zeroes are a passwd of null pointers and numbers.
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
        // SAFETY: all zeroes are a group of null pointers and numbers.
        let (mut entry, mut found) = (unsafe { mem::zeroed() }, ptr::null_mut());
        let (at, size) = (buffer.as_mut_ptr(), buffer.len());
        // SAFETY: as for a user.
        let code =
            unsafe { libc::getgrnam_r(group.as_ptr(), &raw mut entry, at, size, &raw mut found) };
        (code, (!found.is_null()).then_some(entry.gr_gid))
    })
}

/// Reads an entry of a database with a buffer that is large enough for it.
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
            // Some say that there is none with an error (getpwnam(3)).
            (libc::ENOENT | libc::ESRCH, _) => return Ok(None),
            (code, _) => return Err(io::Error::from_raw_os_error(code)),
        }
    }
}

/// Makes no program that this thread, or one that it starts, executes have more privileges than the
/// process (`PR_SET_NO_NEW_PRIVS`). Call it before there are other threads.
///
/// # Errors
/// The system's error.
pub fn forbid_new_privileges() -> io::Result<()> {
    const ON: libc::c_ulong = 1;
    const UNUSED: libc::c_ulong = 0;
    // SAFETY: this prctl takes numbers and touches no memory of ours.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, ON, UNUSED, UNUSED, UNUSED) })
}

/// Makes an account the user of the whole process, with its groups and for good: from root this
/// takes all capabilities. The C library has every thread make these system calls. What is open
/// stays open.
///
/// # Errors
/// The system's error, after which the process should end; also if it can still become root.
pub fn become_account(account: &Account) -> io::Result<()> {
    let Account { uid, gid, groups, .. } = account;
    let dumps_are_forbidden = dumps_are_forbidden();
    // SAFETY: setgroups reads as many groups as there are.
    check(unsafe { libc::setgroups(groups.len(), groups.as_ptr()) })?;
    // SAFETY: these take numbers and touch no memory of ours.
    check(unsafe { libc::setresgid(*gid, *gid, *gid) })?;
    // SAFETY: as above.
    check(unsafe { libc::setresuid(*uid, *uid, *uid) })?;
    // SAFETY: as above.
    if unsafe { libc::setuid(0) } == 0 {
        return Err(io::Error::other("the process can still become root"));
    }
    // A change of the user may have allowed them (fs.suid_dumpable).
    if dumps_are_forbidden { forbid_dumps() } else { Ok(()) }
}

/// While it lives, this thread opens, makes and removes files as an account, with no more rights
/// than that has; files that it makes belong to the account. Threads that it starts do so for good.
#[derive(Debug)]
pub struct FilesAs {
    before: (u32, u32),
    /// It belongs to its thread.
    _thread: PhantomData<*const ()>,
}

impl FilesAs {
    /// Begins.
    ///
    /// # Errors
    /// `PermissionDenied` if the process may not act as the account.
    pub fn begin(account: &Account) -> io::Result<Self> {
        // The user last: the capabilities for files go with it (capabilities(7)).
        let gid = set_files_group(account.gid);
        let guard = Self { before: (set_files_user(account.uid), gid), _thread: PhantomData };
        // An id that cannot be: changes nothing and returns what holds.
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

/// Returns the one before. There is no error: what is not allowed changes nothing (setfsuid(2)).
fn set_files_user(uid: u32) -> u32 {
    // SAFETY: setfsuid takes a number and touches no memory of ours.
    unsafe { libc::setfsuid(uid) }.cast_unsigned()
}

fn set_files_group(gid: u32) -> u32 {
    // SAFETY: setfsgid takes a number and touches no memory of ours.
    unsafe { libc::setfsgid(gid) }.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_forbids_dumps_has_none() {
        forbid_dumps().unwrap();
        assert!(dumps_are_forbidden());
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
    fn files_are_made_as_another_account_on_this_thread_alone() {
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
