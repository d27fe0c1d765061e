//! Block devices as NBD clients see them.

use rtrs_core::block::Geometry;

use crate::config::BridgeConfig;
use crate::proto::ExportInfo;

/// Terms under which a bridge serves its device.
#[derive(Debug)]
pub(crate) struct ExportTerms {
    name: String,
    max_payload: u32,
    shared_writes: bool,
}

impl ExportTerms {
    pub(crate) fn new(name: &str, config: &BridgeConfig) -> Self {
        let BridgeConfig { max_payload, shared_writes, .. } = *config;
        Self { name: name.into(), max_payload, shared_writes }
    }

    /// Export name, as clients request it.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether other hosts may write to the device.
    pub(crate) fn shared_writes(&self) -> bool {
        self.shared_writes
    }

    /// Returns the export of a device with this geometry.
    pub(crate) fn export(&self, geometry: &Geometry) -> ExportInfo {
        let (max_payload, export) = (self.max_payload, export_info(&self.name, geometry));
        let shared_writes = self.shared_writes && !geometry.partial_writes;
        ExportInfo { max_payload, shared_writes, ..export }
    }
}

/// Returns the NBD view of a device. Every connection reaches the same device, whose flush covers
/// all connections, so a client may use several connections (CAN_MULTI_CONN).
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
