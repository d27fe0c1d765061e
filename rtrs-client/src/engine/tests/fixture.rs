//! Test fixture: the shards of a session, a server and a simulated world, driven as in `driver.rs`.

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;

use rtrs_core::block::{BlockDevice, Io, IoFlags, IoOp};
use rtrs_core::fabric::sim::{NodeId, World, WorldOptions, sim_ip};
use rtrs_core::fabric::{Fabric, FabricEvent, WorkCompletion};
use rtrs_core::identity::EvictionSecret;
use rtrs_core::ids::{CoreIndex, ProviderIndex, QpNum, SessionId};
use rtrs_core::mem::{MemSlice, Region};
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::AccessMode;

use super::server::{How, Server};
use crate::engine::control::SessionControl;
use crate::engine::ctx::Ctx;
use crate::engine::device_table::OpenDevice;
use crate::engine::io::Shard;
use crate::engine::io::devices::{DeviceReport, Reported};
use crate::engine::io::slow_requests::SlowReport;
use crate::engine::message::{ConnectionEnd, ControlMessage, Message, Outbox, ShardMessage};
use crate::engine::{
    Change, ChangeError, DeviceIndex, Failover, HeartbeatSettings, NoPath, PATH_RUN, PathTarget,
    Policy, SessionConfig, SessionDevice, SlowIo, VolumeConfig,
};
use crate::path::state::PathState;
use crate::stats::ShardStats;

/// The only provider of each shard.
const PROVIDER: ProviderIndex = ProviderIndex(0);
pub(super) const MS: Duration = Duration::from_millis(1);
pub(super) const SEC: Duration = Duration::from_secs(1);
/// Size of the IO buffers on each shard.
pub(super) const BUFFERS: usize = 4 << 20;

#[derive(Clone, Copy, Debug)]
pub(super) struct Done {
    pub(super) shard: usize,
    pub(super) tag: u64,
    pub(super) status: IoStatus,
}

/// A shard of the client.
struct Host {
    fabrics: Vec<Box<dyn Fabric>>,
    shard: Rc<RefCell<Shard>>,
    device: Option<SessionDevice>,
    region: Arc<Region>,
    inbox: VecDeque<ShardMessage>,
    out: Outbox,
}

pub(super) struct Client {
    pub(super) control: SessionControl,
    shards: Vec<Host>,
    home: VecDeque<ControlMessage>,
    waiting: BTreeSet<u64>,
    next_tag: u64,
    pub(super) done: Vec<Done>,
    /// Tags of IOs that the device failed before they completed.
    pub(super) given_up: Vec<u64>,
    /// If set, randomly delays messages between shards.
    pub(super) lazy: Option<Prng>,
    /// Whether the fixture leaves the first device's completions to others.
    pub(super) is_idle: bool,
}

impl Client {
    fn new(now: Instant, config: SessionConfig, fabrics: Vec<Box<dyn Fabric>>) -> Self {
        let uuids: Vec<[u8; 16]> = (0..config.paths.len()).map(|i| [0xa0 + i as u8; 16]).collect();
        let config = Arc::new(config);
        let shard = |(index, fabric)| Host {
            fabrics: vec![fabric],
            shard: Rc::new(RefCell::new(Shard::new(CoreIndex(index), &config))),
            device: None,
            region: Region::new(BUFFERS).expect("memory"),
            inbox: VecDeque::new(),
            out: Outbox::default(),
        };
        Self {
            shards: (0u16..).zip(fabrics).map(shard).collect(),
            control: SessionControl::new(now, Arc::clone(&config), &uuids),
            home: VecDeque::new(),
            waiting: BTreeSet::new(),
            next_tag: 1,
            done: Vec::new(),
            given_up: Vec::new(),
            lazy: None,
            is_idle: false,
        }
    }

