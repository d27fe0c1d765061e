//! Metrics of the server, declared once: the text of a scrape and the table in
//! docs/reference/metrics.md are generated from this file. `daemon/metrics.rs` fills in the values.

rtrs_core::metrics! {
    of [];
    io ["export"];
    IO_PART_SECONDS = Histogram "rtrs_server_io_part_seconds" ["export", "part"]
        "Parts of an IO's time on the server: backend, and everything else (server_queue).";
    DEVICE_ERRORS = Counter "rtrs_server_device_errors_total" ["export"]
        "Requests that failed at the disk or file of an export.";
    DEVICE_QUEUE_FULL = Counter "rtrs_server_device_queue_full_total" ["export"]
        "Requests that waited because the queue of the disk or file was full.";
    EXPORT_THROTTLED = Counter "rtrs_server_export_throttled_requests_total" ["export"]
        "Requests that the rate limits of an export delayed.";
    EXPORT_THROTTLED_SECONDS = Counter "rtrs_server_export_throttled_seconds_total" ["export"]
        "Time for which rate limits delayed requests of an export, summed over the requests.";
    FAILED_FLUSHES = Counter "rtrs_server_failed_flushes_total" ["export"]
        "Flushes and durable writes that the disk or file failed; each starts a new cache epoch.";
    EXPORT_REPLACED = Gauge "rtrs_server_export_replaced" ["export"]
        "1 while the path of an export refers to anything other than the exported file or device.";
    EXPORT_FAILED = Gauge "rtrs_server_export_failed" ["export"]
        "1 while an export of the configuration cannot be opened; `export list` shows the reason.";
    SESSIONS = Gauge "rtrs_server_sessions" ["state"]
        "Sessions by state.";
    PATHS = Gauge "rtrs_server_paths" ["transport"]
        "Connected paths of all sessions.";
    MEMORY = Gauge "rtrs_server_memory_bytes" []
        "Memory used by the chunks of all sessions.";
    MEMORY_MAX = Gauge "rtrs_server_memory_max_bytes" []
        "Limit on the memory of the chunks of all sessions (memory-max).";
    REFUSED = Counter "rtrs_server_refused_total" ["reason"]
        "Connections refused, and sessions without an open export that were ended.";
    CERTIFICATE_EXPIRY = Gauge "rtrs_server_certificate_expiry_timestamp_seconds" []
        "Expiry time of the server's certificate, in seconds since 1970.";
    LOST_PORTALS = Gauge "rtrs_server_lost_portals" []
        "Portals that the server does not listen on because their device was removed.";
    SESSION_OPEN = Gauge "rtrs_server_session_open" ["session", "export"]
        "1 for each export that a session has open.";
    SESSION_PATHS = Gauge "rtrs_server_session_paths" ["session"]
        "Connected paths of the session.";
    SESSION_INFLIGHT = Gauge "rtrs_server_session_inflight" ["session"]
        "Requests of the session in flight.";
    SESSION_QUEUE_DEPTH = Gauge "rtrs_server_session_queue_depth" ["session"]
        "Queue depth of the session.";
    SESSION_MEMORY = Gauge "rtrs_server_session_memory_bytes" ["session"]
        "Memory used by the chunks of the session.";
    SESSION_BLOCKED = Gauge "rtrs_server_session_blocked" ["session"]
        "Requests of the session that wait for an older write of a closed path, which is still \
         running.";
    SESSION_REQUESTS = Counter "rtrs_server_session_requests_total" ["session", "op"]
        "Requests of the session that were answered.";
    SESSION_BYTES = Counter "rtrs_server_session_bytes_total" ["session", "op"]
        "Bytes that the session read and wrote.";
    SESSION_ERRORS = Counter "rtrs_server_session_errors_total" ["session"]
        "Requests of the session that were answered with an error.";
    SESSION_BUSY = Counter "rtrs_server_session_busy_seconds_total" ["session"]
        "Time from arrival to answer, summed over all requests of the session.";
    SESSION_BACKEND = Counter "rtrs_server_session_backend_seconds_total" ["session"]
        "Time spent at the disk or file, summed over all requests of the session.";
    SESSION_REPLAYS = Counter "rtrs_server_session_replays_total" ["session"]
        "Requests that the client resent over another path while the server still had them.";
}
