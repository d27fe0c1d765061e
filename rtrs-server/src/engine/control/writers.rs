//! Last writers of exports, to detect a client that returns after another client has written.
//!
//! A client whose paths have all failed keeps its requests and returns with the same session ID.
//! Meanwhile its session has ended here, and another client may have opened the export for writing,
//! written, and left. The requests of the first client would overwrite that data, and its users
//! would continue with data in their memory that the disk no longer holds. So a session that had
//! the export open before may open it for writing only if no other session has opened it for
//! exclusive writing since. A kernel client does not announce that it returns.
//!
//! This is one of two records. [`CurrentWriters`] has seen all opens since the start of the
//! process, including opens of exports that were removed meanwhile, so it refuses every session
//! that it does not list. [`SavedWriters`](crate::engine::saved_writers::SavedWriters) is the
//! record of an export that earlier processes left in the state directory. A save may have failed,
//! so the saved record refuses only the sessions that it lists as displaced. The saved record
//! applies until the first open for exclusive writing by a session that is new to this process.
//! After a restart, a session that returns does not indicate that others were displaced, because
//! both sides of a migration return.
//!
//! Writers of a migration are on the list together, until one of them is granted exclusive access.
//! At most [`EXPORTS_MAX`] exports are remembered; the export opened longest ago is dropped first.

use std::collections::VecDeque;

use rtrs_core::identity::ExportId;
use rtrs_core::ids::SessionId;
use rtrs_core::wire::AccessMode;

use crate::export::Export;

const EXPORTS_MAX: usize = 4096;

/// Maximum number of sessions of an export; more than any migration has. Migrations that were
/// cancelled leave sessions behind.
const SESSIONS_MAX: usize = 16;

/// Sessions that have had an export open since a different session wrote to it.
#[derive(Debug)]
struct Entry {
    name: String,
    id: Option<ExportId>,
    /// First the session that has opened the export for exclusive writing, then the sessions that
    /// have joined it.
    sessions: Vec<SessionId>,
}

/// Session that has opened an export.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewWriter {
    pub(super) session: SessionId,
    pub(super) access: AccessMode,
    /// Whether the session had the export open before, according to its client.
    pub(super) returns: bool,
    /// Whether the open replaces an open for a migration by exclusive access: the migration is
    /// over, and the session on the old host must not continue.
    pub(super) promoted: bool,
}

/// Last writers of all exports in this process; the most recently opened export is last.
#[derive(Debug, Default)]
pub(super) struct CurrentWriters(VecDeque<Entry>);

impl CurrentWriters {
    /// Whether another session has opened the export for exclusive writing since this session did.
    pub(super) fn have_changed_since(&self, session: SessionId, export: &Export) -> bool {
        let entry = self.0.iter().find(|entry| entry.is_of(export));
        match entry {
            Some(entry) => !entry.sessions.contains(&session),
            None => export.writers.have_displaced(session),
        }
    }

    /// Records a successful open. `opens` are all sessions that have the export open.
    pub(super) fn opened(
        &mut self,
        writer: NewWriter,
        export: &Export,
        opens: &[(SessionId, AccessMode)],
    ) {
        let NewWriter { session, access, returns, promoted } = writer;
        if !access.may_write() {
            return;
        }
        let known = self.0.iter().position(|entry| entry.is_of(export));
        let known = known.and_then(|at| self.0.remove(at));
        let was_writer = known.as_ref().is_some_and(|entry| entry.sessions.contains(&session))
            || export.writers.contain(session);
        let joins = access == AccessMode::Migration || (returns || was_writer) && !promoted;
        export.writers.opened(session, joins);
        let mut sessions = match known {
            Some(entry) if joins => entry.sessions,
            None if joins => return,
            _ => Vec::new(),
        };
        if !sessions.contains(&session) {
            sessions.push(session);
        }
        if sessions.len() > SESSIONS_MAX {
            let writes = |who| opens.iter().any(|(one, how)| *one == who && how.may_write());
            let is_old = |who: &SessionId| *who != session && !writes(*who);
            if let Some(at) = sessions.iter().skip(1).position(is_old) {
                sessions.remove(1 + at);
            }
        }
        if self.0.len() >= EXPORTS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(Entry { name: export.name.clone(), id: export.id, sessions });
    }
}

impl Entry {
    /// Whether this is the entry of an export, and not of an earlier export with the same name.
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

