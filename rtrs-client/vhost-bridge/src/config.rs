//! Features and configuration space of the device.

use rtrs_core::block::Geometry;
use vhost::vhost_user::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// Sector size of the protocol, which does not depend on the block size.
pub(crate) const SECTOR: u64 = 512;
/// Maximum number of rings.
pub(crate) const RINGS_MAX: u16 = 64;
/// Maximum number of data segments per request that the device asks of the driver, as other devices
/// do.
const SEG_MAX: u32 = 126;
/// Length of the defined part of the configuration space.
const CONFIG_LEN: usize = 60;
/// Maximum length of the configuration space that a monitor may access.
const CONFIG_MAX: u32 = 256;
/// Offset of the cache mode.
const WCE_AT: u32 = 32;

/// Returns whether a feature was negotiated.
pub(crate) fn has(features: u64, bit: u32) -> bool {
    features >> bit & 1 != 0
}

/// Returns the features that a device with this geometry offers.
pub(crate) fn features(geometry: &Geometry) -> u64 {
    let optional = [
        (VIRTIO_BLK_F_RO, geometry.read_only),
        (VIRTIO_BLK_F_DISCARD, geometry.discard && geometry.discard_max > 0),
        (VIRTIO_BLK_F_WRITE_ZEROES, geometry.write_zeroes && geometry.zeroes_max > 0),
    ];
    let optional = optional.into_iter().filter(|(_, is_set)| *is_set).map(|(bit, _)| bit);
    always_offered() | mask(optional)
}

/// Returns the features that a driver may accept: those that a device offers with any geometry. A
/// driver retains the features that it has accepted when the geometry changes, even when its
/// monitor reconnects. Requests that the device no longer supports fail.
pub(crate) fn acceptable() -> u64 {
    let optional = [VIRTIO_BLK_F_RO, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES];
    always_offered() | mask(optional.into_iter())
}

fn mask(bits: impl Iterator<Item = u32>) -> u64 {
    bits.fold(0, |mask, bit| mask | 1 << bit)
}

fn always_offered() -> u64 {
    let always = [
        VIRTIO_F_VERSION_1,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_CONFIG_WCE,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_MQ,
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_TOPOLOGY,
    ];
    let of_monitor = VhostUserVirtioFeatures::PROTOCOL_FEATURES | VhostUserVirtioFeatures::LOG_ALL;
    mask(always.into_iter()) | of_monitor.bits()
}

/// Returns the protocol features.
pub(crate) fn protocol_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::LOG_SHMFD
        | VhostUserProtocolFeatures::RESET_DEVICE
        | VhostUserProtocolFeatures::BACKEND_REQ
}

/// Maximum number of sectors in a discard or write zeroes of at most this many bytes.
pub(crate) fn sectors_max(bytes: u32) -> u32 {
    bytes / SECTOR as u32
}

/// Content of the configuration space.
#[derive(Clone, Copy)]
pub(crate) struct Config<'a> {
    pub(crate) geometry: &'a Geometry,
    /// Number of useful rings.
    pub(crate) rings: u16,
    pub(crate) is_writeback: bool,
}

/// Returns the configuration space.
fn space(config: Config<'_>) -> [u8; CONFIG_LEN] {
    let Config { geometry, rings, is_writeback } = config;
    let mut space = [0; CONFIG_LEN];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    let block = geometry.logical_block.max(SECTOR as u32);
    let physical = geometry.physical_block.max(block);
    put(0, &(geometry.size / SECTOR).to_le_bytes());
    put(12, &SEG_MAX.to_le_bytes());
    put(20, &block.to_le_bytes());
    // Exponent of the physical block in logical blocks.
    put(24, &[u8::try_from((physical / block).ilog2()).unwrap_or(0)]);
    let io_min = u16::try_from(physical / block).unwrap_or(u16::MAX);
    put(26, &io_min.to_le_bytes());
    put(WCE_AT as usize, &[u8::from(is_writeback)]);
    put(34, &rings.to_le_bytes());
    if geometry.discard {
        let unit = geometry.discard_granularity.max(block) / SECTOR as u32;
        put(36, &sectors_max(geometry.discard_max).to_le_bytes());
        put(40, &1_u32.to_le_bytes());
        put(44, &unit.to_le_bytes());
    }
    if geometry.write_zeroes {
        put(48, &sectors_max(geometry.zeroes_max).to_le_bytes());
        put(52, &1_u32.to_le_bytes());
        put(56, &[1]);
    }
    space
}

