//! Buffers of one core: counted references over a fixed pool in one registered region.
//!
//! A connection receives into a buffer of its own; the payload of a write is handed to the
//! device where it was received, and the buffer comes back when the last such write is done.
//! Small reads share a buffer, cut off one after the other. Nothing here allocates after start.

use std::io;
use std::sync::Arc;

use rtrs_core::mem::{MemSlice, Pool, Region};

/// Bytes of one buffer: two writes of 128 KiB and the headers between them.
pub(crate) const BUFFER_LEN: usize = 256 * 1024 + 4096;
/// Most of one read that goes into one buffer.
pub(crate) const PART_MAX: usize = 256 * 1024;

/// A part of a buffer and the buffer it holds.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) buffer: u32,
    pub(crate) slice: MemSlice,
}

/// The pool with a count of holders per buffer.
#[derive(Debug)]
pub(crate) struct Buffers {
    pool: Pool,
    holders: Vec<u32>,
    /// The buffer that small reads are cut from, and how far it is used.
    shared: Option<(u32, usize)>,
}

impl Buffers {
    /// A pool of at least `bytes`.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        let count = u32::try_from(bytes.div_ceil(BUFFER_LEN)).unwrap_or(u32::MAX);
        let pool = Pool::new(count, BUFFER_LEN)?;
        Ok(Self { holders: vec![0; count as usize], pool, shared: None })
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        self.pool.region()
    }

    /// Takes a whole buffer with one holder.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let index = self.pool.take()?;
        self.holders[index as usize] = 1;
        Some(index)
    }

    /// One more holder.
    pub(crate) fn hold(&mut self, index: u32) {
        debug_assert!(self.holders[index as usize] > 0, "only a held buffer can be held again");
        self.holders[index as usize] += 1;
    }

    /// One holder less; the last one gives the buffer back.
    pub(crate) fn release(&mut self, index: u32) {
        let holders = &mut self.holders[index as usize];
        assert!(*holders > 0, "buffer {index} has no holder");
        *holders -= 1;
        if *holders == 0 {
            self.pool.give(index);
        }
    }

    /// A part of a buffer.
    pub(crate) fn slice(&self, index: u32, from: usize, len: usize) -> MemSlice {
        self.pool
            .slice(index)
            .slice(from, len)
            .unwrap_or_else(|| panic!("{from}+{len} is outside a buffer"))
    }

    /// True when the caller's own hold is the only one.
    pub(crate) fn is_sole_holder(&self, index: u32) -> bool {
        self.holders[index as usize] == 1
    }

    /// Moves bytes between two buffers.
    pub(crate) fn copy(&self, from: (u32, usize), to: (u32, usize), len: usize) {
        let region = self.region();
        region.copy_from(
            to.0 as usize * BUFFER_LEN + to.1,
            region,
            from.0 as usize * BUFFER_LEN + from.1,
            len,
        );
    }

    /// Memory for a read of `len` bytes, appended to `parts`: all of it or nothing. False when
    /// there is not enough now.
    pub(crate) fn take_read(&mut self, len: usize, parts: &mut Vec<Part>) -> bool {
        if len <= PART_MAX / 2 {
            return self.take_shared(len, parts);
        }
        if self.pool.available() < len.div_ceil(PART_MAX) {
            return false;
        }
        let mut left = len;
        while left > 0 {
            let Some(buffer) = self.take() else { return false };
            let part = left.min(PART_MAX);
            parts.push(Part { buffer, slice: self.slice(buffer, 0, part) });
            left -= part;
        }
        true
    }

    fn take_shared(&mut self, len: usize, parts: &mut Vec<Part>) -> bool {
        let aligned = len.next_multiple_of(512);
        if let Some((buffer, used)) = self.shared {
            // Nobody but us: start over at its beginning, which is the warmest memory.
            let used = if self.holders[buffer as usize] == 1 { 0 } else { used };
            if used + aligned <= BUFFER_LEN {
                self.shared = Some((buffer, used + aligned));
                self.hold(buffer);
                parts.push(Part { buffer, slice: self.slice(buffer, used, len) });
                return true;
            }
            self.shared = None;
            self.release(buffer);
        }
        let Some(buffer) = self.take() else { return false };
        self.shared = Some((buffer, aligned));
        self.hold(buffer);
        parts.push(Part { buffer, slice: self.slice(buffer, 0, len) });
        true
    }

    /// Buffers nobody holds.
    #[cfg(test)]
    pub(crate) fn available(&self) -> usize {
        self.pool.available()
    }

    /// All buffers.
    pub(crate) fn capacity(&self) -> usize {
        self.pool.capacity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_reads_share_and_give_back() {
        let mut buffers = Buffers::new(BUFFER_LEN * 2).unwrap();
        let mut parts = Vec::new();
        for _ in 0..65 {
            assert!(buffers.take_read(4096, &mut parts));
        }
        assert_eq!(buffers.available(), 1, "65 reads of 4 KiB fit one buffer");
        assert!(buffers.take_read(4096, &mut parts));
        assert_eq!(buffers.available(), 0);
        let first = parts[0].slice.offset();
        let second = parts[1].slice.offset();
        assert_eq!(second - first, 4096);
        for part in parts.drain(..) {
            buffers.release(part.buffer);
        }
        assert_eq!(buffers.available(), 1, "the shared one stays with the pool's user");
    }

    #[test]
    fn a_large_read_gets_all_or_nothing() {
        let mut buffers = Buffers::new(BUFFER_LEN * 3).unwrap();
        let mut parts = Vec::new();
        assert!(!buffers.take_read(PART_MAX * 3 + 1, &mut parts));
        assert!(parts.is_empty());
        assert!(buffers.take_read(PART_MAX * 2 + 1, &mut parts));
        assert_eq!(parts.iter().map(|p| p.slice.len()).sum::<usize>(), PART_MAX * 2 + 1);
    }
}
