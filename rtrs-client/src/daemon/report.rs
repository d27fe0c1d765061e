//! An attached session's replies to `status`, `stats` and `attach`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use hdrhistogram::Histogram;
use rtrs_core::block::Geometry;
use rtrs_core::fabric::FabricCounters;
use rtrs_core::front_end::FrontEndStats;
use rtrs_core::ids::PathId;
use rtrs_core::metrics::Bucket;
use rtrs_core::rt::Clock;
use rtrs_core::settings::SettingValue;
use rtrs_core::time::Duration;
use rtrs_core::wire::{errno, errno_name};

use super::driver::ClientShardReport;
use super::saved::Saved;
use crate::control_protocol::{
    Attached, Heartbeats, IoError, IoErrors, Latency, OldestIo, PartTimes, PathInfo, PathStats,
    SessionState, ShardStats as ShardReport, SlowRequests, Stats, Status, WaitsFor,
};
use crate::engine::{
    DeviceIndex, DeviceReport, Failures, NoPathWait, PathEnd, PathStatus, SessionFailure,
    VolumeStatus, Waits,
};
use crate::frontend::Complaint;
use crate::parts::Parts;
use crate::settings::{Access, Failover, NoPath, SlowIo};
use crate::stats::{DeviceStats, OP_NAMES, ShardStats, op_name};

/// Properties of an attached volume that do not change.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) name: String,
    /// Name of the export on the server.
    pub(crate) export: String,
    /// Index of the volume's device in the session.
    pub(crate) index: DeviceIndex,
    /// Name of the volume whose log contains the session's log messages.
    pub(crate) log: String,
    pub(crate) session: String,
    pub(crate) session_id: String,
    pub(crate) access: Access,
    pub(crate) no_path: NoPath,
    pub(crate) failover: Failover,
    pub(crate) slow_io: SlowIo,
    /// NBD URI for clients, if there is one.
    pub(crate) uri: Option<String>,
    /// Path of the block device, once connected.
    pub(crate) device: Arc<OnceLock<String>>,
    pub(crate) pid: u32,
    pub(crate) shards: u16,
    /// Whether the volume is being detached.
    pub(crate) ending: Arc<AtomicBool>,
    /// State saved for a takeover.
    pub(crate) saved: Option<Saved>,
    pub(crate) started: SystemTime,
}

/// Report from the control shard, the only shard that knows the paths. None if the session is
/// ending, or if the host was too busy for the shard to report in time.
fn control(reports: &[ClientShardReport]) -> Option<&ClientShardReport> {
    reports.iter().find(|report| report.engine.shard.0 == 0)
}

impl Identity {
    /// Status of the volume, as reported by the control shard.
    fn volume<'a>(&self, reports: &'a [ClientShardReport]) -> Option<&'a VolumeStatus> {
        control(reports)?.engine.volume(self.index)
    }

    /// Each shard's report on the volume's device.
    fn devices<'a>(
        &self,
        reports: &'a [ClientShardReport],
    ) -> impl Iterator<Item = &'a DeviceReport> {
        let index = self.index;
        reports.iter().filter_map(move |report| report.engine.device(index))
    }

    /// Counters of all shards for the volume.
    pub(super) fn device_stats(&self, reports: &[ClientShardReport]) -> DeviceStats {
        let mut total = DeviceStats::default();
        self.devices(reports).for_each(|device| total.add(&device.stats));
        total.count_failed_flushes(self.failed_flushes(reports));
        total
    }

    /// Number of flushes that succeeded on the server but reported lost writes.
    fn failed_flushes(&self, reports: &[ClientShardReport]) -> u64 {
        self.devices(reports).map(|device| device.failed_flushes).max().unwrap_or(0)
    }

    /// Number of times that the server may have lost acknowledged writes to the volume.
    pub(super) fn cache_losses(&self, reports: &[ClientShardReport]) -> u64 {
        self.devices(reports).map(|device| device.cache_losses).max().unwrap_or(0)
    }

    /// Geometry of the device, if the device has ever been open.
    fn geometry<'a>(&self, reports: &'a [ClientShardReport]) -> Option<&'a Geometry> {
        control(reports)?.engine.geometry(self.index)
    }
}