    /// Runs a function on the control shard.
    fn control<T>(
        &mut self,
        now: Instant,
        what: impl FnOnce(&mut SessionControl, &mut Ctx<'_>) -> T,
    ) -> T {
        let Host { fabrics, out, .. } = &mut self.shards[0];
        what(&mut self.control, &mut Ctx { now, fabrics, out })
    }

    fn on_control_message(&mut self, now: Instant, message: ControlMessage) {
        self.control(now, |control, ctx| control.handle_message(message, ctx));
    }

    pub(super) fn has_messages(&self) -> bool {
        !self.home.is_empty() || self.shards.iter().any(|shard| !shard.inbox.is_empty())
    }

    fn is_lazy(&mut self) -> bool {
        self.lazy.as_mut().is_some_and(|prng| prng.chance(Ratio::new(9, 10)))
    }

    fn on_message(&mut self, now: Instant, shard: usize, message: ShardMessage) {
        let opened = matches!(message, ShardMessage::Open(DeviceIndex::FIRST, _));
        let here = &mut self.shards[shard];
        let ctx = &mut Ctx { now, fabrics: &mut here.fabrics, out: &mut here.out };
        here.shard.borrow_mut().handle_message(message, ctx);
        if opened && here.device.is_none() {
            let mut device = SessionDevice::new(&here.shard, DeviceIndex::FIRST);
            device.attach_region(&here.region).expect("memory is registered");
            here.device = Some(device);
        }
        here.shard.borrow().check();
    }

    /// Handles a completion on a shard. Returns whether the completion belongs to a path.
    pub(super) fn owns(&mut self, now: Instant, shard: usize, wc: &WorkCompletion) -> bool {
        let Host { fabrics, out, shard: engine, .. } = &mut self.shards[shard];
        let ctx = &mut Ctx { now, fabrics, out };
        engine.borrow_mut().handle_completion(PROVIDER, wc, ctx)
            || shard == 0 && self.control.handle_completion(PROVIDER, wc, ctx)
    }

    fn on_event(&mut self, now: Instant, shard: usize, event: FabricEvent) {
        let here = &mut self.shards[shard];
        let engine = Rc::clone(&here.shard);
        let ctx = &mut Ctx { now, fabrics: &mut here.fabrics, out: &mut here.out };
        match event {
            FabricEvent::Completion(wc) => assert!(self.owns(now, shard, &wc), "{shard}: {wc:?}"),
            FabricEvent::Established { qp, private_data } => {
                let data = private_data.as_bytes();
                if !engine.borrow_mut().handle_established(PROVIDER, qp, data, ctx) {
                    assert!(shard == 0, "unclaimed connection");
                    self.control.handle_established(PROVIDER, qp, data, ctx);
                }
            }
            FabricEvent::ConnectFailed { qp, failure } => {
                self.on_end(now, shard, qp, ConnectionEnd::Failed(failure));
            }
            FabricEvent::Closed { qp, reason } => {
                self.on_end(now, shard, qp, ConnectionEnd::Closed(reason));
            }
            FabricEvent::Request(request) => panic!("{request:?}"),
        }
        engine.borrow().check();
    }

    fn on_end(&mut self, now: Instant, shard: usize, qp: QpNum, end: ConnectionEnd) {
        let here = &mut self.shards[shard];
        let ctx = &mut Ctx { now, fabrics: &mut here.fabrics, out: &mut here.out };
        let ours = shard == 0 && self.control.handle_closed(PROVIDER, qp, &end, ctx)
            || here.shard.borrow_mut().handle_closed(PROVIDER, qp, end, ctx);
        assert!(ours, "shard {shard}: unclaimed connection {qp} ended");
    }

    fn deliver(&mut self, now: Instant, shard: usize) -> bool {
        let mut any = false;
        while let Some((to, message)) = self.shards[shard].out.take() {
            any = true;
            match message {
                Message::Control(message) if shard == 0 => self.on_control_message(now, message),
                Message::Control(message) => self.home.push_back(message),
                Message::Shard(message) if to.index() == shard => {
                    self.on_message(now, shard, message);
                }
                Message::Shard(message) => self.shards[to.index()].inbox.push_back(message),
            }
        }
        any
    }

    fn turn_shard(&mut self, now: Instant, shard: usize) -> bool {
        let mut any = false;
        while !self.is_lazy()
            && let Some(message) = self.shards[shard].inbox.pop_front()
        {
            any = true;
            self.on_message(now, shard, message);
        }
        if shard == 0 {
            while !self.is_lazy()
                && let Some(message) = self.home.pop_front()
            {
                any = true;
                self.on_control_message(now, message);
            }
        }
        any |= self.shards[shard].fabrics[0].poll(now);
        while let Some(event) = self.shards[shard].fabrics[0].next_event() {
            any = true;
            self.on_event(now, shard, event);
        }
        if shard == 0 {
            any |= self.control(now, |control, ctx| control.poll(ctx));
        }
        any |= self.deliver(now, shard);
        let here = &mut self.shards[shard];
        let ctx = &mut Ctx { now, fabrics: &mut here.fabrics, out: &mut here.out };
        any |= here.shard.borrow_mut().pump(ctx);
        here.shard.borrow().check();
        here.fabrics[0].flush(now);
        if let Some(device) = here.device.as_mut().filter(|_| !self.is_idle) {
            device.poll(now);
            self.given_up.extend(std::iter::from_fn(|| device.take_given_up()));
            while let Some(done) = device.reap() {
                any = true;
                assert!(self.waiting.remove(&done.tag), "IO {} ended twice", done.tag);
                self.done.push(Done { shard, tag: done.tag, status: done.status });
            }
        }
        any | self.deliver(now, shard)
    }

    fn deadline(&self) -> Option<Instant> {
        let shards = self.shards.iter().map(|shard| shard.shard.borrow().deadline());
        shards.fold(self.control.deadline(), earliest)
    }

    /// Number of unfinished IOs.
    pub(super) fn pending(&self) -> usize {
        self.waiting.len()
    }

    /// Final status of an IO, once it has completed.
    pub(super) fn status(&self, tag: u64) -> Option<IoStatus> {
        self.done.iter().find(|done| done.tag == tag).map(|done| done.status)
    }

    pub(super) fn buffer(&self, shard: usize, at: usize, len: usize) -> MemSlice {
        self.shards[shard].region.slice(at, len).expect("inside the buffers")
    }

    /// Cancels the first device's IOs that have not begun and whose tags match.
    pub(super) fn cancel(&mut self, shard: usize, fits: &dyn Fn(u64) -> bool) {
        self.shards[shard].device.as_mut().expect("a device").cancel(fits);
    }

    /// Number of unfinished IOs of the first device.
    pub(super) fn inflight(&self, shard: usize) -> usize {
        self.shards[shard].shard.borrow().ios().device_inflight(DeviceIndex::FIRST)
    }

    pub(super) fn stats(&self, shard: usize) -> ShardStats {
        self.shards[shard].shard.borrow().paths().stats().clone()
    }

    /// Returns a shard's report of a device.
    pub(super) fn device_report(
        &self,
        now: Instant,
        shard: usize,
        device: DeviceIndex,
    ) -> Option<DeviceReport> {
        self.device_reports(now, shard, Reported::One(device)).pop()
    }

    /// Returns a shard's reports of devices.
    pub(super) fn device_reports(
        &self,
        now: Instant,
        shard: usize,
        reported: Reported,
    ) -> Vec<DeviceReport> {
        self.shards[shard].shard.borrow().device_reports(now, reported)
    }

    pub(super) fn shards(&self) -> usize {
        self.shards.len()
    }

    pub(super) fn region(&self, shard: usize) -> &Arc<Region> {
        &self.shards[shard].region
    }

    /// Returns a shard's description of a device.
    pub(super) fn info(&self, shard: usize, device: DeviceIndex) -> Arc<OpenDevice> {
        Arc::clone(self.shards[shard].shard.borrow().ios().devices().info(device))
    }

    /// Whether a shard has completions that have not been reaped.
    pub(super) fn has_completions(&self, shard: usize) -> bool {
        self.shards[shard].shard.borrow().ios().devices().has_completions()
    }

    /// Paths that a shard may use for a device.
    pub(super) fn serving(&self, shard: usize, device: DeviceIndex) -> Vec<usize> {
        self.shards[shard].shard.borrow().paths().serving(device)
    }

    /// Delivers a message from the control shard to all shards.
    pub(super) fn notify_all(&mut self, now: Instant, message: &ShardMessage) {
        for shard in 0..self.shards.len() {
            self.on_message(now, shard, message.clone());
        }
    }

    /// Returns a shard's queue for a device.
    pub(super) fn device(&self, shard: usize, device: DeviceIndex) -> SessionDevice {
        SessionDevice::new(&self.shards[shard].shard, device)
    }

    pub(super) fn slow_requests(&self, now: Instant) -> SlowReport {
        let device = DeviceIndex::FIRST;
        let slow = self.shards.iter().map(|s| s.shard.borrow().ios().slow_requests(now, device));
        slow.fold(SlowReport::default(), |sum, shard| SlowReport {
            now: sum.now + shard.now,
            total: sum.total + shard.total,
            oldest: sum.oldest.max(shard.oldest),
        })
    }

    pub(super) fn permits_held(&self, shard: usize) -> usize {
        self.shards[shard].shard.borrow().ios().permits_held()
    }

    pub(super) fn path_slow(&self, shard: usize) -> Vec<bool> {
        self.shards[shard].shard.borrow().paths().slow()
    }

    pub(super) fn path_inflight(&self, shard: usize) -> Vec<u32> {
        self.shards[shard].shard.borrow().paths().inflight()
    }

    pub(super) fn states(&self) -> Vec<PathState> {
        self.control.view().paths().iter().map(|path| path.state).collect()
    }

    pub(super) fn last_error(&self, path: usize) -> String {
        let end = self.control.view().paths()[path].last_end.clone();
        end.map(|end| end.to_string()).unwrap_or_default()
    }
}

/// Secret by which the server proves that it ended the session.
pub(super) const SECRET: EvictionSecret = EvictionSecret([0x5e; 16]);

/// Parameters of a fixture.
pub(super) struct Setup {
    pub(super) seed: u64,
    pub(super) paths: usize,
    /// Number of addresses for additional paths, initially unused.
    pub(super) spare: usize,
    pub(super) world: WorldOptions,
    pub(super) how: How,
    pub(super) config: SessionConfig,
    /// Addresses of each path; if empty, the server's own address.
    pub(super) remotes: Vec<SocketAddr>,
    pub(super) invalidate_reads: bool,
    /// Heartbeats for a server that identifies itself as `rtrs-server`.
    pub(super) heartbeat: HeartbeatSettings,
}

/// Returns the server's address on a path.
pub(super) fn server_ip(path: usize) -> IpAddr {
    sim_ip(1 + path as u8)
}

/// Returns the client's address on a path.
pub(super) fn client_ip(path: usize) -> IpAddr {
    sim_ip(11 + path as u8)
}

/// Returns the target of the path with that number.
pub(super) fn target(path: usize) -> PathTarget {
    PathTarget {
        peer_name: None,
        name: format!("path{path}"),
        local: Some(client_ip(path)),
        remotes: vec![SocketAddr::new(server_ip(path), 1234)],
        unresolved: None,
        transport: "sim",
        provider: PROVIDER,
        invalidate_reads: true,
        heartbeat: HEARTBEAT,
        proves: true,
    }
}

/// Default heartbeats of fixtures, for any server.
const HEARTBEAT: HeartbeatSettings = HeartbeatSettings {
    interval: Duration::from_millis(100),
    missed_max: 3,
    confirmed_missed_max: 3,
    idle_max: Duration::from_secs(30),
};

/// Returns a volume that is opened for writing.
pub(super) fn volume(export: &str) -> VolumeConfig {
    VolumeConfig {
        export: export.into(),
        access: AccessMode::ReadWrite,
        read_only_fallback: false,
        promotes: false,
        inherited_epoch: None,
        inherited_export: None,
        identity: None,
    }
}

fn config() -> SessionConfig {
    SessionConfig {
        name: "fixture".into(),
        volumes: vec![volume("vol0")],
        open_patience: Duration::ZERO,
        resent_for: Duration::ZERO,
        id: SessionId([0x5e; 16]),
        paths: Vec::new(),
        shards: 2,
        policy: Policy::RoundRobin,
        path_run: PATH_RUN,
        heartbeat: HEARTBEAT,
        connect_timeout: SEC,
        reconnect_min: 100 * MS,
        reconnect_max: SEC,
        io_timeout: 5 * SEC,
        slow_io: SlowIo::Wait,
        no_path: NoPath::QueueFor(5 * SEC),
        failover: Failover::Fast,
        queue_depth_limit: u16::MAX,
        prover: None,
        seed: 7,
    }
}

/// IO to submit.
#[derive(Clone, Copy)]
pub(super) struct TestIo {
    op: IoOp,
    flags: IoFlags,
    offset: u64,
    len: u32,
    at: usize,
}

impl TestIo {
    /// IO without flags, whose buffer begins at the start of the shard's buffers.
    pub(super) fn new(op: IoOp, offset: u64, len: u32) -> Self {
        Self { op, flags: IoFlags::default(), offset, len, at: 0 }
    }

