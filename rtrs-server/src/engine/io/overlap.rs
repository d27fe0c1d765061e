//! Orphaned writes: what the disk still works on for paths that are closed.
//!
//! Nobody learns how such a request ends, and its client may take it for failed by now: a write
//! that lands late must not land over a newer one. So when a shard closes its part of a path, it
//! enters what the device may still change there. It does so before it reports to the control
//! shard that it has stopped serving the path: before a FENCE for it is answered, and before the
//! client can connect it again. A later change to the same bytes, on any shard, path or session,
//! waits until the orphaned write has ended (`pipeline.rs`). Everything else goes on: reads,
//! changes elsewhere, other exports. An orphaned write gives its permit back, since this table
//! protects more exactly.
//!
//! One table per export, shared by all shards and sessions. Usual IO reads one number of it.

use std::ops::Range;

use rtrs_core::ids::{PermitId, SessionId};
use rtrs_core::orphans::Orphans;

use crate::path::key::PathKey;

/// A request of a closed path that may still change the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrphanedWrite {
    /// Its session.
    pub session: SessionId,
    /// Its path.
    pub path: PathKey,
    /// The permit that it had.
    pub permit: PermitId,
}

/// The orphaned writes of an export.
pub type OrphanedWrites = Orphans<OrphanedWrite>;

/// True when an orphaned write may still change some of these bytes.
pub(super) fn touches(write: &Range<u64>, bytes: &Range<u64>) -> bool {
    if rtrs_core::mutated!(DeferredByStart) {
        return write.start == bytes.start;
    }
    write.start < bytes.end && bytes.start < write.end
}
