//! The lock between commands that save exports and `reload`.
//!
//! If a `reload` ran after an export was changed but before the file was written, it would read the
//! old file and undo the change. Commands therefore hold the lock exclusively, while reloads share
//! it. The lock is a file next to the control socket; only users of the socket can open it.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rtrs_core::time::Duration;

use crate::error::{Error, ErrorKind};

/// Maximum time that a command waits for another command or for a reload.
const COMMAND_PATIENCE: Duration = Duration::from_secs(10);
/// Maximum time that a reload waits for commands. It is short because the reload may have to end
/// sessions.
const RELOAD_PATIENCE: Duration = Duration::from_secs(5);
/// Time between attempts.
const INTERVAL: Duration = Duration::from_millis(5);

/// A server's lock.
#[derive(Debug)]
pub(crate) struct SaveLock(PathBuf);

/// Removes the lock's file when dropped.
#[derive(Debug)]
pub(crate) struct LockFile(PathBuf);

impl Drop for LockFile {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            tracing::warn!("cannot remove {}: {error}", self.0.display());
        }
    }
}

impl SaveLock {
    /// Creates the lock for the server with this control socket, and its file.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub(crate) fn create(socket: &Path) -> io::Result<(Self, LockFile)> {
        let path = path_beside(socket);
        let mut options = File::options();
        options.write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        options.open(&path)?;
        Ok((Self(path.clone()), LockFile(path)))
    }

    /// Acquires the lock for a reload. Returns None if commands hold it for too long or it cannot
    /// be opened; the reload then goes ahead, because it may have to end sessions.
    pub(crate) fn share(&self) -> Option<File> {
        let locked = File::open(&self.0)
            .and_then(|file| acquire(&file, File::try_lock_shared, RELOAD_PATIENCE).map(|()| file));
        locked
            .inspect_err(|error| {
                let path = self.0.display();
                tracing::warn!(
                    "reloading without the lock {path}, which excludes commands with --save: \
                     {error}"
                );
            })
            .ok()
    }
}

/// Acquires the lock for a command sent to the server with this control socket.
///
/// # Errors
/// [`ErrorKind::System`] if another command or a reload holds it for too long.
pub(crate) fn acquire_for_command(socket: &Path) -> Result<File, Error> {
    let path = path_beside(socket);
    let locked = File::open(&path)
        .and_then(|file| acquire(&file, File::try_lock, COMMAND_PATIENCE).map(|()| file));
    locked.map_err(|error| not_locked(&path, error))
}

/// Acquires the lock on a directory for a command, so that commands to two servers do not overwrite
/// each other's changes to a file.
///
/// # Errors
/// [`ErrorKind::System`] if the directory cannot be opened, or another process holds the lock for
/// too long.
pub(crate) fn acquire_directory(path: &Path) -> Result<File, Error> {
    let locked = File::open(path)
        .and_then(|dir| acquire(&dir, File::try_lock, COMMAND_PATIENCE).map(|()| dir));
    locked.map_err(|error| not_locked(path, error))
}

fn not_locked(path: &Path, error: io::Error) -> Error {
    let path = path.display();
    let text = match error.kind() {
        io::ErrorKind::WouldBlock => format!(
            "nothing changed: another process holds the lock {path}, such as a command with --save \
             or a reload; find the process with `fuser -v {path}`"
        ),
        _ => format!("nothing changed: cannot lock {path}"),
    };
    Error::with_source(ErrorKind::System, text, error)
}

fn path_beside(socket: &Path) -> PathBuf {
    let mut path = socket.to_path_buf().into_os_string();
    path.push(".lock");
    path.into()
}

/// Acquires a lock with `attempt`, or fails with [`io::ErrorKind::WouldBlock`] after `patience`.
fn acquire(
    file: &File,
    attempt: impl Fn(&File) -> Result<(), TryLockError>,
    patience: Duration,
) -> io::Result<()> {
    let end = std::time::Instant::now() + patience;
    loop {
        match attempt(file) {
            Err(TryLockError::WouldBlock) if std::time::Instant::now() < end => {
                std::thread::sleep(INTERVAL);
            }
            done => return done.map_err(io::Error::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reloads_share_the_lock_that_a_command_holds_exclusively() {
        let dir = std::env::temp_dir().join(format!("rtrs-save-lock-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let socket = dir.join("a.srv");
        let (lock, file) = SaveLock::create(&socket).unwrap();
        let is_refused = |attempt: fn(&File) -> Result<(), TryLockError>| {
            let file = File::open(path_beside(&socket)).unwrap();
            acquire(&file, attempt, Duration::ZERO).is_err()
        };
        let reloads = (lock.share().unwrap(), lock.share().unwrap());
        assert!(is_refused(File::try_lock));
        drop(reloads);
        let command = acquire_for_command(&socket).unwrap();
        assert!(is_refused(File::try_lock_shared));
        assert!(is_refused(File::try_lock));
        drop(command);
        // A program started by another test may briefly hold a copy of the descriptor.
        let free = File::open(path_beside(&socket)).unwrap();
        acquire(&free, File::try_lock_shared, Duration::from_secs(60)).unwrap();
        drop(file);
        std::fs::remove_dir(&dir).expect("nothing is left");
    }
}
