//! What a shard does because time has passed: a look at everything that waits, every [`SWEEP`].
//!
//! A request that is not answered within the IO timeout says that the path is dead, or that the
//! disk behind it is slow. The connection that it was sent on tells which: it lives when something
//! came over it since, and not long ago. Nothing else counts, not even a heartbeat of the path,
//! since a connection can die alone (`probe.rs`). A connection that owes answers and is silent is
//! probed before the time of its oldest request is over, so the answer is there when it is needed.
//! Where no probe can be sent, because the shard has too few permits for one of its own
//! (`permits.rs`) and requests hold them all, silence counts as death.

use rtrs_core::fabric::CloseReason;
use rtrs_core::ids::PathId;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant};

use super::Shard;
use super::probe::is_due;
use super::requests::{Request, RequestRow, Standing};
use super::waiting::IoRow;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceIndex;
use crate::engine::message::ControlMessage;
use crate::engine::session::{Failover, HeartbeatSettings, SlowIo};

/// How often running requests are held against the IO timeout.
const SWEEP: Duration = Duration::from_millis(250);
/// Least time of a request, however old its IO is.
const LAST_TRY: Duration = Duration::from_secs(1);

/// What a connection that owes an overdue answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    /// Something came over it since.
    Proven,
    /// It is asked, or is about to be.
    Asked,
    /// Nothing shows that it lives.
    Unproven,
}

impl Shard {
    /// The longest that a whole IO may take, if that is bounded.
    pub(super) fn age_max(&self) -> Option<Duration> {
        match self.config.slow_io {
            SlowIo::Wait => None,
            SlowIo::Fail => self.config.no_path.io_age_max(self.config.io_timeout),
        }
    }

    /// How long a connection that owes an answer may be silent before it is probed, and how long it
    /// may owe the answer to the probe.
    fn silence_bounds(&self) -> (Duration, Duration) {
        let HeartbeatSettings { interval, missed_max, .. } = self.config.heartbeat;
        let half = self.config.io_timeout / 2;
        (interval.min(half), (interval * missed_max).min(half))
    }

    /// Ends what is over its time: requests by ending their path if that is dead, waiting IO with
    /// an error.
    pub(super) fn sweep(&mut self, ctx: &mut Ctx<'_>) -> bool {
        if ctx.now < self.next_sweep {
            return false;
        }
        let due = std::mem::replace(&mut self.next_sweep, ctx.now + SWEEP);
        if self.probes.came_late(ctx.now, due, SWEEP) {
            return false;
        }
        self.note_use(ctx);
        let mut any = self.sweep_requests(ctx) | self.look_at_silence(ctx);
        any |= self.sweep_retries(ctx.now);
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

    /// Paths that owe answers are in use, however long these take. The session may have become idle
    /// just when a request went out.
    fn note_use(&self, ctx: &mut Ctx<'_>) {
        for path in self.paths.iter().filter(|path| path.inflight() > 0) {
            if path.waits(ctx.now) {
                ctx.out.control(ControlMessage::InUse);
            }
        }
    }

    /// Looks at requests that are over their time. True when a path was ended or an IO given up.
    fn sweep_requests(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let (bound, age_max) = (self.config.io_timeout, self.age_max());
        let overdue = self.requests.rows(|request| {
            let age = request.sent.since(self.requests.io(request.io).submitted);
            // What the whole IO has left, and a moment in any case.
            let left = age_max.map_or(bound, |max| max.saturating_sub(age).max(LAST_TRY));
            request.is_on(request.path) && ctx.now.since(request.sent) >= bound.min(left)
        });
        let mut any = false;
        for row in overdue {
            let request = *self.requests.request(row);
            match self.life(&request, ctx.now) {
                Life::Proven => any |= self.note_slow(row, ctx.now),
                Life::Asked => {}
                Life::Unproven => {
                    self.paths.abort(request.path, CloseReason::TimedOut, ctx);
                    any = true;
                }
            }
        }
        any
    }

    /// Whether the connection of an overdue request lives.
    fn life(&self, request: &Request, now: Instant) -> Life {
        if matches!(request.standing, Standing::Answered(_) | Standing::Exposed) {
            // Nothing at the server is waited for.
            return Life::Unproven;
        }
        let heard = self.paths[request.path].heard();
        let (period, answer) = self.silence_bounds();
        if heard > request.sent && now.since(heard) <= period + answer + SWEEP * 2 {
            return Life::Proven;
        }
        // A probe of another path ends soon, one way or the other; then it is this one's turn.
        let may_ask = self.probes.path().is_some() || self.requests.has_probe_permit();
        if may_ask { Life::Asked } else { Life::Unproven }
    }

    /// A request is over its time, and its connection lives. True when its IO is given up for that.
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
        self.config.slow_io == SlowIo::Fail && self.give_io_up(io)
    }

    /// Has the user of an IO told that it has failed. What of it is at the server stays here with
    /// its permit and its memory until that has answered or cannot start it any more. False when
    /// the user was told before.
    fn give_io_up(&mut self, row: IoRow) -> bool {
        let taken = self.requests.io_mut(row);
        if std::mem::replace(&mut taken.given_up, true) {
            return false;
        }
        let (device, tag) = (taken.device, taken.io.tag);
        self.requests.fail(row, IoStatus::TimedOut);
        self.devices.give_up(device, tag);
        true
    }

    /// A request is slow no more: it was answered, or its connection has ended.
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

    /// How long an IO of a device may wait to be issued, if that is bounded. While the disk holds
    /// requests over their time, what waits for their permits gets as much time as they had.
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

    /// Ends what has waited too long for a path. What awaits a fence ends only where none will
    /// come: an error while the first copy may still begin would let it land after newer writes.
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
            // The time that a disk has taken does not count where it may take any.
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

    /// Asks a connection that owes answers and is silent whether it works, and ends one that was
    /// asked in vain. One at a time, the one that is silent for the longest time first, and only
    /// while a permit is free.
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

    /// Of the paths whose connections owe answers and are silent for `period`, the one that is so
    /// for the longest time.
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
