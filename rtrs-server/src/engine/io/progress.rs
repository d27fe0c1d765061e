//! Progress of an IO.

use std::ops::Range;

use rtrs_core::block::{IoFlags, IoOp};
use rtrs_core::time::Instant;

use crate::engine::device_table::DeviceId;
use crate::engine::ledger::FlushMark;
use crate::engine::partial::PartOfBlock;
use crate::export::ExportIndex;

/// Step of an IO at the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IoStep {
    /// Flush before the IO (PREFLUSH).
    PreFlush,
    /// Read of the block that a partial write changes.
    ReadBlock,
    /// The IO itself, in parts if the device limits its size.
    Data,
    /// Flush in place of FUA, for a device without FUA.
    PostFlush,
}

/// State of a change that may take turns with others (`turns.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Not in the turn list.
    None,
    /// In the turn list, waiting.
    Waits,
    /// In the turn list, running; others may be waiting for it to end.
    Runs,
}

/// State that decides the durability of an IO (`sync.rs`).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SyncProgress {
    /// Epoch of the export at the first submission.
    pub(super) epoch: Option<u32>,
    /// Ledger position that a flush covers; unused by other operations.
    pub(super) mark: FlushMark,
    /// Number of an outstanding sync.
    pub(super) number: Option<u64>,
}

/// Time that the steps of an IO spend at the device.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DeviceTime {
    /// Time when the current step was submitted.
    submitted: Instant,
    /// Nanoseconds that completed steps have spent at the device.
    spent_ns: u64,
}

impl DeviceTime {
    /// Records the submission of a step.
    pub(super) const fn begin(&mut self, now: Instant) {
        self.submitted = now;
    }

    /// Adds the time of the current step, which has ended.
    pub(super) const fn end(&mut self, now: Instant) {
        self.spent_ns += now.as_nanos().saturating_sub(self.submitted.as_nanos());
    }

    /// Nanoseconds that completed steps have spent at the device.
    pub(super) const fn spent_ns(&self) -> u64 {
        self.spent_ns
    }
}

/// Progress of an IO.
#[derive(Clone, Copy, Debug)]
pub(super) struct IoProgress {
    pub(super) export: ExportIndex,
    pub(super) device: DeviceId,
    pub(super) op: IoOp,
    pub(super) flags: IoFlags,
    /// Current or next step at the device.
    pub(super) step: IoStep,
    /// Whether a flush must follow the data.
    pub(super) post_flush: bool,
    /// Offset of the first byte on the device.
    pub(super) offset: u64,
    /// Number of bytes done.
    pub(super) done: u32,
    /// Total number of bytes.
    pub(super) len: u32,
    /// Length of the part on which the device is working.
    pub(super) part: u32,
    /// Present for a partial write, which then writes the whole block.
    pub(super) partial: Option<PartOfBlock>,
    pub(super) turn: Turn,
    /// Number of bytes in the chunk for the data, or for the answer to an extents request.
    pub(super) room: u32,
    pub(super) sync: SyncProgress,
    pub(super) device_time: DeviceTime,
}

impl IoProgress {
    /// Whether the IO changes the device's contents.
    pub(super) const fn changes(&self) -> bool {
        self.op.changes()
    }

    /// All bytes of the IO on the device.
    pub(super) fn bytes(&self) -> Range<u64> {
        self.offset..self.offset + u64::from(self.len)
    }

    /// Bytes that the current step may change on the device, if any. Earlier steps are complete,
    /// and later steps do not begin once the path is closed.
    pub(super) fn may_change(&self) -> Option<Range<u64>> {
        let from = self.offset + u64::from(self.done);
        let changes = self.changes() && self.step == IoStep::Data;
        changes.then(|| from..from + u64::from(self.part))
    }

    /// Whether the next operation at the device is a flush.
    pub(super) fn is_flush(&self) -> bool {
        matches!(self.step, IoStep::PreFlush | IoStep::PostFlush) || self.op == IoOp::Flush
    }
}
