//! One shard's part of a session: all IO goes through this module.
//!
//! A request uses this shard's connection of the path that the policy selects. Each part owns its
//! state and knows nothing of its siblings; this file connects them:
//!
//! - `requests.rs`: IOs, requests and permits (`permits.rs`), with `waiting.rs`;
//! - `paths.rs`: connections, the policy (`policy.rs`) and slow-path detection (`slow_path.rs`);
//! - `retry.rs`, `resend.rs`: requests in flight on a path that died, which are sent again on
//!   another;
//! - `sweep.rs`: periodic checks: `probe.rs` probes a silent connection, `slow_requests.rs` counts
//!   requests that a slow disk delays;
//! - `syncs.rs`, `held_flushes.rs`: the order of flushes and writes with FUA; a successful flush
//!   waits for those that overlap it;
//! - `failed_ios.rs`: number and last of the failed IOs, and their log lines;
//! - `zeroes.rs`: zeroes written as data if the server cannot write them;
//! - `block_device.rs`: a device of the session for its user; `devices.rs`: addition and removal of
//!   devices.
//!
//! Read targets are opened to the server through a window per permit, under a fresh key for each
//! request, and closed when the answer has arrived. A late or malicious server thus cannot write
//! into memory that has been reused.

pub(crate) mod block_device;
pub(crate) mod devices;
pub(crate) mod failed_ios;
mod held_flushes;
mod paths;
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

use rtrs_core::block::{Completion, Io, IoOp};
use rtrs_core::fabric::{CloseReason, ConnectFailure, FabricError, WcStatus, WorkCompletion};
use rtrs_core::ids::{CoreIndex, PathId, PermitId, ProviderIndex, QpNum};
use rtrs_core::mem::Region;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;
use rtrs_core::wire::errno;

use self::failed_ios::FailedIo;
use self::paths::Paths;
use self::permits::share;
use self::probe::Probes;
use self::requests::{Request, RequestRow, Requests, Standing, TakenIo};
use self::retry::Retries;
use self::slow_requests::SlowRequests;
use self::syncs::Syncs;
use self::waiting::IoRow;
use self::zeroes::{Zeroes, unsupported};
use crate::engine::cache_epoch::FlushMark;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::{DeviceIndex, DeviceSet};
use crate::engine::device_table::DeviceTable;
use crate::engine::message::{Connect, ConnectionEnd, ControlMessage, ShardMessage};
use crate::engine::session::{Granted, SessionConfig};
use crate::parts::RequestTimes;
use crate::path::handshake::check_accept;
use crate::path::io::Answer;
use crate::path::shard::PathEvent;
use crate::stats::{DeviceStats, Done, ShardStats};

/// Loss count of an IO with an individually lost part; no real count reaches this value.
const PART_LOST: u64 = u64::MAX;

/// One shard's part of a session.
#[derive(Debug)]
pub(crate) struct Shard {
    index: CoreIndex,
    config: Arc<SessionConfig>,
    granted: Option<Granted>,
    devices: DeviceTable,
    requests: Requests,
    retries: Retries,
    syncs: Syncs,
    paths: Paths,
    probes: Probes,
    slow: SlowRequests,
    /// Devices that are being closed.
    closing: DeviceSet,
    zeroes: Zeroes,
    next_sweep: Instant,
    now: Instant,
    stats: ShardStats,
    device_stats: Vec<DeviceStats>,
    internal_errors: u64,
}

impl Shard {
    pub(crate) fn new(index: CoreIndex, config: &Arc<SessionConfig>) -> Self {
        let mut shard = Self {
            index,
            granted: None,
            devices: DeviceTable::new(),
            requests: Requests::new(),
            retries: Retries::new(config.paths.len()),
            syncs: Syncs::new(index),
            paths: Paths::new(index, config),
            probes: Probes::default(),
            slow: SlowRequests::new(config.paths.len()),
            closing: DeviceSet::default(),
            zeroes: Zeroes::default(),
            next_sweep: Instant::ZERO,
            now: Instant::ZERO,
            stats: ShardStats::new(config.paths.len()),
            device_stats: Vec::new(),
            internal_errors: 0,
            config: Arc::clone(config),
        };
        for (device, volume) in DeviceIndex::all().zip(&config.volumes) {
            shard.add_device(device, volume.export.as_str().into());
        }
        shard
    }

