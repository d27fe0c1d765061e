//! Where a volume stands that moves between servers: in which term, at which server, and when to
//! ask the next one.

use rtrs_core::gateway::Standing;
use rtrs_core::identity::ServerId;
use rtrs_core::ids::PathId;
use rtrs_core::time::{Duration, Instant};

/// When a server is asked again that could not begin, or perhaps was not reached.
pub(super) const BUSY_EVERY: Duration = Duration::from_secs(1);

/// What is known of a volume that moves.
#[derive(Debug, Default)]
pub(super) struct Moving {
    /// Its export moves between servers.
    pub(super) moves: bool,
    /// The highest term of an active server.
    term: u64,
    /// Which one that was.
    pub(super) server: Option<ServerId>,
    /// The server that serves it was asked to leave, and has to have done so by then.
    pub(super) leaves_by: Option<Instant>,
    /// Since when no path serves it.
    pub(super) lost: Option<Instant>,
    /// No server is asked before.
    pub(super) next: Instant,
    /// The path over which one was asked last.
    pub(super) asked: Option<PathId>,
}

impl Moving {
    /// True if a path that opened the volume so serves it.
    pub(super) fn would_serve(&self, standing: Option<Standing>) -> bool {
        let Some(Standing { active, term }) = standing else { return true };
        active && term >= self.term || rtrs_core::mutated!(StandbyServes)
    }

    /// A path to this server opened the volume, and is not refused.
    pub(super) fn meet(&mut self, standing: Option<Standing>, server: Option<ServerId>) {
        let serves = self.would_serve(standing);
        let Some(Standing { term, .. }) = standing else { return };
        self.moves = true;
        if serves {
            if self.server != server {
                self.leaves_by = None;
            }
            (self.term, self.server) = (term.max(self.term), server);
        }
    }

    /// The path is gone over which a server was asked: perhaps it has not heard of it.
    pub(super) fn path_lost(&mut self, path: PathId, now: Instant) {
        if self.asked == Some(path) {
            self.next = self.next.min(now + BUSY_EVERY);
        }
    }
}
