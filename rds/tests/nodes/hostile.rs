//! Tests of peers that violate the protocol: their connection is closed or their message is
//! dropped, without affecting other peers.

use std::io::{Read, Write};
use std::net::TcpStream;

use rds::wire::{
    ACK_REQUIRED, CONG_BITMAP, CongestionMap, Header, PING_PORT, PROBE_PORT, RETRANSMITTED,
};
use socket2::{Domain, Socket, Type};

use super::*;

/// A node at 127.0.0.99, to which lower addresses connect, with a socket on port 4000, and a
/// well-behaved peer with a socket on port 3000.
struct Scene {
    port: u16,
    node: Node,
    reader: RdsSocket,
    good: RdsSocket,
}

impl Scene {
    fn new(change: impl FnOnce(&mut NodeOptions)) -> Self {
        Self::at(address(99), change)
    }

    fn at(own: IpAddr, change: impl FnOnce(&mut NodeOptions)) -> Self {
        let port = free_port();
        let mut own = NodeOptions::new(own);
        (own.listen_port, own.peer_port) = (port, port);
        change(&mut own);
        let node = Node::start(own).unwrap();
        let reader = bind(&node, 4000);
        let peer = Node::start(options(98, port)).unwrap();
        let good = bind(&peer, 3000);
        Self { port, node, reader, good }
    }

    /// Connects from the loopback address that ends with this number.
    fn connect(&self, last: u8) -> TcpStream {
        self.try_connect(address(last)).unwrap()
    }

    fn try_connect(&self, from: IpAddr) -> std::io::Result<TcpStream> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.bind(&SocketAddr::new(from, 0).into())?;
        socket.connect(&SocketAddr::new(self.node.address(), self.port).into())?;
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(LIMIT))?;
        Ok(stream)
    }

    /// Checks that a message from the well-behaved peer arrives.
    fn works(&self) {
        self.good.send_to(b"good", to(&self.reader)).unwrap();
        let mut buffer = [0; 100];
        let (len, from) = self.reader.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..len], from), (&b"good"[..], to(&self.good)));
    }
}

fn message(header: Header, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).unwrap();
    [&Header { len, ..header }.encode(), payload].concat()
}

fn data(sequence: u64, dport: u16) -> Header {
    Header { sequence, sport: 9, dport, ..Header::default() }
}

/// Reads until the other end closes the connection.
fn read_to_end(stream: &mut TcpStream) {
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
            Err(error) => panic!("the connection is kept: {error}"),
        }
    }
}

#[test]
fn impossible_lengths_close_the_connection() {
    let scene = Scene::new(|_| {});
    for header in [
        Header { len: u32::MAX, ..data(1, 4000) },
        Header { len: (1 << 20) + 1, ..data(1, 4000) },
        Header { len: 8191, flags: CONG_BITMAP, ..Header::default() },
        Header { len: 0, flags: CONG_BITMAP, ..Header::default() },
    ] {
        let mut stream = scene.connect(1);
        stream.write_all(&header.encode()).unwrap();
        read_to_end(&mut stream);
        scene.works();
    }
    assert_eq!(counter(&scene.node, "recv_bad_stream"), 4);
}

#[test]
fn only_messages_for_unknown_ports_are_dropped() {
    let scene = Scene::new(|_| {});
    let mut stream = scene.connect(1);
    let mut bytes = Vec::new();
    bytes.extend(message(Header::default(), b""));
    // Unbound ports, and ports that cannot be bound.
    for (sequence, port) in (1..).zip([4001, 1, 65535]) {
        bytes.extend(message(data(sequence, port), &[7; 70_000]));
    }
    // Unknown extension headers.
    let extensions = [99; 16];
    bytes.extend(message(Header { extensions, ..data(4, 4000) }, b"known"));
    stream.write_all(&bytes).unwrap();
    let mut buffer = [0; 100];
    let (len, from) = scene.reader.recv_from(&mut buffer).unwrap();
    assert_eq!((&buffer[..len], from), (&b"known"[..], SocketAddr::new(address(1), 9)));
    scene.works();
    assert_eq!(counter(&scene.node, "recv_drop_no_sock"), 3);
}

#[test]
fn a_stream_is_accepted_byte_by_byte() {
    let scene = Scene::new(|_| {});
    let mut stream = scene.connect(1);
    stream.set_nodelay(true).unwrap();
    let map = CongestionMap::default();
    let map = message(Header { flags: CONG_BITMAP, ..Header::default() }, map.bytes());
    let messages = [message(data(1, 4000), b"one"), message(data(2, 4000), b"two")];
    for byte in [map, messages.concat()].concat() {
        stream.write_all(&[byte]).unwrap();
    }
    let mut buffer = [0; 100];
    for expected in [b"one", b"two"] {
        let (len, _) = scene.reader.recv_from(&mut buffer).unwrap();
        assert_eq!(&buffer[..len], expected);
    }
    scene.works();
}

