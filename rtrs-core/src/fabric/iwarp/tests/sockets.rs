//! Tests of two fabrics, or of a fabric and a scripted peer, on real loopback sockets.

mod half_open;
mod secure;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use socket2::{Domain, Socket, Type};

use super::golden::frame;
use super::hex;
use crate::fabric::iwarp::ddp;
use crate::fabric::iwarp::mpa::{Enhanced, StartFrame};
use crate::fabric::iwarp::{IwarpFabric, IwarpOptions, IwarpShared};
use crate::fabric::{
    Access, CloseReason, ConnRequest, ConnectFailure, ConnectParams, Fabric, FabricError,
    FabricEvent, Listener, MemoryRegistration, PdUse, PrivateData, ProtectionDomain, QpLimits,
    RemoteMem, Sge, SgeList, WcOp, WcStatus, WorkCompletion, WorkRequest, WrOp,
};
use crate::ids::QpNum;
use crate::mem::Region;
use crate::rt::{Clock, Ring};
use crate::time::{Duration, Instant};

const LIMITS: QpLimits = QpLimits { send_max: 128, recv_max: 128 };
const BOUND: Duration = Duration::from_secs(60);

/// A shard: ring, fabric, memory.
struct Node {
    ring: Rc<Ring>,
    fabric: IwarpFabric,
    pd: Arc<dyn ProtectionDomain>,
    mr: Arc<dyn MemoryRegistration>,
}

/// Use of a protection domain; any will do, since this provider has no devices.
const ANY: PdUse<'_> =
    PdUse::Connect { local: None, remote: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0) };

impl Node {
    fn new(options: IwarpOptions) -> Self {
        let ring = Ring::new(256).unwrap();
        let mut fabric = IwarpFabric::new(&ring, IwarpShared::new(), options);
        let pd = fabric.alloc_pd(ANY).unwrap();
        let region = Region::new(8 << 20).unwrap();
        let access = Access { local_write: true, remote_write: true, remote_read: true };
        let mr = pd.register(&region, access).unwrap();
        Self { ring, fabric, pd, mr }
    }

    fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { slice: self.mr.region().slice(offset, len).unwrap(), lkey: self.mr.lkey() }
    }

    fn remote(&self, offset: usize) -> RemoteMem {
        RemoteMem { addr: self.mr.base() + offset as u64, rkey: self.mr.rkey() }
    }

    fn now(&self) -> Instant {
        Clock.now()
    }

    /// Runs one turn without waiting.
    fn turn(&mut self) -> Option<FabricEvent> {
        self.fabric.flush(Clock.now());
        self.ring.turn().unwrap();
        self.fabric.poll(Clock.now());
        self.fabric.next_event()
    }

    /// Waits for the next event, sleeping in between.
    fn wait(&mut self) -> FabricEvent {
        let end = Clock.now() + BOUND;
        loop {
            if let Some(event) = self.turn() {
                return event;
            }
            assert!(Clock.now() < end, "no event within the bound");
            let at = self.fabric.deadline().map_or(end, |at| at.min(end));
            self.ring.turn_or_sleep(Some(at.since(Clock.now()))).unwrap();
        }
    }

    fn connect(&mut self, remote: SocketAddr, timeout: Duration) -> QpNum {
        let params = ConnectParams {
            local: None,
            remote,
            private_data: PrivateData::new(b"please"),
            limits: LIMITS,
            timeout,
            peer_name: None,
        };
        self.fabric.connect(Clock.now(), &self.pd, &params).unwrap()
    }

    fn completion(&mut self) -> WorkCompletion {
        match self.wait() {
            FabricEvent::Completion(wc) => wc,
            event => panic!("{event:?}"),
        }
    }

    fn closed(&mut self) -> CloseReason {
        loop {
            match self.wait() {
                FabricEvent::Completion(wc) => assert_eq!(wc.status, WcStatus::Flushed),
                FabricEvent::Closed { reason, .. } => return reason,
                event => panic!("{event:?}"),
            }
        }
    }

    fn send(&mut self, qp: QpNum, wr_id: u64, op: WrOp, sges: SgeList) {
        let wr = WorkRequest { wr_id, op, sges, signaled: true };
        self.fabric.post_send(qp, wr).unwrap();
    }
}

