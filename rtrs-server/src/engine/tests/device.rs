//! The fabric of the server's shards: a simulated one that records posted requests and whose device
//! has properties set by a test.

use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::fabric::sim::SimFabric;
use rtrs_core::fabric::{
    Access, AsyncRegistration, BindResult, Capabilities, ConnRequest, Fabric, FabricError,
    FabricEvent, Listener, MemoryRegistration, PdUse, PrivateData, ProtectionDomain, RegisterError,
    Registered, Sge, ToRegister, Who, Window, WorkRequest, WrOp,
};
use rtrs_core::ids::QpNum;
use rtrs_core::mem::{MemSlice, Region};
use rtrs_core::time::Instant;
use rtrs_core::wire::ConnReq;

/// A work request as it was posted, with a copy of its data at that time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Posted {
    pub(super) op: WrOp,
    pub(super) bytes: Vec<u8>,
}

pub(super) type Log = Rc<RefCell<Vec<Posted>>>;

/// Addresses that were passed to `know_peer`.
pub(super) type Known = Rc<RefCell<Vec<(IpAddr, bool)>>>;

/// Properties of the server's device.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DeviceOptions {
    /// Whether registered memory is pinned.
    pub(super) pins_memory: bool,
    /// Maximum number of bytes that may be registered at a time; 0 for no limit.
    pub(super) register_max: usize,
    /// Whether the device lacks memory windows.
    pub(super) no_windows: bool,
    /// Memory per connection, in bytes.
    pub(super) connection_bytes: u64,
    /// Whether the device's queue pairs cannot be destroyed.
    pub(super) undead: bool,
    /// Whether there are many devices: each request arrives over a different one.
    pub(super) many: bool,
    /// Whether released resources remain until the server ends.
    pub(super) slow: bool,
    /// Whether memory is registered only when the test requests it.
    pub(super) aside: bool,
    /// Whether the device does not support proofs.
    pub(super) takes_no_proofs: bool,
    /// Lowest address of the peers that use TLS with a key, as `db1`.
    pub(super) tls_from: Option<IpAddr>,
}

/// Pending and completed asynchronous registrations.
#[derive(Debug, Default)]
pub(super) struct Aside {
    pub(super) waiting: Vec<(u64, ToRegister)>,
    pub(super) made: VecDeque<AsyncRegistration>,
}

/// Registered regions: ID, length, access.
pub(super) type Regions = Arc<Mutex<Vec<(u64, usize, Access)>>>;

/// A protection domain of a device with [`DeviceOptions`].
#[derive(Debug)]
struct PoorPd {
    inner: Arc<dyn ProtectionDomain>,
    device: DeviceOptions,
    registered: Regions,
    kept: Mutex<Vec<Box<dyn Any + Send>>>,
}

impl ProtectionDomain for PoorPd {
    fn register(
        &self,
        region: &Arc<Region>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegistration>, FabricError> {
        let max = self.device.register_max;
        if max > 0 && region.len() > max {
            let error = std::io::Error::from_raw_os_error(12);
            return Err(FabricError::system("cannot register: raise RLIMIT_MEMLOCK", error));
        }
        self.registered.lock().push((region.id(), region.len(), access));
        self.inner.register(region, access)
    }
    fn window(&self, parent: &Arc<dyn MemoryRegistration>) -> Result<Arc<dyn Window>, FabricError> {
        if self.device.no_windows {
            return Err(FabricError::Unsupported("no memory windows"));
        }
        self.inner.window(parent)
    }
    fn has_windows(&self) -> bool {
        !self.device.no_windows
    }
    fn is_idle(&self) -> bool {
        self.inner.is_idle() && !self.device.undead
    }
    fn free_later(&self, what: Box<dyn Any + Send>) {
        if self.device.slow {
            self.kept.lock().push(what);
        }
    }
    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }
}

