//! A node: its sockets, its peers and the connections to them, wired together.

mod receive;
mod users;

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::IpAddr;

use rtrs_core::log_limit::LogLimit;
use rtrs_core::mutated;
use rtrs_core::prng::Prng;
use rtrs_core::time::Duration;
use rtrs_core::time::Instant;

use super::backoff::Backoff;
use super::config::Config;
use super::event::{Event, LinkId, Order, SocketId};
use super::link::{Link, Role};
use super::outbox::{Message, Owner};
use super::peer::{Peer, Phase, STALE, connects};
use super::ports::Ports;
use super::stats::Stats;
use crate::wire::{CONG_BITMAP, Extensions, Header, MAP_LEN, PING_PORT, PROBE_PORT};

/// Between two attempts that a larger peer asks for.
const KICK_INTERVAL: Duration = Duration::from_millis(10);
/// How long messages wait for the first map of a peer, and for that of each connection if it says
/// of which run the peer is: they are for this one, and a later run does not get them.
const HOLD: Duration = Duration::from_secs(1);
/// How long closed sockets wait until what they have sent is given up: all queues are looked
/// through, for as many sockets as possible at once.
const CLOSED_WAIT: Duration = Duration::from_millis(100);

/// Whom a timer wakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Peer(IpAddr),
    Link(LinkId),
    /// What closed sockets have sent is to be given up.
    Closed,
}

/// The node of one address.
///
/// Whoever drives it moves bytes between it and TCP connections, obeys [`Order`]s and passes
/// [`Event`]s to users. Before the first bytes of an accepted connection it reads what is left of
/// the [`predecessor`](Self::predecessor), and before the next accept what is left of the
/// [`candidate`](Self::candidate). It reports how much of what it has written the peer's
/// system has acknowledged.
#[derive(Debug)]
pub struct Node {
    config: Config,
    ports: Ports,
    peers: BTreeMap<IpAddr, Peer>,
    links: BTreeMap<LinkId, Link>,
    timers: BTreeSet<(Instant, Timer)>,
    /// Links that have something to write.
    ready: BTreeSet<LinkId>,
    /// Sockets that are closed and of which messages are still in queues.
    closed: BTreeSet<SocketId>,
    closed_waits: bool,
    orders: VecDeque<Order>,
    stats: Stats,
    next_link: u64,
    prng: Prng,
    /// Lines of the log that peers can cause at any rate.
    restarts: LogLimit,
    bad_streams: LogLimit,
    refusals: LogLimit,
}

// Connections.
impl Node {
    /// A node without sockets and connections.
    pub fn new(config: Config) -> Self {
        let mut prng = Prng::new(config.seed);
        let ports = Ports::new(config.sockets_max, config.memory, prng.fork());
        Self {
            config,
            ports,
            peers: BTreeMap::new(),
            links: BTreeMap::new(),
            timers: BTreeSet::new(),
            ready: BTreeSet::new(),
            closed: BTreeSet::new(),
            closed_waits: false,
            orders: VecDeque::new(),
            stats: Stats::default(),
            next_link: 0,
            prng,
            restarts: LogLimit::default(),
            bad_streams: LogLimit::default(),
            refusals: LogLimit::default(),
        }
    }

    /// Its configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Its counters.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Bytes that peers have sent and users have not read, and that users have sent and peers have
    /// not acknowledged, as limits of memory count them.
    pub fn memory(&self) -> (usize, usize) {
        (self.ports.memory.received, self.ports.memory.sent)
    }

