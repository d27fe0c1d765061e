//! Connection establishment: which node connects, when, and how simultaneous connections are
//! resolved.

use std::ops::Range;

use super::*;
use crate::proto::ConnectionState::{Connecting, Down, Error, Up};

#[test]
fn the_smaller_node_connects_regardless_of_the_sender() {
    for (from, to) in [(1, 5), (5, 1)] {
        let mut net = Net::new(&[1, 5]);
        let sender = net.at(from).bind(3000).unwrap();
        let reader = net.at(to).bind(4000).unwrap();
        net.send(sender, from, (to, 4000), b"hi");
        net.pass(Duration::from_secs(3));
        assert_eq!(net.read(to, reader), [(3000, b"hi".to_vec())]);
        assert_eq!(net.pipes.len(), 1);
        assert_eq!(net.pipes[0][0].node, 1, "the smaller node has opened the connection");
        let kicks = u64::from(from == 5);
        assert_eq!(net.at(5).stats().tcp_kicks_sent, kicks);
        assert_eq!(net.at(1).stats().tcp_kicks_received, kicks);
        assert_eq!(net.at(1).stats().tcp_connect_attempts, 1);
    }
}

#[test]
fn both_nodes_may_start_simultaneously() {
    let mut net = Net::new(&[1, 5]);
    let sockets = [1, 5].map(|node| net.at(node).bind(3000).unwrap());
    net.send(sockets[0], 1, (5, 3000), b"up");
    net.send(sockets[1], 5, (1, 3000), b"down");
    net.pass(Duration::from_secs(3));
    assert_eq!(net.read(5, sockets[1]), [(3000, b"up".to_vec())]);
    assert_eq!(net.read(1, sockets[0]), [(3000, b"down".to_vec())]);
    assert_eq!(net.pipes.len(), 1);
}

#[test]
fn the_smaller_node_restores_a_lost_connection() {
    let mut net = Net::new(&[1, 5]);
    let sender = net.at(1).bind(3000).unwrap();
    net.send(sender, 1, (5, 9), b"");
    net.settle();
    for round in 1..5 {
        net.cut();
        net.pass(Duration::from_millis(10));
        assert_eq!(net.pipes.len(), 1, "round {round}");
        assert_eq!(net.at(1).stats().tcp_connect_attempts, 1 + round);
        assert_eq!(net.at(5).stats().conn_reset, round);
    }
}

#[test]
fn attempts_back_off() {
    let mut net = Net::new(&[1]);
    net.unreachable = vec![5];
    let sender = net.at(1).bind(3000).unwrap();
    net.send(sender, 1, (5, 9), b"");
    net.pass(Duration::from_secs(60));
    let attempts = net.at(1).stats().tcp_connect_attempts;
    // Half a second apart on average, once the maximum delay is reached.
    assert!((80..=180).contains(&attempts), "{attempts}");
}

#[test]
fn a_larger_node_keeps_asking_until_the_smaller_one_answers() {
    let mut net = Net::new(&[5]);
    let sender = net.at(5).bind(3000).unwrap();
    net.send(sender, 5, (1, 4000), b"hi");
    net.pass(Duration::from_secs(10));
    net.nodes.insert(1, Net::node(1, 1));
    let reader = net.at(1).bind(4000).unwrap();
    net.pass(Duration::from_secs(3));
    assert_eq!(net.read(1, reader), [(3000, b"hi".to_vec())]);
}

/// The smaller node has lost a connection that looks intact to the larger node.
#[test]
fn a_new_connection_replaces_an_intact_one() {
    let mut net = Net::new(&[1, 5]);
    let sender = net.at(1).bind(3000).unwrap();
    let reader = net.at(5).bind(4000).unwrap();
    net.send(sender, 1, (5, 4000), b"one");
    net.settle();
    net.send(sender, 1, (5, 4000), b"two");
    net.delivers = false;
    net.settle();
    // Data written on the old connection still arrives, but its closure is not seen.
    let old = net.pipes.remove(0);
    let now = net.now;
    net.at(1).lost(now, old[0].link);
    net.pass(Duration::from_millis(1));
    let [near, far] = net.pipes[0].clone();
    assert_eq!(net.at(5).peers().predecessors(far.link), [old[1].link]);
    net.at(5).received(now, old[1].link, &old[0].out);
    // Nothing is sent on the new connection until it has delivered valid data.
    assert!(near.out.len() > MAP_LEN && far.out.is_empty());
    net.at(5).received(now, far.link, &near.out[..47]);
    assert!(!net.at(5).peers().predecessors(far.link).is_empty());
    net.pipes[0][0].out.drain(..47);
    net.delivers = true;
    net.settle();
    assert!(net.at(5).peers().predecessors(far.link).is_empty());
    assert_eq!(net.read(5, reader), [(3000, b"one".to_vec()), (3000, b"two".to_vec())]);
    assert_eq!(net.at(5).stats().recv_drop_old_seq, 1, "it was repeated");
}

