//! A node: its sockets, its peers and the connections to them.

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

/// Minimum interval between two attempts requested by a larger peer.
const KICK_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum time for which messages wait for the first map of a peer. If the peer announces its
/// generation, this applies to the first map of each connection: the messages are for the current
/// run of the peer, and a later run must not get them.
const HOLD: Duration = Duration::from_secs(1);
/// Delay after which messages of closed sockets are abandoned. All queues are searched, for as many
/// sockets as possible at once.
const CLOSED_WAIT: Duration = Duration::from_millis(100);

/// Purpose of a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Peer(IpAddr),
    Link(LinkId),
    /// Messages of closed sockets are to be abandoned.
    Closed,
}

/// The node of one address.
///
/// The driver moves bytes between the node and TCP connections, carries out [`Order`]s and passes
/// [`Event`]s to users. Before the first bytes of an accepted connection it reads what is left of
/// the [`predecessor`](Self::predecessor), and before the next accept what is left of the
/// [`candidate`](Self::candidate). It reports how much of the written data the peer's system has
/// acknowledged.
#[derive(Debug)]
pub struct Node {
    config: Config,
    ports: Ports,
    peers: BTreeMap<IpAddr, Peer>,
    links: BTreeMap<LinkId, Link>,
    timers: BTreeSet<(Instant, Timer)>,
    /// Links with data to write.
    ready: BTreeSet<LinkId>,
    /// Closed sockets with messages still in queues.
    closed: BTreeSet<SocketId>,
    closed_waits: bool,
    orders: VecDeque<Order>,
    stats: Stats,
    next_link: u64,
    prng: Prng,
    /// Rate limit of log lines that peers can cause.
    restarts: LogLimit,
    bad_streams: LogLimit,
    refusals: LogLimit,
}

// Connections.
impl Node {
    /// Creates a node without sockets and connections.
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

    /// Returns the node's configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the node's counters.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Returns the bytes that peers have sent and users have not read, and the bytes that users
    /// have sent and peers have not acknowledged, both as counted in memory limits.
    pub fn memory(&self) -> (usize, usize) {
        (self.ports.memory.received, self.ports.memory.sent)
    }

