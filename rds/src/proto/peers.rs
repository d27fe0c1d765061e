//! Peers of a node, and the connections to them: who connects, when, and what happens to messages
//! when a connection is lost.
//!
//! Changes have consequences for users and memory limits, which are not known here: they are
//! collected as [`Effect`]s.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use rtrs_core::log_limit::LogLimit;
use rtrs_core::mutated;
use rtrs_core::prng::Prng;
use rtrs_core::time::{Duration, Instant};

use super::backoff::Backoff;
use super::config::Config;
use super::event::{LinkId, SocketId};
use super::info::{ConnectionInfo, TcpInfo};
use super::link::{Link, Role};
use super::links::Links;
use super::outbox::{Message, Owner};
use super::peer::{Lost, Peer, Phase, connects};
use super::peer_log::PeerLog;
use super::stats::Stats;
use super::timers::{Timer, Timers};
use crate::wire::{CongestionMap, Header};

/// Maximum time for which messages wait for the first map of a peer. If the peer announces its
/// generation, this applies to the first map of each connection: the messages are for the current
/// run of the peer, and a later run must not get them.
const HOLD: Duration = Duration::from_secs(1);
/// Delay after which messages of closed sockets are abandoned. All queues are searched, for as many
/// sockets as possible at once.
const CLOSED_WAIT: Duration = Duration::from_millis(100);

/// Consequence of a change for users and memory limits.
#[derive(Debug)]
pub(super) enum Effect {
    /// The unfinished input of a connection, of this many bytes, is discarded.
    InputDiscarded(usize),
    /// A message will not be sent any more.
    Dropped(Message),
    /// The congestion map of a peer is no longer known.
    MapForgotten(IpAddr),
}

/// The limit of peers is reached.
#[derive(Clone, Copy, Debug)]
pub(super) struct Crowded;

/// All peers of a node, by address.
#[derive(Debug)]
pub struct Peers {
    config: Config,
    peers: BTreeMap<IpAddr, Peer>,
    links: Links,
    timers: Timers,
    /// Closed sockets with messages still in queues.
    closed: BTreeSet<SocketId>,
    closed_waits: bool,
    effects: Vec<Effect>,
    stats: Stats,
    prng: Prng,
    /// Rate limits of log lines that peers can cause.
    restarts: LogLimit,
    refusals: LogLimit,
    troubles: PeerLog,
}

impl Peers {
    pub(super) fn new(config: Config, prng: Prng) -> Self {
        Self {
            config,
            peers: BTreeMap::new(),
            links: Links::default(),
            timers: Timers::default(),
            closed: BTreeSet::new(),
            closed_waits: false,
            effects: Vec::new(),
            stats: Stats::default(),
            prng,
            restarts: LogLimit::default(),
            refusals: LogLimit::default(),
            troubles: PeerLog::default(),
        }
    }

    /// Returns the counters of connections and peers.
    pub(super) fn stats(&self) -> Stats {
        self.stats
    }

    /// Returns the consequences of the changes since the last call, in order.
    pub(super) fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    pub(super) fn links(&self) -> &Links {
        &self.links
    }

    pub(super) fn links_mut(&mut self) -> &mut Links {
        &mut self.links
    }

    pub(super) fn get(&self, address: IpAddr) -> Option<&Peer> {
        self.peers.get(&address)
    }

    pub(super) fn get_mut(&mut self, address: IpAddr) -> Option<&mut Peer> {
        self.peers.get_mut(&address)
    }

    /// Returns a connection and its peer.
    pub(super) fn pair(&mut self, id: LinkId) -> Option<(&mut Peer, &mut Link)> {
        let link = self.links.get_mut(id)?;
        Some((self.peers.get_mut(&link.peer)?, link))
    }

    /// Returns all peers with their addresses.
    pub(super) fn iter(&self) -> impl Iterator<Item = (IpAddr, &Peer)> {
        self.peers.iter().map(|(address, peer)| (*address, peer))
    }

