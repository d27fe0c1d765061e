//! The provider traits and their contract.
//!
//! The fabric has the shape of verbs. A [`Fabric`] is one shard's view of a provider: its queue
//! pairs, its completions, its connection events; it is used from that shard's thread only. A
//! [`ProtectionDomain`] is shared between shards: memory registered in it is reachable through
//! every queue pair made in it, on any shard.
//!
//! Contract, the same for every provider and checked by `conformance.rs`:
//! - **Order.** Work requests of one queue pair take effect at the peer in posting order. When a
//!   receive completes at the peer, all bytes of earlier writes of that queue pair are in place.
//! - **Completions.** A signaled request, every failed one and every posted receive completes
//!   exactly once. A successful write or send completion means that the local buffer is free;
//!   it does not prove arrival (on iwarp it means "handed to TCP").
//! - **Flush on error.** When a queue pair goes to error, all that is posted completes as
//!   `Flushed`, then one [`FabricEvent::Closed`] ends it. After `Closed` nothing more is
//!   reported for it and no byte is placed in or read from local memory on its behalf.
//! - **Receives** must be posted before the message can arrive; iwarp has no retry for it and
//!   ends the connection. They may be posted as soon as the queue pair exists, also while it
//!   still connects; an attempt that fails flushes them before `ConnectFailed`. Everything else
//!   is posted after `Established`.
//! - **Nothing blocks.** `poll` moves work on; `flush` hands what was posted to the transport in
//!   one batch per queue pair.
//! - **No wait without a bound.** Connecting ends within [`ConnectParams::timeout`], an accepted
//!   connection's start-up and a graceful disconnect within the provider's own stated bounds.

#[cfg(any(test, feature = "test-util"))]
pub mod conformance;
pub mod error;
pub mod iwarp;
pub mod peer;
mod qp_table;
pub mod rdma;
#[cfg(any(test, feature = "test-util"))]
pub mod sim;
#[cfg(feature = "verbs")]
pub mod verbs;
pub mod work;

use std::any::Any;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};

pub use error::{CloseReason, FabricError};
pub use peer::{PeerIdentity, Proof, ProofError, Who};
pub use work::{RemoteMem, Sge, SgeList, WcOp, WcStatus, WorkCompletion, WorkRequest, WrOp};

use crate::ids::{QpNum, Rkey};
use crate::mem::{MemSlice, Region};
use crate::time::{Duration, Instant};

/// Longest private data a session may send: what RDMA CM leaves of a connect request.
pub const PRIVATE_DATA_MAX: usize = 56;

/// Private data of connect, accept and reject. Received data may be longer than what was sent
/// (RDMA CM pads with zeroes).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PrivateData {
    bytes: [u8; Self::CAPACITY],
    len: u8,
}

impl PrivateData {
    /// What fits at most (RDMA CM's accept carries up to 196 bytes).
    pub const CAPACITY: usize = 196;
    /// No private data.
    pub const EMPTY: Self = Self { bytes: [0; Self::CAPACITY], len: 0 };

    /// Private data of these bytes, cut at the capacity.
    #[allow(clippy::cast_possible_truncation, reason = "at most 196")]
    pub fn new(from: &[u8]) -> Self {
        let len = from.len().min(Self::CAPACITY);
        let mut bytes = [0; Self::CAPACITY];
        bytes[..len].copy_from_slice(&from[..len]);
        Self { bytes, len: len as u8 }
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl Default for PrivateData {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl fmt::Debug for PrivateData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrivateData({} bytes)", self.len)
    }
}

/// What a peer, or a local operation, may do with registered memory. Reading locally is always
/// allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Receives and local reads may write here.
    pub local_write: bool,
    /// The peer may RDMA-write here.
    pub remote_write: bool,
    /// The peer may RDMA-read here.
    pub remote_read: bool,
}

impl Access {
    /// Only a source of sends and writes.
    pub const LOCAL_READ: Self =
        Self { local_write: false, remote_write: false, remote_read: false };
    /// Source of sends and writes, target of receives and of our reads.
    pub const LOCAL: Self = Self { local_write: true, remote_write: false, remote_read: false };
    /// As `LOCAL`, and the peer may write.
    pub const REMOTE_WRITE: Self =
        Self { local_write: true, remote_write: true, remote_read: false };
    /// As `LOCAL`, and the peer may read.
    pub const REMOTE_READ: Self =
        Self { local_write: true, remote_write: false, remote_read: true };
}

