//! Users with messages to take.

use std::collections::BTreeSet;

use rtrs_base::time::{Duration, Instant};

use super::client::ClientId;

/// Interval of the checks whether the connections of congested sockets are empty. Users report what
/// they take, unless they are killed before they count it.
const CHECK: Duration = Duration::from_secs(1);

/// Users that have not taken all that was passed on to them.
#[derive(Debug, Default)]
pub(super) struct Untaken {
    pub(super) clients: BTreeSet<ClientId>,
    /// Users whose ports are congested, and the time of the next check what they have taken.
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

    /// Returns the users to check, once it is time.
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
