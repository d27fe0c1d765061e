//! Another node: what is kept about it over its connections.

use std::net::IpAddr;

use rtrs_core::time::{Duration, Instant};

use super::backoff::Backoff;
use super::event::LinkId;
use super::outbox::{Outbox, Owner};
use crate::wire::CongestionMap;

/// Peers that were away for so long may be forgotten if others need their place.
const AWAY: Duration = Duration::from_secs(600);
/// Peers that have sent no messages to users are forgotten when they were away for so long.
pub(super) const STALE: Duration = Duration::from_secs(300);

/// Where the connection to a peer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Nothing wants one.
    Idle,
    /// The next attempt comes at this time.
    Waiting(Instant),
    /// An attempt runs, until this time.
    Connecting(LinkId, Instant),
    /// It is up.
    Up(LinkId),
}

/// Another node.
#[derive(Debug)]
pub(super) struct Peer {
    /// Our address is the smaller one: we connect.
    pub(super) connects: bool,
    pub(super) phase: Phase,
    /// An accepted connection that may replace the one that is up.
    pub(super) candidate: Option<LinkId>,
    pub(super) backoff: Backoff,
    pub(super) last_attempt: Option<Instant>,
    /// A connection has been up.
    pub(super) was_up: bool,
    /// When it was first known, or a connection that was up was last lost.
    pub(super) since: Instant,
    /// When a timer looks whether it is stale.
    pub(super) look_at: Option<Instant>,
    /// It has sent something valid.
    pub(super) is_proven: bool,
    /// It has sent a message to a user: if it were forgotten, one that it repeats would be new.
    pub(super) has_sent: bool,
    pub(super) outbox: Outbox,
    /// It has acknowledged a message of ours, and so takes our sequence numbers for what they are.
    pub(super) is_synced: bool,
    /// The number that is expected next from it.
    pub(super) next_rx: u64,
    /// Its ports that are congested; none before its first map.
    pub(super) map: Option<CongestionMap>,
    /// Tells its runs apart, if it ever said so.
    pub(super) generation: Option<u32>,
    /// It says so in its maps, hence before anything else on a connection.
    pub(super) generation_in_map: bool,
    /// Nothing but maps and probes is sent until its map has come, or until this time.
    pub(super) hold_until: Option<Instant>,
    /// Cost of what it has sent and users have not read.
    pub(super) held: usize,
    /// Answers to its pings that are not acknowledged.
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
            look_at: None,
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

    /// The connection that is up.
    pub(super) fn up(&self) -> Option<LinkId> {
        match self.phase {
            Phase::Up(link) => Some(link),
            _ => None,
        }
    }

    /// True if it takes no more at this port now.
    pub(super) fn is_congested(&self, port: u16) -> bool {
        self.map.as_ref().is_some_and(|map| map.get(port))
    }

    /// True if a connection is to be made although none is up.
    pub(super) fn wants_connection(&self) -> bool {
        // Only another map says that its ports have room again.
        let is_congested = self.map.as_ref().is_some_and(|map| map.ports().next().is_some());
        self.is_sent_to() || (self.connects && self.was_up) || is_congested
    }

    /// True if messages of users wait for it.
    fn is_sent_to(&self) -> bool {
        self.outbox.iter().any(|message| message.owner != Owner::Pong)
    }

    /// True if nothing is lost when it is forgotten: it has never sent anything valid, or is away,
    /// for long if it has sent messages to users.
    pub(super) fn may_go(&self, now: Instant) -> bool {
        let is_idle = !self.is_sent_to() && self.held == 0;
        let is_away = self.up().is_none() && (!self.has_sent || now.since(self.since) >= AWAY);
        is_idle && (!self.is_proven || is_away)
    }

    /// True if it was away for so long that it is forgotten, though nobody needs its place.
    pub(super) fn is_stale(&self, now: Instant) -> bool {
        let is_away = self.up().is_none() && now.since(self.since) >= STALE;
        is_away && !self.has_sent && self.may_go(now)
    }
}

/// True if the node at `own` connects to the one at `peer`, and false if it accepts: the smaller
/// address connects, IPv4 addresses compared as IPv4-mapped ones.
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
