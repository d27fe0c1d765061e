//! Slow-path detection: finds paths that are far slower than the others, based on this shard's
//! answers.
//!
//! Answers are collected in windows of [`WINDOW`]. At the end of a window, each path that answered
//! is compared with the best of the others. The slowest answer in a window does not count, so a
//! single outlier changes nothing. A path that is far slower in one window is *suspect*. A path
//! that stays suspect for [`SLOW_TIME`], over [`SLOW_ANSWERS`] answers in [`SLOW_WINDOWS`] windows,
//! without a better window in between, is *slow* and is no longer selected. The first answers on a
//! connection do not count. A stall affects one window per path; the next window clears the
//! suspicion.
//!
//! While a path is suspect or slow, every path that the policy passes over is still given requests
//! ([`TRY_EVERY`]), so that no path stays suspect or slow longer than its cause. A slow path
//! returns after [`GOOD_WINDOWS`] windows in which it was nearly as fast as the others: returning
//! is harder than leaving, so that paths do not flap. The last path never leaves.

use rtrs_core::ids::PathId;
use rtrs_core::time::{Duration, Instant};

/// Time for which answers are collected before they are judged together.
const WINDOW: Duration = Duration::from_millis(100);
/// A path is far slower when its typical answer takes this many times as long as that of the best
/// other path...
const SLOW_RATIO: u64 = 8;
/// ...and also longer than this.
const SLOW_NANOS: u64 = 10_000_000;
/// A path leaves when it has been far slower for at least this time...
const SLOW_TIME: Duration = Duration::from_secs(2);
/// ...in at least this number of answers...
const SLOW_ANSWERS: u32 = 16;
/// ...and in at least this number of windows.
const SLOW_WINDOWS: u32 = 8;
/// Answers on a new connection do not count until this many have arrived...
const FIRST_ANSWERS: u32 = 16;
/// ...and this time has passed since the first answer.
const FIRST_TIME: Duration = Duration::from_secs(1);
/// A window of a slow path is good when its mean is at most this many times the best of the others,
/// or is below [`GOOD_NANOS`].
const GOOD_RATIO: u64 = 2;
const GOOD_NANOS: u64 = SLOW_NANOS / 2;
/// Number of good windows after which a path returns; a bad one cancels two.
const GOOD_WINDOWS: u32 = 4;
/// Paths are alike if the slowest takes at most this many times as long as the fastest.
const ALIKE_RATIO: u64 = 2;
/// Minimum and maximum time between two requests sent on a path only for comparison.
const TRY_EVERY: Duration = Duration::from_millis(50);
const TRY_EVERY_MAX: Duration = Duration::from_secs(1);
/// Limits on such requests: one in [`TRY_SHARE`] of those in flight, and [`TRIES_MAX`] per path.
const TRY_SHARE: u32 = 4;
const TRIES_MAX: u32 = 16;
/// Maximum age of a window used in comparisons, and of a suspicion without answers.
const FRESH: Duration = Duration::from_secs(3);

/// A connected path, as input to the path selection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) path: PathId,
    pub(crate) inflight: u32,
    /// Last heartbeat round trip in nanoseconds; 0 when none has been measured yet.
    pub(crate) latency_ns: u64,
}

/// Sequence of windows in which a path was far slower.
#[derive(Clone, Copy, Debug)]
struct Suspicion {
    since: Instant,
    answers: u32,
    windows: u32,
}

/// Answers in a window that is being closed.
#[derive(Clone, Copy, Debug)]
struct ClosedWindow {
    answers: u32,
    mean_nanos: u64,
}

/// Measurements of a path.
#[derive(Clone, Copy, Debug, Default)]
struct ResponseTimes {
    /// Answers in the open window: count, total time and maximum.
    answers: u32,
    total_nanos: u64,
    max_nanos: u64,
    /// Time of the last answer.
    last_nanos: u64,
    /// Result of the last window with answers, and the end of that window.
    typical_nanos: u64,
    judged: Option<Instant>,
    /// Window that is being closed.
    closed: Option<ClosedWindow>,
    /// Number of answers in closed windows of this connection, and the end of the first such
    /// window.
    seen: u32,
    first: Instant,
    suspicion: Option<Suspicion>,
    slow: bool,
    /// Number of good windows while slow.
    good: u32,
    /// Whether the path has become slow or has recovered since this flag was last read.
    turned: bool,
    /// Time of the last request; kept while a path is watched.
    sent: Instant,
}

