//! Changes of parts of blocks, and the changes that wait for them.
//!
//! A fragment is one partial write where the device takes those: then nobody else's change of the
//! block is undone, whoever else has the device. Elsewhere the block is read, changed and written.
//! Both take turns with the other changes of the block, by the list of
//! [`Ranges`](rtrs_core::ranges::Ranges), since a device may cease to take partial writes.
//!
//! Each fragment of a row has two blocks of memory: the block as it is read and written, and behind
//! it the bytes that are put in, at the place where they belong. What comes of a fragment is the
//! row's: its flags, its first failure, its reply when all of it has ended.

use std::ops::Range;

use rtrs_core::block::{Io, IoFlags, IoOp, is_part_of_block};
use rtrs_core::mem::MemSlice;
use rtrs_core::ranges::{Key, Piece};
use rtrs_core::status::IoStatus;

use super::Shared;
use crate::cut::Cut;
use crate::requests::{Fragment, Row};

/// Fragments of a shard at a time; beyond that requests of more wait.
const FRAGMENTS_MAX: usize = 128;
/// In the tag of a fragment's IO, above the row number: which one, from 1.
pub(super) const WHICH_SHIFT: u32 = 32;

impl Shared {
    /// True while more may begin.
    pub(crate) fn has_room_for_fragments(&self) -> bool {
        self.fragments < FRAGMENTS_MAX
    }

    fn key(&self, row: u32, piece: Piece) -> Key {
        Key { shard: self.seat.shard, row: row.into(), piece }
    }

    /// Memory of a fragment: its block, and the bytes that are put in.
    pub(crate) fn fragment_memory(
        &mut self,
        index: u32,
        which: usize,
    ) -> Option<(MemSlice, MemSlice)> {
        let row = self.requests.row(index);
        let block = row.cut.block;
        let bytes = &row.cut.rest[which];
        #[allow(clippy::cast_possible_truncation, reason = "below the size of a block")]
        let (from, len) = ((bytes.start % block) as usize, (bytes.end - bytes.start) as usize);
        let before = row.cut.rest[..which].iter().filter(|bytes| !bytes.is_empty()).count();
        let at = 2 * before * block as usize;
        let part = |at, len| row.aside.as_ref().and_then(|aside| aside.slice.slice(at, len));
        part(at, block as usize).zip(part(at + block as usize + from, len))
    }

    /// Enters a fragment whose bytes are in its memory.
    pub(crate) fn begin_fragment(&mut self, index: u32, which: usize) {
        let key = self.key(index, Piece::Fragment(which));
        let block = self.fragment_block(index, which);
        let row = self.requests.row(index);
        row.fragments[which] = Fragment::Waiting;
        row.pending += 1;
        self.fragments += 1;
        self.stats.fragments += 1;
        let group = &self.seat.group;
        group.ranges.enter(key, block, |shard| group.wake(shard));
        self.look();
        self.wait(index);
    }

    /// The block of which it changes a part.
    fn fragment_block(&mut self, index: u32, which: usize) -> Range<u64> {
        let Cut { block, rest, .. } = &self.requests.row(index).cut;
        let start = rest[which].start / block * block;
        start..start + block
    }

    /// Enters what this shard has in flight where that overlaps fragments that came since it looked
    /// last. True when there were such.
    pub(crate) fn look(&mut self) -> bool {
        let (group, shard) = (&self.seat.group, self.seat.shard);
        let Some(round) = group.ranges.due(shard) else { return false };
        for (index, row) in self.requests.in_flight() {
            let key = Key { shard, row: index.into(), piece: Piece::Running };
            let end = if row.queued { row.handed } else { row.ready };
            row.awaited |= group.ranges.meets(key, &row.blocks(0, end));
        }
        group.ranges.has_looked(shard, round, |shard| group.wake(shard));
        true
    }

    /// Queues what is ready of a row if it overlaps what has to take turns. True when it waits.
    pub(super) fn queue(&mut self, index: u32) -> bool {
        let key = self.key(index, Piece::Queued);
        let ranges = &self.seat.group.ranges;
        let row = self.requests.row(index);
        let bytes = row.blocks(row.handed, row.ready);
        if row.queued {
            ranges.extend(key, bytes.end);
            return true;
        }
        if !row.changes() || ranges.is_empty() || bytes.is_empty() || !ranges.queue(key, bytes) {
            return false;
        }
        row.queued = true;
        self.stats.deferred += 1;
        self.wait(index);
        true
    }

    /// Something of this row waits.
    fn wait(&mut self, index: u32) {
        if !self.turns.contains(&index) {
            self.turns.push(index);
        }
    }

    /// Begins what has its turn, and goes on where the device had no room. True when something
    /// happened.
    pub(super) fn advance_turns(&mut self) -> bool {
        let (mut at, mut any) = (0, false);
        while let Some(&index) = self.turns.get(at) {
            any |= self.advance(index);
            let row = self.requests.row(index);
            if row.queued || row.fragments.iter().any(|fragment| fragment.waits()) {
                at += 1;
            } else {
                row.deferred_since = None;
                self.turns.remove(at);
            }
        }
        any
    }

