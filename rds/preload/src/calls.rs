//! Implementation of each call for RDS sockets, with the same results and errors as the kernel.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use libc::c_int;
use rds::socket::{
    Access, Arrival, AtPath, Binding, Bound, How, Incoming, Outgoing, node_dir, node_path, receive,
    send,
};
use rustix::event::{Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::net::sockopt::{Timeout, socket_timeout};

use crate::completions;
use crate::controls::SendControls;
use crate::memory::{Address, borrow, errno};
use crate::options::timestamp_kind;
use crate::table::{Entry, add, node_of, node_paths, share};

/// Address family of RDS sockets.
pub(crate) const AF_RDS: c_int = 21;

/// Number of socket types that the system knows; others are invalid for any family.
const SOCKET_TYPES: c_int = 11;

/// Length of the control message with latencies (struct rds_cmsg_rx_trace).
const LATENCIES_LEN: usize = 32;

/// Interval at which a receive on an unbound socket checks whether it has been bound.
const BIND_LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Flags that a send accepts.
const SEND_FLAGS: c_int = libc::MSG_DONTWAIT | libc::MSG_ZEROCOPY;

/// Whether this library provides sockets of the family, that is, whether a node runs on this host.
pub(crate) fn serves(family: c_int) -> bool {
    family == AF_RDS && !node_paths().is_empty()
}

/// Checks the type of a new socket. Returns the flags of its descriptor.
pub(crate) fn check_type(kind: c_int, protocol: c_int) -> io::Result<c_int> {
    let flags = kind & (libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK);
    match (kind & !flags, protocol) {
        (libc::SOCK_SEQPACKET, 0) => Ok(flags),
        (0..SOCKET_TYPES, _) => Err(errno(libc::ESOCKTNOSUPPORT)),
        _ => Err(errno(libc::EINVAL)),
    }
}

/// Registers a new socket.
pub(crate) fn created(fd: c_int) -> io::Result<()> {
    add(fd)
}

/// Whether the address cannot belong to a single node.
fn is_no_node(address: IpAddr) -> bool {
    let is_broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast());
    address.is_unspecified() || address.is_multicast() || is_broadcast
}

/// Whether the address is valid on a single link only, and does not name that link.
fn lacks_scope(address: SocketAddr) -> bool {
    matches!(address, SocketAddr::V6(v6)
        if v6.ip().is_unicast_link_local() && v6.scope_id() == 0)
}

pub(crate) fn bind(fd: c_int, entry: &Entry, address: Address) -> io::Result<()> {
    let Address::Of(address) = address else { return Err(errno(libc::EINVAL)) };
    let (ip, port) = (address.ip().to_canonical(), address.port());
    if entry.bound(fd).is_some() || is_no_node(ip) || lacks_scope(address) || port == 1 {
        return Err(errno(libc::EINVAL));
    }
    let wishes = entry.wishes();
    let no_node = if wishes.transport { libc::ENOPROTOOPT } else { libc::EADDRNOTAVAIL };
    let path = node_path(&node_dir(), ip);
    let connecting = entry.connecting.lock().unwrap_or_else(PoisonError::into_inner);
    match node_of(fd) {
        Some(former) if former != path => return Err(errno(libc::EADDRNOTAVAIL)),
        Some(_) => {}
        None => {
            let way = AtPath(path.clone());
            way.connect_socket(borrow(fd)).map_err(|error| match error.raw_os_error() {
                Some(libc::ENOENT | libc::ECONNREFUSED) => errno(no_node),
                _ => error,
            })?;
        }
    }
    let socket = borrow(fd);
    let Bound { place, board } = Access::bind(socket, ip, port)?;
    drop(connecting);
    let access = share(Access::with_board(Box::new(AtPath(path)), board)?)?;
    let bound = Arc::new(Binding::new(access, place, socket)?);
    // Values that cannot be set now keep their defaults.
    if let Some(bytes) = wishes.sndbuf {
        bound.set_sndbuf(socket, bytes)?;
    }
    if let Some(bytes) = wishes.rcvbuf {
        bound.set_rcvbuf(socket, bytes)?;
    }
    if wishes.monitors {
        bound.set_monitor(socket, true)?;
    }
    if let Some(to) = wishes.destination {
        bound.set_destination(socket, (to.ip(), to.port()))?;
    }
    entry.set_bound(bound);
    Ok(())
}

