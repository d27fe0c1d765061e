//! State that a session's process saves for a successor that takes over after its death. For each
//! volume, this is the epoch of the server's cache in which it may have left unflushed writes, and
//! the identity of the export; for volumes that share a session, also the session and each volume's
//! own settings. For udev, it is the device of a volume.
//!
//! The files are next to the control socket and are always replaced as a whole; a detach removes
//! them. All volumes have the first two, written by the thread that forwards the session's events.
//! Volumes with a kernel device have the others.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::identity::Identity;
use rtrs_core::local::{OwnFiles, PlaceError, RunDir, SocketState, socket_state};
use serde::{Deserialize, Serialize};

const EPOCH: &str = "life";
const IDENTITY: &str = "identity";
const DEVICE: &str = "device";
const VOLUME: &str = "volume";

/// Volume of a session with several volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedVolume {
    /// Session name at the server.
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
    /// Control socket; the files have its name with their own extensions.
    beside: PathBuf,
    /// Set when the volume is detached, after which nothing is saved.
    over: Arc<Mutex<bool>>,
}

impl Saved {
    /// Creates the files' handle for the volume attached as `name`.
    ///
    /// # Errors
    /// Fails if the run directory cannot be used.
    pub(crate) fn new(run_dir: &RunDir, name: &str) -> Result<Self, PlaceError> {
        Self::beside(run_dir, &run_dir.control_socket(name))
    }

    /// Creates the handle of the files next to this control socket.
    ///
    /// # Errors
    /// Fails if the run directory cannot be used.
    pub(crate) fn beside(run_dir: &RunDir, control_socket: &Path) -> Result<Self, PlaceError> {
        let (files, beside) = (run_dir.files()?, control_socket.to_path_buf());
        Ok(Self { files, beside, over: Arc::new(Mutex::new(false)) })
    }

    /// Epoch saved by a dead process; 0, which means unknown, if it cannot be read.
    pub(crate) fn epoch(&self) -> Option<u64> {
        self.read(EPOCH).unwrap_or_else(|error| {
            tracing::warn!("cannot read {}: {error}", self.path(EPOCH).display());
            Some(0)
        })
    }

    /// Identity of the export that a dead process used, if known.
    ///
    /// # Errors
    /// Returns the reason why an existing file cannot be read.
    pub(crate) fn identity(&self) -> io::Result<Option<Identity>> {
        self.read(IDENTITY)
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

    /// Saves the identity of the export for the next process.
    pub(crate) fn save_identity(&self, identity: Identity) {
        let without = "the process that takes over does not know which export to expect";
        self.write(IDENTITY, &identity.to_string(), without);
    }

    /// Saves the path of the device for udev; an empty one while the device is being connected.
    pub(crate) fn save_device(&self, path: &str) {
        self.write(DEVICE, path, "the links that udev makes may be missing, or come too early");
    }

    /// Saves an epoch for the next process.
    pub(crate) fn save_epoch(&self, epoch: u64) {
        let without = "the process that takes over cannot report writes that a server lost";
        self.write(EPOCH, &epoch.to_string(), without);
    }

    /// Saves that the volume shares a session, for the process that takes over.
    pub(crate) fn save_volume(&self, volume: &SavedVolume) {
        match serde_json::to_string(volume) {
            Ok(text) => {
                self.write(VOLUME, &text, "the process that takes over lacks this volume");
            }
            Err(error) => tracing::warn!("cannot save {:?}: {error}", volume.name),
        }
    }

    fn write(&self, extension: &str, text: &str, without: &str) {
        let over = self.over.lock();
        if *over {
            return;
        }
        if let Err(error) = self.files.replace(&self.name(extension), &format!("{text}\n")) {
            tracing::warn!("cannot write {}: {error}; {without}", self.path(extension).display());
        }
    }

    /// Forgets a shared session, as the volume is the only one now.
    pub(crate) fn forget_volume(&self) {
        self.remove(VOLUME);
    }

    /// Removes everything, and saves nothing from now on.
    pub(crate) fn forget(&self) {
        let mut over = self.over.lock();
        *over = true;
        [EPOCH, IDENTITY, DEVICE, VOLUME].iter().for_each(|extension| self.remove(extension));
    }

    fn remove(&self, extension: &str) {
        if let Err(error) = self.files.remove(&self.name(extension)) {
            tracing::warn!("cannot remove {}: {error}", self.path(extension).display());
        }
    }
}

/// Returns the volumes that a dead process left of the session with this name. Unreadable ones are
/// logged and omitted, and so are volumes that are attached again.
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

/// Forgets what is left of the session with this name, which starts again without a takeover.
pub(crate) fn forget_left(run_dir: &RunDir, session: &str) {
    for volume in left_of(run_dir, session) {
        match Saved::new(run_dir, &volume.name) {
            Ok(saved) => saved.forget_volume(),
            Err(error) => tracing::warn!("cannot forget {:?}: {error}", volume.name),
        }
    }
}

fn all_volumes(run_dir: &RunDir) -> Vec<SavedVolume> {
    // Without a run directory nothing was saved.
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
            tracing::warn!("{} is not understood", run_dir.path().join(&name).display());
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
        assert_eq!(saved.epoch(), Some(0), "what a link names is not read");
        assert!(saved.identity().is_err());
        saved.save_epoch(7);
        saved.save_identity("-/00112233445566778899aabbccddeeff".parse().unwrap());
        assert_eq!(saved.epoch(), Some(7));
        assert_eq!(fs::read_to_string(&other).unwrap(), "theirs");
        saved.forget();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        fs::remove_dir_all(&place).unwrap();
    }

    #[test]
    fn an_epoch_is_saved_until_it_is_removed() {
        let name = format!("rtrs-saved-{}", std::process::id());
        let dir = RunDir::new(Some(std::env::temp_dir().join(name))).unwrap();
        dir.make().unwrap();
        let saved = Saved::new(&dir, "vol.0").unwrap();
        assert_eq!(saved.epoch(), None);
        saved.save_epoch(7);
        saved.save_epoch(u64::MAX);
        assert_eq!(saved.epoch(), Some(u64::MAX));
        assert_eq!(Saved::new(&dir, "vol.1").unwrap().epoch(), None);
        fs::write(saved.path(EPOCH), "x").unwrap();
        assert_eq!(saved.epoch(), Some(0), "not known");
        assert_eq!(saved.identity().unwrap(), None);
        let identity: Identity = "-/00112233445566778899aabbccddeeff".parse().unwrap();
        saved.save_identity(identity);
        assert_eq!(saved.identity().unwrap(), Some(identity));
        fs::write(saved.path(IDENTITY), "x").unwrap();
        assert!(saved.identity().is_err(), "not ignored");
        saved.forget();
        saved.forget();
        saved.save_epoch(8);
        saved.save_identity(identity);
        assert_eq!(saved.epoch(), None);
        assert_eq!(saved.identity().unwrap(), None);
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
            Saved::new(&dir, &one.name).unwrap().save_volume(one);
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
