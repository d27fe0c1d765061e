//! Simulated provider: an in-memory fabric on a virtual clock, driven by one seed.
//!
//! The provider enforces the fabric's contract as strictly as a real device: keys, bounds, rights,
//! protection domains, queue limits, missing receives, flush on error, `Closed` last. Behavior that
//! may differ between providers is an option of the world ([`WorldOptions`]), for example when
//! sends complete and when binds take effect. [`LinkOptions`] and [`Fault`] describe the behavior
//! of networks. The module is used only by tests, and has no threads, real clocks or iteration in
//! hash order.
//!
//! Modules: `world.rs`, the public world; `net.rs`, the clock, the event queue and the shards;
//! `conn.rs`, a connection; `arrive.rs`, the effects of arriving messages; `memory.rs`, keys and
//! their checks; `link.rs`, links; `faults.rs`, faults.

mod arrive;
mod conn;
mod faults;
mod link;
mod memory;
mod net;
mod world;

use std::cell::RefCell;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;

pub use faults::{Fault, FaultOptions};
pub use link::LinkOptions;
pub use net::{BindMode, WorldOptions};
pub use world::{NodeId, World};

use super::{
    Access, BindResult, Capabilities, ConnRequest, ConnectParams, Fabric, FabricCounters,
    FabricError, FabricEvent, Listener, PRIVATE_DATA_MAX, PdUse, PrivateData, ProtectionDomain,
    QpLimits, Sge, Window, WorkRequest,
};
use crate::ids::QpNum;
use crate::mem::MemSlice;
use crate::time::Instant;
use conn::{ACCEPTOR, CONNECTOR, End, Job, Message, SimConn, State};
use memory::{SimPd, SimWindow};
use net::{CoreState, Event, Net, Ticket, Timer};
use world::Inner;

/// One shard's view of a node. Dropping the view acts like a process exit: peers see a reset.
#[derive(Debug)]
pub struct SimFabric {
    world: Rc<RefCell<Inner>>,
    core: usize,
    node: usize,
}

impl World {
    /// Creates the view of a node for a new shard.
    pub fn fabric(&self, node: NodeId) -> SimFabric {
        let net = &mut self.inner.borrow_mut().net;
        net.cores.push(CoreState { node: node.0, next_qp: 1, ..CoreState::default() });
        let core = net.cores.len() - 1;
        SimFabric { world: Rc::clone(&self.inner), core, node: node.0 }
    }
}

impl SimFabric {
    /// Runs `f` on a queue pair of this shard.
    fn with<T>(
        &self,
        qp: QpNum,
        f: impl FnOnce(&mut SimConn, &mut Net, usize) -> T,
    ) -> Result<T, FabricError> {
        let mut inner = self.world.borrow_mut();
        let &(id, side) = inner.net.cores[self.core].qps.get(&qp).ok_or(FabricError::QpState)?;
        inner.with(id, |conn, net| f(conn, net, side)).ok_or(FabricError::QpState)
    }

    /// Moves a queue pair to the error state at its oldest work request; with `reset`, the peer
    /// sees a reset. A queue pair that is unknown or not established does not change.
    pub fn fail(&mut self, qp: QpNum, reset: bool) {
        let _ = self.with(qp, |conn, net, side| conn.fail(net, side, reset));
    }

    /// Returns the number of a protection domain that belongs to this node.
    fn domain(&self, pd: &Arc<dyn ProtectionDomain>) -> Result<u64, FabricError> {
        let inner = self.world.borrow();
        match pd.as_any().downcast_ref::<SimPd>() {
            Some(pd) if Arc::ptr_eq(&pd.keys, inner.net.keys(self.node)) => Ok(pd.id),
            _ => Err(FabricError::LocalMemory),
        }
    }

    fn new_qp(&self, net: &mut Net, id: u64, side: usize) -> QpNum {
        let core = &mut net.cores[self.core];
        let qp = QpNum(core.next_qp);
        core.next_qp += 1;
        core.qps.insert(qp, (id, side));
        core.touched.push(qp);
        qp
    }

    /// Returns the window as this provider's own type.
    fn own<'w>(&self, window: &'w Arc<dyn Window>) -> Result<&'w SimWindow, FabricError> {
        window.as_any().downcast_ref().ok_or(FabricError::LocalMemory)
    }
}

fn refused(what: &str, address: SocketAddr, kind: io::ErrorKind) -> FabricError {
    FabricError::system(format!("{what} {address}"), io::Error::from(kind))
}

/// Takes the ticket out of a connection request, if the request belongs to this provider.
fn ticket(request: ConnRequest) -> Option<u64> {
    let mut ticket = request.inner.downcast::<Ticket>().ok()?;
    ticket.taken = true;
    Some(ticket.conn)
}

impl Listener for SimFabric {
    fn fits(&self, pd: &Arc<dyn ProtectionDomain>, _request: &ConnRequest) -> bool {
        self.domain(pd).is_ok()
    }

