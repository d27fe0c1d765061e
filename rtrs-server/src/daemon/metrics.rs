//! Collects a running server's metrics, for scrapes and for `rtrs-server metrics`.
//!
//! Metrics are collected on the requesting thread. The sessions come from the control shard,
//! through the same request as `session list`; each shard reports the counters of its providers;
//! export counters are read directly.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, mpsc};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rtrs_core::block::TargetName;
use rtrs_core::fabric::FabricCounters;
use rtrs_core::metrics::{MetricsServer, Number, Samples};
use rtrs_core::rt::Sender;
use rtrs_core::settings::MetricsAddress;
use rtrs_core::time::Duration;
use rtrs_core::tls::TlsEndpoint;

use crate::control_protocol::Sessions;
use crate::daemon::control_shard::ControlShard;
use crate::engine::control::REASONS;
use crate::engine::message::{AdminReplyTo, Message};
use crate::error::{Error, ErrorKind, failed};
use crate::export::{ExportIndex, ExportTable};
use crate::metrics as m;
use crate::stats::{ExportTotals, OP_NAMES, PathStage, SessionSnapshot, SessionState, ShardReport};

/// Time within which the shards must report.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Value of the label `role`.
const ROLE: &str = "server";

/// Binds the address of the metrics.
///
/// # Errors
/// Fails with [`ErrorKind::Listen`] if the server cannot listen on the address.
pub(super) fn bind(at: &MetricsAddress) -> Result<MetricsServer, Error> {
    let what = format!("cannot serve metrics at {at}");
    MetricsServer::bind(at).map_err(failed(ErrorKind::Listen, what))
}

/// Collector of a server's metrics.
#[derive(Debug)]
pub(crate) struct ServerMetrics {
    senders: Arc<[Sender<Message>]>,
    control: ControlShard,
    exports: Arc<ExportTable>,
    /// Present if the server has certificates or keys.
    tls: Option<Arc<TlsEndpoint>>,
    started: f64,
}

impl ServerMetrics {
    /// Creates the collector for a server that is starting with these shards and exports.
    pub(crate) fn new(
        senders: &Arc<[Sender<Message>]>,
        exports: &Arc<ExportTable>,
        tls: Option<Arc<TlsEndpoint>>,
    ) -> Arc<Self> {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Arc::new(Self {
            senders: Arc::clone(senders),
            control: ControlShard(senders[0].clone()),
            exports: Arc::clone(exports),
            tls,
            started: started.as_secs_f64(),
        })
    }

    /// Serves the metrics at an address.
    ///
    /// # Errors
    /// Fails with [`ErrorKind::Listen`] if the server cannot listen on the address.
    pub(crate) fn serve(self: &Arc<Self>, at: &MetricsAddress) -> Result<MetricsServer, Error> {
        let server = bind(at)?;
        let metrics = Arc::clone(self);
        server
            .serve(move || metrics.samples().map(|samples| samples.text(m::ALL)))
            .map_err(failed(ErrorKind::System, format!("cannot serve metrics at {at}")))?;
        tracing::info!(address = %server.at(), "serving metrics");
        Ok(server)
    }

    /// Collects all current samples.
    ///
    /// # Errors
    /// Returns the reason why there are no samples, for display.
    pub(crate) fn samples(&self) -> Result<Samples, String> {
        let sessions = self.control.sessions()?;
        let reports = self.reports();
        let mut exports: BTreeMap<String, ExportSums> = BTreeMap::new();
        for at in 0..u16::try_from(self.exports.len()).unwrap_or(u16::MAX) {
            let Some(export) = self.exports.get(ExportIndex(at)) else { continue };
            // Under %SESSNAME%, exports of several sessions can have the same name.
            let sums = exports.entry(export.name.clone()).or_default();
            sums.totals.add(&export.counters.totals());
            sums.rises += u64::from(export.epoch.rises());
            if let Some(name) = export.source.target_name() {
                let replaced = sums.replaced.unwrap_or(false) || name != TargetName::Kept;
                sums.replaced = Some(replaced);
            }
        }
        let mut out = Samples::default();
        out.add(&m::BUILD_INFO, &[ROLE, env!("CARGO_PKG_VERSION")], 1_u64);
        out.add(&m::START_TIME, &[ROLE], self.started);
        if let Some(expires) = self.tls.as_ref().and_then(|tls| tls.expires()) {
            out.add(&m::CERTIFICATE_EXPIRY, &[], expires);
        }
        for (name, sums) in &exports {
            add_export(&mut out, name, sums);
        }
        for name in self.exports.failed_names() {
            out.add(&m::EXPORT_FAILED, &[&name], 1_u64);
        }
        add_reports(&mut out, &reports);
        add_sessions(&mut out, &sessions);
        Ok(out)
    }

