//! A limit for lines that repeat: what fails once may fail ten thousand times a second.

use crate::time::{Duration, Instant};

/// Between two lines.
const INTERVAL: Duration = Duration::from_secs(5);

/// Lets one line pass per interval and counts the others.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogLimit {
    quiet_until: Option<Instant>,
    left_out: u64,
}

impl LogLimit {
    /// Something is to be logged. `None`: not now. Else how many were left out since the last line.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.quiet_until.is_some_and(|until| now < until) {
            self.left_out += 1;
            return None;
        }
        self.quiet_until = Some(now + INTERVAL);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_passes_per_interval_and_says_what_was_left_out() {
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
