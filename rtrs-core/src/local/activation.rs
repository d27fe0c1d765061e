//! Listening sockets that the service manager opened for the process (socket activation,
//! sd_listen_fds(3)).

use std::io;
use std::os::fd::RawFd;

use socket2::{Socket, Type};

use crate::rt::duplicate_inherited;

/// Number of the first passed descriptor.
const FIRST: RawFd = 3;

/// Returns the sockets that the environment passes to this process; empty without a service manager
/// that passes any.
///
/// # Errors
/// `InvalidInput` for an impossible number of descriptors, or a descriptor that is not a
/// listening stream socket; otherwise the system's error. The text names the descriptor.
pub fn passed_sockets() -> io::Result<Vec<Socket>> {
    let variable = |name| std::env::var(name).ok();
    let count = passed(variable("LISTEN_PID"), variable("LISTEN_FDS"), std::process::id())?;
    (FIRST..FIRST + count).map(socket).collect()
}

/// Returns the number of descriptors that these values of LISTEN_PID and LISTEN_FDS pass to the
/// process `own`. Values for another process are inherited from its parent and mean nothing.
fn passed(pid: Option<String>, count: Option<String>, own: u32) -> io::Result<RawFd> {
    let (Some(pid), Some(count)) = (pid, count) else { return Ok(0) };
    if pid != own.to_string() {
        return Ok(0);
    }
    let valid = count.parse::<u16>().map(RawFd::from);
    valid.map_err(|_| invalid(format!("LISTEN_FDS={count:?} is not a number of descriptors")))
}

fn socket(number: RawFd) -> io::Result<Socket> {
    let failed = |error: io::Error| {
        let text = format!("descriptor {number}, which LISTEN_FDS passes: {error}");
        io::Error::new(error.kind(), text)
    };
    let socket = Socket::from(duplicate_inherited(number).map_err(failed)?);
    let is_stream = socket.r#type().map_err(failed)? == Type::STREAM;
    if is_stream && socket.is_listener().map_err(failed)? {
        return Ok(socket);
    }
    Err(invalid(format!(
        "descriptor {number}, which LISTEN_FDS passes, is not a listening stream socket; use \
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
    fn a_passed_descriptor_must_be_a_listening_stream_socket() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let found = socket(listener.as_raw_fd()).unwrap();
        let address = found.local_addr().unwrap().as_socket().unwrap();
        assert_eq!(address, listener.local_addr().unwrap());
        let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
        let error = socket(datagrams.as_raw_fd()).unwrap_err().to_string();
        assert!(error.contains("is not a listening stream socket"), "{error}");
        let file = std::fs::File::open("/dev/null").unwrap();
        let error = socket(file.as_raw_fd()).unwrap_err().to_string();
        assert!(error.contains("Socket operation on non-socket"), "{error}");
        assert!(socket(-1).is_err() && socket(RawFd::MAX).is_err());
    }
}
