//! Periodic checks of a shard: everything that waits is examined every [`SWEEP`].
//!
//! When a request is not answered within the IO timeout, either the path is dead or the disk behind
//! it is slow. The connection that carries the request shows which: it is alive if something was
//! received on it since the request, and recently. Nothing else counts, not even a heartbeat of the
//! path, since a connection can fail on its own (`probe.rs`). A silent connection that owes answers
//! is probed before the time of its oldest request is over, so that the answer is there when it is
//! needed. If no probe can be sent, because the shard has too few permits to reserve one
//! (`permits.rs`) and requests hold them all, silence counts as death.

use rtrs_core::fabric::CloseReason;
use rtrs_core::ids::PathId;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant};

use super::Shard;
use super::failed_ios::FailedIo;
use super::probe::is_due;
use super::requests::{Request, RequestRow, Standing};
use super::waiting::IoRow;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceIndex;
use crate::engine::message::ControlMessage;
use crate::engine::session::{Failover, HeartbeatSettings, SlowIo};

/// Interval between checks.
const SWEEP: Duration = Duration::from_millis(250);
/// Minimum time of a request, whatever the age of its IO.
const LAST_TRY: Duration = Duration::from_secs(1);

/// State of a connection that owes an overdue answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Liveness {
    /// Something was received on it since the request was sent.
    Alive,
    /// A probe is in flight, or about to be.
    Probed,
    /// Nothing shows that the connection is alive.
    Silent,
}

impl Shard {
    /// Maximum time of a whole IO; None if it is unlimited.
    pub(super) fn age_max(&self) -> Option<Duration> {
        match self.config.slow_io {
            SlowIo::Wait => None,
            SlowIo::Fail => self.config.no_path.io_age_max(self.config.io_timeout),
        }
    }

    /// Silence after which a connection that owes an answer is probed, and the time limit for the
    /// answer to the probe.
    fn silence_bounds(&self) -> (Duration, Duration) {
        let HeartbeatSettings { interval, missed_max, .. } = self.config.heartbeat;
        let half = self.config.io_timeout / 2;
        (interval.min(half), (interval * missed_max).min(half))
    }

    /// Enforces time limits: ends dead paths with overdue requests, and fails IO that has waited
    /// too long.
    pub(super) fn sweep(&mut self, ctx: &mut Ctx<'_>) -> bool {
        if ctx.now < self.next_sweep {
            return false;
        }
        self.requests.failed.log_suppressed(ctx.now);
        let due = std::mem::replace(&mut self.next_sweep, ctx.now + SWEEP);
        if self.probes.came_late(ctx.now, due, SWEEP) {
            return false;
        }
        self.note_use(ctx);
        let mut any = self.sweep_requests(ctx) | self.look_at_silence(ctx);
        any |= self.sweep_retries(ctx.now) | self.sweep_held_flushes(ctx.now);
        for device in self.requests.waiting_devices().iter() {
            let Some(bound) = self.waiting_max(device) else { continue };
            while let Some(row) = self.requests.first_waiting(device) {
                if ctx.now.since(self.requests.io(row).submitted) < bound {
                    break;
                }
                self.fail_io(row, IoStatus::TimedOut);
                any = true;
            }
        }
        any
    }

    /// Marks paths that owe answers as used, however long the answers take. The session may have
    /// become idle just when a request was sent.
    fn note_use(&self, ctx: &mut Ctx<'_>) {
        for path in self.paths.iter().filter(|path| path.inflight() > 0) {
            if path.waits(ctx.now) {
                ctx.out.control(ControlMessage::InUse);
            }
        }
    }

    /// Checks requests that have exceeded their time. Returns whether a path was ended or an IO
    /// failed.
    fn sweep_requests(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let (bound, age_max) = (self.config.io_timeout, self.age_max());
        let overdue = self.requests.rows(|request| {
            let age = request.sent.since(self.requests.io(request.io).submitted);
            // Remaining time of the whole IO, but at least `LAST_TRY`.
            let left = age_max.map_or(bound, |max| max.saturating_sub(age).max(LAST_TRY));
            request.is_on(request.path) && ctx.now.since(request.sent) >= bound.min(left)
        });
        let mut any = false;
        for row in overdue {
            let request = *self.requests.request(row);
            match self.liveness(&request, ctx.now) {
                Liveness::Alive => any |= self.note_slow(row, ctx.now),
                Liveness::Probed => {}
                Liveness::Silent => {
                    self.paths.abort(request.path, CloseReason::TimedOut, ctx);
                    any = true;
                }
            }
        }
        any
    }

    /// State of the connection of an overdue request.
    fn liveness(&self, request: &Request, now: Instant) -> Liveness {
        if matches!(request.standing, Standing::Answered(_) | Standing::Exposed) {
            // The request no longer waits for the server.
            return Liveness::Silent;
        }
        let heard = self.paths[request.path].heard();
        let (period, answer) = self.silence_bounds();
        if heard > request.sent && now.since(heard) <= period + answer + SWEEP * 2 {
            return Liveness::Alive;
        }
        // A probe of another path soon ends either way; then this one can be probed.
        let may_ask = self.probes.path().is_some() || self.requests.has_probe_permit();
        if may_ask { Liveness::Probed } else { Liveness::Silent }
    }

