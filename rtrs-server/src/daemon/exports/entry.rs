//! The settings of an export, and which of them can change while it is open.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::last_copy::last_copy;
use crate::export::Export;
use crate::settings::{ExportSpec, Target};

/// An export named by the configuration or by a command.
#[derive(Clone, Debug)]
pub(in crate::daemon) struct Entry {
    pub(in crate::daemon) spec: ExportSpec,
    /// Weak, so that the export is released when its users are done.
    pub(super) export: Weak<Export>,
    /// Whether the export was opened read-only.
    pub(super) opened_ro: bool,
    /// Whether a command changed the size of the export.
    pub(super) resized: bool,
    /// Whether the export is in the configuration.
    pub(in crate::daemon) configured: bool,
}

impl Entry {
    /// Whether a change needs no reopening: access list and rate limits can change while the export
    /// is open, and an export that was opened for writing can become read-only and writable again.
    pub(in crate::daemon) fn stays_open(&self, spec: &ExportSpec) -> bool {
        let same = spec.with_live_options(&self.spec) == self.spec;
        same && (spec.ro == self.spec.ro || !self.opened_ro)
    }

    /// Whether the export has become read-only, but a writer's locks are still held on its file or
    /// disk.
    pub(super) fn keeps_writer_locks(&self) -> bool {
        self.spec.ro && !self.opened_ro && matches!(self.spec.target, Target::Path(_))
    }

    /// Whether the export matches these settings, apart from its access list and a size set by a
    /// command.
    pub(in crate::daemon) fn is_as_set(&self, spec: &ExportSpec) -> bool {
        let target = match (&self.spec.target, &spec.target) {
            (Target::Memory(_), Target::Memory(_)) | (Target::Null(_), Target::Null(_))
                if self.resized =>
            {
                self.spec.target.clone()
            }
            _ => spec.target.clone(),
        };
        ExportSpec { target, access: self.spec.access.clone(), ..spec.clone() } == self.spec
    }

    /// Reason why the export cannot change to these settings now. `open` says whether the export is
    /// open, and if so, whether for writing.
    pub(in crate::daemon) fn obstacle(
        &self,
        spec: &ExportSpec,
        open: Option<bool>,
    ) -> Option<String> {
        let freezes = spec.ro && !self.spec.ro;
        match (self.stays_open(spec), open) {
            (true, Some(true)) if freezes => Some("it is open for writing".to_owned()),
            (true, _) => None,
            (false, Some(_)) => Some("it is open".to_owned()),
            (false, None) => self.keeps_memory(spec).err(),
        }
    }

    /// Refuses to reopen a memory export, whose content would be lost.
    pub(super) fn keeps_memory(&self, spec: &ExportSpec) -> Result<(), String> {
        if !matches!(self.spec.target, Target::Memory(_)) {
            return Ok(());
        }
        let name = spec.name();
        let hint = match &spec.target {
            Target::Memory(_) if self.spec.target != spec.target => {
                "set its size with `export resize`; to discard the content, remove it and add it \
                 again"
            }
            _ => "to discard the content, remove it and add it again",
        };
        Err(format!("export {name:?} would lose its content; {hint}"))
    }

    /// Returns the reason not to close the export, if closing it would lose its content. The target
    /// is not examined, so the result depends on the last examination.
    pub(in crate::daemon) fn last_copy(&self) -> Option<String> {
        self.export.upgrade().and_then(|export| last_copy(&export))
    }
}

#[derive(Debug, Default)]
struct State {
    published: BTreeMap<String, Entry>,
    /// Exports that a change has closed or is about to publish, and whether the configuration
    /// defines them.
    unpublished: BTreeMap<String, bool>,
}

/// Named exports, by name.
#[derive(Debug, Default)]
pub(in crate::daemon) struct Entries(Arc<Mutex<State>>);

/// Temporarily unpublished export. Its access list is kept in the meantime.
#[derive(Debug)]
pub(in crate::daemon) struct Unpublished {
    state: Arc<Mutex<State>>,
    name: String,
}

impl Drop for Unpublished {
    fn drop(&mut self) {
        self.state.lock().unpublished.remove(&self.name);
    }
}

impl Entries {
    /// All exports, without their current access lists.
    pub(super) fn all(&self) -> BTreeMap<String, Entry> {
        let mut state = self.0.lock();
        // Drops the entries of exports whose removal completed after the command had timed out.
        state.published.retain(|_, entry| entry.export.strong_count() > 0);
        state.published.clone()
    }

    /// Names of all exports, including unpublished ones, and whether the configuration defines
    /// them.
    pub(super) fn names(&self) -> BTreeMap<String, bool> {
        let state = self.0.lock();
        let is_open = |(_, entry): &(&String, &Entry)| entry.export.strong_count() > 0;
        let published = state.published.iter().filter(is_open);
        let published = published.map(|(name, entry)| (name.clone(), entry.configured));
        published.chain(state.unpublished.clone()).collect()
    }

    /// An export, without its current access list.
    pub(super) fn get(&self, name: &str) -> Option<Entry> {
        let entry = self.0.lock().published.get(name).cloned();
        entry.filter(|entry| entry.export.strong_count() > 0)
    }

    /// Records that an export is about to be closed and reopened, or to be added, until the result
    /// is dropped. Only one thread at a time changes an export.
    pub(in crate::daemon) fn unpublished(&self, name: &str, configured: bool) -> Unpublished {
        self.0.lock().unpublished.insert(name.to_owned(), configured);
        Unpublished { state: Arc::clone(&self.0), name: name.to_owned() }
    }

    pub(super) fn remove(&self, name: &str) {
        self.0.lock().published.remove(name);
    }

    /// Adds an export, or replaces its settings.
    pub(super) fn insert(&self, spec: &ExportSpec, export: &Arc<Export>, configured: bool) {
        let (spec_of, opened_ro) = (spec.clone(), export.read_only);
        let export = Arc::downgrade(export);
        let entry = Entry { spec: spec_of, export, opened_ro, resized: false, configured };
        self.0.lock().published.insert(spec.name().to_owned(), entry);
    }

    /// Records that an export is in the configuration.
    pub(in crate::daemon) fn note_configured(&self, name: &str) {
        if let Some(entry) = self.0.lock().published.get_mut(name) {
            entry.configured = true;
        }
    }

    /// Records a changed size, which for memory is part of the target.
    pub(in crate::daemon) fn note_size(&self, name: &str, size: u64) {
        if let Some(entry) = self.0.lock().published.get_mut(name)
            && let Target::Memory(of) | Target::Null(of) = &mut entry.spec.target
        {
            *of = size;
            entry.resized = true;
        }
    }
}
