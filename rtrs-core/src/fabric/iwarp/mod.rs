//! The provider `tcp`: a user-space iWARP endpoint on plain TCP sockets.
//!
//! MPA (RFC 5044, 6581) frames the stream, DDP (RFC 5041) places data, RDMAP (RFC 5040) defines
//! operations, and RFC 7306 adds immediates; docs/PROTOCOL.md describes the encoding. No kernel
//! module or privilege is needed. An [`IwarpFabric`] is one shard's view: its sockets on that
//! shard's ring, its queue pairs, its events. [`IwarpShared`] is the state shared by all shards of
//! a process: the table of keys, so that memory registered once is reachable through connections on
//! any shard.
//!
//! Costs: large payloads are sent from, and received into, the registered memory itself; only small
//! payloads are copied. A turn of work performs one send and one receive per busy connection.
//!
//! When created with [`IwarpFabric::with_tls`], the provider is `tls`: the same stream inside TLS
//! 1.3 (handshakes in `secure.rs`, records in `tls.rs`). Each payload is then copied once into the
//! record, at the sender, and once out of the record, at the receiver.

mod batch;
mod ddp;
mod env;
#[cfg(any(test, feature = "test-util"))]
#[path = "tests/fuzz.rs"]
mod fuzz;
#[cfg(any(test, feature = "test-util"))]
#[path = "tests/fuzz_records.rs"]
mod fuzz_records;
mod listener;
mod mpa;
mod options;
mod progress;
mod qp;
mod rdmap;
mod recv_queue;
mod rx;
mod secure;
mod sender;
mod stag;
mod state;
mod stream;
#[cfg(test)]
mod tests;
mod tls;
mod tx;

#[cfg(any(test, feature = "test-util"))]
#[doc(hidden)]
pub use fuzz::fuzz_stream;
#[cfg(any(test, feature = "test-util"))]
pub(crate) use fuzz_records::fuzz_records;
pub use options::IwarpOptions;

use std::any::Any;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use socket2::{Domain, Protocol, SockRef, Socket, Type};

use self::env::{Env, token};
use self::listener::{IwarpRequest, Listeners, tune};
use self::qp::{QpMachine, RX_STAGE};
use self::secure::Tls;
use self::stag::StagTable;
use self::state::CoreState;
use self::stream::IwarpConn;
use self::tls::TLS_STAGE;
use crate::fabric::qp_table::QpTable;
use crate::fabric::{
    Access, BindResult, Capabilities, ConnRequest, ConnectParams, Fabric, FabricCounters,
    FabricError, FabricEvent, Listener, MemoryRegistration, PdUse, PrivateData, ProofError,
    ProtectionDomain, QpLimits, Sge, Window, WorkRequest, with_scope,
};
use crate::ids::{QpNum, Rkey};
use crate::limits::{TCP_CONNECTION_BUFFERS, TLS_CONNECTION_BUFFERS};
use crate::mem::{MemSlice, Region};
use crate::rt::{Fd, Port, Ring};
use crate::time::{Instant, earliest};
use crate::tls::TlsEndpoint;

/// State shared by all shards of a process.
#[derive(Debug)]
pub struct IwarpShared {
    stags: Arc<StagTable>,
    next_pd: AtomicU64,
}

impl IwarpShared {
    /// Creates an empty table of keys.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { stags: StagTable::new(), next_pd: AtomicU64::new(1) })
    }

    /// Creates an empty table of keys, with protection domains numbered from `number`.
    #[cfg(any(test, feature = "test-util"))]
    pub fn with_domains_from(number: u64) -> Arc<Self> {
        Arc::new(Self { stags: StagTable::new(), next_pd: AtomicU64::new(number) })
    }
}

#[derive(Debug)]
struct IwarpPd {
    shared: Arc<IwarpShared>,
    id: u64,
}

#[derive(Debug)]
struct IwarpRegistration {
    shared: Arc<IwarpShared>,
    region: Arc<Region>,
    stag: u32,
    base: u64,
}

#[derive(Debug)]
struct IwarpWindow {
    shared: Arc<IwarpShared>,
    index: u32,
    _parent: Arc<dyn MemoryRegistration>,
}

