//! The access lists of a running server: what settings and commands make of them.
//!
//! Owns [`ServerAccess`], the list of the server itself. What is open stays closed to who is not
//! listed: a server that had a list does not become open to everyone when a command takes the last
//! one away, only when its configuration has none.

use std::io::Write;

use crate::access_list::{AccessPolicy, AccessRule};
use crate::settings::{ExportSpec, Settings};

/// The access list of the server, beside those of its exports.
#[derive(Debug)]
pub(super) struct ServerAccess {
    pub(super) rules: Vec<AccessRule>,
    /// There was a list since the configuration was last read.
    closed: bool,
}

impl ServerAccess {
    /// Of a server that starts.
    pub(super) fn new(rules: Vec<AccessRule>) -> Self {
        Self { rules, closed: false }
    }

    /// The configuration was applied: without any list in it, the server is open.
    pub(super) fn forget(&mut self) {
        self.closed = false;
    }

    /// Who may open what, with the lists of these exports.
    pub(super) fn policy<'a>(
        &mut self,
        exports: impl Iterator<Item = &'a ExportSpec>,
    ) -> AccessPolicy {
        let lists = exports.map(|spec| (spec.name(), &spec.access[..]));
        let policy = AccessPolicy::new(&self.rules, lists).closed(self.closed);
        self.closed = !policy.is_open();
        policy
    }
}

/// What an operator should know of the access lists, one text each.
pub(crate) fn warnings(set: &Settings) -> Vec<String> {
    if set.ping_only {
        return Vec::new();
    }
    let mut rules = set.access.iter().chain(set.export.iter().flat_map(|spec| &spec.access));
    let mut all = Vec::new();
    if rules.clone().next().is_none() && !set.insecure_open {
        all.push(
            "no access list: everyone who reaches the server can read and write all exports; set \
             access (for example --access anyone@10.0.0.0/24:rw), or silence this warning with \
             --insecure-open"
                .to_owned(),
        );
    }
    if let Some(name) = rules.find_map(AccessRule::name) {
        all.push(format!(
            "the access rule for {name:?} lets nobody in: no portal authenticates clients; name \
             addresses (anyone@NETWORK)"
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
        let mut access = ServerAccess::new(Vec::new());
        assert!(access.policy([].iter()).is_open());
        let listed = spec("v=mem:1M,access=anyone:ro");
        assert!(!access.policy([&listed].into_iter()).is_open());
        assert!(!access.policy([].iter()).is_open(), "the list went with its export");
        access.forget();
        assert!(access.policy([].iter()).is_open());
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
