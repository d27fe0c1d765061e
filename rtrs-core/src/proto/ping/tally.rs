//! Counts and times of a ping client.

use crate::time::{Duration, Instant};

/// Counts of a client's operations, and the time they took.
#[derive(Debug, Default)]
pub(super) struct Tally {
    begun: u64,
    answered: u64,
    peer_done: u64,
    /// Times of the first operation and the last completion, used to compute the bandwidth.
    flight: Option<(Instant, Instant)>,
}

impl Tally {
    /// Returns the number of operations begun.
    pub(super) const fn begun(&self) -> u64 {
        self.begun
    }

    /// Returns the number of operations answered.
    pub(super) const fn answered(&self) -> u64 {
        self.answered
    }

    /// Returns the number of the server's own operations.
    pub(super) const fn peer_done(&self) -> u64 {
        self.peer_done
    }

    /// Returns the time from the first operation to the last known completion.
    pub(super) fn flight_time(&self) -> Duration {
        self.flight.map_or(Duration::ZERO, |(first, last)| last - first)
    }

    /// Counts the start of an operation.
    pub(super) fn begin(&mut self) {
        self.begun += 1;
    }

    /// Counts an answered operation that is not a round.
    pub(super) fn answer(&mut self, now: Instant) {
        self.answered += 1;
        self.extend(now);
    }

    /// Counts the end of a round.
    pub(super) fn end_round(&mut self, began: Instant, now: Instant) {
        self.answered += 1;
        self.flight = Some((self.flight.map_or(began, |(first, _)| first), now));
    }

    /// Starts the clock.
    pub(super) fn start(&mut self, now: Instant) {
        self.flight = Some((now, now));
    }

    /// Stores the server's own count and stops the clock.
    pub(super) fn end(&mut self, peer_done: u64, now: Instant) {
        self.peer_done = peer_done;
        self.extend(now);
    }

    fn extend(&mut self, now: Instant) {
        self.flight = self.flight.map(|(first, _)| (first, now));
    }
}
