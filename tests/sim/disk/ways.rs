//! Optional behavior of the disk: no lock, syncs that fail with varying statuses, and durable
//! writes that do not report errors of other writes.

use rtrs_core::block::IoOp;
use rtrs_core::prng::Prng;
use rtrs_core::status::IoStatus;

use super::{Disk, State};

impl Disk {
    /// Sets whether servers can open the disk without locking it.
    pub(in super::super) fn set_unlocked(&self, unlocked: bool) {
        self.state.lock().unlocked = unlocked;
    }

    /// Sets whether durable writes report no errors of other writes.
    pub(in super::super) fn set_apart(&self, apart: bool) {
        self.state.lock().apart = apart;
    }

    /// Makes syncs that consume the error of lost writes fail with a varying status.
    pub(in super::super) fn vary_statuses(&self, prng: Prng) {
        self.state.lock().statuses = Some(prng);
    }
}

impl State {
    /// Returns the status of a sync that consumes the error of lost writes. A refused write has not
    /// reached the disk, and consumes none.
    pub(super) fn sync_error(&mut self, op: IoOp) -> IoStatus {
        let Some(prng) = &mut self.statuses else { return IoStatus::Io };
        let fits = |status: &IoStatus| op == IoOp::Flush || !status.is_refusal();
        let none = [IoStatus::Ok, IoStatus::Moved];
        let all: Vec<_> =
            IoStatus::ALL.into_iter().filter(|s| !none.contains(s) && fits(s)).collect();
        all[prng.index(all.len())]
    }
}
