//! Settings that can change while a node runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rtrs_base::time::Duration;

/// A setting that can be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tunable {
    /// Minimum delay between connection attempts, in nanoseconds.
    ReconnectMin,
    /// Maximum delay between connection attempts, in nanoseconds.
    ReconnectMax,
    /// Number of unacknowledged messages at or above which each write is followed by a check for
    /// acknowledgments.
    MaxUnackedPackets,
    /// Number of unacknowledged bytes at or above which each write is followed by a check for
    /// acknowledgments.
    MaxUnackedBytes,
    /// Send buffer size of TCP connections, in bytes; 0 leaves it to the system.
    TcpSndbuf,
    /// Receive buffer size of TCP connections, in bytes; 0 leaves it to the system.
    TcpRcvbuf,
}

const COUNT: usize = Tunable::TcpRcvbuf as usize + 1;

/// Current values of the settings that can be changed. Clones share the values.
#[derive(Clone, Debug)]
pub struct Tuning(Arc<[AtomicU64; COUNT]>);

impl Default for Tuning {
    fn default() -> Self {
        let tuning = Self(Arc::new([const { AtomicU64::new(0) }; COUNT]));
        for (tunable, value) in [
            (Tunable::ReconnectMin, 1_000_000),
            (Tunable::ReconnectMax, 1_000_000_000),
            (Tunable::MaxUnackedPackets, 8),
            (Tunable::MaxUnackedBytes, 64 << 10),
        ] {
            tuning.set(tunable, value);
        }
        tuning
    }
}

impl Tuning {
    /// Returns the value of a setting.
    pub fn get(&self, tunable: Tunable) -> u64 {
        self.0[tunable as usize].load(Ordering::Relaxed)
    }

    /// Changes a setting.
    pub fn set(&self, tunable: Tunable, value: u64) {
        self.0[tunable as usize].store(value, Ordering::Relaxed);
    }

    /// Returns the minimum delay between connection attempts.
    pub(super) fn reconnect_min(&self) -> Duration {
        Duration::from_nanos(self.get(Tunable::ReconnectMin))
    }

    /// Returns the maximum delay between connection attempts.
    pub(super) fn reconnect_max(&self) -> Duration {
        Duration::from_nanos(self.get(Tunable::ReconnectMax)).max(self.reconnect_min())
    }

    /// Whether a sender with this many unacknowledged packets and bytes checks after each write.
    pub(super) fn is_much(&self, packets: usize, bytes: u64) -> bool {
        packets as u64 >= self.get(Tunable::MaxUnackedPackets)
            || bytes >= self.get(Tunable::MaxUnackedBytes)
    }
}
