//! Memory of paths that are gone, kept for the next connects of their session.
//!
//! To map, pin and register the chunks of a path takes tens of milliseconds where a device pins
//! them. A session that has another path lives on when one ends, and its client connects that one
//! anew; so what the path had is kept for it: the mapping, and the registration where no peer ever
//! had its key. Keys that a peer had are never used again.
//!
//! What is kept here nobody can reach. The path is gone: all its connections were reported closed,
//! so nothing arrives and nothing is read for them any more, and its block IO has ended
//! (docs/FENCE.md, "Reused memory"). Cached memory never leaves its session,
//! and paths and cached memory together are never more than the paths that the session had at once.
//! A path whose client has still to prove who it is takes nothing but what was of its own address,
//! and leaves nothing. Owned by the control shard.

use std::net::IpAddr;
use std::sync::Arc;

use rtrs_core::fabric::{ProtectionDomain, ToRegister};
use rtrs_core::ids::ProviderIndex;
use rtrs_core::limits::Limits;

use crate::path::chunks::{ChunkMemory, ChunkPool};
use crate::path::{PathKey, PathShared};

/// The memory of one path that is gone.
#[derive(Debug)]
pub(super) struct CachedChunks {
    /// Whose it was.
    from: PathKey,
    provider: ProviderIndex,
    /// Where its client was.
    peer: IpAddr,
    /// The domain it was registered in.
    pd: Arc<dyn ProtectionDomain>,
    memory: ChunkMemory,
}

/// What a session keeps.
#[derive(Debug, Default)]
pub(super) struct ChunkCache {
    list: Vec<CachedChunks>,
    /// Paths with chunks that the session had at once, of which it was known whose they were.
    paths_max: usize,
}

impl ChunkCache {
    /// The session has so many paths with chunks and connections.
    pub(super) fn note_paths(&mut self, live: usize) {
        self.paths_max = self.paths_max.max(live);
    }

    /// Paths with chunks that the session had at once.
    pub(super) fn paths_max(&self) -> usize {
        self.paths_max
    }

    /// Paths whose memory is kept.
    pub(super) fn kept(&self) -> usize {
        self.list.len()
    }

    /// Keeps the memory of a path that is gone; `live` others have chunks and connections.
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

    /// Memory for a path over that provider, which was for a client at that address, if one is
    /// given: of a domain that `fits` if there is any, with its registration; else without.
    pub(super) fn take(
        &mut self,
        (provider, peer): (ProviderIndex, Option<IpAddr>),
        fits: impl Fn(&Arc<dyn ProtectionDomain>) -> bool,
    ) -> Option<CachedChunks> {
        let may = |one: &CachedChunks| {
            one.provider == provider && peer.is_none_or(|peer| peer == one.peer)
        };
        let whole = |one: &CachedChunks| {
            // Its windows are gone when nobody else holds it.
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

    /// Bytes of what is kept that count against the server's limit.
    pub(super) fn counted(&self) -> u64 {
        self.list.iter().map(|one| one.memory.region.counted()).sum()
    }

    /// Frees memory that is registered with a device that was removed: the device is not gone
    /// before. True if there is other memory on devices that can be.
    pub(super) fn drop_removed(&mut self) -> bool {
        for CachedChunks { pd, memory, .. } in self.list.extract_if(.., |one| !one.pd.is_present())
        {
            pd.free_later(Box::new(memory));
        }
        self.has_removable()
    }

    /// True if there is memory registered with a device that can be removed.
    pub(super) fn has_removable(&self) -> bool {
        self.list.iter().any(|one| one.pd.is_removable())
    }

    /// Keeps nothing of a path that is gone.
    pub(super) fn free(path: Arc<PathShared>) {
        if let Some(PathShared { pd, messages, chunks, .. }) = alone(path) {
            pd.free_later(Box::new((chunks, messages)));
        }
    }

    /// The session has ended with this path.
    pub(super) fn end(&mut self, path: Arc<PathShared>) {
        Self::free(path);
        self.clear();
    }

    /// Frees all.
    pub(super) fn clear(&mut self) {
        for CachedChunks { pd, memory, .. } in self.list.drain(..) {
            pd.free_later(Box::new(memory));
        }
    }
}

/// A path that is gone. The shards release it before they report that nothing of it is left.
fn alone(path: Arc<PathShared>) -> Option<PathShared> {
    let key = path.key;
    let path = Arc::into_inner(path);
    if path.is_none() {
        tracing::error!(path = %key, "a path that is gone is still held: its memory is not kept");
    }
    path
}

impl CachedChunks {
    /// The domain in which it is registered, if it still is.
    pub(super) fn domain(&self) -> Option<&Arc<dyn ProtectionDomain>> {
        self.memory.registration.is_some().then_some(&self.pd)
    }

    /// What has to be registered to make chunks of it, in its domain if it has one.
    pub(super) fn into_order(
        self,
        limits: Limits,
        pd: &Arc<dyn ProtectionDomain>,
        fresh_keys: bool,
    ) -> ToRegister {
        let registered = self.memory.registration.is_some();
        tracing::debug!(registered, "chunks: taken over from path {}", self.from);
        ChunkPool::over(self.memory, limits, pd, fresh_keys)
    }
}
