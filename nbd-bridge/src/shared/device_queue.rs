//! A shard's device, and the rows that wait for room in the device's queue.

use std::collections::VecDeque;

use rtrs_core::block::{BlockDevice, Geometry, Io, IoOp};

use crate::requests::{NbdRow, Requests};

/// A device, with the rows that wait for room in its queue.
#[derive(Debug)]
pub(crate) struct DeviceQueue {
    device: Box<dyn BlockDevice>,
    /// Waiting rows, in order.
    backlog: VecDeque<u32>,
}

impl DeviceQueue {
    /// Creates the queue of a shard with `rows` rows.
    pub(super) fn new(device: Box<dyn BlockDevice>, rows: usize) -> Self {
        Self { device, backlog: VecDeque::with_capacity(rows) }
    }

    pub(crate) fn device(&self) -> &dyn BlockDevice {
        self.device.as_ref()
    }

    pub(super) fn device_mut(&mut self) -> &mut dyn BlockDevice {
        self.device.as_mut()
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        self.device.geometry()
    }

    /// Whether rows are waiting, so that no more requests should be taken from clients.
    pub(crate) fn is_congested(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Whether the row waits for room in the device queue.
    pub(super) fn holds(&self, index: u32) -> bool {
        self.backlog.contains(&index)
    }

    /// Removes a row from the backlog.
    pub(super) fn remove(&mut self, index: u32) {
        self.backlog.retain(|row| *row != index);
    }

    /// Submits a row's ready bytes, behind rows that are already waiting.
    pub(super) fn submit_in_order(&mut self, index: u32, row: &mut NbdRow) {
        if row.progress.all_handed() {
            // A change to part of a block may end before its turn in the backlog comes.
            return;
        }
        if !self.backlog.is_empty() || !self.submit(index, row) {
            self.backlog.push_back(index);
        }
    }

    /// Submits as many of the waiting rows' bytes as the device accepts now. Returns true if the
    /// device accepted any.
    pub(super) fn submit_waiting(&mut self, requests: &mut Requests) -> bool {
        let mut any = false;
        while let Some(&index) = self.backlog.front() {
            let row = requests.row(index);
            let before = row.progress.handed();
            let all = self.submit(index, row);
            any |= row.progress.handed() > before;
            if !all {
                break;
            }
            self.backlog.pop_front();
        }
        any
    }

    /// Submits a row's ready bytes. Returns false if the device queue is full.
    fn submit(&mut self, index: u32, row: &mut NbdRow) -> bool {
        let Some(op) = row.command.io() else { return true };
        let io_max = io_max(self.device.geometry(), op);
        while !row.progress.all_handed() {
            let left = row.progress.left();
            let (len, step, buf) = match op {
                IoOp::Read | IoOp::Write => {
                    let (at, from) = row.progress.cursor();
                    let slice = &row.parts[at].slice;
                    let most = (least(io_max, left) as usize).min(slice.len() - from);
                    let len = u32::try_from(most).unwrap_or(io_max);
                    (len, len, slice.slice(from, most))
                }
                // A flush has no length; it counts as one byte.
                IoOp::Flush => (0, 1, None),
                IoOp::Discard | IoOp::WriteZeroes => {
                    let len = least(io_max, left);
                    (len, len, None)
                }
                IoOp::Extents => {
                    let len = least(u32::MAX, left);
                    (len, len, row.parts[0].slice.slice(0, row.command.extents_len()))
                }
            };
            let offset = row.command.cut().whole.start + row.progress.handed();
            let flags = row.command.flags();
            let io = Io { tag: u64::from(index), op, flags, offset, len, buf };
            if self.device.submit(io).is_err() {
                return false;
            }
            row.progress.submitted(step);
            if matches!(op, IoOp::Read | IoOp::Write) {
                let part = row.parts[row.progress.cursor().0].slice.len();
                row.progress.move_cursor(step, part);
            }
        }
        true
    }
}

/// Number of bytes for the next IO: `left`, limited to `io_max`.
fn least(io_max: u32, left: u64) -> u32 {
    u32::try_from(left).map_or(io_max, |left| left.min(io_max))
}

/// Maximum number of bytes per IO, a multiple of the block size. A flush has no bytes.
fn io_max(geometry: &Geometry, op: IoOp) -> u32 {
    let bytes = match op {
        IoOp::Read | IoOp::Write => geometry.io_max,
        IoOp::Discard => geometry.discard_max,
        IoOp::WriteZeroes => geometry.zeroes_max,
        IoOp::Flush | IoOp::Extents => 0,
    };
    let block = geometry.logical_block.max(1);
    (bytes / block * block).max(block)
}
