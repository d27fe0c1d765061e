//! Validation of an IO against its device: range, blocks, and size of its parts.

use rtrs_core::block::{Geometry, IoFlags, IoOp};
use rtrs_core::limits::{Limits, SECTOR_SIZE};
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;
use rtrs_core::wire::{IoHeader, RwOp, errno};

use super::progress::{IoProgress, IoStep, Turn};
use crate::engine::device_table::{DeviceEntry, DeviceId};
use crate::engine::ledger::FlushMark;
use crate::engine::partial::PartOfBlock;

/// Device of an IO.
#[derive(Clone, Copy, Debug)]
pub(super) struct IoTarget<'a> {
    pub(super) device: DeviceId,
    pub(super) entry: DeviceEntry,
    pub(super) geometry: &'a Geometry,
    /// Whether the session has nothing to make durable.
    pub(super) reads_only: bool,
    pub(super) limits: Limits,
}

/// Plans an IO from its message. The error is the errno of an immediate answer, 0 if there is
/// nothing to do. The data, or an answer, has `room` bytes of the chunk.
pub(super) fn plan_io(
    target: IoTarget<'_>,
    rw_op: RwOp,
    header: &IoHeader,
    room: u32,
) -> Result<IoProgress, u16> {
    let IoTarget { device, entry, geometry, reads_only, limits } = target;
    let op = match rw_op {
        RwOp::Read => IoOp::Read,
        RwOp::Write | RwOp::PartialWrite => IoOp::Write,
        RwOp::Flush => IoOp::Flush,
        RwOp::Discard => IoOp::Discard,
        RwOp::WriteZeroes => IoOp::WriteZeroes,
        RwOp::Extents => IoOp::Extents,
        RwOp::SecureErase => return Err(errno::EOPNOTSUPP),
    };
    // No session may write to a read-only export (`engine/control/access.rs`).
    if op.changes() && !entry.writable {
        return Err(IoStatus::ReadOnly.to_errno());
    }
    // A flush has sector -1: only reads and changes have an offset.
    let (offset, len) = match op {
        IoOp::Flush => (0, 0),
        _ => {
            let offset = header.sector.checked_mul(u64::from(SECTOR_SIZE));
            (offset.ok_or(errno::EINVAL)?, header.bi_size)
        }
    };
    let (offset, len, partial) = match rw_op {
        RwOp::PartialWrite => {
            let start = offset.saturating_add(header.prio.into());
            let bytes = start..start.saturating_add(len.into());
            let part = PartOfBlock::new(geometry, limits, bytes);
            let (offset, part) = part.ok_or(errno::EINVAL)?;
            (offset, geometry.logical_block, Some(part))
        }
        _ => (offset, len, None),
    };
    let status = validate_range(geometry, op, offset, len);
    if !status.is_ok() {
        return Err(status.to_errno());
    }
    if op == IoOp::WriteZeroes && header.rw.is_fast_only() && !geometry.fast_zero {
        return Err(IoStatus::Unsupported.to_errno());
    }
    if reads_only && op == IoOp::Flush {
        return Err(0);
    }
    let fua = op.changes() && header.rw.is_fua();
    let preflush = header.rw.is_preflush() && !rtrs_core::mutated!(PreflushDropped);
    let unkept = rtrs_core::mutated!(PreflushOfZeroesDropped) && op != IoOp::Write;
    let flush_first = preflush && op != IoOp::Flush && !reads_only && !unkept;
    Ok(IoProgress {
        export: entry.export,
        device,
        op,
        flags: IoFlags {
            fua: fua && geometry.fua && !rtrs_core::mutated!(FuaDropped),
            no_unmap: op == IoOp::WriteZeroes && header.rw.is_no_unmap(),
            fast_only: op == IoOp::WriteZeroes && header.rw.is_fast_only(),
            partial: false,
        },
        step: match partial {
            _ if flush_first => IoStep::PreFlush,
            Some(_) => IoStep::ReadBlock,
            None => IoStep::Data,
        },
        post_flush: fua && !geometry.fua && geometry.write_cache,
        offset,
        done: 0,
        len,
        part: 0,
        partial,
        turn: Turn::None,
        room,
        epoch: None,
        mark: FlushMark::default(),
        number: None,
        submitted: Instant::ZERO,
        backend_ns: 0,
    })
}

/// Validates the range of an IO; the rules of [`Geometry::check`] for an IO of any length.
fn validate_range(geometry: &Geometry, op: IoOp, offset: u64, len: u32) -> IoStatus {
    if op == IoOp::Flush {
        return IoStatus::Ok;
    }
    if op.changes() && geometry.read_only {
        return IoStatus::ReadOnly;
    }
    let block = u64::from(geometry.logical_block.max(1));
    let len = u64::from(len);
    if !offset.is_multiple_of(block) || !len.is_multiple_of(block) || len == 0 {
        return IoStatus::Invalid;
    }
    match offset.checked_add(len) {
        Some(end) if end <= geometry.size => {}
        _ if !op.changes() => return IoStatus::Invalid,
        _ => return IoStatus::NoSpace,
    }
    match op {
        IoOp::Discard if !geometry.discard => IoStatus::Unsupported,
        IoOp::WriteZeroes if !geometry.write_zeroes => IoStatus::Unsupported,
        IoOp::Extents if !geometry.extents => IoStatus::Unsupported,
        _ => IoStatus::Ok,
    }
}

/// Maximum number of bytes that the device takes in one IO, in whole blocks.
pub(super) fn part_max(geometry: &Geometry, op: IoOp) -> u32 {
    let max = match op {
        IoOp::Read | IoOp::Write => geometry.io_max,
        IoOp::Flush | IoOp::Discard => geometry.discard_max,
        IoOp::WriteZeroes => geometry.zeroes_max,
        IoOp::Extents => u32::MAX,
    };
    let block = geometry.logical_block.max(1);
    (max - max % block).max(block)
}
