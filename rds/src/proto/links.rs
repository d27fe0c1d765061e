//! TCP connections of a node, and the orders for the code that owns their sockets.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use super::event::{LinkId, Order};
use super::link::{Link, Role};

/// All connections by number.
#[derive(Debug, Default)]
pub(super) struct Links {
    links: BTreeMap<LinkId, Link>,
    /// Links with data to write.
    ready: BTreeSet<LinkId>,
    orders: VecDeque<Order>,
    last: u64,
}

impl Links {
    /// Adds a connection that a peer has opened.
    pub(super) fn add(&mut self, peer: IpAddr, role: Role) -> LinkId {
        self.last += 1;
        let id = LinkId(self.last);
        self.links.insert(id, Link::new(peer, role));
        id
    }

    /// Adds a connection for a path to a peer, and queues the order to connect.
    pub(super) fn connect(&mut self, peer: IpAddr, path: usize, role: Role) -> LinkId {
        let link = self.add(peer, role);
        if let Some(added) = self.links.get_mut(&link) {
            added.path = path;
        }
        self.orders.push_back(Order::Connect { link, to: peer });
        link
    }

    /// Queues the order to close a connection, even after [`remove`](Self::remove).
    pub(super) fn order_close(&mut self, id: LinkId) {
        self.orders.push_back(Order::Close(id));
    }

    /// Removes a connection.
    pub(super) fn remove(&mut self, id: LinkId) -> Option<Link> {
        self.ready.remove(&id);
        self.links.remove(&id)
    }

    pub(super) fn get(&self, id: LinkId) -> Option<&Link> {
        self.links.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: LinkId) -> Option<&mut Link> {
        self.links.get_mut(&id)
    }

    /// Returns all connections in numerical order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Link> {
        self.links.values()
    }

    /// Returns the next order.
    pub(super) fn take_order(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// Marks a connection as having data to write.
    pub(super) fn wake(&mut self, id: LinkId) {
        self.ready.insert(id);
    }

    /// Returns the next connection with data to write.
    pub(super) fn next_ready(&mut self) -> Option<LinkId> {
        self.ready.pop_first()
    }

    /// Schedules our map to be sent on a connection.
    pub(super) fn send_map(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(&id) {
            link.map_is_due = true;
        }
        self.ready.insert(id);
    }

    /// Returns the connections to a peer that have received a map from a run with a different
    /// generation.
    pub(super) fn of_other_runs(&self, peer: IpAddr, generation: Option<u32>) -> Vec<LinkId> {
        let is_other = |link: &Link| {
            link.peer == peer && link.generation.is_some() && link.generation != generation
        };
        self.links.iter().filter(|(_, link)| is_other(link)).map(|(id, _)| *id).collect()
    }

    /// Whether any connection to a peer, except `id`, has received a map from this run.
    pub(super) fn has_run(&self, peer: IpAddr, generation: u32, id: LinkId) -> bool {
        let is_it = |link: &Link| link.peer == peer && link.generation == Some(generation);
        self.links.iter().any(|(other, link)| *other != id && is_it(link))
    }

    /// Schedules our map to be sent to all peers, over path 0 only: maps on several paths could
    /// arrive out of order.
    pub(super) fn send_map_to_all(&mut self) {
        for (id, link) in &mut self.links {
            if link.role == Role::Up && link.path == 0 {
                link.map_is_due = true;
                self.ready.insert(*id);
            }
        }
    }
}