/// Returns the first event of either node; both take turns on this thread.
fn either(left: &mut Node, right: &mut Node) -> (bool, FabricEvent) {
    let end = Clock.now() + BOUND;
    loop {
        if let Some(event) = left.turn() {
            return (true, event);
        }
        if let Some(event) = right.turn() {
            return (false, event);
        }
        assert!(Clock.now() < end, "no event within the bound");
    }
}

fn request(event: FabricEvent) -> ConnRequest {
    match event {
        FabricEvent::Request(request) => *request,
        event => panic!("{event:?}"),
    }
}

/// Creates a connected pair of nodes on this thread: client, server, and their queue pairs.
fn connected(options: &IwarpOptions) -> (Node, QpNum, Node, QpNum) {
    let (mut client, mut server) = (Node::new(options.clone()), Node::new(options.clone()));
    let address = server.fabric.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let cq = client.connect(address, BOUND);
    let (from_client, event) = either(&mut client, &mut server);
    assert!(!from_client);
    let asked = request(event);
    assert_eq!(asked.private_data.as_bytes(), b"please");
    let now = server.now();
    let answer = PrivateData::new(b"welcome");
    let sq = server.fabric.accept(now, &server.pd, asked, LIMITS, &answer).unwrap();
    let mut up = 0;
    while up < 2 {
        match either(&mut client, &mut server) {
            (from_client, FabricEvent::Established { qp, private_data }) => {
                let wanted: &[u8] = if from_client { b"welcome" } else { b"" };
                assert_eq!(private_data.as_bytes(), wanted);
                assert_eq!(qp, if from_client { cq } else { sq });
                up += 1;
            }
            (_, event) => panic!("{event:?}"),
        }
    }
    (client, cq, server, sq)
}

#[test]
fn either_side_may_send_first_and_both_close_cleanly() {
    for plain in [false, true] {
        let options = IwarpOptions { plain, ..IwarpOptions::default() };
        let (mut client, cq, mut server, sq) = connected(&options);
        client.mr.region().copy_in(0, b"from client");
        server.mr.region().copy_in(0, b"from server");
        let buf = Some(client.sge(4096, 64));
        client.fabric.post_recv(cq, 1, buf).unwrap();
        let buf = Some(server.sge(4096, 64));
        server.fabric.post_recv(sq, 2, buf).unwrap();
        let op = WrOp::Send { imm: None, invalidate: None };
        let sges = SgeList::one(server.sge(0, 11));
        server.send(sq, 3, op, sges);
        if plain {
            // Without the ready-to-receive frame, the responder waits for the client.
            let sges = SgeList::one(client.sge(0, 11));
            client.send(cq, 4, op, sges);
        }
        loop {
            if let (true, FabricEvent::Completion(wc)) = either(&mut client, &mut server)
                && wc.op == WcOp::Recv
            {
                assert_eq!((wc.wr_id, wc.byte_len), (1, 11));
                break;
            }
        }
        assert_eq!(client.mr.region().slice(4096, 11).unwrap().to_vec(), b"from server");
        let now = client.now();
        client.fabric.disconnect(now, cq);
        let refused = client.fabric.post_recv(cq, 9, None);
        assert!(matches!(refused, Err(FabricError::QpState)));
        let (mut ours, mut theirs) = (None, None);
        while ours.is_none() || theirs.is_none() {
            match either(&mut client, &mut server) {
                (true, FabricEvent::Closed { reason, .. }) => ours = Some(reason),
                (false, FabricEvent::Closed { reason, .. }) => theirs = Some(reason),
                (_, FabricEvent::Completion(_)) => {}
                (_, event) => panic!("{event:?}"),
            }
        }
        assert_eq!((ours, theirs), (Some(CloseReason::Local), Some(CloseReason::Peer)));
        assert_eq!(client.fabric.connections() + server.fabric.connections(), 0);
        let refused = client.fabric.post_recv(cq, 9, None);
        assert!(matches!(refused, Err(FabricError::QpState)));
    }
}

