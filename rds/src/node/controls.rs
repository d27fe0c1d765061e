//! Control connections, which carry requests about sockets.
//!
//! A process opens one when it binds its first socket, and keeps it open, because the process may
//! later lose permission to connect, or change its root directory. Each holder of a socket can let
//! a connection change that socket, and no other.

use std::collections::{BTreeMap, BTreeSet};

use super::client::ClientId;
use crate::channel::TallyReader;
use crate::proto::{Refused, Shares, Use, UserId};

/// Maximum number of control connections per socket; beyond it, the oldest loses the socket.
const HOLDERS_MAX: usize = 64;
/// Number of control connections in addition to [`PER_SOCKET`] for each socket that a node may
/// have.
const SPARE: usize = 128;
/// Number of control connections for each socket that a node may have: one user's share of them is
/// still enough for one process per socket.
const PER_SOCKET: usize = 2;

/// Returns the maximum number of control connections for a node with this many sockets.
pub(crate) fn controls_max(sockets: usize) -> usize {
    PER_SOCKET * sockets + SPARE
}

/// A control connection.
#[derive(Debug)]
struct Control {
    user: UserId,
    /// Sockets that the connection may change.
    sockets: BTreeSet<ClientId>,
}

/// Control connections of a node, and the sockets that each may change.
#[derive(Debug)]
pub(super) struct Controls {
    controls: BTreeMap<ClientId, Control>,
    /// Number of control connections of each user.
    shares: Shares,
    limit: usize,
    /// Control connections by socket, oldest first.
    holders: BTreeMap<ClientId, Vec<ClientId>>,
    /// Refused sends of processes with an open control connection.
    tallies: BTreeMap<ClientId, TallyReader>,
    /// Refused sends of processes whose control connection has closed.
    refused: Refused,
}

impl Controls {
    /// Creates the set of control connections of a node with this many sockets.
    pub(super) fn new(sockets_max: usize) -> Self {
        Self {
            controls: BTreeMap::new(),
            shares: Shares::default(),
            limit: controls_max(sockets_max),
            holders: BTreeMap::new(),
            tallies: BTreeMap::new(),
            refused: Refused::default(),
        }
    }

    /// Whether a user may have one more control connection.
    pub(super) fn has_room(&self, user: UserId) -> bool {
        let whole = Use { limit: self.limit, total: self.controls.len() };
        whole.total < whole.limit && self.shares.has_room(user, whole, 1)
    }

    /// Lets a control connection of a user change a socket. Returns a control connection that lost
    /// its last socket as a result, if any.
    pub(super) fn grant(
        &mut self,
        control: ClientId,
        user: UserId,
        socket: ClientId,
    ) -> Option<ClientId> {
        let shares = &mut self.shares;
        let entry = self.controls.entry(control).or_insert_with(|| {
            shares.charge(user, 1);
            Control { user, sockets: BTreeSet::new() }
        });
        if !entry.sockets.insert(socket) {
            return None;
        }
        let holders = self.holders.entry(socket).or_default();
        holders.push(control);
        let oldest = (holders.len() > HOLDERS_MAX).then(|| holders.remove(0))?;
        self.revoke(oldest, socket).then_some(oldest)
    }

    /// Whether a connection is a control connection.
    pub(super) fn contains(&self, control: ClientId) -> bool {
        self.controls.contains_key(&control)
    }

    /// Whether a control connection may change a socket.
    pub(super) fn may_change(&self, control: ClientId, socket: ClientId) -> bool {
        self.controls.get(&control).is_some_and(|entry| entry.sockets.contains(&socket))
    }

    /// Keeps the tally of refused sends by the process behind a control connection.
    pub(super) fn keep_tally(&mut self, control: ClientId, tally: TallyReader) {
        self.tallies.insert(control, tally);
    }

    /// Returns the refused sends of all processes.
    pub(super) fn refused(&self) -> Refused {
        self.tallies.values().fold(self.refused, |sum, tally| sum.plus(tally.read()))
    }

    /// Removes a closed connection of either kind. Returns the control connections that may no
    /// longer change any socket.
    pub(super) fn ended(&mut self, id: ClientId) -> Vec<ClientId> {
        if let Some(tally) = self.tallies.remove(&id) {
            self.refused = self.refused.plus(tally.read());
        }
        for socket in self.remove(id) {
            if let Some(holders) = self.holders.get_mut(&socket) {
                holders.retain(|control| *control != id);
            }
        }
        let mut idle = self.holders.remove(&id).unwrap_or_default();
        idle.retain(|control| self.revoke(*control, id));
        idle
    }

    /// Removes a socket from a control connection. Returns true if that was its last socket.
    fn revoke(&mut self, control: ClientId, socket: ClientId) -> bool {
        let Some(entry) = self.controls.get_mut(&control) else { return false };
        entry.sockets.remove(&socket);
        let is_last = entry.sockets.is_empty();
        if is_last {
            self.remove(control);
        }
        is_last
    }

    /// Removes a control connection. Returns the sockets that it could change.
    fn remove(&mut self, control: ClientId) -> BTreeSet<ClientId> {
        let Some(Control { user, sockets }) = self.controls.remove(&control) else {
            return BTreeSet::new();
        };
        self.shares.discharge(user, 1);
        sockets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USER: UserId = UserId(1000);

    #[test]
    fn a_control_connection_changes_only_the_sockets_that_it_was_granted() {
        let mut controls = Controls::new(100);
        assert_eq!((controls.grant(100, USER, 1), controls.grant(100, USER, 2)), (None, None));
        assert_eq!((controls.grant(200, USER, 2), controls.grant(200, USER, 2)), (None, None));
        assert!(controls.may_change(100, 1) && controls.may_change(200, 2));
        assert!(!controls.may_change(200, 1) && !controls.may_change(300, 1));
        assert_eq!(controls.ended(2), [200], "it has no socket left");
        assert!(!controls.contains(200) && controls.contains(100));
        assert!(controls.ended(100).is_empty() && !controls.may_change(100, 1));
        assert!(controls.ended(1).is_empty());
    }

    #[test]
    fn a_socket_has_a_limited_number_of_control_connections() {
        let mut controls = Controls::new(100);
        let oldest: Vec<_> =
            (100..166).filter_map(|control| controls.grant(control, USER, 1)).collect();
        assert_eq!(oldest, [100, 101]);
        assert!(controls.may_change(102, 1) && !controls.contains(101));
        assert_eq!(controls.ended(1).len(), HOLDERS_MAX);
    }

    #[test]
    fn a_user_leaves_control_connections_for_others() {
        let mut controls = Controls::new(100);
        let mut count = 0;
        while controls.has_room(USER) {
            assert!(count < controls_max(100), "there is no limit");
            // Each of the user's sockets has several control connections.
            controls.grant(1000 + count as ClientId, USER, 1 + (count / 50) as ClientId);
            count += 1;
        }
        assert_eq!(count, 246, "three quarters, which is more than there are sockets");
        assert!(controls.has_room(UserId(1001)));
        assert_eq!(controls.ended(1).len(), 50);
        assert!(controls.has_room(USER), "its first socket is closed");
    }
}
