//! Rate limits for repeated log lines: a failure may recur ten thousand times a second.

use crate::time::{Duration, Instant};

/// Minimum time between lines.
const INTERVAL: Duration = Duration::from_secs(5);
/// Maximum interval for a kind of line that keeps recurring.
const INTERVAL_MAX: Duration = Duration::from_secs(600);
/// Quiet period after which a kind of line starts over with the short interval.
const PAUSE: Duration = Duration::from_secs(1200);
/// Maximum number of kinds. Beyond it, the kind that has been quiet the longest is forgotten,
/// preferably one without suppressed lines.
const KINDS_MAX: usize = 64;

/// Lets one line pass per interval and counts the suppressed ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogLimit {
    quiet_until: Option<Instant>,
    left_out: u64,
}

impl LogLimit {
    /// Decides whether a line passes. Returns None if it is suppressed; otherwise the number of
    /// lines suppressed since the last line that passed.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.quiet_until.is_some_and(|until| now < until) {
            self.left_out += 1;
            return None;
        }
        self.quiet_until = Some(now + INTERVAL);
        Some(std::mem::take(&mut self.left_out))
    }
}

/// Rate limits for many kinds of lines. The first line of each kind passes, then one after 5 s, 10
/// s, 20 s and so on up to 10 minutes while it keeps repeating; the others are counted.
#[derive(Clone, Debug)]
pub struct LogLimits<K> {
    kinds: Vec<Kind<K>>,
}

#[derive(Clone, Debug)]
struct Kind<K> {
    key: K,
    interval: Duration,
    passed: Instant,
    last: Instant,
    left_out: u64,
}

impl<K> Default for LogLimits<K> {
    fn default() -> Self {
        Self { kinds: Vec::new() }
    }
}

impl<K: Clone + PartialEq> LogLimits<K> {
    /// Returns a kind whose interval has ended, with the number of its suppressed lines. The caller
    /// logs a line for them, since there may be no further line of that kind.
    pub fn overdue(&mut self, now: Instant) -> Option<(K, u64)> {
        let is_over = |kind: &&mut Kind<K>| kind.closes().is_some_and(|at| at <= now);
        let kind = self.kinds.iter_mut().find(is_over)?;
        kind.interval = (kind.interval * 2).min(INTERVAL_MAX);
        kind.passed = now;
        Some((kind.key.clone(), std::mem::take(&mut kind.left_out)))
    }

    /// Returns the number of suppressed lines of this kind. The caller logs a line for them.
    pub fn take(&mut self, key: &K) -> u64 {
        let kind = self.kinds.iter_mut().find(|kind| kind.key == *key);
        kind.map_or(0, |kind| std::mem::take(&mut kind.left_out))
    }

    /// Returns when to call [`overdue`](Self::overdue) next.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.kinds.iter().filter_map(Kind::closes).min()
    }
}

impl<K> Kind<K> {
    /// Returns when a line that reports the suppressed lines is due.
    fn closes(&self) -> Option<Instant> {
        (self.left_out > 0).then(|| self.passed + self.interval)
    }
}

impl<K: PartialEq> LogLimits<K> {
    /// Decides whether a line of this kind passes. Returns None if it is suppressed; otherwise the
    /// number of lines of the kind suppressed since the last line that passed.
    pub fn admit(&mut self, now: Instant, key: K) -> Option<u64> {
        let found = self.kinds.iter().position(|kind| kind.key == key);
        let fresh = Kind { key, interval: INTERVAL, passed: now, last: now, left_out: 0 };
        let Some(kind) = found.map(|at| &mut self.kinds[at]) else {
            if self.kinds.len() >= KINDS_MAX
                && let Some((quietest, _)) = self
                    .kinds
                    .iter()
                    .enumerate()
                    .min_by_key(|(_, kind)| (kind.left_out > 0, kind.last))
            {
                self.kinds.swap_remove(quietest);
            }
            self.kinds.push(fresh);
            return Some(0);
        };
        let left_out = kind.left_out;
        if now.since(kind.last) >= PAUSE {
            *kind = fresh;
            return Some(left_out);
        }
        kind.last = now;
        if now.since(kind.passed) < kind.interval {
            kind.left_out += 1;
            return None;
        }
        let interval = (kind.interval * 2).min(INTERVAL_MAX);
        *kind = Kind { interval, ..fresh };
        Some(left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_kind_is_logged_at_growing_intervals() {
        let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
        let mut limits = LogLimits::default();
        // Models a client that tries again each second.
        let passed = |limits: &mut LogLimits<u8>, key, from, to| -> Vec<(u64, u64)> {
            let lines = (from..to).map(|second| (second, limits.admit(at(second), key)));
            lines.filter_map(|(second, left_out)| Some((second, left_out?))).collect()
        };
        assert_eq!(passed(&mut limits, 1, 0, 40), [(0, 0), (5, 4), (15, 9), (35, 19)]);
        assert_eq!(passed(&mut limits, 2, 40, 42), [(40, 0)], "another kind");
        assert!(passed(&mut limits, 1, 42, 20_000).len() < 40);
        // The kind was quiet for a long time.
        let lines = passed(&mut limits, 1, 30_000, 30_006);
        assert_eq!(lines.iter().map(|line| line.0).collect::<Vec<_>>(), [30_000, 30_005]);
        // The number of kinds is limited.
        for key in 0..=255 {
            let _ = limits.admit(at(40_000), key);
        }
        assert_eq!(limits.kinds.len(), KINDS_MAX);
    }

    #[test]
    fn suppressed_lines_are_reported_without_a_further_line() {
        let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
        let mut limits = LogLimits::default();
        for second in [0, 1, 2] {
            let _ = limits.admit(at(second), 'a');
        }
        assert_eq!(limits.deadline(), Some(at(5)));
        assert_eq!(limits.overdue(at(4)), None);
        assert_eq!(limits.overdue(at(5)), Some(('a', 2)));
        assert_eq!((limits.overdue(at(5)), limits.deadline()), (None, None));
        // The next line of that kind waits for the longer interval.
        assert_eq!(limits.admit(at(14), 'a'), None);
        assert_eq!(limits.overdue(at(15)), Some(('a', 1)));
    }

    #[test]
    fn suppressed_lines_are_reported_despite_many_single_ones() {
        let mut limits = LogLimits::default();
        let at = |ms| Instant::ZERO + Duration::from_millis(ms);
        for _ in 0..3 {
            let _ = limits.admit(at(0), 0);
        }
        for key in 1..=1000 {
            let _ = limits.admit(at(key), key);
        }
        assert_eq!(limits.overdue(at(5000)), Some((0, 2)));
    }

    #[test]
    fn one_line_passes_per_interval_with_the_suppressed_count() {
        let begin = Instant::ZERO;
        let mut limit = LogLimit::default();
        assert_eq!(limit.admit(begin), Some(0));
        for _ in 0..7 {
            assert_eq!(limit.admit(begin + INTERVAL / 2), None);
        }
        assert_eq!(limit.admit(begin + INTERVAL), Some(7));
        assert_eq!(limit.admit(begin + INTERVAL), None);
        assert_eq!(limit.admit(begin + INTERVAL * 2), Some(1));
    }
}