    /// Returns the state of all peers.
    pub fn connections(&self) -> impl Iterator<Item = ConnectionInfo> {
        self.iter().map(|(address, peer)| {
            let link = peer.connection.up().and_then(|id| self.links.get(id));
            peer.info(address, link)
        })
    }

    /// Returns the TCP connections that carry messages.
    pub fn tcp_sockets(&self) -> impl Iterator<Item = TcpInfo> {
        self.links.iter().filter(|link| link.role == Role::Up).map(Link::tcp_info)
    }

    /// Returns an accepted connection of a peer that has not delivered valid data yet. Bytes that
    /// have arrived on it must be passed to the node before the next one is accepted, which
    /// replaces it: the peer may know that they have arrived.
    pub fn candidate(&self, peer: IpAddr) -> Option<LinkId> {
        self.peers.get(&peer)?.connection.candidate()
    }

    /// Returns the connection that this accepted one is to replace. Bytes that have arrived on it
    /// must be passed to the node before the first bytes of its successor.
    pub fn predecessor(&self, id: LinkId) -> Option<LinkId> {
        let link = self.links.get(id).filter(|link| link.role == Role::Candidate)?;
        self.connection(link.peer)
    }

    /// Returns the established connection to a peer.
    pub fn connection(&self, peer: IpAddr) -> Option<LinkId> {
        self.peers.get(&peer)?.connection.up()
    }

    /// Whether the limit of peers is reached, so that messages to others may be refused.
    pub fn is_crowded(&self) -> bool {
        self.peers.len() >= self.config.peers_max
    }
}