    /// Whether each shard answers in time.
    pub(crate) fn all_shards_answer(&self) -> bool {
        self.reports().len() == self.senders.len()
    }

    /// Collects the reports of all shards, except those that do not answer in time.
    fn reports(&self) -> Vec<ShardReport> {
        let (reply, answers) = mpsc::channel();
        for shard in &*self.senders {
            let reply = reply.clone();
            shard.send(Message::Report(AdminReplyTo::new(move |report| {
                if reply.send(report).is_err() {
                    tracing::debug!("a report came too late");
                }
            })));
        }
        drop(reply);
        let deadline = Instant::now() + REPORT_TIMEOUT;
        let left = || deadline.saturating_duration_since(Instant::now());
        std::iter::from_fn(|| answers.recv_timeout(left()).ok()).collect()
    }
}

/// Sums over exports with the same name.
#[derive(Default)]
struct ExportSums {
    totals: ExportTotals,
    rises: u64,
    /// Whether a path now leads to a different file; `None` if there is no path.
    replaced: Option<bool>,
}

fn add_export(out: &mut Samples, name: &str, sums: &ExportSums) {
    let ExportSums { totals, rises, replaced } = sums;
    for (op, of_op) in OP_NAMES.iter().zip(&totals.ops) {
        // Unused operations are omitted: a thousand exports with five operations each would make
        // the output very long.
        if of_op.times.count() > 0 {
            out.add_times(&m::IO_SECONDS, &[ROLE, name, op], &of_op.times);
            out.add(&m::IO_BYTES, &[ROLE, name, op], of_op.bytes);
            out.add(&m::IO_ERRORS, &[ROLE, name, op], of_op.errors);
        }
    }
    if totals.backend.count() > 0 {
        for (part, times) in [("server_queue", &totals.queue), ("backend", &totals.backend)] {
            out.add_times(&m::IO_PART_SECONDS, &[name, part], times);
        }
    }
    out.add(&m::DEVICE_ERRORS, &[name], totals.device_errors);
    out.add(&m::DEVICE_QUEUE_FULL, &[name], totals.queue_full);
    out.add(&m::EXPORT_THROTTLED, &[name], totals.throttled);
    out.add(&m::EXPORT_THROTTLED_SECONDS, &[name], Number::seconds(totals.throttled_ns));
    out.add(&m::FAILED_FLUSHES, &[name], *rises);
    if let Some(replaced) = replaced {
        out.add(&m::EXPORT_REPLACED, &[name], u64::from(*replaced));
    }
}

fn add_reports(out: &mut Samples, reports: &[ShardReport]) {
    let mut fabrics: BTreeMap<&str, FabricCounters> = BTreeMap::new();
    for (scheme, counters) in reports.iter().flat_map(|report| &report.fabrics) {
        fabrics.entry(scheme).or_default().add(counters);
    }
    for (transport, counters) in &fabrics {
        out.add(&m::CRC_ERRORS, &[ROLE, transport], counters.crc_errors);
        out.add(&m::RECEIVED, &[ROLE, transport], counters.bytes_received);
        out.add(&m::SENT, &[ROLE, transport], counters.bytes_sent);
    }
    let internal: u64 = reports.iter().map(|report| report.internal_errors).sum();
    out.add(&m::INTERNAL_ERRORS, &[ROLE], internal);
}

fn add_sessions(out: &mut Samples, all: &Sessions) {
    let Sessions { sessions, memory, lost_portals, refused } = all;
    for state in
        [SessionState::Connecting, SessionState::Up, SessionState::Ending, SessionState::Evicted]
    {
        let count = sessions.iter().filter(|session| session.state == state).count();
        out.add(&m::SESSIONS, &[state.name()], count as u64);
    }
    let mut transports: BTreeMap<&str, u64> = BTreeMap::new();
    for path in sessions.iter().flat_map(|session| &session.paths) {
        let count = transports.entry(&path.transport).or_default();
        *count += u64::from(path.state == PathStage::Connected);
    }
    for (transport, count) in transports {
        out.add(&m::PATHS, &[transport], count);
    }
    out.add(&m::MEMORY, &[], memory.used_bytes);
    out.add(&m::MEMORY_MAX, &[], memory.max_bytes);
    out.add(&m::LOST_PORTALS, &[], lost_portals.len() as u64);
    let known = REASONS.iter().map(|reason| (*reason, 0));
    let mut reasons: BTreeMap<&str, u64> = known.collect();
    reasons.extend(refused.iter().map(|(reason, count)| (&**reason, *count)));
    for (reason, count) in reasons {
        out.add(&m::REFUSED, &[reason], count);
    }
    for (name, session) in by_name(sessions) {
        add_session(out, name, session);
    }
}

