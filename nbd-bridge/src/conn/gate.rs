//! Check for disconnected clients before the first request of a connection.

use crate::group::{Due, Seat};

/// Whether requests of a connection may be handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gate {
    /// No request has arrived yet.
    Shut,
    /// Waiting until all shards have checked for disconnected clients.
    Asked(u64),
    Open,
}

impl Gate {
    /// Returns true when requests may be handled: all shards have checked for disconnected clients
    /// since the first request arrived.
    pub(super) fn passes(&mut self, seat: &Seat) -> bool {
        match *self {
            Self::Open => return true,
            Self::Shut => *self = Self::Asked(seat.group.ask(seat.shard)),
            Self::Asked(round) if seat.group.is_over(round) => *self = Self::Open,
            Self::Asked(_) => {}
        }
        self.is_open()
    }

    pub(super) fn is_open(self) -> bool {
        self == Self::Open
    }

    /// Whether the first request waits for other shards.
    pub(super) fn is_waiting(self) -> bool {
        matches!(self, Self::Asked(_))
    }

    /// Whether this connection is the only one that waits for the round.
    pub(super) fn is_only_one_of(self, due: Due) -> bool {
        due.only && self == Self::Asked(due.round)
    }
}
