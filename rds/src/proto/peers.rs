//! Peers of a node and the connections to them: which end connects and when, and what happens to
//! messages when a connection is lost.
//!
//! Changes have consequences for users and memory limits, which this module does not manage. The
//! consequences are collected as [`Effect`]s.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use rtrs_base::log_limit::LogLimit;
use rtrs_base::mutated;
use rtrs_base::prng::Prng;
use rtrs_base::time::{Duration, Instant};

use super::amount::Amount;
use super::backoff::Backoff;
use super::config::{Config, PATHS_MAX};
use super::event::{LinkId, SocketId};
use super::info::{ConnectionInfo, TcpInfo};
use super::link::{Link, Role};
use super::links::Links;
use super::outbox::{Message, Owner};
use super::peer::{Lost, Peer, Phase, PongLimits, Run, connects};
use super::peer_log::PeerLog;
use super::stats::Stats;
use super::timers::{Timer, Timers};
use crate::wire::{CongestionMap, Extensions, Header, Kind};

/// Maximum time for which messages wait for a peer's first map. If the peer announces its
/// generation, this applies to the first map on each connection: the messages are for the current
/// run of the peer, and a later run must not receive them.
const HOLD: Duration = Duration::from_secs(1);
/// Delay after which messages of closed sockets are abandoned. Many sockets are handled together,
/// because all queues must be searched.
const CLOSED_WAIT: Duration = Duration::from_millis(100);

/// Shortest wait before an attempt to connect that must not start immediately, because the driver
/// may be in the middle of closing a connection.
const SOON: Duration = Duration::from_nanos(1);

/// Consequence of a change for users and memory limits.
#[derive(Debug)]
pub(super) enum Effect {
    /// The unfinished input of a connection, of this many bytes, is discarded.
    InputDiscarded(usize),
    /// A message will no longer be sent.
    Dropped(Message),
    /// The congestion map of a peer is no longer known.
    MapForgotten(IpAddr),
}

/// Error for a node that has reached its limit on peers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Crowded;

/// All peers of a node, by address.
#[derive(Debug)]
pub struct Peers {
    config: Config,
    peers: BTreeMap<IpAddr, Peer>,
    pub(super) links: Links,
    pub(super) timers: Timers,
    /// Closed sockets whose messages are still in queues.
    closed: BTreeSet<SocketId>,
    closed_waits: bool,
    /// Consequences of changes, in order, until the node applies them.
    pub(super) effects: Vec<Effect>,
    /// Counters of connections and peers.
    pub(super) stats: Stats,
    prng: Prng,
    /// Seed that makes it unpredictable which ports share a path.
    spread_seed: u32,
    /// Rate limits for log lines that peers can trigger.
    restarts: LogLimit,
    refusals: LogLimit,
    troubles: PeerLog,
}

