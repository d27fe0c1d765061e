//! Tests of client and server together, and of each against a peer that violates the protocol.

use std::net::SocketAddr;
use std::sync::Arc;

use super::messages::{Buffer, Messages, RECVS, SEND, WR_DATA, WR_MESSAGE, limits, remote};
use super::*;
use crate::fabric::sim::{SimFabric, World, WorldOptions, sim_ip};
use crate::fabric::{
    Access, ConnRequest, ConnectParams, Fabric, FabricEvent, Listener, PdUse, PrivateData,
    ProtectionDomain, SgeList, WcStatus, WorkRequest, WrOp,
};
use crate::ids::{QpNum, Rkey};
use crate::time::{Duration, Instant};
use crate::wire::{PingHello, PingInfo, PingMode, PingReply, PingStatus};

const SECOND: Duration = Duration::from_secs(1);

fn hello(mode: PingMode, size: u32) -> PingHello {
    let (duplex, server_invalidate, read_invalidate) = (false, false, false);
    PingHello { mode, duplex, server_invalidate, read_invalidate, depth: 4, size }
}

fn config(remote: SocketAddr, hello: PingHello, count: u64) -> PingClientConfig {
    PingClientConfig {
        local: Some(sim_ip(2)),
        remote,
        hello,
        rping: false,
        count,
        interval: Duration::ZERO,
        validate: true,
        timeout: 2 * SECOND,
    }
}

/// World with a ping server on one side and the test's peers on the other.
struct Fixture {
    world: World,
    /// The server's provider, in the form that the server expects.
    fabrics: [Box<dyn Fabric>; 1],
    client: SimFabric,
    server: PingServer,
    address: SocketAddr,
}

impl Fixture {
    fn new(config: PingServerConfig) -> Self {
        let world = World::with_options(7, WorldOptions::default());
        let (a, b) = (world.node(sim_ip(1)), world.node(sim_ip(2)));
        let (mut fabric, client) = (world.fabric(a), world.fabric(b));
        let address = fabric.listen(SocketAddr::new(sim_ip(1), 1234)).unwrap();
        let server = PingServer::new(config);
        Self { world, fabrics: [Box::new(fabric)], client, server, address }
    }

    fn now(&self) -> Instant {
        self.world.now()
    }

    /// Runs one step of the world; returns the client's events.
    fn step(&mut self) -> Vec<FabricEvent> {
        let now = self.now();
        self.fabrics[0].flush(now);
        self.client.flush(now);
        if !self.world.step() {
            self.world.advance_to(now + Duration::from_millis(100));
        }
        let now = self.now();
        self.fabrics[0].poll(now);
        while let Some(event) = self.fabrics[0].next_event() {
            match event {
                FabricEvent::Request(request) => {
                    assert!(self.server.claims(request.private_data.as_bytes()));
                    self.server.handle_request(now, 0, *request, self.fabrics[0].as_mut());
                }
                event => self.server.handle_event(now, 0, &event, self.fabrics[0].as_mut()),
            }
        }
        self.server.poll(now, &mut self.fabrics);
        self.client.poll(now);
        std::iter::from_fn(|| self.client.next_event()).collect()
    }

    /// Runs clients until they have ended; returns the events of each.
    fn run(&mut self, clients: &mut [PingClient]) -> Vec<Vec<PingEvent>> {
        let mut seen = vec![Vec::new(); clients.len()];
        for client in clients.iter_mut() {
            client.start(self.world.now(), &mut self.client);
        }
        let until = self.now() + 300 * SECOND;
        while clients.iter().any(|client| !client.is_ended()) {
            assert!(self.now() < until, "{clients:?}");
            let events = self.step();
            let now = self.now();
            for event in events {
                let qp = qp_of(&event);
                let mut clients = clients.iter_mut();
                if let Some(client) = clients.find(|client| client.qp() == Some(qp)) {
                    client.handle_event(now, event, &mut self.client);
                }
            }
            for client in clients.iter_mut() {
                client.poll(now, &mut self.client);
            }
            for (client, seen) in clients.iter_mut().zip(&mut seen) {
                seen.extend(std::iter::from_fn(|| client.next_event()));
            }
        }
        seen
    }

    fn ping(&mut self, config: PingClientConfig) -> (PingClient, Vec<PingEvent>) {
        let mut clients = [PingClient::new(config)];
        let events = self.run(&mut clients).remove(0);
        let [client] = clients;
        (client, events)
    }

