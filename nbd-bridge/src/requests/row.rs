//! One NBD request in flight.

use std::ops::Range;

use rtrs_core::block::IoOp;
use rtrs_core::extents::{self, Extent};
use rtrs_core::losses::Losses;
use rtrs_core::mem::MemSlice;
use rtrs_core::status::IoStatus;

use super::command::Command;
use super::fragments::Fragments;
use super::loss_marks::LossMarks;
use super::overlaps::Overlaps;
use super::progress::Progress;
use super::reply_state::{Late, ReplyState};
use crate::buffers::Part;
use crate::proto::Op;
use crate::proto::reply::Form;
use crate::proto::wire::{MIN_BLOCK_MAX, base_allocation};

/// Size of the memory for block status descriptors: enough, in either form, for all extents that
/// the device can list.
const STATUS_ROOM: usize = 2 * extents::LEN_MAX;
/// Size of the memory for a block status: the extents as listed by the device, then as sent to the
/// client.
pub(crate) const STATUS_MEMORY: usize = extents::LEN_MAX + STATUS_ROOM;
/// Maximum length in a 32-bit descriptor: a multiple of every block size.
const STATUS_LEN_MAX: u64 = (1 << 32) - MIN_BLOCK_MAX as u64;

/// Identifies a connection of a shard: a slot, and a generation that distinguishes successive users
/// of the slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ConnId {
    pub(crate) slot: usize,
    pub(crate) generation: u64,
}

/// An NBD request in flight on one shard, from its header to the last byte of its reply.
#[derive(Debug)]
pub(crate) struct NbdRow {
    pub(crate) conn: ConnId,
    pub(crate) command: Command,
    /// Progress of the whole blocks at the device.
    pub(crate) progress: Progress,
    /// Partial blocks at both ends of the range.
    pub(crate) fragments: Fragments,
    pub(crate) overlaps: Overlaps,
    pub(crate) reply: ReplyState,
    pub(crate) loss_marks: LossMarks,
    /// Data of a read, or payload of a write.
    pub(crate) parts: Vec<Part>,
    /// Whether the row is in use: from `Requests::take` to `Requests::give`.
    pub(super) live: bool,
}

impl NbdRow {
    /// Creates an unused row whose list of parts has no capacity yet.
    pub(super) const fn empty() -> Self {
        Self {
            conn: ConnId { slot: 0, generation: 0 },
            command: Command::refused(0, 0),
            progress: Progress::none(),
            fragments: Fragments::none(),
            overlaps: Overlaps::none(),
            reply: ReplyState::new(),
            loss_marks: LossMarks::none(),
            parts: Vec::new(),
            live: false,
        }
    }

    /// Whether no work is outstanding or still to come.
    pub(crate) fn is_done(&self) -> bool {
        self.progress.is_done()
    }

    /// Whether no IO for the whole blocks is in flight at the device.
    pub(crate) fn is_idle(&self) -> bool {
        self.progress.pending() as usize == self.fragments.open()
    }

    /// Whether any IO of the request is in flight at the device.
    pub(crate) fn is_at_device(&self) -> bool {
        !self.is_idle() || self.fragments.any_at_device()
    }

    /// Returns the range that is read or changed, rounded to whole blocks.
    pub(crate) fn bytes(&self) -> &Range<u64> {
        &self.command.cut().span
    }

    /// Converts an offset range within the whole blocks into a range on the device.
    pub(crate) fn blocks(&self, from: u64, to: u64) -> Range<u64> {
        let start = self.command.cut().whole.start;
        start + from..start + to
    }

    /// Returns the range that the device may still change for this request.
    pub(crate) fn may_change(&self) -> Option<Range<u64>> {
        let all = self.command.cut().fragments() > 0;
        let bytes = || match all {
            true => self.bytes().clone(),
            false => self.blocks(0, self.progress.ready()),
        };
        self.command.changes().then(bytes)
    }

    /// Whether this request changes whole blocks that are at the device or about to be submitted.
    pub(crate) fn is_changing(&self) -> bool {
        let waits = self.overlaps.is_queued() || self.overlaps.is_deferred();
        let unheld = !waits && self.progress.handed() < self.progress.ready();
        self.live && self.command.changes() && (unheld || !self.is_idle())
    }

    /// Whether a piece of a long read is complete and must be sent before the next piece is read.
    pub(crate) fn is_between(&self) -> bool {
        self.command.op() == Op::Read && !self.progress.is_complete() && self.progress.is_drained()
    }

    /// Begins a read in pieces of at most `piece` bytes.
    pub(crate) fn begin_read(&mut self, piece: u64) {
        self.progress.begin_read(piece, self.command.whole_len());
    }

    /// Prepares the next piece of a read, reusing the memory of the previous piece.
    pub(crate) fn next_piece(&mut self) {
        self.progress.next_piece(self.command.whole_len());
    }

    /// Discards the data of the current piece of a finished read, so that [`Self::begin_read`]
    /// reads it again. Returns false for other rows.
    pub(crate) fn forget_piece(&mut self) -> bool {
        let has_data = self.command.op() == Op::Read && !self.parts.is_empty();
        let is_whole = self.reply.error().is_none() && self.reply.late() == Late::No;
        let forgets = has_data && is_whole && self.progress.is_drained();
        if forgets {
            self.progress.forget_piece();
        }
        forgets
    }

