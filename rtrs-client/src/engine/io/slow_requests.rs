//! Slow requests: requests that the server does not answer within the IO timeout although their
//! path is alive.
//!
//! In this case the disk hangs, not the path. Closing the path would not help: the request would
//! hang again on the next path, and all other requests on this path would have to move. So the
//! request is left alone and reported. Each shard logs one line when a path's first request becomes
//! slow, and one when the last has ended.

use rtrs_core::ids::PathId;
use rtrs_core::time::Duration;

/// Period from the first slow request of a path to the end of the last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Episode {
    /// Number of requests that became slow.
    pub(super) requests: u64,
    /// Longest duration of a slow request that has ended.
    pub(super) longest: Duration,
    /// Number of slow requests that have not ended yet.
    open: usize,
}

/// Slow requests of a device on a shard, for its report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlowReport {
    /// Current number of slow requests.
    pub(crate) now: usize,
    /// Total since the session began.
    pub(crate) total: u64,
    /// Time since the oldest slow request was sent.
    pub(crate) oldest: Option<Duration>,
}

/// Slow requests of a shard, by path.
#[derive(Debug)]
pub(super) struct SlowRequests {
    paths: Vec<Episode>,
}

impl SlowRequests {
    pub(super) fn new(paths: usize) -> Self {
        Self { paths: vec![Episode::default(); paths] }
    }

    /// Grows the table for another path.
    pub(super) fn add_path(&mut self, paths: usize) {
        self.paths.resize(paths.max(self.paths.len()), Episode::default());
    }

    /// Counts a request that became slow. Returns whether it is the only slow request on this path.
    pub(super) fn began(&mut self, path: PathId) -> bool {
        let episode = &mut self.paths[path.index()];
        episode.requests += 1;
        episode.open += 1;
        episode.open == 1
    }

    /// Records the end of a slow request of this age: it was answered, or its connection ended.
    /// Returns the episode if the path has no slow requests left.
    pub(super) fn ended(&mut self, path: PathId, age: Duration) -> Option<Episode> {
        let episode = &mut self.paths[path.index()];
        episode.open -= 1;
        episode.longest = episode.longest.max(age);
        (episode.open == 0).then(|| std::mem::take(episode))
    }

    /// Current number of slow requests.
    pub(super) fn now(&self) -> usize {
        self.paths.iter().map(|episode| episode.open).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_and_the_last_slow_request_of_a_path_are_reported() {
        const MS: Duration = Duration::from_millis(1);
        let mut slow = SlowRequests::new(1);
        slow.add_path(2);
        let (one, other) = (PathId(0), PathId(1));
        assert!(slow.began(one) && !slow.began(one) && slow.began(other));
        assert_eq!(slow.now(), 3);
        assert_eq!(slow.ended(one, 9 * MS), None);
        assert_eq!(slow.ended(other, MS).map(|e| (e.requests, e.longest)), Some((1, MS)));
        assert_eq!(slow.ended(one, 5 * MS).map(|e| (e.requests, e.longest)), Some((2, 9 * MS)));
        assert!(slow.began(one), "another episode");
        assert_eq!(slow.now(), 1);
    }
}
