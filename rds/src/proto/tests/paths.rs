//! Several connections between two nodes: their number, the messages they carry, and the effect of
//! a broken connection.

use super::*;
use crate::proto::ConnectionState;
use crate::wire::CONG_BITMAP;

/// Number of the sender's sockets: enough for each path to have some.
const SOCKETS: u16 = 64;

fn node(last: u8, life: u32, paths: usize) -> Node {
    let mut config = Config::new(address(last), life, u64::from(last));
    config.paths = paths;
    Node::new(config)
}

/// Nodes 1 and 5 with these numbers of paths, and sockets that send from one node to the other.
struct Pair {
    net: Net,
    from: u8,
    to: u8,
    senders: Vec<SocketId>,
    reader: SocketId,
}

impl Pair {
    fn new(paths: [usize; 2], from: u8) -> Self {
        let mut net = Net::new(&[]);
        net.nodes.insert(1, node(1, 1, paths[0]));
        net.nodes.insert(5, node(5, 1, paths[1]));
        let to = 6 - from;
        let ports = 3000..3000 + SOCKETS;
        let senders = ports.map(|port| net.at(from).bind(port).unwrap()).collect();
        let reader = net.at(to).bind(4000).unwrap();
        net.at(to).set_buffers(reader, None, Some(1 << 20));
        let mut pair = Self { net, from, to, senders, reader };
        pair.send(b"0");
        pair
    }

    /// Sends a message from each socket.
    fn send(&mut self, payload: &[u8]) {
        for id in self.senders.clone() {
            self.net.send(id, self.from, (self.to, 4000), payload);
        }
    }

    /// Lets three seconds pass, and returns the payloads that arrived, in order, by port.
    fn read(&mut self) -> BTreeMap<u16, Vec<u8>> {
        self.net.pass(Duration::from_secs(3));
        let mut found: BTreeMap<u16, Vec<u8>> = BTreeMap::new();
        for (port, payload) in self.net.read(self.to, self.reader) {
            found.entry(port).or_default().extend(payload);
        }
        found
    }

    /// Returns the numbers of the paths that are up at a node.
    fn up(&mut self, node: u8) -> Vec<usize> {
        let all = self.net.at(node).peers().connections();
        all.filter(|info| info.state == ConnectionState::Up).map(|info| info.path).collect()
    }

    fn all(payload: &[u8]) -> BTreeMap<u16, Vec<u8>> {
        (3000..3000 + SOCKETS).map(|port| (port, payload.to_vec())).collect()
    }
}

#[test]
fn two_nodes_use_as_many_paths_as_both_support() {
    for (paths, count) in [([8, 8], 8), ([8, 3], 3), ([2, 8], 2), ([8, 1], 1), ([1, 8], 1)] {
        for from in [1, 5] {
            let mut pair = Pair::new(paths, from);
            assert_eq!(pair.read(), Pair::all(b"0"), "{paths:?}");
            let expected: Vec<usize> = (0..count).collect();
            assert_eq!((pair.up(1), pair.up(5)), (expected.clone(), expected), "{paths:?}");
            assert_eq!(pair.net.pipes.len(), count);
            let carried = pair.net.at(from).peers().connections().map(|info| info.next_tx);
            let least = 3 + u64::from(SOCKETS) / 8 / 4;
            assert!(carried.into_iter().all(|next_tx| next_tx >= least), "{paths:?}");
            assert_eq!(pair.net.at(from).memory().1, 0);
        }
    }
}

