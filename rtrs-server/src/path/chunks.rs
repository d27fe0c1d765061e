//! The memory of one path that its peer reaches: chunks, their registration and their keys.
//!
//! Chunks belong to a path, not to a session, so that a late arrival on a dead path cannot touch
//! memory that moved on. One region holds all chunks; it is registered once. With
//! fresh keys every chunk has a window of its own, whose key the peer gets and loses
//! with each request; else the registration's one key covers all. Made for the control shard when
//! INFO_REQ was accepted, or before the path's first connection where the device pins it, or over
//! the memory of a path of the session that is gone (`engine/control/chunk_pool.rs`); read by every
//! shard, freed with its last holder: a block IO in flight keeps the memory itself alive, never the
//! peer's right to it.

use std::any::Any;
use std::sync::Arc;

use rtrs_core::fabric::{
    Access, FabricError, MemoryRegistration, ProtectionDomain, RegisterError, Registered, Sge,
    ToRegister, Window,
};
use rtrs_core::ids::ChunkIndex;
use rtrs_core::limits::Limits;
use rtrs_core::mem::{Counting, MemSlice, MemoryMeter, Region};
use rtrs_core::wire::{InfoRsp, RkeyRsp, SgDesc, TimedRkeyRsp};

/// Bytes between two chunks. Chunks are a power of two long, and most IO touches only the start
/// of each: without a gap all those starts would compete for the same few cache sets.
const GAP: usize = 4096;

/// Chunks of a path that its peer may write to before the session's first OPEN, where memory is
/// committed as it is written. Our clients use two: OPEN has permit 0, and FENCE permit 1.
pub const CHUNKS_BEFORE_OPEN: u32 = 4;

/// All chunks of one path.
#[derive(Debug)]
pub struct ChunkPool {
    limits: Limits,
    region: Arc<Region>,
    registration: Arc<dyn MemoryRegistration>,
    windows: Box<[Arc<dyn Window>]>,
}

/// The memory of a pool, without a key that a peer ever had.
#[derive(Debug)]
pub struct ChunkMemory {
    /// The chunks and what lies between them.
    pub region: Arc<Region>,
    /// For our own use only; with windows there was no other.
    pub registration: Option<Arc<dyn MemoryRegistration>>,
}

impl ChunkPool {
    /// What has to be registered for a pool: `queue_depth * chunk_size` bytes, mapped here, backed
    /// when touched or pinned, and counted by the meter in that way.
    ///
    /// # Errors
    /// The system's refusal of memory.
    pub fn fresh(
        limits: Limits,
        pd: &Arc<dyn ProtectionDomain>,
        fresh_keys: bool,
        (meter, counting): (&Arc<MemoryMeter>, Counting),
    ) -> Result<ToRegister, RegisterError> {
        let size = (Self::bytes(limits), Self::stride(limits));
        let region = Region::metered(size, meter, counting)
            .map_err(|e| RegisterError::Memory(FabricError::system("memory for the chunks", e)))?;
        let memory = ChunkMemory { region, registration: None };
        Ok(Self::over(memory, limits, pd, fresh_keys))
    }

    /// The same over the memory of another pool, which was of the same limits: registered anew
    /// unless it brings a registration, which is of `pd` then; all keys are new.
    pub fn over(
        memory: ChunkMemory,
        limits: Limits,
        pd: &Arc<dyn ProtectionDomain>,
        fresh_keys: bool,
    ) -> ToRegister {
        let ChunkMemory { region, registration } = memory;
        assert!(region.len() >= Self::bytes(limits), "chunks of another size");
        ToRegister {
            pd: Arc::clone(pd),
            region,
            // One for our own use would serve nobody without windows.
            registration: registration.filter(|_| fresh_keys),
            access: if fresh_keys { Access::LOCAL } else { Access::REMOTE_WRITE },
            windows: if fresh_keys { limits.queue_depth() } else { 0 },
            wanted: None,
        }
    }

    /// The pool, when that is registered.
    pub fn new(limits: Limits, registered: Registered) -> Self {
        let Registered { registration, windows } = registered;
        Self { limits, region: Arc::clone(registration.region()), registration, windows }
    }

    /// The memory, and apart from it all that a peer could reach it by, to be released.
    pub fn into_memory(self) -> (ChunkMemory, Box<dyn Any + Send>) {
        let Self { region, registration, windows, .. } = self;
        if windows.is_empty() {
            return (ChunkMemory { region, registration: None }, Box::new(registration));
        }
        (ChunkMemory { region, registration: Some(registration) }, Box::new(windows))
    }

    fn stride(limits: Limits) -> usize {
        limits.chunk_size() as usize + GAP
    }

    /// Bytes of a pool. No gap behind the last chunk: the peer's key must not reach beyond the
    /// chunks.
    pub fn bytes(limits: Limits) -> usize {
        Self::stride(limits) * usize::from(limits.queue_depth()) - GAP
    }

