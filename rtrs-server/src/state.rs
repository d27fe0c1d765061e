//! The state directory: data that a server keeps across restarts on the same host.
//!
//! Owns [`StateDir`]: one file for each writable export, containing the export's epoch
//! (`engine/epoch_file.rs`). The file is allocated when the export is opened, so that an epoch can
//! be saved even if the disk is full. A separate thread saves, so that no shard waits for a disk;
//! increments that arrive while a file is being written are included in the next save. A file that
//! cannot be written is cleared. If that fails too, the save is retried until it succeeds; until
//! then the epoch does not count as saved.
//!
//! A file is named after the export's key: the ID of the file or disk, so that its epoch is found
//! under any name and path, or the name and target if it has no ID. Several servers may share a
//! directory, but not a file: a server that may change the export holds a lock on `KEY.lock` next
//! to the file for as long as it serves the export. Otherwise one server could overwrite what
//! another has saved, and a client would miss a loss.
//!
//! A second file for each export lists its last writers (`writers_file.rs`), under the same lock.
//!
//! If the directory cannot be used, every start of the server counts as a new cache epoch: clients
//! may then see a loss that did not happen, but never miss one.

mod claim;
mod clean_stop;
mod disk_file;
#[cfg(test)]
mod full_disk;
mod probe;
mod saver;
mod writers_file;

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rtrs_core::rt::{Account, effective_user, random_number};

use crate::engine::epoch::{EpochState, EpochStore, SyncEpoch};
use crate::engine::epoch_file::{EpochFile, Medium, Saved, fnv1a};
use crate::engine::saved_writers::SavedWriters;

use claim::{Claim, files_as};
use disk_file::DiskFile;
pub(crate) use probe::check_directory;
use saver::{Save, Saver};
use writers_file::WritersSave;

/// Maximum number of characters of an export's name used in its file name.
const STEM_MAX: usize = 40;

/// Maximum time that an open waits for a save of the same export.
const WRITE_MAX: Duration = Duration::from_secs(5);

/// Time after which an unfinished save is reported.
const SLOW: Duration = Duration::from_secs(5);

/// Maximum time to wait for another server that holds an export's epoch, since it may be shutting
/// down.
const TAKEN_MAX: Duration = Duration::from_secs(5);

/// Error: another server using the same directory holds the export's epoch.
#[derive(Debug, thiserror::Error)]
#[error(
    "another server already stores the epoch of this target in {}; use a separate --state-dir for \
     each server, or stop the other server", .0.display()
)]
pub(crate) struct Taken(PathBuf);

/// Stores epochs in files.
#[derive(Debug)]
pub(crate) struct StateDir {
    store: Option<Arc<Files>>,
    /// Random number of this process, used for epochs that cannot be saved.
    salt: u64,
    /// Owner of the directory, for a server that starts as root and then runs as another user.
    owner: Option<Account>,
}

#[derive(Debug)]
struct Files {
    dir: PathBuf,
    epochs: Saver<EpochSave>,
    writers: Saver<WritersSave>,
    claims: Mutex<BTreeMap<PathBuf, Weak<Claim>>>,
    taken_max: Duration,
}

/// An export's epoch, and the right to write its files if this server holds that right.
type Kept = (Arc<SyncEpoch>, Option<Arc<Claim>>);

/// File of an export that this server may change.
#[derive(Debug)]
struct Claimed {
    saver: Saver<EpochSave>,
    claim: Arc<Claim>,
}

/// A save of an epoch, which holds the claim until it is done.
#[derive(Debug)]
struct EpochSave {
    state: Arc<EpochState>,
    claim: Arc<Claim>,
}

impl StateDir {
    /// Opens `given`, or else the first available of `$STATE_DIRECTORY` (set by systemd),
    /// `/var/lib/rtrs` for root, `$XDG_STATE_HOME/rtrs` and `$HOME/.local/state/rtrs`. Logs a
    /// warning if that directory cannot be used. If an owner is given, root accesses the directory
    /// as `owner`.
    pub(crate) fn open(given: Option<&Path>, owner: Option<&Account>) -> Self {
        let owner = owner.cloned();
        let opened = match state_dir(given) {
            Some(dir) => files_as(owner.as_ref()).and_then(|_as| Files::open(&dir)),
            None => Err(probe::no_home()),
        };
        match opened {
            Ok(files) => Self { store: Some(Arc::new(files)), salt: 0, owner },
            Err(error) => {
                tracing::warn!("{}", probe::unusable(&error));
                Self { store: None, salt: random_number() | 1, owner }
            }
        }
    }

