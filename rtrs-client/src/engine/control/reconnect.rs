//! Schedule of reconnect attempts.
//!
//! A path may have several addresses, and each attempt uses the next one. After each round through
//! all the addresses there is a wait, which grows (`Backoff`) until the path carries IO.

use rtrs_core::proto::Backoff;
use rtrs_core::time::{Duration, Instant};

/// Attempts of a path, and the waits between them.
#[derive(Debug)]
pub(super) struct Reconnect {
    /// Number of addresses in a round.
    addresses: u64,
    backoff: Backoff,
    /// Number of failed attempts and lost connections since the path was added.
    failed: u64,
    /// Number of failures since the last success, counted across rounds.
    failed_in_row: u64,
    /// Number of successful connects.
    connects: u64,
}

impl Reconnect {
    /// Creates the schedule of an untried path with this number of addresses and these bounds on
    /// waits.
    pub(super) fn new(addresses: usize, waits: (Duration, Duration), seed: u64) -> Self {
        Self {
            addresses: addresses.max(1) as u64,
            backoff: Backoff::new(waits.0, waits.1, seed),
            failed: 0,
            failed_in_row: 0,
            connects: 0,
        }
    }

    /// Sets new bounds, which apply from the next wait onwards.
    pub(super) fn set_waits(&mut self, min: Duration, max: Duration) {
        self.backoff.set_bounds(min, max);
    }

    /// Starts a round with different addresses, without changing later waits.
    pub(super) fn set_addresses(&mut self, addresses: usize) {
        self.addresses = addresses.max(1) as u64;
        self.failed_in_row = 0;
    }

    /// Whether the last attempt ended a round through all the addresses.
    pub(super) fn is_round_over(&self) -> bool {
        self.failed_in_row.is_multiple_of(self.addresses)
    }

    /// Returns the time of the next attempt after a failure: now if `at_once`, otherwise according
    /// to the schedule.
    pub(super) fn next_attempt(&mut self, now: Instant, at_once: bool) -> Instant {
        self.failed_in_row += 1;
        let more = !self.failed_in_row.is_multiple_of(self.addresses);
        if more || at_once { now } else { now + self.backoff.wait() }
    }

    /// Counts a failed attempt or lost connection, whether or not the path is retried.
    pub(super) fn ended(&mut self) {
        self.failed += 1;
    }

    /// Counts a successful connect. After the path ends, the next attempt follows a wait.
    pub(super) fn connected(&mut self) {
        self.connects += 1;
        self.backoff.reset();
        self.failed_in_row = self.addresses - 1;
    }

    /// Resets waits to the length used after a first failure.
    pub(super) fn forget_failures(&mut self) {
        self.failed_in_row = 0;
        self.backoff.reset();
    }

    /// Whether each address has been tried at least once.
    pub(super) fn has_tried_all(&self) -> bool {
        self.failed >= self.addresses
    }

    /// Number of failed attempts and lost connections since the path was added.
    pub(super) fn failed(&self) -> u64 {
        self.failed
    }

    /// Number of reconnects.
    pub(super) fn reconnects(&self) -> u64 {
        self.connects.saturating_sub(1)
    }
}
