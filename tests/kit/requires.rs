//! A test's requirements for its machine. [`requires`] skips a test with a message and counts it
//! ([`skip`]); [`quick`] selects the short versions.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;

use socket2::{Domain, Socket, Type};

pub use rtrs_core::skip::skip;

/// Returns the `PATH` for programs in tests: the caller's plus the directories of mkfs and fsck.
pub(crate) fn search_path() -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    format!("{path}:/usr/sbin:/sbin")
}

fn find(tool: &str) -> Option<PathBuf> {
    std::env::split_paths(&search_path()).map(|dir| dir.join(tool)).find(|path| path.is_file())
}

/// Whether all of these programs are installed; otherwise prints that the current test is skipped,
/// with the reason. If this returns false, the test must return immediately.
#[must_use]
pub fn requires(tools: &[&str]) -> bool {
    let missing: Vec<&str> = tools.iter().copied().filter(|tool| find(tool).is_none()).collect();
    if missing.is_empty() {
        return true;
    }
    skip(&format!("no {}", missing.join(", ")));
    false
}

/// Whether `RTRS_QUICK` asks for small images and short times.
#[must_use]
pub fn quick() -> bool {
    std::env::var_os("RTRS_QUICK").is_some_and(|value| value != "0")
}

/// Whether the tests run as root, to whom file permissions do not apply.
#[must_use]
pub fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output().expect("run id");
    id.stdout.trim_ascii() == b"0"
}

/// Ports below those that Linux assigns to outgoing connections, which could otherwise take a port
/// before the intended program does.
const PORTS: Range<u16> = 10_000..32_000;

/// Returns a TCP port that was just found free on all IPv4 addresses of this host, for programs
/// that cannot use port 0.
///
/// # Panics
/// Panics if no port is free.
#[must_use]
pub fn free_port() -> u16 {
    let drawn = || {
        let random = RandomState::new().build_hasher().finish();
        PORTS.start + u16::try_from(random % PORTS.len() as u64).expect("less than all ports")
    };
    // The socket does not listen. If it did, a process started by another thread in the meantime
    // would briefly hold a copy of it, which would keep the program from using the port.
    let is_free = |port: &u16| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.set_reuse_address(true).expect("an option");
        socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, *port)).into()).is_ok()
    };
    std::iter::repeat_with(drawn).take(1000).find(is_free).expect("a free port")
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn free_ports_are_outside_the_ephemeral_range() {
        let ports: HashSet<u16> = (0..100).map(|_| free_port()).collect();
        assert!(ports.len() > 90, "{ports:?}");
        assert!(ports.iter().all(|port| PORTS.contains(port)), "{ports:?}");
    }
}
