//! Response data in the memory of a request.

use rtrs_core::ids::ChunkIndex;

use super::pipeline::Step;

impl Step<'_> {
    /// Writes a response to the memory that the peer's read returns, followed by zeroes.
    pub(super) fn fill(&self, room: u32, bytes: &[u8]) {
        let len = room as usize;
        let chunk = self.path.chunks().chunk(ChunkIndex::from(self.at.permit));
        if let Some(room) = chunk.slice(0, len) {
            room.fill(0);
            room.copy_in(0, &bytes[..bytes.len().min(len)]);
        }
    }
}
