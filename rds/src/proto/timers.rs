//! Timers of a node.

use std::collections::BTreeSet;
use std::net::IpAddr;

use rtrs_base::time::Instant;

use super::event::LinkId;

/// Purpose of a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    Peer(IpAddr),
    Link(LinkId),
    /// Messages of closed sockets must be abandoned.
    Closed,
}

/// Timers, by time. Timers are never canceled: a timer that has lost its purpose does nothing.
#[derive(Debug, Default)]
pub(super) struct Timers {
    timers: BTreeSet<(Instant, Timer)>,
}

impl Timers {
    pub(super) fn set(&mut self, at: Instant, timer: Timer) {
        self.timers.insert((at, timer));
    }

    /// Returns the time of the first timer.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Removes the first timer if it is due.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<Timer> {
        let (at, _) = self.timers.first()?;
        if *at > now {
            return None;
        }
        self.timers.pop_first().map(|(_, timer)| timer)
    }
}
