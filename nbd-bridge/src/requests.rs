//! Requests in flight on one shard: a row each, from the header to the last byte of the reply.

use std::ops::Range;

use rtrs_core::block::{IoFlags, IoOp};
use rtrs_core::extents::{self, Extent};
use rtrs_core::mem::MemSlice;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

use crate::buffers::Part;
use crate::cut::Cut;
use crate::proto::Op;
use crate::proto::wire::{NbdError, base_allocation};

/// A connection of a shard: its slot, and what distinguishes it from former ones of that slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ConnId {
    pub(crate) slot: usize,
    pub(crate) generation: u64,
}

/// Whether a request took longer than its device allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Late {
    /// It did not.
    No,
    /// It did, and its client is told once its payload is here.
    Noted,
    /// Its client is being told that it failed. The device still works on it.
    GivenUp,
    /// Its client was told, or is gone.
    Told,
}

/// How far the change of a part of a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fragment {
    /// There is none, its bytes have not come, or it has ended.
    None,
    /// It waits for its turn.
    Waiting,
    /// It is its turn, and the device had no room.
    ToRead,
    /// The device reads the block.
    Reading,
    /// The same, and nothing follows.
    Dropped,
    /// The bytes are in the block, and the device had no room.
    ToWrite,
    /// The device writes the block.
    Writing,
    /// The device writes the bytes into the block.
    WritingPart,
}

impl Fragment {
    /// It has begun and not ended; such fragments count as pending.
    pub(crate) fn is_open(self) -> bool {
        self != Self::None
    }

    /// The device has an IO of it.
    pub(crate) fn is_at_device(self) -> bool {
        matches!(self, Self::Reading | Self::Dropped | Self::Writing | Self::WritingPart)
    }

    /// It waits for others, or for room at the device.
    pub(crate) fn waits(self) -> bool {
        matches!(self, Self::Waiting | Self::ToRead | Self::ToWrite)
    }
}

/// A request and what is outstanding of it.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) conn: ConnId,
    pub(crate) cookie: u64,
    pub(crate) op: Op,
    /// What the device is asked; None when it is not asked at all.
    pub(crate) io: Option<IoOp>,
    pub(crate) flags: IoFlags,
    /// Of block status: only the first extent is wanted.
    pub(crate) one: bool,
    pub(crate) offset: u64,
    pub(crate) len: u32,
    /// The same in blocks of the device.
    pub(crate) cut: Cut,
    /// Of `cut.rest`, how far each is.
    pub(crate) fragments: [Fragment; 2],
    /// The device did not take a partial write: blocks are read, changed and written.
    pub(crate) whole_blocks: bool,
    /// Memory of the fragments.
    pub(crate) aside: Option<Part>,
    /// Bytes of the whole blocks that may be handed to the device: all, or the payload that is
    /// here. A flush counts as one.
    pub(crate) ready: u32,
    /// Bytes that were handed to the device.
    pub(crate) handed: u32,
    /// Of a read: how much is read before its client gets that, and where what it gets next begins.
    pub(crate) piece: u32,
    pub(crate) base: u32,
    /// Where the next of them are: the part, and the offset in it.
    pub(crate) cursor: (usize, usize),
    /// IOs submitted and not yet completed, and fragments.
    pub(crate) pending: u32,
    /// Nothing more will get ready (the payload of a large write arrives piece by piece, and a long
    /// read is read so).
    pub(crate) complete: bool,
    /// It gets no reply: its payload did not arrive in full.
    pub(crate) silent: bool,
    /// It waits for orphaned writes, and nothing of it was handed over.
    pub(crate) deferred: bool,
    /// It is one itself, and is in the table.
    pub(crate) orphaned: bool,
    /// What is ready waits for changes of parts of blocks.
    pub(crate) queued: bool,
    /// Such changes wait for what the device has of it.
    pub(crate) awaited: bool,
    /// Since when it is known to be deferred, or to wait for its turn.
    pub(crate) deferred_since: Option<Instant>,
    pub(crate) late: Late,
    /// Between `take` and `give`.
    live: bool,
    /// First failure.
    pub(crate) status: IoStatus,
    /// Of a flush: losses reported to its user before it came.
    pub(crate) reported: u64,
    /// Of a change in several IOs: losses when the first of them had ended.
    pub(crate) losses: Option<u64>,
    /// A refusal instead of a status, with its reason.
    pub(crate) refusal: Option<(NbdError, &'static str)>,
    /// Data of a read, or payload of a write.
    pub(crate) parts: Vec<Part>,
}

