//! Messages to and from a node, over the connection that serves as a user's socket.
//!
//! Errors have the errno values of the kernel's RDS sockets.

use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};

use rtrs_base::mem::Written;
use rtrs_base::rt::Clock;
use rtrs_base::time::{Duration, Instant};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, socket_timeout};
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, RecvMsg, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use super::access::{Binding, is_nonblocking};
use super::request::{gone, tell};
use super::room::SendWait;
use crate::channel::{
    INLINE_FIRST, INLINE_MAX, PACKET_LEN, Packet, PacketKind, PacketTimes, RING_MESSAGE_MAX,
    Refusal, passed_fds, put_rest, take_rest,
};
use crate::wire::PAYLOAD_MAX;

/// Maximum number of parts of a message that are passed to the system without copying.
const PARTS_MAX: usize = 64;
/// Maximum number of parts that the system accepts in a call (UIO_MAXIOV).
const SYSTEM_PARTS: usize = 1024;

/// Room for control messages of a receive: the descriptor of a long message, and the messages that
/// socket options add. A message whose descriptor does not fit is lost.
const CONTROL_LEN: usize = 512;

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

impl How {
    fn flags(self) -> RecvFlags {
        let mut flags = RecvFlags::CMSG_CLOEXEC;
        flags.set(RecvFlags::DONTWAIT, self.dontwait);
        flags.set(RecvFlags::PEEK, self.peek);
        flags
    }
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
    /// Groups of ports in which a port is no longer congested: bit N is for the ports whose
    /// remainder modulo 64 is N.
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

/// Result of a receive, and its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Message or notification.
    pub incoming: Incoming,
    /// Time since 1970 at which the node delivered the message; zero for a notification.
    pub time: Duration,
    times: PacketTimes,
}

impl Arrival {
    /// Returns the parts of a message's time until now: arrival of its header, arrival of its
    /// payload, and the time since.
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
/// EINVAL, EOPNOTSUPP and ENOTCONN for a message that cannot be sent there, ENOMEM when the node
/// has reached its limit on peers, EINTR, ENETDOWN when the node has ended.
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
        // Fails if the node has ended; the next call reports that.
        let _ = binding.shown.show_full(socket, room, binding.flow.position());
    }
    Ok(len)
}

/// Lets the node run, so that it may make room in a full send buffer: the next call of a program
/// that sends a stream then neither waits nor makes the node wake it.
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
        // The node has not read earlier messages yet.
        Err(Errno::AGAIN) => Ok(false),
        // Too many descriptors are in flight.
        Err(Errno::TOOMANYREFS) => Err(Errno::NOBUFS),
        Err(error) => Err(gone(error)),
    }
}

/// Passes a message to the node through the ring. Returns false if it has to take the socket.
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
        // that got ENOBUFS could wait for an update forever.
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

/// Whether the node at the other end has ended.
fn has_ended(socket: BorrowedFd<'_>) -> io::Result<bool> {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
    poll(&mut fds, Some(&Timespec::default()))?;
    Ok(fds[0].revents().contains(PollFlags::HUP))
}

/// Sends a packet, if there is room in the connection.
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

/// Receives the next message or notification. Only users with a monitor get congestion updates; for
/// other users, the updates only have to wake a poll.
///
/// # Errors
/// EAGAIN or ETIMEDOUT when there is nothing, EINTR, ENETDOWN when the node has ended. EMFILE when
/// a message above 64 KiB is lost because this process has no descriptors left.
pub fn receive(
    binding: &Binding,
    socket: BorrowedFd<'_>,
    to: &mut [IoSliceMut<'_>],
    how: How,
) -> io::Result<Arrival> {
    let source = Source { socket, taken: &|len| binding.taken(socket, len) };
    loop {
        let mut arrival = receive_next(source, to, how)?;
        if !matches!(arrival.incoming, Incoming::Cleared(_)) || binding.monitors() {
            return Ok(arrival);
        }
        if how.peek {
            // The update is taken even where a message would stay in the queue.
            arrival = receive_next(source, to, How { dontwait: true, peek: false })?;
            if !matches!(arrival.incoming, Incoming::Cleared(_)) {
                return Ok(arrival);
            }
        }
    }
}

/// Connection that messages are received from.
#[derive(Clone, Copy)]
struct Source<'a> {
    socket: BorrowedFd<'a>,
    /// Records the length of a message that was taken.
    taken: &'a dyn Fn(u32),
}

