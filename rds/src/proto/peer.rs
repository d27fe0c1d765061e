//! State kept about another node across connections.

mod connection;
mod inbound;
mod outbound;
mod path;

use std::net::IpAddr;

use rtrs_base::time::{Duration, Instant};

use super::backoff::Backoff;
use super::event::LinkId;
use super::info::{ConnectionInfo, ConnectionState};
use super::link::Link;
use super::outbox::Message;
use crate::wire::{Header, PING_PORT};
pub(super) use connection::{Lost, Phase};
pub(super) use inbound::{Inbound, Run};
pub(super) use outbound::Greeting;
pub(super) use path::Path;

/// Absence after which a peer may be forgotten if others need its slot.
const AWAY: Duration = Duration::from_secs(600);
/// Absence after which a peer is forgotten if it has never sent a message to a user.
const STALE: Duration = Duration::from_secs(300);

/// Time for a new peer to send its first valid data; until then, silent and absent peers are
/// evicted first. The data may have arrived but not been read yet.
const FRESH: Duration = Duration::from_secs(1);

/// Reasons why a peer can be forgotten, in order of eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Evicted {
    /// The peer has never sent anything valid.
    Silent,
    /// The peer has only pinged, and is away.
    Away,
    /// The peer is new, and has not sent anything valid yet.
    Fresh,
    /// The peer has sent messages, and has been away for a long time.
    LongAway,
}

/// Another node.
#[derive(Debug)]
pub(super) struct Peer {
    /// Paths by number; there is always at least one path.
    paths: Vec<Path>,
    pub(super) inbound: Inbound,
    /// Accepted connections, oldest first, whose path is not known yet.
    pub(super) unassigned: Vec<LinkId>,
    /// Number of paths that both nodes support; `None` before the first map.
    count: Option<usize>,
    /// Number of paths over which messages are spread. The number does not change during a run of
    /// the peer, because messages of a port are ordered by their path.
    spread: Option<usize>,
    /// Time at which a timer checks whether the peer is stale.
    check_at: Option<Instant>,
}

impl Peer {
    /// Creates a peer. `paths` is the maximum number of connections to it.
    pub(super) fn new(connects: bool, backoff: Backoff, now: Instant, paths: usize) -> Self {
        let known = (paths == 1).then_some(1);
        Self {
            paths: vec![Path::new(connects, backoff, now)],
            inbound: Inbound::default(),
            unassigned: Vec::new(),
            count: known,
            spread: known,
            check_at: None,
        }
    }

    /// Returns all paths.
    pub(super) fn paths(&self) -> &[Path] {
        &self.paths
    }

    /// Returns all paths.
    pub(super) fn paths_mut(&mut self) -> &mut [Path] {
        &mut self.paths
    }

    /// Returns a path, which must exist.
    pub(super) fn path(&self, index: usize) -> &Path {
        &self.paths[index]
    }

    /// Returns a path, which must exist.
    pub(super) fn path_mut(&mut self, index: usize) -> &mut Path {
        &mut self.paths[index]
    }

    /// Adds paths until there are this many.
    pub(super) fn grow(
        &mut self,
        count: usize,
        now: Instant,
        mut backoff: impl FnMut() -> Backoff,
    ) {
        let connects = self.connects();
        while self.paths.len() < count {
            self.paths.push(Path::new(connects, backoff(), now));
        }
    }

    /// Whether this node's address is smaller than the peer's, so that this node connects.
    pub(super) fn connects(&self) -> bool {
        self.paths[0].connection.connects()
    }

    /// Returns the number of paths that both nodes support; `None` before the first map.
    pub(super) fn count(&self) -> Option<usize> {
        self.count
    }

    pub(super) fn set_count(&mut self, count: usize) {
        self.count = Some(count);
    }

    /// Returns the path whose sequence numbers apply to messages received on a connection. A peer
    /// that has restarted with fewer paths treats the connection as its only one.
    pub(super) fn numbering(&self, index: usize) -> usize {
        if self.count.is_none_or(|count| index < count) { index } else { 0 }
    }

