//! A path on the server: the state that its connections share across shards.
//!
//! The control shard owns the state of a path (`state.rs`, `handshake.rs`); `end.rs` lists the
//! reasons why a path ends. Each shard with a connection of the path owns that connection and the
//! requests that arrived over it. `io.rs` posts answers.

pub mod chunks;
pub mod end;
pub mod handshake;
pub mod io;
pub mod key;
pub mod state;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rtrs_core::fabric::{PeerIdentity, ProtectionDomain};
use rtrs_core::ids::{ConnIndex, CoreIndex, PathUuid, PermitId, ProviderIndex};
use rtrs_core::time::{Duration, Instant};

use crate::access_list::Client;
use crate::engine::io::permits::{Holder, PermitTable};
use crate::engine::session::SessionShared;
use crate::path::chunks::{ChunkPool, MessageBuffers};
use crate::stats::PathCounters;
pub use end::{InfoError, PathEnd, PeerFault};
pub use key::PathKey;
use state::PathState;

/// State shared by the connections of one path.
#[derive(Debug)]
pub struct PathShared {
    /// Number of the path.
    pub key: PathKey,
    /// Session of the path.
    pub session: Arc<SessionShared>,
    /// Origin of the path.
    pub origin: PathOrigin,
    /// Protection domain of the path's memory and queue pairs.
    pub pd: Arc<dyn ProtectionDomain>,
    /// Whether each request gets a fresh key for its chunk.
    pub fresh_keys: bool,
    /// Whether answers carry the time that their requests took on this server; only with fresh
    /// keys.
    pub times: bool,
    /// Buffers for the path's small messages.
    pub messages: MessageBuffers,
    /// Chunks of the path, set when INFO_REQ is accepted or earlier.
    pub chunks: OnceLock<ChunkPool>,
    /// Counters of the path, per shard.
    pub counters: PathCounters,
    /// Present if the client must authenticate on the path.
    gate: Option<ProofGate>,
    state: AtomicU8,
    heard: AtomicU64,
}

/// Separates a path from its session until the client has authenticated.
#[derive(Debug)]
struct ProofGate {
    /// Identity of the client, once proved.
    identity: OnceLock<PeerIdentity>,
    /// Permits of requests that arrive before the proof; kept apart, so that they cannot conflict
    /// with another path's permits.
    permits: PermitTable,
}

/// Origin of a path, as described by its first connection.
#[derive(Clone, Debug)]
pub struct PathOrigin {
    /// UUID that the client gave the path.
    pub uuid: PathUuid,
    /// Number of connections that the complete path has.
    pub cid_num: u16,
    /// Index of the shard's provider that carries the path.
    pub provider: ProviderIndex,
    /// Scheme of that provider.
    pub transport: &'static str,
    /// Address of the client.
    pub peer: SocketAddr,
    /// Address of the server.
    pub local: SocketAddr,
    /// Whether the client accepts CHANGED.
    pub takes_changed: bool,
    /// Whether the client accepts exports for which this server is standby.
    pub takes_standby: bool,
    /// Whether the client accepts answers with the time that its requests took on this server.
    pub takes_times: bool,
    /// Whether the client supports refusals in INFO_RSP.
    pub takes_info_refusals: bool,
    /// Whether the client must authenticate on the path.
    pub must_authenticate: bool,
    /// Identity that the first connection proved; the others proved the same one. Anonymous without
    /// TLS.
    pub identity: PeerIdentity,
}

/// Resources of a new path, apart from its chunks.
#[derive(Debug)]
pub struct PathResources {
    /// Protection domain of the path's memory and queue pairs.
    pub pd: Arc<dyn ProtectionDomain>,
    /// Whether each request gets a fresh key for its chunk.
    pub fresh_keys: bool,
    /// Buffers for the path's small messages.
    pub messages: MessageBuffers,
}