// Connections.
impl Peers {
    /// Returns the time at which to call [`tick`](Self::tick).
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.timers.deadline()
    }

    /// Runs the next timer that is due. Returns false if there is none.
    pub(super) fn tick(&mut self, now: Instant) -> bool {
        if !self.closed.is_empty() && !self.closed_waits {
            self.closed_waits = true;
            self.timers.set(now + CLOSED_WAIT, Timer::Closed);
        }
        let Some(timer) = self.timers.take_due(now) else { return false };
        match timer {
            Timer::Peer(peer) => self.tick_peer(now, peer),
            Timer::Closed => {
                self.closed_waits = false;
                self.abandon_closed();
            }
            Timer::Link(id) => {
                if self.links.get(id).is_some_and(|link| link.role == Role::Candidate) {
                    self.stats.tcp_listen_closed_stale += 1;
                    self.close(now, id);
                }
            }
        }
        true
    }

    fn tick_peer(&mut self, now: Instant, address: IpAddr) {
        let Some(peer) = self.peers.get_mut(&address) else { return };
        if peer.is_stale(now) {
            self.forget(address);
            return;
        }
        peer.timer_ran(now);
        match peer.connection.phase() {
            Phase::Waiting(at) if at <= now => match peer.wants_connection() {
                true => self.attempt(now, address),
                false => self.rest(now, address),
            },
            Phase::Idle => self.rest(now, address),
            Phase::Connecting(link, until) if until <= now => self.close(now, link),
            Phase::Up(link) => {
                if peer.outbound.release_overdue(now) {
                    self.links.wake(link);
                }
            }
            Phase::Waiting(_) | Phase::Connecting(..) => {}
        }
    }

    /// Starts to connect.
    fn attempt(&mut self, now: Instant, address: IpAddr) {
        let Some(peer) = self.peers.get_mut(&address) else { return };
        let role = match peer.connection.connects() {
            true => {
                self.stats.tcp_connect_attempts += 1;
                Role::Connecting
            }
            false => {
                self.stats.tcp_kicks_sent += 1;
                Role::Kicking
            }
        };
        let link = self.links.connect(address, role);
        let until = now + self.config.connect_timeout;
        peer.connection.attempted(now, link, until);
        self.timers.set(until, Timer::Peer(address));
    }

    /// Schedules an attempt to connect after `wait`.
    fn attempt_after(&mut self, now: Instant, address: IpAddr, wait: Duration) {
        if wait.is_zero() {
            self.attempt(now, address);
        } else if let Some(peer) = self.peers.get_mut(&address) {
            peer.connection.wait_until(now + wait);
            self.timers.set(now + wait, Timer::Peer(address));
        }
    }

    /// Handles a new message in the outbox of a peer.
    pub(super) fn wake(&mut self, now: Instant, address: IpAddr) {
        let Some(peer) = self.peers.get_mut(&address) else { return };
        match peer.connection.phase() {
            Phase::Idle => {
                let wait = peer.connection.delay();
                self.attempt_after(now, address, wait);
            }
            Phase::Up(link) => self.links.wake(link),
            Phase::Waiting(_) | Phase::Connecting(..) => {}
        }
    }

    /// Handles an ordered connection that has been established.
    pub(super) fn connected(&mut self, now: Instant, id: LinkId) {
        let Some(link) = self.links.get(id) else { return };
        match link.role {
            Role::Connecting => self.up(now, link.peer, id),
            // The peer has seen the connection, which is its only purpose.
            Role::Kicking => self.close(now, id),
            Role::Candidate | Role::Up => {}
        }
    }

    /// Handles a connection accepted from a peer. With `None`, the caller closes the connection.
    pub(super) fn accepted(&mut self, now: Instant, from: IpAddr) -> Option<LinkId> {
        let own = self.config.address;
        if from == own || from.is_ipv4() != own.is_ipv4() || self.admit(now, from).is_err() {
            return None;
        }
        let connection = &self.peers.get(&from)?.connection;
        if connection.connects() {
            self.stats.tcp_kicks_received += 1;
            self.kicked(now, from);
            return None;
        }
        match (connection.phase(), connection.candidate()) {
            (Phase::Up(_), former) => {
                if let Some(former) = former {
                    self.stats.tcp_listen_closed_stale += 1;
                    self.close(now, former);
                }
                self.stats.tcp_connect_raced += 1;
                let id = self.links.add(from, Role::Candidate);
                self.peers.get_mut(&from)?.connection.set_candidate(id);
                self.timers.set(now + self.config.connect_timeout, Timer::Link(id));
                Some(id)
            }
            (phase, _) => {
                if let Phase::Connecting(kick, _) = phase {
                    self.links.remove(kick);
                    self.links.order_close(kick);
                }
                let id = self.links.add(from, Role::Up);
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
        match peer.connection.phase() {
            // The peer may have lost a connection that looks good from here. Sending data will show
            // it.
            Phase::Up(link) => self.links.send_map(link),
            Phase::Connecting(..) => {}
            Phase::Idle | Phase::Waiting(_) => {
                if let Some(wait) = peer.connection.delay_after_kick(now) {
                    self.attempt_after(now, address, wait);
                }
            }
        }
    }

    /// Starts to carry messages on a connection.
    fn up(&mut self, now: Instant, address: IpAddr, id: LinkId) {
        // Messages of closed sockets may only use connections that were already up.
        self.abandon_closed();
        let (Some(peer), Some(link)) = (self.peers.get_mut(&address), self.links.get_mut(id))
        else {
            return;
        };
        let was_up = peer.connection.established(now, id);
        link.role = Role::Up;
        link.map_is_due = !(was_up && mutated!(RdsMapForgotten));
        let waits = peer.inbound.awaits_map() && !mutated!(RdsMapNotAwaited);
        let until = waits.then(|| now + HOLD);
        peer.outbound.hold(until);
        if let Some(until) = until {
            self.timers.set(until, Timer::Peer(address));
        }
        self.links.wake(id);
    }

    /// Handles the first valid data of a peer on a connection.
    pub(super) fn valid(&mut self, now: Instant, id: LinkId) {
        let Some((peer, link)) = self.pair(id) else { return };
        link.is_taken = true;
        peer.inbound.prove();
        if peer.connection.candidate() == Some(id)
            && let Some(former) = peer.connection.up()
        {
            // The other connection takes over as soon as the current one is lost.
            self.close(now, former);
        }
    }

    /// Handles a connection that has ended or could not be established.
    pub(super) fn lost(&mut self, now: Instant, id: LinkId) {
        self.abandon_closed();
        let Some(link) = self.links.remove(id) else { return };
        let address = link.peer;
        let Some(peer) = self.peers.get_mut(&address) else { return };
        if !mutated!(RdsPartKept) {
            peer.inbound.discharge(link.held);
            self.effects.push(Effect::InputDiscarded(link.held));
        }
        let lost = peer.connection.lost(now, id);
        let Lost::Current { was_up, successor, trouble } = lost else { return };
        let dropped = peer.outbound.take_back(link.into_unacked());
        self.stats.conn_reset += u64::from(was_up);
        self.drop_messages(dropped);
        if let Some(successor) = successor.filter(|_| !mutated!(RdsCandidateForgotten)) {
            self.up(now, address, successor);
            return;
        }
        let Some(peer) = self.peers.get_mut(&address) else { return };
        if let Some(trouble) = trouble.filter(|_| peer.outbound.has_messages())
            && let Some(left_out) = self.troubles.admit(now, address)
        {
            tracing::warn!(peer = %address, left_out, "cannot reach the peer: {trouble}");
        }
        if !peer.wants_connection() {
            self.rest(now, address);
            return;
        }
        let wait = peer.connection.delay_after_loss();
        // Never at once, whatever the delay: the driver may be in the middle of closing a
        // connection.
        self.attempt_after(now, address, wait.max(Duration::from_nanos(1)));
    }

    /// Handles a peer that needs no connection. A single timer checks whether it is stale.
    fn rest(&mut self, now: Instant, address: IpAddr) {
        let check_at = self.peers.get_mut(&address).and_then(|peer| peer.rest(now));
        if let Some(at) = check_at {
            self.timers.set(at, Timer::Peer(address));
        }
    }

    /// Closes a connection.
    pub(super) fn close(&mut self, now: Instant, id: LinkId) {
        self.links.order_close(id);
        self.lost(now, id);
    }

    /// Adds a peer if there is room.
    pub(super) fn admit(&mut self, now: Instant, address: IpAddr) -> Result<(), Crowded> {
        if self.peers.contains_key(&address) {
            return Ok(());
        }
        if self.is_crowded() {
            let free = self.peers.iter().filter(|(_, peer)| peer.may_be_forgotten(now));
            let victim = free.min_by_key(|(_, peer)| peer.eviction_rank(now));
            let Some(victim) = victim.map(|(address, _)| *address) else {
                self.stats.peers_refused += 1;
                if let Some(left_out) = self.refusals.admit(now) {
                    let count = self.peers.len();
                    tracing::warn!(
                        peer = %address, left_out,
                        "peer refused: the node has {count} peers already; raise peers-max"
                    );
                }
                return Err(Crowded);
            };
            self.forget(victim);
        }
        let (min, max) = (self.config.reconnect_min, self.config.reconnect_max);
        let backoff = Backoff::new(min, max, self.prng.fork());
        let connects = connects(self.config.address, address);
        self.peers.insert(address, Peer::new(connects, backoff, now));
        Ok(())
    }

    /// Removes a peer without messages or state worth keeping.
    fn forget(&mut self, address: IpAddr) {
        let Some(peer) = self.peers.remove(&address) else { return };
        if peer.inbound.map().is_some() {
            self.effects.push(Effect::MapForgotten(address));
        }
        self.stats.tcp_crowded_out += u64::from(!peer.is_proven());
        for id in peer.connection.links() {
            if let Some(link) = self.links.remove(id) {
                self.effects.push(Effect::InputDiscarded(link.held));
            }
            self.links.order_close(id);
        }
    }
}

// Messages.
impl Peers {
    /// Queues the answer to a ping or probe.
    pub(super) fn answer(&mut self, now: Instant, to: IpAddr, dport: u16) {
        let Some(peer) = self.peers.get_mut(&to) else { return };
        let generation = self.config.sent_generation();
        if peer.answer(dport, generation, self.config.pongs_max) {
            self.stats.send_pong += 1;
            self.wake(now, to);
        } else {
            self.stats.send_pong_dropped += 1;
        }
    }

    /// Handles a probe or the answer to one.
    pub(super) fn probed(&mut self, now: Instant, from: IpAddr, header: &Header) {
        let Some(peer) = self.peers.get_mut(&from) else { return };
        if peer.inbound.probed(header) {
            self.restarted(now, from);
        }
    }

    /// Drops messages that a former run of the peer may have delivered; they must not be resent.
    fn restarted(&mut self, now: Instant, from: IpAddr) {
        let Some(peer) = self.peers.get_mut(&from) else { return };
        let dropped = peer.outbound.restart();
        if let Some(left_out) = self.restarts.admit(now) {
            tracing::info!(peer = %from, dropped = dropped.len(), left_out, "peer has restarted");
        }
        self.drop_messages(dropped);
    }

    /// Handles a map of a peer, which may announce a restart, and sends the messages that waited
    /// for it. Returns the groups of ports that may have been cleared, or `None` if the map has not
    /// changed.
    pub(super) fn map_received(
        &mut self,
        now: Instant,
        id: LinkId,
        header: &Header,
        map: CongestionMap,
    ) -> Option<u64> {
        let from = self.links.get(id)?.peer;
        if self.peers.get_mut(&from)?.inbound.map_begun(header) {
            self.restarted(now, from);
        }
        let peer = self.peers.get_mut(&from)?;
        if peer.outbound.release_held() {
            self.links.wake(id);
        }
        let change = peer.inbound.replace_map(map);
        change.is_new.then_some(change.cleared)
    }

    /// Records a closed socket with messages in queues. They are sent at most once more, over the
    /// current connection if one is up.
    pub(super) fn socket_closed(&mut self, id: SocketId) {
        self.closed.insert(id);
    }

    /// Cancels the messages of a socket to a port of a peer. Returns the cost of those that may
    /// still arrive.
    pub(super) fn cancel(&mut self, id: SocketId, to: IpAddr, port: u16) -> usize {
        let is_meant =
            |message: &Message| message.owner == Owner::Socket(id) && message.dport == port;
        self.abandon(to, is_meant, true)
    }

    /// Abandons the messages of all closed sockets at once, since all queues have to be searched.
    fn abandon_closed(&mut self) {
        if self.closed.is_empty() {
            return;
        }
        let closed = std::mem::take(&mut self.closed);
        let is_meant = |m: &Message| matches!(m.owner, Owner::Socket(id) if closed.contains(&id));
        let peers: Vec<IpAddr> = self.peers.keys().copied().collect();
        for peer in peers {
            self.abandon(peer, is_meant, false);
        }
    }

    /// Abandons messages to a peer, even if no message was sent before when `waiting`. Returns the
    /// cost of those that lost their owner.
    fn abandon(
        &mut self,
        address: IpAddr,
        is_meant: impl Fn(&Message) -> bool + Copy,
        waiting: bool,
    ) -> usize {
        let Some(peer) = self.peers.get_mut(&address) else { return 0 };
        let link = peer.connection.up().and_then(|id| self.links.get_mut(id));
        let abandoned = peer.outbound.abandon(link, is_meant, waiting);
        self.drop_messages(abandoned.dropped);
        abandoned.cost
    }

    /// Drops messages that will not be sent any more.
    fn drop_messages(&mut self, messages: Vec<Message>) {
        for message in messages {
            self.stats.send_dropped += u64::from(message.owner != Owner::Probe);
            self.effects.push(Effect::Dropped(message));
        }
    }
}
