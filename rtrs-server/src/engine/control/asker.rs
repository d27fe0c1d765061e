//! The request that an answer of the control shard belongs to.

use rtrs_core::ids::{CoreIndex, PermitId};

use crate::engine::message::{ControlAnswer, Outbox, ShardMessage};
use crate::path::PathKey;

/// A request of a client that the control shard works on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asker {
    /// Its path.
    pub(super) path: PathKey,
    /// Its shard.
    pub(super) core: CoreIndex,
    /// Its permit.
    pub(super) permit: PermitId,
}

impl Asker {
    /// Answers it. Nothing happens if its path is gone meanwhile.
    pub(super) fn answer(self, answer: ControlAnswer, out: &mut Outbox) {
        let Self { path, core, permit } = self;
        out.shard(core, ShardMessage::Answer { path, permit, answer });
    }
}
