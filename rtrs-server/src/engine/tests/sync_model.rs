//! A model of writes, syncs and flushes on three shards, for loom (`rtrs_core::sync`).
//!
//! The model runs the server's own code for the shards' devices, the steps of IOs, the export's
//! epoch and the session's ledger. Only the disk and the shard loop are modeled. One shard
//! acknowledges a write. On a second shard, a flush of another session fails: the disk loses all
//! data that was not durable, and reports the loss only to this sync. On a third shard, a flush of
//! the first session succeeds and is checked.

use std::collections::VecDeque;
use std::sync::Arc;

use loom::sync::Mutex;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use rtrs_core::block::{BlockDevice, BlockSource, Completion, Core, Geometry, IoFlags};
use rtrs_core::ids::CoreIndex;
use rtrs_core::sync::model;

use super::super::progress::{DeviceTime, SyncProgress, Turn};
use super::*;
use crate::export::{Export, ExportIndex, ExportTable};

const SHARDS: u16 = 3;
const WRITER: CoreIndex = CoreIndex(0);
/// Shard of the other session, whose sync consumes the error.
const OTHER: CoreIndex = CoreIndex(1);
const FLUSHER: CoreIndex = CoreIndex(2);
const EXPORT: ExportIndex = ExportIndex(0);
const PATH: PathKey = PathKey(1);

/// State of a write on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    NotWritten,
    InCache,
    Durable,
    Lost,
}

#[derive(Debug)]
struct Disk {
    /// States of an older write of the session, and of the concurrent write.
    fates: Mutex<[Fate; 2]>,
    /// Whether the session's flush was submitted.
    flushing: AtomicBool,
    /// Value of `flushing` after the write completed and before the write was acknowledged.
    flushed_first: std::sync::atomic::AtomicBool,
}

#[derive(Debug)]
struct Source(Arc<Disk>);

impl BlockSource for Source {
    fn geometry(&self) -> Geometry {
        Geometry::plain(4096)
    }

    fn open(&self, core: &Core) -> std::io::Result<Box<dyn BlockDevice>> {
        let (disk, geometry) = (Arc::clone(&self.0), self.geometry());
        Ok(Box::new(Device { core: core.index, disk, geometry, queue: VecDeque::new() }))
    }
}

/// Queue of one shard. A write reaches the cache when it is submitted; a sync runs when it is
/// reaped.
#[derive(Debug)]
struct Device {
    core: CoreIndex,
    disk: Arc<Disk>,
    geometry: Geometry,
    queue: VecDeque<Io>,
}

impl BlockDevice for Device {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if io.op.changes() {
            self.disk.fates.lock().unwrap()[1] = Fate::InCache;
        }
        if self.core == FLUSHER {
            self.disk.flushing.store(true, Ordering::Release);
        }
        self.queue.push_back(io);
        Ok(())
    }

    fn poll(&mut self, _now: Instant) -> bool {
        false
    }

    fn reap(&mut self) -> Option<Completion> {
        let Io { tag, op, flags, .. } = self.queue.pop_front()?;
        let mut status = IoStatus::Ok;
        if self.core == WRITER {
            let flushing = self.disk.flushing.load(Ordering::Acquire);
            self.disk.flushed_first.store(flushing, Ordering::Relaxed);
        }
        if op == IoOp::Flush || flags.fua {
            let fails = self.core == OTHER;
            let mut fates = self.disk.fates.lock().unwrap();
            for fate in fates.iter_mut().filter(|fate| **fate == Fate::InCache) {
                if fails {
                    (*fate, status) = (Fate::Lost, IoStatus::Io);
                } else {
                    *fate = Fate::Durable;
                }
            }
        }
        Some(Completion::new(tag, status))
    }

    fn inflight(&self) -> usize {
        self.queue.len()
    }
}

/// Operation of the first shard.
#[derive(Clone, Copy, Debug)]
struct Change {
    op: IoOp,
    durable: Durable,
}

/// Mechanism that makes a single change durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Durable {
    No,
    ByFua,
    /// Made durable by a flush, because the device has no FUA.
    ByPostFlush,
}

const PLAIN_FLUSH: Change = Change { op: IoOp::Flush, durable: Durable::No };

/// A request running on its shard.
struct Request {
    devices: Devices,
    io: IoProgress,
    /// Step that has completed but is not settled yet.
    settling: Option<Settling>,
}

impl Request {
    fn new(exports: &Arc<ExportTable>, core: CoreIndex, change: Change) -> Self {
        let mut devices = Devices::new(Core::without_ring(core), Arc::clone(exports), SHARDS);
        devices.open(EXPORT, None).unwrap();
        let fua = change.durable == Durable::ByFua;
        let len = if change.op == IoOp::Flush { 0 } else { 512 };
        let io = IoProgress {
            export: EXPORT,
            device: DeviceId(0),
            op: change.op,
            flags: IoFlags { fua, ..IoFlags::default() },
            step: IoStep::Data,
            post_flush: change.durable == Durable::ByPostFlush,
            offset: 0,
            done: 0,
            len,
            part: len,
            partial: None,
            turn: Turn::None,
            room: 0,
            sync: SyncProgress::default(),
            device_time: DeviceTime::default(),
        };
        Self { devices, io, settling: None }
    }

