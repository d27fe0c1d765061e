//! Provider traits and their contract.
//!
//! The fabric is modeled on verbs. A [`Fabric`] is one shard's view of a provider, with its queue
//! pairs, completions and connection events; it is used only from that shard's thread. It is also a
//! [`Listener`], with the addresses it listens on and the requests that arrive there, and its
//! [`Capabilities`] say what differs between providers. A [`ProtectionDomain`] is shared between
//! shards: memory registered in it is reachable through every queue pair created in it, on any
//! shard.
//!
//! Contract, the same for every provider and checked by `conformance/`:
//! - **Order.** Work requests on one queue pair take effect at the peer in posting order. When a
//!   receive completes at the peer, all bytes of earlier writes on that queue pair are in place.
//! - **Completions.** Every signaled request, failed request and posted receive completes exactly
//!   once. A successful write or send completion means that the local buffer is free; it does not
//!   prove arrival (on iwarp it means "handed to TCP").
//! - **Flush on error.** When a queue pair enters the error state, all posted work completes as
//!   `Flushed`, followed by one [`FabricEvent::Closed`]. After `Closed` nothing more is reported
//!   for the queue pair, and local memory is neither read nor written on its behalf.
//! - **Receives** must be posted before the message can arrive; iwarp cannot retry and ends the
//!   connection. They may be posted as soon as the queue pair exists, even while it is still
//!   connecting; a failed attempt flushes them before `ConnectFailed`. Everything else is posted
//!   after `Established`.
//! - **Nothing blocks.** `poll` makes progress; `flush` hands posted work to the transport in one
//!   batch per queue pair.
//! - **No unlimited waits.** Connection attempts end within [`ConnectParams::timeout`], start-ups
//!   of accepted connections and graceful disconnects within the provider's own timeouts.

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

/// Returns the local address to connect from, with port 0 and the scope ID of the peer's address:
/// the system accepts a link-local address only with its interface.
pub fn with_scope(local: IpAddr, peer: SocketAddr) -> SocketAddr {
    let mut address = SocketAddr::new(local, 0);
    if let (SocketAddr::V6(own), SocketAddr::V6(peer)) = (&mut address, peer) {
        own.set_scope_id(peer.scope_id());
    }
    address
}

/// Maximum length of private data that a session may send: the space that RDMA CM leaves in a
/// connect request.
pub const PRIVATE_DATA_MAX: usize = 56;

/// Private data of a connect, accept or reject. Received data may be longer than what was sent
/// (RDMA CM pads with zeroes).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PrivateData {
    bytes: [u8; Self::CAPACITY],
    len: u8,
}

impl PrivateData {
    /// Maximum length (RDMA CM's accept carries up to 196 bytes).
    pub const CAPACITY: usize = 196;
    /// Empty private data.
    pub const EMPTY: Self = Self { bytes: [0; Self::CAPACITY], len: 0 };

    /// Creates private data from these bytes, truncated to the capacity.
    #[allow(clippy::cast_possible_truncation, reason = "at most 196")]
    pub fn new(from: &[u8]) -> Self {
        let len = from.len().min(Self::CAPACITY);
        let mut bytes = [0; Self::CAPACITY];
        bytes[..len].copy_from_slice(&from[..len]);
        Self { bytes, len: len as u8 }
    }

    /// Returns the bytes.
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

/// Access rights of a peer, or of a local operation, to registered memory. Local reads are always
/// allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Whether receives and local reads may write to the memory.
    pub local_write: bool,
    /// Whether the peer may RDMA-write to the memory.
    pub remote_write: bool,
    /// Whether the peer may RDMA-read from the memory.
    pub remote_read: bool,
}

impl Access {
    /// Source of sends and writes only.
    pub const LOCAL_READ: Self =
        Self { local_write: false, remote_write: false, remote_read: false };
    /// Source of sends and writes, target of receives and of local reads.
    pub const LOCAL: Self = Self { local_write: true, remote_write: false, remote_read: false };
    /// Same as `LOCAL`, and the peer may write.
    pub const REMOTE_WRITE: Self =
        Self { local_write: true, remote_write: true, remote_read: false };
    /// Same as `LOCAL`, and the peer may read.
    pub const REMOTE_READ: Self =
        Self { local_write: true, remote_write: false, remote_read: true };
}