impl Row {
    /// Nothing of it is outstanding or to come.
    pub(crate) fn is_done(&self) -> bool {
        self.pending == 0 && self.complete && self.handed == self.ready
    }

    /// The device has nothing of its whole blocks.
    pub(crate) fn is_idle(&self) -> bool {
        let fragments = self.fragments.iter().filter(|fragment| fragment.is_open());
        self.pending as usize == fragments.count()
    }

    /// The device has something of it.
    pub(crate) fn is_at_device(&self) -> bool {
        !self.is_idle() || self.fragments.iter().any(|fragment| fragment.is_at_device())
    }

    /// It is in a table or list of the shard.
    pub(crate) fn is_listed(&self) -> bool {
        self.deferred || self.orphaned || self.queued || self.awaited
    }

    /// The bytes that it reads or changes, in whole blocks.
    pub(crate) fn bytes(&self) -> &Range<u64> {
        &self.cut.span
    }

    /// It changes something.
    pub(crate) fn changes(&self) -> bool {
        self.io.is_some_and(IoOp::changes)
    }

    /// Its whole blocks from one byte to another, counted from the first.
    pub(crate) fn blocks(&self, from: u32, to: u32) -> Range<u64> {
        self.cut.whole.start + u64::from(from)..self.cut.whole.start + u64::from(to)
    }

    /// The bytes that the device may still change for it.
    pub(crate) fn may_change(&self) -> Option<Range<u64>> {
        let all = self.cut.fragments() > 0;
        let bytes = || if all { self.cut.span.clone() } else { self.blocks(0, self.ready) };
        self.changes().then(bytes)
    }

    /// A piece of a long read is there, and its client has to get it before the next one.
    pub(crate) fn is_between(&self) -> bool {
        self.op == Op::Read && !self.complete && self.pending == 0 && self.handed == self.ready
    }

    /// The next piece of a read gets ready, in the memory of the one before.
    pub(crate) fn next_piece(&mut self) {
        let whole = self.cut.whole.end - self.cut.whole.start;
        let len = u32::try_from(whole).unwrap_or(u32::MAX);
        (self.base, self.cursor) = (self.ready, (0, 0));
        self.ready = len.min(self.ready + self.piece);
        self.complete = self.ready == len;
    }

    /// Of a read: what its client asked for of the piece that is there.
    pub(crate) fn asked(&self) -> Range<u64> {
        let piece = self.blocks(self.base, self.ready);
        piece.start.max(self.offset)..piece.end.min(self.offset + u64::from(self.len))
    }

