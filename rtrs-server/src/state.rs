//! The state directory: what a server keeps for the next one of its host.
//!
//! Owns [`StateDir`]: one file for each export of which a sync has ever failed, holding the
//! export's epoch as a number (`epoch.rs`). A thread writes them, so that no shard waits for a
//! disk; rises that come while a file is being written go into the next write. The new number is
//! written to a file beside, which takes the old one's place when the disk has it. The next server
//! reads that one first, so that a server that is killed meanwhile loses nothing.
//!
//! A file is named after the export's key: the name and what is behind it, or for an export of the
//! search path the id of the file or disk, which keeps it under every name. Several servers may
//! share a directory, but not a file: a server that may change the export holds a lock on
//! `KEY.lock` beside it, as long as it serves the export. Else one server could overwrite what
//! another has saved, and a client would miss a loss.
//!
//! If the directory cannot be used, every start of the server counts as a new epoch of its caches:
//! clients then hear of a loss that may not have been one, and of none too little.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rtrs_core::rt::{Account, FilesAs, effective_user, random_number};

use crate::engine::epoch::{EpochState, EpochStore, SyncEpoch};

/// Letters of an export's name in the name of its file.
const STEM_MAX: usize = 40;

/// How long a read waits for what is being written.
const WRITE_MAX: Duration = Duration::from_secs(5);

/// How long another server may keep an export's epoch before it is an error: it may be ending.
const TAKEN_MAX: Duration = Duration::from_secs(5);

/// Another server keeps the epoch of an export in the same directory.
#[derive(Debug, thiserror::Error)]
#[error(
    "another server keeps the epoch of an export with this name and target in {}; give each server \
     a --state-dir of its own, or stop the other one", .0.display()
)]
pub(crate) struct Taken(PathBuf);

/// Keeps epochs in files.
#[derive(Debug)]
pub(crate) struct StateDir {
    store: Option<Arc<Files>>,
    /// Of this process; for epochs that cannot be kept.
    salt: u64,
    /// Whose the directory is, for a server that starts as root and goes on as somebody else.
    owner: Option<Account>,
}

#[derive(Debug)]
struct Files {
    dir: PathBuf,
    jobs: Sender<Job>,
    claims: Mutex<BTreeMap<PathBuf, Weak<Claim>>>,
    taken_max: Duration,
}

/// The right to write an export's file. One server at a time has it.
#[derive(Debug)]
struct Claim {
    path: PathBuf,
    /// Locked until it is closed.
    _file: File,
}

impl Drop for Claim {
    fn drop(&mut self) {
        // While the lock is held: who waits for it finds that the name is gone, and begins anew.
        let _ = fs::remove_file(&self.path);
    }
}

/// The files of an export that this server may change.
#[derive(Debug)]
struct Claimed {
    files: Arc<Files>,
    claim: Arc<Claim>,
}

/// What the thread does.
#[derive(Debug)]
enum Job {
    /// The claim is held until it is done.
    Save(PathBuf, Arc<EpochState>, Arc<Claim>),
    /// Tell when all that was asked for before is done.
    Tell(Sender<()>),
}

impl StateDir {
    /// The directory said, or else the first there is of `$STATE_DIRECTORY`, which systemd sets,
    /// `/var/lib/rtrs` for root, `$XDG_STATE_HOME/rtrs` and `$HOME/.local/state/rtrs`. Warns when
    /// it cannot be used. Root does everything there as `owner`.
    pub(crate) fn open(said: Option<&Path>, owner: Option<&Account>) -> Self {
        let owner = owner.cloned();
        let opened = match state_dir(said) {
            Some(dir) => files_as(owner.as_ref()).and_then(|_as| Files::open(&dir)),
            None => Err(io::Error::new(io::ErrorKind::NotFound, "no home directory is known")),
        };
        match opened {
            Ok(files) => Self { store: Some(Arc::new(files)), salt: 0, owner },
            Err(error) => {
                tracing::warn!(
                    "cannot use the state directory: {error}; set --state-dir to a writable \
                     directory. Until then, clients treat every start of this server as a loss of \
                     unflushed data"
                );
                Self { store: None, salt: random_number() | 1, owner }
            }
        }
    }

