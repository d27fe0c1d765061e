//! Small text files, as those of /sys and /etc, and paths to files.

use std::fs;
use std::io;
use std::path::{self, Path, PathBuf};

/// Most bytes of such a file.
const BYTES_MAX: usize = 4096;

/// The text of a small file, without white space and NULs around it. None if there is none.
#[must_use]
pub fn read_text(path: &Path) -> Option<String> {
    let bytes = fs::read(path).ok().filter(|bytes| bytes.len() <= BYTES_MAX)?;
    let text = String::from_utf8_lossy(&bytes);
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    (!text.is_empty()).then(|| text.to_owned())
}

/// Makes the paths that are set absolute, so that they mean the same files when the process has
/// changed its directory.
///
/// # Errors
/// The system's when the current directory is gone; `InvalidInput` for an empty path.
pub fn make_absolute<const N: usize>(paths: [&mut Option<PathBuf>; N]) -> io::Result<()> {
    for path in paths.into_iter().flatten() {
        *path = path::absolute(&*path)?;
    }
    Ok(())
}
