//! What remains of an IO.

use std::ops::Range;

use rtrs_core::block::{IoFlags, IoOp};
use rtrs_core::time::Instant;

use crate::engine::device_table::DeviceId;
use crate::engine::ledger::FlushMark;
use crate::engine::partial::PartOfBlock;
use crate::export::ExportIndex;

/// Which step of an IO the device works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IoStep {
    /// A flush before the IO (PREFLUSH).
    PreFlush,
    /// The block of a partial write is read.
    ReadBlock,
    /// The IO itself, in parts where the device takes less at once.
    Data,
    /// A flush in place of FUA, for a device without FUA.
    PostFlush,
}

/// Whether a change takes turns with others (`turns.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// It does not: nothing in its place does.
    None,
    /// It is entered and waits.
    Waits,
    /// It is entered and runs; others may wait for its end.
    Runs,
}

/// What remains of an IO.
#[derive(Clone, Copy, Debug)]
pub(super) struct IoProgress {
    pub(super) export: ExportIndex,
    pub(super) device: DeviceId,
    pub(super) op: IoOp,
    pub(super) flags: IoFlags,
    /// The step that the device works on, or works on next.
    pub(super) step: IoStep,
    /// A flush must follow the data.
    pub(super) post_flush: bool,
    /// The first byte on the device.
    pub(super) offset: u64,
    /// Bytes done.
    pub(super) done: u32,
    /// Bytes in all.
    pub(super) len: u32,
    /// Bytes of the part that the device works on.
    pub(super) part: u32,
    /// Of a partial write; then the IO is the write of the whole block.
    pub(super) partial: Option<PartOfBlock>,
    pub(super) turn: Turn,
    /// Bytes of the chunk that hold the data, or the answer of extents.
    pub(super) room: u32,
    /// The export's epoch when it was submitted first.
    pub(super) epoch: Option<u32>,
    /// Of a flush: what it covers.
    pub(super) mark: FlushMark,
    /// Of a sync that is out: its number.
    pub(super) number: Option<u64>,
    /// When its present step was submitted.
    pub(super) submitted: Instant,
    /// Nanoseconds that its earlier steps were at the device.
    pub(super) backend_ns: u64,
}

impl IoProgress {
    /// True for what changes the content of the device.
    pub(super) const fn changes(&self) -> bool {
        self.op.changes()
    }

    /// All its bytes on the device.
    pub(super) fn bytes(&self) -> Range<u64> {
        self.offset..self.offset + u64::from(self.len)
    }

    /// The bytes that the device may change by the step it works on, if that changes any. What was
    /// done before has happened, and what remains is not begun once the path is closed.
    pub(super) fn may_change(&self) -> Option<Range<u64>> {
        let from = self.offset + u64::from(self.done);
        let changes = self.changes() && self.step == IoStep::Data;
        changes.then(|| from..from + u64::from(self.part))
    }

    /// What the device is to do next is a flush.
    pub(super) fn is_flush(&self) -> bool {
        matches!(self.step, IoStep::PreFlush | IoStep::PostFlush) || self.op == IoOp::Flush
    }
}
