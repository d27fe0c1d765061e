//! Tests of users that violate the protocol: the node disconnects them without affecting others.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rtrs_base::rt::receive_passed;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use socket2::{Domain, Socket, Type};

use super::{NodeHandle, NodeOptions};
use crate::channel::{Connect, PACKET_LEN, Packet, PacketKind};

/// Timeout for any step, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn start() -> NodeHandle {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let mut options = NodeOptions::new(ADDRESS);
    (options.listen_port, options.peer_port) = (port, port);
    NodeHandle::start(options, None).unwrap()
}

/// Waits until `check` returns true.
fn wait_for(what: &str, mut check: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < LIMIT, "timed out waiting for: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn pair(kind: Type) -> [OwnedFd; 2] {
    let (ours, theirs) = Socket::pair(Domain::UNIX, kind, None).unwrap();
    [ours.into(), theirs.into()]
}

fn put(fd: &OwnedFd, packet: &Packet, body: &[u8], fds: &[BorrowedFd<'_>]) {
    let head = packet.encode();
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    let parts = [IoSlice::new(&head), IoSlice::new(body)];
    sendmsg(fd, &parts, &mut control, SendFlags::NOSIGNAL).unwrap();
}

fn wait_for_event(fd: &OwnedFd, event: PollFlags) {
    let limit = Timespec::try_from(LIMIT).unwrap();
    let ready = poll(&mut [PollFd::new(fd, event)], Some(&limit)).unwrap();
    assert_eq!(ready, 1, "the node neither answers nor ends the connection");
}

/// Waits for a packet; `None` if the node has closed the connection.
fn get(fd: &OwnedFd) -> Option<(Packet, Vec<OwnedFd>)> {
    wait_for_event(fd, PollFlags::IN);
    get_now(fd)
}

/// Returns the next packet; `None` if there is none, or if the node has closed the connection.
fn get_now(fd: &OwnedFd) -> Option<(Packet, Vec<OwnedFd>)> {
    let (mut head, mut body) = ([0; PACKET_LEN], [0; 100]);
    let mut parts = [IoSliceMut::new(&mut head), IoSliceMut::new(&mut body)];
    match receive_passed(fd, &mut parts) {
        Ok((0, _)) => None,
        Ok((_, fds)) => Some((Packet::decode(&head).unwrap(), fds)),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => None,
        Err(error) => panic!("{error}"),
    }
}

/// A bound socket, and a control connection that may change it.
struct User {
    socket: OwnedFd,
    bound: Packet,
    control: OwnedFd,
}

fn user(node: &NodeHandle) -> User {
    let socket = node.way().connect().unwrap();
    put(&socket, &Packet { address: ADDRESS, ..Packet::new(PacketKind::Bind) }, &[], &[]);
    let (bound, fds) = get(&socket).unwrap();
    assert_eq!((bound.kind, bound.value, fds.len()), (PacketKind::Bound, 0, 2));
    let [control, theirs] = pair(Type::SEQPACKET);
    put(&socket, &Packet::new(PacketKind::Control), &[], &[theirs.as_fd()]);
    assert_eq!(get(&control).unwrap().0.kind, PacketKind::Bound);
    User { socket, bound, control }
}

fn sockets(node: &NodeHandle) -> usize {
    node.report().unwrap().sockets.len()
}

const COUNTERS: Packet = Packet {
    kind: PacketKind::Info,
    port: 0,
    len: 0,
    address: ADDRESS,
    value: 10_000,
    extra: 0,
    times: crate::channel::PacketTimes::NONE,
};

/// Checks that the node answers a well-behaved user.
fn works(node: &NodeHandle) {
    let user = user(node);
    let [ours, theirs] = pair(Type::SEQPACKET);
    put(&user.control, &COUNTERS, &[], &[theirs.as_fd()]);
    let (done, fds) = get(&ours).unwrap();
    assert_eq!((done.kind, done.value, fds.len()), (PacketKind::Done, 0, 1));
}

/// The name of a descriptor that is not a connection, the descriptor, and a check that no process
/// holds it anymore.
type Wrong = (&'static str, OwnedFd, Box<dyn Fn() -> bool>);

fn at_its_end(fd: OwnedFd) -> Box<dyn Fn() -> bool> {
    Box::new(move || {
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap();
        fds[0].revents().contains(PollFlags::HUP)
    })
}

fn wrong_descriptors(dir: &std::path::Path) -> Vec<Wrong> {
    let socket = |kind| Socket::new(Domain::UNIX, kind, None).unwrap();
    let connects = |kind, path: std::path::PathBuf| {
        let address = socket2::SockAddr::unix(path).unwrap();
        move || Socket::new(Domain::UNIX, kind, None).unwrap().connect(&address).is_ok()
    };
    let (reader, writer) = std::io::pipe().unwrap();
    let [stream, other_stream] = pair(Type::STREAM);
    // Always readable, but without input.
    let [datagrams, _] = pair(Type::DGRAM);
    rustix::net::shutdown(&datagrams, rustix::net::Shutdown::Read).unwrap();
    let named = socket(Type::DGRAM);
    let (at, listens_at) = (dir.join("datagrams"), dir.join("listens"));
    named.bind(&socket2::SockAddr::unix(&at).unwrap()).unwrap();
    named.shutdown(std::net::Shutdown::Read).unwrap();
    let listener = socket(Type::SEQPACKET);
    listener.bind(&socket2::SockAddr::unix(&listens_at).unwrap()).unwrap();
    listener.listen(1).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let tcp_address = tcp.local_addr().unwrap();
    let file = std::fs::File::open("/dev/zero").unwrap();
    let is_open = connects(Type::DGRAM, at);
    let listens = connects(Type::SEQPACKET, listens_at);
    vec![
        ("pipe", writer.into(), at_its_end(reader.into())),
        ("stream", stream, at_its_end(other_stream)),
        ("datagrams", datagrams, Box::new(|| true)),
        ("datagrams with a name", named.into(), Box::new(move || !is_open())),
        ("listening", listener.into(), Box::new(move || !listens())),
        ("tcp", tcp.into(), Box::new(move || std::net::TcpStream::connect(tcp_address).is_err())),
        ("not connected", socket(Type::SEQPACKET).into(), Box::new(|| true)),
        ("file", file.into(), Box::new(|| true)),
    ]
}

#[test]
fn descriptors_other_than_connections_disconnect_their_user() {
    let node = start();
    let name = format!("rds-wrong-{}", std::process::id());
    let dir = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&dir).unwrap();
    let mut last = None;
    for (what, fd, is_closed) in wrong_descriptors(&dir) {
        let user = user(&node);
        put(&user.control, &COUNTERS, &[], &[fd.as_fd()]);
        drop(fd);
        assert!(get(&user.control).is_none(), "{what} is accepted");
        wait_for(what, is_closed);
        works(&node);
        last = Some(user);
    }
    // The request is sent over the socket itself.
    let file = std::fs::File::open("/dev/zero").unwrap();
    let User { socket, .. } = last.unwrap();
    put(&socket, &Packet::new(PacketKind::Control), &[], &[file.as_fd()]);
    assert!(get(&socket).is_none());
    works(&node);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn too_many_descriptors_disconnect_their_user() {
    let node = start();
    let user = user(&node);
    let [_ours, theirs] = pair(Type::SEQPACKET);
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(20))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    let fds = [theirs.as_fd(); 20];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let head = COUNTERS.encode();
    sendmsg(&user.control, &[IoSlice::new(&head)], &mut control, SendFlags::NOSIGNAL).unwrap();
    assert!(get(&user.control).is_none());
    works(&node);
}

/// Otherwise, the user would hold an end of the socket or leave its port bound on disconnecting.
#[test]
fn a_passed_connection_does_not_become_a_socket() {
    let node = start();
    let user = user(&node);
    put(&user.control, &Packet { address: ADDRESS, ..Packet::new(PacketKind::Bind) }, &[], &[]);
    assert!(get(&user.control).is_none());
    assert_eq!(sockets(&node), 1);
    drop(user);
    wait_for("the socket to be closed", || sockets(&node) == 0);
}

#[test]
fn a_control_connection_that_is_closed_for_others_leaves_no_socket() {
    let node = start();
    let users: Vec<User> = (0..3).map(|_| user(&node)).collect();
    assert_eq!(sockets(&node), 3);
    // The control connections no longer have sockets, so they are closed to make room for newer
    // ones.
    let controls: Vec<OwnedFd> = users.into_iter().map(|user| user.control).collect();
    wait_for("the sockets to be closed", || sockets(&node) == 0);
    let newer: Vec<OwnedFd> = (0..260).map(|_| node.way().connect().unwrap()).collect();
    assert!(controls.iter().all(|control| get(control).is_none()));
    drop(newer);
    works(&node);
}

#[test]
fn a_user_that_does_not_read_its_answer_gets_no_other() {
    let node = start();
    let fd = node.way().connect().unwrap();
    for _ in 0..3 {
        put(&fd, &COUNTERS, &[], &[]);
        assert_eq!(get(&fd).unwrap().0.kind, PacketKind::Done, "one after the other");
    }
    put(&fd, &COUNTERS, &[], &[]);
    wait_for_event(&fd, PollFlags::IN);
    put(&fd, &COUNTERS, &[], &[]);
    wait_for_event(&fd, PollFlags::HUP);
    assert_eq!(get(&fd).unwrap().0.kind, PacketKind::Done);
    assert!(get(&fd).is_none(), "it gets a second answer");
    works(&node);
}

/// Programs may close descriptors that they do not recognize.
#[test]
fn a_socket_without_its_control_connection_reports_what_it_has_taken() {
    let node = start();
    let User { socket, bound, control } = user(&node);
    drop(control);
    let Packet { len, extra, .. } = bound;
    put(&socket, &Packet { len, extra, ..Packet::new(PacketKind::Taken) }, &[], &[]);
    let port = node.report().unwrap().sockets[0].port;
    let head = Packet { port, len: 5, address: ADDRESS, ..Packet::new(PacketKind::Send) };
    put(&socket, &head, b"whole", &[]);
    // The message itself is in the ring.
    assert_eq!(get(&socket).map(|(packet, _)| packet.kind), Some(PacketKind::Token));
}

/// Each request makes the node send a token while messages are waiting.
#[test]
fn a_user_that_asks_for_tokens_without_end_fills_only_its_own_connection() {
    let node = start();
    let User { socket, bound, control } = user(&node);
    let port = node.report().unwrap().sockets[0].port;
    let head = Packet { port, len: 5, address: ADDRESS, ..Packet::new(PacketKind::Send) };
    put(&socket, &head, b"whole", &[]);
    wait_for_event(&socket, PollFlags::IN);
    let Packet { len, extra, .. } = bound;
    for _ in 0..3000 {
        put(&control, &Packet { len, extra, ..Packet::new(PacketKind::Token) }, &[], &[]);
    }
    works(&node);
    let tokens = std::iter::from_fn(|| {
        let (packet, _) = get_now(&socket)?;
        assert_eq!(packet.kind, PacketKind::Token);
        Some(packet.value)
    });
    let tokens: Vec<u32> = tokens.collect();
    assert!(tokens.len() > 1 && tokens.is_sorted(), "{tokens:?}");
}
