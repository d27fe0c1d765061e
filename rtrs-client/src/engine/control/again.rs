//! Which connected path opens the device once more, when, and what the answer has to be.
//!
//! One path at a time, and when none is connecting: all opens use the same permit. And not while a
//! fence is awaited, which may need the same connection.

use rtrs_core::ids::PathId;
use rtrs_core::time::Instant;

use super::identity::Pinned;
use super::path::Path;
use super::paths::Paths;
use crate::engine::device_table::OpenDevice;
use crate::engine::session::CONTROL;
use crate::path::state::PathState;

fn may_open(paths: &Paths) -> bool {
    let awaited = paths.iter().any(|path| path.fence.is_awaited());
    let opening = paths.first(PathState::Opening).is_some();
    let busy = paths.is_using(CONTROL) || opening || awaited;
    !busy && !rtrs_core::mutated!(ResizeUnheard)
}

/// The path that is due to open the device once more, if one may.
pub(super) fn next(paths: &Paths, now: Instant) -> Option<PathId> {
    let is_due = |id: &PathId| paths[*id].due_again().is_some_and(|due| now >= due);
    paths.ids().find(is_due).filter(|_| may_open(paths))
}

/// When a path is due to. None while none may: what ends that is an event.
pub(super) fn deadline(paths: &Paths) -> Option<Instant> {
    let due = paths.iter().filter_map(Path::due_again).min();
    due.filter(|_| may_open(paths))
}

/// True if the device in the answer on a connected path is the one opened `last`, with another size
/// perhaps. False if nothing proves that: then it stays as it was, since the connection lives.
///
/// # Errors
/// Why it cannot be that one.
pub(super) fn judge(
    path: &Path,
    pinned: &Pinned,
    last: &OpenDevice,
    device: &OpenDevice,
) -> Result<bool, String> {
    // On a connection that lives these stay what they are.
    if (last.device_id, path.cache_id()) != (device.device_id, device.cache_id) {
        return Err("the server gave another device for the same open".to_owned());
    }
    let (size, had) = (device.geometry.size, last.geometry.size);
    let has_ids = pinned.knows_export() || device.export_id.is_some();
    if size != had && !has_ids {
        tracing::warn!(
            size,
            had,
            "the device has another size, and no ID proves that it is the same one: it keeps its \
             size until the next attach"
        );
        return Ok(false);
    }
    let refused = pinned.refuses(path.server(), Some(last), device);
    let refused = refused.or_else(|| pinned.refuses_beside(path.server(), device.export_id));
    refused.map_or(Ok(true), Err)
}