/// A memory registration. Dropping it ends it: later accesses of peers are refused. Its windows
/// hold it (its `Arc`) until they are gone themselves.
pub trait MemoryRegistration: Send + Sync + fmt::Debug {
    /// Key for local use in [`Sge::lkey`].
    fn lkey(&self) -> u32;
    /// Key for the peer; refused when the registration has no remote access.
    fn rkey(&self) -> Rkey;
    /// The address the peer uses for byte 0 of the region.
    fn base(&self) -> u64;
    /// The region it covers, whole.
    fn region(&self) -> &Arc<Region>;
}

/// A key of its own for a part of a registration, which can be given a new value and taken away
/// cheaply. Dropping it ends it.
pub trait Window: Send + Sync + fmt::Debug {
    /// The current key, or the last one when the window is not bound.
    fn rkey(&self) -> Rkey;

    /// The window as its provider's own type.
    fn as_any(&self) -> &dyn Any;
}

/// How a bind or revoke went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindResult {
    /// It is in force now, no completion follows. The key is the new one (bind) or the dead one.
    Done(Rkey),
    /// It is in force when the `Bind` completion with the given `wr_id` arrives, and before
    /// anything posted on the same queue pair after it begins, as work requests of one queue pair
    /// take effect in order: a message that tells the key may follow at once.
    Pending(Rkey),
}

/// What a new protection domain is for: memory and queue pairs of verbs belong to one device,
/// and the device follows from the addresses. Providers without devices take no notice.
#[derive(Clone, Copy, Debug)]
pub enum PdUse<'a> {
    /// Connecting, with the addresses later given to [`Fabric::connect`].
    Connect {
        /// Source address; None leaves the choice to the system.
        local: Option<IpAddr>,
        /// The peer.
        remote: SocketAddr,
    },
    /// Accepting this request and others that come over the same device.
    Accept(&'a ConnRequest),
}

/// A set of memory and queue pairs that may work together; one per path.
pub trait ProtectionDomain: Send + Sync + fmt::Debug {
    /// Registers a region, whole.
    ///
    /// # Errors
    /// `System` when the device or its limits refuse (names RLIMIT_MEMLOCK where that is the
    /// cause), `NoKey` when all keys are in use.
    fn register(
        &self,
        region: &Arc<Region>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegistration>, FabricError>;

    /// Makes an unbound window over parts of `parent`.
    ///
    /// # Errors
    /// As `register`.
    fn window(&self, parent: &Arc<dyn MemoryRegistration>) -> Result<Arc<dyn Window>, FabricError>;

    /// False when the device has no windows: `window` always fails then.
    fn has_windows(&self) -> bool {
        true
    }

    /// False while a queue pair of it may still reach memory. `Closed` promises that none does
    /// whose end was reported; a device that could not end one breaks that promise, and says so
    /// here.
    fn is_idle(&self) -> bool;

    /// False when its device was removed. What is registered in it delays the removal.
    fn is_present(&self) -> bool {
        true
    }

    /// True where a device can be removed, so that `is_present` has to be looked at.
    fn is_removable(&self) -> bool {
        false
    }

    /// Frees windows, registrations and regions of it that are no longer used. Where that may block
    /// it is done on another thread, some time after the call.
    fn free_later(&self, what: Box<dyn Any + Send>) {
        drop(what);
    }

    /// The domain as its provider's own type.
    fn as_any(&self) -> &dyn Any;
}

/// Memory that is registered, with windows over it.
#[derive(Debug)]
pub struct Registered {
    /// The registration.
    pub registration: Arc<dyn MemoryRegistration>,
    /// Unbound.
    pub windows: Box<[Arc<dyn Window>]>,
}

/// What of a registration with windows was refused.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The registration itself.
    #[error("{0}")]
    Memory(FabricError),
    /// One of the windows.
    #[error("{0}")]
    Windows(FabricError),
    /// Nothing was refused: nobody wanted it any more.
    #[error("nobody waits for it any more")]
    Unwanted,
}

