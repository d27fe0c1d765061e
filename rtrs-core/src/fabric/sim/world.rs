//! Simulated world: nodes, links between their addresses, and one virtual clock.
//!
//! The world changes only when driven: [`World::step`] takes the next scheduled event, advances the
//! clock to it and runs it. All randomness comes from the seed; the same seed and the same calls
//! produce the same events at the same times. Used by the tests of both session ends and by the
//! conformance suite.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use parking_lot::Mutex;

use super::conn::{ACCEPTOR, CONNECTOR, SimConn, State};
use super::faults::Fault;
use super::link::LinkOptions;
use super::memory::Keys;
use super::net::{Event, Net, Node, WorldOptions};
use crate::time::{Duration, Instant};

/// A machine in a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeId(pub(super) usize);

/// Inner state of a world.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) net: Net,
    pub(super) conns: BTreeMap<u64, SimConn>,
    pub(super) next_conn: u64,
    pub(super) next_port: u16,
}

impl Inner {
    /// Runs `f` on a connection, and removes the connection if it has ended.
    pub(super) fn with<T>(
        &mut self,
        id: u64,
        f: impl FnOnce(&mut SimConn, &mut Net) -> T,
    ) -> Option<T> {
        let conn = self.conns.get_mut(&id)?;
        let result = f(conn, &mut self.net);
        if conn.is_over() {
            self.conns.remove(&id);
        }
        Some(result)
    }

    /// Closes connections whose requests were dropped without an answer.
    pub(super) fn close_dropped(&mut self) {
        let dropped = std::mem::take(&mut *self.net.dropped.lock());
        for id in dropped {
            self.with(id, |conn, net| {
                if conn.ends[ACCEPTOR].state == State::Requested {
                    conn.abort(net, ACCEPTOR);
                }
            });
        }
    }

    fn ids(&self, chosen: impl Fn(&SimConn) -> bool) -> Vec<u64> {
        self.conns.values().filter(|c| chosen(c)).map(|c| c.id).collect()
    }

    fn apply(&mut self, fault: Fault) {
        match fault {
            Fault::LinkDown(a, b) => {
                self.net.links.set_down(a, b, true);
                for id in self.ids(|conn| conn.runs_between(a, b)) {
                    self.with(id, SimConn::break_link);
                }
            }
            Fault::LinkUp(a, b) => self.net.links.set_down(a, b, false),
            Fault::Silence(from, to) => self.net.links.set_silent(from, to, true),
            Fault::Unsilence(from, to) => {
                self.net.links.set_silent(from, to, false);
                for id in self.ids(|conn| conn.runs_between(from, to)) {
                    self.with(id, |conn, net| {
                        for side in [CONNECTOR, ACCEPTOR] {
                            if conn.ends[side].addr.ip() == from {
                                conn.release(net, side);
                            }
                        }
                    });
                }
            }
            Fault::Change(from, to, options) => self.net.links.set(from, to, Some(options)),
            Fault::Restore(from, to) => self.net.links.set(from, to, None),
        }
    }

    fn step(&mut self) -> bool {
        self.close_dropped();
        let Some(((when, _), event)) = self.net.queue.pop_first() else { return false };
        self.net.now = self.net.now.max(when);
        match event {
            Event::Depart(id, side) => {
                self.with(id, |conn, net| conn.depart(net, side));
            }
            Event::Deliver(id, side) => {
                self.with(id, |conn, net| conn.deliver(net, side));
            }
            Event::Timer(id, side, timer) => {
                self.with(id, |conn, net| conn.timer(net, side, timer));
            }
            Event::Fault(fault) => self.apply(fault),
            Event::Emit(core, event) => self.net.emit(core, *event),
        }
        true
    }
}

/// A simulated world. Clones share the same world.
#[derive(Clone, Debug)]
pub struct World {
    pub(super) inner: Rc<RefCell<Inner>>,
}

impl World {
    /// Creates a world in which all randomness follows from `seed`.
    pub fn new(seed: u64) -> Self {
        Self::with_options(seed, WorldOptions::default())
    }

    /// Creates a world with these options.
    pub fn with_options(seed: u64, options: WorldOptions) -> Self {
        let net = Net::new(seed, options);
        let inner = Inner { net, conns: BTreeMap::new(), next_conn: 1, next_port: 40_000 };
        Self { inner: Rc::new(RefCell::new(inner)) }
    }

    /// Adds a machine with one address. Panics if the address is taken.
    pub fn node(&self, address: IpAddr) -> NodeId {
        let net = &mut self.inner.borrow_mut().net;
        assert!(net.node_of(address).is_none(), "{address} is taken");
        let keys = Arc::new(Mutex::new(Keys::new(net.prng.fork(), net.options.bounces)));
        net.nodes.push(Node { addresses: vec![address], keys });
        NodeId(net.nodes.len() - 1)
    }

