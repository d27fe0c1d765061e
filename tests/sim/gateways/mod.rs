//! Simulation of two gateways over one store, and a client with a path to each: processes freeze or
//! are killed, links are cut, operators move the export. At most one write or read of each block is
//! in flight at a time, so the legal results are known.

mod store;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_client::engine::ClientEngine;
use rtrs_client::{Change, DeviceIndex, NoPath, SessionConfig, SessionDevice, SlowIo};
use rtrs_core::block::{BlockDevice, Core, Io, IoFlags, IoOp};
use rtrs_core::fabric::Fabric;
use rtrs_core::fabric::sim::{NodeId, World};
use rtrs_core::gateway::Gateway;
use rtrs_core::identity::{ExportId, ServerId};
use rtrs_core::ids::{CoreIndex, ProviderIndex};
use rtrs_core::limits::Limits;
use rtrs_core::mem::Region;
use rtrs_core::prng::Prng;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_server::engine::message::{ControlMessage, Message};
use rtrs_server::{Export, ExportIndex, ExportTable, ServerEngine, ServerInstance, SessionParams};

pub use self::store::Counts;
use self::store::{BLOCK, BLOCKS, SimGateway, Store};
use super::Failure;
use super::host::{Inbox, PORT, Pace, ServerHost, client_ip, server_ip, session_config};
use super::options::{MS, Options};

/// Time under faults, and maximum time for recovery afterwards.
const LOAD: Duration = Duration::from_secs(40);
const CALM_MAX: Duration = Duration::from_secs(90);
/// Maximum number of rounds at one virtual time; beyond it, the clock is considered stopped.
const SPINS_MAX: u32 = 20_000;

/// Planted bug in the code specific to gateways, which a checker has to detect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatewayPlant {
    /// No bug.
    None,
    /// The lock is taken from its owner without blocklisting it.
    NoBlocklist,
    /// A gateway becomes active, and receives the requests in flight, before it holds the lock.
    ActiveEarly,
}

struct Server {
    node: NodeId,
    host: Option<ServerHost>,
    gateway: SimGateway,
    at: ExportIndex,
    /// Time until which the server's process is frozen.
    frozen: Instant,
    /// Time at which the server is restarted.
    starts: Option<Instant>,
}

struct Rig {
    world: World,
    prng: Prng,
    store: Arc<Mutex<Store>>,
    servers: Vec<Server>,
    node: NodeId,
    client: ClientEngine,
    fabrics: Vec<Box<dyn Fabric>>,
    device: Option<SessionDevice>,
    memory: Arc<Region>,
    /// Running IO by block: the number of the write, or None for a read.
    running: BTreeMap<usize, Option<u64>>,
    next: u64,
    /// Time when each block is used next.
    pause: [Instant; BLOCKS],
    started: u64,
    loaded: bool,
}

fn config(seed: u64) -> SessionConfig {
    let options = Options { paths: 2, client_cores: 1, ..Options::draw(seed) };
    SessionConfig {
        shards: 1,
        no_path: NoPath::Queue,
        slow_io: SlowIo::Wait,
        io_timeout: Duration::from_secs(5),
        ..session_config(&options, 1, None, None)
    }
}

impl Rig {
    fn new(seed: u64, plant: GatewayPlant) -> Self {
        let mut prng = Prng::new(seed ^ 0x6a7e);
        let world = World::new(prng.next_u64());
        let node = world.node(client_ip(0));
        world.add_address(node, client_ip(1));
        let store = Store::new(prng.fork(), plant);
        let config = Arc::new(config(seed));
        let uuids = [[0xa0; 16], [0xa1; 16]];
        let fabric: Box<dyn Fabric> = Box::new(world.fabric(node));
        let mut rig = Self {
            client: ClientEngine::new(world.now(), CoreIndex(0), &config, &uuids),
            fabrics: vec![fabric],
            device: None,
            memory: Region::new(BLOCKS * BLOCK as usize).expect("memory"),
            running: BTreeMap::new(),
            next: 0,
            pause: [Instant::ZERO; BLOCKS],
            started: 0,
            loaded: true,
            servers: Vec::new(),
            world,
            prng,
            store,
            node,
        };
        for at in 0..2 {
            let node = rig.world.node(server_ip(at));
            let gateway = SimGateway::new(&rig.store);
            let (frozen, at_table) = (Instant::ZERO, ExportIndex(0));
            rig.servers.push(Server {
                node,
                host: None,
                gateway,
                at: at_table,
                frozen,
                starts: None,
            });
            rig.start(at);
        }
        rig
    }

