//! State that a session's process saves for a successor that takes over after its death. For each
//! volume, this is the epoch of the server's cache in which the volume may have left unflushed
//! writes, and the identity of the export; for volumes that share a session, also the session and
//! the settings specific to each volume; for udev, the device of the volume.
//!
//! The files are next to the control socket and are always replaced as a whole. All volumes have
//! the epoch and identity files, written by the thread that forwards the session's events. Volumes
//! with a kernel device also have the other files.
//!
//! A process writes nothing until its volume is about to have users ([`Saved::begin`]): until then,
//! the attach may still fail, and the files of an earlier process remain. The files are removed
//! when the volume has ended and none of its users can miss a loss; see `volume.rs`.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::identity::{Identity, IdentityError};
use rtrs_core::local::{OwnFiles, PlaceError, RunDir, SocketState, socket_state};
use serde::{Deserialize, Serialize};

const EPOCH: &str = "life";
const IDENTITY: &str = "identity";
const DEVICE: &str = "device";
const VOLUME: &str = "volume";
/// Export of a volume that was detached although users may return to it.
const DETACHED: &str = "detached";
/// Log of a background session; see `session_log.rs`.
const LOG: &str = "log";
/// Suffix that marks an export in memory.
const MEMORY: &str = " memory";

/// Export that a process used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UsedExport {
    pub(crate) identity: Identity,
    /// Whether the export's content is lost when its server's process ends.
    pub(crate) memory: bool,
}

impl UsedExport {
    /// Identity that a later attach must find. None for memory: a restarted server's memory has a
    /// different ID, and there is no content to protect.
    pub(crate) fn lasting(self) -> Option<Identity> {
        let Self { identity: Identity { server, export }, memory } = self;
        let identity = Identity { server, export: export.filter(|_| !memory) };
        Some(identity).filter(|identity| !identity.is_unknown())
    }
}

impl fmt::Display for UsedExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { identity, memory } = self;
        write!(f, "{identity}{}", if *memory { MEMORY } else { "" })
    }
}

impl FromStr for UsedExport {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let id = text.strip_suffix(MEMORY);
        Ok(Self { identity: id.unwrap_or(text).parse()?, memory: id.is_some() })
    }
}

/// Volume of a session with several volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedVolume {
    /// Name of the session on the server.
    pub(crate) session: String,
    /// Name of the volume on this host.
    pub(crate) name: String,
    /// The volume's own settings.
    pub(crate) settings: BTreeMap<String, String>,
}

/// Files of one volume. Clones refer to the same files.
#[derive(Clone, Debug)]
pub(crate) struct Saved {
    files: OwnFiles,
    /// Control socket; each file has the socket's name with a different extension.
    beside: PathBuf,
    state: Arc<Mutex<State>>,
    /// Error from the last write to each file, if it failed.
    unwritten: Arc<Mutex<BTreeMap<&'static str, String>>>,
}