    /// Creates an epoch that no later server can find: clients treat each start as a new epoch.
    pub(crate) fn unknown() -> Arc<SyncEpoch> {
        SyncEpoch::unkept(random_number() | 1)
    }

    /// Empties the file of an export whose epoch this server cannot keep. Otherwise a later server
    /// would continue with that epoch, and clients would miss losses on this server.
    fn distrust(&self, key: &str) {
        let Some(files) = &self.store else { return };
        let path = files.path(key);
        let cleared = files_as(self.owner.as_ref()).and_then(|_as| DiskFile::new(&path).clear());
        if let Err(error) = cleared {
            tracing::error!(
                "cannot clear {}: {error}; check the disk. If a sync fails and this server then \
                 restarts, new clients may not be notified of the failure",
                path.display()
            );
        }
    }

    /// Returns the epoch of the export with this `key`. Several servers may share a read-only
    /// export, whose syncs cannot fail.
    ///
    /// # Errors
    /// [`Taken`] if another server holds the epoch and does not release it within 5 s.
    pub(crate) fn epoch(&self, key: &str, read_only: bool) -> Result<Arc<SyncEpoch>, Taken> {
        self.epoch_and_claim(key, read_only).map(|(epoch, _)| epoch)
    }

    /// Returns the epoch, and the right to write the export's files if this server has it.
    fn epoch_and_claim(&self, key: &str, read_only: bool) -> Result<Kept, Taken> {
        let Some(files) = &self.store else { return Ok((SyncEpoch::unkept(self.salt), None)) };
        let opened = files_as(self.owner.as_ref()).and_then(|_as| match read_only {
            true => files.look(key).map(|epoch| (epoch, None)),
            false => files.keep(key),
        });
        match opened {
            Ok(kept) => Ok(kept),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                Err(Taken(files.dir.clone()))
            }
            Err(error) => {
                tracing::warn!(
                    "cannot use {}: {error}; make it writable. Until then, clients treat every \
                     start of this server as a loss of unflushed data",
                    files.path(key).display()
                );
                // On timeout, another export of this server holds the epoch, or a save is running.
                if !read_only && error.kind() != io::ErrorKind::TimedOut {
                    self.distrust(key);
                }
                Ok((Self::unknown(), None))
            }
        }
    }

    /// Returns the epoch of an export like [`Self::epoch`], and its last writers from this
    /// process and earlier processes.
    ///
    /// # Errors
    /// Those of [`Self::epoch`].
    pub(crate) fn epoch_and_writers(
        &self,
        key: &str,
        read_only: bool,
    ) -> Result<(Arc<SyncEpoch>, SavedWriters), Taken> {
        let (epoch, claim) = self.epoch_and_claim(key, read_only)?;
        let Some((files, claim)) = self.store.as_ref().zip(claim) else {
            return Ok((epoch, SavedWriters::default()));
        };
        let writers = writers_file::open(claim, files.writers.clone(), self.owner.as_ref());
        Ok((epoch, writers))
    }

    /// Warns if a save of last writers is slow, once per save.
    pub(crate) fn warn_of_slow_save(&self) {
        if let Some(files) = self.store.as_ref().filter(|files| files.writers.take_slow(SLOW)) {
            tracing::warn!(
                "{} does not respond; if this server restarts before a write to that directory \
                 succeeds, a returning client may write even though another client has written in \
                 the meantime",
                files.dir.display()
            );
        }
    }

    /// Waits up to `within` for the last writers of all open exports to be saved. Returns whether
    /// they were.
    pub(crate) fn save_writers(&self, within: Duration) -> bool {
        self.store.as_ref().is_none_or(|files| files.writers.finish(within))
    }
}