    /// Handles a message from the control shard.
    pub(crate) fn handle_message(&mut self, message: ShardMessage, ctx: &mut Ctx<'_>) {
        self.now = ctx.now;
        match message {
            ShardMessage::Granted(granted) => self.on_granted(granted),
            ShardMessage::Connect(connect) => {
                let Connect { path, epoch, cid, .. } = *connect;
                let (range, timeout) = (self.requests.range(), self.config.connect_timeout);
                if let Err(error) = self.paths.connect(&connect, range, timeout, ctx) {
                    let reason = CloseReason::Lost(error.to_string());
                    let failure = ConnectFailure::Failed(reason);
                    ctx.out.control(ControlMessage::Failed { path, epoch, cid, failure });
                }
            }
            ShardMessage::PathUp { path, epoch, chunks, served } => {
                let range = self.requests.range();
                self.paths[path].up(epoch, &chunks, range, &served);
                served.iter().for_each(|served| self.has_path(served.device));
            }
            ShardMessage::Serves { path, epoch, served } => {
                self.paths[path].serve(epoch, served);
                self.has_path(served.device);
            }
            ShardMessage::Leaves { path, epoch, device } => {
                if self.paths[path].is_of(epoch) {
                    self.paths[path].leave(device);
                }
            }
            ShardMessage::Cache(device, cache) => self.devices.set_cache(device, cache),
            // The next `pump` checks.
            ShardMessage::Wake => {}
            ShardMessage::Disconnect { path, epoch, in_order } => {
                self.paths[path].disconnect(epoch, in_order, ctx);
            }
            ShardMessage::Open(device, info) => {
                let zeroes = self.zeroes.prepare(&info);
                self.devices.open(device, info);
                let known = zeroes.and_then(|new| new.map_or(Ok(()), |r| self.attach(None, &r)));
                if let Err(error) = known {
                    tracing::error!("no memory for zeroes: {error}");
                }
            }
            ShardMessage::Closed(device) => self.devices.pause(device),
            ShardMessage::Fenced { path, epoch } => self.on_fenced(path, epoch),
            ShardMessage::GiveUp(device) => self.give_up(device),
            ShardMessage::AddDevice(device, export) => self.add_device(device, export),
            ShardMessage::CloseDevice(device) => self.close_device(device),
            ShardMessage::AddPath { path, target } => {
                self.paths.add(path, *target);
                self.retries.add_path(self.paths.count());
                self.slow.add_path(self.paths.count());
                self.stats.add_path(path.index());
            }
            ShardMessage::Retire { path, epoch } => self.paths[path].retire(epoch),
            ShardMessage::Config(config) => self.on_config(config),
        }
    }

    fn on_config(&mut self, config: Arc<SessionConfig>) {
        self.paths.set_policy(config.policy);
        if config.no_path != self.config.no_path {
            // The control shard reports when IO fails under the new policy.
            self.devices.fail_none();
        }
        self.next_sweep = Instant::ZERO;
        self.config = config;
    }

