//! Parallel execution of the same work for many items.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// Stack size of a thread that only sends requests and waits.
const STACK_BYTES: usize = 512 << 10;

/// Calls `one` for each item, up to `max` at the same time. The results are in the order of `all`.
pub(super) fn at_once<T: Sync, R: Send>(
    all: &[T],
    max: usize,
    one: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(all.len())));
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(found) = all.get(at) else { return };
            let result = one(found);
            results.lock().push((at, result));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..all.len().min(max) {
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
            // The existing threads do the work of a thread that cannot be started.
            if thread.spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    let mut results = results.into_inner();
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}
