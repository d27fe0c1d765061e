//! Access lists of a reload.

use std::collections::{BTreeMap, BTreeSet};

use super::{Entry, Exports, Followed};
use crate::control_protocol::Reloaded;
use crate::daemon::access::{Holders, ServerAccess};
use crate::engine::message::{AdminReply, AdminRequest};
use crate::settings::{AccessRule, ExportSpec, Settings};

impl Exports {
    /// Adopts the access lists of a configuration, of which only the restrictions apply until
    /// [`Self::grant_access`]. An export that a command added keeps its list; one that left the
    /// configuration is available only to the sessions that have it open. Records the differences
    /// in `done`, and returns the number of the configuration.
    pub(in crate::daemon) fn narrow_access(&self, set: &Settings, done: &mut Reloaded) -> u64 {
        let (others, withdrawn) = (self.others(), self.withdrawn_by(set));
        let mut number = 0;
        self.access.change(|access| {
            let before = access.clone();
            access.narrow_to(set, others, &withdrawn);
            record_changes(&before, access, done);
            number = access.configuration();
        });
        number
    }

    /// Applies the permissions of the configuration with that number to the exports that match it.
    /// The caller has the turn of all exports.
    pub(in crate::daemon) fn grant_access(&self, number: u64, wanted: &[ExportSpec]) {
        let entries = self.entries();
        let wanted: BTreeMap<&str, &ExportSpec> =
            wanted.iter().map(|spec| (spec.name(), spec)).collect();
        let as_wanted = |name: &str, entry: &Entry| match wanted.get(name) {
            Some(spec) => entry.is_as_set(spec) && self.standing(entry) == Followed::Same,
            None => !entry.configured,
        };
        // Done before the lists are locked: the control shard is asked whether an export is in use.
        let done = entries.iter().filter(|(name, entry)| as_wanted(name, entry));
        // A failed export gets its list before it is served.
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
        let (others, withdrawn) = (self.others(), self.withdrawn_by(set));
        let before = self.access.lists();
        let mut access = before.clone();
        access.narrow_to(set, others, &withdrawn);
        record_changes(&before, &access, done);
        access
    }

    /// Access lists of exports that commands have added.
    fn others(&self) -> BTreeMap<String, Vec<AccessRule>> {
        let others = self.entries().into_iter().filter(|(_, entry)| !entry.configured);
        let others = others.map(|(name, entry)| (name, entry.spec));
        let others = others.chain(self.failed.specs_as(false));
        others.map(|(name, spec)| (name, spec.access)).collect()
    }

    /// Exports that are no longer in the configuration, and the sessions that have them open.
    fn withdrawn_by(&self, set: &Settings) -> BTreeMap<String, Holders> {
        let wanted: BTreeSet<&str> = set.export.iter().map(ExportSpec::name).collect();
        let gone = self.entries().into_iter().filter(|(_, entry)| entry.configured);
        // A failed export may be opened before the next reload: its list must not just vanish.
        let gone = gone.map(|(name, _)| name).chain(self.failed.specs_as(true).into_keys());
        let gone = gone.filter(|name| !wanted.contains(name.as_str()));
        let gone: Vec<String> = gone.collect();
        if gone.is_empty() {
            return BTreeMap::new();
        }
        let asked = self.control.ask(AdminRequest::Holders(gone.clone()), |answer| match answer {
            AdminReply::Holders(holders) => Some(holders),
            _ => None,
        });
        // Clients that lose access must not benefit from a control shard that is busy.
        asked.unwrap_or_else(|why| {
            tracing::warn!(
                "exports that left the configuration admit no client: cannot ask which sessions \
                 have them open: {why}"
            );
            gone.into_iter().map(|name| (name, Holders::new())).collect()
        })
    }
}

/// Records how the lists of a reload differ from those before.
fn record_changes(before: &ServerAccess, after: &ServerAccess, done: &mut Reloaded) {
    done.access_changed = before.changes_to(after);
    done.unlisted_changed = before.unlisted_change_to(after);
    done.losses.closed = before.closed_in(after);
}