    fn on_granted(&mut self, granted: Granted) {
        if self.granted.is_none() {
            let own = granted.fence_permit(&self.config).0 + 1;
            let depth = granted.depth(&self.config);
            self.requests.set_permits(share(depth, own, self.config.shards, self.index));
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
        self.now = ctx.now;
        let Some(path) = self.paths.find(provider, qp) else { return false };
        let (path, epoch, cid, why) = self.paths[path].closed();
        self.paths.forget_times(path);
        // This connection can no longer touch memory. Answered requests end here; the others move
        // to another path.
        for row in self.requests.rows(|request| request.is_on(path)) {
            let request = self.requests.request(row);
            let device = self.requests.io(request.io).device;
            match request.standing {
                Standing::Answered(status) => self.end_request(row, status),
                _ if self.devices.is_failing(device) => self.end_request(row, IoStatus::Aborted),
                _ => self.await_fence(row, epoch),
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
        self.now = ctx.now;
        let Some((work, path)) = self.paths.completed(provider, wc) else { return false };
        if wc.status != WcStatus::Success {
            // The provider is about to report the end of the connection; requests wait for that.
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
            return self.requests.give_permit(answer.permit);
        }
        // A server may answer a permit that is not in use, or answer twice.
        let Some(row) = self.requests.find(answer.permit, path) else { return };
        let request = self.requests.request_mut(row);
        if request.standing != Standing::Sent {
            return;
        }
        request.standing = Standing::Answered(answer.status);
        let (len, took, sent, io) =
            (request.part.len, self.now.since(request.sent), request.sent, request.io);
        let taken = self.requests.io(io);
        // An extents query transfers none of its range.
        let len = if taken.io.op == IoOp::Extents { 0 } else { len };
        if answer.errno == errno::EIDRM {
            ctx.out.control(ControlMessage::Removed(taken.device));
        }
        let queued = sent.since(taken.submitted);
        self.end_slow(row);
        // From now on, the request waits for the local RDMA device to close its window.
        self.requests.request_mut(row).sent = self.now;
        let fabric = ctx.fabrics[self.paths[path].provider().index()].as_mut();
        match self.paths[path].close_window(answer.permit, fabric) {
            Ok(true) => self.end_request(row, answer.status),
            Ok(false) => {}
            Err(error) => {
                // Another connection of the path may still place data into the read's memory.
                self.requests.request_mut(row).standing = Standing::Exposed;
                let what = format!("window of permit {} did not close: {error}", answer.permit);
                self.paths.abort(path, CloseReason::Lost(what), ctx);
            }
        }
        let times = RequestTimes { queued, round_trip: took, server: answer.times };
        self.stats.request_done(path.index(), len, answer.status, times);
        self.paths.answered(path, self.now, took);
    }

    fn on_revoked(&mut self, permit: PermitId, path: PathId, ctx: &mut Ctx<'_>) {
        let row = self.requests.find(permit, path);
        match row.map(|row| (row, self.requests.request(row).standing)) {
            Some((row, Standing::Answered(status))) => self.end_request(row, status),
            _ => self.internal_error("a key was revoked without a request", path, ctx),
        }
    }

    /// Reports an impossible state of this shard, which is a bug, and ends the path involved.
    fn internal_error(&mut self, what: &'static str, path: PathId, ctx: &mut Ctx<'_>) {
        let name = self.paths[path].name();
        tracing::error!(shard = self.index.0, path = %name, what, "internal error");
        self.internal_errors += 1;
        ctx.out.control(ControlMessage::InternalError { path });
        self.paths.abort(path, CloseReason::Lost(format!("internal error: {what}")), ctx);
    }

    /// Reports an event of an unknown connection.
    pub(crate) fn unclaimed_event(&mut self) {
        let what = "an event of an unknown connection";
        tracing::error!(shard = self.index.0, what, "internal error");
        self.internal_errors += 1;
    }

    fn end_request(&mut self, row: RequestRow, status: IoStatus) {
        self.end_slow(row);
        let request = self.requests.end_request(row, status);
        let path = &mut self.paths[request.path];
        if request.is_on(request.path) {
            path.request_left();
        }
        let taken = self.requests.io_mut(request.io);
        if let Some(cache) = self.devices.cache(taken.device) {
            match (status, request.standing) {
                (IoStatus::Ok, _) => {
                    if taken.has_more() {
                        taken.losses.get_or_insert_with(|| cache.count());
                    }
                    let epoch = path.cache_id(taken.device);
                    if taken.io.op == IoOp::Flush {
                        // A flush covers writes only once it has succeeded for its user.
                        taken.epoch = epoch;
                        return self.end_io(request.io);
                    }
                    let outdated = cache.done(self.index, &taken.io, taken.mark, epoch);
                    if outdated && taken.has_more() {
                        taken.losses = Some(PART_LOST);
                    }
                    if let Some(before) = taken.losses.filter(|_| !taken.has_more()) {
                        cache.ended_in_parts(&taken.io, before);
                    }
                }
                (status, Standing::Answered(_)) => cache.failed(&taken.io, status),
                // The server's answer is unknown.
                _ if taken.sync.is_some() => cache.sync_unanswered(),
                _ => {}
            }
        }
        self.end_io(request.io);
    }

    /// Ends an IO that has no outstanding requests. A flush may be held back.
    fn end_io(&mut self, row: IoRow) {
        if self.requests.is_ended(row) && !self.end_sync(row) {
            self.complete(row);
        }
    }

    /// Completes an IO that has ended.
    fn complete(&mut self, row: IoRow) {
        let taken = self.requests.take_ended(row);
        let TakenIo { device, io, mark, status, submitted, epoch, given_up, .. } = taken;
        if let (IoOp::Flush, true, Some(cache)) =
            (io.op, status.is_ok(), self.devices.cache(device))
        {
            cache.done(self.index, &io, mark, epoch);
        }
        let mark = (io.op == IoOp::Flush).then_some(mark);
        self.devices.ended(device, Completion { tag: io.tag, status }, mark);
        let stats = &mut self.device_stats[device.index()];
        if stats.io_done(&io, status, self.now.since(submitted)) == Done::Failed {
            let path = self.requests.failed.take_path(row);
            if !given_up {
                let failed = FailedIo { path, ..FailedIo::new(&io, status, self.now) };
                self.requests.failed.note(device, failed, &self.paths);
            }
        }
    }

    /// Fails a waiting IO as soon as its requests in flight have ended.
    fn fail_io(&mut self, row: IoRow, status: IoStatus) {
        self.requests.fail(row, status);
        self.end_io(row);
    }

    /// Registers this memory with all paths, for one device or for all devices.
    fn attach(&mut self, device: Option<DeviceIndex>, region: &Arc<Region>) -> std::io::Result<()> {
        let attached = self.paths.attach_region(device, region, self.requests.range());
        attached.map_err(|error| std::io::Error::other(error.to_string()))
    }

    fn submit(&mut self, device: DeviceIndex, io: Io) -> Result<(), Io> {
        if !self.devices.has_room(device) {
            return Err(io);
        }
        let info = self.devices.info(device);
        let mut io = self.zeroes.translate(info, io);
        let mut status = info.geometry.check(&io);
        let mut mark = FlushMark::default();
        if self.devices.is_closed(device) {
            status = IoStatus::Aborted;
        } else if self.devices.is_failing(device) && status.is_ok() {
            status = IoStatus::TimedOut;
        }
        if io.op == IoOp::Flush {
            // A flush has no range, whatever the submitter passed.
            (io.offset, io.len, io.buf) = (0, 0, None);
            if let Some(cache) = self.devices.cache(device) {
                cache.submitted(&mut mark, self.now);
            }
        }
        self.devices.taken(device);
        let row = self.requests.take(TakenIo::new(device, io, status, mark, self.now));
        self.device_stats[device.index()].queue_full += u64::from(self.requests.is_full());
        self.end_io(row);
        Ok(())
    }

    /// Cancels queued IO with these tags, and the unissued rest of IO that is partly issued.
    /// Requests that were posted once, on any path, are not canceled: they may take effect at any
    /// time.
    fn cancel(&mut self, device: DeviceIndex, fits: &dyn Fn(u64) -> bool) {
        for row in self.requests.waiting(device, |io| fits(io.io.tag)) {
            self.fail_io(row, IoStatus::Aborted);
        }
    }

    /// Issues queued IO as far as permits and paths allow. Returns whether anything was issued or
    /// finished.
    pub(crate) fn pump(&mut self, ctx: &mut Ctx<'_>) -> bool {
        self.now = ctx.now;
        self.devices.drop_unclaimed();
        self.report_retired(ctx);
        self.report_settled(ctx);
        let any = self.sweep(ctx) | self.issue_waiting(ctx);
        any | self.release_flushes(ctx)
    }

    /// Issues queued IO. Returns whether anything was issued or finished.
    fn issue_waiting(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let serving = self.devices.serving();
        let Some(granted) = self.granted.filter(|_| !serving.is_empty()) else { return false };
        let mut any = self.send_again(&granted, ctx);
        // Devices that cannot issue now: not open, without a path or at their share of permits.
        let mut blocked = DeviceSet::default();
        while let Some(device) = self.requests.next_device(blocked)
            && self.requests.has_permit()
        {
            let may_go = serving.contains(device) && self.requests.may_take_permit(device);
            let path = if may_go { self.paths.choose(self.now, device) } else { None };
            let Some((row, path)) = self.requests.first_waiting(device).zip(path) else {
                blocked.insert(device);
                continue;
            };
            let taken = self.requests.io(row);
            if unsupported(&taken.io, self.devices.info(taken.device)) {
                self.fail_io(row, IoStatus::Unsupported);
                any = true;
                continue;
            }
            let Some(permit) = self.requests.take_permit() else { break };
            match self.issue(row, path, permit, &granted, ctx) {
                Ok(()) => {}
                Err(FabricError::QpState | FabricError::QueueFull) => {
                    self.requests.give_permit(permit);
                    self.abandon_path(path, ctx);
                }
                Err(error) => {
                    self.requests.give_permit(permit);
                    tracing::error!("request could not be posted: {error}");
                    self.fail_io(row, IoStatus::Io);
                }
            }
            any = true;
        }
        any
    }

    /// Issues the next part of an IO on a path, with this permit.
    fn issue(
        &mut self,
        row: IoRow,
        path: PathId,
        permit: PermitId,
        granted: &Granted,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), FabricError> {
        let draws = self.begin_sync(row);
        let taken = self.requests.io_mut(row);
        let device = self.devices.info(taken.device);
        if let (IoOp::Flush, Some(cache)) = (taken.io.op, self.devices.cache(taken.device)) {
            cache.sent(&mut taken.mark);
        }
        let part = taken.next_part(granted.max_io_size, device.geometry.logical_block);
        let target = &mut self.paths[path];
        let fabric = ctx.fabrics[target.provider().index()].as_mut();
        let device_id = target.device_id(taken.device);
        if let Err(error) = target.post(taken.request(part, permit, device_id), granted, fabric) {
            if draws {
                self.return_sync(row);
            }
            return Err(error);
        }
        self.requests.issued(row, permit, path, part, self.now);
        self.stats.request_issued(path.index());
        self.path_used(path, ctx);
        Ok(())
    }

    /// Records a request. The first one of an idle session makes the control shard check that the
    /// server is alive.
    fn path_used(&self, path: PathId, ctx: &mut Ctx<'_>) {
        if self.paths[path].ends_idle() {
            ctx.out.control(ControlMessage::InUse);
        }
    }

    /// Ends a path to which no request can be posted.
    fn abandon_path(&mut self, path: PathId, ctx: &mut Ctx<'_>) {
        self.paths.abort(path, CloseReason::Lost("no request can be posted".into()), ctx);
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

    /// Frees the permits of probes that can no longer arrive.
    fn free_probes(&mut self) {
        for permit in self.probes.free(|path, epoch| self.retries.is_fenced(path, epoch)) {
            self.requests.give_permit(permit);
        }
    }

    /// Fails the waiting IO of a device that has had no path for too long or will never have one.
    /// Requests on a path end with its connection.
    fn give_up(&mut self, device: DeviceIndex) {
        self.devices.set_failing(device, true);
        let of_it = |request: &Request| self.requests.io(request.io).device == device;
        let off = |request: &Request| of_it(request) && !request.is_on(request.path);
        for row in self.requests.rows(off) {
            self.retries.remove(row);
            self.end_request(row, IoStatus::TimedOut);
        }
        while let Some(row) = self.requests.first_waiting(device) {
            self.fail_io(row, IoStatus::TimedOut);
        }
    }

    /// Time at which `pump` must be called even if nothing happens.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        if self.requests.inflight() > 0 {
            return Some(self.next_sweep);
        }
        self.requests.failed.deadline().map(|at| at.max(self.next_sweep))
    }

    /// Number of unfinished IOs.
    pub(crate) fn inflight(&self) -> usize {
        self.requests.inflight()
    }

    pub(crate) fn devices(&self) -> &DeviceTable {
        &self.devices
    }

    pub(crate) fn stats(&self) -> &ShardStats {
        &self.stats
    }

    pub(crate) fn path_inflight(&self) -> Vec<u32> {
        self.paths.inflight()
    }

    /// For each path, whether this shard excludes it because it is slow.
    pub(crate) fn path_slow(&self) -> Vec<bool> {
        self.paths.slow()
    }

    /// Number of permits that requests hold.
    pub(crate) fn permits_held(&self) -> usize {
        self.requests.permits_held()
    }

    /// Panics when the tables are inconsistent. Internal errors are only logged: mutants in the
    /// simulator cause them on purpose.
    pub(crate) fn check(&self) {
        self.requests.check(self.probes.permits_held());
        let all = || self.requests.requests();
        let ready = all().filter(|(_, request)| request.standing == Standing::Ready);
        self.retries.check(ready.map(|(row, request)| (request.turn, row)).collect());
        for path in self.paths.iter() {
            let mine = all().filter(|(_, request)| request.is_on(path.id())).count();
            assert_eq!(path.inflight() as usize, mine);
        }
        assert_eq!(self.slow.now(), all().filter(|(_, request)| request.slow).count());
    }
}