    /// Number of bytes from the start of the current piece of a read to the end.
    pub(crate) fn unsent(&self) -> u64 {
        self.command.whole_len() - self.progress.current_piece().start
    }

    /// Returns the blocks of the current piece of a read.
    fn piece(&self) -> Range<u64> {
        let piece = self.progress.current_piece();
        self.blocks(piece.start, piece.end)
    }

    /// Returns the requested part of the current piece of a read.
    pub(crate) fn asked(&self) -> Range<u64> {
        let (piece, offset) = (self.piece(), self.command.offset());
        piece.start.max(offset)..piece.end.min(offset + self.command.len())
    }

    /// Passes the memory of [`Self::asked`] to `take`, slice by slice.
    pub(crate) fn data(&self, mut take: impl FnMut(MemSlice)) {
        let (asked, start) = (self.asked(), self.piece().start);
        let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let (mut skip, mut left) = (bytes(asked.start - start), bytes(asked.end - asked.start));
        for part in &self.parts {
            let from = skip.min(part.slice.len());
            let len = left.min(part.slice.len() - from);
            (skip, left) = (skip - from, left - len);
            if let Some(slice) = part.slice.slice(from, len).filter(|slice| !slice.is_empty()) {
                take(slice);
            }
        }
    }

    /// Converts the extents listed by the device, which has `size` bytes, into NBD block status
    /// descriptors and returns them with their number. Returns None if the device listed none.
    ///
    /// Unless the client wants only one descriptor, the last one may extend beyond the requested
    /// range.
    pub(crate) fn statuses(&self, form: Form, size: u64) -> Option<(MemSlice, u32)> {
        let memory = &self.parts.first()?.slice;
        let list = memory.slice(0, self.command.extents_len())?;
        let room = memory.slice(extents::LEN_MAX, STATUS_ROOM)?;
        let command = &self.command;
        if self.reply.status() == IoStatus::Unsupported {
            // The device supported block status when the client connected.
            extents::all_data(&list, size.saturating_sub(command.cut().whole.start));
        }
        let (entry_len, len_max) = match form {
            Form::Extended => (16, u64::MAX),
            Form::Simple | Form::Structured => (8, STATUS_LEN_MAX),
        };
        let one = command.first_extent_only();
        let end = if one { command.offset() + command.asked() } else { size };
        // Bytes between the block boundary and the first requested byte.
        let mut skip = command.offset() - command.cut().whole.start;
        let (mut left, mut wanted) = (end.checked_sub(command.offset())?, command.asked());
        let mut used = 0;
        let good = extents::read_all(&list, |Extent { len, hole }| {
            let cut = skip.min(len);
            let mut len = (len - cut).min(left);
            (skip, left) = (skip - cut, left - len);
            let flags = if hole { base_allocation::HOLE | base_allocation::ZERO } else { 0 };
            while len > 0 {
                let part = len.min(len_max);
                let entry = match form {
                    Form::Extended => u128::from(part) << 64 | u128::from(flags),
                    Form::Simple | Form::Structured => {
                        u128::from(part << 32 | u64::from(flags)) << 64
                    }
                };
                room.copy_in(used, &entry.to_be_bytes()[..entry_len]);
                used += entry_len;
                (len, wanted) = (len - part, wanted.saturating_sub(part));
                if one || wanted == 0 || used == STATUS_ROOM {
                    return false;
                }
            }
            left > 0
        });
        let list = room.slice(0, used).filter(|_| good && used > 0)?;
        Some((list, u32::try_from(used / entry_len).ok()?))
    }

    /// Returns the memory of a fragment: its block, and the new bytes.
    pub(crate) fn fragment_memory(&self, which: usize) -> Option<(MemSlice, MemSlice)> {
        self.fragments.slices(self.command.cut(), which)
    }

    /// Merges the new bytes of a fragment into its block. Returns false if they do not fit in the
    /// block.
    pub(crate) fn merge_fragment(&self, which: usize) -> bool {
        self.fragments.merge(self.command.cut(), which)
    }

    /// Records the loss count after the first IO of a change has succeeded.
    pub(crate) fn note_losses(&mut self, losses: Option<&Losses>) {
        if self.command.changes() && !self.is_done() {
            self.loss_marks.note_first(losses);
        }
    }

    /// Whether the losses must be counted again before a change is answered. A loss since the first
    /// of the row's IOs completed may have affected the data of that IO and may have been reported
    /// already, so flushes after the answer must report it again. Losses of individual writes and
    /// these repetitions do not count.
    pub(crate) fn must_repeat_loss(&mut self, losses: &Losses) -> bool {
        if self.command.io() == Some(IoOp::Flush) {
            return false;
        }
        let counts = self.reply.status().is_ok() && !self.command.flags().fua;
        let before = self.loss_marks.take_first().filter(|_| counts);
        before.is_some_and(|before| losses.shared() != before)
    }
}
