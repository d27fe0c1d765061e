//! Limit on the operations of an export that may block in the ring's worker threads.

use std::collections::VecDeque;

use rtrs_core::block::IoOp;
use rtrs_core::rt::Ring;

use super::inflight::{Phase, Slot};
use super::shared::Shared;
use crate::backend::target::INFLIGHT_MAX;

/// Maximum number of operations that may occupy the ring's worker threads concurrently. All exports
/// of a shard share the threads, and each adds as many as it may occupy, so that a hanging export
/// leaves the others' threads free.
pub(super) const WORKERS: usize = 32;
const WORKERS_SIGNED: i32 = 32;

/// Method of submitting an operation to the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Submission {
    /// Runs before the call returns.
    Inline,
    /// Fails instead of blocking.
    Nowait,
    /// Blocks in a worker thread if necessary.
    Blocking,
    /// Runs in a worker thread.
    Worker,
}

/// Workers of one queue, and the IOs waiting for one.
#[derive(Debug)]
pub(super) struct Workers {
    in_memory: bool,
    /// Whether O_DIRECT is in use.
    direct: bool,
    /// Whether operations on the target can fail instead of blocking (RWF_NOWAIT).
    pub(super) nowait: bool,
    /// Whether the target is a block device accessed through the page cache.
    pub(super) cached_device: bool,
    /// Whether submitting reads and writes may block.
    pub(super) blocks: bool,
    /// Number of free workers out of [`WORKERS`].
    free: usize,
    /// Slots waiting for a worker.
    waiting: VecDeque<u32>,
}

impl Workers {
    /// Adds this queue's workers to the ring's.
    pub(super) fn new(shared: &Shared, ring: &Ring) -> Self {
        if let Err(error) = ring.add_workers(WORKERS_SIGNED) {
            tracing::warn!(
                %error,
                "cannot set the number of worker threads; an export that hangs may delay others"
            );
        }
        Self {
            in_memory: shared.in_memory,
            direct: shared.align.is_some(),
            nowait: !shared.blocks && (shared.align.is_some() || shared.device),
            cached_device: shared.align.is_none() && shared.device,
            blocks: shared.blocks,
            free: WORKERS,
            waiting: VecDeque::with_capacity(INFLIGHT_MAX),
        }
    }

    /// Removes this queue's workers from the ring's.
    pub(super) fn close(&self, ring: &Ring) {
        // A failure leaves the ring with more threads than it needs.
        let _ = ring.add_workers(-WORKERS_SIGNED);
    }

    /// Returns how to submit a slot's next operation. If it needs a worker, the slot takes one; if
    /// none is free, the slot waits and `None` is returned.
    pub(super) fn admit(&mut self, index: u32, slot: &mut Slot) -> Option<Submission> {
        let submission = if self.in_memory && slot.phase == Phase::Transfer {
            Submission::Inline
        } else if self.nowait && self.limits_transfer(slot) && !slot.may_block {
            Submission::Nowait
        } else {
            if self.is_needed(slot) && !slot.worker {
                let Some(left) = self.free.checked_sub(1) else {
                    self.waiting.push_back(index);
                    return None;
                };
                self.free = left;
                slot.worker = true;
            }
            match slot.phase {
                Phase::Transfer | Phase::WriteZeroes if self.blocks => Submission::Worker,
                _ => Submission::Blocking,
            }
        };
        slot.tried = submission == Submission::Nowait;
        Some(submission)
    }

    /// Takes back a slot's worker. Returns whether the slot had one, so that waiting slots may
    /// start.
    pub(super) fn release(&mut self, slot: &mut Slot) -> bool {
        let had = std::mem::take(&mut slot.worker);
        self.free += usize::from(had);
        had
    }

    /// Removes the slot that has waited longest if a worker is free.
    pub(super) fn next_waiting(&mut self) -> Option<u32> {
        if self.free > 0 { self.waiting.pop_front() } else { None }
    }

    /// Whether a blocking transfer counts against the limit: direct IO with NOWAIT, which blocks
    /// when the device has no free tags, and writes to a device through the page cache.
    fn limits_transfer(&self, slot: &Slot) -> bool {
        let direct = self.direct && self.nowait;
        matches!(slot.phase, Phase::Transfer | Phase::WriteZeroes)
            && (direct || (self.cached_device && slot.op != IoOp::Read))
    }

    /// Whether an operation needs a worker. A file's IO through the page cache seldom needs a
    /// thread, and all its writes together need at most one.
    fn is_needed(&self, slot: &Slot) -> bool {
        match slot.phase {
            Phase::Transfer | Phase::WriteZeroes => self.blocks || self.limits_transfer(slot),
            Phase::Punch | Phase::ZeroRange | Phase::Sync => true,
            Phase::Discard | Phase::Extents => false,
        }
    }
}
