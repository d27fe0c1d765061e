//! Check whether a TCP address can be used for listening.

use std::io;
use std::net::SocketAddr;

use socket2::{Domain, Protocol, Socket, Type};

/// Binds a socket as a listener does and closes it again. Clients cannot connect in the meantime.
///
/// # Errors
/// The reason why the address cannot be used: `AddrInUse`, `AddrNotAvailable`, `PermissionDenied`.
pub fn check_tcp_address(address: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn an_address_with_a_listener_is_in_use() {
        // No other program uses this address, so the port stays free.
        let listener = TcpListener::bind("127.93.17.2:0").unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!(check_tcp_address(address).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        // A closed connection in TIME_WAIT does not prevent listening.
        let client = TcpStream::connect(address).unwrap();
        drop(listener.accept().unwrap());
        drop((listener, client));
        check_tcp_address(address).unwrap();
        check_tcp_address(address).unwrap();
    }
}
