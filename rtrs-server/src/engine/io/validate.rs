//! What a device lets an IO do: its range, its blocks, how much at once.

use rtrs_core::block::{Geometry, IoOp};
use rtrs_core::status::IoStatus;

/// Judges where an IO wants to go; the rules of [`Geometry::check`] for an IO of any length.
pub(super) fn judge_range(geometry: &Geometry, op: IoOp, offset: u64, len: u32) -> IoStatus {
    if op == IoOp::Flush {
        return IoStatus::Ok;
    }
    if op != IoOp::Read && geometry.read_only {
        return IoStatus::ReadOnly;
    }
    let block = u64::from(geometry.logical_block.max(1));
    let len = u64::from(len);
    if !offset.is_multiple_of(block) || !len.is_multiple_of(block) || len == 0 {
        return IoStatus::Invalid;
    }
    match offset.checked_add(len) {
        Some(end) if end <= geometry.size => {}
        _ if op == IoOp::Read => return IoStatus::Invalid,
        _ => return IoStatus::NoSpace,
    }
    match op {
        IoOp::Discard if !geometry.discard => IoStatus::Unsupported,
        IoOp::WriteZeroes if !geometry.write_zeroes => IoStatus::Unsupported,
        _ => IoStatus::Ok,
    }
}

/// Most bytes of one IO that the device takes at once, in whole blocks.
pub(super) fn part_max(geometry: &Geometry, op: IoOp) -> u32 {
    let max = match op {
        IoOp::Read | IoOp::Write => geometry.io_max,
        IoOp::Flush | IoOp::Discard => geometry.discard_max,
        IoOp::WriteZeroes => geometry.zeroes_max,
    };
    let block = geometry.logical_block.max(1);
    (max - max % block).max(block)
}
