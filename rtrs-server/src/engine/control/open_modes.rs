//! Open exports of all sessions, and the rules for further opens.
//!
//! The rules are those of the kernel's server (rnbd-srv.c, rnbd_srv_check_update_open_perm):
//! reading is always allowed; one session may write; a second writer is admitted only with
//! `migration`, after the first. Unlike in the kernel, the new mode is checked when a session opens
//! an export again, and a mode without writing is enforced on IO.
//!
//! A session may open an export for a migration and *wait*: it runs no IO until it is granted
//! access `rw`, which requires that no other session has the export open for writing. The first
//! writer of the migration may return if all other sessions with write access are waiting. Used by
//! the control shard.

use rtrs_core::ids::SessionId;
use rtrs_core::wire::{AccessMode, errno};

use crate::export::ExportIndex;

/// Session that opens an export.
#[derive(Clone, Copy, Debug)]
pub struct Opener {
    pub session: SessionId,
    /// Whether the session had the export open before, and is not known to have been displaced. It
    /// may then write beside a session that waits, which has written nothing.
    pub returns: bool,
    /// Whether the session runs no IO until it is granted access `rw`.
    pub waits: bool,
}

/// Open exports of all sessions.
#[derive(Debug, Default)]
pub struct OpenModes {
    opens: Vec<Vec<(SessionId, AccessMode)>>,
    /// Sessions that wait. They have the export open for a migration.
    waiting: Vec<(ExportIndex, SessionId)>,
}

impl OpenModes {
    /// Checks and records an open. The open replaces an earlier open of the same session. However,
    /// a session that may have writes in flight excludes other writers until it closes the export
    /// (`close.rs`), even if it requests a lesser mode meanwhile, or wants to wait.
    ///
    /// # Errors
    /// EPERM if another session writes, EACCES for writing to a read-only export. The session's
    /// current open remains unchanged.
    pub fn open(
        &mut self,
        export: ExportIndex,
        read_only: bool,
        opener: Opener,
        mode: AccessMode,
    ) -> Result<(), u16> {
        let Opener { session, returns, waits } = opener;
        if mode.may_write() && read_only {
            return Err(errno::EACCES);
        }
        if self.opens.len() <= export.index() {
            self.opens.resize_with(export.index() + 1, Vec::new);
        }
        let opens = &mut self.opens[export.index()];
        let waiting = &mut self.waiting;
        let before = opens.iter().find(|(who, _)| *who == session).map(|(_, how)| *how);
        let others = opens.iter().filter(|(who, how)| *who != session && how.may_write());
        let is_waiting = |who: &SessionId| waiting.contains(&(export, *who));
        let others: Vec<bool> = others.map(|(who, _)| is_waiting(who)).collect();
        // A session that ends its own migration must be alone.
        let may_return = match before {
            Some(AccessMode::Migration) => false,
            Some(AccessMode::ReadWrite) => true,
            Some(AccessMode::ReadOnly) | None => returns,
        };
        let room = match mode {
            AccessMode::ReadOnly => true,
            AccessMode::ReadWrite => others.is_empty() || may_return && !others.contains(&false),
            AccessMode::Migration => others.len() < 2 || before == Some(AccessMode::Migration),
        };
        if !room && !rtrs_core::mutated!(SecondWriter) {
            return Err(errno::EPERM);
        }
        let was_writer = before.filter(|how| how.may_write() && !is_waiting(&session));
        let is_lesser = !mode.may_write() || waits;
        let mode = was_writer.filter(|_| is_lesser).unwrap_or(mode);
        waiting.retain(|one| *one != (export, session));
        if waits && mode == AccessMode::Migration && was_writer.is_none() {
            waiting.push((export, session));
        }
        opens.retain(|(who, _)| *who != session);
        opens.push((session, mode));
        Ok(())
    }

    /// Whether a session has an export open for a migration.
    pub fn migrates(&self, export: ExportIndex, session: SessionId) -> bool {
        self.opens(export).contains(&(session, AccessMode::Migration))
    }

