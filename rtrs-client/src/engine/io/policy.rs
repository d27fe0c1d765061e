//! Path selection for the next request.
//!
//! The policies leave out a path that is far slower than the others (`slow_path.rs`).
//!
//! These are the three policies of the kernel's client (`rtrs-clt.c`, `get_next_path_*`), without
//! three of their flaws. The in-flight count is maintained under every policy. A path without a
//! measured latency counts as the mean of the others, so that it does not always win against
//! measured paths. Paths with equal numbers of requests take turns; otherwise the first would carry
//! nearly all of a light load.
//!
//! Under `min-inflight` a turn is a *run* of requests. Small requests that arrive together thus
//! share one send, one wake-up of the server and one batch of answers, as they do on a single path.
//! Paths whose speeds differ have no runs: with all requests on one path, a faster path would wait
//! for a slower one.

use rtrs_core::ids::PathId;
use rtrs_core::time::{Duration, Instant};

use super::slow_path::{Candidate, PathTimes};
use crate::engine::session::Policy;

/// Bytes after which a run ends, so that large requests use the bandwidth of all paths.
const RUN_BYTES: u32 = 128 << 10;
/// Time after which a run ends.
const RUN_TIME: Duration = Duration::from_millis(1);

/// Successive requests on one path.
#[derive(Debug)]
struct Run {
    path: PathId,
    begun: Instant,
    requests: u32,
    bytes: u32,
}

impl Run {
    fn new(path: PathId, begun: Instant) -> Self {
        Self { path, begun, requests: 0, bytes: 0 }
    }

    /// Whether the next request belongs to the run.
    fn continues(&self, now: Instant, requests_max: u32) -> bool {
        self.requests < requests_max && self.bytes < RUN_BYTES && now.since(self.begun) < RUN_TIME
    }
}

/// Policy, its cursor, and the paths that are too slow to be chosen.
#[derive(Debug)]
pub(crate) struct Chooser {
    pub(crate) policy: Policy,
    pub(crate) times: PathTimes,
    cursor: u16,
    run: Option<Run>,
    run_max: u32,
}

impl Chooser {
    /// Creates a chooser. Under `MinInflight`, up to `run_max` successive requests use the same
    /// path.
    pub(crate) fn new(policy: Policy, run_max: u32, paths: usize) -> Self {
        Self { policy, times: PathTimes::new(paths), cursor: u16::MAX, run: None, run_max }
    }

    /// Selects the path for the next request from `up`, which is in list order: a path that is due
    /// for a trial request, or else the policy's choice among the paths that are not slow, if there
    /// are any.
    pub(crate) fn choose(
        &mut self,
        now: Instant,
        up: impl Iterator<Item = Candidate> + Clone,
    ) -> Option<PathId> {
        let Self { policy, times, cursor, run, run_max } = self;
        if !times.is_watching() {
            if *policy != Policy::MinInflight || *run_max <= 1 || !times.are_alike() {
                *run = None;
                return pick(*policy, cursor, up);
            }
            let current =
                run.as_ref().filter(|run| run.continues(now, *run_max)).map(|run| run.path);
            if current.is_some_and(|path| up.clone().any(|c| c.path == path)) {
                return current;
            }
            let chosen = pick(*policy, cursor, up)?;
            *run = Some(Run::new(chosen, now));
            return Some(chosen);
        }
        *run = None;
        if times.take_shift() {
            pick(Policy::RoundRobin, cursor, up.clone());
        }
        let all_slow = up.clone().all(|c| times.is_slow(c.path));
        let quick = up.clone().filter(|c| all_slow || !times.is_slow(c.path));
        let tried = times.pick_try(now, up.clone());
        let chosen = tried.or_else(|| pick(*policy, cursor, quick))?;
        times.sent(chosen, now);
        Some(chosen)
    }

    /// Counts a request, with this many bytes of data, that was sent over a path.
    pub(crate) fn sent(&mut self, path: PathId, bytes: u32) {
        if let Some(run) = self.run.as_mut().filter(|run| run.path == path) {
            run.requests += 1;
            run.bytes = run.bytes.saturating_add(bytes);
        }
    }
}

