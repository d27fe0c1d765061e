//! Buffers whose bytes are in pieces of other regions.
//!
//! A scattered region has buffers like any other, and its owner assigns a list of pieces to each
//! buffer that is in use: memory of a guest, or of a program that submits vectors. Everything that
//! accesses the region accesses the pieces. So a buffer is one range for all code between its owner
//! and the socket: it is split, registered and opened to a peer like contiguous memory.
//!
//! Devices need contiguous memory. For them, the region has bounce memory, at the same offsets; a
//! provider that uses it copies between bounce memory and the pieces. Bounce memory is backed only
//! where it is used. It also holds the bytes of a buffer that are in no piece, so an access never
//! fails: a late write to a buffer that its owner has taken back reaches no other memory.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;

use super::region::{MemSlice, Parts, Region};

/// Maximum number of pieces in a buffer.
pub const PIECES_MAX: usize = 128;

/// Reason why pieces cannot be assigned to a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScatterError {
    /// The pool has no scattered buffers.
    #[error("the buffers of the pool are not scattered")]
    Whole,
    /// There are more than [`PIECES_MAX`] pieces.
    #[error("more than 128 pieces for a buffer")]
    Count,
    /// The pieces are longer than the buffer.
    #[error("more bytes than a buffer has")]
    Length,
    /// A piece belongs to a scattered region.
    #[error("a piece that is scattered itself")]
    Nested,
}

/// Piece of a buffer.
#[derive(Debug)]
struct Piece {
    /// Offset in the buffer of the byte after the piece.
    end: usize,
    memory: MemSlice,
}

/// Pieces of the buffers of a scattered region.
#[derive(Debug)]
pub(super) struct Scatter {
    bounce: Arc<Region>,
    buffer_len: usize,
    buffers: Box<[Mutex<Vec<Piece>>]>,
}

impl Scatter {
    /// Creates `count` buffers of `buffer_len` bytes each, without pieces.
    pub(super) fn new(count: u32, buffer_len: usize) -> io::Result<Arc<Self>> {
        let too_large = || io::Error::new(io::ErrorKind::InvalidInput, "pool too large");
        let bytes = (count as usize).checked_mul(buffer_len).ok_or_else(too_large)?;
        let bounce = Region::with_stride(bytes, buffer_len)?;
        let list = || Mutex::new(Vec::with_capacity(PIECES_MAX));
        let buffers = (0..count).map(|_| list()).collect();
        Ok(Arc::new(Self { bounce, buffer_len, buffers }))
    }

    /// Replaces the pieces of a buffer. Returns their length; on error, no pieces are assigned.
    pub(super) fn assign(
        &self,
        buffer: u32,
        pieces: impl IntoIterator<Item = MemSlice>,
    ) -> Result<usize, ScatterError> {
        let list = &mut *self.buffers[buffer as usize].lock();
        list.clear();
        let mut end = 0;
        for memory in pieces.into_iter().filter(|memory| !memory.is_empty()) {
            end += memory.len();
            let fault = if memory.region().is_scattered() {
                ScatterError::Nested
            } else if end > self.buffer_len {
                ScatterError::Length
            } else if list.len() == PIECES_MAX {
                ScatterError::Count
            } else {
                list.push(Piece { end, memory });
                continue;
            };
            list.clear();
            return Err(fault);
        }
        Ok(end)
    }
}

impl Parts for Scatter {
    fn bounce(&self) -> &Arc<Region> {
        &self.bounce
    }

    fn first_part(&self, offset: usize, len: usize) -> MemSlice {
        let (buffer, at) = (offset / self.buffer_len, offset % self.buffer_len);
        let mut len = len;
        if let Some(list) = self.buffers.get(buffer) {
            len = len.min(self.buffer_len - at);
            let list = list.lock();
            let next = list.partition_point(|piece| piece.end <= at);
            if let Some(Piece { end, memory }) = list.get(next) {
                let from = memory.len() - (end - at);
                return part_of(memory, from, len.min(end - at));
            }
        }
        part_of(&self.bounce.whole(), offset, len)
    }
}

