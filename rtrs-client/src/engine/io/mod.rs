//! One shard's part of a session. All IO goes through this module.
//!
//! A request uses this shard's connection on the path that the policy selects. Each part owns its
//! state and knows nothing of its siblings; this file connects them:
//!
//! - `ios.rs`: submitted IOs and how they end, with `requests.rs`: requests and their permits
//!   (`permits.rs`); `waiting.rs`: the queues; `failed_ios.rs`: number of failed IOs, the last of
//!   them, and their log lines; `zeroes.rs`: zeroes written as data if the server cannot write
//!   them;
//! - `paths.rs`: connections, the policy (`policy.rs`), slow-path detection (`slow_path.rs`),
//!   counters, and requests that a slow disk delays (`slow_requests.rs`);
//! - `retry.rs`, `resend.rs`: requests in flight on a path that died, which are resent on a
//!   different path;
//! - `limits.rs`: time limits; `sweep.rs`: their periodic check; `probe.rs` probes a silent
//!   connection;
//! - `syncs.rs`, `held_flushes.rs`: the order of flushes and writes with FUA; a successful flush
//!   waits for the syncs that overlap it;
//! - `block_device.rs`: a device as its user sees it; `devices.rs`: addition and removal of
//!   devices.
//!
//! Read targets are opened to the server through a window per permit, under a fresh key for each
//! request, and closed when the answer has arrived. A late or malicious server thus cannot write
//! into memory that has been reused.

pub(crate) mod block_device;
pub(crate) mod devices;
pub(crate) mod failed_ios;
mod held_flushes;
pub(crate) mod ios;
mod limits;
pub(crate) mod paths;
pub(crate) mod permits;
pub(crate) mod policy;
mod probe;
mod requests;
mod resend;
pub(crate) mod retry;
mod slow_path;
pub(crate) mod slow_requests;
mod sweep;
mod syncs;
mod waiting;
mod zeroes;

use std::sync::Arc;

use rtrs_core::block::IoOp;
use rtrs_core::fabric::{CloseReason, ConnectFailure, FabricError, WcStatus, WorkCompletion};
use rtrs_core::ids::{CoreIndex, PathId, PermitId, ProviderIndex, QpNum};
use rtrs_core::mem::Region;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;
use rtrs_core::wire::errno;

use self::devices::{DeviceReport, Reported};
use self::ios::Ios;
use self::limits::TimeLimits;
use self::paths::Paths;
use self::permits::share;
use self::probe::Probes;
use self::requests::{RequestRow, Standing};
use self::waiting::IoRow;
use self::zeroes::unsupported;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::{DeviceIndex, DeviceSet};
use crate::engine::message::{Connect, ConnectionEnd, ControlMessage, ShardMessage};
use crate::engine::session::{Granted, SessionConfig};
use crate::parts::RequestTimes;
use crate::path::handshake::check_accept;
use crate::path::io::Answer;
use crate::path::shard::PathEvent;

/// One shard's part of a session.
#[derive(Debug)]
pub(crate) struct Shard {
    index: CoreIndex,
    config: Arc<SessionConfig>,
    granted: Option<Granted>,
    limits: TimeLimits,
    ios: Ios,
    paths: Paths,
    probes: Probes,
    next_sweep: Instant,
}

impl Shard {
    pub(crate) fn new(index: CoreIndex, config: &Arc<SessionConfig>) -> Self {
        let mut shard = Self {
            index,
            granted: None,
            limits: TimeLimits::new(config),
            ios: Ios::new(index),
            paths: Paths::new(index, config),
            probes: Probes::default(),
            next_sweep: Instant::ZERO,
            config: Arc::clone(config),
        };
        for (path, target) in (0u16..).zip(&config.paths) {
            shard.ios.add_path(PathId(path), &target.name);
        }
        for (device, volume) in DeviceIndex::all().zip(&config.volumes) {
            shard.add_device(device, volume.export.as_str().into());
        }
        shard
    }

