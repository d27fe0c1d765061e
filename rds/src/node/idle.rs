//! Connections of users without a socket: new ones, requests, and those kept for requests.

use std::collections::BTreeSet;

use super::client::ClientId;

/// Maximum number of connections that are new, or that requests use.
const UNBOUND_MAX: usize = 256;
/// Maximum number of connections that users keep for requests.
const KEPT_MAX: usize = 512;

/// Connections without a socket. Beyond each limit, the oldest is to be closed.
#[derive(Debug, Default)]
pub(super) struct IdleClients {
    /// Oldest first.
    unbound: BTreeSet<ClientId>,
    /// Oldest first.
    kept: BTreeSet<ClientId>,
}

impl IdleClients {
    /// Adds a new connection. Returns the one to close for it.
    pub(super) fn add(&mut self, id: ClientId) -> Option<ClientId> {
        self.unbound.insert(id);
        if self.unbound.len() > UNBOUND_MAX { self.unbound.pop_first() } else { None }
    }

    /// Keeps a connection for requests. Returns the one to close for it.
    pub(super) fn keep(&mut self, id: ClientId) -> Option<ClientId> {
        self.unbound.remove(&id);
        self.kept.insert(id);
        if self.kept.len() > KEPT_MAX { self.kept.pop_first() } else { None }
    }

    /// Removes a connection that is closed, or has a socket now.
    pub(super) fn remove(&mut self, id: ClientId) {
        self.unbound.remove(&id);
        self.kept.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_connections_are_evicted_only_by_others_of_their_kind() {
        let mut idle = IdleClients::default();
        assert_eq!(idle.add(1), None);
        assert_eq!(idle.keep(1), None);
        assert!((2..258).all(|id| idle.add(id).is_none()));
        assert_eq!(idle.add(258), Some(2));
        idle.remove(3);
        assert_eq!(idle.add(259), None);
        let evicted: Vec<_> = (1000..1512).filter_map(|id| idle.keep(id)).collect();
        assert_eq!(evicted, [1]);
    }
}
