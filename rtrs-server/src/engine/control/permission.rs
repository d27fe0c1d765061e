//! Access checks for the paths of a session.
//!
//! Each path of a session may do what the session does: a path that joins must be allowed to use
//! all exports that the session has open, and a session opens only what all its paths may open. It
//! therefore does not matter which path a request arrives on. This module has no state: the access
//! lists are in the [`ExportTable`], because the operator's thread replaces them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use rtrs_core::fabric::{PeerIdentity, Who};
use rtrs_core::identity::SessionTag;
use rtrs_core::ids::SessionId;
use rtrs_core::settings::printable;
use rtrs_core::wire::{AccessMode, Name};

use super::connect::Attempt;
use super::path::Path;
use super::refusal::Refusal;
use super::registry::Registry;
use crate::access_list::{AccessPolicy, Client};
use crate::engine::message::{AdminReply, AdminRequest};
use crate::export::ExportTable;
use crate::path::state::PathState;
use crate::path::{PathEnd, PathKey};
use crate::stats::Revoked;

/// Checks whether a client may connect, either in a new session or in a session of the same client
/// that may have exports open. If the client must still authenticate, [`check_proof`] decides once
/// the client has authenticated.
pub(super) fn check_connect(
    exports: &ExportTable,
    attempt: Attempt<'_>,
    registry: &Registry,
) -> Result<(), Refusal> {
    let (identity, id) = (&attempt.request.identity, attempt.conn.session_id);
    let other = || Refusal::Identity(identity.who.clone());
    let session = registry.session(id).map(|session| session.shared().who());
    if attempt.must_authenticate {
        // A session of a client without a name accepts no authenticating path.
        return if session == Some(Some(&Who::Anonymous)) { Err(other()) } else { Ok(()) };
    }
    let client = Client::of(&identity.who, attempt.request.peer, id);
    check_client(exports, identity, client)?;
    // A session whose client is unknown is assigned to the first client with a name.
    if session.flatten().is_some_and(|who| *who != identity.who) {
        return Err(other());
    }
    check_session(&exports.access(), exports, client, id, registry)
}

/// Checks whether a client that authenticated on a path may use it.
pub(super) fn check_proof(
    exports: &ExportTable,
    identity: &PeerIdentity,
    client: Client<'_>,
    id: SessionId,
    registry: &Registry,
) -> Result<(), Refusal> {
    check_client(exports, identity, client)?;
    let who = registry.session(id).and_then(|session| session.shared().who());
    if who.is_some_and(|who| *who != identity.who) {
        return Err(Refusal::Identity(identity.who.clone()));
    }
    check_session(&exports.access(), exports, client, id, registry)
}

/// Checks that an access list and the current certificates or keys include the client.
fn check_client(
    exports: &ExportTable,
    identity: &PeerIdentity,
    client: Client<'_>,
) -> Result<(), Refusal> {
    let policy = exports.access();
    if !policy.may_connect(client) {
        return Err(Refusal::NotAllowed(format!("{client} is in no access list")));
    }
    if identity.proof.as_ref().is_some_and(|proof| proof.generation() < policy.generation) {
        let why = "certificates or keys were reloaded while the client connected; it may retry";
        return Err(Refusal::NotAllowed(why.into()));
    }
    Ok(())
}

/// Checks whether a client may do what a session does.
pub(super) fn check_session(
    policy: &AccessPolicy,
    exports: &ExportTable,
    client: Client<'_>,
    id: SessionId,
    registry: &Registry,
) -> Result<(), Refusal> {
    let Some(session) = registry.session(id).filter(|_| !policy.is_open()) else { return Ok(()) };
    // Closed and removed exports are released on their own.
    let devices = &session.shared().devices;
    for open in devices.ids().filter_map(|id| devices.get(id)) {
        let Some(export) = exports.get(open.export) else { continue };
        let allowed = match exports.is_found(open.export) {
            true => policy.allows_found(client, open.writable),
            false => policy.allows(client, &export.name, open.writable),
        };
        if !allowed {
            return Err(Refusal::NotAllowed(denial(client, &export.name, open.writable)));
        }
    }
    Ok(())
}

/// Clients of a session, one for each path that carries requests. A path that is connecting or has
/// not authenticated is checked when it comes up. Requests of an ending path were allowed when they
/// began.
pub(super) fn clients(registry: &Registry, id: SessionId) -> impl Iterator<Item = Client<'_>> {
    let up = |path: &&Path| path.state() == PathState::Connected && !path.is_unproved();
    registry.paths_of(id).filter(up).map(|path| path.shared().client())
}

/// Whether all paths of a session may open an export, for writing if `write`. A client may see any
/// export that it may read.
pub(super) fn may_open(
    policy: &AccessPolicy,
    registry: &Registry,
    id: SessionId,
    export: &str,
    write: bool,
) -> bool {
    // Without a path there is no client to check.
    let mut clients = clients(registry, id).peekable();
    policy.is_open()
        || clients.peek().is_some() && clients.all(|client| policy.allows(client, export, write))
}

