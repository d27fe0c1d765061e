//! Properties derived from a run's settings.

use rtrs_client::{NoPath, SlowIo};
use rtrs_core::time::Duration;

use super::{Ids, MS, Options};

impl Options {
    /// Whether nothing but IO happens to the cluster.
    pub(in super::super) fn is_quiet(&self) -> bool {
        let changed = self.extra.removal.is_some() || self.extra.second;
        self.faults.is_empty() && !self.operated && !self.rival && !changed
    }

    /// Whether path faults spare the first path, because IO has a time bound or only that path
    /// distinguishes the session's server from others.
    pub(in super::super) fn keeps_first_path(&self) -> bool {
        self.stall_max.is_some() || self.extra.ids.is_some_and(Ids::is_beside)
    }

    /// Returns how long a write that ended with an error for lack of a path may still take effect
    /// once the write's core is served again: by then the core's earlier requests are fenced off,
    /// and only operations that the backend had begun continue. None if the backend or a core may
    /// be slow.
    pub(in super::super) fn given_up_for(&self) -> Option<Duration> {
        let quick = self.disk.slow.num == 0 && self.disk.stuck.num == 0;
        (quick && self.faults.core_stall == 0).then_some(self.disk.latency_max + 2 * MS)
    }

    /// Returns how long an IO may wait for an abandoned change, if that is bounded.
    pub(in super::super) fn deferred_max(&self) -> Option<Duration> {
        (self.slow_io == SlowIo::Fail).then_some(self.io_timeout)
    }

    /// Whether IO may end with an error because no path came back in time, or the disk took too
    /// long.
    pub(in super::super) fn path_errors(&self) -> bool {
        match self.no_path {
            _ if self.slow_io == SlowIo::Fail => true,
            NoPath::Fail => true,
            NoPath::QueueFor(time) => time < Duration::from_secs(60),
            NoPath::Queue => false,
        }
    }
}
