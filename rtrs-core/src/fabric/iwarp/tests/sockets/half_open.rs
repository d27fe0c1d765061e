//! Tests of the limits on connections that send no request: their number, their lifetime, and the
//! choice of the one to close.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};

use socket2::{Domain, Protocol, Socket, Type};

use super::{BOUND, Node, request};
use crate::fabric::iwarp::IwarpOptions;
use crate::fabric::iwarp::mpa::StartFrame;
use crate::fabric::{Fabric, Listener, PrivateData};
use crate::time::Duration;

#[test]
fn half_open_connections_are_bounded_in_number() {
    // No timeout closes them, however slow the test is.
    let options = IwarpOptions {
        half_open_max: 8,
        startup_timeout: Duration::from_secs(600),
        ..IwarpOptions::default()
    };
    let mut server = Node::new(options);
    let address = server.fabric.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let mut idle: Vec<TcpStream> = Vec::new();
    for _ in 0..100 {
        idle.push(TcpStream::connect(address).unwrap());
        for _ in 0..4 {
            assert!(server.turn().is_none());
        }
        assert!(server.fabric.half_open() <= 8);
    }
    let end = server.now() + Duration::from_secs(3);
    while server.fabric.half_open() < 8 && server.now() < end {
        server.turn();
    }
    // The oldest was closed; the youngest is still open and may send a request.
    let mut byte = [0];
    idle[0].set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    assert_eq!(idle[0].read(&mut byte).unwrap_or(0), 0);
    let ask = StartFrame::request(true, false, PrivateData::new(b"late")).encode();
    idle[99].write_all(&ask[..7]).unwrap();
    server.turn();
    idle[99].write_all(&ask[7..]).unwrap();
    let asked = request(server.wait());
    assert_eq!(asked.private_data.as_bytes(), b"late");
    server.fabric.stop_listening();
    for _ in 0..10 {
        server.turn();
    }
    assert_eq!(server.ring.running(), 0);
}

#[test]
fn half_open_connections_are_bounded_in_time() {
    let options =
        IwarpOptions { startup_timeout: Duration::from_millis(300), ..IwarpOptions::default() };
    let mut server = Node::new(options);
    let address = server.fabric.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let _idle = TcpStream::connect(address).unwrap();
    let end = server.now() + BOUND;
    // The turn that accepts the connection does not close it.
    while server.fabric.half_open() == 0 {
        assert!(server.now() < end, "the connection is not accepted");
        assert!(server.turn().is_none());
    }
    while server.fabric.half_open() > 0 {
        assert!(server.now() < end, "the request timer did not fire");
        assert!(server.turn().is_none());
        let at = server.fabric.deadline().map_or(end, |at| at.min(end));
        server.ring.turn_or_sleep(Some(at.since(server.now()))).unwrap();
    }
    server.fabric.stop_listening();
    for _ in 0..10 {
        server.turn();
    }
    assert_eq!(server.ring.running(), 0);
}

/// Opens a connection from this loopback address that sends nothing yet.
fn idle_from(server: &mut Node, address: SocketAddr, source: [u8; 4]) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).unwrap();
    socket.bind(&SocketAddr::new(IpAddr::from(source), 0).into()).unwrap();
    socket.connect(&address.into()).unwrap();
    for _ in 0..4 {
        assert!(server.turn().is_none());
    }
    socket.into()
}

/// Sends a request and checks that the server reports it.
fn asks(server: &mut Node, stream: &mut TcpStream, data: &[u8]) {
    let ask = StartFrame::request(true, false, PrivateData::new(data)).encode();
    stream.write_all(&ask).unwrap();
    assert_eq!(request(server.wait()).private_data.as_bytes(), data);
}

/// Fills the table of half-open connections from one address, then from many.
#[test]
fn half_open_connections_evict_others_from_their_source() {
    let options = IwarpOptions { half_open_max: 8, ..IwarpOptions::default() };
    let mut server = Node::new(options);
    let address = server.fabric.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let mut single = idle_from(&mut server, address, [127, 0, 0, 1]);
    let crowd = |server: &mut Node, third| -> Vec<TcpStream> {
        (0..100).map(|n| idle_from(server, address, [127, 0, third, n])).collect()
    };
    let flood: Vec<TcpStream> =
        (0..100).map(|_| idle_from(&mut server, address, [127, 0, 1, 1])).collect();
    assert!(server.fabric.half_open() <= 8);
    asks(&mut server, &mut single, b"the only one of its source");
    drop(flood);
    // With one connection from each of many sources, a known source is preferred, before and after.
    let known = IpAddr::from([127, 0, 0, 9]);
    server.fabric.know_peer(known, true);
    let mut before = idle_from(&mut server, address, [127, 0, 0, 9]);
    let unknown = crowd(&mut server, 2);
    asks(&mut server, &mut before, b"of a known source");
    let mut after = idle_from(&mut server, address, [127, 0, 0, 9]);
    asks(&mut server, &mut after, b"of a known source again");
    assert!(server.fabric.crowded_out() >= 180, "{}", server.fabric.crowded_out());
    server.fabric.know_peer(known, false);
    let mut forgotten = idle_from(&mut server, address, [127, 0, 0, 9]);
    let more = crowd(&mut server, 3);
    forgotten.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    assert_eq!(forgotten.read(&mut [0]).unwrap_or(0), 0, "it is unknown now");
    drop((unknown, more));
    server.fabric.stop_listening();
    for _ in 0..10 {
        server.turn();
    }
    assert_eq!(server.ring.running(), 0);
}