    fn start(&mut self, at: usize) {
        self.started += 1;
        let gateway = SimGateway::new(&self.store);
        let id = Some(ExportId::of_name("image"));
        let mut export = Export::new("vol", Arc::new(gateway.clone()));
        export.id = id;
        let table = ExportTable::new(vec![export]);
        let params = SessionParams {
            limits: Limits::new(32, 16384).expect("valid limits"),
            heartbeat_interval: 200 * MS,
            heartbeat_missed_max: 3,
            handshake_timeout: 1000 * MS,
            shutdown_grace: 1000 * MS,
            instance: ServerInstance { boot: 1, process: self.started },
            server_id: ServerId::from_bytes([at as u8 + 1; 16]),
            ..SessionParams::default()
        };
        let server = &mut self.servers[at];
        let mut fabric: Box<dyn Fabric> = Box::new(self.world.fabric(server.node));
        let listens = fabric.listen(SocketAddr::new(server_ip(at), PORT));
        listens.expect("the address is free");
        server.host = Some(ServerHost {
            core: ServerEngine::new(params, Core::without_ring(CoreIndex(0)), &table),
            fabrics: vec![fabric],
            inbox: Inbox::new(),
            pace: Pace::new(),
        });
        (server.gateway, server.starts) = (gateway, None);
    }

    fn kill(&mut self, at: usize) {
        let now = self.world.now();
        let server = &mut self.servers[at];
        // IO that the server has sent to the store remains in transit.
        if let Some(host) = server.host.take() {
            drop(host.core);
            drop(host.fabrics);
        }
        server.starts = Some(now + self.prng.duration(100 * MS..=5000 * MS));
    }

    fn strike(&mut self) {
        let now = self.world.now();
        let at = self.prng.index(2);
        match self.prng.index(6) {
            0 => {
                let time = self.prng.duration(100 * MS..=6000 * MS);
                self.servers[at].frozen = now + time;
            }
            1 => self.world.link_down(client_ip(at), server_ip(at)),
            2 => self.world.link_up(client_ip(at), server_ip(at)),
            3 if self.servers[at].host.is_some() => self.kill(at),
            4 => self.servers[at].gateway.begin_release(),
            5 => {
                let switch = Change::SwitchVolume { export: "vol".into() };
                // Refused if there is no gateway to switch to.
                let _ = self.client.change(now, switch, &mut self.fabrics);
            }
            _ => {}
        }
    }

    fn calm(&mut self) {
        self.loaded = false;
        for at in 0..2 {
            self.world.link_up(client_ip(at), server_ip(at));
            self.servers[at].frozen = Instant::ZERO;
            self.servers[at].starts = self.servers[at].starts.map(|_| Instant::ZERO);
        }
    }

    fn turn_server(&mut self, at: usize) -> bool {
        let now = self.world.now();
        if self.servers[at].starts.is_some_and(|at| at <= now) {
            self.start(at);
        }
        let server = &mut self.servers[at];
        if server.frozen > now {
            return false;
        }
        let Some(host) = &mut server.host else { return false };
        if let Some(event) = server.gateway.tick() {
            let message = Message::Control(ControlMessage::Gateway(server.at, event));
            host.inbox.push(now, message);
        }
        let (busy, messages) = host.turn(now);
        for (_, message) in messages {
            host.inbox.push(now, message);
        }
        busy
    }

    fn turn_client(&mut self) -> Result<bool, Failure> {
        let now = self.world.now();
        let Self { client, fabrics, .. } = self;
        let mut busy = fabrics[0].poll(now);
        while let Some(event) = fabrics[0].next_event() {
            busy = true;
            client.handle_event(now, ProviderIndex(0), event, fabrics);
        }
        busy |= client.poll(now, fabrics);
        while let Some((_, message)) = client.take_message() {
            busy = true;
            client.handle_message(now, message, fabrics);
        }
        if self.device.is_none()
            && let Some(mut device) = client.device(DeviceIndex::FIRST)
        {
            device.attach_region(&self.memory).expect("memory is registered");
            self.device = Some(device);
        }
        busy |= self.work(now)?;
        busy |= self.client.pump(now, &mut self.fabrics);
        self.fabrics[0].flush(now);
        Ok(busy)
    }

