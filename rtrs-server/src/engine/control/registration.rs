//! The making of a path's chunks.
//!
//! Where a device pins memory, registering it takes too long for a core (`Fabric::register_aside`):
//! another thread does it, and the path's connections wait meanwhile, unanswered, so that they can
//! still be refused with the reason. Everything else goes on, the path's time-out too; what is made
//! for a path that has ended is let go of. Elsewhere memory is there at once. Runs on the control
//! core.

use std::sync::Arc;

use rtrs_core::fabric::{ConnRequest, MadeAside, RegisterError};
use rtrs_core::ids::{ConnIndex, SessionId};

use super::Control;
use crate::engine::ctx::Ctx;
use crate::engine::session::SessionParams;
use crate::listener::Refusal;
use crate::path::chunks::ChunkPool;
use crate::path::{PathEnd, PathKey, PathShared};

/// Chunks that are being made, and the connections that wait for them.
#[derive(Debug, Default)]
pub(super) struct Making(Vec<(ConnIndex, ConnRequest)>);

impl Making {
    pub(super) fn hold(&mut self, cid: ConnIndex, request: ConnRequest) {
        self.0.push((cid, request));
    }

    /// Connections that wait.
    pub(super) fn held(&self) -> u16 {
        u16::try_from(self.0.len()).unwrap_or(u16::MAX)
    }
}

/// Tells a peer that its connection is refused, and why.
pub(super) fn refuse(provider: u8, request: ConnRequest, refusal: &Refusal, ctx: &mut Ctx<'_>) {
    let (peer, errno) = (request.peer, refusal.errno());
    if refusal.is_ours() {
        tracing::warn!(%peer, %refusal, errno, "refused a connection");
    } else {
        tracing::info!(%peer, %refusal, errno, "refused a connection");
    }
    ctx.fabrics[usize::from(provider)].reject(ctx.now, request, &refusal.response());
}

impl Control {
    /// Memory is registered that was to be registered aside, or was refused.
    pub(crate) fn made(&mut self, provider: u8, made: MadeAside, ctx: &mut Ctx<'_>) {
        let MadeAside { id, pd, result, took } = made;
        let key = PathKey(u32::try_from(id).unwrap_or(u32::MAX));
        let path = self.paths.get_mut(&key);
        // A path that ends waits no more.
        let Some((path, Making(held))) = path.and_then(|p| Some((&p.shared, p.making.take()?)))
        else {
            return pd.let_go(Box::new(result));
        };
        match result {
            Ok(registered) => {
                tracing::debug!(path = %key, "chunks: made in {} ms", took.as_millis());
                let path = Arc::clone(path);
                give_chunks(&path, ChunkPool::new(self.params.limits, registered));
                self.note_paths(path.session.id);
                for (cid, request) in held {
                    self.accept(Arc::clone(&path), cid, request, ctx);
                }
            }
            Err(error) => {
                let refusal = Refusal::from(error);
                for (_, request) in held {
                    refuse(provider, request, &refusal, ctx);
                }
                self.end_path(key, &PathEnd::Unserved(refusal.to_string()), ctx);
            }
        }
    }

    /// Makes the chunks of a path that has none yet, at once. Its domain is chosen, so of what was
    /// kept since only the memory serves.
    pub(super) fn make_chunks(&mut self, path: &PathShared) -> Result<(), RegisterError> {
        let SessionParams { limits, always_invalidate, .. } = self.params;
        let session = self.sessions.get_mut(&path.session.id);
        let wanted = match session.and_then(|s| s.spares.take(path.provider, |_| false)) {
            Some(spare) => spare.into_order(limits, &path.pd, always_invalidate),
            None => ChunkPool::fresh(limits, &path.pd, always_invalidate)?,
        };
        give_chunks(path, ChunkPool::new(limits, wanted.register()?));
        tracing::debug!(path = %path.key, "chunks: made");
        self.note_paths(path.session.id);
        Ok(())
    }

    /// Paths of a session that have connections, and chunks or the promise of them.
    pub(super) fn paths_with_chunks(&self, id: SessionId) -> usize {
        let keys = self.sessions.get(&id).map(|session| &session.paths[..]).unwrap_or_default();
        let paths = keys.iter().filter_map(|key| self.paths.get(key));
        let paths = paths.filter(|path| path.state.may_begin());
        paths.filter(|p| p.making.is_some() || p.shared.chunks.get().is_some()).count()
    }

    pub(super) fn note_paths(&mut self, id: SessionId) {
        let live = self.paths_with_chunks(id);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.spares.note_paths(live);
        }
    }
}

/// A path has its chunks. It gets them once.
fn give_chunks(path: &PathShared, pool: ChunkPool) {
    if path.chunks.set(pool).is_err() {
        tracing::error!(path = %path.key, "chunks were made twice; the first are used");
    }
}
