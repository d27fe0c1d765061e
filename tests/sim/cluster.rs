//! Simulated cluster: the client and server cores, the world between them, and one clock.
//!
//! A core's turn does what its driver would do: it handles messages, fabric events, timers and the
//! device's user, and posts requests. After a turn in which something happened, the core pauses for
//! a time drawn from the seed, so that events pile up and turns interleave. `bounds.rs` checks
//! invariants during a run and leftovers at its end; `users.rs` contains the workloads, `second.rs`
//! a second volume, `beside.rs` other sessions, and `operator.rs` the operators' actions.

mod beside;
mod bounds;
mod guest;
mod machine;
mod nbd;
mod operator;
mod second;
mod servers;
mod users;

use std::collections::VecDeque;
use std::sync::Arc;

use nbd_bridge::{BufferPools, Group, Seat};
use rtrs_client::engine::{ClientEngine, PathStatus};
use rtrs_client::{Change, DeviceIndex, Leaving};
use rtrs_core::fabric::sim::{NodeId, World};
use rtrs_core::ids::CoreIndex;
use rtrs_core::prng::Prng;
use rtrs_core::time::{Duration, Instant, earliest};

use super::disk::Disk;
use super::epochs::KeptEpoch;
use super::faults::Act;
use super::host::{
    ClientHost, Inbox, Pace, ServerHost, ask_to_stop, client_ip, path_name, server_ip,
    session_config,
};
use super::log::Log;
use super::machine::Machine;
use super::nbd::{EXTRA_SECTORS, End};
use super::options::{MS, Options};
use super::oracle::Oracle;
use super::port::{Port, PortFaults, SharedFaults};
use super::workload::{Errors, Rules, Workload};
use super::{Failure, Plant};
use beside::Beside;
use operator::Exports;
use second::Second;
use servers::OtherServers;

/// Maximum number of rounds at the same virtual time; beyond it, the clock is considered stopped.
const SPINS_MAX: u32 = 20_000;

/// State of a run.
#[derive(Debug)]
pub(super) struct Cluster {
    options: Options,
    pub(super) world: World,
    nodes: [NodeId; 2],
    client: Vec<ClientHost>,
    /// Whether the workloads do IO and faults are injected.
    is_loaded: bool,
    /// Workloads while there is no client.
    works: Vec<Workload>,
    /// Number of clients started so far.
    clients_started: u8,
    /// Server's cache epoch that the most recently killed client had saved.
    saved_epoch: Option<u64>,
    other_servers: OtherServers,
    /// Number of paths added to running sessions.
    added: u8,
    /// Time at which the session is configured with all paths again.
    restore_at: Option<Instant>,
    /// Time at which a session that gave up is retried.
    retry_at: Option<Instant>,
    /// Whether the current client's session has opened the device.
    has_opened: bool,
    guest: Option<guest::Guest>,
    /// Second volume of the session, if it has one.
    pub(super) second: Option<Second>,
    beside: Beside,
    server: Vec<ServerHost>,
    exports: Exports,
    /// State that a server keeps for the next one.
    kept: Arc<KeptEpoch>,
    /// Whether the backing file is truncated.
    is_short: bool,
    /// Number of servers started so far.
    servers_started: u64,
    plant: Plant,
    pub(super) disk: Disk,
    pub(super) oracle: Oracle,
    ports: [SharedFaults; 2],
    plan: VecDeque<(Instant, Act)>,
    prng: Prng,
    log: Log,
    spins: u32,
    pinned_until: Instant,
    pub(super) faults: u64,
    pub(super) registered_max: usize,
    states: Vec<String>,
    /// Group of the bridges of the current client's cores.
    group: Arc<Group>,
    /// Connections that their users have closed without the bridges noticing, for a planted bug.
    unseen: Vec<End>,
    /// Virtual machine that uses the device.
    machine: Option<Machine>,
}

/// Makes connections take a while to end on the server in some runs, and in half of these on the
/// client too. No random numbers are drawn for this, so that other runs do not change. Runs that
/// kill clients are left out: a killed client would keep its memory registered for that time, and
/// the memory bound, which is for one client, would not apply.
fn linger(world: &World, options: &Options) {
    let seed = options.seed;
    if options.faults.client_restart + options.faults.client_leave > 0 {
        return;
    }
    let by = Duration::from_millis(200) * (1 + (seed / 8 % 8) as u32);
    if seed % 4 == 3 {
        world.linger(server_ip(0), by);
    }
    if seed % 8 == 7 {
        world.linger(client_ip(0), by / 8);
    }
}

