//! Requests to a node.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rtrs_base::time::Duration;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, socketpair,
};

use crate::channel::{Connect, FDS_MAX, PACKET_LEN, Packet, PacketKind, passed_fds};

/// Maximum time for a node to answer.
pub(super) const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);

/// A node's answer, and the descriptors passed with it.
pub(super) type Answer = (Packet, Vec<OwnedFd>);

pub(super) fn unclear() -> io::Error {
    let text = "cannot read the node's answer; the node may have another version";
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Sends a request over a connection of its own.
pub(super) fn exchange(way: &dyn Connect, packet: &Packet) -> io::Result<Answer> {
    let socket = way.connect()?;
    ask(socket.as_fd(), packet)
}

/// Sends a request and waits for the answer on the same connection. An errno in the answer becomes
/// an error.
pub(super) fn ask(socket: BorrowedFd<'_>, packet: &Packet) -> io::Result<Answer> {
    put(socket, packet, &[])?;
    answer(socket)
}

/// Sends a request over a connection shared with others, and waits for the answer on a separate
/// connection, which is also returned. `extra` is passed along.
pub(super) fn ask_apart(
    channel: BorrowedFd<'_>,
    packet: &Packet,
    extra: Option<BorrowedFd<'_>>,
) -> io::Result<(Answer, OwnedFd)> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let (ours, theirs) = socketpair(family, kind, SocketFlags::CLOEXEC, None)?;
    let fds: Vec<BorrowedFd<'_>> = [theirs.as_fd()].into_iter().chain(extra).collect();
    put(channel, packet, &fds)?;
    drop(theirs);
    Ok((answer(ours.as_fd())?, ours))
}

/// Sends a packet that needs no answer, unless the socket buffer is full.
pub(super) fn tell(channel: BorrowedFd<'_>, packet: &Packet) -> Result<(), Errno> {
    let head = packet.encode();
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let mut none = SendAncillaryBuffer::default();
    rustix::net::sendmsg(channel, &[io::IoSlice::new(&head)], &mut none, flags).map(drop)
}

/// Sends a packet. Waits for room for at most [`ANSWER_TIME_MAX`], whether or not the socket is
/// nonblocking.
fn put(socket: BorrowedFd<'_>, packet: &Packet, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let head = packet.encode();
    let parts = [io::IoSlice::new(&head)];
    let deadline = Instant::now() + ANSWER_TIME_MAX;
    loop {
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::sendmsg(socket, &parts, &mut control, flags) {
            Ok(_) => return Ok(()),
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT, deadline)?,
            Err(error) => return Err(gone(error).into()),
        }
    }
}

/// Maps errors from a broken connection to ENETDOWN.
pub(super) fn gone(error: Errno) -> Errno {
    match error {
        Errno::PIPE | Errno::CONNRESET | Errno::CONNREFUSED => Errno::NETDOWN,
        error => error,
    }
}

fn answer(socket: BorrowedFd<'_>) -> io::Result<Answer> {
    wait(socket, PollFlags::IN, Instant::now() + ANSWER_TIME_MAX)?;
    let mut head = [0; PACKET_LEN];
    let mut parts = [io::IoSliceMut::new(&mut head)];
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = rustix::net::recvmsg(socket, &mut parts, &mut control, flags).map_err(gone)?;
    if got.bytes == 0 {
        return Err(Errno::NETDOWN.into());
    }
    let answer = Packet::decode(&head).ok_or_else(unclear)?;
    let code = i32::try_from(answer.value).unwrap_or(0);
    let is_answer = matches!(answer.kind, PacketKind::Bound | PacketKind::Done);
    match code {
        _ if !is_answer => Err(unclear()),
        0 => Ok((answer, passed_fds(&mut control))),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// Waits until a socket is readable or writable.
fn wait(socket: BorrowedFd<'_>, events: PollFlags, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // A wait without a limit might never end.
        let limit = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        match poll(&mut [PollFd::new(&socket, events)], Some(&limit)) {
            Ok(0) => return Err(Errno::TIMEDOUT.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
