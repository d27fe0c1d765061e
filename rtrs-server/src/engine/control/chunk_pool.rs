//! Memory of paths that have ended, cached for new paths of their session.
//!
//! Mapping, pinning and registering the chunks of a path takes tens of milliseconds on devices that
//! pin memory. A session with several paths survives the end of one path, and its client reconnects
//! that path. The path's memory is therefore kept: the mapping, and the registration if no peer
//! ever held its key. Keys that a peer has held are never reused.
//!
//! Cached memory is unreachable. The path has ended: all its connections have been reported closed,
//! so nothing more arrives or is read over them, and its block IO has ended
//! (docs/explanation/fence.md, "Reused memory"). Cached memory never leaves its session, and paths
//! and cached memory together never exceed the number of paths that the session has had at one
//! time. A path whose client must still authenticate takes only memory previously used by its own
//! address, and leaves none behind. Owned by the control shard.

use std::net::IpAddr;
use std::sync::Arc;

use rtrs_core::fabric::{ProtectionDomain, ToRegister};
use rtrs_core::ids::ProviderIndex;
use rtrs_core::limits::Limits;

use crate::path::chunks::{ChunkMemory, ChunkPool};
use crate::path::{PathKey, PathShared};

/// Memory of a path that has ended.
#[derive(Debug)]
pub(super) struct CachedChunks {
    /// Path that the memory belonged to.
    from: PathKey,
    provider: ProviderIndex,
    /// Address of the path's client.
    peer: IpAddr,
    /// Protection domain in which the memory was registered.
    pd: Arc<dyn ProtectionDomain>,
    memory: ChunkMemory,
}

/// Cached memory of a session.
#[derive(Debug, Default)]
pub(super) struct ChunkCache {
    list: Vec<CachedChunks>,
    /// Maximum number of paths of known clients with chunks that the session has had at one time.
    paths_max: usize,
}

impl ChunkCache {
    /// Records the current number of paths with chunks and connections.
    pub(super) fn note_paths(&mut self, live: usize) {
        self.paths_max = self.paths_max.max(live);
    }

    /// Maximum number of paths with chunks that the session has had at one time.
    pub(super) fn paths_max(&self) -> usize {
        self.paths_max
    }

    /// Number of cached pools.
    pub(super) fn kept(&self) -> usize {
        self.list.len()
    }

    /// Caches the memory of an ended path; `live` is the number of other paths with chunks and
    /// connections.
    pub(super) fn keep(&mut self, path: Arc<PathShared>, live: usize) {
        let Some(PathShared { key, origin, pd, messages, chunks, .. }) = alone(path) else {
            return;
        };
        let room = live + self.list.len() < self.paths_max;
        match chunks.into_inner() {
            Some(pool) if room && pd.is_idle() && pd.is_present() => {
                let (memory, keys) = pool.into_memory();
                pd.free_later(Box::new((keys, messages)));
                tracing::debug!(path = %key, "chunks: kept");
                self.list.push(CachedChunks {
                    from: key,
                    provider: origin.provider,
                    peer: origin.peer.ip(),
                    pd,
                    memory,
                });
            }
            pool => pd.free_later(Box::new((pool, messages))),
        }
    }

    /// Takes memory for a path over this provider; if `peer` is given, only memory previously used
    /// by a client at that address. Prefers memory whose domain `fits`, including its registration;
    /// otherwise returns memory without a registration.
    pub(super) fn take(
        &mut self,
        provider: ProviderIndex,
        peer: Option<IpAddr>,
        fits: impl Fn(&Arc<dyn ProtectionDomain>) -> bool,
    ) -> Option<CachedChunks> {
        let may = |one: &CachedChunks| {
            one.provider == provider && peer.is_none_or(|peer| peer == one.peer)
        };
        let whole = |one: &CachedChunks| {
            // The windows are released once no other reference exists.
            let bare = one.memory.registration.as_ref().map(Arc::strong_count) == Some(1);
            may(one) && bare && fits(&one.pd)
        };
        let whole = self.list.iter().position(whole);
        let at = whole.or_else(|| self.list.iter().position(may))?;
        let mut taken = self.list.swap_remove(at);
        if whole.is_none()
            && let Some(registration) = taken.memory.registration.take()
        {
            taken.pd.free_later(Box::new(registration));
        }
        Some(taken)
    }

    /// Bytes of cached memory that count against the server's limit.
    pub(super) fn counted(&self) -> u64 {
        self.list.iter().map(|one| one.memory.region.counted()).sum()
    }

    /// Frees memory that is registered with a removed device, because the device cannot be released
    /// earlier. Returns whether memory on other removable devices remains.
    pub(super) fn drop_removed(&mut self) -> bool {
        for CachedChunks { pd, memory, .. } in self.list.extract_if(.., |one| !one.pd.is_present())
        {
            pd.free_later(Box::new(memory));
        }
        self.has_removable()
    }

    /// Whether memory is registered with a removable device.
    pub(super) fn has_removable(&self) -> bool {
        self.list.iter().any(|one| one.pd.is_removable())
    }

    /// Frees the memory of an ended path without caching it.
    pub(super) fn free(path: Arc<PathShared>) {
        if let Some(PathShared { pd, messages, chunks, .. }) = alone(path) {
            pd.free_later(Box::new((chunks, messages)));
        }
    }

    /// Frees all memory when the session ends with this path.
    pub(super) fn end(&mut self, path: Arc<PathShared>) {
        Self::free(path);
        self.clear();
    }

    /// Frees all cached memory.
    pub(super) fn clear(&mut self) {
        for CachedChunks { pd, memory, .. } in self.list.drain(..) {
            pd.free_later(Box::new(memory));
        }
    }
}

/// Unwraps an ended path from its last reference. The shards drop their references before they
/// report that nothing of the path remains.
fn alone(path: Arc<PathShared>) -> Option<PathShared> {
    let key = path.key;
    let path = Arc::into_inner(path);
    if path.is_none() {
        tracing::error!(
            path = %key,
            "internal error: an ended path is still referenced; its memory is not cached"
        );
    }
    path
}

impl CachedChunks {
    /// Domain in which the memory is still registered, if any.
    pub(super) fn domain(&self) -> Option<&Arc<dyn ProtectionDomain>> {
        self.memory.registration.is_some().then_some(&self.pd)
    }

    /// Prepares a registration of the memory as chunks, in its own domain if it has one.
    pub(super) fn into_order(
        self,
        limits: Limits,
        pd: &Arc<dyn ProtectionDomain>,
        fresh_keys: bool,
    ) -> ToRegister {
        let registered = self.memory.registration.is_some();
        tracing::debug!(registered, "chunks taken over from path {}", self.from);
        ChunkPool::over(self.memory, limits, pd, fresh_keys)
    }
}
