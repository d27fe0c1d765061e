//! Rules of a workload: its access to the device and the errors that it accepts.

use rtrs_core::time::Duration;

use super::super::Plant;
use super::super::options::{MachineOptions, WorkOptions};

/// Errors that an IO may end with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Errors {
    /// Whether the backend may fail.
    pub(in super::super) backend: bool,
    /// Whether a failing flush reports writes that the backend lost.
    pub(in super::super) loses: bool,
    /// Whether syncs of the backend fail with varying statuses.
    pub(in super::super) statuses: bool,
    /// Whether durable changes flush by themselves, and fail if a power cut may have taken what
    /// they have written.
    pub(in super::super) postflush: bool,
    /// Whether a flush may report a device that became smaller while no path was up.
    pub(in super::super) shrinks: bool,
    /// Whether IO may fail because the session has had no path for too long.
    pub(in super::super) paths: bool,
    /// Time for which a failed write may still happen once the core is served again.
    pub(in super::super) given_up_for: Option<Duration>,
    /// Maximum time that an IO may wait for an abandoned change, if that is bounded.
    pub(in super::super) deferred_max: Option<Duration>,
}

/// Rules of a run, the same for the workloads of all cores.
#[derive(Clone, Debug)]
pub(in super::super) struct Rules {
    pub(in super::super) options: WorkOptions,
    pub(in super::super) errors: Errors,
    /// Minimum delay before a client that takes over from a dead one repeats unanswered requests,
    /// from their first submission, as users of the kernel's nbd see it. None if there is no
    /// takeover.
    pub(in super::super) takeover: Option<Duration>,
    /// Whether the device is used through the front end, as NBD.
    pub(in super::super) nbd: bool,
    /// Whether each core's connection is a separate user, with its own reports of losses.
    pub(in super::super) alone: bool,
    /// Whether users stop in the middle of payloads.
    pub(in super::super) stalls: bool,
    /// Whether users occasionally drop their connections.
    pub(in super::super) nbd_drops: bool,
    /// Whether the memory of the front end is shared with another volume.
    pub(in super::super) shares: bool,
    /// Whether durable writes flush before they are done.
    pub(in super::super) preflush: bool,
    /// Whether data is written durably and zeroes and discards are not.
    pub(in super::super) zeroes: bool,
    /// Virtual machine that uses the device.
    pub(in super::super) machine: Option<MachineOptions>,
    pub(in super::super) plant: Plant,
}
