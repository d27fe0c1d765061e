//! Phase of the connection to a peer, and the time of the next attempt.

use rtrs_base::time::{Duration, Instant};

use crate::proto::backoff::Backoff;
use crate::proto::event::LinkId;

/// Minimum interval between two attempts requested by a peer with a larger address.
const KICK_INTERVAL: Duration = Duration::from_millis(10);

/// Number of consecutive connections, each lost soon after it was established and without a
/// message, after which the peer is considered unable to communicate.
const FRUITLESS_MAX: u32 = 8;

/// State of the connection to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proto) enum Phase {
    /// No connection is needed.
    Idle,
    /// The next attempt starts at this time.
    Waiting(Instant),
    /// An attempt is in progress and times out at this time.
    Connecting(LinkId, Instant),
    /// The connection is up.
    Up(LinkId),
}

/// Role that a lost link had in the connection to its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proto) enum Lost {
    /// An accepted connection that was to replace the current connection.
    Candidate,
    /// The current connection, or an attempt to establish it.
    Current {
        was_up: bool,
        /// The accepted connection that takes over.
        successor: Option<LinkId>,
        /// Many connections in a row were lost without a message.
        trouble: Option<Trouble>,
    },
}

/// Likely reason why each connection is lost without carrying a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::proto) enum Trouble {
    #[error(
        "the peer closes each connection before it sends a message; check that an RDS node listens \
         there, not a proxy or another service"
    )]
    Refused,
    #[error(
        "the peer closes each connection and opens its own, as if it had the smaller address; if \
         NAT is in between, it must keep the order of the two addresses"
    )]
    BothSmaller,
    #[error(
        "the peer only requests connections, as if it had the larger address; if NAT is in \
         between, it must keep the order of the two addresses"
    )]
    BothLarger,
}

/// Connection to a peer, across attempts.
#[derive(Debug)]
pub(in crate::proto) struct Connection {
    connects: bool,
    phase: Phase,
    candidate: Option<LinkId>,
    backoff: Backoff,
    last_attempt: Option<Instant>,
    /// A connection has been up before, or the peer has requested a connection.
    was_up: bool,
    /// Time when the peer first became known, or when the last established connection was lost.
    since: Instant,
    /// Time when the last connection was established.
    up_since: Instant,
    /// The last established connection has carried a message.
    has_carried: bool,
    /// Number of consecutive connections that were lost soon after being established, without a
    /// message.
    fruitless: u32,
    /// The peer has requested a connection since the last message.
    was_kicked: bool,
}

impl Connection {
    pub(super) fn new(connects: bool, backoff: Backoff, now: Instant) -> Self {
        Self {
            connects,
            phase: Phase::Idle,
            candidate: None,
            backoff,
            last_attempt: None,
            was_up: false,
            since: now,
            up_since: now,
            has_carried: false,
            fruitless: 0,
            was_kicked: false,
        }
    }

    /// Whether this node's address is smaller than the peer's, so that this node connects.
    pub(in crate::proto) fn connects(&self) -> bool {
        self.connects
    }

    pub(in crate::proto) fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns the connection that is up.
    pub(in crate::proto) fn up(&self) -> Option<LinkId> {
        match self.phase {
            Phase::Up(link) => Some(link),
            _ => None,
        }
    }

    /// Returns an accepted connection that may replace the current connection.
    pub(in crate::proto) fn candidate(&self) -> Option<LinkId> {
        self.candidate
    }

    pub(in crate::proto) fn set_candidate(&mut self, link: LinkId) {
        self.candidate = Some(link);
    }

    /// Whether the connection is to be restored when it is lost. After many fruitless connections,
    /// it is restored only if the peer asks for it, which a proxy in the peer's place would not do.
    pub(super) fn is_restored(&self) -> bool {
        self.connects && self.was_up && (!self.is_in_vain() || self.was_kicked)
    }

    fn is_in_vain(&self) -> bool {
        self.fruitless >= FRUITLESS_MAX
    }

    /// Records that a message has passed in either direction.
    pub(in crate::proto) fn carried(&mut self) {
        self.has_carried = true;
        self.was_kicked = false;
        self.fruitless = 0;
        self.backoff.reset();
    }

    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// Records an attempt to connect, which times out at `until`.
    pub(in crate::proto) fn attempted(&mut self, now: Instant, link: LinkId, until: Instant) {
        self.phase = Phase::Connecting(link, until);
        self.last_attempt = Some(now);
    }

    pub(in crate::proto) fn wait_until(&mut self, at: Instant) {
        self.phase = Phase::Waiting(at);
    }

    pub(in crate::proto) fn rest(&mut self) {
        self.phase = Phase::Idle;
    }

    /// Returns the delay before an attempt made for a new message.
    pub(in crate::proto) fn delay(&mut self) -> Duration {
        self.backoff.wait()
    }

    /// Returns the delay before an attempt after a failure or loss. A peer with a smaller address
    /// reconnects on its own, if it can.
    pub(in crate::proto) fn delay_after_loss(&mut self) -> Duration {
        if self.connects { self.backoff.wait() } else { self.backoff.wait_later() }
    }

    /// Returns the delay before an attempt that the peer has requested, or `None` to keep the
    /// scheduled attempt: requests from a peer that cannot communicate must not undo the backoff.
    pub(in crate::proto) fn delay_after_kick(&mut self, now: Instant) -> Option<Duration> {
        let earliest = self.last_attempt.map_or(now, |last| last + KICK_INTERVAL);
        (self.was_up, self.was_kicked) = (true, true);
        match self.phase {
            _ if !self.is_in_vain() => Some(earliest.since(now)),
            Phase::Waiting(_) => None,
            _ => Some(self.backoff.wait().max(earliest.since(now))),
        }
    }

    /// Records an established connection. Returns whether an earlier connection had been
    /// established.
    pub(in crate::proto) fn established(&mut self, now: Instant, link: LinkId) -> bool {
        self.phase = Phase::Up(link);
        self.candidate = self.candidate.filter(|candidate| *candidate != link);
        (self.up_since, self.has_carried) = (now, false);
        std::mem::replace(&mut self.was_up, true)
    }

    /// Records that a link has been lost.
    pub(in crate::proto) fn lost(&mut self, now: Instant, link: LinkId) -> Lost {
        if self.candidate == Some(link) {
            self.candidate = None;
            return Lost::Candidate;
        }
        let was_up = self.phase == Phase::Up(link);
        if was_up {
            self.since = now;
            if now.since(self.up_since) >= self.backoff.longest() {
                self.fruitless = 0;
                self.backoff.reset();
            } else if !self.has_carried {
                self.fruitless = self.fruitless.saturating_add(1);
            }
        }
        let trouble = (was_up && self.is_in_vain()).then_some(match self.connects {
            true if self.was_kicked => Trouble::BothSmaller,
            true => Trouble::Refused,
            false => Trouble::BothLarger,
        });
        Lost::Current { was_up, successor: self.candidate.take(), trouble }
    }

    /// Returns the links of the connection: the current connection and the candidate.
    pub(in crate::proto) fn links(&self) -> impl Iterator<Item = LinkId> {
        let current = match self.phase {
            Phase::Up(link) | Phase::Connecting(link, _) => Some(link),
            Phase::Idle | Phase::Waiting(_) => None,
        };
        current.into_iter().chain(self.candidate)
    }
}
