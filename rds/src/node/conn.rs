//! TCP connection to a peer, as seen by the system.

use std::io;
use std::net::{IpAddr, SocketAddr};

use rtrs_base::rt::{Fd, OpId};
use rtrs_base::time::{Duration, Instant};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use crate::proto::{Tunable, Tuning};

/// Idle time before the first keepalive probe, and interval between probes.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// Number of unanswered probes after which a connection is considered lost.
const KEEPALIVES: u32 = 5;
/// Minimum and maximum interval between checks for acknowledged bytes while a user is waiting.
const POLL_INTERVALS: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(2));
/// Minimum and maximum interval when no user is waiting, and only memory has to be released.
const POLL_INTERVALS_IDLE: (Duration, Duration) =
    (Duration::from_millis(10), Duration::from_millis(100));

/// A TCP connection to a peer.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) fd: Fd,
    /// The connect in progress.
    pub(super) connecting: Option<OpId>,
    /// Polls in progress, for input and for output space.
    pub(super) reading: Option<OpId>,
    pub(super) writing: Option<OpId>,
    /// Whether no data has been read yet.
    pub(super) is_fresh: bool,
    /// Time of the next check for acknowledged bytes.
    pub(super) poll_at: Option<Instant>,
    poll_interval: Duration,
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
            poll_at: None,
            poll_interval: Duration::ZERO,
            acked: 0,
        }
    }

    /// Schedules the next check for acknowledged bytes. The peer has acknowledged `acked` bytes in
    /// total.
    pub(super) fn plan_poll(&mut self, now: Instant, acked: u64, is_urgent: bool) {
        let progress = std::mem::replace(&mut self.acked, acked) != acked;
        let (shortest, longest) = if is_urgent { POLL_INTERVALS } else { POLL_INTERVALS_IDLE };
        self.poll_interval = match progress {
            true => shortest,
            false => (self.poll_interval * 2).clamp(shortest, longest),
        };
        self.poll_at = Some(now + self.poll_interval);
    }
}

/// Creates a socket to connect from an address.
pub(super) fn outgoing(from: IpAddr, dead_after: Duration, tuning: &Tuning) -> io::Result<Socket> {
    let from = SocketAddr::new(from, 0);
    let socket = Socket::new(Domain::for_address(from), Type::STREAM, Some(Protocol::TCP))?;
    socket.bind(&from.into())?;
    prepare(&SockRef::from(&socket), dead_after, tuning)?;
    Ok(socket)
}

/// Sets options common to all connections: no delay, a timeout for silent peers, and buffer sizes.
pub(super) fn prepare(
    socket: &SockRef<'_>,
    dead_after: Duration,
    tuning: &Tuning,
) -> io::Result<()> {
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(&keepalive.with_retries(KEEPALIVES))?;
    socket.set_tcp_user_timeout(Some(dead_after))?;
    set_buffers(socket, tuning)
}

/// Failure to apply the buffer settings to some connections.
#[derive(Debug, thiserror::Error)]
#[error("cannot change the buffers of {failed} of {all} connections: {source}")]
pub struct BuffersError {
    failed: usize,
    all: usize,
    source: io::Error,
}

/// Sets the buffer sizes of all these connections.
pub(super) fn set_all_buffers<'a>(
    conns: impl Iterator<Item = &'a Fd>,
    tuning: &Tuning,
) -> Result<(), BuffersError> {
    let (mut failed, mut all, mut last) = (0, 0, None);
    for fd in conns {
        all += 1;
        if let Err(error) = set_buffers(&SockRef::from(fd), tuning) {
            (failed, last) = (failed + 1, Some(error));
        }
    }
    last.map_or(Ok(()), |source| Err(BuffersError { failed, all, source }))
}

/// Sets the buffer sizes of a connection, unless they are left to the system.
fn set_buffers(socket: &SockRef<'_>, tuning: &Tuning) -> io::Result<()> {
    let size = |tunable| usize::try_from(tuning.get(tunable)).unwrap_or(usize::MAX);
    match size(Tunable::TcpSndbuf) {
        0 => {}
        bytes => socket.set_send_buffer_size(bytes)?,
    }
    match size(Tunable::TcpRcvbuf) {
        0 => Ok(()),
        bytes => socket.set_recv_buffer_size(bytes),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;

    use super::*;

    #[test]
    fn connections_that_keep_their_buffers_are_counted() {
        let socket = || OwnedFd::from(Socket::new(Domain::IPV4, Type::STREAM, None).unwrap());
        let file = OwnedFd::from(File::open("/dev/null").unwrap());
        let fds = [socket(), file, socket()].map(Fd::new);
        let tuning = Tuning::default();
        set_all_buffers(fds.iter(), &tuning).unwrap();
        tuning.set(Tunable::TcpSndbuf, 8192);
        let error = set_all_buffers(fds.iter(), &tuning).unwrap_err().to_string();
        assert!(error.starts_with("cannot change the buffers of 1 of 3 connections: "), "{error}");
        // The others have the new size, doubled by the system.
        let size = |fd: &Fd| SockRef::from(fd).send_buffer_size().unwrap();
        assert_eq!([size(&fds[0]), size(&fds[2])], [16_384; 2]);
    }
}
