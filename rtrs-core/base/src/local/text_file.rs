//! Small text files, such as those in /sys and /etc, and paths of files.

use std::fs;
use std::io;
use std::path::{self, Path, PathBuf};

/// Maximum size of such a file in bytes.
const BYTES_MAX: usize = 4096;

/// Returns the text of a small file, without surrounding white space and NULs. None if there is
/// none.
#[must_use]
pub fn read_text(path: &Path) -> Option<String> {
    let bytes = fs::read(path).ok().filter(|bytes| bytes.len() <= BYTES_MAX)?;
    let text = String::from_utf8_lossy(&bytes);
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    (!text.is_empty()).then(|| text.to_owned())
}

/// Makes the given paths absolute, so that they remain valid when the process changes its
/// directory.
///
/// # Errors
/// Returns the system's error if the current directory does not exist; `InvalidInput` for an empty
/// path.
pub fn make_absolute<const N: usize>(paths: [&mut Option<PathBuf>; N]) -> io::Result<()> {
    for path in paths.into_iter().flatten() {
        *path = path::absolute(&*path)?;
    }
    Ok(())
}
