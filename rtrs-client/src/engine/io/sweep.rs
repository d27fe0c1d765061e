//! A shard's periodic checks: everything that is waiting is examined every [`SWEEP`].
//!
//! When a request is not answered within the IO timeout, either the path is dead or the disk behind
//! it is slow. The connection that carries the request shows which: it is alive if something was
//! received on it recently and since the request was sent. Nothing else counts, not even a
//! heartbeat on the path, since a connection can fail on its own (`probe.rs`). A silent connection
//! that owes answers is probed before its oldest request times out, so that the answer has arrived
//! by then. If no probe can be sent, because the shard has too few permits to reserve one
//! (`permits.rs`) and requests hold them all, silence counts as death.

use rtrs_core::fabric::CloseReason;
use rtrs_core::ids::PathId;
use rtrs_core::time::Instant;

use super::Shard;
use super::limits::SWEEP;
use super::probe::is_due;
use super::requests::{Request, RequestRow, Standing};
use crate::engine::ctx::Ctx;

/// State of a connection that owes an overdue answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Liveness {
    /// Something was received on the connection since the request was sent.
    Alive,
    /// A probe is in flight, or about to be sent.
    Probed,
    /// Nothing shows that the connection is alive.
    Silent,
}

impl Shard {
    /// Enforces time limits: ends dead paths with overdue requests, and fails IO that has waited
    /// too long.
    pub(super) fn sweep(&mut self, ctx: &mut Ctx<'_>) -> bool {
        if ctx.now < self.next_sweep {
            return false;
        }
        self.ios.requests.failed.log_suppressed(ctx.now);
        let due = std::mem::replace(&mut self.next_sweep, ctx.now + SWEEP);
        if self.probes.came_late(ctx.now, due, SWEEP) {
            return false;
        }
        self.paths.note_use(ctx);
        let mut any = self.sweep_requests(ctx) | self.look_at_silence(ctx);
        let has_fences = self.granted.is_some_and(|granted| granted.fences);
        any |= self.ios.fail_late_retries(&self.limits, has_fences);
        any |= self.ios.fail_late_flushes(&self.limits);
        for device in self.ios.requests.waiting_devices().iter() {
            let is_served = self.paths.serve(device);
            any |= self.ios.fail_late_waiting(&self.limits, device, is_served);
        }
        any
    }

    /// Checks requests that have exceeded their time limit. Returns whether a path was ended or an
    /// IO failed.
    fn sweep_requests(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let requests = &self.ios.requests;
        let overdue = requests.rows(|request| {
            let submitted = requests.io(request.io).submitted;
            request.is_on(request.path) && self.limits.is_overdue(request.sent, submitted, ctx.now)
        });
        let mut any = false;
        for row in overdue {
            let request = *self.ios.requests.request(row);
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
            // The request is no longer waiting for the server.
            return Liveness::Silent;
        }
        if self.limits.is_alive(request.sent, self.paths[request.path].heard(), now) {
            return Liveness::Alive;
        }
        // A probe on another path soon ends either way; this one can then be probed.
        let may_ask = self.probes.path().is_some() || self.ios.requests.has_probe_permit();
        if may_ask { Liveness::Probed } else { Liveness::Silent }
    }

    /// Handles an overdue request on a live connection. Returns whether the failure of its IO was
    /// reported to the user.
    fn note_slow(&mut self, row: RequestRow, now: Instant) -> bool {
        let request = self.ios.requests.request_mut(row);
        let io = request.io;
        if self.paths.begin_slow(request, now) {
            self.ios.count_slow(io);
        }
        self.limits.fails_slow() && self.ios.give_up_io(io)
    }

    /// Probes a silent connection that owes answers, and ends one whose probe stays unanswered.
    /// Only one probe is in flight at a time, for the connection that has been silent longest, and
    /// only while a permit is free.
    fn look_at_silence(&mut self, ctx: &mut Ctx<'_>) -> bool {
        if let Some(path) = self.probes.path() {
            let target = &self.paths[path];
            let silent = self.probes.silent_for(ctx.now, target.heard(), self.limits.probe);
            let Some(silent) = silent.filter(|_| target.is_up()) else { return false };
            let why = format!("no answer for {} ms", silent.as_millis());
            self.paths.abort(path, CloseReason::Lost(why), ctx);
            return true;
        }
        let Some(granted) = self.granted else { return false };
        let Some(path) = self.most_silent(ctx.now) else { return false };
        let Some(permit) = self.ios.requests.take_probe_permit() else { return false };
        let target = &mut self.paths[path];
        let fabric = ctx.fabrics[target.provider().index()].as_mut();
        if target.post_probe(permit, &granted, fabric).is_err() {
            self.ios.requests.give_permit(permit);
            self.paths.abandon(path, ctx);
        } else {
            self.probes.sent(path, permit, ctx.now);
        }
        true
    }

    /// Path whose connection owes answers and has been silent for too long, and for longer than any
    /// other.
    fn most_silent(&self, now: Instant) -> Option<PathId> {
        let candidates = self.paths.iter().filter(|path| path.inflight() > 0 && path.is_up());
        let silent = candidates.filter(|path| {
            let waits =
                |request: &Request| request.path == path.id() && request.standing == Standing::Sent;
            let sent = self.ios.requests.requests().filter(|(_, request)| waits(request));
            let oldest = sent.map(|(_, request)| request.sent).min();
            oldest.is_some_and(|oldest| is_due(now, oldest, path.heard(), self.limits.silence))
        });
        silent.min_by_key(|path| path.heard()).map(|path| path.id())
    }
}