/// Sessions by name. If an evicted session and its successor have the same name, selects the
/// successor.
fn by_name(sessions: &[SessionSnapshot]) -> BTreeMap<&str, &SessionSnapshot> {
    let mut named: BTreeMap<&str, &SessionSnapshot> = BTreeMap::new();
    for session in sessions {
        let Some(name) = &session.name else { continue };
        let other = named.entry(name).or_insert(session);
        if other.state == SessionState::Evicted {
            *other = session;
        }
    }
    named
}

fn add_session(out: &mut Samples, name: &str, session: &SessionSnapshot) {
    let (io, one) = (&session.io, &[name][..]);
    let opens: BTreeSet<&str> = session.opens.iter().map(|open| &*open.export).collect();
    for export in opens {
        out.add(&m::SESSION_OPEN, &[name, export], 1_u64);
    }
    let up = session.paths.iter().filter(|path| path.state == PathStage::Connected).count();
    out.add(&m::SESSION_PATHS, one, up as u64);
    out.add(&m::SESSION_INFLIGHT, one, io.inflight);
    out.add(&m::SESSION_QUEUE_DEPTH, one, u64::from(session.queue_depth));
    out.add(&m::SESSION_MEMORY, one, session.memory_bytes);
    out.add(&m::SESSION_BLOCKED, one, io.blocked);
    for (op, count) in [
        ("read", io.reads),
        ("write", io.writes),
        ("flush", io.flushes),
        ("discard", io.discards),
        ("write-zeroes", io.write_zeroes),
        ("control", io.controls),
    ] {
        out.add(&m::SESSION_REQUESTS, &[name, op], count);
    }
    out.add(&m::SESSION_BYTES, &[name, "read"], io.read_bytes);
    out.add(&m::SESSION_BYTES, &[name, "write"], io.write_bytes);
    out.add(&m::SESSION_ERRORS, one, io.errors);
    out.add(&m::SESSION_BUSY, one, Number::seconds(io.busy_ns));
    out.add(&m::SESSION_BACKEND, one, Number::seconds(io.backend_ns));
    out.add(&m::SESSION_REPLAYS, one, io.replays);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{IoTotals, MemorySnapshot};

    fn session(name: Option<&str>, state: SessionState, reads: u64) -> SessionSnapshot {
        SessionSnapshot {
            id: "id".into(),
            log_id: String::new(),
            identity: "anonymous".into(),
            name: name.map(str::to_owned),
            state,
            version: 1,
            age_ms: 0,
            queue_depth: 512,
            memory_bytes: 0,
            permits_held: 0,
            opens: Vec::new(),
            io: IoTotals { reads, ..IoTotals::default() },
            paths: Vec::new(),
        }
    }

    #[test]
    fn samples_have_distinct_labels() {
        use SessionState::{Connecting, Evicted, Up};
        for order in [[Evicted, Up], [Up, Evicted]] {
            let sessions = vec![
                session(Some("a"), order[0], u64::from(order[0] == Up)),
                session(None, Connecting, 0),
                session(None, Connecting, 0),
                session(Some("a"), order[1], u64::from(order[1] == Up)),
            ];
            let refused = [("memory-max".to_owned(), 3), ("silent".to_owned(), 4)].into();
            let memory = MemorySnapshot { used_bytes: 1, max_bytes: 2 };
            let all = Sessions { sessions, memory, lost_portals: Vec::new(), refused };
            let mut out = Samples::default();
            add_sessions(&mut out, &all);
            let text = out.text(m::ALL);
            let mut keys: Vec<&str> =
                text.lines().filter_map(|line| Some(line.rsplit_once(' ')?.0)).collect();
            let count = keys.len();
            keys.sort_unstable();
            keys.dedup();
            assert_eq!(keys.len(), count, "{text}");
            for line in [
                "rtrs_server_session_requests_total{session=\"a\",op=\"read\"} 1\n",
                "rtrs_server_sessions{state=\"connecting\"} 2\n",
                "rtrs_server_sessions{state=\"ending\"} 0\n",
                "rtrs_server_refused_total{reason=\"memory-max\"} 3\n",
                "rtrs_server_refused_total{reason=\"silent\"} 4\n",
                "rtrs_server_refused_total{reason=\"evicted\"} 0\n",
                "rtrs_server_memory_max_bytes 2\n",
            ] {
                assert!(text.contains(line), "{line} is not in\n{text}");
            }
        }
    }
}
