//! The fixture of the session tests: a server's shards on the simulated fabric, a device whose IO
//! can be held, and a log of every work request that the server posts.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::block::{BlockDevice, BlockSource, Completion, Core, Geometry, Io, IoOp};
use rtrs_core::extents::{Extent, ExtentList};
use rtrs_core::fabric::sim::{BindMode, NodeId, SimFabric, World, WorldOptions, sim_ip};
use rtrs_core::fabric::{Access, AsyncRegistration, Fabric};
use rtrs_core::identity::ExportId;
use rtrs_core::ids::{CoreIndex, ProviderIndex};
use rtrs_core::limits::Limits;
use rtrs_core::proto::ping::PingServerStats;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant, earliest};

use super::device::{Aside, Known, Log, Regions, Tee};
pub(super) use super::device::{DeviceOptions, Posted};
use crate::audit::{AuditEvent, AuditSink};
use crate::engine::ServerEngine;
use crate::engine::epoch::SyncEpoch;
use crate::engine::finder::{Finder, Search};
use crate::engine::message::{AdminReply, AdminReplyTo, AdminRequest, ControlMessage, Message};
use crate::engine::session::SessionParams;
use crate::export::{Export, ExportIndex, ExportTable};

/// State of a device, for tests to observe and control.
#[derive(Debug, Default)]
pub(super) struct DeviceState {
    pub(super) bytes: Vec<u8>,
    /// Executed IOs, in order.
    pub(super) log: Vec<(IoOp, u64, u32, bool)>,
    /// Whether the last executed IO had to be fast.
    pub(super) fast_only: bool,
    /// Whether IOs are accepted but not executed.
    pub(super) hold: bool,
    /// Number of changes to execute before one that is accepted but not executed until `holds` is
    /// false.
    pub(super) hold_after: Option<u32>,
    /// Whether such a change is being held.
    pub(super) holds: bool,
    /// Whether flushes, and IOs after a flush, are not executed.
    pub(super) hold_flush: bool,
    /// Failure of the next sync only; with `hold_failed`, that sync does not complete.
    pub(super) lost: Option<IoStatus>,
    pub(super) hold_failed: bool,
    /// Number of IOs that may be in flight per shard.
    pub(super) room: usize,
    /// Number of devices open on all shards.
    pub(super) open: usize,
    /// Size of the device, if it has changed.
    pub(super) size: Option<u64>,
    /// Maximum number of IOs executed in one turn.
    pub(super) most: usize,
    /// Whether another program has truncated the file.
    pub(super) cut: bool,
    /// Offset from which searches for extents fail.
    pub(super) unsearchable_from: Option<u64>,
}

/// An in-memory device whose IO tests can hold.
#[derive(Debug)]
pub(super) struct TestSource {
    pub(super) geometry: Geometry,
    pub(super) volatile: bool,
    pub(super) exclusive: bool,
    pub(super) sole_writer: bool,
    pub(super) state: Arc<Mutex<DeviceState>>,
}

#[derive(Debug)]
struct TestDevice {
    geometry: Geometry,
    state: Arc<Mutex<DeviceState>>,
    taken: VecDeque<Io>,
    held: Option<Io>,
    failed: VecDeque<Completion>,
    done: VecDeque<Completion>,
}

impl BlockSource for TestSource {
    fn geometry(&self) -> Geometry {
        let size = self.state.lock().size.unwrap_or(self.geometry.size);
        Geometry { size, ..self.geometry.clone() }
    }
    fn is_volatile(&self) -> bool {
        self.volatile
    }
    fn is_exclusive(&self) -> bool {
        self.exclusive
    }
    fn is_sole_writer(&self) -> bool {
        self.sole_writer
    }
    fn is_cut(&self) -> bool {
        self.state.lock().cut
    }
    fn open(&self, _core: &Core) -> std::io::Result<Box<dyn BlockDevice>> {
        self.state.lock().open += 1;
        Ok(Box::new(TestDevice {
            geometry: self.geometry(),
            state: Arc::clone(&self.state),
            taken: VecDeque::new(),
            held: None,
            failed: VecDeque::new(),
            done: VecDeque::new(),
        }))
    }
}

