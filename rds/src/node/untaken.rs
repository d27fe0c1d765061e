//! Users that have not taken all of their messages.

use std::collections::BTreeSet;

use rtrs_base::time::{Duration, Instant};

use super::client::ClientId;

/// Interval at which the node checks what users have taken. Users report the messages that they
/// take, unless they are killed first.
const CHECK: Duration = Duration::from_secs(1);

/// Users that have not taken everything that was passed to them.
#[derive(Debug, Default)]
pub(super) struct Untaken {
    pub(super) clients: BTreeSet<ClientId>,
    /// Users whose ports are congested.
    pub(super) congested: BTreeSet<ClientId>,
    /// Users whose messages are waiting for room in their rings.
    waiting: BTreeSet<ClientId>,
    /// Users whose rings have held messages since the last check.
    unread: BTreeSet<ClientId>,
    check_at: Option<Instant>,
}

/// Users to check.
#[derive(Debug)]
pub(super) struct Due {
    /// Users of congested ports or full rings.
    pub(super) waiting: BTreeSet<ClientId>,
    /// Users whose rings have held messages.
    pub(super) unread: BTreeSet<ClientId>,
}

impl Untaken {
    pub(super) fn add(&mut self, id: ClientId) {
        self.clients.insert(id);
    }

    pub(super) fn remove(&mut self, id: ClientId) {
        for set in [&mut self.clients, &mut self.congested, &mut self.waiting, &mut self.unread] {
            set.remove(&id);
        }
    }

    /// Records whether messages are waiting for room in a user's ring.
    pub(super) fn set_waiting(&mut self, id: ClientId, waits: bool) {
        if waits {
            self.waiting.insert(id);
        } else {
            self.waiting.remove(&id);
        }
    }

    /// Records that a user's ring holds messages.
    pub(super) fn add_unread(&mut self, id: ClientId) {
        self.unread.insert(id);
    }

    /// Plans the next check.
    pub(super) fn plan_check(&mut self, now: Instant) {
        let sets = [&self.congested, &self.waiting, &self.unread];
        if self.check_at.is_none() && sets.iter().any(|set| !set.is_empty()) {
            self.check_at = Some(now + CHECK);
        }
    }

    /// Returns the users to check, once it is time.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<Due> {
        self.check_at.take_if(|at| *at <= now)?;
        let waiting = self.congested.union(&self.waiting).copied().collect();
        Some(Due { waiting, unread: std::mem::take(&mut self.unread) })
    }

    /// Returns the time of the next check.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.check_at
    }
}