impl Cluster {
    pub(super) fn new(options: &Options, plant: Plant, log: &Log) -> Self {
        let mut prng = Prng::new(options.seed);
        let world = World::with_options(prng.next_u64(), options.world.clone());
        let nodes = [world.node(client_ip(0)), world.node(server_ip(0))];
        for path in 1..options.paths {
            world.add_address(nodes[0], client_ip(path));
            world.add_address(nodes[1], server_ip(path));
        }
        linger(&world, options);
        let tracks = options.faults.cuts_power();
        let sectors = options.work.sectors;
        let all = sectors + if options.extra.guest_writes { guest::SECTORS } else { 0 };
        let all = all + if options.extra.losses.stalls { EXTRA_SECTORS } else { 0 };
        let all = all.next_multiple_of(options.disk.block / 512);
        let disk = Disk::new(options.disk, all, tracks, plant, prng.fork());
        disk.count_later_than(options.io_timeout);
        disk.shared_from(sectors);
        disk.set_unlocked(options.extra.unlocked);
        disk.set_apart(options.extra.losses.apart);
        if options.extra.losses.statuses {
            disk.vary_statuses(Prng::new(options.seed ^ 0x7374_6174_7573_6573));
        }
        let mut port = |has: &[Plant]| {
            PortFaults::new(if has.contains(&plant) { plant } else { Plant::None }, prng.fork())
        };
        let windows = if options.invalidate_reads { Plant::OpenWindow } else { Plant::None };
        let ports = [
            port(&[Plant::Leak, Plant::EarlyClosed, windows]),
            port(&[Plant::LostAnswer, Plant::LostClose, windows]),
        ];
        ports[1].borrow_mut().pinned = options.pinned;
        ports[1].borrow_mut().late_data = options.late_data;
        ports[0].borrow_mut().preflush = options.preflush;
        ports.iter().for_each(|port| port.borrow_mut().kernel = options.kernel.is_some());
        let errors = Errors {
            backend: options.disk.errors.num > 0 || options.disk.writeback.num > 0,
            loses: options.disk.writeback.num > 0,
            statuses: options.extra.losses.statuses,
            postflush: options.extra.machine.is_some_and(|machine| machine.through)
                && !options.disk.fua,
            shrinks: options.extra.resizes,
            paths: options.path_errors(),
            given_up_for: options.given_up_for(),
            deferred_max: options.deferred_max(),
        };
        let (work, takeover) = (options.work.clone(), options.takeover);
        let Options { nbd, nbd_drops, preflush, .. } = *options;
        let (shares, alone) = (options.extra.second, options.extra.losses.users);
        let stalls = options.extra.losses.stalls;
        let rules = Rules {
            options: work,
            errors,
            takeover,
            nbd,
            alone,
            stalls,
            nbd_drops,
            shares,
            preflush,
            zeroes: options.extra.losses.zeroes,
            machine: options.extra.machine,
            plant,
        };
        let machine = Self::machine(options);
        let works = (0..options.client_cores)
            .map(|at| Workload::new(usize::from(at), &rules, prng.fork(), log.clone()))
            .map(|work| work.with_machine(machine.as_ref()))
            .collect();
        let mut oracle = Oracle::new(sectors, options.work.overlap, options.disk.write_cache);
        oracle.flights = options.world.flights;
        oracle.part_max = options.part_max();
        let mut cluster = Self {
            oracle,
            options: options.clone(),
            world,
            nodes,
            is_loaded: false,
            client: Vec::new(),
            works: Vec::new(),
            clients_started: 0,
            saved_epoch: None,
            other_servers: OtherServers::new(options, plant),
            added: 0,
            restore_at: None,
            retry_at: None,
            has_opened: false,
            guest: None,
            second: Second::new(options, &rules, log),
            beside: Beside::default(),
            server: Vec::new(),
            exports: Exports::new(options),
            kept: KeptEpoch::new(options.extra.saves, options.seed, plant),
            is_short: false,
            servers_started: 0,
            plant,
            disk,
            ports,
            plan: VecDeque::new(),
            prng,
            log: log.clone(),
            spins: 0,
            pinned_until: Instant::ZERO,
            faults: 0,
            registered_max: 0,
            states: Vec::new(),
            group: Group::new(usize::from(options.client_cores), |_| ()),
            unseen: Vec::new(),
            machine,
        };
        cluster.start_server();
        let home = cluster.other_servers.home();
        cluster.guest = guest::Guest::new(&cluster.world, options, home, &rules, log);
        cluster.start_client(works);
        cluster
    }

