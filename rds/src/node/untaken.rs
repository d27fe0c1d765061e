//! Users that have not taken all of their messages.

use std::collections::BTreeSet;

use rtrs_base::time::{Duration, Instant};

use super::client::ClientId;

/// Interval at which the node checks whether the connections of congested sockets are empty. Users
/// report the messages that they take, unless they are killed before counting them.
const CHECK: Duration = Duration::from_secs(1);

/// Users that have not taken everything that was passed on to them.
#[derive(Debug, Default)]
pub(super) struct Untaken {
    pub(super) clients: BTreeSet<ClientId>,
    /// Users whose ports are congested; the next check finds out what they have taken.
    pub(super) congested: BTreeSet<ClientId>,
    check_at: Option<Instant>,
}

impl Untaken {
    pub(super) fn add(&mut self, id: ClientId) {
        self.clients.insert(id);
    }

    pub(super) fn remove(&mut self, id: ClientId) {
        self.clients.remove(&id);
        self.congested.remove(&id);
    }

    /// Plans the next check of congested ports.
    pub(super) fn plan_check(&mut self, now: Instant) {
        if self.check_at.is_none() && !self.congested.is_empty() {
            self.check_at = Some(now + CHECK);
        }
    }

    /// Returns the users to check, if the check is due.
    pub(super) fn take_due(&mut self, now: Instant) -> BTreeSet<ClientId> {
        if self.check_at.is_none_or(|at| at > now) {
            return BTreeSet::new();
        }
        self.check_at = None;
        self.congested.clone()
    }

    /// Returns the time of the next check.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.check_at
    }
}
