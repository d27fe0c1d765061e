//! FENCE: a client reports that one of its paths is dead, and requests an answer once no more work
//! from that path can begin.
//!
//! The answer waits until every shard has stopped serving the path: whatever still arrives over its
//! connections is ignored. The connections may close later: a driver may take a minute to destroy a
//! queue pair (`rtrs-core/src/fabric/verbs/reaper.rs`), and a client that had to wait for that
//! would also consider the path that carried its FENCE dead. Block IO from the dead path that is
//! already in progress may continue: newer changes to the same bytes wait for it, and so do
//! requests that the client resends (`engine/io/overlap.rs`). Runs on the control shard.
//!
//! A path to a different server process is unknown here. Its requests certainly have no further
//! effect only if that process had to release the exports' locks before this process could open the
//! exports.

use rtrs_core::identity::ServerProcess;
use rtrs_core::wire::{Fence, errno};

use super::path::Path;
use super::registry::Registry;
use crate::engine::message::ControlAnswer;
use crate::engine::session::{SessionParams, SessionShared};
use crate::export::ExportTable;
use crate::path::PathKey;

/// Outcome of a FENCE.
pub(super) enum Fencing {
    /// Answer immediately.
    Answer(ControlAnswer),
    /// End this path, and answer when it has stopped.
    End(PathKey),
}

/// This server process.
pub(super) struct Own<'a> {
    process: Option<ServerProcess>,
    exports: &'a ExportTable,
}

impl<'a> Own<'a> {
    pub(super) fn of(params: &SessionParams, exports: &'a ExportTable) -> Self {
        Self { process: params.instance.process(), exports }
    }

    /// Whether this process can answer a FENCE: the path led to this process, as far as both sides
    /// know, or every export to which the session writes is locked.
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

/// Finds the path named by a FENCE, which arrived over another path.
pub(super) fn fence(over: &Path, fence: &Fence, registry: &Registry, own: &Own<'_>) -> Fencing {
    if over.shared().origin.uuid == fence.path {
        return Fencing::Answer(ControlAnswer::Refused(errno::EINVAL));
    }
    if !own.can_answer(fence, &over.shared().session) {
        return Fencing::Answer(ControlAnswer::Refused(errno::ENOLCK));
    }
    // At most one path with a given name is served (`connect.rs`, `authenticate.rs`): the older
    // path while it is being replaced.
    let mut paths = registry.paths_of(over.shared().session.id);
    let meant = paths.find(|path| path.is_covered_by(fence) && !path.is_unproved());
    match meant.filter(|_| !rtrs_core::mutated!(FencedPathKept)) {
        Some(path) => Fencing::End(path.key()),
        None => Fencing::Answer(ControlAnswer::Done),
    }
}
