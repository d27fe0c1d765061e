//! Counters of one shard's bridge.

use rtrs_core::status::IoStatus;
use serde::{Deserialize, Serialize};

use crate::status::is_device_fault;

/// Counters of a shard's bridge since startup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BridgeStats {
    /// Clients connected now.
    pub connections: u64,
    /// Successful handshakes.
    pub negotiated: u64,
    /// IOs completed by the device.
    pub completed: u64,
    /// IOs that the device failed, and flushes that failed because of a loss not yet reported to
    /// the client although the device completed them.
    pub failed: u64,
    /// Bytes received from clients.
    pub bytes_received: u64,
    /// Bytes sent to clients.
    pub bytes_sent: u64,
    /// Bytes moved because a request straddled the end of a buffer.
    pub bytes_moved: u64,
    /// Writes that closed connections left unanswered and that may still have landed.
    pub orphaned: u64,
    /// Requests that waited for such writes, for requests that were given up, or for changes of
    /// parts of blocks.
    pub deferred: u64,
    /// Changes of parts of blocks; a request has at most two.
    pub fragments: u64,
    /// Requests that failed because the device took too long, while it still worked on them.
    pub given_up: u64,
}

impl BridgeStats {
    pub(crate) fn completed(&mut self, status: IoStatus) {
        self.completed += 1;
        if is_device_fault(status) {
            self.failed += 1;
        }
    }

    /// Adds the counters of another shard.
    pub fn add(&mut self, other: &Self) {
        self.connections += other.connections;
        self.negotiated += other.negotiated;
        self.completed += other.completed;
        self.failed += other.failed;
        self.bytes_received += other.bytes_received;
        self.bytes_sent += other.bytes_sent;
        self.bytes_moved += other.bytes_moved;
        self.orphaned += other.orphaned;
        self.deferred += other.deferred;
        self.fragments += other.fragments;
        self.given_up += other.given_up;
    }
}