#[test]
fn ping_floods_are_cheap() {
    let scene = Scene::new(|_| {});
    let mut stream = scene.connect(1);
    let pings: Vec<u8> = (1..20_000).flat_map(|seq| message(data(seq, 0), b"")).collect();
    // The answers are not read.
    stream.write_all(&pings).unwrap();
    stream.write_all(&message(Header { sport: PROBE_PORT, ..data(20_000, 0) }, b"")).unwrap();
    scene.works();
    wait_for("all to be read", || counter(&scene.node, "recv_ping") >= 20_000);
    let report = report_of(&scene.node);
    let flooder = report.peers.iter().find(|peer| peer.address == address(1)).unwrap();
    assert!(flooder.queued_bytes <= 65 * 200, "{flooder:?}");
    assert!(report.counters["send_pong_dropped"] > 0);
}

#[test]
fn peers_that_ignore_congestion_fill_only_their_share() {
    let scene = Scene::new(|options| {
        let config = &mut options.config;
        (config.port_memory, config.peer_memory) = (1 << 20, 2 << 20);
        config.memory = 3 << 20;
    });
    let full = bind(&scene.node, 4001);
    let mut stream = scene.connect(1);
    for sequence in 1..200 {
        stream.write_all(&message(data(sequence, 4001), &[7; 50_000])).unwrap();
    }
    wait_for("the limit", || counter(&scene.node, "recv_drop_no_memory") > 100);
    let report = report_of(&scene.node);
    assert!(report.unread_bytes <= 1 << 20, "{}", report.unread_bytes);
    // Other peers have room, on their connections and on their ports.
    scene.works();
    stream.write_all(&message(data(200, 4000), b"other port")).unwrap();
    let mut buffer = vec![0; 60_000];
    let (len, _) = scene.reader.recv_from(&mut buffer).unwrap();
    assert_eq!(&buffer[..len], b"other port");
    // The messages that were not dropped are complete.
    for _ in 0..10 {
        let (len, _) = full.recv_from(&mut buffer).unwrap();
        assert!(len == 50_000 && buffer[..len].iter().all(|byte| *byte == 7));
    }
}

#[test]
fn unfinished_long_messages_are_bounded() {
    let scene = Scene::new(|options| options.config.memory = 4 << 20);
    let begin = message(data(1, 4000), &[7; 600_000]);
    let streams: Vec<TcpStream> = (1..40)
        .map(|last| {
            let mut stream = scene.connect(last);
            stream.write_all(&begin[..590_000]).unwrap();
            stream
        })
        .collect();
    wait_for("all to be read", || report_of(&scene.node).peers.len() >= 39);
    let report = report_of(&scene.node);
    assert!(report.unread_bytes <= 4 << 20, "{}", report.unread_bytes);
    drop(streams);
    wait_for("their memory to be free", || report_of(&scene.node).unread_bytes < 100_000);
    scene.works();
}

/// Sends to and from unbound ports, and sets flags of other transports.
#[test]
fn forged_ports_and_flags_affect_only_the_named_port() {
    let scene = Scene::new(|_| {});
    let mut stream = scene.connect(1);
    let mut bytes = Vec::new();
    let ports = [(0, 0), (0, 1), (1, 1), (1, 0), (9, 1), (65535, 65535)];
    for (sequence, (sport, dport)) in (1..).zip(ports) {
        let header = Header { sequence, sport, dport, ..Header::default() };
        bytes.extend(message(header, &[7; 100]));
    }
    for (sequence, sport, flags) in [
        (10, PING_PORT, 0),
        (11, PROBE_PORT, ACK_REQUIRED),
        // Not a map, since the map flag is not the only flag.
        (12, 9, CONG_BITMAP | RETRANSMITTED),
    ] {
        let header = Header { sequence, sport, dport: 4000, flags, ..Header::default() };
        bytes.extend(message(header, b"data"));
    }
    stream.write_all(&bytes).unwrap();
    let mut buffer = [0; 100];
    for sport in [PING_PORT, PROBE_PORT, 9] {
        let (len, from) = scene.reader.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..len], from), (&b"data"[..], SocketAddr::new(address(1), sport)));
    }
    scene.works();
    assert_eq!(counter(&scene.node, "recv_bad_stream"), 0);
}

/// Sends sequence numbers at the ends of their range, repeated and decreasing, which must affect
/// only their own connection.
#[test]
fn forged_sequence_numbers_harm_only_their_sender() {
    let scene = Scene::new(|_| {});
    let mut stream = scene.connect(1);
    let mut buffer = [0; 100];
    let mut arrives = |stream: &mut TcpStream, header: Header, text: &[u8]| {
        stream.write_all(&message(header, text)).unwrap();
        let (len, from) = scene.reader.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..len], from), (text, SocketAddr::new(address(1), 9)));
        scene.works();
    };
    arrives(&mut stream, data(u64::MAX - 1, 4000), b"last but one");
    let repeat = Header { flags: RETRANSMITTED, ..data(7, 4000) };
    stream.write_all(&message(repeat, b"old")).unwrap();
    arrives(&mut stream, data(u64::MAX, 4000), b"last");
    arrives(&mut stream, data(0, 4000), b"none");
    arrives(&mut stream, Header { flags: RETRANSMITTED, ..data(7, 4000) }, b"new");
    assert_eq!(counter(&scene.node, "recv_drop_old_seq"), 1);
}

