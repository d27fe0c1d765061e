//! Changed settings of exports. Some apply to an open export; for others the target is closed and
//! opened again. Several targets are opened at the same time, because each may be slow.

use std::sync::Arc;

use parking_lot::MutexGuard;

use super::{Entry, Exports, LAST_COPY_HINT, RELEASE_MAX, done, recovery};
use crate::engine::message::AdminRequest;
use crate::export::Export;
use crate::settings::ExportSpec;
use crate::stats::{Revoked, TRIES_AGAIN};

/// An export that is closed to be opened again with changed settings.
pub(in crate::daemon) struct Closed {
    entry: Entry,
    spec: ExportSpec,
    export: Arc<Export>,
    /// Losses of sessions by the changed access list.
    revoked: Vec<Revoked>,
}

/// Beginning of a change of settings.
pub(in crate::daemon) enum Begun {
    /// The settings matched already.
    Unchanged,
    /// The settings apply, with these losses of sessions.
    Changed(Vec<Revoked>),
    Closed(Box<Closed>),
}

impl Exports {
    /// Applies changed settings to an export like [`Self::begin_change`] and
    /// [`Self::finish_changes`]. Returns the losses of sessions, or None if the settings already
    /// match. Others may check lists for losses as soon as those of the export are changed.
    pub(super) fn change(
        &self,
        entry: &Entry,
        spec: &ExportSpec,
        force: bool,
        checking_losses: MutexGuard<'_, ()>,
    ) -> Result<Option<Vec<Revoked>>, String> {
        let begun = self.begin_change(entry, spec, force);
        drop(checking_losses);
        match begun? {
            Begun::Unchanged => Ok(None),
            Begun::Changed(revoked) => Ok(Some(revoked)),
            Begun::Closed(closed) => {
                let mut results = self.finish_changes(vec![*closed]);
                results.remove(0).1.map(Some)
            }
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
            return self.access.change_list(&entry.spec, spec).map(Begun::Changed);
        }
        entry.keeps_memory(spec)?;
        if let Some(why) = entry.last_copy().filter(|_| !force) {
            return Err(format!("{why}{LAST_COPY_HINT}"));
        }
        let (export, _) = self.unpublish(name, false).map_err(|(why, open)| {
            let only = "; only access, and ro of an export that was opened for writing, can change \
                        while it is open";
            why + if open { only } else { "" }
        })?;
        let revoked = self.access.change_list(&entry.spec, spec)?;
        let (entry, spec) = (entry.clone(), spec.clone());
        Ok(Begun::Closed(Box::new(Closed { entry, spec, export, revoked })))
    }

    /// Opens closed exports with their changed settings, and those that fail with their old ones.
    /// Returns the settings with the losses of sessions, or the reason of the failure. An export
    /// that cannot be released in time is not opened again.
    pub(in crate::daemon) fn finish_changes(
        &self,
        all: Vec<Closed>,
    ) -> Vec<(ExportSpec, Result<Vec<Revoked>, String>)> {
        let (exports, mut changes): (Vec<_>, Vec<_>) = all
            .into_iter()
            .map(|Closed { entry, spec, export, revoked }| {
                (export, Change { entry, spec, revoked, failed: None })
            })
            .unzip();
        let released = self.opener.release_each(exports, RELEASE_MAX);
        let mut results = Vec::new();
        changes = changes
            .into_iter()
            .zip(released)
            .filter_map(|(change, released)| match released {
                Ok(()) => Some(change),
                Err(why) => {
                    results.push((change.spec, Err(why)));
                    None
                }
            })
            .collect();
        self.open_changed(&mut changes);
        self.reopen_unchanged(&mut changes);
        results.extend(changes.into_iter().map(|change| match change.failed {
            None => (change.spec, Ok(change.revoked)),
            Some(why) => (change.spec, Err(why)),
        }));
        results
    }

    /// Opens the exports with their changed settings.
    fn open_changed(&self, changes: &mut [Change]) {
        let specs: Vec<_> = changes.iter().map(|change| change.spec.clone()).collect();
        for (change, opened) in changes.iter_mut().zip(self.open_all(&specs)) {
            let published = opened.and_then(|export| {
                Ok(self.publish(&change.spec, &export, change.entry.configured)?)
            });
            change.failed = published.err().map(|error| error.why);
        }
    }

    /// Opens the exports whose change has failed with their old settings. The server tries again to
    /// open those that fail.
    fn reopen_unchanged(&self, changes: &mut [Change]) {
        let mut changes: Vec<_> =
            changes.iter_mut().filter_map(|change| Some((change.failed.take()?, change))).collect();
        let specs: Vec<_> = changes.iter().map(|(_, change)| change.entry.spec.clone()).collect();
        let opened = self.open_all(&specs);
        for ((why, change), opened) in changes.iter_mut().zip(opened) {
            let Entry { spec, configured, .. } = &change.entry;
            let listed = self.access.change_list(&change.spec, spec);
            let published = opened.and_then(|export| {
                listed?;
                Ok(self.publish(spec, &export, *configured)?)
            });
            change.failed = Some(match published {
                Ok(()) => format!("{why}; the export keeps its old options"),
                Err(again) => {
                    let text = format!(
                        "{why}; and it could not be opened with its old options, with which \
                         {TRIES_AGAIN}: {again}"
                    );
                    recovery::note_failed(self, spec.clone(), again);
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
    revoked: Vec<Revoked>,
    /// Reason why it is not open with the changed settings.
    failed: Option<String>,
}
