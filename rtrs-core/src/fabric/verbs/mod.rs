//! Provider `rdma`: RDMA devices (InfiniBand, RoCE, soft-RoCE) through libibverbs and librdmacm.
//!
//! A [`VerbsFabric`] is one shard's view: its connection manager event channel, its completion
//! channels and queues, and its queue pairs. [`VerbsShared`] is the state shared by the shards of a
//! process. Descriptors are polled through the shard's ring, and `flush` hands posted work to the
//! device as one list per queue pair. Calls that may block in the driver are made on other threads,
//! which report the outcome in a message. docs/explanation/fabric.md ("Calls of RDMA drivers") says
//! which calls stay on the shard, and why.
//!
//! A device may be removed while it is in use. The device's connections then end. Each shard frees
//! its state for the device when the last connection has ended, and the context is freed with the
//! last domain. Listening on an address is retried until a device has that address.
//!
//! - `options.rs`: options
//! - `info.rs`: devices of the host
//! - `hint.rs`: errors with hints
//! - `device.rs`: shared state, a shard's queues
//! - `devices.rs`: a shard's devices
//! - `sources.rs`: other sources of events
//! - `listener.rs`: listening addresses
//! - `domain.rs`, `regions.rs`: memory
//! - `conn.rs`: one connection
//! - `turn.rs`: inputs of a turn
//! - `ending.rs`: closing connections, dispatching completions
//! - `teardown.rs`: blocking calls made when closing
//! - `dreq.rs`: unconfirmed disconnects
//! - `reaper.rs`: threads for blocking calls
//! - `windows.rs`: tests of memory windows
//! - `sys/`: library calls, and all unsafe code

mod conn;
mod device;
mod devices;
mod domain;
mod dreq;
mod ending;
mod hint;
mod info;
mod listener;
mod options;
mod reaper;
mod regions;
mod sources;
#[allow(unsafe_code)]
mod sys;
mod teardown;
mod turn;
mod windows;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

pub use device::VerbsShared;
pub use info::{DeviceInfo, Transport, devices};
pub use options::VerbsOptions;

use self::conn::{End, Reads, Resolver, Stage, VerbsConn, lost};
use self::device::{Report, source_for};
use self::devices::{Devices, token};
use self::domain::{VerbsPd, VerbsWindow};
use self::listener::Listeners;
use self::regions::RegionCache;
use self::sources::{CmChannel, Reports};
use self::sys::{CmId, IdKey, Qp};
use crate::fabric::qp_table::QpTable;
use crate::fabric::{
    Access, AsyncRegistration, BindResult, Capabilities, CloseReason, ConnRequest, ConnectFailure,
    ConnectParams, Fabric, FabricCounters, FabricError, FabricEvent, Listener, PRIVATE_DATA_MAX,
    PdUse, PrivateData, ProtectionDomain, QpLimits, RegisterError, Registered, Sge, ToRegister,
    Window, WorkRequest, WrOp, with_scope,
};
use crate::ids::{QpNum, Rkey};
use crate::mem::MemSlice;
use crate::rt::{Port, Ring};
use crate::time::{Instant, earliest};

/// Maximum number of connection manager events taken in one turn.
const CM_EVENTS_MAX: usize = 256;

/// Request from a peer, inside a [`ConnRequest`]. Dropping it rejects the request without private
/// data.
#[derive(Debug)]
struct VerbsRequest {
    id: CmId,
    reads: Reads,
    _place: HalfOpen,
}

/// Reserved slot among the requests that are waiting to be answered.
#[derive(Debug)]
struct HalfOpen(Arc<AtomicU32>);

impl HalfOpen {
    fn take(count: &Arc<AtomicU32>, most: u32) -> Option<Self> {
        if count.fetch_add(1, Ordering::Relaxed) >= most {
            count.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Self(Arc::clone(count)))
    }
}

