//! Unanswered requests of a connection to an NBD server.

use nbd_bridge::client::{BadReply, Reply, Requests};
use nbd_bridge::wire::{RequestHeader, cmd, cmd_flags};
use rtrs_core::block::{Io, IoFlags, IoOp};
use rtrs_core::mem::MemSlice;

use crate::backend::target::INFLIGHT_MAX;

/// Number of request rows; one is reserved for a flush that another connection needs.
pub(super) const ROWS: usize = INFLIGHT_MAX + 1;

/// An unanswered request.
pub(super) struct Slot {
    /// Tag of an accepted IO; None for a flush that another connection needs.
    pub(super) tag: Option<u64>,
    pub(super) op: IoOp,
    pub(super) flags: IoFlags,
    buf: Option<MemSlice>,
    /// Latest change that a flush must cover; unused by other operations.
    pub(super) mark: u64,
}

impl Slot {
    /// Data that follows the request header.
    pub(super) fn payload(&self) -> Option<&MemSlice> {
        self.buf.as_ref().filter(|_| self.op == IoOp::Write)
    }

    /// Part of a read's buffer.
    pub(super) fn target(&self, at: usize, len: usize) -> MemSlice {
        let part = self.buf.as_ref().and_then(|buf| buf.slice(at, len));
        part.unwrap_or_else(|| unreachable!("data within its request"))
    }
}

/// Unanswered requests, by row.
pub(super) struct Outstanding {
    requests: Requests,
    /// Slots by row of `requests`.
    slots: Box<[Option<Slot>]>,
    /// Number of accepted IOs.
    accepted: usize,
    /// Whether one of the slots is a flush that another connection needs.
    helps: bool,
}

impl Outstanding {
    pub(super) fn new() -> Self {
        let requests = Requests::new(ROWS as u32);
        Self { requests, slots: (0..ROWS).map(|_| None).collect(), accepted: 0, helps: false }
    }

    /// Number of accepted IOs.
    pub(super) fn accepted(&self) -> usize {
        self.accepted
    }

    /// Whether a flush that another connection needs is outstanding.
    pub(super) fn helps(&self) -> bool {
        self.helps
    }

    pub(super) fn is_empty(&self) -> bool {
        self.accepted == 0 && !self.helps
    }

    /// Rows of all requests, in ascending order.
    pub(super) fn rows(&self) -> impl Iterator<Item = u32> {
        let rows = (0u32..).zip(&self.slots);
        rows.filter(|(_, slot)| slot.is_some()).map(|(row, _)| row)
    }

    pub(super) fn slot(&self, row: u32) -> &Slot {
        let slot = self.slots.get(row as usize).and_then(Option::as_ref);
        slot.unwrap_or_else(|| unreachable!("a row of `requests` has its slot"))
    }

    /// Adds the request of an IO; a flush must cover the changes up to `mark`. Returns the IO if
    /// all rows are in use.
    pub(super) fn add(&mut self, io: Io, mark: u64) -> Result<u32, Io> {
        let (command, flags) = command(&io);
        let Some(row) = self.requests.add(command, flags, io.offset, io.len) else {
            return Err(io);
        };
        let Io { tag, op, flags, buf, .. } = io;
        self.slots[row as usize] = Some(Slot { tag: Some(tag), op, flags, buf, mark });
        self.accepted += 1;
        Ok(row)
    }

    /// Adds a flush that another connection needs.
    pub(super) fn add_help(&mut self, mark: u64) -> Option<u32> {
        let row = self.requests.add(cmd::FLUSH, 0, 0, 0)?;
        let (op, flags) = (IoOp::Flush, IoFlags::default());
        self.slots[row as usize] = Some(Slot { tag: None, op, flags, buf: None, mark });
        self.helps = true;
        Some(row)
    }

    /// Header of a request that is about to be sent.
    pub(super) fn header(&mut self, row: u32) -> [u8; RequestHeader::LEN] {
        self.requests.send(row)
    }

    /// Parses the start of received bytes. Returns the number of bytes used, or None if the bytes
    /// are incomplete.
    pub(super) fn parse(&mut self, bytes: &[u8]) -> Result<Option<(usize, Reply)>, BadReply> {
        self.requests.next(bytes)
    }

    /// Prepares for a new connection, over which all requests are resent.
    pub(super) fn reconnect(&mut self, structured: bool) {
        self.requests.reconnect(structured);
    }

    /// Removes an answered request.
    pub(super) fn end(&mut self, row: u32) -> Slot {
        let Some(slot) = self.slots[row as usize].take() else {
            unreachable!("a row of `requests` has its slot")
        };
        match slot.tag {
            Some(_) => self.accepted -= 1,
            None => self.helps = false,
        }
        slot
    }

    /// Removes a request that was not sent.
    pub(super) fn cancel(&mut self, row: u32) -> Slot {
        self.requests.remove(row);
        self.end(row)
    }
}

/// Command and flags of an IO.
fn command(io: &Io) -> (u16, u16) {
    let command = match io.op {
        IoOp::Read | IoOp::Extents => cmd::READ,
        IoOp::Write => cmd::WRITE,
        IoOp::Flush => cmd::FLUSH,
        IoOp::Discard => cmd::TRIM,
        IoOp::WriteZeroes => cmd::WRITE_ZEROES,
    };
    let zeroes = io.op == IoOp::WriteZeroes;
    let all = [
        (io.op.changes() && io.flags.fua, cmd_flags::FUA),
        (zeroes && io.flags.no_unmap, cmd_flags::NO_HOLE),
    ];
    (command, all.iter().filter(|(on, _)| *on).fold(0, |flags, (_, flag)| flags | flag))
}
