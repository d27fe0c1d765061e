//! Measures a provider's speed between two threads: `tcp` over loopback, `rdma` over a device.
//!
//! One thread writes `size` bytes with an immediate, `depth` at a time; the other answers each with
//! an empty write with immediate. Usage: `fabric_bench [tcp|rdma:LISTEN[@SOURCE]] [size] [depth]
//! [seconds] [connections] [nocrc]`, with the addresses of RDMA devices, e.g.
//! `rdma:10.0.0.2@10.0.0.1`.

use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;

use rtrs_core::fabric::iwarp::{IwarpFabric, IwarpOptions, IwarpShared};
use rtrs_core::fabric::{
    Access, ConnectParams, Fabric, FabricEvent, MemoryRegistration, PdUse, PrivateData, QpLimits,
    RemoteMem, Sge, SgeList, WcOp, WorkRequest, WrOp,
};
use rtrs_core::ids::{QpNum, Rkey};
use rtrs_core::mem::Region;
use rtrs_core::rt::{Clock, Inbox, PollPolicy, Ring, Shard, run};
use rtrs_core::time::{Duration, Instant};

const NOWHERE: RemoteMem = RemoteMem { addr: 0, rkey: Rkey(0) };

struct Side {
    fabric: Box<dyn Fabric>,
    registration: Arc<dyn MemoryRegistration>,
    /// None on the answering side.
    target: Option<RemoteMem>,
    size: usize,
    depth: usize,
    connections: usize,
    open: Vec<QpNum>,
    closed: usize,
    end: Instant,
    done: u64,
    pd: Arc<dyn rtrs_core::fabric::ProtectionDomain>,
}

impl Side {
    fn limits(&self) -> QpLimits {
        QpLimits { send_max: self.depth as u32 + 4, recv_max: self.depth as u32 + 4 }
    }

    fn write(&mut self, qp: QpNum, slot: usize) {
        let (remote, sges) = match self.target {
            Some(target) => {
                let at = slot * self.size;
                let region = self.registration.region();
                let slice = region.slice(at, self.size).expect("inside");
                let sge = Sge { slice, lkey: self.registration.lkey() };
                let remote = RemoteMem { addr: target.addr + at as u64, rkey: target.rkey };
                (remote, SgeList::one(sge))
            }
            None => (NOWHERE, SgeList::EMPTY),
        };
        let op = WrOp::RdmaWrite { remote, imm: Some(slot as u32) };
        let wr = WorkRequest { wr_id: slot as u64, op, sges, signaled: false };
        self.fabric.post_send(qp, wr).expect("post");
    }

    fn event(&mut self, now: Instant, event: FabricEvent) {
        match event {
            FabricEvent::Request(request) => {
                let (limits, pd) = (self.limits(), Arc::clone(&self.pd));
                let data = PrivateData::EMPTY;
                let qp = self.fabric.accept(now, &pd, request, limits, &data).expect("accept");
                for _ in 0..self.depth + 2 {
                    self.fabric.post_recv(qp, 0, None).expect("recv");
                }
            }
            FabricEvent::Established { qp, .. } => {
                self.open.push(qp);
                if self.target.is_some() {
                    for _ in 0..self.depth + 2 {
                        self.fabric.post_recv(qp, 0, None).expect("recv");
                    }
                    for slot in 0..self.depth {
                        self.write(qp, slot);
                    }
                }
            }
            FabricEvent::Completion(wc) if wc.op == WcOp::RecvRdmaWithImm => {
                self.done += 1;
                if self.target.is_none() || now < self.end {
                    self.fabric.post_recv(wc.qp, 0, None).expect("recv");
                    self.write(wc.qp, wc.imm.unwrap_or(0) as usize);
                }
            }
            FabricEvent::Closed { .. } => self.closed += 1,
            FabricEvent::ConnectFailed { failure, .. } => panic!("{failure:?}"),
            FabricEvent::Completion(_) => {}
        }
    }
}

impl Shard for Side {
    type Message = ();

    fn turn(&mut self, now: Instant) -> bool {
        let busy = self.fabric.poll(now);
        while let Some(event) = self.fabric.next_event() {
            self.event(now, event);
        }
        self.fabric.flush(now);
        if self.target.is_some() && now >= self.end {
            for qp in std::mem::take(&mut self.open) {
                self.fabric.abort(now, qp);
            }
        }
        busy
    }
    fn deadline(&self) -> Option<Instant> {
        let end = self.target.map(|_| self.end);
        rtrs_core::time::earliest(end, self.fabric.deadline())
    }
    fn is_done(&self) -> bool {
        self.closed == self.connections
    }
    fn inbox(&mut self) -> Option<&mut Inbox<()>> {
        None
    }
}

#[derive(Clone)]
struct Plan {
    size: usize,
    depth: usize,
    seconds: u64,
    connections: usize,
    carrier: Carrier,
}

