//! Counters of a workload.

use rtrs_core::time::Duration;

/// Counters of a core's workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct WorkStats {
    pub(in super::super) reads: u64,
    pub(in super::super) writes: u64,
    pub(in super::super) flushes: u64,
    pub(in super::super) errors: u64,
    /// IOs that were repeated after their client died.
    pub(in super::super) again: u64,
    /// Flushes that reported writes lost by a power cut.
    pub(in super::super) losses_reported: u64,
    /// IOs that failed beyond the end of a truncated file.
    pub(in super::super) beyond: u64,
    /// IOs that failed because their export had been removed.
    pub(in super::super) removed: u64,
    /// Duration of the longest IO.
    pub(in super::super) time_max: Duration,
}
