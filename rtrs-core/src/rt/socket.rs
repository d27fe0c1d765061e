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
        while unacknowledged(&stream).unwrap() > 0 {
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