/// What is to be registered, and how.
#[derive(Clone, Debug)]
pub struct ToRegister {
    /// Where.
    pub pd: Arc<dyn ProtectionDomain>,
    /// The memory.
    pub region: Arc<Region>,
    /// Its registration, if it has one that allows this access: only windows are made then.
    pub registration: Option<Arc<dyn MemoryRegistration>>,
    /// The access that it allows.
    pub access: Access,
    /// How many windows are made over it.
    pub windows: u16,
    /// Where it is given, nothing is registered when that is gone.
    pub wanted: Option<Weak<()>>,
}

impl ToRegister {
    /// Registers it, on the thread that calls this, however long that takes.
    ///
    /// # Errors
    /// What was refused. Nothing is left of it then.
    pub fn register(&self) -> Result<Registered, RegisterError> {
        if self.wanted.as_ref().is_some_and(|wanted| wanted.strong_count() == 0) {
            return Err(RegisterError::Unwanted);
        }
        let registration = match &self.registration {
            Some(registration) => Arc::clone(registration),
            None => self.pd.register(&self.region, self.access).map_err(RegisterError::Memory)?,
        };
        let windows = (0..self.windows).map(|_| self.pd.window(&registration));
        let windows = windows.collect::<Result<_, _>>().map_err(RegisterError::Windows)?;
        Ok(Registered { registration, windows })
    }
}

/// The outcome of an asynchronous registration.
#[derive(Debug)]
pub struct AsyncRegistration {
    /// The caller's number for it.
    pub id: u64,
    /// The domain it was made in.
    pub pd: Arc<dyn ProtectionDomain>,
    /// The memory, or what was refused.
    pub result: Result<Registered, RegisterError>,
    /// How long it took.
    pub took: Duration,
}

/// Bounds of a queue pair, from which the provider sizes its queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpLimits {
    /// Send work requests that may be outstanding.
    pub send_max: u32,
    /// Receives that may be posted.
    pub recv_max: u32,
}

/// How to connect.
#[derive(Clone, Debug)]
pub struct ConnectParams {
    /// Source address; None leaves the choice to the system.
    pub local: Option<IpAddr>,
    /// The peer.
    pub remote: SocketAddr,
    /// Sent with the request, at most [`PRIVATE_DATA_MAX`] bytes.
    pub private_data: PrivateData,
    /// Queue bounds.
    pub limits: QpLimits,
    /// Until `Established`; afterwards `ConnectFailed(TimedOut)`.
    pub timeout: Duration,
    /// The name that the peer's certificate must have; None for its address.
    pub peer_name: Option<Arc<str>>,
}

/// A peer that asks for a connection. It can be handed to another shard of the same provider
/// before it is accepted. Dropping it closes the connection without an answer.
pub struct ConnRequest {
    /// The peer's private data.
    pub private_data: PrivateData,
    /// The peer's address.
    pub peer: SocketAddr,
    /// Our address it came to.
    pub local: SocketAddr,
    /// Who the peer has proved to be.
    pub identity: PeerIdentity,
    /// The provider's own state.
    pub inner: Box<dyn Any + Send>,
}

impl fmt::Debug for ConnRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnRequest")
            .field("peer", &self.peer)
            .field("local", &self.local)
            .field("identity", &self.identity)
            .field("private_data", &self.private_data)
            .finish_non_exhaustive()
    }
}

/// Why a connection attempt failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectFailure {
    /// The peer answered with a reject and this private data.
    Rejected(PrivateData),
    /// It did not come about otherwise.
    Failed(CloseReason),
}

/// What happened on a shard's provider.
#[derive(Debug)]
pub enum FabricEvent {
    /// A connection attempt of ours succeeded (with the peer's private data), or an accepted
    /// connection is ready. On iwarp the accepting side gets it when its reply is on its way.
    Established {
        /// Which.
        qp: QpNum,
        /// Private data of the accept; empty on the accepting side.
        private_data: PrivateData,
    },
    /// A connection attempt failed; the queue pair is gone.
    ConnectFailed {
        /// Which.
        qp: QpNum,
        /// Why.
        failure: ConnectFailure,
    },
    /// A peer asks; answer with `accept` or `reject` within the provider's bound.
    Request(ConnRequest),
    /// A work request or receive ended.
    Completion(WorkCompletion),
    /// The connection ended and everything posted has been flushed. The queue pair is gone.
    Closed {
        /// Which.
        qp: QpNum,
        /// Why.
        reason: CloseReason,
    },
}

