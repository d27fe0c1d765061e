//! A test's directory, in memory if the machine has /dev/shm, removed with the handle. Its path is
//! short, because it contains unix sockets, whose paths are limited to 107 bytes.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// Temporary directory, removed with its contents when dropped.
#[derive(Debug)]
pub struct Scratch {
    dir: TempDir,
}

impl Scratch {
    /// Creates the directory, under /dev/shm if that exists, otherwise in the system's default
    /// location.
    ///
    /// # Panics
    /// Panics when no directory can be created.
    #[must_use]
    pub fn new() -> Self {
        let shm = Path::new("/dev/shm");
        let mut builder = tempfile::Builder::new();
        builder.prefix("rtrs-");
        let dir = if shm.is_dir() { builder.tempdir_in(shm) } else { builder.tempdir() };
        Self { dir: dir.expect("create a scratch directory") }
    }

    /// Returns the directory itself.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the path of `name` in the directory without creating it.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns [`Self::path`] as text, for command lines.
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
