//! A parsed client request, and the operation that it needs from the device.

use rtrs_core::block::{IoFlags, IoOp};
use rtrs_core::extents;

use crate::cut::Cut;
use crate::proto::wire::MIN_BLOCK_MAX;
use crate::proto::{Op, Validated};

/// Maximum range of one extents request: its length fits in 32 bits, with whole blocks at both
/// ends. The answer may cover less or more than that.
const STATUS_MAX: u64 = (1 << 32) - 2 * MIN_BLOCK_MAX as u64;

/// A parsed request; does not change while the request is in flight.
#[derive(Debug)]
pub(crate) struct Command {
    cookie: u64,
    op: Op,
    io: Option<IoOp>,
    flags: IoFlags,
    /// The client wants only the first extent (block status only).
    first_extent_only: bool,
    /// The read must be answered with one chunk.
    one_chunk: bool,
    offset: u64,
    /// Number of bytes requested from the device.
    len: u64,
    /// Number of bytes requested by the client.
    asked: u64,
    cut: Cut,
}

impl Command {
    /// Creates the command for a valid request to an export with this minimum block size.
    pub(crate) fn new(request: &Validated, min_block: u32) -> Self {
        let Validated { op, cookie, offset, len: asked, one, one_chunk, .. } = *request;
        let len = if op == Op::BlockStatus { asked.min(STATUS_MAX) } else { asked };
        let (io, flags) = device_operation(request);
        let cut = Cut::new(op, offset..offset + len, min_block.into());
        Self { cookie, op, io, flags, first_extent_only: one, one_chunk, offset, len, asked, cut }
    }

    /// Creates the command for a request that only receives an error reply.
    pub(crate) const fn refused(cookie: u64, offset: u64) -> Self {
        Self {
            cookie,
            op: Op::Flush,
            io: None,
            flags: IoFlags { fua: false, no_unmap: false, fast_only: false, partial: false },
            first_extent_only: false,
            one_chunk: false,
            offset,
            len: 0,
            asked: 0,
            cut: Cut::new(Op::Flush, 0..0, 1),
        }
    }

    /// Client's handle, echoed in the reply.
    pub(crate) fn cookie(&self) -> u64 {
        self.cookie
    }

    pub(crate) fn op(&self) -> Op {
        self.op
    }

    /// Operation for the device; None if the device is not involved.
    pub(crate) fn io(&self) -> Option<IoOp> {
        self.io
    }

    pub(crate) fn flags(&self) -> IoFlags {
        self.flags
    }

    pub(crate) fn first_extent_only(&self) -> bool {
        self.first_extent_only
    }

    /// Size of the memory for the extents that the device lists. A client that wants one extent has
    /// no use for the others, and searching for them would take most of the time.
    pub(crate) fn extents_len(&self) -> usize {
        if self.first_extent_only { extents::LEN_MIN } else { extents::LEN_MAX }
    }

    /// Whether the read must be answered with one chunk.
    pub(crate) fn one_chunk(&self) -> bool {
        self.one_chunk
    }

    /// Offset of the first requested byte.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Number of requested bytes; for a block status, the number that the device is queried about.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Number of bytes whose status the client requested.
    pub(crate) fn asked(&self) -> u64 {
        self.asked
    }

    /// Requested bytes in device blocks.
    pub(crate) fn cut(&self) -> &Cut {
        &self.cut
    }

    /// Number of bytes in whole blocks.
    pub(crate) fn whole_len(&self) -> u64 {
        self.cut.whole.end - self.cut.whole.start
    }

    /// Whether the operation changes data.
    pub(crate) fn changes(&self) -> bool {
        self.io.is_some_and(IoOp::changes)
    }
}

/// Returns the operation that a request needs from the device, if any, and its flags.
fn device_operation(request: &Validated) -> (Option<IoOp>, IoFlags) {
    let Validated { fua, no_hole, fast_only, .. } = *request;
    match request.op {
        Op::Read => (Some(IoOp::Read), IoFlags::default()),
        Op::Write => {
            let fua = fua && !rtrs_core::mutated!(NbdFuaDropped);
            (Some(IoOp::Write), IoFlags { fua, ..IoFlags::default() })
        }
        Op::Flush => (Some(IoOp::Flush), IoFlags::default()),
        Op::Trim => (Some(IoOp::Discard), IoFlags { fua, ..IoFlags::default() }),
        Op::WriteZeroes => {
            let flags = IoFlags { fua, no_unmap: no_hole, fast_only, ..IoFlags::default() };
            (Some(IoOp::WriteZeroes), flags)
        }
        Op::BlockStatus => (Some(IoOp::Extents), IoFlags::default()),
        // A cache request is a hint: there is no cache to fill.
        Op::Cache | Op::Disconnect => (None, IoFlags::default()),
    }
}
