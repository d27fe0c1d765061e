//! Small text files, such as those in /sys and /etc.

use std::fs;
use std::path::Path;

/// Maximum size of such a file in bytes.
const BYTES_MAX: usize = 4096;

/// Returns the text of a small file, without surrounding white space and NULs. Returns None if no
/// text is left.
#[must_use]
pub fn read_text(path: &Path) -> Option<String> {
    let bytes = fs::read(path).ok().filter(|bytes| bytes.len() <= BYTES_MAX)?;
    let text = String::from_utf8_lossy(&bytes);
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    (!text.is_empty()).then(|| text.to_owned())
}
