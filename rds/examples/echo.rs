//! Two nodes in one process, each with a socket, exchanging a message and its answer.
//!
//! `cargo run -p rds --example echo`. A node that talks to other hosts binds an address of this
//! host, such as `Node::bind("10.0.0.1".parse()?)`; `Node::open` finds a node run by `rds node`.

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use rds::node::NodeOptions;
use rds::socket::{Node, RdsSocket};

fn main() -> Result<(), Box<dyn Error>> {
    // Not the TCP port of RDS, which a kernel with rds_tcp occupies.
    let start = |address: IpAddr| {
        let ports = (26_385, 26_385);
        let options = NodeOptions::new(address);
        Node::start(NodeOptions { listen_port: ports.0, peer_port: ports.1, ..options })
    };
    let (near, far) = (Ipv4Addr::new(127, 0, 0, 1), Ipv4Addr::new(127, 0, 0, 2));
    let (node, peer) = (start(near.into())?, start(far.into())?);

    let server = RdsSocket::bind(&peer, 4000)?;
    let echo = std::thread::spawn(move || -> Result<(), rds::socket::Error> {
        let mut buffer = vec![0; 1 << 20];
        let (len, from) = server.recv_from(&mut buffer)?;
        server.send_to(&buffer[..len], from)
    });

    let socket = RdsSocket::bind(&node, 0)?;
    socket.set_receive_timeout(Some(Duration::from_secs(10)))?;
    socket.send_to(b"hello", SocketAddr::new(far.into(), 4000))?;
    let mut buffer = [0; 64];
    let (len, from) = socket.recv_from(&mut buffer)?;
    println!("{} from {from}", String::from_utf8_lossy(&buffer[..len]));
    echo.join().map_err(|_| "the server panicked")??;
    Ok(())
}
