//! Listening sockets that the service manager passed (socket activation), and the portals that use
//! them: those with the same address.

use std::io;

use rtrs_core::local::PassedSocket;
use rtrs_core::settings::Scheme;

use super::Target;
use crate::error::{Error, ErrorKind};

/// Whether a portal uses one of the sockets.
pub(super) fn has(passed: &[PassedSocket], target: &Target) -> bool {
    target.scheme != Scheme::Rdma && passed.iter().any(|socket| is_at(socket, target))
}

fn is_at(socket: &PassedSocket, target: &Target) -> bool {
    socket.address() == Some(target.address)
}

/// Portals for all TCP sockets, for a server without `listen`.
pub(super) fn targets(passed: &[PassedSocket], scheme: Scheme) -> Vec<Target> {
    let addresses = passed.iter().filter_map(PassedSocket::address);
    addresses.map(|address| Target { scheme, address, automatic: false }).collect()
}

/// Logs the sockets that no portal uses.
///
/// # Errors
/// Returns [`ErrorKind::Listen`] if a socket has the address of a portal that is only for RDMA.
pub(super) fn check(passed: &[PassedSocket], targets: &[Target]) -> Result<(), Error> {
    let is_used = |socket: &&PassedSocket| {
        targets.iter().any(|target| target.scheme != Scheme::Rdma && is_at(socket, target))
    };
    for socket in passed.iter().filter(|socket| !is_used(socket)) {
        if let Some(target) =
            targets.iter().find(|target| !target.automatic && is_at(socket, target))
        {
            return Err(Error::new(
                ErrorKind::Listen,
                format!(
                    "cannot listen on {target} with the socket {socket} of the service manager: \
                     RDMA listeners cannot be passed; remove its ListenStream= from the socket \
                     unit, or use tcp:// or tls:// in listen"
                ),
            ));
        }
        tracing::warn!(
            socket = socket.name,
            "connections to {socket} of the service manager are not served: listen has no tcp:// \
             or tls:// entry with exactly this address; add one, or remove the ListenStream= from \
             the socket unit"
        );
    }
    Ok(())
}

/// Hint for an address in use while there are passed sockets: one of the sockets may overlap with
/// it.
pub(super) fn hint(passed: &[PassedSocket], error: &io::Error) -> Option<String> {
    if error.kind() != io::ErrorKind::AddrInUse || passed.is_empty() {
        return None;
    }
    let all: Vec<String> = passed.iter().map(ToString::to_string).collect();
    Some(format!(
        "; the service manager passes {}; write the same address in listen and in ListenStream= \
         of the socket unit",
        all.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::daemon::portals::Portals;
    use crate::plan::Plan;
    use crate::settings::Settings;

    fn socket(name: &str, address: &str) -> PassedSocket {
        let socket = TcpListener::bind(address).unwrap().into();
        PassedSocket { name: name.into(), socket }
    }

    fn portals(listen: &str, passed: Vec<PassedSocket>) -> Result<Portals, Error> {
        let set = Settings::from_yaml(listen, "s.yaml").unwrap();
        Portals::new(&Plan::new(set).unwrap(), passed)
    }

    #[test]
    fn portals_use_the_sockets_with_their_addresses() {
        let (one, other) = (socket("one", "127.0.0.1:0"), socket("other", "127.0.0.1:0"));
        let [at, left] = [&one, &other].map(|socket| socket.address().unwrap());
        let listen = format!("listen: ['tcp://{at}', 'tcp://127.0.0.1:0']");
        let portals = portals(&listen, vec![one, other]).unwrap();
        assert_eq!(portals.activated(), [format!("tcp://{at}")]);
        assert_eq!(portals.targets.len(), 2, "{left} is not served");
        portals.check(&[]).unwrap();
    }

    #[test]
    fn a_server_without_listen_uses_all_tcp_sockets() {
        let (v4, v6) = (socket("a", "127.0.0.1:0"), socket("a", "[::1]:0"));
        let dir = std::env::temp_dir().join(format!("rtrs-passed-{}", std::process::id()));
        let unix = std::os::unix::net::UnixListener::bind(&dir).unwrap();
        let unix = PassedSocket { name: "u".into(), socket: unix.into() };
        let names = [&v4, &v6].map(|socket| format!("tcp://{}", socket.address().unwrap()));
        let portals = portals("", vec![v4, unix, v6]).unwrap();
        std::fs::remove_file(dir).unwrap();
        assert_eq!(portals.activated(), names);
        let default = |target: &Target| target.scheme == Scheme::Tcp && target.automatic;
        assert!(!portals.targets.iter().any(default), "{:?}", portals.targets);
    }

    #[test]
    fn a_socket_for_an_rdma_portal_is_refused() {
        let passed = [socket("r.socket", "127.0.0.1:0")];
        let address = passed[0].address().unwrap();
        let rdma = Target { scheme: Scheme::Rdma, address, automatic: false };
        let error = check(&passed, &[rdma]).unwrap_err().to_string();
        let said = format!("rdma://{address} with the socket {address} (\"r.socket\")");
        assert!(error.contains(&said), "{error}");
        assert!(error.contains("RDMA listeners cannot be passed"), "{error}");
        let tcp = Target { scheme: Scheme::Tcp, ..rdma };
        check(&passed, &[rdma, tcp]).unwrap();
        check(&passed, &[Target { automatic: true, ..rdma }]).unwrap();
    }

    #[test]
    fn an_address_that_overlaps_with_a_socket_is_explained() {
        let passed = socket("x", "127.0.0.1:0");
        let port = passed.address().unwrap().port();
        let portals = portals(&format!("listen: 'tcp://0.0.0.0:{port}'"), vec![passed]).unwrap();
        let error = portals.check(&[]).unwrap_err().to_string();
        let said = format!("the service manager passes 127.0.0.1:{port} (\"x\")");
        assert!(error.contains(&said), "{error}");
    }
}
