//! Data on the wire, in the order in which the kernel sends it.

use super::*;
use crate::wire::{CONG_BITMAP, CongestionMap, PING_PORT, PROBE_PORT};

/// A simulated peer: its connection is up, and the node's output is recorded.
struct Played {
    node: Node,
    link: LinkId,
    now: Instant,
    written: u64,
}

impl Played {
    /// Creates node 5 with the simulated peer 1.
    fn new() -> Self {
        let mut node = Net::node(5, 0x0102_0304);
        let now = Instant::ZERO;
        let link = node.accepted(now, address(1)).unwrap();
        Self { node, link, now, written: 0 }
    }

    /// Creates the simulated peer, after the exchange that precedes data.
    fn greeted() -> Self {
        let mut played = Self::new();
        played.input_map(None);
        played.output(true);
        played
    }

    /// Returns the node's output, acknowledging it if requested.
    fn output(&mut self, acknowledged: bool) -> Vec<(Header, Vec<u8>)> {
        let mut stream = Vec::new();
        loop {
            let mut room = [IoSlice::new(&[]); 3];
            let count = self.node.output(self.link, &mut room);
            let bytes: Vec<u8> = room[..count].iter().flat_map(|slice| slice.to_vec()).collect();
            if bytes.is_empty() {
                return frames(&stream);
            }
            self.node.wrote(self.link, bytes.len());
            self.written += bytes.len() as u64;
            if acknowledged {
                self.node.acked(self.link, self.written);
            }
            stream.extend(bytes);
        }
    }

    fn input(&mut self, header: Header, payload: &[u8]) {
        let len = u32::try_from(payload.len()).unwrap();
        let bytes = [&Header { len, ..header }.encode(), payload].concat();
        self.node.received(self.now, self.link, &bytes);
    }

    /// Sends an empty map, with the peer's generation if given.
    fn input_map(&mut self, run: Option<u32>) {
        let extensions = Extensions { generation: run, ..Extensions::default() }.encode();
        let header = Header { flags: CONG_BITMAP, extensions, ..Header::default() };
        self.input(header, CongestionMap::default().bytes());
    }

    /// Breaks the connection, and lets the peer reconnect.
    fn reconnect(&mut self) {
        self.node.lost(self.now, self.link);
        self.link = self.node.accepted(self.now, address(1)).unwrap();
        self.written = 0;
    }

    fn send(&mut self, id: SocketId, payload: &[u8]) {
        self.node.send(self.now, id, Outgoing::new(address(1), 4000, payload.to_vec())).unwrap();
    }
}

fn data(sequence: u64, flags: u8) -> Header {
    Header { sequence, flags, sport: 3000, dport: 4000, ..Header::default() }
}

fn generation(number: u32) -> Extensions {
    Extensions { generation: Some(number), ..Extensions::default() }
}