    /// Its memory.
    pub(crate) fn data(&self, mut take: impl FnMut(MemSlice)) {
        let (asked, start) = (self.asked(), self.blocks(self.base, self.ready).start);
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

    /// The extents that the device listed, as the client of a block status wants them, and their
    /// number. None if it listed none.
    pub(crate) fn statuses(&self) -> Option<(MemSlice, u32)> {
        let memory = &self.parts.first()?.slice;
        let list = memory.slice(0, extents::LEN_MAX)?;
        let room = memory.slice(extents::LEN_MAX, extents::LEN_MAX)?;
        let bytes = self.cut.whole.end - self.cut.whole.start;
        let len = u32::try_from(bytes).unwrap_or(u32::MAX);
        if self.status == IoStatus::Unsupported {
            // It could when the client came.
            extents::all_data(&list, len);
        }
        // What was not asked for before the first byte.
        let (mut skip, mut left) = (self.offset - self.cut.whole.start, u64::from(self.len));
        let mut count = 0;
        let good = extents::read(&list, len, |Extent { len, hole }| {
            let cut = skip.min(len);
            let len = (len - cut).min(left);
            (skip, left) = (skip - cut, left - len);
            if len == 0 {
                return true;
            }
            let flags = if hole { base_allocation::HOLE | base_allocation::ZERO } else { 0 };
            let entry = (len << 32 | u64::from(flags)).to_be_bytes();
            room.copy_in(8 * count, &entry);
            count += 1;
            left > 0 && !self.one
        });
        let list = room.slice(0, 8 * count).filter(|_| good && count > 0)?;
        Some((list, u32::try_from(count).ok()?))
    }

    /// A row of nothing, whose list of parts has no room yet.
    const fn empty() -> Self {
        Self {
            conn: ConnId { slot: 0, generation: 0 },
            cookie: 0,
            op: Op::Flush,
            io: None,
            flags: IoFlags { fua: false, no_unmap: false, fast_only: false, partial: false },
            one: false,
            offset: 0,
            len: 0,
            cut: Cut::new(Op::Flush, 0..0, 1),
            fragments: [Fragment::None; 2],
            whole_blocks: false,
            aside: None,
            ready: 0,
            handed: 0,
            piece: 0,
            base: 0,
            cursor: (0, 0),
            pending: 0,
            complete: true,
            silent: false,
            deferred: false,
            orphaned: false,
            queued: false,
            awaited: false,
            deferred_since: None,
            late: Late::No,
            live: false,
            status: IoStatus::Ok,
            reported: 0,
            losses: None,
            refusal: None,
            parts: Vec::new(),
        }
    }
}

/// The rows of one shard. A fixed number; their vectors keep their room.
#[derive(Debug)]
pub(crate) struct Requests {
    rows: Vec<Row>,
    free: Vec<u32>,
}

impl Requests {
    pub(crate) fn new(count: u32) -> Self {
        let row = |_| Row { parts: Vec::with_capacity(2), ..Row::empty() };
        Self { rows: (0..count).map(row).collect(), free: (0..count).rev().collect() }
    }

    /// Takes a fresh row.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let index = self.free.pop()?;
        let row = &mut self.rows[index as usize];
        debug_assert!(row.parts.is_empty() && row.pending == 0);
        let parts = std::mem::take(&mut row.parts);
        *row = Row { parts, live: true, ..Row::empty() };
        Some(index)
    }

    /// Gives a row back; its parts have been released.
    pub(crate) fn give(&mut self, index: u32) {
        let row = &mut self.rows[index as usize];
        let empty = row.parts.is_empty() && row.aside.is_none();
        debug_assert!(empty && row.pending == 0, "row {index} given back in use");
        debug_assert!(!row.is_listed(), "row {index} given back in a table");
        row.live = false;
        self.free.push(index);
    }

    pub(crate) fn row(&mut self, index: u32) -> &mut Row {
        &mut self.rows[index as usize]
    }

    /// A row in use, if this number is one.
    pub(crate) fn live(&mut self, index: u32) -> Option<&mut Row> {
        self.rows.get_mut(index as usize).filter(|row| row.live)
    }

    /// The rows of a connection that are not finished.
    pub(crate) fn open_rows(&self, conn: ConnId) -> Vec<u32> {
        let open = |row: &Row| row.live && row.conn == conn && !row.is_done();
        (0..).zip(&self.rows).filter(|(_, row)| open(row)).map(|(index, _)| index).collect()
    }

    /// The changes of whole blocks that the device has or is about to get.
    pub(crate) fn in_flight(&mut self) -> impl Iterator<Item = (u32, &mut Row)> {
        let in_flight = |row: &Row| {
            let unheld = !row.queued && !row.deferred && row.handed < row.ready;
            row.live && row.changes() && (unheld || !row.is_idle())
        };
        (0..).zip(&mut self.rows).filter(move |(_, row)| in_flight(row))
    }

    /// Rows that are in the table of orphaned writes; for tests.
    pub(crate) fn orphaned(&self) -> usize {
        self.rows.iter().filter(|row| row.orphaned).count()
    }

    /// Rows not in use.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// All rows.
    pub(crate) fn capacity(&self) -> usize {
        self.rows.len()
    }

    /// Rows in use.
    pub(crate) fn busy(&self) -> usize {
        self.rows.len() - self.free.len()
    }
}