    /// Opens a scripted connection to the ping server.
    fn peer(&mut self, private_data: PrivateData) -> Peer {
        let now = self.now();
        let remote = self.address;
        let pd = self.client.alloc_pd(PdUse::Connect { local: None, remote }).unwrap();
        let params = ConnectParams {
            local: Some(sim_ip(2)),
            remote,
            private_data,
            limits: limits(16),
            timeout: SECOND,
            peer_name: None,
        };
        let qp = self.client.connect(now, &pd, &params).unwrap();
        let messages = Messages::new(&pd).unwrap();
        messages.post_all(&mut self.client, qp).unwrap();
        let mut peer = Peer { qp, pd, messages, events: Vec::new() };
        peer.wait(self, |event| matches!(event, FabricEvent::Established { .. }));
        peer
    }

    /// Runs steps until the server has no pings left.
    fn drained(&mut self) {
        for _ in 0..2000 {
            self.step();
        }
        assert_eq!(self.server.connections(), 0);
    }
}

/// Returns the queue pair of an event.
fn qp_of(event: &FabricEvent) -> QpNum {
    match event {
        FabricEvent::Established { qp, .. }
        | FabricEvent::ConnectFailed { qp, .. }
        | FabricEvent::Closed { qp, .. } => *qp,
        FabricEvent::Completion(wc) => wc.qp,
        FabricEvent::Request(_) => QpNum(u32::MAX),
    }
}

struct Peer {
    qp: QpNum,
    pd: Arc<dyn ProtectionDomain>,
    messages: Messages,
    events: Vec<FabricEvent>,
}

impl Peer {
    /// Waits for a matching event and returns it.
    fn wait(&mut self, fixture: &mut Fixture, is: impl Fn(&FabricEvent) -> bool) -> FabricEvent {
        for _ in 0..100_000 {
            if let Some(at) = self.events.iter().position(&is) {
                return self.events.remove(at);
            }
            let events = fixture.step();
            self.events.extend(events.into_iter().filter(|event| qp_of(event) == self.qp));
        }
        panic!("timed out: {:?}", self.events);
    }

    fn send(&mut self, fixture: &mut Fixture, info: &PingInfo) {
        self.messages.send(&mut fixture.client, self.qp, info, SEND).unwrap();
    }

    fn receive(&mut self, fixture: &mut Fixture) -> PingInfo {
        let event = self.wait(fixture, |event| {
            matches!(event, FabricEvent::Completion(wc)
                if wc.wr_id < RECVS && wc.status == WcStatus::Success)
        });
        let FabricEvent::Completion(wc) = event else { unreachable!() };
        self.messages.take(wc.wr_id, wc.byte_len).unwrap()
    }

    fn closed(&mut self, fixture: &mut Fixture) {
        self.wait(fixture, |event| matches!(event, FabricEvent::Closed { .. }));
    }

    fn post(&mut self, fixture: &mut Fixture, op: WrOp, buffer: &Buffer, len: usize) {
        let sges = SgeList::one(buffer.sge(0, len));
        let wr = WorkRequest { wr_id: WR_DATA, op, sges, signaled: true };
        fixture.client.post_send(self.qp, wr).unwrap();
    }
}