    /// Adds another address to a machine. Panics if the address is taken.
    pub fn add_address(&self, node: NodeId, address: IpAddr) {
        let net = &mut self.inner.borrow_mut().net;
        assert!(net.node_of(address).is_none(), "{address} is taken");
        net.nodes[node.0].addresses.push(address);
    }

    /// Returns the number of bytes that a machine has registered now; a region counts once for each
    /// of its registrations.
    pub fn registered(&self, node: NodeId) -> usize {
        self.inner.borrow().net.keys(node.0).lock().registered()
    }

    /// Returns the current time.
    pub fn now(&self) -> Instant {
        self.inner.borrow().net.now
    }

    /// Runs the next scheduled event. Returns false if there is none.
    pub fn step(&self) -> bool {
        self.inner.borrow_mut().step()
    }

    /// Returns the time of the next scheduled event.
    pub fn next_event_time(&self) -> Option<Instant> {
        let mut inner = self.inner.borrow_mut();
        inner.close_dropped();
        inner.net.queue.first_key_value().map(|(&(when, _), _)| when.max(inner.net.now))
    }

    /// Runs all events scheduled up to `until`, then sets the clock to `until`. A time in the past
    /// has no effect.
    pub fn advance_to(&self, until: Instant) {
        while self.next_event_time().is_some_and(|when| when <= until) {
            self.step();
        }
        let net = &mut self.inner.borrow_mut().net;
        net.now = net.now.max(until);
    }

    /// Applies a change immediately.
    pub fn apply(&self, fault: Fault) {
        self.inner.borrow_mut().apply(fault);
    }

    /// Schedules a plan of changes.
    pub fn inject(&self, plan: &[(Instant, Fault)]) {
        let net = &mut self.inner.borrow_mut().net;
        for &(at, fault) in plan {
            net.at(at.max(net.now), Event::Fault(fault));
        }
    }

    /// Takes down the link between two addresses: messages on it are lost, its connections end
    /// after the link's `detect`, and new ones time out.
    pub fn link_down(&self, a: IpAddr, b: IpAddr) {
        self.apply(Fault::LinkDown(a, b));
    }

    /// Brings the link back up, for new connections.
    pub fn link_up(&self, a: IpAddr, b: IpAddr) {
        self.apply(Fault::LinkUp(a, b));
    }

    /// Delays reports of ended connections to the node with this address by `by`, as with a driver
    /// that is slow to destroy queue pairs. Work in flight is flushed immediately.
    pub fn linger(&self, address: IpAddr, by: Duration) {
        let net = &mut self.inner.borrow_mut().net;
        if let Some(node) = net.node_of(address) {
            net.linger.insert(node, by);
        }
    }

    /// Holds back everything from one address to another, without an event.
    pub fn silence(&self, from: IpAddr, to: IpAddr) {
        self.apply(Fault::Silence(from, to));
    }

    /// Delivers the messages that were held back, in order.
    pub fn unsilence(&self, from: IpAddr, to: IpAddr) {
        self.apply(Fault::Unsilence(from, to));
    }

    /// Sets the options of one direction between two addresses.
    pub fn set_link(&self, from: IpAddr, to: IpAddr, options: LinkOptions) {
        self.apply(Fault::Change(from, to, options));
    }

    /// Returns the options of one direction between two addresses.
    pub fn link(&self, from: IpAddr, to: IpAddr) -> LinkOptions {
        self.inner.borrow().net.links.options(from, to)
    }

    /// Cuts the power to a machine: its connections break silently (peers detect it by heartbeats),
    /// and its fabrics report nothing more and hold no queue pair. New fabrics of the node model
    /// its restart.
    pub fn crash(&self, node: NodeId) {
        let mut inner = self.inner.borrow_mut();
        for id in inner.ids(|conn| conn.ends.iter().any(|end| end.node == node.0)) {
            inner.with(id, |conn, net| {
                conn.broken |= !net.options.flights;
                for side in [CONNECTOR, ACCEPTOR] {
                    if conn.ends[side].node == node.0 {
                        conn.vanish(net, side);
                    }
                }
            });
        }
        let net = &mut inner.net;
        let cores = &net.cores;
        net.listeners.retain(|_, &mut core| cores[core].node != node.0);
        for core in net.cores.iter_mut().filter(|core| core.node == node.0) {
            core.events.clear();
            core.touched.clear();
            core.qps.clear();
        }
    }
}
