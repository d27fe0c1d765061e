//! What a workload may do and meet.

use rtrs_core::time::Duration;

use super::super::Plant;
use super::super::options::WorkOptions;

/// Which errors an IO may end with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Errors {
    /// The backend's own.
    pub(in super::super) backend: bool,
    /// A flush that fails tells of writes that the backend lost.
    pub(in super::super) loses: bool,
    /// Syncs of the backend fail with any status.
    pub(in super::super) statuses: bool,
    /// A flush may report a device that became smaller while no path was up.
    pub(in super::super) shrinks: bool,
    /// Those of a session that has had no path for too long.
    pub(in super::super) paths: bool,
    /// How long what was given up may still happen once the core is served again.
    pub(in super::super) given_up_for: Option<Duration>,
    /// How long an IO may wait for a change that was given up, if that is bounded.
    pub(in super::super) deferred_max: Option<Duration>,
}

/// What there is about a run, the same for the workloads of all cores.
#[derive(Clone, Debug)]
pub(in super::super) struct Rules {
    pub(in super::super) options: WorkOptions,
    pub(in super::super) errors: Errors,
    /// Whoever comes after a client that died takes its device over, as the kernel's users see it:
    /// what was not answered is asked for again, this long after it was first.
    pub(in super::super) takeover: Option<Duration>,
    /// The device is used through the front end, as NBD.
    pub(in super::super) nbd: bool,
    /// Each core's connection is a user of its own, whom flushes tell of losses.
    pub(in super::super) alone: bool,
    /// Its users stop in the middle of payloads.
    pub(in super::super) stalls: bool,
    /// Its users drop their connections now and then.
    pub(in super::super) nbd_drops: bool,
    /// The memory of its front is shared with that of another volume.
    pub(in super::super) shares: bool,
    /// Durable writes flush before they are done.
    pub(in super::super) preflush: bool,
    /// Data is written durably, zeroes and discards are not.
    pub(in super::super) zeroes: bool,
    pub(in super::super) plant: Plant,
}
