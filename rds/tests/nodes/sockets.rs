//! Tests of sockets from the users' point of view.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rds::channel::{InfoOption, connections_of, sockets_of};
use rds::node::NodeHandle;
use rds::socket::{Access, Binding, How, Incoming, Outgoing};
use rtrs_base::skip::skip;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;

/// Bytes that differ from message to message.
fn payload(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + seed * 13) as u8).collect()
}

fn outgoing<'a>(to: Option<(IpAddr, u16)>, payload: &'a [IoSlice<'a>]) -> Outgoing<'a> {
    Outgoing { to, payload, cookie: None }
}

/// Binds a socket on node 127.0.0.1 in the same way as librds_preload.so.
fn bind_low(node: &NodeHandle, port: u16) -> (OwnedFd, Binding) {
    let access = Arc::new(Access::open(Box::new(node.way())).unwrap());
    let fd = access.connect().unwrap();
    let bound = Access::bind(fd.as_fd(), address(1), port).unwrap();
    let binding = Binding::new(access, bound.place, fd.as_fd()).unwrap();
    (fd, binding)
}

#[test]
fn messages_of_all_sizes_pass_both_ways() {
    let [near, far] = nodes([1, 2]);
    let (a, b) = (bind(&near, 0), bind(&far, 4000));
    let mut buffer = vec![0; 1 << 20];
    for socket in [&a, &b] {
        socket.set_send_buffer(4 << 20).unwrap();
    }
    let sizes = [0, 1, 47, 48, 8192, 65_536, 65_537, 100_000, 1 << 20];
    for (seed, len) in sizes.into_iter().enumerate() {
        for (from, at) in [(&a, &b), (&b, &a)] {
            from.send_to(&payload(len, seed), to(at)).unwrap();
            let (got, source) = at.recv_from(&mut buffer).unwrap();
            assert_eq!(source, to(from));
            assert!(buffer[..got] == payload(len, seed), "{len} bytes");
        }
    }
    let error = a.send_to(&vec![0; (1 << 20) + 1], to(&b)).unwrap_err();
    assert!(error.to_string().contains("longer than the send buffer or 1 MiB"), "{error}");
}

#[test]
fn sockets_of_one_node_reach_each_other() {
    let [node] = nodes([1]);
    let (a, b) = (bind(&node, 3000), bind(&node, 4000));
    a.send_to(b"me", to(&b)).unwrap();
    let mut buffer = [0; 10];
    assert_eq!(b.recv_from(&mut buffer).unwrap(), (2, to(&a)));
    // The node answers its own pings.
    a.send_to(b"", SocketAddr::new(address(1), 0)).unwrap();
    assert_eq!(a.recv_from(&mut buffer).unwrap(), (0, SocketAddr::new(address(1), 0)));
}

#[test]
fn ipv6_nodes_connect() {
    let port = free_port();
    let start = |text: &str| {
        let mut options = NodeOptions::new(text.parse().unwrap());
        (options.listen_port, options.peer_port) = (port, port);
        Node::start(options)
    };
    // The loopback interface has only one IPv6 address, so the node talks to itself.
    let node = match start("::1") {
        Ok(node) => node,
        Err(error) => {
            skip(&format!("no IPv6 here: {error}"));
            return;
        }
    };
    let socket = bind(&node, 4000);
    socket.send_to(b"six", to(&socket)).unwrap();
    let mut buffer = [0; 10];
    assert_eq!(socket.recv_from(&mut buffer).unwrap(), (3, to(&socket)));
    let error = socket.send_to(b"x", "127.0.0.1:4000".parse().unwrap()).unwrap_err();
    assert!(error.to_string().contains("the other family"), "{error}");
}

#[test]
fn nonblocking_calls_return_would_block() {
    let [near, far] = nodes([1, 2]);
    let (a, b) = (bind(&near, 0), bind(&far, 4000));
    let mut buffer = [0; 100];
    let error = a.try_recv_from(&mut buffer).unwrap_err();
    assert!(error.is_temporary() && !error.is_congested(), "{error}");
    a.set_receive_timeout(Some(Duration::from_millis(10))).unwrap();
    let error = a.recv_from(&mut buffer).unwrap_err();
    assert!(error.to_string().contains("within the time limit"), "{error}");
    a.try_send_to(b"0123456789", to(&b)).unwrap();
    wait_readable(&b);
    // A peek leaves the message in the queue; bytes that do not fit are lost.
    let peek = How { dontwait: true, peek: true };
    let from = to(&a);
    let whole = Incoming::Message { len: 4, total: 10, from };
    assert_eq!(b.receive(&mut buffer[..4], peek).unwrap(), whole);
    assert_eq!(b.receive(&mut buffer[..4], How::default()).unwrap(), whole);
    assert_eq!(&buffer[..4], b"0123");
    assert!(b.try_recv_from(&mut buffer).is_err());
}

/// Each answer counts toward a limit until it is acknowledged.
#[test]
fn single_pings_are_all_answered() {
    let [near, far] = nodes([1, 2]);
    let a = bind(&near, 0);
    let ping = SocketAddr::new(address(2), 0);
    let mut buffer = [0; 10];
    for number in 0..500 {
        a.send_to(b"", ping).unwrap();
        assert_eq!(a.recv_from(&mut buffer).unwrap(), (0, ping), "ping {number}");
    }
    assert_eq!(counter(&far, "send_pong_dropped"), 0);
}

fn wait_readable(socket: &RdsSocket) {
    let limit = Timespec::try_from(LIMIT).unwrap();
    let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "it never becomes readable");
}