    /// Handles a message from the control shard.
    pub(crate) fn handle_message(&mut self, message: ShardMessage, ctx: &mut Ctx<'_>) {
        self.ios.now = ctx.now;
        match message {
            ShardMessage::Granted(granted) => self.on_granted(granted),
            ShardMessage::Connect(connect) => {
                let Connect { path, epoch, cid, .. } = *connect;
                let (range, timeout) = (self.ios.requests.range(), self.config.connect_timeout);
                if let Err(error) = self.paths.connect(&connect, range, timeout, ctx) {
                    let reason = CloseReason::Lost(error.to_string());
                    let failure = ConnectFailure::Failed(reason);
                    ctx.out.control(ControlMessage::Failed { path, epoch, cid, failure });
                }
            }
            ShardMessage::PathUp { path, epoch, chunks, served } => {
                let range = self.ios.requests.range();
                self.paths[path].up(epoch, &chunks, range, &served);
                served.iter().for_each(|served| self.ios.has_path(served.device));
            }
            ShardMessage::Serves { path, epoch, served } => {
                self.paths[path].serve(epoch, served);
                self.ios.has_path(served.device);
            }
            ShardMessage::Leaves { path, epoch, device } => {
                if self.paths[path].is_of(epoch) {
                    self.paths[path].leave(device);
                }
            }
            ShardMessage::Cache(device, cache) => self.ios.devices.set_cache(device, cache),
            // The next `pump` checks what needs to be done.
            ShardMessage::Wake => {}
            ShardMessage::Disconnect { path, epoch, in_order } => {
                self.paths[path].disconnect(epoch, in_order, ctx);
            }
            ShardMessage::Open(device, info) => {
                let zeroes = self.ios.zeroes.prepare(&info);
                self.ios.devices.open(device, info);
                let known = zeroes.and_then(|new| new.map_or(Ok(()), |r| self.attach(None, &r)));
                if let Err(error) = known {
                    tracing::error!("no memory for zeroes: {error}");
                }
            }
            ShardMessage::Closed(device) => self.ios.devices.pause(device),
            ShardMessage::Fenced { path, epoch } => self.on_fenced(path, epoch),
            ShardMessage::GiveUp(device) => self.ios.give_up(device),
            ShardMessage::AddDevice(device, export) => self.add_device(device, export),
            ShardMessage::CloseDevice(device) => self.ios.close_device(device),
            ShardMessage::AddPath { path, target } => {
                self.ios.add_path(path, &target.name);
                self.paths.add(path, *target);
            }
            ShardMessage::Retire { path, epoch } => self.paths[path].retire(epoch),
            ShardMessage::Config(config) => self.on_config(config),
        }
    }

    fn on_config(&mut self, config: Arc<SessionConfig>) {
        self.paths.set_policy(config.policy);
        if config.no_path != self.config.no_path {
            // The control shard reports when IO fails under the new policy.
            self.ios.devices.fail_none();
        }
        self.next_sweep = Instant::ZERO;
        self.limits = TimeLimits::new(&config);
        self.config = config;
    }

    /// Adds a device that is not open yet.
    fn add_device(&mut self, device: DeviceIndex, export: Arc<str>) {
        self.ios.add_device(device, export);
        // The previous device with this number may have been reopened just to close it.
        self.paths.forget_device(device);
    }

    fn on_granted(&mut self, granted: Granted) {
        if self.granted.is_none() {
            let own = granted.fence_permit(&self.config).0 + 1;
            let depth = granted.depth(&self.config);
            self.ios.requests.set_permits(share(depth, own, self.config.shards, self.index));
        }
        self.granted = Some(granted);
    }

    /// Handles a queue pair of this shard that became ready. Returns whether it belongs to one of
    /// the shard's IO connections.
    pub(crate) fn handle_established(
        &mut self,
        provider: ProviderIndex,
        qp: QpNum,
        private_data: &[u8],
        ctx: &mut Ctx<'_>,
    ) -> bool {
        let Some(path) = self.paths.find(provider, qp) else { return false };
        if let Err(fault) = check_accept(private_data) {
            self.paths.abort(path, CloseReason::Protocol(fault.to_string()), ctx);
            return true;
        }
        let (path, epoch, cid) = self.paths[path].established();
        ctx.out.control(ControlMessage::Up { path, epoch, cid });
        true
    }

