//! Message area of a ring, addressed by ever-growing positions.

use std::sync::Arc;

use super::mapping::Mapping;

/// Length of the header of each message, and alignment of records.
pub(super) const RECORD_LEN: usize = 8;

/// Returns the length of a message's record in a ring.
pub(super) fn place_len(len: usize) -> usize {
    RECORD_LEN + len.next_multiple_of(RECORD_LEN)
}

/// Area for messages in a mapping.
pub(super) struct Area {
    pub(super) mapping: Arc<Mapping>,
    /// Offset of the area.
    pub(super) data: usize,
    /// Length of the area, a power of two.
    pub(super) len: usize,
}

impl Area {
    /// Returns the two memory ranges that hold `len` bytes at a position: offset and length of the
    /// first, and the length of the second, which is at the beginning of the area.
    fn ranges(&self, position: usize, len: usize) -> (usize, usize, usize) {
        let at = position & (self.len - 1);
        let first = len.min(self.len - at);
        (self.data + at, first, len - first)
    }

    pub(super) fn write(&self, position: usize, bytes: &[u8]) {
        let (at, first, _) = self.ranges(position, bytes.len());
        let (first, second) = bytes.split_at(first);
        self.mapping.write_bytes(at, first);
        self.mapping.write_bytes(self.data, second);
    }

    pub(super) fn read(&self, position: usize, bytes: &mut [u8]) {
        let (at, first, _) = self.ranges(position, bytes.len());
        let (first, second) = bytes.split_at_mut(first);
        self.mapping.read_bytes(at, first);
        self.mapping.read_bytes(self.data, second);
    }

    pub(super) fn append(&self, position: usize, len: usize, bytes: &mut Vec<u8>) {
        let (at, first, second) = self.ranges(position, len);
        self.mapping.append_bytes(at, first, bytes);
        self.mapping.append_bytes(self.data, second, bytes);
    }
}