/// Memory registration. Dropping the value deregisters the memory: later accesses by peers are
/// refused. A window holds its registration's `Arc` for as long as it exists.
pub trait MemoryRegistration: Send + Sync + fmt::Debug {
    /// Returns the key for local use in [`Sge::lkey`].
    fn lkey(&self) -> u32;
    /// Returns the key for the peer; refused if the registration has no remote access.
    fn rkey(&self) -> Rkey;
    /// Returns the address that the peer uses for byte 0 of the region.
    fn base(&self) -> u64;
    /// Returns the region, all of which is registered.
    fn region(&self) -> &Arc<Region>;

    /// Moves bytes that peers have written to a part of the region, or that a read has fetched, to
    /// the region's pieces. If the region is scattered, this must be called before the bytes are
    /// used: a provider that cannot access pieces uses bounce memory.
    fn collect(&self, _slice: &MemSlice) {}
}

/// Memory window: a separate key for part of a registration, which can be rebound and revoked
/// cheaply. Dropping the window revokes its key.
pub trait Window: Send + Sync + fmt::Debug {
    /// Returns the current key, or the last one if the window is not bound.
    fn rkey(&self) -> Rkey;

    /// Returns the window as the provider's own type.
    fn as_any(&self) -> &dyn Any;
}

/// Result of a bind or revoke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindResult {
    /// Takes effect now; no completion follows. The key is the new one (bind) or the dead one
    /// (revoke).
    Done(Rkey),
    /// Takes effect when the `Bind` completion with the given `wr_id` arrives, and before any later
    /// work request on the same queue pair begins, because work requests of a queue pair take
    /// effect in order. A message that contains the key may therefore follow immediately.
    Pending(Rkey),
}

/// Purpose of a new protection domain. With verbs, memory and queue pairs belong to one device,
/// which the addresses determine. Providers without devices ignore it.
#[derive(Clone, Copy, Debug)]
pub enum PdUse<'a> {
    /// For connecting, with the addresses later given to [`Fabric::connect`].
    Connect {
        /// Source address; None leaves the choice to the system.
        local: Option<IpAddr>,
        /// Address of the peer.
        remote: SocketAddr,
    },
    /// For accepting this request and others that arrive over the same device.
    Accept(&'a ConnRequest),
}

/// Set of memory and queue pairs that may be used together; one per path.
pub trait ProtectionDomain: Send + Sync + fmt::Debug {
    /// Registers a whole region. In a scattered region ([`Region::is_scattered`]), RDMA reads and
    /// writes access the pieces that its owner has assigned at that time; sends take only
    /// contiguous memory.
    ///
    /// # Errors
    /// `System` if the device refuses or a limit is exceeded (naming RLIMIT_MEMLOCK if it is that
    /// one), `NoKey` if all keys are in use.
    fn register(
        &self,
        region: &Arc<Region>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegistration>, FabricError>;

    /// Creates an unbound window over parts of `parent`.
    ///
    /// # Errors
    /// See [`Self::register`].
    fn window(&self, parent: &Arc<dyn MemoryRegistration>) -> Result<Arc<dyn Window>, FabricError>;

    /// Returns false if the device has no windows; `window` then always fails.
    fn has_windows(&self) -> bool {
        true
    }

    /// Returns false while a queue pair of the domain may still access memory. `Closed` guarantees
    /// that its queue pair does not; if a device could not destroy a queue pair, that guarantee is
    /// broken and this returns false.
    fn is_idle(&self) -> bool;

    /// Returns false if the domain's device has been removed. Memory registered in the domain
    /// delays the removal.
    fn is_present(&self) -> bool {
        true
    }

    /// Returns true if the device can be removed, so that `is_present` must be checked.
    fn is_removable(&self) -> bool {
        false
    }

    /// Frees unused windows, registrations and regions of the domain. If that may block, it happens
    /// on another thread some time after the call.
    fn free_later(&self, what: Box<dyn Any + Send>) {
        drop(what);
    }

    /// Returns the domain as the provider's own type.
    fn as_any(&self) -> &dyn Any;
}

/// Registered memory with windows over it.
#[derive(Debug)]
pub struct Registered {
    /// Registration.
    pub registration: Arc<dyn MemoryRegistration>,
    /// Windows, unbound.
    pub windows: Box<[Arc<dyn Window>]>,
}

/// Reason why a registration with windows failed.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The registration was refused.
    #[error("{0}")]
    Memory(FabricError),
    /// A window was refused.
    #[error("{0}")]
    Windows(FabricError),
    /// Nothing was refused, but the registration was no longer wanted.
    #[error("the registration is no longer wanted")]
    Unwanted,
}

