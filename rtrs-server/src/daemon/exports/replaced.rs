//! Exports whose path leads to a file or device other than the open one.

use std::sync::Arc;
use std::time::Instant;

use rtrs_core::block::TargetName;
use rtrs_core::time::Duration;

use super::in_time::in_time;
use super::last_copy::{last_copy, orphan};
use super::{Entry, Exports, Followed, NotReopened};
use crate::engine::finder::Examined;
use crate::export::Export;
use crate::settings::Target;

/// Maximum time to examine the target of a path, because file systems can hang.
const LOOK_MAX: Duration = Duration::from_millis(500);

/// Maximum time that an open waits for a running change of exports.
const OPEN_TURN_MAX: Duration = Duration::from_secs(1);

/// Interval between attempts to reopen an export whose path leads elsewhere.
const RETRY: Duration = Duration::from_secs(10);

/// Reason why an export in use keeps its target.
const IN_USE: &str = "its path leads to another file or device, and sessions have the old one \
                      open; what they write may be lost when the last of them closes it: copy it \
                      through a client before that. The new one is exported then";

/// Reason why an export whose path leads nowhere keeps its target.
const MISSING: &str = "its path leads nowhere; what was opened is still exported, and if it was \
                       deleted, its content is lost when the server ends: copy it through a client \
                       before that";

impl Exports {
    /// Examines the targets of all exports.
    pub(in crate::daemon) fn examine_targets(&self) {
        let exports = self.table.all();
        exports.iter().for_each(|(_, export)| export.source.examine_name(Duration::ZERO));
        // They are examined in order, so it suffices to wait for the last one.
        let mut named = exports.iter().rev();
        if let Some((_, last)) = named.find(|(_, export)| export.source.target_name().is_some()) {
            last.source.examine_name(LOOK_MAX);
        }
        exports.iter().for_each(|(_, export)| export.note_orphan());
    }

    /// Examines the target of an export, which is returned.
    pub(super) fn examine_target(&self, name: &str) -> Option<Arc<Export>> {
        let export = self.table.get(self.table.find(name.as_bytes())?)?;
        export.source.examine_name(LOOK_MAX);
        export.note_orphan();
        Some(export)
    }

    /// Returns why an export should not be closed if its content would end with it.
    pub(in crate::daemon) fn last_copy(&self, name: &str) -> Option<String> {
        last_copy(&*self.examine_target(name)?)
    }

