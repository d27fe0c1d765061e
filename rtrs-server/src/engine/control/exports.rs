//! Effects of the operator's changes to exports on sessions: which sessions have an export open,
//! and what happens when an export is removed. The daemon changes what is exported and releases
//! files (`daemon/exports.rs`). Nothing here waits for a backend.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use rtrs_core::block::TargetName;
use rtrs_core::identity::SessionTag;
use rtrs_core::ids::SessionId;
use rtrs_core::wire::AccessMode;

use super::open::Opens;
use super::path::Path;
use super::registry::Registry;
use crate::engine::device_table::DeviceId;
use crate::engine::message::{AdminReply, Outbox};
use crate::export::{Export, ExportIndex, ExportTable};
use crate::path::PathKey;
use crate::rate_limits::RateLimits;
use crate::stats::{ExportSnapshot, ExportState, ExportUser};

/// Maximum number of sessions named in an error message.
const NAMED_MAX: usize = 3;

/// An export that the operator named.
#[derive(Debug)]
pub(super) struct NamedExport {
    index: ExportIndex,
    export: Arc<Export>,
}

/// Finds an export by its name. The error text is shown to the operator.
pub(super) fn find(exports: &ExportTable, name: &str) -> Result<NamedExport, String> {
    let index = exports.find(name.as_bytes());
    let found = index.and_then(|index| Some(NamedExport { index, export: exports.get(index)? }));
    found.ok_or_else(|| format!("there is no export {name:?}; `export list` shows all"))
}

fn name_of(session: SessionId, registry: &Registry) -> Option<String> {
    let name = registry.session(session)?.name()?;
    Some(String::from_utf8_lossy(name.as_bytes()).into_owned())
}

/// Addresses of a session's clients.
fn peers_of(session: SessionId, registry: &Registry) -> BTreeSet<IpAddr> {
    let paths = registry.paths_of(session).map(Path::shared);
    paths.map(|path| path.origin.peer.ip().to_canonical()).collect()
}

