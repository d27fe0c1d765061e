//! Messages to and from a node, over a socket's ring or its connection.
//!
//! Errors have the errno values of the kernel's RDS sockets.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};

use rtrs_base::mem::Written;
use rtrs_base::rt::Clock;
use rtrs_base::time::{Duration, Instant};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, socket_timeout};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::access::{Binding, is_nonblocking};
use super::request::{gone, tell};
use super::room::SendWait;
use crate::channel::{
    INLINE_FIRST, INLINE_MAX, Packet, PacketKind, PacketTimes, RING_MESSAGE_MAX, Refusal, put_rest,
};
use crate::wire::PAYLOAD_MAX;

/// Maximum number of parts of a message that are passed to the system without copying.
const PARTS_MAX: usize = 64;

/// Number of times that a blocking call yields its CPU after it has filled the send buffer.
const YIELDS: usize = 20;

/// Interval at which waiting users check that the node is still running.
const ALIVE_LOOK: Duration = Duration::from_millis(200);

/// Options of a receive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct How {
    /// Whether to fail with EAGAIN instead of blocking.
    pub dontwait: bool,
    /// Whether to leave the message in the queue.
    pub peek: bool,
}

/// Result of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// A message.
    Message {
        /// Number of bytes that fit into the buffer.
        len: usize,
        /// Length of the message in bytes.
        total: usize,
        /// Sender of the message; port 0 for the answer to a ping.
        from: SocketAddr,
    },
    /// Groups of ports in which a port is no longer congested: bit N stands for the ports that are
    /// N modulo 64.
    Cleared(u64),
    /// The message with this cookie is complete: it was acknowledged, canceled or dropped.
    Completed(u32),
}

/// A message to send.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// Destination; `None` for the socket's default destination.
    pub to: Option<(IpAddr, u16)>,
    /// Parts of the payload.
    pub payload: &'a [IoSlice<'a>],
    /// Number that [`Incoming::Completed`] returns when the message is complete.
    pub cookie: Option<u32>,
}

/// Result of a receive, with its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Message or notification.
    pub incoming: Incoming,
    /// Time since 1970 when the node delivered the message; zero for a notification.
    pub time: Duration,
    pub(super) times: PacketTimes,
}

impl Arrival {
    /// Returns the parts of a message's time up to now: arrival of its header, arrival of its
    /// payload, and the time since then.
    pub fn latencies(&self) -> [Duration; 3] {
        let PacketTimes { header, payload, queued } = self.times;
        let arrived = [header, payload].map(|nanos| Duration::from_nanos(nanos.into()));
        let waited = Clock.now().since(Instant::from_nanos(queued));
        [arrived[0], arrived[1], waited]
    }
}

/// Sends a message.
///
/// # Errors
/// EAGAIN or ETIMEDOUT when the send buffer is full, ENOBUFS when the port is congested, EMSGSIZE,
/// EINVAL, EOPNOTSUPP and ENOTCONN for a message that cannot be sent to its destination, ENOMEM
/// when the node has reached its limit on peers, EINTR, ENETDOWN when the node has stopped.
pub fn send(
    binding: &Binding,
    socket: BorrowedFd<'_>,
    message: Outgoing<'_>,
    dontwait: bool,
) -> io::Result<usize> {
    let Outgoing { to, payload, cookie } = message;
    let view = binding.view().ok_or(Errno::NETDOWN)?;
    let (address, port) = to.or(view.connected).ok_or(Errno::NOTCONN)?;
    let is_broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast());
    if address.is_unspecified() || address.is_multicast() || is_broadcast {
        return Err(Errno::INVAL.into());
    }
    if address.is_ipv4() != binding.board().address().is_ipv4() {
        return Err(Errno::OPNOTSUPP.into());
    }
    let len: usize = payload.iter().map(|part| part.len()).sum();
    if len > PAYLOAD_MAX.min(view.sndbuf) {
        return Err(Errno::MSGSIZE.into());
    }
    if binding.board().may_refuse(address) {
        binding.reach(socket, address)?;
    }
    let packet = Packet { port, address, ..Packet::new(PacketKind::Send) };
    await_uncongested(binding, socket, &packet, dontwait)?;
    let packet = Packet { len: u32::try_from(len).unwrap_or(u32::MAX), ..packet };
    let packet = packet.with_cookie(cookie);
    let mut wait: Option<SendWait> = None;
    while !send_now(binding, socket, &packet, payload)? {
        if wait.is_none() {
            binding.refused(Refusal::QueueFull);
            if dontwait || is_nonblocking(socket) {
                return Err(Errno::AGAIN.into());
            }
        }
        wait.get_or_insert_default().writable(socket)?;
    }
    binding.sent(packet.len);
    let is_full = || binding.room().ok().filter(|room| !room.is_any());
    if is_full().is_some() && !dontwait && !is_nonblocking(socket) {
        yield_for_room(binding);
    }
    if let Some(room) = is_full() {
        // Fails if the node has stopped; the next call reports that.
        let _ = binding.shown.show_full(socket, room, binding.flow.position());
    }
    Ok(len)
}

/// Lets the node run, so that it may make room in a full send buffer: the next call in a program
/// that sends a stream then neither waits nor needs a wakeup from the node.
fn yield_for_room(binding: &Binding) {
    for _ in 0..YIELDS {
        if binding.room().is_ok_and(|room| room.is_ample()) {
            return;
        }
        std::thread::yield_now();
    }
}