#[test]
fn endless_maps_cost_only_time() {
    let scene = Scene::new(|_| {});
    let mut stream = scene.connect(1);
    for number in 0..3000_u16 {
        let mut map = CongestionMap::default();
        map.set(number, true);
        let header = Header { flags: CONG_BITMAP, ..Header::default() };
        stream.write_all(&message(header, map.bytes())).unwrap();
    }
    scene.works();
    wait_for("all to be read", || counter(&scene.node, "cong_update_received") >= 3000);
    let report = report_of(&scene.node);
    let flooder = report.peers.iter().find(|peer| peer.address == address(1)).unwrap();
    let congested: Vec<_> = flooder.congested_ports.iter().map(|port| port.port).collect();
    assert_eq!(congested, [2999]);
    assert!(report.unread_bytes < 10_000, "{}", report.unread_bytes);
}

/// A peer that does not read delays only those who send to it, as a slow network would.
#[test]
fn a_peer_that_never_reads_fills_only_its_senders_buffer() {
    let scene = Scene::new(|_| {});
    let mut stream = scene.connect(1);
    stream.write_all(&message(Header::default(), b"")).unwrap();
    let silent = SocketAddr::new(address(1), 9);
    let sender = bind(&scene.node, 4001);
    let begun = Instant::now();
    // More than both systems' buffers hold.
    let mut bytes = 0;
    loop {
        match sender.try_send_to(&[7; 50_000], silent) {
            Ok(()) => bytes += 50_000,
            Err(error) => {
                assert!(error.is_temporary() && !error.is_congested(), "{error}");
                let report = report_of(&scene.node);
                let peer = report.peers.iter().find(|peer| peer.address == address(1)).unwrap();
                // The queue is full, rather than not yet processed.
                if peer.queued_bytes >= 100_000 && begun.elapsed() > Duration::from_millis(500) {
                    assert!(peer.queued_bytes <= 400_000, "{}", peer.queued_bytes);
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        assert!(begun.elapsed() < LIMIT, "the buffers hold more than {bytes} bytes");
    }
    scene.works();
    let other = bind(&scene.node, 4002);
    other.send_to(b"passes", to(&scene.good)).unwrap();
    assert_eq!(scene.good.recv_from(&mut [0; 10]).unwrap().0, 6);
}

#[test]
fn a_peer_cannot_impersonate_the_node() {
    let scene = Scene::new(|_| {});
    let mut stream = scene.connect(99);
    // The connection may already be closed.
    let _ = stream.write_all(&message(data(1, 4000), b"forged"));
    read_to_end(&mut stream);
    scene.works();
}

/// Invalid packets close the connection of the user that sent them.
#[test]
fn malformed_requests_disconnect_only_their_sender() {
    use rds::socket::Connect;
    use rustix::net::{RecvFlags, SendFlags, recv, send};
    let scene = Scene::new(|_| {});
    let way = scene.node.handle().unwrap().way();
    for bytes in [&[0; 1][..], &[0; 32], &[255; 32], &[3; 100], &[1, 1, 0, 0], &[7; 60_000]] {
        let fd = way.connect().unwrap();
        send(&fd, bytes, SendFlags::NOSIGNAL).unwrap();
        let mut buffer = [0; 100];
        let count = recv(&fd, &mut buffer[..], RecvFlags::empty()).map_or(0, |(_, count)| count);
        assert_eq!(count, 0, "{} bytes are answered", bytes.len());
        scene.works();
    }
}

/// Opens ten thousand connections from different addresses; none sends anything.
#[test]
fn half_open_connections_only_evict_each_other() {
    let far = Ipv4Addr::new(127, 9, 0, 1).into();
    let scene = Scene::at(far, |options| options.config.peers_max = 64);
    scene.works();
    let mut kept = std::collections::VecDeque::new();
    for number in 0..10_000_u32 {
        let [_, _, high, low] = (number + 1).to_be_bytes();
        let stream = scene.try_connect(Ipv4Addr::new(127, 1, high, low).into()).unwrap();
        kept.push_back(stream);
        if kept.len() > 200 {
            kept.pop_front();
        }
    }
    scene.works();
    let report = report_of(&scene.node);
    assert!(report.peers.len() <= 64, "{}", report.peers.len());
    // The node may have accepted only connections that were already closed.
    wait_for("the last ones to crowd each other out", || {
        counter(&scene.node, "tcp_crowded_out") > 0
    });
    let resets = counter(scene.good.node(), "conn_reset");
    assert_eq!(resets, 0, "the good peer keeps its connection");
}