impl FabricEvent {
    /// The last event of a queue pair: `Closed` if it was established before, else
    /// `ConnectFailed`.
    pub(crate) fn ended(qp: QpNum, established: bool, failure: ConnectFailure) -> Self {
        match failure {
            failure if !established => Self::ConnectFailed { qp, failure },
            ConnectFailure::Failed(reason) => Self::Closed { qp, reason },
            ConnectFailure::Rejected(_) => Self::Closed { qp, reason: CloseReason::Peer },
        }
    }
}

/// One shard's view of a provider.
pub trait Fabric: fmt::Debug {
    /// The scheme of its addresses: `tcp`, `tls`, `rdma`, `sim`.
    fn scheme(&self) -> &'static str;

    /// True when registered memory is taken from the system at once, as by devices that pin it,
    /// so that registering much of it may well be refused (RLIMIT_MEMLOCK).
    fn pins_memory(&self) -> bool {
        false
    }

    /// True when a bind or revoke is a work request of the device that takes its time
    /// ([`BindResult::Pending`]), so that one of them is better than two.
    fn binds_are_requests(&self) -> bool {
        false
    }

    /// True when a client may prove by messages who it is (CHALLENGE and AUTH). Not where everybody
    /// on the way can take over a connection behind the proof.
    fn takes_proofs(&self) -> bool {
        true
    }

    /// Bytes of memory a peer can make us hold with each connection, besides what is registered.
    fn connection_bytes(&self) -> u64 {
        0
    }

    /// True when a peer's send may invalidate a key that a [`Window`] has here.
    fn remote_invalidate(&self) -> bool {
        true
    }

