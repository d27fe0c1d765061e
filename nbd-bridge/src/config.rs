//! `BridgeConfig`: limits of one shard's bridge.

use rtrs_core::time::Duration;

use crate::proto::wire::PAYLOAD_MAX;

/// Limits of one shard's bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BridgeConfig {
    /// Bytes of buffers on this shard. They must hold the largest piece of a request (usually 32
    /// MiB) and two 260 KiB buffers for every connection. Bridges with the same pools share these
    /// bytes, up to about 60 bridges in a pool of 64 MiB. Physical memory is allocated on first
    /// use.
    pub buffer_bytes: usize,
    /// Maximum number of connections on this shard; further ones are closed immediately.
    pub connections_max: usize,
    /// Maximum number of requests in flight on this shard. One connection can use at most half of
    /// them.
    pub requests_max: u32,
    /// Bytes of buffers that are populated at startup and used first, so that this much traffic
    /// needs no fresh memory.
    pub touched_bytes: usize,
    /// Maximum read or write size of one request, as advertised to clients.
    pub max_payload: u32,
    /// Maximum time that a request waits for an overlapping change on which its own client has
    /// given up; then the request fails. None means no limit.
    pub deferred_max: Option<Duration>,
    /// Whether another host may write to the device at the same time. Changes to parts of blocks
    /// are then refused unless the device supports partial writes.
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
