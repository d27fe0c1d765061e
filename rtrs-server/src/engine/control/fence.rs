//! FENCE: a client says that one of its paths is dead, and wants to know when nothing of it can
//! begin any more.
//!
//! The answer waits until every shard has stopped serving the path: what still comes over its
//! connections is not looked at any more. When these are closed is another matter: a driver may
//! take a minute to destroy a queue pair (`rtrs-core/src/fabric/verbs/reaper.rs`), and a client
//! that had to wait for that would take the path it asked over for dead too. Block IO of the path
//! that runs by then may run on: newer changes of the same bytes wait for it, and so does what the
//! client sends again (`engine/io/overlap.rs`). Runs on the control shard.

use rtrs_core::wire::{Fence, errno};

use super::path::Path;
use super::registry::Registry;
use crate::engine::message::ControlAnswer;
use crate::path::PathKey;

/// What a FENCE comes to.
pub(super) enum Fencing {
    /// An answer at once.
    Answer(ControlAnswer),
    /// This path has to end; then the answer comes.
    End(PathKey),
}

/// Finds the path that a FENCE means, which came over another one.
pub(super) fn fence(over: &Path, fence: &Fence, registry: &Registry) -> Fencing {
    if over.shared().origin.uuid == fence.path {
        return Fencing::Answer(ControlAnswer::Refused(errno::EINVAL));
    }
    // At most one path of a name serves (`connect.rs`, `authenticate.rs`): the older one while it
    // is being replaced.
    let mut paths = registry.paths_of(over.shared().session.id);
    let meant = paths.find(|path| path.is_meant_by(fence) && !path.is_unproved());
    match meant.filter(|_| !rtrs_core::mutated!(FenceWithoutEnd)) {
        Some(path) => Fencing::End(path.key()),
        None => Fencing::Answer(ControlAnswer::Done),
    }
}
