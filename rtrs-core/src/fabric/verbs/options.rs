//! How the provider behaves, and the numbers of the wire that follow from it.

use crate::time::Duration;

/// How this provider behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsOptions {
    /// Bound of an accepted connection's start-up.
    pub startup_timeout: Duration,
    /// Bound of a disconnect: what has not been sent by then is reported as flushed.
    pub close_timeout: Duration,
    /// Requests of peers that wait for their answer; those beyond are rejected at once.
    pub half_open_max: u32,
    /// Requests the connection manager queues before we see them.
    pub backlog: i32,
    /// Silence of the peer after which a queue pair gives up what it sent. The wire knows powers
    /// of two times a few retries, so it may be as short as 3/4 of it; some devices take up to
    /// four times as long (IBA 9.7.6.1.3).
    pub path_timeout: Duration,
    /// Code of the time our peer waits when it found no receive posted (IBA table 45): 1 means
    /// 10 us, 12 640 us. RDMA CM would leave it at 0, which means 655 ms.
    pub min_rnr_timer: u8,
    /// RDMA reads either end may have outstanding, at most what the devices can. RTRS asks for 0.
    pub reads_max: u8,
    /// Refuse devices without RDMA write with immediate (iWARP), which a session needs.
    pub require_imm: bool,
}

impl Default for VerbsOptions {
    fn default() -> Self {
        Self {
            startup_timeout: Duration::from_secs(5),
            close_timeout: Duration::from_secs(2),
            half_open_max: 1024,
            backlog: 1024,
            path_timeout: Duration::from_secs(4),
            min_rnr_timer: 12,
            reads_max: 0,
            require_imm: true,
        }
    }
}

/// When a queue pair repeats what was not acknowledged, and how often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Retry {
    /// Local ACK timeout: 4.096 us times two to this power (IBA 9.7.6.1.3).
    pub(super) ack_timeout: u8,
    /// Repetitions, 1 to 6: rdma_rxe takes 7 for endless.
    pub(super) count: u8,
}

impl Retry {
    /// The longest time not above `limit` that the wire can say.
    pub(super) fn within(limit: Duration) -> Self {
        const UNIT_NANOS: u128 = 4096;
        let limit = limit.as_nanos();
        let mut best = (0, Self { ack_timeout: 8, count: 1 });
        // From 1 ms, below which a busy peer looks silent, to 2^31, the longest the field holds.
        for ack_timeout in 8..=31_u8 {
            let interval = UNIT_NANOS << ack_timeout;
            let Ok(count) = u8::try_from((limit / interval).saturating_sub(1).min(6)) else {
                continue;
            };
            // The first try has its interval too. More and shorter tries win a draw.
            let total = interval * (u128::from(count) + 1);
            if count >= 1 && total > best.0 {
                best = (total, Self { ack_timeout, count });
            }
        }
        best.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_retry_time_stays_within_its_limit() {
        for millis in [4, 10, 100, 500, 777, 1000, 2000, 3500, 4000, 10_000, 30_000, 100_000] {
            let limit = Duration::from_millis(millis);
            let retry = Retry::within(limit);
            let interval = Duration::from_nanos(4096 << retry.ack_timeout);
            let total = interval * u32::from(retry.count + 1);
            assert!(total <= limit, "{millis} ms: {retry:?} takes {total:?}");
            assert!(total >= limit * 3 / 4, "{millis} ms: {retry:?} takes {total:?}");
            assert!((1..=6).contains(&retry.count));
        }
        // Four seconds: seven tries of 537 ms.
        assert_eq!(Retry::within(Duration::from_secs(4)), Retry { ack_timeout: 17, count: 6 });
        assert_eq!(Retry::within(Duration::ZERO), Retry { ack_timeout: 8, count: 1 });
        let long = Retry::within(Duration::from_secs(1 << 40));
        assert_eq!(long, Retry { ack_timeout: 31, count: 6 });
    }
}