/// Returns the policy's choice. Equal paths take turns, even under `MinInflight`; `cursor` is the
/// previous choice.
fn pick(
    policy: Policy,
    cursor: &mut u16,
    mut up: impl Iterator<Item = Candidate> + Clone,
) -> Option<PathId> {
    let after = *cursor;
    let comes_later = |c: &Candidate| after == u16::MAX || c.path.0 <= after;
    match policy {
        Policy::RoundRobin => {
            let next = up.clone().find(|c| !comes_later(c));
            let chosen = next.or_else(|| up.next())?.path;
            *cursor = chosen.0;
            Some(chosen)
        }
        Policy::MinInflight => {
            let chosen = up.min_by_key(|c| (c.inflight, comes_later(c)))?.path;
            *cursor = chosen.0;
            Some(chosen)
        }
        Policy::MinLatency => {
            let (count, sum) = up
                .clone()
                .filter(|c| c.latency_ns > 0)
                .fold((0, 0u64), |(n, sum), c| (n + 1, sum.saturating_add(c.latency_ns)));
            let mean = sum.checked_div(count).unwrap_or(0);
            up.min_by_key(|c| if c.latency_ns == 0 { mean } else { c.latency_ns }).map(|c| c.path)
        }
    }
}

#[cfg(test)]
mod tests {
    use rtrs_core::time::Duration;

    use super::*;
    use crate::engine::session::PATH_RUN;

    fn paths(of: &[(u32, u64)]) -> Vec<Candidate> {
        (0u16..)
            .zip(of)
            .map(|(id, &(inflight, latency_ns))| Candidate {
                path: PathId(id),
                inflight,
                latency_ns,
            })
            .collect()
    }

    fn picks(policy: Policy, up: &[Candidate], times: usize) -> Vec<u16> {
        let mut chooser = Chooser::new(policy, PATH_RUN, 3);
        let now = Instant::ZERO;
        (0..times).map(|_| chooser.choose(now, up.iter().copied()).unwrap().0).collect()
    }

    #[test]
    fn round_robin_visits_every_path_and_skips_missing_ones() {
        let up = paths(&[(0, 0), (0, 0), (0, 0)]);
        assert_eq!(picks(Policy::RoundRobin, &up, 6), [0, 1, 2, 0, 1, 2]);
        assert_eq!(picks(Policy::RoundRobin, &up[1..], 3), [1, 2, 1]);
    }

    #[test]
    fn the_least_loaded_or_quickest_path_wins() {
        assert_eq!(picks(Policy::MinInflight, &paths(&[(3, 0), (1, 0), (2, 0)]), 2), [1, 1]);
        assert_eq!(picks(Policy::MinLatency, &paths(&[(0, 9), (0, 5), (0, 5)]), 2), [1, 1]);
    }

    #[test]
    fn equally_loaded_paths_take_turns() {
        let up = paths(&[(3, 0), (1, 0), (1, 0)]);
        assert_eq!(runs(&up, 4096, MS), [1, 2, 1, 2, 1, 2, 1, 2]);
        let up = paths(&[(0, 0), (0, 0), (0, 0)]);
        assert_eq!(runs(&up, 4096, MS), [0, 1, 2, 0, 1, 2, 0, 1], "a light load");
    }

    /// Returns the paths that min-inflight selects for eight requests of this size, one every
    /// `gap`.
    fn runs(up: &[Candidate], bytes: u32, gap: Duration) -> Vec<u16> {
        let (mut chooser, mut now) =
            (Chooser::new(Policy::MinInflight, PATH_RUN, 3), Instant::ZERO);
        let mut selected = Vec::new();
        for _ in 0..8 {
            let path = chooser.choose(now, up.iter().copied()).unwrap();
            chooser.sent(path, bytes);
            selected.push(path.0);
            now = now + gap;
        }
        selected
    }