#[test]
fn a_connection_starts_with_the_map_and_a_probe() {
    let mut played = Played::new();
    let id = played.node.bind(3000).unwrap();
    played.send(id, b"hi!!");
    // Until the probe is acknowledged, the peer may mistake our sequence numbers for the numbers of
    // a previous run.
    let first = played.output(false);
    assert_eq!(first.len(), 2);
    let (map, probe) = (&first[0], &first[1]);
    assert_eq!((map.0.flags, map.0.sequence, map.0.sport, map.0.dport), (CONG_BITMAP, 0, 0, 0));
    assert_eq!(map.1, CongestionMap::default().bytes());
    let expected = [6, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(map.0.extensions, expected);
    let expected = [5, 0, 1, 6, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0];
    let header =
        Header { sequence: 1, sport: PROBE_PORT, extensions: expected, ..Header::default() };
    assert_eq!(probe, &(header, Vec::new()));
    played.node.acked(played.link, played.written);
    // The generation of the peer, and whether it has accepted the connection, are not known yet
    // either.
    assert_eq!(played.output(false), []);
    played.input_map(None);
    played.node.acked(played.link, played.written);
    let header = Header { sequence: 2, len: 4, sport: 3000, dport: 4000, ..Header::default() };
    assert_eq!(played.output(true), [(header, b"hi!!".to_vec())]);
}

#[test]
fn probes_and_pings_are_answered() {
    let mut played = Played::greeted();
    let probe = Extensions { npaths: Some(8), ..Extensions::default() };
    let header =
        Header { sequence: 1, sport: PROBE_PORT, extensions: probe.encode(), ..data(0, 0) };
    played.input(Header { dport: PING_PORT, ..header }, b"");
    played.input(Header { dport: PING_PORT, ..data(2, 0) }, b"ignored");
    played.input(Header { sport: 0, dport: 0, ..data(3, 0) }, b"");
    let answers: Vec<_> = played
        .output(true)
        .into_iter()
        .map(|(h, _)| (h.sequence, h.sport, h.dport, h.len, h.extensions))
        .collect();
    let paths = Extensions { npaths: Some(1), ..generation(0x0102_0304) }.encode();
    assert_eq!(answers, [(2, 0, PROBE_PORT, 0, paths), (3, 0, 3000, 0, [0; 16])]);
    assert_eq!(played.node.stats().recv_ping, 2);
}

#[test]
fn ping_floods_are_answered_at_a_limited_rate() {
    let mut played = Played::greeted();
    for sequence in 1..1000 {
        played.input(Header { dport: PING_PORT, ..data(sequence, 0) }, b"");
    }
    assert_eq!(played.output(true).len(), 64);
    assert_eq!(played.node.stats().send_pong_dropped, 999 - 64);
    played.input(Header { dport: PING_PORT, ..data(1000, 0) }, b"");
    assert_eq!(played.output(true).len(), 1);
    // No messages are sent to a congested port either.
    let mut map = CongestionMap::default();
    map.set(3000, true);
    played.input(Header { flags: CONG_BITMAP, ..Header::default() }, map.bytes());
    played.input(Header { dport: PING_PORT, ..data(1001, 0) }, b"");
    assert_eq!(played.output(true), []);
}

/// The driver checks acknowledged bytes of an idle connection only occasionally.
#[test]
fn any_number_of_single_pings_is_answered() {
    let mut played = Played::greeted();
    let mut checks = 0;
    for sequence in 1..=500 {
        played.input(Header { dport: PING_PORT, ..data(sequence, 0) }, b"");
        assert_eq!(played.output(false).len(), 1, "ping {sequence}");
        let is_urgent = played.node.awaits_ack(played.link).unwrap().is_awaited;
        if is_urgent {
            played.node.acked(played.link, played.written);
            checks += 1;
        }
    }
    assert!((7..=20).contains(&checks), "{checks}");
    assert_eq!(played.node.stats().send_pong_dropped, 0);
}

/// The kernel's rule: only a message marked as a repeat can be old.
#[test]
fn messages_are_accepted_by_the_kernels_rule() {
    let mut played = Played::new();
    let id = played.node.bind(4000).unwrap();
    for (at, (sequence, flags, taken)) in [
        (1, 0, true),
        (2, RETRANSMITTED, true),
        (2, RETRANSMITTED, false),
        (1, RETRANSMITTED, false),
        // A gap.
        (9, RETRANSMITTED, true),
        // A new run of the peer.
        (1, 0, true),
        (2, RETRANSMITTED, true),
        (1, RETRANSMITTED, false),
        (u64::MAX, 0, true),
        (0, 0, true),
    ]
    .into_iter()
    .enumerate()
    {
        played.input(data(sequence, flags), b"x");
        assert_eq!(played.node.receive(id).is_some(), taken, "step {at}");
    }
    assert_eq!(played.node.stats().recv_drop_old_seq, 3);
}

#[test]
fn resent_messages_precede_the_probe_and_new_messages() {
    let mut played = Played::greeted();
    let id = played.node.bind(3000).unwrap();
    for payload in [b"a", b"b"] {
        played.send(id, payload);
    }
    assert_eq!(played.output(false).len(), 2);
    played.send(id, b"c");
    played.reconnect();
    let again: Vec<_> = played
        .output(true)
        .into_iter()
        .skip(1)
        .map(|(h, payload)| (h.sequence, h.flags, h.sport, payload))
        .collect();
    let expected = [
        (2, RETRANSMITTED, 3000, b"a".to_vec()),
        (3, RETRANSMITTED, 3000, b"b".to_vec()),
        (4, 0, PROBE_PORT, Vec::new()),
        (5, 0, 3000, b"c".to_vec()),
    ];
    assert_eq!(again, expected);
}

#[test]
fn a_restarted_peer_gets_nothing_twice() {
    let mut played = Played::new();
    let id = played.node.bind(3000).unwrap();
    played.input_map(Some(7));
    played.output(true);
    for (number, sent) in [(7, 1), (8, 0)] {
        played.send(id, b"may have arrived");
        played.output(false);
        played.send(id, b"new");
        played.reconnect();
        // The peer's map shows whether the peer was restarted.
        let kinds: Vec<u8> = played.output(true).iter().map(|(h, _)| h.flags).collect();
        assert_eq!(kinds, [CONG_BITMAP]);
        played.input_map(Some(number));
        let flags: Vec<u8> = played.output(true).iter().map(|(h, _)| h.flags).collect();
        assert_eq!(flags.iter().filter(|flags| **flags == RETRANSMITTED).count(), sent);
        assert_eq!(flags.iter().filter(|flags| **flags == 0).count(), 2, "probe, and what is new");
    }
    assert_eq!(played.node.stats().send_dropped, 1);
    // The new run uses its own sequence numbers.
    let reader = played.node.bind(4000).unwrap();
    played.input(data(1, RETRANSMITTED), b"x");
    assert!(played.node.receive(reader).is_some());
}

#[test]
fn a_silent_peer_is_awaited_only_briefly() {
    let mut played = Played::new();
    let id = played.node.bind(3000).unwrap();
    played.input_map(Some(7));
    played.output(true);
    played.send(id, b"x");
    played.output(false);
    played.reconnect();
    assert_eq!(played.output(true).len(), 1);
    let until = played.now + Duration::from_secs(1);
    while played.node.deadline().is_some_and(|at| at <= until) {
        played.node.tick(until);
    }
    assert_eq!(played.output(true).len(), 2);
}

/// Restarts a kernel peer, whose maps carry no generation and which announces its restarts only in
/// probes.
#[test]
fn a_restart_announced_in_a_probe_keeps_its_sequence_numbers() {
    let mut played = Played::new();
    let reader = played.node.bind(4000).unwrap();
    let probe = |sequence, number| Header {
        sequence,
        sport: PROBE_PORT,
        extensions: generation(number).encode(),
        ..Header::default()
    };
    played.input(probe(1, 7), b"");
    played.input(data(50, 0), b"x");
    played.reconnect();
    // The queued data precedes the probe.
    played.input(data(1, 0), b"y");
    played.input(probe(2, 8), b"");
    played.reconnect();
    played.input(data(1, RETRANSMITTED), b"y");
    let read: Vec<_> =
        std::iter::from_fn(|| played.node.receive(reader)).map(|r| r.payload).collect();
    assert_eq!(read, [b"x", b"y"]);
}

#[test]
fn a_map_waits_for_at_most_one_message_and_is_queued_once() {
    let mut played = Played::greeted();
    let reader = played.node.bind(4000).unwrap();
    played.node.set_buffers(reader, None, Some(1000));
    let sender = played.node.bind(3000).unwrap();
    for payload in [b"a", b"b"] {
        played.send(sender, payload);
    }
    for sequence in 1..10 {
        played.input(data(sequence, 0), &[0; 500]);
    }
    while played.node.receive(reader).is_some() {}
    for sequence in 10..20 {
        played.input(data(sequence, 0), &[0; 500]);
    }
    let frames = played.output(true);
    let maps: Vec<usize> =
        (0..).zip(&frames).filter(|(_, (h, _))| h.flags == CONG_BITMAP).map(|(at, _)| at).collect();
    assert_eq!(maps, [0]);
    let map = CongestionMap::from_payload(frames[0].1.clone()).unwrap();
    assert_eq!(map.ports().collect::<Vec<_>>(), [4000]);
    assert_eq!(frames.len(), 3);
}

#[test]
fn only_messages_for_unbound_ports_are_dropped() {
    let mut played = Played::new();
    let reader = played.node.bind(4000).unwrap();
    played.input(Header { dport: 4001, ..data(1, 0) }, &[1; 5000]);
    played.input(Header { dport: 1, ..data(2, 0) }, b"forged");
    played.input(data(3, 0), b"x");
    assert_eq!(played.node.receive(reader).map(|r| r.payload), Some(b"x".to_vec()));
    assert_eq!(played.node.stats().recv_drop_no_sock, 2);
}

/// Data exchanged between the kernel and one of our nodes (docs/RDS.md).
#[test]
fn bytes_match_the_kernel() {
    let hex = "00000000000000070000000000000000000000040bb80fa00000000000000000";
    let bytes: Vec<u8> = (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .chain([0; 16])
        .collect();
    let header = Header { sequence: 7, len: 4, sport: 3000, dport: 4000, ..Header::default() };
    assert_eq!(header.encode().to_vec(), bytes);
    assert_eq!(Header::decode(bytes.as_slice().try_into().unwrap()), header);
    let paths = Extensions { npaths: Some(8), ..Extensions::default() };
    assert_eq!(paths.encode()[..4], [5, 0, 8, 0]);
}
