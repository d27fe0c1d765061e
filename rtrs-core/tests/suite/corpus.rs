//! Replays the corpora of the fuzz targets, so that bugs once found by a fuzzer do not return.
//!
//! The bodies are in the crate; a plain `cargo test` runs them over fuzz/corpus.

use std::fs;
use std::path::Path;

/// Runs a target's body over every file of its corpus, whole and truncated.
fn replay(target: &str, body: fn(&[u8])) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut files = 0;
    for entry in fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
        let path = entry.expect("directory entry").path();
        let bytes = fs::read(&path).expect("corpus file");
        // Shown only if the body panics.
        println!("{}", path.display());
        body(&bytes);
        for cut in 0..bytes.len().min(512) {
            body(&bytes[..cut]);
        }
        files += 1;
    }
    assert!(files > 0, "{} is empty", dir.display());
}

#[test]
fn wire() {
    replay("wire", rtrs_core::wire::fuzz);
}
