//! FENCE: a client says that one of its paths is dead, and wants to know when nothing of it can
//! begin any more.
//!
//! The answer waits until every shard has stopped serving the path: what still comes over its
//! connections is not looked at any more. When these are closed is another matter: a driver may
//! take a minute to destroy a queue pair (`rtrs-core/src/fabric/verbs/reaper.rs`), and a client
//! that had to wait for that would take the path it asked over for dead too. Block IO of the path
//! that runs by then may run on: newer changes of the same bytes wait for it, and so does what the
//! client sends again (`engine/io/overlap.rs`). Runs on the control shard.
//!
//! A path that led to another process of the server is unknown here. Nothing of it takes effect any
//! more only if that process had to release the locks of the exports before this one could open
//! them.

use rtrs_core::identity::ServerProcess;
use rtrs_core::wire::{Fence, errno};

use super::path::Path;
use super::registry::Registry;
use crate::engine::message::ControlAnswer;
use crate::engine::session::{SessionParams, SessionShared};
use crate::export::ExportTable;
use crate::path::PathKey;

/// What a FENCE comes to.
pub(super) enum Fencing {
    /// An answer at once.
    Answer(ControlAnswer),
    /// This path has to end; then the answer comes.
    End(PathKey),
}

/// This process of the server.
pub(super) struct Own<'a> {
    process: Option<ServerProcess>,
    exports: &'a ExportTable,
}

impl<'a> Own<'a> {
    pub(super) fn of(params: &SessionParams, exports: &'a ExportTable) -> Self {
        Self { process: params.instance.process(), exports }
    }

    /// Whether this process can answer a FENCE: the path led to this process, as far as both sides
    /// know, or each export that the session writes is locked.
    fn can_answer(&self, fence: &Fence, session: &SessionShared) -> bool {
        let devices = &session.devices;
        let open = || devices.ids().filter_map(|id| devices.get(id));
        let mut written = open().filter(|entry| entry.writable);
        let is_locked = |export| {
            let export = self.exports.get(export);
            export.is_none_or(|export| export.source.is_exclusive())
        };
        !self.process.is_some_and(|own| own.differs(fence.process))
            || written.all(|entry| is_locked(entry.export))
            || rtrs_core::mutated!(ForeignFenceAnswered)
    }
}

/// Finds the path that a FENCE means, which came over another one.
pub(super) fn fence(over: &Path, fence: &Fence, registry: &Registry, own: &Own<'_>) -> Fencing {
    if over.shared().origin.uuid == fence.path {
        return Fencing::Answer(ControlAnswer::Refused(errno::EINVAL));
    }
    if !own.can_answer(fence, &over.shared().session) {
        return Fencing::Answer(ControlAnswer::Refused(errno::ENOLCK));
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