impl Drop for TestDevice {
    fn drop(&mut self) {
        self.state.lock().open -= 1;
    }
}

impl BlockDevice for TestDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }
    fn refresh(&mut self) {
        self.geometry.size = self.state.lock().size.unwrap_or(self.geometry.size);
    }
    fn submit(&mut self, io: Io) -> Result<(), Io> {
        let mut state = self.state.lock();
        if self.inflight() >= state.room {
            return Err(io);
        }
        match state.hold_after.filter(|_| io.op.changes()) {
            Some(0) => {
                (state.hold_after, state.holds) = (None, true);
                self.held = Some(io);
            }
            after => {
                state.hold_after = after.map(|after| after - 1).or(state.hold_after);
                self.taken.push_back(io);
            }
        }
        Ok(())
    }
    fn poll(&mut self, _now: Instant) -> bool {
        let mut state = self.state.lock();
        if !state.holds
            && let Some(io) = self.held.take()
        {
            self.taken.push_front(io);
        }
        let flush = self.taken.iter().position(|io| io.op == IoOp::Flush && state.hold_flush);
        let runs = if state.hold { 0 } else { flush.unwrap_or(self.taken.len()) };
        state.most = state.most.max(runs);
        for io in self.taken.drain(..runs) {
            let status = self.geometry.check(&io);
            if status == IoStatus::Ok {
                state.log.push((io.op, io.offset, io.len, io.flags.fua));
                state.fast_only = io.flags.fast_only;
                let (from, len) = (usize::try_from(io.offset).unwrap(), io.len as usize);
                match (io.op, &io.buf) {
                    (IoOp::Read, Some(buf)) => buf.copy_in(0, &state.bytes[from..from + len]),
                    (IoOp::Write, Some(buf)) => {
                        buf.copy_out(0, &mut state.bytes[from..from + len]);
                    }
                    (IoOp::WriteZeroes | IoOp::Discard, None) => {
                        state.bytes[from..from + len].fill(0);
                    }
                    (IoOp::Extents, Some(room)) => {
                        let mut list = ExtentList::new(room);
                        let sectors = state.bytes[from..from + len].chunks(512);
                        let is_hole = |sector: &[u8]| sector.iter().all(|byte| *byte == 0);
                        let mut extents = sectors.map(|s| Extent { len: 512, hole: is_hole(s) });
                        let _ = extents.all(|extent| list.push(extent));
                    }
                    (IoOp::Flush, None) => {}
                    other => panic!("no such IO: {other:?}"),
                }
            }
            let syncs = io.op == IoOp::Flush || io.flags.fua;
            let mut status = state.lost.take_if(|_| syncs).unwrap_or(status);
            let end = io.offset + u64::from(io.len);
            if io.op == IoOp::Extents && state.unsearchable_from.is_some_and(|from| end > from) {
                status = IoStatus::Io;
            }
            let to = if status.is_ok() { &mut self.done } else { &mut self.failed };
            to.push_back(Completion::new(io.tag, status));
        }
        let back = if state.hold_failed { 0 } else { self.failed.len() };
        self.done.extend(self.failed.drain(..back));
        runs > 0
    }
    fn reap(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }
    fn inflight(&self) -> usize {
        self.taken.len() + self.failed.len() + self.done.len() + usize::from(self.held.is_some())
    }
}

/// Options for a server under test.
#[derive(Clone, Debug)]
pub(super) struct StandOptions {
    pub(super) params: SessionParams,
    pub(super) bind: BindMode,
    pub(super) geometry: Geometry,
    pub(super) device: DeviceOptions,
    /// Whether the test searches for names that are not exported.
    pub(super) search: bool,
    /// Whether the devices report that their contents are lost when the process ends.
    pub(super) volatile: bool,
    /// Whether the exports are locked.
    pub(super) exclusive: bool,
    /// Whether nothing but the devices changes the contents.
    pub(super) sole_writer: bool,
    /// Epoch of the exports.
    pub(super) epoch: Arc<SyncEpoch>,
}