fn paths(reports: &[ClientShardReport]) -> Option<&[PathStatus]> {
    control(reports)?.engine.paths.as_deref()
}

/// State of a session, with the reason if the states of the paths do not show it.
fn state(
    identity: &Identity,
    reports: &[ClientShardReport],
    paths: &[PathInfo],
) -> (SessionState, Option<String>) {
    if identity.ending.load(Ordering::Relaxed) {
        return (SessionState::Detaching, None);
    }
    let Some(volume) = identity.volume(reports) else { return (SessionState::Unresponsive, None) };
    let why = volume.obstacle.as_ref().map(ToString::to_string);
    if volume.obstacle == Some(SessionFailure::Evicted) {
        return (SessionState::Evicted, why);
    }
    if volume.open {
        let is_whole = paths.iter().all(PathInfo::is_connected);
        return (if is_whole { SessionState::Open } else { SessionState::Degraded }, None);
    }
    let mut all = self::paths(reports).unwrap_or_default().iter();
    let another = all.find_map(|path| {
        let end = path.last_end.as_ref().filter(|end| end.is_mismatch())?;
        Some(format!("{}: {end}", path.path))
    });
    match another {
        Some(error) => (SessionState::IdentityMismatch, Some(error)),
        None if why.is_some() => (SessionState::Failed, why),
        None if identity.geometry(reports).is_none() => (SessionState::Connecting, None),
        None => (SessionState::NoPath, refusal(self::paths(reports).unwrap_or_default())),
    }
}

/// First path whose server refuses connections, with the reason.
fn refusal(paths: &[PathStatus]) -> Option<String> {
    paths.iter().find_map(|path| {
        let end = path.last_end.as_ref().filter(|end| end.errno().is_some())?;
        Some(format!("{}: {end}", path.path))
    })
}

/// Reply to `status`. `volumes` contains the names of all the session's volumes.
pub(crate) fn status(
    identity: &Identity,
    volumes: &[String],
    reports: &[ClientShardReport],
) -> Status {
    let (control, volume) = (control(reports), identity.volume(reports));
    let geometry = identity.geometry(reports);
    let no_path = volume.and_then(|volume| volume.no_path);
    let paths: Option<Vec<PathInfo>> =
        paths(reports).map(|all| all.iter().map(|path| path_info(path, volume, reports)).collect());
    let (state, reason) = state(identity, reports, paths.as_deref().unwrap_or_default());
    Status {
        name: identity.name.clone(),
        export: identity.export.clone(),
        session: identity.session.clone(),
        session_id: identity.session_id.clone(),
        volumes: volumes.to_vec(),
        log: identity.log.clone(),
        state,
        reason,
        no_path_left_ms: match no_path {
            Some(NoPathWait::QueuesFor(left)) => Some(millis(left)),
            _ => None,
        },
        io_fails: no_path == Some(NoPathWait::Fails) || volume.is_some_and(|volume| volume.failed),
        access: identity.access,
        policy: control.and_then(|r| r.engine.policy),
        uri: identity.uri.clone(),
        device: identity.device.get().cloned(),
        pid: identity.pid,
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        shards: identity.shards,
        size: geometry.map(|g| g.size),
        block_size: geometry.map(|g| g.logical_block),
        read_only: geometry.map(|g| g.read_only),
        read_only_fallback: identity.access == Access::Auto
            && geometry.is_some_and(|g| g.read_only),
        inflight: identity.devices(reports).map(|device| device.inflight).sum(),
        no_path: control.and_then(|r| r.engine.no_path_policy).unwrap_or(identity.no_path),
        failover: identity.failover,
        slow_io: identity.slow_io,
        identity: volume.and_then(|volume| volume.identity),
        memory: volume.is_some_and(|volume| volume.memory),
        oldest_io: oldest(identity, reports),
        slow_requests: slow_requests(identity, reports),
        io_errors: io_errors(identity, reports),
        unsaved: identity.saved.as_ref().map(Saved::unwritten).unwrap_or_default(),
        nbd_connections: reports.iter().map(|report| connections(identity, report)).sum(),
        nbd_clients: reports.iter().map(|report| front_stats(identity, report).clients).sum(),
        complaint: complaint(identity, volume, reports),
        paths,
    }
}

