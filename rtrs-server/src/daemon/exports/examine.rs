//! Examination of targets: whether the paths of exports still resolve to the open files, and
//! whether those files were deleted.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use rtrs_core::time::Duration;

use super::last_copy::last_copy;
use crate::export::{Export, ExportTable};

/// Maximum time to examine the target of a path; limited because file systems can hang.
pub(super) const LOOK_MAX: Duration = Duration::from_millis(500);
/// Maximum time to examine a file that may have been deleted, before its export is closed. Another
/// target that hangs can delay an examination by a second.
const LOOK_BEFORE_CLOSE_MAX: Duration = Duration::from_secs(5);

/// Examines the targets of the exports in a table.
pub(in crate::daemon) struct TargetExaminer(Arc<ExportTable>);

impl TargetExaminer {
    pub(super) fn new(table: &Arc<ExportTable>) -> Self {
        Self(Arc::clone(table))
    }

    /// Examines the targets of all exports for a list.
    pub(super) fn look_at_all(&self) {
        examine(&self.exports(), LOOK_MAX);
    }

    /// Examines the targets of all exports, some of which are about to be closed.
    pub(in crate::daemon) fn examine_all(&self) {
        examine_before_close(&self.exports());
    }

    /// Examines the target of an export that is about to be closed. Returns the export.
    pub(super) fn examine(&self, name: &str) -> Option<Arc<Export>> {
        let export = self.0.get(self.0.find(name.as_bytes())?)?;
        examine_before_close(std::slice::from_ref(&export));
        Some(export)
    }

    fn exports(&self) -> Vec<Arc<Export>> {
        self.0.all().into_iter().map(|(_, export)| export).collect()
    }

    /// Returns the reason not to close an export, if closing it would lose its contents.
    pub(in crate::daemon) fn last_copy(&self, name: &str) -> Option<String> {
        last_copy(&*self.examine(name)?)
    }

    /// Returns the reason for the server not to exit, if exiting would lose the contents of
    /// exports.
    pub(in crate::daemon) fn last_copies(&self) -> Option<String> {
        self.examine_all();
        let all: Vec<_> = self.0.all().iter().filter_map(|(_, export)| last_copy(export)).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }
}

/// Examines the targets of exports, and waits up to `within` for the results. Returns, for each,
/// whether the result is known.
pub(super) fn examine(exports: &[Arc<Export>], within: Duration) -> Vec<bool> {
    let looks: Vec<_> =
        exports.iter().map(|export| (export, export.source.examine_name())).collect();
    let until = Instant::now() + within;
    let has_ended = |(export, number): &(&Arc<Export>, u64)| export.source.is_examined(*number);
    while !looks.iter().all(has_ended) && Instant::now() < until {
        thread::sleep(Duration::from_millis(1));
    }
    exports.iter().for_each(|export| export.note_orphan());
    looks.iter().map(has_ended).collect()
}

/// Examines the targets of exports that are about to be closed, and records which are unknown.
fn examine_before_close(exports: &[Arc<Export>]) {
    let examined = examine(exports, LOOK_BEFORE_CLOSE_MAX);
    for (export, ended) in exports.iter().zip(examined) {
        export.note_examined(ended);
    }
}