    pub(super) fn flags(self, flags: IoFlags) -> Self {
        Self { flags, ..self }
    }

    /// Makes the buffer begin at byte `at` of the shard's buffers.
    pub(super) fn at(self, at: usize) -> Self {
        Self { at, ..self }
    }
}

/// Client, server and world.
pub(super) struct Fixture {
    pub(super) world: World,
    /// The client's machine.
    pub(super) node: NodeId,
    pub(super) client: Client,
    pub(super) server: Server,
    spins: u32,
}

impl Fixture {
    pub(super) fn new(change: impl FnOnce(&mut Setup)) -> Self {
        let mut setup = Setup {
            seed: 1,
            paths: 1,
            spare: 0,
            world: WorldOptions::default(),
            how: How::default(),
            config: config(),
            remotes: Vec::new(),
            invalidate_reads: true,
            heartbeat: HEARTBEAT,
        };
        change(&mut setup);
        let world = World::with_options(setup.seed, setup.world);
        let (there, here) = (world.node(server_ip(0)), world.node(client_ip(0)));
        let addresses = setup.paths + setup.spare;
        for path in 1..addresses {
            world.add_address(there, server_ip(path));
            world.add_address(here, client_ip(path));
        }
        let addresses: Vec<_> =
            (0..addresses).map(|path| SocketAddr::new(server_ip(path), 1234)).collect();
        let target = |(path, &remote): (usize, &SocketAddr)| PathTarget {
            remotes: if setup.remotes.is_empty() { vec![remote] } else { setup.remotes.clone() },
            invalidate_reads: setup.invalidate_reads,
            heartbeat: setup.heartbeat,
            ..target(path)
        };
        setup.config.paths = addresses.iter().enumerate().map(target).take(setup.paths).collect();
        let fabrics = (0..setup.config.shards)
            .map(|_| Box::new(world.fabric(here)) as Box<dyn Fabric>)
            .collect();
        let server = Server::new(Box::new(world.fabric(there)), &addresses, setup.how);
        let client = Client::new(world.now(), setup.config, fabrics);
        Self { world, node: here, client, server, spins: 0 }
    }

