//! Tests of behavior that is specific to the simulated world: late writes, links that fail with and
//! without notice, silence, crashes, and identical runs from the same seed.

use std::net::SocketAddr;
use std::sync::Arc;

use rtrs_core::fabric::sim::{
    FaultOptions, LinkOptions, NodeId, SimFabric, World, WorldOptions, sim_ip,
};
use rtrs_core::fabric::{
    Access, CloseReason, ConnectFailure, ConnectParams, Fabric, FabricEvent, Listener,
    MemoryRegistration, PdUse, PrivateData, ProtectionDomain, QpLimits, RemoteMem, Sge, SgeList,
    WcStatus, WorkRequest, WrOp,
};
use rtrs_core::ids::QpNum;
use rtrs_core::mem::Region;
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::{Duration, Instant};

const LIMITS: QpLimits = QpLimits { send_max: 16, recv_max: 16 };

/// A server with two addresses and a client with two addresses, with one shard each.
struct Setup {
    world: World,
    nodes: [NodeId; 2],
    server: SimFabric,
    client: SimFabric,
    pd_server: Arc<dyn ProtectionDomain>,
    pd_client: Arc<dyn ProtectionDomain>,
    address: [SocketAddr; 2],
    /// Server memory that the client may write to.
    target: Arc<dyn MemoryRegistration>,
    /// Client memory.
    source: Arc<dyn MemoryRegistration>,
    log: Vec<String>,
}

impl Setup {
    fn new(seed: u64, options: WorldOptions) -> Self {
        let world = World::with_options(seed, options);
        let (s, c) = (world.node(sim_ip(1)), world.node(sim_ip(11)));
        world.add_address(s, sim_ip(2));
        world.add_address(c, sim_ip(12));
        let (mut server, mut client) = (world.fabric(s), world.fabric(c));
        let any = PdUse::Connect { local: None, remote: SocketAddr::new(sim_ip(1), 1234) };
        let (pd_server, pd_client) = (server.alloc_pd(any).unwrap(), client.alloc_pd(any).unwrap());
        let address = [1, 2].map(|n| server.listen(SocketAddr::new(sim_ip(n), 1234)).unwrap());
        let region = Region::new(1 << 20).unwrap();
        let target = pd_server.register(&region, Access::REMOTE_WRITE).unwrap();
        let region = Region::new(1 << 20).unwrap();
        let source = pd_client.register(&region, Access::LOCAL).unwrap();
        let (nodes, log) = ([s, c], Vec::new());
        Self { world, nodes, server, client, pd_server, pd_client, address, target, source, log }
    }

    fn connect(&mut self, path: usize) -> (QpNum, QpNum) {
        let client = self.start(path, Duration::from_secs(1));
        let (mut request, mut server, mut ready) = (None, None, 0);
        for _ in 0..100 {
            for (_, event) in self.turn() {
                match event {
                    FabricEvent::Request(r) => request = Some(r),
                    FabricEvent::Established { .. } => ready += 1,
                    other => panic!("{other:?}"),
                }
            }
            if let Some(request) = request.take() {
                let now = self.world.now();
                let empty = PrivateData::EMPTY;
                let qp = self.server.accept(now, &self.pd_server, *request, LIMITS, &empty);
                server = Some(qp.unwrap());
            }
            if ready == 2 {
                break;
            }
        }
        (client, server.unwrap())
    }

    fn start(&mut self, path: usize, timeout: Duration) -> QpNum {
        let params = ConnectParams {
            local: Some([sim_ip(11), sim_ip(12)][path]),
            remote: self.address[path],
            private_data: PrivateData::EMPTY,
            limits: LIMITS,
            timeout,
            peer_name: None,
        };
        self.client.connect(self.world.now(), &self.pd_client, &params).unwrap()
    }

    /// Flushes, runs one event of the world and returns the events of the fabrics.
    fn turn(&mut self) -> Vec<(&'static str, FabricEvent)> {
        let now = self.world.now();
        self.server.flush(now);
        self.client.flush(now);
        self.world.step();
        self.events()
    }

