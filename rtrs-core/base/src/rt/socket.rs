//! State of a socket's connection in the kernel.

use std::io::{self, IoSliceMut};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::syscall::check;

/// Control message with a descriptor for the sender's process, which a socket with SO_PASSPIDFD
/// receives.
const SCM_PIDFD: libc::c_int = 4;
/// Number of words for a packet's control messages: the 253 descriptors that the kernel allows
/// (SCM_MAX_FD), and the sender's credentials, label and process.
const CONTROL_WORDS: usize = 192;

/// Returns the number of segments that were sent but not acknowledged by the peer's system
/// (`tcpi_unacked`). 0 means that all sent data has arrived there, whether or not the peer's
/// program has read it.
///
/// # Errors
/// The system's error; ENOTSUP or a similar error for anything but a TCP socket.
pub fn unacknowledged(fd: impl AsFd) -> io::Result<u32> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    let fd = fd.as_fd();
    // SAFETY: the descriptor is open while it is borrowed; the kernel writes at most `len` bytes to
    // `info`, which is that large.
    let rc = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    check(rc)?;
    // SAFETY: all bytes are zero or written by the kernel, and any bytes are a valid `tcp_info`.
    Ok(unsafe { info.assume_init() }.tcpi_unacked)
}

/// Returns the number of bytes that were sent, or are waiting to be sent, and have not been
/// acknowledged by the peer's system (SIOCOUTQ). The number does not change after the connection is
/// lost.
///
/// # Errors
/// The system's error.
pub fn unacknowledged_bytes(fd: impl AsFd) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the descriptor is open while it is borrowed; the kernel writes one int.
    let rc = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    check(rc)?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// Returns true if the peer has closed the connection. A peer that has only closed its sending
/// direction may still be waiting for a reply.
pub fn is_hung_up(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    let mut entry = libc::pollfd { fd: fd.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: the descriptor is open while it is borrowed; the kernel reads and writes one entry,
    // and does not wait.
    let ready = unsafe { libc::poll(&raw mut entry, 1, 0) };
    ready > 0 && entry.revents & libc::POLLHUP != 0
}

/// Sets a socket option to `value`, as setsockopt(2) does.
///
/// # Errors
/// The system's error.
pub fn set_option(fd: impl AsFd, level: i32, name: i32, value: &[u8]) -> io::Result<()> {
    let len = libc::socklen_t::try_from(value.len()).map_err(io::Error::other)?;
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open while it is borrowed; the kernel reads `len` bytes of `value`,
    // which is that long. Options whose value contains a pointer cannot be set safely this way,
    // such as (SOL_RDS, GET_MR), and no such option is used here.
    let rc = unsafe { libc::setsockopt(fd, level, name, value.as_ptr().cast(), len) };
    check(rc)
}

/// Reads a socket option, as getsockopt(2) does. Returns the result of the call, which some options
/// use, and the number of bytes; `None` if `room` is too short for the value (ENOSPC).
///
/// # Errors
/// The system's error.
pub fn get_option(
    fd: impl AsFd,
    level: i32,
    name: i32,
    room: &mut [u8],
) -> io::Result<(Option<usize>, usize)> {
    let mut len = libc::socklen_t::try_from(room.len()).map_err(io::Error::other)?;
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open while it is borrowed; the kernel writes at most `len` bytes to
    // `room`, which is that long.
    let rc = unsafe { libc::getsockopt(fd, level, name, room.as_mut_ptr().cast(), &raw mut len) };
    let len = usize::try_from(len).unwrap_or(0);
    match usize::try_from(rc) {
        Ok(value) => Ok((Some(value), len.min(room.len()))),
        Err(_) => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENOSPC) => Ok((None, len)),
            error => Err(error),
        },
    }
}

/// Process at the other end of a connected Unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process ID; `None` for a process outside this PID namespace.
    pub pid: Option<u32>,
    /// User ID.
    pub uid: u32,
}

/// Returns the process that listened on the Unix socket to which this one is connected
/// (SO_PEERCRED); 0 if it is outside this PID namespace.
///
/// # Errors
/// The system's error.
pub fn peer_pid(fd: impl AsFd) -> io::Result<u32> {
    u32::try_from(peer_ucred(fd)?.pid).map_err(io::Error::other)
}

/// Returns the process at the other end of a Unix socket, as it was when it connected, listened or
/// created a pair of sockets (SO_PEERCRED).
///
/// # Errors
/// The system's error; `NotConnected` for a socket without a peer.
pub fn peer_credentials(fd: impl AsFd) -> io::Result<PeerCredentials> {
    credentials(peer_ucred(fd)?)
}

fn credentials(peer: libc::ucred) -> io::Result<PeerCredentials> {
    if peer.uid == libc::uid_t::MAX {
        return Err(io::ErrorKind::NotConnected.into());
    }
    let pid = u32::try_from(peer.pid).ok().filter(|pid| *pid != 0);
    Ok(PeerCredentials { pid, uid: peer.uid })
}

