//! Exports that could not be reopened, with the reasons and times of the attempts.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Interval between attempts to reopen an export.
const RETRY: Duration = Duration::from_secs(10);

/// A failed attempt to reopen an export.
#[derive(Debug)]
struct Failure {
    at: Instant,
    why: String,
}

/// Failed attempts to reopen exports, by name.
#[derive(Debug, Default)]
pub(super) struct NotReopened(Mutex<BTreeMap<String, Failure>>);

impl NotReopened {
    /// Whether an export may be reopened now.
    pub(super) fn is_due(&self, name: &str, now: Instant) -> bool {
        let is_old = |failure: &Failure| now.saturating_duration_since(failure.at) >= RETRY;
        self.0.lock().get(name).is_none_or(is_old)
    }

    /// Forgets the failures of an export that was reopened.
    pub(super) fn forget(&self, name: &str) {
        self.0.lock().remove(name);
    }

    /// Records why an export was not reopened, and logs a new reason.
    pub(super) fn note(&self, name: &str, why: &str) {
        let failure = Failure { at: Instant::now(), why: why.to_owned() };
        let known = self.0.lock().insert(name.to_owned(), failure);
        if known.is_none_or(|known| known.why != why) {
            tracing::error!(export = name, "not reopened: {why}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_attempt_is_repeated_after_a_pause() {
        let (failures, before) = (NotReopened::default(), Instant::now());
        failures.note("vol", "locked");
        assert!(!failures.is_due("vol", before) && failures.is_due("other", before));
        assert!(failures.is_due("vol", Instant::now() + RETRY));
        failures.forget("vol");
        assert!(failures.is_due("vol", before));
    }
}