/// Request to register memory.
#[derive(Clone, Debug)]
pub struct ToRegister {
    /// Protection domain.
    pub pd: Arc<dyn ProtectionDomain>,
    /// Memory.
    pub region: Arc<Region>,
    /// Existing registration with this access, if any; then only windows are created.
    pub registration: Option<Arc<dyn MemoryRegistration>>,
    /// Access that the registration allows.
    pub access: Access,
    /// Number of windows to create.
    pub windows: u16,
    /// If given, nothing is registered once this has been dropped.
    pub wanted: Option<Weak<()>>,
}

impl ToRegister {
    /// Registers the memory on the calling thread, however long that takes.
    ///
    /// # Errors
    /// Returns the part that was refused. Nothing remains registered in that case.
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

/// Outcome of an asynchronous registration.
#[derive(Debug)]
pub struct AsyncRegistration {
    /// ID chosen by the caller.
    pub id: u64,
    /// Domain of the registration.
    pub pd: Arc<dyn ProtectionDomain>,
    /// Registered memory, or the part that was refused.
    pub result: Result<Registered, RegisterError>,
    /// Duration of the registration.
    pub took: Duration,
}

/// Limits of a queue pair, from which the provider sizes its queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpLimits {
    /// Maximum number of outstanding send work requests.
    pub send_max: u32,
    /// Maximum number of posted receives.
    pub recv_max: u32,
}

/// Parameters of a connection attempt.
#[derive(Clone, Debug)]
pub struct ConnectParams {
    /// Source address; None leaves the choice to the system.
    pub local: Option<IpAddr>,
    /// Address of the peer.
    pub remote: SocketAddr,
    /// Private data sent with the request, at most [`PRIVATE_DATA_MAX`] bytes.
    pub private_data: PrivateData,
    /// Limits of the queue pair.
    pub limits: QpLimits,
    /// Maximum time until `Established`; after that, `ConnectFailed(TimedOut)`.
    pub timeout: Duration,
    /// Name that the peer's certificate must contain; None for the peer's address.
    pub peer_name: Option<Arc<str>>,
}

/// Connection request from a peer. It can be handed to another shard of the same provider before it
/// is accepted. Dropping it closes the connection without an answer.
pub struct ConnRequest {
    /// Private data of the peer.
    pub private_data: PrivateData,
    /// Address of the peer.
    pub peer: SocketAddr,
    /// Local address on which the request arrived.
    pub local: SocketAddr,
    /// Identity that the peer has proved.
    pub identity: PeerIdentity,
    /// Provider-specific state.
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

/// Reason why a connection attempt failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectFailure {
    /// The peer answered with a reject and this private data.
    Rejected(Box<PrivateData>),
    /// The attempt failed for another reason.
    Failed(CloseReason),
}

/// Event from a shard's provider. Most events are completions, which are moved several times, so
/// the large parts of other events are boxed.
#[derive(Debug)]
pub enum FabricEvent {
    /// An outgoing connection was established (with the peer's private data), or an accepted
    /// connection is ready. On iwarp the accepting side reports it once its reply is being sent.
    Established {
        /// Queue pair of the connection.
        qp: QpNum,
        /// Private data of the accept; empty on the accepting side.
        private_data: Box<PrivateData>,
    },
    /// A connection attempt failed; the queue pair no longer exists.
    ConnectFailed {
        /// Queue pair of the attempt.
        qp: QpNum,
        /// Reason.
        failure: ConnectFailure,
    },
    /// A peer requests a connection; answer with `accept` or `reject` within the provider's
    /// timeout.
    Request(Box<ConnRequest>),
    /// A work request or receive completed.
    Completion(WorkCompletion),
    /// The connection ended and everything posted has been flushed. The queue pair no longer
    /// exists.
    Closed {
        /// Queue pair of the connection.
        qp: QpNum,
        /// Reason.
        reason: CloseReason,
    },
}

const _: () = assert!(size_of::<FabricEvent>() <= 48, "as small as a completion");

