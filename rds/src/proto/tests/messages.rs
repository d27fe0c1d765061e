//! Delivery of messages: in order, exactly once, within limits.

use super::*;
use crate::wire::CongestionMap;

/// Connected nodes 1 and 5, with a socket on port 3000 of node 1 and a socket on port 4000 of node
/// 5.
fn connected() -> (Net, SocketId, SocketId) {
    let mut net = Net::new(&[1, 5]);
    let sender = net.at(1).bind(3000).unwrap();
    let reader = net.at(5).bind(4000).unwrap();
    net.send(sender, 1, (5, 4000), b"first");
    net.pass(Duration::from_millis(1));
    assert_eq!(net.read(5, reader).len(), 1);
    (net, sender, reader)
}

fn in_flight(net: &mut Net, node: u8) -> usize {
    net.at(node).ports().sockets().map(|info| info.in_flight).sum()
}

#[test]
fn messages_arrive_once_and_in_order_despite_disconnects() {
    let (mut net, sender, reader) = connected();
    let mut expected = Vec::new();
    for round in 0..50_u8 {
        net.send(sender, 1, (5, 4000), &[round; 100]);
        expected.push((3000, vec![round; 100]));
        net.delivers = false;
        net.settle();
        // Part of the written data arrives without the sender noticing.
        let now = net.now;
        let [near, far] = net.pipes[0].clone();
        let arrives = near.out.len() * usize::from(round % 5) / 4;
        net.at(5).received(now, far.link, &near.out[..arrives]);
        net.cut();
        net.delivers = true;
        net.pass(Duration::from_millis(20));
    }
    assert_eq!(net.read(5, reader), expected);
    let stats = (net.at(1).stats(), net.at(5).stats());
    assert!(stats.0.send_retransmitted >= 50 && stats.1.recv_drop_old_seq > 0, "{stats:?}");
    assert_eq!(in_flight(&mut net, 1), 0);
    assert_eq!(net.at(1).memory(), (0, 0));
}

#[test]
fn buffers_are_freed_only_when_acknowledged() {
    let (mut net, sender, _) = connected();
    net.delivers = false;
    net.send(sender, 1, (5, 4000), &[7; 1000]);
    net.settle();
    assert_eq!(in_flight(&mut net, 1), 1000);
    let link = net.pipes[0][0].link;
    let written = net.at(1).awaits_ack(link).unwrap().written;
    net.at(1).acked(link, written - 1);
    assert_eq!(in_flight(&mut net, 1), 1000);
    net.at(1).acked(link, written);
    assert_eq!(in_flight(&mut net, 1), 0);
    assert_eq!(net.at(1).awaits_ack(link), None);
}

#[test]
fn tcp_acknowledgments_of_an_unaccepted_connection_do_not_count() {
    let (mut net, sender, reader) = connected();
    net.cut();
    net.delivers = false;
    net.send(sender, 1, (5, 4000), &[7; 1000]);
    net.pass(Duration::from_millis(20));
    // Behaves like Linux 6.1 before it has seen the end of the previous connection: its TCP
    // acknowledges everything and then resets the new connection.
    let [near, far] = net.pipes[0].clone();
    assert!(near.written > 1000);
    net.at(1).acked(near.link, near.written);
    assert_eq!(in_flight(&mut net, 1), 1000);
    net.end(5, far.link);
    let now = net.now;
    net.at(5).lost(now, far.link);
    net.delivers = true;
    net.pass(Duration::from_millis(20));
    assert_eq!(net.read(5, reader), [(3000, vec![7; 1000])]);
    assert_eq!(in_flight(&mut net, 1), 0);
}