    /// Runs the request up to its answer, or up to a step whose result depends on other syncs.
    fn run(&mut self, account: Account<'_>) -> Option<u16> {
        loop {
            let op = if self.io.is_flush() { IoOp::Flush } else { self.io.op };
            let (flags, len) = (self.io.flags, self.io.part);
            let order = Io { tag: 0, op, flags, offset: 0, len, buf: None };
            assert!(self.io.submit(order, account, &mut self.devices));
            let Completion { status, .. } = self.devices.reap(EXPORT).unwrap();
            self.settling = Some(self.io.end_sync(Instant::ZERO, status, &mut self.devices).0);
            match self.settle(account) {
                Some(Next::Submit | Next::PutIn(_)) => {}
                Some(Next::Answer(errno) | Next::ReportLoss(errno)) => return Some(errno),
                None => return None,
            }
        }
    }

    fn settle(&mut self, account: Account<'_>) -> Option<Next> {
        let end = self.settling.filter(|end| self.io.is_settled(end, Instant::ZERO, &self.devices));
        end.map(|end| self.io.end_step(end.status, account, &self.devices))
    }

    /// Errno of a request that could not be answered earlier. No other sync is outstanding.
    fn finish(&mut self, account: Account<'_>) -> u16 {
        match self.settle(account).expect("no other sync is outstanding") {
            Next::Answer(errno) | Next::ReportLoss(errno) => errno,
            Next::Submit | Next::PutIn(_) => {
                self.run(account).expect("no other sync is outstanding")
            }
        }
    }
}

struct Model {
    exports: Arc<ExportTable>,
    disk: Arc<Disk>,
    ledger: FlushLedger,
    other: FlushLedger,
    /// Whether the session has received the acknowledgment of the write.
    acknowledged: AtomicBool,
}

impl Model {
    fn account(&self, permit: u16) -> Account<'_> {
        Account { ledger: Some(&self.ledger), path: PATH, permit: PermitId(permit) }
    }

    fn request(&self, core: CoreIndex, change: Change) -> Request {
        Request::new(&self.exports, core, change)
    }

    fn flush(&self, permit: u16) -> (Request, Option<u16>) {
        let mut flush = self.request(FLUSHER, PLAIN_FLUSH);
        let errno = flush.run(self.account(permit));
        (flush, errno)
    }

    fn write(&self, change: Change) -> (Request, Option<u16>) {
        let mut write = self.request(WRITER, change);
        let errno = write.run(self.account(0));
        self.acknowledged.store(errno == Some(0), Ordering::Release);
        (write, errno)
    }

    fn fail_sync(&self) -> Request {
        let mut flush = self.request(OTHER, PLAIN_FLUSH);
        flush.run(Account { ledger: Some(&self.other), path: PathKey(2), permit: PermitId(0) });
        flush
    }
}

/// Checks all interleavings. `before` says whether the session has an earlier write that no flush
/// has covered.
fn check(change: Change, before: bool) {
    model(move || {
        let fates = [if before { Fate::InCache } else { Fate::NotWritten }, Fate::NotWritten];
        let (fates, flushing) = (Mutex::new(fates), AtomicBool::new(false));
        let disk = Arc::new(Disk { fates, flushing, flushed_first: Default::default() });
        let export = Export::new("vol", Arc::new(Source(Arc::clone(&disk))));
        // Set here, because loom does not model the `OnceLock` that otherwise orders this call
        // before the first use.
        export.epoch.order().set_shards(SHARDS);
        let (ledger, other) = (FlushLedger::default(), FlushLedger::default());
        if before {
            ledger.wrote(0, 0);
        }
        let exports = ExportTable::new(vec![export]);
        let acknowledged = AtomicBool::new(false);
        let model = Arc::new(Model { exports, disk, ledger, other, acknowledged });
        let (writer, other) = (Arc::clone(&model), Arc::clone(&model));
        let writer = thread::spawn(move || writer.write(change));
        let other = thread::spawn(move || other.fail_sync());

        let covers = [before, model.acknowledged.load(Ordering::Acquire)];
        let (mut flush, end) = model.flush(1);
        let (mut write, written) = writer.join().unwrap();
        drop(other.join().unwrap());
        let end = end.unwrap_or_else(|| flush.finish(model.account(1)));
        let written = written.unwrap_or_else(|| write.finish(model.account(0)));
        // A flush does not report a write that was acknowledged after the flush was submitted.
        let reports = [before, !model.disk.flushed_first.load(Ordering::Relaxed)];
        let (_, last) = model.flush(2);
        let last = last.expect("no sync is outstanding");

        let fates = *model.disk.fates.lock().unwrap();
        if change.durable != Durable::No {
            let is_durable = fates[1] == Fate::Durable;
            assert!(written != 0 || is_durable, "acknowledged but not durable: {fates:?}");
        }
        for at in (0..2).filter(|at| fates[*at] == Fate::Lost) {
            let plain = at == 0 || change.durable == Durable::No;
            assert!(end != 0 || !covers[at], "a flush that covers write {at} succeeds: {fates:?}");
            let reported = last != 0 || end != 0 && reports[at];
            assert!(reported || !plain, "no flush reports write {at}: {fates:?}, {end}, {last}");
        }
    });
}

#[test]
fn a_lost_write_is_reported() {
    check(Change { op: IoOp::Write, durable: Durable::No }, false);
}

#[test]
fn lost_zeroes_after_an_older_write_are_reported() {
    check(Change { op: IoOp::WriteZeroes, durable: Durable::No }, true);
}

#[test]
fn a_lost_durable_write_fails() {
    check(Change { op: IoOp::Write, durable: Durable::ByFua }, false);
}

#[test]
fn a_lost_write_followed_by_a_flush_fails() {
    check(Change { op: IoOp::Write, durable: Durable::ByPostFlush }, false);
}