impl Default for StandOptions {
    fn default() -> Self {
        Self {
            params: SessionParams {
                limits: Limits::new(16, 16384).unwrap(),
                heartbeat_interval: Duration::from_secs(100),
                cores: 2,
                ..SessionParams::default()
            },
            bind: BindMode::Done,
            device: DeviceOptions::default(),
            search: false,
            volatile: false,
            exclusive: true,
            sole_writer: false,
            epoch: Arc::default(),
            geometry: Geometry {
                discard: true,
                discard_granularity: 512,
                write_zeroes: true,
                ..Geometry::plain(1 << 20)
            },
        }
    }
}

struct Host {
    core: ServerEngine,
    fabrics: Vec<Box<dyn Fabric>>,
    inbox: VecDeque<Message>,
}

/// A server on a simulated fabric. Exports: `vol` and `other`, identical; `fixed`, read-only.
pub(super) struct Fixture {
    pub(super) world: World,
    pub(super) address: SocketAddr,
    pub(super) params: SessionParams,
    pub(super) device: Arc<Mutex<DeviceState>>,
    node: NodeId,
    client: NodeId,
    hosts: Vec<Host>,
    pub(super) exports: Arc<ExportTable>,
    log: Log,
    registered: Regions,
    aside: Rc<RefCell<Aside>>,
    pub(super) known: Known,
    searches: Searches,
    /// Export that a test returns as the result of a search.
    pub(super) found: Option<Arc<Export>>,
}

/// A finder whose searches the test answers.
#[derive(Clone, Debug, Default)]
struct Searches(Arc<Mutex<VecDeque<Search>>>);

impl Finder for Searches {
    fn find(&self, search: Search) -> bool {
        self.0.lock().push_back(search);
        true
    }
}

impl Fixture {
    #[allow(clippy::needless_pass_by_value, reason = "tests make them in the call")]
    pub(super) fn new(options: StandOptions) -> Self {
        Self::serving(options, None)
    }

    /// Creates a server with `exports`, or with the default ones.
    #[allow(clippy::needless_pass_by_value, reason = "tests make them in the call")]
    pub(super) fn serving(options: StandOptions, exports: Option<Arc<ExportTable>>) -> Self {
        let world_options = WorldOptions { bind: options.bind, ..WorldOptions::default() };
        let world = World::with_options(7, world_options);
        let node = world.node(sim_ip(1));
        let client = world.node(sim_ip(2));
        for n in 3..30 {
            world.add_address(client, sim_ip(n));
        }
        let size = usize::try_from(options.geometry.size).unwrap();
        let device = Arc::new(Mutex::new(DeviceState {
            bytes: vec![0; size],
            room: 64,
            ..DeviceState::default()
        }));
        let export = |name: &str, read_only, state: &Arc<Mutex<DeviceState>>| {
            let source = TestSource {
                geometry: options.geometry.clone(),
                volatile: options.volatile,
                exclusive: options.exclusive,
                sole_writer: options.sole_writer,
                state: Arc::clone(state),
            };
            let (id, epoch) = (Some(ExportId::of_name(name)), Arc::clone(&options.epoch));
            Export { read_only, id, epoch, ..Export::new(name, Arc::new(source)) }
        };
        let spare = || {
            let state = DeviceState { bytes: vec![0; size], room: 64, ..Default::default() };
            Arc::new(Mutex::new(state))
        };
        let searches = Searches::default();
        let finder = Box::new(searches.clone()) as Box<dyn Finder>;
        let named = vec![
            export("vol", false, &device),
            export("other", false, &spare()),
            export("fixed", true, &spare()),
        ];
        let own = || ExportTable::with_finder(named, options.search.then_some(finder));
        let exports = exports.unwrap_or_else(own);
        let found = Arc::new(export("found", false, &spare()));
        let (log, registered, aside) =
            (Log::default(), Regions::default(), Rc::<RefCell<Aside>>::default());
        let known = Known::default();
        let hosts: Vec<Host> = (0..options.params.cores)
            .map(|at| {
                let core = Core::without_ring(CoreIndex(at));
                let inner = world.fabric(node);
                Host {
                    core: ServerEngine::new(options.params, core, &exports),
                    fabrics: vec![Box::new(Tee {
                        inner,
                        log: Rc::clone(&log),
                        device: options.device,
                        registered: Arc::clone(&registered),
                        aside: Rc::clone(&aside),
                        known: Rc::clone(&known),
                    })],
                    inbox: VecDeque::new(),
                }
            })
            .collect();
        let mut fixture = Self {
            world,
            address: SocketAddr::new(sim_ip(1), 1234),
            params: options.params,
            device,
            node,
            client,
            hosts,
            exports,
            log,
            registered,
            aside,
            known,
            searches,
            found: Some(found),
        };
        fixture.hosts[0].fabrics[0].listen(fixture.address).unwrap();
        fixture
    }

