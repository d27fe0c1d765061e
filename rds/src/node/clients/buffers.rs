//! Buffers of users' sockets: what users have taken, and what the board shows them of the buffers.

use rtrs_base::time::Instant;

use super::super::client::ClientId;
use super::Clients;
use super::delivery::check_unread;
use crate::proto::Node;

impl Clients {
    /// Applies what users have taken. Call this before the messages of peers are handled; otherwise
    /// those would find the buffers fuller than they are.
    pub(in crate::node) fn look(&mut self, node: &mut Node) {
        let mut clients = std::mem::take(&mut self.untaken.clients);
        clients.retain(|id| self.settle(node, *id));
        self.untaken.clients = clients;
    }

    /// Publishes what the buffers of users have released. Call this before the events of sockets
    /// that have room.
    pub(in crate::node) fn release(&mut self, node: &mut Node) {
        for socket in node.ports_mut().take_freed() {
            if let Some(id) = self.by_socket.get(&socket).copied() {
                self.settle(node, id);
            }
        }
    }

    /// Applies what the users of a socket have taken, and publishes the state of its buffers.
    /// Returns whether there is more to take.
    pub(super) fn settle(&mut self, node: &mut Node, id: ClientId) -> bool {
        let client = self.clients.get_mut(&id);
        let Some(bound) = client.and_then(|client| client.bound.as_mut()) else { return false };
        let mut is_published = false;
        loop {
            let taken = bound.flow.take();
            if taken > 0 {
                node.taken(bound.id, taken);
            } else if is_published {
                break;
            }
            let Some(buffers) = node.ports().buffer_use(bound.id) else { return false };
            // Below half of the buffer, the port is no longer congested.
            let excess = (buffers.waiting + 1).saturating_sub(buffers.rcvbuf / 2);
            let mark = buffers.is_congested.then(|| bound.flow.mark(excess));
            self.board.set_flow(bound.slot, bound.flow.released(buffers.in_flight), mark);
            if mark.is_none() {
                self.untaken.congested.remove(&id);
                break;
            }
            // Users that took messages before the mark was published do not report that.
            self.untaken.congested.insert(id);
            is_published = true;
        }
        bound.flow.has_untaken()
    }

    /// Checks periodically what users that may have been killed have taken.
    pub(super) fn check_untaken(&mut self, now: Instant, node: &mut Node) {
        let Some(due) = self.untaken.take_due(now) else { return };
        for id in due.waiting {
            self.take_rest(node, id);
            self.deliver(now, node, id);
        }
        for id in due.unread {
            let Some(client) = self.clients.get_mut(&id) else { continue };
            let checked = check_unread(client);
            if *checked.as_ref().unwrap_or(&true) {
                self.untaken.add_unread(id);
            }
            self.starved.retry_token(now, id, checked.map(drop));
        }
    }

    /// Applies what the users of a socket have taken: everything, if the ring is empty.
    fn take_rest(&mut self, node: &mut Node, id: ClientId) {
        let bound = self.clients.get_mut(&id).and_then(|client| client.bound.as_mut());
        if let Some(bound) = bound.filter(|bound| bound.flow.outgoing.is_empty()) {
            node.taken(bound.id, bound.flow.take_all());
        }
        self.settle(node, id);
    }
}
