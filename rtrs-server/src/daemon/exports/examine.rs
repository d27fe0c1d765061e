//! Examination of targets: whether the paths of exports still lead to what is open, and whether that
//! was deleted.

use std::sync::Arc;

use rtrs_core::time::Duration;

use super::last_copy::last_copy;
use crate::export::{Export, ExportTable};

/// Maximum time to examine the target of a path, because file systems can hang.
pub(super) const LOOK_MAX: Duration = Duration::from_millis(500);

/// Examines the targets of the exports in a table.
pub(in crate::daemon) struct TargetExaminer(Arc<ExportTable>);

impl TargetExaminer {
    pub(super) fn new(table: &Arc<ExportTable>) -> Self {
        Self(Arc::clone(table))
    }

    /// Examines the targets of all exports.
    pub(in crate::daemon) fn examine_all(&self) {
        let exports = self.0.all();
        exports.iter().for_each(|(_, export)| export.source.examine_name(Duration::ZERO));
        // They are examined in order, so it suffices to wait for the last one.
        let mut named = exports.iter().rev();
        if let Some((_, last)) = named.find(|(_, export)| export.source.target_name().is_some()) {
            last.source.examine_name(LOOK_MAX);
        }
        exports.iter().for_each(|(_, export)| export.note_orphan());
    }

    /// Examines the target of an export, which is returned.
    pub(super) fn examine(&self, name: &str) -> Option<Arc<Export>> {
        let export = self.0.get(self.0.find(name.as_bytes())?)?;
        export.source.examine_name(LOOK_MAX);
        export.note_orphan();
        Some(export)
    }

    /// Returns why an export should not be closed if its content would end with it.
    pub(in crate::daemon) fn last_copy(&self, name: &str) -> Option<String> {
        last_copy(&*self.examine(name)?)
    }

    /// Returns why the server should not end if the content of exports would end with it.
    pub(in crate::daemon) fn last_copies(&self) -> Option<String> {
        self.examine_all();
        let all: Vec<_> = self.0.all().iter().filter_map(|(_, export)| last_copy(export)).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }
}