fn part_of(memory: &MemSlice, from: usize, len: usize) -> MemSlice {
    memory.slice(from, len).unwrap_or_else(|| panic!("{from}+{len} is outside {memory:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::{Pool, crc32c_append};
    use crate::prng::Prng;

    const LEN: usize = 64 << 10;

    fn bytes(prng: &mut Prng, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        prng.fill(&mut bytes);
        bytes
    }

    /// Returns pieces of `memory` in shuffled order, with a gap after each, and their total length.
    fn pieces(prng: &mut Prng, memory: &Arc<Region>, count: usize) -> (Vec<MemSlice>, usize) {
        let room = LEN / count;
        let piece = |at: usize| {
            let len = 1 + prng.index((room - 1).max(1)).min(LEN / PIECES_MAX - 1);
            memory.slice((at * 5 % count) * room, len).unwrap()
        };
        // 5 is coprime to the counts, so no two pieces overlap.
        let pieces: Vec<_> = (0..count).map(piece).collect();
        let len = pieces.iter().map(MemSlice::len).sum();
        (pieces, len)
    }

    #[test]
    fn bytes_of_a_buffer_are_in_its_pieces() {
        let prng = &mut Prng::new(7);
        let memory = Region::new(LEN).unwrap();
        let other = Region::new(LEN).unwrap();
        let mut pool = Pool::scattered(3, LEN).unwrap();
        let buffers = [0; 3].map(|_| pool.take().unwrap());
        for count in [1, 2, 3, 17, 64, 127, 128] {
            for buffer in buffers {
                memory.fill(0, LEN, 0xEE);
                let (pieces, len) = pieces(prng, &memory, count);
                let slice = pool.assign(buffer, pieces.clone()).unwrap();
                let sent = bytes(prng, len);
                slice.copy_in(0, &sent);
                let held: Vec<u8> = pieces.iter().flat_map(MemSlice::to_vec).collect();
                assert!(held == sent && slice.to_vec() == sent, "{count} pieces");
                let rest = memory.whole().to_vec().iter().filter(|&&byte| byte != 0xEE).count();
                assert!(rest <= len, "{count} pieces: bytes outside were written");
                assert_eq!(slice.crc32c(5), crc32c_append(5, &sent));

                let (from, part) = (prng.index(len), 1 + prng.index(len));
                let part = part.min(len - from);
                let inner = slice.slice(from, part).unwrap();
                assert_eq!(inner.to_vec(), sent[from..from + part]);
                other.copy_from(9, slice.region(), inner.offset(), part);
                assert_eq!(other.slice(9, part).unwrap().to_vec(), sent[from..from + part]);
                inner.fill(3);
                inner.copy_from(&other.slice(9, part).unwrap());
                assert!(slice.to_vec() == sent);
            }
        }
    }

    #[test]
    fn parts_are_counted() {
        let memory = Region::new(LEN).unwrap();
        let mut pool = Pool::scattered(1, LEN).unwrap();
        let buffer = pool.take().unwrap();
        let list = (0..100).map(|at| memory.slice(at * 20, 10).unwrap());
        let slice = pool.assign(buffer, list).unwrap();
        assert_eq!(slice.len(), 1000);
        assert_eq!((slice.len_of_parts(1000, 3), slice.len_of_parts(25, 3)), (30, 25));
        let inner = slice.slice(25, 900).unwrap();
        assert_eq!((inner.len_of_parts(900, 1), inner.len_of_parts(900, 200)), (5, 900));
        assert_eq!(memory.whole().len_of_parts(LEN, 0), LEN, "not scattered");
    }

    #[test]
    fn bounce_memory_is_a_copy() {
        let memory = Region::new(4096).unwrap();
        let mut pool = Pool::scattered(1, 4096).unwrap();
        let buffer = pool.take().unwrap();
        let list = [memory.slice(100, 3).unwrap(), memory.slice(0, 3).unwrap()];
        let slice = pool.assign(buffer, list).unwrap();
        slice.copy_in(0, b"abcdef");
        let bounce = slice.bounce().unwrap();
        assert_eq!((bounce.to_vec(), bounce.address()), (vec![0; 6], slice.device_address()));
        slice.fill_bounce();
        assert_eq!(bounce.to_vec(), b"abcdef");
        bounce.slice(2, 2).unwrap().copy_in(0, b"XY");
        slice.slice(2, 3).unwrap().drain_bounce();
        assert_eq!(slice.to_vec(), b"abXYef");
        assert!(memory.whole().bounce().is_none());
    }

    #[test]
    fn a_buffer_without_pieces_has_bounce_memory() {
        let memory = Region::new(4096).unwrap();
        let mut pool = Pool::scattered(2, 5000).unwrap();
        let buffer = pool.take().unwrap();
        let slice = pool.assign(buffer, [memory.slice(0, 100).unwrap()]).unwrap();
        assert_eq!(Arc::strong_count(&memory), 2, "the list keeps the memory");
        pool.give(buffer);
        assert_eq!(Arc::strong_count(&memory), 1, "it is released with the buffer");
        // A late writer, and bytes beyond the pieces and beyond the last buffer.
        slice.fill(9);
        assert_eq!(memory.whole().to_vec(), vec![0; 4096]);
        let region = pool.region();
        region.fill(0, region.len(), 8);
        assert!(region.whole().to_vec().iter().all(|&byte| byte == 8));
        assert_eq!(memory.whole().to_vec(), vec![0; 4096]);
    }

    #[test]
    fn wrong_pieces_are_refused() {
        let memory = Region::new(LEN).unwrap();
        let mut pool = Pool::scattered(1, 4096).unwrap();
        let buffer = pool.take().unwrap();
        let one = memory.slice(0, 1).unwrap();
        let nested = pool.region().slice(0, 1).unwrap();
        let long = memory.slice(0, 4097).unwrap();
        assert_eq!(pool.assign(buffer, vec![one.clone(); 129]).unwrap_err(), ScatterError::Count);
        assert_eq!(pool.assign(buffer, [one.clone(), long]).unwrap_err(), ScatterError::Length);
        assert_eq!(pool.assign(buffer, [one.clone(), nested]).unwrap_err(), ScatterError::Nested);
        assert_eq!(Arc::strong_count(&memory), 2, "no piece is left");
        let empty = memory.slice(5, 0).unwrap();
        let list = std::iter::repeat_n(empty, 200).chain(vec![one.clone(); 128]);
        assert_eq!(pool.assign(buffer, list).unwrap().len(), 128);
        let mut plain = Pool::new(1, 4096).unwrap();
        let buffer = plain.take().unwrap();
        assert_eq!(plain.assign(buffer, [one]).unwrap_err(), ScatterError::Whole);
    }
}
