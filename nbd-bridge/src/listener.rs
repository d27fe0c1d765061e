//! The listening socket for NBD clients: a unix socket or a TCP port.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use rtrs_core::local::{PassedSocket, SocketFile, bind_unix};
use rtrs_core::log_limit::LogLimits;
use rtrs_core::rt::{Fd, Op, Port, Ring};
use rtrs_core::time::{Duration, Instant};
use rustix::io::Errno;
use socket2::TcpKeepalive;

use crate::send_buffer;
use crate::starttls::Relays;

/// Pause after the first accept that failed for lack of descriptors or memory; doubled after each
/// further failure, up to `RETRY_MAX`.
const RETRY: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(1);

/// Address that NBD clients connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// Path of a unix socket.
    Unix(PathBuf),
    /// TCP address; with port 0 the system picks a free port.
    Tcp(SocketAddr),
}

impl Endpoint {
    /// Returns the NBD URI of export `name`, with an address that clients can use.
    pub fn uri(&self, name: &str) -> String {
        match self {
            Self::Unix(path) => {
                let path = percent_encoded(path.as_os_str().as_bytes());
                format!("nbd+unix:///{}?socket={path}", percent_encoded(name.as_bytes()))
            }
            Self::Tcp(address) => {
                format!("nbd://{}/{}", reachable(*address), percent_encoded(name.as_bytes()))
            }
        }
    }
}

/// Returns an address at which other hosts can reach a port that listens on all addresses: the
/// address that this host uses towards its default gateway, or a loopback address if it has none.
/// Sends no packets.
fn reachable(address: SocketAddr) -> SocketAddr {
    // Documentation networks (RFC 5737 and RFC 3849), which are routed to the default gateway.
    const OUTSIDE_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
    const OUTSIDE_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
    let source = |own: IpAddr, outside: IpAddr| {
        let socket = UdpSocket::bind((own, 0)).ok()?;
        socket.connect((outside, 9)).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    let v4 = || source(Ipv4Addr::UNSPECIFIED.into(), OUTSIDE_V4.into());
    let v6 = || source(Ipv6Addr::UNSPECIFIED.into(), OUTSIDE_V6.into());
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => v4().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        // An IPv6 wildcard socket usually accepts IPv4 clients too.
        IpAddr::V6(ip) if ip.is_unspecified() => {
            v6().or_else(v4).unwrap_or(IpAddr::V6(Ipv6Addr::LOCALHOST))
        }
        _ => return address,
    };
    SocketAddr::new(ip, address.port())
}

