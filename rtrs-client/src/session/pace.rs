//! Paths that are far slower than the others, as this core's answers show.
//!
//! Each answer moves the mean of its path, the newest ones weigh most. A path whose mean stays far
//! above the best of the others leaves the choice. Then one request now and then goes over it, and
//! when some of these in a row were nearly as quick as elsewhere, it is back: the way back is
//! narrower than the way out, so that no path goes in and out all the time. The last path never
//! leaves. While a path is suspect, paths that nobody used lately get a request now and then too,
//! or there would be nothing to compare it with.

use rtrs_core::ids::PathId;
use rtrs_core::time::{Duration, Instant};

use super::policy::Candidate;

/// A path is slow when its mean is so many times the best of the others...
const SLOW_RATIO: u64 = 8;
/// ...and above this...
const SLOW_NANOS: u64 = 10_000_000;
/// ...for so long...
const SLOW_TIME: Duration = Duration::from_secs(2);
/// ...in so many answers at least.
const SLOW_ANSWERS: u32 = 4;
/// An answer over a slow path is good within so many times the best of the others, or below
/// [`GOOD_NANOS`].
const GOOD_RATIO: u64 = 2;
const GOOD_NANOS: u64 = SLOW_NANOS / 2;
/// So many good answers in a row bring a path back.
const GOOD_ANSWERS: u32 = 3;
/// How often a slow path is tried, and how old a mean may be before its path is tried.
const TRY_EVERY: Duration = Duration::from_secs(1);
/// Older means are compared with nothing.
const FRESH: Duration = Duration::from_secs(3);

/// What is known of a path.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    mean_nanos: u64,
    answers: u32,
    /// When the last answer came.
    last: Instant,
    /// Since when the mean is far above the others', and answers since.
    above: Option<(Instant, u32)>,
    slow: bool,
    /// Good answers in a row while slow.
    good: u32,
    /// When a request was sent over it only to see.
    tried: Instant,
}

impl Pace {
    /// Slow, or perhaps about to be.
    fn is_watched(&self) -> bool {
        self.slow || self.mean_nanos > SLOW_NANOS
    }
}

/// The paces of all paths on a core.
#[derive(Debug, Default)]
pub(crate) struct Paces {
    of: Vec<Pace>,
    /// Paths that are slow or suspect; nothing is looked at while there are none.
    watched: usize,
}

impl Paces {
    pub(super) fn new(paths: usize) -> Self {
        Self { of: vec![Pace::default(); paths], watched: 0 }
    }

    fn of(&mut self, path: PathId) -> &mut Pace {
        let at = path.index();
        if self.of.len() <= at {
            self.of.resize(at + 1, Pace::default());
        }
        &mut self.of[at]
    }

    /// True when a path has left the choice.
    pub(crate) fn is_slow(&self, path: PathId) -> bool {
        self.watched > 0 && self.of.get(path.index()).is_some_and(|pace| pace.slow)
    }

    /// Nothing is known of a path any more; it is new, or connected anew.
    pub(crate) fn forget(&mut self, path: PathId) {
        let pace = self.of(path);
        let watched = std::mem::take(pace).is_watched();
        self.watched -= usize::from(watched);
    }

    /// The best mean of the other paths that carry requests.
    fn best_beside(&self, path: PathId, now: Instant) -> Option<u64> {
        let others = self.of.iter().enumerate().filter(|(at, _)| *at != path.index());
        others
            .filter(|(_, pace)| !pace.slow && pace.answers > 0 && now.since(pace.last) <= FRESH)
            .map(|(_, pace)| pace.mean_nanos)
            .min()
    }

    /// A request was answered. True when the path is slow now and was not, or the other way round.
    pub(crate) fn answered(&mut self, path: PathId, now: Instant, took: Duration) -> bool {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let pace = self.of(path);
        let (watched, slow) = (pace.is_watched(), pace.slow);
        let mean = pace.mean_nanos;
        pace.mean_nanos = match pace.answers {
            0 => nanos,
            // Few answers come over a slow path, so each weighs more.
            _ if slow => mean / 2 + nanos / 2,
            _ => mean - mean / 8 + nanos / 8,
        };
        pace.answers = pace.answers.saturating_add(1);
        pace.last = now;
        if pace.is_watched() {
            let best = self.best_beside(path, now);
            self.of(path).judge(now, nanos, best);
        } else {
            pace.above = None;
        }
        let pace = *self.of(path);
        self.watched = self.watched + usize::from(pace.is_watched()) - usize::from(watched);
        pace.slow != slow
    }

    /// The path that the next request is to go over, only to see how quick it is.
    pub(crate) fn pick_try(
        &mut self,
        now: Instant,
        up: impl Iterator<Item = Candidate> + Clone,
    ) -> Option<PathId> {
        if self.watched == 0 || up.clone().all(|c| self.is_slow(c.path)) {
            return None;
        }
        let mut idle = up.filter(|c| c.inflight == 0).map(|c| c.path);
        let path = idle.find(|path| {
            let pace = self.of.get(path.index()).copied().unwrap_or_default();
            now.since(pace.last.max(pace.tried)) >= TRY_EVERY
        })?;
        self.of(path).tried = now;
        Some(path)
    }
}