/// Tests whether the state directory can be used, without creating anything. If not, returns the
/// warning that the server would log at startup.
pub(crate) fn check_state_dir(given: Option<&Path>, owner: Option<&Account>) -> Option<String> {
    let checked = match state_dir(given) {
        Some(dir) => check_directory(&dir, "epochs", owner),
        None => Err(probe::no_home()),
    };
    checked.err().map(|error| probe::unusable(&error))
}

/// Returns the given directory, or the default.
pub(crate) fn state_dir(given: Option<&Path>) -> Option<PathBuf> {
    let is_root = effective_user() == 0;
    let default = || default_dir(is_root, |name| env::var_os(name));
    given.map(Path::to_path_buf).or_else(default)
}

/// Returns a random epoch number for an export whose last epoch is unknown. The number is small
/// enough for every JSON parser.
fn fresh_number() -> u64 {
    (random_number() >> 32).max(1)
}

fn default_dir(is_root: bool, var: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute = |name: &str| var(name).map(PathBuf::from).filter(|path| path.is_absolute());
    // systemd separates multiple directories with colons; this server uses the first.
    let unit = var("STATE_DIRECTORY").and_then(|all| {
        let first = all.to_str()?.split(':').next()?.to_owned();
        Some(PathBuf::from(first)).filter(|path| path.is_absolute())
    });
    unit.or_else(|| is_root.then(|| PathBuf::from("/var/lib/rtrs")))
        .or_else(|| absolute("XDG_STATE_HOME").map(|home| home.join("rtrs")))
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state/rtrs")))
}

impl Files {
    fn open(dir: &Path) -> io::Result<Self> {
        let dir = dir.join("epochs");
        fs::create_dir_all(&dir)
            .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", dir.display())))?;
        probe::try_write(&dir)?;
        // Two threads, so that saving an epoch never waits for a list of writers.
        let (epochs, writers) = (Saver::start("state")?, Saver::start("state-writers")?);
        Ok(Self { dir, epochs, writers, claims: Mutex::default(), taken_max: TAKEN_MAX })
    }

    fn path(&self, key: &str) -> PathBuf {
        let plain = |c: &char| c.is_ascii_alphanumeric() || *c == '-' || *c == '_';
        let stem: String = key.chars().filter(plain).take(STEM_MAX).collect();
        self.dir.join(format!("{stem}-{:016x}", fnv1a(key.as_bytes())))
    }

    /// Opens the epoch of an export that this server may change.
    fn keep(&self, key: &str) -> io::Result<Kept> {
        let claim = self.claim(key)?;
        if !is_free_within(&claim, WRITE_MAX) {
            let text =
                "another export of this server has the same target, or a save takes too long";
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        let mut file = claim.file.lock();
        let fresh = fresh_number();
        let (number, cleared) = match &mut *file {
            Some(file) => (file.reopen(fresh)?, file.take_cleared()),
            None => {
                let mut opened = EpochFile::open(DiskFile::new(&claim.path), fresh)?;
                let cleared = opened.take_cleared();
                if cleared.is_none() {
                    // Opened now rather than when a save needs it.
                    opened.medium().file()?;
                }
                (file.insert(opened).number(), cleared)
            }
        };
        drop(file);
        if let Some(error) = cleared {
            claim.log_cleared(number, &error);
        }
        let store = Claimed { saver: self.epochs.clone(), claim: Arc::clone(&claim) };
        Ok((SyncEpoch::kept(number, Arc::new(store), key.into()), Some(claim)))
    }

    /// Reads the epoch of an export that this server does not change.
    fn look(&self, key: &str) -> io::Result<Arc<SyncEpoch>> {
        let path = self.path(key);
        let claim = self.claims.lock().get(&path).and_then(Weak::upgrade);
        // Waits for a save that this server is making for another export of the same target.
        let saving = claim.as_ref().map(|claim| claim.file.try_lock_for(WRITE_MAX));
        let readable = !matches!(saving, Some(None));
        let number = if readable { EpochFile::look(DiskFile::new(&path))? } else { None };
        Ok(match number {
            Some(number) => SyncEpoch::kept(number, Arc::new(ReadOnly), key.into()),
            None => StateDir::unknown(),
        })
    }

    /// Acquires the right to write the export's file. Fails with `ResourceBusy` if another server
    /// holds it.
    fn claim(&self, key: &str) -> io::Result<Arc<Claim>> {
        let path = self.path(key);
        let lock = path.with_extension("lock");
        let end = Instant::now() + self.taken_max;
        loop {
            let file = File::options().write(true).create(true).truncate(false).open(&lock)?;
            // Not held during waits, so that other exports can be claimed in the meantime.
            let mut claims = self.claims.lock();
            claims.retain(|_, claim| claim.strong_count() > 0);
            if let Some(claim) = claims.get(&path).and_then(Weak::upgrade) {
                return Ok(claim);
            }
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) if Instant::now() < end => {
                    drop(claims);
                    thread::sleep(Duration::from_millis(20));
                    continue;
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(io::ErrorKind::ResourceBusy.into());
                }
                Err(TryLockError::Error(error)) => {
                    tracing::debug!("{}: cannot be locked here: {error}", lock.display());
                }
            }
            // The previous holder of the lock may have removed the lock file.
            let named = fs::metadata(&lock).is_ok_and(|meta| {
                file.metadata().is_ok_and(|own| (own.dev(), own.ino()) == (meta.dev(), meta.ino()))
            });
            if named {
                let claim = Arc::new(Claim {
                    lock,
                    _locked: file,
                    path: path.clone(),
                    file: Mutex::default(),
                    logged: AtomicBool::new(false),
                });
                claims.insert(path, Arc::downgrade(&claim));
                return Ok(claim);
            }
        }
    }
}

