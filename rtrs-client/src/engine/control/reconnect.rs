//! When a path that ended is tried again.
//!
//! A path may have several addresses, and each attempt takes the next. The wait comes after a round
//! of all of them, and grows from round to round (`Backoff`) until the path carries IO.

use rtrs_core::proto::Backoff;
use rtrs_core::time::{Duration, Instant};

/// Attempts of a path, and the waits between them.
#[derive(Debug)]
pub(super) struct Reconnect {
    /// Addresses in a round.
    addresses: u64,
    backoff: Backoff,
    /// Attempts that failed and ends of what was connected, since the path was added.
    failed: u64,
    /// The same, counted through rounds of all addresses; begins anew with each success.
    failed_in_row: u64,
    /// Times it was connected.
    connects: u64,
}

impl Reconnect {
    /// A path with so many addresses that was never tried; waits are within these bounds.
    pub(super) fn new(addresses: usize, waits: (Duration, Duration), seed: u64) -> Self {
        Self {
            addresses: addresses.max(1) as u64,
            backoff: Backoff::new(waits.0, waits.1, seed),
            failed: 0,
            failed_in_row: 0,
            connects: 0,
        }
    }

    /// Other bounds for the waits, from the next one on.
    pub(super) fn set_waits(&mut self, min: Duration, max: Duration) {
        self.backoff.set_bounds(min, max);
    }

    /// The path has ended and is to be tried again, `at_once` or in its turn. Returns when.
    pub(super) fn next_attempt(&mut self, now: Instant, at_once: bool) -> Instant {
        self.failed_in_row += 1;
        let more = !self.failed_in_row.is_multiple_of(self.addresses);
        if more || at_once { now } else { now + self.backoff.wait() }
    }

    /// The path has ended, whether or not it is tried again.
    pub(super) fn ended(&mut self) {
        self.failed += 1;
    }

    /// The path carries IO. When it ends, the next attempt comes after a wait.
    pub(super) fn connected(&mut self) {
        self.connects += 1;
        self.backoff.reset();
        self.failed_in_row = self.addresses - 1;
    }

    /// Waits are as short as after the first failure.
    pub(super) fn forget_failures(&mut self) {
        self.failed_in_row = 0;
        self.backoff.reset();
    }

    /// True when each address was tried at least once.
    pub(super) fn has_tried_all(&self) -> bool {
        self.failed >= self.addresses
    }

    /// Attempts that failed and ends of what was connected, since the path was added.
    pub(super) fn failed(&self) -> u64 {
        self.failed
    }

    /// Times it was connected again.
    pub(super) fn reconnects(&self) -> u64 {
        self.connects.saturating_sub(1)
    }
}
