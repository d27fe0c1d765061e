//! The socket that NBD clients connect to: a unix socket or a TCP port.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rtrs_core::rt::{Fd, Op, Port, Ring};
use rtrs_core::time::{Duration, Instant};

/// Wait after an accept that failed for want of descriptors or memory.
const RETRY: Duration = Duration::from_millis(100);

/// Where NBD clients connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A unix socket at this path.
    Unix(PathBuf),
    /// A TCP address; port 0 takes a free one.
    Tcp(SocketAddr),
}

impl Endpoint {
    /// The NBD URI of export `name` here.
    pub fn uri(&self, name: &str) -> String {
        match self {
            Self::Unix(path) => format!("nbd+unix:///{name}?socket={}", path.display()),
            Self::Tcp(address) => format!("nbd://{address}/{name}"),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

/// A bound socket before it is served. Removes its unix socket path when dropped.
#[derive(Debug)]
pub struct Bound {
    socket: OwnedFd,
    endpoint: Endpoint,
    _cleanup: Option<Cleanup>,
}

#[derive(Debug)]
struct Cleanup(PathBuf);

impl Drop for Cleanup {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            tracing::debug!("{} not removed: {error}", self.0.display());
        }
    }
}

impl Bound {
    /// Binds and listens. A unix socket that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// The system's error; `AddrInUse` when somebody listens there, `AlreadyExists` when the path
    /// is something other than a socket.
    pub fn new(endpoint: &Endpoint) -> io::Result<Self> {
        match endpoint {
            Endpoint::Unix(path) => {
                remove_stale(path)?;
                let listener = std::os::unix::net::UnixListener::bind(path)?;
                Ok(Self {
                    socket: listener.into(),
                    endpoint: endpoint.clone(),
                    _cleanup: Some(Cleanup(path.clone())),
                })
            }
            Endpoint::Tcp(address) => {
                let listener = std::net::TcpListener::bind(address)?;
                let endpoint = Endpoint::Tcp(listener.local_addr()?);
                Ok(Self { socket: listener.into(), endpoint, _cleanup: None })
            }
        }
    }

    /// Where it listens, with the port that was really taken.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Starts to accept on this core's ring.
    pub fn serve(self, ring: &Rc<Ring>) -> Listener {
        let Self { socket, endpoint, _cleanup } = self;
        let listener = Listener {
            port: ring.port(),
            fd: Fd::new(socket),
            tcp: matches!(endpoint, Endpoint::Tcp(_)),
            retry: None,
            _cleanup,
        };
        listener.accept();
        listener
    }
}

fn remove_stale(path: &Path) -> io::Result<()> {
    let meta = match std::fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    if !meta.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "exists and is not a socket"));
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there")),
        Err(_) => std::fs::remove_file(path),
    }
}

/// A listening socket on a core.
#[derive(Debug)]
pub struct Listener {
    port: Port,
    fd: Fd,
    tcp: bool,
    retry: Option<Instant>,
    _cleanup: Option<Cleanup>,
}

impl Listener {
    fn accept(&self) {
        self.port.submit(Op::Accept { fd: self.fd.clone() }, 0);
    }

    /// The next client.
    pub fn take(&mut self, now: Instant) -> Option<OwnedFd> {
        if self.retry.is_some_and(|at| at <= now) {
            self.retry = None;
            self.accept();
        }
        let done = self.port.take()?;
        match done.into_fd() {
            Ok(socket) => {
                self.accept();
                tune(&socket, self.tcp);
                Some(socket)
            }
            Err(error) => {
                tracing::warn!("accepting an NBD client failed: {error}");
                self.retry = Some(now + RETRY);
                None
            }
        }
    }

    /// When `take` wants to be called even if nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        self.retry
    }
}

/// Room in the socket for the replies of a batch, so that the core need not wait for the client
/// to take them one by one. TCP sizes its own.
const UNIX_SEND_BUFFER: usize = 4 << 20;

/// Sets what helps a client; a refusal only makes it slower.
fn tune(socket: &OwnedFd, tcp: bool) {
    let socket = socket2::SockRef::from(socket);
    let tuned = if tcp {
        socket.set_tcp_nodelay(true)
    } else {
        socket.set_send_buffer_size(UNIX_SEND_BUFFER)
    };
    if let Err(error) = tuned {
        tracing::debug!("socket of an NBD client not tuned: {error}");
    }
}
