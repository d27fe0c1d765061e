//! Chooses among the addresses of a portal by a TCP connect to each in turn, in the order that
//! attach uses.

use std::io;
use std::net::{IpAddr, SocketAddr};

use rtrs_core::fabric::with_scope;
use rtrs_core::settings::Scheme;
use rtrs_core::time::Duration;
use socket2::{Domain, Protocol, Socket, Type};

/// Address to use, and the preceding addresses that do not answer.
#[derive(Debug)]
pub(super) struct Choice {
    pub(super) remote: SocketAddr,
    pub(super) skipped: Vec<(SocketAddr, io::Error)>,
}

/// Connects over TCP from `source`, if given, and closes the connection.
///
/// # Errors
/// Returns the error of the bind or connect.
pub(super) fn connect(
    source: Option<IpAddr>,
    remote: SocketAddr,
    timeout: Duration,
) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(remote), Type::STREAM, Some(Protocol::TCP))?;
    if let Some(source) = source {
        socket.bind(&with_scope(source, remote).into())?;
    }
    socket.connect_timeout(&remote.into(), timeout)
}

/// Returns the first address that accepts TCP connections, or the first address if none does. A
/// sole address is not tried, and neither is RDMA, whose ports do not answer TCP. None if there is
/// no address.
pub(super) fn choose(
    scheme: Scheme,
    source: Option<IpAddr>,
    addresses: &[SocketAddr],
    timeout: Duration,
) -> Option<Choice> {
    let (first, others) = addresses.split_first()?;
    let unchanged = Choice { remote: *first, skipped: Vec::new() };
    if others.is_empty() || scheme == Scheme::Rdma {
        return Some(unchanged);
    }
    let mut skipped = Vec::new();
    for remote in addresses {
        match connect(source, *remote, timeout) {
            Ok(()) => return Some(Choice { remote: *remote, skipped }),
            Err(error) => skipped.push((*remote, error)),
        }
    }
    Some(unchanged)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn an_address_that_answers_is_chosen() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let open = listener.local_addr().unwrap();
        let closed = SocketAddr::from(([127, 0, 0, 2], open.port()));
        let choose = |addresses: &[SocketAddr]| {
            choose(Scheme::Tcp, None, addresses, Duration::from_secs(30))
        };

        let choice = choose(&[closed, open]).unwrap();
        assert_eq!(choice.remote, open);
        assert_eq!(choice.skipped.len(), 1);
        assert_eq!(choice.skipped[0].0, closed);
        let choice = choose(&[closed]).unwrap();
        assert_eq!((choice.remote, choice.skipped.len()), (closed, 0));
        let choice = choose(&[closed, closed]).unwrap();
        assert_eq!((choice.remote, choice.skipped.len()), (closed, 0));
        assert!(choose(&[]).is_none());
    }
}