    fn advance(&mut self, index: u32) -> bool {
        let mut any = false;
        if self.requests.row(index).queued {
            let key = self.key(index, Piece::Queued);
            if self.seat.group.ranges.start(key) {
                let row = self.requests.row(index);
                (row.queued, row.awaited) = (false, true);
                self.hand_over_in_order(index);
                any = true;
            }
        }
        for which in 0..2 {
            if self.requests.row(index).fragments[which] == Fragment::Waiting {
                let key = self.key(index, Piece::Fragment(which));
                if self.seat.group.ranges.start(key) {
                    self.requests.row(index).fragments[which] = Fragment::ToRead;
                }
            }
            any |= self.submit_fragment(index, which);
        }
        any
    }

    /// Hands the next IO of a fragment to the device. True when it took one.
    fn submit_fragment(&mut self, index: u32, which: usize) -> bool {
        let row = self.requests.row(index);
        let geometry = self.device.geometry();
        let (bytes, block) = (&row.cut.rest[which], u64::from(geometry.logical_block));
        let partial = geometry.partial_writes
            && !row.whole_blocks
            && !rtrs_core::mutated!(PartialByClient)
            && is_part_of_block(bytes.start, bytes.end - bytes.start, block);
        let (op, next) = match row.fragments[which] {
            Fragment::ToRead if partial => (IoOp::Write, Fragment::WritingPart),
            Fragment::ToRead => (IoOp::Read, Fragment::Reading),
            Fragment::ToWrite => (IoOp::Write, Fragment::Writing),
            _ => return false,
        };
        let partial = next == Fragment::WritingPart;
        if next == Fragment::Reading && self.shared_writes {
            // Another client may change the block between its read and its write.
            self.note_status(index, IoStatus::Invalid);
            self.end_fragment(index, which);
            self.finish_if_done(index);
            return true;
        }
        let fua = op == IoOp::Write && row.flags.fua;
        let bytes = match partial {
            true => row.cut.rest[which].clone(),
            false => self.fragment_block(index, which),
        };
        let Some((block, part)) = self.fragment_memory(index, which) else {
            self.internal_error(index, "a part of a block without memory");
            self.note_status(index, IoStatus::Io);
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
        let taken = self.device.submit(io).is_ok();
        if taken {
            self.requests.row(index).fragments[which] = next;
        }
        taken
    }

    /// An IO of a fragment has ended.
    pub(super) fn on_fragment(&mut self, index: u32, which: usize, status: IoStatus) {
        let row = self.requests.row(index);
        match row.fragments[which] {
            Fragment::Reading if status.is_ok() => {
                row.fragments[which] = Fragment::ToWrite;
                if self.put_in(index, which) {
                    if !self.submit_fragment(index, which) {
                        self.wait(index);
                    }
                    return;
                }
                // The block as it was must not pass for a change.
                self.note_status(index, IoStatus::Io);
            }
            // The server took partial writes when this one was submitted; since then another one
            // has its place.
            Fragment::WritingPart if status == IoStatus::Unsupported && row.status.is_ok() => {
                (row.fragments[which], row.whole_blocks) = (Fragment::ToRead, true);
                if !self.submit_fragment(index, which) {
                    self.wait(index);
                }
                return;
            }
            _ => {}
        }
        self.note_status(index, status);
        self.end_fragment(index, which);
        if status.is_ok() {
            self.note_losses(index);
        }
        self.finish_if_done(index);
    }

    /// Notes a status, if it is the first error of the row.
    fn note_status(&mut self, index: u32, status: IoStatus) {
        let row = self.requests.row(index);
        if row.status.is_ok() {
            row.status = status;
        }
    }

    /// Puts the bytes of a fragment into its block. False if they are not within it.
    fn put_in(&mut self, index: u32, which: usize) -> bool {
        let Cut { block, rest, .. } = &self.requests.row(index).cut;
        let from = rest[which].start % block;
        let Some((block, bytes)) = self.fragment_memory(index, which) else { return false };
        let place = usize::try_from(from).ok().and_then(|from| block.slice(from, bytes.len()));
        if let Some(place) = &place {
            place.copy_from(&bytes);
        }
        place.is_some()
    }

    fn end_fragment(&mut self, index: u32, which: usize) {
        let key = self.key(index, Piece::Fragment(which));
        let row = self.requests.row(index);
        row.fragments[which] = Fragment::None;
        row.pending -= 1;
        self.fragments -= 1;
        self.end_turn(index, key.piece);
    }

    fn end_turn(&self, row: u32, piece: Piece) {
        let Self { seat, .. } = self;
        let key = self.key(row, piece);
        seat.group.ranges.end(key.shard, |own| *own == key, |shard| seat.group.wake(shard));
    }

    /// Nothing more of a row begins.
    pub(super) fn drop_turns(&mut self, index: u32) {
        self.turns.retain(|row| *row != index);
        if std::mem::take(&mut self.requests.row(index).queued) {
            self.end_turn(index, Piece::Queued);
        }
        for which in 0..2 {
            match &mut self.requests.row(index).fragments[which] {
                state @ Fragment::Reading => *state = Fragment::Dropped,
                state if state.waits() => self.end_fragment(index, which),
                _ => {}
            }
        }
        self.end_running(index);
    }

    /// Fragments need not wait for the row any more if the device has nothing of it.
    pub(super) fn end_running(&mut self, index: u32) {
        let row = self.requests.row(index);
        if row.awaited && row.is_idle() && (row.handed == row.ready || row.queued) {
            row.awaited = false;
            self.end_turn(index, Piece::Running);
        }
    }
}

/// True when a row has fragments that have not ended.
pub(super) fn is_open(row: &Row) -> bool {
    row.fragments.iter().any(|fragment| fragment.is_open())
}