    /// An epoch that nobody can find again: each is a new one to clients.
    pub(crate) fn unknown() -> Arc<SyncEpoch> {
        SyncEpoch::unkept(random_number() | 1)
    }

    /// The epoch of an export that is known by `key`. No sync of one that is read-only can fail:
    /// several servers may have it.
    ///
    /// # Errors
    /// Another server keeps it, and has not ended within 5 s.
    pub(crate) fn epoch(&self, key: &str, read_only: bool) -> Result<Arc<SyncEpoch>, Taken> {
        let Some(files) = &self.store else { return Ok(SyncEpoch::unkept(self.salt)) };
        let acting = files_as(self.owner.as_ref());
        let claim = match &acting {
            Ok(_) if read_only => Ok(None),
            Ok(_) => files.claim(key).map(Some),
            Err(error) => Err(error.kind().into()),
        };
        if claim.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy) {
            return Err(Taken(files.dir.clone()));
        }
        // Read when nobody else can write it any more.
        Ok(match claim.and_then(|claim| Ok((claim, files.read(key)?))) {
            Ok((Some(claim), base)) => {
                let store = Arc::new(Claimed { files: Arc::clone(files), claim });
                SyncEpoch::kept(base, store, key.into())
            }
            Ok((None, base)) => SyncEpoch::kept(base, Arc::new(ReadOnly), key.into()),
            Err(error) => {
                let path = files.path(key);
                tracing::warn!("cannot use {}: {error}; remove it if it stays so", path.display());
                Self::unknown()
            }
        })
    }
}

/// The directory said, or the default.
pub(crate) fn state_dir(said: Option<&Path>) -> Option<PathBuf> {
    let is_root = effective_user() == 0;
    let default = || default_dir(is_root, |name| env::var_os(name));
    said.map(Path::to_path_buf).or_else(default)
}

/// Acts as the owner on this thread, if there is one.
fn files_as(owner: Option<&Account>) -> io::Result<Option<FilesAs>> {
    owner.map(FilesAs::begin).transpose()
}

fn default_dir(is_root: bool, var: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let said = |name: &str| var(name).map(PathBuf::from).filter(|path| path.is_absolute());
    // systemd separates several by colons; the first is ours.
    let unit = var("STATE_DIRECTORY").and_then(|all| {
        let first = all.to_str()?.split(':').next()?.to_owned();
        Some(PathBuf::from(first)).filter(|path| path.is_absolute())
    });
    unit.or_else(|| is_root.then(|| PathBuf::from("/var/lib/rtrs")))
        .or_else(|| said("XDG_STATE_HOME").map(|home| home.join("rtrs")))
        .or_else(|| said("HOME").map(|home| home.join(".local/state/rtrs")))
}

impl Files {
    fn open(dir: &Path) -> io::Result<Self> {
        let dir = dir.join("epochs");
        fs::create_dir_all(&dir)
            .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", dir.display())))?;
        let probe = dir.join(format!(".probe-{}", std::process::id()));
        File::create(&probe)
            .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", dir.display())))?;
        // Another server that shares the directory may have the same number in its container.
        let _ = fs::remove_file(&probe);
        let (jobs, inbox) = mpsc::channel();
        thread::Builder::new().name("state".into()).spawn(move || run(&inbox))?;
        Ok(Self { dir, jobs, claims: Mutex::default(), taken_max: TAKEN_MAX })
    }

    fn path(&self, key: &str) -> PathBuf {
        let plain = |c: &char| c.is_ascii_alphanumeric() || *c == '-' || *c == '_';
        let stem: String = key.chars().filter(plain).take(STEM_MAX).collect();
        self.dir.join(format!("{stem}-{:016x}", fnv1a(key.as_bytes())))
    }

