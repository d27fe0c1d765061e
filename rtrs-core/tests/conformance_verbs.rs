//! Runs the conformance suite with the `rdma` provider on a real RDMA device, and checks that no
//! resources are left behind.
//!
//! The device is the first that has an active port and an address, or the one with the address
//! `RTRS_VERBS_ADDRESS`. Side A listens there; side B connects from `RTRS_VERBS_SOURCE`, if given,
//! so that packets cross a link. `RTRS_VERBS_SILENT` is an address that does not answer. On a host
//! without an RDMA device, every test is skipped with a message; `scripts/lab.sh` provides a device
//! and runs the tests.
#![cfg(feature = "verbs")]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;

use rtrs_core::fabric::conformance::{Harness, Side, skip};
use rtrs_core::fabric::verbs::{
    DeviceInfo, Transport, VerbsFabric, VerbsOptions, VerbsShared, devices,
};
use rtrs_core::fabric::{
    Access, CloseReason, ConnRequest, ConnectParams, Fabric, FabricEvent, Listener, PdUse,
    PrivateData, ProtectionDomain, QpLimits, Sge, SgeList, WcOp, WcStatus, WorkRequest, WrOp,
};
use rtrs_core::ids::{QpNum, Rkey};
use rtrs_core::mem::Region;
use rtrs_core::rt::{Clock, Ring};
use rtrs_core::time::{Duration, Instant};

fn from_environment(name: &str) -> Option<IpAddr> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|e| panic!("{name}={value}: {e}")))
}

/// Returns the address to listen on, or the reason why there is none.
fn listen_ip() -> Result<IpAddr, String> {
    if let Some(address) = from_environment("RTRS_VERBS_ADDRESS") {
        return Ok(address);
    }
    let found = devices().map_err(|e| e.to_string())?;
    let usable = |device: &&DeviceInfo| device.transport != Transport::Iwarp;
    let mut ports = found.iter().filter(usable).flat_map(|device| &device.ports);
    ports
        .find(|port| port.state == "active" && !port.addresses.is_empty())
        .map(|port| port.addresses[0])
        .ok_or_else(|| "no RDMA device; use scripts/lab.sh run verbs-conformance".to_owned())
}

/// The three shards of a harness.
struct Cores {
    /// Declared first, so that a fabric's queue pairs are dropped before its ring.
    a: VerbsFabric,
    b: VerbsFabric,
    second: VerbsFabric,
    rings: [Rc<Ring>; 3],
    idle: u32,
}

struct Verbs {
    cores: Result<Box<Cores>, String>,
    address: IpAddr,
    soft: bool,
}

fn options() -> VerbsOptions {
    VerbsOptions { reads_max: 8, ..VerbsOptions::default() }
}

impl Cores {
    fn new() -> Self {
        let rings = [(); 3].map(|()| Ring::new(256).expect("io_uring"));
        let open = || VerbsShared::open().expect("the connection manager");
        let (here, there) = (open(), open());
        let make = |ring: &Rc<Ring>, shared: &Arc<VerbsShared>| {
            VerbsFabric::new(ring, Arc::clone(shared), options()).expect("a fabric")
        };
        Self {
            a: make(&rings[0], &here),
            b: make(&rings[1], &there),
            second: make(&rings[2], &here),
            rings,
            idle: 0,
        }
    }