/// Percent-encodes bytes for the path or query of a URI (RFC 3986, 2.1 and 2.3). Slashes are kept.
fn percent_encoded(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for byte in bytes {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                text.push((*byte).into());
            }
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

/// A bound socket that is not served yet. Removes the path of its unix socket on drop.
#[derive(Debug)]
pub struct Bound {
    socket: OwnedFd,
    endpoint: Endpoint,
    file: Option<SocketFile>,
    relays: Option<Arc<Relays>>,
}

impl Bound {
    /// Binds and listens. A unix socket on which no process listens anymore is replaced.
    ///
    /// # Errors
    /// The system's error; `AddrInUse` if another process listens there, `AlreadyExists` if the
    /// path is not a socket.
    pub fn new(endpoint: &Endpoint) -> io::Result<Self> {
        match endpoint {
            Endpoint::Unix(path) => {
                let (listener, file) = bind_unix(path)?;
                let endpoint = endpoint.clone();
                Ok(Self { socket: listener.into(), endpoint, file: Some(file), relays: None })
            }
            Endpoint::Tcp(address) => {
                let listener = std::net::TcpListener::bind(address)?;
                let endpoint = Endpoint::Tcp(listener.local_addr()?);
                Ok(Self { socket: listener.into(), endpoint, file: None, relays: None })
            }
        }
    }

    /// Takes over a listening socket passed by the service manager.
    ///
    /// # Errors
    /// The system's error.
    pub fn passed(endpoint: &Endpoint, passed: &PassedSocket) -> io::Result<Self> {
        let socket = passed.socket.try_clone()?.into();
        Ok(Self { socket, endpoint: endpoint.clone(), file: None, relays: None })
    }

    /// Offers TLS to clients on a TCP port.
    #[must_use]
    pub fn offering(self, relays: Arc<Relays>) -> Self {
        Self { relays: Some(relays), ..self }
    }

    /// Returns the relays for TLS clients, if TLS is offered.
    pub fn relays(&self) -> Option<Arc<Relays>> {
        self.relays.clone()
    }

    /// Returns the NBD URI of export `name`; its scheme is `nbds` if TLS is offered.
    pub fn uri(&self, name: &str) -> String {
        let uri = self.endpoint.uri(name);
        match uri.strip_prefix("nbd://") {
            Some(rest) if self.relays.is_some() => format!("nbds://{rest}"),
            _ => uri,
        }
    }

    /// Returns the address, with the port that was actually bound.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Starts accepting on this shard's ring.
    pub fn serve(self, ring: &Rc<Ring>) -> Listener {
        let Self { socket, endpoint, file, relays } = self;
        let listener = Listener {
            port: ring.port(),
            fd: Fd::new(socket),
            tcp: matches!(endpoint, Endpoint::Tcp(_)),
            retry: None,
            failing: None,
            limit: LogLimits::default(),
            relays,
            _file: file,
        };
        listener.accept();
        listener
    }
}

/// A listening socket on a shard.
#[derive(Debug)]
pub struct Listener {
    port: Port,
    fd: Fd,
    tcp: bool,
    retry: Option<Instant>,
    /// None while accepting works.
    failing: Option<Failing>,
    limit: LogLimits<()>,
    relays: Option<Arc<Relays>>,
    /// Removes the path of the unix socket on drop.
    _file: Option<SocketFile>,
}

/// Failed accepts since the last client.
#[derive(Clone, Copy, Debug)]
struct Failing {
    /// Whether the failure has been logged.
    is_logged: bool,
    /// Pause before the next attempt.
    pause: Duration,
}

impl Listener {
    fn accept(&self) {
        self.port.submit(Op::Accept { fd: self.fd.clone() }, 0);
    }

    /// Returns the next client.
    pub fn take(&mut self, now: Instant) -> Option<OwnedFd> {
        if self.retry.is_some_and(|at| at <= now) {
            self.retry = None;
            self.accept();
        }
        loop {
            let done = self.port.take()?;
            match done.into_fd() {
                Ok(socket) => {
                    self.accept();
                    if self.failing.take().is_some_and(|failing| failing.is_logged) {
                        tracing::info!("accepting NBD clients again");
                    }
                    tune(&socket, self.tcp);
                    let Some(relays) = &self.relays else { return Some(socket) };
                    if let Some(end) = relays.start(now, socket) {
                        tune(&end, false);
                        return Some(end);
                    }
                }
                Err(error) => {
                    self.failed(now, &error);
                    return None;
                }
            }
        }
    }

    /// Logs a failed accept, and schedules the next attempt.
    fn failed(&mut self, now: Instant, error: &io::Error) {
        let admitted = self.limit.admit(now, ());
        let failing = self.failing.unwrap_or(Failing { is_logged: false, pause: RETRY });
        if let Some(left_out) = admitted {
            let hint = match Errno::from_io_error(error) {
                Some(Errno::MFILE | Errno::NFILE) => {
                    "; close other clients, or raise the limit of open files (ulimit -n, \
                     LimitNOFILE= in a systemd unit)"
                }
                _ => "",
            };
            tracing::warn!(left_out, "cannot accept NBD clients, trying again: {error}{hint}");
        }
        let is_logged = failing.is_logged || admitted.is_some();
        let pause = (failing.pause * 2).min(RETRY_MAX);
        self.failing = Some(Failing { is_logged, pause });
        self.retry = Some(now + failing.pause);
    }

    /// Returns the time at which `take` must be called even if nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        self.retry
    }
}

