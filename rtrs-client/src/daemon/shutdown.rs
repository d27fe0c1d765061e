//! Shutdown of a session, which shard 0 controls: front ends stop on every shard, then the paths
//! end.

use rtrs_core::time::{Duration, Instant};

/// Time for which paths wait, after a shutdown's deadline, for shards to count unfinished IO. A
/// shard counts when it wakes at the deadline, so only a stuck shard takes longer.
const COUNT_PATIENCE: Duration = Duration::from_secs(1);
/// Time limit for paths to end after a shutdown's deadline. Paths have their own limits; this one
/// is for a provider that exceeds them.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// Shutdown in progress.
#[derive(Clone, Copy, Debug)]
struct Progress {
    /// Deadline for requests in flight.
    deadline: Instant,
    /// Number of shards whose front ends are still running.
    running: usize,
    /// Whether the paths are ending.
    ends_paths: bool,
}

/// Progress of the shutdown, if any.
#[derive(Debug, Default)]
pub(crate) struct Shutdown(Option<Progress>);

impl Shutdown {
    /// Starts the shutdown of a session with this number of shards, or shortens one in progress.
    /// Returns true if the caller must send the deadline to the shards.
    pub(crate) fn begin(&mut self, deadline: Instant, shards: usize) -> bool {
        self.0 = match self.0 {
            Some(before) if before.deadline <= deadline => return false,
            Some(before) => Some(Progress { deadline, ..before }),
            None => Some(Progress { deadline, running: shards, ends_paths: false }),
        };
        true
    }

    /// Records that all front ends of a shard have stopped.
    pub(crate) fn shard_stopped(&mut self) {
        if let Some(progress) = &mut self.0 {
            progress.running = progress.running.saturating_sub(1);
        }
    }

    /// Whether the paths must end. Ending them fails requests in flight on every shard, so each
    /// shard counts its requests first.
    pub(crate) fn ends_paths(&mut self, now: Instant) -> bool {
        let Some(progress) = &mut self.0 else { return false };
        progress.ends_paths |= progress.running == 0 || now >= progress.deadline + COUNT_PATIENCE;
        progress.ends_paths
    }

    /// Finishes the shutdown if the paths have ended or are taking too long. Returns whether front
    /// ends are still running at that point; None if the shutdown is not over.
    pub(crate) fn finish(&mut self, now: Instant, paths_ended: bool) -> Option<bool> {
        let Progress { deadline, running, .. } = self.0?;
        if !(paths_ended && running == 0) && now < deadline + END_PATIENCE {
            return None;
        }
        self.0 = None;
        Some(running > 0)
    }

    /// Time of the next step if nothing happens before.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let Progress { deadline, ends_paths, .. } = self.0?;
        Some(deadline + if ends_paths { END_PATIENCE } else { COUNT_PATIENCE })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn a_shutdown_can_only_be_shortened() {
        let mut shutdown = Shutdown::default();
        let at = |s| Instant::ZERO + S * s;
        assert!(shutdown.begin(at(20), 2));
        assert!(!shutdown.begin(at(20), 2) && !shutdown.begin(at(30), 2));
        shutdown.shard_stopped();
        assert!(shutdown.begin(at(10), 2));
        assert_eq!(shutdown.deadline(), Some(at(10) + COUNT_PATIENCE));
        assert!(!shutdown.ends_paths(at(10)), "one of two shards still runs");
        shutdown.shard_stopped();
        assert!(shutdown.ends_paths(at(0)));
    }

    #[test]
    fn a_shard_that_is_stuck_leaves_no_deadline_in_the_past() {
        let (mut shutdown, start) = (Shutdown::default(), Instant::ZERO);
        assert!(shutdown.begin(start, 2));
        assert!(shutdown.ends_paths(start + COUNT_PATIENCE));
        assert_eq!(shutdown.deadline(), Some(start + END_PATIENCE));
        assert_eq!(shutdown.finish(start + END_PATIENCE, false), Some(true));
    }

    #[test]
    fn a_shutdown_ends_with_its_paths_and_all_front_ends() {
        let mut shutdown = Shutdown::default();
        let start = Instant::ZERO;
        assert_eq!((shutdown.finish(start, true), shutdown.deadline()), (None, None));
        assert!(shutdown.begin(start, 1));
        assert_eq!(shutdown.finish(start, true), None, "the front ends run");
        shutdown.shard_stopped();
        assert_eq!(shutdown.finish(start, false), None);
        assert_eq!(shutdown.finish(start, true), Some(false));
        assert_eq!(shutdown.deadline(), None);
    }

    #[test]
    fn a_stuck_shard_does_not_keep_the_session() {
        let mut shutdown = Shutdown::default();
        let start = Instant::ZERO;
        assert!(shutdown.begin(start, 2));
        assert!(shutdown.ends_paths(start + COUNT_PATIENCE));
        assert_eq!(shutdown.finish(start + COUNT_PATIENCE, true), None);
        assert_eq!(shutdown.finish(start + END_PATIENCE, false), Some(true));
    }
}
