//! Slow requests: those that the server does not answer within the IO timeout, over a path that
//! lives.
//!
//! What hangs then is the disk, not the path. Closing the path would help nobody: the request would
//! hang again on the next one, and all that works on this one would have to move. So the request
//! stays where it is and is reported. Each shard logs one line when the first request of a path
//! becomes slow, and one when the last has ended.

use rtrs_core::ids::PathId;
use rtrs_core::time::Duration;

/// From the first slow request of a path to the end of the last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Episode {
    /// Requests that became slow.
    pub(super) requests: u64,
    /// The longest of them, among those that have ended.
    pub(super) longest: Duration,
    /// Not ended yet.
    open: usize,
}

/// The slow requests of a device on a shard, for its report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlowReport {
    /// Now.
    pub(crate) now: usize,
    /// Since the session began.
    pub(crate) total: u64,
    /// Since the oldest of now was sent.
    pub(crate) oldest: Option<Duration>,
}

/// The slow requests of a shard, by path.
#[derive(Debug)]
pub(super) struct SlowRequests {
    paths: Vec<Episode>,
}

impl SlowRequests {
    pub(super) fn new(paths: usize) -> Self {
        Self { paths: vec![Episode::default(); paths] }
    }

    /// There may be one more path.
    pub(super) fn add_path(&mut self, paths: usize) {
        self.paths.resize(paths.max(self.paths.len()), Episode::default());
    }

    /// A request on this path has become slow. True when it is the only one there.
    pub(super) fn began(&mut self, path: PathId) -> bool {
        let episode = &mut self.paths[path.index()];
        episode.requests += 1;
        episode.open += 1;
        episode.open == 1
    }

    /// A slow request on this path was answered after so long, or its connection has ended. The
    /// episode, when it was the last one.
    pub(super) fn ended(&mut self, path: PathId, age: Duration) -> Option<Episode> {
        let episode = &mut self.paths[path.index()];
        episode.open -= 1;
        episode.longest = episode.longest.max(age);
        (episode.open == 0).then(|| std::mem::take(episode))
    }

    /// Slow requests now.
    pub(super) fn now(&self) -> usize {
        self.paths.iter().map(|episode| episode.open).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_and_the_last_slow_request_of_a_path_are_told() {
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
