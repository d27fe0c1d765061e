//! Thread that retries exports that could not be opened.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use super::exports::{OpenError, recovery};
use super::reload::Changes;
use crate::settings::ExportSpec;

/// Maximum time between checks of the list of failed exports, which a reload may change.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Time between checks while there are no failed exports. A change that fails wakes the thread.
const LOOK_IDLE: Duration = Duration::from_secs(30);

/// Adds the exports that could not be opened at startup, and starts the thread. The thread ends
/// some time after the exports are dropped.
pub(super) fn watch(
    changes: &Arc<Changes>,
    failures: Vec<(ExportSpec, OpenError)>,
) -> std::io::Result<()> {
    recovery::begin(&changes.exports, failures);
    let changes = Arc::downgrade(changes);
    let named = thread::Builder::new().name("export-retry".into());
    named.spawn(move || run(&changes)).map(drop)
}

fn run(changes: &Weak<Changes>) {
    loop {
        let Some(changes) = changes.upgrade() else { return };
        let wait = recovery::try_due(&changes.exports);
        let wait = wait.map_or(LOOK_IDLE, |wait| wait.min(LOOK_EVERY));
        let attempts = changes.exports.attempts();
        drop(changes);
        attempts.wait_or_wake(wait);
    }
}
