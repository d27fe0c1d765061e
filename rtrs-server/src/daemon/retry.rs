//! Thread that tries to open the exports that failed at the start of the server.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use super::exports::recovery;
use super::reload::Changes;
use crate::settings::ExportSpec;

/// Maximum time between looks at the list of failed exports, which a reload may change.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Adds the exports that a start could not open, and starts the thread if there are any. The thread
/// ends when no failed export is left, or soon after the exports are dropped.
pub(super) fn watch(
    changes: &Arc<Changes>,
    failures: Vec<(ExportSpec, String)>,
) -> std::io::Result<()> {
    if failures.is_empty() {
        return Ok(());
    }
    recovery::begin(&changes.exports, failures);
    let changes = Arc::downgrade(changes);
    let named = thread::Builder::new().name("export-retry".into());
    named.spawn(move || run(&changes)).map(drop)
}

/// Tries until no failed export is left: only a start adds exports to the list.
fn run(changes: &Weak<Changes>) {
    loop {
        let Some(changes) = changes.upgrade() else { return };
        let Some(wait) = recovery::try_due(&changes.exports) else { return };
        let attempts = changes.exports.attempts();
        drop(changes);
        attempts.wait(wait.min(LOOK_EVERY));
    }
}