/// An OPEN whose permissions must be checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpenCheck<'a> {
    pub(super) session: SessionId,
    pub(super) name: &'a Name,
    /// Whether an export has this name. Otherwise the search path is used.
    pub(super) named: bool,
    pub(super) access: AccessMode,
}

/// Checks whether all paths of a session may open an export. The error is for the session's client.
pub(super) fn check_open(
    exports: &ExportTable,
    registry: &Registry,
    asked: OpenCheck<'_>,
) -> Result<(), String> {
    let OpenCheck { session, name, named, access } = asked;
    let policy = exports.access();
    if policy.is_open() {
        return Ok(());
    }
    let name = String::from_utf8_lossy(name.as_bytes());
    let write = access.may_write();
    let mut clients = clients(registry, session).peekable();
    if clients.peek().is_none() {
        return Err("the session has no connected path".into());
    }
    let allows = |client| match named {
        true => policy.allows(client, &name, write),
        false => policy.allows_found(client, write),
    };
    let denied = clients.find(|client| !allows(*client));
    denied.map_or(Ok(()), |client| Err(denial(client, &name, write)))
}

/// Paths that must end because of an operator's request, and the reason.
pub(super) fn to_end(
    request: AdminRequest,
    exports: &ExportTable,
    registry: &Registry,
) -> (Vec<PathKey>, PathEnd) {
    match request {
        AdminRequest::EndUnknown(mut keys) => {
            keys.retain(|key| registry.path(*key).is_some_and(|path| !path.state().is_ending()));
            (keys, PathEnd::Unknown)
        }
        AdminRequest::WouldEnd { policy, unknown } => {
            let mut keys = denied(&policy, exports, registry);
            keys.extend(unknown);
            keys.sort_unstable();
            keys.dedup();
            (keys, PathEnd::NotAllowed)
        }
        _ => (denied(&exports.access(), exports, registry), PathEnd::NotAllowed),
    }
}

/// Paths whose clients may not do what their sessions do, according to these access lists.
fn denied(policy: &AccessPolicy, exports: &ExportTable, registry: &Registry) -> Vec<PathKey> {
    let is_denied = |path: &&Path| {
        let client = path.shared().client();
        let id = path.shared().session.id;
        !policy.may_connect(client) || check_session(policy, exports, client, id, registry).is_err()
    };
    let live = registry.paths().filter(|path| !path.is_unproved() && !path.state().is_ending());
    live.filter(is_denied).map(Path::key).collect()
}

/// Sessions that lose these paths.
pub(super) fn revoked(keys: &[PathKey], registry: &Registry) -> Vec<Revoked> {
    let paths = keys.iter().filter_map(|key| registry.path(*key)).map(Path::shared);
    let mut lost: BTreeMap<SessionId, (usize, BTreeSet<IpAddr>)> = BTreeMap::new();
    for path in paths {
        let (count, peers) = lost.entry(path.session.id).or_default();
        *count += 1;
        peers.insert(path.origin.peer.ip().to_canonical());
    }
    let shown = lost.into_iter().filter_map(|(id, (paths, peers))| {
        let session = registry.session(id)?;
        let name = session.name().map(|name| name.to_string());
        let live = registry.paths_of(id).filter(|path| !path.state().is_ending()).count();
        Some(Revoked {
            session: name.unwrap_or_else(|| SessionTag::of(id).to_string()),
            identity: session.shared().who().map(ToString::to_string),
            paths,
            paths_left: live.saturating_sub(paths),
            peers,
        })
    });
    shown.collect()
}

/// Authenticated clients, by path.
pub(super) fn identities(registry: &Registry) -> AdminReply {
    let proved = registry
        .paths()
        .map(Path::shared)
        .filter(|path| path.identity().proof.is_some() && !path.state().is_ending());
    AdminReply::Identities(proved.map(|path| (path.key, path.identity().clone())).collect())
}

/// Formats a denial for the client and the log.
fn denial(client: Client<'_>, export: &str, write: bool) -> String {
    let mode = if write { "rw" } else { "ro" };
    format!("{client} may not open '{}' {mode}", printable(export))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access_list::Unlisted;

    #[test]
    fn a_session_without_a_path_may_open_nothing() {
        let list = ["anyone:rw".parse().unwrap()];
        let exports = ExportTable::new(Vec::new());
        exports.set_access(AccessPolicy::new(&list, [].into_iter(), Unlisted::Nobody));
        let (registry, id) = (Registry::default(), SessionId([1; 16]));
        let (name, access) = (&Name::new(b"vol").unwrap(), AccessMode::ReadOnly);
        let asked = OpenCheck { session: id, name, named: true, access };
        check_open(&exports, &registry, asked).unwrap_err();
        assert!(!may_open(&exports.access(), &registry, id, "vol", false));
    }
}
