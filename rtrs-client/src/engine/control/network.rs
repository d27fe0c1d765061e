//! Reaction to network changes on this host: paths that are down are tried immediately.
//!
//! Such a change is a link regaining its carrier, or a new address or route. The only way to find
//! out whether one helps a path is to try. So every waiting path is tried, and its backoff starts
//! over. An attempt in progress is replaced by a new one: its packets may be lost, and TCP or RDMA
//! CM retransmit them only after seconds. Any number of changes may arrive, from a link that flaps
//! or from links that have nothing to do with the server, so the reaction is limited:
//!
//! - The spacing of a path's reactions starts at `SPACING_MIN` and doubles up to `SPACING_MAX`,
//!   until there has been no change for `QUIET`. A change that comes too early is handled later.
//! - An attempt runs for at least `ATTEMPT_MIN`, and the replacement of an abandoned attempt is
//!   never abandoned itself: a server that is slow to answer is still reached.
//! - No attempt is abandoned until the device has been open: a failed attempt may end the attach.
//!
//! Paths over RDMA are excluded. Changes are reported before a device is ready to send what an
//! attempt needs, and an abandoned attempt is answered late: with rdma_rxe in Linux 6.1, packets
//! that cannot be sent then stop the management queue pair from ever receiving again, and in the
//! lab (faults-links) the path never recovered. RDMA paths are tried after their regular waits.

use rtrs_core::time::{Duration, Instant};

/// Minimum time between two of a path's reactions to changes.
pub(in crate::engine) const SPACING_MIN: Duration = Duration::from_millis(200);
/// Upper limit of that time under continuous changes: at most about two attempts per second.
pub(in crate::engine) const SPACING_MAX: Duration = Duration::from_millis(3200);
/// Time without a change after which the spacing starts over at its minimum.
const QUIET: Duration = Duration::from_secs(10);
/// Minimum duration of an attempt regardless of changes; most attempts finish within it.
pub(in crate::engine) const ATTEMPT_MIN: Duration = Duration::from_millis(300);

/// Reactions of a path to network changes.
#[derive(Debug)]
pub(super) struct NetworkRetry {
    /// Time of the pending reaction, and a description of the change that caused it.
    due: Option<(Instant, String)>,
    /// Time of the last reaction, including a pending one.
    last: Option<Instant>,
    /// Minimum time from that reaction to the next.
    spacing: Duration,
    /// Epoch of the most recently abandoned attempt.
    given_up: Option<u32>,
    /// Whether the next attempt starts without waiting.
    at_once: bool,
}

impl Default for NetworkRetry {
    fn default() -> Self {
        Self { due: None, last: None, spacing: SPACING_MIN, given_up: None, at_once: false }
    }
}

impl NetworkRetry {
    /// Records a network change, to be handled now or as soon as the spacing permits.
    pub(super) fn changed(&mut self, now: Instant, what: &str) {
        if self.due.is_some() {
            return;
        }
        let at = match self.last {
            Some(last) if now.since(last) < QUIET => {
                let at = now.max(last + self.spacing);
                self.spacing = (self.spacing * 2).min(SPACING_MAX);
                at
            }
            _ => {
                self.spacing = SPACING_MIN;
                now
            }
        };
        self.last = Some(at);
        self.due = Some((at, what.to_owned()));
    }

    /// Takes the change that is due now.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<String> {
        self.due.take_if(|(at, _)| now >= *at).map(|(_, what)| what)
    }

    /// Whether to abandon the attempt of this epoch, which began at `started`, because of the
    /// change.
    pub(super) fn gives_up(
        &mut self,
        now: Instant,
        epoch: u32,
        started: Instant,
        what: &str,
    ) -> bool {
        let old_enough = started + ATTEMPT_MIN;
        if self.given_up.is_some_and(|before| before + 1 == epoch) {
            // This attempt runs to completion. If it fails, later waits are short.
            return false;
        }
        if now < old_enough {
            self.due = Some((old_enough, what.to_owned()));
            return false;
        }
        self.given_up = Some(epoch);
        self.at_once = true;
        true
    }

    pub(super) fn skip_wait(&mut self) {
        self.at_once = true;
    }

    /// Takes the flag that skips the next wait.
    pub(super) fn take_at_once(&mut self) -> bool {
        std::mem::take(&mut self.at_once)
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.due.as_ref().map(|(at, _)| *at)
    }
}
