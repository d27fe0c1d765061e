//! Counters of a front end on one shard.

use serde::{Deserialize, Serialize};

/// Counters of a front end on one shard since it was made. Those that a kind of front end does not
/// have stay 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct FrontEndStats {
    /// Clients connected now.
    pub(crate) connections: u64,
    /// Successful handshakes.
    pub(crate) negotiated: u64,
    /// IOs completed by the device.
    pub(crate) completed: u64,
    /// IOs that the device failed, and flushes that failed because of a loss not yet reported to
    /// the client although the device completed them.
    pub(crate) failed: u64,
    /// Bytes received from clients.
    pub(crate) bytes_received: u64,
    /// Bytes sent to clients.
    pub(crate) bytes_sent: u64,
    /// Bytes moved because a request straddled the end of a buffer.
    pub(crate) bytes_moved: u64,
    /// Writes that closed connections left unanswered and that may still have landed.
    pub(crate) orphaned: u64,
    /// Requests that waited for such writes, for requests that were given up, or for changes of
    /// parts of blocks.
    pub(crate) deferred: u64,
    /// Changes of parts of blocks; a request has at most two.
    pub(crate) fragments: u64,
    /// Requests that failed because the device took too long, while it still worked on them.
    pub(crate) given_up: u64,
}

impl FrontEndStats {
    /// Adds the counters of another shard.
    pub(crate) fn add(&mut self, other: &Self) {
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
