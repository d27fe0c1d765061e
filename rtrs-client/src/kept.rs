//! What a session's process leaves for one that takes over from it when it dies: in which life of
//! the server's cache it may have left writes that were not flushed.
//!
//! A number in a file beside the control socket, replaced as a whole. Sessions behind a device of
//! the kernel have one; it goes with a session that ends in order. Called by `hold`; written by the
//! thread that forwards the session's events.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::local::RunDir;

/// The file of one session. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    path: PathBuf,
    /// The session has ended, and there is nothing to keep any more.
    over: Arc<Mutex<bool>>,
}

impl Kept {
    /// That of the session that is attached as `name`.
    pub(crate) fn new(run_dir: &RunDir, name: &str) -> Self {
        let path = run_dir.control_socket(name).with_extension("life");
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

    /// Leaves a life for the next process.
    pub(crate) fn keep(&self, life: u64) {
        let over = self.over.lock();
        if *over {
            return;
        }
        let fresh = self.path.with_extension("life.new");
        let kept =
            fs::write(&fresh, format!("{life}\n")).and_then(|()| fs::rename(&fresh, &self.path));
        if let Err(error) = kept {
            tracing::warn!(
                "cannot write {}: {error}; if this process dies, who takes over cannot tell of \
                 writes that a server lost meanwhile",
                self.path.display()
            );
        }
    }

    /// Leaves nothing, from now on.
    pub(crate) fn forget(&self) {
        let mut over = self.over.lock();
        *over = true;
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("cannot remove {}: {error}", self.path.display());
            }
            _ => {}
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
        kept.forget();
        kept.forget();
        kept.keep(8);
        assert_eq!(kept.life(), None);
        fs::remove_dir(dir.path()).unwrap();
    }
}
