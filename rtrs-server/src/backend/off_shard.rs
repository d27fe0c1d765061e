//! Execution of blocking functions on a thread, with a time limit.

use std::io;
use std::sync::mpsc;
use std::thread;

use rtrs_core::time::Duration;

/// Runs `make` on a new thread. Returns None if it does not finish within the limit; its result is
/// then dropped on that thread.
pub(super) fn within<T: Send + 'static>(
    name: &str,
    limit: Duration,
    make: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Option<T>> {
    let (made, wait) = mpsc::channel();
    thread::Builder::new().name(name.into()).spawn(move || drop(made.send(make())))?;
    Ok(wait.recv_timeout(limit).ok())
}