    /// Returns the path for messages from a port.
    pub(super) fn path_of(&self, port: u16, seed: u32) -> usize {
        let hash = (u32::from(port) ^ seed).wrapping_mul(0x9e37_79b1);
        let hash = (hash ^ hash >> 15).wrapping_mul(0x85eb_ca77);
        ((u64::from(hash) * self.spread.unwrap_or(1) as u64) >> 32) as usize
    }

    /// Whether the number of paths over which messages are spread is decided.
    pub(super) fn is_spread(&self) -> bool {
        self.spread.is_some()
    }

    /// Spreads messages over this number of paths. No earlier message may still be in flight.
    pub(super) fn spread(&mut self, count: usize, seed: u32) {
        if self.spread.replace(count) == Some(count) {
            return;
        }
        let messages: Vec<Message> =
            self.paths.iter_mut().flat_map(|path| path.outbound.take_unsent()).collect();
        for message in messages {
            let path = self.path_of(message.sport, seed);
            self.paths[path].outbound.push(message);
        }
    }

    /// Returns the established connections, in path order.
    pub(super) fn up(&self) -> impl Iterator<Item = LinkId> {
        self.paths.iter().filter_map(|path| path.connection.up())
    }

    /// Returns all links: the links of the paths, and accepted connections without a path.
    pub(super) fn links(&self) -> Vec<LinkId> {
        let of_paths = self.paths.iter().flat_map(|path| path.connection.links());
        of_paths.chain(self.unassigned.iter().copied()).collect()
    }

    /// Whether any messages are waiting to be sent.
    pub(super) fn has_messages(&self) -> bool {
        self.paths.iter().any(|path| path.outbound.has_messages())
    }

    /// Whether to establish a connection for a path that has none. The first path comes first; the
    /// others follow once both nodes know of them.
    pub(super) fn wants_connection(&self, index: usize) -> bool {
        let Path { connection, outbound, .. } = &self.paths[index];
        if index > 0 {
            let is_known = self.count.is_some_and(|count| index < count);
            let has_first = self.paths[0].connection.up().is_some();
            return is_known && has_first && (self.connects() || outbound.has_messages());
        }
        // Only a new map can report that the peer's ports are no longer congested.
        self.has_messages() || connection.is_restored() || self.inbound.has_congestion()
    }

    /// Whether the peer can be forgotten without losing anything: it has never sent valid data, or
    /// it is absent and, if it has sent messages to users, has been absent long enough.
    pub(super) fn may_be_forgotten(&self, now: Instant) -> bool {
        let is_idle = !self.has_messages() && self.inbound.held() == 0;
        let is_away = self.up().next().is_none()
            && (!self.inbound.has_sent() || now.since(self.since()) >= AWAY);
        is_idle && (!self.inbound.is_proven() || is_away)
    }

    /// Returns the time when the peer first became known, or when its last connection was lost.
    fn since(&self) -> Instant {
        let times = self.paths.iter().map(|path| path.connection.since());
        times.max().unwrap_or(Instant::ZERO)
    }

    /// Returns the rank of the peer in the order of eviction: by class, then oldest first.
    pub(super) fn eviction_rank(&self, now: Instant) -> (Evicted, Instant) {
        let since = self.since();
        let is_fresh = now.since(since) < FRESH;
        let class = match (self.inbound.is_proven(), self.inbound.has_sent()) {
            (false, _) if is_fresh => Evicted::Fresh,
            (false, _) => Evicted::Silent,
            (true, false) => Evicted::Away,
            (true, true) => Evicted::LongAway,
        };
        (class, since)
    }

    /// Whether the peer has sent valid data.
    pub(super) fn is_proven(&self) -> bool {
        self.inbound.is_proven()
    }

    /// Whether the peer has been absent long enough to be forgotten even if its slot is not needed.
    pub(super) fn is_stale(&self, now: Instant) -> bool {
        let is_away = self.up().next().is_none() && now.since(self.since()) >= STALE;
        is_away && !self.inbound.has_sent() && self.may_be_forgotten(now)
    }