impl Peers {
    pub(super) fn new(config: Config, prng: Prng) -> Self {
        Self {
            spread_seed: (config.seed ^ config.seed >> 32) as u32,
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

    /// Returns the state of the paths to all peers.
    pub fn connections(&self) -> impl Iterator<Item = ConnectionInfo> {
        self.iter().flat_map(|(address, peer)| peer.info(address, |id| self.links.get(id)))
    }

    /// Returns the TCP connections that carry messages.
    pub fn tcp_sockets(&self) -> impl Iterator<Item = TcpInfo> {
        self.links.iter().filter(|link| link.role == Role::Up).map(Link::tcp_info)
    }

    /// Returns the accepted connections of a peer that have not delivered valid data yet, oldest
    /// first. Bytes that have arrived on these connections must be passed to the node before the
    /// next connection is accepted, which may replace them: the peer may know that the bytes have
    /// arrived.
    pub fn candidates(&self, peer: IpAddr) -> Vec<LinkId> {
        let Some(peer) = self.peers.get(&peer) else { return Vec::new() };
        let candidates = peer.paths().iter().filter_map(|path| path.connection.candidate());
        candidates.chain(peer.unassigned.iter().copied()).collect()
    }

    /// Returns the connections that this accepted connection may replace. Bytes that have arrived
    /// on them must be passed to the node before the first bytes of their successor.
    pub fn predecessors(&self, id: LinkId) -> Vec<LinkId> {
        let link = self.links.get(id).filter(|link| link.role == Role::Candidate);
        link.map_or_else(Vec::new, |link| self.established(link.peer))
    }

    /// Returns the established connections to a peer.
    pub fn established(&self, peer: IpAddr) -> Vec<LinkId> {
        self.peers.get(&peer).map_or_else(Vec::new, |peer| peer.up().collect())
    }

    /// Whether the limit on peers has been reached, so that messages to others may be refused.
    pub fn is_crowded(&self) -> bool {
        self.peers.len() >= self.config.peers_max
    }
}

// Connections.
impl Peers {
    /// Runs the next timer that is due. Returns false if none is due.
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
        for index in 0..peer.paths().len() {
            let Some(peer) = self.peers.get_mut(&address) else { return };
            match peer.path(index).connection.phase() {
                Phase::Waiting(at) if at <= now => match peer.wants_connection(index) {
                    true => self.attempt(now, address, index),
                    false => self.rest(now, address, index),
                },
                Phase::Idle => self.rest(now, address, index),
                Phase::Connecting(link, until) if until <= now => self.close(now, link),
                Phase::Up(link) => {
                    if peer.path_mut(index).outbound.release_overdue(now) {
                        if !peer.is_spread() {
                            peer.spread(1, self.spread_seed);
                        }
                        self.links.wake(link);
                    }
                }
                Phase::Waiting(_) | Phase::Connecting(..) => {}
            }
        }
    }

    /// Starts connecting.
    fn attempt(&mut self, now: Instant, address: IpAddr, index: usize) {
        let Some(peer) = self.peers.get_mut(&address) else { return };
        let role = match peer.connects() {
            true => {
                self.stats.tcp_connect_attempts += 1;
                Role::Connecting
            }
            false => {
                self.stats.tcp_kicks_sent += 1;
                Role::Kicking
            }
        };
        let link = self.links.connect(address, index, role);
        let until = now + self.config.connect_timeout;
        peer.path_mut(index).connection.attempted(now, link, until);
        self.timers.set(until, Timer::Peer(address));
    }

    /// Schedules an attempt to connect after `wait`.
    fn attempt_after(&mut self, now: Instant, address: IpAddr, index: usize, wait: Duration) {
        if wait.is_zero() {
            self.attempt(now, address, index);
        } else if let Some(peer) = self.peers.get_mut(&address) {
            peer.path_mut(index).connection.wait_until(now + wait);
            self.timers.set(now + wait, Timer::Peer(address));
        }
    }

    /// Queues a message to a peer.
    pub(super) fn queue(&mut self, now: Instant, to: IpAddr, message: Message) {
        let Some(peer) = self.peers.get_mut(&to) else { return };
        let index = peer.path_of(message.sport, self.spread_seed);
        peer.path_mut(index).outbound.push(message);
        self.wake(now, to, index);
    }

    /// Handles a new message in the outbox of a path.
    fn wake(&mut self, now: Instant, address: IpAddr, index: usize) {
        let Some(peer) = self.peers.get_mut(&address) else { return };
        // The other paths are established after the first path.
        let index = if peer.path(0).connection.up().is_some() { index } else { 0 };
        let connection = &mut peer.path_mut(index).connection;
        match connection.phase() {
            Phase::Idle => {
                let wait = connection.delay();
                self.attempt_after(now, address, index, wait);
            }
            Phase::Up(link) => self.links.wake(link),
            Phase::Waiting(_) | Phase::Connecting(..) => {}
        }
    }

    /// Handles a requested connection that has been established.
    pub(super) fn connected(&mut self, now: Instant, id: LinkId) {
        let Some(link) = self.links.get(id) else { return };
        match link.role {
            Role::Connecting => self.up(now, id),
            // The connection's only purpose was to be seen by the peer.
            Role::Kicking => self.close(now, id),
            Role::Candidate | Role::Up => {}
        }
    }

    /// Handles a connection accepted from a peer. On `None`, the caller closes the connection.
    pub(super) fn accepted(&mut self, now: Instant, from: IpAddr) -> Option<LinkId> {
        let own = self.config.address;
        if from == own || from.is_ipv4() != own.is_ipv4() || self.admit(now, from).is_err() {
            return None;
        }
        let peer = self.peers.get(&from)?;
        if peer.connects() {
            self.stats.tcp_kicks_received += 1;
            self.kicked(now, from);
            return None;
        }
        let connection = &peer.path(0).connection;
        let (has_several, is_up) = (peer.count() != Some(1), connection.up().is_some());
        if !has_several && !is_up {
            if let Phase::Connecting(kick, _) = connection.phase() {
                self.links.remove(kick);
                self.links.order_close(kick);
            }
            let id = self.links.add(from, Role::Up);
            self.up(now, id);
            return Some(id);
        }
        let former = match has_several {
            true => peer.unassigned.first().filter(|_| peer.unassigned.len() >= PATHS_MAX).copied(),
            false => connection.candidate(),
        };
        if let Some(former) = former {
            self.stats.tcp_listen_closed_stale += 1;
            self.close(now, former);
        }
        self.stats.tcp_connect_raced += u64::from(is_up);
        let id = self.links.add(from, Role::Candidate);
        let peer = self.peers.get_mut(&from)?;
        match has_several {
            true => peer.unassigned.push(id),
            false => peer.path_mut(0).connection.set_candidate(id),
        }
        self.timers.set(now + self.config.connect_timeout, Timer::Link(id));
        Some(id)
    }

    /// Handles a larger peer's request for connections.
    fn kicked(&mut self, now: Instant, address: IpAddr) {
        if mutated!(RdsConnectRequestIgnored) {
            return;
        }
        let count = self.peers.get(&address).map_or(0, |peer| peer.paths().len());
        for index in 0..count {
            let Some(peer) = self.peers.get_mut(&address) else { return };
            let may_connect = index == 0 || peer.wants_connection(index);
            let connection = &mut peer.path_mut(index).connection;
            match connection.phase() {
                // The peer may have lost a connection that looks intact from here. Sending data
                // will reveal the loss.
                Phase::Up(link) => self.links.send_map(link),
                Phase::Idle | Phase::Waiting(_) if may_connect => {
                    if let Some(wait) = connection.delay_after_kick(now) {
                        self.attempt_after(now, address, index, wait);
                    }
                }
                Phase::Connecting(..) | Phase::Idle | Phase::Waiting(_) => {}
            }
        }
    }

    /// Starts carrying messages on a connection.
    fn up(&mut self, now: Instant, id: LinkId) {
        // Messages of closed sockets may only use connections that were already up.
        self.abandon_closed();
        let Some((peer, link)) = self.pair(id) else { return };
        let address = link.peer;
        let waits = peer.inbound.awaits_map() && !mutated!(RdsMapNotAwaited);
        let path = peer.path_mut(link.path);
        let was_up = path.connection.established(now, id);
        link.role = Role::Up;
        link.map_is_due = !(was_up && mutated!(RdsMapForgotten));
        let until = waits.then(|| now + HOLD);
        path.outbound.hold(until);
        if let Some(until) = until {
            self.timers.set(until, Timer::Peer(address));
        }
        self.links.wake(id);
    }

    /// Handles a valid header from a peer on a connection.
    pub(super) fn valid(&mut self, now: Instant, id: LinkId, header: &Header, kind: Kind) {
        let Some((peer, link)) = self.pair(id) else { return };
        link.is_taken = true;
        peer.inbound.prove();
        if peer.unassigned.contains(&id) {
            let map = (kind == Kind::Map).then(|| Extensions::decode(&header.extensions));
            let path = map.and_then(|extensions| extensions.path).unwrap_or(0);
            self.assign(now, id, path.into());
            return;
        }
        let connection = &peer.path(link.path).connection;
        if connection.candidate() == Some(id)
            && let Some(former) = connection.up()
        {
            // The other connection takes over as soon as the current connection is lost.
            self.close(now, former);
        }
    }

    /// Assigns an accepted connection to a path, which uses it from then on.
    fn assign(&mut self, now: Instant, id: LinkId, index: usize) {
        let Some(link) = self.links.get_mut(id) else { return };
        let address = link.peer;
        let Some(peer) = self.peers.get_mut(&address) else { return };
        let is_older = peer
            .paths()
            .get(index)
            .is_some_and(|path| path.connection.up().is_some_and(|up| up > id));
        // The peer has opened a newer connection, or remembers an earlier run of this node that had
        // more paths.
        if is_older || index >= self.config.paths() {
            self.close(now, id);
            return;
        }
        link.path = index;
        peer.unassigned.retain(|other| *other != id);
        let (config, prng) = (&self.config, &mut self.prng);
        peer.grow(index + 1, now, || backoff(config, prng));
        let connection = &mut peer.path_mut(index).connection;
        let candidate = connection.candidate();
        match connection.phase() {
            Phase::Up(former) => {
                connection.set_candidate(id);
                self.close(now, former);
            }
            phase => {
                if let Phase::Connecting(kick, _) = phase {
                    self.links.remove(kick);
                    self.links.order_close(kick);
                }
                self.up(now, id);
            }
        }
        if let Some(candidate) = candidate {
            self.discard(candidate);
        }
    }

    /// Removes a connection that does not belong to any path, or no longer does.
    fn discard(&mut self, id: LinkId) {
        if let Some(link) = self.links.remove(id) {
            if let Some(peer) = self.peers.get_mut(&link.peer) {
                peer.inbound.discharge(link.held);
            }
            self.effects.push(Effect::InputDiscarded(link.held));
        }
        self.links.order_close(id);
    }

    /// Handles a connection that was lost or could not be established.
    pub(super) fn lost(&mut self, now: Instant, id: LinkId) {
        self.abandon_closed();
        let Some(link) = self.links.remove(id) else { return };
        let (address, index) = (link.peer, link.path);
        let Some(peer) = self.peers.get_mut(&address) else { return };
        if !mutated!(RdsPartKept) {
            peer.inbound.discharge(link.held);
            self.effects.push(Effect::InputDiscarded(link.held));
        }
        if peer.unassigned.contains(&id) {
            peer.unassigned.retain(|other| *other != id);
            return;
        }
        let path = peer.path_mut(index);
        let lost = path.connection.lost(now, id);
        let Lost::Current { was_up, successor, trouble } = lost else { return };
        let dropped = path.outbound.take_back(link.into_unacked());
        self.stats.conn_reset += u64::from(was_up);
        self.drop_messages(dropped);
        if let Some(successor) = successor.filter(|_| !mutated!(RdsCandidateForgotten)) {
            self.up(now, successor);
            return;
        }
        let Some(peer) = self.peers.get_mut(&address) else { return };
        if let Some(trouble) = trouble.filter(|_| peer.has_messages())
            && let Some(left_out) = self.troubles.admit(now, address)
        {
            tracing::warn!(peer = %address, left_out, "cannot reach the peer: {trouble}");
        }
        if peer.wants_connection(index) {
            let wait = peer.path_mut(index).connection.delay_after_loss();
            self.attempt_after(now, address, index, wait.max(SOON));
            return;
        }
        // Messages on this path also need the first path.
        let is_first_idle = peer.path(0).connection.phase() == Phase::Idle;
        if index > 0 && is_first_idle && peer.wants_connection(0) {
            let wait = peer.path_mut(0).connection.delay_after_loss();
            self.attempt_after(now, address, 0, wait.max(SOON));
        }
        self.rest(now, address, index);
    }

    /// Handles a path that needs no connection. A single timer checks whether the peer is stale.
    fn rest(&mut self, now: Instant, address: IpAddr, index: usize) {
        let check_at = self.peers.get_mut(&address).and_then(|peer| peer.rest(now, index));
        if let Some(at) = check_at {
            self.timers.set(at, Timer::Peer(address));
        }
    }

    /// Closes a connection.
    pub(super) fn close(&mut self, now: Instant, id: LinkId) {
        self.links.order_close(id);
        self.lost(now, id);
    }

    /// Adds a peer if the limit permits it.
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
        let backoff = backoff(&self.config, &mut self.prng);
        let connects = connects(self.config.address, address);
        self.peers.insert(address, Peer::new(connects, backoff, now, self.config.paths()));
        Ok(())
    }

