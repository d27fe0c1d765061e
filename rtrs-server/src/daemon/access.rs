//! The access lists of a running server: what settings and commands make of them.
//!
//! Owns [`ServerAccess`], the lists of the server itself and of its exports. A list counts from the
//! moment it is set, whether or not its export can be opened. What is not listed stays closed: a
//! server that had a list does not become open to everyone when a command takes the last one away,
//! only when its configuration has none.

use std::collections::{BTreeMap, BTreeSet};

use crate::access_list::{AccessPolicy, AccessRule, ListChange, Unlisted};
use crate::plan::has_keys;
use crate::settings::{ExportSpec, Settings};

/// The access lists of a server.
#[derive(Clone, Debug)]
pub(super) struct ServerAccess {
    server: Vec<AccessRule>,
    /// By the name of the export.
    exports: BTreeMap<String, Vec<AccessRule>>,
    /// Clients can prove who they are.
    has_keys: bool,
    /// There was a list since the configuration was last read.
    closed: bool,
    /// Which configuration of certificates and keys is in use.
    pub(super) generation: u64,
}

impl ServerAccess {
    /// Of a server that starts.
    pub(super) fn new(set: &Settings) -> Self {
        let (server, exports) = (Vec::new(), BTreeMap::new());
        let has_keys = has_keys(set);
        let mut access = Self { server, exports, has_keys, closed: false, generation: 0 };
        access.configure(set, BTreeMap::new());
        access
    }

    /// The lists are those of the configuration, and of exports that commands have added.
    pub(super) fn configure(&mut self, set: &Settings, others: BTreeMap<String, Vec<AccessRule>>) {
        self.server.clone_from(&set.access);
        self.exports = others;
        for spec in &set.export {
            self.exports.insert(spec.name().to_owned(), spec.access.clone());
        }
        self.closed = self.has_list();
    }

    /// The list of the server itself.
    pub(super) fn server(&self) -> &[AccessRule] {
        &self.server
    }

    /// The list of an export.
    pub(super) fn of(&self, export: &str) -> Vec<AccessRule> {
        self.exports.get(export).cloned().unwrap_or_default()
    }

    /// An export has another list now.
    pub(super) fn set(&mut self, spec: &ExportSpec) {
        self.exports.insert(spec.name().to_owned(), spec.access.clone());
        self.closed |= self.has_list();
    }

    /// There is no such export any more.
    pub(super) fn forget(&mut self, export: &str) {
        self.exports.remove(export);
    }

    /// The lists that are others in `now`.
    pub(super) fn changes_to(&self, now: &Self) -> Vec<ListChange> {
        let names: BTreeSet<&String> = self.exports.keys().chain(now.exports.keys()).collect();
        let exports = names.into_iter().map(|name| ListChange {
            export: Some(name.clone()),
            before: self.of(name),
            after: now.of(name),
        });
        let (before, after) = (self.server.clone(), now.server.clone());
        let server = ListChange { export: None, before, after };
        let all = std::iter::once(server).chain(exports);
        all.filter(|change| change.before != change.after).collect()
    }

    fn has_list(&self) -> bool {
        !self.server.is_empty() || self.exports.values().any(|list| !list.is_empty())
    }

    /// Who may open what.
    pub(super) fn policy(&self) -> AccessPolicy {
        let unlisted = match (self.closed, self.has_keys) {
            (true, _) => Unlisted::Nobody,
            (false, true) => Unlisted::Named,
            (false, false) => Unlisted::Everyone,
        };
        let lists = self.exports.iter().map(|(name, list)| (name.as_str(), &list[..]));
        AccessPolicy::new(&self.server, lists, unlisted).with_generation(self.generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> ExportSpec {
        text.parse().unwrap()
    }

    #[test]
    fn only_the_configuration_opens_a_server_that_had_a_list() {
        let mut access = ServerAccess::new(&Settings::default());
        assert!(access.policy().is_open());
        access.set(&spec("v=mem:1M,access=anyone:ro"));
        assert!(!access.policy().is_open());
        access.forget("v");
        assert!(!access.policy().is_open(), "the list went with its export");
        access.configure(&Settings::default(), BTreeMap::new());
        assert!(access.policy().is_open());
    }

    #[test]
    fn a_list_counts_whether_or_not_its_export_is_there() {
        let set = Settings {
            export: vec![spec("v=/none/there,access=anyone:ro"), spec("w=mem:1M")],
            ..Settings::default()
        };
        assert!(!ServerAccess::new(&set).policy().is_open());
    }
}
