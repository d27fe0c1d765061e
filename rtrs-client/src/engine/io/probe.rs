//! Asks a server that has become silent on one connection whether the connection still works.
//!
//! Heartbeats watch a path by its service connection. A connection that carries IO can die alone:
//! on rdma_rxe of Linux 6.1 a queue pair of the kernel's server may stop sending for good, or
//! until it is given something new to send, without an error at either end (docs/PROTOCOL.md).
//! So when requests wait and nothing has come over their connection for a heartbeat's period, a
//! request follows that every server answers at once: the close of a device nobody has opened. It
//! needs no memory of ours and reaches no disk. If that stays unanswered as long as a heartbeat
//! may, the connection is ended and its path with it, well before the requests' own time is over.
//! A disk that is slow is no reason: the answer does not wait for it.
//!
//! The probe of a connection that ended unanswered may still arrive at the server. Under a permit
//! that another request has by then it would end that one's path at a server of ours, and write 12
//! bytes into its chunk at a kernel's. So its permit is withheld until the path is fenced off or
//! connected anew, as that of a request is.

use rtrs_core::ids::{PathId, PermitId};
use rtrs_core::time::{Duration, Instant};

/// Late sweeps in a row at which nothing is judged.
const LATES_MAX: u32 = 8;

/// A probe that was sent.
#[derive(Clone, Copy, Debug)]
struct Probe {
    path: PathId,
    permit: PermitId,
    sent: Instant,
}

/// A probe that was not answered before its connection ended.
#[derive(Clone, Copy, Debug)]
struct LateProbe {
    path: PathId,
    epoch: u32,
    permit: PermitId,
}

impl Probe {
    /// True when the connection is to be ended: neither the answer came in time nor anything else.
    fn is_dead(&self, now: Instant, heard: Instant, bound: Duration) -> bool {
        heard <= self.sent && now.since(self.sent) >= bound
    }
}

/// True when a connection is to be asked: its oldest request waits and nothing has come, both for
/// the whole period.
pub(super) fn is_due(now: Instant, oldest: Instant, heard: Instant, period: Duration) -> bool {
    now.since(oldest.max(heard)) >= period
}

/// The probes of a shard: one at a time, and those whose permits are withheld.
#[derive(Debug, Default)]
pub(super) struct Probes {
    current: Option<Probe>,
    late: Vec<LateProbe>,
    /// Late sweeps in a row.
    late_sweeps: u32,
}

impl Probes {
    /// True when a sweep that was due then came so late that the shard has not run meanwhile: then
    /// nothing is judged, and what was asked gets its whole time once more. Some times in a row
    /// only.
    pub(super) fn came_late(&mut self, now: Instant, due: Instant, interval: Duration) -> bool {
        let late = now.since(due) > interval && self.late_sweeps < LATES_MAX;
        self.late_sweeps = if late { self.late_sweeps + 1 } else { 0 };
        if let Some(probe) = self.current.as_mut().filter(|_| late) {
            probe.sent = now;
        }
        late
    }

    /// A probe was sent.
    pub(super) fn sent(&mut self, path: PathId, permit: PermitId, sent: Instant) {
        tracing::debug!(path = path.0, "silent connection asked");
        self.current = Some(Probe { path, permit, sent });
    }

    /// The path that is asked, if there is one.
    pub(super) fn path(&self) -> Option<PathId> {
        self.current.map(|probe| probe.path)
    }

    /// Where the path that is asked is silent for too long, for how long it is. `heard` is when
    /// something last came from it.
    pub(super) fn silent_for(
        &self,
        now: Instant,
        heard: Instant,
        max: Duration,
    ) -> Option<Duration> {
        let probe = self.current.filter(|probe| probe.is_dead(now, heard, max))?;
        Some(now.since(heard.max(probe.sent)))
    }

    /// True when this is the answer to the probe.
    pub(super) fn is_answered(&mut self, path: PathId, permit: PermitId) -> bool {
        let is_it = |probe: &mut Probe| (probe.path, probe.permit) == (path, permit);
        self.current.take_if(is_it).is_some()
    }

    /// A connection of this path has ended, in this epoch.
    pub(super) fn connection_ended(&mut self, path: PathId, epoch: u32) {
        if let Some(probe) = self.current.take_if(|probe| probe.path == path) {
            self.late.push(LateProbe { path, epoch, permit: probe.permit });
        }
    }

    /// The permits of probes that cannot arrive any more, once each.
    pub(super) fn free(&mut self, is_fenced: impl Fn(PathId, u32) -> bool) -> Vec<PermitId> {
        let freed = self.late.extract_if(.., |one| is_fenced(one.path, one.epoch));
        freed.map(|one| one.permit).collect()
    }

    /// Permits that they hold.
    pub(super) fn permits_held(&self) -> usize {
        usize::from(self.current.is_some()) + self.late.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_measured_from_the_later_of_two() {
        let at = |ms| Instant::ZERO + Duration::from_millis(ms);
        let period = Duration::from_millis(100);
        assert!(is_due(at(200), at(100), at(0), period));
        assert!(is_due(at(200), at(0), at(100), period));
        assert!(!is_due(at(199), at(100), at(0), period));
        assert!(!is_due(at(199), at(0), at(100), period));
        let probe = Probe { path: PathId(0), permit: PermitId(1), sent: at(200) };
        assert!(probe.is_dead(at(300), at(200), period));
        assert!(!probe.is_dead(at(299), at(0), period));
        assert!(!probe.is_dead(at(900), at(201), period), "something came");
    }
}