#[test]
fn a_disconnect_delivers_posted_work() {
    let (mut client, cq, mut server, sq) = connected(&IwarpOptions::default());
    server.fabric.post_recv(sq, 1, None).unwrap();
    let to = server.remote(0);
    client.mr.region().fill(0, 4 << 20, 7);
    let sges = SgeList::one(client.sge(0, 4 << 20));
    client.send(cq, 5, WrOp::RdmaWrite { remote: to, imm: Some(3) }, sges);
    let now = client.now();
    client.fabric.disconnect(now, cq);
    let mut seen = Vec::new();
    while seen.len() < 4 {
        match either(&mut client, &mut server) {
            (left, FabricEvent::Completion(wc)) => {
                assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
                seen.push((left, Some(wc.op)));
            }
            (left, FabricEvent::Closed { .. }) => seen.push((left, None)),
            (_, event) => panic!("{event:?}"),
        }
    }
    assert!(seen.contains(&(false, Some(WcOp::RecvRdmaWithImm))), "{seen:?}");
    assert_eq!(server.mr.region().slice(0, 4 << 20).unwrap().to_vec(), vec![7; 4 << 20]);
}

#[test]
fn an_abort_cancels_and_flushes_before_it_reports() {
    let (mut client, cq, mut server, sq) = connected(&IwarpOptions::default());
    for id in 0..5 {
        let buf = Some(client.sge(id as usize * 64, 64));
        client.fabric.post_recv(cq, id, buf).unwrap();
    }
    // The server is not running, so not all of this can be sent.
    for id in 10..20 {
        let sges = SgeList::one(client.sge(0, 4 << 20));
        let to = server.remote(0);
        client.send(cq, id, WrOp::RdmaWrite { remote: to, imm: None }, sges);
    }
    let mut done = Vec::new();
    for _ in 0..20 {
        if let Some(FabricEvent::Completion(wc)) = client.turn() {
            done.push(wc.wr_id);
        }
    }
    assert!(client.ring.running() > 0);
    let now = client.now();
    client.fabric.abort(now, cq);
    loop {
        match client.wait() {
            FabricEvent::Completion(wc) => done.push(wc.wr_id),
            FabricEvent::Closed { reason, qp } => {
                assert_eq!((reason, qp), (CloseReason::Local, cq));
                break;
            }
            event => panic!("{event:?}"),
        }
    }
    done.sort_unstable();
    assert_eq!(done, (0..5).chain(10..20).collect::<Vec<_>>(), "each exactly once");
    assert_eq!(client.ring.running(), 0, "nothing of ours is left with the kernel");
    assert_eq!(Arc::strong_count(client.mr.region()), 2, "registration and table");
    server.fabric.post_recv(sq, 1, None).unwrap();
    assert!(matches!(server.closed(), CloseReason::Lost(_)));
    server.fabric.stop_listening();
    server.turn();
    server.ring.turn_or_sleep(Some(Duration::from_millis(50))).unwrap();
    assert_eq!(server.ring.running(), 0);
}

