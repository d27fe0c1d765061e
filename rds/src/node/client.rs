//! A user's connection to the node.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rtrs_base::mem::{Front, Malformed};
use rtrs_base::rt::{Fd, OpId, PeerCredentials, peer_credentials, receive_passed};
use rtrs_base::time::{Duration, Instant};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketType,
    recv, sendmsg,
};

use crate::channel::{
    FDS_MAX, INLINE_FIRST, INLINE_MAX, Next, NodeFlow, NodeRing, PACKET_LEN, Packet, PacketKind,
    PacketTimes, SocketView, take_rest,
};
use crate::proto::{Received, SocketId, UserId};
use crate::wire::{ArrivalTimes, PAYLOAD_MAX};

/// ID of a user's connection.
pub(super) type ClientId = u64;

/// Connections involved in a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asker {
    /// Connection that decides which sockets may be changed.
    pub(super) control: ClientId,
    /// Connection that receives the answer.
    pub(super) answering: ClientId,
}

/// A socket of the node.
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) id: SocketId,
    pub(super) slot: usize,
    /// State of the socket as published on the board.
    pub(super) view: SocketView,
    pub(super) flow: NodeFlow,
    /// Whether the socket is full, so that the user's messages are not read.
    pub(super) is_full: bool,
    /// Time until which the remaining messages are read, after the user has disconnected.
    pub(super) ends_at: Option<Instant>,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) fd: Fd,
    /// Process that created the connection.
    pub(super) credentials: PeerCredentials,
    /// Whether the connection was passed over a different connection, for requests and answers.
    /// Such a connection cannot become a socket: processes that share it could change the buffers
    /// of this end.
    pub(super) is_passed: bool,
    pub(super) inode: u64,
    /// Socket of the connection; None if nothing but queries has arrived yet.
    pub(super) bound: Option<Bound>,
    /// Polls in progress: for input, for room, and for a hangup while the socket is full.
    pub(super) reading: Option<OpId>,
    pub(super) writing: Option<OpId>,
    pub(super) watching: Option<OpId>,
}

/// Input from a user.
#[derive(Debug)]
pub(super) enum Input {
    /// A packet, the bytes that followed it, and the descriptors of a request.
    Packet(Packet, Vec<u8>, Vec<OwnedFd>),
    /// No input at present.
    Nothing,
    /// The user has disconnected, or has sent something other than a packet.
    End,
}