#[test]
fn the_state_of_a_connection_shows_failures() {
    let mut node = Node::new(Config::new(address(1), 1, 1));
    let id = node.bind(3000).unwrap();
    let state = |node: &Node| node.peers().connections().next().map(|info| info.state);
    assert_eq!(state(&node), None);
    let connecting = |node: &mut Node| match node.take_order() {
        Some(Order::Connect { link, .. }) => link,
        order => panic!("{order:?}"),
    };
    let mut now = Instant::ZERO;
    node.send(now, id, Outgoing::new(address(5), 4000, b"x".to_vec())).unwrap();
    let link = connecting(&mut node);
    assert_eq!(state(&node), Some(Connecting));
    node.lost(now, link);
    assert_eq!(state(&node), Some(Error), "the next attempt waits");
    now = now + Duration::from_secs(1);
    node.tick(now);
    let link = connecting(&mut node);
    assert_eq!(state(&node), Some(Connecting));
    node.connected(now, link);
    assert_eq!(state(&node), Some(Up));
    // Without any messages, the connection is not needed.
    node.cancel(id, address(5), 4000);
    node.lost(now, link);
    assert_ne!(state(&node), Some(Up));
    let mut idle = Node::new(Config::new(address(5), 1, 1));
    let link = idle.accepted(now, address(1)).unwrap();
    assert_eq!(state(&idle), Some(Up));
    idle.lost(now, link);
    assert_eq!(state(&idle), Some(Down));
}

#[test]
fn a_silent_candidate_is_closed() {
    let mut net = Net::new(&[1, 5]);
    let sender = net.at(1).bind(3000).unwrap();
    net.send(sender, 1, (5, 4000), b"one");
    net.settle();
    let now = net.now;
    let candidate = net.at(5).accepted(now, address(1)).unwrap();
    // Only the newest candidate counts.
    let newer = net.at(5).accepted(now, address(1)).unwrap();
    assert_eq!(net.at(5).take_order(), Some(Order::Close(candidate)));
    let later = now + Duration::from_secs(10);
    assert!(net.at(5).tick(later));
    assert_eq!(net.at(5).take_order(), Some(Order::Close(newer)));
    assert_eq!(net.pipes.len(), 1);
    assert_eq!(net.at(5).peers().connections().next().map(|info| info.state), Some(Up));
}

#[test]
fn a_malformed_candidate_is_harmless() {
    let mut net = Net::new(&[1, 5]);
    let sender = net.at(1).bind(3000).unwrap();
    net.send(sender, 1, (5, 4000), b"one");
    net.settle();
    let now = net.now;
    let candidate = net.at(5).accepted(now, address(1)).unwrap();
    net.at(5).received(now, candidate, &[0xff; HEADER_LEN]);
    assert_eq!(net.at(5).take_order(), Some(Order::Close(candidate)));
    assert_eq!(net.at(5).stats().recv_bad_stream, 1);
    assert_eq!(net.at(5).peers().connections().next().map(|info| info.state), Some(Up));
}

#[test]
fn a_connection_from_a_larger_node_requests_a_connection() {
    let mut node = Net::node(1, 1);
    let now = Instant::ZERO;
    assert_eq!(node.accepted(now, address(5)), None);
    assert!(matches!(node.take_order(), Some(Order::Connect { to, .. }) if to == address(5)));
    // The rate is limited no matter what the peer does.
    for _ in 0..100 {
        assert_eq!(node.accepted(now, address(5)), None);
    }
    assert_eq!(node.take_order(), None);
    assert_eq!(node.accepted(now, address(1)), None, "its own address");
    assert_eq!(node.accepted(now, "fd00::9".parse().unwrap()), None, "the other family");
}

#[test]
fn silent_connections_only_evict_each_other() {
    let mut config = Config::new(address(250), 1, 1);
    config.peers_max = 8;
    let mut node = Node::new(config);
    let proven = node.accepted(Instant::ZERO, address(1)).unwrap();
    node.received(Instant::ZERO, proven, &Header::default().encode());
    for last in 2..200 {
        let now = Instant::ZERO + Duration::from_secs(last.into());
        assert!(node.accepted(now, address(last)).is_some());
    }
    let orders = std::iter::from_fn(|| node.take_order()).count();
    assert_eq!((orders, node.peers().connections().count()), (191, 8));
    assert_eq!(node.stats().tcp_crowded_out, 191);
    assert!(node.peers().connections().any(|info| info.peer == address(1) && info.state == Up));
}

