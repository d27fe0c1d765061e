//! A directory per test, in memory where the machine has /dev/shm, removed with the handle.
//! Its path is short, because unix sockets are made in it (their paths end at 107 bytes).

use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// A temporary directory, removed with all it holds when dropped.
#[derive(Debug)]
pub struct Scratch {
    dir: TempDir,
}

impl Scratch {
    /// Makes the directory: under /dev/shm when there is one, else under the system's own.
    ///
    /// # Panics
    /// When no directory can be made.
    #[must_use]
    pub fn new() -> Self {
        let shm = Path::new("/dev/shm");
        let mut builder = tempfile::Builder::new();
        builder.prefix("rtrs-");
        let dir = if shm.is_dir() { builder.tempdir_in(shm) } else { builder.tempdir() };
        Self { dir: dir.expect("make a scratch directory") }
    }

    /// The directory itself.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The path of `name` in the directory; nothing is made.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// [`Self::path`] as text, for command lines.
    #[must_use]
    pub fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("scratch paths are plain text").to_owned()
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}
