//! What follows from a run's settings.

use rtrs_client::{NoPath, SlowIo};
use rtrs_core::time::Duration;

use super::{Ids, MS, Options};

impl Options {
    /// Nothing happens to the cluster but IO.
    pub(in super::super) fn is_quiet(&self) -> bool {
        let changed = self.extra.removal.is_some() || self.extra.second;
        self.faults.is_empty() && !self.operated && !self.rival && !changed
    }

    /// IO is held to a time, or other servers are told from the session's by its first path: what
    /// strikes paths leaves that one alone.
    pub(in super::super) fn keeps_first_path(&self) -> bool {
        self.stall_max.is_some() || self.extra.ids.is_some_and(Ids::is_beside)
    }

    /// How long a write may still take effect that ended with an error because no path was left,
    /// once its core is served again: then what was sent of it is fenced off, and only what the
    /// backend had begun goes on. None where the backend or a core may take long.
    pub(in super::super) fn given_up_for(&self) -> Option<Duration> {
        let quick = self.disk.slow.num == 0 && self.disk.stuck.num == 0;
        (quick && self.faults.core_stall == 0).then_some(self.disk.latency_max + 2 * MS)
    }

    /// How long an IO may wait for a change that was given up, if that is bounded.
    pub(in super::super) fn deferred_max(&self) -> Option<Duration> {
        (self.slow_io == SlowIo::Fail).then_some(self.io_timeout)
    }

    /// IO may end with an error because no path came back in time, or the disk took too long.
    pub(in super::super) fn path_errors(&self) -> bool {
        match self.no_path {
            _ if self.slow_io == SlowIo::Fail => true,
            NoPath::Fail => true,
            NoPath::QueueFor(time) => time < Duration::from_secs(60),
            NoPath::Queue => false,
        }
    }
}