fn peer_ucred(fd: impl AsFd) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let fd = fd.as_fd();
    // SAFETY: the descriptor is open while it is borrowed; the kernel writes at most `len` bytes to
    // `peer`, which is that large.
    let rc = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    check(rc)?;
    Ok(peer)
}

/// Receives a packet without waiting, and the descriptors that its sender has passed along
/// (SCM_RIGHTS). Other control messages are dropped, and a descriptor for the sender's process
/// (SCM_PIDFD) is closed: any process that shares the socket can turn these messages on.
///
/// # Errors
/// The system's error; `WouldBlock` if no packet is waiting.
pub fn receive_passed(
    fd: impl AsFd,
    parts: &mut [IoSliceMut<'_>],
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut control = [const { MaybeUninit::<u64>::uninit() }; CONTROL_WORDS];
    // SAFETY: an all-zero msghdr is valid and refers to no memory.
    let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    header.msg_iov = parts.as_mut_ptr().cast();
    header.msg_iovlen = parts.len();
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = size_of_val(&control);
    let fd = fd.as_fd();
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the descriptor is open while it is borrowed; the parts have the layout of iovec, and
    // the kernel writes to them and to `control` within the lengths of the header.
    let count = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut header, flags) };
    let Ok(count) = usize::try_from(count) else { return Err(io::Error::last_os_error()) };
    let mut passed = Vec::new();
    // SAFETY: the header describes `control`, of which the kernel has written `msg_controllen`
    // bytes of control messages.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    while !next.is_null() {
        // SAFETY: `next` points to a control message within `control`.
        let message = unsafe { *next };
        let has_descriptors = message.cmsg_level == libc::SOL_SOCKET
            && [libc::SCM_RIGHTS, SCM_PIDFD].contains(&message.cmsg_type);
        if has_descriptors {
            // SAFETY: only computes a length.
            let head = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = message.cmsg_len.saturating_sub(head) / size_of::<RawFd>();
            for index in 0..count {
                // SAFETY: the message holds `count` descriptors, which need not be aligned. The
                // kernel has just opened each of them for this process.
                let fd = unsafe {
                    let data = libc::CMSG_DATA(next).cast::<RawFd>();
                    OwnedFd::from_raw_fd(data.add(index).read_unaligned())
                };
                if message.cmsg_type == libc::SCM_RIGHTS {
                    passed.push(fd);
                }
            }
        }
        // SAFETY: see above.
        next = unsafe { libc::CMSG_NXTHDR(&raw const header, next) };
    }
    Ok((count, passed))
}

/// Returns the number of bytes that a stream socket has received and that have not been read.
///
/// # Errors
/// The system's error.
pub fn unread(fd: impl AsFd) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the descriptor is open while it is borrowed; the kernel writes one int.
    let rc = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    check(rc)?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// Directions that the peer of a stream socket has closed, whether or not all its data has been
/// read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerEnd {
    /// None, as far as is known.
    Open,
    /// The peer sends nothing more, but may still read. A TCP peer that no longer exists also looks
    /// like this until something is sent to it.
    SendsNoMore,
    /// The peer neither sends nor reads anymore.
    Gone,
}

