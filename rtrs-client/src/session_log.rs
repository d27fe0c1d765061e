//! Log of a background session, `NAME.log` in the run directory.
//!
//! Each attach of the name appends to the log. The session's process locks the file as long as it
//! is open, so one of two simultaneous attaches is refused.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rtrs_core::local::{RunDir, open_log};

/// Environment variable with the log path of a background daemon; unset in all other processes.
pub(crate) const DAEMON_LOG: &str = "RTRS_CLIENT_BACKGROUND_LOG";
/// Environment variable with the process ID of the command that started a background daemon.
pub(crate) const STARTER: &str = "RTRS_CLIENT_STARTER";
/// Maximum time for which an ending session may still hold its log.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);
/// Size beyond which the next attach renames a log to `NAME.log.old`.
const BYTES_MAX: u64 = 4 << 20;
/// Time for which the log of a failed attach is kept.
const FAILED_KEPT: Duration = Duration::from_secs(24 * 3600);
/// Beginning of the last line logged by a failed process.
const FAILED: &str = "rtrs-client: ";

/// Whether this process is a background daemon, started by the attach or apply command.
pub(crate) fn is_in_background() -> bool {
    std::env::var_os(DAEMON_LOG).is_some()
}

/// Whether the command that started this background daemon has ended, so that this process has a
/// new parent.
pub(crate) fn has_starter_ended() -> bool {
    let starter = std::env::var(STARTER).ok().and_then(|id| id.parse::<u32>().ok());
    starter.is_some_and(|starter| starter != parent_id())
}

/// Log owned by this process until it and all its copies are dropped.
#[derive(Debug)]
pub(crate) struct SessionLog {
    path: PathBuf,
    file: File,
    /// Position at which this attach's lines begin.
    begin: u64,
}

/// Reason why a log cannot be opened.
#[derive(Debug)]
pub(crate) enum LogError<E> {
    /// Another process holds the log: the name is being attached or detached.
    Busy,
    /// Another process holds the log, for this reason.
    Taken(E),
    /// System error.
    System(io::Error),
}

/// Path of the log for a name.
pub(crate) fn path_of(run_dir: &RunDir, name: &str) -> PathBuf {
    run_dir.control_socket(name).with_extension("log")
}

impl SessionLog {
    /// Opens and locks the log. Another process that holds the log may be about to end, so this
    /// waits briefly, unless `is_free` objects.
    pub(crate) fn open<E>(
        path: PathBuf,
        is_free: impl Fn() -> Result<(), E>,
    ) -> Result<Self, LogError<E>> {
        let system = LogError::System;
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            let file = open_log(&path).map_err(system)?;
            match file.try_lock() {
                Ok(()) => {
                    let begin = file.metadata().map_err(system)?.len();
                    if begin <= BYTES_MAX {
                        return Ok(Self { path, file, begin });
                    }
                    fs::rename(&path, path.with_extension("log.old")).map_err(system)?;
                }
                Err(TryLockError::Error(error)) => return Err(system(error)),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    is_free().map_err(LogError::Taken)?;
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(TryLockError::WouldBlock) => return Err(LogError::Busy),
            }
        }
    }

    /// Returns the file for the session's process, which inherits the lock.
    pub(crate) fn for_process(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Last message of this attach's process, if it ended with an error.
    pub(crate) fn last_error(&self) -> Option<String> {
        let mut file = File::open(&self.path).ok()?;
        file.seek(SeekFrom::Start(self.begin)).ok()?;
        let mut text = String::new();
        file.take(BYTES_MAX).read_to_string(&mut text).ok()?;
        text.lines().rev().find_map(|line| line.strip_prefix(FAILED)).map(str::to_owned)
    }
}

/// Removes logs of attaches that failed more than a day ago. Leaves logs that cannot be removed.
pub(crate) fn remove_failed(run_dir: &Path, now: SystemTime) {
    for entry in fs::read_dir(run_dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let old = entry
            .metadata()
            .and_then(|meta| meta.modified())
            .is_ok_and(|modified| now.duration_since(modified).is_ok_and(|age| age > FAILED_KEPT));
        if old && path.extension().is_some_and(|ending| ending == "log") && has_failed(&path) {
            let _ = fs::remove_file(&path);
        }
    }
}

/// Whether no process holds the log and its last line is an error.
fn has_failed(path: &Path) -> bool {
    let failed = || {
        let mut log = open_log(path).ok()?;
        log.try_lock().ok()?;
        // The file is open for appending, so it is reopened for reading.
        let length = log.seek(SeekFrom::End(0)).ok()?;
        let mut file = File::open(path).ok()?;
        file.seek(SeekFrom::Start(length.saturating_sub(4096))).ok()?;
        let mut tail = Vec::new();
        file.read_to_end(&mut tail).ok()?;
        Some(String::from_utf8_lossy(&tail).lines().last()?.starts_with(FAILED))
    };
    failed().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("rtrs-log-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn open(&self) -> Result<SessionLog, LogError<()>> {
            SessionLog::open(self.0.join("v.log"), || Ok(()))
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn an_attach_appends_and_reads_only_its_own_error() {
        let dir = Dir::new("append");
        let log = dir.open().unwrap();
        log.for_process().unwrap().write_all(b"rtrs-client: the first\n").unwrap();
        assert_eq!(log.last_error().as_deref(), Some("the first"));
        assert!(matches!(dir.open(), Err(LogError::Busy)), "held by this process");
        drop(log);
        let log = dir.open().unwrap();
        assert_eq!(log.last_error(), None, "it was from the previous attach");
        log.for_process().unwrap().write_all(b"more\nrtrs-client: the second\n").unwrap();
        assert_eq!(log.last_error().as_deref(), Some("the second"));
        let text = fs::read_to_string(log.path()).unwrap();
        assert_eq!(text, "rtrs-client: the first\nmore\nrtrs-client: the second\n");
    }

    #[test]
    fn a_long_log_is_rotated() {
        let dir = Dir::new("long");
        let log = dir.open().unwrap();
        log.file.set_len(BYTES_MAX + 1).unwrap();
        drop(log);
        assert_eq!(dir.open().unwrap().begin, 0);
        assert_eq!(fs::metadata(dir.0.join("v.log.old")).unwrap().len(), BYTES_MAX + 1);
    }

    #[test]
    fn only_old_logs_of_failed_attaches_are_removed() {
        let dir = Dir::new("failed");
        let write = |name: &str, text: &str| fs::write(dir.0.join(name), text).unwrap();
        write("good.log", "rtrs-client: an error\ndevice open\n");
        write("bad.log", "device open\nrtrs-client: an error\n");
        write("bad.identity", "rtrs-client: an error\n");
        write("held.log", "rtrs-client: an error\n");
        let held = SessionLog::open::<()>(dir.0.join("held.log"), || Ok(())).unwrap();
        let left = || {
            let names = fs::read_dir(&dir.0).unwrap().map(|entry| entry.unwrap().file_name());
            let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
            names.sort();
            names.join(" ")
        };
        remove_failed(&dir.0, SystemTime::now() + FAILED_KEPT / 2);
        assert_eq!(left(), "bad.identity bad.log good.log held.log");
        remove_failed(&dir.0, SystemTime::now() + FAILED_KEPT * 2);
        assert_eq!(left(), "bad.identity good.log held.log");
        drop(held);
    }
}
