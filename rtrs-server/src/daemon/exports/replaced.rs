//! Exports whose path no longer resolves to the open file or device, and read-only exports that
//! still hold a writer's locks. Both are reopened when no session uses them: the new target is
//! opened first, without delaying changes to other exports, and then replaces the old target.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use rtrs_core::block::TargetName;
use rtrs_core::time::Duration;

use super::examine::{LOOK_MAX, examine};
use super::in_time::in_time;
use super::last_copy::orphan;
use super::{Entry, Exports, Followed, Opened, RELEASE_MAX, recovery};
use crate::engine::finder::Examined;
use crate::export::{Export, Lookup};
use crate::settings::Target;
use crate::stats::TRIES_AGAIN;

/// Maximum time that an open waits for a change to its export to finish.
const OPEN_TURN_MAX: Duration = Duration::from_secs(1);

/// Reason why an export in use keeps its target.
const IN_USE: &str = "its path refers to another file or device, but sessions have the old target \
                      open; its content may be lost when the last session closes it: copy it \
                      through a client first. The new target is exported after that";

/// Reason why an export whose path no longer exists keeps its target.
const MISSING: &str = "its path no longer exists; the open target is still exported. If it was \
                       deleted, its content is lost when the server stops: copy it through a \
                       client first";

/// Reason why an opened target does not replace the old target.
enum NotReplaced {
    /// The old target is still exported.
    Kept(String),
    /// Neither target is exported. The server keeps trying to open the path.
    Failed(String),
}

/// Result of comparing an export with its path.
enum Found {
    /// The target stays as it is.
    Stays(Followed),
    ToReopen(Box<Entry>),
}

impl Exports {
    /// Name of the export that has this file or device open for writing, if there is one.
    pub(super) fn holder_of(&self, target: &Target) -> Option<String> {
        let (opener, entries, target) = (Arc::clone(&self.opener), self.entries(), target.clone());
        // Accessing files can hang; in that case the error names no export.
        let found = in_time(move || {
            let id_of = |target: &Target| match target {
                Target::Path(path) => opener.sources.target(path),
                _ => None,
            };
            let id = id_of(&target);
            let holds = |entry: &Entry| !entry.opened_ro && id_of(&entry.spec.target) == id;
            let mut entries = entries.into_iter().filter(|_| id.is_some());
            Ok::<_, String>(entries.find(|(_, entry)| holds(entry)).map(|(name, _)| name))
        });
        found.ok().flatten()
    }

    /// Examines the target of an export that a session is about to open, and reopens it if its path
    /// now resolves to a different target. If another change to the export takes too long, because
    /// the target hangs, the open must be refused.
    pub(in crate::daemon) fn examine_before_open(&self, name: &[u8]) -> Examined {
        let Some(export) = self.table.find(name).and_then(|at| self.table.get(at)) else {
            // A change in progress may be about to publish this name again.
            if self.table.lookup(name) == Lookup::Changing {
                drop(self.turns.of(&String::from_utf8_lossy(name), OPEN_TURN_MAX));
            }
            return Examined::Yes;
        };
        examine(std::slice::from_ref(&export), LOOK_MAX);
        if export.source.is_cut() {
            tracing::warn!(
                export = &*export.name,
                "opened at its old size, but its target is shorter: IO beyond the end of the \
                 target fails"
            );
        }
        if export.source.target_name() != Some(TargetName::Replaced) {
            return Examined::Yes;
        }
        let name = export.name.clone();
        // The old export is closed when its last reference is dropped.
        drop(export);
        if let Some(_turn) = self.turns.of(&name, OPEN_TURN_MAX) {
            // The outcome is logged; an export that cannot be reopened is opened as it is.
            let _ = self.follow_all(std::slice::from_ref(&name), false);
            return Examined::Yes;
        }
        let standing = self.entry(&name).map(|entry| self.standing(&entry));
        if standing != Some(Followed::Reopened) {
            return Examined::Yes;
        }
        tracing::warn!(
            export = name,
            "open refused: the path refers to another target, which cannot be opened while another \
             change of the export is running"
        );
        Examined::Outdated
    }

