//! Counters for front ends, which serve block devices to their users.

use serde::{Deserialize, Serialize};

/// Counters of a front end on one shard since it was created. Counters that do not apply to a kind
/// of front end stay 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FrontEndStats {
    /// Open connections.
    pub connections: u64,
    /// Connections whose clients use the device: past the handshake, and not disconnected.
    /// Kernel connections are not counted.
    pub clients: u64,
    /// Successful handshakes.
    pub negotiated: u64,
    /// IOs completed by the device.
    pub completed: u64,
    /// IOs that the device failed, and flushes that the device completed but that failed because of
    /// a loss not yet reported to the client.
    pub failed: u64,
    /// Bytes received from clients.
    pub bytes_received: u64,
    /// Bytes sent to clients.
    pub bytes_sent: u64,
    /// Bytes moved because a request straddled the end of a buffer.
    pub bytes_moved: u64,
    /// Unanswered writes of closed connections that may still have landed.
    pub orphaned: u64,
    /// Requests that waited for orphaned writes, for abandoned requests, or for changes to parts of
    /// blocks.
    pub deferred: u64,
    /// Changes to parts of blocks; a request has at most two.
    pub fragments: u64,
    /// Requests that failed because the device took too long, while it was still working on them.
    pub given_up: u64,
}

impl FrontEndStats {
    /// Adds the counters of another shard.
    pub fn add(&mut self, other: &Self) {
        self.connections += other.connections;
        self.clients += other.clients;
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns counters that all differ from each other, as JSON.
    fn distinct(factor: u64) -> serde_json::Value {
        json!({
            "connections": factor,
            "negotiated": 2 * factor,
            "completed": 3 * factor,
            "failed": 4 * factor,
            "bytes_received": 5 * factor,
            "bytes_sent": 6 * factor,
            "bytes_moved": 7 * factor,
            "orphaned": 8 * factor,
            "deferred": 9 * factor,
            "fragments": 10 * factor,
            "given_up": 11 * factor,
            "clients": 12 * factor,
        })
    }

    #[test]
    fn stats_of_shards_add_up() {
        let one: FrontEndStats = serde_json::from_value(distinct(1)).unwrap();
        let mut sum = one;
        sum.add(&one);
        assert_eq!(json!(sum), distinct(2));
    }

    #[test]
    fn counters_that_another_version_lacks_are_zero() {
        assert_eq!(serde_json::from_str::<FrontEndStats>("{}").unwrap(), FrontEndStats::default());
    }
}
