//! Work on a target that may hang, such as a file of an NFS server that is down, with a time limit.

use std::sync::mpsc;
use std::thread;

use super::failed::{ATTEMPT_MAX, HANGS};

/// Runs work on a thread of its own, and returns its result. After the time limit of an attempt the
/// result is dropped whenever it comes, and with it a target that was opened.
///
/// # Errors
/// If the work takes too long, or no thread can be started.
pub(super) fn in_time<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let (result, done) = mpsc::channel();
    let named = thread::Builder::new().name("export-target".into());
    // The receiver may have stopped waiting.
    let started = named.spawn(move || drop(result.send(work())));
    started.map_err(|error| format!("cannot start a thread: {error}"))?;
    done.recv_timeout(ATTEMPT_MAX).unwrap_or_else(|_| Err(HANGS.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_late_result_is_dropped() {
        assert_eq!(in_time(|| Ok(1)), Ok(1));
        let (let_go, hanging) = mpsc::channel::<()>();
        let late = Arc::new(());
        let result = Arc::clone(&late);
        let hung = in_time(move || {
            // Ends when the sender is dropped.
            let _ = hanging.recv();
            Ok(result)
        });
        assert!(hung.unwrap_err().contains("does not answer"));
        drop(let_go);
        while Arc::strong_count(&late) > 1 {
            thread::yield_now();
        }
    }
}
