//! Exchange with the process about the paths' hosts, which it resolves outside the engine.

use crate::engine::session::Resolved;

/// Hosts to resolve again, and the results that the next poll applies.
#[derive(Debug, Default)]
pub(crate) struct Hosts {
    /// Names of paths whose addresses have all failed, each once.
    unreached: Vec<String>,
    found: Vec<(String, Resolved)>,
}

impl Hosts {
    /// Records that all addresses of a path have failed.
    pub(super) fn add_unreached(&mut self, path: &str) {
        if !self.unreached.iter().any(|known| known == path) {
            self.unreached.push(path.to_owned());
        }
    }

    /// Name of the next path whose host should be resolved again.
    pub(in crate::engine) fn take_unreached(&mut self) -> Option<String> {
        self.unreached.pop()
    }

    /// Records the addresses of a path's host, or the reason why it has none.
    pub(in crate::engine) fn resolved(&mut self, path: &str, found: Resolved) {
        self.found.push((path.to_owned(), found));
    }

    pub(super) fn take_found(&mut self) -> Option<(String, Resolved)> {
        self.found.pop()
    }
}
