//! A path at the server: what its connections share, whichever shard they live on.
//!
//! The control shard owns a path's life (`state.rs`, `handshake.rs`); each shard that has a
//! connection of it owns that connection and the requests that came over it; how answers are
//! posted stands in `io.rs`.

pub mod chunks;
pub mod handshake;
pub mod io;
pub mod key;
pub mod state;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rtrs_core::fabric::{CloseReason, PeerIdentity, ProtectionDomain};
use rtrs_core::ids::{ConnIndex, CoreIndex, PathUuid, PermitId, ProviderIndex};
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::WireError;

use crate::access_list::Client;
use crate::engine::io::permits::{Holder, PermitTable};
use crate::engine::session::SessionShared;
use crate::path::chunks::{ChunkPool, MessageBuffers};
use crate::stats::PathCounters;
use handshake::InfoError;
pub use key::PathKey;
use state::PathState;

/// What the connections of one path share.
#[derive(Debug)]
pub struct PathShared {
    /// Its number.
    pub key: PathKey,
    /// Its session.
    pub session: Arc<SessionShared>,
    /// Where it comes from.
    pub origin: PathOrigin,
    /// The domain of its memory and queue pairs.
    pub pd: Arc<dyn ProtectionDomain>,
    /// Each request gets a fresh key to its chunk.
    pub fresh_keys: bool,
    /// Answers carry how long their requests took here; only with fresh keys.
    pub times: bool,
    /// Buffers of its small messages.
    pub messages: MessageBuffers,
    /// Its chunks, at the latest from the moment INFO_REQ was accepted.
    pub chunks: OnceLock<ChunkPool>,
    /// What it did, per shard.
    pub counters: PathCounters,
    /// Where its client has to prove who it is on the path.
    gate: Option<ProofGate>,
    state: AtomicU8,
    heard: AtomicU64,
}

/// What keeps a path apart from its session until its client has proved who it is.
#[derive(Debug)]
struct ProofGate {
    /// Who, once that is proved.
    identity: OnceLock<PeerIdentity>,
    /// Of its requests until then: they meet no other path's.
    permits: PermitTable,
}

/// Where a path comes from, as its first connection says.
#[derive(Clone, Debug)]
pub struct PathOrigin {
    /// What the client calls it.
    pub uuid: PathUuid,
    /// Connections it has when complete.
    pub cid_num: u16,
    /// Which of the shard's providers carries it.
    pub provider: ProviderIndex,
    /// That provider's scheme.
    pub transport: &'static str,
    /// The client's address.
    pub peer: SocketAddr,
    /// Our address.
    pub local: SocketAddr,
    /// The client takes CHANGED.
    pub takes_changed: bool,
    /// The client takes exports that are standby here.
    pub takes_standby: bool,
    /// What its first connection proved; all others proved the same. Without TLS, nothing.
    pub identity: PeerIdentity,
}

impl PathShared {
    /// A path that connects.
    pub fn new(
        key: PathKey,
        session: Arc<SessionShared>,
        origin: PathOrigin,
        (pd, fresh_keys, times): (Arc<dyn ProtectionDomain>, bool, bool),
        messages: MessageBuffers,
        (cores, proves): (u16, bool),
    ) -> Arc<Self> {
        let gate = proves.then(|| ProofGate {
            identity: OnceLock::new(),
            permits: PermitTable::new(session.limits.queue_depth()),
        });
        Arc::new(Self {
            key,
            session,
            origin,
            pd,
            fresh_keys,
            times: times && fresh_keys,
            messages,
            chunks: OnceLock::new(),
            counters: PathCounters::new(cores),
            gate,
            state: AtomicU8::new(PathState::Connecting as u8),
            heard: AtomicU64::new(0),
        })
    }

    /// The client, as access lists name it.
    pub(crate) fn client(&self) -> Client<'_> {
        Client::of(&self.identity().who, self.origin.peer, self.session.id)
    }

    /// Who the client has proved to be.
    pub(crate) fn identity(&self) -> &PeerIdentity {
        let proved = self.gate.as_ref().and_then(|gate| gate.identity.get());
        proved.unwrap_or(&self.origin.identity)
    }

    /// True until the client has proved who it is, where it has to: nothing else is answered.
    pub fn is_unproved(&self) -> bool {
        self.gate.as_ref().is_some_and(|gate| gate.identity.get().is_none())
    }

    /// The client has proved who it is; the control shard only. False if it has before.
    pub(crate) fn prove(&self, identity: PeerIdentity) -> bool {
        self.gate.as_ref().is_some_and(|gate| gate.identity.set(identity).is_ok())
    }

    /// The permits of requests that came before the proof, or after.
    pub(crate) fn permits(&self, unproved: bool) -> &PermitTable {
        let own = self.gate.as_ref().filter(|_| unproved).map(|gate| &gate.permits);
        own.unwrap_or(&self.session.permits)
    }

    /// Who holds a permit, this path if it does.
    pub(crate) fn permit_holder(&self, permit: PermitId, holder: Holder) -> Option<Holder> {
        let own = self.gate.as_ref().and_then(|gate| gate.permits.holder(permit));
        own.filter(|own| *own == holder).or_else(|| self.session.permits.holder(permit))
    }

    /// Gives a permit back that this path holds.
    pub(crate) fn release_permit(&self, permit: PermitId, holder: Holder) {
        let gate = self.gate.as_ref();
        let own = gate.is_some_and(|gate| gate.permits.holder(permit) == Some(holder));
        self.permits(own).release(permit, holder);
    }

    /// The state as last published by the control shard.
    pub fn state(&self) -> PathState {
        PathState::from_u8(self.state.load(Ordering::Acquire))
    }

    /// Publishes a state; the control shard only.
    pub(crate) fn publish(&self, state: PathState) {
        self.state.store(state as u8, Ordering::Release);
    }

    /// Something came from the peer. Noted at most once a millisecond by each shard.
    pub(crate) fn note_heard(&self, now: Instant) {
        self.heard.store(now.as_nanos(), Ordering::Relaxed);
    }

    /// When something last came from the peer, on any shard.
    pub fn heard(&self) -> Instant {
        Instant::from_nanos(self.heard.load(Ordering::Relaxed))
    }
}