impl Config<'_> {
    /// Returns the requested part of the configuration space; undefined bytes are zero. None if the
    /// part ends beyond `CONFIG_MAX`.
    pub(crate) fn read(self, offset: u32, size: u32) -> Option<Vec<u8>> {
        let end = offset.checked_add(size).filter(|end| *end <= CONFIG_MAX)?;
        let mut bytes = space(self).to_vec();
        bytes.resize((end as usize).max(CONFIG_LEN), 0);
        bytes.truncate(end as usize);
        Some(bytes.split_off(offset as usize))
    }
}

/// Returns the cache mode that a write to the configuration space sets. None if the write is not
/// allowed.
pub(crate) fn written(offset: u32, bytes: &[u8]) -> Option<bool> {
    let at = usize::try_from(WCE_AT.checked_sub(offset)?).ok()?;
    match (bytes.get(at)?, bytes.len() <= CONFIG_MAX as usize) {
        (0, true) => Some(false),
        (1, true) => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use virtio_bindings::virtio_blk::VIRTIO_BLK_F_SIZE_MAX;
    use virtio_bindings::virtio_config::{VIRTIO_F_IN_ORDER, VIRTIO_F_RING_PACKED};

    use super::*;

    fn geometry() -> Geometry {
        Geometry {
            logical_block: 4096,
            discard: true,
            discard_granularity: 8192,
            write_zeroes: true,
            ..Geometry::plain(1 << 30)
        }
    }

    fn read(geometry: &Geometry, is_writeback: bool, offset: u32, size: u32) -> Option<Vec<u8>> {
        Config { geometry, rings: 3, is_writeback }.read(offset, size)
    }

    #[test]
    fn the_space_has_the_geometry() {
        let all = read(&geometry(), true, 0, 100).unwrap();
        let word = |at: usize| u32::from_le_bytes(all[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(4)), ((1 << 30) / 512, 0));
        assert_eq!((word(8), word(12), word(20)), (0, 126, 4096));
        assert_eq!((all[24], all[32], all[34]), (0, 1, 3));
        assert_eq!((word(36), word(40), word(44)), ((1 << 30) / 512, 1, 16));
        assert_eq!((word(48), word(52), all[56]), ((1 << 30) / 512, 1, 1));
        assert_eq!(all[60..], [0; 40]);
        let plain = Geometry { physical_block: 4096, ..Geometry::plain(4096) };
        let all = read(&plain, false, 0, 60).unwrap();
        assert_eq!((all[20..24].to_vec(), all[24], all[26], all[32]), (vec![0, 2, 0, 0], 3, 8, 0));
        assert_eq!(all[36..60], [0; 24]);
    }

    #[test]
    fn features_stay_acceptable_while_the_geometry_changes() {
        let plain = Geometry::plain(4096);
        let read_only = Geometry { read_only: true, ..plain.clone() };
        let all = [&plain, &read_only, &geometry()].map(features);
        assert!(has(all[1], VIRTIO_BLK_F_RO) && !has(all[0] | all[2], VIRTIO_BLK_F_RO));
        for bit in [VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES] {
            assert!(has(all[2], bit) && !has(all[0] | all[1], bit));
        }
        assert_eq!(all.iter().fold(0, |sum, features| sum | features), acceptable());
        // Rings are split ones, and requests may be answered in any order.
        for bit in [VIRTIO_F_RING_PACKED, VIRTIO_F_IN_ORDER] {
            assert!(!has(acceptable(), bit));
        }
        // No segment is too long, so there is no limit to offer.
        assert!(!has(acceptable(), VIRTIO_BLK_F_SIZE_MAX));
    }

    #[test]
    fn any_part_of_the_space_can_be_read() {
        let part = |offset, size| read(&geometry(), true, offset, size);
        assert_eq!(part(32, 2), Some(vec![1, 0]));
        assert_eq!(part(58, 4), Some(vec![0; 4]));
        assert_eq!(part(256, 0), Some(vec![]));
        assert_eq!((part(1, 256), part(u32::MAX, 2)), (None, None));
    }

    #[test]
    fn only_the_cache_mode_can_be_written() {
        assert_eq!((written(32, &[0]), written(32, &[1])), (Some(false), Some(true)));
        let mut all = [0; 60];
        assert_eq!(written(0, &all), Some(false));
        all[32] = 2;
        assert_eq!((written(0, &all), written(33, &[0]), written(0, &[1])), (None, None, None));
    }
}
