//! What a test asks of its machine. [`requires`] skips aloud: a line `SKIP name: reason` goes past
//! the test runner's capture to the real stderr, and into the file that `RTRS_SKIP_FILE` names,
//! where `scripts/test.sh` counts it. [`quick`] tells whether the short versions are wanted.

use std::fs::OpenOptions;
use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;

/// The `PATH` tests run programs with: the caller's, and where mkfs and fsck live.
pub(crate) fn search_path() -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    format!("{path}:/usr/sbin:/sbin")
}

fn find(tool: &str) -> Option<PathBuf> {
    std::env::split_paths(&search_path()).map(|dir| dir.join(tool)).find(|path| path.is_file())
}

/// True when every one of these programs is installed; else says that the current test is skipped
/// and why. A test returns at once on false.
#[must_use]
pub fn requires(tools: &[&str]) -> bool {
    let missing: Vec<&str> = tools.iter().copied().filter(|tool| find(tool).is_none()).collect();
    if missing.is_empty() {
        return true;
    }
    let thread = std::thread::current();
    let line = format!("SKIP {}: no {}\n", thread.name().unwrap_or("test"), missing.join(", "));
    // Not eprint!, which the test runner would swallow. Nothing can be done if stderr is gone.
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(path) = std::env::var_os("RTRS_SKIP_FILE") {
        let file = OpenOptions::new().create(true).append(true).open(path);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("note the skip");
    }
    false
}

/// True when `RTRS_QUICK` asks for small images and short times.
#[must_use]
pub fn quick() -> bool {
    std::env::var_os("RTRS_QUICK").is_some_and(|value| value != "0")
}

/// True when the tests run as root, whom file permissions do not stop.
#[must_use]
pub fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output().expect("run id");
    id.stdout.trim_ascii() == b"0"
}

/// A TCP port of 127.0.0.1 that was free a moment ago. For programs that cannot take port 0.
#[must_use]
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind a loopback port");
    listener.local_addr().expect("its address").port()
}