/// Idle time of a TCP client after which keepalive probes are sent.
const PROBE_AFTER: Duration = Duration::from_secs(10);
/// Interval between keepalive probes.
const PROBE_EVERY: Duration = Duration::from_secs(5);
/// Number of unanswered probes after which a connection ends, on systems where `SILENCE_MAX` cannot
/// be set.
const PROBES_MAX: u32 = 4;
/// Time without an acknowledgment from a TCP client's host after which the connection ends, even
/// while data is in flight. Otherwise a client whose host died would occupy a connection forever.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Sets socket options that speed up a connection and detect a dead client. Failures are logged and
/// otherwise ignored.
pub(crate) fn tune(socket: &OwnedFd, tcp: bool) {
    let fd = socket;
    let socket = socket2::SockRef::from(fd);
    let probes = TcpKeepalive::new()
        .with_time(PROBE_AFTER)
        .with_interval(PROBE_EVERY)
        .with_retries(PROBES_MAX);
    let tuned = if tcp {
        let all = [
            socket.set_tcp_nodelay(true),
            socket.set_tcp_keepalive(&probes),
            socket.set_tcp_user_timeout(Some(SILENCE_MAX)),
        ];
        all.into_iter().collect()
    } else {
        // TCP sizes its buffers itself.
        send_buffer::enlarge(fd, send_buffer::ROOM)
    };
    if let Err(error) = tuned {
        tracing::debug!("cannot tune the socket of an NBD connection: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn a_tcp_client_with_a_dead_host_is_detected() {
        let ring = Ring::new(8).unwrap();
        let bound = Bound::new(&Endpoint::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
        let Endpoint::Tcp(address) = *bound.endpoint() else { panic!("{bound:?}") };
        let mut listener = bound.serve(&ring);
        let _client = TcpStream::connect(address).unwrap();
        let socket = loop {
            ring.turn_or_sleep(Some(Duration::from_millis(10))).unwrap();
            match listener.take(Instant::ZERO) {
                Some(socket) => break socket,
                None => continue,
            }
        };
        let socket = socket2::SockRef::from(&socket);
        assert!(socket.keepalive().unwrap() && socket.tcp_nodelay().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), PROBE_AFTER);
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), PROBE_EVERY);
        assert_eq!(socket.tcp_keepalive_retries().unwrap(), PROBES_MAX);
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(SILENCE_MAX));
    }

    #[test]
    fn uris_escape_unusual_names() {
        let unix = Endpoint::Unix("/run/a b&/é.sock".into());
        assert_eq!(
            unix.uri("a b%?c#d/e"),
            "nbd+unix:///a%20b%25%3Fc%23d/e?socket=/run/a%20b%26/%C3%A9.sock"
        );
        let tcp = Endpoint::Tcp("[::1]:10809".parse().unwrap());
        assert_eq!(tcp.uri("vol0.img"), "nbd://[::1]:10809/vol0.img");
    }

    #[test]
    fn the_uri_of_a_wildcard_address_is_connectable() {
        for any in ["0.0.0.0:0", "[::]:0"] {
            let Ok(bound) = Bound::new(&Endpoint::Tcp(any.parse().unwrap())) else {
                assert_eq!(any, "[::]:0", "a host without IPv6");
                continue;
            };
            let uri = bound.uri("v");
            let address = uri.strip_prefix("nbd://").and_then(|rest| rest.strip_suffix("/v"));
            let address: SocketAddr = address.unwrap().parse().unwrap();
            assert!(!address.ip().is_unspecified(), "{uri}");
            TcpStream::connect(address).unwrap();
        }
    }
}
