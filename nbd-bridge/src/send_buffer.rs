//! Send buffer size of unix sockets: room for a batch of requests or replies, so that the sender
//! need not wait for its peer to receive them one by one.

use std::io;
use std::os::fd::AsFd;

use rustix::net::sockopt::{set_socket_send_buffer_size, set_socket_send_buffer_size_force};

/// Send buffer size in bytes.
pub(crate) const ROOM: usize = 4 << 20;

/// Enlarges the send buffer of a socket to `bytes`. With CAP_NET_ADMIN, the system's limit
/// (net.core.wmem_max, 208 KiB by default) does not apply; otherwise it caps the size.
///
/// # Errors
/// The system's error; the buffer keeps its size.
pub(crate) fn enlarge(socket: impl AsFd, bytes: usize) -> io::Result<()> {
    set_socket_send_buffer_size_force(&socket, bytes)
        .or_else(|_| set_socket_send_buffer_size(&socket, bytes))
        .map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::net::sockopt::socket_send_buffer_size;

    use super::*;

    #[test]
    fn the_send_buffer_is_as_large_as_permitted() {
        let bound = std::fs::read_to_string("/proc/sys/net/core/wmem_max").unwrap();
        let bound: usize = bound.trim().parse().unwrap();
        let (socket, peer) = UnixStream::pair().unwrap();
        enlarge(&socket, bound + 4096).unwrap();
        let forced = set_socket_send_buffer_size_force(&peer, bound + 4096).is_ok();
        // The kernel doubles the value to account for its overhead.
        let expected = if forced { bound + 4096 } else { bound };
        assert_eq!(socket_send_buffer_size(&socket).unwrap(), 2 * expected);
    }
}
