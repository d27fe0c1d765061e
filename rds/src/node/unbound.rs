//! Connections of users without a socket: new ones, and those of requests.

use std::collections::BTreeSet;

use super::client::ClientId;

const UNBOUND_MAX: usize = 256;

/// Connections without a socket, at most 256. Beyond that, the oldest is to be closed.
#[derive(Debug, Default)]
pub(super) struct UnboundClients {
    /// Oldest first.
    clients: BTreeSet<ClientId>,
}

impl UnboundClients {
    /// Adds a new connection. Returns the one to close for it.
    pub(super) fn add(&mut self, id: ClientId) -> Option<ClientId> {
        self.clients.insert(id);
        if self.clients.len() > UNBOUND_MAX { self.clients.pop_first() } else { None }
    }

    /// Removes a connection that is closed, or has a socket now.
    pub(super) fn remove(&mut self, id: ClientId) {
        self.clients.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_connection_is_evicted() {
        let mut unbound = UnboundClients::default();
        assert!((1..257).all(|id| unbound.add(id).is_none()));
        unbound.remove(1);
        assert_eq!(unbound.add(257), None);
        assert_eq!(unbound.add(258), Some(2));
    }
}