impl FabricEvent {
    /// Returns the last event of a queue pair: `Closed` if it had been established, otherwise
    /// `ConnectFailed`.
    pub(crate) fn ended(qp: QpNum, established: bool, failure: ConnectFailure) -> Self {
        match failure {
            failure if !established => Self::ConnectFailed { qp, failure },
            ConnectFailure::Failed(reason) => Self::Closed { qp, reason },
            ConnectFailure::Rejected(_) => Self::Closed { qp, reason: CloseReason::Peer },
        }
    }
}

/// Properties of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Scheme of its addresses: `tcp`, `tls`, `rdma`, `sim`.
    pub scheme: &'static str,
    /// Whether registering memory allocates all of it immediately, as devices that pin memory do,
    /// so large registrations are likely to be refused (RLIMIT_MEMLOCK).
    pub pins_memory: bool,
    /// Whether data of scattered regions ([`Region::is_scattered`]) is copied through bounce
    /// memory.
    pub bounces: bool,
    /// Whether binds and revokes are work requests of the device ([`BindResult::Pending`]) and take
    /// time, so one request should do the work of two where possible.
    pub binds_are_requests: bool,
    /// Whether a client may prove its identity with messages (CHALLENGE and AUTH). False if an
    /// attacker on the network could take over a connection after the proof.
    pub takes_proofs: bool,
    /// Bytes of memory that a peer can make this end hold per connection, in addition to registered
    /// memory.
    pub connection_bytes: u64,
    /// Whether a peer's send may invalidate the key of a local [`Window`].
    pub remote_invalidate: bool,
}

impl Capabilities {
    /// Returns the properties of a provider whose memory costs nothing and whose binds take effect
    /// immediately, and which supports proofs and remote invalidation.
    pub const fn of(scheme: &'static str) -> Self {
        Self {
            scheme,
            pins_memory: false,
            bounces: false,
            binds_are_requests: false,
            takes_proofs: true,
            connection_bytes: 0,
            remote_invalidate: true,
        }
    }
}

/// Listening half of a shard's provider: its addresses, and the requests that arrive there.
pub trait Listener: fmt::Debug {
    /// Starts listening. Returns the address actually used (port 0 selects a free port).
    ///
    /// # Errors
    /// `System` with the address if the port is in use or not permitted.
    fn listen(&mut self, address: SocketAddr) -> Result<SocketAddr, FabricError>;

    /// Returns the addresses whose listeners were lost with their devices and are being retried.
    fn lost_listeners(&self) -> Vec<SocketAddr> {
        Vec::new()
    }

    /// Records that a session has gained (`known`) or lost a path from this address. When too many
    /// connections are waiting for their requests, those from known addresses are closed last.
    /// Calls with true and false must be balanced.
    fn know_peer(&mut self, _peer: IpAddr, _known: bool) {}

    /// Returns the number of connections closed before their requests arrived because there were
    /// too many, since start.
    fn crowded_out(&self) -> u64 {
        0
    }

    /// Returns the next peer that failed to prove its identity in its connection's handshake, and
    /// why. Some are omitted if there are many at once. `poll` returns true when there may be one.
    fn next_refused(&mut self) -> Option<(SocketAddr, ProofError)> {
        None
    }

    /// Stops listening; requests not yet reported are dropped.
    fn stop_listening(&mut self);

    /// Returns true if a request may be accepted in a domain that was created for an earlier one,
    /// because both arrived over the same device.
    fn fits(&self, pd: &Arc<dyn ProtectionDomain>, request: &ConnRequest) -> bool;

    /// Accepts a peer's request on this shard. Receives may be posted immediately, before `flush`
    /// sends the reply.
    ///
    /// # Errors
    /// `System` if the queue pair cannot be created; the request is closed.
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
}

/// One shard's view of a provider: memory, connections, work requests and their completions.
pub trait Fabric: Listener {
    /// Returns the properties of the provider.
    fn capabilities(&self) -> Capabilities;

