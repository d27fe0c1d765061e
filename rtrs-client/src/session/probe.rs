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

use rtrs_core::fabric::{CloseReason, Fabric};
use rtrs_core::ids::{PathId, PermitId};
use rtrs_core::time::{Duration, Instant};

use super::Rhythm;
use super::shard::{SWEEP, ShardSession};

/// Device ids count up from 0, so this one is nobody's.
pub(crate) const NO_DEVICE: u32 = i32::MAX as u32;

/// Late sweeps in a row at which nothing is judged.
const LATES_MAX: u32 = 8;

/// A probe that was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Probe {
    /// Index of the path.
    pub(super) path: usize,
    pub(super) permit: PermitId,
    pub(super) sent: Instant,
}

/// A probe that was not answered before its connection ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct LateProbe {
    path: PathId,
    epoch: u32,
    permit: PermitId,
}

impl Probe {
    /// True when the connection is to be ended: neither the answer came in time nor anything else.
    pub(super) fn is_dead(&self, now: Instant, heard: Instant, bound: Duration) -> bool {
        heard <= self.sent && now.since(self.sent) >= bound
    }
}

/// True when a connection is to be asked: its oldest request waits and nothing has come, both for
/// the whole period.
pub(super) fn is_due(now: Instant, oldest: Instant, heard: Instant, period: Duration) -> bool {
    now.since(oldest.max(heard)) >= period
}

impl ShardSession {
    /// True when this sweep came so late that the core has not run meanwhile: then nothing is
    /// judged, and what was asked gets its whole time once more. Some times in a row only.
    pub(super) fn came_late(&mut self, now: Instant, due: Instant) -> bool {
        let late = now.since(due) > SWEEP && self.lates < LATES_MAX;
        self.lates = if late { self.lates + 1 } else { 0 };
        if let Some(probe) = self.probe.as_mut().filter(|_| late) {
            probe.sent = now;
        }
        late
    }

    /// A connection of this path has ended, in this epoch.
    pub(super) fn end_probe(&mut self, path: PathId, epoch: u32) {
        if let Some(probe) = self.probe.take_if(|probe| probe.path == path.index()) {
            self.late_probes.push(LateProbe { path, epoch, permit: probe.permit });
            self.free_late_probes();
        }
    }

    /// Gives the permits of probes back that cannot arrive any more.
    pub(super) fn free_late_probes(&mut self) {
        let replays = &self.replays;
        for late in self.late_probes.extract_if(.., |one| replays.is_fenced(one.path, one.epoch)) {
            self.permits.give(late.permit);
        }
    }

    /// Asks a connection that owes answers and is silent whether it works, and ends one that was
    /// asked in vain. One at a time, and only while a permit is free.
    pub(super) fn look_at_silence(
        &mut self,
        now: Instant,
        fabrics: &mut [Box<dyn Fabric>],
    ) -> bool {
        let Rhythm { interval: period, missed_max, .. } = self.config.heartbeat;
        if let Some(probe) = self.probe {
            let path = &mut self.paths[probe.path];
            let bound = period * missed_max;
            let dead = path.is_up() && probe.is_dead(now, path.heard(), bound);
            if dead {
                let silent = now.since(path.heard().max(probe.sent));
                let why = format!("no answer for {} ms", silent.as_millis());
                let provider = path.provider();
                path.abort(now, CloseReason::Lost(why), fabrics[provider].as_mut());
            }
            return dead;
        }
        let Some(granted) = self.granted else { return false };
        for index in 0..self.paths.len() {
            let path = &self.paths[index];
            if path.inflight == 0 || !path.is_up() {
                continue;
            }
            let open = self.rows.iter().flatten().filter(|row| row.answered.is_none());
            let Some(oldest) = open.filter(|r| r.is_on(path.id())).map(|r| r.sent).min() else {
                continue;
            };
            if !is_due(now, oldest, path.heard(), period) {
                continue;
            }
            let Some(permit) = self.permits.take() else { return false };
            let path = &mut self.paths[index];
            let provider = path.provider();
            if path.post_probe(permit, &granted, fabrics[provider].as_mut()).is_err() {
                self.permits.give(permit);
                continue;
            }
            tracing::debug!(path = index, "silent connection asked");
            self.probe = Some(Probe { path: index, permit, sent: now });
            return true;
        }
        false
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
        let probe = Probe { path: 0, permit: PermitId(1), sent: at(200) };
        assert!(probe.is_dead(at(300), at(200), period));
        assert!(!probe.is_dead(at(299), at(0), period));
        assert!(!probe.is_dead(at(900), at(201), period), "something came");
    }
}
