//! Control connections: those that requests about sockets come through.
//!
//! A process opens one when it binds its first socket, and keeps it: later it may have lost the
//! permission to connect, or its root directory. Each holder of a socket can let a connection
//! change that socket, and no other.

use std::collections::{BTreeMap, BTreeSet};

use super::client::ClientId;
use crate::channel::TallyReader;
use crate::proto::Refused;

/// Maximum number of control connections of a socket; beyond it, the oldest loses the socket.
const HOLDERS_MAX: usize = 64;

/// Which control connections may change which sockets.
#[derive(Debug, Default)]
pub(super) struct Controls {
    sockets: BTreeMap<ClientId, BTreeSet<ClientId>>,
    /// Control connections by socket, oldest first.
    holders: BTreeMap<ClientId, Vec<ClientId>>,
    /// Refused sends of the processes of control connections.
    tallies: BTreeMap<ClientId, TallyReader>,
    /// Refused sends of processes whose control connection is closed.
    refused: Refused,
}

impl Controls {
    /// Lets a control connection change a socket. Returns another one that may change none any
    /// more.
    pub(super) fn grant(&mut self, control: ClientId, socket: ClientId) -> Option<ClientId> {
        if !self.sockets.entry(control).or_default().insert(socket) {
            return None;
        }
        let holders = self.holders.entry(socket).or_default();
        holders.push(control);
        let oldest = (holders.len() > HOLDERS_MAX).then(|| holders.remove(0))?;
        self.revoke(oldest, socket).then_some(oldest)
    }

    /// Whether a connection is a control connection.
    pub(super) fn contains(&self, control: ClientId) -> bool {
        self.sockets.contains_key(&control)
    }

    /// Whether a control connection may change a socket.
    pub(super) fn may_change(&self, control: ClientId, socket: ClientId) -> bool {
        self.sockets.get(&control).is_some_and(|sockets| sockets.contains(&socket))
    }

    /// Keeps the refused sends of the process of a control connection.
    pub(super) fn keep_tally(&mut self, control: ClientId, tally: TallyReader) {
        self.tallies.insert(control, tally);
    }

    /// Returns the sends that all processes were refused.
    pub(super) fn refused(&self) -> Refused {
        self.tallies.values().fold(self.refused, |sum, tally| sum.plus(tally.read()))
    }

    /// Removes a closed connection of either kind. Returns the control connections that may change
    /// no socket any more.
    pub(super) fn ended(&mut self, id: ClientId) -> Vec<ClientId> {
        if let Some(tally) = self.tallies.remove(&id) {
            self.refused = self.refused.plus(tally.read());
        }
        for socket in self.sockets.remove(&id).unwrap_or_default() {
            if let Some(holders) = self.holders.get_mut(&socket) {
                holders.retain(|control| *control != id);
            }
        }
        let mut idle = self.holders.remove(&id).unwrap_or_default();
        idle.retain(|control| self.revoke(*control, id));
        idle
    }

    /// Takes a socket from a control connection. Returns true if that was its last one.
    fn revoke(&mut self, control: ClientId, socket: ClientId) -> bool {
        let Some(sockets) = self.sockets.get_mut(&control) else { return false };
        sockets.remove(&socket);
        let is_last = sockets.is_empty();
        if is_last {
            self.sockets.remove(&control);
        }
        is_last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_connection_changes_only_the_sockets_that_it_was_granted() {
        let mut controls = Controls::default();
        assert_eq!((controls.grant(100, 1), controls.grant(100, 2)), (None, None));
        assert_eq!((controls.grant(200, 2), controls.grant(200, 2)), (None, None));
        assert!(controls.may_change(100, 1) && controls.may_change(200, 2));
        assert!(!controls.may_change(200, 1) && !controls.may_change(300, 1));
        assert_eq!(controls.ended(2), [200], "it has no socket any more");
        assert!(!controls.contains(200) && controls.contains(100));
        assert!(controls.ended(100).is_empty() && !controls.may_change(100, 1));
        assert!(controls.ended(1).is_empty());
    }

    #[test]
    fn a_socket_has_a_limited_number_of_control_connections() {
        let mut controls = Controls::default();
        let oldest: Vec<_> = (100..166).filter_map(|control| controls.grant(control, 1)).collect();
        assert_eq!(oldest, [100, 101]);
        assert!(controls.may_change(102, 1) && !controls.contains(101));
        assert_eq!(controls.ended(1).len(), HOLDERS_MAX);
    }
}
