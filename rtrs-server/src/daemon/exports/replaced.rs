//! Exports whose path leads to another file or device than the one that is open.

use std::sync::Arc;
use std::time::Instant;

use rtrs_core::block::TargetName;
use rtrs_core::time::Duration;

use super::{Entry, Exports, Followed, NotReopened};
use crate::export::Export;

/// Longest wait for a look at what a path leads to; file systems can hang.
const LOOK_MAX: Duration = Duration::from_millis(500);

/// Longest wait of an open for the change of exports that runs.
const OPEN_TURN_MAX: Duration = Duration::from_secs(1);

/// Time between attempts to open an export again whose path leads elsewhere.
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
    /// Has the targets of all exports examined.
    pub(in crate::daemon) fn examine_targets(&self) {
        let exports = self.table.all();
        exports.iter().for_each(|(_, export)| export.source.examine_name(Duration::ZERO));
        // They are looked at in order, so the last one is waited for.
        let mut named = exports.iter().rev();
        if let Some((_, last)) = named.find(|(_, export)| export.source.target_name().is_some()) {
            last.source.examine_name(LOOK_MAX);
        }
    }

    /// Has the target of an export examined that a session is about to open, and opens it again if
    /// its path leads elsewhere.
    pub(in crate::daemon) fn examine_before_open(&self, name: &[u8]) {
        let Some(export) = self.table.find(name).and_then(|at| self.table.get(at)) else { return };
        export.source.examine_name(LOOK_MAX);
        if export.source.target_name() != Some(TargetName::Replaced) {
            return;
        }
        let name = export.name.clone();
        // The old one is closed when its last holder is gone.
        drop(export);
        let Some(_turn) = self.changing.try_lock_for(OPEN_TURN_MAX) else { return };
        let _ = self.follow(&name);
    }

    /// Opens exports again whose path leads elsewhere and that no session has open.
    pub(in crate::daemon) fn reopen_replaced(&self) {
        let is_replaced =
            |export: &Arc<Export>| export.source.target_name() == Some(TargetName::Replaced);
        let all = self.table.all().into_iter().map(|(_, export)| export);
        let replaced: Vec<String> =
            all.filter(is_replaced).map(|export| export.name.clone()).collect();
        if replaced.is_empty() {
            return;
        }
        // Whatever runs will look again.
        let Some(_turn) = self.changing.try_lock() else { return };
        for name in replaced {
            let failed = self.not_reopened.lock().get(&name).map(|failure| failure.at);
            if failed.is_none_or(|at| at.elapsed() >= RETRY) {
                let _ = self.follow(&name);
            }
        }
    }

    /// Whether an export is what its path leads to; one that no session has open is opened again.
    /// The turn to change exports is held.
    pub(in crate::daemon) fn follow(&self, name: &str) -> Followed {
        let Some(entry) = self.entry(name) else { return Followed::Same };
        match self.standing(&entry) {
            Followed::Reopened => {}
            other => return other,
        }
        match self.reopen(&entry) {
            Ok(()) => {
                self.not_reopened.lock().remove(name);
                tracing::info!(export = name, "the path leads to another target: opened again");
                Followed::Reopened
            }
            Err(why) => {
                let why = format!(
                    "its path leads to another file or device, which cannot be exported: {why}; \
                     the old one is exported still"
                );
                let failure = NotReopened { at: Instant::now(), why: why.clone() };
                let known = self.not_reopened.lock().insert(name.to_owned(), failure);
                if known.is_none_or(|known| known.why != why) {
                    tracing::error!(export = name, "not opened again: {why}");
                }
                Followed::Kept(why)
            }
        }
    }

    /// What [`Self::follow`] would do with an export.
    pub(in crate::daemon) fn standing(&self, entry: &Entry) -> Followed {
        let export = entry.export.upgrade();
        match export.and_then(|export| export.source.target_name()) {
            None | Some(TargetName::Kept) => Followed::Same,
            Some(TargetName::Missing) => Followed::Kept(MISSING.to_owned()),
            Some(TargetName::Replaced) => match self.is_open(entry.spec.name()) {
                Ok(false) => Followed::Reopened,
                Ok(true) => Followed::Kept(IN_USE.to_owned()),
                Err(why) => Followed::Kept(why),
            },
        }
    }

    /// Exports what the path leads to instead of what is open.
    fn reopen(&self, entry: &Entry) -> Result<(), String> {
        let name = entry.spec.name();
        // First, so that the old one stays exported if that fails.
        let opened = self.opener.open(&entry.spec);
        let export = Arc::new(opened.map_err(|error| error.chain().to_string())?);
        let (old, _) = self.unpublish(name, false).map_err(|(why, _)| why)?;
        if let Err(why) = self.publish(&entry.spec, &export, entry.configured) {
            self.publish(&entry.spec, &old, entry.configured)?;
            return Err(why);
        }
        // Nobody waits: an open that was examined must not wait for the last flush of the old one.
        // What goes wrong there stands in the log.
        let _ = self.release(vec![old], Duration::ZERO);
        Ok(())
    }
}