    /// The next thing to do with connections.
    pub fn take_order(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// The next thing for users to know.
    pub fn take_event(&mut self) -> Option<Event> {
        self.ports.take_event()
    }

    /// When [`tick`](Self::tick) is to be called.
    pub fn deadline(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Runs timers. True if any was due.
    pub fn tick(&mut self, now: Instant) -> bool {
        if !self.closed.is_empty() && !self.closed_waits {
            self.closed_waits = true;
            self.timers.insert((now + CLOSED_WAIT, Timer::Closed));
        }
        let mut any = false;
        while let Some((at, timer)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.timers.remove(&(at, timer));
            any = true;
            match timer {
                Timer::Peer(peer) => self.tick_peer(now, peer),
                Timer::Closed => {
                    self.closed_waits = false;
                    self.abandon_closed();
                }
                Timer::Link(id) => {
                    if self.links.get(&id).is_some_and(|link| link.role == Role::Candidate) {
                        self.close(now, id);
                    }
                }
            }
        }
        any
    }

    fn tick_peer(&mut self, now: Instant, address: IpAddr) {
        let Some(peer) = self.peers.get_mut(&address) else { return };
        if peer.is_stale(now) {
            self.forget(address);
            return;
        }
        peer.look_at = peer.look_at.filter(|at| *at > now);
        match peer.phase {
            Phase::Waiting(at) if at <= now => match peer.wants_connection() {
                true => self.attempt(now, address),
                false => self.rest(now, address),
            },
            Phase::Idle => self.rest(now, address),
            Phase::Connecting(link, until) if until <= now => self.close(now, link),
            Phase::Up(link) if peer.hold_until.is_some_and(|until| until <= now) => {
                peer.hold_until = None;
                self.ready.insert(link);
            }
            _ => {}
        }
    }

    fn new_link(&mut self, peer: IpAddr, role: Role) -> LinkId {
        self.next_link += 1;
        let id = LinkId(self.next_link);
        self.links.insert(id, Link::new(peer, role));
        id
    }

    /// Starts to connect.
    fn attempt(&mut self, now: Instant, address: IpAddr) {
        let Some(peer) = self.peers.get(&address) else { return };
        let role = if peer.connects { Role::Connecting } else { Role::Kicking };
        match role {
            Role::Kicking => self.stats.tcp_kicks_sent += 1,
            _ => self.stats.tcp_connect_attempts += 1,
        }
        let link = self.new_link(address, role);
        let until = now + self.config.connect_timeout;
        if let Some(peer) = self.peers.get_mut(&address) {
            peer.phase = Phase::Connecting(link, until);
            peer.last_attempt = Some(now);
        }
        self.timers.insert((until, Timer::Peer(address)));
        self.orders.push_back(Order::Connect { link, to: address });
    }

    /// Lets an attempt come after `wait`.
    fn attempt_after(&mut self, now: Instant, address: IpAddr, wait: Duration) {
        if wait.is_zero() {
            self.attempt(now, address);
        } else if let Some(peer) = self.peers.get_mut(&address) {
            peer.phase = Phase::Waiting(now + wait);
            self.timers.insert((now + wait, Timer::Peer(address)));
        }
    }

    /// Something is in the outbox of a peer.
    fn wake(&mut self, now: Instant, address: IpAddr) {
        let Some(peer) = self.peers.get_mut(&address) else { return };
        match peer.phase {
            Phase::Idle => {
                let wait = peer.backoff.wait();
                self.attempt_after(now, address, wait);
            }
            Phase::Up(link) => {
                self.ready.insert(link);
            }
            Phase::Waiting(_) | Phase::Connecting(..) => {}
        }
    }

    /// A connection that was ordered is there.
    pub fn connected(&mut self, now: Instant, id: LinkId) {
        let Some(link) = self.links.get(&id) else { return };
        match link.role {
            Role::Connecting => self.up(now, link.peer, id),
            // The peer has seen it, which is all that it is for.
            Role::Kicking => self.close(now, id),
            Role::Candidate | Role::Up => {}
        }
    }

    /// A connection of a peer that is accepted and has sent nothing valid yet. What has arrived
    /// over it is to be passed to [`received`](Self::received) before the next one is
    /// [`accepted`](Self::accepted), which replaces it: the peer may know that it has arrived.
    pub fn candidate(&self, peer: IpAddr) -> Option<LinkId> {
        self.peers.get(&peer)?.candidate
    }

    /// A peer has connected. `None`: close the connection.
    pub fn accepted(&mut self, now: Instant, from: IpAddr) -> Option<LinkId> {
        let own = self.config.address;
        if from == own || from.is_ipv4() != own.is_ipv4() || self.make_peer(now, from).is_err() {
            return None;
        }
        let peer = self.peers.get(&from)?;
        if peer.connects {
            self.stats.tcp_kicks_received += 1;
            self.kicked(now, from);
            return None;
        }
        match (peer.phase, peer.candidate) {
            (Phase::Up(_), former) => {
                if let Some(former) = former {
                    self.close(now, former);
                }
                self.stats.tcp_connect_raced += 1;
                let id = self.new_link(from, Role::Candidate);
                self.peers.get_mut(&from)?.candidate = Some(id);
                self.timers.insert((now + self.config.connect_timeout, Timer::Link(id)));
                Some(id)
            }
            (phase, _) => {
                if let Phase::Connecting(kick, _) = phase {
                    self.links.remove(&kick);
                    self.orders.push_back(Order::Close(kick));
                }
                let id = self.new_link(from, Role::Up);
                self.up(now, from, id);
                Some(id)
            }
        }
    }

    /// A larger peer asks for a connection.
    fn kicked(&mut self, now: Instant, address: IpAddr) {
        let Some(peer) = self.peers.get_mut(&address) else { return };
        if mutated!(RdsKickIgnored) {
            return;
        }
        match peer.phase {
            // It may have lost a connection that looks good from here. Something to send shows it.
            Phase::Up(link) => {
                if let Some(link) = self.links.get_mut(&link) {
                    link.map_is_due = true;
                }
                self.ready.insert(link);
            }
            Phase::Connecting(..) => {}
            Phase::Idle | Phase::Waiting(_) => {
                let earliest = peer.last_attempt.map_or(now, |last| last + KICK_INTERVAL);
                peer.was_up = true;
                self.attempt_after(now, address, earliest.since(now));
            }
        }
    }

    /// The connection that this accepted one is to replace. What has arrived over it is to be
    /// passed to [`received`](Self::received) before the first bytes of its successor.
    pub fn predecessor(&self, id: LinkId) -> Option<LinkId> {
        let link = self.links.get(&id).filter(|link| link.role == Role::Candidate)?;
        self.peers.get(&link.peer)?.up()
    }

    /// A connection carries messages from now on.
    fn up(&mut self, now: Instant, address: IpAddr, id: LinkId) {
        // What they have sent is for connections that were up already.
        self.abandon_closed();
        let (Some(peer), Some(link)) = (self.peers.get_mut(&address), self.links.get_mut(&id))
        else {
            return;
        };
        link.role = Role::Up;
        link.map_is_due = !(peer.was_up && mutated!(RdsMapForgotten));
        peer.phase = Phase::Up(id);
        peer.candidate = peer.candidate.filter(|candidate| *candidate != id);
        peer.was_up = true;
        peer.backoff.reset();
        let waits = peer.map.is_none() || peer.generation_in_map;
        let waits = waits && !mutated!(RdsUnheld);
        peer.hold_until = waits.then(|| now + HOLD);
        if let Some(until) = peer.hold_until {
            self.timers.insert((until, Timer::Peer(address)));
        }
        self.ready.insert(id);
    }

    /// A connection has ended or could not be made.
    pub fn lost(&mut self, now: Instant, id: LinkId) {
        self.abandon_closed();
        let Some(link) = self.links.remove(&id) else { return };
        self.ready.remove(&id);
        let address = link.peer;
        let Some(peer) = self.peers.get_mut(&address) else { return };
        if !mutated!(RdsPartKept) {
            self.ports.memory.received -= link.held;
            peer.held -= link.held;
        }
        if peer.candidate == Some(id) {
            peer.candidate = None;
            return;
        }
        let was_up = peer.phase == Phase::Up(id);
        let mut dropped = peer.outbox.take_back(link.into_unacked());
        // Whoever pings asks again. A kernel asks once for the number of connections.
        dropped.extend(peer.outbox.remove(|m| m.owner == Owner::Pong && m.dport != PROBE_PORT));
        peer.hold_until = None;
        if was_up {
            peer.since = now;
        }
        let candidate = peer.candidate.take();
        self.stats.conn_reset += u64::from(was_up);
        self.drop_messages(address, dropped);
        let Some(peer) = self.peers.get_mut(&address) else { return };
        if let Some(candidate) = candidate.filter(|_| !mutated!(RdsCandidateForgotten)) {
            self.up(now, address, candidate);
            return;
        }
        if !peer.wants_connection() {
            self.rest(now, address);
            return;
        }
        // A smaller peer comes back by itself, if it can.
        let wait = if peer.connects { peer.backoff.wait() } else { peer.backoff.wait_later() };
        // Not at once, whatever the wait: who drives us may be in the middle of a connection's end.
        self.attempt_after(now, address, wait.max(Duration::from_nanos(1)));
    }

    /// A peer needs no connection. One timer at a time looks whether it is stale.
    fn rest(&mut self, now: Instant, address: IpAddr) {
        let Some(peer) = self.peers.get_mut(&address) else { return };
        peer.phase = Phase::Idle;
        if !peer.has_sent && peer.look_at.is_none() {
            let at = now + STALE;
            peer.look_at = Some(at);
            self.timers.insert((at, Timer::Peer(address)));
        }
    }

    /// Ends a connection.
    fn close(&mut self, now: Instant, id: LinkId) {
        self.orders.push_back(Order::Close(id));
        self.lost(now, id);
    }

    /// The connection to a peer that is up.
    pub fn connection(&self, peer: IpAddr) -> Option<LinkId> {
        self.peers.get(&peer)?.up()
    }

    /// A peer, made if there is room.
    fn make_peer(&mut self, now: Instant, address: IpAddr) -> Result<(), ()> {
        if self.peers.contains_key(&address) {
            return Ok(());
        }
        if self.peers.len() >= self.config.peers_max {
            let free = self.peers.iter().filter(|(_, peer)| peer.may_go(now));
            let victim = free.min_by_key(|(_, peer)| (peer.is_proven, peer.since));
            let Some(victim) = victim.map(|(address, _)| *address) else {
                self.stats.peers_refused += 1;
                if let Some(left_out) = self.refusals.admit(now) {
                    let count = self.peers.len();
                    tracing::warn!(
                        peer = %address, left_out,
                        "peer refused: the node has {count} peers already; raise peers-max"
                    );
                }
                return Err(());
            };
            self.forget(victim);
        }
        let (min, max) = (self.config.reconnect_min, self.config.reconnect_max);
        let backoff = Backoff::new(min, max, self.prng.fork());
        let connects = connects(self.config.address, address);
        self.peers.insert(address, Peer::new(connects, backoff, now));
        Ok(())
    }

    /// True if there are as many peers as there may be, so that messages to others may be refused.
    pub fn is_crowded(&self) -> bool {
        self.peers.len() >= self.config.peers_max
    }

    /// Removes a peer that has nothing.
    fn forget(&mut self, address: IpAddr) {
        let Some(peer) = self.peers.remove(&address) else { return };
        if peer.map.is_some() {
            self.ports.congestion_changed(address, 0);
        }
        self.stats.tcp_crowded_out += u64::from(!peer.is_proven);
        let current = match peer.phase {
            Phase::Up(link) | Phase::Connecting(link, _) => Some(link),
            Phase::Idle | Phase::Waiting(_) => None,
        };
        for id in current.into_iter().chain(peer.candidate) {
            if let Some(link) = self.links.remove(&id) {
                self.ports.memory.received -= link.held;
            }
            self.ready.remove(&id);
            self.orders.push_back(Order::Close(id));
        }
    }
}

// Output.
impl Node {
    /// The next connection that has something to write. It is named again when there is more.
    pub fn next_ready(&mut self) -> Option<LinkId> {
        self.ready.pop_first()
    }

    /// What to write to a connection now, as far as there is room for slices; how many there are.
    /// None: there is nothing.
    pub fn output<'a>(&'a mut self, id: LinkId, room: &mut [IoSlice<'a>]) -> usize {
        self.hand_over(id);
        self.links.get(&id).map_or(0, |link| link.slices(room))
    }

    /// So many bytes of the output are written.
    pub fn wrote(&mut self, id: LinkId, count: usize) {
        if let Some(link) = self.links.get_mut(&id) {
            link.wrote(count);
        }
    }

    /// Hands maps and messages to a connection, as much as it takes now.
    fn hand_over(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(&id).filter(|link| link.role == Role::Up) else {
            return;
        };
        let Some(peer) = self.peers.get_mut(&link.peer) else { return };
        let generation = self.config.sent_generation();
        while link.has_room() {
            if std::mem::take(&mut link.map_is_due) {
                let header = Header {
                    len: MAP_LEN as u32,
                    flags: CONG_BITMAP,
                    extensions: Extensions { npaths: None, generation }.encode(),
                    ..Header::default()
                };
                link.hand_map(header, self.ports.congested().bytes().to_vec());
                self.stats.cong_update_queued += 1;
                continue;
            }
            // Repeats come first: the number of a probe in front of them would make them old.
            let repeats = peer.outbox.begins_with_a_repeat() && !mutated!(RdsProbeFirst);
            if !link.has_probed && !repeats {
                link.has_probed = true;
                let extensions = Extensions { npaths: Some(1), generation }.encode();
                let (owner, sport, dport) = (Owner::Probe, PROBE_PORT, PING_PORT);
                let payload = Vec::new();
                let (sequence, is_begun) = (None, false);
                let probe =
                    Message { owner, sport, dport, payload, extensions, sequence, is_begun };
                let (header, probe) = peer.outbox.number(probe);
                link.hand(header, probe);
                continue;
            }
            // The peer may remember numbers of our former run, and take what is repeated for old.
            // The probe is never repeated, so it makes the peer count anew.
            let waits_for_ack = !peer.is_synced && link.has_probed && !mutated!(RdsUnsynced);
            if waits_for_ack || peer.hold_until.is_some() {
                break;
            }
            let Some((header, message)) = peer.outbox.pop() else { break };
            self.stats.send_retransmitted += u64::from(message.is_begun);
            link.hand(header, message);
        }
    }

    /// The first `acked` bytes of what was written to a connection have arrived at the peer's
    /// system. Counts for nothing before anything has been received over the connection.
    pub fn acked(&mut self, id: LinkId, acked: u64) {
        let believes = self.config.generation == 0 || mutated!(RdsAckUntaken);
        let is_taken = |link: &&mut Link| link.is_taken || believes;
        let Some(link) = self.links.get_mut(&id).filter(is_taken) else { return };
        let address = link.peer;
        let Some(peer) = self.peers.get_mut(&address) else { return };
        while let Some(message) = link.pop_acked(acked) {
            self.stats.send_drop_acked += 1;
            peer.pongs -= usize::from(message.owner == Owner::Pong);
            self.ports.release(&message);
            if !std::mem::replace(&mut peer.is_synced, true) {
                self.ready.insert(id);
            }
        }
    }

    /// If anything that was written to a connection is not known to be acknowledged: bytes written
    /// in all, bytes acknowledged, and whether somebody waits for more.
    pub fn awaits_ack(&self, id: LinkId) -> Option<(u64, u64, bool)> {
        let link = self.links.get(&id).filter(|link| link.is_unacked())?;
        let is_synced = self.peers.get(&link.peer).is_some_and(|peer| peer.is_synced);
        let (written, acked) = link.progress();
        Some((written, acked, !is_synced || self.ports.has_refused()))
    }

    /// Messages that are not sent any more.
    fn drop_messages(&mut self, address: IpAddr, messages: Vec<Message>) {
        for message in messages {
            self.stats.send_dropped += u64::from(message.owner != Owner::Probe);
            if message.owner == Owner::Pong
                && let Some(peer) = self.peers.get_mut(&address)
            {
                peer.pongs -= 1;
            }
            self.ports.release(&message);
        }
    }
}
