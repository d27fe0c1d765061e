//! World of a run: the clock, the order of events, and the faults.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::io::IoSlice;

use rds::proto::{ConnectionInfo, LinkId, MESSAGE_COST, Order, SocketInfo};
use rtrs_core::mutated;
use rtrs_core::prng::Prng;
use rtrs_core::prng::Ratio;
use rtrs_core::time::Duration;
use rtrs_core::time::Instant;

use super::checker::Checker;
use super::host::{Host, address, host_of};
use super::net::{EndId, Net, other, take};
use super::plan::Plan;

/// Time until an idle end detects that a connection has ended.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Maximum time to settle after the faults.
const SETTLE: Duration = Duration::from_secs(90);
/// Interval between checks of whether everything has settled.
const LOOK: Duration = Duration::from_millis(20);

/// Counters of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) messages: u64,
    pub(super) cuts: u64,
    pub(super) restarts: u64,
    pub(super) retransmitted: u64,
    pub(super) doubles: u64,
    pub(super) raced: u64,
    pub(super) stalls: u64,
    pub(super) refusals: u64,
    pub(super) congested: u64,
    pub(super) full: u64,
    /// Paths other than the first that have carried messages.
    pub(super) paths: u64,
    /// Time at which everything had settled.
    end: Instant,
    actions: u64,
}

impl Outcome {
    pub(super) fn add(&mut self, other: &Self) {
        self.messages += other.messages;
        self.cuts += other.cuts;
        self.restarts += other.restarts;
        self.retransmitted += other.retransmitted;
        self.doubles += other.doubles;
        self.raced += other.raced;
        self.stalls += other.stalls;
        self.refusals += other.refusals;
        self.congested += other.congested;
        self.full += other.full;
        self.paths += other.paths;
    }
}

#[derive(Clone, Copy, Debug)]
enum Action {
    /// Runs a node.
    Turn(usize),
    /// Moves bytes from an end to the other system.
    Move(EndId),
    /// Lets an end detect that the connection has ended.
    Finish(EndId),
    /// Delivers a connection attempt to its target.
    Syn {
        from: usize,
        life: u32,
        link: LinkId,
        to: usize,
    },
    /// Fails a connection attempt, or closes it immediately.
    Refused {
        from: usize,
        life: u32,
        link: LinkId,
    },
    /// Makes a user queue messages.
    Want,
    Fault,
    Start(usize),
    Look,
}

struct World {
    plan: Plan,
    prng: Prng,
    now: Instant,
    hosts: Vec<Option<Host>>,
    lives: Vec<u32>,
    net: Net,
    checker: Checker,
    actions: BTreeMap<(Instant, u64), Action>,
    number: u64,
    turns: Vec<Option<Instant>>,
    /// Time until which each node is stalled.
    stalls: Vec<Instant>,
    /// Connection attempts in transit.
    attempts: BTreeSet<(usize, LinkId)>,
    wants: usize,
    faults: usize,
    calm_since: Option<Instant>,
    outcome: Outcome,
}

/// Runs the simulation of a seed.
pub(super) fn run(seed: u64) -> Result<Outcome, String> {
    let mut prng = Prng::new(seed);
    let plan = Plan::draw(&mut prng);
    let count = plan.sockets.len();
    let mut world = World {
        prng,
        now: Instant::ZERO,
        hosts: (0..count).map(|_| None).collect(),
        lives: vec![0; count],
        net: Net::default(),
        checker: Checker::default(),
        actions: BTreeMap::new(),
        number: 0,
        turns: vec![None; count],
        stalls: vec![Instant::ZERO; count],
        attempts: BTreeSet::new(),
        wants: plan.messages,
        faults: plan.faults,
        calm_since: None,
        outcome: Outcome::default(),
        plan,
    };
    (0..count).for_each(|host| world.start(host));
    world.after(Duration::ZERO, Action::Want);
    world.after(Duration::ZERO, Action::Fault);
    world.after(LOOK, Action::Look);
    while let Some(((at, _), action)) = world.actions.pop_first() {
        world.now = at;
        world.outcome.actions += 1;
        if world.act(action).map_err(|why| format!("{why}\n{:?}", world.plan))? {
            break;
        }
    }
    for host in world.hosts.iter().flatten() {
        count_host(&mut world.outcome, host);
    }
    world.outcome.end = world.now;
    Ok(world.outcome)
}

