//! Rules for a workload: its access to the device and the errors that it accepts.

use rtrs_core::time::Duration;

use super::super::Plant;
use super::super::options::{MachineOptions, WorkOptions};

/// Errors with which an IO may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Errors {
    /// Whether the backend may fail.
    pub(in super::super) backend: bool,
    /// Whether a failed flush reports writes that the backend lost.
    pub(in super::super) loses: bool,
    /// Whether the backend's syncs fail with varying statuses.
    pub(in super::super) statuses: bool,
    /// Whether durable changes flush by themselves, and fail if a power cut may have lost what they
    /// wrote.
    pub(in super::super) postflush: bool,
    /// Whether a flush may report a device that became smaller while no path was up.
    pub(in super::super) shrinks: bool,
    /// Whether IO may fail because the session has had no path for too long.
    pub(in super::super) paths: bool,
    /// Time for which a failed write may still take effect once the core is served again.
    pub(in super::super) given_up_for: Option<Duration>,
    /// Maximum time that an IO may wait for an abandoned change, if that is bounded.
    pub(in super::super) deferred_max: Option<Duration>,
}

/// Rules for a run, shared by the workloads of all cores.
#[derive(Clone, Debug)]
pub(in super::super) struct Rules {
    pub(in super::super) options: WorkOptions,
    pub(in super::super) errors: Errors,
    /// Minimum delay, from the first submission of unanswered requests, before a client that takes
    /// over from a dead one repeats them, as with the kernel's nbd. None if there is no takeover.
    pub(in super::super) takeover: Option<Duration>,
    /// Whether the device is used through the NBD front end.
    pub(in super::super) nbd: bool,
    /// Whether each core's connection is a separate user, with its own reports of losses.
    pub(in super::super) alone: bool,
    /// Whether users stall in the middle of payloads.
    pub(in super::super) stalls: bool,
    /// Whether users occasionally drop their connections.
    pub(in super::super) nbd_drops: bool,
    /// Whether the front end's memory is shared with another volume.
    pub(in super::super) shares: bool,
    /// Whether durable writes request a flush before them.
    pub(in super::super) preflush: bool,
    /// Whether data is written durably, unlike zeroes and discards.
    pub(in super::super) zeroes: bool,
    /// Virtual machine that uses the device.
    pub(in super::super) machine: Option<MachineOptions>,
    pub(in super::super) plant: Plant,
}
