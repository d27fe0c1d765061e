//! Metrics of a session, for scrapes and for `rtrs-client metrics`, collected from the reports that
//! `status` and `stats` use. Metrics are collected on the requesting thread.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use rtrs_core::metrics::{MetricsServer, Number, Samples};
use rtrs_core::settings::MetricsAddress;

use super::driver::ClientShardReport;
use super::launch::ShardHandle;
use super::report::{self, Identity};
use super::roster::Roster;
use crate::control_protocol::{PathInfo, PathStats, SessionState, Stats, Status};
use crate::engine::Reported;
use crate::error::{Error, ErrorKind, system};
use crate::metrics as m;
use crate::parts::Parts;
use crate::path::state::PathState;
use crate::stats::{DeviceStats, OP_NAMES};

/// Value of the `role` label.
const ROLE: &str = "client";

/// Values of the `volume` and `export` labels.
type Labels<'a> = [&'a str; 2];

/// Address at which metrics will be served.
#[derive(Debug)]
pub(crate) struct Scraped(MetricsServer);

impl Scraped {
    /// Binds the address.
    ///
    /// # Errors
    /// Fails with [`ErrorKind::InUse`] and the system's error.
    pub(crate) fn bind(at: &MetricsAddress) -> Result<Self, Error> {
        let what = || format!("cannot serve metrics at {at}");
        MetricsServer::bind(at)
            .map(Self)
            .map_err(|error| Error::with_source(ErrorKind::InUse, what(), error))
    }

    /// Serves the metrics of a session's volumes until the returned value is dropped.
    ///
    /// # Errors
    /// Fails with the system's error.
    pub(crate) fn serve(
        self,
        roster: &Arc<Roster>,
        shards: &ShardHandle,
    ) -> Result<MetricsServer, Error> {
        let (roster, shards) = (Arc::clone(roster), shards.clone());
        let make = move || {
            let (names, reports) = (roster.names(), shards.reports(Reported::All));
            let mut all = Samples::default();
            for identity in roster.identities() {
                all.merge(&samples(&identity, &names, &reports));
            }
            Ok(all.text(m::ALL))
        };
        self.0.serve(make).map_err(system("cannot serve metrics"))?;
        tracing::info!(address = %self.0.at(), "serving metrics");
        Ok(self.0)
    }
}

/// Returns all samples of a volume. The session's own samples, and the counters of its paths and
/// transports, are included only for the first of its volumes.
pub(crate) fn samples(
    identity: &Identity,
    volumes: &[String],
    reports: &[ClientShardReport],
) -> Samples {
    let status = report::status(identity, volumes, reports);
    let stats = report::stats(identity, reports, false);
    let counts_session = volumes.first().is_none_or(|first| *first == identity.name);
    let mut out = Samples::default();
    let of: Labels<'_> = [&identity.name, &identity.export];
    let [volume, export] = of;
    out.add(&m::BUILD_INFO, &[ROLE, volume, export, env!("CARGO_PKG_VERSION")], 1_u64);
    let started = identity.started.duration_since(UNIX_EPOCH).unwrap_or_default();
    out.add(&m::START_TIME, &[ROLE, volume, export], started.as_secs_f64());
    let device = identity.device_stats(reports);
    add_ops(&mut out, of, &device);
    let path = status.device.as_deref().unwrap_or_default();
    out.add(&m::INFO, &[volume, export, &status.session, path], 1_u64);
    add_volume(&mut out, of, &status);
    out.add(&m::QUEUE_FULL, &of, device.queue_full);
    out.add(&m::CACHE_LOSSES, &of, identity.cache_losses(reports));
    out.add(&m::NBD_CONNECTIONS, &of, stats.nbd.connections);
    out.add(&m::NBD_FAILED, &of, stats.nbd.failed + stats.nbd.given_up);
    for path in status.paths() {
        add_path(&mut out, of, path);
    }
    if counts_session {
        add_session(&mut out, of, &stats, reports);
    }
    out
}