#[test]
fn refusals_carry_private_data() {
    let options = IwarpOptions::default();
    let (mut client, mut server) = (Node::new(options.clone()), Node::new(options));
    let address = server.fabric.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let qp = client.connect(address, BOUND);
    client.fabric.post_recv(qp, 3, None).unwrap();
    let refused = client.fabric.post_send(
        qp,
        WorkRequest {
            wr_id: 1,
            op: WrOp::Send { imm: None, invalidate: None },
            sges: SgeList::EMPTY,
            signaled: false,
        },
    );
    assert!(matches!(refused, Err(FabricError::QpState)), "not yet connected");
    let asked = request(either(&mut client, &mut server).1);
    let now = server.now();
    server.fabric.reject(now, asked, &PrivateData::new(b"full"));
    assert_eq!(client.completion().status, WcStatus::Flushed);
    match client.wait() {
        FabricEvent::ConnectFailed { failure: ConnectFailure::Rejected(data), .. } => {
            assert_eq!(data.as_bytes(), b"full");
        }
        event => panic!("{event:?}"),
    }
    // Dropping a request closes the connection without an answer.
    client.connect(address, BOUND);
    drop(request(either(&mut client, &mut server).1));
    match client.wait() {
        FabricEvent::ConnectFailed { failure: ConnectFailure::Failed(reason), .. } => {
            assert!(matches!(reason, CloseReason::Lost(_)), "{reason:?}");
        }
        event => panic!("{event:?}"),
    }
    assert_eq!(client.fabric.connections(), 0);
}

#[test]
fn connecting_times_out() {
    let mut client = Node::new(IwarpOptions::default());
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let bound = Duration::from_millis(100);
    client.connect(address, bound);
    let silent = client.wait();
    assert!(
        matches!(
            silent,
            FabricEvent::ConnectFailed {
                failure: ConnectFailure::Failed(CloseReason::TimedOut),
                ..
            }
        ),
        "{silent:?}"
    );
    drop(taken);
    // Bound but not listening, so that no other program can listen on the port.
    let closed = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    closed.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    client.connect(closed.local_addr().unwrap().as_socket().unwrap(), BOUND);
    match client.wait() {
        FabricEvent::ConnectFailed {
            failure: ConnectFailure::Failed(CloseReason::Lost(what)),
            ..
        } => assert!(what.contains("refused") && what.contains("127.0.0.1"), "{what}"),
        event => panic!("{event:?}"),
    }
    let mut server = Node::new(IwarpOptions::default());
    let address = server.fabric.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let taken = client.fabric.listen(address).unwrap_err().to_string();
    assert!(taken.contains(&address.to_string()), "{taken}");
}

fn replies(address: SocketAddr, bytes: &[u8], server: &mut Node) -> Vec<u8> {
    let mut peer = TcpStream::connect(address).unwrap();
    peer.write_all(bytes).unwrap();
    peer.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    let mut got = Vec::new();
    let end = server.now() + BOUND;
    loop {
        assert!(server.turn().is_none());
        let mut buffer = [0; 512];
        match peer.read(&mut buffer) {
            Ok(0) => return got,
            Ok(n) => got.extend_from_slice(&buffer[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return got,
            Err(_) => assert!(server.now() < end, "the connection stays open"),
        }
    }
}

#[test]
fn invalid_requests_are_closed_and_markers_refused() {
    let mut server = Node::new(IwarpOptions::default());
    let address = server.fabric.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let good = StartFrame::request(true, false, PrivateData::EMPTY);
    let bytes = good.encode();
    let broken = |at: usize, value: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        bytes
    };
    for bad in [
        broken(0, b'X'),
        broken(8, 0),
        broken(12, b'p'),
        broken(17, 0),
        broken(17, 3),
        broken(18, 3),
        broken(19, 3),
        broken(17, 1),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
    ] {
        assert!(replies(address, &bad, &mut server).is_empty());
    }
    let markers = StartFrame { markers: true, ..good }.encode();
    let reply = replies(address, &markers, &mut server);
    assert_eq!(reply[..16], *b"MPA ID Rep Frame");
    assert_eq!(reply[16], 0x70, "C, R and S");
    assert_eq!(reply[18..], [0, 4, 0, 0, 0, 0]);
    assert_eq!(server.fabric.half_open(), 0);
}

/// Starts a scripted peer that accepts one connection, answers with `reply`, then writes `then`.
fn peer_replies(reply: Vec<u8>, then: Vec<u8>) -> (SocketAddr, std::thread::JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(BOUND)).unwrap();
        let mut request = [0; 38];
        stream.read_exact(&mut request).unwrap();
        stream.write_all(&reply).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        let _ = stream.write_all(&then);
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        rest
    });
    (address, thread)
}