    /// Starts a client with these workloads.
    fn start_client(&mut self, works: Vec<Workload>) {
        (self.clients_started, self.has_opened, self.retry_at) =
            (self.clients_started + 1, false, None);
        self.group = Group::new(works.len(), |_| ());
        self.machine.iter().for_each(Machine::begin_life);
        let identity = self.other_servers.identity(self.clients_started);
        let mut config =
            session_config(&self.options, self.clients_started, self.saved_epoch, identity);
        let takes_over = self.options.takeover.is_some();
        let second = self.second.as_mut().map(|second| second.begin_life(takes_over));
        config.volumes.extend(second);
        let config = Arc::new(config);
        let uuid = |at: usize| [0xa0 + at as u8; 16].map(|byte: u8| byte ^ self.clients_started);
        let uuids: Vec<[u8; 16]> = (0..self.options.paths).map(uuid).collect();
        for (at, work) in (0..).zip(works) {
            let fabric = self.world.fabric(self.nodes[0]);
            self.client.push(ClientHost {
                core: ClientEngine::new(self.world.now(), CoreIndex(at), &config, &uuids),
                fabrics: vec![Port::boxed(fabric, SharedFaults::clone(&self.ports[0]))],
                inbox: Inbox::new(),
                work,
                pools: BufferPools::default(),
                pace: Pace::new(),
            });
        }
    }

    /// Ends the client's process; if `power` is set, by a power failure. The workloads remain.
    fn stop_client(&mut self, power: bool) {
        if power {
            self.world.crash(self.nodes[0]);
        }
        self.retry_at = None;
        let now = self.now();
        let kept = self.client.first().and_then(|home| home.core.saved_epoch(DeviceIndex::FIRST));
        self.saved_epoch = kept.or(self.saved_epoch);
        let kept =
            self.client.first().and_then(|home| home.core.pinned_identity(DeviceIndex::FIRST));
        self.other_servers.keep(kept);
        if let (Some(second), Some(home)) = (&mut self.second, self.client.first()) {
            second.client_gone(now, self.options.takeover.is_some(), &home.core);
        }
        if self.plant == Plant::EarlyOpen {
            self.disk.end_writes_early();
        }
        for mut host in std::mem::take(&mut self.client) {
            host.work.abandon(now, &mut self.oracle, true);
            self.works.push(host.work);
        }
        self.oracle.client_gone(self.options.takeover.is_some());
    }

    /// Retries a session that gave up attaching, as a supervisor does.
    fn supervise(&mut self, now: Instant) {
        if self.restore_at.is_some_and(|at| at <= now) {
            self.restore(now);
        }
        self.supervise_second(now);
        let Some(home) = self.client.first() else { return };
        if self.clients_started > 1 && self.retry_at.is_none() && home.core.failure().is_some() {
            self.retry_at = Some(now + 50 * MS);
        }
        if self.retry_at.is_some_and(|at| at <= now) {
            self.stop_client(false);
            let works = std::mem::take(&mut self.works);
            self.start_client(works);
        }
    }

    pub(super) fn now(&self) -> Instant {
        self.world.now()
    }

    /// Sets the upcoming actions.
    pub(super) fn set_plan(&mut self, plan: Vec<(Instant, Act)>) {
        self.plan = plan.into();
    }

    /// Releases the write that the disk holds.
    pub(super) fn release_write(&mut self) {
        self.log.event(self.now(), "let go", [0, 0], String::new);
        self.disk.release_write();
        self.wake_all();
    }

    pub(super) fn paths(&self) -> Vec<PathStatus> {
        self.client.first().map(|home| home.core.paths()).unwrap_or_default()
    }

