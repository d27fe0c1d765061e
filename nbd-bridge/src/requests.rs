//! In-flight requests of one shard: one row per request, from its header to the last byte of its
//! reply.

mod command;
mod fragments;
mod loss_marks;
mod overlaps;
mod progress;
mod reply_state;
mod row;

pub(crate) use command::Command;
pub(crate) use fragments::{Fragment, block_of};
pub(crate) use reply_state::Late;
pub(crate) use row::{ConnId, NbdRow, STATUS_MEMORY};

/// All request rows of one shard. Their number is fixed, and their vectors keep their capacity.
#[derive(Debug)]
pub(crate) struct Requests {
    rows: Vec<NbdRow>,
    free: Vec<u32>,
    /// Number of rows reserved for each possible connection.
    reserve: usize,
    /// Number of reserved rows that are not in use.
    reserved: usize,
}

/// Divisor: a quarter of the rows is reserved for connections, in equal shares.
const RESERVED_PART: usize = 4;

impl Requests {
    /// Creates the `count` rows of a shard that has at most `connections_max` connections.
    pub(crate) fn new(count: u32, connections_max: usize) -> Self {
        let row = |_| NbdRow { parts: Vec::with_capacity(2), ..NbdRow::empty() };
        let reserve = count as usize / RESERVED_PART / connections_max.max(1);
        Self {
            rows: (0..count).map(row).collect(),
            free: (0..count).rev().collect(),
            reserve,
            reserved: reserve * connections_max,
        }
    }

    /// Allocates a cleared row for a connection that holds `rows` rows. Beyond its reserve, a
    /// connection may hold at most as many rows as are free for everyone, so that clients that do
    /// not read their replies leave room for others.
    pub(crate) fn take(&mut self, rows: usize) -> Option<u32> {
        let within = rows < self.reserve;
        if !within && rows.max(1) > self.free.len().saturating_sub(self.reserved) {
            return None;
        }
        let index = self.free.pop()?;
        self.reserved -= usize::from(within);
        let row = &mut self.rows[index as usize];
        debug_assert!(row.parts.is_empty() && row.progress.pending() == 0);
        let parts = std::mem::take(&mut row.parts);
        *row = NbdRow { parts, live: true, ..NbdRow::empty() };
        Some(index)
    }

    /// Frees a row of a connection that holds `rows` others. The caller has already released its
    /// parts.
    pub(crate) fn give(&mut self, index: u32, rows: usize) {
        let row = &mut self.rows[index as usize];
        let empty = row.parts.is_empty() && !row.fragments.has_memory();
        debug_assert!(empty && row.progress.pending() == 0, "row {index} was freed in use");
        debug_assert!(!row.overlaps.is_listed(), "row {index} was freed in a table");
        row.live = false;
        self.free.push(index);
        self.reserved += usize::from(rows < self.reserve);
    }

    pub(crate) fn row(&mut self, index: u32) -> &mut NbdRow {
        &mut self.rows[index as usize]
    }

    /// Returns the row if `index` is in range and the row is in use.
    pub(crate) fn live(&mut self, index: u32) -> Option<&mut NbdRow> {
        self.rows.get_mut(index as usize).filter(|row| row.live)
    }

    /// Returns the unfinished rows of a connection.
    pub(crate) fn open_rows(&self, conn: ConnId) -> Vec<u32> {
        let open = |row: &NbdRow| row.live && row.conn == conn && !row.is_done();
        (0..).zip(&self.rows).filter(|(_, row)| open(row)).map(|(index, _)| index).collect()
    }

    /// Returns changes to whole blocks that are at the device or about to be submitted.
    pub(crate) fn in_flight(&mut self) -> impl Iterator<Item = (u32, &mut NbdRow)> {
        (0..).zip(&mut self.rows).filter(|(_, row)| row.is_changing())
    }

    /// Number of rows in the table of orphaned writes; for tests.
    pub(crate) fn orphaned(&self) -> usize {
        self.rows.iter().filter(|row| row.overlaps.is_orphaned()).count()
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
