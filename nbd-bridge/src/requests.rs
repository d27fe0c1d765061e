//! In-flight requests of one shard: one row per request, from its header to the last byte of its
//! reply.

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

/// Identifies a connection of a shard: a slot, and a generation that distinguishes successive users
/// of the slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ConnId {
    pub(crate) slot: usize,
    pub(crate) generation: u64,
}

/// Tracks whether a request exceeded the time limit of its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Late {
    /// Within the limit.
    No,
    /// Overdue; the client gets an error once the payload has been received.
    Noted,
    /// The error reply is on its way to the client, while the device still works on the request.
    GivenUp,
    /// The reply has been sent, or the client has disconnected.
    Told,
}

/// Progress of a write to part of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fragment {
    /// No such write, its bytes have not been received yet, or it has completed.
    None,
    /// Waiting for its turn.
    Waiting,
    /// Its turn has come, but the device queue was full when the read of the block was submitted.
    ToRead,
    /// The block is being read.
    Reading,
    /// The block is being read, but the write was canceled and nothing follows.
    Dropped,
    /// The bytes have been merged into the block, but the device queue was full.
    ToWrite,
    /// The block is being written.
    Writing,
    /// The device itself is writing the partial block.
    WritingPart,
}

impl Fragment {
    /// Whether the fragment has begun and not yet ended. Open fragments count as pending.
    pub(crate) fn is_open(self) -> bool {
        self != Self::None
    }

    /// Whether the fragment has an IO in flight at the device.
    pub(crate) fn is_at_device(self) -> bool {
        matches!(self, Self::Reading | Self::Dropped | Self::Writing | Self::WritingPart)
    }

    /// Whether the fragment waits for other requests, or for room in the device queue.
    pub(crate) fn waits(self) -> bool {
        matches!(self, Self::Waiting | Self::ToRead | Self::ToWrite)
    }
}

/// A request and its outstanding work.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) conn: ConnId,
    pub(crate) cookie: u64,
    pub(crate) op: Op,
    /// Operation for the device; None when the device is not involved.
    pub(crate) io: Option<IoOp>,
    pub(crate) flags: IoFlags,
    /// The client wants only the first extent (block status only).
    pub(crate) one: bool,
    pub(crate) offset: u64,
    pub(crate) len: u32,
    /// `offset` and `len` in device blocks.
    pub(crate) cut: Cut,
    /// Progress of the two fragments in `cut.rest`.
    pub(crate) fragments: [Fragment; 2],
    /// The device rejected a partial write, so blocks are read, modified and written back.
    pub(crate) whole_blocks: bool,
    /// Memory of the fragments.
    pub(crate) aside: Option<Part>,
    /// Bytes of the whole blocks that may be submitted to the device: all bytes, or the payload
    /// received so far. A flush counts as one byte.
    pub(crate) ready: u32,
    /// Bytes submitted to the device.
    pub(crate) handed: u32,
    /// Maximum number of bytes read before they are sent to the client (reads only). `base` is
    /// where the current piece begins.
    pub(crate) piece: u32,
    pub(crate) base: u32,
    /// Position of the next bytes to submit: the index of a part, and an offset in that part.
    pub(crate) cursor: (usize, usize),
    /// Number of IOs in flight plus open fragments.
    pub(crate) pending: u32,
    /// `ready` will not grow any more. The payload of a large write arrives piece by piece, and a
    /// long read is also done in pieces.
    pub(crate) complete: bool,
    /// No reply is sent, because the payload did not arrive in full.
    pub(crate) silent: bool,
    /// Waiting for orphaned writes; no part has been submitted.
    pub(crate) deferred: bool,
    /// The request is an orphaned write itself, and is listed in the group's table.
    pub(crate) orphaned: bool,
    /// The ready bytes wait for changes of parts of blocks.
    pub(crate) queued: bool,
    /// Changes of parts of blocks wait for IOs of this request.
    pub(crate) awaited: bool,
    /// Time when the request was first seen deferred or waiting for its turn.
    pub(crate) deferred_since: Option<Instant>,
    pub(crate) late: Late,
    /// In use: set from `take` to `give`.
    live: bool,
    /// First error.
    pub(crate) status: IoStatus,
    /// Losses that had been reported to the client before this flush arrived.
    pub(crate) reported: u64,
    /// Loss count when the first of several IOs of a change completed, or when a flush ended.
    pub(crate) losses: Option<u64>,
    /// NBD error and reason to send instead of a status.
    pub(crate) refusal: Option<(NbdError, &'static str)>,
    /// Data of a read, or payload of a write.
    pub(crate) parts: Vec<Part>,
}

impl Row {
    /// Whether no work is outstanding or still to come.
    pub(crate) fn is_done(&self) -> bool {
        self.pending == 0 && self.complete && self.handed == self.ready
    }

    /// Whether the device has no IO for the whole blocks in flight.
    pub(crate) fn is_idle(&self) -> bool {
        let fragments = self.fragments.iter().filter(|fragment| fragment.is_open());
        self.pending as usize == fragments.count()
    }

    /// Whether the device has any IO of the request in flight.
    pub(crate) fn is_at_device(&self) -> bool {
        !self.is_idle() || self.fragments.iter().any(|fragment| fragment.is_at_device())
    }