    /// Returns the names of unused exports that are due to be reopened.
    pub(in crate::daemon) fn to_reopen(&self) -> Vec<String> {
        let all = self.table.all().into_iter().map(|(_, export)| export);
        let all = all.inspect(|export| export.note_orphan());
        let to_reopen = all.filter(|export| {
            export.source.target_name() == Some(TargetName::Replaced)
                || self.entry(&export.name).is_some_and(|entry| entry.keeps_writer_locks())
        });
        let now = Instant::now();
        let is_due =
            |name: &String| self.not_reopened.is_due(name, now) && self.turns.are_free_for(name);
        let mut due: Vec<_> = to_reopen.map(|export| export.name.clone()).filter(is_due).collect();
        if !due.is_empty() {
            // If the control shard does not answer, the next check will ask again.
            let all = self.list_now().map(|list| list.exports).unwrap_or_default();
            let unused = all.iter().filter(|export| export.open_by.is_empty() && !export.found);
            let unused: BTreeSet<_> = unused.map(|export| &*export.name).collect();
            due.retain(|name| unused.contains(&**name));
        }
        due
    }

    /// Reopens an export if that is due and no session uses it. Does nothing while a change is in
    /// progress: the change itself reopens the export if necessary.
    pub(in crate::daemon) fn reopen_unused(&self, name: &str) {
        let Some(_turn) = self.turns.of(name, Duration::ZERO) else { return };
        let _ = self.follow_all(&[name.to_owned()], false);
        self.give_up_writer_locks(name);
    }

    /// Compares exports with their paths, and concurrently reopens unused exports that were
    /// replaced. Unless forced, keeps a file that was deleted before something else appeared at its
    /// path. The caller must hold the turn for these exports.
    pub(in crate::daemon) fn follow_all(&self, names: &[String], force: bool) -> Vec<Followed> {
        let found: Vec<_> = names.iter().map(|name| self.find_replaced(name, force)).collect();
        let specs = found.iter().filter_map(|found| match found {
            Found::ToReopen(entry) => Some(entry.spec.clone()),
            Found::Stays(_) => None,
        });
        let mut opened = self.opener.open_all(&specs.collect::<Vec<_>>()).into_iter();
        let follow = |found: Found| match found {
            Found::Stays(followed) => followed,
            Found::ToReopen(entry) => {
                let opened = opened.next().unwrap_or_else(|| Err("it was not opened".into()));
                self.replace(&entry, opened)
            }
        };
        found.into_iter().map(follow).collect()
    }

    /// Compares an export with its path.
    fn find_replaced(&self, name: &str, force: bool) -> Found {
        let Some(entry) = self.entry(name) else { return Found::Stays(Followed::Same) };
        match self.standing(&entry) {
            Followed::Reopened => Found::ToReopen(Box::new(entry)),
            Followed::Orphan(_) if force => Found::ToReopen(Box::new(entry)),
            Followed::Orphan(why) => {
                self.not_reopened.note(name, &why);
                Found::Stays(Followed::Orphan(why))
            }
            other => Found::Stays(other),
        }
    }

    /// Exports the opened target of the path in place of the old target.
    fn replace(&self, entry: &Entry, opened: Opened) -> Followed {
        let name = entry.spec.name();
        let replaced = opened.map_err(|error| NotReplaced::Kept(error.why));
        match replaced.and_then(|export| self.reopen(entry, &export, Duration::ZERO)) {
            Ok(()) => {
                self.not_reopened.forget(name);
                tracing::info!(export = name, "reopened: the path refers to another target");
                Followed::Reopened
            }
            Err(NotReplaced::Failed(why)) => Followed::Failed(why),
            Err(NotReplaced::Kept(why)) => {
                let why = format!(
                    "its path refers to another file or device, which cannot be exported: {why}; \
                     the old target is still exported"
                );
                self.not_reopened.note(name, &why);
                Followed::Kept(why)
            }
        }
    }