    fn listen(&mut self, address: SocketAddr) -> Result<SocketAddr, FabricError> {
        let net = &mut self.world.borrow_mut().net;
        let ours = net.nodes[self.node].addresses.contains(&address.ip());
        if !ours && !address.ip().is_unspecified() {
            return Err(refused("listen on", address, io::ErrorKind::AddrNotAvailable));
        }
        let mut address = address;
        if address.port() == 0 {
            let free = (20_000..u16::MAX).find(|&port| {
                !net.listeners.keys().any(|(n, a)| (*n, a.port()) == (self.node, port))
            });
            address.set_port(free.ok_or(FabricError::NoKey)?);
        }
        let taken = net.listeners.keys().any(|&(node, other)| {
            let matches = other.ip() == address.ip()
                || other.ip().is_unspecified()
                || address.ip().is_unspecified();
            node == self.node && other.port() == address.port() && matches
        });
        if taken {
            return Err(refused("listen on", address, io::ErrorKind::AddrInUse));
        }
        net.listeners.insert((self.node, address), self.core);
        Ok(address)
    }

    fn stop_listening(&mut self) {
        let net = &mut self.world.borrow_mut().net;
        let core = self.core;
        net.listeners.retain(|_, listener| *listener != core);
        net.cores[core].events.retain(|event| !matches!(event, FabricEvent::Request(_)));
    }

    fn accept(
        &mut self,
        _now: Instant,
        pd: &Arc<dyn ProtectionDomain>,
        request: ConnRequest,
        limits: QpLimits,
        private_data: &PrivateData,
    ) -> Result<QpNum, FabricError> {
        let pd = self.domain(pd)?;
        let peer = request.peer;
        let gone = || refused("accept from", peer, io::ErrorKind::ConnectionReset);
        let id = ticket(request).ok_or_else(gone)?;
        let mut inner = self.world.borrow_mut();
        let Inner { net, conns, .. } = &mut *inner;
        let conn = conns.get_mut(&id).ok_or_else(gone)?;
        let end = &conn.ends[ACCEPTOR];
        if end.state != State::Requested || end.node != self.node {
            return Err(gone());
        }
        let qp = self.new_qp(net, id, ACCEPTOR);
        let end = &mut conn.ends[ACCEPTOR];
        (end.core, end.qp, end.pd, end.limits) = (self.core, qp, pd, limits);
        (end.state, end.reply) = (State::Accepting, *private_data);
        net.after(net.options.accept_bound, Event::Timer(id, ACCEPTOR, Timer::Accept));
        Ok(qp)
    }

    fn reject(&mut self, _now: Instant, request: ConnRequest, private_data: &PrivateData) {
        let Some(id) = ticket(request) else { return };
        self.world.borrow_mut().with(id, |conn, net| {
            if conn.ends[ACCEPTOR].state == State::Requested {
                conn.transmit(net, ACCEPTOR, Message::Reject(*private_data));
                conn.ends[ACCEPTOR].state = State::Gone;
            }
        });
    }
}

impl Fabric for SimFabric {
    fn capabilities(&self) -> Capabilities {
        let options = &self.world.borrow().net.options;
        let (bounces, binds_are_requests) = (options.bounces, options.bind == BindMode::Pending);
        Capabilities { bounces, binds_are_requests, ..Capabilities::of("sim") }
    }

    fn alloc_pd(&mut self, _of: PdUse<'_>) -> Result<Arc<dyn ProtectionDomain>, FabricError> {
        let keys = Arc::clone(self.world.borrow().net.keys(self.node));
        Ok(Arc::new(SimPd::new(keys)))
    }

    fn connect(
        &mut self,
        _now: Instant,
        pd: &Arc<dyn ProtectionDomain>,
        params: &ConnectParams,
    ) -> Result<QpNum, FabricError> {
        let pd = self.domain(pd)?;
        let remote = params.remote;
        if params.private_data.as_bytes().len() > PRIVATE_DATA_MAX {
            return Err(refused("connect to", remote, io::ErrorKind::InvalidInput));
        }
        let mut inner = self.world.borrow_mut();
        let Inner { net, conns, next_conn, next_port } = &mut *inner;
        let addresses = &net.nodes[self.node].addresses;
        let local = params.local.unwrap_or(addresses[0]);
        if !addresses.contains(&local) || local.is_ipv4() != remote.is_ipv4() {
            return Err(refused("connect to", remote, io::ErrorKind::AddrNotAvailable));
        }
        let (id, port) = (*next_conn, *next_port);
        *next_conn += 1;
        *next_port = port.checked_add(1).unwrap_or(40_000);
        let mut end = End::new(self.node, SocketAddr::new(local, port));
        (end.core, end.pd, end.limits) = (self.core, pd, params.limits);
        end.state = State::Connecting;
        end.qp = self.new_qp(net, id, CONNECTOR);
        let qp = end.qp;
        let (lost, peer) = match net.node_of(remote.ip()) {
            Some(peer) => (net.links.is_down(local, remote.ip()), peer),
            None => (true, self.node),
        };
        let mut conn = SimConn::new(id, [end, End::new(peer, remote)]);
        conn.broken = lost;
        conn.transmit(net, CONNECTOR, Message::Request(params.private_data));
        net.after(params.timeout, Event::Timer(id, CONNECTOR, Timer::Connect));
        conns.insert(id, conn);
        Ok(qp)
    }

