//! Absolute paths for files named by the user.

use std::env;
use std::io;
use std::path::{self, Path, PathBuf};

/// Makes a path absolute, so that it remains valid if the process changes its directory.
///
/// # Errors
/// `InvalidInput` for an empty path. For a relative one, the system's error if the current
/// directory has been removed or cannot be determined, with the path and a remedy.
pub fn absolute(path: &Path) -> io::Result<PathBuf> {
    path::absolute(path).map_err(|error| {
        if path.as_os_str().is_empty() {
            return error;
        }
        let why = match error.kind() {
            io::ErrorKind::NotFound => "was removed".to_owned(),
            _ => format!("cannot be determined ({error})"),
        };
        let text = format!(
            "{path:?} is a relative path, and the current directory {why}; use an absolute path, \
             or change to another directory"
        );
        io::Error::new(error.kind(), text)
    })
}

/// Makes the given paths absolute.
///
/// # Errors
/// Those of [`absolute`].
pub fn make_absolute<const N: usize>(paths: [&mut Option<PathBuf>; N]) -> io::Result<()> {
    for path in paths.into_iter().flatten() {
        *path = absolute(path)?;
    }
    Ok(())
}

/// Replaces the error from opening a file with the reason, if the file's path is relative to a
/// current directory that has been removed.
pub(crate) fn why_missing(path: &Path, error: io::Error) -> io::Error {
    let is_missing = error.kind() == io::ErrorKind::NotFound && env::current_dir().is_err();
    match absolute(path) {
        Err(why) if is_missing => why,
        _ => error,
    }
}