    /// Creates a fixture whose paths are all connected and whose device is open.
    pub(super) fn open(change: impl FnOnce(&mut Setup)) -> Self {
        let mut fixture = Self::new(change);
        fixture.until("all paths up and the device open", 2 * SEC, Self::is_whole);
        fixture
    }

    /// Creates a fixture that was open once and then lost its path, and whose server now behaves
    /// differently. (Before its first open, a session gives up at the first failure.)
    pub(super) fn spoiled(setup: impl FnOnce(&mut Setup), spoil: impl FnOnce(&mut How)) -> Self {
        let mut fixture = Self::open(setup);
        spoil(&mut fixture.server.how);
        fixture.server.seen.clear();
        fixture.server.end_path(fixture.now(), 0);
        fixture
    }

    /// Whether all paths are connected and every shard knows the device.
    pub(super) fn is_whole(&self) -> bool {
        self.client.control.view().is_open(DeviceIndex::FIRST)
            && self.client.states().iter().all(|state| *state == PathState::Connected)
            && self.client.shards.iter().all(|shard| shard.device.is_some())
            && !self.client.has_messages()
    }

    pub(super) fn now(&self) -> Instant {
        self.world.now()
    }

    fn turn(&mut self) -> bool {
        let now = self.world.now();
        let mut any = false;
        for shard in 0..self.client.shards.len() {
            any |= self.client.turn_shard(now, shard);
        }
        any | self.server.turn(now)
    }