impl Drop for HalfOpen {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Endpoint of one shard.
#[derive(Debug)]
pub struct VerbsFabric {
    conns: QpTable<VerbsConn>,
    /// Connections by connection manager ID, to look up events.
    by_id: HashMap<IdKey, QpNum>,
    listeners: Listeners,
    devices: Devices,
    cm: CmChannel,
    reports: Reports,
    shared: Arc<VerbsShared>,
    options: VerbsOptions,
    port: Port,
    regions: RegionCache,
    events: VecDeque<FabricEvent>,
    dirty: Vec<QpNum>,
    /// Connections to tear down, with the reasons.
    dying: Vec<(QpNum, End)>,
    counters: FabricCounters,
    now: Instant,
}

impl VerbsFabric {
    /// Creates an endpoint on this shard's ring.
    ///
    /// # Errors
    /// `System` if the connection manager cannot be reached.
    pub fn new(
        ring: &Rc<Ring>,
        shared: Arc<VerbsShared>,
        options: VerbsOptions,
    ) -> Result<Self, FabricError> {
        let failed = |e| FabricError::system("cannot use the RDMA connection manager", e);
        let cm = CmChannel::open(&shared.reaper, token::CM).map_err(failed)?;
        let reports = Reports::new(ring).map_err(failed)?;
        let core = shared.join(reports.sender());
        let port = ring.port();
        let mut fabric = Self {
            conns: QpTable::new(),
            by_id: HashMap::new(),
            listeners: Listeners::default(),
            devices: Devices::new(core),
            cm,
            reports,
            shared,
            options,
            port,
            regions: RegionCache::default(),
            events: VecDeque::with_capacity(256),
            dirty: Vec::with_capacity(64),
            dying: Vec::new(),
            counters: FabricCounters::default(),
            now: Instant::ZERO,
        };
        fabric.cm.arm(&fabric.port);
        Ok(fabric)
    }

    /// Returns the number of connections in any state.
    pub fn connections(&self) -> usize {
        self.conns.iter().count()
    }

    fn domain<'p>(&self, pd: &'p Arc<dyn ProtectionDomain>) -> Result<&'p VerbsPd, FabricError> {
        pd.as_any().downcast_ref::<VerbsPd>().ok_or(FabricError::LocalMemory)
    }

    /// Releases this shard's state for removed devices, once no connection uses it.
    fn retire_removed(&mut self) {
        let conns = &mut self.conns;
        self.devices.retire_removed(&self.port, |context| {
            conns.iter_mut().any(|conn| conn.qp.pd().context().key() == context)
        });
    }

    /// Creates a queue pair for a reserved name. Releases the name on failure.
    fn make_qp(
        &mut self,
        pd: &VerbsPd,
        name: QpNum,
        limits: QpLimits,
    ) -> Result<(Qp, u32), FabricError> {
        self.try_make_qp(pd, name, limits).inspect_err(|_| drop(self.conns.remove(name)))
    }

    fn try_make_qp(
        &mut self,
        pd: &VerbsPd,
        name: QpNum,
        limits: QpLimits,
    ) -> Result<(Qp, u32), FabricError> {
        let device = pd.context().limits();
        let (what, wanted) = if limits.send_max >= limits.recv_max {
            ("requests in a send queue", u64::from(limits.send_max) + 1)
        } else {
            ("posted receives", u64::from(limits.recv_max))
        };
        if wanted > u64::from(device.qp_wr_max) {
            return Err(hint::queue_too_long(pd.context().name(), what, wanted, device.qp_wr_max));
        }
        let cq_entries = Qp::cq_entries(&pd.pd, limits);
        let device = self.devices.open(pd, &self.port)?;
        let cq = device.reserve(cq_entries)?;
        let qp = Qp::new(&pd.pd, &cq, name, limits).map_err(|e| {
            device.release(&cq, cq_entries);
            let (QpLimits { send_max, recv_max }, device) = (limits, pd.context().name());
            FabricError::system(
                format!(
                    "cannot create a queue pair of {send_max} requests and {recv_max} receives on \
                     {device}"
                ),
                e,
            )
        })?;
        Ok((qp, cq_entries))
    }

    /// Returns a device's limits on outstanding reads.
    fn reads(&self, pd: &VerbsPd) -> Reads {
        let device = pd.context().limits();
        let most = self.options.reads_max;
        Reads {
            responder: most.min(device.responder_reads_max),
            initiator: most.min(device.initiator_reads_max),
        }
    }

    fn insert(&mut self, conn: VerbsConn) {
        let name = conn.name;
        self.by_id.insert(conn.id.key(), name);
        self.conns.insert(name, conn);
        self.settle(name);
    }

    /// Updates a connection's timer.
    fn settle(&mut self, name: QpNum) {
        if let Some(conn) = self.conns.get(name) {
            let deadline = conn.deadline;
            self.conns.arm(name, deadline);
        }
    }

    /// Returns the connection and the window of a bind or revoke.
    fn binding<'w>(
        &mut self,
        qp: QpNum,
        window: &'w Arc<dyn Window>,
    ) -> Result<(&mut VerbsConn, &'w VerbsWindow), FabricError> {
        let conn = self.conns.get_mut(qp).filter(|conn| conn.takes_requests());
        let window = window.as_any().downcast_ref().ok_or(FabricError::LocalMemory)?;
        Ok((conn.ok_or(FabricError::QpState)?, window))
    }

    fn mark(&mut self, name: QpNum) {
        if let Some(conn) = self.conns.get_mut(name)
            && !std::mem::replace(&mut conn.dirty, true)
        {
            self.dirty.push(name);
        }
    }

    fn push(&mut self, event: FabricEvent) {
        self.events.push_back(event);
    }

    /// Hands everything posted on a connection to its device.
    fn post(&mut self, name: QpNum) {
        let Some(conn) = self.conns.get_mut(name) else { return };
        match conn.qp.post() {
            Ok(calls) => self.counters.sends += calls,
            Err(e) => {
                self.dying.push((name, ConnectFailure::Failed(lost(format!("cannot post: {e}")))))
            }
        }
    }

    fn refuse_foreign(request: ConnRequest) -> Result<VerbsRequest, FabricError> {
        let inner = request.inner.downcast::<VerbsRequest>();
        inner
            .map(|inner| *inner)
            .map_err(|_| FabricError::Unsupported("connection requests of another provider"))
    }
}