/// Checks the peer of a stream socket, without waiting or reading.
pub fn peer_end(fd: impl AsFd) -> PeerEnd {
    let fd = fd.as_fd().as_raw_fd();
    let mut poll = libc::pollfd { fd, events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one valid pollfd is passed, and the kernel writes to nothing else.
    let found = unsafe { libc::poll(&raw mut poll, 1, 0) };
    if found > 0 && poll.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0 {
        PeerEnd::Gone
    } else if found > 0 && poll.revents & libc::POLLRDHUP != 0 {
        PeerEnd::SendsNoMore
    } else {
        PeerEnd::Open
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn data_in_the_peers_kernel_is_acknowledged_unread() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stream.write_all(&[7; 1000]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while unacknowledged(&stream).unwrap() > 0 || unacknowledged_bytes(&stream).unwrap() > 0 {
            assert!(Instant::now() < deadline, "never acknowledged");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn unread_data_is_counted() {
        let (one, mut other) = UnixStream::pair().unwrap();
        assert_eq!(unread(&one).unwrap(), 0);
        other.write_all(&[7; 100]).unwrap();
        assert_eq!((unread(&one).unwrap(), unread(&other).unwrap()), (100, 0));
    }

    #[test]
    fn raw_socket_options_are_set_and_read() {
        let (one, _other) = UnixStream::pair().unwrap();
        let (level, name) = (libc::SOL_SOCKET, libc::SO_RCVLOWAT);
        set_option(&one, level, name, &7_i32.to_ne_bytes()).unwrap();
        let mut room = [0; 8];
        assert_eq!(get_option(&one, level, name, &mut room).unwrap(), (Some(0), 4));
        assert_eq!(room, [7_i32.to_ne_bytes(), [0; 4]].concat()[..]);
        assert!(get_option(&one, level, 9999, &mut room).is_err());
        assert!(set_option(&one, level, name, &[]).is_err());
    }

    fn packet_pair() -> (OwnedFd, OwnedFd) {
        let (one, other) =
            socket2::Socket::pair(socket2::Domain::UNIX, socket2::Type::SEQPACKET, None).unwrap();
        (one.into(), other.into())
    }

    /// Sends a packet with descriptors.
    fn pass(socket: &OwnedFd, fds: &[std::os::fd::BorrowedFd<'_>]) {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        let part = [io::IoSlice::new(b"packet")];
        sendmsg(socket, &part, &mut control, SendFlags::empty()).unwrap();
    }

    #[test]
    fn all_passed_descriptors_are_received() {
        let (ours, theirs) = packet_pair();
        let mut room = [0; 10];
        let mut receive = || receive_passed(&ours, &mut [IoSliceMut::new(&mut room)]);
        assert_eq!(receive().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        for count in [1, 2, 253] {
            pass(&theirs, &vec![theirs.as_fd(); count]);
            let (len, fds) = receive().unwrap();
            assert_eq!((len, fds.len()), (6, count));
            let flags = rustix::io::fcntl_getfd(&fds[count - 1]).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        }
        drop(theirs);
        assert_eq!(receive().unwrap().0, 0);
    }

    /// Returns the number of pidfds that this process has open.
    fn process_descriptors() -> usize {
        let entries = std::fs::read_dir("/proc/self/fd").unwrap();
        let links = entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        links.filter(|link| link.to_string_lossy().contains("pidfd")).count()
    }

    #[test]
    fn descriptors_of_the_senders_process_are_closed() {
        const PASSPIDFD: i32 = 76;
        let (ours, theirs) = packet_pair();
        for name in [libc::SO_PASSCRED, libc::SO_PASSSEC, PASSPIDFD] {
            let set = set_option(&ours, libc::SOL_SOCKET, name, &1_i32.to_ne_bytes());
            if name == PASSPIDFD && set.is_err() {
                crate::skip::skip("the kernel has no SO_PASSPIDFD");
                return;
            }
        }
        let before = process_descriptors();
        let mut room = [0; 10];
        for _ in 0..5 {
            pass(&theirs, &[theirs.as_fd()]);
            let (len, fds) = receive_passed(&ours, &mut [IoSliceMut::new(&mut room)]).unwrap();
            assert_eq!((len, fds.len()), (6, 1));
        }
        assert_eq!(process_descriptors(), before);
    }

    #[test]
    fn a_peer_may_lack_a_process_number_but_must_exist() {
        let (ours, theirs) = packet_pair();
        let uid = std::fs::metadata("/proc/self").unwrap().uid();
        let own = PeerCredentials { pid: Some(std::process::id()), uid };
        assert_eq!(peer_credentials(&ours).unwrap(), own);
        drop(theirs);
        assert_eq!(peer_credentials(&ours).unwrap(), own, "also after it is gone");
        let outside = credentials(libc::ucred { pid: 0, uid: 7, gid: 7 }).unwrap();
        assert_eq!(outside, PeerCredentials { pid: None, uid: 7 });
        let alone =
            socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::SEQPACKET, None).unwrap();
        let error = peer_credentials(&alone).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotConnected);
        assert_eq!(peer_pid(&alone).unwrap(), 0);
        assert!(peer_credentials(std::fs::File::open("/dev/null").unwrap()).is_err());
    }

    #[test]
    fn sockets_other_than_tcp_are_refused() {
        let (one, _other) = UnixStream::pair().unwrap();
        assert!(unacknowledged(&one).is_err());
    }

    #[test]
    fn a_closed_peer_is_detected_before_all_is_read() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&[7; 100]).unwrap();
        assert_eq!(peer_end(&ours), PeerEnd::Open);
        theirs.shutdown(Shutdown::Write).unwrap();
        assert_eq!(peer_end(&ours), PeerEnd::SendsNoMore);
        drop(theirs);
        assert_eq!(peer_end(&ours), PeerEnd::Gone);
    }

    #[test]
    fn a_closed_tcp_peer_sends_no_more() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (ours, _) = listener.accept().unwrap();
        theirs.write_all(&[7; 100]).unwrap();
        assert_eq!(peer_end(&ours), PeerEnd::Open);
        drop(theirs);
        let deadline = Instant::now() + Duration::from_secs(60);
        while peer_end(&ours) == PeerEnd::Open {
            assert!(Instant::now() < deadline, "its end is never seen");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
