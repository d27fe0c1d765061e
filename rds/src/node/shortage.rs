//! Shortage of descriptors and memory: the users waiting for them, and the descriptor held in
//! reserve to report the shortage.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use rtrs_base::log_limit::LogLimit;
use rtrs_base::time::{Duration, Instant};

use super::client::ClientId;

/// Pause after an accept, or the sending of a token, fails for lack of descriptors or memory.
pub(super) const PAUSE: Duration = Duration::from_millis(50);

/// A descriptor reserved for refusing a user when no more are available.
#[derive(Debug)]
pub(super) struct Reserve {
    spare: Option<OwnedFd>,
    /// The user that currently holds the reserved descriptor.
    refused: Option<ClientId>,
    log: LogLimit,
}

impl Reserve {
    pub(super) fn new() -> Self {
        Self { spare: spare(), refused: None, log: LogLimit::default() }
    }

    /// Logs that a user could not be given a connection or a socket.
    pub(super) fn warn(&mut self, now: Instant, error: &io::Error) {
        if let Some(left_out) = self.log.admit(now) {
            tracing::warn!(%error, left_out, "cannot serve another user");
        }
    }

    /// Frees the descriptor for the next connection. Returns false if it is already in use.
    pub(super) fn release(&mut self) -> bool {
        self.spare.take().is_some()
    }

    /// Records a new user, which holds the reserved descriptor if no other was left.
    pub(super) fn accepted(&mut self, id: ClientId) {
        if self.spare.is_none() && self.refused.is_none() {
            self.spare = spare();
            self.refused = self.spare.is_none().then_some(id);
        }
    }

    /// Whether a user holds the reserved descriptor and is therefore refused a socket.
    pub(super) fn is_refused(&self, id: ClientId) -> bool {
        self.refused == Some(id)
    }

    /// Records a user that has disconnected.
    pub(super) fn ended(&mut self, id: ClientId) {
        if self.refused == Some(id) {
            self.refused = None;
        }
    }
}

/// Whether there is a free descriptor.
pub(super) fn has_free() -> bool {
    spare().is_some()
}

/// Opens a descriptor to hold in reserve. Returns `None` if there are no more.
fn spare() -> Option<OwnedFd> {
    File::open("/dev/null").ok().map(OwnedFd::from)
}

/// Users whose messages have no token because it could not be sent.
#[derive(Debug, Default)]
pub(super) struct Starved {
    clients: BTreeSet<ClientId>,
    retry_at: Option<Instant>,
    log: LogLimit,
}

impl Starved {
    /// Schedules another attempt for a user if a token could not be sent.
    pub(super) fn retry_token(&mut self, now: Instant, id: ClientId, sent: io::Result<()>) {
        let Err(error) = sent else { return };
        self.clients.insert(id);
        self.retry_at.get_or_insert(now + PAUSE);
        if let Some(left_out) = self.log.admit(now) {
            tracing::warn!(%error, left_out, "cannot wake a user; trying again shortly");
        }
    }

    pub(super) fn remove(&mut self, id: ClientId) {
        self.clients.remove(&id);
    }

    /// Takes the users to retry if the next attempt is due.
    pub(super) fn take_due(&mut self, now: Instant) -> BTreeSet<ClientId> {
        if self.retry_at.is_none_or(|at| at > now) {
            return BTreeSet::new();
        }
        self.retry_at = None;
        std::mem::take(&mut self.clients)
    }

    /// Returns the time of the next attempt.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.retry_at
    }
}