    /// Creates a protection domain on the device that the connection uses.
    ///
    /// # Errors
    /// `System` if the device refuses, or if no device of this provider has a route to the peer.
    fn alloc_pd(&mut self, of: PdUse<'_>) -> Result<Arc<dyn ProtectionDomain>, FabricError>;

    /// Registers memory on another thread; `next_registration` later returns the result with this
    /// ID. If registration does not block, it is done immediately and its result returned.
    fn register_async(
        &mut self,
        _id: u64,
        what: ToRegister,
    ) -> Option<Result<Registered, RegisterError>> {
        Some(what.register())
    }

    /// Returns the next completed asynchronous registration. `poll` returns true when there may be
    /// one.
    fn next_registration(&mut self) -> Option<AsyncRegistration> {
        None
    }

    /// Starts connecting. The attempt ends with `Established` or `ConnectFailed`.
    ///
    /// # Errors
    /// `System` if the attempt cannot be started.
    fn connect(
        &mut self,
        now: Instant,
        pd: &Arc<dyn ProtectionDomain>,
        params: &ConnectParams,
    ) -> Result<QpNum, FabricError>;

    /// Adds a work request to the queue pair's batch.
    ///
    /// # Errors
    /// `QpState`, `QueueFull`, `LocalMemory` or `Unsupported`; nothing was posted.
    fn post_send(&mut self, qp: QpNum, wr: WorkRequest) -> Result<(), FabricError>;

    /// Posts a receive. Without a buffer, the receive takes no data (immediates, empty sends).
    ///
    /// # Errors
    /// See [`Self::post_send`].
    fn post_recv(&mut self, qp: QpNum, wr_id: u64, buf: Option<Sge>) -> Result<(), FabricError>;

    /// Binds a window to part of its parent under a new key.
    ///
    /// # Errors
    /// See [`Self::post_send`]; `LocalMemory` if `slice` is not part of the parent's region.
    fn bind(
        &mut self,
        qp: QpNum,
        window: &Arc<dyn Window>,
        slice: &MemSlice,
        access: Access,
        wr_id: u64,
    ) -> Result<BindResult, FabricError>;

    /// Revokes a window's key. Once this takes effect, no peer can access the memory through the
    /// window. Fails with `QpState` while a peer is writing through it.
    ///
    /// # Errors
    /// See [`Self::post_send`].
    fn revoke(
        &mut self,
        qp: QpNum,
        window: &Arc<dyn Window>,
        wr_id: u64,
    ) -> Result<BindResult, FabricError>;

    /// Hands everything posted since the last call to the transport.
    fn flush(&mut self, now: Instant);

    /// Disconnects gracefully: posted work is sent first, within the provider's timeout. The
    /// connection ends with `Closed`.
    fn disconnect(&mut self, now: Instant, qp: QpNum);

    /// Aborts a connection. It still ends with `Closed`, after all flushes; a pending attempt ends
    /// with `ConnectFailed` instead.
    fn abort(&mut self, now: Instant, qp: QpNum);

    /// Returns the local address of an established connection, or None if the system does not
    /// report it. Makes a system call; not for frequent use.
    fn local_ip(&self, qp: QpNum) -> Option<IpAddr>;

    /// Returns true if the peer's system has acknowledged all sent data: the link and the system
    /// work, so if no answer comes, the peer's program is slow. None if that is unknown. Makes a
    /// system call; not for frequent use.
    fn peer_has_all(&self, _qp: QpNum) -> Option<bool> {
        None
    }

    /// Makes progress. Returns true if anything happened.
    fn poll(&mut self, now: Instant) -> bool;

    /// Returns the next event.
    fn next_event(&mut self) -> Option<FabricEvent>;

    /// Returns the time by which `poll` must be called even if nothing happens.
    fn deadline(&self) -> Option<Instant>;

    /// Returns the numbers of bytes and frames since start, for statistics.
    fn counters(&self) -> FabricCounters;
}

/// Statistics of a shard's provider since start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct FabricCounters {
    /// Payload and header bytes handed to the transport.
    pub bytes_sent: u64,
    /// Bytes received from the transport.
    pub bytes_received: u64,
    /// Bytes of RDMA writes and read responses received directly into their target.
    pub bytes_direct: u64,
    /// Bytes of RDMA writes and read responses copied from a staging buffer.
    pub bytes_copied: u64,
    /// Number of calls that handed data to the transport.
    pub sends: u64,
    /// Number of calls that received data from the transport.
    pub receives: u64,
    /// Number of frames dropped because of a wrong checksum (each closes its connection).
    pub crc_errors: u64,
}

impl FabricCounters {
    /// Adds the counters of another provider, or of the same provider on another shard.
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
