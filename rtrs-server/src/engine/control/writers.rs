//! Last writers of exports, to detect a client that returns after another one has written.
//!
//! A client whose paths have all failed keeps its requests and returns with the same session ID.
//! Meanwhile its session has ended here, and another client may have opened the export for writing,
//! written, and left. The requests of the first client would overwrite that data, and its users
//! would continue with data in their memory that the disk no longer holds. So a session that had
//! the export open before may open it for writing only if no other session has opened it for
//! exclusive writing since. A kernel client does not announce that it returns.
//!
//! This is one of two records. [`CurrentWriters`] has seen all opens since the start of the
//! process, including those of exports that were removed meanwhile, so it refuses the sessions that
//! it does not list. [`SavedWriters`](crate::engine::saved_writers::SavedWriters) is the record of
//! an export that earlier processes left in the state directory. A save may have failed, so it
//! refuses only the sessions that it lists as displaced. It applies until the first open for
//! exclusive writing by a session that is new to this process. After a restart, a session that
//! returns does not indicate that others were displaced, because both sides of a migration return.
//!
//! Writers of a migration are on the list together. At most [`EXPORTS_MAX`] exports are remembered;
//! the one opened longest ago is dropped first.

use std::collections::VecDeque;

use rtrs_core::identity::ExportId;
use rtrs_core::ids::SessionId;
use rtrs_core::wire::AccessMode;

use crate::export::Export;

const EXPORTS_MAX: usize = 4096;

/// Maximum number of sessions of an export; more than any migration has.
const SESSIONS_MAX: usize = 16;

/// Sessions that have had an export open since a different session wrote to it.
#[derive(Debug)]
struct Entry {
    name: String,
    id: Option<ExportId>,
    sessions: VecDeque<SessionId>,
}

/// Last writers of all exports in this process; the most recently opened export is last.
#[derive(Debug, Default)]
pub(super) struct CurrentWriters(VecDeque<Entry>);

impl CurrentWriters {
    /// Whether another session has opened the export for exclusive writing since this one.
    pub(super) fn have_changed_since(&self, session: SessionId, export: &Export) -> bool {
        let entry = self.0.iter().find(|entry| entry.is_of(export));
        match entry {
            Some(entry) => !entry.sessions.contains(&session),
            None => export.writers.have_displaced(session),
        }
    }

    /// Records a successful open, by a session that `returns` or by a new one.
    pub(super) fn opened(
        &mut self,
        session: SessionId,
        export: &Export,
        access: AccessMode,
        returns: bool,
    ) {
        if !access.may_write() {
            return;
        }
        let known = self.0.iter().position(|entry| entry.is_of(export));
        let known = known.and_then(|at| self.0.remove(at));
        let was_writer = known.as_ref().is_some_and(|entry| entry.sessions.contains(&session))
            || export.writers.contain(session);
        let joins = access == AccessMode::Migration || returns || was_writer;
        export.writers.opened(session, joins);
        let mut sessions = match known {
            Some(entry) if joins => entry.sessions,
            None if joins => return,
            _ => VecDeque::new(),
        };
        sessions.retain(|one| *one != session);
        sessions.push_back(session);
        if sessions.len() > SESSIONS_MAX {
            sessions.pop_front();
        }
        if self.0.len() >= EXPORTS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(Entry { name: export.name.clone(), id: export.id, sessions });
    }
}

impl Entry {
    /// Whether this is the entry of an export, and not of an earlier one with the same name.
    fn is_of(&self, export: &Export) -> bool {
        match (self.id, export.id) {
            (Some(before), Some(now)) => before == now,
            _ => self.name == export.name,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::NullSource;

    fn export(name: &str, id: Option<&str>) -> Export {
        let source = Arc::new(NullSource::new(4096, 512));
        Export { id: id.map(ExportId::of_name), ..Export::new(name, source) }
    }

    fn session(n: u8) -> SessionId {
        SessionId([n; 16])
    }

    #[test]
    fn a_writer_is_displaced_by_another_writer_but_not_by_readers_or_a_migration() {
        let (mut writers, vol) = (CurrentWriters::default(), export("vol", None));
        assert!(!writers.have_changed_since(session(1), &vol), "nothing is known");
        writers.opened(session(1), &vol, AccessMode::ReadWrite, false);
        writers.opened(session(2), &vol, AccessMode::ReadOnly, false);
        writers.opened(session(3), &vol, AccessMode::Migration, false);
        let changed = |writers: &CurrentWriters, n| writers.have_changed_since(session(n), &vol);
        assert!(!changed(&writers, 1) && !changed(&writers, 3));
        writers.opened(session(2), &vol, AccessMode::ReadWrite, false);
        assert!(changed(&writers, 1) && !changed(&writers, 2) && changed(&writers, 3));
        assert!(!writers.have_changed_since(session(1), &export("other", None)));
    }

    /// Both sides of a migration return to the next process, which may know their sessions from the
    /// state directory.
    #[test]
    fn a_restart_during_a_migration_refuses_neither_side() {
        use AccessMode::{Migration, ReadWrite};
        for (first, second) in [((1, ReadWrite), (2, Migration)), ((2, Migration), (1, ReadWrite))]
        {
            for returns in [true, false] {
                for is_saved in [true, false] {
                    if !is_saved && !returns {
                        continue;
                    }
                    let (mut writers, vol) = (CurrentWriters::default(), export("vol", None));
                    if is_saved {
                        vol.writers.opened(session(1), false);
                        vol.writers.opened(session(2), true);
                    }
                    for (n, access) in [first, second] {
                        assert!(!writers.have_changed_since(session(n), &vol), "{n}");
                        writers.opened(session(n), &vol, access, returns);
                    }
                    assert!(!writers.have_changed_since(session(first.0), &vol));
                    writers.opened(session(3), &vol, ReadWrite, false);
                    let changed = [1, 2].map(|n| writers.have_changed_since(session(n), &vol));
                    assert_eq!(changed, [true; 2], "{first:?} {second:?}");
                }
            }
        }
    }

    #[test]
    fn an_export_is_known_by_its_id_if_it_has_one() {
        let mut writers = CurrentWriters::default();
        writers.opened(session(1), &export("vol", Some("a")), AccessMode::ReadWrite, false);
        assert!(writers.have_changed_since(session(2), &export("renamed", Some("a"))));
        assert!(!writers.have_changed_since(session(2), &export("vol", Some("b"))));
    }

    #[test]
    fn the_number_of_entries_is_bounded() {
        let mut writers = CurrentWriters::default();
        for n in 0..=EXPORTS_MAX {
            writers.opened(session(1), &export(&n.to_string(), None), AccessMode::ReadWrite, false);
        }
        assert_eq!(writers.0.len(), EXPORTS_MAX);
        for n in 0..=SESSIONS_MAX as u8 {
            writers.opened(session(n), &export("1", None), AccessMode::Migration, false);
        }
        assert_eq!(writers.0.back().map(|entry| entry.sessions.len()), Some(SESSIONS_MAX));
    }
}
