//! Lock that allows one `apply` at a time in a run directory.

use std::fs::{File, TryLockError};
use std::time::{Duration, Instant};

use rtrs_core::local::{RunDir, open_log};

use crate::cmd::text::remark;
use crate::error::{Error, ErrorKind, system};

/// Maximum wait for another `apply`.
const WAIT_MAX: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// File name in the run directory.
const FILE: &str = "apply.lock";

/// Lock that is held until it is dropped. The processes of sessions do not inherit it.
pub(super) struct Lock(File);

impl Lock {
    /// Waits for the lock, and prints a remark if another `apply` holds it.
    ///
    /// # Errors
    /// Fails with [`ErrorKind::InUse`] when another `apply` takes too long.
    pub(super) fn take(run_dir: &RunDir) -> Result<Self, Error> {
        let path = run_dir.path().join(FILE);
        let what = format!("cannot lock {}", path.display());
        let file = open_log(&path).map_err(system(what.clone()))?;
        let deadline = Instant::now() + WAIT_MAX;
        let mut remarked = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self(file)),
                Err(TryLockError::Error(error)) => return Err(system(what)(error)),
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                    let text = format!(
                        "another apply has been running in this directory for over {} s; see {}",
                        WAIT_MAX.as_secs(),
                        path.display()
                    );
                    return Err(Error::new(ErrorKind::InUse, text));
                }
                Err(TryLockError::WouldBlock) => {}
            }
            if !std::mem::replace(&mut remarked, true) {
                remark("another apply is running in this run directory; waiting for it");
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing the file also unlocks it, so an error has no consequence.
        let _ = self.0.unlock();
    }
}