/// Counters of the volume's front end on one shard.
fn front_stats(identity: &Identity, report: &ClientShardReport) -> FrontEndStats {
    let found = report.fronts.iter().find(|(device, _)| *device == identity.index);
    found.map(|(_, stats)| *stats).unwrap_or_default()
}

/// First complaint of the volume's front end.
fn complaint(
    identity: &Identity,
    volume: Option<&VolumeStatus>,
    reports: &[ClientShardReport],
) -> Option<String> {
    let mut all = reports.iter().flat_map(|report| &report.complaints);
    let (_, complaint) = all.find(|(device, _)| *device == identity.index)?;
    Some(match complaint {
        Complaint::Client(text) => (*text).to_owned(),
        Complaint::Held => held(volume.and_then(|volume| volume.held_by)),
    })
}

/// Text about a guest that runs here before the server grants exclusive access. `refusal` is the
/// reason of the server, if it has refused the access.
fn held(refusal: Option<u16>) -> String {
    let (why, remedy) = match refusal {
        Some(errno::EPERM | errno::EBUSY) => (
            "another session still has the export open for writing".to_owned(),
            "detach the volume on the old host",
        ),
        Some(refusal) => (
            format!("the server refuses exclusive access: {}", errno_name(refusal)),
            "check the export on the server",
        ),
        None => (
            "the server has not granted exclusive access yet".to_owned(),
            "check the paths of the volume",
        ),
    };
    format!("the guest has started here, and {why}, so its requests wait; {remedy}")
}

/// Number of the volume's NBD connections on one shard.
fn connections(identity: &Identity, report: &ClientShardReport) -> u64 {
    front_stats(identity, report).connections
}

fn path_info(
    path: &PathStatus,
    volume: Option<&VolumeStatus>,
    reports: &[ClientShardReport],
) -> PathInfo {
    let mut refusals = volume.into_iter().flat_map(|volume| &volume.refusals);
    let refused = refusals.find(|(of, _)| *of == path.path).map(|(_, why)| why);
    let (why, now) = (refused.or(path.last_end.as_ref()), Clock.now());
    PathInfo {
        path: path.path.clone(),
        transport: path.transport.to_owned(),
        address: path.address.clone(),
        state: path.state,
        leaving: path.leaving.map(str::to_owned),
        connections: path.connections,
        reconnects: path.reconnects,
        ends: path.ends,
        heartbeat_us: path.heartbeat_us,
        silence_max_ms: path.silence_max_ms,
        heartbeats: heartbeats(path),
        internal_errors: path.internal_errors,
        last_error: path.errors.last.as_ref().map(|(_, why)| why.to_string()),
        last_error_age_ms: path.errors.last.as_ref().map(|(at, _)| millis(now.since(*at))),
        errors: path.errors.count,
        refused: refused.map(ToString::to_string),
        mismatch: why.is_some_and(PathEnd::is_mismatch),
        slow: is_slow(path, reports),
    }
}

fn heartbeats(path: &PathStatus) -> Heartbeats {
    Heartbeats { sent: path.heartbeats.sent, missed: path.heartbeats.missed }
}

/// Output of `attach`.
pub(crate) fn attached(status: Status) -> Attached {
    let uri = if status.device.is_some() { None } else { status.uri };
    Attached {
        name: status.name,
        export: status.export,
        device: status.device,
        uri,
        size: status.size,
        block_size: status.block_size,
        read_only: status.read_only,
        read_only_fallback: status.read_only_fallback,
        identity: status.identity,
        pid: status.pid,
        unsaved: status.unsaved,
        paths: status.paths,
    }
}

/// Whether a shard avoids the path because it is much slower than the other paths.
fn is_slow(path: &PathStatus, reports: &[ClientShardReport]) -> bool {
    let at = path.id.index();
    reports.iter().any(|report| report.engine.path_slow.get(at).copied().unwrap_or_default())
}

