//! Requests in flight on one core: a row each, from the header to the last byte of the reply.

use rtrs_core::status::IoStatus;

use crate::buffers::Part;
use crate::proto::Op;
use crate::proto::wire::NbdError;

/// A request and what is outstanding of it.
#[derive(Debug)]
pub(crate) struct Row {
    /// The connection's slot and the generation that tells it from its successor.
    pub(crate) conn: usize,
    pub(crate) generation: u32,
    pub(crate) cookie: u64,
    pub(crate) op: Op,
    pub(crate) offset: u64,
    pub(crate) len: u32,
    /// IOs submitted and not yet completed.
    pub(crate) pending: u32,
    /// All of it was submitted (a large write arrives piece by piece).
    pub(crate) complete: bool,
    /// First failure.
    pub(crate) status: IoStatus,
    /// A refusal instead of a status, with its reason.
    pub(crate) refusal: Option<(NbdError, &'static str)>,
    /// Data of a read, or payload of a write.
    pub(crate) parts: Vec<Part>,
}

/// The rows of one core. A fixed number; their vectors keep their room.
#[derive(Debug)]
pub(crate) struct Requests {
    rows: Vec<Row>,
    free: Vec<u32>,
}

impl Requests {
    pub(crate) fn new(count: u32) -> Self {
        let row = || Row {
            conn: 0,
            generation: 0,
            cookie: 0,
            op: Op::Flush,
            offset: 0,
            len: 0,
            pending: 0,
            complete: true,
            status: IoStatus::Ok,
            refusal: None,
            parts: Vec::with_capacity(2),
        };
        Self { rows: (0..count).map(|_| row()).collect(), free: (0..count).rev().collect() }
    }

    /// Takes a fresh row.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let index = self.free.pop()?;
        let row = &mut self.rows[index as usize];
        debug_assert!(row.parts.is_empty() && row.pending == 0);
        row.complete = true;
        row.status = IoStatus::Ok;
        row.refusal = None;
        Some(index)
    }

    /// Gives a row back; its parts have been released.
    pub(crate) fn give(&mut self, index: u32) {
        debug_assert!(self.rows[index as usize].parts.is_empty());
        self.free.push(index);
    }

    pub(crate) fn row(&mut self, index: u32) -> &mut Row {
        &mut self.rows[index as usize]
    }

    /// Rows in use.
    pub(crate) fn busy(&self) -> usize {
        self.rows.len() - self.free.len()
    }
}
