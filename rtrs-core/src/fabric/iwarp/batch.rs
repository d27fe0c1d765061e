//! A batch of frames under construction: a list of slices for one system call.
//!
//! Headers, checksums and small payloads are in staging memory; large payloads stay in place. Only
//! pieces of at most 256 bytes are copied, and nothing is allocated.

use super::mpa;
use crate::fabric::SgeList;
use crate::mem::{IoVecs, MemSlice, crc32c_append};

/// Size of the send staging memory in bytes: headers, small payloads and checksums of one batch.
pub(super) const TX_STAGE: usize = 48 << 10;
/// Maximum payload of a frame; a multiple of 4096 below the largest MULPDU.
pub(super) const SEGMENT_MAX: usize = 61440;
/// Maximum number of slices in a batch.
pub(super) const BATCH_SLICES: usize = 144;
/// Number of bytes after which a batch is full.
const BATCH_BYTES: usize = 256 << 10;
/// Pieces up to this length are copied into staging memory, next to their header.
const INLINE_MAX: usize = 256;
/// Maximum staging memory used by one frame: header, prefix, two small pieces, padding, checksum.
const STAGE_PER_FRAME: usize = 20 + 8 + 2 * INLINE_MAX + 8;
/// Maximum number of parts of a scattered frame payload: the pages of the largest frame, plus a
/// partial page.
pub(super) const PARTS_PER_FRAME: usize = SEGMENT_MAX / 4096 + 1;
/// Maximum number of slices used by one frame: two pieces, one of which may be scattered, and the
/// staging around them.
const SLICES_PER_FRAME: usize = 4 + PARTS_PER_FRAME;

/// Returns the number of payload bytes of a frame that begins `from` bytes into a message with
/// `left` bytes remaining. `memory` is the first piece of the message.
pub(super) fn payload_len(memory: Option<&MemSlice>, from: usize, left: usize) -> usize {
    let len = left.min(SEGMENT_MAX);
    let Some(memory) = memory.filter(|memory| memory.region().is_scattered()) else { return len };
    let Some(rest) = memory.slice(from, memory.len().saturating_sub(from)) else { return len };
    let fits = rest.len_of_parts(len, PARTS_PER_FRAME);
    if fits < rest.len().min(len) { fits } else { len }
}

/// Batch under construction.
pub(super) struct Batch<'a> {
    stage: MemSlice,
    iov: &'a mut IoVecs,
    /// End of the used staging memory, and start of the part that is not yet in the list.
    at: usize,
    run: usize,
    bytes: usize,
    sum: u32,
    crc: bool,
}

impl<'a> Batch<'a> {
    /// Creates an empty batch that fills `iov`; `stage` has [`TX_STAGE`] bytes.
    pub(super) fn new(stage: MemSlice, iov: &'a mut IoVecs, crc: bool) -> Self {
        Self { stage, iov, at: 0, run: 0, bytes: 0, sum: 0, crc }
    }

    pub(super) fn has_room(&self) -> bool {
        self.bytes < BATCH_BYTES
            && TX_STAGE - self.at >= STAGE_PER_FRAME
            && self.iov.room() >= SLICES_PER_FRAME
    }

    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.stage.copy_in(self.at, bytes);
        if self.crc {
            self.sum = crc32c_append(self.sum, bytes);
        }
        self.at += bytes.len();
    }

    /// Starts a frame with its length field and header.
    pub(super) fn begin(&mut self, header: &[u8]) {
        self.sum = 0;
        self.put(header);
    }

    fn push_run(&mut self) {
        if self.at > self.run {
            if let Some(part) = self.stage.slice(self.run, self.at - self.run) {
                self.bytes += part.len();
                self.iov.push(part);
            }
            self.run = self.at;
        }
    }

    /// Adds a part of local memory as payload.
    pub(super) fn payload(&mut self, part: MemSlice) {
        if self.crc {
            self.sum = part.crc32c(self.sum);
        }
        if part.len() <= INLINE_MAX {
            let from = part.region();
            self.stage.region().copy_from(
                self.stage.offset() + self.at,
                from,
                part.offset(),
                part.len(),
            );
            self.at += part.len();
            return;
        }
        self.push_run();
        self.bytes += part.len();
        self.iov.push(part);
    }

    /// Ends a frame whose ULPDU has this length.
    pub(super) fn end(&mut self, ulpdu_len: usize) {
        let pad = mpa::pad_len(ulpdu_len);
        self.put(&[0; 3][..pad]);
        // If neither side uses CRC, the field remains and is zero (RFC 5044 section 4.4).
        let sum = if self.crc { self.sum } else { 0 };
        self.stage.copy_in(self.at, &sum.to_le_bytes());
        self.at += mpa::CRC_LEN;
    }

    /// Adds the bytes `from..from + len` of a list of pieces as payload.
    pub(super) fn pieces(&mut self, sges: &SgeList, mut from: usize, mut len: usize) {
        for sge in sges.iter() {
            let whole = sge.slice.len();
            if from >= whole {
                from -= whole;
                continue;
            }
            let take = (whole - from).min(len);
            if take > 0
                && let Some(part) = sge.slice.slice(from, take)
            {
                self.payload(part);
            }
            from = 0;
            len -= take;
        }
    }

    /// Completes the list and returns the number of bytes in it.
    pub(super) fn finish(mut self) -> usize {
        self.push_run();
        self.bytes
    }
}
