//! A model of writes, syncs and flushes on three shards, for loom (`rtrs_core::sync`).
//!
//! One shard acknowledges a write. On a second a sync of another session fails: the disk loses what
//! was not durable, and says so to this sync only. On a third a flush of the first session
//! succeeds and is judged.

use std::sync::Arc;

use loom::sync::Mutex;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use rtrs_core::ids::{CoreIndex, PermitId};
use rtrs_core::sync::model;

use super::FlushLedger;
use crate::engine::epoch::SyncEpoch;
use crate::path::PathKey;

const PATH: PathKey = PathKey(1);

/// What the disk did with a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    NotWritten,
    InCache,
    Durable,
    Lost,
}

struct Model {
    ledger: FlushLedger,
    epoch: Arc<SyncEpoch>,
    /// The write of before, and the one that is acknowledged meanwhile.
    disk: Mutex<[Fate; 2]>,
    /// The session has the acknowledgment of the second write.
    acknowledged: AtomicBool,
    /// The first flush is submitted.
    submitted: AtomicBool,
}

/// How a flush ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It waits for syncs of other shards.
    Unanswered,
    Good,
    Reported,
}

impl Model {
    /// The disk makes durable, or loses, what is in its cache. True when it lost something.
    fn sync_disk(&self, fate: Fate) -> bool {
        let mut disk = self.disk.lock().unwrap();
        let cached = disk.iter_mut().filter(|now| **now == Fate::InCache);
        cached.map(|now| *now = fate).count() > 0 && fate == Fate::Lost
    }

    /// What `Shard::begin_sync` and `note_write` do for a write. True when a flush had been
    /// submitted before it was acknowledged.
    fn write(&self) -> bool {
        let began = self.epoch.rises();
        self.disk.lock().unwrap()[1] = Fate::InCache;
        let after_flush = self.submitted.load(Ordering::Acquire);
        self.ledger.wrote(began, self.epoch.rises());
        self.acknowledged.store(true, Ordering::Release);
        after_flush
    }

    /// What `Shard` does for a sync that fails.
    fn fail_sync(&self, core: CoreIndex) {
        self.epoch.draw(core, None);
        if self.sync_disk(Fate::Lost) {
            self.epoch.raise();
        }
        self.epoch.back(core, None);
    }

    /// What `Shard` does for a flush that the disk ends well.
    fn flush(&self, core: CoreIndex, permit: PermitId) -> End {
        let mark = self.ledger.begin_flush(self.epoch.rises(), PATH, permit);
        self.submitted.store(true, Ordering::Release);
        self.epoch.draw(core, None);
        self.sync_disk(Fate::Durable);
        self.epoch.back(core, None);
        if !self.epoch.is_clear(self.epoch.horizon()) {
            return End::Unanswered;
        }
        match self.ledger.hides_loss(mark, self.epoch.rises()) {
            None => End::Good,
            Some(hidden) => {
                self.ledger.report(mark, hidden, PATH, permit);
                End::Reported
            }
        }
    }
}

/// `before`: the session has another write that no flush has covered.
fn check(before: bool) {
    model(move || {
        let epoch = SyncEpoch::unkept(0);
        epoch.set_shards(3);
        let ledger = FlushLedger::default();
        let mut first = Fate::NotWritten;
        if before {
            ledger.wrote(0, 0);
            first = Fate::InCache;
        }
        let disk = Mutex::new([first, Fate::NotWritten]);
        let (acknowledged, submitted) = (AtomicBool::new(false), AtomicBool::new(false));
        let model = Arc::new(Model { ledger, epoch, disk, acknowledged, submitted });
        let (writer, other) = (Arc::clone(&model), Arc::clone(&model));
        let writer = thread::spawn(move || writer.write());
        let other = thread::spawn(move || other.fail_sync(CoreIndex(1)));

        let covers = [before, model.acknowledged.load(Ordering::Acquire)];
        let end = model.flush(CoreIndex(2), PermitId(1));
        // What it tells says nothing about a write that was acknowledged after it was submitted.
        let reports = [before, !writer.join().unwrap()];
        other.join().unwrap();
        let last = model.flush(CoreIndex(2), PermitId(2));

        let disk = *model.disk.lock().unwrap();
        assert_ne!(last, End::Unanswered, "no sync is out");
        for at in (0..2).filter(|at| disk[*at] == Fate::Lost) {
            let good = end == End::Good && covers[at];
            assert!(!good, "a flush that covers write {at} succeeds: {disk:?}");
            let reported = last == End::Reported || end == End::Reported && reports[at];
            assert!(reported, "no flush reports write {at}: {disk:?}, {end:?}, {last:?}");
        }
    });
}

#[test]
fn a_lost_write_is_told() {
    check(false);
}

#[test]
fn a_lost_write_beside_an_older_one_is_told() {
    check(true);
}