impl ResponseTimes {
    /// Whether the path is slow or suspect.
    fn is_watched(&self) -> bool {
        self.slow || self.suspicion.is_some()
    }

    /// Whether the connection is too new to be judged.
    fn is_new(&self, now: Instant) -> bool {
        self.seen < FIRST_ANSWERS || now.since(self.first) < FIRST_TIME
    }

    /// Ends a window, if the path answered in it.
    fn close(&mut self, end: Instant) {
        let answers = self.answers;
        let Some(mean_nanos) = self.total_nanos.checked_div(u64::from(answers)) else { return };
        if self.seen == 0 {
            self.first = end;
        }
        self.seen = self.seen.saturating_add(answers);
        let others = (self.total_nanos - self.max_nanos).checked_div(u64::from(answers - 1));
        self.typical_nanos = others.unwrap_or(self.max_nanos);
        (self.judged, self.closed) = (Some(end), Some(ClosedWindow { answers, mean_nanos }));
        (self.answers, self.total_nanos, self.max_nanos) = (0, 0, 0);
    }

    /// Judges the closed window; `best` is the best time of the other paths.
    fn judge(&mut self, end: Instant, closed: ClosedWindow, best: Option<u64>) {
        let ClosedWindow { answers, mean_nanos } = closed;
        if self.slow {
            let bound = best.unwrap_or(0).saturating_mul(GOOD_RATIO).max(GOOD_NANOS);
            let good = self.good;
            self.good = if mean_nanos <= bound { good + 1 } else { good.saturating_sub(2) };
            if self.good >= GOOD_WINDOWS {
                let &mut Self { typical_nanos, judged, sent, .. } = self;
                *self = Self { typical_nanos, judged, sent, turned: true, ..Self::default() };
            }
            return;
        }
        let far = best.is_some_and(|best| self.typical_nanos > best.saturating_mul(SLOW_RATIO));
        if !far || self.typical_nanos <= SLOW_NANOS {
            self.suspicion = None;
            return;
        }
        let new = Suspicion { since: end, answers: 0, windows: 0 };
        let mut run = self.suspicion.unwrap_or(new);
        if self.is_new(end) {
            run = new;
        } else {
            (run.answers, run.windows) = (run.answers + answers, run.windows + 1);
        }
        self.suspicion = Some(run);
        let long = end.since(run.since) >= SLOW_TIME;
        if long && run.answers >= SLOW_ANSWERS && run.windows >= SLOW_WINDOWS {
            (self.slow, self.good, self.suspicion, self.turned) = (true, 0, None, true);
        }
    }
}

/// Measurements for all paths on a shard.
#[derive(Debug, Default)]
pub(crate) struct PathTimes {
    of: Vec<ResponseTimes>,
    /// End of the open window.
    end: Instant,
    /// Number of slow or suspect paths; nothing is checked while it is zero.
    watched: usize,
    /// Whether a window ended while a path was watched.
    shift: bool,
    /// Whether the last window found that the paths are not alike.
    differ: bool,
}

impl PathTimes {
    pub(super) fn new(paths: usize) -> Self {
        Self { of: vec![ResponseTimes::default(); paths], ..Self::default() }
    }

    fn of(&mut self, path: PathId) -> &mut ResponseTimes {
        let at = path.index();
        if self.of.len() <= at {
            self.of.resize(at + 1, ResponseTimes::default());
        }
        &mut self.of[at]
    }

    pub(crate) fn is_slow(&self, path: PathId) -> bool {
        self.watched > 0 && self.of.get(path.index()).is_some_and(|measured| measured.slow)
    }

    /// Forgets the measurements of a path that is new or was reconnected.
    pub(crate) fn forget(&mut self, path: PathId) {
        let measured = self.of(path);
        let watched = std::mem::take(measured).is_watched();
        self.watched -= usize::from(watched);
    }

    /// Best typical time among the other paths that are not slow.
    fn best_beside(&self, at: usize, end: Instant) -> Option<u64> {
        let others =
            self.of.iter().enumerate().filter(|(other, measured)| *other != at && !measured.slow);
        others
            .filter(|(_, measured)| {
                measured.judged.is_some_and(|judged| end.since(judged) <= FRESH)
            })
            .map(|(_, measured)| measured.typical_nanos)
            .min()
    }

    /// Records an answer. Returns whether it ended a window; [`Self::next_turned`] returns the
    /// result.
    pub(crate) fn answered(&mut self, path: PathId, now: Instant, took: Duration) -> bool {
        let ended = now >= self.end;
        if ended {
            self.close();
            self.end = now + WINDOW;
        }
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let measured = self.of(path);
        measured.answers += 1;
        measured.total_nanos = measured.total_nanos.saturating_add(nanos);
        measured.max_nanos = measured.max_nanos.max(nanos);
        measured.last_nanos = nanos;
        ended
    }