pub(crate) fn connect(fd: c_int, entry: &Entry, address: Address) -> io::Result<()> {
    let Address::Of(to) = address else { return Err(errno(libc::EAFNOSUPPORT)) };
    let ip = to.ip().to_canonical();
    if is_no_node(ip) {
        return Err(errno(match to {
            SocketAddr::V6(_) => libc::EPROTOTYPE,
            SocketAddr::V4(_) if ip.is_unspecified() => libc::EDESTADDRREQ,
            SocketAddr::V4(_) => libc::EINVAL,
        }));
    }
    if lacks_scope(to) {
        return Err(errno(libc::EINVAL));
    }
    match entry.bound(fd) {
        Some(bound) => bound.set_destination(borrow(fd), (ip, to.port())),
        None => {
            entry.wish(|wishes| wishes.destination = Some(SocketAddr::new(ip, to.port())));
            Ok(())
        }
    }
}

/// Returns the address that a socket is bound to; before that, the unspecified address in the
/// family of the default destination.
pub(crate) fn own_address(fd: c_int, entry: &Entry) -> Option<SocketAddr> {
    let Some(bound) = entry.bound(fd) else {
        return entry.wishes().destination.map(|to| match to {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        });
    };
    Some(SocketAddr::new(bound.board().address(), bound.view()?.port))
}

/// Returns the default destination.
pub(crate) fn destination(fd: c_int, entry: &Entry) -> io::Result<SocketAddr> {
    let to = match entry.bound(fd) {
        Some(bound) => bound.view().and_then(|view| view.connected),
        None => entry.wishes().destination.map(|to| (to.ip(), to.port())),
    };
    to.map(|(ip, port)| SocketAddr::new(ip, port)).ok_or_else(|| errno(libc::ENOTCONN))
}

/// A message from the program.
#[derive(Debug)]
pub(crate) struct Sending<'a> {
    pub(crate) to: Option<Address>,
    pub(crate) payload: &'a [IoSlice<'a>],
    pub(crate) flags: c_int,
    pub(crate) controls: SendControls,
}

pub(crate) fn send_message(fd: c_int, entry: &Entry, message: &Sending<'_>) -> io::Result<usize> {
    let Sending { to, payload, flags, controls } = message;
    if flags & !SEND_FLAGS != 0 {
        return Err(errno(libc::EOPNOTSUPP));
    }
    let to = match to {
        None => None,
        Some(Address::Of(to)) if !is_no_node(to.ip().to_canonical()) && !lacks_scope(*to) => {
            Some((to.ip().to_canonical(), to.port()))
        }
        Some(_) => return Err(errno(libc::EINVAL)),
    };
    let Some(bound) = entry.bound(fd) else { return Err(errno(libc::ENOTCONN)) };
    let may_notify = entry.is_zerocopy() && payload.iter().any(|part| !part.is_empty());
    let cookie = controls.cookie(flags & libc::MSG_ZEROCOPY != 0, may_notify)?;
    let dontwait = flags & libc::MSG_DONTWAIT != 0;
    let sent = send(&bound, borrow(fd), Outgoing { to, payload, cookie }, dontwait)?;
    entry.set_sent();
    Ok(sent)
}

/// Result of a receive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Got {
    /// Return value of the call.
    pub(crate) result: usize,
    pub(crate) is_truncated: bool,
    pub(crate) from: Option<SocketAddr>,
    /// Congestion update without a message.
    pub(crate) update: Option<u64>,
    /// Timestamp of a message, if the program has requested timestamps.
    pub(crate) timestamp: Option<Timestamp>,
    /// Latencies of a message, if the program has requested them.
    pub(crate) latencies: Option<[u8; LATENCIES_LEN]>,
}

impl Got {
    /// Result of a receive that takes no message.
    const NOTHING: Self = Self {
        result: 0,
        is_truncated: false,
        from: None,
        update: None,
        timestamp: None,
        latencies: None,
    };
}

/// Control message with the time at which a message was delivered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timestamp {
    pub(crate) kind: c_int,
    time: Duration,
}

impl Timestamp {
    /// Returns the contents: a `struct timeval` with 64-bit members.
    pub(crate) fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.time.as_secs().to_ne_bytes());
        bytes[8..].copy_from_slice(&u64::from(self.time.subsec_micros()).to_ne_bytes());
        bytes
    }
}

