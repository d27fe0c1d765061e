//! Requests in flight on one shard: a row each, from the header to the last byte of the reply.

use std::ops::Range;

use rtrs_core::block::{IoFlags, IoOp};
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

use crate::buffers::Part;
use crate::proto::Op;
use crate::proto::wire::NbdError;

/// A connection of a shard: its slot, and what distinguishes it from former ones of that slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ConnId {
    pub(crate) slot: usize,
    pub(crate) generation: u32,
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

/// A request and what is outstanding of it.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) conn: ConnId,
    pub(crate) cookie: u64,
    pub(crate) op: Op,
    /// What the device is asked; None when it is not asked at all.
    pub(crate) io: Option<IoOp>,
    pub(crate) flags: IoFlags,
    pub(crate) offset: u64,
    pub(crate) len: u32,
    /// Bytes that may be handed to the device: all, or the payload that is here. A flush counts
    /// as one.
    pub(crate) ready: u32,
    /// Bytes that were handed to the device.
    pub(crate) handed: u32,
    /// Where the next of them are: the part, and the offset in it.
    pub(crate) cursor: (usize, usize),
    /// IOs submitted and not yet completed.
    pub(crate) pending: u32,
    /// Nothing more will get ready (the payload of a large write arrives piece by piece).
    pub(crate) complete: bool,
    /// It gets no reply: its payload did not arrive in full.
    pub(crate) silent: bool,
    /// It waits for orphaned writes, and nothing of it was handed over.
    pub(crate) deferred: bool,
    /// It is one itself, and is in the table.
    pub(crate) orphaned: bool,
    /// Since when it is known to be deferred.
    pub(crate) deferred_since: Option<Instant>,
    pub(crate) late: Late,
    /// Between `take` and `give`.
    live: bool,
    /// First failure.
    pub(crate) status: IoStatus,
    /// Of a flush: losses reported to its user before it came.
    pub(crate) reported: u64,
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

    /// The bytes that it reads or changes.
    pub(crate) fn bytes(&self) -> Range<u64> {
        self.offset..self.offset + u64::from(self.len)
    }

    /// The bytes that the device may still change for it.
    pub(crate) fn may_change(&self) -> Option<Range<u64>> {
        let changes = matches!(self.io, Some(IoOp::Write | IoOp::Discard | IoOp::WriteZeroes));
        changes.then(|| self.offset..self.offset + u64::from(self.ready))
    }

    /// A row of nothing, whose list of parts has no room yet.
    const fn empty() -> Self {
        Self {
            conn: ConnId { slot: 0, generation: 0 },
            cookie: 0,
            op: Op::Flush,
            io: None,
            flags: IoFlags { fua: false, no_unmap: false, fast_only: false },
            offset: 0,
            len: 0,
            ready: 0,
            handed: 0,
            cursor: (0, 0),
            pending: 0,
            complete: true,
            silent: false,
            deferred: false,
            orphaned: false,
            deferred_since: None,
            late: Late::No,
            live: false,
            status: IoStatus::Ok,
            reported: 0,
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
        assert!(row.parts.is_empty() && row.pending == 0, "row {index} given back in use");
        assert!(!row.deferred && !row.orphaned, "row {index} given back in a table");
        row.live = false;
        self.free.push(index);
    }

    pub(crate) fn row(&mut self, index: u32) -> &mut Row {
        &mut self.rows[index as usize]
    }

    /// The rows of a connection that are not finished.
    pub(crate) fn open_rows(&self, conn: ConnId) -> Vec<u32> {
        let open = |row: &Row| row.live && row.conn == conn && !row.is_done();
        (0..).zip(&self.rows).filter(|(_, row)| open(row)).map(|(index, _)| index).collect()
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