fn count_host(outcome: &mut Outcome, host: &Host) {
    let stats = host.node.stats();
    outcome.messages += stats.send_queued;
    outcome.retransmitted += stats.send_retransmitted;
    outcome.doubles += stats.recv_drop_old_seq;
    outcome.raced += stats.tcp_connect_raced;
    outcome.congested += host.refused.congested;
    outcome.full += host.refused.full;
    // Each connection has a probe.
    let is_used = |info: &ConnectionInfo| info.path > 0 && info.next_tx > 2;
    outcome.paths += host.node.peers().connections().filter(is_used).count() as u64;
}

impl World {
    fn after(&mut self, wait: Duration, action: Action) {
        self.number += 1;
        self.actions.insert((self.now + wait, self.number), action);
    }

    fn delayed(&mut self, action: Action) {
        let wait = self.prng.duration(Duration::from_nanos(1)..=self.plan.delay);
        self.after(wait, action);
    }

    /// Schedules a node's next run no later than `at`.
    fn turn_at(&mut self, host: usize, at: Instant) {
        if self.turns[host].is_none_or(|turn| turn > at) {
            self.turns[host] = Some(at);
            self.after(at.since(self.now), Action::Turn(host));
        }
    }

    fn turn_soon(&mut self, host: usize) {
        let wait = self.prng.duration(Duration::from_nanos(1)..=self.plan.delay / 4);
        self.turn_at(host, self.now + wait);
    }

    /// Performs an action. Returns whether the run has ended.
    fn act(&mut self, action: Action) -> Result<bool, String> {
        match action {
            Action::Turn(host) => {
                if self.turns[host] != Some(self.now) {
                    return Ok(false);
                }
                self.turns[host] = None;
                if self.stalls[host] > self.now {
                    self.turn_at(host, self.stalls[host]);
                } else if let Some(running) = self.hosts[host].take() {
                    let running = self.turn(running)?;
                    self.hosts[host] = Some(running);
                }
            }
            Action::Move(end) => self.move_bytes(end),
            Action::Finish(end) => {
                if let Some(host) = self.net.finish(end) {
                    self.turn_soon(host);
                }
            }
            Action::Syn { from, life, link, to } => self.syn(from, life, link, to),
            Action::Refused { from, life, link } => {
                let now = self.now;
                if let Some(host) = self.running(from, life) {
                    host.node.lost(now, link);
                    self.turn_soon(from);
                }
            }
            Action::Want => self.want(),
            Action::Fault => self.fault(),
            Action::Start(host) => self.start(host),
            Action::Look => return self.look(),
        }
        Ok(false)
    }

    fn running(&mut self, host: usize, life: u32) -> Option<&mut Host> {
        self.hosts[host].as_mut().filter(|host| host.life == life)
    }

    fn start(&mut self, host: usize) {
        let life = self.lives[host];
        self.hosts[host] = Some(Host::start(&self.plan, host, life, &mut self.prng));
        self.turns[host] = None;
        self.turn_soon(host);
    }

    fn want(&mut self) {
        if self.wants == 0 {
            return;
        }
        let from = self.prng.index(self.hosts.len());
        let to = (from + 1 + self.prng.index(self.hosts.len() - 1)) % self.hosts.len();
        // Bursts, so that buffers fill.
        let burst = 1 + self.prng.index(8).min(self.wants - 1);
        self.wants -= burst;
        let Self { plan, prng, .. } = self;
        if let Some(host) = self.hosts[from].as_mut() {
            (0..burst).for_each(|_| host.want(plan, to, prng));
            self.turn_soon(from);
        }
        let wait = self.prng.duration(Duration::ZERO..=self.plan.pause);
        self.after(wait, Action::Want);
    }