    /// Takes the right to write the export's file; `ResourceBusy` when another server keeps it.
    fn claim(&self, key: &str) -> io::Result<Arc<Claim>> {
        let path = self.path(key).with_extension("lock");
        let mut claims = self.claims.lock();
        claims.retain(|_, claim| claim.strong_count() > 0);
        if let Some(claim) = claims.get(&path).and_then(Weak::upgrade) {
            return Ok(claim);
        }
        let end = Instant::now() + self.taken_max;
        loop {
            let file = File::options().write(true).create(true).truncate(false).open(&path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) if Instant::now() < end => {
                    thread::sleep(Duration::from_millis(20));
                    continue;
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(io::ErrorKind::ResourceBusy.into());
                }
                Err(TryLockError::Error(error)) => {
                    tracing::debug!("{}: cannot be locked here: {error}", path.display());
                }
            }
            // Who had it before may have removed the name.
            let named = fs::metadata(&path).is_ok_and(|meta| {
                file.metadata().is_ok_and(|own| (own.dev(), own.ino()) == (meta.dev(), meta.ino()))
            });
            if named {
                let claim = Arc::new(Claim { path: path.clone(), _file: file });
                claims.insert(path, Arc::downgrade(&claim));
                return Ok(claim);
            }
        }
    }

    fn read(&self, key: &str) -> io::Result<u64> {
        // An export of the search path may have been closed just now with a save under way.
        let (done, saved) = mpsc::channel();
        let _ = self.jobs.send(Job::Tell(done));
        saved.recv_timeout(WRITE_MAX).map_err(|_| {
            io::Error::new(io::ErrorKind::TimedOut, "what is being written takes too long")
        })?;
        let path = self.path(key);
        // A server that was killed while it saved has left this one. After a power failure it may
        // hold anything, but then the host has started anew.
        let cut = fs::read_to_string(path.with_extension("new")).unwrap_or_default();
        if let Some(number) = cut.strip_suffix('\n').and_then(|number| number.parse().ok()) {
            return Ok(number);
        }
        match fs::read_to_string(path) {
            Ok(text) => text.trim().parse().map_err(|_| {
                io::Error::new(io::ErrorKind::InvalidData, "it does not hold a number")
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error),
        }
    }
}

impl EpochStore for Claimed {
    fn save(&self, key: &str, state: &Arc<EpochState>) {
        let job = Job::Save(self.files.path(key), Arc::clone(state), Arc::clone(&self.claim));
        // The thread ends with the last sender only.
        let _ = self.files.jobs.send(job);
    }
}

/// Another server may write the file.
#[derive(Debug)]
struct ReadOnly;

impl EpochStore for ReadOnly {
    fn save(&self, _key: &str, state: &Arc<EpochState>) {
        let (_, rises) = state.begin_save();
        state.end_save(rises);
    }
}

/// FNV-1a, 64 bits: tells file names apart, protects nothing.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn run(inbox: &Receiver<Job>) {
    for job in inbox {
        let (path, state, _claim) = match job {
            Job::Save(path, state, claim) => (path, state, claim),
            Job::Tell(done) => {
                // Who asked may have lost patience.
                let _ = done.send(());
                continue;
            }
        };
        let (number, rises) = state.begin_save();
        if let Err(error) = write(&path, number) {
            tracing::error!(
                epoch = number,
                "cannot write {}: {error}; a client that connects after the server's next start \
                 may not be notified that a sync has failed",
                path.display()
            );
        }
        // What was lost is reported all the same.
        state.end_save(rises);
    }
}

