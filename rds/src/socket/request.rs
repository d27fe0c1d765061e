//! Requests to a node: each over a connection of its own, or over one that is kept.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use rtrs_core::time::Duration;
use rustix::fs::fstat;
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
        let limit = Timespec::try_from(left).ok();
        match poll(&mut [PollFd::new(&socket, PollFlags::IN)], limit.as_ref()) {
            Ok(0) => return Err(Errno::TIMEDOUT.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Sends a packet that has no answer, if there is room for it.
pub(super) fn tell(socket: BorrowedFd<'_>, packet: &Packet) -> io::Result<()> {
    rustix::net::send(socket, &packet.encode(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

/// Connection for requests that is made early and kept: a process may lose the right to make new
/// ones (setuid) or the way to the node (chroot).
#[derive(Debug, Default)]
pub(super) struct KeptConnection {
    /// Process that made the connection. Its children must not use the connection: they would read
    /// each other's answers.
    owner: AtomicU32,
    socket: Mutex<Option<KeptSocket>>,
}

impl KeptConnection {
    /// Makes the connection, unless this process has one. Without it, the process cannot change its
    /// sockets after it has lost its rights, but everything else works.
    pub(super) fn make(&self, way: &dyn Connect) {
        let process = std::process::id();
        // After a fork, the lock may stay with a thread that does not exist.
        if self.owner.load(Ordering::Acquire) != process
            && let Ok(mut socket) = self.socket.try_lock()
            && let Ok(kept) = KeptSocket::new(way)
        {
            *socket = Some(kept);
            self.owner.store(process, Ordering::Release);
        }
    }

    /// Sends a request. Returns `None` without a connection.
    pub(super) fn ask(&self, packet: &Packet) -> Option<io::Result<Answer>> {
        if self.owner.load(Ordering::Acquire) != std::process::id() {
            return None;
        }
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = socket.as_ref().filter(|kept| kept.is_intact())?;
        let answer = ask(kept.fd()?, packet, &[]);
        if let Err(error) = &answer
            && !is_answer(error)
        {
            // The next answer could be the one of this request.
            *socket = None;
        }
        Some(answer)
    }
}

/// Whether an error is an answer of a node.
fn is_answer(error: &io::Error) -> bool {
    let answers = [Errno::NOENT, Errno::PERM, Errno::NOMEM, Errno::NOPROTOOPT];
    Errno::from_io_error(error).is_some_and(|errno| answers.contains(&errno))
}

/// A descriptor that the program does not know of, and may close or replace.
#[derive(Debug)]
struct KeptSocket {
    fd: Option<OwnedFd>,
    inode: u64,
}

impl KeptSocket {
    fn new(way: &dyn Connect) -> io::Result<Self> {
        let fd = way.connect()?;
        tell(fd.as_fd(), &Packet::new(PacketKind::Keep))?;
        let inode = fstat(&fd)?.st_ino;
        Ok(Self { fd: Some(fd), inode })
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(OwnedFd::as_fd)
    }

    fn is_intact(&self) -> bool {
        self.fd().is_some_and(|fd| fstat(fd).is_ok_and(|stat| stat.st_ino == self.inode))
    }
}

impl Drop for KeptSocket {
    fn drop(&mut self) {
        if !self.is_intact()
            && let Some(fd) = self.fd.take()
        {
            // The number belongs to the program now.
            let _ = fd.into_raw_fd();
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    /// A node whose end of each connection the test holds.
    #[derive(Debug, Default)]
    struct Played(Mutex<Vec<OwnedFd>>);

    impl Connect for Played {
        fn connect(&self) -> io::Result<OwnedFd> {
            let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
            let (ours, theirs) = socketpair(family, kind, SocketFlags::CLOEXEC, None)?;
            self.0.lock().unwrap().push(theirs);
            Ok(ours)
        }
    }

    #[test]
    fn an_unclear_answer_ends_a_kept_connection() {
        let way = Played::default();
        let kept = KeptConnection::default();
        let request = Packet::new(PacketKind::Monitor);
        assert!(kept.ask(&request).is_none(), "none is made");
        (0..3).for_each(|_| kept.make(&way));
        let ends = way.0.lock().unwrap();
        assert_eq!(ends.len(), 1);
        let answer = |value| {
            let packet = Packet { value, ..Packet::new(PacketKind::Done) };
            tell(ends[0].as_fd(), &packet).unwrap();
            kept.ask(&request).unwrap().map(drop).map_err(|error| error.raw_os_error())
        };
        assert_eq!(answer(0), Ok(()));
        let refused = Errno::PERM.raw_os_error();
        assert_eq!(answer(u32::try_from(refused).unwrap()), Err(Some(refused)));
        assert_eq!(answer(0), Ok(()));
        tell(ends[0].as_fd(), &request).unwrap();
        assert!(kept.ask(&request).unwrap().is_err());
        assert!(kept.ask(&request).is_none());
    }
}