    fn fault(&mut self) {
        if self.faults == 0 {
            return;
        }
        self.faults -= 1;
        let wait = self.prng.duration(Duration::ZERO..=self.plan.fault_pause);
        self.after(wait, Action::Fault);
        if self.prng.chance(self.plan.restarts) {
            let host = self.prng.index(self.hosts.len());
            self.kill(host);
            return;
        }
        if self.prng.chance(self.plan.stalls) {
            let host = self.prng.index(self.hosts.len());
            let time = self.prng.duration(Duration::ZERO..=self.plan.stall);
            self.stalls[host] = self.now + time;
            self.outcome.stalls += 1;
            return;
        }
        let conns = self.net.all();
        if conns.is_empty() {
            return;
        }
        // Often the newest one: a connection is most vulnerable while it begins.
        let conn = match self.prng.chance(Ratio::new(1, 2)) {
            true => conns[conns.len() - 1],
            false => conns[self.prng.index(conns.len())],
        };
        self.outcome.cuts += 1;
        let sides = [(conn, 0), (conn, 1)];
        sides.into_iter().for_each(|end| self.move_some(end));
        self.net.break_conn(conn);
        let late = self.prng.chance(self.plan.one_sided).then(|| self.prng.index(2));
        for (side, end) in (0..).zip(sides) {
            match late {
                Some(late) if late == side => self.after(KEEPALIVE, Action::Finish(end)),
                _ => self.delayed(Action::Finish(end)),
            }
        }
    }

    /// Delivers some of the written bytes.
    fn move_some(&mut self, end: EndId) {
        let len = self.net.end(end).map_or(0, |end| end.out.len());
        let count = self.prng.index(len + 1);
        self.net.move_bytes(end, count, self.plan.window);
        if let Some(host) = self.net.end(other(end)).map(|end| end.host) {
            self.turn_soon(host);
        }
    }

    /// Kills a node's process and schedules the next one.
    fn kill(&mut self, host: usize) {
        let Some(old) = self.hosts[host].take() else { return };
        self.outcome.restarts += 1;
        count_host(&mut self.outcome, &old);
        self.lives[host] += 1;
        self.stalls[host] = Instant::ZERO;
        while let Some(end) = self.net.accept(host) {
            self.close(end);
        }
        for end in self.net.of_host(host) {
            self.close(end);
        }
        self.attempts.retain(|(from, _)| *from != host);
        let wait = self.prng.duration(Duration::ZERO..=Duration::from_millis(30));
        self.after(wait, Action::Start(host));
    }

    /// Closes an end once its node has closed it or has ended.
    fn close(&mut self, end: EndId) {
        self.move_some(end);
        self.net.close(end);
        self.delayed(Action::Finish(other(end)));
    }

    fn move_bytes(&mut self, end: EndId) {
        let count = usize::try_from(self.prng.range(1..=self.plan.piece)).unwrap_or(1);
        let left = self.net.move_bytes(end, count, self.plan.window);
        for end in [end, other(end)] {
            // One side reads, the other receives the acknowledgment.
            if let Some(host) = self.net.end(end).filter(|end| !end.closed).map(|end| end.host) {
                self.turn_soon(host);
            }
        }
        let waits = self.net.end(other(end)).map_or(0, |end| end.inbox.len());
        if left > 0 && waits < self.plan.window {
            self.delayed(Action::Move(end));
        }
    }

    fn syn(&mut self, from: usize, life: u32, link: LinkId, to: usize) {
        if !self.attempts.remove(&(from, link)) || self.running(from, life).is_none() {
            return;
        }
        let now = self.now;
        if self.hosts[to].is_none() {
            self.delayed(Action::Refused { from, life, link });
            return;
        }
        // The system accepts even if its node is not running.
        self.net.connect((from, life, link), (to, self.lives[to]));
        self.turn_soon(to);
        if let Some(host) = self.running(from, life) {
            host.node.connected(now, link);
        }
        self.turn_soon(from);
    }