    /// Returns why the server should not end if the content of exports would end with it.
    pub(in crate::daemon) fn last_copies(&self) -> Option<String> {
        self.examine_targets();
        let all: Vec<_> =
            self.table.all().iter().filter_map(|(_, export)| last_copy(export)).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// Names the export that has the same file or device open for writing as one that could not be
    /// opened.
    pub(super) fn holder_of(&self, target: &Target) -> Option<String> {
        let (opener, entries, target) = (Arc::clone(&self.opener), self.entries(), target.clone());
        // Files can hang; then the error names no export.
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
    /// leads elsewhere. Another export may hold the lock for changes for long, because its target
    /// hangs: the open must be refused then.
    pub(in crate::daemon) fn examine_before_open(&self, name: &[u8]) -> Examined {
        let Some(export) = self.table.find(name).and_then(|at| self.table.get(at)) else {
            // A running replacement may be about to publish this name again.
            if self.table.is_replacing() {
                drop(self.changing.try_lock_for(OPEN_TURN_MAX));
            }
            return Examined::Yes;
        };
        export.source.examine_name(LOOK_MAX);
        export.note_orphan();
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
        if let Some(_turn) = self.changing.try_lock_for(OPEN_TURN_MAX) {
            // The outcome is logged; an export that cannot be reopened is opened as it is.
            let _ = self.follow(&name, false);
            return Examined::Yes;
        }
        let standing = self.entry(&name).map(|entry| self.standing(&entry));
        if standing != Some(Followed::Reopened) {
            return Examined::Yes;
        }
        tracing::warn!(
            export = name,
            "open refused: the path leads to another target, which cannot be opened while another \
             change of the exports is running"
        );
        Examined::Outdated
    }

    /// Reopens unused exports whose path leads elsewhere.
    pub(in crate::daemon) fn reopen_replaced(&self) {
        let is_replaced =
            |export: &Arc<Export>| export.source.target_name() == Some(TargetName::Replaced);
        let all = self.table.all().into_iter().map(|(_, export)| export);
        let all = all.inspect(|export| export.note_orphan());
        let replaced: Vec<String> =
            all.filter(is_replaced).map(|export| export.name.clone()).collect();
        if replaced.is_empty() {
            return;
        }
        // A running change checks the targets itself.
        let Some(_turn) = self.changing.try_lock() else { return };
        for name in replaced {
            let failed = self.not_reopened.lock().get(&name).map(|failure| failure.at);
            if failed.is_none_or(|at| at.elapsed() >= RETRY) {
                let _ = self.follow(&name, false);
            }
        }
    }

    /// Compares an export with its path, and reopens it if it was replaced and is unused. Unless
    /// forced, a file stays that was deleted before anything took its path. The caller holds the
    /// lock for changes of exports.
    pub(in crate::daemon) fn follow(&self, name: &str, force: bool) -> Followed {
        let Some(entry) = self.entry(name) else { return Followed::Same };
        match self.standing(&entry) {
            Followed::Reopened => {}
            Followed::Orphan(_) if force => {}
            Followed::Orphan(why) => {
                self.note_not_reopened(name, &why);
                return Followed::Orphan(why);
            }
            other => return other,
        }
        match self.reopen(&entry) {
            Ok(()) => {
                self.not_reopened.lock().remove(name);
                tracing::info!(export = name, "opened again: the path leads to another target");
                Followed::Reopened
            }
            Err(why) => {
                let why = format!(
                    "its path leads to another file or device, which cannot be exported: {why}; \
                     the old one is still exported"
                );
                self.note_not_reopened(name, &why);
                Followed::Kept(why)
            }
        }
    }

    /// Records why an export was not reopened, and logs a new reason.
    fn note_not_reopened(&self, name: &str, why: &str) {
        let failure = NotReopened { at: Instant::now(), why: why.to_owned() };
        let known = self.not_reopened.lock().insert(name.to_owned(), failure);
        if known.is_none_or(|known| known.why != why) {
            tracing::error!(export = name, "not opened again: {why}");
        }
    }

    /// Returns the result that [`Self::follow`] would have for an export.
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

    /// Exports the current target of the path instead of the open one.
    fn reopen(&self, entry: &Entry) -> Result<(), String> {
        // Opened first, so that the old target stays exported if that fails.
        let export = self.open_target(&entry.spec).map_err(|error| error.why)?;
        // Opens wait until the export is back.
        self.table.set_replacing(true);
        let replaced = self.exchange(entry, &export);
        self.table.set_replacing(false);
        let old = replaced?;
        if old.source.is_deleted() {
            tracing::warn!(
                export = entry.spec.name(),
                "closes the old file, which has no other name: its content ends"
            );
        }
        // Without waiting, because an examined open must not wait for the last flush of the old
        // target. Errors are logged.
        let _ = self.release(vec![old], Duration::ZERO);
        Ok(())
    }

    /// Removes an export and adds another in its place. Returns the old one.
    fn exchange(&self, entry: &Entry, export: &Arc<Export>) -> Result<Arc<Export>, String> {
        let (old, _) = self.unpublish(entry.spec.name(), false).map_err(|(why, _)| why)?;
        if let Err(why) = self.publish(&entry.spec, export, entry.configured) {
            self.publish(&entry.spec, &old, entry.configured)?;
            return Err(why);
        }
        Ok(old)
    }
}
