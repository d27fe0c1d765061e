//! The simulator's backend: an in-memory disk with its own cache, clock and faults.
//!
//! An operation takes effect at one point in time between its submission and its completion; both
//! that time and the completion are drawn from the seed. What completed writes promise is tracked
//! separately from their effects: `current` is the content that reads see, `durable` is the content
//! that is certain to survive a power cut, and the journal holds the writes in between. A cut
//! keeps, independently for each sector, any of the versions since the durable one: writes are
//! dropped, torn at sector boundaries and reordered. An operation whose device is dropped (because
//! the server's process ended) has either taken effect by then or never will.

mod ways;

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::block::{
    BlockDevice, BlockSource, Completion, Core, Geometry, Io, IoOp, SharedSize,
};
use rtrs_core::mem::Region;
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant, earliest};

use super::Plant;
use super::options::DiskOptions;

/// Maximum delay of a write that a planted bug makes late.
const LATE_MAX: Duration = Duration::from_millis(400);
/// Size of a sector in bytes.
pub(super) const SECTOR: usize = 512;

/// A write that a power cut may lose.
#[derive(Debug)]
struct Entry {
    /// Position in the order in which writes take effect.
    seq: u64,
    op: u64,
    /// Position in the order of submissions and completions.
    completed: Option<u64>,
    offset: usize,
    data: Vec<u8>,
}

/// Counters for one run of the backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DiskStats {
    pub(super) ops: u64,
    pub(super) slow: u64,
    pub(super) stuck: u64,
    pub(super) errors: u64,
    pub(super) cuts: u64,
    /// Writes lost during cache writeback.
    pub(super) lost: u64,
    /// Operations that took longer than the client waits for an answer.
    pub(super) late: u64,
    /// Operations that failed because the backing file had been truncated.
    pub(super) beyond: u64,
}

#[derive(Debug)]
struct State {
    options: DiskOptions,
    plant: Plant,
    /// Whether power cuts are possible, so that versions must be kept.
    tracks: bool,
    prng: Prng,
    /// Random source for lost writes, separate so that runs without them are unaffected.
    loser: Prng,
    /// Whether writes were lost. Only the next sync of any session reports the loss.
    lost: bool,
    /// Random source for the status that reports lost writes, if it varies.
    statuses: Option<Prng>,
    /// Whether the disk has no lock.
    unlocked: bool,
    /// Whether durable writes do not report errors of other writes.
    apart: bool,
    now: Instant,
    /// Time after which nothing is slow, stuck or failing any more.
    calm: Option<Instant>,
    /// Time that the client waits for an answer.
    patience: Duration,
    /// Offset at which the sectors of the second session begin, for a planted bug.
    guest_from: usize,
    /// Length of the backing file in bytes, and the minimum length since the file was exported.
    len: usize,
    end: usize,
    /// End of the file at the time of the last failed flush.
    reported: usize,
    current: Vec<u8>,
    previous: Vec<u8>,
    durable: Vec<u8>,
    durable_seq: Vec<u64>,
    journal: Vec<Entry>,
    /// Whether the next write is held: it neither takes effect nor ends until it is released.
    armed: bool,
    /// Whether a write is held.
    holds: bool,
    /// Operations submitted before this time do not end before it.
    stuck_until: Instant,
    /// Time that registering memory blocks a core, and the blocked time not yet taken.
    pin_time: Duration,
    pinned: Duration,
    /// Whether operations end early for the caller and take effect later, for a planted bug.
    loose: bool,
    /// Byte ranges whose writes also end early, up to the given serial, for a planted bug.
    given_up: Vec<(Range<u64>, u64)>,
    /// Operations that ended early and have not taken effect.
    late: Vec<Op>,
    /// Write to be repeated, for a planted bug.
    ghost: Option<(usize, Vec<u8>, u8)>,
    clock: u64,
    inflight: usize,
    stats: DiskStats,
}

/// The disk, which outlives servers.
#[derive(Clone, Debug)]
pub(super) struct Disk {
    geometry: Geometry,
    /// Size of the disk; content beyond the workload's sectors is ignored.
    size: Arc<SharedSize>,
    state: Arc<Mutex<State>>,
}