    /// Whether the device is open on all cores and all paths carry IO.
    pub(super) fn is_whole(&self) -> bool {
        self.client.first().is_some_and(|home| home.core.is_open(DeviceIndex::FIRST))
            && self.is_settled()
            && self.guest.iter().filter_map(guest::Guest::work).all(Workload::is_open)
            && self.paths().len() == self.options.paths
            && self.paths().iter().all(|path| path.is_connected())
            && self.client.iter().all(|host| host.work.is_open() && host.inbox.deadline().is_none())
            && self.is_second_whole()
    }

    /// Stops all sources of faults.
    pub(super) fn calm(&mut self) {
        for port in &self.ports {
            let mut port = port.borrow_mut();
            (port.fail_after, port.no_memory, port.late_data) = (None, 0, false);
        }
        self.disk.calm(self.now());
        self.exports.calm(self.now());
        self.kept.calm();
        self.machine.iter().for_each(Machine::calm);
        self.calm_second();
        self.stop_other_servers();
        self.beside.end_rival();
        self.restore_at = self.options.operated.then(|| self.now());
        // Drop the actions that remain if the load ended early.
        self.plan.retain(|(_, act)| !matches!(act, Act::Reconnect { .. } | Act::RemoveExport));
    }

    pub(super) fn act(&mut self, act: Act) -> Result<(), Failure> {
        let now = self.now();
        self.faults += 1;
        self.log.event(now, "fault", [0, 0], || format!("{act:?}"));
        match act {
            Act::World(fault) => self.world.apply(fault),
            Act::QpError { at_client, after, receive } => {
                let mut port = self.ports[usize::from(!at_client)].borrow_mut();
                (port.fail_after, port.at_receive) = (Some(after), receive);
            }
            Act::StopServer { power } => {
                self.stop_server(power);
                self.start_other_servers_in_its_place();
            }
            Act::AskServer { drain } => {
                if let Some(host) = self.server.first_mut() {
                    host.core.handle_message(now, ask_to_stop(drain), &mut host.fabrics);
                }
            }
            Act::StartServer => {
                if self.server.first().is_some_and(|host| host.core.is_stopping()) {
                    self.stop_server(false);
                }
                if self.server.is_empty() {
                    self.start_again();
                }
            }
            Act::StopClient { power } => self.stop_client(power),
            Act::LeaveClient => self.leave_client(),
            Act::StartClient if self.client.is_empty() => {
                let works = std::mem::take(&mut self.works);
                self.start_client(works);
            }
            Act::StartClient => {}
            Act::Stall { core, time } => {
                let client = self.client.iter_mut().map(|host| &mut host.pace);
                let server = self.server.iter_mut().map(|host| &mut host.pace);
                if let Some(pace) = client.chain(server).nth(core) {
                    pace.free_at = pace.free_at.max(now + time);
                }
            }
            Act::NoMemory { at_client, times } => {
                self.ports[usize::from(!at_client)].borrow_mut().no_memory = times;
            }
            Act::Leave { path, good, within } => {
                let leaving = Leaving { path: path_name(path), within, force: false };
                let change =
                    if good { Change::Remove(leaving) } else { Change::Disconnect(leaving) };
                self.change(now, change);
            }
            Act::Have { path, within } => self.ensure_path(now, path, within),
            Act::Choose(policy) => {
                let change = self.client.first().and_then(|home| home.choose(policy));
                if let Some(change) = change {
                    self.change(now, change);
                }
            }
            Act::Move { path } => self.move_address(path),
            Act::Twin { path } => self.twin(path),
            Act::Resize { sectors } => self.resize(sectors),
            Act::Grow { times } => self.grow(now, times),
            Act::ReportIds(ids) => self.report_ids(ids),
            Act::Reconnect { only, by } => self.reconnect(now, only, by)?,
            Act::RemoveExport => self.remove_export()?,
            Act::Second(act) => self.act_on_second(now, act),
        }
        self.wake_all();
        Ok(())
    }

    fn wake_all(&mut self) {
        for host in &mut self.client {
            host.pace.due = true;
        }
        for host in self.server.iter_mut().chain(self.other_servers.hosts_mut()) {
            host.pace.due = true;
        }
        if let Some(guest) = &mut self.guest {
            guest.pace.due = true;
        }
    }

    /// Starts detaching the session.
    pub(super) fn detach(&mut self) {
        let now = self.now();
        for port in &self.ports {
            port.borrow_mut().detaching = true;
        }
        let home = &mut self.client[0];
        home.core.detach(now, &mut home.fabrics);
        if let Some(guest) = &mut self.guest {
            guest.detach(now);
        }
        self.wake_all();
    }

