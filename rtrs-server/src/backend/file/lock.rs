//! The lock (`flock`) that prevents a second server from writing to the same file.
//!
//! The kernel keeps a killed server's lock until the last write in progress has completed, so a
//! restarted server waits for such writes. On a file system without locks, a writable export is
//! refused unless the operator has set `no-lock`.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;

use rtrs_core::time::Duration;

use super::super::target::BackendError;

/// Maximum time to wait for a locked target before refusing it.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// Lock functions, provided by the system or a test.
#[derive(Debug)]
pub(super) struct Locks {
    /// Takes the exclusive lock without waiting.
    pub(super) take: fn(&File) -> Result<(), TryLockError>,
    /// Fails if the file system does not support locks. Does not take the lock.
    pub(super) probe: fn(&File) -> io::Result<()>,
}

/// The system's lock functions.
pub(super) const SYSTEM: Locks = Locks { take: File::try_lock, probe: File::unlock };

impl Locks {
    /// Locks a writable target for this process. A read-only target needs no lock, but a warning is
    /// logged if nothing prevents another server from writing to it.
    ///
    /// # Errors
    /// Fails if the target is locked, or if it cannot be locked and `no_lock` is false.
    pub(super) fn guard(
        &self,
        path: &Path,
        file: &File,
        read_only: bool,
        no_lock: bool,
    ) -> Result<(), BackendError> {
        let locked = if read_only { (self.probe)(file) } else { self.lock(path, file)? };
        match locked {
            Ok(()) => Ok(()),
            Err(error) if read_only || no_lock => {
                tracing::warn!(
                    path = %path.display(), %error,
                    "the file system does not support locks; another server could write at the \
                     same time"
                );
                Ok(())
            }
            Err(error) => Err(BackendError::path(
                path,
                "cannot be locked for writing",
                "use a file system with flock, or export it with `ro`; if no other server can \
                 write to it, use `no-lock`",
            )
            .because(error)),
        }
    }

    /// Takes the lock, or returns the system's reason why locks are unavailable. Retries for a
    /// while: after an io_uring is closed or its process is killed, the kernel takes some time to
    /// release the files.
    fn lock(&self, path: &Path, file: &File) -> Result<io::Result<()>, BackendError> {
        let mut waited = Duration::ZERO;
        loop {
            match (self.take)(file) {
                Ok(()) => return Ok(Ok(())),
                Err(TryLockError::WouldBlock) if waited < LOCK_PATIENCE => {
                    let pause = Duration::from_millis(20);
                    std::thread::sleep(pause);
                    waited += pause;
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(BackendError::path(
                        path,
                        "is locked: it is already exported, or another program uses it",
                        "stop the other program, or export it with `ro`",
                    ));
                }
                Err(TryLockError::Error(error)) => return Ok(Err(error)),
            }
        }
    }
}