    fn events(&mut self) -> Vec<(&'static str, FabricEvent)> {
        let now = self.world.now();
        let mut events = Vec::new();
        for (name, fabric) in [("server", &mut self.server), ("client", &mut self.client)] {
            fabric.poll(now);
            while let Some(event) = fabric.next_event() {
                self.log.push(format!("{now} {name} {event:?}"));
                events.push((name, event));
            }
        }
        events
    }

    /// Runs for this time and returns all events.
    fn run(&mut self, time: Duration) -> Vec<(&'static str, FabricEvent)> {
        let now = self.world.now();
        self.server.flush(now);
        self.client.flush(now);
        let until = now + time;
        let mut all = Vec::new();
        while self.world.next_event_time().is_some_and(|t| t <= until) {
            all.extend(self.turn());
        }
        self.world.advance_to(until);
        all.extend(self.events());
        all
    }

    /// Posts a client's write of `len` bytes with this value at `offset`.
    fn write(&mut self, qp: QpNum, offset: u64, len: usize, byte: u8) {
        let slice = self.source.region().slice(0, len).unwrap();
        slice.fill(byte);
        let sge = Sge { slice, lkey: self.source.lkey() };
        let addr = self.target.base() + offset;
        let remote = RemoteMem { addr, rkey: self.target.rkey() };
        let op = WrOp::RdmaWrite { remote, imm: None };
        let wr = WorkRequest { wr_id: 1, op, sges: SgeList::one(sge), signaled: true };
        self.client.post_send(qp, wr).unwrap();
    }

    fn target_byte(&self) -> u8 {
        self.target.region().slice(0, 1).unwrap().to_vec()[0]
    }
}