#[test]
fn a_port_is_bound_once_and_freed_with_its_socket() {
    let [node] = nodes([1]);
    let first = bind(&node, 4000);
    let error = RdsSocket::bind(&node, 4000).unwrap_err();
    let text =
        "cannot bind 127.0.0.1 port 4000: the port is in use; use another, or 0 for a free one";
    assert_eq!(error.to_string(), text);
    let error = RdsSocket::bind(&node, 1).unwrap_err();
    assert!(error.to_string().contains("no socket can have this address or port"), "{error}");
    drop(first);
    wait_for("the port to be free", || RdsSocket::bind(&node, 4000).is_ok());
}

/// The reader pauses until senders are stopped; then all messages arrive in order.
#[test]
fn a_slow_reader_stops_its_senders_and_loses_nothing() {
    let [near, far] = nodes([1, 2]);
    let (a, b) = (bind(&near, 0), bind(&far, 4000));
    let other = bind(&far, 4001);
    a.set_congestion_updates(true).unwrap();
    let mut sent = 0_usize;
    let begun = Instant::now();
    loop {
        match a.try_send_to(&payload(4000, sent), to(&b)) {
            Ok(()) => sent += 1,
            Err(error) if error.is_congested() => break,
            Err(error) => assert!(error.is_temporary(), "{error}"),
        }
        assert!(begun.elapsed() < LIMIT, "it is never congested after {sent} messages");
    }
    assert!(sent * 4000 > 100_000, "{sent}");
    // Other senders are not stopped.
    a.send_to(b"passes", to(&other)).unwrap();
    let mut buffer = [0; 5000];
    assert_eq!(other.recv_from(&mut buffer).unwrap().0, 6);
    for number in 0..sent {
        let (len, _) = b.recv_from(&mut buffer).unwrap();
        assert!(buffer[..len] == payload(4000, number), "message {number}");
    }
    let groups = loop {
        if let Incoming::Cleared(groups) = a.receive(&mut buffer, How::default()).unwrap() {
            break groups;
        }
    };
    assert_eq!(groups, 1 << (4000 % 64));
    // A waiting sender resumes automatically.
    a.send_to(b"again", to(&b)).unwrap();
    assert_eq!(b.recv_from(&mut buffer).unwrap().0, 5);
}