    /// Handles a failed connection attempt or the end of a connection. Returns whether it belongs
    /// to the shard's IO connections.
    pub(crate) fn handle_closed(
        &mut self,
        provider: ProviderIndex,
        qp: QpNum,
        end: ConnectionEnd,
        ctx: &mut Ctx<'_>,
    ) -> bool {
        self.ios.now = ctx.now;
        let Some(path) = self.paths.find(provider, qp) else { return false };
        let (path, epoch, cid, why) = self.paths[path].closed();
        self.paths.forget_times(path);
        // This connection can no longer access memory. Answered requests end here; the others move
        // to a different path.
        for row in self.ios.requests.rows(|request| request.is_on(path)) {
            let request = self.ios.requests.request(row);
            let device = self.ios.requests.io(request.io).device;
            match request.standing {
                Standing::Answered(status) => self.end_request(row, status),
                _ if self.ios.devices.is_failing(device) => {
                    self.end_request(row, IoStatus::Aborted)
                }
                _ => self.lose_request(row, epoch, ctx.now),
            }
        }
        ctx.out.control(match end {
            ConnectionEnd::Failed(failure) => ControlMessage::Failed { path, epoch, cid, failure },
            ConnectionEnd::Closed(reason) => {
                let reason = match (reason, why) {
                    (CloseReason::Local, Some(why)) => why,
                    (reason, _) => reason,
                };
                ControlMessage::Closed { path, epoch, cid, reason }
            }
        });
        self.probes.connection_ended(path, epoch);
        self.free_probes();
        true
    }

    /// Handles a completion. Returns whether it belongs to one of the shard's IO connections.
    pub(crate) fn handle_completion(
        &mut self,
        provider: ProviderIndex,
        wc: &WorkCompletion,
        ctx: &mut Ctx<'_>,
    ) -> bool {
        self.ios.now = ctx.now;
        let Some((work, path)) = self.paths.completed(provider, wc) else { return false };
        if wc.status != WcStatus::Success {
            // The provider is about to report the end of the connection; requests wait for that
            // report.
            return true;
        }
        let fabric = ctx.fabrics[provider.index()].as_mut();
        match self.paths[path].on_completion(ctx.now, work, wc, fabric) {
            Ok(PathEvent::Nothing) => {}
            Ok(PathEvent::Answer(answer)) => self.on_answer(answer, path, ctx),
            Ok(PathEvent::Revoked(permit)) => self.on_revoked(permit, path, ctx),
            Err(fault) => self.paths.abort(path, CloseReason::Protocol(fault.to_string()), ctx),
        }
        true
    }

    fn on_answer(&mut self, answer: Answer, path: PathId, ctx: &mut Ctx<'_>) {
        if self.probes.is_answered(path, answer.permit) {
            return self.ios.requests.give_permit(answer.permit);
        }
        // A server may answer a permit that is not in use, or answer twice.
        let Some(row) = self.ios.requests.find(answer.permit, path) else { return };
        let request = self.ios.requests.request_mut(row);
        if request.standing != Standing::Sent {
            return;
        }
        request.standing = Standing::Answered(answer.status);
        let (part, took, sent, io) =
            (request.part, ctx.now.since(request.sent), request.sent, request.io);
        let taken = self.ios.requests.io(io);
        if let Some(memory) = taken.scattered_answer(part).filter(|_| answer.status.is_ok()) {
            self.paths[path].collect(&memory);
        }
        // An extents query transfers none of its range.
        let len = if taken.io.op == IoOp::Extents { 0 } else { part.len };
        if answer.errno == errno::EIDRM {
            ctx.out.control(ControlMessage::Removed(taken.device));
        }
        let queued = sent.since(taken.submitted);
        let request = self.ios.requests.request_mut(row);
        self.paths.end_slow(request, ctx.now);
        // From now on, the request waits for the local RDMA device to close its window.
        request.sent = ctx.now;
        let fabric = ctx.fabrics[self.paths[path].provider().index()].as_mut();
        match self.paths[path].close_window(answer.permit, fabric) {
            Ok(true) => self.end_request(row, answer.status),
            Ok(false) => {}
            Err(error) => {
                // Another connection of the path may still place data into the read's memory.
                self.ios.requests.request_mut(row).standing = Standing::Exposed;
                let what = format!("window of permit {} did not close: {error}", answer.permit);
                self.paths.abort(path, CloseReason::Lost(what), ctx);
            }
        }
        let times = RequestTimes { queued, round_trip: took, server: answer.times };
        self.paths.stats.request_done(path.index(), len, answer.status, times);
        self.paths.answered(path, ctx.now, took);
    }

