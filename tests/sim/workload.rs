//! Workload of a run: reads, writes and flushes on each core, and checks of their results.
//!
//! Each workload is a closed loop of bounded depth with pauses drawn from the seed. Every
//! submission and every completion is reported to the oracle; a second completion of an IO, or a
//! completion of one that is not in flight, is a failure. If a client takes over from a dead one,
//! unanswered requests are repeated, whole and some time later, as the kernel's nbd driver does;
//! new requests are submitted immediately.

mod machine;
mod rules;
mod stats;

use std::collections::{BTreeMap, VecDeque};

use nbd_bridge::{BufferPools, Seat};
use rtrs_client::SessionDevice;
use rtrs_core::block::{BlockDevice, Io, IoFlags, IoOp};
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant, earliest};

use super::buffers::Buffers;
use super::disk::SECTOR;
use super::log::Log;
use super::machine::Front as MachineFront;
use super::nbd::{Front, Use, buffer_bytes};
use super::options::WorkOptions;
use super::oracle::{Oracle, USERS, pattern};
use super::{Failure, Plant};
pub(super) use rules::{Errors, Rules};
pub(super) use stats::WorkStats;

/// IO in flight.
#[derive(Clone, Debug)]
struct Pending {
    op: IoOp,
    slot: usize,
    sector: u32,
    count: u32,
    fua: bool,
    /// The oracle's number for a write, or the start of a flush.
    mark: u64,
    since: Instant,
    /// Time at which the IO is repeated, after its client has died.
    again_at: Option<Instant>,
}

/// Returns how long a client that takes over may receive repeats of requests that the previous one
/// had accepted.
pub(super) fn resent_for(takeover: Option<Duration>) -> Duration {
    takeover.map_or(Duration::ZERO, |after| after + Duration::from_millis(100))
}

/// Minimum age of a failed IO that was probably sent: IO that fails for lack of a path fails
/// immediately, and would only fail again if repeated.
const SENT: Duration = Duration::from_millis(15);

/// Current task of a core's workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// No new IO.
    Rest,
    /// Random IO.
    Load,
    /// One read of the whole disk, continuing at this sector.
    ReadBack(u32),
}

/// Device that a workload uses.
#[derive(Debug)]
enum Used {
    Session(SessionDevice),
    Nbd(Box<Front>),
    Machine(Box<MachineFront>),
}

impl Used {
    fn device(&mut self) -> &mut dyn BlockDevice {
        match self {
            Self::Session(device) => device,
            Self::Nbd(front) => front.as_mut(),
            Self::Machine(front) => front.as_mut(),
        }
    }
}

/// Workload of one core.
#[derive(Debug)]
pub(super) struct Workload {
    core: usize,
    /// Position of the workload's first sector on the device.
    base: u32,
    options: WorkOptions,
    errors: Errors,
    takeover: Option<Duration>,
    /// Time until which flushes may report a loss again, as a dead client's requests are repeated.
    resent_until: Instant,
    nbd: bool,
    /// Way in which the front end is used.
    way: Use,
    preflush: bool,
    /// Whether data is written durably and zeroes are not.
    zeroes: bool,
    plant: Plant,
    prng: Prng,
    device: Option<Used>,
    /// Ring of a virtual machine while it has no client.
    machine: Option<Box<MachineFront>>,
    buffers: Buffers,
    free: Vec<usize>,
    pending: BTreeMap<u64, Pending>,
    /// Writes that failed for lack of a path, with the time of each failure.
    given_up: Vec<(Instant, u32)>,
    /// Time at which the export was removed, until the workload has a new device.
    removed_at: Option<Instant>,
    /// Sectors of writes that have failed since the last query, for a planted bug.
    pub(super) failed: Vec<(u32, u32)>,
    /// IOs to perform in any mode: operation, sector, count, FUA.
    orders: VecDeque<(IoOp, u32, u32, bool)>,
    next_tag: u64,
    next_at: Instant,
    pub(super) mode: Mode,
    /// Whether all has been well for a while, so that no IO may fail for lack of a path.
    pub(super) is_calm: bool,
    /// Number of IOs that may still be submitted under load.
    pub(super) left: u64,
    pub(super) stats: WorkStats,
    log: Log,
}