fn write(path: &Path, number: u64) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = File::create(&fresh)?;
    file.write_all(format!("{number}\n").as_bytes())?;
    file.sync_all()?;
    fs::rename(&fresh, path)?;
    match path.parent() {
        Some(dir) => File::open(dir)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let name = format!("rtrs-state-{}-{name}", std::process::id());
            let dir = env::temp_dir().join(name);
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
        let end = Instant::now() + Duration::from_secs(20);
        while !epoch.is_saved(rises) {
            assert!(Instant::now() < end, "not saved");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn an_epoch_outlives_the_server() {
        let scratch = Scratch::new("outlives");
        let first = StateDir::open(Some(&scratch.0), None).epoch("vol=/a/b", false).unwrap();
        assert_eq!(first.number(), 0);
        first.raise();
        wait_saved(&first, first.raise());
        let id = first.cache_id(5, 2);
        drop(first);
        let state = StateDir::open(Some(&scratch.0), None);
        let next = state.epoch("vol=/a/b", false).unwrap();
        assert_eq!(next.number(), 2);
        assert_eq!(next.cache_id(5, 0), id, "one instance");
        drop(next);
        assert_eq!(state.epoch("vol=/a/c", false).unwrap().number(), 0);
        let files = fs::read_dir(scratch.0.join("epochs")).unwrap().count();
        assert_eq!(files, 1, "nothing is left of a write");
    }

    #[test]
    fn an_epoch_whose_save_was_cut_short_is_found() {
        let scratch = Scratch::new("cut");
        let state = StateDir::open(Some(&scratch.0), None);
        let path = state.store.as_ref().unwrap().path("vol");
        fs::write(&path, "14\n").unwrap();
        for (cut, number) in [("15\n", 15), ("", 14), ("1", 14), ("\0\0\0", 14)] {
            fs::write(path.with_extension("new"), cut).unwrap();
            assert_eq!(state.epoch("vol", false).unwrap().number(), number, "{cut:?}");
        }
        fs::write(path.with_extension("new"), "15\n").unwrap();
        let epoch = state.epoch("vol", false).unwrap();
        wait_saved(&epoch, epoch.raise());
        assert_eq!(state.epoch("vol", false).unwrap().number(), 16);
        assert!(!path.with_extension("new").exists());
    }

    #[test]
    fn an_export_that_is_found_again_has_what_was_just_raised() {
        let scratch = Scratch::new("again");
        let state = StateDir::open(Some(&scratch.0), None);
        for rises in 0..20 {
            let epoch = state.epoch("/a/b", false).unwrap();
            assert_eq!(epoch.number(), rises);
            epoch.raise();
        }
    }

    #[test]
    fn one_server_at_a_time_keeps_an_exports_epoch() {
        let scratch = Scratch::new("shared");
        let mut states = [(); 2].map(|()| StateDir::open(Some(&scratch.0), None));
        let first = states[0].epoch("vol=/a/b", false).unwrap();
        let again = states[0].epoch("vol=/a/b", false).unwrap();
        drop(again);
        let second = states[1].store.as_mut().and_then(Arc::get_mut).unwrap();
        second.taken_max = Duration::ZERO;
        let error = states[1].epoch("vol=/a/b", false).unwrap_err().to_string();
        assert!(error.contains(&*scratch.0.to_string_lossy()), "{error}");
        assert!(error.contains("--state-dir"), "{error}");
        let reader = states[1].epoch("vol=/a/b", true).unwrap();
        reader.raise();
        assert_eq!(states[1].epoch("other=/a/c", false).unwrap().number(), 0);
        // What is being saved when the first server ends is waited for.
        states[1].store.as_mut().and_then(Arc::get_mut).unwrap().taken_max = TAKEN_MAX;
        first.raise();
        drop(first);
        assert_eq!(states[1].epoch("vol=/a/b", false).unwrap().number(), 1);
    }

    #[test]
    fn without_a_directory_each_start_is_a_new_epoch() {
        let scratch = Scratch::new("refused");
        fs::create_dir_all(&scratch.0).unwrap();
        let file = scratch.0.join("file");
        fs::write(&file, "x").unwrap();
        let id = || StateDir::open(Some(&file), None).epoch("vol", false).unwrap().cache_id(5, 0);
        let ids = [id(), id()];
        assert!(ids[0] != ids[1] && ids[0] != 5);
        let state = StateDir::open(Some(&scratch.0), None);
        fs::write(state.store.as_ref().unwrap().path("vol"), "seven").unwrap();
        let epoch = state.epoch("vol", false).unwrap();
        assert_ne!(epoch.cache_id(5, 0), 5, "what cannot be read is not 0");
    }

    #[test]
    fn the_default_follows_the_user() {
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