    /// Returns the oldest search that has not been answered yet.
    pub(super) fn search(&mut self) -> Option<Search> {
        self.settle();
        self.searches.0.lock().pop_front()
    }

    /// Answers a search.
    pub(super) fn answer(&mut self, search: Search, result: Result<Arc<Export>, u16>) {
        let found = ControlMessage::Found(Box::new((search, result)));
        self.hosts[0].inbox.push_back(Message::Control(found));
        self.settle();
    }

    pub(super) fn client_fabric(&self) -> SimFabric {
        self.world.fabric(self.client)
    }

    pub(super) fn now(&self) -> Instant {
        self.world.now()
    }

    pub(super) fn send(&mut self, message: Message) {
        self.hosts[0].inbox.push_back(message);
    }

    /// Runs until nothing happens within ten milliseconds.
    pub(super) fn settle(&mut self) {
        self.run(Duration::from_millis(10), true);
    }

    /// Advances the virtual time.
    pub(super) fn pass(&mut self, time: Duration) {
        self.run(time, false);
    }

    fn run(&mut self, time: Duration, until_idle: bool) {
        let end = self.now() + time;
        for round in 0.. {
            assert!(round < 1_000_000, "the server never becomes idle");
            if self.turn() {
                continue;
            }
            let limit = if until_idle { self.now() + time } else { end };
            let mut next = self.world.next_event_time();
            if !until_idle {
                for host in &self.hosts {
                    next = earliest(next, host.core.deadline());
                }
            }
            match next {
                Some(at) if at <= limit => {
                    self.world.advance_to(at.max(self.now() + Duration::from_nanos(1)));
                }
                _ if until_idle => return,
                _ => {
                    self.world.advance_to(end);
                    self.turn();
                    return;
                }
            }
        }
    }

    /// Runs one turn of each shard, or advances to the next event. Returns false if there is none
    /// within ten milliseconds.
    pub(super) fn step(&mut self) -> bool {
        if self.turn() {
            return true;
        }
        let soon = self.now() + Duration::from_millis(10);
        let next = self.world.next_event_time().filter(|at| *at <= soon);
        next.into_iter().for_each(|at| {
            self.world.advance_to(at.max(self.now() + Duration::from_nanos(1)));
        });
        next.is_some()
    }

    fn turn(&mut self) -> bool {
        let mut busy = false;
        let now = self.now();
        let mut messages = Vec::new();
        for host in &mut self.hosts {
            while let Some(message) = host.inbox.pop_front() {
                busy = true;
                host.core.handle_message(now, message, &mut host.fabrics);
            }
            busy |= host.fabrics[0].poll(now);
            while !host.core.is_turn_full()
                && let Some(event) = host.fabrics[0].next_event()
            {
                busy = true;
                host.core.handle_event(now, ProviderIndex(0), event, &mut host.fabrics);
            }
            busy |= host.core.poll(now, &mut host.fabrics);
            messages.extend(std::iter::from_fn(|| host.core.take_message()));
            host.fabrics[0].flush(now);
            host.core.check();
        }
        busy |= !messages.is_empty();
        messages.into_iter().for_each(|(to, one)| self.hosts[to.index()].inbox.push_back(one));
        busy
    }