fn receive_next(source: Source<'_>, to: &mut [IoSliceMut<'_>], how: How) -> io::Result<Arrival> {
    let socket = source.socket;
    let space: usize = to.iter().map(|part| part.len()).sum();
    if to.len() >= SYSTEM_PARTS {
        // The head of the packet needs a part too.
        let mut whole = vec![0; space.min(PAYLOAD_MAX)];
        let got = receive_next(source, &mut [IoSliceMut::new(&mut whole)], how)?;
        if let Incoming::Message { len, .. } = got.incoming {
            scatter(&whole[..len], to);
        }
        return Ok(got);
    }
    let mut head = [0; PACKET_LEN];
    let mut room = [MaybeUninit::uninit(); CONTROL_LEN];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let flags = how.flags();
    let mut next = || {
        if let [one] = to {
            let mut parts = [IoSliceMut::new(&mut head), IoSliceMut::new(one)];
            rustix::net::recvmsg(socket, &mut parts, &mut control, flags)
        } else {
            let mut parts = vec![IoSliceMut::new(&mut head)];
            parts.extend(to.iter_mut().map(|part| IoSliceMut::new(part)));
            rustix::net::recvmsg(socket, &mut parts, &mut control, flags)
        }
    };
    let got = match next() {
        // The node was killed before it had read all input. The system reports that once, before
        // the data that the node had sent.
        Err(Errno::CONNRESET) => next(),
        got => got,
    };
    let got = match got {
        Err(Errno::AGAIN) if !how.dontwait && !is_nonblocking(socket) => Err(Errno::TIMEDOUT),
        Ok(RecvMsg { bytes: 0, .. }) | Err(Errno::CONNRESET) => Err(Errno::NETDOWN),
        got => got,
    }?;
    let unclear = || io::Error::from(Errno::PROTO);
    let packet = Packet::decode(&head).filter(|_| got.bytes >= PACKET_LEN).ok_or_else(unclear)?;
    let notification =
        |incoming| Ok(Arrival { incoming, time: Duration::ZERO, times: packet.times });
    match packet.kind {
        PacketKind::Update => notification(Incoming::Cleared(packet.wide())),
        PacketKind::Completed => notification(Incoming::Completed(packet.value)),
        PacketKind::Data => {
            if !how.peek {
                (source.taken)(packet.len);
            }
            let total = packet.len as usize;
            let len = total.min(space);
            match passed_fds(&mut control).into_iter().next() {
                Some(rest) => take_rest(rest, total, to)?,
                None if got.bytes - PACKET_LEN == len => {}
                // The rest is in a memfd for which there was no descriptor.
                None if got.flags.contains(ReturnFlags::CTRUNC) => return Err(Errno::MFILE.into()),
                None => return Err(unclear()),
            }
            let from = SocketAddr::new(packet.address, packet.port);
            let time = Duration::from_nanos(packet.wide());
            let incoming = Incoming::Message { len, total, from };
            Ok(Arrival { incoming, time, times: packet.times })
        }
        _ => Err(unclear()),
    }
}

/// Copies the first `len` bytes of a payload.
fn gather(payload: &[IoSlice<'_>], len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    for part in payload {
        bytes.extend_from_slice(&part[..part.len().min(len - bytes.len())]);
    }
    bytes
}

/// Copies bytes into the parts, in order.
fn scatter(mut bytes: &[u8], to: &mut [IoSliceMut<'_>]) {
    for part in to {
        let count = part.len().min(bytes.len());
        part[..count].copy_from_slice(&bytes[..count]);
        bytes = &bytes[count..];
    }
}

fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn source(socket: &OwnedFd) -> Source<'_> {
        Source { socket: socket.as_fd(), taken: &|_| {} }
    }

    /// Otherwise the rest of the message would be the former contents of the buffer.
    #[test]
    fn a_truncated_message_is_an_error() {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (ours, theirs) = socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        let head = Packet { len: 100_000, ..Packet::new(PacketKind::Data) }.encode();
        let parts = [IoSlice::new(&head), IoSlice::new(&[7; INLINE_FIRST])];
        let mut none = SendAncillaryBuffer::default();
        let mut send = || {
            rustix::net::sendmsg(&theirs, &parts, &mut none, SendFlags::empty()).unwrap();
        };
        send();
        let mut buffer = vec![0; 100_000];
        let error =
            receive_next(source(&ours), &mut [IoSliceMut::new(&mut buffer)], How::default());
        assert_eq!(error.unwrap_err().raw_os_error(), Some(Errno::PROTO.raw_os_error()));
        // A receiver without room for the rest gets no error.
        send();
        let room = &mut buffer[..INLINE_FIRST];
        let got =
            receive_next(source(&ours), &mut [IoSliceMut::new(room)], How::default()).unwrap();
        let expected =
            |got| matches!(got, Incoming::Message { len: INLINE_FIRST, total: 100_000, .. });
        assert!(expected(got.incoming));
    }

    /// The descriptor of the rest shares the control buffer with other control messages.
    #[test]
    fn control_messages_of_the_socket_cost_no_data() {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (ours, theirs) = socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::sockopt::set_socket_passcred(&ours, true).unwrap();
        let payload: Vec<u8> = (0..100_000_u32).map(|at| (at % 251) as u8).collect();
        let packet = Packet::with_wide(PacketKind::Data, 1_700_000_000_123_456_789);
        let packet = Packet { len: 100_000, ..packet };
        send_packet(theirs.as_fd(), &packet, &[IoSlice::new(&payload)]).unwrap();
        let mut buffer = vec![0; 100_000];
        let to = &mut [IoSliceMut::new(&mut buffer)];
        let got = receive_next(source(&ours), to, How::default()).unwrap();
        assert!(matches!(got.incoming, Incoming::Message { len: 100_000, .. }));
        assert_eq!(got.time, Duration::from_nanos(1_700_000_000_123_456_789));
        assert!(buffer == payload);
    }

    #[test]
    fn messages_arrive_with_as_many_buffers_as_the_system_allows() {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (ours, theirs) = socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        let payload: Vec<u8> = (0..1500_u16).map(|at| at as u8).collect();
        let head = Packet { len: 1500, ..Packet::new(PacketKind::Data) }.encode();
        let mut none = SendAncillaryBuffer::default();
        let parts = [IoSlice::new(&head), IoSlice::new(&payload)];
        rustix::net::sendmsg(&theirs, &parts, &mut none, SendFlags::empty()).unwrap();
        let mut bytes = vec![0; SYSTEM_PARTS];
        let mut room: Vec<_> = bytes.chunks_mut(1).map(IoSliceMut::new).collect();
        let got = receive_next(source(&ours), &mut room, How::default()).unwrap();
        let expected =
            |got| matches!(got, Incoming::Message { len: SYSTEM_PARTS, total: 1500, .. });
        assert!(expected(got.incoming));
        assert!(bytes == payload[..SYSTEM_PARTS]);
    }
}