    fn post_send(&mut self, qp: QpNum, wr: WorkRequest) -> Result<(), FabricError> {
        self.with(qp, |conn, net, side| {
            conn.post_send(net, side, wr)?;
            net.cores[self.core].touched.push(qp);
            Ok(())
        })?
    }

    fn post_recv(&mut self, qp: QpNum, wr_id: u64, buf: Option<Sge>) -> Result<(), FabricError> {
        self.with(qp, |conn, net, side| conn.post_recv(net, side, wr_id, buf))?
    }

    fn bind(
        &mut self,
        qp: QpNum,
        window: &Arc<dyn Window>,
        slice: &MemSlice,
        access: Access,
        wr_id: u64,
    ) -> Result<BindResult, FabricError> {
        let sim = self.own(window)?;
        self.with(qp, |conn, net, side| {
            let end = &conn.ends[side];
            if end.state != State::Up {
                return Err(FabricError::QpState);
            }
            if !sim.covers(end.pd, slice) {
                return Err(FabricError::LocalMemory);
            }
            let key = sim.draw_key();
            if net.options.bind != BindMode::Pending {
                sim.put(key, slice, access);
                return Ok(BindResult::Done(key));
            }
            let (window, slice) = (Arc::clone(window), slice.clone());
            conn.push(side, wr_id, Job::Bind { window, key, slice, access }, true)?;
            net.cores[self.core].touched.push(qp);
            Ok(BindResult::Pending(key))
        })?
    }

    fn revoke(
        &mut self,
        qp: QpNum,
        window: &Arc<dyn Window>,
        wr_id: u64,
    ) -> Result<BindResult, FabricError> {
        let sim = self.own(window)?;
        self.with(qp, |conn, net, side| {
            let end = &conn.ends[side];
            if end.state != State::Up {
                return Err(FabricError::QpState);
            }
            if !sim.belongs(end.pd) {
                return Err(FabricError::LocalMemory);
            }
            match net.options.bind {
                BindMode::Done => {
                    sim.take();
                    return Ok(BindResult::Done(window.rkey()));
                }
                BindMode::InUse => return Err(FabricError::QpState),
                BindMode::Pending => {}
            }
            conn.push(side, wr_id, Job::Revoke { window: Arc::clone(window) }, true)?;
            net.cores[self.core].touched.push(qp);
            Ok(BindResult::Pending(window.rkey()))
        })?
    }

    fn flush(&mut self, _now: Instant) {
        let touched = std::mem::take(&mut self.world.borrow_mut().net.cores[self.core].touched);
        for qp in touched {
            // A queue pair that has already ended has nothing left to flush.
            let _ = self.with(qp, |conn, net, side| conn.flush(net, side));
        }
    }

    fn local_ip(&self, qp: QpNum) -> Option<IpAddr> {
        self.with(qp, |conn, _, side| conn.ends[side].addr.ip()).ok()
    }

    fn disconnect(&mut self, _now: Instant, qp: QpNum) {
        // An unknown queue pair has already reported its last event.
        let _ = self.with(qp, |conn, net, side| conn.disconnect(net, side));
    }

    fn abort(&mut self, _now: Instant, qp: QpNum) {
        let _ = self.with(qp, |conn, net, side| conn.abort(net, side));
    }

    fn poll(&mut self, _now: Instant) -> bool {
        let mut inner = self.world.borrow_mut();
        inner.close_dropped();
        std::mem::take(&mut inner.net.cores[self.core].active)
    }

    fn next_event(&mut self) -> Option<FabricEvent> {
        self.world.borrow_mut().net.cores[self.core].events.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }

    fn counters(&self) -> FabricCounters {
        self.world.borrow().net.cores[self.core].counters
    }
}

impl Drop for SimFabric {
    fn drop(&mut self) {
        // The world is already borrowed here only if a panic is unwinding.
        let Ok(mut inner) = self.world.try_borrow_mut() else { return };
        let core = self.core;
        inner.net.listeners.retain(|_, listener| *listener != core);
        inner.net.cores[core].events.clear();
        let qps: Vec<_> = inner.net.cores[core].qps.values().copied().collect();
        for (id, side) in qps {
            inner.with(id, |conn, net| {
                conn.transmit(net, side, Message::Reset);
                conn.vanish(net, side);
            });
        }
        inner.close_dropped();
    }
}

/// Returns the address `10.0.0.n` in a simulated world, for tests.
pub fn sim_ip(n: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, n])
}
