//! Accesses of a process to its guest's memory, which a simulation can end at any of them.

use std::cell::Cell;

thread_local! {
    /// Number of accesses until the process dies; None for a process that lives on.
    static ACCESSES_LEFT: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Counts an access to the guest's memory or to the record of requests in flight. Returns false if
/// the process has died, so that the access does not happen.
#[cfg(debug_assertions)]
pub(crate) fn may_access() -> bool {
    let left = ACCESSES_LEFT.get();
    if let Some(count) = left {
        ACCESSES_LEFT.set(Some(count.saturating_sub(1)));
    }
    left != Some(0)
}

/// Runs a part of a process that dies after `accesses` accesses to the guest's memory and to the
/// record of requests in flight, if there is a limit: all later accesses fail. Returns the number
/// of accesses left, with 0 for a process that is dead. Builds without debug assertions have no
/// limit.
pub fn run_until_death(accesses: Option<u32>, part: impl FnOnce()) -> Option<u32> {
    ACCESSES_LEFT.set(accesses);
    part();
    ACCESSES_LEFT.take()
}