    /// Ends the open window and uses it to judge all paths.
    fn close(&mut self) {
        let end = self.end;
        for measured in &mut self.of {
            measured.close(end);
        }
        self.watched = 0;
        for at in 0..self.of.len() {
            let best = self.best_beside(at, end);
            let measured = &mut self.of[at];
            if let Some(closed) = measured.closed.take() {
                measured.judge(end, closed, best);
            } else if measured.judged.is_none_or(|judged| end.since(judged) > FRESH) {
                measured.suspicion = None;
            }
            self.watched += usize::from(measured.is_watched());
        }
        self.shift = self.watched > 0;
        let fresh = |measured: &&ResponseTimes| {
            measured.judged.is_some_and(|judged| end.since(judged) <= FRESH)
        };
        let typical = self.of.iter().filter(fresh).map(|measured| measured.typical_nanos);
        let quickest = typical.clone().min().unwrap_or(0);
        self.differ = typical.max().unwrap_or(0) > quickest.saturating_mul(ALIKE_RATIO);
    }

    /// Takes the next path that became slow or returned.
    pub(crate) fn next_turned(&mut self) -> Option<PathId> {
        let mut all = (0u16..).zip(&mut self.of);
        all.find_map(|(at, measured)| std::mem::take(&mut measured.turned).then_some(PathId(at)))
    }

    /// Whether the paths answer about equally fast, according to the measurements so far.
    pub(super) fn are_alike(&self) -> bool {
        !self.differ
    }

    /// Whether any path is slow or suspect.
    pub(super) fn is_watching(&self) -> bool {
        self.watched > 0
    }

    /// Returns true once after a window that ended while a path was watched. Requests that
    /// alternate with slower ones (a write, a flush, a write, ...) then swap their paths; otherwise
    /// the path that carries the slower requests would look slow.
    pub(super) fn take_shift(&mut self) -> bool {
        std::mem::take(&mut self.shift)
    }

    pub(super) fn sent(&mut self, path: PathId, now: Instant) {
        self.of(path).sent = now;
    }

