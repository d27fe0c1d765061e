//! The setting `user`: the work that the server does as root, and its switch to a different user.
//!
//! Owns [`RunAs`]. As root, the server opens its exports, creates the run and state directories for
//! the user, sets up its devices and rings, and listens. Then [`RunAs::enter`] drops all root
//! privileges on all threads, and verifies the result; no shard serves clients before that
//! (`serve.rs`). The control socket and the metrics are opened afterwards, so they belong to the
//! user, who can remove them later. Root touches nothing in the user's directories, because the
//! user could have placed links there (`FilesAs`).
//!
//! - A request that io_uring passes to a worker has the credentials of the thread that submitted
//!   it, and a ring never opens the paths of requests, so a ring created by root retains no
//!   privileges.
//! - Memory for RDMA is pinned later, for each path. The limit on locked memory is removed while
//!   that is allowed, so CAP_IPC_LOCK is not kept.
//! - The kernel makes such a process undumpable: another process of the same user cannot attach to
//!   it and take the descriptors that root has opened. It leaves no core dump.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, chown};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rtrs_core::local::RunDir;
use rtrs_core::rt::{
    Account, become_account, effective_user, forbid_new_privileges, unbound_locked_memory,
};

use super::stuck_threads::wait_for_stuck_threads;
use crate::error::{Error, ErrorKind, failed};
use crate::settings::Settings;
use crate::state::state_dir;

/// Directory of this process's threads.
const TASKS: &str = "/proc/self/task";
/// Prefix of the kernel's names for a ring's threads. A request on such a thread has its
/// submitter's credentials.
const RING_THREADS: &str = "iou-";
/// Lines of a thread's status that show its capabilities. The inheritable and bounding sets have no
/// effect without new privileges.
const CAPABILITIES: [&str; 3] = ["CapPrm:", "CapEff:", "CapAmb:"];

/// Longest time that a thread takes to end on a busy machine.
const THREAD_END_MAX: Duration = Duration::from_secs(10);
/// Interval between checks of the threads.
const CHECK_AGAIN: Duration = Duration::from_millis(1);
/// Maximum time to wait for threads that cannot take a signal.
const STUCK_MAX: Duration = Duration::from_secs(30);

/// The user that the server runs as once it has started.
#[derive(Debug)]
pub(super) struct RunAs {
    account: Account,
}

/// Run directory of a server with these settings.
pub(super) fn run_dir(set: &Settings) -> Result<RunDir, Error> {
    let default = set.user.is_some().then(|| RunDir::OF_SERVER.into());
    Ok(RunDir::new(set.run_dir.clone().or(default))?)
}

impl RunAs {
    /// Looks up the user named in the settings, if any, and checks that the server can switch to it
    /// and that existing directories belong to it.
    ///
    /// # Errors
    /// [`ErrorKind::System`] for a process that is not root, a user or group that does not exist,
    /// and root itself; [`ErrorKind::InUse`] for a directory of another user.
    pub(super) fn find(set: &Settings) -> Result<Option<Self>, Error> {
        let Some(user) = &set.user else { return Ok(None) };
        let text = format!("cannot run as user {user}");
        let refuse = |why: &str| Err(Error::new(ErrorKind::System, format!("{text}: {why}")));
        let own = effective_user();
        if own != 0 {
            return refuse(&format!(
                "the server runs as user {own}, and only root can become another user; start the \
                 server as root, or leave out --user"
            ));
        }
        let account = Account::find(&user.name, user.group.as_deref())
            .map_err(failed(ErrorKind::System, text.as_str()))?;
        if account.uid == 0 {
            return refuse("that user is root; choose another user, or leave out --user");
        }
        let this = Self { account };
        this.check_dir(run_dir(set)?.path(), "run-dir")?;
        if let Some(dir) = state_dir(set.state_dir.as_deref()) {
            this.check_dir(&dir, "state-dir")?;
        }
        Ok(Some(this))
    }

    /// Account of the user.
    pub(super) fn account(&self) -> &Account {
        &self.account
    }