    /// Whether a detach has ended everything on the client.
    pub(super) fn is_done(&self) -> bool {
        self.client[0].core.is_done() && self.guest.as_ref().is_none_or(guest::Guest::is_done)
    }

    fn turn_client(&mut self, at: usize) -> Result<bool, Failure> {
        let now = self.world.now();
        let mut busy = self.client[at].begin_turn(now);
        let ClientHost { core, work, pools, .. } = &mut self.client[at];
        if !work.is_open()
            && let Some(device) = core.device(DeviceIndex::FIRST)
        {
            if self.clients_started > 1 && !std::mem::replace(&mut self.has_opened, true) {
                // The server admits a writer only once no write by its predecessor can land.
                self.oracle.settle();
                self.disk.end_writes_in_time();
            }
            let seat = Seat { group: Arc::clone(&self.group), shard: at };
            work.open(now, device, seat, pools);
        }
        busy |= work.turn(now, &mut self.oracle)?;
        if let Some(second) = &mut self.second {
            busy |= second.turn(now, at, core, pools)?;
        }
        for (sector, count) in work.failed.drain(..) {
            self.disk.end_current_writes_early(sector, count);
        }
        if self.is_torn() {
            return Ok(true);
        }
        busy |= self.client[at].end_turn(now);
        let ClientHost { core, pace, .. } = &mut self.client[at];
        pace.turns += u64::from(busy);
        if busy && pace.turns.is_multiple_of(16) {
            core.check();
        }
        let mut messages = Vec::new();
        while let Some(message) = core.take_message() {
            messages.push(message);
        }
        for (to, message) in messages {
            let takes = self.prng.duration(Duration::ZERO..=self.options.message_max);
            self.client[to.index()].inbox.push(now + takes, message);
        }
        if at == 0 && busy {
            self.note_paths(now);
        }
        Ok(busy)
    }

    fn note_paths(&mut self, now: Instant) {
        for (at, path) in self.paths().into_iter().enumerate() {
            if self.states.len() <= at {
                self.states.push(String::new());
            }
            let state = path.state_name();
            if self.states[at] != state {
                self.log.event(now, "path", [at as u64, path.reconnects], || {
                    let why = path.last_error().unwrap_or_default();
                    format!("{} {} {why}", path.path, state)
                });
                self.states[at] = state;
            }
        }
    }

    fn turn_server(&mut self, at: usize) -> bool {
        let (busy, messages) = self.server[at].turn(self.world.now());
        for (to, mail) in messages {
            // A core that takes longer may be too late for a connecting client.
            let max = self.options.server_message_max;
            let max = if self.is_loaded { max } else { max.min(300 * MS) };
            let takes = self.prng.duration(Duration::ZERO..=max);
            self.server[to.index()].inbox.push(self.world.now() + takes, mail);
        }
        busy
    }

    /// Runs the turn of every core that is due. Returns whether anything happened.
    fn turn(&mut self) -> Result<bool, Failure> {
        let now = self.world.now();
        self.disk.set_now(now);
        self.exports.set_now(now);
        if let Some(second) = &self.second {
            second.set_now(now);
        }
        let mut any = self.other_servers.turn(now, self.options.think_max);
        for at in 0..self.client.len() {
            let pace = &mut self.client[at].pace;
            if pace.due && pace.free_at <= now {
                pace.due = false;
                if self.turn_client(at)? {
                    any = true;
                    // Replies and bridge rounds affect other cores too.
                    if self.options.nbd_drops {
                        self.client.iter_mut().for_each(|host| host.pace.due = true);
                    }
                    let pause = self.prng.duration(Duration::ZERO..=self.options.think_max);
                    let pace = &mut self.client[at].pace;
                    (pace.due, pace.free_at) = (true, now + pause);
                }
            }
        }
        any |= self.turn_beside(now)?;
        for at in 0..self.server.len() {
            let pace = &mut self.server[at].pace;
            if pace.due && pace.free_at <= now {
                pace.due = false;
                if self.turn_server(at) {
                    any = true;
                    let pause = self.prng.duration(Duration::ZERO..=self.options.think_max);
                    let pinned = self.disk.take_pinned();
                    let pace = &mut self.server[at].pace;
                    (pace.due, pace.free_at) = (true, now + pause.max(pinned));
                    if !pinned.is_zero() {
                        self.pinned_until = self.pinned_until.max(now + pinned);
                    }
                }
            }
        }
        Ok(any | self.save_epochs(now))
    }

