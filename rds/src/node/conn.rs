//! The TCP connection to a peer as the system has it.

use std::io;
use std::net::{IpAddr, SocketAddr};

use rtrs_core::rt::{Fd, OpId};
use rtrs_core::time::{Duration, Instant};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

/// Idle time before the system asks whether the peer lives, and between two such questions.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// Questions without an answer that end a connection.
const KEEPALIVES: u32 = 5;
/// The shortest and the longest wait between two looks at what is acknowledged when somebody waits
/// for it.
const LOOK: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(2));
/// The same when nobody does: only memory waits.
const LOOK_IDLE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(100));

/// A connection.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) fd: Fd,
    /// The connect, while it runs.
    pub(super) connecting: Option<OpId>,
    /// The polls that run, for input and for room.
    pub(super) reading: Option<OpId>,
    pub(super) writing: Option<OpId>,
    /// Nothing was read from it yet.
    pub(super) is_fresh: bool,
    /// When to look what is acknowledged.
    pub(super) look_at: Option<Instant>,
    look_wait: Duration,
    acked: u64,
}

impl Conn {
    pub(super) fn new(fd: Fd) -> Self {
        Self {
            fd,
            connecting: None,
            reading: None,
            writing: None,
            is_fresh: true,
            look_at: None,
            look_wait: Duration::ZERO,
            acked: 0,
        }
    }

    /// `written` bytes were written in all, of which the peer has `acked`: when to look again.
    pub(super) fn plan_look(&mut self, now: Instant, acked: u64, is_urgent: bool) {
        let progress = std::mem::replace(&mut self.acked, acked) != acked;
        let (shortest, longest) = if is_urgent { LOOK } else { LOOK_IDLE };
        self.look_wait = match progress {
            true => shortest,
            false => (self.look_wait * 2).clamp(shortest, longest),
        };
        self.look_at = Some(now + self.look_wait);
    }
}

/// A socket to connect from an address.
pub(super) fn outgoing(from: IpAddr, dead_after: Duration) -> io::Result<Socket> {
    let from = SocketAddr::new(from, 0);
    let socket = Socket::new(Domain::for_address(from), Type::STREAM, Some(Protocol::TCP))?;
    socket.bind(&from.into())?;
    tune(&SockRef::from(&socket), dead_after)?;
    Ok(socket)
}

/// Sets what all connections have: no delays, and a limit for peers that are silent.
pub(super) fn tune(socket: &SockRef<'_>, dead_after: Duration) -> io::Result<()> {
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(&keepalive.with_retries(KEEPALIVES))?;
    socket.set_tcp_user_timeout(Some(dead_after))
}