#[test]
fn invalid_replies_fail_the_connection() {
    let ask = StartFrame::request(true, false, PrivateData::EMPTY);
    let (good, _) = ask.accept(true, false, PrivateData::EMPTY);
    let mut wrong_rtr = good;
    wrong_rtr.enhanced =
        Some(Enhanced { peer_to_peer: true, rtr_read: true, ..Enhanced::default() });
    let mut key = good.encode();
    key[9] = b'q';
    for bad in
        [key, StartFrame { markers: true, ..good }.encode(), wrong_rtr.encode(), ask.encode()]
    {
        let (address, thread) = peer_replies(bad, Vec::new());
        let mut client = Node::new(IwarpOptions::default());
        client.connect(address, BOUND);
        let event = client.wait();
        let FabricEvent::ConnectFailed { failure: ConnectFailure::Failed(reason), .. } = event
        else {
            panic!("{event:?}")
        };
        assert!(matches!(reason, CloseReason::Protocol(_)), "{reason:?}");
        thread.join().unwrap();
    }
}

#[test]
fn a_violating_peer_gets_a_terminate_before_the_close() {
    let ask = StartFrame::request(true, false, PrivateData::EMPTY);
    let (good, _) = ask.accept(true, false, PrivateData::EMPTY);
    let evil = frame(&ddp::tagged(0, true, 0x0101_0101, 5, 4), b"evil");
    let (address, thread) = peer_replies(good.encode(), evil);
    let mut client = Node::new(IwarpOptions::default());
    let qp = client.connect(address, BOUND);
    assert!(matches!(client.wait(), FabricEvent::Established { .. }));
    client.fabric.post_recv(qp, 8, None).unwrap();
    let reason = client.closed();
    assert!(matches!(&reason, CloseReason::Protocol(t) if t.contains("STag")), "{reason:?}");
    let seen = thread.join().unwrap();
    assert_eq!(seen[..20], hex("00 0e c1 40 00 00 00 01 0000000000000000 eb d3 4c 5f"));
    assert_eq!(seen[22..24], [0x41, 0x47], "a terminate");
    assert_eq!(seen[40..44], [0x11, 0x00, 0xc0, 0x00]);
    // In the other direction, the peer's Terminate is reported.
    let fields = ddp::Untagged { invalidate: 0, qn: 2, msn: 1, mo: 0 };
    let terminate = frame(&ddp::untagged(7, true, fields, 4), &[0x11, 0x01, 0, 0]);
    let (address, thread) = peer_replies(good.encode(), terminate);
    client.connect(address, BOUND);
    assert!(matches!(client.wait(), FabricEvent::Established { .. }));
    let reason = client.closed();
    assert!(matches!(&reason, CloseReason::PeerTerminated(_)), "{reason:?}");
    thread.join().unwrap();
}

#[test]
fn a_peer_that_resets_or_stops_mid_frame_is_lost() {
    let ask = StartFrame::request(true, false, PrivateData::EMPTY);
    let (good, _) = ask.accept(true, false, PrivateData::EMPTY);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut client = Node::new(IwarpOptions::default());
    client.connect(address, BOUND);
    client.turn();
    let (mut stream, _) = listener.accept().unwrap();
    let reply = good.encode();
    stream.write_all(&reply[..3]).unwrap();
    assert!(client.turn().is_none());
    stream.write_all(&reply[3..]).unwrap();
    assert!(matches!(client.wait(), FabricEvent::Established { .. }));
    stream.write_all(&[0, 40, 0xc1]).unwrap();
    client.turn();
    // Closing with unread bytes resets the connection; either way, the frame is cut off.
    drop(stream);
    assert!(matches!(client.closed(), CloseReason::Lost(_)));
}