impl Disk {
    pub(super) fn new(
        options: DiskOptions,
        sectors: u32,
        tracks: bool,
        plant: Plant,
        prng: Prng,
    ) -> Self {
        let size = sectors as usize * SECTOR;
        let geometry = Geometry {
            logical_block: options.block,
            physical_block: options.block,
            write_cache: options.write_cache,
            fua: options.fua,
            discard: true,
            discard_granularity: options.block,
            write_zeroes: true,
            io_max: options.io_max,
            discard_max: options.discard_max,
            ..Geometry::plain(size as u64)
        };
        let state = State {
            loser: Prng::new(0x6c6f_7365_7273 ^ u64::from(sectors) << 32 ^ prng.clone().next_u64()),
            lost: false,
            statuses: None,
            unlocked: false,
            apart: false,
            options,
            plant,
            tracks,
            prng,
            now: Instant::ZERO,
            calm: None,
            patience: Duration::MAX,
            guest_from: usize::MAX,
            len: size,
            end: size,
            reported: size,
            current: vec![0; size],
            previous: vec![0; size],
            durable: vec![0; size],
            durable_seq: vec![0; sectors as usize],
            journal: Vec::new(),
            armed: false,
            holds: false,
            stuck_until: Instant::ZERO,
            pin_time: Duration::ZERO,
            pinned: Duration::ZERO,
            loose: false,
            given_up: Vec::new(),
            late: Vec::new(),
            ghost: None,
            clock: 0,
            inflight: 0,
            stats: DiskStats::default(),
        };
        let size = Arc::new(SharedSize::new(geometry.size));
        Self { geometry, size, state: Arc::new(Mutex::new(state)) }
    }

    /// Sets the length of the backing file in sectors. Data beyond the new end is lost; new sectors
    /// hold zeroes. IO beyond the shortest length fails until the file is exported again.
    pub(super) fn set_sectors(&self, sectors: u32) {
        let state = &mut *self.state.lock();
        state.len = sectors as usize * SECTOR;
        state.end = state.end.min(state.len);
        if state.plant == Plant::OldTail {
            return;
        }
        let len = state.len;
        for content in [&mut state.current, &mut state.previous, &mut state.durable] {
            content[len..].fill(0);
        }
    }

    /// Returns the disk as a newly started server exports it, with the length of the file.
    pub(super) fn exported(&self) -> Self {
        let state = &mut *self.state.lock();
        state.end = state.len;
        state.reported = state.len;
        if state.len < self.geometry.size as usize || self.size.get() < self.geometry.size {
            self.size.set(state.len as u64);
        }
        self.clone()
    }

    /// Resizes the disk to a multiple of the workload's size.
    pub(super) fn resize(&self, times: u32) {
        self.size.set(self.geometry.size * u64::from(times));
    }

    /// Returns the size of the disk.
    pub(super) fn size(&self) -> u64 {
        self.size.get()
    }

    /// Sets how long the client waits for an answer.
    pub(super) fn count_later_than(&self, patience: Duration) {
        self.state.lock().patience = patience;
    }

    /// Sets the first sector of the second session.
    pub(super) fn shared_from(&self, sector: u32) {
        self.state.lock().guest_from = sector as usize * SECTOR;
    }

    /// Sets the submission time for the next operations.
    pub(super) fn set_now(&self, now: Instant) {
        let state = &mut *self.state.lock();
        state.now = now;
        while let Some(at) = state.late.iter().position(|op| op.effect_at <= now) {
            let mut op = state.late.swap_remove(at);
            state.apply(&mut op);
        }
    }

    /// From now on, makes writes end early and take effect later, for a planted bug.
    pub(super) fn end_writes_early(&self) {
        self.state.lock().loose = true;
    }

    /// Makes the current writes to these sectors end early and take effect later, for a planted
    /// bug.
    pub(super) fn end_current_writes_early(&self, sector: u32, count: u32) {
        let state = &mut *self.state.lock();
        let bytes = |sector: u32| u64::from(sector) * SECTOR as u64;
        state.given_up.push((bytes(sector)..bytes(sector + count), state.clock));
    }

    /// Stops ending writes early.
    pub(super) fn end_writes_in_time(&self) {
        self.state.lock().loose = false;
    }

    /// Holds the next write.
    pub(super) fn hold_next_write(&self) {
        self.state.lock().armed = true;
    }

    /// Whether a write is held.
    pub(super) fn holds(&self) -> bool {
        self.state.lock().holds
    }

    /// Keeps operations submitted before `until` from ending before then.
    pub(super) fn stick_until(&self, until: Instant) {
        self.state.lock().stuck_until = until;
    }

    /// Sets how long registering memory with the disk blocks a core from now on.
    pub(super) fn pin_slowly(&self, time: Duration) {
        self.state.lock().pin_time = time;
    }

    /// Takes the time for which registering memory blocked the core that was just polled.
    pub(super) fn take_pinned(&self) -> Duration {
        std::mem::take(&mut self.state.lock().pinned)
    }

