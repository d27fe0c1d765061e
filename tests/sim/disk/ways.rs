//! What some runs have in particular: a disk without a lock, syncs that fail with any status,
//! durable writes that take no error of others.

use rtrs_core::block::IoOp;
use rtrs_core::prng::Prng;
use rtrs_core::status::IoStatus;

use super::{Disk, State};

impl Disk {
    /// Servers do not lock it.
    pub(in super::super) fn set_unlocked(&self, unlocked: bool) {
        self.state.lock().unlocked = unlocked;
    }

    /// Durable writes take no error of other writes from now on.
    pub(in super::super) fn set_apart(&self, apart: bool) {
        self.state.lock().apart = apart;
    }

    /// Syncs that take the error of lost writes fail with any status from now on.
    pub(in super::super) fn vary_statuses(&self, prng: Prng) {
        self.state.lock().statuses = Some(prng);
    }
}

impl State {
    /// How a sync ends that takes the error of lost writes. A write that is refused has not reached
    /// the disk, and takes none.
    pub(super) fn sync_error(&mut self, op: IoOp) -> IoStatus {
        let Some(prng) = &mut self.statuses else { return IoStatus::Io };
        let fits = |status: &IoStatus| op == IoOp::Flush || !status.is_refusal();
        let none = [IoStatus::Ok, IoStatus::Moved];
        let all: Vec<_> =
            IoStatus::ALL.into_iter().filter(|s| !none.contains(s) && fits(s)).collect();
        all[prng.index(all.len())]
    }
}
