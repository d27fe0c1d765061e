//! Schedule of reconnect attempts.
//!
//! A path may have several addresses, and each attempt takes the next. The wait comes after a round
//! of all addresses, and grows from round to round (`Backoff`) until the path carries IO. The waits
//! of a path that connects and soon ends, again and again, grow too, but only while another path is
//! connected: each of its ends disturbs IO that the other path could carry.

use rtrs_core::proto::Backoff;
use rtrs_core::time::{Duration, Instant};

/// Attempts of a path, and the waits between them.
#[derive(Debug)]
pub(super) struct Reconnect {
    /// Number of addresses in a round.
    addresses: u64,
    backoff: Backoff,
    /// Maximum wait. A path that stays connected for longer has not failed at once.
    wait_max: Duration,
    /// Time of the last connect, until the path ends.
    connected_at: Option<Instant>,
    /// Whether the path ended soon after its last connect while another path was connected, so that
    /// its wait may have grown.
    flaps: bool,
    /// Failed attempts and lost connections since the path was added.
    failed: u64,
    /// Failures since the last success, counted through rounds of all addresses.
    failed_in_row: u64,
    /// Number of successful connects.
    connects: u64,
}

impl Reconnect {
    /// Creates the schedule of an untried path with this number of addresses and these bounds for
    /// waits.
    pub(super) fn new(addresses: usize, waits: (Duration, Duration), seed: u64) -> Self {
        Self {
            addresses: addresses.max(1) as u64,
            backoff: Backoff::new(waits.0, waits.1, seed),
            wait_max: waits.1,
            connected_at: None,
            flaps: false,
            failed: 0,
            failed_in_row: 0,
            connects: 0,
        }
    }

    /// Sets other bounds, from the next wait on.
    pub(super) fn set_waits(&mut self, min: Duration, max: Duration) {
        self.backoff.set_bounds(min, max);
        self.wait_max = max;
    }

    /// Returns the time of the next attempt after an end: now if `at_once`, otherwise in turn.
    pub(super) fn next_attempt(&mut self, now: Instant, at_once: bool) -> Instant {
        self.failed_in_row += 1;
        let more = !self.failed_in_row.is_multiple_of(self.addresses);
        if more || at_once { now } else { now + self.backoff.wait() }
    }

    /// Records that the path becomes unusable. `is_redundant` is whether another path is connected.
    pub(super) fn lost(&mut self, now: Instant, is_redundant: bool) {
        let Some(at) = self.connected_at.take() else { return };
        self.flaps = is_redundant && now.since(at) < self.wait_max;
        if !self.flaps {
            self.backoff.reset();
        }
    }

    /// Counts an end, whether or not the path is tried again.
    pub(super) fn ended(&mut self) {
        self.failed += 1;
    }

    /// Counts a successful connect. When the path ends, the next attempt comes after a wait.
    pub(super) fn connected(&mut self, now: Instant) {
        self.connects += 1;
        self.connected_at = Some(now);
        self.failed_in_row = self.addresses - 1;
    }

    /// Shortens waits to those after a first failure.
    pub(super) fn forget_failures(&mut self) {
        self.failed_in_row = 0;
        self.flaps = false;
        self.backoff.reset();
    }

    /// Shortens the next wait of a path that could connect, now that no other path is connected.
    pub(super) fn forget_flaps(&mut self) {
        if std::mem::take(&mut self.flaps) {
            self.backoff.reset();
        }
    }

    /// Returns a wait to replace the current one of a path that could connect, now that no other
    /// path is connected. None if the current one has not grown.
    pub(super) fn shortened_wait(&mut self) -> Option<Duration> {
        let flaps = self.flaps;
        self.forget_flaps();
        flaps.then(|| self.backoff.wait())
    }

    /// Whether each address was tried at least once.
    pub(super) fn has_tried_all(&self) -> bool {
        self.failed >= self.addresses
    }

    /// Failed attempts and lost connections since the path was added.
    pub(super) fn failed(&self) -> u64 {
        self.failed
    }

    /// Number of reconnects.
    pub(super) fn reconnects(&self) -> u64 {
        self.connects.saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIN: Duration = Duration::from_millis(100);
    const MAX: Duration = Duration::from_millis(800);

    /// Connects a path for this time. Returns the wait before its next attempt.
    fn wait_after(path: &mut Reconnect, time: Duration, is_redundant: bool) -> Duration {
        let begin = Instant::ZERO + MAX;
        path.connected(begin);
        path.lost(begin + time, is_redundant);
        path.next_attempt(begin, false).since(begin)
    }

    #[test]
    fn waits_of_a_flapping_path_grow_only_beside_another_path() {
        for addresses in [1, 3] {
            let mut path = Reconnect::new(addresses, (MIN, MAX), 7);
            let waits: Vec<_> = (0..6).map(|_| wait_after(&mut path, MIN, true)).collect();
            assert!(waits[0] <= MIN && waits[5] >= MAX / 2, "{waits:?}");
            assert!(path.shortened_wait().is_some_and(|wait| wait <= MIN));
            assert_eq!(path.shortened_wait(), None);
            let waits: Vec<_> = (0..6).map(|_| wait_after(&mut path, MIN, true)).collect();
            assert!(waits[5] >= MAX / 2, "{waits:?}");
            assert!(wait_after(&mut path, MAX, true) <= MIN, "it was of use");
            assert_eq!(path.shortened_wait(), None);
            for _ in 0..6 {
                assert!(wait_after(&mut path, Duration::ZERO, false) <= MIN, "IO waits for it");
            }
        }
    }
}