#[test]
fn a_blocked_sender_resumes_when_there_is_space() {
    let [near, far] = nodes([1, 2]);
    let (a, b) = (bind(&near, 0), bind(&far, 4000));
    b.set_receive_buffer(20_000).unwrap();
    let reader = std::thread::spawn(move || {
        let mut buffer = [0; 3000];
        for number in 0..2000_usize {
            let (len, _) = b.recv_from(&mut buffer).unwrap();
            assert!(buffer[..len] == payload(2500, number), "message {number}");
            if number.is_multiple_of(100) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    });
    let b = SocketAddr::new(address(2), 4000);
    (0..2000).for_each(|number| a.send_to(&payload(2500, number), b).unwrap());
    reader.join().unwrap();
}

#[test]
fn canceling_frees_the_buffer() {
    let port = free_port();
    let near = Node::start(options(1, port)).unwrap();
    let a = bind(&near, 3000);
    // No node has this address.
    let (gone, other) = (SocketAddr::new(address(9), 4000), SocketAddr::new(address(9), 4001));
    a.set_send_buffer(10_000).unwrap();
    let mut sent = 0;
    let full = loop {
        match a.try_send_to(&[7; 5000], gone) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent < 1000);
    };
    assert!(full.is_temporary() && !full.is_congested(), "{full}");
    a.cancel(gone).unwrap();
    wait_for("room", || a.try_send_to(b"x", other).is_ok());
    wait_for("the canceled messages to be gone", || report_of(&near).unacked_bytes < 1000);
    // Canceled messages do not arrive even if a node starts there.
    let far = Node::start(options(9, port)).unwrap();
    let (b, c) = (bind(&far, 4000), bind(&far, 4001));
    // The first message may have arrived before its port was bound.
    a.send_to(b"second", other).unwrap();
    let mut buffer = [0; 6000];
    while c.recv_from(&mut buffer).unwrap().0 != 6 {}
    b.set_receive_timeout(Some(Duration::from_millis(50))).unwrap();
    assert!(b.recv_from(&mut buffer).is_err());
}

/// A cancel is read even if limits are exceeded, because earlier messages must be canceled too.
#[test]
fn repeated_cancels_use_no_memory() {
    let port = free_port();
    let mut options = options(1, port);
    options.config.memory = 4 << 20;
    (options.config.port_memory, options.config.peer_memory) = (1 << 20, 2 << 20);
    let node = Node::start(options).unwrap();
    let (fd, binding) = bind_low(node.handle().unwrap(), 0);
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let payload = [IoSlice::new(&[7; 60_000])];
            let to = Some((address(9), 4000));
            // Fails once the node has stopped.
            while rds::socket::send(&binding, fd.as_fd(), outgoing(to, &payload), false).is_ok() {}
        });
        for _ in 0..200 {
            binding.cancel(fd.as_fd(), (address(9), 4001)).unwrap();
        }
        let unacked = report_of(&node).unacked_bytes;
        assert!(unacked < 10 << 20, "{unacked}");
        drop(node);
        sender.join().unwrap();
    });
}

/// Connections break in the middle of messages a hundred times.
#[test]
fn no_message_is_lost_repeated_or_reordered_over_broken_connections() {
    let port = free_port();
    let [near, far] = [1, 2].map(|last| {
        let options = options(last, port);
        // The test resets connections that have not carried a message yet.
        options.config.tuning.set(Tunable::ReconnectMax, 20_000_000);
        Node::start(options).unwrap()
    });
    let (a, b) = (bind(&near, 0), bind(&far, 4000));
    let len_of = |number: usize| 1 + number * 13 % 50_000;
    // An empty message is the last one.
    let reader = std::thread::spawn(move || {
        let mut buffer = vec![0; 60_000];
        for number in 0.. {
            let (len, _) = b.recv_from(&mut buffer).unwrap();
            if len == 0 {
                return number;
            }
            assert!(buffer[..len] == payload(len_of(number), number), "message {number}");
        }
        0
    });
    let breaker = std::thread::spawn(move || {
        let mut resets = 0_u32;
        // The sender may not have had anything in flight at any reset.
        while resets < 100 || counter(&near, "send_retransmitted") == 0 {
            std::thread::sleep(Duration::from_millis(3));
            let (node, peer) = if resets.is_multiple_of(2) { (&near, 2) } else { (&far, 1) };
            resets += u32::from(node.handle().unwrap().reset(address(peer)) > 0);
        }
        (near, far)
    });
    let b = SocketAddr::new(address(2), 4000);
    let mut sent = 0;
    while sent < 4000 || !breaker.is_finished() {
        a.send_to(&payload(len_of(sent), sent), b).unwrap();
        sent += 1;
    }
    a.send_to(b"", b).unwrap();
    assert_eq!(reader.join().unwrap(), sent);
    let (near, far) = breaker.join().unwrap();
    assert!(counter(&near, "conn_reset") >= 50 && counter(&far, "conn_reset") >= 50);
    assert!(counter(&near, "send_retransmitted") > 0);
}

