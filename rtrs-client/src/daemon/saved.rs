//! What a session's process saves for one that takes over from it when it dies: the epoch of the
//! server's cache in which it may have left writes that were not flushed, and the identity of the
//! export.
//!
//! Two files beside the control socket, each replaced as a whole. Sessions behind a device of the
//! kernel have them; a session that ends in order removes them. Written by the thread that forwards
//! the session's events.

use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::identity::Identity;
use rtrs_core::local::{OwnFiles, PlaceError, RunDir};

const EPOCH: &str = "life";
const IDENTITY: &str = "identity";

/// The files of one session. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Saved {
    files: OwnFiles,
    /// The control socket, whose name they have with an extension of their own.
    beside: PathBuf,
    /// The session has ended: nothing is saved any more.
    over: Arc<Mutex<bool>>,
}

impl Saved {
    /// That of the session that is attached as `name`.
    ///
    /// # Errors
    /// The run directory cannot be used.
    pub(crate) fn new(run_dir: &RunDir, name: &str) -> Result<Self, PlaceError> {
        let (files, beside) = (run_dir.files()?, run_dir.control_socket(name));
        Ok(Self { files, beside, over: Arc::new(Mutex::new(false)) })
    }

    /// What a process that died has saved; 0, which means unknown, if it cannot be read.
    pub(crate) fn epoch(&self) -> Option<u64> {
        self.read(EPOCH).unwrap_or_else(|error| {
            tracing::warn!("cannot read {}: {error}", self.path(EPOCH).display());
            Some(0)
        })
    }

    /// Which server's export a process that died worked with, if it is known.
    ///
    /// # Errors
    /// Why it cannot be read, where there is something.
    pub(crate) fn identity(&self) -> io::Result<Option<Identity>> {
        self.read(IDENTITY)
    }

    /// What a file holds, if there is one.
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

    /// The name of a file in the run directory.
    fn name(&self, extension: &str) -> String {
        let path = self.path(extension);
        path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Saves the identity of the export for the next process.
    pub(crate) fn save_identity(&self, identity: Identity) {
        let what = "does not know which export to expect";
        self.write(IDENTITY, &identity.to_string(), what);
    }

    /// Saves an epoch for the next process.
    pub(crate) fn save_epoch(&self, epoch: u64) {
        self.write(EPOCH, &epoch.to_string(), "cannot report writes that a server lost meanwhile");
    }

    fn write(&self, extension: &str, text: &str, without: &str) {
        let over = self.over.lock();
        if *over {
            return;
        }
        if let Err(error) = self.files.replace(&self.name(extension), &format!("{text}\n")) {
            tracing::warn!(
                "cannot write {}: {error}; if this process dies, the one that takes over {without}",
                self.path(extension).display()
            );
        }
    }

    /// Removes everything, and saves nothing from now on.
    pub(crate) fn forget(&self) {
        let mut over = self.over.lock();
        *over = true;
        for extension in [EPOCH, IDENTITY] {
            if let Err(error) = self.files.remove(&self.name(extension)) {
                tracing::warn!("cannot remove {}: {error}", self.path(extension).display());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_symbolic_link_in_the_run_directory_is_not_written_through() {
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
    fn an_epoch_is_saved_until_it_is_forgotten() {
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
}
