//! The real clock, CLOCK_MONOTONIC in nanoseconds, and the uptime of the host.

use crate::time::Instant;

#[allow(clippy::cast_sign_loss, reason = "these clocks are never negative")]
fn nanos(clock: libc::clockid_t) -> u64 {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: ts is a valid timespec; the clocks always exist on Linux.
    unsafe { libc::clock_gettime(clock, &raw mut ts) };
    ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64
}

/// Reads the system's monotonic clock. All shards of a process share its origin.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock;

impl Clock {
    /// Returns the current time.
    pub fn now(self) -> Instant {
        Instant::from_nanos(nanos(libc::CLOCK_MONOTONIC))
    }

    /// Returns the time since the host was started, in milliseconds, including the time it was
    /// suspended.
    pub fn boot_millis(self) -> u64 {
        nanos(libc::CLOCK_BOOTTIME) / 1_000_000
    }
}
