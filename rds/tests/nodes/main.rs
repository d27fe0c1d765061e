//! Tests of nodes on loopback, with real connections: messages of all sizes, limits, losses, and
//! peers that violate the protocol.
#![forbid(unsafe_code)]

mod hostile;
mod sockets;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use rds::node::{NodeOptions, NodeReport};
use rds::proto::Tunable;
use rds::socket::{Node, RdsSocket};

/// Timeout of any step on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Returns a loopback address by its last byte; the smaller address connects.
fn address(last: u8) -> IpAddr {
    Ipv4Addr::new(127, 0, 0, last).into()
}

/// Returns a TCP port that was free just now, for all nodes of a test.
fn free_port() -> u16 {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    listener.local_addr().unwrap().port()
}

fn options(last: u8, port: u16) -> NodeOptions {
    let mut options = NodeOptions::new(address(last));
    (options.listen_port, options.peer_port) = (port, port);
    options
}

/// Starts nodes at these addresses, which can reach each other.
fn nodes<const N: usize>(lasts: [u8; N]) -> [Node; N] {
    let port = free_port();
    lasts.map(|last| Node::start(options(last, port)).unwrap())
}

fn bind(node: &Node, port: u16) -> RdsSocket {
    let socket = RdsSocket::bind(node, port).unwrap();
    socket.set_send_timeout(Some(LIMIT)).unwrap();
    socket.set_receive_timeout(Some(LIMIT)).unwrap();
    socket
}

fn to(socket: &RdsSocket) -> SocketAddr {
    SocketAddr::new(socket.node().address(), socket.port())
}

/// Waits until `check` holds.
fn wait_for(what: &str, mut check: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < LIMIT, "timed out waiting for: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the state of a node. Repeats the report, since a busy node may not answer in time.
fn report_of(node: &Node) -> NodeReport {
    let begun = Instant::now();
    loop {
        if let Some(report) = node.handle().unwrap().report() {
            return report;
        }
        assert!(begun.elapsed() < LIMIT, "the node does not answer");
    }
}

/// Returns a counter of a node.
fn counter(node: &Node, name: &str) -> u64 {
    report_of(node).counters[name]
}