/// A fabric that records posted requests.
#[derive(Debug)]
pub(super) struct Tee {
    pub(super) inner: SimFabric,
    pub(super) log: Log,
    pub(super) device: DeviceOptions,
    pub(super) registered: Regions,
    pub(super) aside: Rc<RefCell<Aside>>,
    pub(super) known: Known,
}

impl Listener for Tee {
    rtrs_core::forward_listener!(inner);

    fn know_peer(&mut self, peer: IpAddr, known: bool) {
        self.known.borrow_mut().push((peer, known));
    }
    fn fits(&self, pd: &Arc<dyn ProtectionDomain>, request: &ConnRequest) -> bool {
        self.inner.fits(pd, request) && !self.device.many
    }
}

impl Fabric for Tee {
    rtrs_core::forward_fabric!(inner);

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            pins_memory: self.device.pins_memory,
            takes_proofs: !self.device.takes_no_proofs,
            connection_bytes: self.device.connection_bytes,
            ..self.inner.capabilities()
        }
    }
    fn alloc_pd(&mut self, of: PdUse<'_>) -> Result<Arc<dyn ProtectionDomain>, FabricError> {
        let inner = self.inner.alloc_pd(of)?;
        let (device, registered) = (self.device, Arc::clone(&self.registered));
        Ok(Arc::new(PoorPd { inner, device, registered, kept: Mutex::default() }))
    }
    fn register_async(
        &mut self,
        id: u64,
        what: ToRegister,
    ) -> Option<Result<Registered, RegisterError>> {
        if !self.device.aside {
            return Some(what.register());
        }
        self.aside.borrow_mut().waiting.push((id, what));
        None
    }
    fn next_registration(&mut self) -> Option<AsyncRegistration> {
        self.aside.borrow_mut().made.pop_front()
    }
    fn post_send(&mut self, qp: QpNum, wr: WorkRequest) -> Result<(), FabricError> {
        let bytes = wr.sges.iter().flat_map(|sge| sge.slice.to_vec()).collect();
        self.log.borrow_mut().push(Posted { op: wr.op, bytes });
        self.inner.post_send(qp, wr)
    }
    fn post_recv(&mut self, qp: QpNum, wr_id: u64, buf: Option<Sge>) -> Result<(), FabricError> {
        self.inner.post_recv(qp, wr_id, buf)
    }
    fn bind(
        &mut self,
        qp: QpNum,
        window: &Arc<dyn Window>,
        slice: &MemSlice,
        access: Access,
        wr_id: u64,
    ) -> Result<BindResult, FabricError> {
        self.inner.bind(qp, window, slice, access, wr_id)
    }
    fn revoke(
        &mut self,
        qp: QpNum,
        window: &Arc<dyn Window>,
        wr_id: u64,
    ) -> Result<BindResult, FabricError> {
        self.inner.revoke(qp, window, wr_id)
    }
    fn flush(&mut self, now: Instant) {
        self.inner.flush(now);
    }
    fn abort(&mut self, now: Instant, qp: QpNum) {
        self.inner.abort(now, qp);
    }
    fn poll(&mut self, now: Instant) -> bool {
        self.inner.poll(now)
    }
    fn next_event(&mut self) -> Option<FabricEvent> {
        let mut event = self.inner.next_event();
        // RDMA CM may pass on its whole buffer, with padding after the data that was sent.
        if let Some(FabricEvent::Request(request)) = &mut event
            && request.private_data.as_bytes().len() == ConnReq::LEN
        {
            let mut padded = [0xee; PrivateData::CAPACITY];
            padded[..ConnReq::LEN].copy_from_slice(request.private_data.as_bytes());
            request.private_data = PrivateData::new(&padded);
        }
        if let Some(FabricEvent::Request(request)) = &mut event
            && self.device.tls_from.is_some_and(|from| request.peer.ip() >= from)
        {
            request.identity.who = Who::Key("db1".into());
            request.identity.cipher = Some("TLS13_AES_128_GCM_SHA256");
        }
        event
    }
    fn deadline(&self) -> Option<Instant> {
        self.inner.deadline()
    }
}
