//! Last writers of an export, saved for the server's next process.
//!
//! A client that returns after another client has written must not continue. Within a process,
//! `control/writers.rs` detects that. The next process can detect it only from the list of
//! displaced sessions that this process has saved. Sessions in neither list may open the export,
//! because a save can fail and a wrong refusal would fail all of a client's IO.

use std::fmt;

use parking_lot::Mutex;
use rtrs_core::ids::SessionId;

use super::epoch_file::fnv1a;

/// Maximum number of sessions in each list.
const SESSIONS_MAX: usize = 64;

/// Saves lists, without blocking.
pub trait WriterStore: fmt::Debug + Send + Sync {
    fn save(&self, lists: &WriterLists);
}

/// Hash of a session ID, because only the client and the server may know the ID itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionHash(pub u64);

impl From<SessionId> for SessionHash {
    fn from(session: SessionId) -> Self {
        Self(fnv1a(&session.0))
    }
}

/// Sessions that have written to an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WriterLists {
    /// First the last session that opened the export for exclusive writing, then sessions that have
    /// migrated from it since then.
    pub writers: Vec<SessionHash>,
    /// Sessions after which a different session opened the export for exclusive writing, the latest
    /// last.
    pub displaced: Vec<SessionHash>,
}

/// Last writers of an export, from this process and earlier ones.
#[derive(Debug, Default)]
pub struct SavedWriters {
    lists: Mutex<WriterLists>,
    store: Option<Box<dyn WriterStore>>,
}

impl SavedWriters {
    /// Continues with saved lists, and saves their changes.
    pub fn kept(lists: WriterLists, store: Box<dyn WriterStore>) -> Self {
        Self { lists: Mutex::new(lists), store: Some(store) }
    }

    /// Whether, according to the lists, another session has opened the export for exclusive writing
    /// since this session did.
    pub(crate) fn have_displaced(&self, session: SessionId) -> bool {
        self.lists.lock().displaced.contains(&session.into())
    }

    /// Whether this session is one of the last writers.
    pub(crate) fn contain(&self, session: SessionId) -> bool {
        self.lists.lock().writers.contains(&session.into())
    }

    /// Records that a session has opened the export for writing. With `joins`, the session joins
    /// the last writers; otherwise it displaces them.
    pub(crate) fn opened(&self, session: SessionId, joins: bool) {
        let session = SessionHash::from(session);
        let mut lists = self.lists.lock();
        let before = lists.clone();
        let WriterLists { writers, displaced } = &mut *lists;
        displaced.retain(|one| *one != session);
        if !joins {
            writers.retain(|writer| *writer != session);
            displaced.append(writers);
        }
        if !writers.contains(&session) {
            writers.push(session);
        }
        // The exclusive writer stays.
        let surplus = writers.len().saturating_sub(SESSIONS_MAX);
        writers.drain(1..1 + surplus);
        let surplus = displaced.len().saturating_sub(SESSIONS_MAX);
        displaced.drain(..surplus);
        if let Some(store) = self.store.as_ref().filter(|_| *lists != before) {
            store.save(&lists);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Debug, Default)]
    struct Store(Arc<Mutex<Vec<WriterLists>>>);

    impl WriterStore for Store {
        fn save(&self, lists: &WriterLists) {
            self.0.lock().push(lists.clone());
        }
    }

    fn session(n: u8) -> SessionId {
        SessionId([n; 16])
    }

    #[test]
    fn the_next_process_knows_displaced_sessions_and_admits_others() {
        let saved = Arc::new(Mutex::new(Vec::new()));
        let start = || {
            let last = saved.lock().last().cloned().unwrap_or_default();
            SavedWriters::kept(last, Box::new(Store(Arc::clone(&saved))))
        };
        let first = start();
        first.opened(session(1), false);
        first.opened(session(1), false);
        assert_eq!(saved.lock().len(), 1, "saved only when it changes");
        // The session's predecessor is known from the earlier process.
        let second = start();
        second.opened(session(2), false);
        second.opened(session(3), true);
        let third = start();
        let displaced: Vec<u8> = (1..5).filter(|n| third.have_displaced(session(*n))).collect();
        assert_eq!(displaced, [1], "a migration displaces nobody");
        third.opened(session(4), false);
        third.opened(session(1), false);
        let displaced: Vec<u8> = (1..5).filter(|n| third.have_displaced(session(*n))).collect();
        assert_eq!(displaced, [2, 3, 4]);
    }

    #[test]
    fn the_lists_are_bounded() {
        let writers = SavedWriters::default();
        for n in 0..200 {
            writers.opened(session(n), n % 2 == 1);
        }
        for n in 200..=255 {
            writers.opened(session(n), true);
        }
        let lists = writers.lists.lock();
        assert!(lists.writers.len() <= SESSIONS_MAX && lists.displaced.len() == SESSIONS_MAX);
    }
}
