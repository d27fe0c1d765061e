//! Rate limit on log lines about peers: for each peer, and in total.

use std::net::IpAddr;

use rtrs_base::log_limit::LogLimits;
use rtrs_base::time::{Duration, Instant};

/// Maximum number of lines in a period, whatever the number of peers.
const LINES_MAX: u32 = 64;
/// Length of a period.
const PERIOD: Duration = Duration::from_secs(60);

/// Rate limit on one kind of line.
#[derive(Debug, Default)]
pub(crate) struct PeerLog {
    peers: LogLimits<IpAddr>,
    ends_at: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl PeerLog {
    /// Decides whether to log a line. Returns None to suppress it, otherwise the number of lines
    /// suppressed so far: lines of this peer, and lines of all peers beyond the total.
    pub(crate) fn admit(&mut self, now: Instant, peer: IpAddr) -> Option<u64> {
        let of_peer = self.peers.admit(now, peer)?;
        if self.ends_at.is_none_or(|at| at <= now) {
            self.ends_at = Some(now + PERIOD);
            self.lines = 0;
        }
        if self.lines >= LINES_MAX {
            self.left_out += of_peer + 1;
            return None;
        }
        self.lines += 1;
        Some(of_peer + std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u16) -> IpAddr {
        let [high, low] = number.to_be_bytes();
        [10, 0, high, low].into()
    }

    #[test]
    fn many_peers_share_a_limit_and_no_line_is_uncounted() {
        let mut log = PeerLog::default();
        let (mut lines, mut counted) = (0, 0);
        for second in 0..600 {
            let now = Instant::ZERO + Duration::from_secs(second);
            for number in 0..500 {
                if let Some(left_out) = log.admit(now, peer(number)) {
                    (lines, counted) = (lines + 1, counted + 1 + left_out);
                }
            }
        }
        assert!((64..=640).contains(&lines), "{lines}");
        assert!(counted > 100_000, "{counted}");
    }

    #[test]
    fn few_peers_are_all_named() {
        let mut log = PeerLog::default();
        let now = Instant::ZERO;
        assert!((0..60).all(|number| log.admit(now, peer(number)) == Some(0)));
        assert!((0..60).all(|number| log.admit(now, peer(number)).is_none()));
    }
}
