//! Rate limits of an export.
//!
//! Owns [`RateLimits`]: the values of the settings `iops`, `bandwidth` and `burst`, as the engine
//! enforces them (`engine/io/throttle.rs`) and `export list` shows them.

use std::fmt;

use rtrs_core::settings::ByteSize;
use serde::{Deserialize, Serialize};

/// Maximum rates of an export, across all its sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RateLimits {
    /// Requests per second.
    pub iops: Option<u64>,
    /// Reads per second.
    pub iops_read: Option<u64>,
    /// Writes, discards and write zeroes per second.
    pub iops_write: Option<u64>,
    /// Bytes per second.
    pub bandwidth: Option<u64>,
    /// Bytes read per second.
    pub bandwidth_read: Option<u64>,
    /// Bytes written per second.
    pub bandwidth_write: Option<u64>,
    /// Maximum allowance that an idle export saves up, in milliseconds at each rate.
    pub burst_ms: u64,
}

impl RateLimits {
    /// Whether no limit is set.
    #[must_use]
    pub fn is_unlimited(&self) -> bool {
        let Self { iops, iops_read, iops_write, .. } = self;
        let Self { bandwidth, bandwidth_read, bandwidth_write, .. } = self;
        [iops, iops_read, iops_write, bandwidth, bandwidth_read, bandwidth_write]
            .into_iter()
            .all(Option::is_none)
    }
}

impl fmt::Display for RateLimits {
    /// Formats the limits that are set, as in the text form of an export.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let requests =
            [("iops", self.iops), ("iops-read", self.iops_read), ("iops-write", self.iops_write)];
        let bytes = [
            ("bandwidth", self.bandwidth),
            ("bandwidth-read", self.bandwidth_read),
            ("bandwidth-write", self.bandwidth_write),
        ];
        for (name, rate) in requests {
            if let Some(rate) = rate {
                write!(f, "{name}={rate},")?;
            }
        }
        for (name, rate) in bytes {
            if let Some(rate) = rate {
                write!(f, "{name}={},", ByteSize::new(rate))?;
            }
        }
        write!(f, "burst={}ms", self.burst_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_print_as_options() {
        let none = RateLimits { burst_ms: 100, ..RateLimits::default() };
        assert!(none.is_unlimited());
        let limits = RateLimits {
            iops: Some(2000),
            iops_read: Some(1),
            bandwidth_write: Some(10 << 20),
            ..none
        };
        assert_eq!(limits.to_string(), "iops=2000,iops-read=1,bandwidth-write=10M,burst=100ms");
        let text = serde_json::to_string(&limits).unwrap();
        assert_eq!(serde_json::from_str::<RateLimits>(&text).unwrap(), limits);
        let each = [
            RateLimits { iops: Some(1), ..none },
            RateLimits { iops_read: Some(1), ..none },
            RateLimits { iops_write: Some(1), ..none },
            RateLimits { bandwidth: Some(1), ..none },
            RateLimits { bandwidth_read: Some(1), ..none },
            RateLimits { bandwidth_write: Some(1), ..none },
        ];
        assert!(each.iter().all(|limits| !limits.is_unlimited()));
    }
}
