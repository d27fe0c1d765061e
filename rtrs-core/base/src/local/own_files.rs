//! Small files in the run directory that outlive the process that writes them.
//!
//! [`OwnFiles`] holds the checked run directory open. Names are looked up in that directory, even
//! if the path has since been replaced. Symbolic links are not followed, neither for files that are
//! read nor for the temporary files that replace them.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

/// Maximum number of bytes read from a file.
const BYTES_MAX: u64 = 4096;

/// Run directory that belongs to this user and is not writable by others. Clones share the same
/// directory.
#[derive(Debug, Clone)]
pub struct OwnFiles {
    dir: Arc<fs::File>,
}

impl OwnFiles {
    pub(super) fn new(dir: fs::File) -> Self {
        Self { dir: Arc::new(dir) }
    }

    /// Returns the path to a name in the directory that is held open.
    fn at(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.dir.as_raw_fd()))
    }

    /// Returns the content of a file, if it exists.
    ///
    /// # Errors
    /// The system's error; `FilesystemLoop` for a symbolic link; `InvalidData` for anything other
    /// than a regular file with at most 4096 bytes of text.
    pub fn read(&self, name: &str) -> io::Result<Option<String>> {
        let Some(file) = self.open(name)? else { return Ok(None) };
        let meta = file.metadata()?;
        if !meta.is_file() || meta.len() > BYTES_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "not a regular file of at most 4096 bytes",
            ));
        }
        let mut text = String::new();
        file.take(BYTES_MAX).read_to_string(&mut text)?;
        Ok(Some(text))
    }

    /// Opens a file, if it exists.
    fn open(&self, name: &str) -> io::Result<Option<fs::File>> {
        // Without O_NONBLOCK, opening a pipe would block.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        match fs::File::options().read(true).custom_flags(flags).open(self.at(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some),
        }
    }

    /// Sets a file's times to now, if it exists, so that programs that remove old files keep it.
    ///
    /// # Errors
    /// The system's error; `FilesystemLoop` for a symbolic link.
    pub fn touch(&self, name: &str) -> io::Result<()> {
        let Some(file) = self.open(name)? else { return Ok(()) };
        let now = SystemTime::now();
        file.set_times(fs::FileTimes::new().set_accessed(now).set_modified(now))
    }

    /// Replaces a file atomically, or creates it; only this user can read it. The temporary file
    /// `NAME.new` is removed first if it exists, and after a failure.
    ///
    /// # Errors
    /// The system's error.
    pub fn replace(&self, name: &str, text: &str) -> io::Result<()> {
        let fresh = self.at(&format!("{name}.new"));
        remove(&fresh)?;
        // O_EXCL (`create_new`) ensures that a new file is written.
        let mut file = fs::File::options().write(true).create_new(true).mode(0o600).open(&fresh)?;
        let written = file.write_all(text.as_bytes());
        written.and_then(|()| fs::rename(&fresh, self.at(name))).inspect_err(|_| {
            // Report the first failure.
            let _ = remove(&fresh);
        })
    }

    /// Removes a file, if it exists; for a symbolic link, removes the link and not its target.
    ///
    /// # Errors
    /// The system's error.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        remove(&self.at(name))
    }
}

fn remove(path: &std::path::Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use crate::local::RunDir;

    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let name = format!("rtrs-own-files-{}-{name}", std::process::id());
            let dir = std::env::temp_dir().join(name);
            let _ = fs::remove_dir_all(&dir);
            fs::create_dir(&dir).unwrap();
            Self(dir)
        }

        fn open(&self) -> (PathBuf, OwnFiles) {
            let dir = RunDir::new(Some(self.0.join("run"))).unwrap();
            dir.make().unwrap();
            (dir.path().to_path_buf(), dir.files().unwrap())
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn files_are_replaced_and_removed() {
        let scratch = Scratch::new("plain");
        let (_, files) = scratch.open();
        assert_eq!(files.read("vol.life").unwrap(), None);
        files.replace("vol.life", "7\n").unwrap();
        files.replace("vol.life", "8\n").unwrap();
        assert_eq!(files.read("vol.life").unwrap().as_deref(), Some("8\n"));
        files.remove("vol.life").unwrap();
        files.remove("vol.life").unwrap();
        assert_eq!(files.read("vol.life").unwrap(), None);
    }

    #[test]
    fn a_touched_file_counts_as_new() {
        let scratch = Scratch::new("touch");
        let (dir, files) = scratch.open();
        files.touch("vol.life").unwrap();
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "not created");
        files.replace("vol.life", "7\n").unwrap();
        let file = fs::File::open(dir.join("vol.life")).unwrap();
        let old = SystemTime::UNIX_EPOCH;
        file.set_times(fs::FileTimes::new().set_accessed(old).set_modified(old)).unwrap();
        let before = SystemTime::now() - std::time::Duration::from_secs(60);
        files.touch("vol.life").unwrap();
        let meta = file.metadata().unwrap();
        assert!(meta.modified().unwrap() > before && meta.accessed().unwrap() > before);
        assert_eq!(files.read("vol.life").unwrap().as_deref(), Some("7\n"));
    }

    #[test]
    fn symbolic_links_are_not_followed() {
        let scratch = Scratch::new("links");
        let (dir, files) = scratch.open();
        let other = scratch.0.join("other");
        let untouched = || assert_eq!(fs::read_to_string(&other).unwrap(), "theirs");
        fs::write(&other, "theirs").unwrap();
        symlink(&other, dir.join("vol.life")).unwrap();
        symlink(&other, dir.join("vol.life.new")).unwrap();
        let error = files.read("vol.life").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ELOOP));
        files.replace("vol.life", "7\n").unwrap();
        untouched();
        assert_eq!(files.read("vol.life").unwrap().as_deref(), Some("7\n"), "a file of its own");
        symlink(&other, dir.join("vol.identity")).unwrap();
        files.remove("vol.identity").unwrap();
        untouched();
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    }

    #[test]
    fn replacing_the_directory_changes_nothing() {
        let scratch = Scratch::new("moved");
        let (dir, files) = scratch.open();
        let away = scratch.0.join("away");
        fs::rename(&dir, &away).unwrap();
        fs::create_dir(&dir).unwrap();
        files.replace("vol.life", "7\n").unwrap();
        assert_eq!(fs::read_to_string(away.join("vol.life")).unwrap(), "7\n");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    }

    #[test]
    fn files_that_are_not_small_and_regular_are_refused() {
        let scratch = Scratch::new("odd");
        let (dir, files) = scratch.open();
        fs::create_dir(dir.join("folder")).unwrap();
        assert!(files.read("folder").is_err());
        fs::write(dir.join("long"), [b'7'; 5000]).unwrap();
        assert_eq!(files.read("long").unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