impl Pace {
    fn judge(&mut self, now: Instant, nanos: u64, best: Option<u64>) {
        let Some(best) = best else {
            self.above = None;
            return;
        };
        if self.slow {
            let is_good = nanos <= best.saturating_mul(GOOD_RATIO).max(GOOD_NANOS);
            self.good = if is_good { self.good + 1 } else { 0 };
            if self.good >= GOOD_ANSWERS {
                *self = Self { mean_nanos: nanos, answers: 1, last: now, ..Self::default() };
            }
            return;
        }
        if self.mean_nanos <= best.saturating_mul(SLOW_RATIO) {
            self.above = None;
            return;
        }
        let (since, answers) = self.above.unwrap_or((now, 0));
        self.above = Some((since, answers + 1));
        if now.since(since) >= SLOW_TIME && answers + 1 >= SLOW_ANSWERS {
            (self.slow, self.good, self.above) = (true, 0, None);
        }
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

    /// Answers of both paths every 50 ms over a time; returns when OTHER left or came back.
    fn run(
        paces: &mut Paces,
        span: std::ops::Range<u32>,
        quick: Duration,
        other: Duration,
    ) -> Vec<u32> {
        let mut turns = Vec::new();
        for ms in span.step_by(50) {
            assert!(!paces.answered(QUICK, at(ms), quick), "the quick one stays");
            if paces.answered(OTHER, at(ms), other) {
                turns.push(ms);
            }
        }
        turns
    }

    #[test]
    fn a_path_that_stays_far_slower_leaves_and_comes_back_by_good_answers() {
        let mut paces = Paces::default();
        assert!(run(&mut paces, 0..5000, MS, MS).is_empty());
        let left = run(&mut paces, 5000..9000, MS, 50 * MS);
        assert!(left.len() == 1 && (7000..7300).contains(&left[0]), "{left:?}");
        assert!(paces.is_slow(OTHER) && !paces.is_slow(QUICK));
        // Two good answers and a bad one are not enough, three good ones are.
        for (ms, took, slow) in
            [(9000, 1, true), (10_000, 1, true), (11_000, 50, true), (12_000, 1, true)]
        {
            paces.answered(QUICK, at(ms), MS);
            paces.answered(OTHER, at(ms), MS * took);
            assert_eq!(paces.is_slow(OTHER), slow, "at {ms}");
        }
        assert_eq!(run(&mut paces, 13_000..14_000, MS, MS), [13_050]);
        assert_eq!(paces.watched, 0);
    }

    #[test]
    fn what_is_slow_everywhere_or_for_a_moment_or_by_little_stays() {
        let mut paces = Paces::default();
        assert!(run(&mut paces, 0..9000, 90 * MS, 95 * MS).is_empty(), "the disk is slow");
        let mut paces = Paces::default();
        for round in 0..10 {
            let begin = round * 4000;
            assert!(run(&mut paces, begin..begin + 1000, MS, 50 * MS).is_empty(), "for a moment");
            assert!(run(&mut paces, begin + 1000..begin + 4000, MS, MS).is_empty());
        }
        let mut paces = Paces::default();
        assert!(
            run(&mut paces, 0..9000, MS / 10, 9 * MS).is_empty(),
            "90 times as slow, and quick"
        );
        let mut paces = Paces::default();
        assert!(run(&mut paces, 0..9000, 10 * MS, 70 * MS).is_empty(), "7 times as slow");
    }

    #[test]
    fn a_path_alone_is_compared_with_nothing() {
        let mut paces = Paces::default();
        paces.answered(QUICK, at(0), MS);
        for ms in (0..60_000).step_by(100) {
            let left = paces.answered(OTHER, at(ms), 500 * MS);
            assert!(!left || ms <= 5000, "the last answer of the other is {ms} ms old");
        }
        let mut paces = Paces::default();
        for ms in (0..60_000).step_by(100) {
            assert!(!paces.answered(OTHER, at(ms), 500 * MS));
        }
        assert_eq!(paces.pick_try(at(60_000), up(&[(OTHER, 0)])), None);
    }

    #[test]
    fn a_slow_path_is_tried_once_a_second_and_so_is_one_nobody_uses() {
        let mut paces = Paces::default();
        run(&mut paces, 0..4000, MS, 50 * MS);
        assert!(paces.is_slow(OTHER));
        let both = [(QUICK, 3), (OTHER, 0)];
        assert_eq!(paces.pick_try(at(4500), up(&both)), None, "it answered a moment ago");
        assert_eq!(paces.pick_try(at(5000), up(&both)), Some(OTHER));
        assert_eq!(paces.pick_try(at(5900), up(&both)), None);
        assert_eq!(paces.pick_try(at(6000), up(&[(QUICK, 3), (OTHER, 1)])), None, "one at a time");
        assert_eq!(paces.pick_try(at(6000), up(&both)), Some(OTHER));
        assert_eq!(paces.pick_try(at(9000), up(&[(OTHER, 0)])), None, "it is all there is");
        paces.forget(OTHER);
        assert!(!paces.is_slow(OTHER));
        assert_eq!(paces.pick_try(at(9000), up(&both)), None, "nothing is suspect");
        // The first of two idle ones takes everything: the second is tried when that is slow.
        for ms in 9000..9020 {
            paces.answered(QUICK, at(ms), 40 * MS);
        }
        assert_eq!(paces.pick_try(at(9100), up(&both)), Some(OTHER));
    }
}
