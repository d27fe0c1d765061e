//! What NBD clients are told of a block device.

use rtrs_core::block::Geometry;

use crate::proto::ExportInfo;

/// The NBD view of a device. Every connection reaches the same device, whose flush covers all
/// of them, so several connections may be used at once (CAN_MULTI_CONN).
pub fn export_info(name: &str, geometry: &Geometry) -> ExportInfo {
    ExportInfo {
        description: "RTRS session".into(),
        read_only: geometry.read_only,
        flush: geometry.write_cache || !geometry.read_only,
        write_cache: geometry.write_cache,
        fua: geometry.fua,
        trim: geometry.discard,
        write_zeroes: geometry.write_zeroes,
        fast_zero: geometry.write_zeroes,
        cache: true,
        multi_conn: true,
        rotational: geometry.rotational,
        min_block: geometry.logical_block,
        preferred_block: geometry.physical_block.max(4096),
        ..ExportInfo::plain(name, geometry.size)
    }
}