    fn work(&mut self, now: Instant) -> Result<bool, Failure> {
        let Some(device) = &mut self.device else { return Ok(false) };
        let mut any = device.poll(now);
        while let Some(done) = device.reap() {
            any = true;
            let block = done.tag as usize;
            let (write, mut store) = (self.running.remove(&block), self.store.lock());
            store.counts.ios += 1;
            if done.status != IoStatus::Ok {
                return Err(Failure::new("errors", format!("block {block}: {}", done.status)));
            }
            match write {
                Some(Some(value)) => store.acked(block, value)?,
                Some(None) => {
                    let mut found = [0; 8];
                    let at = block * BLOCK as usize;
                    self.memory.slice(at, 8).expect("inside").copy_out(0, &mut found);
                    let (found, last) = (u64::from_le_bytes(found), store.acked[block]);
                    if found != last {
                        let text = format!("block {block} has {found}, and {last} was acked");
                        return Err(Failure::new("lost", text));
                    }
                }
                None => return Err(Failure::new("once", format!("block {block} ended twice"))),
            }
            self.pause[block] = now + self.prng.duration(Duration::ZERO..=60 * MS);
        }
        for block in 0..BLOCKS {
            if !self.loaded || self.running.contains_key(&block) || self.pause[block] > now {
                continue;
            }
            let at = block * BLOCK as usize;
            let slice = self.memory.slice(at, BLOCK as usize).expect("inside");
            let write = self.prng.index(3) > 0;
            let op = if write { IoOp::Write } else { IoOp::Read };
            if write {
                self.next += 1;
                slice.copy_in(0, &self.next.to_le_bytes());
                self.store.lock().submitted[block] = self.next;
            }
            let (offset, len) = (at as u64, BLOCK);
            let (tag, flags, buf) = (block as u64, IoFlags::default(), Some(slice));
            device.submit(Io { tag, op, flags, offset, len, buf }).expect("there is room");
            self.running.insert(block, write.then_some(self.next));
            any = true;
        }
        Ok(any)
    }

    fn deadline(&self) -> Option<Instant> {
        let now = self.world.now();
        let servers = self.servers.iter().filter_map(|server| {
            let host = server.host.as_ref().and_then(ServerHost::deadline);
            let own = earliest(host, server.gateway.deadline()).filter(|_| server.host.is_some());
            Some(earliest(own, server.starts)?.max(server.frozen).max(now))
        });
        let work = self.pause.iter().enumerate().filter(|(block, at)| {
            self.loaded && self.device.is_some() && !self.running.contains_key(block) && **at > now
        });
        let own = earliest(self.client.deadline(), work.map(|(_, at)| *at).min());
        let own = earliest(own, self.device.as_ref().and_then(BlockDevice::deadline));
        let store = earliest(self.store.lock().deadline(), self.world.next_event_time());
        earliest(earliest(own, store), servers.min()).map(|at| at.max(now))
    }

    /// Runs until a given time, or until a condition holds.
    fn run(&mut self, until: Instant, so: impl Fn(&Self) -> bool) -> Result<bool, Failure> {
        let mut spins = 0;
        while !so(self) {
            let now = self.world.now();
            let mut busy = self.store.lock().advance(now)?;
            busy |= self.turn_client()?;
            for at in 0..2 {
                busy |= self.turn_server(at);
            }
            spins = if busy { spins + 1 } else { 0 };
            if spins > SPINS_MAX {
                return Err(Failure::new("live", format!("the clock stopped at {now}")));
            }
            if busy {
                continue;
            }
            match self.deadline().filter(|at| *at <= until) {
                // All work due now is done: advance the clock slightly.
                Some(at) => self.world.advance_to(at.max(now + Duration::from_micros(10))),
                None => {
                    self.world.advance_to(until);
                    return Ok(so(self));
                }
            }
        }
        Ok(true)
    }
}

/// Runs two gateways under faults.
///
/// # Errors
/// Returns the checker's finding: `ghost`, `lost`, `errors`, `once` or `live`.
pub fn run_gateways(seed: u64, plant: GatewayPlant) -> Result<Counts, Failure> {
    let mut rig = Rig::new(seed, plant);
    // A session that cannot attach at first gives up.
    let attached = rig.world.now() + CALM_MAX;
    if !rig.run(attached, |rig| rig.device.is_some())? {
        return Err(Failure::new("live", "the session does not attach"));
    }
    let end = rig.world.now() + LOAD;
    while rig.world.now() < end {
        let pause = rig.prng.duration(100 * MS..=3000 * MS);
        let until = rig.world.now() + pause;
        rig.run(until, |_| false)?;
        rig.strike();
    }
    rig.calm();
    let until = rig.world.now() + CALM_MAX;
    if !rig.run(until, |rig| rig.running.is_empty())? {
        let paths = rig.client.paths();
        let text = format!("{} IOs never end; {paths:?}, node {:?}", rig.running.len(), rig.node);
        return Err(Failure::new("live", text));
    }
    let counts = rig.store.lock().counts;
    Ok(counts)
}