/// Formats the names of sessions for an error message.
fn names(users: &[(SessionId, AccessMode)], registry: &Registry) -> String {
    let shown = users.iter().take(NAMED_MAX).map(|(session, mode)| {
        let name =
            name_of(*session, registry).unwrap_or_else(|| SessionTag::of(*session).to_string());
        format!("{name} ({})", crate::stats::Access::from(*mode))
    });
    let shown = shown.collect::<Vec<_>>().join(", ");
    match users.len().saturating_sub(NAMED_MAX) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Lists all exports, without their access lists, which the daemon adds.
pub(super) fn list(exports: &ExportTable, opens: &Opens, registry: &Registry) -> AdminReply {
    let all = exports.all().into_iter().map(|(at, export)| {
        let users = opens.users(at).iter().map(|(session, mode)| ExportUser {
            session: session.to_string(),
            name: name_of(*session, registry),
            access: (*mode).into(),
            peers: peers_of(*session, registry),
        });
        let open_by: Vec<ExportUser> = users.collect();
        let name = export.source.target_name();
        let state = match () {
            () if exports.is_ending(at) => ExportState::Removing,
            () if export.source.is_cut() => ExportState::Cut,
            () if export.source.gateway().is_some_and(|gateway| !gateway.standing().active) => {
                ExportState::Standby
            }
            () if name == Some(TargetName::Replaced) => ExportState::Replaced,
            () if name == Some(TargetName::Missing) => ExportState::Missing,
            () if open_by.is_empty() => ExportState::Unused,
            () => ExportState::Open,
        };
        let (geometry, totals) = (export.geometry(), export.counters.totals());
        ExportSnapshot {
            name: export.name.clone(),
            backing: export.backing.clone(),
            size: geometry.size,
            block_size: geometry.logical_block,
            read_only: geometry.read_only,
            id: export.id.map(|id| id.to_string()),
            state,
            found: exports.is_found(at),
            open_by,
            device_errors: totals.device_errors,
            io: (&totals).into(),
            epoch: export.epoch.number(),
            access: Vec::new(),
            access_limit: None,
            limits: export.throttle.limits(),
            reason: export
                .source
                .outage()
                .map(|why| format!("its server is unreachable ({why}); IO waits")),
            unread: false,
        }
    });
    AdminReply::Exports(all.collect())
}

/// Sessions that have exports open, by export name, each with a flag for write access.
pub(super) fn holders(exports: &ExportTable, opens: &Opens, names: Vec<String>) -> AdminReply {
    let of = |name: &str| {
        let users = exports.find(name.as_bytes()).map(|at| opens.users(at)).unwrap_or_default();
        users.iter().map(|(session, mode)| (*session, mode.may_write())).collect()
    };
    let all = names.into_iter().map(|name| {
        let holders = of(&name);
        (name, holders)
    });
    AdminReply::Holders(all.collect())
}

/// Device IDs of an export in the sessions that have it open.
pub(super) fn devices_of(
    export: ExportIndex,
    opens: &Opens,
    registry: &Registry,
) -> Vec<(SessionId, DeviceId)> {
    let device = |id: SessionId| registry.session(id)?.shared().devices.find(export);
    opens.users(export).iter().filter_map(|(id, _)| Some((*id, device(*id)?))).collect()
}

/// Announces changed devices to the clients of these sessions, on each of their paths.
pub(super) fn announce(
    changed: &[(SessionId, DeviceId)],
    registry: &mut Registry,
    out: &mut Outbox,
) {
    for (id, device) in changed {
        let keys: Vec<PathKey> = registry.paths_of(*id).map(Path::key).collect();
        for key in keys {
            registry.path_mut(key).into_iter().for_each(|path| path.announce(*device, out));
        }
    }
}

/// Records that a session reopens a device that the session has or had open. Called before the
/// reply to the OPEN.
pub(super) fn opened_again(
    key: PathKey,
    device: Option<DeviceId>,
    registry: &mut Registry,
    out: &mut Outbox,
) {
    if let (Some(device), Some(path)) = (device, registry.path_mut(key)) {
        let ids = path.shared().session.devices.ids().len();
        path.opened_again(device, u32::try_from(ids).unwrap_or(u32::MAX), out);
    }
}

/// Removes an export and notifies the sessions that lose it.
pub(super) fn remove(
    found: &NamedExport,
    force: bool,
    opens: &mut Opens,
    registry: &mut Registry,
    out: &mut Outbox,
) -> AdminReply {
    let NamedExport { index, export } = found;
    let index = *index;
    let name = &export.name;
    let users = opens.users(index).to_vec();
    if !users.is_empty() && !force {
        let by = names(&users, registry);
        return AdminReply::Refused(format!("export {name:?} is open by {by}"));
    }
    let devices = devices_of(index, opens, registry);
    let sessions = users.iter().filter_map(|(id, _)| Some(&**registry.session(*id)?.shared()));
    opens.remove(index, sessions, out);
    let name_or_id = |id| name_of(id, registry).unwrap_or_else(|| SessionTag::of(id).to_string());
    // Lift the limits, so that throttled requests do not delay the removal.
    opens.limit(index, RateLimits::default(), out);
    let ended: Vec<String> = users.iter().map(|(id, _)| name_or_id(*id)).collect();
    if ended.is_empty() {
        tracing::info!(export = &**name, "export removed");
    } else {
        tracing::warn!(export = &**name, sessions = ?ended, "export removed while it was open");
    }
    announce(&devices, registry, out);
    AdminReply::ExportRemoved { ended }
}

/// Changes the rate limits of an export, including for waiting requests.
pub(super) fn limit(
    found: &NamedExport,
    limits: RateLimits,
    opens: &Opens,
    out: &mut Outbox,
) -> AdminReply {
    let NamedExport { index, export } = found;
    opens.limit(*index, limits, out);
    if limits.is_unlimited() {
        tracing::info!(export = &*export.name, "export changed: no rate limits");
    } else {
        tracing::info!(export = &*export.name, %limits, "export changed");
    }
    AdminReply::Done
}

/// Forbids opens of an export for writing, or permits them again.
pub(super) fn freeze(
    found: &NamedExport,
    frozen: bool,
    opens: &Opens,
    registry: &Registry,
) -> AdminReply {
    let NamedExport { index, export } = found;
    let name = &export.name;
    let writers = opens.users(*index).iter().filter(|(_, mode)| mode.may_write());
    let writers: Vec<_> = writers.copied().collect();
    if frozen && !writers.is_empty() {
        let by = names(&writers, registry);
        let why =
            format!("export {name:?} is open for writing by {by}; detach it at the client first");
        return AdminReply::Refused(why);
    }
    export.freeze(frozen);
    tracing::info!(export = &**name, read_only = frozen, "export changed");
    AdminReply::Done
}