/// How often a shard notes a path's traffic at most.
pub const HEARD_EVERY: Duration = Duration::from_millis(1);

/// The shard that connection `cid` of a session's paths lives on: service connections on shard 0,
/// the others in turn from the session's first shard on.
pub fn core_of(cid: ConnIndex, first: CoreIndex, cores: u16) -> CoreIndex {
    let turn = cid.0.checked_sub(1).map_or(0, |turn| u32::from(turn) + u32::from(first.0));
    CoreIndex(u16::try_from(turn % u32::from(cores.max(1))).unwrap_or(0))
}

/// What a peer did that ends its path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerFault {
    /// A request before the handshake was over.
    #[error("a request came before the handshake was over")]
    Early,
    /// An immediate whose chunk or offset does not exist.
    #[error("immediate {0:#010x} names no place in a chunk")]
    Immediate(u32),
    /// A message without an immediate where none is due.
    #[error("a message came where none is due")]
    Message,
    /// A permit that is in flight on this path.
    #[error("permit {0} was used again before its answer")]
    PermitReused(u16),
    /// Bytes that are no request and name nobody to answer.
    #[error("{0}")]
    Wire(WireError),
    /// INFO_REQ was refused.
    #[error("{0}")]
    Info(InfoError),
}

/// Why a path ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PathEnd {
    /// The peer broke the protocol.
    #[error("the peer broke the protocol: {0}")]
    Peer(PeerFault),
    /// Another session has the name.
    #[error("another session has the name {0:?} (session-name)")]
    NameTaken(String),
    /// A connection ended.
    #[error("connection {cid} ended: {reason}")]
    Connection {
        /// Which.
        cid: ConnIndex,
        /// Why.
        reason: CloseReason,
    },
    /// Our own transport refused something.
    #[error("the transport refused: {0}")]
    Fabric(String),
    /// Something happened that cannot: a bug of this server.
    #[error("internal error: {0}")]
    Internal(&'static str),
    /// There is no memory for it, or what else it needs here.
    #[error("it cannot be served: {0}")]
    Unserved(String),
    /// The handshake took too long.
    #[error("the handshake was not over in time")]
    HandshakeTimeout,
    /// Its client has not proved who it is.
    #[error("its client has not proved who it is in time")]
    Unproved,
    /// Its client has not proved who it is, and others need its place.
    #[error("its client has not proved who it is, and others need its place")]
    CrowdedUnproved,
    /// Its session has turned out to be one with other limits.
    #[error("another path has proved whose its session is, and with another queue depth")]
    OtherClient,
    /// Nobody has proved in time that the session is his.
    #[error("no path is left of its session whose client has proved who it is")]
    Orphaned,
    /// Its session has opened no export, and others need its place.
    #[error(
        "its session has opened no export, and others need its place (half-open-max, sessions-max)"
    )]
    Crowded,
    /// Its session has opened no export in time.
    #[error("its session has opened no export in time (open-timeout)")]
    Unopened,
    /// The peer is silent.
    #[error("the peer does not answer heartbeats")]
    Silent,
    /// The client connects this path anew, so this one is dead.
    #[error("the client connects it anew")]
    Replaced,
    /// The client has given it up and says so over another path.
    #[error("the client has given it up")]
    Fenced,
    /// The client sent a request again over another path while this one still has it, so it gave
    /// this one up.
    #[error("its client sends its requests again over path {0}")]
    Superseded(PathKey),
    /// The operator ended it.
    #[error("ended by the operator")]
    Operator,
    /// The operator ended its session.
    #[error("its session was evicted by the operator")]
    Evicted,
    /// The access lists have changed and do not let its client do what the session does.
    #[error("the access lists no longer allow it")]
    NotAllowed,
    /// Its client's certificate or key is no longer one that the server takes.
    #[error("its client's certificate or key is no longer accepted")]
    Unknown,
    /// Another gateway serves an export of its session.
    #[error("an export of its session has moved to another gateway")]
    Moved,
    /// The server stops.
    #[error("the server stops")]
    Shutdown,
}

impl PathEnd {
    /// True when connections should end at once instead of in order.
    pub const fn is_abrupt(&self) -> bool {
        !matches!(self, Self::Shutdown)
    }
}