fn closed(events: &[(&'static str, FabricEvent)]) -> Vec<(&'static str, CloseReason)> {
    let found = events.iter().filter_map(|(name, event)| match event {
        FabricEvent::Closed { reason, .. } => Some((*name, reason.clone())),
        _ => None,
    });
    found.collect()
}

#[test]
fn a_write_of_a_dead_path_arrives_late() {
    let mut s = Setup::new(1, WorldOptions::default());
    let (old, _) = s.connect(0);
    let (new, server_new) = s.connect(1);
    // The first path goes silent after its write is sent, and its owner gives up on it.
    s.world.silence(sim_ip(11), sim_ip(1));
    s.write(old, 0, 100, 1);
    s.run(Duration::from_millis(10));
    let now = s.world.now();
    s.client.abort(now, old);
    assert_eq!(closed(&s.run(Duration::from_millis(1))), [("client", CloseReason::Local)]);
    // The same IO is resent on the other path, and is answered.
    s.write(new, 0, 100, 2);
    s.run(Duration::from_millis(1));
    assert_eq!(s.target_byte(), 2);
    // The route is restored and delivers the old bytes; fencing exists to prevent this.
    s.world.unsilence(sim_ip(11), sim_ip(1));
    let events = s.run(Duration::from_millis(1));
    assert_eq!(s.target_byte(), 1);
    let closed = closed(&events);
    assert!(matches!(closed[..], [("server", CloseReason::Lost(_))]), "{closed:?}");
    s.server.disconnect(now, server_new);
    s.run(Duration::from_secs(2));
}

#[test]
fn a_fenced_path_accepts_no_late_write() {
    let mut s = Setup::new(2, WorldOptions::default());
    let (client, server) = s.connect(0);
    s.world.silence(sim_ip(11), sim_ip(1));
    s.write(client, 0, 100, 1);
    s.run(Duration::from_millis(10));
    let now = s.world.now();
    s.server.abort(now, server);
    s.run(Duration::from_millis(1));
    s.world.unsilence(sim_ip(11), sim_ip(1));
    s.run(Duration::from_millis(10));
    assert_eq!(s.target_byte(), 0);
}

#[test]
fn a_dead_link_is_reported_only_with_detection() {
    for detect in [Some(Duration::from_millis(100)), None] {
        for acknowledged in [false, true] {
            let link = LinkOptions { detect, ..LinkOptions::default() };
            let options = WorldOptions { link, acknowledged, ..WorldOptions::default() };
            let mut s = Setup::new(3, options);
            let (client, _) = s.connect(0);
            let (other, _) = s.connect(1);
            s.world.link_down(sim_ip(1), sim_ip(11));
            s.write(client, 0, 100, 1);
            s.write(other, 4096, 100, 1);
            let early = s.run(Duration::from_millis(49));
            assert!(closed(&early).is_empty());
            let late = s.run(Duration::from_secs(60));
            assert_eq!(closed(&late).len(), if detect.is_some() { 2 } else { 0 });
            assert_eq!(s.target_byte(), 0);
            let statuses: Vec<WcStatus> = early
                .iter()
                .chain(&late)
                .filter_map(|(_, event)| match event {
                    FabricEvent::Completion(wc) if wc.qp == client => Some(wc.status),
                    _ => None,
                })
                .collect();
            let expected = match (acknowledged, detect) {
                (false, _) => vec![WcStatus::Success],
                (true, Some(_)) => vec![WcStatus::RetryExceeded],
                (true, None) => vec![],
            };
            assert_eq!(statuses, expected);
            // New connections time out until the link is up again.
            let qp = s.start(0, Duration::from_millis(500));
            let events = s.run(Duration::from_secs(1));
            let failed = events.iter().any(|(_, e)| match e {
                FabricEvent::ConnectFailed { qp: failed, failure } => {
                    *failed == qp && *failure == ConnectFailure::Failed(CloseReason::TimedOut)
                }
                _ => false,
            });
            assert!(failed, "{events:?}");
            s.world.link_up(sim_ip(11), sim_ip(1));
            let (again, _) = s.connect(0);
            s.write(again, 0, 100, 3);
            s.run(Duration::from_millis(1));
            assert_eq!(s.target_byte(), 3);
        }
    }
}

#[test]
fn a_write_can_be_torn_when_its_link_fails() {
    let torn = |ratio| {
        let options = WorldOptions { torn_writes: ratio, ..WorldOptions::default() };
        let mut s = Setup::new(4, options);
        let (client, _) = s.connect(0);
        s.write(client, 0, 1 << 20, 1);
        // Run only until the write has been sent.
        while !s.turn().iter().any(|(_, e)| matches!(e, FabricEvent::Completion(_))) {}
        s.world.link_down(sim_ip(1), sim_ip(11));
        s.run(Duration::from_secs(1));
        let bytes = s.target.region().whole().to_vec();
        bytes.iter().filter(|&&b| b == 1).count()
    };
    assert!((1..=1 << 20).contains(&torn(Ratio::ONE)));
    assert_eq!(torn(Ratio::ZERO), 0);
}

#[test]
fn a_silent_link_fills_the_queue() {
    let options = WorldOptions { buffered_max: 64 << 10, ..WorldOptions::default() };
    let mut s = Setup::new(5, options);
    let (client, _) = s.connect(0);
    s.world.silence(sim_ip(11), sim_ip(1));
    for _ in 0..LIMITS.send_max {
        s.write(client, 0, 32 << 10, 1);
    }
    let done = s.run(Duration::from_secs(1)).len();
    assert_eq!(done, 2, "only what the buffers hold completes");
    s.world.unsilence(sim_ip(11), sim_ip(1));
    assert_eq!(s.run(Duration::from_secs(1)).len(), 14);
}

#[test]
fn a_crashed_node_is_silent_until_it_restarts() {
    let mut s = Setup::new(6, WorldOptions::default());
    let (client, _) = s.connect(0);
    s.world.crash(s.nodes[0]);
    s.write(client, 0, 100, 1);
    assert!(closed(&s.run(Duration::from_secs(60))).is_empty());
    assert_eq!(s.target_byte(), 0);
    let now = s.world.now();
    s.client.abort(now, client);
    s.run(Duration::from_millis(1));
    s.server = s.world.fabric(s.nodes[0]);
    s.address = [1, 2].map(|n| s.server.listen(SocketAddr::new(sim_ip(n), 1234)).unwrap());
    let (client, _) = s.connect(0);
    s.write(client, 0, 100, 1);
    s.run(Duration::from_millis(1));
    assert_eq!(s.target_byte(), 1);
}

#[test]
fn a_dropped_fabric_resets_its_peers() {
    let mut s = Setup::new(7, WorldOptions::default());
    s.connect(0);
    s.connect(1);
    s.server = s.world.fabric(s.nodes[0]);
    let closed = closed(&s.run(Duration::from_millis(1)));
    assert!(matches!(
        closed[..],
        [("client", CloseReason::Lost(_)), ("client", CloseReason::Lost(_))]
    ));
}

#[test]
fn links_reorder_but_queue_pairs_keep_their_order() {
    let link = LinkOptions { jitter: Duration::from_millis(1), ..LinkOptions::default() };
    let mut s = Setup::new(8, WorldOptions { link, ..WorldOptions::default() });
    let qps = [s.connect(0).0, s.connect(1).0, s.connect(0).0];
    let mut overtakes = 0;
    for round in 0..100_u64 {
        // The same byte is written on three queue pairs one after the other, twice each.
        for (i, &qp) in qps.iter().enumerate() {
            for value in 0..2 {
                let at = round * 8 + i as u64 * 2;
                s.write(qp, at, 1, value + 1);
                s.run(Duration::from_micros(1));
            }
        }
        for (i, &qp) in qps.iter().enumerate() {
            s.write(qp, 0, 1, i as u8 + 1);
            s.run(Duration::from_micros(1));
        }
        s.run(Duration::from_millis(10));
        let bytes = s.target.region().slice(round as usize * 8, 6).unwrap().to_vec();
        if round > 0 {
            assert_eq!([bytes[0], bytes[2], bytes[4]], [2, 2, 2]);
        }
        overtakes += u32::from(s.target_byte() != 3);
    }
    assert!((20..90).contains(&overtakes), "{overtakes}");
}

/// Runs writes on two paths while links fail; returns all events with their times.
fn run_of(seed: u64) -> Vec<String> {
    let mut s = Setup::new(seed, WorldOptions::default());
    let faults = FaultOptions::new(vec![(sim_ip(1), sim_ip(11)), (sim_ip(2), sim_ip(12))]);
    let until = Instant::from_nanos(10_000_000_000);
    let plan = faults.plan(&mut Prng::new(seed), s.world.now(), until);
    assert!(!plan.is_empty());
    let mut paths = [s.connect(0).0, s.connect(1).0];
    s.world.inject(&plan);
    for round in 0..200_u8 {
        let (mut dead, mut requests) = (Vec::new(), Vec::new());
        for qp in paths {
            let sge =
                Sge { slice: s.source.region().slice(0, 1000).unwrap(), lkey: s.source.lkey() };
            sge.slice.fill(round);
            let remote = RemoteMem { addr: s.target.base(), rkey: s.target.rkey() };
            let op = WrOp::RdmaWrite { remote, imm: None };
            let wr = WorkRequest { wr_id: 0, op, sges: SgeList::one(sge), signaled: true };
            // A path that is down or connecting refuses the request.
            let _ = s.client.post_send(qp, wr);
        }
        for (name, event) in s.run(Duration::from_millis(50)) {
            match event {
                FabricEvent::Request(request) => requests.push(request),
                FabricEvent::Closed { qp, .. } | FabricEvent::ConnectFailed { qp, .. }
                    if name == "client" =>
                {
                    dead.push(qp);
                }
                _ => {}
            }
        }
        for request in requests {
            let now = s.world.now();
            let empty = PrivateData::EMPTY;
            s.server.accept(now, &s.pd_server, *request, LIMITS, &empty).unwrap();
        }
        for (path, qp) in paths.iter_mut().enumerate() {
            if dead.contains(qp) {
                *qp = s.start(path, Duration::from_millis(200));
            }
        }
    }
    s.log
}

#[test]
fn the_same_seed_yields_the_same_run() {
    let first = run_of(42);
    assert!(first.len() > 300, "{}", first.len());
    assert!(first.iter().any(|line| line.contains("Closed")));
    assert_eq!(first, run_of(42));
    assert_ne!(first, run_of(43));
}