    /// Records that a path needs no connection. Returns the time at which to check whether the peer
    /// is stale, unless a timer is already set.
    pub(super) fn rest(&mut self, now: Instant, index: usize) -> Option<Instant> {
        self.paths[index].connection.rest();
        if self.inbound.has_sent() || self.check_at.is_some() {
            return None;
        }
        self.check_at = Some(now + STALE);
        self.check_at
    }

    /// Records that a timer has expired.
    pub(super) fn timer_ran(&mut self, now: Instant) {
        self.check_at = self.check_at.filter(|at| *at > now);
    }

    /// Whether the payload of a message on a path is wanted, given the memory limit of a peer.
    pub(super) fn wants(&self, index: usize, header: &Header, memory: usize) -> bool {
        let is_data = header.dport != PING_PORT;
        let is_new = !self.paths[self.numbering(index)].is_old(header);
        is_data && is_new && self.inbound.fits(header.len as usize, memory)
    }

    /// Queues the answer to a ping or probe. Returns false if too many answers are waiting, or if
    /// the port is congested.
    pub(super) fn answer(&mut self, index: usize, dport: u16, limits: PongLimits) -> bool {
        let PongLimits { generation, max } = limits;
        let outbound = &mut self.paths[index].outbound;
        !self.inbound.is_congested(dport) && outbound.push_pong(dport, generation, max)
    }

    /// Removes the messages that an earlier run of the peer may have delivered. Sequence numbers
    /// restart if `renumbers`.
    pub(super) fn restart(&mut self, renumbers: bool) -> Vec<Message> {
        let mut dropped = Vec::new();
        for path in &mut self.paths {
            dropped.extend(path.outbound.restart());
            if renumbers {
                path.restart_numbers();
            }
        }
        dropped
    }

    /// Returns the state of the paths; `links` returns a connection.
    pub(super) fn info<'a>(
        &'a self,
        peer: IpAddr,
        links: impl Fn(LinkId) -> Option<&'a Link>,
    ) -> impl Iterator<Item = ConnectionInfo> {
        self.paths.iter().enumerate().map(move |(index, path)| {
            let Path { connection, outbound, .. } = path;
            let link = connection.up().and_then(&links);
            let handed = link.into_iter().flat_map(Link::messages);
            ConnectionInfo {
                peer,
                path: index,
                next_tx: outbound.next_tx(),
                next_rx: path.next_rx(),
                state: match connection.phase() {
                    Phase::Idle => ConnectionState::Down,
                    Phase::Waiting(_) => ConnectionState::Error,
                    Phase::Connecting(..) => ConnectionState::Connecting,
                    Phase::Up(_) => ConnectionState::Up,
                },
                is_sending: link.is_some_and(Link::has_output),
                queued: outbound.messages().chain(handed).map(Message::cost).sum(),
                held: if index == 0 { self.inbound.held() } else { 0 },
            }
        })
    }
}

/// Limit on the answers to a peer's pings, and the generation that the answers announce.
#[derive(Clone, Copy, Debug)]
pub(super) struct PongLimits {
    pub(super) generation: Option<u32>,
    pub(super) max: usize,
}

/// Whether the node at `own` connects to the node at `peer` rather than accepting: the smaller
/// address connects. IPv4 addresses are compared as IPv4-mapped addresses.
pub(super) fn connects(own: IpAddr, peer: IpAddr) -> bool {
    let number = |address| match address {
        IpAddr::V4(v4) => u128::from(v4.to_ipv6_mapped()),
        IpAddr::V6(v6) => u128::from(v6),
    };
    number(own) < number(peer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smaller_address_connects() {
        for (small, large) in [
            ("10.9.0.1", "10.9.0.5"),
            ("10.0.0.2", "10.0.0.10"),
            ("9.255.255.255", "10.0.0.0"),
            ("fd00::1", "fd00::2"),
            ("::1", "10.0.0.1"),
            ("10.0.0.1", "fd00::1"),
        ] {
            let (small, large) = (small.parse().unwrap(), large.parse().unwrap());
            assert!(connects(small, large) && !connects(large, small), "{small} {large}");
        }
    }
}
