//! Work with a time limit on targets that may hang, such as a file on an NFS server that is down.

use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use super::failed::{ATTEMPT_MAX, HANGS};

/// Maximum number of targets worked on at once.
const AT_ONCE: usize = 64;

/// Runs work on a thread of its own, and returns its result. A result that arrives after the time
/// limit is dropped, along with any target that was opened.
///
/// # Errors
/// Returns an error if the work takes too long, or if no thread can be started.
pub(super) fn in_time<T: Send + 'static, E: From<String> + Send + 'static>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    begin(work)?.end(Instant::now() + ATTEMPT_MAX)
}

/// Runs work like [`in_time`] for all items, up to [`AT_ONCE`] of them at once.
pub(super) fn all_in_time<I, T, E>(
    items: &[I],
    work: impl Fn(I) -> Result<T, E> + Clone + Send + 'static,
) -> Vec<Result<T, E>>
where
    I: Clone + Send + 'static,
    T: Send + 'static,
    E: From<String> + Send + 'static,
{
    let run = |items: &[I]| -> Vec<Result<T, E>> {
        let start = |item: &I| {
            let (work, item) = (work.clone(), item.clone());
            begin(move || work(item))
        };
        let (begun, until) = (items.iter().map(start).collect::<Vec<_>>(), Instant::now());
        begun.into_iter().map(|work| work?.end(until + ATTEMPT_MAX)).collect()
    };
    items.chunks(AT_ONCE).flat_map(run).collect()
}

/// Work on a thread of its own.
struct Work<T, E>(mpsc::Receiver<Result<T, E>>);

impl<T, E: From<String>> Work<T, E> {
    /// Waits for the result.
    fn end(self, until: Instant) -> Result<T, E> {
        let rest = until.saturating_duration_since(Instant::now());
        self.0.recv_timeout(rest).unwrap_or_else(|_| Err(HANGS.to_owned().into()))
    }
}

/// Begins work on a thread of its own.
fn begin<T: Send + 'static, E: From<String> + Send + 'static>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<Work<T, E>, E> {
    let (result, done) = mpsc::channel();
    let named = thread::Builder::new().name("export-target".into());
    // The receiver may have stopped waiting.
    let started = named.spawn(move || drop(result.send(work())));
    started.map_err(|error| format!("cannot start a thread: {error}"))?;
    Ok(Work(done))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_late_result_is_dropped() {
        assert_eq!(in_time(|| Ok::<_, String>(1)), Ok(1));
        let (let_go, hanging) = mpsc::channel::<()>();
        let late = Arc::new(());
        let result = Arc::clone(&late);
        let hung = in_time(move || {
            // Ends when the sender is dropped.
            let _ = hanging.recv();
            Ok::<_, String>(result)
        });
        assert!(hung.unwrap_err().contains("does not respond"));
        drop(let_go);
        while Arc::strong_count(&late) > 1 {
            thread::yield_now();
        }
    }

    #[test]
    fn hanging_work_delays_no_other_work() {
        let (let_go, hanging) = mpsc::channel::<()>();
        let hanging = Arc::new(parking_lot::Mutex::new(hanging));
        let all = all_in_time(&[1, 2, 3, 4], move |n| match n {
            // Both hang at the same time, so the time limit passes only once.
            2 | 4 => Err(hanging.lock().recv().unwrap_err().to_string()),
            _ => Ok(n),
        });
        assert_eq!((&all[0], &all[2]), (&Ok(1), &Ok(3)));
        let hung = |at: usize| all[at].as_ref().is_err_and(|why| why == HANGS);
        assert!(hung(1) && hung(3), "{all:?}");
        drop(let_go);
    }
}
