//! Requests to a node.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rtrs_core::time::Duration;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags};

use crate::channel::{Connect, PACKET_LEN, Packet, PacketKind, first_fd};

/// Time for a node to answer.
pub(super) const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);

/// Answer of a node, and the descriptor that came with it.
pub(super) type Answer = (Packet, Option<OwnedFd>);

pub(super) fn unclear() -> io::Error {
    let text = "the node's answer is not understood; it may be of another version";
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Sends a request over a connection of its own.
pub(super) fn exchange(way: &dyn Connect, packet: &Packet, body: &[u8]) -> io::Result<Answer> {
    let socket = way.connect()?;
    ask(socket.as_fd(), packet, body)
}

/// Sends a packet and waits for the answer. An errno in the answer becomes an error.
pub(super) fn ask(socket: BorrowedFd<'_>, packet: &Packet, body: &[u8]) -> io::Result<Answer> {
    let head = packet.encode();
    let parts = [io::IoSlice::new(&head), io::IoSlice::new(body)];
    let mut none = SendAncillaryBuffer::default();
    rustix::net::sendmsg(socket, &parts, &mut none, SendFlags::NOSIGNAL)?;
    wait_readable(socket)?;
    let mut head = [0; PACKET_LEN];
    let mut parts = [io::IoSliceMut::new(&mut head)];
    let mut room = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = rustix::net::recvmsg(socket, &mut parts, &mut control, flags)?;
    if got.bytes == 0 {
        return Err(Errno::NETDOWN.into());
    }
    let answer = Packet::decode(&head).ok_or_else(unclear)?;
    let code = i32::try_from(answer.value).unwrap_or(0);
    let is_answer = matches!(answer.kind, PacketKind::Bound | PacketKind::Done);
    match code {
        _ if !is_answer => Err(unclear()),
        0 => Ok((answer, first_fd(&mut control))),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// Waits for an answer within [`ANSWER_TIME_MAX`], whether or not the socket is nonblocking.
fn wait_readable(socket: BorrowedFd<'_>) -> io::Result<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let deadline = std::time::Instant::now() + ANSWER_TIME_MAX;
    loop {
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        // Without a limit, the wait would have no end.
        let limit = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        match poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&limit)) {
            Ok(0) => return Err(Errno::TIMEDOUT.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
