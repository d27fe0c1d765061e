//! `BridgeConfig`: the bounds of one shard's bridge.

use rtrs_core::time::Duration;

use crate::proto::wire::PAYLOAD_MAX;

/// Bounds of one shard's bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BridgeConfig {
    /// Bytes of buffers on this shard: the largest piece of a request, 32 MiB as a rule, and
    /// two buffers of 260 KiB for every connection must fit. Bridges that share their pools have
    /// them in common, up to about 60 in a pool of 64 MiB. Memory is real only once it was used.
    pub buffer_bytes: usize,
    /// Connections on this shard; more are closed at once.
    pub connections_max: usize,
    /// Requests in flight on this shard; one connection has at most half of them.
    pub requests_max: u32,
    /// Bytes of buffers that are made real at start and used first, so that this much traffic
    /// needs no fresh memory.
    pub touched_bytes: usize,
    /// Largest read or write in one request that clients are offered.
    pub max_payload: u32,
    /// How long a request may wait for a change that it overlaps and that nobody waits for any
    /// more; then it fails. None: as long as that takes.
    pub deferred_max: Option<Duration>,
    /// Another host may write to the device at the same time. Then changes of parts of blocks are
    /// refused unless the device takes partial writes.
    pub shared_writes: bool,
}

impl Default for BridgeConfig {
    fn default() -> Self {
        Self {
            buffer_bytes: 64 << 20,
            connections_max: 48,
            requests_max: 1024,
            touched_bytes: 0,
            max_payload: PAYLOAD_MAX,
            deferred_max: None,
            shared_writes: false,
        }
    }
}