fn ended(events: &[PingEvent]) -> &Result<(), PingFailure> {
    match events.last() {
        Some(PingEvent::Ended(end)) => end,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_mode_runs_and_is_verified() {
    let modes = [
        PingMode::PingPong,
        PingMode::ReadLatency,
        PingMode::WriteLatency,
        PingMode::ReadBandwidth,
        PingMode::WriteBandwidth,
    ];
    for mode in modes {
        for size in [1, 23, 64, 4096, 65536, PingHello::SIZE_MAX] {
            let mut fixture = Fixture::new(PingServerConfig::default());
            let address = fixture.address;
            let (client, events) = fixture.ping(config(address, hello(mode, size), 20));
            assert_eq!(*ended(&events), Ok(()), "{mode:?} {size}");
            assert_eq!((client.sent(), client.answered()), (20, 20), "{mode:?} {size}");
            assert!(client.flight_time() > Duration::ZERO);
            let rounds = events.iter().filter(|n| matches!(n, PingEvent::Round { .. })).count();
            assert_eq!(rounds, if mode.is_bandwidth() { 0 } else { 20 });
            fixture.drained();
            assert_eq!(fixture.server.stats().faults, 0);
        }
    }
}

#[test]
fn duplex_counts_both_directions() {
    for mode in [PingMode::ReadBandwidth, PingMode::WriteBandwidth] {
        let mut fixture = Fixture::new(PingServerConfig::default());
        let address = fixture.address;
        let hello = PingHello { duplex: true, ..hello(mode, 4096) };
        let (client, events) = fixture.ping(config(address, hello, 200));
        assert_eq!(*ended(&events), Ok(()));
        assert_eq!(client.answered(), 200);
        assert!(client.peer_done() >= 50, "{}", client.peer_done());
        fixture.drained();
    }
}

#[test]
fn invalidating_variants_use_each_key_once() {
    for (server_invalidate, read_invalidate) in [(true, false), (false, true), (true, true)] {
        let mut fixture = Fixture::new(PingServerConfig::default());
        let address = fixture.address;
        let hello =
            PingHello { server_invalidate, read_invalidate, ..hello(PingMode::PingPong, 1000) };
        let (client, events) = fixture.ping(config(address, hello, 10));
        assert_eq!(*ended(&events), Ok(()));
        assert_eq!(client.answered(), 10);
    }
}

#[test]
fn rping_sends_no_extension_and_needs_the_option() {
    let rping = PingServerConfig { rping: true, ..PingServerConfig::default() };
    let mut fixture = Fixture::new(rping);
    let address = fixture.address;
    let plain = |size| PingClientConfig {
        rping: true,
        ..config(address, hello(PingMode::PingPong, size), 100)
    };
    let mut clients = [23, 64, 65535].map(|size| PingClient::new(plain(size)));
    for events in fixture.run(&mut clients) {
        assert_eq!(*ended(&events), Ok(()));
        assert_eq!(events.len(), 102);
        let PingEvent::Round { text, .. } = &events[2] else { panic!("{events:?}") };
        assert!(text.starts_with(b"rdma-ping-1: BCD"), "{text:?}");
    }
    assert_eq!(fixture.server.stats().rounds, 300);
    assert!(!PingServer::new(PingServerConfig::default()).claims(&[]));
    let off = PingServerConfig { enabled: false, ..rping };
    assert!(!PingServer::new(off).claims(&[]));
    assert!(PingServer::new(off).claims(&hello(PingMode::PingPong, 1).encode()));
}

#[test]
fn refusals_are_reported() {
    let server = PingServerConfig::default();
    for (server, size, status) in [
        (PingServerConfig { enabled: false, ..server }, 64, PingStatus::Off),
        (PingServerConfig { connections_max: 0, ..server }, 64, PingStatus::Busy),
        (PingServerConfig { size_max: 100, ..server }, 101, PingStatus::Unusable),
    ] {
        let mut fixture = Fixture::new(server);
        let address = fixture.address;
        let (_, events) = fixture.ping(config(address, hello(PingMode::PingPong, size), 1));
        assert_eq!(*ended(&events), Err(PingFailure::Refused(status)));
        assert_eq!(fixture.server.stats().refused, 1);
    }
}

#[test]
fn pings_are_bounded_and_slots_are_reused() {
    let most = PingServerConfig { connections_max: 3, ..PingServerConfig::default() };
    let mut fixture = Fixture::new(most);
    let address = fixture.address;
    let make = || PingClient::new(config(address, hello(PingMode::PingPong, 64), 5));
    let mut clients: Vec<PingClient> = (0..5).map(|_| make()).collect();
    let events = fixture.run(&mut clients);
    let good = events.iter().filter(|events| ended(events).is_ok()).count();
    assert_eq!(good, 3, "{events:?}");
    fixture.drained();
    assert!(fixture.run(&mut [make()])[0].last() == Some(&PingEvent::Ended(Ok(()))));
}

#[test]
fn the_oldest_ping_of_the_busiest_source_is_evicted() {
    let most = PingServerConfig { connections_max: 3, ..PingServerConfig::default() };
    let mut fixture = Fixture::new(most);
    let data = || PrivateData::new(&hello(PingMode::PingPong, 64).encode());
    let mut peers: Vec<Peer> = (0..3).map(|_| fixture.peer(data())).collect();
    let node = fixture.world.node(sim_ip(3));
    let (mut other, remote) = (fixture.world.fabric(node), fixture.address);
    let pd = other.alloc_pd(PdUse::Connect { local: None, remote }).unwrap();
    let params = ConnectParams {
        local: Some(sim_ip(3)),
        remote,
        private_data: data(),
        limits: limits(16),
        timeout: SECOND,
        peer_name: None,
    };
    let _qp = other.connect(fixture.now(), &pd, &params).unwrap();
    let mut outcome = None;
    for _ in 0..2000 {
        let now = fixture.now();
        other.flush(now);
        let _events = fixture.step();
        other.poll(fixture.now());
        outcome = outcome.or_else(|| other.next_event());
        if outcome.is_some() {
            break;
        }
    }
    assert!(matches!(outcome, Some(FabricEvent::Established { .. })), "{outcome:?}");
    assert_eq!((fixture.server.stats().accepted, fixture.server.stats().faults), (4, 1));
    // The remaining two still occupy their slots, so one more from this source is refused.
    let address = fixture.address;
    let (_, events) = fixture.ping(config(address, hello(PingMode::PingPong, 64), 1));
    assert_eq!(*ended(&events), Err(PingFailure::Refused(PingStatus::Busy)));
    peers.clear();
}

#[test]
fn only_silent_clients_are_disconnected() {
    let mut fixture = Fixture::new(PingServerConfig::default());
    let data = PrivateData::new(&hello(PingMode::PingPong, 64).encode());
    let mut peer = fixture.peer(data);
    let began = fixture.now();
    peer.closed(&mut fixture);
    let lasted = fixture.now() - began;
    assert!((29 * SECOND..40 * SECOND).contains(&lasted), "{lasted:?}");
    assert_eq!(fixture.server.stats().faults, 1);
    // The client reads once a minute, which the server does not notice: keepalives keep it
    // connected.
    let address = fixture.address;
    let slow = PingClientConfig {
        interval: 60 * SECOND,
        ..config(address, hello(PingMode::ReadLatency, 64), 3)
    };
    let (client, events) = fixture.ping(slow);
    assert_eq!((ended(&events), client.answered()), (&Ok(()), 3));
}

#[test]
fn a_lying_client_is_disconnected() {
    let good = hello(PingMode::PingPong, 64);
    type Violation = fn(&mut Peer, &mut Fixture, PingInfo);
    let violations: [(PingHello, Violation); 7] = [
        (good, |peer, fixture, info| peer.send(fixture, &PingInfo { size: 65, ..info })),
        (good, |peer, fixture, info| peer.send(fixture, &PingInfo { size: 0, ..info })),
        // The key is invalid.
        (good, |peer, fixture, info| {
            peer.send(fixture, &PingInfo { rkey: Rkey(info.rkey.0 ^ 1), ..info });
        }),
        // Two messages are sent before the go-ahead.
        (good, |peer, fixture, info| {
            peer.send(fixture, &info);
            peer.send(fixture, &info);
        }),
        // The message is 20 bytes long.
        (good, |peer, fixture, _| {
            let buffer = Buffer::new(&peer.pd, 20, Access::LOCAL).unwrap();
            peer.post(fixture, SEND, &buffer, 20);
        }),
        (hello(PingMode::WriteBandwidth, 64), |peer, fixture, info| {
            peer.send(fixture, &info);
            peer.receive(fixture);
            peer.send(fixture, &PingInfo { size: 2, ..PingInfo::GO_AHEAD });
        }),
        // An immediate is sent although none were negotiated.
        (hello(PingMode::WriteBandwidth, 64), |peer, fixture, info| {
            peer.send(fixture, &info);
            let theirs = peer.receive(fixture);
            let buffer = Buffer::new(&peer.pd, 64, Access::LOCAL).unwrap();
            let op = WrOp::RdmaWrite { remote: remote(&theirs), imm: Some(9) };
            peer.post(fixture, op, &buffer, 64);
        }),
    ];
    for (at, (hello, violation)) in violations.into_iter().enumerate() {
        let mut fixture = Fixture::new(PingServerConfig::default());
        let mut peer = fixture.peer(PrivateData::new(&hello.encode()));
        let buffer = Buffer::new(&peer.pd, 64, Access::REMOTE_READ).unwrap();
        let began = fixture.now();
        violation(&mut peer, &mut fixture, buffer.info());
        peer.closed(&mut fixture);
        assert!(fixture.now() - began < 5 * SECOND, "violation {at} took too long");
        fixture.drained();
        // The server continues to work.
        let address = fixture.address;
        let (_, events) = fixture.ping(config(address, good, 3));
        assert_eq!(*ended(&events), Ok(()), "after violation {at}");
    }
}

#[test]
fn the_size_from_rping_is_bounded_before_memory_is_allocated() {
    let mut fixture = Fixture::new(PingServerConfig { rping: true, ..PingServerConfig::default() });
    for size in [0, PingHello::SIZE_MAX + 1, u32::MAX] {
        let mut peer = fixture.peer(PrivateData::EMPTY);
        peer.send(&mut fixture, &PingInfo { addr: 1, rkey: Rkey(1), size });
        peer.closed(&mut fixture);
    }
    assert_eq!(fixture.server.stats().faults, 3);
}

#[test]
fn a_client_reaches_only_the_advertised_buffer() {
    // A server has more memory than that for pings: a session's, which its clients may write.
    let mut fixture = Fixture::new(PingServerConfig::default());
    let remote_address = fixture.address;
    let use_of = PdUse::Connect { local: None, remote: remote_address };
    let session = fixture.fabrics[0].alloc_pd(use_of).unwrap();
    let chunk = Buffer::new(&session, 4096, Access::REMOTE_WRITE).unwrap();
    chunk.all().fill(0xEE);
    let readable = Buffer::new(&session, 4096, Access::REMOTE_READ).unwrap();
    let writes = hello(PingMode::WriteBandwidth, 64);
    let reads = hello(PingMode::ReadBandwidth, 64);
    type Aim = fn(PingInfo, &Buffer, &Buffer) -> (PingInfo, usize);
    let aims: [(PingHello, bool, Aim); 8] = [
        (writes, true, |_, chunk, _| (chunk.info(), 64)),
        (writes, false, |_, _, readable| (readable.info(), 64)),
        (reads, false, |_, _, readable| (readable.info(), 64)),
        // Access to its own buffer in the wrong way, and beyond its bounds. A region consists of
        // whole pages.
        (writes, false, |own, _, _| (own, 64)),
        (reads, true, |own, _, _| (own, 64)),
        (writes, true, |own, _, _| (PingInfo { addr: own.addr + 4096 - 63, ..own }, 64)),
        (writes, true, |own, _, _| (PingInfo { addr: own.addr - 1, ..own }, 64)),
        (reads, false, |own, _, _| (PingInfo { addr: own.addr + 4096, ..own }, 1)),
    ];
    for (at, (hello, write, aim)) in aims.into_iter().enumerate() {
        let mut peer = fixture.peer(PrivateData::new(&hello.encode()));
        let mine = Buffer::new(&peer.pd, 64, Access::REMOTE_WRITE).unwrap();
        mine.all().fill(0x55);
        peer.send(&mut fixture, &mine.info());
        let own = peer.receive(&mut fixture);
        let (target, len) = aim(own, &chunk, &readable);
        let op = if write {
            WrOp::RdmaWrite { remote: remote(&target), imm: None }
        } else {
            WrOp::RdmaRead { remote: remote(&target) }
        };
        peer.post(&mut fixture, op, &mine, len);
        peer.closed(&mut fixture);
        assert!(chunk.all().to_vec().iter().all(|b| *b == 0xEE), "aim {at} hit the session");
        assert!(mine.all().to_vec().iter().all(|b| *b == 0x55), "aim {at} read something");
    }
    fixture.drained();
    // The key of one ping's buffer is invalid on another ping's connection.
    let mut owner = fixture.peer(PrivateData::new(&writes.encode()));
    let mine = Buffer::new(&owner.pd, 64, Access::REMOTE_WRITE).unwrap();
    owner.send(&mut fixture, &mine.info());
    let target = owner.receive(&mut fixture);
    let mut thief = fixture.peer(PrivateData::new(&writes.encode()));
    let theirs = Buffer::new(&thief.pd, 64, Access::LOCAL).unwrap();
    let op = WrOp::RdmaWrite { remote: remote(&target), imm: None };
    thief.post(&mut fixture, op, &theirs, 64);
    thief.closed(&mut fixture);
}

/// Scripted server for a client.
struct Liar {
    world: World,
    server: SimFabric,
    client: SimFabric,
    address: SocketAddr,
    pd: Option<Arc<dyn ProtectionDomain>>,
}

/// Answer of the scripted server to each message; messages are numbered from 0.
type Answer<'a> = &'a dyn Fn(&mut SimFabric, QpNum, &mut Messages, PingInfo, u64);

impl Liar {
    fn new() -> Self {
        let world = World::with_options(9, WorldOptions::default());
        let (a, b) = (world.node(sim_ip(1)), world.node(sim_ip(2)));
        let (mut server, client) = (world.fabric(a), world.fabric(b));
        let address = server.listen(SocketAddr::new(sim_ip(1), 1234)).unwrap();
        Self { world, server, client, address, pd: None }
    }

    fn accept(&mut self, request: ConnRequest, data: &PrivateData) -> (QpNum, Messages) {
        let now = self.world.now();
        let pd = self.server.alloc_pd(PdUse::Accept(&request)).unwrap();
        let messages = Messages::new(&pd).unwrap();
        let qp = self.server.accept(now, &pd, request, limits(4), data).unwrap();
        messages.post_all(&mut self.server, qp).unwrap();
        self.pd = Some(pd);
        (qp, messages)
    }

    /// Runs a client against the scripted server; returns its result and the time.
    fn deceive(
        mut self,
        hello: PingHello,
        reply: Option<PrivateData>,
        answer: Answer<'_>,
    ) -> (Result<(), PingFailure>, Duration) {
        let mut client = PingClient::new(config(self.address, hello, 3));
        client.start(self.world.now(), &mut self.client);
        let mut open: Option<(QpNum, Messages)> = None;
        let mut count = 0;
        while !client.is_ended() {
            let now = self.world.now();
            assert!(now < Instant::ZERO + 60 * SECOND, "{client:?}");
            self.server.flush(now);
            self.client.flush(now);
            if !self.world.step() {
                self.world.advance_to(now + Duration::from_millis(50));
            }
            let now = self.world.now();
            self.server.poll(now);
            while let Some(event) = self.server.next_event() {
                match event {
                    FabricEvent::Request(request) => match &reply {
                        Some(data) => open = Some(self.accept(*request, data)),
                        None => self.server.reject(now, *request, &PrivateData::EMPTY),
                    },
                    FabricEvent::Completion(wc)
                        if wc.wr_id < RECVS && wc.status == WcStatus::Success =>
                    {
                        let Some((qp, messages)) = &mut open else { continue };
                        let info = messages.take(wc.wr_id, wc.byte_len).unwrap();
                        answer(&mut self.server, *qp, messages, info, count);
                        count += 1;
                    }
                    _ => {}
                }
            }
            self.client.poll(now);
            while let Some(event) = self.client.next_event() {
                client.handle_event(now, event, &mut self.client);
            }
            client.poll(now, &mut self.client);
        }
        let took = self.world.now() - Instant::ZERO;
        let events: Vec<PingEvent> = std::iter::from_fn(|| client.next_event()).collect();
        (ended(&events).clone(), took)
    }
}

#[test]
fn a_lying_server_is_reported_in_time() {
    let pong = hello(PingMode::PingPong, 64);
    let read = hello(PingMode::ReadLatency, 64);
    let writes = hello(PingMode::WriteLatency, 64);
    let inv = PingHello { server_invalidate: true, ..pong };
    let good = Some(PrivateData::new(&PingReply { status: PingStatus::Good }.encode()));
    let status = |status| Some(PrivateData::new(&PingReply { status }.encode()));
    let go: Answer<'_> = &|fabric, qp, messages, _, _| {
        messages.send(fabric, qp, &PingInfo::GO_AHEAD, SEND).unwrap();
    };
    let silent: Answer<'_> = &|_, _, _, _, _| {};
    let long: Answer<'_> = &|fabric, qp, messages, _, _| {
        let sges = SgeList::one(messages.buffer.sge(0, 17));
        let wr = WorkRequest { wr_id: WR_MESSAGE, op: SEND, sges, signaled: true };
        fabric.post_send(qp, wr).unwrap();
    };
    let short: Answer<'_> = &|fabric, qp, messages, _, _| {
        let sges = SgeList::one(messages.buffer.sge(0, 15));
        let wr = WorkRequest { wr_id: WR_MESSAGE, op: SEND, sges, signaled: true };
        fabric.post_send(qp, wr).unwrap();
    };
    let huge: Answer<'_> = &|fabric, qp, messages, _, _| {
        let sges = SgeList::one(messages.buffer.sge(0, 200));
        let wr = WorkRequest { wr_id: WR_MESSAGE, op: SEND, sges, signaled: true };
        fabric.post_send(qp, wr).unwrap();
    };
    let twice: Answer<'_> = &|fabric, qp, messages, _, _| {
        for _ in 0..3 {
            messages.send(fabric, qp, &PingInfo::GO_AHEAD, SEND).unwrap();
        }
    };
    let wrong_key: Answer<'_> = &|fabric, qp, messages, info, _| {
        let op = WrOp::Send { imm: None, invalidate: Some(Rkey(info.rkey.0 ^ 1)) };
        messages.send(fabric, qp, &PingInfo::GO_AHEAD, op).unwrap();
    };
    let no_buffer: Answer<'_> = &|fabric, qp, messages, _, _| {
        let info = PingInfo { addr: 5, rkey: Rkey(77), size: 64 };
        messages.send(fabric, qp, &info, SEND).unwrap();
    };
    let small: Answer<'_> = &|fabric, qp, messages, info, _| {
        messages.send(fabric, qp, &PingInfo { size: 63, ..info }, SEND).unwrap();
    };
    let cases: [(&str, PingHello, Option<PrivateData>, Answer<'_>, &str); 16] = [
        ("reject", pong, None, silent, "refused without a reason"),
        ("reply of rping", pong, Some(PrivateData::EMPTY), go, "--rping"),
        ("garbage", pong, Some(PrivateData::new(&[0xA5; 56])), go, "not an RTRS server"),
        ("busy", pong, status(PingStatus::Busy), go, "the maximum number of pings"),
        ("newer", pong, status(PingStatus::Other(9)), go, "Other(9)"),
        ("silent", pong, good, silent, "no go-ahead after the server's read within 2s"),
        ("nothing written", pong, good, go, "data mismatch in round 0 at byte 0 of 64"),
        ("15 bytes", pong, good, short, "a message of 15 bytes"),
        ("17 bytes", pong, good, long, "a message of 17 bytes"),
        ("200 bytes", pong, good, huge, "longer than 64 bytes"),
        ("three at once", pong, good, twice, "mismatch"),
        ("not invalidated", inv, good, go, "does not invalidate"),
        ("another key", inv, good, wrong_key, ""),
        ("no address", read, good, silent, "no address of the server's buffer"),
        ("no buffer", read, good, no_buffer, ""),
        ("small buffer", writes, good, small, "a buffer of 63 bytes"),
    ];
    for (name, hello, reply, answer, words) in cases {
        let (end, took) = Liar::new().deceive(hello, reply, answer);
        let text = end.expect_err(name).to_string();
        assert!(text.contains(words), "{name}: {text}");
        assert!(took < 10 * SECOND, "{name} took {took:?}");
    }
}

