//! Listening sockets of a node: TCP for its peers, a unix socket for its users.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rtrs_base::local::{SocketFile, bind_seqpacket};
use socket2::{Domain, Protocol, Socket, Type};

/// Maximum number of connections waiting to be accepted.
const BACKLOG: i32 = 1024;
/// Time to retry while an address or a path is in use: the kernel releases the sockets of an
/// earlier process's io_uring only some time after that process has ended.
const PATIENCE: Duration = Duration::from_secs(1);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// Retries a bind for up to [`PATIENCE`] if the address is in use.
fn patiently<T>(mut bind: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match bind() {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                thread::sleep(PAUSE);
            }
            done => return done,
        }
    }
}

/// Listens for peers at an address of this host.
///
/// # Errors
/// The system's error.
pub(super) fn listen_tcp(address: IpAddr, port: u16) -> io::Result<OwnedFd> {
    let address = SocketAddr::new(address, port);
    patiently(|| {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        Ok(socket.into())
    })
}

/// Listening socket for users in other processes. Dropping it removes its path.
#[derive(Debug)]
pub struct UserSocket {
    fd: OwnedFd,
    _file: SocketFile,
}

impl UserSocket {
    /// Listens at a path, for users admitted by its mode. Replaces a socket on which no process
    /// listens.
    ///
    /// # Errors
    /// The system's error; `AddrInUse` if another process is listening there.
    pub fn bind(path: &Path, mode: u32) -> io::Result<Self> {
        let (fd, file) = patiently(|| bind_seqpacket(path, mode, BACKLOG))?;
        Ok(Self { fd, _file: file })
    }

    /// Duplicates the descriptor.
    pub(super) fn try_clone(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }
}