#[test]
fn the_announced_first_frame_must_arrive() {
    let options =
        IwarpOptions { startup_timeout: Duration::from_secs(2), ..IwarpOptions::default() };
    let mut server = Node::new(options);
    let address = server.fabric.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let mut peer = TcpStream::connect(address).unwrap();
    let ask = StartFrame::request(true, false, PrivateData::EMPTY);
    peer.write_all(&ask.encode()).unwrap();
    let asked = request(server.wait());
    let now = server.now();
    server.fabric.accept(now, &server.pd, asked, LIMITS, &PrivateData::EMPTY).unwrap();
    assert!(matches!(server.wait(), FabricEvent::Established { .. }));
    assert_eq!(server.closed(), CloseReason::TimedOut);
}

#[test]
fn a_request_can_be_accepted_on_another_core() {
    let shared = IwarpShared::new();
    let mut client = Node::new(IwarpOptions::default());
    let mut server = Node::new(IwarpOptions::default());
    server.fabric = IwarpFabric::new(&server.ring, Arc::clone(&shared), IwarpOptions::default());
    let address = server.fabric.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let pd = server.fabric.alloc_pd(ANY).unwrap();
    let region = Region::new(1 << 20).unwrap();
    let mr = pd.register(&region, Access::REMOTE_WRITE).unwrap();
    let qp = client.connect(address, BOUND);
    let asked = request(either(&mut client, &mut server).1);
    let to = RemoteMem { addr: mr.base(), rkey: mr.rkey() };
    let thread = std::thread::spawn(move || {
        let ring = Ring::new(64).unwrap();
        let fabric = IwarpFabric::new(&ring, shared, IwarpOptions::default());
        let mut other = Node { ring, fabric, pd, mr };
        let now = other.now();
        let answer = PrivateData::EMPTY;
        let qp = other.fabric.accept(now, &other.pd, asked, LIMITS, &answer).unwrap();
        other.fabric.post_recv(qp, 1, None).unwrap();
        assert!(matches!(other.wait(), FabricEvent::Established { .. }));
        assert_eq!(other.completion().imm, Some(9));
        let mut seen = [0; 4];
        other.mr.region().copy_out(0, &mut seen);
        assert_eq!(other.closed(), CloseReason::Peer);
        seen
    });
    assert!(matches!(client.wait(), FabricEvent::Established { .. }));
    client.mr.region().copy_in(0, b"core");
    let sges = SgeList::one(client.sge(0, 4));
    client.send(qp, 1, WrOp::RdmaWrite { remote: to, imm: Some(9) }, sges);
    client.completion();
    let now = client.now();
    client.fabric.disconnect(now, qp);
    assert_eq!(client.closed(), CloseReason::Local);
    assert_eq!(&thread.join().unwrap(), b"core");
}

