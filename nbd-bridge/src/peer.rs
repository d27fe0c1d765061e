//! The other end of a client's socket.

use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use rtrs_core::rt::peer_pid;

/// Other end of a client's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Peer {
    /// Process on this host, on a unix socket.
    Process(u32),
    /// Address of a TCP client.
    Address(SocketAddr),
    /// Relay in this process, for a client with TLS.
    TlsRelay,
    /// Client that has disconnected, or a process without a PID in this namespace.
    Unknown,
}

impl Peer {
    /// Returns the other end of this socket.
    pub(crate) fn of(fd: &impl AsFd) -> Self {
        let address = socket2::SockRef::from(fd).peer_addr().ok();
        match address.and_then(|address| address.as_socket()) {
            Some(address) => Self::Address(address),
            None => match peer_pid(fd) {
                Ok(pid) if pid == std::process::id() => Self::TlsRelay,
                // A TCP client that has disconnected, or a process outside this PID namespace.
                Ok(0) | Err(_) => Self::Unknown,
                Ok(pid) => Self::Process(pid),
            },
        }
    }

    /// Describes the client for a person, with the name of its process from /proc.
    pub fn describe(&self) -> String {
        match self {
            Self::Process(pid) => match fs::read_to_string(format!("/proc/{pid}/comm")) {
                Ok(name) => format!("{} (pid {pid})", name.trim_end().escape_debug()),
                Err(_) => self.to_string(),
            },
            Self::TlsRelay => "a client with TLS".into(),
            Self::Address(_) | Self::Unknown => self.to_string(),
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(pid) => write!(f, "pid {pid}"),
            Self::Address(address) => write!(f, "{address}"),
            // The relay's own log line has the address.
            Self::TlsRelay => f.write_str("tls"),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn clients_are_described_by_address_or_process() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, _) = listener.accept().unwrap();
        let address = client.local_addr().unwrap();
        assert_eq!(Peer::of(&socket), Peer::Address(address));
        assert_eq!(Peer::Address(address).describe(), address.to_string());
        let (socket, _other) = UnixStream::pair().unwrap();
        assert_eq!(Peer::of(&socket), Peer::TlsRelay);
        let own = Peer::Process(std::process::id()).describe();
        let name = fs::read_to_string("/proc/self/comm").unwrap();
        assert_eq!(own, format!("{} (pid {})", name.trim_end(), std::process::id()));
        assert_eq!(Peer::Process(u32::MAX).describe(), format!("pid {}", u32::MAX));
        // A TCP socket without a peer has neither an address nor a process.
        let idle = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
        assert_eq!(Peer::of(&idle.unwrap()), Peer::Unknown);
    }
}
