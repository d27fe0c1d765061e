//! User connections without a socket: new ones, and those opened for the answer to a request.

use std::collections::BTreeMap;

use super::client::ClientId;
use crate::proto::UserId;

const UNBOUND_MAX: usize = 256;

/// Connections without a socket, at most 256. Beyond that, the oldest connection of the user with
/// the most connections must be closed.
#[derive(Debug, Default)]
pub(super) struct UnboundClients {
    /// Oldest first.
    clients: BTreeMap<ClientId, UserId>,
    counts: BTreeMap<UserId, usize>,
}

impl UnboundClients {
    /// Adds a new connection. Returns a connection that must be closed to make room, if any.
    pub(super) fn add(&mut self, id: ClientId, user: UserId) -> Option<ClientId> {
        if self.clients.insert(id, user).is_none() {
            *self.counts.entry(user).or_default() += 1;
        }
        if self.clients.len() <= UNBOUND_MAX {
            return None;
        }
        let (most, _) = self.counts.iter().max_by_key(|(_, count)| **count)?;
        let (oldest, _) = self.clients.iter().find(|(_, user)| *user == most)?;
        let oldest = *oldest;
        self.remove(oldest);
        Some(oldest)
    }

    /// Removes a connection that was closed, or that has a socket now.
    pub(super) fn remove(&mut self, id: ClientId) {
        let Some(user) = self.clients.remove(&id) else { return };
        if let Some(count) = self.counts.get_mut(&user) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FEW: UserId = UserId(1000);
    const MANY: UserId = UserId(1001);

    #[test]
    fn oldest_connection_is_evicted() {
        let mut unbound = UnboundClients::default();
        assert!((1..257).all(|id| unbound.add(id, MANY).is_none()));
        unbound.remove(1);
        assert_eq!(unbound.add(257, MANY), None);
        assert_eq!(unbound.add(257, MANY), None, "it is counted once");
        assert_eq!(unbound.add(258, MANY), Some(2));
    }

    #[test]
    fn a_user_with_many_connections_evicts_only_its_own() {
        let mut unbound = UnboundClients::default();
        assert!((1..=10).all(|id| unbound.add(id, FEW).is_none()));
        let evicted: Vec<_> = (11..1000).filter_map(|id| unbound.add(id, MANY)).collect();
        assert!(evicted.iter().all(|id| *id > 10) && evicted.len() == 743, "{evicted:?}");
        assert!(unbound.add(1000, FEW).is_some_and(|id| id > 10 && id < 1000));
        (1..=1000).for_each(|id| unbound.remove(id));
        assert!(unbound.counts.is_empty());
    }
}
