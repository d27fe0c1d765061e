//! Received bytes of a connection that have not been parsed.

use rtrs_core::mem::MemSlice;

use crate::buffers::{BUFFER_LEN, Buffers, PART_MAX};
use crate::proto::wire::ExtendedRequest;

/// Minimum size of a write that counts as large: receives are limited to fit such writes.
const LARGE: usize = 32 * 1024;
/// Number of requests after a large write for which receives stay limited: a client that mixes
/// large writes with reads still sends large writes.
const LARGE_MEMORY: u8 = 16;
/// Alignment of the pieces of a long payload on the device.
pub(super) const PIECE_ALIGN: u64 = 4096;

/// Receive buffer of a connection, and the unparsed bytes in it.
#[derive(Debug, Default)]
pub(super) struct Input {
    buffer: Option<u32>,
    /// Offset of the first unparsed byte in the buffer.
    start: usize,
    /// End of the received bytes in the buffer.
    fill: usize,
    /// Bytes received so far.
    received: u64,
    /// Number of requests for which receives remain limited to fit large writes.
    large: u8,
}

impl Input {
    pub(super) fn buffer(&self) -> Option<u32> {
        self.buffer
    }

    /// Offset of the first unparsed byte in the buffer.
    pub(super) fn start(&self) -> usize {
        self.start
    }

    /// Number of unparsed bytes.
    pub(super) fn available(&self) -> usize {
        self.fill - self.start
    }

    /// Stream offset at which the received bytes end.
    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// Stream offset of the first unparsed byte.
    pub(super) fn parsed(&self) -> u64 {
        self.received - self.available() as u64
    }

    /// Adds bytes that were received.
    pub(super) fn add(&mut self, count: usize) {
        self.fill += count;
        self.received += count as u64;
    }

    /// Skips bytes that have been parsed.
    pub(super) fn consume(&mut self, count: usize) {
        self.start += count;
    }

    /// Copies the next bytes out of the buffer. Returns false if the connection has no buffer.
    pub(super) fn peek(&self, bytes: &mut [u8], buffers: &Buffers) -> bool {
        if let Some(buffer) = self.buffer {
            buffers.copy_out(buffer, self.start, bytes);
        }
        self.buffer.is_some()
    }

    /// Adapts receives to a request with a payload of this length.
    pub(super) fn note_request(&mut self, payload: u32) {
        self.large =
            if payload as usize >= LARGE { LARGE_MEMORY } else { self.large.saturating_sub(1) };
    }

    /// Whether receives are limited to fit large writes.
    pub(super) fn is_limited(&self) -> bool {
        self.large > 0
    }

    /// Whether the next `need` bytes have been received and are in one buffer.
    pub(super) fn has(&self, need: usize) -> bool {
        self.available() >= need && self.start + need <= BUFFER_LEN
    }

    /// Returns the number of payload bytes that are submitted together, of `left` bytes that belong
    /// at `to` on the device; 0 if they belong in another buffer.
    pub(super) fn piece(&self, left: u32, to: u64, min_block: u32) -> usize {
        piece(self.start, left, to, min_block)
    }

    /// Returns the number of payload bytes that must be received before the next bytes can be
    /// submitted, in this buffer or in a fresh one.
    pub(super) fn needed_piece(&self, left: u32, to: u64, min_block: u32) -> usize {
        match self.piece(left, to, min_block) {
            0 => piece(0, left, to, min_block),
            here => here,
        }
    }

    /// Starts over at the cache-warm beginning of the buffer if its bytes are no longer needed.
    pub(super) fn rewind(&mut self, buffers: &Buffers) {
        if let Some(buffer) = self.buffer
            && self.start == self.fill
            && buffers.is_sole_holder(buffer)
        {
            (self.start, self.fill) = (0, 0);
        }
    }

    /// Makes room in one buffer for `need` bytes, starting with the first unparsed byte. Returns
    /// the number of bytes that were moved; None if no buffer is available.
    pub(super) fn make_room(&mut self, need: usize, buffers: &mut Buffers) -> Option<u64> {
        let Some(buffer) = self.buffer else {
            self.buffer = Some(buffers.take_receiver()?);
            (self.start, self.fill) = (0, 0);
            return Some(0);
        };
        if self.start + need <= BUFFER_LEN {
            return Some(0);
        }
        let available = self.available();
        let fresh = if buffers.is_sole_holder(buffer) {
            buffers.copy((buffer, self.start), (buffer, 0), available);
            buffer
        } else {
            buffers.exchange(buffer, self.start, available)?
        };
        self.buffer = Some(fresh);
        (self.start, self.fill) = (0, available);
        Some(available as u64)
    }

    /// Returns the memory for the next receive, which ends at most `most` bytes after the start of
    /// the unparsed bytes.
    pub(super) fn memory(&self, most: usize, buffers: &Buffers) -> Option<MemSlice> {
        let end = (self.start + most).min(BUFFER_LEN);
        self.buffer.map(|buffer| buffers.slice(buffer, self.fill, end - self.fill))
    }

    /// Releases the buffer of a closed connection.
    pub(super) fn release(&mut self, buffers: &mut Buffers) {
        if let Some(buffer) = self.buffer.take() {
            buffers.release_receiver(buffer);
        }
    }
}

/// Returns the number of payload bytes that are submitted together when they begin at offset
/// `start` of a buffer; 0 if they belong in another buffer.
fn piece(start: usize, left: u32, to: u64, min_block: u32) -> usize {
    let (room, left) = (BUFFER_LEN - start, left as usize);
    if left <= room {
        return left;
    }
    if left <= PART_MAX {
        return 0;
    }
    let most = room.min(PART_MAX) as u64;
    let align = PIECE_ALIGN.max(u64::from(min_block));
    let end = (to + most) / align * align;
    usize::try_from(end.saturating_sub(to)).unwrap_or(0)
}

/// A header and a whole piece fit into one buffer, and the largest block fits twice into a piece,
/// so that a piece at the start of a buffer is never 0.
const _: () = assert!(PART_MAX + ExtendedRequest::LEN <= BUFFER_LEN && LARGE < PART_MAX);
const _: () = assert!(2 * crate::proto::wire::MIN_BLOCK_MAX as usize <= PART_MAX);
