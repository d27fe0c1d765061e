//! Tests of peers that send raw bytes to a daemon.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};

use rds::wire::{CONG_BITMAP, CongestionMap, Header, MAP_LEN};
use rtrs_core::rt::unacknowledged_bytes;
use rtrs_tests::wait_for;
use socket2::{Domain, Socket, Type};

use crate::stand::{LIMIT, Stand, address};

/// Connects node 127.0.0.1 to node 127.0.0.2, and sends a map.
fn connect(stand: &Stand) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::new(address(1), 0).into()).unwrap();
    socket.connect(&SocketAddr::new(address(2), stand.port()).into()).unwrap();
    let mut stream = TcpStream::from(socket);
    let header = Header { flags: CONG_BITMAP, len: MAP_LEN as u32, ..Header::default() };
    send(&mut stream, header, CongestionMap::default().bytes());
    stream
}

/// Sends a message and waits until the other system has acknowledged it.
fn send(stream: &mut TcpStream, header: Header, payload: &[u8]) {
    let len = u32::try_from(payload.len()).unwrap();
    stream.write_all(&[&Header { len, ..header }.encode(), payload].concat()).unwrap();
    wait_for("an acknowledgment", LIMIT, || {
        (unacknowledged_bytes(&*stream).unwrap() == 0).then_some(())
    });
}

fn data(sequence: u64) -> Header {
    Header { sequence, sport: 9, dport: 4000, ..Header::default() }
}

/// The system of a stopped daemon accepts connections and acknowledges the data on them. A peer
/// does not send that data again, so the daemon has to read everything when it resumes.
#[test]
fn data_received_while_a_daemon_is_stopped_is_read() {
    let mut stand = Stand::new(2);
    stand.stop(1);
    let mut receiver = stand.begin(&["recv", "4000", "-I", "127.0.0.2", "-n", "4"]);
    wait_for("the receiver", LIMIT, || {
        let info = stand.rds(&["info", "-k", "-I", "127.0.0.2"]).ok();
        info.stdout.contains(" 4000 ").then_some(())
    });
    let mut first = connect(&stand);
    send(&mut first, data(1), b"one");
    receiver.wait_lines("one", 1, LIMIT);
    stand.signal(2, "STOP");
    // Each time, the peer sees the end of its connection, but the daemon does not.
    let mut streams = vec![first];
    for (sequence, text) in [(2, "two"), (3, "three"), (4, "four")] {
        let mut stream = connect(&stand);
        send(&mut stream, data(sequence), text.as_bytes());
        streams.push(stream);
    }
    stand.signal(2, "CONT");
    assert_eq!(receiver.wait(LIMIT).ok().stdout, "one\ntwo\nthree\nfour\n");
}