    fn writer(session: SessionId, access: AccessMode, returns: bool) -> NewWriter {
        NewWriter { session, access, returns, promoted: false }
    }

    #[test]
    fn a_writer_is_displaced_by_another_writer_but_not_by_readers_or_a_migration() {
        let (mut writers, vol) = (CurrentWriters::default(), export("vol", None));
        assert!(!writers.have_changed_since(session(1), &vol), "nothing is known");
        writers.opened(writer(session(1), AccessMode::ReadWrite, false), &vol, &[]);
        writers.opened(writer(session(2), AccessMode::ReadOnly, false), &vol, &[]);
        writers.opened(writer(session(3), AccessMode::Migration, false), &vol, &[]);
        let changed = |writers: &CurrentWriters, n| writers.have_changed_since(session(n), &vol);
        assert!(!changed(&writers, 1) && !changed(&writers, 3));
        writers.opened(writer(session(2), AccessMode::ReadWrite, false), &vol, &[]);
        assert!(changed(&writers, 1) && !changed(&writers, 2) && changed(&writers, 3));
        assert!(!writers.have_changed_since(session(1), &export("other", None)));
    }

    /// The old host of a migration must not continue once the new host has the export alone, in
    /// this process and in the next.
    #[test]
    fn a_promotion_displaces_the_old_host() {
        let (mut writers, vol) = (CurrentWriters::default(), export("vol", None));
        writers.opened(writer(session(1), AccessMode::ReadWrite, false), &vol, &[]);
        writers.opened(writer(session(2), AccessMode::Migration, false), &vol, &[]);
        let alone = writer(session(2), AccessMode::ReadWrite, true);
        writers.opened(NewWriter { promoted: true, ..alone }, &vol, &[]);
        for writers in [&writers, &CurrentWriters::default()] {
            let changed = [1, 2].map(|n| writers.have_changed_since(session(n), &vol));
            assert_eq!(changed, [true, false]);
        }
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
                        writers.opened(writer(session(n), access, returns), &vol, &[]);
                    }
                    assert!(!writers.have_changed_since(session(first.0), &vol));
                    writers.opened(writer(session(3), ReadWrite, false), &vol, &[]);
                    let changed = [1, 2].map(|n| writers.have_changed_since(session(n), &vol));
                    assert_eq!(changed, [true; 2], "{first:?} {second:?}");
                }
            }
        }
    }

    /// The source of a migration must not be refused because its migrations were cancelled often.
    #[test]
    fn cancelled_migrations_do_not_displace_writers() {
        use AccessMode::{Migration, ReadWrite};
        let (mut writers, vol) = (CurrentWriters::default(), export("vol", None));
        writers.opened(writer(session(0), ReadWrite, false), &vol, &[]);
        let opens = [(session(0), ReadWrite), (session(1), Migration)];
        for n in 1..100 {
            writers.opened(writer(session(n), Migration, false), &vol, &opens);
            writers.opened(writer(session(0), ReadWrite, true), &vol, &opens);
        }
        let changed = [0, 1, 2, 98, 99].map(|n| writers.have_changed_since(session(n), &vol));
        assert_eq!(changed, [false, false, true, false, false]);
        let saved = [0, 50, 99].map(|n| vol.writers.contain(session(n)));
        assert_eq!(saved, [true, true, true]);
        assert!(!vol.writers.contain(session(1)), "the list on disk is bounded too");
    }

    #[test]
    fn an_export_is_known_by_its_id_if_it_has_one() {
        let mut writers = CurrentWriters::default();
        let one = writer(session(1), AccessMode::ReadWrite, false);
        writers.opened(one, &export("vol", Some("a")), &[]);
        assert!(writers.have_changed_since(session(2), &export("renamed", Some("a"))));
        assert!(!writers.have_changed_since(session(2), &export("vol", Some("b"))));
    }

    #[test]
    fn the_number_of_entries_is_bounded() {
        let mut writers = CurrentWriters::default();
        for n in 0..=EXPORTS_MAX {
            let one = writer(session(1), AccessMode::ReadWrite, false);
            writers.opened(one, &export(&n.to_string(), None), &[]);
        }
        assert_eq!(writers.0.len(), EXPORTS_MAX);
        for n in 0..=SESSIONS_MAX as u8 {
            let one = writer(session(n), AccessMode::Migration, false);
            writers.opened(one, &export("1", None), &[]);
        }
        assert_eq!(writers.0.back().map(|entry| entry.sessions.len()), Some(SESSIONS_MAX));
    }
}