/// Sends writes with immediates from one thread to another and checks every byte.
fn stream(options: &IwarpOptions, len: usize, count: u32) -> crate::fabric::FabricCounters {
    const SLOTS: u32 = 4;
    let ready = Arc::new(AtomicBool::new(false));
    let (sender, receiver) = std::sync::mpsc::channel();
    let byte = |n: u32, i: usize| (n as usize * 13 + i * 7 + (i >> 9)) as u8;
    let server = {
        let (options, ready) = (options.clone(), Arc::clone(&ready));
        std::thread::spawn(move || {
            let mut node = Node::new(options);
            let address = node.fabric.listen("127.0.0.1:0".parse().unwrap()).unwrap();
            sender.send((address, node.remote(0))).unwrap();
            let asked = request(node.wait());
            let now = node.now();
            let answer = PrivateData::EMPTY;
            let qp = node.fabric.accept(now, &node.pd, asked, LIMITS, &answer).unwrap();
            for id in 0..u64::from(SLOTS) + 1 {
                node.fabric.post_recv(qp, id, None).unwrap();
            }
            assert!(matches!(node.wait(), FabricEvent::Established { .. }));
            let mut buffer = vec![0; len];
            for n in 0..count {
                let wc = loop {
                    let wc = node.completion();
                    if wc.op == WcOp::RecvRdmaWithImm {
                        break wc;
                    }
                };
                assert_eq!((wc.status, wc.imm), (WcStatus::Success, Some(n)));
                let slot = (n % SLOTS) as usize * len;
                node.mr.region().copy_out(slot, &mut buffer);
                let good = buffer.iter().enumerate().all(|(i, b)| *b == byte(n, i));
                assert!(good, "message {n} is damaged");
                node.fabric.post_recv(qp, u64::from(n), None).unwrap();
                let zero = RemoteMem { addr: 0, rkey: crate::ids::Rkey(0) };
                let op = WrOp::RdmaWrite { remote: zero, imm: Some(n) };
                let ack = WorkRequest { wr_id: 0, op, sges: SgeList::EMPTY, signaled: false };
                node.fabric.post_send(qp, ack).unwrap();
            }
            node.closed();
            ready.store(true, Ordering::SeqCst);
            node.fabric.counters()
        })
    };
    let (address, to) = receiver.recv().unwrap();
    let mut node = Node::new(options.clone());
    let qp = node.connect(address, BOUND);
    for id in 0..u64::from(SLOTS) + 1 {
        node.fabric.post_recv(qp, id, None).unwrap();
    }
    assert!(matches!(node.wait(), FabricEvent::Established { .. }));
    let (mut sent, mut acked) = (0, 0);
    while acked < count {
        while sent < count && sent < acked + SLOTS {
            let slot = (sent % SLOTS) as usize * len;
            let bytes: Vec<u8> = (0..len).map(|i| byte(sent, i)).collect();
            node.mr.region().copy_in(slot, &bytes);
            let remote = RemoteMem { addr: to.addr + slot as u64, rkey: to.rkey };
            let half = len / 3;
            let sges = SgeList::two(node.sge(slot, half), node.sge(slot + half, len - half));
            let op = WrOp::RdmaWrite { remote, imm: Some(sent) };
            let wr = WorkRequest { wr_id: 0, op, sges, signaled: false };
            node.fabric.post_send(qp, wr).unwrap();
            sent += 1;
        }
        let wc = node.completion();
        assert_eq!((wc.op, wc.imm), (WcOp::RecvRdmaWithImm, Some(acked)));
        node.fabric.post_recv(qp, 0, None).unwrap();
        acked += 1;
    }
    let now = node.now();
    node.fabric.disconnect(now, qp);
    assert_eq!(node.closed(), CloseReason::Local);
    let counters = server.join().unwrap();
    assert!(ready.load(Ordering::SeqCst));
    counters
}

#[test]
fn large_writes_arrive_intact_and_mostly_directly() {
    let counters = stream(&IwarpOptions::default(), 1 << 20, 40);
    assert_eq!(counters.bytes_direct + counters.bytes_copied, 40 << 20);
    assert!(counters.bytes_direct * 10 > 9 * (40 << 20), "{counters:?}");
}

#[test]
fn streams_of_any_size_arrive_intact() {
    for crc in [true, false] {
        let options = IwarpOptions { crc, ..IwarpOptions::default() };
        for len in [1, 300, 4096, 4099, 20_001, 131_072] {
            let counters = stream(&options, len, 200);
            assert_eq!(counters.crc_errors, 0);
            assert!(counters.bytes_received > len as u64 * 200);
        }
    }
}