    /// Reopens an unused export that has become read-only, so that its writer locks are released: a
    /// virtual machine may then write to the file. An export whose path no longer leads to its file
    /// stays as it is. The caller must hold the export's turn.
    pub(super) fn give_up_writer_locks(&self, name: &str) {
        let entry = self.entry(name).filter(Entry::keeps_writer_locks);
        let Some(entry) = entry.filter(|_| self.is_open(name) == Ok(false)) else { return };
        match self.open_for_reading(&entry) {
            Ok(None) => {}
            Ok(Some(export)) => match self.reopen(&entry, &export, RELEASE_MAX) {
                Ok(()) => self.not_reopened.forget(name),
                Err(NotReplaced::Kept(why)) => self.not_reopened.note(name, &why),
                // Already logged.
                Err(NotReplaced::Failed(_)) => {}
            },
            Err(why) => {
                let why = format!(
                    "the export is now read-only, but still holds the locks of a writer: {why}"
                );
                self.not_reopened.note(name, &why);
            }
        }
    }

    /// Opens the target of a read-only export whose target is still open for writing. Returns None
    /// if the path resolves to a different target.
    fn open_for_reading(&self, entry: &Entry) -> Result<Option<Arc<Export>>, String> {
        let Some(old) = entry.export.upgrade() else { return Ok(None) };
        if old.source.target_name() != Some(TargetName::Kept) {
            return Ok(None);
        }
        let (opener, spec) = (Arc::clone(&self.opener), entry.spec.clone());
        let opened: Opened = in_time(move || {
            // Settle first: if the flush raises the epoch, that must happen before the export is
            // opened.
            old.source.settle().map_err(|error| format!("cannot flush the export: {error}"))?;
            let export = opener.open_shared(&spec)?;
            if export.file == old.file { Ok(export) } else { Err("its path has changed".into()) }
        });
        opened.map(Some).map_err(|error| error.why)
    }

    /// Returns the result that [`Self::follow_all`] would return for an export.
    pub(in crate::daemon) fn standing(&self, entry: &Entry) -> Followed {
        let Some(export) = entry.export.upgrade() else { return Followed::Same };
        match export.source.target_name() {
            None | Some(TargetName::Kept) => Followed::Same,
            Some(TargetName::Missing) => Followed::Kept(MISSING.to_owned()),
            Some(TargetName::Replaced) => match self.is_open(entry.spec.name()) {
                Ok(false) if export.is_orphan() => Followed::Orphan(orphan(&export)),
                Ok(false) => Followed::Reopened,
                Ok(true) => Followed::Kept(IN_USE.to_owned()),
                Err(why) => Followed::Kept(why),
            },
        }
    }

    /// Publishes an opened target in place of the old target, and waits up to `within` for the
    /// release of the old target. Errors during the release are logged.
    fn reopen(
        &self,
        entry: &Entry,
        export: &Arc<Export>,
        within: Duration,
    ) -> Result<(), NotReplaced> {
        // Opens wait until the export is published again.
        let reserved = self.reserve(entry);
        let old = self.exchange(entry, export)?;
        drop(reserved);
        if old.source.is_deleted() {
            tracing::warn!(
                export = entry.spec.name(),
                "closing the old file, which has no other name: its content is lost"
            );
        }
        let _ = self.opener.release(vec![old], within);
        Ok(())
    }

    /// Replaces an export with another. Returns the old export.
    fn exchange(&self, entry: &Entry, export: &Arc<Export>) -> Result<Arc<Export>, NotReplaced> {
        let Entry { spec, configured, .. } = entry;
        let removed = self.unpublish(spec.name(), false);
        let (old, _) = removed.map_err(|(why, _)| NotReplaced::Kept(why))?;
        let Err(why) = self.publish(spec, export, *configured) else { return Ok(old) };
        if self.publish(spec, &old, *configured).is_ok() {
            return Err(NotReplaced::Kept(why));
        }
        recovery::note_failed(self, spec.clone(), *configured, why.as_str().into());
        let _ = self.opener.release(vec![old], Duration::ZERO);
        Err(NotReplaced::Failed(format!("{why}; {TRIES_AGAIN}")))
    }
}