impl Workload {
    pub(super) fn new(core: usize, rules: &Rules, prng: Prng, log: Log) -> Self {
        let Rules { options, errors, takeover, nbd, alone, nbd_drops, shares, .. } = rules.clone();
        let Rules { stalls, zeroes, preflush, plant, .. } = *rules;
        let span = options.span_max.max(8) as usize * SECTOR;
        let long = options.span_max > 128 || rules.stalls;
        let deferred_max = errors.deferred_max;
        Self {
            core,
            base: 0,
            errors,
            takeover,
            nbd,
            way: Use {
                drops: nbd_drops,
                long,
                parts: options.parts,
                alone,
                stalls: stalls.then(|| u64::from(options.sectors) * SECTOR as u64),
                deferred_max,
                shares,
                machine: rules.machine,
            },
            preflush,
            zeroes,
            plant,
            prng,
            device: None,
            machine: None,
            buffers: Buffers::new(options.depth, span, options.scattered),
            free: (0..options.depth).rev().collect(),
            pending: BTreeMap::new(),
            given_up: Vec::new(),
            removed_at: None,
            failed: Vec::new(),
            orders: VecDeque::new(),
            next_tag: (core as u64) << 48,
            next_at: Instant::ZERO,
            resent_until: Instant::ZERO,
            mode: Mode::Rest,
            is_calm: false,
            left: options.ios_max,
            stats: WorkStats::default(),
            options,
            log,
        }
    }

    /// Moves the workload to the sectors starting at `base`.
    pub(super) fn based_at(self, base: u32) -> Self {
        Self { base, ..self }
    }

    /// Opens the device.
    pub(super) fn open(
        &mut self,
        now: Instant,
        device: SessionDevice,
        seat: Seat,
        pools: &BufferPools,
    ) {
        self.resent_until = now + resent_for(self.takeover);
        self.removed_at = None;
        let Some(mut device) = self.open_machine(device) else { return };
        if self.nbd {
            let front = Front::new(now, device, self.prng.fork(), seat, self.way, pools);
            self.device = Some(Used::Nbd(Box::new(front)));
        } else {
            let attached = device.attach_region(self.buffers.region());
            attached.expect("memory of a workload is registered");
            self.device = Some(Used::Session(device));
        }
    }

    /// Records that the server's operator has removed its export: later IO fails.
    pub(super) fn export_removed(&mut self, now: Instant) {
        self.removed_at = Some(now);
    }

    /// Returns its front, if it has one.
    pub(super) fn front(&mut self) -> Option<&mut Front> {
        match &mut self.device {
            Some(Used::Nbd(front)) => Some(front),
            _ => None,
        }
    }

    /// Closes the user's connection with all its requests. Those whose reply has arrived have
    /// already ended, even if not taken here: a read's memory holds its data.
    pub(super) fn forget_all(&mut self, now: Instant, oracle: &mut Oracle) -> Result<(), Failure> {
        self.with_device(|work, device| work.take_ended(now, device, oracle).map(|_| ()))?;
        for (tag, io) in std::mem::take(&mut self.pending) {
            self.free.push(io.slot);
            self.buffers.back(io.slot, 0)?;
            match io.op {
                IoOp::Read => oracle.read_done(tag, io.sector, None)?,
                IoOp::Flush => {}
                _ => oracle.write_dropped(io.mark as u32),
            }
        }
        Ok(())
    }

    /// Ends the workload's user: IO in flight ends without a completion, or waits for the next
    /// user, if that user takes over.
    pub(super) fn abandon(&mut self, now: Instant, oracle: &mut Oracle, takes_over: bool) {
        if self.leave_machine() {
            return;
        }
        self.device = None;
        self.given_up.clear();
        if let Some(after) = self.takeover.filter(|_| takes_over) {
            for (tag, io) in &mut self.pending {
                io.again_at = Some(now.max(io.since + after));
                match io.op {
                    IoOp::Read => drop(oracle.read_done(*tag, io.sector, None)),
                    IoOp::Flush => {}
                    _ => oracle.write_orphaned(io.mark as u32),
                }
            }
            return self.buffers.renew();
        }
        for (tag, io) in std::mem::take(&mut self.pending) {
            match io.op {
                IoOp::Read => drop(oracle.read_done(tag, io.sector, None)),
                IoOp::Flush => {}
                _ => oracle.write_failed(io.mark as u32, false),
            }
        }
        self.free = (0..self.options.depth).rev().collect();
        let span = self.options.span_max.max(8) as usize * SECTOR;
        self.buffers = Buffers::new(self.options.depth, span, self.options.scattered);
        if self.mode != Mode::Load {
            self.mode = Mode::Rest;
        }
    }

