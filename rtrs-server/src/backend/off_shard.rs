//! What may block, on a thread that is given a time.

use std::io;
use std::sync::mpsc;
use std::thread;

use rtrs_core::time::Duration;

/// What a thread of its own makes. None when it does not within this time; then it is dropped
/// there.
pub(super) fn within<T: Send + 'static>(
    name: &str,
    limit: Duration,
    make: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Option<T>> {
    let (made, wait) = mpsc::channel();
    thread::Builder::new().name(name.into()).spawn(move || drop(made.send(make())))?;
    Ok(wait.recv_timeout(limit).ok())
}
