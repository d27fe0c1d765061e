//! What a test asks of its machine. [`requires`] skips aloud and counted ([`skip`]); [`quick`]
//! tells whether the short versions are wanted.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;

pub use rtrs_core::skip::skip;

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
    skip(&format!("no {}", missing.join(", ")));
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
