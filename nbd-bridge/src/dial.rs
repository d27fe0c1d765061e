//! Connects to an NBD server: everything up to the first request, on a thread that may block.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::ToSocketAddrs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rtrs_core::time::Duration;
use socket2::{Domain, SockAddr, Socket, Type};

use crate::listener::tune;
use crate::proto::client::{ClientHandshake, HandshakeError, Offered, Reply, Requests};
use crate::proto::wire::cmd;

/// Address of an NBD server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ServerAddress {
    /// A host name or address, and a port.
    Tcp(String, u16),
    /// Path of a unix socket.
    Unix(PathBuf),
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Reason for a failed connection.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// System error.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The server cannot be used.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
}

/// Connects and requests the export `name`. Each step may take up to `limit`.
///
/// # Errors
/// The reason why the connection failed.
pub fn dial(
    address: &ServerAddress,
    name: &str,
    limit: Duration,
) -> Result<(OwnedFd, Offered), DialError> {
    let mut socket = connect(address, limit)?;
    socket.set_read_timeout(Some(limit))?;
    socket.set_write_timeout(Some(limit))?;
    let mut handshake = ClientHandshake::new(name);
    let (mut input, mut out) = ([0; 4096], Vec::new());
    let offered = loop {
        // The server sends replies one at a time, so no bytes of the next phase are read here.
        let count = read_some(&mut socket, &mut input).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                io::Error::new(io::ErrorKind::TimedOut, "the server does not answer")
            }
            _ => error,
        })?;
        if count == 0 {
            let text = "the server closed the connection";
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text).into());
        }
        let (_, offered) = handshake.feed(&input[..count], &mut out)?;
        if let Some(offered) = offered {
            break offered;
        }
        socket.write_all(&out)?;
        out.clear();
    };
    socket.set_read_timeout(None)?;
    socket.set_write_timeout(None)?;
    let fd = OwnedFd::from(socket);
    tune(&fd, matches!(address, ServerAddress::Tcp(..)));
    Ok((fd, offered))
}

/// Reads once, retrying if a signal interrupts the read.
fn read_some(from: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match from.read(into) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Sends a flush on a connection that has nothing in flight, and closes the connection. Each step
/// may take up to `limit`.
///
/// # Errors
/// Fails if data that the server has acknowledged over this connection may not be durable.
pub fn flush(fd: OwnedFd, structured: bool, limit: Duration) -> io::Result<()> {
    let mut socket = Socket::from(fd);
    socket.set_read_timeout(Some(limit))?;
    socket.set_write_timeout(Some(limit))?;
    let mut requests = Requests::new(1);
    requests.reconnect(structured);
    let full = || io::Error::other("no room for a request");
    let row = requests.add(cmd::FLUSH, 0, 0, 0).ok_or_else(full)?;
    socket.write_all(&requests.send(row))?;
    let (mut part, mut received) = ([0; 512], Vec::new());
    loop {
        match read_some(&mut socket, &mut part)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => received.extend_from_slice(&part[..count]),
        }
        while let Some((count, reply)) = requests.next(&received).map_err(io::Error::other)? {
            received.drain(..count);
            match reply {
                Reply::End { error: 0, .. } => return Ok(()),
                Reply::End { error, .. } => {
                    return Err(io::Error::other(format!("the server returned error {error}")));
                }
                _ => {}
            }
        }
    }
}

fn connect(address: &ServerAddress, limit: Duration) -> io::Result<Socket> {
    let to = |domain, address: &SockAddr| {
        let socket = Socket::new(domain, Type::STREAM, None)?;
        socket.connect_timeout(address, limit)?;
        Ok(socket)
    };
    let (host, port) = match address {
        ServerAddress::Unix(path) => return to(Domain::UNIX, &SockAddr::unix(path)?),
        ServerAddress::Tcp(host, port) => (host.as_str(), *port),
    };
    let none = || Err(io::Error::new(io::ErrorKind::NotFound, "the host has no address"));
    let all = (host, port).to_socket_addrs()?;
    all.fold(none(), |found, address| {
        found.or_else(|_| to(Domain::for_address(address), &address.into()))
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    #[test]
    fn a_silent_or_closing_server_is_an_error() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let address = ServerAddress::Tcp("127.0.0.1".into(), port);
        let served = thread::spawn(move || {
            let silent = listener.accept().unwrap();
            drop(listener.accept().unwrap());
            drop(silent);
        });
        let error = dial(&address, "x", Duration::from_millis(200)).unwrap_err();
        assert_eq!(error.to_string(), "the server does not answer");
        let error = dial(&address, "x", Duration::from_secs(20)).unwrap_err().to_string();
        assert!(error.contains("closed the connection"), "{error}");
        served.join().unwrap();
        let error = dial(&address, "x", Duration::from_secs(20)).unwrap_err();
        assert!(matches!(error, DialError::Io(_)), "{error:?}");
    }

    #[test]
    fn a_read_continues_after_signals() {
        struct Signals(u32);

        impl Read for Signals {
            fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
                self.0 = self.0.checked_sub(1).ok_or(io::ErrorKind::WouldBlock)?;
                match self.0 {
                    0 => {
                        into[0] = 7;
                        Ok(1)
                    }
                    _ => Err(io::ErrorKind::Interrupted.into()),
                }
            }
        }

        let (mut from, mut into) = (Signals(3), [0; 4]);
        assert_eq!(read_some(&mut from, &mut into).unwrap(), 1);
        assert_eq!(into, [7, 0, 0, 0]);
        let error = read_some(&mut from, &mut into).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