    #[test]
    fn a_run_ends_by_time_by_bytes_and_by_requests() {
        let up = paths(&[(0, 0), (0, 0)]);
        assert_eq!(runs(&up, 512, MS / 2), [0, 0, 1, 1, 0, 0, 1, 1]);
        assert_eq!(runs(&up, 32 << 10, Duration::ZERO), [0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!(runs(&up, 128 << 10, Duration::ZERO), [0, 1, 0, 1, 0, 1, 0, 1]);
        let mut chooser = Chooser::new(Policy::MinInflight, PATH_RUN, 2);
        for request in 0..96 {
            let path = chooser.choose(Instant::ZERO, up.iter().copied()).unwrap();
            assert_eq!(u32::from(path.0), request / PATH_RUN % 2, "request {request}");
            chooser.sent(path, 0);
        }
    }

    #[test]
    fn paths_that_differ_share_each_batch() {
        let (mut chooser, mut now) =
            (Chooser::new(Policy::MinInflight, PATH_RUN, 3), Instant::ZERO);
        for took in [4 * MS, MS] {
            answers(&mut chooser, &mut now, Duration::from_secs(1), took);
            let mut up = paths(&[(0, 0), (0, 0), (0, 0)]);
            for _ in 0..9 {
                let path = chooser.choose(now, up.iter().copied()).unwrap();
                chooser.sent(path, 512);
                up[path.index()].inflight += 1;
            }
            let spread = up.iter().map(|c| c.inflight).collect::<Vec<_>>();
            let is_run = spread.contains(&9);
            assert_eq!(is_run, took == MS, "{took:?}: {spread:?}");
        }
    }

    #[test]
    fn a_run_ends_with_its_path() {
        let up = paths(&[(0, 0), (0, 0)]);
        let mut chooser = Chooser::new(Policy::MinInflight, PATH_RUN, 2);
        let mut choose = |up: &[Candidate]| {
            let path = chooser.choose(Instant::ZERO, up.iter().copied()).unwrap();
            chooser.sent(path, 512);
            path.0
        };
        assert_eq!([choose(&up), choose(&up), choose(&up[1..]), choose(&up)], [0, 0, 1, 1]);
    }

    #[test]
    fn an_unmeasured_path_does_not_beat_a_quick_one() {
        assert_eq!(picks(Policy::MinLatency, &paths(&[(0, 0), (0, 5), (0, 100)]), 1), [1]);
        assert_eq!(picks(Policy::MinLatency, &paths(&[(0, 0), (0, 0)]), 1), [0]);
    }

    const ALL: [Policy; 3] = [Policy::RoundRobin, Policy::MinInflight, Policy::MinLatency];
    const MS: Duration = Duration::from_millis(1);

    /// Records answers on three paths every 20 ms for this time.
    fn answers(chooser: &mut Chooser, now: &mut Instant, time: Duration, first: Duration) {
        let end = *now + time;
        while *now < end {
            *now = *now + 20 * MS;
            for (path, took) in [(0, first), (1, MS), (2, MS)] {
                chooser.times.answered(PathId(path), *now, took);
            }
        }
    }

    /// Returns the number of requests that each path is given in one second, at one request per
    /// millisecond.
    fn second(chooser: &mut Chooser, now: &mut Instant, up: &[Candidate]) -> [usize; 3] {
        let mut counts = [0; 3];
        for _ in 0..1000 {
            *now = *now + MS;
            counts[chooser.choose(*now, up.iter().copied()).unwrap().index()] += 1;
        }
        counts
    }

    #[test]
    fn slow_paths_are_left_out_while_there_are_others() {
        for policy in ALL {
            let (mut chooser, mut now) = (Chooser::new(policy, PATH_RUN, 3), Instant::ZERO);
            answers(&mut chooser, &mut now, Duration::from_secs(5), 40 * MS);
            let up = paths(&[(1, 1), (5, 9), (5, 9)]);
            let counts = second(&mut chooser, &mut now, &up);
            assert!((10..=21).contains(&counts[0]), "{policy:?}: {counts:?}");
            assert_eq!(chooser.choose(now, up[..1].iter().copied()), Some(PathId(0)), "alone");
        }
    }

    #[test]
    fn no_policy_starves_a_path_that_is_suspect() {
        for policy in ALL {
            let (mut chooser, mut now) = (Chooser::new(policy, PATH_RUN, 3), Instant::ZERO);
            answers(&mut chooser, &mut now, Duration::from_secs(2), MS);
            answers(&mut chooser, &mut now, 300 * MS, 40 * MS);
            assert!(chooser.times.is_watching() && !chooser.times.is_slow(PathId(0)));
            // The policies that use measurements would never select it.
            let up = paths(&[(2, 90), (1, 9), (8, 8)]);
            let counts = second(&mut chooser, &mut now, &up);
            assert!(counts[0] >= 10, "{policy:?}: {counts:?}");
        }
    }

    #[test]
    fn slower_requests_alternating_with_quick_ones_eject_no_path() {
        let mut chooser = Chooser::new(Policy::RoundRobin, PATH_RUN, 2);
        let mut now = Instant::ZERO;
        let up = paths(&[(0, 0), (0, 0)]);
        for _ in 0..1000 {
            for took in [MS, 30 * MS] {
                let path = chooser.choose(now, up.iter().copied()).unwrap();
                now = now + took;
                chooser.times.answered(path, now, took);
                assert_eq!(chooser.times.next_turned(), None, "at {now}");
            }
        }
    }

    #[test]
    fn nothing_is_chosen_without_paths() {
        for policy in [Policy::RoundRobin, Policy::MinInflight, Policy::MinLatency] {
            let mut chooser = Chooser::new(policy, PATH_RUN, 3);
            assert_eq!(chooser.choose(Instant::ZERO, std::iter::empty()), None);
        }
    }
}
