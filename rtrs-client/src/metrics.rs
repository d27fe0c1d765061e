//! Metrics of a session, declared once: the text of a scrape and the table of
//! docs/reference/metrics.md are made from this list. `daemon/metrics.rs` collects the values, and
//! `cmd/metrics.rs` those of all sessions of a host.

rtrs_core::metrics! {
    of ["volume", "export"];
    io ["volume", "export"];
    IO_PART_SECONDS = Histogram "rtrs_client_io_part_seconds" ["volume", "export", "part"]
        "Breakdown of the time of requests, over all paths.";
    INFO = Gauge "rtrs_client_info" ["volume", "export", "session", "device"]
        "Name of the session at the server, and its block device if it has one; the value is 1.";
    SESSION_UP = Gauge "rtrs_client_session_up" ["volume"]
        "1 if the session answered the exporter; 0 if it is dead or unresponsive.";
    UP = Gauge "rtrs_client_up" ["volume", "export"]
        "1 while the export is open and a path is connected.";
    SIZE = Gauge "rtrs_client_size_bytes" ["volume", "export"]
        "Size of the export.";
    INFLIGHT = Gauge "rtrs_client_inflight" ["volume", "export"]
        "IOs in flight.";
    OLDEST = Gauge "rtrs_client_oldest_io_seconds" ["volume", "export"]
        "Age of the oldest IO in flight; 0 if there is none.";
    QUEUE_FULL = Counter "rtrs_client_queue_full_total" ["volume", "export"]
        "IOs that found the queue full.";
    SLOW = Gauge "rtrs_client_slow_requests" ["volume", "export"]
        "Requests not answered within io-timeout over a working path.";
    SLOW_TOTAL = Counter "rtrs_client_slow_requests_total" ["volume", "export"]
        "Requests not answered within io-timeout over a working path, since attach.";
    CACHE_LOSSES = Counter "rtrs_client_cache_losses_total" ["volume", "export"]
        "Number of times that the server may have lost acknowledged writes that were not flushed.";
    NBD_CONNECTIONS = Gauge "rtrs_client_nbd_connections" ["volume", "export"]
        "Open NBD connections.";
    NBD_FAILED = Counter "rtrs_client_nbd_failed_total" ["volume", "export"]
        "IOs of NBD clients that failed, including flushes that report a loss.";
    PATH_UP = Gauge "rtrs_client_path_up" ["volume", "export", "path"]
        "1 while the path is connected.";
    PATH_DISABLED = Gauge "rtrs_client_path_disabled" ["volume", "export", "path"]
        "1 while the path is disconnected by path disconnect.";
    PATH_SLOW = Gauge "rtrs_client_path_slow" ["volume", "export", "path"]
        "1 while the path is excluded because it is far slower than others.";
    PATH_INFLIGHT = Gauge "rtrs_client_path_inflight" ["volume", "export", "path"]
        "Requests in flight on the path.";
    PATH_RTT = Gauge "rtrs_client_path_heartbeat_seconds" ["volume", "export", "path"]
        "Round trip of the last heartbeat.";
    PATH_REQUESTS = Counter "rtrs_client_path_requests_total" ["volume", "export", "path"]
        "Requests sent over the path.";
    PATH_BYTES = Counter "rtrs_client_path_bytes_total" ["volume", "export", "path"]
        "Bytes of data in answered requests.";
    PATH_ERRORS = Counter "rtrs_client_path_errors_total" ["volume", "export", "path"]
        "Answers with an error.";
    PATH_RECONNECTS = Counter "rtrs_client_path_reconnects_total" ["volume", "export", "path"]
        "Number of times that the path reconnected.";
    PATH_ENDS = Counter "rtrs_client_path_ends_total" ["volume", "export", "path"]
        "Failed attempts to connect, and failures of the connected path.";
    PATH_FAILOVERS = Counter "rtrs_client_path_failovers_total" ["volume", "export", "path"]
        "Requests that were in flight when the path died and were resent.";
    PATH_FENCE_WAITS = Counter "rtrs_client_path_fence_waits_total" ["volume", "export", "path"]
        "Requests that waited for the fence of the path after it died.";
    PATH_SLOW_TOTAL = Counter "rtrs_client_path_slow_requests_total" ["volume", "export", "path"]
        "Requests not answered within io-timeout although the path worked.";
    PATH_MISSED = Counter "rtrs_client_path_heartbeats_missed_total" ["volume", "export", "path"]
        "Periods after a heartbeat in which nothing arrived.";
}