    /// Handles an overdue request on a live connection. Returns whether the failure of its IO was
    /// reported to the user.
    fn note_slow(&mut self, row: RequestRow, now: Instant) -> bool {
        let request = self.requests.request_mut(row);
        let (io, path, age) = (request.io, request.path, now.since(request.sent));
        if !std::mem::replace(&mut request.slow, true) {
            self.stats.request_slow(path.index());
            let device = self.requests.io(io).device;
            self.device_stats[device.index()].slow_requests += 1;
            if self.slow.began(path) {
                tracing::warn!(
                    path = %self.paths[path].name(),
                    shard = self.index.0,
                    age_s = age.as_secs(),
                    "a request is slow: the path works, and the server does not answer it"
                );
            }
        }
        self.config.slow_io == SlowIo::Fail && self.give_up_io(io)
    }

    /// Reports the failure of an IO to its user. Its requests stay here with their permits and
    /// memory until the server has answered or can no longer start them. Returns false if the user
    /// was notified before.
    fn give_up_io(&mut self, row: IoRow) -> bool {
        let taken = self.requests.io_mut(row);
        if std::mem::replace(&mut taken.given_up, true) {
            return false;
        }
        let (device, tag) = (taken.device, taken.io.tag);
        let failed = FailedIo::new(&taken.io, IoStatus::TimedOut, self.now);
        self.requests.failed.note(device, failed, &self.paths);
        self.give_sync_up(row);
        self.requests.fail(row, IoStatus::TimedOut);
        self.devices.give_up(device, tag);
        true
    }

    /// Ends the slow state of a request that was answered or lost its connection.
    pub(super) fn end_slow(&mut self, row: RequestRow) {
        let request = self.requests.request_mut(row);
        if !std::mem::take(&mut request.slow) {
            return;
        }
        let (path, age) = (request.path, self.now.since(request.sent));
        if let Some(episode) = self.slow.ended(path, age) {
            tracing::info!(
                path = %self.paths[path].name(),
                shard = self.index.0,
                requests = episode.requests,
                longest_s = episode.longest.as_secs(),
                "no request is slow any more"
            );
        }
    }

    /// Maximum time that an IO of a device may wait to be issued; None if it is unlimited. If slow
    /// requests count as failed, IOs waiting for their permits get `io_timeout` too.
    fn waiting_max(&self, device: DeviceIndex) -> Option<Duration> {
        let is_slow =
            |request: &Request| request.slow && self.requests.io(request.io).device == device;
        let disk_is_slow = self.requests.requests().any(|(_, request)| is_slow(request))
            && self.paths.serve(device);
        match self.config.slow_io {
            SlowIo::Fail if disk_is_slow => Some(self.config.io_timeout),
            SlowIo::Wait | SlowIo::Fail => self.age_max(),
        }
    }

    /// Fails requests that have waited too long for a path. Those that await a fence are failed
    /// only if none will come: a first copy that could start after the error could take effect
    /// after newer writes.
    fn sweep_retries(&mut self, now: Instant) -> bool {
        let fences = self.granted.is_some_and(|granted| granted.fences);
        let unfenced = self.config.failover == Failover::Strict && !fences;
        let Some(bound) = self.config.no_path.io_age_max(self.config.io_timeout) else {
            return false;
        };
        let early = rtrs_core::mutated!(GivenUpBeforeFence);
        let waits_for_disk = self.config.slow_io == SlowIo::Wait && !early;
        let over = self.requests.rows(|request| {
            let waits = match request.standing {
                Standing::Ready => true,
                Standing::AwaitingFence { .. } => unfenced || early,
                Standing::Sent | Standing::Answered(_) | Standing::Exposed => false,
            };
            // Time spent at a disk does not count if it is unlimited.
            let submitted = self.requests.io(request.io).submitted;
            let since = if waits_for_disk { request.sent } else { submitted };
            waits && now.since(since) >= bound
        });
        for row in &over {
            self.retries.remove(*row);
            self.end_request(*row, IoStatus::TimedOut);
        }
        !over.is_empty()
    }

    /// Probes a silent connection that owes answers, and ends one whose probe stays unanswered.
    /// Only one probe is in flight at a time, for the connection that has been silent longest, and
    /// only while a permit is free.
    fn look_at_silence(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let (period, answer) = self.silence_bounds();
        if let Some(path) = self.probes.path() {
            let target = &self.paths[path];
            let silent = self.probes.silent_for(ctx.now, target.heard(), answer);
            let Some(silent) = silent.filter(|_| target.is_up()) else { return false };
            let why = format!("no answer for {} ms", silent.as_millis());
            self.paths.abort(path, CloseReason::Lost(why), ctx);
            return true;
        }
        let Some(granted) = self.granted else { return false };
        let Some(path) = self.most_silent(ctx.now, period) else { return false };
        let Some(permit) = self.requests.take_probe_permit() else { return false };
        let target = &mut self.paths[path];
        let fabric = ctx.fabrics[target.provider().index()].as_mut();
        if target.post_probe(permit, &granted, fabric).is_err() {
            self.requests.give_permit(permit);
            self.abandon_path(path, ctx);
        } else {
            self.probes.sent(path, permit, ctx.now);
        }
        true
    }

    /// Path whose connection owes answers and has been silent for `period`, and longer than the
    /// others.
    fn most_silent(&self, now: Instant, period: Duration) -> Option<PathId> {
        let candidates = self.paths.iter().filter(|path| path.inflight() > 0 && path.is_up());
        let silent = candidates.filter(|path| {
            let waits =
                |request: &Request| request.path == path.id() && request.standing == Standing::Sent;
            let sent = self.requests.requests().filter(|(_, request)| waits(request));
            let oldest = sent.map(|(_, request)| request.sent).min();
            oldest.is_some_and(|oldest| is_due(now, oldest, path.heard(), period))
        });
        silent.min_by_key(|path| path.heard()).map(|path| path.id())
    }
}