impl Client {
    /// Takes over a connection.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn new(fd: OwnedFd) -> io::Result<Self> {
        let credentials = peer_credentials(&fd)?;
        let inode = rustix::fs::fstat(&fd)?.st_ino;
        Ok(Self {
            fd: Fd::new(fd),
            credentials,
            is_passed: false,
            inode,
            bound: None,
            reading: None,
            writing: None,
            watching: None,
        })
    }

    /// Takes over a connection that a process with these credentials has passed.
    ///
    /// # Errors
    /// `InvalidInput` for anything but a connected unix socket for packets: other descriptors may
    /// be readable without input, or never reach an end. Otherwise the system's error.
    pub(super) fn passed(fd: OwnedFd, credentials: PeerCredentials) -> io::Result<Self> {
        let is_packet_socket = socket_domain(&fd)? == AddressFamily::UNIX
            && socket_type(&fd)? == SocketType::SEQPACKET
            && !socket_acceptconn(&fd)?;
        if !is_packet_socket {
            let text = "not a connected unix socket for packets";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(Self { credentials, is_passed: true, ..Self::new(fd)? })
    }

    /// Returns the user against whose shares the connection counts.
    pub(super) fn user(&self) -> UserId {
        UserId(self.credentials.uid)
    }

    /// Returns the polls in progress.
    pub(super) fn polls(&self) -> impl Iterator<Item = OpId> {
        [self.reading, self.writing, self.watching].into_iter().flatten()
    }

    /// Returns the ring of the socket, if its users use it.
    pub(super) fn ring_in_use(&mut self) -> Option<&mut NodeRing> {
        let ring = self.bound.as_mut().map(|bound| &mut bound.flow.ring)?;
        ring.is_used().then_some(ring)
    }

    /// Whether the ring of the socket holds a message.
    pub(super) fn has_ring_input(&self) -> bool {
        self.bound.as_ref().is_some_and(|bound| bound.flow.ring.has_input())
    }

    /// Reads the user's next packet, from the ring or from the connection, whichever was sent
    /// first. Without `all`, packets on the connection that a poll in progress will report may be
    /// left unread. `buffer` has room for a packet and [`INLINE_MAX`] bytes.
    pub(super) fn read(&mut self, buffer: &mut [u8], all: bool) -> Input {
        let is_reported = self.reading.is_some() && !all;
        let Some(ring) = self.ring_in_use() else { return self.read_connection(buffer) };
        match ring.next() {
            Ok(Next::Message(front)) => return take(ring, front),
            Ok(Next::Socket) if is_reported && !ring.has_input() => return Input::Nothing,
            Ok(Next::Socket) => {}
            Err(error) => return broken(&error),
        }
        let had_message = ring.has_input();
        // Since the ring was checked, users may have added messages to it and then sent a packet.
        let peeked = peek(&self.fd);
        let Some(ring) = self.ring_in_use() else { return Input::Nothing };
        let is_preceded = match &peeked {
            Peeked::Packet(packet) => packet.position().is_some_and(|at| ring.is_before(at)),
            // A message that was not in the ring before the peek may follow a packet that was sent
            // after the peek.
            Peeked::Nothing => had_message,
            Peeked::End => true,
        };
        match ring.front() {
            Ok(Some(front)) if is_preceded => take(ring, front),
            Err(error) => broken(&error),
            Ok(_) if matches!(peeked, Peeked::Nothing) => Input::Nothing,
            Ok(_) => self.read_connection(buffer),
        }
    }

    /// Reads the next packet from the connection.
    fn read_connection(&mut self, buffer: &mut [u8]) -> Input {
        let mut head = [0; PACKET_LEN];
        let mut parts = [IoSliceMut::new(&mut head), IoSliceMut::new(buffer)];
        let mut got = receive_passed(&self.fd, &mut parts);
        if got.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset) {
            // The user closed the connection before reading all input. The system reports that
            // once, before the data that the user had sent.
            got = receive_passed(&self.fd, &mut parts);
        }
        let nothing = [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted];
        let (count, fds) = match got {
            Ok(got) => got,
            Err(error) if nothing.contains(&error.kind()) => return Input::Nothing,
            Err(_) => return Input::End,
        };
        if fds.len() > FDS_MAX {
            return Input::End;
        }
        let Some(len) = count.checked_sub(PACKET_LEN) else { return Input::End };
        let Some(packet) = Packet::decode(&head) else { return Input::End };
        let inline = &buffer[..len.min(buffer.len())];
        if packet.kind != PacketKind::Send {
            return Input::Packet(packet, inline.to_vec(), fds);
        }
        if let Some(bound) = &mut self.bound {
            bound.flow.ring.read_from_socket();
        }
        match whole(packet.len as usize, inline, fds.into_iter().next()) {
            Some(payload) => Input::Packet(packet, payload, Vec::new()),
            None => Input::End,
        }
    }

    /// Sends a packet with descriptors, if there is room now.
    ///
    /// # Errors
    /// The system's error; `WouldBlock` if there is no room.
    pub(super) fn write(&self, packet: &Packet, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        send(&self.fd, packet, fds)
    }

    /// Sends another token if messages are in the ring.
    ///
    /// # Errors
    /// See [`Client::send_token`].
    pub(super) fn renew_token(&mut self) -> io::Result<()> {
        match self.bound.as_ref().is_some_and(|bound| !bound.flow.outgoing.is_empty()) {
            true => self.send_token(),
            false => Ok(()),
        }
    }

    /// Makes the connection readable to announce messages in the ring.
    ///
    /// # Errors
    /// The system's error, except when the user has disconnected, which the following read notices.
    pub(super) fn send_token(&mut self) -> io::Result<()> {
        let Some(bound) = &mut self.bound else { return Ok(()) };
        let ring = &mut bound.flow.outgoing;
        let Some(value) = ring.next_token() else { return Ok(()) };
        let packet = Packet { value, ..Packet::new(PacketKind::Token) };
        match send(&self.fd, &packet, &[]) {
            Ok(()) => ring.token_sent(),
            Err(error) => {
                use io::ErrorKind::{BrokenPipe, ConnectionReset, WouldBlock};
                ring.token_failed();
                // A connection without room is readable.
                if ![BrokenPipe, ConnectionReset, WouldBlock].contains(&error.kind()) {
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}

fn send(fd: &Fd, packet: &Packet, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let head = packet.encode();
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(fd, &[IoSlice::new(&head)], &mut control, flags)?;
    Ok(())
}

/// Returns the head of a message for a user. `time` is in nanoseconds since 1970.
pub(super) fn data_packet(received: &Received, time: u64) -> Packet {
    let len = u32::try_from(received.payload.len()).unwrap_or(u32::MAX);
    let (port, address) = (received.port, received.from);
    let ArrivalTimes { header, payload: begun, end } = received.times;
    let nanos = |span: Duration| u32::try_from(span.as_nanos()).unwrap_or(u32::MAX);
    let times = PacketTimes {
        header: nanos(begun.since(header)),
        payload: nanos(end.since(begun)),
        queued: end.as_nanos(),
    };
    Packet { port, len, address, times, ..Packet::with_wide(PacketKind::Data, time) }
}

/// Takes a message from a ring.
fn take(ring: &mut NodeRing, front: Front) -> Input {
    match ring.take(front) {
        Some((packet, payload)) => Input::Packet(packet, payload, Vec::new()),
        None => {
            tracing::debug!("user disconnected: its ring contains an invalid message");
            Input::End
        }
    }
}

fn broken(error: &Malformed) -> Input {
    tracing::debug!(%error, "user disconnected");
    Input::End
}

/// Next packet on a connection, which is left unread.
#[derive(Debug)]
enum Peeked {
    Packet(Packet),
    Nothing,
    /// The user has disconnected, or has sent something other than a packet.
    End,
}

fn peek(fd: &Fd) -> Peeked {
    let mut head = [0; PACKET_LEN];
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let mut got = recv(fd, &mut head, flags);
    if matches!(got, Err(Errno::CONNRESET)) {
        // Reported once, as in [`Client::read_connection`].
        got = recv(fd, &mut head, flags);
    }
    match got {
        Ok((PACKET_LEN, _)) => Packet::decode(&head).map_or(Peeked::End, Peeked::Packet),
        Err(Errno::AGAIN | Errno::INTR) => Peeked::Nothing,
        Ok(_) | Err(_) => Peeked::End,
    }
}

/// Assembles a payload of `len` bytes from its inline part and the rest in a memfd. Returns `None`
/// if the length does not match.
fn whole(len: usize, inline: &[u8], rest: Option<OwnedFd>) -> Option<Vec<u8>> {
    let Some(rest) = rest else { return (inline.len() == len).then(|| inline.to_vec()) };
    if !(INLINE_MAX + 1..=PAYLOAD_MAX).contains(&len) || inline.len() != INLINE_FIRST {
        return None;
    }
    let mut payload = vec![0; len];
    payload[..INLINE_FIRST].copy_from_slice(inline);
    take_rest(rest, len, &mut [IoSliceMut::new(&mut payload)]).ok()?;
    Some(payload)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::put_rest;

    #[test]
    fn payload_lengths_match_their_headers() {
        let inline = vec![7; INLINE_FIRST];
        let rest = |len: usize| put_rest(&[IoSlice::new(&vec![7; len])]).ok();
        assert_eq!(whole(3, &[1, 2, 3], None), Some(vec![1, 2, 3]));
        assert_eq!(whole(4, &[1, 2, 3], None), None);
        assert_eq!(whole(100_000, &inline, rest(100_000)), Some(vec![7; 100_000]));
        assert_eq!(whole(100_000, &inline, rest(90_000)), None);
        assert_eq!(whole(100_000, &inline[1..], rest(100_000)), None);
        assert_eq!(whole(PAYLOAD_MAX + 1, &inline, rest(PAYLOAD_MAX + 1)), None);
        assert_eq!(whole(100, &inline, rest(100_000)), None);
    }
}
