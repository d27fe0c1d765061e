//! State kept about another node across connections.

use std::net::IpAddr;

use rtrs_core::time::{Duration, Instant};

use super::backoff::Backoff;
use super::event::LinkId;
use super::outbox::{Outbox, Owner};
use crate::wire::CongestionMap;

/// Time of absence after which a peer may be forgotten if others need its slot.
const AWAY: Duration = Duration::from_secs(600);
/// Time of absence after which peers are forgotten if they have never sent a message to a user.
pub(super) const STALE: Duration = Duration::from_secs(300);

/// State of the connection to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// No connection is needed.
    Idle,
    /// The next attempt starts at this time.
    Waiting(Instant),
    /// An attempt is in progress, until this time.
    Connecting(LinkId, Instant),
    /// The connection is up.
    Up(LinkId),
}

/// Another node.
#[derive(Debug)]
pub(super) struct Peer {
    /// Our address is the smaller one, so we connect.
    pub(super) connects: bool,
    pub(super) phase: Phase,
    /// An accepted connection that may replace the current one.
    pub(super) candidate: Option<LinkId>,
    pub(super) backoff: Backoff,
    pub(super) last_attempt: Option<Instant>,
    /// A connection has been up before.
    pub(super) was_up: bool,
    /// Time when the peer first became known, or when the last established connection was lost.
    pub(super) since: Instant,
    /// Time at which a timer checks whether the peer is stale.
    pub(super) check_at: Option<Instant>,
    /// The peer has sent valid data.
    pub(super) is_proven: bool,
    /// The peer has sent a message to a user. If it were forgotten, a repeated message would look
    /// new.
    pub(super) has_sent: bool,
    pub(super) outbox: Outbox,
    /// The peer has acknowledged a message of ours, and so interprets our sequence numbers
    /// correctly.
    pub(super) is_synced: bool,
    /// Sequence number expected next from the peer.
    pub(super) next_rx: u64,
    /// Congested ports of the peer; none before its first map.
    pub(super) map: Option<CongestionMap>,
    /// Generation of the peer, which distinguishes its runs, if the peer ever announced one.
    pub(super) generation: Option<u32>,
    /// The peer announces its generation in maps, and so before anything else on a connection.
    pub(super) generation_in_map: bool,
    /// Only maps and probes are sent until the peer's map has arrived, or until this time.
    pub(super) hold_until: Option<Instant>,
    /// Cost of messages that the peer has sent and users have not read.
    pub(super) held: usize,
    /// Number of unacknowledged answers to the peer's pings.
    pub(super) pongs: usize,
}

impl Peer {
    pub(super) fn new(connects: bool, backoff: Backoff, now: Instant) -> Self {
        Self {
            connects,
            phase: Phase::Idle,
            candidate: None,
            backoff,
            last_attempt: None,
            was_up: false,
            since: now,
            check_at: None,
            is_proven: false,
            has_sent: false,
            outbox: Outbox::default(),
            is_synced: false,
            next_rx: 0,
            map: None,
            generation: None,
            generation_in_map: false,
            hold_until: None,
            held: 0,
            pongs: 0,
        }
    }

    /// Returns the connection that is up.
    pub(super) fn up(&self) -> Option<LinkId> {
        match self.phase {
            Phase::Up(link) => Some(link),
            _ => None,
        }
    }

    /// Whether a port of the peer accepts no more messages now.
    pub(super) fn is_congested(&self, port: u16) -> bool {
        self.map.as_ref().is_some_and(|map| map.get(port))
    }

    /// Whether a connection is to be established when none is up.
    pub(super) fn wants_connection(&self) -> bool {
        // Only another map can report that its ports are no longer congested.
        let is_congested = self.map.as_ref().is_some_and(|map| map.ports().next().is_some());
        self.is_sent_to() || (self.connects && self.was_up) || is_congested
    }

    /// Whether messages of users wait to be sent to the peer.
    fn is_sent_to(&self) -> bool {
        self.outbox.iter().any(|message| message.owner != Owner::Pong)
    }

    /// Whether the peer can be forgotten without losing anything: it has never sent valid data, or
    /// it is absent, for long enough if it has sent messages to users.
    pub(super) fn may_be_forgotten(&self, now: Instant) -> bool {
        let is_idle = !self.is_sent_to() && self.held == 0;
        let is_away = self.up().is_none() && (!self.has_sent || now.since(self.since) >= AWAY);
        is_idle && (!self.is_proven || is_away)
    }

    /// Whether the peer was absent long enough to be forgotten even if its slot is not needed.
    pub(super) fn is_stale(&self, now: Instant) -> bool {
        let is_away = self.up().is_none() && now.since(self.since) >= STALE;
        is_away && !self.has_sent && self.may_be_forgotten(now)
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