/// New peers whose first bytes have not been read must not evict each other while others are away.
#[test]
fn new_peers_replace_those_that_are_away() {
    let mut config = Config::new(address(250), 1, 1);
    config.peers_max = 8;
    let mut node = Node::new(config);
    for last in 1..9 {
        let link = node.accepted(Instant::ZERO, address(last)).unwrap();
        node.received(Instant::ZERO, link, &Header::default().encode());
        node.lost(Instant::ZERO, link);
    }
    let now = Instant::ZERO + Duration::from_secs(5);
    let links: Vec<_> = (11..19).map(|last| node.accepted(now, address(last)).unwrap()).collect();
    for link in links {
        node.received(now, link, &Header::default().encode());
    }
    let up = node.peers().connections().filter(|info| info.state == Up).count();
    assert_eq!((up, node.stats().tcp_crowded_out), (8, 0));
}

#[test]
fn known_peers_are_not_evicted() {
    let mut config = Config::new(address(250), 1, 1);
    config.peers_max = 4;
    let mut node = Node::new(config);
    for last in 1..5 {
        let link = node.accepted(Instant::ZERO, address(last)).unwrap();
        node.received(Instant::ZERO, link, &Header::default().encode());
    }
    assert_eq!(node.accepted(Instant::ZERO, address(9)), None);
    let socket = node.bind(3000).unwrap();
    let sent = node.send(Instant::ZERO, socket, Outgoing::new(address(9), 1, Vec::new()));
    assert_eq!(sent, Err(SendError::TooManyPeers(4)));
}

/// Adds a peer that has pinged and disconnected.
fn pinged_once(net: &mut Net, own: u8, from: u8) {
    net.nodes.insert(from, Net::node(from, 1));
    let socket = net.at(from).bind(3000).unwrap();
    net.send(socket, from, (own, 0), b"");
    net.settle();
    assert_eq!(net.read(from, socket).len(), 1);
    // The last answer is never delivered.
    net.delivers = false;
    net.send(socket, from, (own, 0), b"");
    net.settle();
    let pings: Vec<u8> = net.pipes[0].iter().flat_map(|end| end.out.clone()).collect();
    let near = net.pipes[0].iter().find(|end| end.node == own).unwrap().link;
    let now = net.now;
    net.at(own).received(now, near, &pings);
    net.nodes.remove(&from);
    net.cut_at(own);
    net.delivers = true;
}

#[test]
fn peers_that_only_pinged_are_forgotten() {
    for (own, from) in [(1, 9), (9, 1)] {
        let mut net = Net::new(&[own]);
        pinged_once(&mut net, own, from);
        let left: Vec<usize> = net.at(own).peers().connections().map(|info| info.queued).collect();
        assert_eq!(left, [0], "the answer is dropped");
        net.pass(Duration::from_secs(290));
        assert_eq!(net.at(own).peers().connections().count(), 1);
        net.pass(Duration::from_secs(20));
        assert_eq!(net.at(own).peers().connections().count(), 0);
        let attempts = net.at(own).stats().tcp_connect_attempts;
        net.pass(Duration::from_secs(60));
        assert_eq!(net.at(own).stats().tcp_connect_attempts, attempts);
    }
}

#[test]
fn peers_that_only_pinged_are_evicted_for_others() {
    let mut net = Net::new(&[]);
    let mut config = Config::new(address(1), 1, 1);
    config.peers_max = 2;
    net.nodes.insert(1, Node::new(config));
    pinged_once(&mut net, 1, 5);
    pinged_once(&mut net, 1, 6);
    let (now, socket) = (net.now, net.at(1).bind(3000).unwrap());
    assert!(net.at(1).peers().is_crowded());
    for last in [7, 8] {
        net.at(1).reach(now, address(last)).unwrap();
        net.at(1).send(now, socket, Outgoing::new(address(last), 9, Vec::new())).unwrap();
    }
    assert_eq!(net.at(1).reach(now, address(9)), Err(SendError::TooManyPeers(2)));
    assert_eq!(net.at(1).stats().peers_refused, 1);
}