    /// Removes a peer without messages or state worth keeping.
    fn forget(&mut self, address: IpAddr) {
        let Some(peer) = self.peers.remove(&address) else { return };
        if peer.inbound.map().is_some() {
            self.effects.push(Effect::MapForgotten(address));
        }
        self.stats.tcp_crowded_out += u64::from(!peer.is_proven());
        for id in peer.links() {
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
    pub(super) fn answer(&mut self, now: Instant, id: LinkId, dport: u16) {
        let limits =
            PongLimits { generation: self.config.sent_generation(), max: self.config.pongs_max };
        let Some((peer, link)) = self.pair(id) else { return };
        let (to, index) = (link.peer, link.path);
        if peer.answer(index, dport, limits) {
            self.stats.send_pong += 1;
            self.wake(now, to, index);
        } else {
            self.stats.send_pong_dropped += 1;
        }
    }

    /// Handles a probe or a probe's answer.
    pub(super) fn probed(&mut self, now: Instant, from: IpAddr, header: &Header) {
        let Some(peer) = self.peers.get_mut(&from) else { return };
        if peer.inbound.probed(header) {
            self.restarted(now, from, false);
        }
    }

    /// Drops messages that an earlier run of the peer may have received; they must not be resent.
    fn restarted(&mut self, now: Instant, from: IpAddr, renumbers: bool) {
        let Some(peer) = self.peers.get_mut(&from) else { return };
        let dropped = peer.restart(renumbers);
        if let Some(left_out) = self.restarts.admit(now) {
            tracing::info!(peer = %from, dropped = dropped.len(), left_out, "peer has restarted");
        }
        self.drop_messages(dropped);
    }

    /// Handles a map from a peer, which may announce a restart, and sends the messages that waited
    /// for the map. Returns the groups of ports that may have been cleared, or `None` if the map
    /// has not changed.
    pub(super) fn map_received(
        &mut self,
        now: Instant,
        id: LinkId,
        header: &Header,
        map: CongestionMap,
    ) -> Option<u64> {
        let Extensions { npaths, generation, path } = Extensions::decode(&header.extensions);
        let (peer, link) = self.pair(id)?;
        let (from, index) = (link.peer, link.path);
        link.generation = generation.or(link.generation);
        let known = peer.inbound.generation();
        let is_connected = known.is_some_and(|known| self.links.has_run(from, known, id));
        let run = self.peers.get_mut(&from)?.inbound.map_begun(generation, is_connected);
        match run {
            Run::Former => {
                self.close(now, id);
                return None;
            }
            // Close connections to earlier runs first, which returns their messages.
            Run::New => {
                for other in self.links.of_other_runs(from, generation) {
                    self.close(now, other);
                }
                self.restarted(now, from, true);
            }
            Run::Same => {}
        }
        let npaths =
            npaths.filter(|_| generation.is_some() && path.is_some()).map_or(1, usize::from);
        self.paths_known(now, from, npaths, run);
        let peer = self.peers.get_mut(&from)?;
        if peer.path_mut(index).outbound.release_held() {
            self.links.wake(id);
        }
        if index > 0 {
            // Only announces the path: maps on several paths could arrive out of order.
            return None;
        }
        let change = peer.inbound.replace_map(map);
        change.is_new.then_some(change.cleared)
    }

    /// Records the number of paths that a peer supports, and connects the missing paths.
    fn paths_known(&mut self, now: Instant, from: IpAddr, npaths: usize, run: Run) {
        let count = npaths.clamp(1, self.config.paths());
        let Some(peer) = self.peers.get_mut(&from) else { return };
        peer.set_count(count);
        let (config, prng) = (&self.config, &mut self.prng);
        peer.grow(count, now, || backoff(config, prng));
        if run == Run::New || !peer.is_spread() {
            peer.spread(count, self.spread_seed);
        }
        for index in 0..count {
            let Some(peer) = self.peers.get_mut(&from) else { return };
            let wants = index > 0 && peer.wants_connection(index);
            let connection = &mut peer.path_mut(index).connection;
            match connection.phase() {
                Phase::Idle if wants => {
                    let wait = connection.delay();
                    self.attempt_after(now, from, index, wait.max(SOON));
                }
                Phase::Up(link) => self.links.wake(link),
                _ => {}
            }
        }
    }

    /// Records a closed socket whose messages are still queued. The messages are sent at most once
    /// more, over the current connection if one is up.
    pub(super) fn socket_closed(&mut self, id: SocketId) {
        self.closed.insert(id);
    }

    /// Cancels a socket's messages to a port of a peer. Returns the amount of messages that may
    /// still arrive.
    pub(super) fn cancel(&mut self, id: SocketId, to: IpAddr, port: u16) -> Amount {
        let is_meant =
            |message: &Message| message.owner == Owner::Socket(id) && message.dport == port;
        self.abandon(to, is_meant, true)
    }

    /// Abandons the messages of all closed sockets together, because all queues must be searched.
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

    /// Abandons messages to a peer. If `waiting` is set, messages that are not queued on a
    /// connection are dropped in any case. Returns the amount of messages that lost their owner.
    fn abandon(
        &mut self,
        address: IpAddr,
        is_meant: impl Fn(&Message) -> bool + Copy,
        waiting: bool,
    ) -> Amount {
        let mut amount = Amount::default();
        let Some(peer) = self.peers.get_mut(&address) else { return amount };
        let mut dropped = Vec::new();
        for path in peer.paths_mut() {
            let link = path.connection.up().and_then(|id| self.links.get_mut(id));
            let abandoned = path.outbound.abandon(link, is_meant, waiting);
            amount += abandoned.amount;
            dropped.extend(abandoned.dropped);
        }
        self.drop_messages(dropped);
        amount
    }

    /// Drops messages that will no longer be sent.
    fn drop_messages(&mut self, messages: Vec<Message>) {
        for message in messages {
            self.stats.send_dropped += u64::from(message.owner != Owner::Probe);
            self.effects.push(Effect::Dropped(message));
        }
    }
}

/// Creates the delays between attempts to connect.
fn backoff(config: &Config, prng: &mut Prng) -> Backoff {
    Backoff::new(config.tuning.clone(), prng.fork())
}
