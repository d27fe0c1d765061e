//! Checks at startup, and for `--check`, whether a server can write to its directories.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf, absolute};

use rtrs_core::rt::{Account, FilesAs};

/// Returns the warning for a server that cannot use its state directory.
pub(super) fn unusable(error: &io::Error) -> String {
    format!(
        "cannot use the state directory: {error}; set --state-dir to a writable directory. Until \
         then, clients treat every start of this server as a loss of unflushed data"
    )
}

/// Returns the error for a server that has no default state directory.
pub(super) fn no_home() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "no home directory is known")
}

/// Creates a file in a directory, to check that this is possible, and removes it.
///
/// # Errors
/// The system's error, with the directory.
pub(super) fn try_write(dir: &Path) -> io::Result<()> {
    let named =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", dir.display()));
    let path = dir.join(format!(".probe-{}", std::process::id()));
    File::create(&path).map_err(named)?;
    match fs::remove_file(&path) {
        // Another server sharing the directory may have the same PID in its container.
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(named(error)),
        _ => Ok(()),
    }
}

/// Checks whether files can be created in the subdirectory `below` of a directory. At startup, the
/// server creates both if they do not exist; as root, it creates the directory for the owner.
///
/// # Errors
/// The system's error, with the directory.
pub(crate) fn check_directory(dir: &Path, below: &str, owner: Option<&Account>) -> io::Result<()> {
    let dir = absolute(dir)?;
    let all: PathBuf = dir.components().chain(Path::new(below).components()).collect();
    let Some(existing) = all.ancestors().find(|dir| dir.exists()) else { return Ok(()) };
    let owner = owner.filter(|_| existing.starts_with(&dir));
    owner.map(FilesAs::begin).transpose().and_then(|_as| try_write(existing))
}

#[cfg(test)]
mod tests {
    use rtrs_core::tests::certificates::TestDir;

    use super::super::check_state_dir;
    use super::*;

    #[test]
    fn checking_a_directory_creates_nothing() {
        let scratch = TestDir::new("probe");
        let dir = scratch.0.join("a/b");
        assert_eq!(check_state_dir(Some(&dir), None), None);
        assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 0);
        fs::create_dir_all(dir.join("epochs")).unwrap();
        assert_eq!(check_state_dir(Some(&dir), None), None);
        assert_eq!(fs::read_dir(dir.join("epochs")).unwrap().count(), 0);
        fs::write(scratch.0.join("file"), "").unwrap();
        let warning = check_state_dir(Some(&scratch.0.join("file")), None).unwrap();
        assert!(warning.contains("/file: Not a directory (os error 20); set --state-dir"));
        let text = check_directory(&scratch.0.join("file/x"), "", None).unwrap_err().to_string();
        assert!(text.contains("/file: Not a directory"), "{text}");
    }
}
