//! FENCE: a client says that one of its paths is dead, and wants to know when nothing of it can
//! begin any more.
//!
//! The answer waits until every core has stopped serving the path: what still comes over its
//! connections is not looked at any more. When these are closed is another matter: a driver may
//! take a minute to destroy a queue pair (`rtrs-core/src/fabric/verbs/reaper.rs`), and a client
//! that had to wait for that would take the path it asked over for dead too. Block IO of the path
//! that runs by then may run on: newer changes of the same bytes wait for it, and so does what the
//! client sends again (`engine/io/overlap.rs`). Runs on the control core.

use rtrs_core::ids::{CoreIndex, PermitId};
use rtrs_core::wire::{Fence, errno};

use super::Control;
use crate::engine::ctx::Ctx;
use crate::engine::message::{ControlAnswer, ShardMessage};
use crate::path::{PathEnd, PathKey};

/// The request that asked for a fence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asker {
    pub(super) path: PathKey,
    pub(super) core: CoreIndex,
    pub(super) permit: PermitId,
}

impl Asker {
    /// Answers it. A path that is gone meanwhile hears nothing.
    pub(super) fn tell(self, answer: ControlAnswer, ctx: &mut Ctx<'_>) {
        let Self { path, core, permit } = self;
        ctx.out.shard(core, ShardMessage::Answer { path, permit, answer });
    }
}

impl Control {
    /// Ends the path that is meant. `None`: the answer comes when that is done.
    pub(super) fn fence(
        &mut self,
        asker: Asker,
        fence: Fence,
        ctx: &mut Ctx<'_>,
    ) -> Option<ControlAnswer> {
        let own = self.paths.get(&asker.path)?;
        if own.shared.uuid == fence.path {
            return Some(ControlAnswer::Refused(errno::EINVAL));
        }
        let session = self.sessions.get(&own.shared.session.id)?;
        // At most one path of a name has connections (`admit_connection`).
        let meant = session.paths.iter().copied().find(|key| {
            self.paths.get(key).is_some_and(|path| {
                path.shared.uuid == fence.path
                    && path.state.may_begin()
                    && fence.covers(path.recon_cnt)
            })
        });
        let meant = meant.filter(|_| !rtrs_core::mutated!(FenceWithoutEnd));
        let Some(key) = meant else { return Some(ControlAnswer::Done) };
        self.paths.get_mut(&key)?.fenced_by.push(asker);
        self.end_path(key, &PathEnd::Fenced, ctx);
        if rtrs_core::mutated!(FenceBeforeStopped) {
            return Some(ControlAnswer::Done);
        }
        None
    }
}
