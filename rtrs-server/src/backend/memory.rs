//! A sparse memory device.
//!
//! The content is stored in 64 KiB chunks that are allocated when first written; unwritten ranges
//! read as zeroes and use no memory. Discards and write zeroes free every chunk that they cover
//! completely. The memory in use therefore never exceeds the device's size, so a large device with
//! little content uses little memory. All shards share the chunks; a lock guards each of 256
//! stripes, with neighboring chunks in different stripes, and is held only for one copy within one
//! chunk. IOs complete within `submit`. An IO that crosses chunks is not atomic with respect to
//! others, as on a disk.

use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::sync::Arc;

use parking_lot::RwLock;
use rtrs_core::block::{
    BlockDevice, BlockSource, Core, Geometry, Io, IoOp, Lost, SharedErrors, SharedSize,
};
use rtrs_core::extents::{Extent, ExtentList};
use rtrs_core::mem::MemSlice;
use rtrs_core::status::IoStatus;

use super::immediate::{Content, Immediate};

/// Size of a chunk in bytes.
pub const CHUNK: usize = 64 << 10;
const STRIPES: usize = 256;
/// Maximum number of chunks examined for one extent request: 512 MiB, in about half a millisecond.
const CHUNKS_SOUGHT: usize = 8192;

/// Geometry shared by memory and null devices.
pub(super) fn geometry(size: u64, block: u32) -> Geometry {
    Geometry {
        logical_block: block,
        write_cache: false,
        discard: true,
        discard_granularity: 4096,
        write_zeroes: true,
        fast_zero: true,
        extents: true,
        ..Geometry::plain(size)
    }
}

type Chunks = HashMap<u64, Box<[u8]>>;

struct Store {
    size: SharedSize,
    stripes: Box<[RwLock<Chunks>]>,
}

/// A memory device. Its content exists until the source and all its devices are dropped.
#[derive(Debug)]
pub struct MemorySource {
    geometry: Geometry,
    store: Arc<Store>,
}

impl MemorySource {
    /// Creates a device with `size` bytes of zeroes in blocks of `block` bytes. The size must be a
    /// multiple of the block size.
    pub fn new(size: u64, block: u32) -> Self {
        assert!(size.is_multiple_of(u64::from(block)), "the size must be in whole blocks");
        let stripes = (0..STRIPES).map(|_| RwLock::new(Chunks::new())).collect();
        // Advertised so that clients flush: the content is lost with the process, and a client that
        // never flushes would not notice.
        let geometry = Geometry { write_cache: true, ..geometry(size, block) };
        Self { geometry, store: Arc::new(Store { size: SharedSize::new(size), stripes }) }
    }

    /// Total size of the allocated chunks in bytes.
    pub fn allocated(&self) -> u64 {
        let bytes = |stripe: &RwLock<Chunks>| -> usize {
            stripe.read().values().map(|chunk| chunk.len()).sum()
        };
        self.store.stripes.iter().map(|stripe| bytes(stripe) as u64).sum()
    }
}

impl BlockSource for MemorySource {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.store.size.get(), ..self.geometry.clone() }
    }

    fn resize(&self, size: u64, lost: &Lost<'_>) -> std::io::Result<()> {
        let had = self.store.size.get();
        self.store.size.set(size);
        if size < had {
            lost().inspect_err(|_| self.store.size.set(had))?;
            self.store.cut(size);
        }
        Ok(())
    }

    fn shared_errors(&self) -> SharedErrors {
        SharedErrors::None
    }

    fn is_volatile(&self) -> bool {
        true
    }

    fn open(&self, _core: &Core) -> std::io::Result<Box<dyn BlockDevice>> {
        Ok(Box::new(Immediate::new(self.geometry(), Arc::clone(&self.store))))
    }
}

/// Part of an IO within one chunk.
struct Piece {
    chunk: u64,
    /// Offset within the chunk.
    at: usize,
    /// Offset within the IO.
    from: usize,
    len: usize,
}

/// Splits a range at chunk boundaries.
fn pieces(offset: u64, len: usize) -> impl Iterator<Item = Piece> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let start = offset + from as u64;
        #[allow(clippy::cast_possible_truncation, reason = "a remainder below the chunk size")]
        let at = (start % CHUNK as u64) as usize;
        let piece =
            Piece { chunk: start / CHUNK as u64, at, from, len: (len - from).min(CHUNK - at) };
        from += piece.len;
        (piece.len > 0).then_some(piece)
    })
}

impl Store {
    fn stripe(&self, chunk: u64) -> &RwLock<Chunks> {
        #[allow(clippy::cast_possible_truncation, reason = "a remainder of a small number")]
        let index = (chunk % STRIPES as u64) as usize;
        &self.stripes[index]
    }

    /// Length of a chunk within the device: shorter for the last one, and 0 beyond the end, because
    /// an IO may have begun before the device was shrunk.
    fn chunk_len(&self, chunk: u64) -> usize {
        let left = self.size.get().saturating_sub(chunk * CHUNK as u64);
        usize::try_from(left).map_or(CHUNK, |left| left.min(CHUNK))
    }

