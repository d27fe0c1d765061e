//! Replays the fuzz corpus, so that every input that once found new behavior is still handled.

use std::fs;
use std::path::Path;

/// Runs `body` over every file of a corpus. A missing corpus is a failure, not a pass.
fn replay(corpus: &str, at_least: usize, body: fn(&[u8])) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(corpus);
    let mut files: Vec<_> = fs::read_dir(&dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.expect("a directory entry").path())
        .collect();
    files.sort();
    assert!(files.len() >= at_least, "{}: only {} inputs", dir.display(), files.len());
    for file in files {
        let data = fs::read(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        if let Err(panic) = std::panic::catch_unwind(|| body(&data)) {
            eprintln!("while replaying {}", file.display());
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn nbd_handshake() {
    replay("nbd_handshake", 20, super::fuzz::fuzz_handshake);
}

#[test]
fn nbd_transmission() {
    replay("nbd_transmission", 12, super::fuzz::fuzz_transmission);
}
