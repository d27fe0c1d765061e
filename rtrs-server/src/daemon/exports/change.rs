//! Changes to export settings. Some settings can be applied to an open export; for others, the
//! target is closed and reopened (`finish.rs`).

use std::sync::Arc;

use parking_lot::MutexGuard;

use super::entry::Unpublished;
use super::{Entry, Exports, LAST_COPY_HINT, done};
use crate::daemon::access::FormerAccess;
use crate::engine::message::AdminRequest;
use crate::export::{Export, Reserved};
use crate::settings::ExportSpec;
use crate::stats::Revoked;

/// An export that has been closed to be reopened with changed settings.
pub(in crate::daemon) struct Closed {
    pub(super) entry: Entry,
    pub(super) spec: ExportSpec,
    pub(super) export: Arc<Export>,
    pub(super) applied: Applied,
    /// Access before the list was changed.
    pub(super) former: Option<FormerAccess>,
    /// Kept until the export is open again or has failed.
    pub(super) reserved: Reservation,
}

/// The name and access list of a temporarily closed export.
#[derive(Debug)]
pub(super) struct Reservation {
    _name: Reserved,
    _list: Unpublished,
}

/// Result of a change to settings.
#[derive(Debug, Default)]
pub(in crate::daemon) struct Applied {
    /// Access that sessions lost through the changed list; None if the settings were unchanged.
    pub(super) revoked: Option<Vec<Revoked>>,
    /// Problems that did not prevent the settings from being applied.
    pub(in crate::daemon) warnings: Vec<String>,
}

/// Result of the first step of a change to settings.
pub(in crate::daemon) enum Begun {
    /// The settings were already the same.
    Unchanged,
    /// The settings have been applied.
    Changed(Applied),
    Closed(Box<Closed>),
}

impl Exports {
    /// Applies changed settings to an export, like [`Self::begin_change`] followed by
    /// [`Self::finish_changes`]. Other threads may check lists for losses as soon as the export's
    /// list has changed.
    pub(super) fn change(
        &self,
        entry: &Entry,
        spec: &ExportSpec,
        force: bool,
        checking_losses: MutexGuard<'_, ()>,
    ) -> Result<Applied, String> {
        let begun = self.begin_change(entry, spec, force);
        drop(checking_losses);
        match begun? {
            Begun::Unchanged => Ok(Applied::default()),
            Begun::Changed(applied) => Ok(applied),
            Begun::Closed(closed) => self.finish_changes(vec![*closed]).remove(0).1,
        }
    }

    /// Reserves the name and access list of an export that is about to be closed and reopened,
    /// until the result is dropped.
    pub(super) fn reserve(&self, entry: &Entry) -> Reservation {
        let name = entry.spec.name();
        let list = self.entries.unpublished(name, entry.configured);
        Reservation { _name: self.table.reserve(name), _list: list }
    }

    /// Applies changed settings to an export that can stay open, or closes it. Unless forced,
    /// refuses to close the last copy of a file.
    pub(in crate::daemon) fn begin_change(
        &self,
        entry: &Entry,
        spec: &ExportSpec,
        force: bool,
    ) -> Result<Begun, String> {
        let name = spec.name();
        if entry.spec == *spec {
            return Ok(Begun::Unchanged);
        }
        if let Some(export) = entry.export.upgrade().filter(|_| entry.stays_open(spec)) {
            if spec.ro != entry.spec.ro {
                let request = AdminRequest::ExportFreeze { name: name.to_owned(), frozen: spec.ro };
                self.control.ask(request, done)?;
            }
            let limits = spec.rate_limits();
            if limits != entry.spec.rate_limits() {
                let request = AdminRequest::ExportLimit { name: name.to_owned(), limits };
                self.control.ask(request, done)?;
            }
            self.entries.insert(spec, &export, entry.configured);
            let revoked = Some(self.access.change_list(&entry.spec, spec)?);
            return Ok(Begun::Changed(Applied { revoked, warnings: Vec::new() }));
        }
        entry.keeps_memory(spec)?;
        if let Some(why) = entry.last_copy().filter(|_| !force) {
            return Err(format!("{why}{LAST_COPY_HINT}"));
        }
        let reserved = self.reserve(entry);
        let (export, _) = self.unpublish(name, false).map_err(|(why, open)| {
            let only = "; while an export is open, only access, rate limits, and ro if it was \
                        opened for writing, can change";
            why + if open { only } else { "" }
        })?;
        // The export must be reopened whatever happens to the list.
        let former = self.access.set_list(&entry.spec, spec);
        let checked = former.as_ref().map_or(Ok(Vec::new()), |_| self.access.check());
        let (revoked, problem) = match checked {
            Ok(revoked) => (revoked, None),
            Err(why) => (Vec::new(), Some(why)),
        };
        let warnings = problem.into_iter().collect();
        let applied = Applied { revoked: Some(revoked), warnings };
        let (entry, spec) = (entry.clone(), spec.clone());
        Ok(Begun::Closed(Box::new(Closed { entry, spec, export, applied, former, reserved })))
    }
}
