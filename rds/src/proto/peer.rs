//! State kept about another node across connections.

mod connection;
mod inbound;
mod outbound;

use std::net::IpAddr;

use rtrs_core::time::{Duration, Instant};

use super::backoff::Backoff;
use super::info::ConnectionInfo;
use super::link::Link;
use super::outbox::Message;
pub(super) use connection::{Connection, Lost, Phase};
pub(super) use inbound::Inbound;
pub(super) use outbound::{Greeting, Outbound};

/// Time of absence after which a peer may be forgotten if others need its slot.
const AWAY: Duration = Duration::from_secs(600);
/// Time of absence after which peers are forgotten if they have never sent a message to a user.
const STALE: Duration = Duration::from_secs(300);

/// Time for a new peer to send its first valid data before others are kept rather than it. It may
/// have sent the data, and the node has not read it yet.
const FRESH: Duration = Duration::from_secs(1);

/// Reason why a peer can be forgotten, in the order of eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Evicted {
    /// The peer has never sent anything valid.
    Silent,
    /// The peer has only pinged, and is away.
    Away,
    /// The peer is new, and has not sent anything valid yet.
    Fresh,
    /// The peer has sent messages, and was away for long.
    LongAway,
}

/// Another node.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) connection: Connection,
    pub(super) inbound: Inbound,
    pub(super) outbound: Outbound,
    /// Time at which a timer checks whether the peer is stale.
    check_at: Option<Instant>,
}

impl Peer {
    pub(super) fn new(connects: bool, backoff: Backoff, now: Instant) -> Self {
        Self {
            connection: Connection::new(connects, backoff, now),
            inbound: Inbound::default(),
            outbound: Outbound::default(),
            check_at: None,
        }
    }

    /// Whether a connection is to be established when none is up.
    pub(super) fn wants_connection(&self) -> bool {
        // Only another map can report that its ports are no longer congested.
        let is_congested = self.inbound.has_congestion();
        self.outbound.has_messages() || self.connection.is_restored() || is_congested
    }

    /// Whether the peer can be forgotten without losing anything: it has never sent valid data, or
    /// it is absent, for long enough if it has sent messages to users.
    pub(super) fn may_be_forgotten(&self, now: Instant) -> bool {
        let Self { connection, inbound, outbound, .. } = self;
        let is_idle = !outbound.has_messages() && inbound.held() == 0;
        let is_away = connection.up().is_none()
            && (!inbound.has_sent() || now.since(connection.since()) >= AWAY);
        is_idle && (!inbound.is_proven() || is_away)
    }

    /// Returns the order in which peers are forgotten, and the oldest first among equals.
    pub(super) fn eviction_rank(&self, now: Instant) -> (Evicted, Instant) {
        let since = self.connection.since();
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

    /// Whether the peer was absent long enough to be forgotten even if its slot is not needed.
    pub(super) fn is_stale(&self, now: Instant) -> bool {
        let connection = &self.connection;
        let is_away = connection.up().is_none() && now.since(connection.since()) >= STALE;
        is_away && !self.inbound.has_sent() && self.may_be_forgotten(now)
    }

    /// Records that the peer needs no connection. Returns the time at which to check whether it is
    /// stale, unless a timer is set already.
    pub(super) fn rest(&mut self, now: Instant) -> Option<Instant> {
        self.connection.rest();
        if self.inbound.has_sent() || self.check_at.is_some() {
            return None;
        }
        self.check_at = Some(now + STALE);
        self.check_at
    }

    /// Records that a timer has run.
    pub(super) fn timer_ran(&mut self, now: Instant) {
        self.check_at = self.check_at.filter(|at| *at > now);
    }

    /// Queues the answer to a ping or probe. Returns false if too many wait, or if the port is
    /// congested.
    pub(super) fn answer(&mut self, dport: u16, generation: Option<u32>, pongs_max: usize) -> bool {
        !self.inbound.is_congested(dport) && self.outbound.push_pong(dport, generation, pongs_max)
    }

    /// Returns the state of the peer, whose connection is `link` if one is up.
    pub(super) fn info(&self, peer: IpAddr, link: Option<&Link>) -> ConnectionInfo {
        let handed = link.into_iter().flat_map(Link::messages);
        ConnectionInfo {
            peer,
            next_tx: self.outbound.next_tx(),
            next_rx: self.inbound.next_rx(),
            is_connecting: matches!(self.connection.phase(), Phase::Connecting(..)),
            is_up: link.is_some(),
            is_sending: link.is_some_and(Link::has_output),
            queued: self.outbound.messages().chain(handed).map(Message::cost).sum(),
            held: self.inbound.held(),
        }
    }
}

/// Whether the node at `own` connects to the one at `peer` rather than accepting: the smaller
/// address connects. IPv4 addresses are compared as IPv4-mapped ones.
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