/// State of a volume's files while its process runs.
#[derive(Debug)]
enum State {
    /// The volume has no users yet: the values wait for [`Saved::begin`].
    Waiting { epoch: Option<u64>, export: Option<UsedExport> },
    /// Values are written; `found` holds the earlier contents of the files.
    Writing { found: Vec<(&'static str, Option<String>)> },
    /// Nothing is saved anymore.
    Over,
}

/// Consequences of failing to write a file.
const WITHOUT_EPOCH: &str = "after a takeover, writes that a server lost cannot be reported";
const WITHOUT_IDENTITY: &str = "after a takeover, the export cannot be verified";

/// Extensions of all files.
const ALL: [&str; 5] = [EPOCH, IDENTITY, DETACHED, DEVICE, VOLUME];

impl Saved {
    /// Creates the handle for the files of the volume attached as `name`.
    ///
    /// # Errors
    /// Fails if the run directory cannot be used.
    pub(crate) fn new(run_dir: &RunDir, name: &str) -> Result<Self, PlaceError> {
        Self::beside(run_dir, &run_dir.control_socket(name))
    }

    /// Creates the handle for the files next to this control socket.
    ///
    /// # Errors
    /// Fails if the run directory cannot be used.
    pub(crate) fn beside(run_dir: &RunDir, control_socket: &Path) -> Result<Self, PlaceError> {
        let (files, beside) = (run_dir.files()?, control_socket.to_path_buf());
        let state = State::Waiting { epoch: None, export: None };
        let (state, unwritten) = (Arc::new(Mutex::new(state)), Arc::default());
        Ok(Self { files, beside, state, unwritten })
    }

    /// Epoch saved by a process that died; 0, which means unknown, if it cannot be read.
    pub(crate) fn epoch(&self) -> Option<u64> {
        self.read(EPOCH).unwrap_or_else(|error| {
            tracing::warn!("cannot read {}: {error}", self.path(EPOCH).display());
            Some(0)
        })
    }

    /// Export of a process that did not end with a detach, if known.
    ///
    /// # Errors
    /// Returns the reason why an existing file cannot be read.
    pub(crate) fn export(&self) -> io::Result<Option<UsedExport>> {
        self.read(IDENTITY)
    }

    /// Export to which the epoch belongs, if known.
    ///
    /// # Errors
    /// Returns the reason why an existing file cannot be read.
    pub(crate) fn export_of_epoch(&self) -> io::Result<Option<UsedExport>> {
        match self.read(IDENTITY)? {
            None => self.read(DETACHED),
            found => Ok(found),
        }
    }

    /// Path of the session's device; empty while the device is being connected, None if unknown.
    pub(crate) fn device(&self) -> Option<String> {
        match self.files.read(&self.name(DEVICE)) {
            Ok(text) => text.map(|text| text.trim().to_owned()),
            Err(error) => {
                tracing::warn!("cannot read {}: {error}", self.path(DEVICE).display());
                None
            }
        }
    }

    /// Reads a file, if it exists.
    fn read<T: FromStr>(&self, extension: &str) -> io::Result<Option<T>>
    where
        T::Err: std::error::Error + Send + Sync + 'static,
    {
        let Some(text) = self.files.read(&self.name(extension))? else { return Ok(None) };
        let value = text.trim().parse();
        value.map(Some).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
    }

    fn path(&self, extension: &str) -> PathBuf {
        self.beside.with_extension(extension)
    }

    /// Name of a file in the run directory.
    fn name(&self, extension: &str) -> String {
        let path = self.path(extension);
        path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Begins saving, before the volume has users.
    pub(crate) fn begin(&self) {
        let mut state = self.state.lock();
        let State::Waiting { epoch, export } = &*state else { return };
        let (epoch, export) = (*epoch, *export);
        let read = |extension: &'static str| {
            // A file that cannot be read is not restored.
            let found = self.files.read(&self.name(extension)).ok()?;
            Some((extension, found))
        };
        *state = State::Writing { found: ALL.into_iter().filter_map(read).collect() };
        if let Some(epoch) = epoch {
            self.replace(EPOCH, &format!("{epoch}\n"), WITHOUT_EPOCH);
        }
        if let Some(export) = export {
            self.replace(IDENTITY, &format!("{export}\n"), WITHOUT_IDENTITY);
            self.remove(DETACHED);
        }
    }

    /// Restores the files of an earlier process because the volume had no users, and stops saving.
    pub(crate) fn put_back(&self) {
        let state = std::mem::replace(&mut *self.state.lock(), State::Over);
        let State::Writing { found } = state else { return };
        for (extension, text) in found {
            match text {
                Some(text) => self.replace(extension, &text, "its earlier contents are lost"),
                None => _ = self.remove(extension),
            }
        }
    }

    /// Saves the export for the next process.
    pub(crate) fn save_export(&self, export: UsedExport) {
        if let State::Waiting { export: waiting, .. } = &mut *self.state.lock() {
            *waiting = Some(export);
            return;
        }
        self.write(IDENTITY, &export.to_string(), WITHOUT_IDENTITY);
    }

    /// Saves the path of the device for udev; an empty path means that the device is being
    /// connected.
    pub(crate) fn save_device(&self, path: &str) {
        self.write(DEVICE, path, "the links that udev creates may be missing, or appear too early");
    }

    /// Saves an epoch for the next process.
    pub(crate) fn save_epoch(&self, epoch: u64) {
        if let State::Waiting { epoch: waiting, .. } = &mut *self.state.lock() {
            *waiting = Some(epoch);
            return;
        }
        self.write(EPOCH, &epoch.to_string(), WITHOUT_EPOCH);
    }

    /// Records that the volume shares a session, for the process that takes over.
    pub(crate) fn save_volume(&self, volume: &SavedVolume) {
        match serde_json::to_string(volume) {
            Ok(text) => {
                self.write(VOLUME, &text, "after a takeover, this volume is missing");
            }
            Err(error) => tracing::warn!("cannot save {:?}: {error}", volume.name),
        }
    }

    /// Marks the files as used, and also the session's log, which a quiet session rarely writes.
    pub(crate) fn touch(&self) {
        for extension in ALL.into_iter().chain([LOG]) {
            if let Err(error) = self.files.touch(&self.name(extension)) {
                tracing::debug!("cannot touch {}: {error}", self.path(extension).display());
            }
        }
    }

    /// Files that the next process will lack because they could not be written, with the reasons.
    pub(crate) fn unwritten(&self) -> Vec<String> {
        self.unwritten.lock().values().cloned().collect()
    }

    fn write(&self, extension: &'static str, text: &str, without: &str) {
        let state = self.state.lock();
        if matches!(*state, State::Writing { .. }) {
            self.replace(extension, &format!("{text}\n"), without);
        }
    }

    fn replace(&self, extension: &'static str, text: &str, without: &str) {
        let Err(error) = self.files.replace(&self.name(extension), text) else {
            self.unwritten.lock().remove(extension);
            return;
        };
        let why = format!("cannot write {}: {error}; {without}", self.path(extension).display());
        tracing::warn!("{why}");
        self.unwritten.lock().insert(extension, why);
    }

    /// Forgets the shared session, because the volume is now the only one in it.
    pub(crate) fn forget_volume(&self) {
        self.remove(VOLUME);
    }

    /// Removes all files and stops saving.
    pub(crate) fn forget(&self) {
        let mut state = self.state.lock();
        *state = State::Over;
        ALL.iter().for_each(|extension| _ = self.remove(extension));
    }

    /// Removes everything except the epoch and the export to which it belongs, after a detach:
    /// users may still connect to the next process, which may use a different export. Returns false
    /// if there was nothing to remove.
    pub(crate) fn forget_but_epoch(&self) -> bool {
        let mut state = self.state.lock();
        *state = State::Over;
        let mut found = [DEVICE, VOLUME].map(|extension| self.remove(extension)).contains(&true);
        match self.files.read(&self.name(IDENTITY)) {
            Ok(None) => {}
            Ok(Some(text)) => {
                if matches!(self.files.read(&self.name(EPOCH)), Ok(None)) {
                    self.remove(DETACHED);
                } else {
                    self.replace(DETACHED, &text, "the epoch may belong to another export");
                }
                found |= self.remove(IDENTITY);
            }
            // Without the identity, the epoch applies to every export.
            Err(_) => found |= self.remove(IDENTITY),
        }
        found
    }

    /// Removes a file. Returns false if there was none.
    fn remove(&self, extension: &'static str) -> bool {
        self.unwritten.lock().remove(extension);
        let existed = self.path(extension).symlink_metadata().is_ok();
        if let Err(error) = self.files.remove(&self.name(extension)) {
            tracing::warn!("cannot remove {}: {error}", self.path(extension).display());
        }
        existed
    }
}

/// Returns the volumes of the session with this name that a dead process left behind. Omits
/// unreadable volumes, which are logged, and volumes that are attached again.
pub(crate) fn left_of(run_dir: &RunDir, session: &str) -> Vec<SavedVolume> {
    let in_use = |volume: &SavedVolume| {
        let state = socket_state(&run_dir.control_socket(&volume.name));
        matches!(state, Ok(SocketState::InUse))
    };
    let mut found = all_volumes(run_dir);
    found.retain(|volume| volume.session == session && !in_use(volume));
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// Returns the session that the first of these volumes shared in a dead process.
pub(crate) fn session_left(run_dir: &RunDir, names: &[String]) -> Option<String> {
    let all = all_volumes(run_dir);
    let mut found = names.iter().filter_map(|name| all.iter().find(|left| left.name == *name));
    found.next().map(|volume| volume.session.clone())
}

/// Forgets what is left of the session with this name, which is restarting without a takeover.
pub(crate) fn forget_left(run_dir: &RunDir, session: &str) {
    for volume in left_of(run_dir, session) {
        match Saved::new(run_dir, &volume.name) {
            Ok(saved) => saved.forget_volume(),
            Err(error) => tracing::warn!("cannot forget {:?}: {error}", volume.name),
        }
    }
}

/// Extensions of the files that remain only if a process did not end with a detach.
const OF_ATTACHED: [&str; 3] = [IDENTITY, DEVICE, VOLUME];

/// Returns the volumes that a process left behind without their control socket: each volume's name,
/// and the path of the socket. For example, a failed attach removes the socket of the previous
/// process.
///
/// # Errors
/// Fails if a directory cannot be read.
pub(crate) fn left_without_socket(run_dir: &RunDir) -> Result<Vec<(String, PathBuf)>, PlaceError> {
    let mut all = Vec::new();
    for extension in OF_ATTACHED {
        all.extend(run_dir.sessions_with(extension)?);
    }
    all.sort();
    all.dedup();
    all.retain(|(_, socket)| is_left_without(socket));
    Ok(all)
}

/// Whether a process has left a volume behind without this control socket.
pub(crate) fn is_left_without(socket: &Path) -> bool {
    let exists = |path: &Path| path.symlink_metadata().is_ok();
    let has_file = || OF_ATTACHED.iter().any(|one| exists(&socket.with_extension(one)));
    // A process creates the socket before it writes a file, and removes the files before the
    // socket.
    !exists(socket) && has_file() && !exists(socket)
}

fn all_volumes(run_dir: &RunDir) -> Vec<SavedVolume> {
    // Without a run directory, nothing was saved.
    let Ok(files) = run_dir.files() else { return Vec::new() };
    let entries = std::fs::read_dir(run_dir.path()).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let read = |name: String| {
        let text = files.read(&name).unwrap_or_else(|error| {
            tracing::warn!("cannot read {}: {error}", run_dir.path().join(&name).display());
            None
        })?;
        let volume: Option<SavedVolume> = serde_json::from_str(&text).ok();
        // The file name must match the volume name.
        let volume = volume.filter(|volume| {
            let path = run_dir.control_socket(&volume.name).with_extension(VOLUME);
            path == run_dir.path().join(&name)
        });
        if volume.is_none() {
            tracing::warn!("{} has invalid contents", run_dir.path().join(&name).display());
        }
        volume
    };
    let ending = format!(".{VOLUME}");
    names.filter(|name| name.ends_with(&ending)).filter_map(read).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_symbolic_link_in_the_run_directory_is_not_followed() {
        let name = format!("rtrs-saved-link-{}", std::process::id());
        let place = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&place);
        let dir = RunDir::new(Some(place.join("run"))).unwrap();
        dir.make().unwrap();
        let other = place.join("other");
        fs::write(&other, "theirs").unwrap();
        for name in ["vol.life", "vol.life.new", "vol.identity", "vol.identity.new"] {
            std::os::unix::fs::symlink(&other, dir.path().join(name)).unwrap();
        }
        let saved = Saved::new(&dir, "vol").unwrap();
        assert_eq!(saved.epoch(), Some(0), "the target of a link is not read");
        assert!(saved.export().is_err());
        saved.begin();
        saved.save_epoch(7);
        saved.save_export("-/00112233445566778899aabbccddeeff".parse().unwrap());
        assert_eq!(saved.epoch(), Some(7));
        assert_eq!(fs::read_to_string(&other).unwrap(), "theirs");
        saved.forget();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        fs::remove_dir_all(&place).unwrap();
    }

    #[test]
    fn an_unwritten_file_is_reported_until_it_is_written() {
        let name = format!("rtrs-saved-unwritten-{}", std::process::id());
        let dir = RunDir::new(Some(std::env::temp_dir().join(name))).unwrap();
        let _ = fs::remove_dir_all(dir.path());
        dir.make().unwrap();
        let saved = Saved::new(&dir, "v").unwrap();
        saved.begin();
        // A file cannot replace a directory.
        let obstacle = dir.path().join("v.life");
        fs::create_dir(&obstacle).unwrap();
        saved.save_epoch(7);
        saved.save_device("/dev/nbd3");
        let [why] = &saved.clone().unwritten()[..] else { panic!("{:?}", saved.unwritten()) };
        assert!(why.starts_with(&format!("cannot write {}: ", obstacle.display())), "{why}");
        assert!(why.ends_with(WITHOUT_EPOCH), "{why}");
        assert!(!dir.path().join("v.life.new").exists());
        fs::remove_dir(&obstacle).unwrap();
        saved.save_epoch(8);
        assert_eq!((saved.unwritten(), saved.epoch()), (Vec::new(), Some(8)));
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn an_epoch_is_saved_until_it_is_removed() {
        let name = format!("rtrs-saved-{}", std::process::id());
        let dir = RunDir::new(Some(std::env::temp_dir().join(name))).unwrap();
        dir.make().unwrap();
        let saved = Saved::new(&dir, "vol.0").unwrap();
        assert_eq!(saved.epoch(), None);
        saved.begin();
        saved.save_epoch(7);
        saved.save_epoch(u64::MAX);
        assert_eq!(saved.epoch(), Some(u64::MAX));
        assert_eq!(Saved::new(&dir, "vol.1").unwrap().epoch(), None);
        fs::write(saved.path(EPOCH), "x").unwrap();
        assert_eq!(saved.epoch(), Some(0), "not known");
        assert_eq!(saved.export().unwrap(), None);
        let export: UsedExport = "-/00112233445566778899aabbccddeeff".parse().unwrap();
        saved.save_export(export);
        assert_eq!(saved.export().unwrap(), Some(export));
        fs::write(saved.path(IDENTITY), "x").unwrap();
        assert!(saved.export().is_err(), "not ignored");
        saved.forget();
        saved.forget();
        saved.save_epoch(8);
        saved.save_export(export);
        assert_eq!(saved.epoch(), None);
        assert_eq!(saved.export().unwrap(), None);
        fs::remove_dir(dir.path()).unwrap();
    }

    #[test]
    fn a_dead_volume_is_found_by_its_files_without_its_socket() {
        let name = format!("rtrs-saved-socket-{}", std::process::id());
        let dir = RunDir::new(Some(std::env::temp_dir().join(name))).unwrap();
        dir.make().unwrap();
        let names = || {
            let left = left_without_socket(&dir).unwrap();
            left.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        let saved = |name: &str| {
            let saved = Saved::new(&dir, name).unwrap();
            saved.begin();
            saved.save_epoch(7);
            saved
        };
        let export: UsedExport = "-/00112233445566778899aabbccddeeff".parse().unwrap();
        let by_export = saved("a b.c");
        by_export.save_export(export);
        let by_device = saved("d");
        by_device.save_device("/dev/nbd3");
        by_device.save_export(export);
        assert_eq!(names(), ["a b.c", "d"]);
        // A process that still has its socket is found through its socket.
        let socket = dir.control_socket("d");
        fs::write(&socket, "").unwrap();
        assert_eq!(names(), ["a b.c"]);
        fs::remove_file(socket).unwrap();
        // A detach leaves at most the epoch and its export.
        by_export.forget_but_epoch();
        by_device.forget();
        assert!(names().is_empty() && by_export.epoch() == Some(7));
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn files_change_once_the_volume_gets_users_and_are_put_back_if_it_gets_none() {
        let name = format!("rtrs-saved-begin-{}", std::process::id());
        let dir = RunDir::new(Some(std::env::temp_dir().join(name))).unwrap();
        dir.make().unwrap();
        let export: UsedExport = "-/00112233445566778899aabbccddeeff".parse().unwrap();
        let dead = Saved::new(&dir, "v").unwrap();
        dead.begin();
        dead.save_epoch(7);
        dead.save_device("/dev/nbd3");

        let saved = Saved::new(&dir, "v").unwrap();
        let left = || (saved.epoch(), saved.export().unwrap(), saved.device());
        let before = left();
        assert_eq!(before, (Some(7), None, Some("/dev/nbd3".into())));
        saved.save_epoch(8);
        saved.save_export(export);
        assert_eq!(left(), before);
        saved.begin();
        saved.save_device("");
        assert_eq!(left(), (Some(8), Some(export), Some(String::new())));
        saved.put_back();
        saved.save_epoch(9);
        assert_eq!(left(), before);
        assert!(saved.forget_but_epoch());
        assert_eq!(left(), (Some(7), None, None));
        assert!(!saved.forget_but_epoch(), "the epoch alone");
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_detached_volume_is_bound_to_no_export() {
        let name = format!("rtrs-saved-detached-{}", std::process::id());
        let dir = RunDir::new(Some(std::env::temp_dir().join(name))).unwrap();
        dir.make().unwrap();
        let export: UsedExport = "-/00112233445566778899aabbccddeeff memory".parse().unwrap();
        assert_eq!((export.memory, export.lasting()), (true, None));
        assert_eq!(export.to_string().parse(), Ok(export));
        let saved = || Saved::new(&dir, "v").unwrap();
        let left = || (saved().export().unwrap(), saved().export_of_epoch().unwrap());
        let dead = saved();
        dead.begin();
        dead.save_export(export);
        assert!(saved().forget_but_epoch());
        assert_eq!(left(), (None, None), "without an epoch");
        dead.save_export(export);
        dead.save_epoch(7);
        assert_eq!(left(), (Some(export), Some(export)));
        assert!(saved().forget_but_epoch());
        assert_eq!(left(), (None, Some(export)));
        let next = saved();
        next.save_export(UsedExport { memory: false, ..export });
        next.begin();
        let used = Some(UsedExport { memory: false, ..export });
        assert_eq!(left(), (used, used));
        next.put_back();
        assert_eq!(left(), (None, Some(export)));
        saved().forget();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        fs::remove_dir(dir.path()).unwrap();
    }

    #[test]
    fn volumes_of_a_session_are_found_by_its_name() {
        let name = format!("rtrs-saved-volumes-{}", std::process::id());
        let dir = RunDir::new(Some(std::env::temp_dir().join(name))).unwrap();
        assert_eq!(left_of(&dir, "s"), []);
        dir.make().unwrap();
        let volume = |session: &str, name: &str| SavedVolume {
            session: session.into(),
            name: name.into(),
            settings: [("device".to_owned(), "auto".to_owned())].into(),
        };
        let all = [volume("s", "pool/b"), volume("s", "c"), volume("t", "d")];
        for one in &all {
            let saved = Saved::new(&dir, &one.name).unwrap();
            saved.begin();
            saved.save_volume(one);
        }
        // One file with a wrong name, and one with invalid contents.
        let text = fs::read_to_string(dir.path().join("c.volume")).unwrap();
        fs::write(dir.path().join("e.volume"), text).unwrap();
        fs::write(dir.path().join("f.volume"), "x").unwrap();
        assert_eq!(left_of(&dir, "s"), [all[1].clone(), all[0].clone()]);
        let session = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            session_left(&dir, &names)
        };
        assert_eq!(session(&["x", "d", "c"]).as_deref(), Some("t"));
        assert_eq!(session(&["pool/b"]).as_deref(), Some("s"));
        assert_eq!(session(&["e", "x"]), None);
        Saved::new(&dir, "c").unwrap().forget();
        assert_eq!(left_of(&dir, "s"), [all[0].clone()]);
        forget_left(&dir, "s");
        assert_eq!(left_of(&dir, "s"), []);
        assert_eq!(left_of(&dir, "t"), [all[2].clone()]);
        fs::remove_dir_all(dir.path()).unwrap();
    }
}
