//! A shard's paths: connections, response times, and the choice of path for the next request.

use std::ops::{Index, IndexMut, Range};
use std::sync::Arc;

use rtrs_core::fabric::{CloseReason, FabricError, WorkCompletion};
use rtrs_core::ids::{CoreIndex, PathId, ProviderIndex, QpNum};
use rtrs_core::mem::Region;
use rtrs_core::time::{Duration, Instant};

use super::policy::Chooser;
use super::requests::{MemoryUse, Request};
use super::slow_path::Candidate;
use super::slow_requests::SlowRequests;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::{DeviceIndex, DeviceSet};
use crate::engine::message::{Connect, ControlMessage};
use crate::engine::session::{PathTarget, Policy, SessionConfig};
use crate::path::io::WrId;
use crate::path::shard::PathShard;
use crate::stats::ShardStats;

/// This shard's connections on all paths, and the choice between them.
#[derive(Debug)]
pub(crate) struct Paths {
    shard: CoreIndex,
    rows: Vec<PathShard>,
    chooser: Chooser,
    /// Memory registered with every connection, and the devices that use it; None for all devices.
    regions: Vec<(Arc<Region>, Option<DeviceSet>)>,
    slow: SlowRequests,
    pub(super) stats: ShardStats,
}

impl Paths {
    pub(super) fn new(shard: CoreIndex, config: &SessionConfig) -> Self {
        let rows = (0u16..).zip(&config.paths).map(|(id, t)| PathShard::new(PathId(id), t.clone()));
        let chooser = Chooser::new(config.policy, config.path_run, config.paths.len());
        let paths = config.paths.len();
        Self {
            shard,
            rows: rows.collect(),
            chooser,
            regions: Vec::new(),
            slow: SlowRequests::new(paths),
            stats: ShardStats::new(paths),
        }
    }

    /// Adds a path, in a new slot or in that of a removed path.
    pub(super) fn add(&mut self, path: PathId, target: PathTarget) {
        let added = PathShard::new(path, target);
        match self.rows.get_mut(path.index()) {
            Some(place) => *place = added,
            None => self.rows.push(added),
        }
        self.chooser.times.forget(path);
        self.slow.add_path(self.rows.len());
        self.stats.add_path(path.index());
    }

    /// Starts this shard's connection on a path, with these permits.
    pub(super) fn connect(
        &mut self,
        start: &Connect,
        range: Range<u16>,
        timeout: Duration,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), FabricError> {
        let path = &mut self.rows[start.path.index()];
        let regions = self.regions.iter().map(|(region, _)| region);
        path.connect(start, range, regions, timeout, ctx)
    }

    /// Registers this memory with all connections, for one device or for all devices.
    pub(super) fn attach_region(
        &mut self,
        device: Option<DeviceIndex>,
        region: &Arc<Region>,
        range: Range<u16>,
    ) -> Result<(), FabricError> {
        let known = self.regions.iter_mut().find(|(known, _)| known.id() == region.id());
        if let Some((_, of)) = known {
            if let (Some(of), Some(device)) = (of, device) {
                of.insert(device);
            }
            return Ok(());
        }
        for at in 0..self.rows.len() {
            if let Err(error) = self.rows[at].attach_region(region, range.clone()) {
                self.rows[..at].iter_mut().for_each(|path| path.detach_region(region));
                return Err(error);
            }
        }
        let of = device.map(|device| {
            let mut of = DeviceSet::default();
            of.insert(device);
            of
        });
        self.regions.push((Arc::clone(region), of));
        Ok(())
    }

    /// Forgets a removed device, and deregisters memory that only this device used.
    pub(super) fn forget_device(&mut self, device: DeviceIndex) {
        self.forget_regions(device, |_| true);
        self.rows.iter_mut().for_each(|path| path.leave(device));
    }

    /// Deregisters a device's memory, unless other devices use it too. Nothing in flight may use
    /// it.
    pub(super) fn detach_region(&mut self, device: DeviceIndex, region: &Region) {
        self.forget_regions(device, |known| known.id() == region.id());
    }

    fn forget_regions(&mut self, device: DeviceIndex, fits: impl Fn(&Region) -> bool) {
        let paths = &mut self.rows;
        self.regions.retain_mut(|(region, of)| {
            let Some(of) = of.as_mut().filter(|_| fits(region)) else { return true };
            of.remove(device);
            if of.is_empty() {
                paths.iter_mut().for_each(|path| path.detach_region(region));
            }
            !of.is_empty()
        });
    }

    /// Counts a request of `bytes` bytes that was sent on a path. The first request after an idle
    /// period makes the control shard check that the server is alive.
    pub(super) fn issued(
        &mut self,
        path: PathId,
        bytes: u32,
        memory: MemoryUse,
        ctx: &mut Ctx<'_>,
    ) {
        self.stats.request_issued(path.index());
        self.chooser.sent(path, bytes);
        let fabric = &ctx.fabrics[self[path].provider().index()];
        if memory == MemoryUse::Scattered && fabric.capabilities().bounces {
            self.stats.request_bounced(path.index());
        }
        if self[path].ends_idle() {
            ctx.out.control(ControlMessage::InUse);
        }
    }

    /// Marks paths with unanswered requests as used, however long the answers take. The session may
    /// have become idle just as a request was sent.
    pub(super) fn note_use(&self, ctx: &mut Ctx<'_>) {
        for path in self.rows.iter().filter(|path| path.inflight() > 0) {
            if path.waits(ctx.now) {
                ctx.out.control(ControlMessage::InUse);
            }
        }
    }