    /// Clears everything beyond `size`.
    fn cut(&self, size: u64) {
        for stripe in &self.stripes {
            stripe.write().retain(|number, chunk| {
                let left = size.saturating_sub(number * CHUNK as u64);
                let left = usize::try_from(left).map_or(CHUNK, |left| left.min(CHUNK));
                chunk.get_mut(left..).into_iter().for_each(|beyond| beyond.fill(0));
                left > 0
            });
        }
    }

    fn read(&self, offset: u64, buf: &MemSlice) {
        for p in pieces(offset, buf.len()) {
            match self.stripe(p.chunk).read().get(&p.chunk) {
                Some(chunk) if p.at + p.len <= chunk.len() => {
                    buf.copy_in(p.from, &chunk[p.at..p.at + p.len]);
                }
                found => {
                    let part = buf.slice(p.from, p.len);
                    part.expect("a piece is within its IO").fill(0);
                    // The last chunk of a device that has since grown may be short.
                    if let Some(there) = found.and_then(|chunk| chunk.get(p.at..)) {
                        buf.copy_in(p.from, there);
                    }
                }
            }
        }
    }

    /// Runs `fill` on the bytes of a piece, allocating its chunk if necessary.
    fn with_chunk(&self, p: &Piece, fill: impl FnOnce(&mut [u8])) -> IoStatus {
        let mut stripe = self.stripe(p.chunk).write();
        let len = self.chunk_len(p.chunk).max(p.at + p.len);
        let mut fresh = Vec::new();
        if let Some(chunk) = stripe.get_mut(&p.chunk) {
            if p.at + p.len <= chunk.len() {
                fill(&mut chunk[p.at..p.at + p.len]);
                return IoStatus::Ok;
            }
            fresh = mem::take(chunk).into_vec();
        }
        let room = fresh.try_reserve_exact(len - fresh.len()).is_ok();
        if !room || stripe.try_reserve(1).is_err() {
            if !fresh.is_empty() {
                stripe.insert(p.chunk, fresh.into_boxed_slice());
            }
            return IoStatus::NoMemory;
        }
        fresh.resize(len, 0);
        fill(&mut fresh[p.at..p.at + p.len]);
        stripe.insert(p.chunk, fresh.into_boxed_slice());
        IoStatus::Ok
    }

    fn write(&self, offset: u64, buf: &MemSlice) -> IoStatus {
        for p in pieces(offset, buf.len()) {
            let status = self.with_chunk(&p, |bytes| buf.copy_out(p.from, bytes));
            if !status.is_ok() {
                return status;
            }
        }
        IoStatus::Ok
    }

    /// Lists which chunks in a range exist, up to the limit for one IO.
    fn find_holes(&self, offset: u64, len: u32, room: &MemSlice) {
        let mut list = ExtentList::new(room);
        for p in pieces(offset, len as usize).take(CHUNKS_SOUGHT) {
            let hole = !self.stripe(p.chunk).read().contains_key(&p.chunk);
            if !list.push(Extent { len: p.len as u64, hole }) {
                break;
            }
        }
    }

    /// Makes a range read as zeroes. With `keep`, its chunks stay allocated or are allocated.
    fn zero(&self, offset: u64, len: usize, keep: bool) -> IoStatus {
        for p in pieces(offset, len) {
            if keep {
                let status = self.with_chunk(&p, |bytes| bytes.fill(0));
                if !status.is_ok() {
                    return status;
                }
            } else if p.at == 0 && p.len == self.chunk_len(p.chunk) {
                drop(self.stripe(p.chunk).write().remove(&p.chunk));
            } else if let Some(chunk) = self.stripe(p.chunk).write().get_mut(&p.chunk) {
                let end = chunk.len().min(p.at + p.len);
                chunk.get_mut(p.at..end).into_iter().for_each(|bytes| bytes.fill(0));
            }
        }
        IoStatus::Ok
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("size", &self.size).finish_non_exhaustive()
    }
}

impl Content for Arc<Store> {
    fn size(&self) -> u64 {
        self.size.get()
    }

    fn run(&self, io: &Io) -> IoStatus {
        match (io.op, &io.buf) {
            (IoOp::Read, Some(buf)) => {
                self.read(io.offset, buf);
                IoStatus::Ok
            }
            (IoOp::Write, Some(buf)) => self.write(io.offset, buf),
            (IoOp::Extents, Some(room)) => {
                self.find_holes(io.offset, io.len, room);
                IoStatus::Ok
            }
            (IoOp::Read | IoOp::Write | IoOp::Extents, None) => IoStatus::Invalid,
            (IoOp::Flush, _) => IoStatus::Ok,
            (IoOp::Discard, _) => self.zero(io.offset, io.len as usize, false),
            (IoOp::WriteZeroes, _) => self.zero(io.offset, io.len as usize, io.flags.no_unmap),
        }
    }
}