#[test]
fn a_full_socket_is_refused_and_notified() {
    let (mut net, sender, _) = connected();
    net.at(1).set_buffers(sender, Some(2000), None);
    net.delivers = false;
    for _ in 0..2 {
        net.send(sender, 1, (5, 4000), &[7; 1000]);
    }
    let to = address(5);
    assert_eq!(net.at(1).may_send(sender, to, 4000, 1), Err(SendError::Full));
    let long = SendError::TooLong { len: 2001, max: 2000 };
    assert_eq!(net.at(1).may_send(sender, to, 4000, 2001), Err(long));
    while net.at(1).ports_mut().take_event().is_some() {}
    net.delivers = true;
    net.settle();
    assert_eq!(net.at(1).ports_mut().take_event(), Some(Event::Writable(sender)));
    assert_eq!(net.at(1).may_send(sender, to, 4000, 1), Ok(()));
}

#[test]
fn invalid_addresses_and_lengths_are_refused() {
    let (mut net, sender, _) = connected();
    net.at(1).set_buffers(sender, Some(2 << 20), None);
    let node = net.at(1);
    for text in ["0.0.0.0", "255.255.255.255", "224.0.0.1"] {
        let to: IpAddr = text.parse().unwrap();
        assert_eq!(node.may_send(sender, to, 1, 0), Err(SendError::Address(to)));
    }
    let to = "fd00::1".parse().unwrap();
    assert_eq!(node.may_send(sender, to, 1, 0), Err(SendError::Family(to)));
    let max = 1 << 20;
    let long = SendError::TooLong { len: max + 1, max };
    assert_eq!(node.may_send(sender, address(5), 4000, max + 1), Err(long));
    assert_eq!(node.may_send(sender, address(5), 4000, max), Ok(()));
    node.close_socket(sender);
    assert_eq!(node.may_send(sender, address(5), 4000, 1), Err(SendError::Closed));
}

#[test]
fn a_slow_reader_stops_senders_to_its_port_only() {
    let (mut net, sender, reader) = connected();
    let other = net.at(5).bind(4001).unwrap();
    net.at(5).set_buffers(reader, None, Some(4000));
    let to = address(5);
    let mut sent = 0;
    while net.at(1).may_send(sender, to, 4000, 500) == Ok(()) {
        net.send(sender, 1, (5, 4000), &[1; 500]);
        net.settle();
        sent += 1;
        assert!(sent < 100);
    }
    assert_eq!(net.at(1).may_send(sender, to, 4000, 500), Err(SendError::Congested));
    assert_eq!(sent, 4000 / 500 + 1);
    // The other socket's port is one higher, so it is in the next group.
    net.send(sender, 1, (5, 4001), b"passes");
    net.settle();
    assert_eq!(net.read(5, other).len(), 1);
    // Room on the port is reported only on request.
    net.at(1).watch(sender, address(5), 4000);
    while net.at(1).ports_mut().take_event().is_some() {}
    // A port that is not congested is reported immediately.
    net.at(1).watch(sender, address(5), 4001);
    assert_eq!(net.at(1).ports_mut().take_event(), Some(Event::Readable(sender)));
    assert_eq!(net.at(1).ports_mut().take_updates(sender), 1 << (4001 % 64));
    assert_eq!(net.read(5, reader).len(), sent);
    net.settle();
    let events: Vec<Event> = std::iter::from_fn(|| net.at(1).ports_mut().take_event()).collect();
    assert_eq!(events, [Event::Congestion(address(5)), Event::Readable(sender)]);
    assert_eq!(net.at(1).ports_mut().take_updates(sender), 1 << (4000 % 64));
    assert_eq!(net.at(1).ports_mut().take_updates(sender), 0);
    assert_eq!(net.at(1).may_send(sender, to, 4000, 500), Ok(()));
    assert_eq!(net.at(1).congestion(address(5)), Some(&CongestionMap::default()));
}

