//! Orphaned writes: writes of closed paths that the disk is still executing.
//!
//! The result of such a request is not reported, and the client may already consider it failed, so
//! a late write must not overwrite a newer one. When a shard closes its part of a path, it
//! therefore records in this table the bytes that the device may still change. It does so before it
//! reports to the control shard that it has stopped serving the path, and thus before a FENCE for
//! the path is answered and before the client can reconnect it. A later change to the same bytes,
//! on any shard, path or session, waits until the orphaned write has ended (`pipeline.rs`).
//! Everything else continues: reads, changes elsewhere, other exports. An orphaned write releases
//! its permit, because this table gives more precise protection.
//!
//! Each export has one table, shared by all shards and sessions. Normal IO reads only one number in
//! it.

use std::ops::Range;

use rtrs_core::ids::{PermitId, SessionId};
use rtrs_core::orphans::Orphans;

use crate::path::key::PathKey;

/// A request of a closed path that may still change the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrphanedWrite {
    /// Session of the request.
    pub session: SessionId,
    /// Path of the request.
    pub path: PathKey,
    /// Permit that the request held.
    pub permit: PermitId,
}

/// Orphaned writes to an export.
pub type OrphanedWrites = Orphans<OrphanedWrite>;

/// Whether an orphaned write may still change some of these bytes.
pub(super) fn touches(write: &Range<u64>, bytes: &Range<u64>) -> bool {
    if rtrs_core::mutated!(OverlapByStartOnly) {
        return write.start == bytes.start;
    }
    write.start < bytes.end && bytes.start < write.end
}
