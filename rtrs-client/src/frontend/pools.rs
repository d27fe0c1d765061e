//! Memory of a shard's front ends.

use nbd_bridge::BufferPools;

/// Memory that the front ends of one shard share.
#[derive(Debug, Default)]
pub(crate) struct FrontEndPools {
    /// Buffers of the NBD bridges.
    pub(super) nbd: BufferPools,
}
