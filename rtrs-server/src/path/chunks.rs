//! Memory of one path that its peer accesses: chunks, their registration and their keys.
//!
//! Chunks belong to a path, not to a session, so that a late arrival on a dead path cannot touch
//! memory that has been reused. One region holds all chunks and is registered once. With fresh
//! keys, every chunk has its own window, whose key the peer is given and loses with each request;
//! otherwise the registration's key covers all chunks. The pool is created for the control shard
//! when INFO_REQ is accepted, or before the path's first connection if the device pins memory, or
//! from the memory of an earlier path of the session (`engine/control/chunk_pool.rs`). Every shard
//! reads it, and its last holder frees it: block IO in flight keeps the memory itself alive, but
//! never the peer's right to access it.

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

/// Bytes between two chunks. The chunk size is a power of two, and most IO touches only the start
/// of each chunk: without a gap all those starts would compete for the same few cache sets.
const GAP: usize = 4096;

/// Number of a path's chunks to which its peer may write before the session's first OPEN, on
/// transports where memory is committed on the first write. Our clients use two: OPEN has permit 0,
/// and FENCE permit 1.
pub const CHUNKS_BEFORE_OPEN: u32 = 4;

/// All chunks of one path.
#[derive(Debug)]
pub struct ChunkPool {
    limits: Limits,
    region: Arc<Region>,
    registration: Arc<dyn MemoryRegistration>,
    windows: Box<[Arc<dyn Window>]>,
}

/// Memory of a pool, not covered by any key that a peer has ever been given.
#[derive(Debug)]
pub struct ChunkMemory {
    /// The chunks and the gaps between them.
    pub region: Arc<Region>,
    /// Registration for local access only; present if the pool used windows.
    pub registration: Option<Arc<dyn MemoryRegistration>>,
}

impl ChunkPool {
    /// Prepares the registration of a new pool of `queue_depth` chunks. The memory is mapped here,
    /// committed when touched or pinned, and counted by the meter accordingly.
    ///
    /// # Errors
    /// The system refused the memory.
    pub fn fresh(
        limits: Limits,
        pd: &Arc<dyn ProtectionDomain>,
        fresh_keys: bool,
        meter: &Arc<MemoryMeter>,
        counting: Counting,
    ) -> Result<ToRegister, RegisterError> {
        let (len, stride) = (Self::bytes(limits), Self::stride(limits));
        let region = Region::metered(len, stride, meter, counting)
            .map_err(|e| RegisterError::Memory(FabricError::system("memory for the chunks", e)))?;
        let memory = ChunkMemory { region, registration: None };
        Ok(Self::over(memory, limits, pd, fresh_keys))
    }

    /// Prepares the registration of a pool over the memory of another pool with the same limits.
    /// The memory is registered again unless it has a registration, which must belong to `pd`. All
    /// keys are new.
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
            // Without windows, a registration for local access would be useless.
            registration: registration.filter(|_| fresh_keys),
            access: if fresh_keys { Access::LOCAL } else { Access::REMOTE_WRITE },
            windows: if fresh_keys { limits.queue_depth() } else { 0 },
            wanted: None,
        }
    }

    /// Creates the pool from its registration.
    pub fn new(limits: Limits, registered: Registered) -> Self {
        let Registered { registration, windows } = registered;
        Self { limits, region: Arc::clone(registration.region()), registration, windows }
    }

    /// Separates the memory from everything that gives a peer access to it, which is to be
    /// released.
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

    /// Size of a pool in bytes. No gap follows the last chunk: the peer's key must not extend
    /// beyond the chunks.
    pub fn bytes(limits: Limits) -> usize {
        Self::stride(limits) * usize::from(limits.queue_depth()) - GAP
    }

    /// Permits the peer to write to all chunks, or, before the session's first OPEN, to
    /// [`CHUNKS_BEFORE_OPEN`].
    pub fn let_write(&self, opened: bool) {
        self.region.limit_writes(if opened { u32::MAX } else { CHUNKS_BEFORE_OPEN });
    }

    /// Memory region of all chunks.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// First `len` bytes of a chunk. Panics for a chunk outside the queue depth.
    fn start_of(&self, index: ChunkIndex, len: u32) -> MemSlice {
        let slice = self.region.slice(index.index() * Self::stride(self.limits), len as usize);
        slice.unwrap_or_else(|| panic!("chunk {index} outside its pool"))
    }

    /// Memory of a chunk. Panics for a chunk outside the queue depth.
    pub fn chunk(&self, index: ChunkIndex) -> MemSlice {
        self.start_of(index, self.limits.chunk_size())
    }

    /// First `len` bytes of a chunk, at most the whole chunk, as the source of a work request.
    pub fn sge(&self, index: ChunkIndex, len: u32) -> Sge {
        let slice = self.start_of(index, len.min(self.limits.chunk_size()));
        Sge { slice, lkey: self.registration.lkey() }
    }

    /// Copies bytes out of a chunk. Panics for a range outside the chunk.
    pub fn copy_out(&self, index: ChunkIndex, from: u32, to: &mut [u8]) {
        let size = self.limits.chunk_size() as usize;
        assert!(from as usize <= size && to.len() <= size - from as usize, "outside the chunk");
        self.region.copy_out(index.index() * Self::stride(self.limits) + from as usize, to);
    }

    /// Window of a chunk; None without fresh keys.
    pub fn window(&self, index: ChunkIndex) -> Option<&Arc<dyn Window>> {
        self.windows.get(index.index())
    }

    /// Number of windows: the queue depth, or 0 without fresh keys.
    pub fn window_count(&self) -> u16 {
        if self.windows.is_empty() { 0 } else { self.limits.queue_depth() }
    }

    /// Describes the chunks to the peer: one descriptor each, with the current key of its window,
    /// or the pool's key.
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

/// Buffers for the small messages of one path's connections, in separately registered memory.
///
/// `[INFO_REQ, 272 bytes, in 512][RKEY_RSP, 16 bytes per chunk][INFO_RSP]`. Each RKEY_RSP belongs
/// to its chunk: it is written when the chunk is given a new key and may be overwritten when the
/// peer uses that key.
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
    /// The system refused the memory or its registration.
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

    /// Receive buffer for INFO_REQ.
    pub fn info_req(&self) -> Sge {
        self.sge(0, rtrs_core::wire::InfoReq::LEN)
    }

    /// Buffer for the RKEY_RSP of a chunk, with or without room for times.
    pub fn rkey_rsp(&self, index: ChunkIndex, times: bool) -> Sge {
        assert!(index.0 < self.queue_depth, "chunk {index} has no buffer");
        let len = if times { TimedRkeyRsp::LEN } else { RkeyRsp::LEN };
        self.sge(Self::REQUEST_ROOM + Self::KEY_ROOM * index.index(), len)
    }

    /// Writes INFO_RSP and returns it.
    pub fn info_rsp(&self, message: &InfoRsp) -> Sge {
        let mut bytes = vec![0; message.encoded_len()];
        let len = message.encode(&mut bytes);
        self.put_info_rsp(&bytes[..len])
    }

    /// Writes INFO_RSP with the errno of a refusal and returns it.
    pub fn info_refusal(&self, errno: u16) -> Sge {
        self.put_info_rsp(&InfoRsp::refusal(errno))
    }

    fn put_info_rsp(&self, bytes: &[u8]) -> Sge {
        let keys = Self::KEY_ROOM * usize::from(self.queue_depth);
        let sge = self.sge(Self::REQUEST_ROOM + keys, bytes.len());
        sge.slice.copy_in(0, bytes);
        sge
    }
}