#[test]
fn canceled_messages_are_not_resent() {
    let (mut net, sender, reader) = connected();
    let other = net.at(5).bind(4001).unwrap();
    net.delivers = false;
    net.send(sender, 1, (5, 4000), b"lost");
    net.send(sender, 1, (5, 4001), b"kept");
    net.settle();
    net.unreachable = vec![5];
    net.cut();
    net.send(sender, 1, (5, 4000), b"never");
    net.at(1).cancel(sender, address(5), 4000);
    assert_eq!(in_flight(&mut net, 1), 4);
    (net.delivers, net.unreachable) = (true, Vec::new());
    net.pass(Duration::from_secs(3));
    assert_eq!(net.read(5, reader), []);
    assert_eq!(net.read(5, other), [(3000, b"kept".to_vec())]);
    assert_eq!(net.at(1).memory(), (0, 0));
}

#[test]
fn canceling_a_message_in_flight_frees_its_buffer() {
    let (mut net, sender, reader) = connected();
    net.delivers = false;
    net.send(sender, 1, (5, 4000), b"sent");
    net.settle();
    net.at(1).cancel(sender, address(5), 4000);
    assert_eq!(in_flight(&mut net, 1), 0);
    net.delivers = true;
    net.settle();
    assert_eq!(net.read(5, reader), [(3000, b"sent".to_vec())]);
    assert_eq!(net.at(1).memory(), (0, 0));
}

#[test]
fn a_closed_socket_sends_pending_messages_at_most_once() {
    let (mut net, sender, reader) = connected();
    net.send(sender, 1, (5, 4000), b"last words");
    net.at(1).close_socket(sender);
    net.settle();
    assert_eq!(net.read(5, reader), [(3000, b"last words".to_vec())]);
    let sender = net.at(1).bind(3000).unwrap();
    net.delivers = false;
    net.send(sender, 1, (5, 4000), b"gone");
    net.settle();
    net.at(1).close_socket(sender);
    net.cut();
    net.delivers = true;
    net.pass(Duration::from_secs(3));
    assert_eq!(net.read(5, reader), []);
    assert_eq!(net.at(1).memory(), (0, 0));
    // The port now has a new owner, which is not charged.
    let next = net.at(1).bind(3000).unwrap();
    net.send(next, 1, (5, 4000), b"next");
    net.settle();
    assert_eq!(net.read(5, reader), [(3000, b"next".to_vec())]);
}

/// Messages queued behind a message that is not resent are not sent either.
#[test]
fn messages_of_a_closed_socket_arrive_without_gaps() {
    for is_noticed in [true, false] {
        let (mut net, sender, reader) = connected();
        net.delivers = false;
        net.send(sender, 1, (5, 4000), b"lost");
        net.settle();
        net.send(sender, 1, (5, 4000), b"behind it");
        net.at(1).close_socket(sender);
        if is_noticed {
            for _ in 0..2 {
                net.now = net.now + Duration::from_millis(200);
                let now = net.now;
                net.at(1).tick(now);
            }
        }
        net.cut();
        net.delivers = true;
        net.pass(Duration::from_secs(3));
        assert_eq!(net.read(5, reader), []);
        assert_eq!(net.at(1).memory(), (0, 0));
    }
}

#[test]
fn a_node_can_send_to_itself() {
    let mut net = Net::new(&[1]);
    let sender = net.at(1).bind(3000).unwrap();
    let reader = net.at(1).bind(4000).unwrap();
    net.send(sender, 1, (1, 4000), b"me");
    net.send(sender, 1, (1, 0), b"");
    assert_eq!(net.read(1, reader), [(3000, b"me".to_vec())]);
    assert_eq!(net.read(1, sender), [(0, Vec::new())], "it answers its own ping");
    net.at(1).set_buffers(reader, None, Some(1000));
    for _ in 0..3 {
        net.send(sender, 1, (1, 4000), &[0; 400]);
    }
    assert_eq!(net.at(1).may_send(sender, address(1), 4000, 1), Err(SendError::Congested));
    assert!(net.pipes.is_empty());
}

