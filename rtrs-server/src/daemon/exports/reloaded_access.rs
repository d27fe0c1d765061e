//! Changes to access lists by a reload.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::MutexGuard;

use super::{Entry, Exports, Followed};
use crate::control_protocol::Reloaded;
use crate::daemon::access::{Holders, ServerAccess};
use crate::engine::message::{AdminReply, AdminRequest};
use crate::settings::{AccessRule, ExportSpec, Settings};

impl Exports {
    /// Adopts the access lists of a configuration; only their restrictions apply until
    /// [`Self::grant_access`]. An export that a command added keeps its list; an export that left
    /// the configuration is available only to the sessions that have it open. Records the
    /// differences in `done`, and returns the number of the configuration.
    ///
    /// The lock is that of [`begin_check`](super::access::ExportAccess::begin_check): an export has
    /// both a list and an entry among the exports, or neither.
    pub(in crate::daemon) fn narrow_access(
        &self,
        set: &Settings,
        _checking_losses: &MutexGuard<'_, ()>,
        done: &mut Reloaded,
    ) -> u64 {
        let (others, withdrawn) = self.exports_besides(set);
        let mut number = 0;
        self.access.change(|access| {
            let before = access.clone();
            access.narrow_to(set, others, &withdrawn);
            record_changes(&before, access, done);
            number = access.configuration();
        });
        number
    }

    /// Grants the permissions in the configuration with that number for the exports that match it.
    /// The caller must hold the turn of all exports.
    pub(in crate::daemon) fn grant_access(&self, number: u64, wanted: &[ExportSpec]) {
        let entries = self.entries();
        let wanted: BTreeMap<&str, &ExportSpec> =
            wanted.iter().map(|spec| (spec.name(), spec)).collect();
        let as_wanted = |name: &str, entry: &Entry| match wanted.get(name) {
            Some(spec) => entry.is_as_set(spec) && self.standing(entry) == Followed::Same,
            None => !entry.configured,
        };
        // Done before the lists are locked, because it asks the control shard which exports are in
        // use.
        let done = entries.iter().filter(|(name, entry)| as_wanted(name, entry));
        // A failed export is given its list before it is served.
        let failed = self.failed.specs();
        let failed = failed.iter().filter(|(name, spec)| wanted.get(&***name) == Some(spec));
        let failed = failed.map(|(name, _)| &**name);
        let done: Vec<&str> = done.map(|(name, _)| &**name).chain(failed).collect();
        self.access.change(|access| access.grant(number, done.into_iter()));
    }

    /// Returns the access lists that [`Self::narrow_access`] would result in, and records the
    /// differences in `done`.
    pub(in crate::daemon) fn preview_lists(
        &self,
        set: &Settings,
        done: &mut Reloaded,
    ) -> ServerAccess {
        let (others, withdrawn) = self.exports_besides(set);
        let before = self.access.lists();
        let mut access = before.clone();
        access.narrow_to(set, others, &withdrawn);
        record_changes(&before, &access, done);
        access
    }

    /// Exports that a configuration does not name: access lists of exports that commands have
    /// added, and holders of exports removed from the configuration.
    fn exports_besides(
        &self,
        set: &Settings,
    ) -> (BTreeMap<String, Vec<AccessRule>>, BTreeMap<String, Holders>) {
        let mut known = self.entries.names();
        // An export that a change has closed may fail to reopen. A failed export may be opened
        // before the next reload, so its list must be kept too.
        known.extend(self.failed.names());
        let lists = self.access.lists();
        let wanted: BTreeSet<&str> = set.export.iter().map(ExportSpec::name).collect();
        let (configured, others): (Vec<_>, Vec<_>) =
            known.into_iter().partition(|(_, configured)| *configured);
        let others = others.into_iter().map(|(name, _)| (name.clone(), lists.of(&name))).collect();
        let gone = configured.into_iter().map(|(name, _)| name);
        let gone = gone.filter(|name| !wanted.contains(name.as_str())).collect();
        (others, self.holders_of(gone))
    }

    /// Sessions that have these exports open.
    fn holders_of(&self, gone: Vec<String>) -> BTreeMap<String, Holders> {
        if gone.is_empty() {
            return BTreeMap::new();
        }
        let asked = self.control.ask(AdminRequest::Holders(gone.clone()), |answer| match answer {
            AdminReply::Holders(holders) => Some(holders),
            _ => None,
        });
        // Clients that lose access must not benefit if the control shard is busy.
        asked.unwrap_or_else(|why| {
            tracing::warn!(
                "exports removed from the configuration admit no client: cannot query which \
                 sessions have them open: {why}"
            );
            gone.into_iter().map(|name| (name, Holders::new())).collect()
        })
    }
}

/// Records how the lists after a reload differ from the previous lists.
fn record_changes(before: &ServerAccess, after: &ServerAccess, done: &mut Reloaded) {
    done.access_changed = before.changes_to(after);
    done.unlisted_changed = before.unlisted_change_to(after);
    done.losses.closed = before.closed_in(after);
}