/// Name of a path, even of one that has been removed; "?" if unknown.
fn path_name(path: PathId, reports: &[ClientShardReport]) -> String {
    let names = control(reports).map_or(&[][..], |control| control.engine.names.as_slice());
    names.get(path.index()).cloned().unwrap_or_else(|| "?".into())
}

/// Failed IOs of the volume, including lost writes that a flush reported.
fn io_errors(identity: &Identity, reports: &[ClientShardReport]) -> IoErrors {
    let mut all = Failures::default();
    identity.devices(reports).for_each(|device| all.add(&device.failures));
    let last = all.last.map(|failed| IoError {
        errno: errno_name(failed.status.to_errno()).to_owned(),
        op: op_name(failed.op).to_owned(),
        offset: failed.offset,
        bytes: failed.len,
        path: failed.path.map(|path| path_name(path, reports)),
        age_ms: millis(Clock.now().since(failed.at)),
    });
    let lost_writes = identity.failed_flushes(reports);
    IoErrors { count: all.count + lost_writes, lost_writes, last }
}

/// Oldest IO that is waiting.
fn oldest(identity: &Identity, reports: &[ClientShardReport]) -> Option<OldestIo> {
    let oldest =
        identity.devices(reports).filter_map(|device| device.oldest).max_by_key(|o| o.age)?;
    let name = |path: PathId| Some(path_name(path, reports));
    let (waits_for, path) = match oldest.waits {
        Waits::Answer(path) => (WaitsFor::Answer, name(path)),
        Waits::Fence(path) => (WaitsFor::Fence, name(path)),
        Waits::Path => (WaitsFor::Path, None),
        Waits::Permit => (WaitsFor::Permit, None),
        Waits::Flushes => (WaitsFor::Flushes, None),
    };
    Some(OldestIo { age_ms: millis(oldest.age), waits_for, path })
}

