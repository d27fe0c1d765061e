//! Progress of a request's whole blocks at the device.
//!
//! Offsets count from the first whole block. A flush counts as one byte.

use std::ops::Range;

/// Which bytes of a request are ready for the device, and which have been submitted.
#[derive(Debug)]
pub(crate) struct Progress {
    /// Bytes that may be submitted to the device: all bytes, or the payload received so far.
    ready: u64,
    /// Bytes submitted to the device.
    handed: u64,
    /// Maximum number of bytes read before they are sent to the client (reads only).
    piece: u64,
    /// Start of the current piece (reads only).
    base: u64,
    /// Position of the next bytes to submit: the index of a part, and an offset in that part.
    cursor: (usize, usize),
    /// Number of IOs in flight plus open fragments.
    pending: u32,
    /// `ready` will not grow anymore. Until then, it grows as the payload of a large write arrives,
    /// or as a long read proceeds to the next piece.
    complete: bool,
}

impl Progress {
    /// Progress of a request that has no bytes.
    pub(crate) const fn none() -> Self {
        Self { ready: 0, handed: 0, piece: 0, base: 0, cursor: (0, 0), pending: 0, complete: true }
    }

    /// Whether no work is outstanding or still to come.
    pub(crate) fn is_done(&self) -> bool {
        self.is_drained() && self.complete
    }

    /// Whether no work is outstanding. More bytes may become ready.
    pub(crate) fn is_drained(&self) -> bool {
        self.pending == 0 && self.all_handed()
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Whether all ready bytes have been submitted.
    pub(crate) fn all_handed(&self) -> bool {
        self.handed >= self.ready
    }

    pub(crate) fn ready(&self) -> u64 {
        self.ready
    }

    pub(crate) fn handed(&self) -> u64 {
        self.handed
    }

    /// Number of ready bytes that have not been submitted.
    pub(crate) fn left(&self) -> u64 {
        self.ready - self.handed
    }

    /// Number of IOs in flight plus open fragments.
    pub(crate) fn pending(&self) -> u32 {
        self.pending
    }

    pub(crate) fn cursor(&self) -> (usize, usize) {
        self.cursor
    }

    /// Bytes of the current piece of a read.
    pub(crate) fn current_piece(&self) -> Range<u64> {
        self.base..self.ready
    }

    /// Expects a payload, which makes bytes ready as it arrives.
    pub(crate) fn expect_payload(&mut self) {
        self.complete = false;
    }

    /// Makes further bytes ready.
    pub(crate) fn add_ready(&mut self, len: u64) {
        self.ready += len;
    }

    /// Makes the first `len` bytes ready.
    pub(crate) fn set_ready(&mut self, len: u64) {
        self.ready = len;
    }

    /// Begins a read of `len` bytes in pieces of at most `piece` bytes.
    pub(crate) fn begin_read(&mut self, piece: u64, len: u64) {
        self.piece = piece;
        self.next_piece(len);
    }

    /// Makes the next piece of a read of `len` bytes ready, reusing the memory of the previous one.
    pub(crate) fn next_piece(&mut self, len: u64) {
        (self.base, self.cursor) = (self.ready, (0, 0));
        self.ready = len.min(self.ready + self.piece);
        self.complete = self.ready == len;
    }

    /// Returns to the start of the current piece of a read, making the piece no longer ready.
    pub(crate) fn forget_piece(&mut self) {
        (self.ready, self.handed, self.complete) = (self.base, self.base, false);
    }

    /// Records that no further bytes will become ready.
    pub(crate) fn set_complete(&mut self) {
        self.complete = true;
    }

    /// Drops the bytes that have not been submitted.
    pub(crate) fn cut_off(&mut self) {
        (self.ready, self.complete) = (self.handed, true);
    }

    /// Records a submitted IO of the next `len` bytes.
    pub(crate) fn submitted(&mut self, len: u32) {
        self.handed += u64::from(len);
        self.pending += 1;
    }

    /// Moves the cursor past submitted bytes of the current part, whose length is `part`.
    pub(crate) fn move_cursor(&mut self, len: u32, part: usize) {
        self.cursor.1 += len as usize;
        if self.cursor.1 == part {
            self.cursor = (self.cursor.0 + 1, 0);
        }
    }

    /// Moves the cursor to the first part, after the parts have been released.
    pub(crate) fn reset_cursor(&mut self) {
        self.cursor = (0, 0);
    }

    /// Records that a fragment has begun.
    pub(crate) fn fragment_begun(&mut self) {
        self.pending += 1;
    }

    /// Records that an IO or a fragment has ended.
    pub(crate) fn ended(&mut self) {
        self.pending -= 1;
    }
}