impl PathShared {
    /// Creates a path that is connecting, on a server with `cores` shards.
    pub fn new(
        key: PathKey,
        session: Arc<SessionShared>,
        origin: PathOrigin,
        resources: PathResources,
        cores: u16,
    ) -> Arc<Self> {
        let PathResources { pd, fresh_keys, messages } = resources;
        let gate = origin.must_authenticate.then(|| ProofGate {
            identity: OnceLock::new(),
            permits: PermitTable::new(session.limits.queue_depth()),
        });
        Arc::new(Self {
            key,
            session,
            pd,
            fresh_keys,
            times: origin.takes_times && fresh_keys,
            origin,
            messages,
            chunks: OnceLock::new(),
            counters: PathCounters::new(cores),
            gate,
            state: AtomicU8::new(PathState::Connecting as u8),
            heard: AtomicU64::new(0),
        })
    }

    /// The client, as access lists see it.
    pub(crate) fn client(&self) -> Client<'_> {
        Client::of(&self.identity().who, self.origin.peer, self.session.id)
    }

    /// Identity that the client has proved.
    pub(crate) fn identity(&self) -> &PeerIdentity {
        let proved = self.gate.as_ref().and_then(|gate| gate.identity.get());
        proved.unwrap_or(&self.origin.identity)
    }

    /// Whether the client must still authenticate. Until it has, no other request is answered.
    pub fn is_unproved(&self) -> bool {
        self.gate.as_ref().is_some_and(|gate| gate.identity.get().is_none())
    }

    /// Records the client's identity. For the control shard only. Returns false if it was already
    /// recorded.
    pub(crate) fn prove(&self, identity: PeerIdentity) -> bool {
        self.gate.as_ref().is_some_and(|gate| gate.identity.set(identity).is_ok())
    }

    /// Permit table for requests that arrived before (`unproved`) or after the proof.
    pub(crate) fn permits(&self, unproved: bool) -> &PermitTable {
        let own = self.gate.as_ref().filter(|_| unproved).map(|gate| &gate.permits);
        own.unwrap_or(&self.session.permits)
    }

    /// Holder of a permit; this path if it holds a permit with that number.
    pub(crate) fn permit_holder(&self, permit: PermitId, holder: Holder) -> Option<Holder> {
        let own = self.gate.as_ref().and_then(|gate| gate.permits.holder(permit));
        own.filter(|own| *own == holder).or_else(|| self.session.permits.holder(permit))
    }

    /// Releases a permit that this path holds.
    pub(crate) fn release_permit(&self, permit: PermitId, holder: Holder) {
        let gate = self.gate.as_ref();
        let own = gate.is_some_and(|gate| gate.permits.holder(permit) == Some(holder));
        self.permits(own).release(permit, holder);
    }

    /// State last published by the control shard.
    pub fn state(&self) -> PathState {
        PathState::from_u8(self.state.load(Ordering::Acquire))
    }

    /// Publishes a state. For the control shard only.
    pub(crate) fn publish(&self, state: PathState) {
        self.state.store(state as u8, Ordering::Release);
    }

    /// Records that something arrived from the peer. Each shard does this at most once a
    /// millisecond.
    pub(crate) fn note_heard(&self, now: Instant) {
        self.heard.store(now.as_nanos(), Ordering::Relaxed);
    }

    /// Time when something last arrived from the peer, on any shard.
    pub fn heard(&self) -> Instant {
        Instant::from_nanos(self.heard.load(Ordering::Relaxed))
    }
}

/// Minimum interval at which a shard records traffic of a path.
pub const HEARD_EVERY: Duration = Duration::from_millis(1);

/// Shard of connection `cid` of a session's paths: service connections are on shard 0, the others
/// round-robin, starting at the session's first shard.
pub fn core_of(cid: ConnIndex, first: CoreIndex, cores: u16) -> CoreIndex {
    let turn = cid.0.checked_sub(1).map_or(0, |turn| u32::from(turn) + u32::from(first.0));
    CoreIndex(u16::try_from(turn % u32::from(cores.max(1))).unwrap_or(0))
}