/// Requests delayed by a slow disk.
fn slow_requests(identity: &Identity, reports: &[ClientShardReport]) -> SlowRequests {
    let slow = || identity.devices(reports).map(|device| device.slow_requests);
    SlowRequests {
        now: slow().map(|shard| shard.now).sum(),
        oldest_ms: slow().filter_map(|shard| shard.oldest).max().map(millis),
        total: slow().map(|shard| shard.total).sum(),
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn latency(times: &Histogram<u64>) -> Latency {
    let us = |nanos: u64| nanos as f64 / 1000.0;
    Latency {
        count: times.len(),
        p50: us(times.value_at_quantile(0.5)),
        p90: us(times.value_at_quantile(0.9)),
        p99: us(times.value_at_quantile(0.99)),
        p999: us(times.value_at_quantile(0.999)),
        max: us(times.max()),
    }
}

/// Non-empty buckets of a histogram.
fn buckets(times: &Histogram<u64>) -> Vec<Bucket> {
    let bucket = |at: u64, count| {
        let (from, to) = (times.lowest_equivalent(at), times.highest_equivalent(at));
        Bucket { from, to, count }
    };
    times.iter_recorded().map(|at| bucket(at.value_iterated_to(), at.count_at_value())).collect()
}

fn parts(parts: &Parts, with_times: bool) -> Vec<PartTimes> {
    let times = parts.iter().map(|(part, times)| PartTimes {
        part,
        count: times.count(),
        p50: times.quantile_us(0.5),
        p99: times.quantile_us(0.99),
        max: times.max_us(),
        times: with_times.then(|| times.filled().collect()),
    });
    times.collect()
}

/// Reply to `stats`.
pub(crate) fn stats(identity: &Identity, reports: &[ClientShardReport], with_times: bool) -> Stats {
    let count = reports.iter().map(|r| r.engine.stats.paths.len()).max().unwrap_or(0);
    let mut total = ShardStats::new(count);
    let mut fabric = FabricCounters::default();
    let mut transports: BTreeMap<String, FabricCounters> = BTreeMap::new();
    let mut nbd = FrontEndStats::default();
    for report in reports {
        total.add(&report.engine.stats);
        nbd.add(&front_stats(identity, report));
        for (scheme, counters) in &report.fabrics {
            fabric.add(counters);
            transports.entry((*scheme).to_owned()).or_default().add(counters);
        }
    }
    let device = identity.device_stats(reports);
    let ops = OP_NAMES.iter().map(|name| (*name).to_owned()).zip(device.ops).collect();
    let paths = paths(reports).unwrap_or_default();
    let shards = reports.iter().map(|r| ShardReport {
        core: r.engine.shard.0,
        ios: r.engine.devices.iter().flat_map(|d| &d.stats.ops).map(|op| op.count).sum(),
        inflight: r.engine.inflight,
        nbd_connections: connections(identity, r),
    });
    let of_path = |path: &PathStatus| {
        let status = path_info(path, identity.volume(reports), reports);
        path_stats(path.id, status, &total, reports, with_times)
    };
    Stats {
        name: identity.name.clone(),
        ops,
        latency_us: latency(&device.latency),
        times: with_times.then(|| buckets(&device.latency)),
        parts_us: parts(&total.parts(), with_times),
        paths: paths.iter().map(of_path).collect(),
        cores: shards.collect(),
        fabric,
        transports,
        nbd,
    }
}

/// Replaces the initial paths in the settings with the current ones.
pub(crate) fn set_paths(settings: &mut [SettingValue], reports: &[ClientShardReport]) {
    let (Some(paths), Some(setting)) =
        (paths(reports), settings.iter_mut().find(|setting| setting.name == "path"))
    else {
        return;
    };
    setting.value = paths.iter().map(|path| path.path.clone()).collect();
}

fn path_stats(
    path: PathId,
    status: PathInfo,
    total: &ShardStats,
    reports: &[ClientShardReport],
    with_times: bool,
) -> PathStats {
    let at = path.index();
    let count = total.paths.get(at).copied().unwrap_or_default();
    PathStats {
        status,
        inflight: reports.iter().filter_map(|r| r.engine.path_inflight.get(at)).sum(),
        latency_us: total.path_latency.get(at).map(latency),
        times: total.path_latency.get(at).filter(|_| with_times).map(buckets),
        parts_us: (total.path_parts.get(at).map(|all| parts(all, with_times))).unwrap_or_default(),
        requests: count.requests,
        answers: count.answers,
        bytes: count.bytes,
        errors: count.errors,
        failovers: count.failovers,
        fence_waits: count.fence_waits,
        slow_requests: count.slow_requests,
    }
}

#[cfg(test)]
impl Identity {
    /// Identity of a volume "v".
    pub(crate) fn example() -> Self {
        Self {
            name: "v".into(),
            export: "v".into(),
            index: DeviceIndex::FIRST,
            log: "v".into(),
            session: "host-v".into(),
            session_id: "id".into(),
            access: Access::Auto,
            no_path: NoPath::Queue,
            failover: Failover::Fast,
            slow_io: SlowIo::Wait,
            uri: None,
            device: Arc::new(OnceLock::new()),
            pid: 7,
            shards: 2,
            ending: Arc::default(),
            saved: None,
            started: SystemTime::UNIX_EPOCH,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_where_the_session_is_served() {
        let identity = Identity::example();
        // Not connected yet.
        let early = serde_json::json!(status(&identity, &[], &[]));
        assert_eq!(early["state"], "unresponsive", "no shard reports");
        assert!(early["device"].is_null() && early["uri"].is_null());
        identity.device.get_or_init(|| "/dev/nbd3".into());
        let device = status(&identity, &[], &[]);
        assert_eq!(device.served_at(), "/dev/nbd3");
        let shown = serde_json::json!(attached(device));
        assert_eq!((&shown["device"], shown.get("uri")), (&"/dev/nbd3".into(), None));
        let uri = Some("nbd://127.0.0.1:10809/v".to_owned());
        let socket_identity = Identity { uri, device: Arc::new(OnceLock::new()), ..identity };
        let socket = status(&socket_identity, &[], &[]);
        assert_eq!(socket.served_at(), "nbd://127.0.0.1:10809/v");
        socket_identity.ending.store(true, Ordering::Relaxed);
        assert_eq!(status(&socket_identity, &[], &[]).state, SessionState::Detaching);
        let shown = serde_json::json!(attached(socket));
        assert_eq!((&shown["uri"], shown.get("device")), (&"nbd://127.0.0.1:10809/v".into(), None));
    }
}