/// A peer whose messages were read by users may return with a repeated message.
#[test]
fn peers_that_sent_messages_are_kept() {
    let mut net = Net::new(&[1, 5]);
    let reader = net.at(1).bind(4000).unwrap();
    let sender = net.at(5).bind(3000).unwrap();
    net.send(sender, 5, (1, 4000), b"one");
    net.settle();
    assert_eq!(net.read(1, reader).len(), 1);
    net.nodes.remove(&5);
    net.cut_at(1);
    net.pass(Duration::from_secs(1000));
    assert_eq!(net.at(1).peers().connections().count(), 1);
}

/// Lets a peer accept each connection, send `greeting` and close the connection, during `time`.
/// Returns the number of attempts to connect.
fn attempts_at_a_closing_peer(node: &mut Node, greeting: &[u8], time: Range<Instant>) -> u64 {
    let begin = node.stats().tcp_connect_attempts;
    let mut now = time.start;
    loop {
        while let Some(order) = node.take_order() {
            if let Order::Connect { link, .. } = order {
                node.connected(now, link);
                node.received(now, link, greeting);
                node.lost(now, link);
            }
        }
        let attempts = node.stats().tcp_connect_attempts - begin;
        match node.deadline().filter(|at| *at <= time.end && attempts < 10_000) {
            Some(at) => now = now.max(at),
            None => return attempts,
        }
        node.tick(now);
    }
}

#[test]
fn connections_that_carry_nothing_back_off() {
    let map = Header { len: MAP_LEN as u32, flags: 1, ..Header::default() };
    let map = [map.encode().to_vec(), vec![0; MAP_LEN]].concat();
    for greeting in [&[][..], &map] {
        let mut node = Net::node(1, 1);
        let socket = node.bind(3000).unwrap();
        node.send(Instant::ZERO, socket, Outgoing::new(address(5), 9, b"x".to_vec())).unwrap();
        let minute = Instant::ZERO + Duration::from_secs(60);
        let attempts = attempts_at_a_closing_peer(&mut node, greeting, Instant::ZERO..minute);
        assert!((80..=180).contains(&attempts), "{attempts}");
        // Without any messages, there is no reason to continue.
        node.close_socket(socket);
        let soon = minute + Duration::from_secs(5);
        attempts_at_a_closing_peer(&mut node, greeting, minute..soon);
        let hour = minute + Duration::from_secs(3600);
        assert_eq!(attempts_at_a_closing_peer(&mut node, greeting, soon..hour), 0);
        // The peer may have come back by itself.
        assert_eq!(node.accepted(hour, address(5)), None, "a request to connect");
        let later = hour + Duration::from_secs(60);
        assert!(attempts_at_a_closing_peer(&mut node, greeting, hour..later) > 0);
    }
}

/// NAT may reorder the addresses: then both nodes believe that they are smaller, or both larger.
#[test]
fn nodes_that_disagree_about_their_order_back_off() {
    // The nodes' own addresses, and the address of the first node as the second node sees it.
    for [first, second, translated] in [[1, 5, 9], [9, 5, 1]] {
        let mut nodes = [Net::node(first, 1), Net::node(second, 1)];
        let sees = [second, translated];
        let mut now = Instant::ZERO;
        for at in [0, 1] {
            let socket = nodes[at].bind(3000).unwrap();
            let message = Outgoing::new(address(sees[at]), 9, b"x".to_vec());
            nodes[at].send(now, socket, message).unwrap();
        }
        let count = |nodes: &[Node; 2]| -> u64 {
            let of = |node: &Node| node.stats().tcp_connect_attempts + node.stats().tcp_kicks_sent;
            nodes.iter().map(of).sum()
        };
        loop {
            let mut is_busy = true;
            while std::mem::take(&mut is_busy) {
                for at in [0, 1] {
                    while let Some(order) = nodes[at].take_order() {
                        let Order::Connect { link, .. } = order else { continue };
                        is_busy = true;
                        let accepted = nodes[1 - at].accepted(now, address(sees[1 - at]));
                        nodes[at].connected(now, link);
                        match accepted {
                            Some(accepted) => nodes[1 - at].lost(now, accepted),
                            None => nodes[at].lost(now, link),
                        }
                    }
                }
            }
            let deadline = nodes.iter().filter_map(Node::deadline).min();
            let ends_at = Instant::ZERO + Duration::from_secs(60);
            let Some(next) = deadline.filter(|at| *at <= ends_at && count(&nodes) < 10_000) else {
                break;
            };
            now = now.max(next);
            for node in &mut nodes {
                node.tick(now);
            }
        }
        let attempts = count(&nodes);
        assert!((100..=600).contains(&attempts), "{attempts}");
    }
}