    fn turn(&mut self) {
        let mut any = false;
        for ring in &self.rings {
            any |= ring.turn().expect("io_uring");
        }
        self.idle = if any { 0 } else { self.idle + 1 };
        if self.idle > 20 {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

fn make() -> Verbs {
    let address = listen_ip();
    let soft = address.as_ref().is_ok_and(|address| is_soft(*address));
    Verbs {
        address: address.clone().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        cores: address.map(|_| Box::new(Cores::new())),
        soft,
    }
}

/// Returns true if the device with this address is rdma_rxe: only rdma_rxe has a `parent` in sysfs.
fn is_soft(address: IpAddr) -> bool {
    let found = devices().expect("the list of devices");
    let here = |device: &&DeviceInfo| device.ports.iter().any(|p| p.addresses.contains(&address));
    found.iter().find(here).is_some_and(|device| {
        std::path::Path::new("/sys/class/infiniband").join(&device.name).join("parent").exists()
    })
}

impl Verbs {
    fn cores(&mut self) -> &mut Cores {
        self.cores.as_mut().expect("a case that was skipped")
    }
}

impl Harness for Verbs {
    fn now(&self) -> Instant {
        Clock.now()
    }

    fn step(&mut self) {
        self.cores().turn();
    }

    fn fabric(&mut self, side: Side) -> Option<&mut dyn Fabric> {
        let cores = self.cores();
        Some(match side {
            Side::A => &mut cores.a,
            Side::B => &mut cores.b,
            Side::SecondA => &mut cores.second,
        })
    }

    fn listen_address(&self) -> SocketAddr {
        (self.address, 0).into()
    }

    fn source_address(&self) -> Option<IpAddr> {
        from_environment("RTRS_VERBS_SOURCE")
    }

    fn refusing_address(&mut self) -> SocketAddr {
        // The RDMA port space has no listener here unless one of the kernel's services uses this
        // port.
        (self.address, 9).into()
    }

    fn silent_address(&mut self) -> Option<SocketAddr> {
        Some((from_environment("RTRS_VERBS_SILENT")?, 1234).into())
    }

    fn waits_for_receives(&self) -> bool {
        true
    }

    fn skips(&self, case: &str) -> Option<String> {
        if let Err(reason) = &self.cores {
            return Some(reason.clone());
        }
        match case {
            "window_has_bounds" if self.soft => Some(
                "rdma_rxe checks an access through a window only against its registration".into(),
            ),
            "send_with_invalidate_revokes_the_key" => Some(
                "a peer cannot invalidate windows of type 1 (IBA 10.6.7.2.6), and user space has \
                 no other key that every queue pair serves"
                    .into(),
            ),
            _ => None,
        }
    }

    fn patience(&self) -> Duration {
        // Emulated machines are slow, and the tasklets of rdma_rxe limit its sending rate.
        Duration::from_secs(30)
    }
}

rtrs_core::fabric_conformance!(make);

/// One end of a connection created by a test.
struct End {
    qp: QpNum,
    pd: Arc<dyn ProtectionDomain>,
}

/// Runs turns at both ends until `done` returns a value.
fn wait<T>(
    cores: &mut Cores,
    what: &str,
    mut done: impl FnMut(Side, FabricEvent) -> Option<T>,
) -> T {
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_secs(60) {
        let now = Clock.now();
        cores.a.flush(now);
        cores.b.flush(now);
        cores.turn();
        let now = Clock.now();
        cores.a.poll(now);
        cores.b.poll(now);
        for side in [Side::A, Side::B] {
            let fabric = if side == Side::A { &mut cores.a } else { &mut cores.b };
            while let Some(event) = fabric.next_event() {
                if let Some(result) = done(side, event) {
                    return result;
                }
            }
        }
    }
    panic!("timed out waiting for {what}");
}

impl Cores {
    /// Returns the domains of both ends for connections to this address.
    fn domains(&mut self, remote: SocketAddr) -> [Arc<dyn ProtectionDomain>; 2] {
        let source = from_environment("RTRS_VERBS_SOURCE");
        let a = self.a.alloc_pd(PdUse::Connect { local: Some(remote.ip()), remote });
        let b = self.b.alloc_pd(PdUse::Connect { local: source, remote });
        [a.expect("a domain"), b.expect("a domain")]
    }

    fn pair(&mut self, remote: SocketAddr, pds: &[Arc<dyn ProtectionDomain>; 2]) -> [End; 2] {
        let params = ConnectParams {
            local: from_environment("RTRS_VERBS_SOURCE"),
            remote,
            private_data: PrivateData::EMPTY,
            limits: LIMITS,
            timeout: Duration::from_secs(30),
            peer_name: None,
        };
        let b = self.b.connect(Clock.now(), &pds[1], &params).expect("connect");
        let request: ConnRequest = wait(self, "a request", |side, event| match (side, event) {
            (Side::A, FabricEvent::Request(request)) => Some(*request),
            (_, other) => panic!("{other:?}"),
        });
        let a = self.a.accept(Clock.now(), &pds[0], request, LIMITS, &PrivateData::EMPTY);
        let a = a.expect("accept");
        let mut up = 0;
        wait(self, "both ends to be up", |_, event| {
            assert!(matches!(event, FabricEvent::Established { .. }), "{event:?}");
            up += 1;
            (up == 2).then_some(())
        });
        [End { qp: a, pd: Arc::clone(&pds[0]) }, End { qp: b, pd: Arc::clone(&pds[1]) }]
    }
}

const LIMITS: QpLimits = QpLimits { send_max: 16, recv_max: 16 };

/// Returns the kernel's resource counts for all devices.
fn resources() -> Option<String> {
    let shown = Command::new("rdma").args(["resource", "show"]).output().ok()?;
    shown.status.success().then(|| String::from_utf8_lossy(&shown.stdout).into_owned())
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("our descriptors").count()
}

/// Waits until no identifiers are left: those whose DREQ the peer has not confirmed are kept for at
/// most the close timeout, and then destroyed by a thread.
fn quiet(cores: &mut Cores) {
    let until = Clock.now() + options().close_timeout + Duration::from_millis(500);
    while Clock.now() < until {
        cores.turn();
        cores.a.poll(Clock.now());
        cores.b.poll(Clock.now());
    }
}

#[test]
fn two_hundred_connections_leak_nothing() {
    let mut harness = make();
    let address = harness.listen_address();
    let cores = match &mut harness.cores {
        Ok(cores) => cores,
        Err(reason) => return skip(reason),
    };
    if resources().is_none() {
        return skip("no rdma (iproute2)");
    }
    let remote = cores.a.listen(address).expect("listen");
    let mut before = None;
    for round in 0..=200 {
        // The first round opens the devices, whose resources remain.
        if round == 1 {
            quiet(cores);
            before = Some((resources(), descriptors()));
        }
        let pds = cores.domains(remote);
        let [a, b] = cores.pair(remote, &pds);
        let region = Region::new(8192).expect("memory");
        let target = a.pd.register(&region, Access::LOCAL).expect("a registration");
        let window = a.pd.window(&target).expect("a window");
        let source = b.pd.register(&region, Access::LOCAL).expect("a registration");
        let slice = region.slice(0, 4096).expect("half of it");
        let access = Access::REMOTE_WRITE;
        cores.a.bind(a.qp, &window, &slice, access, 1).expect("bind");
        wait(cores, "the bind", |_, event| {
            matches!(event, FabricEvent::Completion(wc) if wc.op == WcOp::Bind).then_some(())
        });
        cores.a.post_recv(a.qp, 2, None).expect("a receive");
        cores.a.post_recv(a.qp, 3, None).expect("a receive");
        let remote_mem = rtrs_core::fabric::RemoteMem { addr: target.base(), rkey: window.rkey() };
        let wr = WorkRequest {
            wr_id: 4,
            op: WrOp::RdmaWrite { remote: remote_mem, imm: Some(round) },
            sges: SgeList::one(Sge {
                slice: region.slice(4096, 4096).expect("the other half"),
                lkey: source.lkey(),
            }),
            signaled: true,
        };
        cores.b.post_send(b.qp, wr).expect("a write");
        wait(cores, "the immediate", |_, event| match event {
            FabricEvent::Completion(wc) if wc.op == WcOp::RecvRdmaWithImm => {
                assert_eq!((wc.status, wc.imm), (WcStatus::Success, Some(round)));
                Some(())
            }
            _ => None,
        });
        // Each round ends the connection in a different way, from either end.
        let now = Clock.now();
        match round % 4 {
            0 => cores.a.disconnect(now, a.qp),
            1 => cores.b.disconnect(now, b.qp),
            2 => cores.a.abort(now, a.qp),
            _ => cores.b.abort(now, b.qp),
        }
        let mut closed = 0;
        wait(cores, "both ends to close", |_, event| {
            closed += u32::from(matches!(event, FabricEvent::Closed { .. }));
            (closed == 2).then_some(())
        });
    }
    quiet(cores);
    assert_eq!(cores.a.connections() + cores.b.connections(), 0);
    let after = Some((resources(), descriptors()));
    let show = |counts: &Option<(Option<String>, usize)>| {
        counts
            .as_ref()
            .map(|(kernel, fds)| format!("{}{fds} descriptors", kernel.as_ref().unwrap()))
    };
    println!("before: {}\nafter: {}", show(&before).unwrap(), show(&after).unwrap());
    assert_eq!(before, after);
}

#[test]
fn a_peer_cannot_invalidate_a_window_of_type_1() {
    let mut harness = make();
    let address = harness.listen_address();
    let cores = match &mut harness.cores {
        Ok(cores) => cores,
        Err(reason) => return skip(reason),
    };
    let remote = cores.a.listen(address).expect("listen");
    let pds = cores.domains(remote);
    let [a, b] = cores.pair(remote, &pds);
    let region = Region::new(4096).expect("memory");
    let target = a.pd.register(&region, Access::LOCAL).expect("a registration");
    let window = a.pd.window(&target).expect("a window");
    cores.a.bind(a.qp, &window, &region.whole(), Access::REMOTE_WRITE, 1).expect("bind");
    wait(cores, "the bind", |_, event| matches!(event, FabricEvent::Completion(_)).then_some(()));
    cores.a.post_recv(a.qp, 2, None).expect("a receive");
    let op = WrOp::Send { imm: None, invalidate: Some(window.rkey()) };
    let wr = WorkRequest { wr_id: 3, op, sges: SgeList::EMPTY, signaled: true };
    cores.b.post_send(b.qp, wr).expect("a send");
    // The end that received the request refuses it; the peer's error differs between devices.
    let reason = wait(cores, "the end", |side, event| match (side, event) {
        (Side::A, FabricEvent::Closed { reason, .. }) => Some(reason),
        _ => None,
    });
    assert!(matches!(reason, CloseReason::Protocol(_)), "{reason:?}");
}

#[test]
fn reads_are_refused_if_none_were_negotiated() {
    let mut harness = make();
    let address = harness.listen_address();
    let cores = match &mut harness.cores {
        Ok(cores) => cores,
        Err(reason) => return skip(reason),
    };
    // As in RTRS, the listening end grants none.
    let shared = VerbsShared::open().expect("the connection manager");
    let ring = Rc::clone(&cores.rings[0]);
    cores.a = VerbsFabric::new(&ring, shared, VerbsOptions::default()).expect("a fabric");
    let remote = cores.a.listen(address).expect("listen");
    let pds = cores.domains(remote);
    let [_, b] = cores.pair(remote, &pds);
    let there = rtrs_core::fabric::RemoteMem { addr: 0, rkey: Rkey(0) };
    let op = WrOp::RdmaRead { remote: there };
    let wr = WorkRequest { wr_id: 1, op, sges: SgeList::EMPTY, signaled: true };
    let refused = cores.b.post_send(b.qp, wr);
    let unsupported = matches!(refused, Err(rtrs_core::fabric::FabricError::Unsupported(_)));
    assert!(unsupported, "{refused:?}");
}

/// `RTRS_VERBS_LINK` names the network interface of the listening side, which may be taken down.
#[test]
fn a_link_that_goes_down_ends_its_connections() {
    let mut harness = make();
    let address = harness.listen_address();
    let cores = match &mut harness.cores {
        Ok(cores) => cores,
        Err(reason) => return skip(reason),
    };
    let Ok(link) = std::env::var("RTRS_VERBS_LINK") else {
        return skip("no RTRS_VERBS_LINK that may be cut");
    };
    let set = |state: &str| {
        let done = Command::new("ip").args(["link", "set", &link, state]).status();
        assert!(done.expect("ip").success(), "ip link set {link} {state}");
    };
    let remote = cores.a.listen(address).expect("listen");
    let pds = cores.domains(remote);
    let [a, _] = cores.pair(remote, &pds);
    cores.a.post_recv(a.qp, 7, None).expect("a receive");
    cores.a.flush(Clock.now());
    set("down");
    let start = std::time::Instant::now();
    let mut flushed = false;
    let reason = wait(cores, "the end of the connection", |side, event| match (side, event) {
        (Side::A, FabricEvent::Completion(wc)) => {
            assert_eq!((wc.wr_id, wc.status), (7, WcStatus::Flushed));
            flushed = true;
            None
        }
        (Side::A, FabricEvent::Closed { reason, .. }) => Some(reason),
        _ => None,
    });
    let took = start.elapsed();
    set("up");
    assert!(flushed, "the receive was not reported");
    assert!(took < Duration::from_secs(5), "{took:?}");
    let CloseReason::Lost(text) = &reason else { panic!("{reason:?}") };
    assert!(text.contains("port 1 of ") && text.contains("went down"), "{text}");
    println!("{reason} after {took:?}");
}
