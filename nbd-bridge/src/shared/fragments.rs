//! Changes to parts of blocks (fragments), and the changes that wait for them.
//!
//! If the device supports partial writes, a fragment is one such write, which does not undo
//! concurrent changes to the block, even those by other users of the device. Otherwise the block is
//! read, modified and written back. In both cases the fragment is serialized with other changes to
//! the block, using the list in [`Ranges`](rtrs_core::ranges::Ranges), since a device may stop
//! supporting partial writes.
//!
//! Each fragment of a row has two blocks of memory: the block that is read and written, and behind
//! it the new bytes at their position in the block. A fragment uses the flags, the first error and
//! the reply of its row; the reply is sent when all IO of the row has ended.

use rtrs_core::block::{Io, IoFlags, IoOp, is_part_of_block};
use rtrs_core::ranges::Piece;
use rtrs_core::status::IoStatus;

use super::Shared;
use crate::requests::{Fragment, block_of};

/// Bit position of the fragment's index (counted from 1) in an IO's tag; the row number is below
/// it.
pub(super) const WHICH_SHIFT: u32 = 32;

impl Shared {
    /// Registers a fragment whose bytes are in its memory.
    pub(crate) fn begin_fragment(&mut self, index: u32, which: usize) {
        let row = self.requests.row(index);
        let block = block_of(row.command.cut(), which);
        row.fragments.set(which, Fragment::Waiting);
        row.progress.fragment_begun();
        self.stats.fragments += 1;
        self.turns.enter_fragment(index, which, block);
        self.turns.look(&mut self.requests);
        self.turns.wait(index);
    }

    /// Begins the fragments of a request that zeroes parts of blocks.
    pub(crate) fn zero_fragments(&mut self, index: u32) {
        for which in 0..2 {
            let row = self.requests.row(index);
            if !row.command.cut().rest[which].is_empty() {
                if let Some((_, bytes)) = row.fragment_memory(which) {
                    bytes.fill(0);
                }
                self.begin_fragment(index, which);
            }
        }
    }

    /// Starts fragments and rows whose turn has come, and retries those that found the device queue
    /// full. Returns true if anything was done.
    pub(super) fn advance_turns(&mut self) -> bool {
        let (mut at, mut any) = (0, false);
        while let Some(&index) = self.turns.waiting().get(at) {
            any |= self.advance(index);
            let row = self.requests.row(index);
            if row.overlaps.is_queued() || row.fragments.any_waits() {
                at += 1;
            } else {
                row.overlaps.stop_waiting();
                self.turns.remove_at(at);
            }
        }
        any
    }

    fn advance(&mut self, index: u32) -> bool {
        let mut any = false;
        let row = self.requests.row(index);
        if row.overlaps.is_queued() && self.turns.start(index, Piece::Queued) {
            row.overlaps.start_turn();
            self.queue.submit_in_order(index, row);
            any = true;
        }
        for which in 0..2 {
            let fragments = &mut self.requests.row(index).fragments;
            let waits = fragments.state(which) == Fragment::Waiting;
            if waits && self.turns.start(index, Piece::Fragment(which)) {
                fragments.set(which, Fragment::ToRead);
            }
            any |= self.submit_fragment(index, which);
        }
        any
    }

    /// Submits the next IO of a fragment. Returns true if the device accepted it.
    fn submit_fragment(&mut self, index: u32, which: usize) -> bool {
        let row = self.requests.row(index);
        let geometry = self.queue.geometry();
        let (bytes, block) = (&row.command.cut().rest[which], u64::from(geometry.logical_block));
        let partial = geometry.partial_writes
            && !row.fragments.whole_blocks()
            && !rtrs_core::mutated!(PartialByClient)
            && is_part_of_block(bytes.start, bytes.end - bytes.start, block);
        let (op, next) = match row.fragments.state(which) {
            Fragment::ToRead if partial => (IoOp::Write, Fragment::WritingPart),
            Fragment::ToRead => (IoOp::Read, Fragment::Reading),
            Fragment::ToWrite => (IoOp::Write, Fragment::Writing),
            _ => return false,
        };
        let partial = next == Fragment::WritingPart;
        if next == Fragment::Reading && self.terms.shared_writes() {
            // Another client may change the block between the read and the write.
            row.reply.note(IoStatus::Invalid);
            self.end_fragment(index, which);
            self.finish_if_done(index);
            return true;
        }
        let fua = op == IoOp::Write && row.command.flags().fua;
        let bytes = match partial {
            true => bytes.clone(),
            false => block_of(row.command.cut(), which),
        };
        let Some((block, part)) = row.fragment_memory(which) else {
            self.internal_error(index, "a part of a block without memory");
            self.requests.row(index).reply.note(IoStatus::Io);
            self.end_fragment(index, which);
            self.finish_if_done(index);
            return true;
        };
        let tag = u64::from(index) | (which as u64 + 1) << WHICH_SHIFT;
        let flags = IoFlags { fua, partial, ..IoFlags::default() };
        #[allow(clippy::cast_possible_truncation, reason = "a block is at most 64 KiB")]
        let len = (bytes.end - bytes.start) as u32;
        let buf = Some(if partial { part } else { block });
        let io = Io { tag, op, flags, offset: bytes.start, len, buf };
        let taken = self.queue.device_mut().submit(io).is_ok();
        if taken {
            self.requests.row(index).fragments.set(which, next);
        }
        taken
    }

    /// Handles the completion of a fragment's IO.
    pub(super) fn on_fragment(&mut self, index: u32, which: usize, status: IoStatus) {
        let row = self.requests.row(index);
        let ok_so_far = row.reply.status().is_ok();
        match row.fragments.state(which) {
            Fragment::Reading if status.is_ok() => {
                row.fragments.set(which, Fragment::ToWrite);
                if row.merge_fragment(which) {
                    if !self.submit_fragment(index, which) {
                        self.turns.wait(index);
                    }
                    return;
                }
                // Writing back the unmodified block must not count as success.
                row.reply.note(IoStatus::Io);
            }
            // The server supported partial writes when this write was submitted, but has since been
            // replaced.
            Fragment::WritingPart if ok_so_far && status == IoStatus::Unsupported => {
                row.fragments.retry_whole(which);
                if !self.submit_fragment(index, which) {
                    self.turns.wait(index);
                }
                return;
            }
            _ => {}
        }
        row.reply.note(status);
        self.end_fragment(index, which);
        if status.is_ok() {
            self.requests.row(index).note_losses(self.losses.as_deref());
        }
        self.finish_if_done(index);
    }

    fn end_fragment(&mut self, index: u32, which: usize) {
        let row = self.requests.row(index);
        row.fragments.set(which, Fragment::None);
        row.progress.ended();
        self.turns.end_fragment(index, which);
    }

    /// Drops those parts of a row that have not begun.
    pub(super) fn drop_turns(&mut self, index: u32) {
        self.turns.remove(index);
        self.turns.end_queued(index, self.requests.row(index));
        for which in 0..2 {
            let fragments = &mut self.requests.row(index).fragments;
            match fragments.state(which) {
                Fragment::Reading => fragments.set(which, Fragment::Dropped),
                state if state.waits() => self.end_fragment(index, which),
                _ => {}
            }
        }
        self.turns.end_running(index, self.requests.row(index));
    }
}
