//! IOs in flight on a queue of a file or block device, and the operations that each IO needs.

use std::io;
use std::sync::atomic::Ordering;

use rtrs_core::block::{Io, IoFlags, IoOp};
use rtrs_core::mem::MemSlice;
use rtrs_core::rt::blkdev::{PUNCH_HOLE, ZERO_RANGE};
use rtrs_core::rt::{Fd, Op};
use rtrs_core::status::{IoStatus, Outcome};

use super::bounce::Bounce;
use super::shared::{Shared, ZEROES};

/// Maximum number of retries of an operation that was interrupted or would have blocked.
const RETRIES_MAX: u8 = 16;

/// Phase of an IO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Transfer,
    Punch,
    ZeroRange,
    WriteZeroes,
    Discard,
    Extents,
    /// A sync, followed by a check of the file's length if the IO is a flush.
    Sync,
}

impl Phase {
    pub(super) fn first(io: &Io, shared: &Shared) -> Self {
        match io.op {
            IoOp::Read | IoOp::Write => Self::Transfer,
            IoOp::Flush => Self::Sync,
            IoOp::Extents => Self::Extents,
            IoOp::Discard if shared.device => Self::Discard,
            IoOp::Discard => Self::Punch,
            IoOp::WriteZeroes if shared.punch && !io.flags.no_unmap => Self::Punch,
            IoOp::WriteZeroes if shared.zero_range.load(Ordering::Relaxed) => Self::ZeroRange,
            IoOp::WriteZeroes => Self::WriteZeroes,
        }
    }
}

/// Next step of an IO after an operation has failed.
pub(super) enum AfterError {
    /// Run the operation for the slot's phase, which may have changed.
    Continue,
    End(Outcome),
}

/// An IO in flight.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) tag: u64,
    pub(super) op: IoOp,
    pub(super) flags: IoFlags,
    pub(super) offset: u64,
    pub(super) len: usize,
    pub(super) buf: Option<MemSlice>,
    /// Number of bytes transferred.
    pub(super) done: usize,
    pub(super) phase: Phase,
    pub(super) bounce: Option<u32>,
    retries: u8,
    /// Whether the IO's operation was submitted so that it fails instead of blocking.
    pub(super) tried: bool,
    /// Whether the operation would block, so that the next operation may wait in a worker thread.
    pub(super) may_block: bool,
    /// Whether the IO holds a worker.
    pub(super) worker: bool,
}

impl Slot {
    pub(super) fn new(io: Io, phase: Phase, bounce: Option<u32>) -> Self {
        Self {
            tag: io.tag,
            op: io.op,
            flags: io.flags,
            offset: io.offset,
            len: io.len as usize,
            buf: io.buf,
            done: 0,
            phase,
            bounce,
            retries: 0,
            tried: false,
            may_block: false,
            worker: false,
        }
    }

    /// Returns the next operation, or None if the target's thread executes it.
    pub(super) fn next_op(&self, fd: &Fd, shared: &Shared, bounce: &Bounce) -> Option<Op> {
        let fd = fd.clone();
        let (offset, len) = (self.offset, self.len as u64);
        Some(match self.phase {
            Phase::Transfer => {
                let (at, left) = (self.offset + self.done as u64, self.len - self.done);
                let buf = self.buf.as_ref().expect("a transfer has a buffer");
                let part = match self.bounce {
                    Some(index) => {
                        let part = bounce.part(index, left);
                        if self.op == IoOp::Write {
                            let from = buf.slice(self.done, part.len());
                            part.copy_from(&from.expect("within the IO"));
                        }
                        part
                    }
                    None => buf.slice(self.done, left).expect("within the IO"),
                };
                if self.op == IoOp::Write {
                    let dsync = self.flags.fua && !shared.in_memory;
                    Op::Write { fd, buf: part, offset: at, dsync }
                } else {
                    Op::Read { fd, buf: part, offset: at }
                }
            }
            Phase::Punch => Op::Fallocate { fd, mode: PUNCH_HOLE, offset, len },
            Phase::ZeroRange => Op::Fallocate { fd, mode: ZERO_RANGE, offset, len },
            Phase::WriteZeroes => {
                let piece = (self.len - self.done).min(ZEROES);
                let buf = shared.zeroes.slice(0, piece).expect("within the zeroes");
                Op::Write { fd, buf, offset: self.offset + self.done as u64, dsync: false }
            }
            Phase::Sync => Op::Fsync { fd, data_only: true },
            Phase::Discard | Phase::Extents => return None,
        })
    }

    /// Records `count` transferred bytes; a read through a bounce buffer copies them out. Returns
    /// whether the transfer is complete.
    pub(super) fn transferred(&mut self, count: usize, bounce: &Bounce) -> bool {
        if let (IoOp::Read, Some(index)) = (self.op, self.bounce) {
            let to = self.buf.as_ref().and_then(|buf| buf.slice(self.done, count));
            to.expect("within the IO").copy_from(&bounce.part(index, count));
        }
        self.done += count;
        self.done == self.len
    }

    /// Selects the operation that replaces a failed one, unless the IO itself fails.
    pub(super) fn after_error(&mut self, error: &io::Error, shared: &Shared) -> AfterError {
        let outcome = Outcome::from(error);
        let status = outcome.status;
        let again = matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
        if again && self.retries < RETRIES_MAX {
            self.retries += 1;
            return AfterError::Continue;
        }
        let zeroing = self.op == IoOp::WriteZeroes && status == IoStatus::Unsupported;
        match self.phase {
            Phase::Punch if zeroing && !(shared.device && self.flags.fast_only) => {
                self.phase = Phase::ZeroRange;
            }
            Phase::ZeroRange if zeroing => {
                shared.zero_range.store(false, Ordering::Relaxed);
                if self.flags.fast_only {
                    return AfterError::End(outcome);
                }
                self.phase = Phase::WriteZeroes;
            }
            _ => {
                // A change with FUA includes a sync, which may fail with the error of an earlier
                // write-back, whatever its errno.
                let syncs = self.op.changes() && self.flags.fua && !shared.in_memory;
                let syncs = syncs && matches!(self.phase, Phase::Transfer | Phase::Sync);
                let lost = syncs && status.is_refusal();
                return AfterError::End(Outcome {
                    status: if lost { IoStatus::Io } else { status },
                    ..outcome
                });
            }
        }
        AfterError::Continue
    }
}

/// All IOs in flight, by slot number. Slots are allocated on demand, because most exports have
/// little load.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
}

impl InFlight {
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Adds an IO; the caller ensures that there are at most `INFLIGHT_MAX`.
    #[allow(clippy::cast_possible_truncation, reason = "INFLIGHT_MAX is small")]
    pub(super) fn add(&mut self, slot: Slot) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.slots[index as usize] = Some(slot);
        index
    }

    pub(super) fn get(&self, index: u32) -> &Slot {
        self.slots[index as usize].as_ref().expect("a taken slot")
    }

    pub(super) fn get_mut(&mut self, index: u32) -> &mut Slot {
        self.slots[index as usize].as_mut().expect("a taken slot")
    }

    pub(super) fn remove(&mut self, index: u32) -> Slot {
        let slot = self.slots[index as usize].take().expect("a taken slot");
        self.free.push(index);
        slot
    }

    /// Whether a change in flight ends beyond `end`.
    pub(super) fn change_beyond(&self, end: u64) -> bool {
        let changes = self.slots.iter().flatten().filter(|slot| slot.op.changes());
        changes.map(|slot| slot.offset + slot.len as u64).any(|at| at > end)
    }
}
