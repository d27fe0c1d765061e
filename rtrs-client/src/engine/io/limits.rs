//! Time limits on the IO of a shard, taken from its session's settings.

use rtrs_core::time::{Duration, Instant};

use super::requests::{Request, Standing};
use crate::engine::session::{Failover, HeartbeatSettings, SessionConfig, SlowIo};

/// Interval between limit checks.
pub(super) const SWEEP: Duration = Duration::from_millis(250);
/// Minimum time allowed for a request, however old its IO is.
const LAST_TRY: Duration = Duration::from_secs(1);

/// Time limits for requests, whole IOs and silent connections.
#[derive(Debug)]
pub(super) struct TimeLimits {
    /// Time limit for a request on a connection that may be dead.
    request: Duration,
    /// Time limit for an IO that waits for a path; None if it is unlimited.
    no_path: Option<Duration>,
    slow_io: SlowIo,
    failover: Failover,
    /// Duration of silence after which a connection that owes an answer is probed.
    pub(super) silence: Duration,
    /// Time limit for the answer to a probe.
    pub(super) probe: Duration,
}

impl TimeLimits {
    pub(super) fn new(config: &SessionConfig) -> Self {
        let HeartbeatSettings { interval, missed_max, .. } = config.heartbeat;
        let half = config.io_timeout / 2;
        Self {
            request: config.io_timeout,
            no_path: config.no_path.io_age_max(config.io_timeout),
            slow_io: config.slow_io,
            failover: config.failover,
            silence: interval.min(half),
            probe: (interval * missed_max).min(half),
        }
    }

    /// Creates limits that fail IO of this age, for tests.
    #[cfg(test)]
    pub(super) fn failing_after(age: Duration) -> Self {
        Self {
            request: age / 3,
            no_path: Some(age),
            slow_io: SlowIo::Fail,
            failover: Failover::Strict,
            silence: age / 30,
            probe: age / 10,
        }
    }

    /// Maximum time for a whole IO; None if it is unlimited.
    fn age_max(&self) -> Option<Duration> {
        self.no_path.filter(|_| self.fails_slow())
    }

    /// Whether an IO that a slow disk delays for too long fails.
    pub(super) fn fails_slow(&self) -> bool {
        self.slow_io == SlowIo::Fail
    }

    /// Whether an IO has used up its time.
    pub(super) fn is_over(&self, submitted: Instant, now: Instant) -> bool {
        self.age_max().is_some_and(|max| now.since(submitted) >= max)
    }

    /// Whether a request has used up its time on its connection. `submitted` is when its IO began.
    pub(super) fn is_overdue(&self, sent: Instant, submitted: Instant, now: Instant) -> bool {
        let age = sent.since(submitted);
        // Remaining time of the whole IO, but at least `LAST_TRY`.
        let left = self.age_max().map_or(self.request, |max| max.saturating_sub(age).max(LAST_TRY));
        now.since(sent) >= self.request.min(left)
    }

    /// Whether a connection that carries an overdue request is alive: something was received on it
    /// recently, and after the request was sent.
    pub(super) fn is_alive(&self, sent: Instant, heard: Instant, now: Instant) -> bool {
        heard > sent && now.since(heard) <= self.silence + self.probe + SWEEP * 2
    }

    /// Maximum time that an IO may wait to be issued; None if it is unlimited. If slow requests
    /// count as failed and the disk is slow, the time limit of a request applies to IOs that wait
    /// for permits.
    pub(super) fn waiting_max(&self, disk_is_slow: bool) -> Option<Duration> {
        if self.fails_slow() && disk_is_slow { Some(self.request) } else { self.age_max() }
    }

    /// Whether a request whose connection has ended has waited too long for a path. A request that
    /// awaits a fence fails only if the server does not support fences: the first copy could start
    /// after the error is reported, and take effect after newer writes.
    pub(super) fn fails_retry(
        &self,
        request: &Request,
        submitted: Instant,
        has_fences: bool,
        now: Instant,
    ) -> bool {
        let Some(bound) = self.no_path else { return false };
        let early = rtrs_core::mutated!(GivenUpBeforeFence);
        let unfenced = self.failover == Failover::Strict && !has_fences;
        let waits = match request.standing {
            Standing::Ready => true,
            Standing::AwaitingFence { .. } => unfenced || early,
            Standing::Sent | Standing::Answered(_) | Standing::Exposed => false,
        };
        // Time spent on a slow disk does not count if it is unlimited.
        let waits_for_disk = self.slow_io == SlowIo::Wait && !early;
        let since = if waits_for_disk { request.sent } else { submitted };
        waits && now.since(since) >= bound
    }

    /// Whether a flush that has been held back since `held`, perhaps behind syncs that a slow disk
    /// delays, fails.
    pub(super) fn fails_held(
        &self,
        submitted: Instant,
        held: Instant,
        disk_is_slow: bool,
        now: Instant,
    ) -> bool {
        let is_slow = self.fails_slow() && disk_is_slow && now.since(held) >= self.request;
        self.is_over(submitted, now) || is_slow
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn at(s: u32) -> Instant {
        Instant::ZERO + S * s
    }

    fn limits(slow_io: SlowIo) -> TimeLimits {
        TimeLimits { slow_io, ..TimeLimits::failing_after(S * 30) }
    }

    #[test]
    fn a_late_request_gets_the_remaining_time_of_its_io() {
        let fail = limits(SlowIo::Fail);
        assert!(!fail.is_overdue(at(0), at(0), at(9)) && fail.is_overdue(at(0), at(0), at(10)));
        assert!(!fail.is_overdue(at(24), at(0), at(29)) && fail.is_overdue(at(24), at(0), at(30)));
        assert!(!fail.is_overdue(at(40), at(0), at(40)) && fail.is_overdue(at(40), at(0), at(41)));
        let wait = limits(SlowIo::Wait);
        assert!(!wait.is_overdue(at(24), at(0), at(33)) && wait.is_overdue(at(24), at(0), at(34)));
    }

    #[test]
    fn a_slow_disk_limits_waiting_io_only_if_slow_io_fails() {
        assert_eq!(limits(SlowIo::Fail).waiting_max(true), Some(S * 10));
        assert_eq!(limits(SlowIo::Fail).waiting_max(false), Some(S * 30));
        assert_eq!(limits(SlowIo::Wait).waiting_max(true), None);
        assert!(limits(SlowIo::Fail).is_over(at(0), at(30)));
        assert!(!limits(SlowIo::Wait).is_over(at(0), at(99)));
    }

    #[test]
    fn a_held_flush_fails_by_its_age_or_behind_a_slow_disk() {
        let fail = limits(SlowIo::Fail);
        assert!(fail.fails_held(at(0), at(29), false, at(30)), "its age");
        assert!(fail.fails_held(at(0), at(5), true, at(15)), "behind a slow disk");
        assert!(!fail.fails_held(at(0), at(5), true, at(14)));
        assert!(!fail.fails_held(at(0), at(5), false, at(15)));
        assert!(!limits(SlowIo::Wait).fails_held(at(0), at(5), true, at(99)));
    }

    #[test]
    fn a_connection_is_alive_if_heard_after_the_request_and_recently() {
        let limits = limits(SlowIo::Wait);
        assert!(limits.is_alive(at(0), at(5), at(9)));
        assert!(!limits.is_alive(at(5), at(5), at(6)), "nothing since the request");
        assert!(!limits.is_alive(at(0), at(5), at(10)), "not recently");
    }
}
