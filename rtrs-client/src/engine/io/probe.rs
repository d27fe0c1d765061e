//! Probes that test a silent connection.
//!
//! Heartbeats test only a path's service connection. A connection that carries IO can fail on its
//! own: with rdma_rxe in Linux 6.1, a queue pair of the kernel server may stop sending permanently,
//! or until it has something new to send, without an error at either end (docs/PROTOCOL.md). So
//! when requests are waiting and nothing has been received on their connection for a heartbeat
//! period, the shard sends a request that every server answers immediately: the close of a device
//! never opened. It uses no client memory and reaches no disk. If it stays unanswered for longer
//! than a heartbeat may, the connection is ended along with its path, well before the time limit of
//! the requests. A slow disk does not cause this: the answer does not wait for it.
//!
//! A probe that is still unanswered when its connection ends may still arrive at the server. If
//! another request were using its permit by then, the probe would end that request's path on
//! `rtrs-server`, and would write 12 bytes into its chunk on a kernel server. So its permit is
//! withheld until the path is fenced off or reconnected, like the permit of a request.

use rtrs_core::ids::{PathId, PermitId};
use rtrs_core::time::{Duration, Instant};

/// Maximum number of consecutive late sweeps that skip the check.
const LATES_MAX: u32 = 8;

/// Probe in flight.
#[derive(Clone, Copy, Debug)]
struct Probe {
    path: PathId,
    permit: PermitId,
    sent: Instant,
}

/// Probe that was not answered before its connection ended.
#[derive(Clone, Copy, Debug)]
struct LateProbe {
    path: PathId,
    epoch: u32,
    permit: PermitId,
}

impl Probe {
    /// Whether to end the connection: neither the answer nor anything else has arrived in time.
    fn is_dead(&self, now: Instant, heard: Instant, bound: Duration) -> bool {
        heard <= self.sent && now.since(self.sent) >= bound
    }
}

/// Whether to probe a connection: its oldest request has waited, and nothing has been received, for
/// the whole period.
pub(super) fn is_due(now: Instant, oldest: Instant, heard: Instant, period: Duration) -> bool {
    now.since(oldest.max(heard)) >= period
}

/// Probes of a shard: the one in flight, and those whose permits are withheld.
#[derive(Debug, Default)]
pub(super) struct Probes {
    current: Option<Probe>,
    late: Vec<LateProbe>,
    /// Number of consecutive late sweeps.
    late_sweeps: u32,
}

impl Probes {
    /// Whether a sweep due at `due` came so late that the shard cannot have run in between. In that
    /// case nothing is checked, and a probe in flight is given its full time again. This applies a
    /// limited number of times in a row.
    pub(super) fn came_late(&mut self, now: Instant, due: Instant, interval: Duration) -> bool {
        let late = now.since(due) > interval && self.late_sweeps < LATES_MAX;
        self.late_sweeps = if late { self.late_sweeps + 1 } else { 0 };
        if let Some(probe) = self.current.as_mut().filter(|_| late) {
            probe.sent = now;
        }
        late
    }

    pub(super) fn sent(&mut self, path: PathId, permit: PermitId, sent: Instant) {
        tracing::debug!(path = path.0, "probing a silent connection");
        self.current = Some(Probe { path, permit, sent });
    }

    /// Path that is being probed.
    pub(super) fn path(&self) -> Option<PathId> {
        self.current.map(|probe| probe.path)
    }

    /// Duration of the silence if the probed path has been silent for too long. `heard` is the time
    /// of the last receipt from it.
    pub(super) fn silent_for(
        &self,
        now: Instant,
        heard: Instant,
        max: Duration,
    ) -> Option<Duration> {
        let probe = self.current.filter(|probe| probe.is_dead(now, heard, max))?;
        Some(now.since(heard.max(probe.sent)))
    }

    /// Ends the probe if this is its answer. Returns whether it was.
    pub(super) fn is_answered(&mut self, path: PathId, permit: PermitId) -> bool {
        let is_answer = |probe: &mut Probe| (probe.path, probe.permit) == (path, permit);
        self.current.take_if(is_answer).is_some()
    }

    /// Withholds the permit of an unanswered probe whose connection ended in this epoch.
    pub(super) fn connection_ended(&mut self, path: PathId, epoch: u32) {
        if let Some(probe) = self.current.take_if(|probe| probe.path == path) {
            self.late.push(LateProbe { path, epoch, permit: probe.permit });
        }
    }

    /// Releases the permits of probes that can no longer arrive.
    pub(super) fn free(&mut self, is_fenced: impl Fn(PathId, u32) -> bool) -> Vec<PermitId> {
        let freed = self.late.extract_if(.., |one| is_fenced(one.path, one.epoch));
        freed.map(|one| one.permit).collect()
    }

    /// Number of permits held by probes.
    pub(super) fn permits_held(&self) -> usize {
        usize::from(self.current.is_some()) + self.late.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_measured_from_the_later_of_request_and_receipt() {
        let at = |ms| Instant::ZERO + Duration::from_millis(ms);
        let period = Duration::from_millis(100);
        assert!(is_due(at(200), at(100), at(0), period));
        assert!(is_due(at(200), at(0), at(100), period));
        assert!(!is_due(at(199), at(100), at(0), period));
        assert!(!is_due(at(199), at(0), at(100), period));
        let probe = Probe { path: PathId(0), permit: PermitId(1), sent: at(200) };
        assert!(probe.is_dead(at(300), at(200), period));
        assert!(!probe.is_dead(at(299), at(0), period));
        assert!(!probe.is_dead(at(900), at(201), period), "something was received");
    }
}
