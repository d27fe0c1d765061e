//! Rings of users: which ones the node polls, and which ones wake it.

use rtrs_base::time::Instant;

use super::super::client::{Client, ClientId};
use super::Clients;
use crate::channel::NodeRing;
use crate::proto::Node;

impl Clients {
    /// Whether any ring that the node polls holds a message.
    pub(in crate::node) fn has_ring_input(&self) -> bool {
        self.rings.iter().filter_map(|id| self.clients.get(id)).any(Client::has_ring_input)
    }

    /// Reads the rings that the node polls. Returns true if any had a message.
    pub(super) fn read_rings(&mut self, now: Instant, node: &mut Node) -> bool {
        let has_input = |id: &ClientId| self.clients.get(id).is_some_and(Client::has_ring_input);
        let ready: Vec<ClientId> = self.rings.iter().copied().filter(has_input).collect();
        for id in &ready {
            self.read(now, node, *id, false);
        }
        !ready.is_empty()
    }

    /// Starts polling the ring of a user, or stops while its socket is full.
    pub(super) fn plan_ring(&mut self, id: ClientId) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let is_full = client.bound.as_ref().is_some_and(|bound| bound.is_full);
        let Some(ring) = client.ring_in_use() else { return };
        ring.awake();
        if is_full {
            self.rings.remove(&id);
        } else {
            self.rings.insert(id);
        }
    }

    /// Prepares a sleep: the next message in any ring wakes the node. Returns false if any ring
    /// holds a message.
    pub(in crate::node) fn prepare_ring_sleep(&mut self) -> bool {
        let mut ring_of = |id: &ClientId, act: fn(&mut NodeRing) -> bool| {
            let bound = self.clients.get_mut(id).and_then(|client| client.bound.as_mut());
            bound.is_none_or(|bound| act(&mut bound.flow.ring))
        };
        if self.rings.iter().all(|id| ring_of(id, NodeRing::prepare_sleep)) {
            self.rings.clear();
            return true;
        }
        for id in &self.rings {
            ring_of(id, |ring| {
                ring.awake();
                true
            });
        }
        false
    }
}
