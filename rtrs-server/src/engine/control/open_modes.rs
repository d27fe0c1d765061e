//! Open exports of all sessions, and the rules for further opens.
//!
//! The rules are those of the kernel's server (rnbd-srv.c, rnbd_srv_check_update_open_perm):
//! reading is always allowed; one session may write; a second writer is admitted only with
//! `migration`, after the first. Unlike in the kernel, the new mode is checked when a session opens
//! an export again, and a mode without writing is enforced on IO. Used by the control shard.

use rtrs_core::ids::SessionId;
use rtrs_core::wire::{AccessMode, errno};

use crate::export::ExportIndex;

/// Open exports of all sessions.
#[derive(Debug, Default)]
pub struct OpenModes {
    opens: Vec<Vec<(SessionId, AccessMode)>>,
}

impl OpenModes {
    /// Checks and records an open. It replaces an earlier open of the same session. However, a
    /// session that may have writes in flight excludes other writers until it closes the export
    /// (`close.rs`), even if it requests a lesser mode meanwhile.
    ///
    /// # Errors
    /// EPERM if another session writes, EACCES for writing to a read-only export. The session's
    /// current open remains unchanged.
    pub fn open(
        &mut self,
        export: ExportIndex,
        read_only: bool,
        session: SessionId,
        mode: AccessMode,
    ) -> Result<(), u16> {
        if mode.may_write() && read_only {
            return Err(errno::EACCES);
        }
        if self.opens.len() <= export.index() {
            self.opens.resize_with(export.index() + 1, Vec::new);
        }
        let opens = &mut self.opens[export.index()];
        let others = opens.iter().filter(|(who, how)| *who != session && how.may_write()).count();
        let room = match mode {
            AccessMode::ReadOnly => true,
            AccessMode::ReadWrite => others == 0,
            AccessMode::Migration => others < 2,
        };
        if !room && !rtrs_core::mutated!(SecondWriter) {
            return Err(errno::EPERM);
        }
        let before = opens.iter().find(|(who, _)| *who == session).map(|(_, how)| *how);
        let mode = before.filter(|how| how.may_write() && !mode.may_write()).unwrap_or(mode);
        opens.retain(|(who, _)| *who != session);
        opens.push((session, mode));
        Ok(())
    }

    /// Records a close. Returns true if no session has the export open anymore.
    pub fn close(&mut self, export: ExportIndex, session: SessionId) -> bool {
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

    #[test]
    fn a_second_writer_is_allowed_only_for_migration() {
        let mut book = OpenModes::default();
        assert_eq!(book.open(E, false, id(1), ReadWrite), Ok(()));
        assert_eq!(book.open(E, false, id(2), ReadOnly), Ok(()));
        assert_eq!(book.open(E, false, id(3), ReadWrite), Err(errno::EPERM));
        assert_eq!(book.open(E, false, id(3), Migration), Ok(()));
        assert_eq!(book.open(E, false, id(4), Migration), Err(errno::EPERM));
        assert!(!book.close(E, id(1)));
        assert_eq!(book.open(E, false, id(4), ReadWrite), Err(errno::EPERM), "a migrator writes");
        assert!(!book.close(E, id(3)) && book.close(E, id(2)));
        assert_eq!(book.open(E, false, id(4), ReadWrite), Ok(()));
    }

    #[test]
    fn a_second_open_by_a_session_replaces_the_first() {
        let mut book = OpenModes::default();
        book.open(E, false, id(1), ReadOnly).unwrap();
        assert_eq!(book.open(E, false, id(1), ReadWrite), Ok(()));
        assert_eq!(book.open(E, false, id(1), ReadWrite), Ok(()));
        assert_eq!(book.opens(E), [(id(1), ReadWrite)]);
        assert_eq!(book.open(E, false, id(1), Migration), Ok(()));
        assert_eq!(book.open(E, false, id(2), Migration), Ok(()), "it lets one more write now");
        assert_eq!(book.open(E, false, id(1), ReadWrite), Err(errno::EPERM));
        assert_eq!(book.opens(E), [(id(1), Migration), (id(2), Migration)]);
    }

    #[test]
    fn a_former_writer_excludes_other_writers_until_it_closes() {
        let mut book = OpenModes::default();
        book.open(E, false, id(1), ReadWrite).unwrap();
        assert_eq!(book.open(E, false, id(1), ReadOnly), Ok(()));
        assert_eq!(book.open(E, false, id(2), ReadWrite), Err(errno::EPERM));
        assert_eq!(book.opens(E), [(id(1), ReadWrite)]);
        assert!(book.close(E, id(1)));
        assert_eq!(book.open(E, false, id(1), ReadOnly), Ok(()), "not forever");
        assert_eq!(book.open(E, false, id(2), ReadWrite), Ok(()));
    }

    #[test]
    fn a_read_only_export_is_never_opened_for_writing() {
        let mut book = OpenModes::default();
        assert_eq!(book.open(E, true, id(1), ReadWrite), Err(errno::EACCES));
        assert_eq!(book.open(E, true, id(1), Migration), Err(errno::EACCES));
        assert_eq!(book.open(E, true, id(1), ReadOnly), Ok(()));
    }
}
