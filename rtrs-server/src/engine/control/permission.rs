//! What the access lists let the paths of a session do.
//!
//! Each path of a session may do what the session does: a path that joins must be allowed all that
//! the session has open, and a session opens only what all its paths may open. So it does not
//! matter over which path a request comes. Holds nothing: the lists are in the [`ExportTable`],
//! since the operator's thread replaces them.

use rtrs_core::ids::SessionId;
use rtrs_core::wire::{AccessMode, Name};

use super::path::Path;
use super::refusal::Refusal;
use super::registry::Registry;
use crate::access_list::{AccessPolicy, Client};
use crate::export::ExportTable;
use crate::path::PathKey;

/// Whether a client may connect: alone, or to a session that has exports open.
pub(super) fn check_connect(
    exports: &ExportTable,
    client: Client<'_>,
    id: SessionId,
    registry: &Registry,
) -> Result<(), Refusal> {
    let policy = exports.access();
    if !policy.may_connect(client) {
        return Err(Refusal::NotAllowed(format!("{client} is in no access list")));
    }
    let Some(session) = registry.session(id).filter(|_| !policy.is_open()) else { return Ok(()) };
    // What it has closed, or what was removed, ends by itself.
    let devices = &session.shared().devices;
    for open in devices.ids().filter_map(|id| devices.get(id)) {
        let Some(export) = exports.get(open.export) else { continue };
        if !policy.allows(client, &export.name, open.writable) {
            return Err(Refusal::NotAllowed(denial(client, &export.name, open.writable)));
        }
    }
    Ok(())
}

/// The clients of a session, one for each path that may carry requests.
fn clients(registry: &Registry, id: SessionId) -> impl Iterator<Item = Client<'_>> {
    let live = registry.paths_of(id).filter(|path| path.state().may_begin());
    live.map(|path| path.shared().client())
}

/// Whether all paths of a session may open an export. Its client may see what it may read.
pub(super) fn may_open(
    policy: &AccessPolicy,
    registry: &Registry,
    (id, export, write): (SessionId, &str, bool),
) -> bool {
    policy.is_open() || clients(registry, id).all(|client| policy.allows(client, export, write))
}

/// Whether all paths of a session may open an export. The error is for its client.
pub(super) fn check_open(
    exports: &ExportTable,
    registry: &Registry,
    (id, name, mode): (SessionId, &Name, AccessMode),
) -> Result<(), String> {
    let policy = exports.access();
    if policy.is_open() {
        return Ok(());
    }
    let name = String::from_utf8_lossy(name.as_bytes());
    let write = mode.may_write();
    let denied = clients(registry, id).find(|client| !policy.allows(*client, &name, write));
    denied.map_or(Ok(()), |client| Err(denial(client, &name, write)))
}

/// The paths that may no longer do what their sessions do.
pub(super) fn no_longer_allowed(exports: &ExportTable, registry: &Registry) -> Vec<PathKey> {
    let denied = |path: &&Path| {
        let client = path.shared().client();
        check_connect(exports, client, path.shared().session.id, registry).is_err()
    };
    registry.paths().filter(denied).map(Path::key).collect()
}

/// Why, for the client and for the log.
fn denial(client: Client<'_>, export: &str, write: bool) -> String {
    let mode = if write { "rw" } else { "ro" };
    format!("{client} may not open '{export}' {mode}")
}