/// Waits until neither an export nor a save uses a claim. Returns false on timeout.
fn is_free_within(claim: &Arc<Claim>, within: Duration) -> bool {
    let end = Instant::now() + within;
    while Arc::strong_count(claim) > 1 {
        if Instant::now() >= end {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

impl EpochStore for Claimed {
    fn save(&self, _key: &str, state: &Arc<EpochState>) {
        self.saver.save(EpochSave { state: Arc::clone(state), claim: Arc::clone(&self.claim) });
    }
}

/// Store for a read-only export: another server may write the file.
#[derive(Debug)]
struct ReadOnly;

impl EpochStore for ReadOnly {
    fn save(&self, _key: &str, state: &Arc<EpochState>) {
        let (_, rises) = state.begin_save();
        state.end_save(rises);
    }
}

impl Save for EpochSave {
    fn has_file_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    fn run(self) -> Option<Self> {
        let (number, rises) = self.state.begin_save();
        let saved = match &mut *self.claim.file.lock() {
            Some(file) => file.save(number),
            None => Err(io::Error::other("the file was never opened")),
        };
        let path = self.claim.path.display();
        match saved {
            Ok(Saved::Kept) => self.claim.logged.store(false, Ordering::Relaxed),
            Ok(Saved::Cleared(error)) => self.claim.log_cleared(number, &error),
            Err(error) => {
                if !self.claim.logged.swap(true, Ordering::Relaxed) {
                    tracing::error!(
                        epoch = number,
                        "cannot write or clear {path}: {error}; trying again; check the disk. If \
                         the server restarts before a write succeeds, new clients may not be \
                         notified that a sync has failed"
                    );
                }
                return Some(self);
            }
        }
        self.state.end_save(rises);
        None
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::mpsc;

    use super::saver::RETRY;
    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let name = format!("rtrs-state-{}-{name}", std::process::id());
            // In memory, because a sync to a busy disk may take longer than an open waits for.
            let memory = PathBuf::from("/dev/shm");
            let parent = if memory.is_dir() { memory } else { env::temp_dir() };
            let dir = parent.join(name);
            let _ = fs::remove_dir_all(&dir);
            Self(dir)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn wait_saved(epoch: &SyncEpoch, rises: u32) {
        let end = Instant::now() + Duration::from_secs(60);
        while !epoch.is_saved(rises) {
            assert!(Instant::now() < end, "not saved");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn an_epoch_survives_a_server_restart() {
        let scratch = Scratch::new("outlives");
        let first = StateDir::open(Some(&scratch.0), None).epoch("vol=/a/b", false).unwrap();
        let base = first.number();
        first.raise();
        wait_saved(&first, first.raise());
        let id = first.cache_id(5, 2);
        drop(first);
        let state = StateDir::open(Some(&scratch.0), None);
        let next = state.epoch("vol=/a/b", false).unwrap();
        assert_eq!(next.number(), base + 2);
        assert_eq!(next.cache_id(5, 0), id, "one instance");
        drop(next);
        let other = state.epoch("vol=/a/c", false).unwrap();
        assert_ne!(other.number(), base, "a fresh epoch");
        drop(other);
        let files = fs::read_dir(scratch.0.join("epochs")).unwrap().count();
        assert_eq!(files, 2, "no temporary file is left");
    }

    #[test]
    fn a_file_of_an_earlier_version_is_read() {
        let scratch = Scratch::new("earlier");
        let state = StateDir::open(Some(&scratch.0), None);
        let path = state.store.as_ref().unwrap().path("vol");
        fs::write(&path, "14\n").unwrap();
        assert_eq!(state.epoch("vol", true).unwrap().number(), 14, "by a reader");
        let epoch = state.epoch("vol", false).unwrap();
        assert_eq!(epoch.number(), 14);
        wait_saved(&epoch, epoch.raise());
        drop(epoch);
        assert_eq!(state.epoch("vol", false).unwrap().number(), 15);
    }

    #[test]
    fn a_file_that_may_lack_a_save_is_not_trusted() {
        let scratch = Scratch::new("distrusted");
        let state = StateDir::open(Some(&scratch.0), None);
        let path = state.store.as_ref().unwrap().path("vol");
        type Break = (&'static str, fn(&Path));
        let breaks: [Break; 5] = [
            ("removed", |path| fs::remove_file(path).unwrap()),
            ("cleared", |path| fs::write(path, "").unwrap()),
            ("replaced in part", |path| fs::write(path.with_extension("new"), "1").unwrap()),
            ("cut", |path| File::options().write(true).open(path).unwrap().set_len(100).unwrap()),
            ("torn", |path| {
                let file = File::options().write(true).open(path).unwrap();
                file.write_all_at(b"rtrs-epoch 1 000000000000000000009", 4096).unwrap();
            }),
        ];
        for (what, break_it) in breaks {
            let before = state.epoch("vol", false).unwrap().number();
            assert_eq!(state.epoch("vol", false).unwrap().number(), before);
            break_it(&path);
            let epoch = state.epoch("vol", false).unwrap();
            assert_ne!(epoch.number(), before, "{what}");
            assert!(!path.with_extension("new").exists(), "{what}");
            wait_saved(&epoch, epoch.raise());
        }
    }

    #[test]
    fn a_failed_save_is_not_reported_as_saved() {
        let scratch = Scratch::new("refused-save");
        let state = StateDir::open(Some(&scratch.0), None);
        let epoch = state.epoch("vol", false).unwrap();
        let (before, dir) = (epoch.number(), scratch.0.join("epochs"));
        // The file can be neither written nor cleared: it is open only for reading, and a directory
        // has taken its place.
        let claims = state.store.as_ref().unwrap().claims.lock();
        let claim = claims.values().find_map(Weak::upgrade).unwrap();
        drop(claims);
        let path = claim.path.clone();
        let kept = dir.join("aside");
        fs::rename(&path, &kept).unwrap();
        fs::create_dir(&path).unwrap();
        fs::write(path.join("x"), "").unwrap();
        let read_only = File::open(&kept).unwrap();
        claim.file.lock().as_mut().unwrap().medium().open = Some(read_only);
        drop(claim);
        let rises = epoch.raise();
        thread::sleep(RETRY * 2);
        assert!(!epoch.is_saved(rises));
        // The disk works again.
        fs::remove_dir_all(&path).unwrap();
        fs::rename(&kept, &path).unwrap();
        wait_saved(&epoch, rises);
        drop(epoch);
        assert_eq!(state.epoch("vol", false).unwrap().number(), before + 1);
    }

    #[test]
    fn an_export_found_again_has_its_latest_epoch() {
        let scratch = Scratch::new("again");
        let state = StateDir::open(Some(&scratch.0), None);
        let base = state.epoch("/a/b", false).unwrap().number();
        for rises in 0..20 {
            let epoch = state.epoch("/a/b", false).unwrap();
            assert_eq!(epoch.number(), base + rises);
            epoch.raise();
        }
    }

    #[test]
    fn one_server_at_a_time_keeps_the_epoch_of_an_export() {
        let scratch = Scratch::new("shared");
        let mut states = [(); 2].map(|()| StateDir::open(Some(&scratch.0), None));
        let first = states[0].epoch("vol=/a/b", false).unwrap();
        let base = first.number();
        let reader = states[0].epoch("vol=/a/b", true).unwrap();
        assert_eq!(reader.number(), base);
        let second = states[1].store.as_mut().and_then(Arc::get_mut).unwrap();
        second.taken_max = Duration::ZERO;
        let error = states[1].epoch("vol=/a/b", false).unwrap_err().to_string();
        assert!(error.contains(&*scratch.0.to_string_lossy()), "{error}");
        assert!(error.contains("--state-dir"), "{error}");
        let reader = states[1].epoch("vol=/a/b", true).unwrap();
        reader.raise();
        states[1].epoch("other=/a/c", false).unwrap();
        // The second server waits for a save that is in progress when the first server stops.
        let second = states[1].store.as_mut().and_then(Arc::get_mut).unwrap();
        second.taken_max = Duration::from_secs(60);
        first.raise();
        drop(first);
        assert_eq!(states[1].epoch("vol=/a/b", false).unwrap().number(), base + 1);
    }

    #[test]
    fn an_export_that_another_server_has_delays_no_other_export() {
        const LONG: Duration = Duration::from_secs(60);
        let scratch = Scratch::new("waits");
        let mut states = [(); 2].map(|()| StateDir::open(Some(&scratch.0), None));
        let held = states[0].epoch("vol=/a/b", false).unwrap();
        states[1].store.as_mut().and_then(Arc::get_mut).unwrap().taken_max = 10 * LONG;
        let second = &states[1];
        thread::scope(|scope| {
            let waiting = scope.spawn(|| second.epoch("vol=/a/b", false).map(drop).is_ok());
            // Give it time to begin waiting.
            thread::sleep(Duration::from_millis(50));
            let (opened, other) = mpsc::channel();
            scope.spawn(move || opened.send(second.epoch("other=/a/c", false).is_ok()));
            let other = other.recv_timeout(LONG);
            drop(held);
            assert_eq!((other, waiting.join().unwrap()), (Ok(true), true));
        });
    }

    #[test]
    fn without_a_state_directory_each_start_is_a_new_epoch() {
        let scratch = Scratch::new("refused");
        fs::create_dir_all(&scratch.0).unwrap();
        let file = scratch.0.join("file");
        fs::write(&file, "x").unwrap();
        let id = || StateDir::open(Some(&file), None).epoch("vol", false).unwrap().cache_id(5, 0);
        let ids = [id(), id()];
        assert!(ids[0] != ids[1] && ids[0] != 5);
        let state = StateDir::open(Some(&scratch.0), None);
        fs::create_dir(state.store.as_ref().unwrap().path("vol")).unwrap();
        let ids = [(); 2].map(|()| state.epoch("vol", false).unwrap().cache_id(5, 0));
        assert!(ids[0] != ids[1] && ids[0] != 5, "a file that cannot be read");
    }

    #[test]
    fn the_default_directory_depends_on_the_user() {
        let var = |of: &'static [(&str, &str)]| {
            move |name: &str| of.iter().find(|(n, _)| *n == name).map(|(_, v)| OsString::from(v))
        };
        let all = &[("STATE_DIRECTORY", "/s:/t"), ("XDG_STATE_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(default_dir(true, var(all)), Some("/s".into()));
        assert_eq!(default_dir(true, var(&all[1..])), Some("/var/lib/rtrs".into()));
        assert_eq!(default_dir(false, var(&all[1..])), Some("/x/rtrs".into()));
        assert_eq!(default_dir(false, var(&all[2..])), Some("/h/.local/state/rtrs".into()));
        assert_eq!(default_dir(false, var(&[])), None);
    }
}