impl Listener for VerbsFabric {
    fn fits(&self, pd: &Arc<dyn ProtectionDomain>, request: &ConnRequest) -> bool {
        let came_over = request.inner.downcast_ref::<VerbsRequest>();
        let came_over = came_over.and_then(|request| request.id.context_key());
        self.domain(pd).is_ok_and(|pd| came_over == Some(pd.context().key()))
    }

    fn listen(&mut self, address: SocketAddr) -> Result<SocketAddr, FabricError> {
        self.listeners.add(self.cm.channel(), &self.shared, address, self.options.backlog)
    }

    fn lost_listeners(&self) -> Vec<SocketAddr> {
        self.listeners.lost_addresses()
    }

    fn stop_listening(&mut self) {
        self.listeners.stop();
        self.events.retain(|event| !matches!(event, FabricEvent::Request(_)));
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
        let pd = self.domain(pd)?;
        let peer = request.peer;
        let failed = |e| FabricError::system(format!("cannot accept {peer}"), e);
        let VerbsRequest { mut id, reads, _place } = Self::refuse_foreign(request)?;
        if id.context_key() != Some(pd.context().key()) {
            return Err(FabricError::system(
                format!(
                    "the request from {peer} arrived over a device other than {}",
                    pd.context().name()
                ),
                io::ErrorKind::InvalidInput.into(),
            ));
        }
        id.migrate(self.cm.channel()).map_err(failed)?;
        let name = self.conns.reserve()?;
        let (qp, cq_entries) = self.make_qp(pd, name, limits)?;
        let mut conn = VerbsConn::new(qp, id, name, pd.id, cq_entries);
        conn.stage = Stage::Accepting;
        conn.reads = reads.min(self.reads(pd));
        conn.private_data = *private_data;
        conn.deadline = Some(now + self.options.startup_timeout);
        let prepared = conn.qp.enter_init(&conn.id, conn.reads.responder > 0);
        self.insert(conn);
        if let Err(e) = prepared {
            self.discard(name);
            return Err(failed(e));
        }
        self.mark(name);
        Ok(name)
    }

