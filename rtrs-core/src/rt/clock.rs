//! The real clock: CLOCK_MONOTONIC as nanoseconds.

use crate::time::Instant;

/// Reads the system's monotonic clock. All shards of a process share its origin.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock;

impl Clock {
    /// The current time.
    #[allow(clippy::cast_sign_loss, reason = "the monotonic clock is never negative")]
    pub fn now(self) -> Instant {
        let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: ts is a valid timespec; CLOCK_MONOTONIC always exists on Linux.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut ts) };
        Instant::from_nanos(ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64)
    }
}
