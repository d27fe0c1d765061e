//! What a session's process leaves for one that takes over from it when it dies: in which life of
//! the server's cache it may have left writes that were not flushed, and which server's export it
//! worked with.
//!
//! Two files beside the control socket, each replaced as a whole. Sessions behind a device of the
//! kernel have them; they go with a session that ends in order. Called by `hold`; written by the
//! thread that forwards the session's events.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::identity::Identity;
use rtrs_core::local::RunDir;

const LIFE: &str = "life";
const IDENTITY: &str = "identity";

/// The files of one session. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    path: PathBuf,
    /// The session has ended, and there is nothing to keep any more.
    over: Arc<Mutex<bool>>,
}

impl Kept {
    /// That of the session that is attached as `name`.
    pub(crate) fn new(run_dir: &RunDir, name: &str) -> Self {
        let path = run_dir.control_socket(name).with_extension(LIFE);
        Self { path, over: Arc::new(Mutex::new(false)) }
    }

    /// What a process that died has left; 0, which says that it is not known, when nobody can read
    /// it.
    pub(crate) fn life(&self) -> Option<u64> {
        match fs::read_to_string(&self.path) {
            Ok(text) => Some(text.trim().parse().unwrap_or(0)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                tracing::warn!("cannot read {}: {error}", self.path.display());
                Some(0)
            }
        }
    }

    /// Which server's export a process that died worked with, if it is known.
    ///
    /// # Errors
    /// Why it cannot be read, where there is something.
    pub(crate) fn identity(&self) -> io::Result<Option<Identity>> {
        let path = self.path.with_extension(IDENTITY);
        match fs::read_to_string(path) {
            Ok(text) => match text.trim().parse() {
                Ok(identity) => Ok(Some(identity)),
                Err(error) => Err(io::Error::new(io::ErrorKind::InvalidData, error)),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Leaves for the next process which server's export it is.
    pub(crate) fn keep_identity(&self, identity: Identity) {
        let what = "does not know which disk it has to be";
        self.write(IDENTITY, &identity.to_string(), what);
    }

    /// Leaves a life for the next process.
    pub(crate) fn keep(&self, life: u64) {
        self.write(LIFE, &life.to_string(), "cannot tell of writes that a server lost meanwhile");
    }

    fn write(&self, extension: &str, text: &str, without: &str) {
        let over = self.over.lock();
        if *over {
            return;
        }
        let path = self.path.with_extension(extension);
        let fresh = self.path.with_extension(format!("{extension}.new"));
        let kept = fs::write(&fresh, format!("{text}\n")).and_then(|()| fs::rename(&fresh, &path));
        if let Err(error) = kept {
            tracing::warn!(
                "cannot write {}: {error}; if this process dies, who takes over {without}",
                path.display()
            );
        }
    }

    /// Leaves nothing, from now on.
    pub(crate) fn forget(&self) {
        let mut over = self.over.lock();
        *over = true;
        for extension in [LIFE, IDENTITY] {
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
    fn a_life_is_kept_until_it_is_forgotten() {
        let name = format!("rtrs-kept-{}", std::process::id());
        let dir = RunDir::new(Some(std::env::temp_dir().join(name))).unwrap();
        dir.make().unwrap();
        let kept = Kept::new(&dir, "vol.0");
        assert_eq!(kept.life(), None);
        kept.keep(7);
        kept.keep(u64::MAX);
        assert_eq!(kept.life(), Some(u64::MAX));
        assert_eq!(Kept::new(&dir, "vol.1").life(), None);
        fs::write(&kept.path, "x").unwrap();
        assert_eq!(kept.life(), Some(0), "not known");
        assert_eq!(kept.identity().unwrap(), None);
        let identity: Identity = "-/00112233445566778899aabbccddeeff".parse().unwrap();
        kept.keep_identity(identity);
        assert_eq!(kept.identity().unwrap(), Some(identity));
        fs::write(kept.path.with_extension(IDENTITY), "x").unwrap();
        assert!(kept.identity().is_err(), "not ignored");
        kept.forget();
        kept.forget();
        kept.keep(8);
        kept.keep_identity(identity);
        assert_eq!(kept.life(), None);
        assert_eq!(kept.identity().unwrap(), None);
        fs::remove_dir(dir.path()).unwrap();
    }
}