    /// Whether a session has an export open and waits to be granted access `rw`.
    pub fn waits(&self, export: ExportIndex, session: SessionId) -> bool {
        self.waiting.contains(&(export, session))
    }

    /// Session that waits for an export.
    pub fn heir(&self, export: ExportIndex) -> Option<SessionId> {
        self.waiting.iter().find(|(at, _)| *at == export).map(|(_, session)| *session)
    }

    /// Records a close. Returns true if no session has the export open anymore.
    pub fn close(&mut self, export: ExportIndex, session: SessionId) -> bool {
        self.waiting.retain(|one| *one != (export, session));
        let Some(opens) = self.opens.get_mut(export.index()) else { return true };
        opens.retain(|(who, _)| *who != session);
        opens.is_empty()
    }

    /// Sessions that have an export open, and their modes.
    pub fn opens(&self, export: ExportIndex) -> &[(SessionId, AccessMode)] {
        self.opens.get(export.index()).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::AccessMode::{Migration, ReadOnly, ReadWrite};
    use super::*;

    const E: ExportIndex = ExportIndex(0);

    fn id(n: u8) -> SessionId {
        SessionId([n; 16])
    }

    fn new(n: u8) -> Opener {
        Opener { session: id(n), returns: false, waits: false }
    }

    /// Session that returns.
    fn back(n: u8) -> Opener {
        Opener { returns: true, ..new(n) }
    }

    fn waiting(n: u8) -> Opener {
        Opener { waits: true, ..new(n) }
    }

    #[test]
    fn the_first_writer_of_a_migration_may_return_beside_a_session_that_waits() {
        let mut book = OpenModes::default();
        book.open(E, false, new(1), ReadWrite).unwrap();
        book.open(E, false, waiting(2), Migration).unwrap();
        assert_eq!(book.open(E, false, new(1), ReadWrite), Ok(()), "over a second path");
        assert!(!book.close(E, id(1)));
        assert_eq!(book.open(E, false, new(1), ReadWrite), Err(errno::EPERM), "another client");
        assert_eq!(book.open(E, false, back(1), ReadWrite), Ok(()));
        assert_eq!(book.open(E, false, back(2), ReadWrite), Err(errno::EPERM), "not alone yet");
        assert!(!book.close(E, id(1)) && book.waits(E, id(2)) && book.migrates(E, id(2)));
        assert_eq!(book.open(E, false, back(2), ReadWrite), Ok(()));
        assert!(!book.waits(E, id(2)) && !book.migrates(E, id(2)));
        assert_eq!(book.open(E, false, back(1), ReadWrite), Err(errno::EPERM), "promoted");
        assert_eq!(book.open(E, false, Opener { waits: true, ..back(2) }, Migration), Ok(()));
        assert_eq!(book.opens(E), [(id(2), ReadWrite)], "it may have writes in flight");
        assert!(!book.waits(E, id(2)) && book.close(E, id(2)));
    }

    /// A second host was tried while the server or the first writer was away.
    #[test]
    fn the_first_writer_may_return_beside_several_sessions_that_wait() {
        let mut book = OpenModes::default();
        book.open(E, false, waiting(2), Migration).unwrap();
        book.open(E, false, waiting(3), Migration).unwrap();
        assert_eq!(book.open(E, false, back(1), ReadWrite), Ok(()));
        assert_eq!(book.open(E, false, waiting(3), Migration), Ok(()), "over a second path");
        assert_eq!(book.open(E, false, waiting(4), Migration), Err(errno::EPERM));
        assert!(!book.close(E, id(1)) && !book.close(E, id(2)));
        assert_eq!(book.open(E, false, back(3), ReadWrite), Ok(()));
    }

    /// The client marks every open after its first open as a return, and therefore also this open.
    #[test]
    fn a_migration_does_not_end_beside_another_writer() {
        for other in [new(1), waiting(1)] {
            for mover in [new(2), waiting(2)] {
                let mut book = OpenModes::default();
                book.open(E, false, other, Migration).unwrap();
                book.open(E, false, mover, Migration).unwrap();
                assert_eq!(book.open(E, false, back(2), ReadWrite), Err(errno::EPERM));
                assert_eq!(book.opens(E), [(id(1), Migration), (id(2), Migration)]);
                assert!(!book.close(E, id(1)));
                assert_eq!(book.open(E, false, back(2), ReadWrite), Ok(()));
            }
        }
    }

    /// A second writer that did not wait may have overwritten what the first writer is going to
    /// resend.
    #[test]
    fn the_first_writer_does_not_return_beside_a_session_that_writes() {
        let mut book = OpenModes::default();
        book.open(E, false, new(1), ReadWrite).unwrap();
        book.open(E, false, new(2), Migration).unwrap();
        assert!(!book.close(E, id(1)));
        assert_eq!(book.open(E, false, back(1), ReadWrite), Err(errno::EPERM));
        assert_eq!(book.open(E, false, waiting(2), Migration), Ok(()));
        assert!(!book.waits(E, id(2)), "it may have writes in flight");
        assert_eq!(book.open(E, false, back(1), ReadWrite), Err(errno::EPERM));
    }

    #[test]
    fn a_second_writer_is_allowed_only_for_migration() {
        let mut book = OpenModes::default();
        assert_eq!(book.open(E, false, new(1), ReadWrite), Ok(()));
        assert_eq!(book.open(E, false, new(2), ReadOnly), Ok(()));
        assert_eq!(book.open(E, false, new(3), ReadWrite), Err(errno::EPERM));
        assert_eq!(book.open(E, false, new(3), Migration), Ok(()));
        assert_eq!(book.open(E, false, new(4), Migration), Err(errno::EPERM));
        assert!(!book.close(E, id(1)));
        assert_eq!(book.open(E, false, new(4), ReadWrite), Err(errno::EPERM), "a migrator writes");
        assert!(!book.close(E, id(3)) && book.close(E, id(2)));
        assert_eq!(book.open(E, false, new(4), ReadWrite), Ok(()));
    }

    #[test]
    fn a_second_open_by_a_session_replaces_the_first() {
        let mut book = OpenModes::default();
        book.open(E, false, new(1), ReadOnly).unwrap();
        assert_eq!(book.open(E, false, new(1), ReadWrite), Ok(()));
        assert_eq!(book.open(E, false, new(1), ReadWrite), Ok(()));
        assert_eq!(book.opens(E), [(id(1), ReadWrite)]);
        assert_eq!(book.open(E, false, new(1), Migration), Ok(()));
        assert_eq!(book.open(E, false, new(2), Migration), Ok(()), "it lets one more write now");
        assert_eq!(book.open(E, false, new(1), ReadWrite), Err(errno::EPERM));
        assert_eq!(book.opens(E), [(id(1), Migration), (id(2), Migration)]);
    }

    #[test]
    fn a_former_writer_excludes_other_writers_until_it_closes() {
        let mut book = OpenModes::default();
        book.open(E, false, new(1), ReadWrite).unwrap();
        assert_eq!(book.open(E, false, new(1), ReadOnly), Ok(()));
        assert_eq!(book.open(E, false, new(2), ReadWrite), Err(errno::EPERM));
        assert_eq!(book.opens(E), [(id(1), ReadWrite)]);
        assert!(book.close(E, id(1)));
        assert_eq!(book.open(E, false, new(1), ReadOnly), Ok(()), "not forever");
        assert_eq!(book.open(E, false, new(2), ReadWrite), Ok(()));
    }

    #[test]
    fn a_read_only_export_is_never_opened_for_writing() {
        let mut book = OpenModes::default();
        assert_eq!(book.open(E, true, new(1), ReadWrite), Err(errno::EACCES));
        assert_eq!(book.open(E, true, new(1), Migration), Err(errno::EACCES));
        assert_eq!(book.open(E, true, new(1), ReadOnly), Ok(()));
    }
}