    /// Releases the held write.
    pub(super) fn release_write(&self) {
        self.state.lock().holds = false;
    }

    /// Stops slowing, blocking and failing operations.
    pub(super) fn calm(&self, now: Instant) {
        self.state.lock().calm = Some(now);
    }

    /// Cuts the power: only durable data is certain to survive.
    pub(super) fn cut_power(&self) {
        let state = &mut *self.state.lock();
        state.stats.cuts += 1;
        let journal = std::mem::take(&mut state.journal);
        for sector in 0..state.durable_seq.len() {
            let at = sector * SECTOR;
            let since = state.durable_seq[sector];
            let covers = |entry: &&Entry| {
                entry.seq > since && entry.offset <= at && at < entry.offset + entry.data.len()
            };
            let versions = journal.iter().filter(covers).count();
            let chosen = state.prng.index(versions + 1);
            if let Some(entry) =
                chosen.checked_sub(1).and_then(|n| journal.iter().filter(covers).nth(n))
            {
                let from = at - entry.offset;
                state.durable[at..at + SECTOR].copy_from_slice(&entry.data[from..from + SECTOR]);
            }
        }
        state.current.copy_from_slice(&state.durable);
        state.previous.copy_from_slice(&state.durable);
        state.ghost = None;
        state.late.clear();
    }

    /// Returns the number of operations that have not ended.
    pub(super) fn inflight(&self) -> usize {
        self.state.lock().inflight
    }

    pub(super) fn stats(&self) -> DiskStats {
        self.state.lock().stats
    }
}

impl BlockSource for Disk {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.size.get(), ..self.geometry.clone() }
    }

    fn is_exclusive(&self) -> bool {
        !self.state.lock().unlocked
    }

    fn open(&self, _core: &Core) -> io::Result<Box<dyn BlockDevice>> {
        Ok(Box::new(Queue {
            geometry: self.geometry(),
            size: Arc::clone(&self.size),
            state: Arc::clone(&self.state),
            ops: Vec::new(),
            done: VecDeque::new(),
        }))
    }
}

fn changes(op: IoOp) -> bool {
    !matches!(op, IoOp::Read | IoOp::Flush)
}

impl State {
    fn chance(&mut self, num: u32, den: u32) -> bool {
        self.prng.chance(Ratio::new(num, den))
    }

    /// Applies a write.
    fn store(&mut self, op: u64, offset: usize, data: Vec<u8>, durable: bool) {
        let end = offset + data.len();
        self.previous[offset..end].copy_from_slice(&self.current[offset..end]);
        self.current[offset..end].copy_from_slice(&data);
        self.clock += 1;
        let seq = self.clock;
        if !self.tracks {
            return;
        }
        let entry = Entry { seq, op, completed: None, offset, data };
        if durable {
            self.keep(&entry);
        } else if self.calm.is_none() && self.loser.chance(self.options.writeback) {
            // Reads see the data until the power fails, because the page is clean.
            self.lost = true;
            self.stats.lost += 1;
        } else {
            self.journal.push(entry);
        }
    }

    /// Makes an entry's data durable, except where newer data is already durable.
    fn keep(&mut self, entry: &Entry) {
        for (n, bytes) in entry.data.chunks(SECTOR).enumerate() {
            let at = entry.offset + n * SECTOR;
            let sector = at / SECTOR;
            if self.durable_seq[sector] < entry.seq {
                self.durable_seq[sector] = entry.seq;
                self.durable[at..at + SECTOR].copy_from_slice(bytes);
            }
        }
    }

    /// Makes writes that completed before `mark` durable.
    fn flush(&mut self, mark: u64) {
        let (kept, left): (Vec<Entry>, Vec<Entry>) = std::mem::take(&mut self.journal)
            .into_iter()
            .partition(|entry| entry.completed.is_some_and(|at| at < mark));
        self.journal = left;
        for entry in &kept {
            self.keep(entry);
        }
    }

    fn completed(&mut self, op: u64) {
        self.clock += 1;
        for entry in self.journal.iter_mut().filter(|entry| entry.op == op) {
            entry.completed = Some(self.clock);
        }
    }

    /// Whether a planted bug ends this operation early because of its duration.
    fn ends_early(&self, time: Duration) -> bool {
        self.plant == Plant::LateEffect && time > self.patience
    }

    /// Whether a planted bug makes an operation end before it takes effect.
    fn ends_before_effect(&self, op: &Op) -> bool {
        let end = op.io.offset + u64::from(op.io.len);
        let overlaps = |bytes: &Range<u64>| bytes.start < end && op.io.offset < bytes.end;
        let chosen = self.loose
            || self.given_up.iter().any(|(bytes, until)| op.serial <= *until && overlaps(bytes))
            || self.ends_early(op.done_at.since(op.begun)) && op.done_at <= self.now;
        chosen && !op.applied && changes(op.io.op)
    }