impl ProtectionDomain for IwarpPd {
    fn register(
        &self,
        region: &Arc<Region>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegistration>, FabricError> {
        let (stag, base) = self.shared.stags.register(self.id, region, access)?;
        Ok(Arc::new(IwarpRegistration {
            shared: Arc::clone(&self.shared),
            region: Arc::clone(region),
            stag,
            base,
        }))
    }

    fn window(&self, parent: &Arc<dyn MemoryRegistration>) -> Result<Arc<dyn Window>, FabricError> {
        let index = self.shared.stags.make_window(self.id, parent.lkey())?;
        Ok(Arc::new(IwarpWindow {
            shared: Arc::clone(&self.shared),
            index,
            _parent: Arc::clone(parent),
        }))
    }

    // A connection reports its end only once none of its operations are still running (stream.rs),
    // however long that takes.
    fn is_idle(&self) -> bool {
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl MemoryRegistration for IwarpRegistration {
    fn lkey(&self) -> u32 {
        self.stag
    }

    fn rkey(&self) -> Rkey {
        Rkey(self.stag)
    }

    fn base(&self) -> u64 {
        self.base
    }

    fn region(&self) -> &Arc<Region> {
        &self.region
    }
}

impl Drop for IwarpRegistration {
    fn drop(&mut self) {
        self.shared.stags.deregister(self.stag, self.region.id());
    }
}

impl Window for IwarpWindow {
    fn rkey(&self) -> Rkey {
        Rkey(self.shared.stags.last_stag(self.index))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for IwarpWindow {
    fn drop(&mut self) {
        self.shared.stags.drop_window(self.index);
    }
}

/// Endpoint of a shard.
#[derive(Debug)]
pub struct IwarpFabric {
    shared: Arc<IwarpShared>,
    options: IwarpOptions,
    port: Port,
    core: CoreState,
    conns: QpTable<IwarpConn>,
    listeners: Listeners,
    dirty: Vec<QpNum>,
    tls: Option<Tls>,
    now: Instant,
}

/// Creates the environment for the provider's connections and listeners. Borrows only these fields.
macro_rules! env {
    ($fabric:ident, $now:expr) => {
        Env {
            core: &mut $fabric.core,
            port: &$fabric.port,
            options: &$fabric.options,
            tls: $fabric.tls.as_ref(),
            now: $now,
        }
    };
}

impl IwarpFabric {
    /// Creates an endpoint on this shard's ring.
    pub fn new(ring: &Rc<Ring>, shared: Arc<IwarpShared>, options: IwarpOptions) -> Self {
        Self {
            core: CoreState::new(Arc::clone(&shared.stags)),
            shared,
            options,
            port: ring.port(),
            conns: QpTable::new(),
            listeners: Listeners::default(),
            dirty: Vec::with_capacity(64),
            tls: None,
            now: Instant::ZERO,
        }
    }

    /// Creates an endpoint that uses TLS. Checksums are off, because TLS records are authenticated.
    ///
    /// # Errors
    /// Returns the system's error if a mailbox cannot be created.
    pub fn with_tls(
        ring: &Rc<Ring>,
        shared: Arc<IwarpShared>,
        mut options: IwarpOptions,
        endpoint: Arc<TlsEndpoint>,
    ) -> io::Result<Self> {
        (options.crc, options.plain) = (false, false);
        let tls = Some(Tls::new(ring, endpoint)?);
        Ok(Self { tls, ..Self::new(ring, shared, options) })
    }

    /// Returns the number of accepted connections whose request has not arrived yet.
    pub fn half_open(&self) -> usize {
        self.listeners.half_open()
    }

    /// Returns the number of connections in any state.
    pub fn connections(&self) -> usize {
        self.conns.iter().count()
    }

    fn pd_id(&self, pd: &Arc<dyn ProtectionDomain>) -> Result<u64, FabricError> {
        match pd.as_any().downcast_ref::<IwarpPd>() {
            Some(pd) if Arc::ptr_eq(&pd.shared, &self.shared) => Ok(pd.id),
            _ => Err(FabricError::LocalMemory),
        }
    }

    /// Creates a machine for a reserved queue pair, which is released on failure.
    fn machine(&mut self, qp: QpNum, pd: u64, limits: QpLimits) -> io::Result<QpMachine> {
        let stage = if self.tls.is_some() { TLS_STAGE } else { RX_STAGE };
        QpMachine::new(qp, pd, limits, stage).inspect_err(|_| drop(self.conns.remove(qp)))
    }

    fn insert(&mut self, qp: QpNum, conn: IwarpConn) {
        self.conns.insert(qp, conn);
        self.settle(qp);
    }

    /// Runs a step of a connection, then updates its timer and its slot.
    fn step(&mut self, qp: QpNum, run: impl FnOnce(&mut IwarpConn, &mut Env<'_>)) {
        let Some(conn) = self.conns.get_mut(qp) else { return };
        let mut env = env!(self, self.now);
        run(conn, &mut env);
        self.settle(qp);
    }

    fn settle(&mut self, qp: QpNum) {
        let Some(conn) = self.conns.get(qp) else { return };
        if conn.is_gone() {
            self.conns.remove(qp);
        } else {
            let deadline = conn.deadline;
            self.conns.arm(qp, deadline);
        }
    }

    fn mark(&mut self, qp: QpNum) {
        if self.dirty.last() != Some(&qp) {
            self.dirty.push(qp);
        }
    }
}

impl Listener for IwarpFabric {
    fn fits(&self, pd: &Arc<dyn ProtectionDomain>, _request: &ConnRequest) -> bool {
        self.pd_id(pd).is_ok()
    }

    fn listen(&mut self, address: SocketAddr) -> Result<SocketAddr, FabricError> {
        let env = env!(self, self.now);
        self.listeners.listen(&env, address)
    }

    fn know_peer(&mut self, peer: IpAddr, known: bool) {
        self.listeners.know(peer, known);
    }

    fn crowded_out(&self) -> u64 {
        self.listeners.crowded_out()
    }

    fn next_refused(&mut self) -> Option<(SocketAddr, ProofError)> {
        self.listeners.refused.pop_front()
    }

    fn stop_listening(&mut self) {
        self.listeners.stop(&self.port);
    }

    fn accept(
        &mut self,
        now: Instant,
        pd: &Arc<dyn ProtectionDomain>,
        request: ConnRequest,
        limits: QpLimits,
        private_data: &PrivateData,
    ) -> Result<QpNum, FabricError> {
        self.now = now;
        let pd = self.pd_id(pd)?;
        let peer = request.peer;
        let inner = request
            .inner
            .downcast::<IwarpRequest>()
            .map_err(|_| FabricError::Unsupported("connection requests of another provider"))?;
        let qp = self.conns.reserve()?;
        let machine = self
            .machine(qp, pd, limits)
            .map_err(|e| FabricError::system(format!("cannot accept {peer}"), e))?;
        let mut env = env!(self, now);
        let conn = IwarpConn::accept(&mut env, machine, *inner, peer, *private_data);
        let failed = |e| FabricError::system(format!("cannot accept {peer}"), e);
        let conn = conn.map_err(failed).inspect_err(|_| drop(self.conns.remove(qp)))?;
        self.insert(qp, conn);
        self.mark(qp);
        Ok(qp)
    }

    fn reject(&mut self, now: Instant, request: ConnRequest, private_data: &PrivateData) {
        self.now = now;
        if let Ok(inner) = request.inner.downcast::<IwarpRequest>() {
            inner.refuse(private_data);
        }
    }
}

impl Fabric for IwarpFabric {
    fn capabilities(&self) -> Capabilities {
        let (scheme, connection_bytes) = match self.tls {
            Some(_) => ("tls", TLS_CONNECTION_BUFFERS),
            None => ("tcp", TCP_CONNECTION_BUFFERS),
        };
        // Over TLS the handshake proves the client's identity.
        Capabilities { takes_proofs: false, connection_bytes, ..Capabilities::of(scheme) }
    }

    fn alloc_pd(&mut self, _of: PdUse<'_>) -> Result<Arc<dyn ProtectionDomain>, FabricError> {
        let id = self.shared.next_pd.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(IwarpPd { shared: Arc::clone(&self.shared), id }))
    }

    fn connect(
        &mut self,
        now: Instant,
        pd: &Arc<dyn ProtectionDomain>,
        params: &ConnectParams,
    ) -> Result<QpNum, FabricError> {
        self.now = now;
        let pd = self.pd_id(pd)?;
        let remote = params.remote;
        let failed = |e| FabricError::system(format!("cannot connect to {remote}"), e);
        let domain = Domain::for_address(remote);
        let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP)).map_err(failed)?;
        tune(&SockRef::from(&socket), &self.options).map_err(failed)?;
        if let Some(local) = params.local {
            let from = with_scope(local, remote);
            socket.bind(&from.into()).map_err(|e| {
                FabricError::system(format!("cannot use the source address {local}"), e)
            })?;
        }
        let qp = self.conns.reserve()?;
        let machine = self.machine(qp, pd, params.limits).map_err(failed)?;
        let mut env = env!(self, now);
        let fd = Fd::new(socket);
        let conn = IwarpConn::connect(&mut env, machine, fd, params);
        self.insert(qp, conn);
        Ok(qp)
    }

    fn post_send(&mut self, qp: QpNum, wr: WorkRequest) -> Result<(), FabricError> {
        let conn = self.conns.get_mut(qp).filter(|conn| conn.takes_work());
        conn.ok_or(FabricError::QpState)?.machine.post_send(&self.core, wr)?;
        self.mark(qp);
        Ok(())
    }

    fn post_recv(&mut self, qp: QpNum, wr_id: u64, buf: Option<Sge>) -> Result<(), FabricError> {
        let conn = self.conns.get_mut(qp).filter(|conn| conn.takes_work());
        conn.ok_or(FabricError::QpState)?.machine.post_recv(&self.core, wr_id, buf)
    }

    fn bind(
        &mut self,
        qp: QpNum,
        window: &Arc<dyn Window>,
        slice: &MemSlice,
        access: Access,
        _wr_id: u64,
    ) -> Result<BindResult, FabricError> {
        let pd = self.conns.get(qp).ok_or(FabricError::QpState)?.machine.pd;
        self.shared.stags.bind(pd, window.rkey(), slice, access).map(BindResult::Done)
    }

    fn revoke(
        &mut self,
        qp: QpNum,
        window: &Arc<dyn Window>,
        _wr_id: u64,
    ) -> Result<BindResult, FabricError> {
        let pd = self.conns.get(qp).ok_or(FabricError::QpState)?.machine.pd;
        self.shared.stags.revoke(pd, window.rkey()).map(BindResult::Done)
    }

    fn flush(&mut self, now: Instant) {
        self.now = now;
        let mut dirty = std::mem::take(&mut self.dirty);
        for qp in dirty.drain(..) {
            self.step(qp, IwarpConn::flush);
        }
        self.dirty = dirty;
    }

    fn local_ip(&self, qp: QpNum) -> Option<IpAddr> {
        self.conns.get(qp)?.local_ip()
    }

    fn peer_has_all(&self, qp: QpNum) -> Option<bool> {
        self.conns.get(qp)?.peer_has_all()
    }

    fn disconnect(&mut self, now: Instant, qp: QpNum) {
        self.now = now;
        self.step(qp, IwarpConn::disconnect);
    }

    fn abort(&mut self, now: Instant, qp: QpNum) {
        self.now = now;
        self.step(qp, IwarpConn::abort);
    }

    fn poll(&mut self, now: Instant) -> bool {
        self.now = now;
        let mut any = false;
        self.core.regions.refresh(&self.core.stags);
        while let Some(done) = self.port.take() {
            any = true;
            let (id, kind) = token::split(done.token);
            if matches!(kind, token::ACCEPT | token::HALF_OPEN | token::GREETING) {
                let mut env = env!(self, now);
                match kind {
                    token::ACCEPT => self.listeners.accepted(&mut env, id, done),
                    token::HALF_OPEN => self.listeners.received(&mut env, id, done),
                    _ => self.listeners.greeted(&mut env, id, done),
                }
            } else {
                self.step(QpNum(id as u32), |conn, env| conn.completed(env, kind, done));
            }
        }
        while let Some(done) = self.tls.as_mut().and_then(Tls::next) {
            any = true;
            let (id, kind) = token::split(done.token);
            if kind == token::HALF_OPEN {
                let mut env = env!(self, now);
                self.listeners.secured(&mut env, id, done.handshake, done.progress);
            } else {
                let qp = QpNum(id as u32);
                self.step(qp, |conn, env| conn.secured(env, done.handshake, done.progress));
            }
        }
        while let Some(qp) = self.conns.take_expired(now) {
            any = true;
            self.step(qp, IwarpConn::on_deadline);
        }
        if self.listeners.deadline().is_some_and(|at| at <= now) {
            let env = env!(self, now);
            any |= self.listeners.poll(&env);
        }
        any | !self.core.events.is_empty()
    }

    fn next_event(&mut self) -> Option<FabricEvent> {
        self.core.events.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        earliest(self.conns.deadline(), self.listeners.deadline())
    }

    fn counters(&self) -> FabricCounters {
        self.core.counters
    }
}