    /// Returns when the next core is due.
    fn core_time(&self, now: Instant) -> Option<Instant> {
        let client = self.client.iter().enumerate().map(|(at, host)| {
            let second = self.second.as_ref().and_then(|second| second.deadline(at));
            (&host.pace, earliest(host.deadline(), second))
        });
        let server = self.server.iter().map(|host| (&host.pace, host.deadline()));
        let guest = self.guest.iter().map(|guest| (&guest.pace, guest.deadline()));
        let other = self.other_servers.hosts().map(|host| (&host.pace, host.deadline()));
        let beside = self.beside.deadline().map(|at| at.max(now));
        let hosts = client.chain(server).chain(guest).chain(other);
        hosts.fold(beside, |soonest, (pace, deadline)| {
            let own = if pace.due { Some(now) } else { deadline };
            earliest(soonest, own.map(|at| at.max(pace.free_at).max(now)))
        })
    }

    /// Marks the cores that are due.
    fn wake_due(&mut self, now: Instant) {
        for (at, host) in self.client.iter_mut().enumerate() {
            let second = self.second.as_ref().and_then(|second| second.deadline(at));
            let deadline = earliest(host.deadline(), second);
            host.pace.due |= deadline.is_some_and(|at| at <= now);
        }
        for host in self.server.iter_mut().chain(self.other_servers.hosts_mut()) {
            host.pace.due |= host.deadline().is_some_and(|at| at <= now);
        }
        if let Some(guest) = &mut self.guest {
            guest.pace.due |= guest.deadline().is_some_and(|at| at <= now);
        }
    }

    /// Advances by one round. Returns false, with the clock at `bound`, if nothing is due before
    /// then.
    fn advance(&mut self, bound: Instant) -> Result<bool, Failure> {
        let before = self.world.now();
        self.kill_while_saving(before)?;
        self.end_torn(before);
        while let Some(&(at, act)) = self.plan.front()
            && at <= before
        {
            self.plan.pop_front();
            self.act(act)?;
        }
        self.turn()?;
        let now = self.world.now();
        self.supervise(now);
        let event = self.world.next_event_time();
        let planned = self.plan.front().map(|&(at, _)| at);
        let planned = earliest(planned, self.kept.deadline());
        let second = self.second.as_ref().filter(|_| !self.client.is_empty());
        let second = second.and_then(Second::retry_at);
        let planned = earliest(planned, second);
        let planned =
            earliest(earliest(planned, self.retry_at), self.restore_at).map(|at| at.max(now));
        let next = earliest(earliest(event, planned), self.core_time(now));
        let Some(at) = next.filter(|&at| at <= bound) else {
            self.world.advance_to(bound);
            self.wake_due(bound);
            return Ok(false);
        };
        if event.is_some_and(|event| event <= at) {
            self.wake_all();
        }
        self.world.advance_to(at);
        self.wake_due(at);
        self.spins = if at > before { 0 } else { self.spins + 1 };
        if self.spins > SPINS_MAX {
            let own = self.client.iter().map(|host| (host.pace.due, host.deadline()));
            let cores: Vec<_> = own
                .chain(self.server.iter().map(|host| (host.pace.due, host.deadline())))
                .collect();
            let text = format!("the clock stopped at {at}; world {event:?}, cores {cores:?}");
            return Err(Failure::new("live", text));
        }
        Ok(true)
    }

    /// Runs until the condition holds, at most until `bound`. Returns whether it holds.
    pub(super) fn run_until(
        &mut self,
        bound: Instant,
        so: impl Fn(&Self) -> bool,
    ) -> Result<bool, Failure> {
        let mut rounds = 0_u32;
        while !so(self) {
            if !self.advance(bound)? {
                return Ok(so(self));
            }
            rounds += 1;
            if rounds.is_multiple_of(64) {
                self.check_memory()?;
                self.check_time()?;
                self.check_first_path()?;
            }
        }
        Ok(true)
    }

    /// Returns the number of queue pair errors so far.
    pub(super) fn qp_errors(&self) -> u64 {
        self.ports.iter().map(|port| port.borrow().failed).sum()
    }
}