    fn on_revoked(&mut self, permit: PermitId, path: PathId, ctx: &mut Ctx<'_>) {
        let row = self.ios.requests.find(permit, path);
        match row.map(|row| (row, self.ios.requests.request(row).standing)) {
            Some((row, Standing::Answered(status))) => self.end_request(row, status),
            _ => self.internal_error("a key was revoked without a request", path, ctx),
        }
    }

    /// Reports an impossible state of this shard, which is a bug, and ends the path involved.
    fn internal_error(&mut self, what: &'static str, path: PathId, ctx: &mut Ctx<'_>) {
        let name = self.paths[path].name();
        tracing::error!(shard = self.index.0, path = %name, what, "internal error");
        ctx.out.control(ControlMessage::InternalError { path });
        self.paths.abort(path, CloseReason::Lost(format!("internal error: {what}")), ctx);
    }

    /// Reports an event of an unknown connection.
    pub(crate) fn unclaimed_event(&self) {
        let what = "an event of an unknown connection";
        tracing::error!(shard = self.index.0, what, "internal error");
    }

    /// Ends a request that is on a path.
    fn end_request(&mut self, row: RequestRow, status: IoStatus) {
        let request = self.ios.requests.request_mut(row);
        self.paths.end_slow(request, self.ios.now);
        let path = &mut self.paths[request.path];
        path.request_left();
        let (io, path) = (request.io, request.path);
        let epoch = self.paths[path].cache_id(self.ios.requests.io(io).device);
        self.ios.end_request(row, status, epoch);
    }

    /// Registers memory with all paths, for one device or for all.
    fn attach(&mut self, device: Option<DeviceIndex>, region: &Arc<Region>) -> std::io::Result<()> {
        let attached = self.paths.attach_region(device, region, self.ios.requests.range());
        attached.map_err(|error| std::io::Error::other(error.to_string()))
    }

    /// Deregisters a device's memory, which nothing in flight uses.
    fn detach(&mut self, device: DeviceIndex, region: &Region) {
        self.paths.detach_region(device, region);
    }

    /// Issues queued IO as far as permits and paths allow. Returns whether anything was issued or
    /// finished.
    pub(crate) fn pump(&mut self, ctx: &mut Ctx<'_>) -> bool {
        self.ios.now = ctx.now;
        self.ios.devices.drop_unclaimed();
        self.report_retired(ctx);
        self.report_settled(ctx);
        self.report_claims(ctx);
        let any = self.sweep(ctx) | self.issue_waiting(ctx);
        self.wake_others(ctx);
        any | self.ios.release_flushes()
    }

    /// Issues queued IO. Returns whether anything was issued or finished.
    fn issue_waiting(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let serving = self.ios.devices.serving();
        let Some(granted) = self.granted.filter(|_| !serving.is_empty()) else { return false };
        let mut any = self.send_again(&granted, ctx);
        // Devices that cannot issue IO now: not open, without a path, or at their limit of permits.
        let mut blocked = DeviceSet::default();
        while let Some(device) = self.ios.requests.next_device(blocked)
            && self.ios.requests.has_permit()
        {
            let may_go = serving.contains(device) && self.ios.requests.may_take_permit(device);
            let path = if may_go { self.paths.choose(ctx.now, device) } else { None };
            let Some((row, path)) = self.ios.requests.first_waiting(device).zip(path) else {
                blocked.insert(device);
                continue;
            };
            let taken = self.ios.requests.io(row);
            if unsupported(&taken.io, self.ios.devices.info(taken.device)) {
                self.ios.fail_io(row, IoStatus::Unsupported);
                any = true;
                continue;
            }
            let Some(permit) = self.ios.requests.take_permit() else { break };
            match self.issue(row, path, permit, &granted, ctx) {
                Ok(()) => {}
                Err(FabricError::QpState | FabricError::QueueFull) => {
                    self.ios.requests.give_permit(permit);
                    self.paths.abandon(path, ctx);
                }
                Err(error) => {
                    self.ios.requests.give_permit(permit);
                    tracing::error!("request could not be posted: {error}");
                    self.ios.fail_io(row, IoStatus::Io);
                }
            }
            any = true;
        }
        any
    }