    fn reject(&mut self, now: Instant, request: ConnRequest, private_data: &PrivateData) {
        self.now = now;
        if let Ok(VerbsRequest { id, .. }) = Self::refuse_foreign(request)
            && let Err(error) = id.reject(private_data.as_bytes())
        {
            tracing::debug!(%error, "a request could not be rejected");
        }
    }
}

impl Fabric for VerbsFabric {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            pins_memory: true,
            bounces: true,
            binds_are_requests: true,
            // Type 1 windows, which user space uses here, do not support remote invalidation (IBA
            // 10.6.7.2.6).
            remote_invalidate: false,
            ..Capabilities::of("rdma")
        }
    }

    fn alloc_pd(&mut self, of: PdUse<'_>) -> Result<Arc<dyn ProtectionDomain>, FabricError> {
        let address = match of {
            PdUse::Connect { local, remote } => {
                let source = local.map_or_else(|| source_for(remote), Ok)?;
                with_scope(source, remote)
            }
            PdUse::Accept(request) => request.local,
        };
        Ok(Arc::new(self.shared.domain(address, self.options.require_imm)?))
    }

    fn register_async(
        &mut self,
        id: u64,
        what: ToRegister,
    ) -> Option<Result<Registered, RegisterError>> {
        let sender = self.reports.sender();
        self.shared.reaper.take(move || {
            let start = std::time::Instant::now();
            let (result, pd) = (what.register(), what.pd);
            let made = AsyncRegistration { id, pd, result, took: start.elapsed() };
            sender.send(Report::Made(Box::new(made)));
        });
        None
    }

    fn next_registration(&mut self) -> Option<AsyncRegistration> {
        self.reports.next_made()
    }

    fn connect(
        &mut self,
        now: Instant,
        pd: &Arc<dyn ProtectionDomain>,
        params: &ConnectParams,
    ) -> Result<QpNum, FabricError> {
        self.now = now;
        let pd = self.domain(pd)?;
        let remote = params.remote;
        let failed = |e| FabricError::system(format!("cannot connect to {remote}"), e);
        if params.private_data.as_bytes().len() > PRIVATE_DATA_MAX {
            return Err(failed(io::ErrorKind::InvalidInput.into()));
        }
        let id = CmId::new(self.cm.channel()).map_err(failed)?;
        let name = self.conns.reserve()?;
        let (qp, cq_entries) = self.make_qp(pd, name, params.limits)?;
        let mut conn = VerbsConn::new(qp, id, name, pd.id, cq_entries);
        conn.reads = self.reads(pd);
        conn.private_data = params.private_data;
        conn.deadline = Some(now + params.timeout);
        conn.resolver = Some(Resolver::new(params.local.map(|ip| with_scope(ip, remote)), remote));
        let started = conn.resolve();
        self.insert(conn);
        if let Err(e) = started {
            self.discard(name);
            return Err(match (e.raw_os_error(), params.local) {
                (Some(libc::ENODEV | libc::EADDRNOTAVAIL), Some(local)) => {
                    hint::no_device(local, &info::names(), e)
                }
                _ => failed(e),
            });
        }
        Ok(name)
    }

    fn post_send(&mut self, qp: QpNum, wr: WorkRequest) -> Result<(), FabricError> {
        self.regions.refresh(&self.shared.regions);
        let conn = self.conns.get_mut(qp).filter(|conn| conn.takes_requests());
        let conn = conn.ok_or(FabricError::QpState)?;
        let write = matches!(wr.op, WrOp::RdmaRead { .. });
        for sge in wr.sges.iter() {
            self.regions.check(conn.pd, sge, write)?;
        }
        conn.qp.push_send(&wr)?;
        self.counters.bytes_sent += wr.sges.len() as u64;
        self.mark(qp);
        Ok(())
    }

    fn post_recv(&mut self, qp: QpNum, wr_id: u64, buf: Option<Sge>) -> Result<(), FabricError> {
        self.regions.refresh(&self.shared.regions);
        let conn = self.conns.get_mut(qp).filter(|conn| conn.takes_receives());
        let conn = conn.ok_or(FabricError::QpState)?;
        if let Some(sge) = &buf {
            self.regions.check(conn.pd, sge, true)?;
        }
        conn.qp.push_recv(wr_id, buf)?;
        self.mark(qp);
        Ok(())
    }

    fn bind(
        &mut self,
        qp: QpNum,
        window: &Arc<dyn Window>,
        slice: &MemSlice,
        access: Access,
        wr_id: u64,
    ) -> Result<BindResult, FabricError> {
        let (conn, window) = self.binding(qp, window)?;
        window.check(conn.qp.pd(), Some((slice, access)))?;
        let key = conn
            .qp
            .push_bind(&window.mw, Some(slice), access, wr_id)
            .map_err(|e| windows::bind_refused(conn.qp.pd().context(), e))?;
        self.mark(qp);
        Ok(BindResult::Pending(Rkey(key)))
    }

    fn revoke(
        &mut self,
        qp: QpNum,
        window: &Arc<dyn Window>,
        wr_id: u64,
    ) -> Result<BindResult, FabricError> {
        let (conn, window) = self.binding(qp, window)?;
        window.check(conn.qp.pd(), None)?;
        let dead = Rkey(window.mw.key());
        conn.qp
            .push_bind(&window.mw, None, Access::LOCAL_READ, wr_id)
            .map_err(|e| windows::bind_refused(conn.qp.pd().context(), e))?;
        self.mark(qp);
        Ok(BindResult::Pending(dead))
    }

    fn flush(&mut self, now: Instant) {
        self.now = now;
        let mut dirty = std::mem::take(&mut self.dirty);
        for name in dirty.drain(..) {
            let Some(conn) = self.conns.get_mut(name) else { continue };
            if conn.end.is_some() {
                continue;
            }
            conn.dirty = false;
            match conn.stage {
                // Receives posted now are handed over in a later stage.
                Stage::Resolving | Stage::Looking => {}
                Stage::Accepting => {
                    if let Err(reason) = conn.answer(&self.options) {
                        self.dying.push((name, ConnectFailure::Failed(reason)));
                    }
                }
                _ => self.post(name),
            }
        }
        self.dirty = dirty;
        self.take_down();
    }

    fn local_ip(&self, qp: QpNum) -> Option<IpAddr> {
        self.conns.get(qp)?.id.local_address().map(|address| address.ip())
    }

    fn disconnect(&mut self, now: Instant, qp: QpNum) {
        self.now = now;
        let until = now + self.options.close_timeout;
        let Some(conn) = self.conns.get_mut(qp).filter(|conn| !conn.dying) else { return };
        match conn.stage {
            Stage::Open => {
                conn.qp.seal();
                conn.stage = Stage::Draining;
                conn.deadline = Some(until);
                let idle = conn.qp.sends_open() == 0;
                self.settle(qp);
                if idle {
                    self.begin_end(qp, ConnectFailure::Failed(CloseReason::Local));
                } else {
                    self.post(qp);
                    self.take_down();
                }
            }
            Stage::Draining => {}
            _ => self.begin_end(qp, ConnectFailure::Failed(CloseReason::Local)),
        }
    }

    fn abort(&mut self, now: Instant, qp: QpNum) {
        self.now = now;
        if self.conns.get_mut(qp).is_some() {
            self.begin_end(qp, ConnectFailure::Failed(CloseReason::Local));
            self.take_down();
        }
    }

    fn poll(&mut self, now: Instant) -> bool {
        self.now = now;
        let mut any = self.poll_ring();
        any |= self.poll_inbox();
        any |= self.poll_completions();
        any |= self.poll_timers();
        self.take_down();
        self.retire_removed();
        any | !self.events.is_empty() | self.reports.has_made()
    }

    fn next_event(&mut self) -> Option<FabricEvent> {
        self.events.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        if !self.events.is_empty() {
            return Some(self.now);
        }
        earliest(self.conns.deadline(), self.listeners.deadline())
    }

    fn counters(&self) -> FabricCounters {
        self.counters
    }
}

impl Drop for VerbsFabric {
    fn drop(&mut self) {
        self.shared.leave(self.devices.core());
    }
}