    /// Selects the path for the next request if a request is due only to measure a path.
    pub(super) fn pick_try(
        &self,
        now: Instant,
        up: impl Iterator<Item = Candidate> + Clone,
    ) -> Option<PathId> {
        if up.clone().all(|c| self.is_slow(c.path)) {
            return None;
        }
        let load: u32 = up.clone().map(|c| c.inflight).sum();
        let is_due = |c: &Candidate| {
            let measured = self.of.get(c.path.index()).copied().unwrap_or_default();
            // At low load, a trial also delays the requests after it, so the pause is longer.
            let share = Duration::from_nanos(measured.last_nanos) * TRY_SHARE / (load + 1);
            c.inflight < TRIES_MAX
                && c.inflight * TRY_SHARE <= load
                && now.since(measured.sent) >= share.clamp(TRY_EVERY, TRY_EVERY_MAX)
        };
        up.filter(is_due).map(|c| c.path).next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const QUICK: PathId = PathId(0);
    const OTHER: PathId = PathId(1);

    fn at(ms: u32) -> Instant {
        Instant::ZERO + MS * ms
    }

    fn up(paths: &[(PathId, u32)]) -> impl Iterator<Item = Candidate> + Clone {
        paths.iter().map(|&(path, inflight)| Candidate { path, inflight, latency_ns: 0 })
    }

    /// Feeds in answers from both paths every `step` ms; returns the times at which OTHER left or
    /// returned.
    fn run_every(
        times: &mut PathTimes,
        span: std::ops::Range<u32>,
        step: usize,
        took: [Duration; 2],
    ) -> Vec<u32> {
        let mut turns = Vec::new();
        for ms in span.step_by(step) {
            times.answered(QUICK, at(ms), took[0]);
            times.answered(OTHER, at(ms), took[1]);
            while let Some(path) = times.next_turned() {
                assert_eq!(path, OTHER, "the quick one stays");
                turns.push(ms);
            }
        }
        turns
    }

    fn run(
        times: &mut PathTimes,
        span: std::ops::Range<u32>,
        quick: Duration,
        other: Duration,
    ) -> Vec<u32> {
        run_every(times, span, 20, [quick, other])
    }

    /// Returns the measurements for two paths that were fast until 5 s.
    fn warm() -> PathTimes {
        let mut times = PathTimes::default();
        assert!(run(&mut times, 0..5000, MS, MS).is_empty());
        times
    }

    #[test]
    fn a_far_slower_path_is_excluded_and_returns_within_a_second_of_being_quick() {
        let mut times = warm();
        let left = run(&mut times, 5000..9000, MS, 50 * MS);
        assert!(left.len() == 1 && (7000..7400).contains(&left[0]), "{left:?}");
        assert!(times.is_slow(OTHER) && !times.is_slow(QUICK));
        assert!(run(&mut times, 9000..20_000, MS, 50 * MS).is_empty(), "it stays away");
        // The slow path is sent a request every 50 ms.
        let back = run_every(&mut times, 20_000..21_000, 50, [MS, MS]);
        assert!(back.len() == 1 && (20_300..20_800).contains(&back[0]), "{back:?}");
        assert!(!times.is_slow(OTHER) && times.watched == 0);
        // A path with only half of its windows good does not count as fast.
        let mut times = warm();
        run(&mut times, 5000..9000, MS, 50 * MS);
        for round in 0..20 {
            let begin = 9000 + round * 200;
            assert!(run(&mut times, begin..begin + 100, MS, MS).is_empty());
            assert!(run(&mut times, begin + 100..begin + 200, MS, 50 * MS).is_empty());
        }
        assert!(times.is_slow(OTHER));
    }

    #[test]
    fn slowness_everywhere_or_brief_or_slight_ejects_no_path() {
        let mut times = PathTimes::default();
        assert!(run(&mut times, 0..9000, 90 * MS, 95 * MS).is_empty(), "the disk is slow");
        let mut times = PathTimes::default();
        for round in 0..10 {
            let begin = round * 4000;
            assert!(run(&mut times, begin..begin + 1800, MS, 50 * MS).is_empty(), "too briefly");
            assert!(run(&mut times, begin + 1800..begin + 4000, MS, MS).is_empty());
        }
        let mut times = PathTimes::default();
        assert!(
            run(&mut times, 0..9000, MS / 10, 9 * MS).is_empty(),
            "90 times as slow, yet quick"
        );
        let mut times = PathTimes::default();
        assert!(run(&mut times, 0..9000, 10 * MS, 70 * MS).is_empty(), "7 times as slow");
    }

    #[test]
    fn one_late_answer_does_not_make_a_path_suspect() {
        let mut times = warm();
        for ms in 5000..15_000 {
            times.answered(QUICK, at(ms), MS);
            // Every window contains one late answer.
            let late = ms % 90 == 0;
            times.answered(OTHER, at(ms), if late { 900 * MS } else { MS });
            assert_eq!(times.next_turned(), None);
        }
        assert_eq!(times.watched, 0);
    }

    #[test]
    fn an_outlier_on_several_paths_ejects_none_of_them() {
        // A repeated stall ends all requests in flight at the same time, more on one path than on
        // the other.
        let mut times = warm();
        for round in 0..30 {
            let begin = 5000 + round * 1000;
            for path in [QUICK, OTHER, OTHER, OTHER, OTHER] {
                for _ in 0..8 {
                    times.answered(path, at(begin), 900 * MS);
                }
            }
            assert!(run(&mut times, begin..begin + 100, MS, MS).is_empty());
            assert_eq!(times.next_turned(), None, "round {round}");
        }
        run(&mut times, 35_000..35_300, MS, MS);
        assert_eq!(times.watched, 0);
        // The paths are affected one after the other.
        let mut times = warm();
        for (path, begin) in [(QUICK, 5000), (OTHER, 5900)] {
            for _ in 0..16 {
                times.answered(path, at(begin), 900 * MS);
            }
        }
        assert!(run(&mut times, 5900..9000, MS, MS).is_empty());
        assert_eq!(times.watched, 0);
    }

    #[test]
    fn the_first_answers_of_a_connection_eject_no_path() {
        let mut times = warm();
        times.forget(OTHER);
        // Answers of 900 ms for 2.9 s: those in the first second do not count, and the rest is too
        // short.
        assert!(run(&mut times, 5000..7900, MS, 900 * MS).is_empty());
        assert!(run(&mut times, 7900..12_000, MS, MS).is_empty());
        assert_eq!(times.watched, 0);
        // All answers on an older connection count.
        assert_eq!(run(&mut times, 12_000..14_900, MS, 900 * MS).len(), 1);
    }

    #[test]
    fn a_path_leaves_only_after_many_answers() {
        let mut times = warm();
        let mut answers = 0;
        for ms in (5000..60_000).step_by(10) {
            times.answered(QUICK, at(ms), MS);
            if ms % 1000 == 500 {
                times.answered(OTHER, at(ms), 500 * MS);
                answers += 1;
            }
            if times.next_turned().is_some() {
                break;
            }
        }
        assert!(times.is_slow(OTHER) && answers >= SLOW_ANSWERS, "{answers}");
    }

    #[test]
    fn paths_are_alike_within_a_factor_of_two() {
        let mut times = PathTimes::default();
        assert!(times.are_alike(), "nothing is known");
        for (other, alike) in [(MS * 19 / 10, true), (MS * 3, false), (MS, true), (MS / 3, false)] {
            let begin = u32::try_from(times.end.as_nanos() / 1_000_000).unwrap();
            run(&mut times, begin..begin + 300, MS, other);
            assert_eq!(times.are_alike(), alike, "{other:?}");
        }
        // The last answers on a path without requests count for three seconds.
        for (ms, alike) in [(2000, false), (5000, true)] {
            times.answered(QUICK, at(ms), MS);
            times.answered(QUICK, at(ms + 200), MS);
            assert_eq!(times.are_alike(), alike, "after {ms} ms");
        }
    }

    #[test]
    fn a_lone_path_is_never_slow() {
        let mut times = PathTimes::default();
        times.answered(QUICK, at(0), MS);
        for ms in (0..60_000).step_by(20) {
            times.answered(OTHER, at(ms), 500 * MS);
            let left = times.next_turned().is_some();
            assert!(!left || ms <= 5000, "the last answer of the other is {ms} ms old");
        }
        let mut times = PathTimes::default();
        for ms in (0..60_000).step_by(20) {
            times.answered(OTHER, at(ms), 500 * MS);
            assert!(times.next_turned().is_none() && !times.is_watching());
        }
    }

    #[test]
    fn suspicion_without_answers_ends() {
        let mut times = warm();
        run(&mut times, 5000..6000, MS, 50 * MS);
        assert_eq!(times.watched, 1);
        for ms in (6000..9200).step_by(20) {
            times.answered(QUICK, at(ms), MS);
        }
        assert_eq!(times.watched, 0);
    }

    #[test]
    fn a_watched_path_is_tried_and_so_is_one_that_the_policy_passes_over() {
        let mut times = warm();
        assert!(!times.is_watching());
        run(&mut times, 5000..5300, MS, 50 * MS);
        assert!(times.is_watching() && !times.is_slow(OTHER), "suspect");
        for begin in [5300, 9300] {
            assert_eq!(times.is_slow(OTHER), begin == 9300);
            let mut tries = 0;
            for ms in begin..begin + 1000 {
                if times.pick_try(at(ms), up(&[(QUICK, 7), (OTHER, 1)])) == Some(OTHER) {
                    times.sent(OTHER, at(ms));
                    tries += 1;
                }
                times.sent(QUICK, at(ms));
            }
            assert!((10..=21).contains(&tries), "{tries} in a second");
            run(&mut times, begin + 1000..begin + 4000, MS, 50 * MS);
        }
        let tried = |load: &[(PathId, u32)]| times.pick_try(at(13_300), up(load));
        assert_eq!(tried(&[(QUICK, 0)]), Some(QUICK), "not used lately");
        times.sent(QUICK, at(13_300));
        let tried = |load: &[(PathId, u32)]| times.pick_try(at(13_300), up(load));
        assert_eq!(tried(&[(QUICK, 3), (OTHER, 1)]), Some(OTHER));
        assert_eq!(tried(&[(QUICK, 2), (OTHER, 1)]), None, "a quarter of the load");
        assert_eq!(tried(&[(QUICK, 200), (OTHER, 16)]), None, "16 in flight");
        assert_eq!(tried(&[(OTHER, 0)]), None, "it is the only path");
        // Without other load, a fifth of the time is spent on the slow path.
        times.answered(OTHER, at(13_300), 100 * MS);
        times.sent(OTHER, at(13_300));
        times.sent(QUICK, at(13_699));
        assert_eq!(times.pick_try(at(13_699), up(&[(QUICK, 0), (OTHER, 0)])), None);
        assert_eq!(times.pick_try(at(13_700), up(&[(QUICK, 0), (OTHER, 0)])), Some(OTHER));
        times.forget(OTHER);
        assert!(!times.is_slow(OTHER) && !times.is_watching());
    }
}