    /// Whether the request is in one of the shard's tables or lists.
    pub(crate) fn is_listed(&self) -> bool {
        self.deferred || self.orphaned || self.queued || self.awaited
    }

    /// Returns the range that is read or changed, rounded to whole blocks.
    pub(crate) fn bytes(&self) -> &Range<u64> {
        &self.cut.span
    }

    /// Whether the operation changes data.
    pub(crate) fn changes(&self) -> bool {
        self.io.is_some_and(IoOp::changes)
    }

    /// Converts an offset range within the whole blocks into a range of the device.
    pub(crate) fn blocks(&self, from: u32, to: u32) -> Range<u64> {
        self.cut.whole.start + u64::from(from)..self.cut.whole.start + u64::from(to)
    }

    /// Returns the range that the device may still change for this request.
    pub(crate) fn may_change(&self) -> Option<Range<u64>> {
        let all = self.cut.fragments() > 0;
        let bytes = || if all { self.cut.span.clone() } else { self.blocks(0, self.ready) };
        self.changes().then(bytes)
    }

    /// Whether a piece of a long read is complete and must be sent before the next piece is read.
    pub(crate) fn is_between(&self) -> bool {
        self.op == Op::Read && !self.complete && self.pending == 0 && self.handed == self.ready
    }

    /// Makes the next piece of a read ready, reusing the memory of the previous piece.
    pub(crate) fn next_piece(&mut self) {
        let whole = self.cut.whole.end - self.cut.whole.start;
        let len = u32::try_from(whole).unwrap_or(u32::MAX);
        (self.base, self.cursor) = (self.ready, (0, 0));
        self.ready = len.min(self.ready + self.piece);
        self.complete = self.ready == len;
    }

    /// Returns the requested part of the current piece of a read.
    pub(crate) fn asked(&self) -> Range<u64> {
        let piece = self.blocks(self.base, self.ready);
        piece.start.max(self.offset)..piece.end.min(self.offset + u64::from(self.len))
    }

    /// Passes the memory of [`Self::asked`] to `take`, slice by slice.
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

    /// Converts the extents listed by the device into NBD block status descriptors and returns them
    /// with their number. Returns None if the device listed no extents.
    pub(crate) fn statuses(&self) -> Option<(MemSlice, u32)> {
        let memory = &self.parts.first()?.slice;
        let list = memory.slice(0, extents::LEN_MAX)?;
        let room = memory.slice(extents::LEN_MAX, extents::LEN_MAX)?;
        let bytes = self.cut.whole.end - self.cut.whole.start;
        let len = u32::try_from(bytes).unwrap_or(u32::MAX);
        if self.status == IoStatus::Unsupported {
            // The device supported this when the client connected.
            extents::all_data(&list, len);
        }
        // Bytes between the block boundary and the first requested byte.
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

    /// An empty row, whose list of parts has no capacity yet.
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

/// All request rows of one shard. Their number is fixed, and their vectors keep their capacity.
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

    /// Allocates a cleared row.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let index = self.free.pop()?;
        let row = &mut self.rows[index as usize];
        debug_assert!(row.parts.is_empty() && row.pending == 0);
        let parts = std::mem::take(&mut row.parts);
        *row = Row { parts, live: true, ..Row::empty() };
        Some(index)
    }

    /// Frees a row. The caller has already released its parts.
    pub(crate) fn give(&mut self, index: u32) {
        let row = &mut self.rows[index as usize];
        let empty = row.parts.is_empty() && row.aside.is_none();
        debug_assert!(empty && row.pending == 0, "row {index} was freed in use");
        debug_assert!(!row.is_listed(), "row {index} was freed in a table");
        row.live = false;
        self.free.push(index);
    }

    pub(crate) fn row(&mut self, index: u32) -> &mut Row {
        &mut self.rows[index as usize]
    }

    /// Returns the row if `index` is in range and the row is in use.
    pub(crate) fn live(&mut self, index: u32) -> Option<&mut Row> {
        self.rows.get_mut(index as usize).filter(|row| row.live)
    }

    /// Returns the unfinished rows of a connection.
    pub(crate) fn open_rows(&self, conn: ConnId) -> Vec<u32> {
        let open = |row: &Row| row.live && row.conn == conn && !row.is_done();
        (0..).zip(&self.rows).filter(|(_, row)| open(row)).map(|(index, _)| index).collect()
    }

    /// Returns changes of whole blocks that are at the device or about to be submitted.
    pub(crate) fn in_flight(&mut self) -> impl Iterator<Item = (u32, &mut Row)> {
        let in_flight = |row: &Row| {
            let unheld = !row.queued && !row.deferred && row.handed < row.ready;
            row.live && row.changes() && (unheld || !row.is_idle())
        };
        (0..).zip(&mut self.rows).filter(move |(_, row)| in_flight(row))
    }

    /// Number of rows in the table of orphaned writes; for tests.
    pub(crate) fn orphaned(&self) -> usize {
        self.rows.iter().filter(|row| row.orphaned).count()
    }

    /// Number of unused rows.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// Total number of rows.
    pub(crate) fn capacity(&self) -> usize {
        self.rows.len()
    }

    /// Number of rows in use.
    pub(crate) fn busy(&self) -> usize {
        self.rows.len() - self.free.len()
    }
}