/// Sends a message if there is room now.
fn send_now(
    binding: &Binding,
    socket: BorrowedFd<'_>,
    packet: &Packet,
    payload: &[IoSlice<'_>],
) -> Result<bool, Errno> {
    let room = binding.room()?;
    if !room.is_any() {
        binding.shown.show_full(socket, room, binding.flow.position())?;
        return Ok(false);
    }
    if packet.len as usize <= RING_MESSAGE_MAX && put_in_ring(binding, socket, packet, payload)? {
        return Ok(true);
    }
    let packet = packet.with_position(binding.flow.position());
    let sent = binding.flow.by_socket(|| match send_packet(socket, &packet, payload) {
        // The send buffer was full before.
        Err(Errno::AGAIN | Errno::MSGSIZE) => {
            binding.shown.widen(socket)?;
            send_packet(socket, &packet, payload)
        }
        sent => sent,
    });
    match sent {
        Ok(()) => Ok(true),
        // The node has not yet read earlier messages.
        Err(Errno::AGAIN) => Ok(false),
        // Too many descriptors are in flight.
        Err(Errno::TOOMANYREFS) => Err(Errno::NOBUFS),
        Err(error) => Err(gone(error)),
    }
}

/// Passes a message to the node through the ring. Returns false if the socket must be used.
fn put_in_ring(
    binding: &Binding,
    socket: BorrowedFd<'_>,
    packet: &Packet,
    payload: &[IoSlice<'_>],
) -> Result<bool, Errno> {
    match binding.flow.put(packet, payload) {
        Written::Done => Ok(true),
        Written::Asleep(token) => {
            match tell(socket, &Packet::new(PacketKind::Wake)) {
                // If the socket is full, its unread packets wake the node.
                Ok(()) | Err(Errno::AGAIN) => {}
                Err(error) => return Err(gone(error)),
            }
            binding.flow.woken(token);
            Ok(true)
        }
        Written::Refused => Ok(false),
    }
}

/// Waits until the destination is not congested, or fails if the call must not block.
fn await_uncongested(
    binding: &Binding,
    socket: BorrowedFd<'_>,
    packet: &Packet,
    dontwait: bool,
) -> io::Result<()> {
    let board = binding.board();
    let is_congested = || board.is_congested(packet.address, packet.port);
    if !is_congested() {
        return Ok(());
    }
    if dontwait || is_nonblocking(socket) {
        let watch = Packet { kind: PacketKind::Watch, ..*packet };
        // The update also wakes users that poll without a monitor. If there is no room for the
        // request, the socket counts as full, and its user is notified as well: otherwise a user
        // that received ENOBUFS could wait for an update forever.
        send_packet(socket, &watch, &[]).map_err(|error| {
            if error == Errno::AGAIN {
                binding.refused(Refusal::QueueFull);
            }
            gone(error)
        })?;
        binding.refused(Refusal::Congested);
        return Err(Errno::NOBUFS.into());
    }
    binding.refused(Refusal::CongestedWait);
    let limit = socket_timeout(socket, Timeout::Send)?;
    let begun = std::time::Instant::now();
    loop {
        let changes = board.changes();
        if !is_congested() {
            return Ok(());
        }
        if has_ended(socket)? {
            return Err(Errno::NETDOWN.into());
        }
        let left = limit.map_or(Duration::MAX, |limit| limit.saturating_sub(begun.elapsed()));
        if left.is_zero() {
            return Err(Errno::TIMEDOUT.into());
        }
        board.wait(changes, Some(left.min(ALIVE_LOOK)))?;
    }
}

/// Whether the node at the other end has stopped.
fn has_ended(socket: BorrowedFd<'_>) -> io::Result<bool> {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
    poll(&mut fds, Some(&Timespec::default()))?;
    Ok(fds[0].revents().contains(PollFlags::HUP))
}

/// Sends a packet, if the connection has room for it.
fn send_packet(
    socket: BorrowedFd<'_>,
    packet: &Packet,
    payload: &[IoSlice<'_>],
) -> Result<(), Errno> {
    let head = packet.encode();
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let len = packet.len as usize;
    if len > INLINE_MAX || payload.len() > PARTS_MAX {
        let is_long = len > INLINE_MAX;
        let rest = is_long.then(|| put_rest(payload)).transpose().map_err(|e| errno(&e))?;
        let inline = gather(payload, if is_long { INLINE_FIRST } else { len });
        let fds = rest.as_ref().map(|fd| [fd.as_fd()]);
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        if let Some(fds) = &fds {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let parts = [IoSlice::new(&head), IoSlice::new(&inline)];
        return rustix::net::sendmsg(socket, &parts, &mut control, flags).map(drop);
    }
    let mut parts = [IoSlice::new(&[]); PARTS_MAX + 1];
    parts[0] = IoSlice::new(&head);
    for (part, from) in parts[1..].iter_mut().zip(payload) {
        *part = IoSlice::new(from);
    }
    let mut none = SendAncillaryBuffer::default();
    rustix::net::sendmsg(socket, &parts[..=payload.len()], &mut none, flags).map(drop)
}

/// Copies the first `len` bytes of a payload.
fn gather(payload: &[IoSlice<'_>], len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    for part in payload {
        bytes.extend_from_slice(&part[..part.len().min(len - bytes.len())]);
    }
    bytes
}

fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}
