//! Reports tests that cannot run in this environment.
//!
//! [`skip`] writes a line `SKIP name: reason` to the real stderr, bypassing the test runner's
//! capture, and to the file named by `RTRS_SKIP_FILE`, in which `scripts/test.sh` counts such
//! lines. Cargo counts a skipped test as passed. Only tests use this module.

use std::fs::OpenOptions;
use std::io::Write;

/// Reports that the current test is skipped, and why. The test must return afterwards.
///
/// # Panics
/// Panics if the file that counts skips cannot be written, because the count would be wrong.
pub fn skip(reason: &str) {
    let thread = std::thread::current();
    let line = format!("SKIP {}: {reason}\n", thread.name().unwrap_or("test"));
    // eprint! would be captured by the test runner. A failure to write to stderr cannot be
    // reported.
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(path) = std::env::var_os("RTRS_SKIP_FILE") {
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let noted = file.and_then(|mut file| file.write_all(line.as_bytes()));
        assert!(noted.is_ok(), "cannot note the skip in {}: {noted:?}", path.display());
    }
}
