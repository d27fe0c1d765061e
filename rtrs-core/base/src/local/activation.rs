//! Listening sockets opened for the process by the service manager (socket activation,
//! sd_listen_fds(3)).

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;

use socket2::{Socket, Type};

use crate::rt::duplicate_inherited;

/// The first passed descriptor.
const FIRST: RawFd = 3;

/// Name for a socket that has none in LISTEN_FDNAMES, as in sd_listen_fds_with_names(3).
const UNNAMED: &str = "unknown";

/// A listening socket passed by the service manager. The manager keeps it open, so it must not be
/// shut down.
#[derive(Debug)]
pub struct PassedSocket {
    /// Name: `FileDescriptorName=` of the socket unit, or else the name of the unit.
    pub name: String,
    /// The socket, in blocking mode.
    pub socket: Socket,
}

impl PassedSocket {
    /// Returns the TCP address, or `None` for a unix socket.
    pub fn address(&self) -> Option<SocketAddr> {
        self.socket.local_addr().ok()?.as_socket()
    }

    /// Returns the path of a unix socket.
    pub fn path(&self) -> Option<std::path::PathBuf> {
        Some(self.socket.local_addr().ok()?.as_pathname()?.to_owned())
    }
}

impl fmt::Display for PassedSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.address(), self.path()) {
            (Some(address), _) => write!(f, "{address}")?,
            (None, Some(path)) => write!(f, "{}", path.display())?,
            (None, None) => f.write_str("a socket without a path")?,
        }
        write!(f, " ({:?})", self.name)
    }
}

/// Returns the sockets that the environment passes to this process, if any.
///
/// # Errors
/// `InvalidInput` for an impossible number of descriptors, or a descriptor that is not a
/// listening stream socket; otherwise the system's error. The text names the descriptor.
pub fn passed_sockets() -> io::Result<Vec<PassedSocket>> {
    let variable = |name| std::env::var(name).ok();
    let count = passed(variable("LISTEN_PID"), variable("LISTEN_FDS"), std::process::id())?;
    let names = variable("LISTEN_FDNAMES").unwrap_or_default();
    let numbers = FIRST..FIRST + count;
    numbers.zip(names_of(&names)).map(|(number, name)| socket(number, name)).collect()
}

/// Returns the descriptor names in a value of LISTEN_FDNAMES, as an infinite iterator.
fn names_of(names: &str) -> impl Iterator<Item = &str> {
    let named = names.split(':').map(|name| if name.is_empty() { UNNAMED } else { name });
    named.chain(std::iter::repeat(UNNAMED))
}

/// Returns the number of descriptors that these values of LISTEN_PID and LISTEN_FDS pass to the
/// process `own`. Values meant for a different process were inherited and are ignored.
fn passed(pid: Option<String>, count: Option<String>, own: u32) -> io::Result<RawFd> {
    let (Some(pid), Some(count)) = (pid, count) else { return Ok(0) };
    if pid != own.to_string() {
        return Ok(0);
    }
    let valid = count.parse::<u16>().map(RawFd::from);
    valid.map_err(|_| invalid(format!("LISTEN_FDS={count:?} is not a number of descriptors")))
}

fn socket(number: RawFd, name: &str) -> io::Result<PassedSocket> {
    let failed = |error: io::Error| {
        let text = format!("descriptor {number} ({name:?}) from LISTEN_FDS: {error}");
        io::Error::new(error.kind(), text)
    };
    let socket = Socket::from(duplicate_inherited(number).map_err(failed)?);
    let is_stream = socket.r#type().map_err(failed)? == Type::STREAM;
    if is_stream && socket.is_listener().map_err(failed)? {
        // io_uring does not wait for connections on a nonblocking socket.
        socket.set_nonblocking(false).map_err(failed)?;
        return Ok(PassedSocket { name: name.to_owned(), socket });
    }
    Err(invalid(format!(
        "descriptor {number} ({name:?}) from LISTEN_FDS is not a listening stream socket; use \
         ListenStream= and Accept=no in the socket unit"
    )))
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn only_descriptors_for_this_process_are_passed() {
        let count = |pid: Option<&str>, count: Option<&str>| {
            passed(pid.map(str::to_owned), count.map(str::to_owned), 7)
        };
        assert_eq!(count(None, None).unwrap(), 0);
        assert_eq!(count(None, Some("1")).unwrap(), 0);
        assert_eq!(count(Some("7"), None).unwrap(), 0);
        assert_eq!(count(Some("8"), Some("1")).unwrap(), 0);
        assert_eq!(count(Some("7"), Some("2")).unwrap(), 2);
        for wrong in ["", "-1", "x", "65536"] {
            let error = count(Some("7"), Some(wrong)).unwrap_err().to_string();
            assert!(error.contains("LISTEN_FDS"), "{error}");
        }
    }

    #[test]
    fn descriptors_without_a_name_are_unknown() {
        let names = |text| names_of(text).take(3).collect::<Vec<_>>();
        assert_eq!(names(""), ["unknown"; 3]);
        assert_eq!(names("a.socket"), ["a.socket", "unknown", "unknown"]);
        assert_eq!(names("a::b:c"), ["a", "unknown", "b"]);
    }

    #[test]
    fn a_passed_descriptor_must_be_a_listening_stream_socket() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // As systemd passes it.
        listener.set_nonblocking(true).unwrap();
        let found = socket(listener.as_raw_fd(), "x.socket").unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!((found.address(), found.path()), (Some(address), None));
        assert_eq!(found.to_string(), format!("{address} (\"x.socket\")"));
        assert!(!found.socket.nonblocking().unwrap());
        let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
        let error = socket(datagrams.as_raw_fd(), "x").unwrap_err().to_string();
        assert!(error.contains("is not a listening stream socket"), "{error}");
        let file = std::fs::File::open("/dev/null").unwrap();
        let error = socket(file.as_raw_fd(), "x").unwrap_err().to_string();
        assert!(error.contains("Socket operation on non-socket"), "{error}");
        assert!(socket(-1, "x").is_err() && socket(RawFd::MAX, "x").is_err());
    }
}
