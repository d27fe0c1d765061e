//! Last writers of exports across restarts, in the file `KEY.writers` of each export.
//!
//! The file is replaced as a whole, by a thread that retries until it succeeds. It is read and
//! written under the claim of the export's epoch. A waiting save does not hold the claim, so that a
//! full disk does not prevent reopening the export; the last save of a closed export holds the
//! claim, and is tried once. If the file is missing or damaged, no earlier writer is known.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rtrs_core::rt::Account;

use super::claim::{Claim, files_as};
use super::disk_file::sync_directory;
use super::saver::{Save, Saver};
use crate::engine::saved_writers::{SavedWriters, SessionHash, WriterLists, WriterStore};

/// Lists of an export that are not yet saved.
#[derive(Debug, Default)]
struct Unsaved {
    lists: Mutex<Option<WriterLists>>,
    /// Whether a failed save was logged, and no save has succeeded since.
    logged: AtomicBool,
}

/// The file of an open export.
#[derive(Debug)]
struct WritersFile {
    unsaved: Arc<Unsaved>,
    claim: Arc<Claim>,
    saver: Saver<WritersSave>,
}

impl WritersFile {
    fn send(&self, held: Option<Arc<Claim>>) {
        let (unsaved, claim) = (Arc::clone(&self.unsaved), Arc::downgrade(&self.claim));
        self.saver.save(WritersSave { unsaved, claim, held });
    }
}

impl WriterStore for WritersFile {
    fn save(&self, lists: &WriterLists) {
        *self.unsaved.lists.lock() = Some(lists.clone());
        self.send(None);
    }
}

impl Drop for WritersFile {
    fn drop(&mut self) {
        self.send(Some(Arc::clone(&self.claim)));
    }
}

/// A save of the latest lists of an export.
#[derive(Debug)]
pub(super) struct WritersSave {
    unsaved: Arc<Unsaved>,
    claim: Weak<Claim>,
    /// The claim, for the last save of an export that is being closed.
    held: Option<Arc<Claim>>,
}

impl Save for WritersSave {
    fn has_file_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.unsaved, &other.unsaved)
    }

    fn run(self) -> Option<Self> {
        // If the claim is gone, the export is closed and its last save has been attempted.
        let claim = self.claim.upgrade()?;
        let lists = self.unsaved.lists.lock().take()?;
        let path = claim.path.with_extension("writers");
        let Err(error) = replace(&path, &text(&lists)) else {
            self.unsaved.logged.store(false, Ordering::Relaxed);
            return None;
        };
        // Newer lists may have arrived in the meantime.
        let mut newest = self.unsaved.lists.lock();
        *newest = newest.take().or(Some(lists));
        drop(newest);
        if !self.unsaved.logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "cannot write {}: {error}; if this server restarts before a write succeeds, a \
                 returning client may write even though another client has written in the meantime",
                path.display()
            );
        }
        self.held.is_none().then_some(self)
    }
}

/// Replaces a file atomically.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let fresh = path.with_extension("writers-new");
    let mut file =
        File::options().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&fresh, path)?;
    sync_directory(path)
}

fn text(lists: &WriterLists) -> String {
    let lines = |kind: &str, list: &[SessionHash]| -> String {
        list.iter().map(|SessionHash(hash)| format!("{kind} {hash:016x}\n")).collect()
    };
    // The last line shows that the file is complete.
    lines("writer", &lists.writers) + &lines("displaced", &lists.displaced) + "end\n"
}

/// Parses the text of a file; `None` if it is damaged.
fn parse(text: &str) -> Option<WriterLists> {
    let mut lists = WriterLists::default();
    for line in text.strip_suffix("end\n")?.lines() {
        let (kind, hash) = line.split_once(' ')?;
        let hash = SessionHash(u64::from_str_radix(hash, 16).ok()?);
        match kind {
            "writer" => lists.writers.push(hash),
            "displaced" => lists.displaced.push(hash),
            _ => return None,
        }
    }
    Some(lists)
}

