//! A path's connection attempts: their schedule, and network changes on this host that may help.

use rtrs_core::time::{Duration, Instant};

use super::network::NetworkRetry;
use super::reconnect::Reconnect;
use crate::path::state::PathState;

/// Attempt in progress, or the last one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attempt<'a> {
    /// Name of the path.
    pub(super) path: &'a str,
    pub(super) epoch: u32,
    pub(super) started: Instant,
}

/// Schedule of a path's attempts.
#[derive(Debug)]
pub(super) struct Attempts {
    pub(super) reconnect: Reconnect,
    network: NetworkRetry,
    /// Time of the next attempt, or deadline of the current step.
    pub(super) until: Instant,
}

impl Attempts {
    /// Creates the schedule for a path with this number of addresses; the first attempt is due now.
    pub(super) fn new(
        now: Instant,
        addresses: usize,
        waits: (Duration, Duration),
        seed: u64,
    ) -> Self {
        let reconnect = Reconnect::new(addresses, waits, seed);
        Self { reconnect, network: NetworkRetry::default(), until: now }
    }

    /// Makes an attempt due now, as if it were the first.
    pub(super) fn begin_anew(&mut self, now: Instant) {
        self.until = now;
        self.reconnect.forget_failures();
    }

    /// Replaces the addresses with this number of new ones; an attempt with the first is due now.
    pub(super) fn use_addresses(&mut self, now: Instant, addresses: usize) {
        self.until = now;
        self.reconnect.set_addresses(addresses);
    }

    /// Counts an attempt that has ended. Returns whether the next one may start at once.
    pub(super) fn ended(&mut self) -> bool {
        self.reconnect.ended();
        self.network.take_at_once()
    }

    /// Schedules the next attempt.
    pub(super) fn schedule(&mut self, now: Instant, at_once: bool) {
        self.until = self.reconnect.next_attempt(now, at_once);
    }

    /// Records a network change that may help a path in this state.
    pub(super) fn network_changed(&mut self, now: Instant, state: PathState, what: &str) {
        if !matches!(state, PathState::Connected | PathState::Disconnected | PathState::Gone) {
            self.network.changed(now, what);
        }
    }

    /// Acts on a network change that is due, if any. Returns Some(true) if the current attempt must
    /// end so that a new one can start; requires that the device `was_open`.
    pub(super) fn poll_network(
        &mut self,
        now: Instant,
        state: PathState,
        attempt: Attempt<'_>,
        was_open: bool,
    ) -> Option<bool> {
        let what = self.network.take_due(now)?;
        let Attempt { path, epoch, started } = attempt;
        match state {
            PathState::Connected | PathState::Disconnected | PathState::Gone => {
                return Some(false);
            }
            PathState::Waiting if now < self.until => {
                tracing::info!(%path, "{what}: trying at once");
                self.until = now;
            }
            PathState::Closing => self.network.skip_wait(),
            PathState::Connecting | PathState::InfoExchange
                if was_open && self.network.gives_up(now, epoch, started, &what) =>
            {
                tracing::info!(%path, "{what}: restarting the attempt");
                self.reconnect.forget_failures();
                return Some(true);
            }
            _ => {}
        }
        self.reconnect.forget_failures();
        Some(false)
    }

    /// Time at which to act on a network change.
    pub(super) fn network_deadline(&self) -> Option<Instant> {
        self.network.deadline()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn at(s: u32) -> Instant {
        Instant::ZERO + S * s
    }

    #[test]
    fn a_network_change_ends_a_wait() {
        let mut attempts = Attempts::new(at(0), 1, (S * 10, S * 10), 0);
        let at_once = attempts.ended();
        attempts.schedule(at(1), at_once);
        assert!(attempts.until > at(2));
        let attempt = Attempt { path: "path", epoch: 1, started: at(0) };
        let mut poll = |now, state| attempts.poll_network(now, state, attempt, true);
        assert_eq!(poll(at(2), PathState::Waiting), None);
        attempts.network_changed(at(2), PathState::Waiting, "carrier");
        let poll = attempts.poll_network(at(2), PathState::Waiting, attempt, true);
        assert_eq!((poll, attempts.until), (Some(false), at(2)));
    }

    #[test]
    fn a_network_change_replaces_an_attempt_once_the_device_was_open() {
        for was_open in [false, true] {
            let mut attempts = Attempts::new(at(0), 1, (S * 10, S * 10), 0);
            let attempt = Attempt { path: "path", epoch: 1, started: at(0) };
            attempts.network_changed(at(5), PathState::Connecting, "carrier");
            let poll = attempts.poll_network(at(5), PathState::Connecting, attempt, was_open);
            assert_eq!(poll, Some(was_open));
            let at_once = attempts.ended();
            assert_eq!(at_once, was_open, "the replacement starts at once");
        }
    }

    #[test]
    fn a_connected_path_ignores_network_changes() {
        let mut attempts = Attempts::new(at(0), 1, (S, S), 0);
        attempts.network_changed(at(5), PathState::Connected, "carrier");
        assert_eq!(attempts.network_deadline(), None);
    }
}
