//! Changed settings of exports. Some apply to an open export; for others the target is closed and
//! opened again. Several targets are opened at the same time, because each may be slow.

use std::sync::Arc;

use parking_lot::MutexGuard;

use super::{Entry, Exports, LAST_COPY_HINT, RELEASE_MAX, done, recovery};
use crate::engine::message::AdminRequest;
use crate::export::{Export, Reserved};
use crate::settings::ExportSpec;
use crate::stats::{Revoked, TRIES_AGAIN};

/// An export that is closed to be opened again with changed settings.
pub(in crate::daemon) struct Closed {
    entry: Entry,
    spec: ExportSpec,
    export: Arc<Export>,
    applied: Applied,
    /// Kept until the export is open again or has failed.
    reserved: Reserved,
}

/// Result of a change of settings.
#[derive(Debug, Default)]
pub(in crate::daemon) struct Applied {
    /// Losses of sessions by the changed access list; None if the settings matched already.
    pub(super) revoked: Option<Vec<Revoked>>,
    /// Problems that did not keep the settings from being applied.
    pub(in crate::daemon) warnings: Vec<String>,
}

/// Beginning of a change of settings.
pub(in crate::daemon) enum Begun {
    /// The settings matched already.
    Unchanged,
    /// The settings apply.
    Changed(Applied),
    Closed(Box<Closed>),
}

impl Exports {
    /// Applies changed settings to an export like [`Self::begin_change`] and
    /// [`Self::finish_changes`]. Others may check lists for losses as soon as those of the export
    /// are changed.
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
            self.entries.insert(spec, &export, entry.configured);
            let revoked = Some(self.access.change_list(&entry.spec, spec)?);
            return Ok(Begun::Changed(Applied { revoked, warnings: Vec::new() }));
        }
        entry.keeps_memory(spec)?;
        if let Some(why) = entry.last_copy().filter(|_| !force) {
            return Err(format!("{why}{LAST_COPY_HINT}"));
        }
        let reserved = self.table.reserve(name);
        let (export, _) = self.unpublish(name, false).map_err(|(why, open)| {
            let only = "; only access, and ro of an export that was opened for writing, can change \
                        while it is open";
            why + if open { only } else { "" }
        })?;
        // The export must be opened again whatever has become of the list.
        let (revoked, problem) = match self.access.change_list(&entry.spec, spec) {
            Ok(revoked) => (revoked, None),
            Err(why) => (Vec::new(), Some(why)),
        };
        let warnings = problem.into_iter().collect();
        let applied = Applied { revoked: Some(revoked), warnings };
        let (entry, spec) = (entry.clone(), spec.clone());
        Ok(Begun::Closed(Box::new(Closed { entry, spec, export, applied, reserved })))
    }

    /// Opens closed exports with their changed settings, and those that fail with their old ones.
    /// The server tries again to open those that fail with both. Returns the settings with what the
    /// changes have led to, or with the reasons of failures.
    pub(in crate::daemon) fn finish_changes(
        &self,
        all: Vec<Closed>,
    ) -> Vec<(ExportSpec, Result<Applied, String>)> {
        let (exports, mut changes): (Vec<_>, Vec<_>) = all
            .into_iter()
            .map(|Closed { entry, spec, export, applied, reserved }| {
                (export, Change { entry, spec, applied, failed: None, _reserved: reserved })
            })
            .unzip();
        let released = self.opener.release_each(exports, RELEASE_MAX);
        for (change, released) in changes.iter_mut().zip(released) {
            change.applied.warnings.extend(released.err());
        }
        self.open_changed(&mut changes);
        self.reopen_unchanged(&mut changes);
        let result = |change: Change| {
            let Applied { warnings, .. } = &change.applied;
            let failed = change.failed.map(|why| [&warnings[..], &[why]].concat().join("; "));
            (change.spec, failed.map_or(Ok(change.applied), Err))
        };
        changes.into_iter().map(result).collect()
    }

    /// Opens the exports with their changed settings.
    fn open_changed(&self, changes: &mut [Change]) {
        let specs: Vec<_> = changes.iter().map(|change| change.spec.clone()).collect();
        for (change, opened) in changes.iter_mut().zip(self.opener.open_all(&specs)) {
            let published = opened.and_then(|export| {
                Ok(self.publish(&change.spec, &export, change.entry.configured)?)
            });
            change.failed = published.err().map(|error| error.why);
        }
    }

    /// Opens the exports whose change has failed with their old settings.
    fn reopen_unchanged(&self, changes: &mut [Change]) {
        let mut changes: Vec<_> =
            changes.iter_mut().filter_map(|change| Some((change.failed.take()?, change))).collect();
        let specs: Vec<_> = changes.iter().map(|(_, change)| change.entry.spec.clone()).collect();
        let opened = self.opener.open_all(&specs);
        for ((why, change), opened) in changes.iter_mut().zip(opened) {
            let Entry { spec, configured, .. } = &change.entry;
            change.applied.warnings.extend(self.access.change_list(&change.spec, spec).err());
            let published =
                opened.and_then(|export| Ok(self.publish(spec, &export, *configured)?));
            change.failed = Some(match published {
                Ok(()) => format!("{why}; the export keeps its old options"),
                Err(again) => {
                    let text = format!(
                        "{why}; and it could not be opened with its old options, with which \
                         {TRIES_AGAIN}: {again}"
                    );
                    recovery::note_failed(self, spec.clone(), *configured, again);
                    text
                }
            });
        }
    }
}

/// A closed export while it is opened again.
struct Change {
    entry: Entry,
    spec: ExportSpec,
    applied: Applied,
    /// Reason why it is not open with the changed settings.
    failed: Option<String>,
    _reserved: Reserved,
}
