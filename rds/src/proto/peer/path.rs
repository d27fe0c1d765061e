//! One of the paths to a peer: its connection, and its sequence numbers in both directions.

use rtrs_base::mutated;
use rtrs_base::time::Instant;

use super::connection::Connection;
use super::outbound::Outbound;
use crate::proto::backoff::Backoff;
use crate::wire::Header;

/// A path to a peer, across connections.
#[derive(Debug)]
pub(in crate::proto) struct Path {
    pub(in crate::proto) connection: Connection,
    pub(in crate::proto) outbound: Outbound,
    /// Sequence number expected next from the peer.
    next_rx: u64,
}

impl Path {
    pub(super) fn new(connects: bool, backoff: Backoff, now: Instant) -> Self {
        let connection = Connection::new(connects, backoff, now);
        Self { connection, outbound: Outbound::default(), next_rx: 0 }
    }

    pub(super) fn next_rx(&self) -> u64 {
        self.next_rx
    }

    pub(super) fn is_old(&self, header: &Header) -> bool {
        let is_old = header.is_retransmitted() && header.sequence < self.next_rx;
        is_old && !mutated!(RdsDuplicateAccepted)
    }

    /// Checks a message's sequence number. Returns false if the message has arrived before.
    pub(in crate::proto) fn accept(&mut self, header: &Header) -> bool {
        let is_new = !self.is_old(header);
        if is_new {
            self.next_rx = header.sequence.wrapping_add(1);
        }
        is_new
    }

    /// Restarts the expected sequence numbers, for a new run of the peer. The first probe of a run
    /// restarts them too: it is never a repeat, and precedes everything else.
    pub(super) fn restart_numbers(&mut self) {
        self.next_rx = 0;
    }
}