    fn turn(&mut self, mut host: Host) -> Result<Host, String> {
        let index = host.index;
        host.node.tick(self.now);
        self.orders(&mut host);
        self.accept(&mut host);
        for end in self.net.of_host(index) {
            self.read(&mut host, end, false);
        }
        self.acks(&mut host);
        if self.calm_since.is_none() && self.prng.chance(self.plan.rests) {
            host.rests_until = self.now + self.prng.duration(Duration::ZERO..=self.plan.pause * 8);
        }
        let mut seen = self.lives.clone();
        // If a node has two connections, the older one determines which run its messages may reach.
        for (peer, life) in self.net.peers(index) {
            seen[peer] = seen[peer].min(life);
        }
        host.users(self.now, &seen, &mut self.checker)?;
        self.orders(&mut host);
        self.flush(&mut host);
        check(&host)?;
        if host.rests_until > self.now {
            self.turn_at(index, host.rests_until);
        } else if host.has_untaken() {
            self.turn_soon(index);
        }
        if let Some(at) = host.node.deadline() {
            self.turn_at(index, at.max(self.now + Duration::from_nanos(1)));
        }
        Ok(host)
    }

    /// Accepts some or all waiting connections.
    fn accept(&mut self, host: &mut Host) {
        while let Some(id) = self.net.accept(host.index) {
            let Some(from) = self.net.end(other(id)).map(|end| end.host) else { continue };
            let may_refuse = from < host.index && self.plan.announces[from] && !host.announces;
            let may_refuse = may_refuse && self.calm_since.is_none();
            if may_refuse && self.prng.chance(self.plan.refusals) {
                self.outcome.refusals += 1;
                self.close(id);
                continue;
            }
            let from = address(from);
            for former in host.node.peers().candidates(from) {
                let end = self.net.find(host.index, former);
                if let Some(end) = end.filter(|_| !mutated!(RdsCandidateUnread)) {
                    self.read(host, end, true);
                }
            }
            match host.node.accepted(self.now, from) {
                Some(link) => self.net.name(id, link),
                None => self.close(id),
            }
            self.orders(host);
            if self.prng.chance(Ratio::new(1, 4)) {
                self.turn_soon(host.index);
                return;
            }
        }
    }

    /// Reads some or all of an end's bytes.
    fn read(&mut self, host: &mut Host, id: EndId, all: bool) {
        loop {
            let Some(end) = self.net.end(id).filter(|end| !end.closed) else { return };
            let Some(link) = end.link else { return };
            if end.inbox.is_empty() {
                if end.ends {
                    self.net.close(id);
                    host.node.lost(self.now, link);
                    self.orders(host);
                }
                return;
            }
            let is_first = !std::mem::replace(&mut end.was_read, true);
            let former = if is_first { host.node.peers().predecessors(link) } else { Vec::new() };
            for former in former {
                let end = self.net.find(host.index, former);
                if let Some(end) = end.filter(|_| !mutated!(RdsPredecessorSkipped)) {
                    self.read(host, end, true);
                }
            }
            let Some(end) = self.net.end(id) else { return };
            let len = end.inbox.len();
            let count = if all { len } else { 1 + self.prng.index(len) };
            let bytes = take(&mut end.inbox, count);
            let pieces = self.prng.range(1..=4);
            let piece = usize::try_from(pieces).map_or(count, |pieces| count.div_ceil(pieces));
            for bytes in bytes.chunks(piece.max(1)) {
                host.node.received(self.now, link, bytes);
            }
            self.orders(host);
            self.delayed(Action::Move(other(id)));
            if !all && self.prng.chance(Ratio::new(1, 2)) {
                self.turn_soon(host.index);
                return;
            }
        }
    }

    fn acks(&mut self, host: &mut Host) {
        for id in self.net.of_host(host.index) {
            let Some((Some(link), acked)) = self.net.end(id).map(|end| (end.link, end.acked))
            else {
                continue;
            };
            if host.node.awaits_ack(link).is_none() {
                continue;
            }
            if self.prng.chance(self.plan.late_acks) {
                self.turn_soon(host.index);
            } else {
                host.node.acked(link, acked);
            }
        }
    }

