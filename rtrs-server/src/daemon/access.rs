//! The access lists of a running server: what settings and commands make of them.
//!
//! Owns [`ServerAccess`], the lists of the server itself and of its exports. A list counts from the
//! moment it is set, whether or not its export can be opened. What is not listed stays closed: a
//! server that had a list does not become open to everyone when a command takes the last one away,
//! only when its configuration has none.

use std::collections::BTreeMap;
use std::io::Write;

use crate::access_list::{AccessPolicy, AccessRule, Unlisted};
use crate::plan::has_keys;
use crate::settings::{ExportSpec, Settings};

/// The access lists of a server.
#[derive(Debug)]
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

/// What an operator should know of the access lists, one text each.
pub(crate) fn warnings(set: &Settings) -> Vec<String> {
    if set.ping_only {
        return Vec::new();
    }
    let mut rules = set.access.iter().chain(set.export.iter().flat_map(|spec| &spec.access));
    let mut all = Vec::new();
    if rules.clone().next().is_none() && !has_keys(set) && !set.insecure_open {
        all.push(
            "no access list: everyone who reaches the server can read and write all exports; set \
             access (for example --access anyone@10.0.0.0/24:rw) or use keys (docs/SECURITY.md), \
             or silence this warning with --insecure-open"
                .to_owned(),
        );
    }
    if let Some(name) = rules.find_map(AccessRule::name).filter(|_| !has_keys(set)) {
        all.push(format!(
            "the access rule for {name:?} lets nobody in: without certificates or keys no client \
             has a name; set tls-dir or key-file, or name addresses (anyone@NETWORK)"
        ));
    }
    all
}

/// Warns the operator, in the log and, if the log takes no warnings, on stderr.
pub(super) fn warn(set: &Settings) {
    for warning in warnings(set) {
        if tracing::enabled!(tracing::Level::WARN) {
            tracing::warn!("{warning}");
        } else {
            // Nobody may be there to read it.
            let _ = writeln!(std::io::stderr(), "warning: {warning}");
        }
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

    #[test]
    fn warnings_name_what_is_open_and_what_nobody_is() {
        let mut set = Settings { export: vec![spec("v=mem:1M")], ..Settings::default() };
        assert!(warnings(&set)[0].contains("everyone"));
        set.insecure_open = true;
        assert_eq!(warnings(&set), [""; 0]);
        set.insecure_open = false;
        set.export = vec![spec("v=mem:1M,access=anyone@10.0.0.0/8:rw")];
        assert_eq!(warnings(&set), [""; 0]);
        set.access = vec!["db1:rw".parse().unwrap()];
        assert!(warnings(&set)[0].contains("\"db1\" lets nobody in"));
        set.ping_only = true;
        assert_eq!(warnings(&set), [""; 0]);
    }
}