/// Adds the samples of the session as a whole.
fn add_session(out: &mut Samples, of: Labels<'_>, stats: &Stats, reports: &[ClientShardReport]) {
    add_parts(out, of, reports);
    let [volume, export] = of;
    for (transport, fabric) in &stats.transports {
        let labels = [ROLE, volume, export, transport];
        out.add(&m::CRC_ERRORS, &labels, fabric.crc_errors);
        out.add(&m::RECEIVED, &labels, fabric.bytes_received);
        out.add(&m::SENT, &labels, fabric.bytes_sent);
    }
    let internal = stats.paths.iter().map(|path| path.status.internal_errors).sum::<u64>();
    out.add(&m::INTERNAL_ERRORS, &[ROLE, volume, export], internal);
    for path in &stats.paths {
        count_path(out, of, path);
    }
}

fn add_ops(out: &mut Samples, [volume, export]: Labels<'_>, total: &DeviceStats) {
    for (op, (count, times)) in OP_NAMES.iter().zip(total.ops.iter().zip(&total.times)) {
        if count.count > 0 {
            let labels = [ROLE, volume, export, op];
            out.add_times(&m::IO_SECONDS, &labels, times);
            out.add(&m::IO_BYTES, &labels, count.bytes);
            out.add(&m::IO_ERRORS, &labels, count.errors);
        }
    }
}

/// Adds the breakdown of times for the session only: five parts for each of many paths would be too
/// many samples.
fn add_parts(out: &mut Samples, [volume, export]: Labels<'_>, reports: &[ClientShardReport]) {
    let mut total = Parts::default();
    reports.iter().for_each(|report| total.add(&report.engine.stats.parts()));
    for (part, times) in total.iter() {
        out.add_times(&m::IO_PART_SECONDS, &[volume, export, part.name()], &times.times());
    }
}

fn add_volume(out: &mut Samples, of: Labels<'_>, status: &Status) {
    out.add(&m::UP, &of, matches!(status.state, SessionState::Open | SessionState::Degraded));
    if let Some(size) = status.size {
        out.add(&m::SIZE, &of, size);
    }
    out.add(&m::INFLIGHT, &of, status.inflight as u64);
    let oldest = status.oldest_io.as_ref().map_or(0, |oldest| oldest.age_ms);
    out.add(&m::OLDEST, &of, oldest as f64 / 1e3);
    out.add(&m::SLOW, &of, status.slow_requests.now as u64);
    out.add(&m::SLOW_TOTAL, &of, status.slow_requests.total);
}

/// Adds the state of a path for the volume.
fn add_path(out: &mut Samples, [volume, export]: Labels<'_>, path: &PathInfo) {
    let labels = &[volume, export, &*path.path][..];
    out.add(&m::PATH_UP, labels, path.is_connected());
    out.add(&m::PATH_DISABLED, labels, path.state == PathState::Disconnected);
    out.add(&m::PATH_SLOW, labels, path.is_avoided());
}

/// Adds the counters of a path.
fn count_path(out: &mut Samples, [volume, export]: Labels<'_>, stats: &PathStats) {
    let path = &stats.status;
    let labels = &[volume, export, &*path.path][..];
    out.add(&m::PATH_INFLIGHT, labels, u64::from(stats.inflight));
    if let Some(us) = path.heartbeat_us.filter(|_| path.is_up()) {
        out.add(&m::PATH_RTT, labels, Number::seconds(us.saturating_mul(1000)));
    }
    for (metric, count) in [
        (&m::PATH_REQUESTS, stats.requests),
        (&m::PATH_BYTES, stats.bytes),
        (&m::PATH_ERRORS, stats.errors),
        (&m::PATH_RECONNECTS, path.reconnects),
        (&m::PATH_ENDS, path.ends),
        (&m::PATH_FAILOVERS, stats.failovers),
        (&m::PATH_FENCE_WAITS, stats.fence_waits),
        (&m::PATH_SLOW_TOTAL, stats.slow_requests),
        (&m::PATH_MISSED, path.heartbeats.missed),
    ] {
        out.add(metric, labels, count);
    }
}