    fn orders(&mut self, host: &mut Host) {
        while let Some(order) = host.node.take_order() {
            match order {
                Order::Connect { link, to } => {
                    let (from, life, to) = (host.index, host.life, host_of(to));
                    self.attempts.insert((from, link));
                    self.delayed(Action::Syn { from, life, link, to });
                }
                Order::Close(link) => {
                    self.attempts.remove(&(host.index, link));
                    host.blocked.remove(&link);
                    if let Some(end) = self.net.find(host.index, link) {
                        self.close(end);
                    }
                }
            }
        }
    }

    fn flush(&mut self, host: &mut Host) {
        for link in std::mem::take(&mut host.blocked) {
            self.write(host, link);
        }
        while let Some(link) = host.node.next_ready() {
            self.write(host, link);
        }
    }

    fn write(&mut self, host: &mut Host, link: LinkId) {
        let Some(id) = self.net.find(host.index, link) else { return };
        loop {
            let written = self.net.end(id).map(|end| (end.out.len(), end.broken));
            let Some((len, is_broken)) = written else { return };
            let room = self.plan.window.saturating_sub(len);
            let mut slices = [IoSlice::new(&[]); 6];
            let count = host.node.output(link, &mut slices);
            let most = usize::try_from(self.prng.range(1..=self.plan.piece)).unwrap_or(1);
            let mut bytes: Vec<u8> = Vec::new();
            for slice in &slices[..count] {
                let left = room.min(most) - bytes.len();
                bytes.extend_from_slice(&slice[..left.min(slice.len())]);
            }
            if count == 0 {
                return;
            }
            if bytes.is_empty() {
                host.blocked.insert(link);
                return;
            }
            host.node.wrote(link, bytes.len());
            if let Some(end) = self.net.end(id).filter(|_| !is_broken) {
                end.out.extend(bytes);
                self.delayed(Action::Move(id));
            } else {
                // The writer detects that the connection is broken.
                self.delayed(Action::Finish(id));
            }
        }
    }

    /// Checks whether the run has ended.
    fn look(&mut self) -> Result<bool, String> {
        self.after(LOOK, Action::Look);
        if self.wants > 0 || self.faults > 0 || self.hosts.iter().any(Option::is_none) {
            return Ok(false);
        }
        let since = *self.calm_since.get_or_insert(self.now);
        let is_busy = |host: &Host| host.is_waiting() || host.node.memory() != (0, 0);
        let busy = self.hosts.iter().flatten().find(|host| is_busy(host));
        let missing = self.checker.missing(&self.lives);
        if busy.is_none() && missing.is_none() {
            return Ok(true);
        }
        if self.now.since(since) < SETTLE {
            return Ok(false);
        }
        let states: Vec<String> = self
            .hosts
            .iter()
            .flatten()
            .map(|host| {
                let connections: Vec<_> = host.node.peers().connections().collect();
                format!("{} {:?} {connections:?}", host.index, host.node.memory())
            })
            .collect();
        Err(missing.unwrap_or_else(|| "live: nodes do not settle".into()) + &states.join("\n"))
    }
}

/// Checks the invariants that hold after each of a node's turns.
fn check(host: &Host) -> Result<(), String> {
    let config = host.node.config();
    let (received, sent) = host.node.memory();
    let held: usize = host.node.peers().connections().map(|info| info.held).sum();
    if received > config.memory || held != received {
        return Err(format!("memory: {received} received, {held} of peers"));
    }
    let cost = |info: SocketInfo| info.in_flight + info.in_flight_messages * MESSAGE_COST;
    let in_flight: usize = host.node.ports().sockets().map(cost).sum();
    if in_flight != sent {
        return Err(format!("memory: {sent} sent, {in_flight} of sockets"));
    }
    let stats = host.node.stats();
    if stats.recv_drop_no_memory + stats.recv_bad_stream + stats.recv_drop_no_sock > 0 {
        return Err(format!("dropped: {stats:?}"));
    }
    let own = host.node.congestion(config.address).ok_or("no map")?;
    for info in host.node.ports().sockets() {
        let bit = own.get(info.port);
        let is_right = match info.waiting {
            waiting if waiting > info.rcvbuf => bit,
            waiting if waiting < info.rcvbuf / 2 => !bit,
            _ => true,
        };
        if !is_right {
            return Err(format!("map: {bit} for {info:?}"));
        }
    }
    Ok(())
}