/// Users are not obliged to call `may_send`.
#[test]
fn memory_is_bounded_for_messages_to_the_same_node() {
    let mut config = Config::new(address(1), 1, 1);
    (config.rcvbuf, config.port_memory, config.memory) = (5000, 10_000, 15_000);
    let mut node = Node::new(config);
    let ids = [4000, 4001, 4002].map(|port| node.bind(port).unwrap());
    for id in ids {
        for _ in 0..20 {
            let message = Outgoing::new(address(1), id.port, vec![7; 1000]);
            node.send(Instant::ZERO, id, message).unwrap();
        }
        assert!(node.ports().sockets().all(|info| info.waiting <= 10_000));
    }
    let (received, sent) = node.memory();
    assert!(received <= 15_000 && received > 13_000 && sent == 0, "{received} {sent}");
    let kept: usize = ids.iter().map(|id| std::iter::from_fn(|| node.receive(*id)).count()).sum();
    assert_eq!(kept as u64 + node.stats().recv_drop_no_memory, 60);
    // Memory for unread ping answers is also bounded.
    for _ in 0..1000 {
        node.send(Instant::ZERO, ids[0], Outgoing::new(address(1), 0, Vec::new())).unwrap();
    }
    assert_eq!(node.memory().0, 78 * MESSAGE_COST);
    assert_eq!(node.stats().send_pong_dropped, 922);
}

/// For a user in another process, the message already counts as sent.
#[test]
fn messages_beyond_the_peer_limit_are_counted() {
    let mut config = Config::new(address(1), 1, 1);
    config.peers_max = 2;
    let mut node = Node::new(config);
    let id = node.bind(4000).unwrap();
    let mut send =
        |last| node.send(Instant::ZERO, id, Outgoing::new(address(last), 9, vec![7; 10]));
    assert_eq!([send(2), send(3)], [Ok(()), Ok(())]);
    assert_eq!(send(4), Err(SendError::TooManyPeers(2)));
    assert_eq!(node.stats().send_dropped, 1);
}

#[test]
fn memory_is_bounded_for_messages_from_peers() {
    let mut config = Config::new(address(5), 1, 1);
    config.port_memory = 10_000;
    config.peer_memory = 15_000;
    config.memory = 25_000;
    let mut node = Node::new(config);
    let now = Instant::ZERO;
    let sockets = [4000, 4001, 4002].map(|port| node.bind(port).unwrap());
    let message = |sequence, dport| {
        let header = Header { sequence, len: 1000, sport: 9, dport, ..Header::default() };
        [header.encode().to_vec(), vec![7; 1000]].concat()
    };
    let mut dropped = 0;
    for peer in 1..4 {
        let link = node.accepted(now, address(peer)).unwrap();
        for (sequence, port) in (1..).zip([4000, 4001, 4002].repeat(12)) {
            node.received(now, link, &message(sequence, port));
        }
        let held: usize = node.peers().connections().map(|info| info.held).sum();
        assert_eq!(held, node.memory().0);
        assert!(node.peers().connections().all(|info| info.held <= 15_000));
        assert!(node.ports().sockets().all(|info| info.waiting <= 10_000));
        assert!(held <= 25_000);
        dropped = node.stats().recv_drop_no_memory;
    }
    assert!(dropped > 0);
    let read: usize =
        sockets.iter().map(|id| std::iter::from_fn(|| node.receive(*id)).count()).sum();
    assert_eq!(read as u64 + dropped, 3 * 36);
    assert_eq!(node.memory(), (0, 0));
    assert!(node.peers().connections().all(|info| info.held == 0));
}

#[test]
fn incomplete_messages_count_towards_the_limit() {
    let mut config = Config::new(address(50), 1, 1);
    (config.memory, config.peer_memory) = (300_000, 120_000);
    let mut node = Node::new(config);
    node.bind(4000).unwrap();
    let now = Instant::ZERO;
    let header = Header { sequence: 1, len: 100_000, sport: 9, dport: 4000, ..Header::default() };
    for peer in 1..20 {
        let link = node.accepted(now, address(peer)).unwrap();
        node.received(now, link, &header.encode());
        node.received(now, link, &[7; 90_000]);
        assert!(node.memory().0 <= 300_000, "{}", node.memory().0);
    }
    assert!(node.memory().0 > 100_000);
}