    /// Whether the device is open.
    pub(super) fn is_open(&self) -> bool {
        self.device.is_some()
    }

    /// Returns the number of the device's user: all connections of a kernel device are one user.
    fn user(&self) -> usize {
        if self.way.alone || self.way.stalls.is_some() { self.core % USERS } else { 0 }
    }

    /// Returns the number of IOs in flight.
    pub(super) fn inflight(&self) -> usize {
        self.pending.len()
    }

    /// Describes the oldest IO in flight, for a failure report.
    pub(super) fn oldest(&self, now: Instant) -> Option<String> {
        let oldest = self.pending.values().min_by_key(|io| io.since)?;
        Some(format!(
            "core {}: {:?} of sectors {}+{} for {} ms",
            self.core,
            oldest.op,
            oldest.sector,
            oldest.count,
            now.since(oldest.since).as_millis()
        ))
    }

    /// Returns the age of the oldest IO in flight.
    pub(super) fn age(&self, now: Instant) -> Duration {
        let oldest = self.pending.values().map(|io| now.since(io.since)).max();
        oldest.unwrap_or(Duration::ZERO)
    }

    /// Whether all IO that the mode requires has been submitted and has ended.
    pub(super) fn is_idle(&self) -> bool {
        let all = match self.mode {
            Mode::Rest => true,
            Mode::Load => self.left == 0,
            Mode::ReadBack(from) => from >= self.options.sectors,
        };
        all && self.pending.is_empty() && self.orders.is_empty()
    }

    /// Orders one IO.
    pub(super) fn order(&mut self, op: IoOp, sector: u32, count: u32, fua: bool) {
        self.orders.push_back((op, sector, count, fua));
    }

