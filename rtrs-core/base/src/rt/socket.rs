//! State of a socket's connection in the kernel.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd};

use super::syscall::check;

/// Returns the number of segments that were sent and not acknowledged by the peer's system
/// (`tcpi_unacked`). 0 means that all sent data has arrived there, whether or not its program has
/// read it.
///
/// # Errors
/// The system's error; ENOTSUP and similar ones for anything but a TCP socket.
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
    // SAFETY: all bytes are zero or written by the kernel, and any bytes make a `tcp_info`.
    Ok(unsafe { info.assume_init() }.tcpi_unacked)
}

/// Returns the number of bytes that were sent, or are waiting to be, and are not acknowledged by
/// the peer's system (SIOCOUTQ). Does not change after the connection is lost.
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

/// Returns true if the peer has closed the connection. A peer that has only ended its direction may
/// still wait for a reply.
pub fn is_hung_up(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    let mut entry = libc::pollfd { fd: fd.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: the descriptor is open while it is borrowed; the kernel reads and writes one entry,
    // and does not wait.
    let ready = unsafe { libc::poll(&raw mut entry, 1, 0) };
    ready > 0 && entry.revents & libc::POLLHUP != 0
}

/// Sets an option of a socket to these bytes, as setsockopt(2) does.
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

/// Gets an option of a socket, as getsockopt(2) does. Returns the result of the call, which some
/// options use, and the number of bytes; `None` if `room` is too short for them (ENOSPC).
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

/// Returns the process that listened on the Unix socket to which this one is connected
/// (SO_PEERCRED).
///
/// # Errors
/// The system's error.
pub fn peer_pid(fd: impl AsFd) -> io::Result<u32> {
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
    u32::try_from(peer.pid).map_err(io::Error::other)
}

/// Returns the number of received bytes of a stream socket that have not been read.
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