#[test]
fn a_server_that_changes_the_data_is_detected() {
    let good = Some(PrivateData::new(&PingReply { status: PingStatus::Good }.encode()));
    let hello = hello(PingMode::PingPong, 64);
    // The server sends the first go-ahead, then writes other bytes and sends the second.
    let change: Answer<'_> = &|fabric, qp, messages, info, n| {
        if n == 1 {
            let op = WrOp::RdmaWrite { remote: remote(&info), imm: None };
            let sges = SgeList::one(messages.buffer.sge(0, 64));
            let wr = WorkRequest { wr_id: WR_MESSAGE, op, sges, signaled: true };
            fabric.post_send(qp, wr).unwrap();
        }
        messages.send(fabric, qp, &PingInfo::GO_AHEAD, SEND).unwrap();
    };
    let (end, _) = Liar::new().deceive(hello, good, change);
    assert_eq!(end, Err(PingFailure::Mismatch { seq: 0, at: 0, size: 64 }));
    // The server may write only to the given buffer.
    let beyond: Answer<'_> = &|fabric, qp, messages, info, _| {
        let wrong = PingInfo { addr: info.addr + 4096 - 63, ..info };
        let op = WrOp::RdmaWrite { remote: remote(&wrong), imm: None };
        let sges = SgeList::one(messages.buffer.sge(0, 64));
        let wr = WorkRequest { wr_id: WR_MESSAGE, op, sges, signaled: true };
        fabric.post_send(qp, wr).unwrap();
    };
    let (end, took) = Liar::new().deceive(hello, good, beyond);
    assert!(matches!(end, Err(PingFailure::Closed(_))), "{end:?}");
    assert!(took < 5 * SECOND);
}