/// Returns the contents of a control message with the requested latencies of a message: their
/// number, their kinds, and their values in nanoseconds.
fn latencies(wanted: [u8; 4], arrival: &Arrival) -> Option<[u8; LATENCIES_LEN]> {
    let [count, positions @ ..] = wanted;
    if count == 0 {
        return None;
    }
    let all = arrival.latencies();
    let mut bytes = [0; LATENCIES_LEN];
    bytes[0] = count;
    for (index, position) in positions.into_iter().take(count.into()).enumerate() {
        let nanos = all.get(usize::from(position)).map_or(0, Duration::as_nanos);
        let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
        bytes[1 + index] = position;
        bytes[8 * (index + 1)..][..8].copy_from_slice(&nanos.to_ne_bytes());
    }
    Some(bytes)
}

/// Waits until another thread or process has bound a socket, for as long as a receive may wait.
/// Returns the bound socket.
fn await_bind(fd: c_int, entry: &Entry, dontwait: bool) -> io::Result<Arc<Binding>> {
    let socket = borrow(fd);
    if dontwait || fcntl_getfl(socket)?.contains(OFlags::NONBLOCK) {
        return Err(errno(libc::EAGAIN));
    }
    let limit = socket_timeout(socket, Timeout::Recv)?;
    let begun = Instant::now();
    loop {
        if let Some(bound) = entry.bound(fd) {
            return Ok(bound);
        }
        if limit.is_some_and(|limit| begun.elapsed() >= limit) {
            return Err(errno(libc::ETIMEDOUT));
        }
        // A signal also interrupts the wait.
        poll(&mut [], Some(&BIND_LOOK))?;
    }
}

/// Options for a receive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Receiving {
    pub(crate) flags: c_int,
    /// There is room for a control message with completions.
    pub(crate) takes_completions: bool,
}

pub(crate) fn receive_message(
    fd: c_int,
    entry: &Entry,
    to: &mut [IoSliceMut<'_>],
    receiving: Receiving,
) -> io::Result<Got> {
    let Receiving { flags, takes_completions } = receiving;
    if flags & libc::MSG_OOB != 0 {
        return Ok(Got::NOTHING);
    }
    // There are no errors to report.
    if flags & libc::MSG_ERRQUEUE != 0 {
        return Err(errno(libc::EAGAIN));
    }
    let bound = match entry.bound(fd) {
        Some(bound) => bound,
        None => await_bind(fd, entry, flags & libc::MSG_DONTWAIT != 0)?,
    };
    let arrival = match next_arrival(fd, entry, &bound, to, receiving) {
        // The caller returns the completions.
        Err(error)
            if takes_completions && is_empty(&error) && completions::is_any(entry.inode()) =>
        {
            return Ok(Got::NOTHING);
        }
        arrival => arrival?,
    };
    let kind = entry.timestamps().and_then(timestamp_kind);
    Ok(match arrival.incoming {
        Incoming::Message { len, total, from } => Got {
            result: if flags & libc::MSG_TRUNC != 0 { total } else { len },
            is_truncated: len < total,
            from: Some(from),
            update: None,
            timestamp: kind.map(|kind| Timestamp { kind, time: arrival.time }),
            latencies: latencies(entry.traces(), &arrival),
        },
        Incoming::Cleared(groups) => Got { update: Some(groups), ..Got::NOTHING },
        Incoming::Completed(_) => Got::NOTHING,
    })
}

/// Whether a receive found nothing and did not wait.
fn is_empty(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EAGAIN)
}

/// Receives the next message or congestion update, and keeps completions. Without waiting, fails
/// with EAGAIN if nothing has arrived, or if a control message with completions is full.
fn next_arrival(
    fd: c_int,
    entry: &Entry,
    bound: &Binding,
    to: &mut [IoSliceMut<'_>],
    receiving: Receiving,
) -> io::Result<Arrival> {
    let Receiving { flags, takes_completions } = receiving;
    let how = How { dontwait: flags & libc::MSG_DONTWAIT != 0, peek: flags & libc::MSG_PEEK != 0 };
    let socket = borrow(fd);
    loop {
        let mut arrival = receive(bound, socket, to, how)?;
        if how.peek && matches!(arrival.incoming, Incoming::Completed(_)) {
            // Even a peek takes a completion.
            arrival = receive(bound, socket, to, How { dontwait: true, peek: false })?;
        }
        let Incoming::Completed(cookie) = arrival.incoming else { return Ok(arrival) };
        let is_full = completions::keep(entry.inode(), cookie) && takes_completions;
        if is_full && (how.dontwait || fcntl_getfl(socket)?.contains(OFlags::NONBLOCK)) {
            return Err(errno(libc::EAGAIN));
        }
    }
}