    /// A new protection domain on the device that the connection uses.
    ///
    /// # Errors
    /// `System` when the device refuses, or no device of this provider leads there.
    fn alloc_pd(&mut self, of: PdUse<'_>) -> Result<Arc<dyn ProtectionDomain>, FabricError>;

    /// True when a request may be accepted in a domain that was made for an earlier one: both came
    /// over the same device.
    fn fits(&self, pd: &Arc<dyn ProtectionDomain>, request: &ConnRequest) -> bool;

    /// Registers memory on another thread: `next_registration` returns it some time later, under
    /// this number. Where registering does not block it is done at once, and returned.
    fn register_async(
        &mut self,
        _id: u64,
        what: ToRegister,
    ) -> Option<Result<Registered, RegisterError>> {
        Some(what.register())
    }

    /// The next asynchronous registration that ended. `poll` is true when there may be one.
    fn next_registration(&mut self) -> Option<AsyncRegistration> {
        None
    }

    /// Starts to listen. Returns the address really used (port 0 asks for a free one).
    ///
    /// # Errors
    /// `System` with the address when the port is taken or not allowed.
    fn listen(&mut self, address: SocketAddr) -> Result<SocketAddr, FabricError>;

    /// Addresses that are listened on no longer, because their device is gone, and are tried again.
    fn lost_listeners(&self) -> Vec<SocketAddr> {
        Vec::new()
    }

    /// A session has a path from this address (`known`), or one path less. Where too many
    /// connections wait for their request, those of known addresses are closed last. To be called
    /// as often with false as with true.
    fn know_peer(&mut self, _peer: IpAddr, _known: bool) {}

    /// Connections that were closed before their request came, since there were too many. Since
    /// start.
    fn crowded_out(&self) -> u64 {
        0
    }

    /// The next peer that did not prove who it is in the handshake of its connection, and why. Of
    /// many at a time some are left out. `poll` is true when there may be one.
    fn next_refused(&mut self) -> Option<(SocketAddr, ProofError)> {
        None
    }

    /// Stops listening; requests not yet reported are dropped.
    fn stop_listening(&mut self);

    /// Starts to connect. Ends in `Established` or `ConnectFailed`.
    ///
    /// # Errors
    /// `System` when it cannot even start.
    fn connect(
        &mut self,
        now: Instant,
        pd: &Arc<dyn ProtectionDomain>,
        params: &ConnectParams,
    ) -> Result<QpNum, FabricError>;

    /// Accepts a peer's request on this shard. Receives may be posted at once, before `flush`
    /// lets the reply go out.
    ///
    /// # Errors
    /// `System` when the queue pair cannot be made; the request is closed.
    fn accept(
        &mut self,
        now: Instant,
        pd: &Arc<dyn ProtectionDomain>,
        request: ConnRequest,
        limits: QpLimits,
        private_data: &PrivateData,
    ) -> Result<QpNum, FabricError>;

    /// Refuses a peer's request.
    fn reject(&mut self, now: Instant, request: ConnRequest, private_data: &PrivateData);

    /// Adds a work request to the queue pair's batch.
    ///
    /// # Errors
    /// `QpState`, `QueueFull`, `LocalMemory`, `Unsupported`; nothing was posted.
    fn post_send(&mut self, qp: QpNum, wr: WorkRequest) -> Result<(), FabricError>;

    /// Posts a receive; None takes no bytes (immediates, empty sends).
    ///
    /// # Errors
    /// As `post_send`.
    fn post_recv(&mut self, qp: QpNum, wr_id: u64, buf: Option<Sge>) -> Result<(), FabricError>;

    /// Binds a window to a part of its parent under a new key.
    ///
    /// # Errors
    /// As `post_send`; `LocalMemory` when `slice` is not part of the parent's region.
    fn bind(
        &mut self,
        qp: QpNum,
        window: &Arc<dyn Window>,
        slice: &MemSlice,
        access: Access,
        wr_id: u64,
    ) -> Result<BindResult, FabricError>;

    /// Takes a window's key away. When it is in force no peer can reach the memory through it.
    /// `QpState` when a peer is in the middle of writing through it.
    ///
    /// # Errors
    /// As `post_send`.
    fn revoke(
        &mut self,
        qp: QpNum,
        window: &Arc<dyn Window>,
        wr_id: u64,
    ) -> Result<BindResult, FabricError>;

    /// Hands everything posted since the last call to the transport.
    fn flush(&mut self, now: Instant);

    /// Ends a connection in order: what was posted goes out first, within a bound of the
    /// provider's. Ends in `Closed`.
    fn disconnect(&mut self, now: Instant, qp: QpNum);

    /// Ends a connection at once. Ends in `Closed`, still after all flushes; an attempt that is
    /// still under way ends in `ConnectFailed` instead.
    fn abort(&mut self, now: Instant, qp: QpNum);

    /// Our address of a connection that is up. None where the system does not say. A system call;
    /// for rare questions only.
    fn local_ip(&self, qp: QpNum) -> Option<IpAddr>;

    /// True when the peer's system has acknowledged all that was sent: link and system work, and if
    /// nothing comes back the peer's program is what is slow. None when that is unknown. A
    /// system call; for rare questions only.
    fn peer_has_all(&self, _qp: QpNum) -> Option<bool> {
        None
    }

    /// Moves work on. True when anything happened.
    fn poll(&mut self, now: Instant) -> bool;

    /// The next event.
    fn next_event(&mut self) -> Option<FabricEvent>;

    /// When `poll` wants to be called even if nothing happens.
    fn deadline(&self) -> Option<Instant>;

    /// Bytes and frames since start, for statistics.
    fn counters(&self) -> FabricCounters;
}

/// What a shard's provider did since start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct FabricCounters {
    /// Payload and header bytes handed to the transport.
    pub bytes_sent: u64,
    /// Bytes taken from the transport.
    pub bytes_received: u64,
    /// Bytes of RDMA writes and read responses received straight into their target.
    pub bytes_direct: u64,
    /// Bytes of RDMA writes and read responses copied from a staging buffer.
    pub bytes_copied: u64,
    /// Calls that handed data to the transport.
    pub sends: u64,
    /// Calls that took data from the transport.
    pub receives: u64,
    /// Frames dropped for a wrong checksum (each ends its connection).
    pub crc_errors: u64,
}

impl FabricCounters {
    /// Adds what another provider, or the same on another shard, did.
    pub const fn add(&mut self, other: &Self) {
        self.bytes_sent += other.bytes_sent;
        self.bytes_received += other.bytes_received;
        self.bytes_direct += other.bytes_direct;
        self.bytes_copied += other.bytes_copied;
        self.sends += other.sends;
        self.receives += other.receives;
        self.crc_errors += other.crc_errors;
    }
}
