//! The network of this host changed for the better: paths that are down are tried at once.
//!
//! A link has its carrier again, an address or a route was added; whether that is of use to a path
//! only an attempt shows. So every path that waits is tried, and its waits begin anew, short. An
//! attempt that is under way is given up for another one: what it has sent may be lost, and TCP or
//! RDMA CM send it again only after seconds. The news may come in any number, from a link that
//! flaps or from links that have nothing to do with the server, so all of this has bounds:
//!
//! - What they cause on a path is `SPACING_MIN` apart, twice as much each time up to
//!   `SPACING_MAX`, until there was nothing for `QUIET`. News that come too early count later.
//! - An attempt has `ATTEMPT_MIN` to itself, and the one in place of an attempt that was given up
//!   has all its time: a server that is slow to answer is connected all the same.
//! - Before the device was ever open no attempt is given up: a failed one may end the attach.
//!
//! Paths over RDMA take no part in it. The news come before a device is ready to send what an
//! attempt needs, and an attempt given up half-way is answered late: on rdma_rxe of Linux 6.1 what
//! cannot be sent then leaves the management queue pair deaf for good, and the path never came back
//! in the lab (faults-links). They are tried after their waits.

use rtrs_core::fabric::Fabric;
use rtrs_core::time::{Duration, Instant};

use super::control::SessionControl;
use crate::path::state::PathState;

/// Least time between two things that news cause on a path.
pub(super) const SPACING_MIN: Duration = Duration::from_millis(200);
/// The same when there is no end of news. With it a path is tried about twice a second at most.
pub(super) const SPACING_MAX: Duration = Duration::from_millis(3200);
/// Without news for so long, the least time counts again.
const QUIET: Duration = Duration::from_secs(10);
/// How long an attempt goes on whatever is heard: most are over by then.
pub(super) const ATTEMPT_MIN: Duration = Duration::from_millis(300);

/// What news of the network cause on a path.
#[derive(Debug)]
pub(super) struct Tries {
    /// When to act on the news, and what they were.
    due: Option<(Instant, String)>,
    /// When news last counted.
    last: Option<Instant>,
    /// From then to the next time.
    spacing: Duration,
    /// The epoch of the attempt that was given up last.
    given_up: Option<u32>,
    /// The path does not wait before its next attempt.
    at_once: bool,
}

impl Default for Tries {
    fn default() -> Self {
        Self { due: None, last: None, spacing: SPACING_MIN, given_up: None, at_once: false }
    }
}

impl Tries {
    /// News came: they count now, or as soon as they may.
    fn hear(&mut self, now: Instant, what: &str) {
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

    /// True, once, when the next attempt comes without a wait.
    pub(super) fn take_at_once(&mut self) -> bool {
        std::mem::take(&mut self.at_once)
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.due.as_ref().map(|(at, _)| *at)
    }
}

impl SessionControl {
    /// Something in this host's network is up or was added; `what` says what, for the log.
    pub(crate) fn on_network_change(
        &mut self,
        now: Instant,
        what: &str,
        fabrics: &mut [Box<dyn Fabric>],
    ) {
        if self.detaching || self.failure.is_some() {
            return;
        }
        for path in &mut self.paths {
            if fabrics[path.target.provider].scheme() == "rdma" {
                continue;
            }
            match path.state {
                PathState::Connected | PathState::Disconnected | PathState::Gone => {}
                PathState::Waiting
                | PathState::Connecting
                | PathState::Introducing
                | PathState::Opening
                | PathState::Closing => path.tries.hear(now, what),
            }
        }
        self.poll_news(now, fabrics);
    }

    /// Acts on news whose time has come. True when there were any.
    pub(super) fn poll_news(&mut self, now: Instant, fabrics: &mut [Box<dyn Fabric>]) -> bool {
        let mut any = false;
        for index in 0..self.paths.len() {
            let tries = &mut self.paths[index].tries;
            if let Some((_, what)) = tries.due.take_if(|(at, _)| now >= *at) {
                any = true;
                self.act_on_news(now, index, what, fabrics);
            }
        }
        any
    }

    fn act_on_news(
        &mut self,
        now: Instant,
        index: usize,
        what: String,
        fabrics: &mut [Box<dyn Fabric>],
    ) {
        let path = &mut self.paths[index];
        let name = &path.target.name;
        match path.state {
            PathState::Connected | PathState::Disconnected | PathState::Gone => return,
            PathState::Waiting => {
                if now < path.until {
                    tracing::info!(path = %name, "{what}: trying at once");
                    path.until = now;
                }
            }
            PathState::Closing => path.tries.at_once = true,
            PathState::Connecting | PathState::Introducing if self.opened_once => {
                let old_enough = path.started + ATTEMPT_MIN;
                if path.tries.given_up.is_some_and(|before| before + 1 == path.epoch) {
                    // It has its time. Should it fail, its waits are short from here on.
                } else if now < old_enough {
                    path.tries.due = Some((old_enough, what));
                } else {
                    tracing::info!(path = %name, "{what}: the attempt begins anew");
                    path.tries.given_up = Some(path.epoch);
                    path.tries.at_once = true;
                    path.reconnect.forget_failures();
                    return self.take_down(now, index, None, false, fabrics);
                }
            }
            PathState::Connecting | PathState::Introducing | PathState::Opening => {}
        }
        self.paths[index].reconnect.forget_failures();
    }
}