    /// Marks a request as slow: the server has not answered it although its path is alive. Returns
    /// whether the request was not slow before.
    pub(super) fn begin_slow(&mut self, request: &mut Request, now: Instant) -> bool {
        if std::mem::replace(&mut request.slow, true) {
            return false;
        }
        let path = request.path;
        self.stats.request_slow(path.index());
        if self.slow.began(path) {
            tracing::warn!(
                path = %self[path].name(),
                shard = self.shard.0,
                age_s = now.since(request.sent).as_secs(),
                "slow request: the path works, but the server does not answer the request"
            );
        }
        true
    }

    /// Ends the slow state of a request that was answered or lost its connection.
    pub(super) fn end_slow(&mut self, request: &mut Request, now: Instant) {
        if !std::mem::take(&mut request.slow) {
            return;
        }
        let path = request.path;
        if let Some(episode) = self.slow.ended(path, now.since(request.sent)) {
            tracing::info!(
                path = %self[path].name(),
                shard = self.shard.0,
                requests = episode.requests,
                longest_s = episode.longest.as_secs(),
                "no more slow requests"
            );
        }
    }

    /// Current number of slow requests.
    pub(super) fn slow_count(&self) -> usize {
        self.slow.now()
    }

    /// Ends a path on which no request can be posted.
    pub(super) fn abandon(&mut self, path: PathId, ctx: &mut Ctx<'_>) {
        self.abort(path, CloseReason::Lost("no request can be posted".into()), ctx);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &PathShard> {
        self.rows.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut PathShard> {
        self.rows.iter_mut()
    }

    /// Path with this queue pair.
    pub(super) fn find(&self, provider: ProviderIndex, qp: QpNum) -> Option<PathId> {
        self.rows.iter().find(|path| path.is(provider, qp)).map(PathShard::id)
    }

    /// Purpose of a completed work request, and the path whose connection it belongs to.
    pub(super) fn completed(
        &self,
        provider: ProviderIndex,
        wc: &WorkCompletion,
    ) -> Option<(WrId, PathId)> {
        let (work, path) = WrId::decode(wc.wr_id)?;
        self.rows.get(path.index())?.is(provider, wc.qp).then_some((work, path))
    }

    /// Selects the path for the next request of a device.
    pub(super) fn choose(&mut self, now: Instant, device: DeviceIndex) -> Option<PathId> {
        let serving = self.rows.iter().filter(|path| path.takes_io_of(device));
        let candidates = serving.map(|path| Candidate {
            path: path.id(),
            inflight: path.inflight(),
            latency_ns: path.latency_ns(),
        });
        self.chooser.choose(now, candidates)
    }

    /// Whether any path takes requests of a device.
    pub(super) fn serve(&self, device: DeviceIndex) -> bool {
        self.rows.iter().any(|path| path.takes_io_of(device))
    }

    /// Indices of the paths that take requests of a device.
    #[cfg(test)]
    pub(crate) fn serving(&self, device: DeviceIndex) -> Vec<usize> {
        let serving = self.rows.iter().filter(|path| path.takes_io_of(device));
        serving.map(|path| path.id().index()).collect()
    }

    pub(super) fn set_policy(&mut self, policy: Policy) {
        self.chooser.policy = policy;
    }

    /// Ends this shard's connection on a path immediately.
    pub(super) fn abort(&mut self, path: PathId, why: CloseReason, ctx: &mut Ctx<'_>) {
        let path = &mut self[path];
        let provider = path.provider();
        path.abort(ctx.now, why, ctx.fabrics[provider.index()].as_mut());
    }

    /// Forgets the response times of a connection that has ended.
    pub(super) fn forget_times(&mut self, path: PathId) {
        self.chooser.times.forget(path);
    }

    /// Records the response time of a request.
    pub(super) fn answered(&mut self, path: PathId, now: Instant, took: Duration) {
        if !self.chooser.times.answered(path, now, took) {
            return;
        }
        while let Some(turned) = self.chooser.times.next_turned() {
            let what = if self.chooser.times.is_slow(turned) {
                "far slower than other paths: using it for few requests until it recovers"
            } else {
                "no longer slow"
            };
            let path = self[turned].name();
            tracing::info!(%path, shard = self.shard.0, "{what}");
        }
    }

    /// Counters of the paths.
    pub(crate) fn stats(&self) -> &ShardStats {
        &self.stats
    }

    /// Requests in flight by path.
    pub(crate) fn inflight(&self) -> Vec<u32> {
        self.rows.iter().map(PathShard::inflight).collect()
    }

    /// For each path, whether this shard excludes it because it is slow.
    pub(crate) fn slow(&self) -> Vec<bool> {
        self.rows.iter().map(|path| self.chooser.times.is_slow(path.id())).collect()
    }
}

/// Panics for a path that was never added, which is a bug in this crate: messages refer only to
/// paths already added.
impl Index<PathId> for Paths {
    type Output = PathShard;

    fn index(&self, path: PathId) -> &PathShard {
        &self.rows[path.index()]
    }
}

impl IndexMut<PathId> for Paths {
    fn index_mut(&mut self, path: PathId) -> &mut PathShard {
        &mut self.rows[path.index()]
    }
}
