//! Data of answers.

use rtrs_core::block::IoOp;
use rtrs_core::extents;
use rtrs_core::ids::ChunkIndex;
use rtrs_core::mem::MemSlice;

use super::pipeline::Step;
use super::progress::IoProgress;
use super::request::Parsed;

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

/// Number of bytes that answer an IO from its chunk: its data, or the used part of an extent list.
pub(super) fn answer_len(chunk: &MemSlice, request: &Parsed, io: &IoProgress) -> u32 {
    if io.op != IoOp::Extents {
        return request.data_len;
    }
    let list = chunk.slice(0, request.data_len as usize);
    let used = list.and_then(|list| u32::try_from(extents::used_len(&list)).ok());
    used.unwrap_or(request.data_len)
}
