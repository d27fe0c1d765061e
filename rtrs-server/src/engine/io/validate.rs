//! Validation of an IO against its device: range, blocks, and size of its parts.

use rtrs_core::block::{Geometry, IoFlags, IoOp};
use rtrs_core::limits::{Limits, SECTOR_SIZE};
use rtrs_core::status::IoStatus;
use rtrs_core::wire::{IoHeader, RwOp, errno};

use super::progress::{DeviceTime, IoProgress, IoStep, SyncProgress, Turn};
use crate::engine::device_table::{DeviceEntry, DeviceId};
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

/// Plans an IO from its message. The error is the errno to answer with immediately, or 0 if there
/// is nothing to do. `room` is the number of bytes in the chunk for the data or an answer.
pub(super) fn plan_io(
    target: IoTarget<'_>,
    rw_op: RwOp,
    header: &IoHeader,
    room: u32,
) -> Result<IoProgress, u16> {
    let IoTarget { device, entry, geometry, reads_only, .. } = target;
    let op = device_op(rw_op)?;
    // No session may write to a read-only export (`engine/control/open_modes.rs`).
    if op.changes() && !entry.writable {
        return Err(IoStatus::ReadOnly.to_errno());
    }
    let Place { offset, len, partial } = locate(target, rw_op, header)?;
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
        sync: SyncProgress::default(),
        device_time: DeviceTime::default(),
    })
}

/// Returns the device operation that serves a request.
fn device_op(rw_op: RwOp) -> Result<IoOp, u16> {
    match rw_op {
        RwOp::Read => Ok(IoOp::Read),
        RwOp::Write | RwOp::PartialWrite => Ok(IoOp::Write),
        RwOp::Flush => Ok(IoOp::Flush),
        RwOp::Discard => Ok(IoOp::Discard),
        RwOp::WriteZeroes => Ok(IoOp::WriteZeroes),
        RwOp::Extents => Ok(IoOp::Extents),
        RwOp::SecureErase => Err(errno::EOPNOTSUPP),
    }
}

/// Range of an IO on its device, in bytes.
struct Place {
    offset: u64,
    len: u32,
    /// Changed part of the block at `offset`; None if whole blocks are changed.
    partial: Option<PartOfBlock>,
}

/// Computes the range of an IO; for a partial write, the range of the block that it changes.
fn locate(target: IoTarget<'_>, rw_op: RwOp, header: &IoHeader) -> Result<Place, u16> {
    let IoTarget { geometry, limits, .. } = target;
    // A flush has sector -1: only reads and changes have an offset.
    if rw_op == RwOp::Flush {
        return Ok(Place { offset: 0, len: 0, partial: None });
    }
    let offset = header.sector.checked_mul(u64::from(SECTOR_SIZE)).ok_or(errno::EINVAL)?;
    let len = header.bi_size;
    if rw_op != RwOp::PartialWrite {
        return Ok(Place { offset, len, partial: None });
    }
    let start = offset.saturating_add(header.prio.into());
    let bytes = start..start.saturating_add(len.into());
    let (offset, part) = PartOfBlock::new(geometry, limits, bytes).ok_or(errno::EINVAL)?;
    Ok(Place { offset, len: geometry.logical_block, partial: Some(part) })
}

/// Validates the range of an IO of any length, according to the rules of [`Geometry::check`].
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

/// Maximum number of bytes that the device accepts in one IO, in whole blocks.
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