/// Reads the last writers of an export. Nothing else writes the file now.
fn read(path: &Path, owner: Option<&Account>) -> WriterLists {
    let text = files_as(owner).and_then(|_as| fs::read_to_string(path));
    match text.map(|text| parse(&text)) {
        Ok(Some(lists)) => return lists,
        Ok(None) => {
            tracing::warn!("{} is damaged; no earlier writer is known", path.display());
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => tracing::warn!("cannot read {}: {error}", path.display()),
    }
    WriterLists::default()
}

/// Reads the last writers of an export that is open under this claim. Changes are saved from now
/// on.
pub(super) fn open(
    claim: Arc<Claim>,
    saver: Saver<WritersSave>,
    owner: Option<&Account>,
) -> SavedWriters {
    let lists = read(&claim.path.with_extension("writers"), owner);
    SavedWriters::kept(lists, Box::new(WritersFile { unsaved: Arc::default(), claim, saver }))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::mpsc;
    use std::thread;
    use std::time::{Duration, Instant};

    use rtrs_core::ids::SessionId;

    use super::*;
    use crate::state::StateDir;

    #[test]
    fn lists_are_read_as_they_were_written() {
        let lists = WriterLists {
            writers: [1, u64::MAX].map(SessionHash).into(),
            displaced: [7].map(SessionHash).into(),
        };
        assert_eq!(parse(&text(&lists)), Some(lists.clone()));
        assert_eq!(parse(&text(&WriterLists::default())), Some(WriterLists::default()));
        let whole = text(&lists);
        for end in 0..whole.len() {
            assert_eq!(parse(&whole[..end]), None, "{end}");
        }
        assert_eq!(parse("reader 1\nend\n"), None);
    }

    /// Maximum time to wait for a save on a busy host.
    const LONG: Duration = Duration::from_secs(60);

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let name = format!("rtrs-writers-{}-{name}", std::process::id());
            // In memory, because syncing a busy disk may take longer than an open waits.
            let memory = PathBuf::from("/dev/shm");
            let parent = if memory.is_dir() { memory } else { std::env::temp_dir() };
            Self(parent.join(name))
        }

        /// The state directory as another process opens it.
        fn open(&self) -> StateDir {
            let mut state = StateDir::open(Some(&self.0), None);
            let files = state.store.as_mut().and_then(Arc::get_mut).unwrap();
            files.taken_max = LONG;
            state
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn session(n: u8) -> SessionId {
        SessionId([n; 16])
    }

    #[test]
    fn a_server_reads_the_lists_after_the_other_one_has_left() {
        let scratch = Scratch::new("taken");
        let (first, second) = (scratch.open(), scratch.open());
        let (epoch, writers) = first.epoch_and_writers("vol", false).unwrap();
        thread::scope(|scope| {
            let (waits, is_waiting) = mpsc::channel();
            let next = scope.spawn(move || {
                waits.send(()).unwrap();
                second.epoch_and_writers("vol", false).unwrap().1
            });
            is_waiting.recv().unwrap();
            // Gives the second process time to do what it can before it acquires the claim.
            thread::sleep(Duration::from_millis(50));
            writers.opened(session(1), false);
            writers.opened(session(2), false);
            drop((writers, epoch));
            assert!(next.join().unwrap().have_displaced(session(1)));
        });
    }

    #[test]
    fn a_reopened_export_knows_its_last_writers() {
        let scratch = Scratch::new("again");
        let state = scratch.open();
        for n in 1..6 {
            let (_epoch, writers) = state.epoch_and_writers("vol", false).unwrap();
            assert!(
                (1..n).all(|n| writers.contain(session(n)) || writers.have_displaced(session(n)))
            );
            writers.opened(session(n), false);
        }
    }

    #[test]
    fn a_failed_save_is_retried_and_a_stop_waits_for_it() {
        let scratch = Scratch::new("failed");
        let state = scratch.open();
        let (_epoch, writers) = state.epoch_and_writers("vol", false).unwrap();
        let fresh = state.store.as_ref().unwrap().path("vol").with_extension("writers-new");
        fs::create_dir(&fresh).unwrap();
        writers.opened(session(1), false);
        assert!(!state.save_writers(LONG), "a directory is in the file's place");
        let path = fresh.with_extension("writers");
        assert!(!path.exists());
        fs::remove_dir(&fresh).unwrap();
        let end = Instant::now() + LONG;
        while !path.exists() {
            assert!(Instant::now() < end, "not saved");
            thread::sleep(Duration::from_millis(1));
        }
        writers.opened(session(2), false);
        assert!(state.save_writers(LONG));
        let lists = parse(&fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(lists.displaced, [SessionHash::from(session(1))]);
    }
}
