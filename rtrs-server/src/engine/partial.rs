//! Placement of the data of a partial write.

use std::ops::Range;

use rtrs_core::block::{Geometry, is_part_of_block};
use rtrs_core::limits::Limits;

/// Bytes that a partial write changes in its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartOfBlock {
    /// Offset of the first byte in the block.
    pub(crate) from: u32,
    /// Number of bytes, which are at the front of the chunk.
    pub(crate) len: u32,
    /// Offset in the chunk that the block is read to.
    pub(crate) block_at: u32,
}

/// Whether chunks of this size have room for a block in addition to the bytes written into it.
pub(crate) const fn takes_partial_writes(geometry: &Geometry, limits: Limits) -> bool {
    !geometry.read_only && geometry.logical_block <= limits.chunk_size() / 2
}

impl PartOfBlock {
    /// Returns the block that contains a byte range of the device, and the position of the range in
    /// it. Returns None if the range is not within one block, or a chunk is too small.
    pub(crate) fn new(
        geometry: &Geometry,
        limits: Limits,
        Range { start, end }: Range<u64>,
    ) -> Option<(u64, Self)> {
        let block = geometry.logical_block;
        let fits = start < end && is_part_of_block(start, end - start, block.into());
        if !fits || !takes_partial_writes(geometry, limits) {
            return None;
        }
        let from = u32::try_from(start % u64::from(block)).ok()?;
        let len = u32::try_from(end - start).ok()?;
        let block_at = limits.chunk_size() - block;
        Some((start - u64::from(from), Self { from, len, block_at }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partial_range_is_within_its_block_and_the_block_within_its_chunk() {
        let geometry = Geometry { logical_block: 4096, ..Geometry::plain(1 << 20) };
        let limits = Limits::new(8, 8192).expect("limits");
        let part = |bytes| PartOfBlock::new(&geometry, limits, bytes);
        let of = |from, len| PartOfBlock { from, len, block_at: 4096 };
        assert_eq!(part(8192..8193), Some((8192, of(0, 1))));
        assert_eq!(part(8195..12288), Some((8192, of(3, 4093))));
        assert_eq!(part(8192..12288), Some((8192, of(0, 4096))));
        assert_eq!(part(8192..8192), None, "nothing");
        assert_eq!(part(8191..8193), None, "in two blocks");
        let large = Geometry { logical_block: 8192, ..geometry.clone() };
        assert_eq!(PartOfBlock::new(&large, limits, 0..1), None, "no room for the block");
        assert!(!takes_partial_writes(&Geometry { read_only: true, ..geometry }, limits));
    }
}