    /// Returns the next order for connections.
    pub fn take_order(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// Returns the next event for users.
    pub fn take_event(&mut self) -> Option<Event> {
        self.ports.take_event()
    }

    /// Returns the time at which to call [`tick`](Self::tick).
    pub fn deadline(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Runs timers. Returns true if any was due.
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
        peer.check_at = peer.check_at.filter(|at| *at > now);
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

    /// Schedules an attempt to connect after `wait`.
    fn attempt_after(&mut self, now: Instant, address: IpAddr, wait: Duration) {
        if wait.is_zero() {
            self.attempt(now, address);
        } else if let Some(peer) = self.peers.get_mut(&address) {
            peer.phase = Phase::Waiting(now + wait);
            self.timers.insert((now + wait, Timer::Peer(address)));
        }
    }

    /// Handles a new message in the outbox of a peer.
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

    /// Handles an ordered connection that has been established.
    pub fn connected(&mut self, now: Instant, id: LinkId) {
        let Some(link) = self.links.get(&id) else { return };
        match link.role {
            Role::Connecting => self.up(now, link.peer, id),
            // The peer has seen the connection, which is its only purpose.
            Role::Kicking => self.close(now, id),
            Role::Candidate | Role::Up => {}
        }
    }

    /// Returns an accepted connection of a peer that has not delivered valid data yet. Bytes that
    /// have arrived on it must be passed to [`received`](Self::received) before the next one is
    /// [`accepted`](Self::accepted), which replaces it: the peer may know that they have arrived.
    pub fn candidate(&self, peer: IpAddr) -> Option<LinkId> {
        self.peers.get(&peer)?.candidate
    }

    /// Handles a connection accepted from a peer. With `None`, the caller closes the connection.
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

    /// Handles the request of a larger peer for a connection.
    fn kicked(&mut self, now: Instant, address: IpAddr) {
        let Some(peer) = self.peers.get_mut(&address) else { return };
        if mutated!(RdsConnectRequestIgnored) {
            return;
        }
        match peer.phase {
            // The peer may have lost a connection that looks good from here. Sending data will show
            // it.
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

    /// Returns the connection that this accepted one is to replace. Bytes that have arrived on it
    /// must be passed to [`received`](Self::received) before the first bytes of its successor.
    pub fn predecessor(&self, id: LinkId) -> Option<LinkId> {
        let link = self.links.get(&id).filter(|link| link.role == Role::Candidate)?;
        self.peers.get(&link.peer)?.up()
    }

    /// Starts to carry messages on a connection.
    fn up(&mut self, now: Instant, address: IpAddr, id: LinkId) {
        // Messages of closed sockets may only use connections that were already up.
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
        let waits = waits && !mutated!(RdsMapNotAwaited);
        peer.hold_until = waits.then(|| now + HOLD);
        if let Some(until) = peer.hold_until {
            self.timers.insert((until, Timer::Peer(address)));
        }
        self.ready.insert(id);
    }

    /// Handles a connection that has ended or could not be established.
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
        // The sender of a ping sends another one. A kernel asks only once for the number of
        // connections.
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
        // A smaller peer reconnects by itself, if it can.
        let wait = if peer.connects { peer.backoff.wait() } else { peer.backoff.wait_later() };
        // Never at once, whatever the delay: the driver may be in the middle of closing a
        // connection.
        self.attempt_after(now, address, wait.max(Duration::from_nanos(1)));
    }

    /// Handles a peer that needs no connection. A single timer checks whether it is stale.
    fn rest(&mut self, now: Instant, address: IpAddr) {
        let Some(peer) = self.peers.get_mut(&address) else { return };
        peer.phase = Phase::Idle;
        if !peer.has_sent && peer.check_at.is_none() {
            let at = now + STALE;
            peer.check_at = Some(at);
            self.timers.insert((at, Timer::Peer(address)));
        }
    }

    /// Closes a connection.
    fn close(&mut self, now: Instant, id: LinkId) {
        self.orders.push_back(Order::Close(id));
        self.lost(now, id);
    }

    /// Returns the established connection to a peer.
    pub fn connection(&self, peer: IpAddr) -> Option<LinkId> {
        self.peers.get(&peer)?.up()
    }

    /// Creates a peer if there is room.
    fn make_peer(&mut self, now: Instant, address: IpAddr) -> Result<(), ()> {
        if self.peers.contains_key(&address) {
            return Ok(());
        }
        if self.peers.len() >= self.config.peers_max {
            let free = self.peers.iter().filter(|(_, peer)| peer.may_be_forgotten(now));
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

    /// Whether the limit of peers is reached, so that messages to others may be refused.
    pub fn is_crowded(&self) -> bool {
        self.peers.len() >= self.config.peers_max
    }

    /// Removes a peer without messages or state worth keeping.
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
    /// Returns the next connection with data to write. It is returned again when there is more.
    pub fn next_ready(&mut self) -> Option<LinkId> {
        self.ready.pop_first()
    }

    /// Collects the bytes to write to a connection, as far as there is room for slices. Returns the
    /// number of slices, 0 if there is nothing to write.
    pub fn output<'a>(&'a mut self, id: LinkId, room: &mut [IoSlice<'a>]) -> usize {
        self.hand_over(id);
        self.links.get(&id).map_or(0, |link| link.slices(room))
    }

    /// Records that `count` bytes of the output are written.
    pub fn wrote(&mut self, id: LinkId, count: usize) {
        if let Some(link) = self.links.get_mut(&id) {
            link.wrote(count);
        }
    }

    /// Queues as many maps and messages on a connection as it accepts now.
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
            // Repeats come first: the number of a probe in front would make the repeats look old.
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
            // The peer may remember sequence numbers of our former run, and consider repeated
            // messages old. The probe is never a repeat, so it makes the peer restart its count.
            let waits_for_ack = !peer.is_synced && link.has_probed && !mutated!(RdsProbeNotAwaited);
            if waits_for_ack || peer.hold_until.is_some() {
                break;
            }
            let Some((header, message)) = peer.outbox.pop() else { break };
            self.stats.send_retransmitted += u64::from(message.is_begun);
            link.hand(header, message);
        }
    }

    /// Records that the first `acked` bytes written to a connection have arrived at the peer's
    /// system. Ignored until data has been received on the connection.
    pub fn acked(&mut self, id: LinkId, acked: u64) {
        let believes = self.config.generation == 0 || mutated!(RdsAckUnaccepted);
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

    /// Returns the progress of a connection with unacknowledged bytes: bytes written in total,
    /// bytes acknowledged, and whether a user waits for more.
    pub fn awaits_ack(&self, id: LinkId) -> Option<(u64, u64, bool)> {
        let link = self.links.get(&id).filter(|link| link.is_unacked())?;
        let is_synced = self.peers.get(&link.peer).is_some_and(|peer| peer.is_synced);
        let (written, acked) = link.progress();
        Some((written, acked, !is_synced || self.ports.has_refused()))
    }

    /// Drops messages that will not be sent any more.
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
