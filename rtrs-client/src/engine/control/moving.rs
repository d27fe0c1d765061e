//! State of a volume that moves between servers: its term, its server, and when to ask for the next
//! takeover.

use rtrs_core::gateway::Standing;
use rtrs_core::identity::ServerId;
use rtrs_core::ids::PathId;
use rtrs_core::time::{Duration, Instant};

/// Interval before the next request to a server that was busy or may not have been reached.
const BUSY_EVERY: Duration = Duration::from_secs(1);
/// Minimum time between takeover requests.
const MOVE_EVERY: Duration = Duration::from_secs(10);
/// Time limit for the active server to step down. A server that cannot reach the store never does.
const LEAVE_MAX: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(super) struct Moving {
    /// Whether the export moves between servers.
    moves: bool,
    /// Highest term reported by an active server.
    term: u64,
    /// Server that reported that term.
    server: Option<ServerId>,
    /// Deadline for the active server to step down, if it was asked to.
    leaves_by: Option<Instant>,
    /// Time since which no path has served the volume.
    lost: Option<Instant>,
    /// Earliest time of the next request.
    next: Instant,
    /// Path of the last request.
    asked: Option<PathId>,
}

impl Moving {
    /// Whether a path that opened the volume with this standing serves it.
    pub(super) fn would_serve(&self, standing: Option<Standing>) -> bool {
        let Some(Standing { active, term }) = standing else { return true };
        active && term >= self.term || rtrs_core::mutated!(StandbyServes)
    }

    /// Records the standing reported by a server over a path that is not refused.
    pub(super) fn record(&mut self, standing: Option<Standing>, server: Option<ServerId>) {
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

    /// Whether the export moves between servers.
    pub(super) fn moves(&self) -> bool {
        self.moves
    }

    /// Records whether a path serves the volume.
    pub(super) fn set_served(&mut self, served: bool, now: Instant) {
        self.lost = if served { None } else { Some(self.lost.unwrap_or(now)) };
    }

    /// Earliest time of the next takeover request, if one is due: `grace` after the loss of the
    /// last path that served the volume, or when the active server has not stepped down in time.
    pub(super) fn due(&self, grace: Duration) -> Option<Instant> {
        let since = self.lost.map(|at| at + grace).or(self.leaves_by)?;
        Some(since.max(self.next))
    }

    /// Rank of a path for the next takeover request; the lowest is asked. Prefers a server other
    /// than the one that last served the volume, then a path other than the one asked last.
    pub(super) fn rank(&self, path: PathId, server: Option<ServerId>) -> (bool, bool) {
        let was_active = self.server.is_some() && server == self.server;
        (was_active, self.asked == Some(path))
    }

    /// Records a takeover request over this path.
    pub(super) fn asked(&mut self, path: PathId, now: Instant) {
        (self.next, self.asked) = (now + MOVE_EVERY, Some(path));
        self.leaves_by = None;
    }

    /// Records that the active server was asked to give up the volume. A manual request takes
    /// effect immediately.
    pub(super) fn sent_away(&mut self, now: Instant) {
        (self.next, self.leaves_by) = (now, Some(now + LEAVE_MAX));
    }

    /// Handles a server that was too busy to take over.
    pub(super) fn busy(&mut self, now: Instant) {
        self.next = now + BUSY_EVERY;
    }

    /// Handles the loss of the last request's path; the request may not have reached the server.
    pub(super) fn path_lost(&mut self, path: PathId, now: Instant) {
        if self.asked == Some(path) {
            self.next = self.next.min(now + BUSY_EVERY);
        }
    }
}