    /// Advances by one event or deadline. Returns false when nothing is due before `bound`.
    fn advance(&mut self, bound: Instant) -> bool {
        // Two turns, because calls into a fabric may leave events behind.
        if self.turn() || self.turn() {
            self.spins += 1;
            assert!(self.spins < 10_000, "a turn that never ends");
            return true;
        }
        self.spins = 0;
        let deadline = self.client.deadline();
        let now = self.world.now();
        assert!(deadline.is_none_or(|at| at > now), "a deadline in the past keeps the shard awake");
        let event = self.world.next_event_time();
        if self.client.has_messages() {
            // Messages are being delayed; meanwhile the world runs.
            if event.is_some_and(|at| at <= bound) {
                self.world.step();
            }
            return true;
        }
        match earliest(event, deadline) {
            Some(at) if at <= bound => {
                if event.is_some_and(|event| event <= at) {
                    self.world.step();
                } else {
                    self.world.advance_to(at);
                }
                true
            }
            _ => {
                self.world.advance_to(bound);
                false
            }
        }
    }

    /// Pauses the client for `time`, while the server and the world run.
    pub(super) fn stall(&mut self, time: Duration) {
        let end = self.world.now() + time;
        loop {
            while self.server.turn(self.world.now()) {}
            match self.world.next_event_time().filter(|at| *at <= end) {
                Some(_) => self.world.step(),
                None => break self.world.advance_to(end),
            };
        }
    }