    /// Issues the next part of an IO on a path with the given permit.
    fn issue(
        &mut self,
        row: IoRow,
        path: PathId,
        permit: PermitId,
        granted: &Granted,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), FabricError> {
        let is_sync = self.ios.begin(row);
        let taken = self.ios.requests.io(row);
        let device = self.ios.devices.info(taken.device);
        let part = taken.next_part(granted.max_io_size, device.geometry.logical_block);
        let target = &mut self.paths[path];
        let fabric = ctx.fabrics[target.provider().index()].as_mut();
        let device_id = target.device_id(taken.device);
        if let Err(error) = target.post(taken.request(part, permit, device_id), granted, fabric) {
            if is_sync {
                self.ios.return_sync(row);
            }
            return Err(error);
        }
        let memory = taken.memory_use();
        self.ios.requests.issued(row, permit, path, part, ctx.now);
        self.paths.issued(path, part.len, memory, ctx);
        Ok(())
    }

    /// Makes other shards check their held flushes after a sync has ended on this shard.
    fn wake_others(&mut self, ctx: &mut Ctx<'_>) {
        if self.ios.syncs.take_wake() {
            let others = (0..self.config.shards).filter(|shard| *shard != self.index.0);
            others.for_each(|shard| ctx.out.shard(CoreIndex(shard), ShardMessage::Wake));
        }
    }

    /// Reports closing devices that have no IO left on this shard.
    fn report_settled(&mut self, ctx: &mut Ctx<'_>) {
        while let Some(device) = self.ios.next_settled() {
            self.paths.forget_device(device);
            ctx.out.control(ControlMessage::Settled { device, shard: self.index });
        }
    }

    /// Reports devices whose users have claimed them, or no longer do.
    fn report_claims(&mut self, ctx: &mut Ctx<'_>) {
        while let Some((device, is_made)) = self.ios.devices.take_claim() {
            ctx.out.control(ControlMessage::Claim { device, is_made });
        }
    }

    /// Reports leaving paths that have no requests in flight on this shard.
    fn report_retired(&mut self, ctx: &mut Ctx<'_>) {
        let asked = self.probes.path();
        for path in self.paths.iter_mut() {
            if path.inflight() == 0
                && asked != Some(path.id())
                && let Some(epoch) = path.take_retiring()
            {
                let (path, shard) = (path.id(), self.index);
                ctx.out.control(ControlMessage::Retired { path, epoch, shard });
            }
        }
    }

    /// Frees the permits of probes that can no longer reach the server.
    fn free_probes(&mut self) {
        for permit in self.probes.free(|path, epoch| self.ios.retries.is_fenced(path, epoch)) {
            self.ios.requests.give_permit(permit);
        }
    }

    /// Time at which `pump` must be called even if nothing happens.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        if self.ios.requests.inflight() > 0 {
            return Some(self.next_sweep);
        }
        self.ios.requests.failed.deadline().map(|at| at.max(self.next_sweep))
    }

    /// Devices and their IOs.
    pub(crate) fn ios(&self) -> &Ios {
        &self.ios
    }

    pub(crate) fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Returns this shard's reports of its devices.
    pub(crate) fn device_reports(&self, now: Instant, reported: Reported) -> Vec<DeviceReport> {
        let is_reported = |device: &DeviceIndex| match reported {
            Reported::All => true,
            Reported::One(one) => one == *device,
            Reported::None => false,
        };
        let devices = self.ios.devices.all().filter(is_reported);
        devices.map(|device| self.ios.report(now, device, self.paths.serve(device))).collect()
    }

    /// Panics when the tables are inconsistent. Internal errors are only logged: mutants in the
    /// simulator cause them on purpose.
    pub(crate) fn check(&self) {
        self.ios.check(self.probes.permits_held());
        let all = || self.ios.requests.requests();
        for path in self.paths.iter() {
            let mine = all().filter(|(_, request)| request.is_on(path.id())).count();
            assert_eq!(path.inflight() as usize, mine);
        }
        assert_eq!(self.paths.slow_count(), all().filter(|(_, request)| request.slow).count());
    }
}