    /// Returns when the workload next submits IO.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let front = match &self.device {
            Some(Used::Session(device)) => device.deadline(),
            Some(Used::Nbd(front)) => front.deadline(),
            Some(Used::Machine(front)) => front.deadline(),
            None => None,
        };
        let load = self.mode == Mode::Load && self.left > 0 && !self.free.is_empty();
        let again = self.pending.values().filter_map(|io| io.again_at).min();
        let own = earliest(again, load.then_some(self.next_at));
        earliest(front, own.filter(|_| self.device.is_some()))
    }

    /// Returns the total size of the workload's buffers in bytes.
    pub(super) fn bytes(&self) -> usize {
        let own = || if self.nbd { buffer_bytes(self.way) } else { self.buffers.region().len() };
        self.machine_bytes().unwrap_or_else(own)
    }

    /// Checks that free buffers have not changed since being returned.
    pub(super) fn check(&mut self) -> Result<(), Failure> {
        self.buffers.check()
    }

    /// Takes completions and submits IO that is due. Returns whether anything happened.
    pub(super) fn turn(&mut self, now: Instant, oracle: &mut Oracle) -> Result<bool, Failure> {
        let any = self.with_device(|work, device| work.work(now, device, oracle))?;
        self.judge_machine()?;
        for tag in self.front().map(Front::take_begun).unwrap_or_default() {
            if let Some(io) = self.pending.get_mut(&tag) {
                io.mark = oracle.begin();
            }
        }
        Ok(any)
    }

    /// Runs a function with the device; returns the default if there is none.
    fn with_device<T: Default>(
        &mut self,
        run: impl FnOnce(&mut Self, &mut dyn BlockDevice) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let Some(mut device) = self.device.take() else { return Ok(T::default()) };
        let result = run(self, device.device());
        self.device = Some(device);
        result
    }

    fn work(
        &mut self,
        now: Instant,
        device: &mut dyn BlockDevice,
        oracle: &mut Oracle,
    ) -> Result<bool, Failure> {
        oracle.close_due(now);
        let mut any = device.poll(now) && self.is_fronted();
        any |= self.take_ended(now, device, oracle)?;
        any |= self.repeat_due(now, device, oracle)?;
        while !self.free.is_empty()
            && let Some((op, sector, count, fua)) = self.orders.pop_front()
        {
            any = true;
            self.submit(now, op, sector, count, fua, device, oracle)?;
        }
        match self.mode {
            Mode::Rest => {}
            Mode::Load => {
                while now >= self.next_at && self.left > 0 && !self.free.is_empty() {
                    any = true;
                    self.next_at = now + self.prng.duration(Duration::ZERO..=self.options.gap_max);
                    self.left -= 1;
                    self.submit_any(now, device, oracle)?;
                }
            }
            Mode::ReadBack(mut from) => {
                while from < self.options.sectors && !self.free.is_empty() {
                    any = true;
                    let count = self.options.span_max.max(8).min(self.options.sectors - from);
                    self.submit(now, IoOp::Read, from, count, false, device, oracle)?;
                    from += count;
                }
                self.mode = Mode::ReadBack(from);
            }
        }
        // New requests have to reach the session in this turn.
        any |= self.is_fronted() && device.poll(now);
        Ok(any)
    }

    /// Takes completions. Returns whether there were any.
    fn take_ended(
        &mut self,
        now: Instant,
        device: &mut dyn BlockDevice,
        oracle: &mut Oracle,
    ) -> Result<bool, Failure> {
        let mut any = false;
        while let Some(done) = device.reap() {
            any = true;
            if self.plant == Plant::Never && self.prng.chance(Ratio::new(1, 100)) {
                continue;
            }
            let bad = self.plant == Plant::BadStatus && self.prng.chance(Ratio::new(1, 100));
            let status = if bad { IoStatus::NoDevice } else { done.status };
            self.ended(now, done.tag, status, oracle)?;
            if self.plant == Plant::Twice && self.prng.chance(Ratio::new(1, 100)) {
                self.ended(now, done.tag, done.status, oracle)?;
            }
        }
        Ok(any)
    }

    fn submit_any(
        &mut self,
        now: Instant,
        device: &mut dyn BlockDevice,
        oracle: &mut Oracle,
    ) -> Result<(), Failure> {
        let count = 1 + self.prng.below(u64::from(self.options.span_max)) as u32;
        let count = count.min(self.options.sectors);
        let room = u64::from(self.options.sectors - count) + 1;
        if self.prng.chance(self.options.reads) {
            let sector = self.prng.below(room) as u32;
            return self.submit(now, IoOp::Read, sector, count, false, device, oracle);
        }
        if self.prng.chance(self.options.flushes) {
            return self.submit(now, IoOp::Flush, 0, 0, false, device, oracle);
        }
        let fua = self.prng.chance(self.options.fua);
        let op = if self.prng.chance(self.options.zeroes) {
            if self.prng.chance(Ratio::new(1, 2)) { IoOp::Discard } else { IoOp::WriteZeroes }
        } else {
            IoOp::Write
        };
        let zeroes_max = device.geometry().discard_max / SECTOR as u32;
        let count = if op == IoOp::Write { count } else { count.min(zeroes_max) };
        let fua = if self.zeroes { op == IoOp::Write } else { fua };
        for _ in 0..8 {
            let sector = self.prng.below(room) as u32;
            if self.options.overlap || oracle.is_free(sector, count) {
                return self.submit(now, op, sector, count, fua, device, oracle);
            }
        }
        Ok(())
    }

    /// Repeats requests that the dead client had not answered. Returns whether there were any.
    fn repeat_due(
        &mut self,
        now: Instant,
        device: &mut dyn BlockDevice,
        oracle: &mut Oracle,
    ) -> Result<bool, Failure> {
        let is_due = |io: &Pending| io.again_at.is_some_and(|at| at <= now);
        let due: Vec<u64> =
            self.pending.iter().filter(|(_, io)| is_due(io)).map(|(tag, _)| *tag).collect();
        for &tag in &due {
            let Some(io) = self.pending.get_mut(&tag) else { continue };
            io.again_at = None;
            match io.op {
                IoOp::Read => oracle.read(tag),
                IoOp::Flush => {}
                _ => oracle.write_again(io.mark as u32),
            }
            self.stats.again += 1;
            self.log.event(now, "again", [tag, 0], || format!("io {tag:#x}"));
            self.hand_over(now, tag, device, oracle)?;
        }
        Ok(!due.is_empty())
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of an IO")]
    fn submit(
        &mut self,
        now: Instant,
        op: IoOp,
        sector: u32,
        count: u32,
        fua: bool,
        device: &mut dyn BlockDevice,
        oracle: &mut Oracle,
    ) -> Result<(), Failure> {
        let Some(slot) = self.free.pop() else { return Ok(()) };
        let fua = self.is_durable(op, fua, device.geometry());
        let tag = self.next_tag;
        self.next_tag += 1;
        let mark = match op {
            IoOp::Write | IoOp::WriteZeroes | IoOp::Discard => {
                u64::from(oracle.write(sector, count, op != IoOp::Write))
            }
            IoOp::Read => {
                oracle.read(tag);
                0
            }
            IoOp::Flush => oracle.begin(),
            IoOp::Extents => 0,
        };
        if fua {
            oracle.durable_asked(sector, count);
        }
        let numbers = [tag, u64::from(sector) << 32 | u64::from(count)];
        self.log.event(now, "submit", numbers, || {
            let what = match op {
                IoOp::Read | IoOp::Flush => format!("{op:?}"),
                _ => format!("{op:?} {mark}{}", if fua { " fua" } else { "" }),
            };
            format!("io {tag:#x} {what} sectors {sector}+{count}")
        });
        let (since, again_at) = (now, None);
        self.pending.insert(tag, Pending { op, slot, sector, count, fua, mark, since, again_at });
        self.hand_over(now, tag, device, oracle)
    }

    /// Submits an IO to the device.
    fn hand_over(
        &mut self,
        now: Instant,
        tag: u64,
        device: &mut dyn BlockDevice,
        oracle: &mut Oracle,
    ) -> Result<(), Failure> {
        let Some(&Pending { op, slot, sector, count, fua, mark, .. }) = self.pending.get(&tag)
        else {
            return Ok(());
        };
        let len = count as usize * SECTOR;
        self.buffers.lend(slot, |buffers| match op {
            IoOp::Write => {
                let id = u32::try_from(mark).unwrap_or(u32::MAX);
                buffers.slice(slot, len).copy_in(0, &pattern(id, sector, count));
            }
            IoOp::Read => buffers.slice(slot, len).fill(0xee),
            _ => {}
        })?;
        let io = Io {
            tag,
            op,
            flags: IoFlags { fua, ..IoFlags::default() },
            offset: u64::from(self.base + sector) * SECTOR as u64,
            len: len as u32,
            buf: matches!(op, IoOp::Read | IoOp::Write).then(|| self.buffers.slice(slot, len)),
        };
        if device.submit(io).is_err() {
            // The device's queue is full: the IO counts as never requested.
            self.log.event(now, "full", [tag, 0], || format!("io {tag:#x}"));
            self.forget(tag, oracle)?;
        }
        Ok(())
    }

    fn forget(&mut self, tag: u64, oracle: &mut Oracle) -> Result<(), Failure> {
        if let Some(io) = self.pending.remove(&tag) {
            self.free.push(io.slot);
            self.buffers.back(io.slot, 0)?;
            match io.op {
                IoOp::Read => drop(oracle.read_done(tag, io.sector, None)),
                IoOp::Flush => {}
                _ => oracle.write_failed(io.mark as u32, true),
            }
        }
        Ok(())
    }

    fn ended(
        &mut self,
        now: Instant,
        tag: u64,
        status: IoStatus,
        oracle: &mut Oracle,
    ) -> Result<(), Failure> {
        let Some(io) = self.pending.remove(&tag) else {
            let text = format!("io {tag:#x} ended ({status:?}) but was not in flight");
            return Err(Failure::new("once", text));
        };
        self.free.push(io.slot);
        let len = io.count as usize * SECTOR;
        self.buffers.back(io.slot, if io.op == IoOp::Read { len } else { 0 })?;
        self.stats.time_max = self.stats.time_max.max(now.since(io.since));
        self.log.event(now, "done", [tag, u64::from(status.to_errno())], || {
            format!("io {tag:#x} {status:?} after {} us", now.since(io.since).as_micros())
        });
        let resent = io.since < self.resent_until;
        let any = self.errors.statuses && !status.is_ok();
        let failed = io.op == IoOp::Flush && (any || status == IoStatus::Io);
        let reported = failed && oracle.flush_failed(self.user(), io.mark, resent);
        if failed && self.errors.loses {
            oracle.excuse_unflushed(self.user());
        }
        let removed = self.removed_at.is_some();
        if status.is_ok() && self.removed_at.is_some_and(|at| io.since > at) {
            let text = format!("io {tag:#x} succeeded but began after its export was removed");
            return Err(Failure::new("blocks", text));
        }
        let (calm, syncs) = (self.is_calm, io.op == IoOp::Flush || io.fua);
        let flushes = io.op == IoOp::Flush || io.fua && self.preflush;
        match status {
            IoStatus::Ok => {}
            IoStatus::Io | IoStatus::TimedOut | IoStatus::Aborted if removed => {
                self.stats.removed += 1;
            }
            IoStatus::Io if reported => self.stats.losses_reported += 1,
            IoStatus::Io if oracle.may_be_beyond(io.sector, io.count, io.since) => {
                self.stats.beyond += 1;
            }
            IoStatus::Io if syncs && oracle.may_be_reported(self.core, io.since, now) => {
                self.stats.beyond += 1
            }
            IoStatus::Io if flushes && oracle.may_be_cut(self.core, io.since, now) => {
                self.stats.beyond += 1;
            }
            IoStatus::Io if syncs && !flushes && oracle.may_fail_for_cut(io.since, now) => {
                self.stats.beyond += 1;
            }
            IoStatus::Io if io.op == IoOp::Flush && self.errors.shrinks => self.stats.errors += 1,
            IoStatus::Io if self.errors.backend => self.stats.errors += 1,
            _ if syncs && self.errors.statuses => self.stats.errors += 1,
            IoStatus::Io if syncs && self.errors.postflush && oracle.has_cut() => {
                self.stats.errors += 1;
            }
            // NBD has one error for all of these.
            IoStatus::Io if self.errors.paths && self.is_fronted() && !calm => {
                self.stats.errors += 1
            }
            IoStatus::Aborted | IoStatus::TimedOut if self.errors.paths && !calm => {
                self.stats.errors += 1;
            }
            other => {
                let text = format!(
                    "io {tag:#x}, {:?} of sectors {}+{}, ended with {other:?} after {} ms",
                    io.op,
                    io.sector,
                    io.count,
                    now.since(io.since).as_millis()
                );
                return Err(Failure::new("errors", text));
            }
        }
        if let (IoStatus::Ok, Some(time)) = (status, self.errors.given_up_for) {
            for (_, id) in self.given_up.extract_if(.., |(at, _)| *at < io.since) {
                oracle.close_at(now + time, id);
            }
        }
        match io.op {
            IoOp::Write | IoOp::WriteZeroes | IoOp::Discard => {
                self.stats.writes += 1;
                let id = u32::try_from(io.mark).unwrap_or(u32::MAX);
                if status.is_ok() {
                    if self.preflush && io.fua {
                        oracle.flushed_before(id);
                    }
                    return oracle.write_acked(id, io.fua);
                }
                if self.errors.paths {
                    self.given_up.push((now, id));
                }
                let again = self.options.rewrites && self.options.rewrites_max > 0;
                if again && self.errors.paths && now.since(io.since) > SENT {
                    self.options.rewrites_max -= 1;
                    self.orders.push_back((IoOp::Write, io.sector, io.count, false));
                }
                if self.plant == Plant::LateError {
                    self.failed.push((io.sector, io.count));
                }
                // One part of an IO may have failed in the backend, another for lack of a path.
                oracle.write_failed(id, !self.errors.paths && !removed);
            }
            IoOp::Read => {
                self.stats.reads += 1;
                let bytes = status.is_ok().then(|| self.buffers.slice(io.slot, len).to_vec());
                return oracle.read_done(tag, io.sector, bytes.as_deref());
            }
            IoOp::Extents => {}
            IoOp::Flush => {
                self.stats.flushes += 1;
                if status.is_ok() {
                    return oracle.flush_acked(self.user(), io.mark);
                }
            }
        }
        Ok(())
    }
}