#[derive(Clone)]
enum Carrier {
    Tcp(IwarpOptions),
    #[cfg(feature = "verbs")]
    Rdma {
        listen: IpAddr,
        source: Option<IpAddr>,
    },
}

impl Carrier {
    fn listen(&self) -> IpAddr {
        match self {
            Self::Tcp(_) => [127, 0, 0, 1].into(),
            #[cfg(feature = "verbs")]
            Self::Rdma { listen, .. } => *listen,
        }
    }

    fn source(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(_) => None,
            #[cfg(feature = "verbs")]
            Self::Rdma { source, .. } => *source,
        }
    }

    fn fabric(&self, ring: &Rc<Ring>) -> Box<dyn Fabric> {
        match self {
            Self::Tcp(options) => {
                Box::new(IwarpFabric::new(ring, IwarpShared::new(), options.clone()))
            }
            #[cfg(feature = "verbs")]
            Self::Rdma { .. } => {
                use rtrs_core::fabric::verbs::{VerbsFabric, VerbsOptions, VerbsShared};
                let shared = VerbsShared::open().unwrap_or_else(|e| panic!("{e}"));
                Box::new(VerbsFabric::new(ring, shared, VerbsOptions::default()).expect("a fabric"))
            }
        }
    }
}

fn side(plan: &Plan, meet: Result<(SocketAddr, RemoteMem), mpsc::Sender<(SocketAddr, RemoteMem)>>) {
    let ring = Ring::new(256).expect("ring");
    let mut fabric = plan.carrier.fabric(&ring);
    let listen = SocketAddr::new(plan.carrier.listen(), 0);
    let local = match &meet {
        Ok(_) => plan.carrier.source(),
        Err(_) => Some(listen.ip()),
    };
    let pd = fabric.alloc_pd(PdUse::Connect { local, remote: listen }).expect("pd");
    let region = Region::new(plan.size * plan.depth).expect("memory");
    region.fill(0, region.len(), 1);
    let registration = pd.register(&region, Access::REMOTE_WRITE).expect("register");
    let now = Clock.now();
    let mut side = Side {
        fabric,
        registration,
        target: None,
        size: plan.size,
        depth: plan.depth,
        connections: plan.connections,
        open: Vec::new(),
        closed: 0,
        end: now + Duration::from_secs(plan.seconds),
        done: 0,
        pd,
    };
    match meet {
        Err(sender) => {
            let address = side.fabric.listen(listen).expect("listen");
            let base = side.registration.base();
            sender
                .send((address, RemoteMem { addr: base, rkey: side.registration.rkey() }))
                .expect("the other side waits");
        }
        Ok((remote, target)) => {
            side.target = Some(target);
            let params = ConnectParams {
                local,
                remote,
                private_data: PrivateData::EMPTY,
                limits: side.limits(),
                timeout: Duration::from_secs(5),
                peer_name: None,
            };
            for _ in 0..plan.connections {
                let pd = Arc::clone(&side.pd);
                side.fabric.connect(now, &pd, &params).expect("connect");
            }
        }
    }
    let policy = PollPolicy { budget_max: Duration::from_micros(80) };
    let stats = run(&ring, policy, &mut side).expect("ring");
    let seconds = plan.seconds as f64;
    let name = if side.target.is_some() { "writer" } else { "target" };
    println!(
        "{name}: {:.0} ops/s, {:.0} MiB/s, {} enters, {} sleeps, {:?}",
        side.done as f64 / seconds,
        side.done as f64 * plan.size as f64 / seconds / 1_048_576.0,
        ring.enters(),
        stats.sleeps,
        side.fabric.counters()
    );
}

fn main() {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let crc = !args.iter().any(|a| a == "nocrc");
    let tcp = Carrier::Tcp(IwarpOptions { crc, ..IwarpOptions::default() });
    let carrier = match args.first().map(String::as_str) {
        Some("tcp") => {
            args.remove(0);
            tcp
        }
        #[cfg(feature = "verbs")]
        Some(first) if first.starts_with("rdma:") => {
            let mut ips =
                first["rdma:".len()..].split('@').map(|ip| ip.parse().expect("an address"));
            let carrier =
                Carrier::Rdma { listen: ips.next().expect("an address"), source: ips.next() };
            args.remove(0);
            carrier
        }
        _ => tcp,
    };
    let number =
        |at: usize, default: usize| args.get(at).and_then(|a| a.parse().ok()).unwrap_or(default);
    let plan = Plan {
        size: number(0, 4096),
        depth: number(1, 32),
        seconds: number(2, 3) as u64,
        connections: number(3, 1),
        carrier,
    };
    let (sender, receiver) = mpsc::channel();
    let server = {
        let plan = plan.clone();
        std::thread::spawn(move || side(&plan, Err(sender)))
    };
    let meeting = receiver.recv().expect("the target listens");
    side(&plan, Ok(meeting));
    server.join().expect("the target ends");
}