#[test]
fn a_map_announces_its_path_and_the_number_of_paths() {
    let first = |paths| {
        let mut node = node(1, 0x0102_0304, paths);
        let id = node.bind(3000).unwrap();
        node.send(Instant::ZERO, id, Outgoing::new(address(5), 4000, Vec::new())).unwrap();
        let Some(Order::Connect { link, .. }) = node.take_order() else { panic!() };
        node.connected(Instant::ZERO, link);
        let mut room = [IoSlice::new(&[]); 8];
        let count = node.output(link, &mut room);
        let stream: Vec<u8> = room[..count].iter().flat_map(|slice| slice.to_vec()).collect();
        frames(&stream).into_iter().map(|(header, _)| header).collect::<Vec<_>>()
    };
    let headers = first(8);
    assert_eq!(headers[0].flags, CONG_BITMAP);
    assert_eq!(headers[0].extensions, [5, 0, 8, 6, 1, 2, 3, 4, 8, 0, 0, 0, 0, 0, 0, 0]);
    // To a kernel peer, this announces a node with one connection.
    assert_eq!(headers[1].extensions, [5, 0, 1, 6, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(first(1)[0].extensions, [6, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_broken_path_affects_only_its_own_messages() {
    for from in [1, 5] {
        let mut pair = Pair::new([8, 8], from);
        pair.read();
        for (round, path) in (1..).zip([3, 0, 7, 3]) {
            pair.net.delivers = false;
            pair.send(b"1");
            pair.net.settle();
            let (own, to) = (pair.from, pair.to);
            let link = pair.net.at(own).peers().established(address(to))[path];
            // Only bytes on this path are lost.
            pair.net.end(own, link);
            let now = pair.net.now;
            pair.net.at(own).lost(now, link);
            pair.net.delivers = true;
            pair.send(b"2");
            assert_eq!(pair.read(), Pair::all(b"12"), "path {path}");
            assert_eq!(pair.up(5).len(), 8, "path {path}");
            let stats = pair.net.at(own).stats();
            assert_eq!(stats.conn_reset, round, "the others are intact");
            assert!(stats.send_retransmitted < round * u64::from(SOCKETS) / 2);
        }
    }
}

#[test]
fn all_paths_return_after_all_are_broken() {
    for from in [1, 5] {
        let mut pair = Pair::new([8, 8], from);
        pair.read();
        for _ in 0..5 {
            pair.net.delivers = false;
            pair.send(b"1");
            pair.net.settle();
            pair.net.cut();
            pair.net.delivers = true;
            pair.send(b"2");
            assert_eq!(pair.read(), Pair::all(b"12"));
            assert_eq!((pair.up(1).len(), pair.up(5).len()), (8, 8));
        }
    }
}

/// The first path is down, and the node that connects has not noticed it.
#[test]
fn messages_of_other_paths_restore_the_first_one() {
    let mut pair = Pair::new([8, 8], 5);
    pair.read();
    let links = pair.net.at(5).peers().established(address(1));
    let now = pair.net.now;
    pair.net.at(5).lost(now, links[0]);
    pair.send(b"1");
    let link = pair.net.at(1).peers().established(address(5))[0];
    pair.net.pipes.retain(|pipe| pipe.iter().all(|end| (end.node, end.link) != (1, link)));
    pair.net.settle();
    // Our request for a connection makes the other node write, which reveals the loss.
    let now = pair.net.now;
    pair.net.at(1).lost(now, link);
    assert_eq!(pair.read(), Pair::all(b"1"));
    assert_eq!((pair.up(1).len(), pair.up(5).len()), (8, 8));
}

#[test]
fn a_restarted_peer_may_have_another_number_of_paths() {
    for from in [1, 5] {
        for paths in [1, 3, 8] {
            let mut pair = Pair::new([8, 8], from);
            pair.read();
            let to = pair.to;
            pair.net.nodes.insert(to, node(to, 2, paths));
            pair.reader = pair.net.at(to).bind(4000).unwrap();
            pair.net.at(to).set_buffers(pair.reader, None, Some(1 << 20));
            pair.net.cut_at(from);
            pair.send(b"1");
            pair.send(b"2");
            assert_eq!(pair.read(), Pair::all(b"12"), "{paths} paths, from {from}");
            assert_eq!((pair.up(1).len(), pair.up(5).len()), (paths, paths));
        }
    }
}

/// Connects the simulated peer 1 to node 5 and sends a map of this path and generation.
fn accept_map(node: &mut Node, path: u8, generation: u32) -> LinkId {
    let now = Instant::ZERO;
    let link = node.accepted(now, address(1)).unwrap();
    input_map(node, link, path, generation);
    link
}

fn input_map(node: &mut Node, link: LinkId, path: u8, generation: u32) {
    let (npaths, path, generation) = (Some(8), Some(path), Some(generation));
    let extensions = Extensions { npaths, generation, path }.encode();
    let len = MAP_LEN as u32;
    let header = Header { flags: CONG_BITMAP, len, extensions, ..Header::default() };
    node.received(Instant::ZERO, link, &[&header.encode()[..], &[0; MAP_LEN]].concat());
}

fn closed(node: &mut Node) -> Vec<LinkId> {
    let each = |order| match order {
        Order::Close(link) => link,
        Order::Connect { .. } => panic!("{order:?}"),
    };
    std::iter::from_fn(|| node.take_order()).map(each).collect()
}

#[test]
fn late_connections_do_not_replace_newer_ones() {
    let mut node = node(5, 1, 8);
    let first = accept_map(&mut node, 0, 7);
    let late = node.accepted(Instant::ZERO, address(1)).unwrap();
    let newer = accept_map(&mut node, 3, 7);
    input_map(&mut node, late, 3, 7);
    assert_eq!(closed(&mut node), [late]);
    // A newer connection does replace it.
    let newest = accept_map(&mut node, 3, 7);
    assert_eq!(closed(&mut node), [newer]);
    assert_eq!(node.peers().established(address(1)), [first, newest]);
}

#[test]
fn another_run_closes_the_connections_of_the_former_one() {
    let mut node = node(5, 1, 8);
    let former = [0, 3].map(|path| accept_map(&mut node, path, 7));
    let late = node.accepted(Instant::ZERO, address(1)).unwrap();
    let first = accept_map(&mut node, 0, 8);
    assert_eq!(closed(&mut node), former);
    // A connection from the earlier run, which is read late.
    input_map(&mut node, late, 4, 7);
    assert_eq!(closed(&mut node), [late]);
    assert_eq!(node.peers().established(address(1)), [first]);
}

/// The address has moved to another host and back.
#[test]
fn a_former_run_may_return() {
    let mut node = node(5, 1, 8);
    let mut last = accept_map(&mut node, 0, 7);
    for generation in [8, 7, 8, 7] {
        node.lost(Instant::ZERO, last);
        last = accept_map(&mut node, 0, generation);
        assert_eq!(node.peers().established(address(1)), [last], "{generation}");
    }
}

#[test]
fn accepted_connections_without_data_are_limited() {
    let mut node = node(5, 1, 8);
    let all: Vec<_> = (0..100).map(|_| node.accepted(Instant::ZERO, address(1)).unwrap()).collect();
    assert_eq!(closed(&mut node), all[..92]);
    assert_eq!(node.peers().candidates(address(1)), all[92..]);
    assert!(node.tick(Instant::ZERO + Duration::from_secs(10)));
    assert_eq!(closed(&mut node), all[92..]);
}

/// An earlier run of the node had more paths.
#[test]
fn paths_beyond_the_limit_are_refused() {
    let mut node = node(5, 1, 2);
    let link = accept_map(&mut node, 2, 7);
    assert_eq!(closed(&mut node), [link]);
}

/// A connection for a second path reaches a peer that has restarted with only one path. The peer
/// mistakes the connection for its only connection, and repeats messages on the next connection.
#[test]
fn a_peer_with_fewer_paths_repeats_messages_on_another_connection() {
    let mut node = node(1, 1, 8);
    let now = Instant::ZERO;
    let (sender, reader) = (node.bind(3000).unwrap(), node.bind(4000).unwrap());
    node.send(now, sender, Outgoing::new(address(5), 4000, Vec::new())).unwrap();
    let connect = |node: &mut Node, now| {
        node.tick(now);
        let links = std::iter::from_fn(|| node.take_order()).filter_map(|order| match order {
            Order::Connect { link, .. } => Some(link),
            Order::Close(_) => None,
        });
        links.collect::<Vec<_>>()
    };
    let first = connect(&mut node, now)[0];
    node.connected(now, first);
    input_map(&mut node, first, 0, 7);
    let later = now + Duration::from_millis(10);
    let second = connect(&mut node, later)[0];
    node.connected(later, second);
    let input = |node: &mut Node, link, header: Header, payload: &[u8]| {
        let len = u32::try_from(payload.len()).unwrap();
        let bytes = [&Header { len, ..header }.encode()[..], payload].concat();
        node.received(later, link, &bytes);
    };
    let extensions = Extensions { generation: Some(8), ..Extensions::default() }.encode();
    let map = Header { flags: CONG_BITMAP, extensions, ..Header::default() };
    let data = |flags| Header { sequence: 5, flags, sport: 9, dport: 4000, ..Header::default() };
    input(&mut node, second, map, &[0; MAP_LEN]);
    input(&mut node, second, data(0), b"once");
    node.lost(later, second);
    let last = later + Duration::from_secs(1);
    let third = connect(&mut node, last)[0];
    node.connected(last, third);
    input(&mut node, third, map, &[0; MAP_LEN]);
    input(&mut node, third, data(RETRANSMITTED), b"once");
    assert_eq!(std::iter::from_fn(|| node.receive(reader)).count(), 1);
}

/// Maps on other paths can be older than a map on the first path.
#[test]
fn maps_count_only_on_the_first_path() {
    let mut node = node(5, 1, 8);
    let first = accept_map(&mut node, 0, 7);
    let second = accept_map(&mut node, 1, 7);
    let id = node.bind(3000).unwrap();
    for (link, path, is_congested) in [(second, 1, false), (first, 0, true), (second, 1, true)] {
        let extensions =
            Extensions { npaths: Some(8), generation: Some(7), path: Some(path) }.encode();
        let header =
            Header { flags: CONG_BITMAP, len: MAP_LEN as u32, extensions, ..Header::default() };
        let map = if path == 0 || !is_congested { [0xff; MAP_LEN] } else { [0; MAP_LEN] };
        node.received(Instant::ZERO, link, &[&header.encode()[..], &map].concat());
        let may_send = node.may_send(id, address(1), 4000, 0);
        assert_eq!(may_send.is_err(), is_congested, "{path}");
    }
}