    /// Lets the peer write to all chunks, or, before the session's first OPEN, to a few of them.
    pub fn let_write(&self, opened: bool) {
        self.region.limit_writes(if opened { u32::MAX } else { CHUNKS_BEFORE_OPEN });
    }

    /// The memory behind all chunks.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The first bytes of a chunk. Panics for a chunk outside the queue depth.
    fn start_of(&self, index: ChunkIndex, len: u32) -> MemSlice {
        let slice = self.region.slice(index.index() * Self::stride(self.limits), len as usize);
        slice.unwrap_or_else(|| panic!("chunk {index} outside its pool"))
    }

    /// The memory of a chunk. Panics for a chunk outside the queue depth.
    pub fn chunk(&self, index: ChunkIndex) -> MemSlice {
        self.start_of(index, self.limits.chunk_size())
    }

    /// The first `len` bytes of a chunk, at most the whole chunk, as the source of a work
    /// request.
    pub fn sge(&self, index: ChunkIndex, len: u32) -> Sge {
        let slice = self.start_of(index, len.min(self.limits.chunk_size()));
        Sge { slice, lkey: self.registration.lkey() }
    }

    /// Copies bytes out of a chunk. Panics outside the chunk.
    pub fn copy_out(&self, index: ChunkIndex, from: u32, to: &mut [u8]) {
        let size = self.limits.chunk_size() as usize;
        assert!(from as usize <= size && to.len() <= size - from as usize, "outside the chunk");
        self.region.copy_out(index.index() * Self::stride(self.limits) + from as usize, to);
    }

    /// The window of a chunk; None without fresh keys.
    pub fn window(&self, index: ChunkIndex) -> Option<&Arc<dyn Window>> {
        self.windows.get(index.index())
    }

    /// How many windows there are: the queue depth, or 0 without fresh keys.
    pub fn window_count(&self) -> u16 {
        if self.windows.is_empty() { 0 } else { self.limits.queue_depth() }
    }

    /// Where the peer finds the chunks: one descriptor each, with its window's present key or the
    /// pool's one key.
    pub fn describe(&self) -> InfoRsp {
        let base = self.registration.base();
        let stride = Self::stride(self.limits) as u64;
        let key = |at: u16| match self.windows.get(usize::from(at)) {
            Some(window) => window.rkey(),
            None => self.registration.rkey(),
        };
        let descs = (0..self.limits.queue_depth())
            .map(|at| SgDesc {
                addr: base + u64::from(at) * stride,
                key: key(at),
                len: self.limits.chunk_size(),
            })
            .collect();
        InfoRsp { descs }
    }
}

/// Small messages of one path's connections, in registered memory of their own.
///
/// `[INFO_REQ, 272 bytes, in 512][RKEY_RSP, 16 bytes per chunk][INFO_RSP]`. Each RKEY_RSP belongs
/// to its chunk: it is written when the chunk gets a new key and may be overwritten when the peer
/// uses that key.
#[derive(Debug)]
pub struct MessageBuffers {
    registration: Arc<dyn MemoryRegistration>,
    queue_depth: u16,
}

impl MessageBuffers {
    const REQUEST_ROOM: usize = 512;
    const KEY_ROOM: usize = TimedRkeyRsp::LEN;

    /// Maps and registers the buffers.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn new(queue_depth: u16, pd: &Arc<dyn ProtectionDomain>) -> Result<Self, FabricError> {
        let depth = usize::from(queue_depth);
        let len = Self::REQUEST_ROOM + Self::KEY_ROOM * depth + InfoRsp::len_for(depth);
        let region = Region::new(len).map_err(|e| FabricError::system("memory for messages", e))?;
        Ok(Self { registration: pd.register(&region, Access::LOCAL)?, queue_depth })
    }

    fn sge(&self, at: usize, len: usize) -> Sge {
        let slice = self
            .registration
            .region()
            .slice(at, len)
            .unwrap_or_else(|| panic!("message at {at} outside its buffers"));
        Sge { slice, lkey: self.registration.lkey() }
    }

    /// Where INFO_REQ is received.
    pub fn info_req(&self) -> Sge {
        self.sge(0, rtrs_core::wire::InfoReq::LEN)
    }

    /// The RKEY_RSP of a chunk, with room for times or without.
    pub fn rkey_rsp(&self, index: ChunkIndex, times: bool) -> Sge {
        assert!(index.0 < self.queue_depth, "chunk {index} has no buffer");
        let len = if times { TimedRkeyRsp::LEN } else { RkeyRsp::LEN };
        self.sge(Self::REQUEST_ROOM + Self::KEY_ROOM * index.index(), len)
    }

    /// Writes INFO_RSP and returns it.
    pub fn info_rsp(&self, message: &InfoRsp) -> Sge {
        let mut bytes = vec![0; message.encoded_len()];
        let len = message.encode(&mut bytes);
        let keys = Self::KEY_ROOM * usize::from(self.queue_depth);
        let sge = self.sge(Self::REQUEST_ROOM + keys, len);
        sge.slice.copy_in(0, &bytes[..len]);
        sge
    }
}
