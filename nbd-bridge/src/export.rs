//! Block devices as NBD clients see them.

use rtrs_core::block::Geometry;

use crate::proto::ExportInfo;

/// Returns the NBD view of a device. Every connection reaches the same device, whose flush covers
/// all connections, so a client may use several at once (CAN_MULTI_CONN).
pub fn export_info(name: &str, geometry: &Geometry) -> ExportInfo {
    ExportInfo {
        description: "RTRS session".into(),
        read_only: geometry.read_only,
        flush: geometry.write_cache || !geometry.read_only,
        write_cache: geometry.write_cache,
        fua: geometry.fua,
        trim: geometry.discard,
        write_zeroes: geometry.write_zeroes,
        fast_zero: geometry.fast_zero,
        cache: true,
        multi_conn: true,
        rotational: geometry.rotational,
        extents: geometry.extents,
        min_block: geometry.logical_block,
        preferred_block: geometry.physical_block.max(4096),
        ..ExportInfo::plain(name, geometry.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fast_zeroes_are_offered_if_the_device_supports_them() {
        for fast_zero in [true, false] {
            let geometry = Geometry { write_zeroes: true, fast_zero, ..Geometry::plain(4096) };
            let export = export_info("v", &geometry);
            assert!(export.write_zeroes);
            assert_eq!(export.fast_zero, fast_zero);
        }
    }
}