#[test]
fn a_restarted_node_is_found_again() {
    let port = free_port();
    for (stays, goes) in [(1, 2), (4, 3)] {
        let near = Node::start(options(stays, port)).unwrap();
        let a = bind(&near, 3000);
        let mut buffer = [0; 10];
        for round in 0..5_u8 {
            let far = Node::start(options(goes, port)).unwrap();
            let b = bind(&far, 4000);
            a.send_to(&[round], SocketAddr::new(address(goes), 4000)).unwrap();
            let (len, from) = b.recv_from(&mut buffer).unwrap();
            assert_eq!((&buffer[..len], from.port()), (&[round][..], 3000));
            b.send_to(&[round], from).unwrap();
            assert_eq!(a.recv_from(&mut buffer).unwrap().0, 1);
            // Ensures that nothing is in flight when the node stops.
            wait_for("all to be acknowledged", || report_of(&near).unacked_bytes == 0);
        }
    }
}

#[test]
fn a_node_answers_info_options() {
    let [near, far] = nodes([1, 2]);
    let (a, b) = (bind(&near, 3000), bind(&far, 4000));
    a.send_to(b"x", to(&b)).unwrap();
    b.recv_from(&mut [0; 10]).unwrap();
    let (bytes, size) = near.info(InfoOption::Connections { v6: false }.number()).unwrap();
    let connections = connections_of(&bytes, size, false);
    assert_eq!(connections.len(), 1);
    assert_eq!((connections[0].peer, connections[0].is_connected), (address(2), true));
    let (bytes, size) = near.info(InfoOption::Sockets { v6: false }.number()).unwrap();
    let sockets = sockets_of(&bytes, size, false);
    assert_eq!(sockets.iter().map(|s| s.bound.1).collect::<Vec<_>>(), [3000]);
    let error = near.info(10_002).unwrap_err();
    assert_eq!(error.to_string(), "cannot get info option 10002: there is no such option");
}

#[test]
fn a_stopping_node_notifies_its_users() {
    let [near, far] = nodes([1, 2]);
    let a = bind(&near, 3000);
    let b = bind(&far, 4000);
    a.send_to(b"first", to(&b)).unwrap();
    assert_eq!(b.recv_from(&mut [0; 10]).unwrap().0, 5);
    a.send_to(b"last", to(&b)).unwrap();
    // Messages sent before the node stops do arrive, because there is a connection.
    let node = near.clone();
    drop(near);
    let port = a.port();
    drop(a);
    drop(node);
    assert_eq!(b.recv_from(&mut [0; 10]).unwrap(), (4, SocketAddr::new(address(1), port)));
}

/// The sending call waits without a limit; only the end of the node can wake it.
#[test]
fn a_stopping_node_wakes_senders_to_a_congested_port() {
    let port = free_port();
    let far = Node::start(options(2, port)).unwrap();
    let full = bind(&far, 4000);
    full.set_receive_buffer(1000).unwrap();
    let node = NodeHandle::start(options(1, port), None).unwrap();
    let (fd, binding) = bind_low(&node, 0);
    let (done, ended) = std::sync::mpsc::channel();
    let sender = std::thread::spawn(move || {
        let payload = [IoSlice::new(&[7; 500])];
        let to = Some((address(2), 4000));
        let error = loop {
            let sent = rds::socket::send(&binding, fd.as_fd(), outgoing(to, &payload), false);
            if let Err(error) = sent {
                break error;
            }
        };
        done.send(error.raw_os_error()).unwrap();
    });
    wait_for("congestion", || {
        let peers = node.report().map_or_else(Vec::new, |report| report.peers);
        peers.iter().any(|peer| peer.congested_ports.iter().any(|port| port.port == 4000))
    });
    // Ensures that the sender is waiting for the port, not for space in its unix socket.
    std::thread::sleep(Duration::from_millis(50));
    node.stop().unwrap();
    let errno = rustix::io::Errno::NETDOWN.raw_os_error();
    assert_eq!(ended.recv_timeout(LIMIT).unwrap(), Some(errno));
    sender.join().unwrap();
}