    /// Runs until the condition holds. Panics if that takes longer than `bound`.
    pub(super) fn until(&mut self, what: &str, bound: Duration, so: impl Fn(&Self) -> bool) {
        let end = self.now() + bound;
        while !so(self) {
            assert!(
                self.advance(end) || so(self),
                "no {what} within {bound:?}: {:?}, {} IOs pending",
                self.client.control.view().paths(),
                self.client.pending()
            );
        }
    }

    pub(super) fn run(&mut self, time: Duration) {
        let end = self.now() + time;
        while self.advance(end) {}
    }

    /// Runs until every IO has completed.
    pub(super) fn drain(&mut self, bound: Duration) {
        self.until("end of all IO", bound, |fixture| fixture.client.pending() == 0);
        for shard in 0..self.client.shards.len() {
            assert_eq!(self.client.inflight(shard), 0, "permits and rows were returned");
        }
    }

    /// Submits an IO on a shard. Returns its tag.
    pub(super) fn submit_io(&mut self, shard: usize, io: TestIo) -> u64 {
        let TestIo { op, flags, offset, len, at } = io;
        let tag = self.client.next_tag;
        self.client.next_tag += 1;
        let bytes = match op {
            IoOp::Read | IoOp::Write => len as usize,
            IoOp::Extents => rtrs_core::extents::LEN_MAX,
            _ => 0,
        };
        let buf = (bytes > 0).then(|| self.client.buffer(shard, at, bytes));
        let now = self.world.now();
        let device = self.client.shards[shard].device.as_mut().expect("the device was opened");
        device.poll(now);
        device.submit(Io { tag, op, flags, offset, len, buf }).expect("room");
        self.client.waiting.insert(tag);
        tag
    }

    /// Submits an IO without flags, whose buffer begins at the start of the shard's buffers.
    pub(super) fn submit(&mut self, shard: usize, op: IoOp, offset: u64, len: u32) -> u64 {
        self.submit_io(shard, TestIo::new(op, offset, len))
    }

    /// Reads through the session and waits for the data.
    pub(super) fn read(&mut self, shard: usize, offset: u64, len: u32) -> Vec<u8> {
        let tag = self.submit(shard, IoOp::Read, offset, len);
        self.drain(10 * SEC);
        assert_eq!(self.client.status(tag), Some(IoStatus::Ok));
        self.client.buffer(shard, 0, len as usize).to_vec()
    }

    pub(super) fn change(&mut self, change: Change) -> Result<(), ChangeError> {
        let now = self.world.now();
        self.client.control(now, |control, ctx| control.change(change, ctx))
    }

    /// Reports a network change that may help paths.
    pub(super) fn network_change(&mut self) {
        let now = self.world.now();
        self.client.control(now, |control, ctx| control.on_network_change("link sim0 is up", ctx));
    }

    /// Reports that a link with the addresses of these paths has gone down.
    pub(super) fn link_down_reported(&mut self, paths: &[usize]) {
        let now = self.world.now();
        let addresses: Vec<_> = paths.iter().map(|path| client_ip(*path)).collect();
        let what = "link sim0 is down";
        self.client.control(now, |control, ctx| control.on_link_down(what, &addresses, ctx));
    }

    pub(super) fn detach(&mut self) {
        let now = self.world.now();
        self.client.control(now, |control, ctx| control.detach(ctx));
    }

    pub(super) fn link_down(&self, path: usize) {
        self.world.link_down(client_ip(path), server_ip(path));
    }

    pub(super) fn link_up(&self, path: usize) {
        self.world.link_up(client_ip(path), server_ip(path));
    }

    /// Number of IO requests on each path.
    pub(super) fn spread(&self) -> Vec<usize> {
        let on = |path: usize| {
            self.server.ios().filter(|r| usize::from(r.path.0[0] - 0xa0) == path).count()
        };
        (0..self.client.control.view().paths().len()).map(on).collect()
    }
}
