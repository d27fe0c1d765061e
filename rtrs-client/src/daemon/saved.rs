//! What a session's process saves for one that takes over from it when it dies: the epoch of the
//! server's cache in which it may have left writes that were not flushed, and the identity of the
//! export.
//!
//! Two files beside the control socket, each replaced as a whole. Sessions behind a device of the
//! kernel have them; a session that ends in order removes them. Written by the thread that forwards
//! the session's events.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::identity::Identity;
use rtrs_core::local::RunDir;

const EPOCH: &str = "life";
const IDENTITY: &str = "identity";

/// The files of one session. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Saved {
    path: PathBuf,
    /// The session has ended: nothing is saved any more.
    over: Arc<Mutex<bool>>,
}

impl Saved {
    /// That of the session that is attached as `name`.
    pub(crate) fn new(run_dir: &RunDir, name: &str) -> Self {
        let path = run_dir.control_socket(name).with_extension(EPOCH);
        Self { path, over: Arc::new(Mutex::new(false)) }
    }

    /// What a process that died has saved; 0, which means unknown, if it cannot be read.
    pub(crate) fn epoch(&self) -> Option<u64> {
        self.read(EPOCH).unwrap_or_else(|error| {
            tracing::warn!("cannot read {}: {error}", self.path.display());
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
        match fs::read_to_string(self.path.with_extension(extension)) {
            Ok(text) => {
                let value = text.trim().parse();
                value.map(Some).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
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
        let path = self.path.with_extension(extension);
        let fresh = self.path.with_extension(format!("{extension}.new"));
        let saved = fs::write(&fresh, format!("{text}\n")).and_then(|()| fs::rename(&fresh, &path));
        if let Err(error) = saved {
            tracing::warn!(
                "cannot write {}: {error}; if this process dies, the one that takes over {without}",
                path.display()
            );
        }
    }

    /// Removes everything, and saves nothing from now on.
    pub(crate) fn forget(&self) {
        let mut over = self.over.lock();
        *over = true;
        for extension in [EPOCH, IDENTITY] {
            let path = self.path.with_extension(extension);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!("cannot remove {}: {error}", path.display());
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_is_saved_until_it_is_forgotten() {
        let name = format!("rtrs-saved-{}", std::process::id());
        let dir = RunDir::new(Some(std::env::temp_dir().join(name))).unwrap();
        dir.make().unwrap();
        let saved = Saved::new(&dir, "vol.0");
        assert_eq!(saved.epoch(), None);
        saved.save_epoch(7);
        saved.save_epoch(u64::MAX);
        assert_eq!(saved.epoch(), Some(u64::MAX));
        assert_eq!(Saved::new(&dir, "vol.1").epoch(), None);
        fs::write(&saved.path, "x").unwrap();
        assert_eq!(saved.epoch(), Some(0), "not known");
        assert_eq!(saved.identity().unwrap(), None);
        let identity: Identity = "-/00112233445566778899aabbccddeeff".parse().unwrap();
        saved.save_identity(identity);
        assert_eq!(saved.identity().unwrap(), Some(identity));
        fs::write(saved.path.with_extension(IDENTITY), "x").unwrap();
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
