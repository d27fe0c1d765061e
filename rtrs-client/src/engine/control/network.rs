//! The network of this host changed for the better: paths that are down are tried at once.
//!
//! A link has its carrier again, an address or a route was added; whether that is of use to a path
//! only an attempt shows. So every path that waits is tried, and its waits begin anew, short. An
//! attempt that is under way is given up for another one: what it has sent may be lost, and TCP or
//! RDMA CM send it again only after seconds. Changes may come in any number, from a link that
//! flaps or from links that have nothing to do with the server, so all of this has bounds:
//!
//! - What they cause on a path is `SPACING_MIN` apart, twice as much each time up to
//!   `SPACING_MAX`, until there was none for `QUIET`. A change that comes too early counts later.
//! - An attempt has `ATTEMPT_MIN` to itself, and the one in place of an attempt that was given up
//!   has all its time: a server that is slow to answer is connected all the same.
//! - Before the device was ever open no attempt is given up: a failed one may end the attach.
//!
//! Paths over RDMA take no part in it. Changes are reported before a device is ready to send what
//! an attempt needs, and an attempt given up half-way is answered late: on rdma_rxe of Linux 6.1
//! what cannot be sent then leaves the management queue pair deaf for good, and the path never came
//! back in the lab (faults-links). They are tried after their waits.

use rtrs_core::time::{Duration, Instant};

/// Least time between two things that changes cause on a path.
pub(in crate::engine) const SPACING_MIN: Duration = Duration::from_millis(200);
/// The same when there is no end of changes. With it a path is tried about twice a second at most.
pub(in crate::engine) const SPACING_MAX: Duration = Duration::from_millis(3200);
/// Without a change for so long, the least time counts again.
const QUIET: Duration = Duration::from_secs(10);
/// How long an attempt goes on whatever changes: most are over by then.
pub(in crate::engine) const ATTEMPT_MIN: Duration = Duration::from_millis(300);

/// What network changes cause on a path.
#[derive(Debug)]
pub(super) struct NetworkRetry {
    /// When to act on a change, and what it was.
    due: Option<(Instant, String)>,
    /// When a change last counted.
    last: Option<Instant>,
    /// From then to the next time.
    spacing: Duration,
    /// The epoch of the attempt that was given up last.
    given_up: Option<u32>,
    /// The path does not wait before its next attempt.
    at_once: bool,
}

impl Default for NetworkRetry {
    fn default() -> Self {
        Self { due: None, last: None, spacing: SPACING_MIN, given_up: None, at_once: false }
    }
}

impl NetworkRetry {
    /// The network changed: that counts now, or as soon as it may.
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

    /// The change to act on now.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<String> {
        self.due.take_if(|(at, _)| now >= *at).map(|(_, what)| what)
    }

    /// True when the attempt of this epoch, which began at `started`, is given up for the change.
    pub(super) fn gives_up(
        &mut self,
        now: Instant,
        (epoch, started): (u32, Instant),
        what: &str,
    ) -> bool {
        let old_enough = started + ATTEMPT_MIN;
        if self.given_up.is_some_and(|before| before + 1 == epoch) {
            // It has its time. Should it fail, its waits are short from here on.
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

    /// The next attempt comes without a wait.
    pub(super) fn skip_wait(&mut self) {
        self.at_once = true;
    }

    /// True, once, when the next attempt comes without a wait.
    pub(super) fn take_at_once(&mut self) -> bool {
        std::mem::take(&mut self.at_once)
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.due.as_ref().map(|(at, _)| *at)
    }
}
