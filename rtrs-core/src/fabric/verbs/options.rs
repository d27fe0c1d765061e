//! Options of the provider, and the protocol values derived from them.

use crate::time::Duration;

/// Options of the provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsOptions {
    /// Maximum time for an accepted connection to start up.
    pub startup_timeout: Duration,
    /// Timeout for a disconnect: work that has not been sent by then is reported as flushed.
    pub close_timeout: Duration,
    /// Maximum number of connect requests from peers that are waiting for an answer; any more are
    /// rejected immediately.
    pub half_open_max: u32,
    /// Maximum number of requests that the connection manager queues.
    pub backlog: i32,
    /// Time without an answer from the peer after which a queue pair gives up. The wire supports
    /// powers of two times a few retries, so it may be as short as 3/4 of this value; some devices
    /// take up to four times as long (IBA 9.7.6.1.3).
    pub path_timeout: Duration,
    /// Encoded time that the peer waits after finding no receive posted (IBA table 45): 1 means 10
    /// us, 12 means 640 us. The default of RDMA CM is 0, which means 655 ms.
    pub min_rnr_timer: u8,
    /// Maximum number of outstanding RDMA reads from either end, limited by the devices. RTRS
    /// requests 0.
    pub reads_max: u8,
    /// Refuse devices without RDMA write with immediate (iWARP), which sessions need.
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

/// Interval and number of retransmissions of unacknowledged packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Retry {
    /// Local ACK timeout: 4.096 us times two to this power (IBA 9.7.6.1.3).
    pub(super) ack_timeout: u8,
    /// Number of retries, 1 to 6: rdma_rxe interprets 7 as infinite.
    pub(super) count: u8,
}

impl Retry {
    /// Returns the longest retry time up to `limit` that the wire can express.
    pub(super) fn within(limit: Duration) -> Self {
        const UNIT_NANOS: u128 = 4096;
        let limit = limit.as_nanos();
        let mut best = (0, Self { ack_timeout: 8, count: 1 });
        // The range starts at 1 ms, below which a busy peer looks silent, and ends at 31, the
        // field's largest value.
        for ack_timeout in 8..=31_u8 {
            let interval = UNIT_NANOS << ack_timeout;
            let Ok(count) = u8::try_from((limit / interval).saturating_sub(1).min(6)) else {
                continue;
            };
            // The first try takes an interval too. In a tie, more and shorter tries win.
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
        // Four seconds is seven tries of 537 ms.
        assert_eq!(Retry::within(Duration::from_secs(4)), Retry { ack_timeout: 17, count: 6 });
        assert_eq!(Retry::within(Duration::ZERO), Retry { ack_timeout: 8, count: 1 });
        let long = Retry::within(Duration::from_secs(1 << 40));
        assert_eq!(long, Retry { ack_timeout: 31, count: 6 });
    }
}
