//! How a test says that it cannot run here.
//!
//! Owns [`skip`]: a line `SKIP name: reason` goes past the test runner's capture to the real
//! stderr, and into the file that `RTRS_SKIP_FILE` names, where `scripts/test.sh` counts it. To
//! cargo a skipped test looks passed. Called by tests only.

use std::fs::OpenOptions;
use std::io::Write;

/// Says that the current test is skipped, and why. The test returns afterwards.
///
/// # Panics
/// When the file that counts skips cannot be written: the count would be wrong.
pub fn skip(reason: &str) {
    let thread = std::thread::current();
    let line = format!("SKIP {}: {reason}\n", thread.name().unwrap_or("test"));
    // Not eprint!, which the test runner would swallow. Nothing can be done if stderr is gone.
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(path) = std::env::var_os("RTRS_SKIP_FILE") {
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let noted = file.and_then(|mut file| file.write_all(line.as_bytes()));
        assert!(noted.is_ok(), "cannot note the skip in {}: {noted:?}", path.display());
    }
}