    fn check_dir(&self, dir: &Path, setting: &str) -> Result<(), Error> {
        let Account { name, uid, .. } = &self.account;
        match fs::metadata(dir) {
            Ok(meta) if meta.uid() != *uid => {
                let text = format!(
                    "cannot run as user {name}: {setting} {} belongs to user {}; use `chown -R \
                     {name}`, or another --{setting}",
                    dir.display(),
                    meta.uid()
                );
                Err(Error::new(ErrorKind::InUse, text))
            }
            // Other problems are reported by the code that uses the directory.
            _ => Ok(()),
        }
    }

    /// Creates the user's missing directories. Must be called before any threads exist.
    ///
    /// # Errors
    /// [`ErrorKind::System`].
    pub(super) fn prepare(&self, set: &Settings) -> Result<(), Error> {
        forbid_new_privileges().map_err(failed(ErrorKind::System, "cannot set no_new_privs"))?;
        let dirs = [Some(run_dir(set)?.path().to_path_buf()), state_dir(set.state_dir.as_deref())];
        for dir in dirs.into_iter().flatten() {
            let text = format!("cannot create {} for user {}", dir.display(), self.account.name);
            self.make_dir(&dir).map_err(failed(ErrorKind::System, text))?;
        }
        Ok(())
    }

    fn make_dir(&self, dir: &Path) -> io::Result<()> {
        if let Some(parent) = dir.parent() {
            fs::create_dir_all(parent)?;
        }
        match fs::DirBuilder::new().mode(0o700).create(dir) {
            Ok(()) => chown(dir, Some(self.account.uid), Some(self.account.gid)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Irrevocably switches all threads to the user. `pins_memory` says whether paths will register
    /// memory.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if the system refuses, or a thread has kept privileges. The server
    /// must then exit.
    pub(super) fn enter(&self, pins_memory: bool) -> Result<(), Error> {
        if pins_memory && let Err(error) = unbound_locked_memory() {
            tracing::warn!(
                "cannot raise the limit of locked memory, which RDMA needs: {error}; use ulimit \
                 -l, or LimitMEMLOCK= in a systemd unit"
            );
        }
        let Account { name, uid, gid, .. } = &self.account;
        let text = format!("cannot run as user {name}");
        let refuse = |why: String| Error::new(ErrorKind::System, format!("{text}: {why}"));
        wait_for_stuck_threads(Path::new(TASKS), STUCK_MAX).map_err(refuse)?;
        become_account(&self.account).map_err(failed(ErrorKind::System, text.as_str()))?;
        wait_verified(THREAD_END_MAX, || verify(&self.account)).map_err(refuse)?;
        tracing::info!(user = %name, uid, gid, "the server has dropped root privileges");
        Ok(())
    }
}

/// Repeats a check until no thread has kept privileges, or until time is up. The C library does not
/// switch a thread that is ending, and the kernel lists it until it has ended.
fn wait_verified(
    time_max: Duration,
    mut check: impl FnMut() -> io::Result<Result<(), String>>,
) -> Result<(), String> {
    let until = Instant::now() + time_max;
    loop {
        let checked = check().map_err(|error| error.to_string())?;
        if checked.is_ok() || Instant::now() >= until {
            return checked;
        }
        thread::sleep(CHECK_AGAIN);
    }
}

/// Checks that every thread runs as the account without further privileges.
fn verify(account: &Account) -> io::Result<Result<(), String>> {
    for task in fs::read_dir(TASKS)? {
        let status = match fs::read_to_string(task?.path().join("status")) {
            Ok(status) => status,
            // The thread has ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) if error.raw_os_error() == Some(ESRCH) => continue,
            Err(error) => return Err(error),
        };
        if let Err(why) = check_thread(&status, account) {
            return Ok(Err(why));
        }
    }
    Ok(Ok(()))
}

/// Errno for "no such process".
const ESRCH: i32 = 3;

/// Checks the status of a thread (proc(5)).
fn check_thread(status: &str, account: &Account) -> Result<(), String> {
    let line = |key: &str| {
        let found = status.lines().find_map(|line| line.strip_prefix(key));
        found.map(str::trim).unwrap_or_default()
    };
    let name = line("Name:");
    if name.starts_with(RING_THREADS) {
        return Ok(());
    }
    let kept = |what: &str| Err(format!("thread {name} still has {what}"));
    // Text that is not a number yields a list that does not match.
    let numbers = |key: &str| -> Vec<u32> {
        line(key).split_whitespace().filter_map(|number| number.parse().ok()).collect()
    };
    if numbers("Uid:") != [account.uid; 4] {
        return kept("another user");
    }
    if numbers("Gid:") != [account.gid; 4] {
        return kept("another group");
    }
    let mut groups = numbers("Groups:");
    groups.sort_unstable();
    if groups != account.groups {
        return kept("other groups");
    }
    for key in CAPABILITIES {
        if u64::from_str_radix(line(key), 16) != Ok(0) {
            return kept("capabilities");
        }
    }
    if line("NoNewPrivs:") != "1" {
        return kept("a way to gain privileges");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> Account {
        Account { name: "rtrs".into(), uid: 990, gid: 985, groups: vec![6, 985] }
    }

    #[test]
    fn a_thread_that_kept_privileges_is_detected() {
        let good = "Name:\tshard-0\nUid:\t990\t990\t990\t990\nGid:\t985\t985\t985\t985\n\
             Groups:\t985 6 \nCapInh:\t0000000000000000\nCapPrm:\t0000000000000000\n\
             CapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\nCapAmb:\t0000000000000000\n\
             NoNewPrivs:\t1\n";
        assert_eq!(check_thread(good, &account()), Ok(()));
        for (from, to, what) in [
            ("Uid:\t990\t990\t990\t990", "Uid:\t990\t990\t0\t990", "another user"),
            ("Gid:\t985", "Gid:\t0", "another group"),
            ("985 6", "985 6 0", "other groups"),
            ("Groups:\t985 6 ", "Groups:\t", "other groups"),
            ("CapPrm:\t0000000000000000", "CapPrm:\t0000000000004000", "capabilities"),
            ("CapEff:\t0000000000000000", "CapEff:\t0000000000004000", "capabilities"),
            ("CapAmb:\t0000000000000000\n", "", "capabilities"),
            ("NoNewPrivs:\t1", "NoNewPrivs:\t0", "a way to gain privileges"),
        ] {
            let bad = good.replace(from, to);
            let why = format!("thread shard-0 still has {what}");
            assert_eq!(check_thread(&bad, &account()), Err(why), "{to}");
        }
        assert_eq!(check_thread("Name:\tiou-wrk-17\nUid:\t0 0 0 0\n", &account()), Ok(()));
    }

    #[test]
    fn an_ending_thread_is_waited_for() {
        let mut checks = 0;
        let ended = wait_verified(Duration::from_secs(60), || {
            checks += 1;
            Ok(if checks < 3 {
                Err("thread export-open has kept another user".into())
            } else {
                Ok(())
            })
        });
        assert_eq!((ended, checks), (Ok(()), 3));
        let kept = || Ok(Err("thread shard-0 has kept another user".to_owned()));
        let kept = wait_verified(Duration::from_millis(1), kept);
        assert_eq!(kept, Err("thread shard-0 has kept another user".into()));
    }

    #[test]
    fn the_run_directory_of_a_user_differs_from_roots() {
        let of = |yaml: &str| {
            let set = Settings::from_yaml(yaml, "test").unwrap();
            run_dir(&set).unwrap().path().to_path_buf()
        };
        assert_eq!(of("user: rtrs\n"), Path::new("/run/rtrs-server"));
        assert_eq!(of("user: rtrs\nrun-dir: /r\n"), Path::new("/r"));
        assert_ne!(of(""), Path::new("/run/rtrs-server"));
    }

    #[test]
    fn a_failed_change_of_user_is_reported() {
        let find = |user: &str| {
            let yaml = format!("user: {user}\nrun-dir: /nowhere/r\nstate-dir: /nowhere/s\n");
            let found = RunAs::find(&Settings::from_yaml(&yaml, "test").unwrap());
            found.unwrap_err().chain().to_string()
        };
        if effective_user() != 0 {
            let text = find("root");
            assert!(text.contains("only root can become another user"), "{text}");
            return;
        }
        for (user, why) in [
            ("no-such-user", "cannot run as user no-such-user: there is no user \"no-such-user\""),
            ("root", "cannot run as user root: that user is root; choose another user"),
            ("nobody:no-such-group", "there is no group \"no-such-group\""),
        ] {
            let text = find(user);
            assert!(text.contains(why), "{text}");
        }
    }
}
