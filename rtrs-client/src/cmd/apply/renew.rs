//! Reattach of all volumes of a session, for settings that they share and that only a new session
//! can have.
//!
//! The volumes are detached first, and then take their turns as in a first `apply`. Whatever keeps
//! a volume attached is looked for before any is detached. If a detach is refused nevertheless, the
//! session continues, and the volumes that were detached join it again.

use std::collections::BTreeMap;
use std::path::Path;

use super::act::{Allowed, needs_all};
use super::group::{Group, Item};
use crate::cmd::detach::end;
use crate::cmd::session::Session;
use crate::control_protocol::Status;
use crate::daemon::device::refuse_if_used;
use crate::error::Error;
use crate::volumes::difference::Action;

/// Result of the first step, the detach.
#[derive(Debug, Default)]
pub(super) enum Renewal {
    /// No running session must be replaced, or the file does not list all of its volumes.
    #[default]
    NotNeeded,
    /// The session has ended. IO of these volumes was cut off.
    Ended(BTreeMap<String, Error>),
    /// A volume cannot be detached, for this reason.
    Refused(String),
}

/// Ends the session of a group whose volumes must all be attached again, if the file lists all.
pub(super) fn renew(group: &Group<'_>) -> Renewal {
    let Some(sharers) = sharers(group) else { return Renewal::NotNeeded };
    end_all(group, sharers)
        .map_or_else(|error| Renewal::Refused(error.chain().to_string()), Renewal::Ended)
}

/// Volumes of the running session that must be replaced.
fn sharers(group: &Group<'_>) -> Option<Vec<Session>> {
    if !group.may.reattach {
        return None;
    }
    let session = |name: &str| Session::new(name, group.global).ok();
    let needing = |item: &Item| {
        let wanted = item.wanted.as_ref().filter(|_| item.error.is_none())?;
        let status = session(&item.name)?.status().ok()?;
        let needs = item.task.action == Action::NeedsReattach && status.volumes.len() > 1;
        (needs && needs_all(wanted, &item.task, &status)).then_some(status)
    };
    let Status { volumes, .. } = group.items.iter().find_map(needing)?;
    let is_listed = |name: &String| group.items.iter().any(|item| item.name == *name);
    volumes.iter().all(is_listed).then(|| volumes.iter().filter_map(|name| session(name)).collect())
}

/// Detaches volumes. Returns the errors of those whose IO was cut off.
fn end_all(group: &Group<'_>, sharers: Vec<Session>) -> Result<BTreeMap<String, Error>, Error> {
    let Allowed { force, within_ms, .. } = group.may;
    for wanted in group.items.iter().filter_map(|item| item.wanted.as_ref()) {
        wanted.plan.session.check()?;
    }
    let mut all = Vec::with_capacity(sharers.len());
    for session in sharers {
        let status = session.status()?;
        if let Some(path) = status.device.as_deref().filter(|_| !force) {
            refuse_if_used(&session.name, Path::new(path))?;
        }
        all.push((session, status.nbd_connections));
    }
    // A volume with clients is the first to refuse.
    all.sort_by_key(|(_, connections)| *connections == 0);
    let mut cut_off = BTreeMap::new();
    for (session, _) in all {
        let ended = end(&session, within_ms, force)?;
        cut_off.extend(ended.verdict(&session.name).err().map(|error| (session.name, error)));
    }
    Ok(cut_off)
}