/// The system reports the unread input to the node before it reports the sent messages.
#[test]
fn messages_sent_before_the_end_arrive_despite_unread_input() {
    let [near, far] = nodes([1, 2]);
    let b = bind(&far, 4000);
    let mut buffer = [0; 10];
    for round in 0..30_u8 {
        let a = bind(&near, 0);
        a.send_to(b"", SocketAddr::new(address(2), 0)).unwrap();
        wait_readable(&a);
        for number in 0..20 {
            a.send_to(&[round, number], to(&b)).unwrap();
        }
        drop(a);
        for number in 0..20 {
            assert_eq!(b.recv_from(&mut buffer).unwrap().0, 2);
            assert_eq!(buffer[..2], [round, number]);
        }
    }
}

#[test]
fn a_wrong_address_is_reported_with_a_hint() {
    let error = Node::bind("192.0.2.1".parse().unwrap()).unwrap_err().to_string();
    assert!(error.starts_with("cannot listen for peers at 192.0.2.1 port 16385: "), "{error}");
    assert!(error.ends_with("; use an address of this host"), "{error}");
    let error = Node::open_at("/nowhere/x.sock".as_ref()).unwrap_err().to_string();
    let text = "cannot use the node at /nowhere/x.sock: no node listens there; start one with `rds \
                node`";
    assert_eq!(error, text);
}

#[test]
fn many_buffers_form_one_message() {
    let [node] = nodes([1]);
    // Uses the same call as librds_preload.so.
    let parts: Vec<Vec<u8>> = (0..200).map(|at| vec![at as u8; 700]).collect();
    let slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let (fd, binding) = bind_low(node.handle().unwrap(), 0);
    let (to_fd, to_binding) = bind_low(node.handle().unwrap(), 4000);
    binding.set_sndbuf(fd.as_fd(), 1 << 20).unwrap();
    let to = Some((address(1), 4000));
    let sent = rds::socket::send(&binding, fd.as_fd(), outgoing(to, &slices), false).unwrap();
    assert_eq!(sent, 140_000);
    let mut first = vec![0; 70_000];
    let mut second = vec![0; 80_000];
    let mut room = [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)];
    let got = rds::socket::receive(&to_binding, to_fd.as_fd(), &mut room, How::default()).unwrap();
    let expected = |got| matches!(got, Incoming::Message { len: 140_000, total: 140_000, .. });
    assert!(expected(got.incoming), "{got:?}");
    assert!([&first[..], &second[..70_000]].concat() == parts.concat());
}

#[test]
fn a_peer_beyond_the_limit_is_refused() {
    let port = free_port();
    let mut few = options(1, port);
    few.config.peers_max = 1;
    let (near, far) = (Node::start(few).unwrap(), Node::start(options(2, port)).unwrap());
    let (a, b) = (bind(&near, 0), bind(&far, 4000));
    a.send_to(b"one", to(&b)).unwrap();
    let mut buffer = [0; 10];
    b.recv_from(&mut buffer).unwrap();
    let error = a.send_to(b"lost", SocketAddr::new(address(3), 4000)).unwrap_err();
    assert_eq!(error.errno(), rustix::io::Errno::NOMEM.raw_os_error());
    assert!(error.to_string().contains("the node has reached its peer limit; raise peers-max"));
    assert_eq!((counter(&near, "peers_refused"), counter(&near, "send_dropped")), (1, 0));
    // The other peers can still be reached.
    a.send_to(b"two", to(&b)).unwrap();
    assert_eq!(b.recv_from(&mut buffer).unwrap().0, 3);
    b.send_to(b"three", to(&a)).unwrap();
    assert_eq!(a.recv_from(&mut buffer).unwrap().0, 5);
}
