//! What the kernel knows about a socket's connection.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd};

use super::check;

/// Segments that were sent and that the peer's system has not acknowledged (`tcpi_unacked`). None:
/// whatever was sent has arrived there, read by its program or not.
///
/// # Errors
/// The system's error; ENOTSUP and the like for what is no TCP socket.
pub fn unacknowledged(fd: impl AsFd) -> io::Result<u32> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    let fd = fd.as_fd();
    // SAFETY: the descriptor is open as long as it is borrowed; the kernel writes at most `len`
    // bytes to `info`, which is that large.
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
    // SAFETY: all bytes are zero or written by the kernel, and any bytes make a `tcp_info`.
    Ok(unsafe { info.assume_init() }.tcpi_unacked)
}

/// Bytes that were sent, or wait to be, and that the peer's system has not acknowledged
/// (SIOCOUTQ). Of a connection that is lost it stays what it was.
///
/// # Errors
/// The system's error.
pub fn unacknowledged_bytes(fd: impl AsFd) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the descriptor is open as long as it is borrowed; the kernel writes one int.
    let rc = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    check(rc)?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// Sets an option of a socket, (level, name), to these bytes.
///
/// # Errors
/// The system's error.
pub fn set_option(fd: impl AsFd, (level, name): (i32, i32), value: &[u8]) -> io::Result<()> {
    let len = libc::socklen_t::try_from(value.len()).map_err(io::Error::other)?;
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open as long as it is borrowed; the kernel reads `len` bytes of
    // `value`, which is that long. No option that has a pointer in its value is safe to set so, and
    // none of those is used here: (SOL_RDS, GET_MR) and the like.
    let rc = unsafe { libc::setsockopt(fd, level, name, value.as_ptr().cast(), len) };
    check(rc)
}

/// Gets an option of a socket, (level, name). Returns what the call returned, which some options
/// use, and how many bytes there are; `None` if `room` is too short for them (ENOSPC).
///
/// # Errors
/// The system's error.
pub fn get_option(
    fd: impl AsFd,
    (level, name): (i32, i32),
    room: &mut [u8],
) -> io::Result<(Option<usize>, usize)> {
    let mut len = libc::socklen_t::try_from(room.len()).map_err(io::Error::other)?;
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open as long as it is borrowed; the kernel writes at most `len`
    // bytes to `room`, which is that long.
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

/// The process that listened on the unix socket that this one is connected to (SO_PEERCRED).
///
/// # Errors
/// The system's error.
pub fn peer_pid(fd: impl AsFd) -> io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let fd = fd.as_fd();
    // SAFETY: the descriptor is open as long as it is borrowed; the kernel writes at most `len`
    // bytes to `peer`, which is that large.
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
    u32::try_from(peer.pid).map_err(io::Error::other)
}

/// Bytes that have arrived at a stream socket and that nobody has read.
///
/// # Errors
/// The system's error.
pub fn unread(fd: impl AsFd) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the descriptor is open as long as it is borrowed; the kernel writes one int.
    let rc = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    check(rc)?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// What the peer of a stream socket has closed, whether or not all that it sent has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerEnd {
    /// Nothing that we know of.
    Open,
    /// It sends nothing more. It may still read. A TCP peer that is gone also looks like this until
    /// something is sent to it.
    SendsNoMore,
    /// It neither sends nor reads any more.
    Gone,
}

/// Looks at the peer of a stream socket, without waiting and without reading.
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
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn what_the_peers_system_has_is_acknowledged_though_nobody_reads_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stream.write_all(&[7; 1000]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while unacknowledged(&stream).unwrap() > 0 || unacknowledged_bytes(&stream).unwrap() > 0 {
            assert!(Instant::now() < deadline, "never acknowledged");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn what_nobody_has_read_is_counted() {
        let (one, mut other) = UnixStream::pair().unwrap();
        assert_eq!(unread(&one).unwrap(), 0);
        other.write_all(&[7; 100]).unwrap();
        assert_eq!((unread(&one).unwrap(), unread(&other).unwrap()), (100, 0));
    }

    #[test]
    fn options_are_bytes() {
        let (one, _other) = UnixStream::pair().unwrap();
        let option = (libc::SOL_SOCKET, libc::SO_RCVLOWAT);
        set_option(&one, option, &7_i32.to_ne_bytes()).unwrap();
        let mut room = [0; 8];
        assert_eq!(get_option(&one, option, &mut room).unwrap(), (Some(0), 4));
        assert_eq!(room, [7_i32.to_ne_bytes(), [0; 4]].concat()[..]);
        assert!(get_option(&one, (libc::SOL_SOCKET, 9999), &mut room).is_err());
        assert!(set_option(&one, option, &[]).is_err());
    }

    #[test]
    fn what_is_no_tcp_socket_is_refused() {
        let (one, _other) = UnixStream::pair().unwrap();
        assert!(unacknowledged(&one).is_err());
    }

    #[test]
    fn a_peer_that_is_gone_is_seen_before_all_is_read() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&[7; 100]).unwrap();
        assert_eq!(peer_end(&ours), PeerEnd::Open);
        theirs.shutdown(Shutdown::Write).unwrap();
        assert_eq!(peer_end(&ours), PeerEnd::SendsNoMore);
        drop(theirs);
        assert_eq!(peer_end(&ours), PeerEnd::Gone);
    }

    #[test]
    fn a_tcp_peer_that_is_gone_sends_no_more() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (ours, _) = listener.accept().unwrap();
        theirs.write_all(&[7; 100]).unwrap();
        assert_eq!(peer_end(&ours), PeerEnd::Open);
        drop(theirs);
        let deadline = Instant::now() + Duration::from_secs(20);
        while peer_end(&ours) == PeerEnd::Open {
            assert!(Instant::now() < deadline, "its end is never seen");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