    fn do_write(&mut self, op: &Op, part: usize) {
        let mut data = match &op.io.buf {
            Some(buf) => buf.to_vec(),
            None => vec![0; op.io.len as usize],
        };
        data.truncate(part);
        if data.is_empty() {
            return;
        }
        let offset = usize::try_from(op.io.offset).unwrap_or(usize::MAX);
        if self.plant == Plant::LostWrite && self.chance(1, 20) {
            return;
        }
        if self.plant == Plant::LostGuestWrite && offset >= self.guest_from && self.chance(1, 20) {
            return;
        }
        if self.plant == Plant::TornWrite && data.len() > SECTOR && self.chance(1, 4) {
            data.truncate(data.len() / 2 / SECTOR * SECTOR);
        }
        if self.plant == Plant::GhostWrite && self.ghost.is_none() && self.chance(1, 4) {
            self.ghost = Some((offset, data.clone(), 6));
        }
        let fua = op.io.flags.fua && self.plant != Plant::NoFua;
        self.store(op.serial, offset, data, fua || !self.options.write_cache);
        if let Some((at, data, left)) = self.ghost.take() {
            match left {
                0 => self.store(op.serial, at, data, false),
                _ => self.ghost = Some((at, data, left - 1)),
            }
        }
    }

    /// Whether an IO extends past the end of a truncated file.
    fn is_beyond(&self, io: &Io) -> bool {
        let writes = self.plant == Plant::GrownWrite && io.op == IoOp::Write;
        !writes && io.offset + u64::from(io.len) > self.end as u64
    }

    fn apply(&mut self, op: &mut Op) {
        if self.is_beyond(&op.io) {
            self.stats.beyond += 1;
            op.status = IoStatus::Io;
            return;
        }
        let (offset, len) = (usize::try_from(op.io.offset).unwrap_or(0), op.io.len as usize);
        if !op.status.is_ok() {
            // A failed operation may have had no effect, its full effect or part of it.
            let part = self.prng.index(len / SECTOR + 1) * SECTOR;
            if changes(op.io.op) {
                self.do_write(op, part);
            }
            return;
        }
        let syncs = op.io.op == IoOp::Flush || op.io.flags.fua && !self.apart;
        op.took = syncs && std::mem::take(&mut self.lost);
        if op.took && self.plant != Plant::QuietSync {
            op.status = self.sync_error(op.io.op);
        }
        if op.io.op == IoOp::Flush && self.reported > self.end {
            self.reported = self.end;
            self.stats.beyond += 1;
            if self.plant != Plant::QuietCut {
                op.status = IoStatus::Io;
            }
        }
        match (op.io.op, &op.io.buf) {
            (IoOp::Read, Some(buf)) => {
                let stale = self.plant == Plant::StaleRead && self.chance(1, 10);
                let from = if stale { &self.previous } else { &self.current };
                buf.copy_in(0, &from[offset..offset + len]);
            }
            (IoOp::Flush, _) if self.plant == Plant::NoFlush => {}
            (IoOp::Flush, _) => self.flush(op.mark),
            (IoOp::Extents, Some(room)) => rtrs_core::extents::all_data(room, op.io.len.into()),
            (IoOp::Read | IoOp::Extents, None) => op.status = IoStatus::Invalid,
            (IoOp::Write | IoOp::WriteZeroes | IoOp::Discard, _) => self.do_write(op, len),
        }
    }

    /// Plans an operation that is submitted now: when it takes effect, when it ends, and its
    /// status.
    fn plan(&mut self) -> (Instant, Instant, IoStatus) {
        let options = self.options;
        self.stats.ops += 1;
        let mut time = self.prng.duration(Duration::ZERO..=options.latency_max);
        let mut status = IoStatus::Ok;
        if self.calm.is_none() {
            if self.prng.chance(options.slow) {
                self.stats.slow += 1;
                time += self.prng.duration(Duration::ZERO..=options.slow_max);
            }
            if self.prng.chance(options.stuck) {
                self.stats.stuck += 1;
                time += self.prng.duration(options.stuck_max / 4..=options.stuck_max);
            }
            if self.prng.chance(options.errors) {
                self.stats.errors += 1;
                status = IoStatus::Io;
            }
        }
        let effect = self.prng.duration(Duration::ZERO..=time);
        self.stats.late += u64::from(time > self.patience);
        let done = (self.now + time).max(self.stuck_until);
        let effect = if self.ends_early(time) { time } else { effect };
        (self.now + effect, done, status)
    }
}