    /// Starts recording the events of the audit log.
    pub(super) fn audited(&mut self) -> Arc<Mutex<Vec<AuditEvent>>> {
        let events = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&events);
        self.control().set_audit(AuditSink::new(move |event| kept.lock().push(event)));
        events
    }

    /// Work requests that the server has posted since the last call.
    pub(super) fn posted(&self) -> Vec<Posted> {
        std::mem::take(&mut *self.log.borrow_mut())
    }

    /// Chunk regions that the server has registered since the last call.
    pub(super) fn pools(&self) -> Vec<(u64, Access)> {
        let chunks = usize::from(self.params.limits.queue_depth());
        let size = chunks * self.params.limits.chunk_size() as usize;
        let all = std::mem::take(&mut *self.registered.lock());
        all.into_iter().filter(|(_, len, _)| *len >= size).map(|(id, _, to)| (id, to)).collect()
    }

    /// Completes pending registrations. Returns their number.
    pub(super) fn make(&mut self) -> usize {
        self.settle();
        let waiting = std::mem::take(&mut self.aside.borrow_mut().waiting);
        let count = waiting.len();
        for (id, what) in waiting {
            let (result, pd, took) = (what.register(), what.pd, Duration::ZERO);
            self.aside.borrow_mut().made.push_back(AsyncRegistration { id, pd, result, took });
        }
        self.settle();
        count
    }

    /// Number of bytes that are waiting to be registered and whose memory still exists.
    pub(super) fn waiting(&self) -> usize {
        self.aside.borrow().waiting.iter().map(|(_, what)| what.region.len()).sum()
    }

    /// Number of chunk bytes that count against the limit.
    pub(super) fn used_memory(&mut self) -> u64 {
        let answer = self.admin(AdminRequest::Sessions).lock().take();
        let Some(AdminReply::Sessions { memory, .. }) = answer else { panic!("no sessions") };
        memory.used_bytes
    }

    /// Number of bytes that the server currently has registered.
    pub(super) fn registered(&self) -> usize {
        self.world.registered(self.node)
    }

    pub(super) fn shutdown(&mut self) {
        let now = self.now();
        let host = &mut self.hosts[0];
        host.core.shutdown(now, &mut host.fabrics);
    }

    pub(super) fn all_done(&self) -> bool {
        self.hosts.iter().all(|host| host.core.is_done())
    }

    pub(super) fn sessions(&self) -> Vec<crate::stats::SessionSnapshot> {
        self.hosts[0].core.snapshot(self.now())
    }

    /// Ping statistics of each shard.
    pub(super) fn pings(&self) -> Vec<Option<PingServerStats>> {
        self.hosts.iter().map(|host| host.core.pings()).collect()
    }

    /// Names of the exports that the first session has open.
    pub(super) fn open_names(&self) -> Vec<String> {
        let opens = self.sessions().swap_remove(0).opens;
        opens.into_iter().map(|open| open.export).collect()
    }

    /// Sends an operator request. The answer is None until it arrives.
    pub(super) fn admin(&mut self, request: AdminRequest) -> Arc<Mutex<Option<AdminReply>>> {
        let answer = Arc::new(Mutex::new(None));
        let place = Arc::clone(&answer);
        let reply = AdminReplyTo::new(move |answer| *place.lock() = Some(answer));
        self.hosts[0].inbox.push_back(Message::Control(ControlMessage::Admin { request, reply }));
        self.settle();
        answer
    }

    /// The control shard's engine.
    pub(super) fn control(&mut self) -> &mut ServerEngine {
        &mut self.hosts[0].core
    }

    /// Numbers of connections and of requests in flight on all shards.
    pub(super) fn load(&self) -> (usize, u64) {
        let shards = || self.hosts.iter().map(|host| host.core.shard());
        (shards().map(|s| s.connections()).sum(), shards().map(|s| s.inflight()).sum())
    }

    /// Counters of the first export.
    pub(super) fn counters(&self) -> crate::stats::ExportTotals {
        self.exports.get(ExportIndex(0)).map(|export| export.counters.totals()).unwrap()
    }

    /// Number of orphaned writes on all exports.
    pub(super) fn orphaned_writes(&self) -> usize {
        let places = (0..u16::try_from(self.exports.len()).unwrap()).map(ExportIndex);
        places.map(|at| self.exports.orphaned_writes(at).len()).sum()
    }

    /// Asserts that nothing of any session remains.
    pub(super) fn assert_empty(&self) {
        assert_eq!((self.load(), self.orphaned_writes()), ((0, 0), 0));
        assert_eq!(self.sessions(), []);
    }
}

pub(super) fn client_ip(n: u8) -> IpAddr {
    sim_ip(2 + n)
}
