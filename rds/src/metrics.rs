//! Metrics of nodes, declared once: the text of a scrape and the table in docs/reference/metrics.md
//! are generated from here. `cmd/node/metrics.rs` fills them.

use rtrs_base::metrics::Metric;

use crate::proto::Stats;

rtrs_base::metrics! {
    BUILD_INFO = Gauge "rds_build_info" ["version"]
        "Version of the daemon; the value is 1.";
    START_TIME = Gauge "rds_start_time_seconds" []
        "Time at which the daemon started, in seconds since 1970.";
    SOCKETS = Gauge "rds_sockets" ["node"]
        "Bound sockets.";
    MEMORY = Gauge "rds_memory_bytes" ["node", "direction"]
        "Memory used by messages that are received but not read, or sent but not acknowledged.";
    MEMORY_MAX = Gauge "rds_memory_max_bytes" ["node"]
        "Limit on the memory used by messages in each direction (memory-max).";
    CONNECTIONS = Gauge "rds_connections" ["node", "state"]
        "Connections to peers by state: down, connecting, up or error.";
    QUEUED = Gauge "rds_peer_queued_bytes" ["node", "peer"]
        "Bytes that are waiting to be sent to the peer or acknowledged by it.";
    STUCK = Gauge "rds_peer_stuck_seconds" ["node", "peer"]
        "Time for which the peer has acknowledged nothing while messages wait for it.";
    CONGESTED = Gauge "rds_congested_ports" ["node", "owner"]
        "Congested ports of the node itself or of a peer; messages to congested ports wait.";
    CONGESTED_SECONDS = Gauge "rds_congested_seconds" ["node", "owner"]
        "Longest time for which one of the congested ports has been congested.";
}

/// Returns all metrics, in the order of the text: those above, and the counters.
pub fn all() -> Vec<&'static Metric> {
    ALL.iter().copied().chain(Stats::METRICS).collect()
}