/// Operation in flight.
#[derive(Debug)]
struct Op {
    io: Io,
    serial: u64,
    /// Clock at submission: a flush covers writes that completed before this value.
    mark: u64,
    begun: Instant,
    effect_at: Instant,
    done_at: Instant,
    applied: bool,
    /// Whether the operation has taken the error for lost writes.
    took: bool,
    held: bool,
    status: IoStatus,
}

/// The disk's queue for one core.
#[derive(Debug)]
struct Queue {
    geometry: Geometry,
    size: Arc<SharedSize>,
    state: Arc<Mutex<State>>,
    ops: Vec<Op>,
    done: VecDeque<Completion>,
}

impl BlockDevice for Queue {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn refresh(&mut self) {
        self.geometry.size = self.size.get();
    }

    fn attach_region(&mut self, _: &Arc<Region>) -> io::Result<()> {
        let mut state = self.state.lock();
        state.pinned = state.pinned + state.pin_time;
        Ok(())
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        let mut state = self.state.lock();
        if self.inflight() >= state.options.room {
            return Err(io);
        }
        let (effect_at, done_at, mut status) = state.plan();
        let judged = self.geometry.check(&io);
        if !judged.is_ok() {
            status = judged;
        }
        state.clock += 1;
        state.inflight += 1;
        let mark = state.clock;
        let (serial, applied) = (mark, !judged.is_ok());
        let held = state.armed && changes(io.op);
        if held {
            (state.armed, state.holds) = (false, true);
        }
        self.ops.push(Op {
            io,
            serial,
            mark,
            begun: state.now,
            effect_at,
            done_at,
            applied,
            took: false,
            held,
            status,
        });
        Ok(())
    }

    fn poll(&mut self, now: Instant) -> bool {
        let mut state = self.state.lock();
        state.now = now;
        if let Some(calm) = state.calm {
            let by = calm + state.options.latency_max;
            for op in &mut self.ops {
                (op.effect_at, op.done_at) = (op.effect_at.min(by), op.done_at.min(by));
            }
        }
        for op in self.ops.iter_mut().filter(|op| op.held && !state.holds) {
            op.held = false;
            (op.effect_at, op.done_at) = (op.effect_at.max(now), op.done_at.max(now));
        }
        let mut any = false;
        let early = state.plant == Plant::LateEffect;
        if state.loose || early || !state.given_up.is_empty() {
            let loose: Vec<Op> =
                self.ops.extract_if(.., |op| state.ends_before_effect(op)).collect();
            for mut op in loose {
                self.done.push_back(Completion::new(op.io.tag, op.status));
                state.inflight -= 1;
                // Except with `loose`, the session may be without a path for a while, so longer
                // delays are allowed.
                let late_max = if state.loose { LATE_MAX } else { 4 * LATE_MAX };
                op.effect_at = now + state.prng.duration(LATE_MAX / 8..=late_max);
                state.late.push(op);
                any = true;
            }
        }
        // Operations are applied in order of their effect times, so late polls make no difference.
        loop {
            let due = self.ops.iter().enumerate().filter(|(_, op)| !op.applied && !op.held);
            let next = due.min_by_key(|(_, op)| (op.effect_at, op.serial)).map(|(at, _)| at);
            let Some(at) = next.filter(|&at| self.ops[at].effect_at <= now) else { break };
            state.apply(&mut self.ops[at]);
            self.ops[at].applied = true;
            any = true;
        }
        let mut at = 0;
        while at < self.ops.len() {
            if self.ops[at].done_at > now || !self.ops[at].applied {
                at += 1;
                continue;
            }
            let op = self.ops.remove(at);
            state.completed(op.serial);
            state.inflight -= 1;
            self.done.push_back(Completion::new(op.io.tag, op.status));
            any = true;
        }
        any
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    fn inflight(&self) -> usize {
        self.ops.len() + self.done.len()
    }

    fn deadline(&self) -> Option<Instant> {
        let holds = self.state.lock().holds;
        self.ops.iter().filter(|op| !op.held || !holds).fold(None, |at, op| {
            let own = if op.applied { op.done_at } else { op.effect_at };
            earliest(at, Some(own))
        })
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        for mut op in std::mem::take(&mut self.ops) {
            state.inflight -= 1;
            // The kernel would have lost the error; the simulated disk keeps it instead.
            state.lost |= op.took;
            if !op.applied && changes(op.io.op) && state.chance(1, 2) {
                op.io.flags.fua = false;
                state.apply(&mut op);
            }
        }
    }
}
