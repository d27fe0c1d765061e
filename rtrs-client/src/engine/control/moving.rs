//! State of a volume that moves between servers: its term, its server, and the time of the next
//! takeover request.

use rtrs_core::gateway::Standing;
use rtrs_core::identity::ServerId;
use rtrs_core::ids::PathId;
use rtrs_core::time::{Duration, Instant};

/// Interval before the next request to a server that was busy or perhaps not reached.
pub(super) const BUSY_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Moving {
    /// Whether the export moves between servers.
    pub(super) moves: bool,
    /// Highest term reported by an active server.
    term: u64,
    /// Server that reported the term.
    pub(super) server: Option<ServerId>,
    /// Time by which the serving server has to have stepped down, if it was asked to.
    pub(super) leaves_by: Option<Instant>,
    /// Time since which no path serves the volume.
    pub(super) lost: Option<Instant>,
    /// Earliest time of the next request.
    pub(super) next: Instant,
    /// Path of the last request.
    pub(super) asked: Option<PathId>,
}

impl Moving {
    /// Whether a path that opened the volume with this standing serves it.
    pub(super) fn would_serve(&self, standing: Option<Standing>) -> bool {
        let Some(Standing { active, term }) = standing else { return true };
        active && term >= self.term || rtrs_core::mutated!(StandbyServes)
    }

    /// Records the standing reported by a server over a path that is not refused.
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

    /// Handles the loss of the path of the last request, which may not have reached the server.
    pub(super) fn path_lost(&mut self, path: PathId, now: Instant) {
        if self.asked == Some(path) {
            self.next = self.next.min(now + BUSY_EVERY);
        }
    }
}
