//! Tests every order in which a change, a failing sync and a flush may take effect and complete.
//!
//! One session has a change and a flush in flight. A sync, from another session or the change's
//! own, consumes the disk cache's error at one point and completes at another. In every
//! interleaving of these points, for every kind of change and every status, a flush reports an
//! acknowledged change that the disk lost, and a successful flush covers what it promises.

use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::block::{Geometry, IoOp};
use rtrs_core::status::IoStatus;
use rtrs_core::wire::{AccessMode, Rw, WriteMsg};

use super::fixture::{Fixture, StandOptions};
use super::lossy_disk::{Fate, LossyDisk, LossyState, PLACE, is_refusal};
use super::peer::{Data, Peer, PeerOptions, io};
use crate::engine::epoch::SyncEpoch;
use crate::export::Export;

const STATUSES: [IoStatus; 12] = [
    IoStatus::Io,
    IoStatus::Ok,
    IoStatus::Beyond,
    IoStatus::Invalid,
    IoStatus::ReadOnly,
    IoStatus::NoSpace,
    IoStatus::NoMemory,
    IoStatus::Unsupported,
    IoStatus::NoDevice,
    IoStatus::Aborted,
    IoStatus::TimedOut,
    IoStatus::Busy,
];

/// Locations of the earlier, acknowledged write and of the change.
const BEFORE: usize = 0;
const CHANGE: usize = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Plain,
    /// The disk supports FUA.
    Fua,
    /// FUA on a disk that does not support it, so that a flush follows.
    FuaByFlush,
    Preflush,
}

impl Form {
    const fn steps(self) -> usize {
        match self {
            Self::Plain | Self::Fua => 1,
            Self::FuaByFlush | Self::Preflush => 2,
        }
    }

    const fn is_durable(self) -> bool {
        matches!(self, Self::Fua | Self::FuaByFlush)
    }
}

/// Next actor of a schedule. The change and the other sync take effect when they reach the disk;
/// the flush does so in a turn of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Actor {
    Change,
    OtherSync,
    Flush,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    op: IoOp,
    form: Form,
    /// Whether an unflushed write was acknowledged before the change.
    before: bool,
    /// Status of the sync that consumes the error; the change's own sync if there is no other.
    status: IoStatus,
    other: bool,
    /// Connections of the flush and of the other sync, each served by a different shard.
    conns: [usize; 2],
}

impl Case {
    fn lengths(&self) -> [(Actor, usize); 3] {
        let other = if self.other { 2 } else { 0 };
        let change = 1 + self.form.steps();
        [(Actor::Change, change), (Actor::OtherSync, other), (Actor::Flush, 3)]
    }

    /// Every possible order of the actors' turns.
    fn schedules(&self) -> Vec<Vec<Actor>> {
        let mut all = Vec::new();
        extend(&mut Vec::new(), &mut self.lengths(), &mut all);
        all
    }

    /// Whether the sync that consumes the error loses data.
    fn loses(&self) -> bool {
        let refused = !self.other && self.form == Form::Fua && is_refusal(self.status);
        !self.status.is_ok() && !refused
    }
}

fn extend(done: &mut Vec<Actor>, left: &mut [(Actor, usize); 3], all: &mut Vec<Vec<Actor>>) {
    if left.iter().all(|(_, count)| *count == 0) {
        return all.push(done.clone());
    }
    for at in 0..left.len() {
        if left[at].1 > 0 {
            left[at].1 -= 1;
            done.push(left[at].0);
            extend(done, left, all);
            done.pop();
            left[at].1 += 1;
        }
    }
}

/// Maximum number of runs on one bench: the simulated clients' send queues hold 256 requests.
const RUNS_MAX: usize = 40;

struct Bench {
    fua: bool,
    runs: usize,
    fixture: Fixture,
    disk: Arc<Mutex<LossyState>>,
    epoch: Arc<SyncEpoch>,
    one: Peer,
    two: Peer,
}

impl Bench {
    fn new(fua: bool) -> Self {
        let mut fixture = Fixture::new(StandOptions::default());
        let disk = Arc::<Mutex<LossyState>>::default();
        let geometry = Geometry {
            fua,
            write_cache: true,
            discard: true,
            discard_granularity: 512,
            write_zeroes: true,
            ..Geometry::plain(1 << 20)
        };
        let source = LossyDisk { geometry, state: Arc::clone(&disk) };
        let epoch = Arc::<SyncEpoch>::default();
        let export = Export { epoch: Arc::clone(&epoch), ..Export::new("lossy", Arc::new(source)) };
        fixture.exports.add(&Arc::new(export)).unwrap();
        let [one, two] = [1, 2].map(|n| {
            let options = PeerOptions { session: n, path: n, local: n, ..PeerOptions::default() };
            let mut peer = Peer::up(&mut fixture, options, &format!("sess{n}"));
            peer.open_device(&mut fixture, "lossy", AccessMode::Migration).unwrap();
            peer
        });
        Self { fua, runs: 0, fixture, disk, epoch, one, two }
    }

    fn flush_at_once(&mut self) -> u16 {
        self.disk.lock().at_once = true;
        self.one.send_flush((1, 4));
        let errno = self.one.reply(&mut self.fixture).errno;
        self.disk.lock().at_once = false;
        errno
    }

    /// Sends a write that is acknowledged but not flushed.
    fn write_before(&mut self) {
        self.disk.lock().at_once = true;
        self.one.send_write((1, 3), io(Rw::WRITE, 0, PLACE), &[1; PLACE as usize]);
        assert_eq!(self.one.reply(&mut self.fixture).errno, 0);
        self.disk.lock().at_once = false;
    }
}

/// Progress of one actor.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    submitted: bool,
    /// ID of its IO at the disk.
    held: Option<usize>,
    answer: Option<u16>,
}

struct Run<'a> {
    bench: &'a mut Bench,
    case: Case,
    actors: [Progress; 3],
    seen: usize,
    /// Locations whose changes the flush covers: those acknowledged when it was submitted, and not
    /// reported as lost.
    covered: [bool; 2],
    /// Whether the change's PREFLUSH covers the earlier write.
    preflush_covers: bool,
}

impl Run<'_> {
    fn of(&mut self, actor: Actor) -> &mut Progress {
        &mut self.actors[actor as usize]
    }

    fn acknowledged(&self) -> [bool; 2] {
        let change = self.actors[Actor::Change as usize].answer;
        [self.case.before, change == Some(0)]
    }

    /// Whether an actor has failed.
    fn failed(&self, actor: Actor) -> bool {
        self.actors[actor as usize].answer.is_some_and(|errno| errno != 0)
    }

    fn turn(&mut self, actor: Actor) {
        match *self.of(actor) {
            Progress { submitted: false, .. } => self.submit(actor),
            Progress { held: Some(id), .. } => {
                if !self.run(actor, id) {
                    self.bench.disk.lock().release(id);
                    self.of(actor).held = None;
                    self.collect(Actor::Change);
                }
            }
            // The IO waits for others, or has ended early.
            Progress { held: None, .. } => {}
        }
    }

    fn submit(&mut self, actor: Actor) {
        self.of(actor).submitted = true;
        let Case { op, form, conns, .. } = self.case;
        match actor {
            Actor::Change => {
                self.preflush_covers = self.case.before && !self.failed(Actor::Flush);
                let rw = match op {
                    IoOp::Write => Rw::WRITE,
                    IoOp::Discard => Rw::DISCARD,
                    _ => Rw::WRITE_ZEROES,
                };
                let rw = rw.fua(form.is_durable()).preflush(form == Form::Preflush);
                let header = io(rw, u64::from(PLACE) / 512, PLACE);
                let peer = &mut self.bench.one;
                if op == IoOp::Write {
                    peer.send_write((1, 3), header, &[2; PLACE as usize]);
                } else {
                    let message = WriteMsg { usr_len: 32 }.encode();
                    peer.request((1, 3), Data::None, &header.encode(), &message);
                }
            }
            Actor::Flush => {
                self.covered = self.acknowledged();
                let reported = form == Form::Preflush && self.failed(Actor::Change);
                self.covered[BEFORE] &= !reported;
                self.bench.one.send_flush((conns[0], 4));
            }
            Actor::OtherSync => self.bench.two.send_flush((conns[1], 4)),
        }
        self.collect(actor);
    }

    /// Lets an IO take effect. Returns false if it already had.
    fn run(&mut self, actor: Actor, id: usize) -> bool {
        let disk = &mut *self.bench.disk.lock();
        let takes = match actor {
            Actor::Change => !self.case.other && disk.is_sync(id),
            Actor::OtherSync => true,
            Actor::Flush => false,
        };
        disk.run(id, if takes { self.case.status } else { IoStatus::Ok })
    }

    /// Lets the server continue, and records the answers and each IO at the disk with its actor.
    fn collect(&mut self, whose: Actor) {
        for reply in self.bench.one.replies(&mut self.bench.fixture) {
            let actor = if reply.permit == 3 { Actor::Change } else { Actor::Flush };
            self.note_answer(actor, reply.errno);
        }
        for reply in self.bench.two.replies(&mut self.bench.fixture) {
            self.note_answer(Actor::OtherSync, reply.errno);
        }
        let taken = self.bench.disk.lock().taken;
        assert!(taken - self.seen <= 1, "{:?}", self.case);
        if taken > self.seen {
            self.of(whose).held = Some(self.seen);
            if whose != Actor::Flush {
                self.run(whose, self.seen);
            }
        }
        self.seen = taken;
    }

    fn note_answer(&mut self, actor: Actor, errno: u16) {
        let (case, covered, preflush_covers) = (self.case, self.covered, self.preflush_covers);
        let fates = self.bench.disk.lock().fates;
        let answer = &mut self.of(actor).answer;
        assert_eq!(answer.replace(errno), None, "answered twice: {case:?}");
        let kept = |place: usize| assert_eq!(fates[place], Fate::Durable, "{actor:?} of {case:?}");
        match (actor, case.form) {
            (Actor::Flush, _) if errno == 0 => {
                (0..2).filter(|place| covered[*place]).for_each(kept);
            }
            (Actor::Change, Form::Plain) => assert_eq!(errno, 0, "{case:?}"),
            (Actor::Change, Form::Fua | Form::FuaByFlush) if errno == 0 => kept(CHANGE),
            (Actor::Change, Form::Preflush) if errno == 0 && preflush_covers => kept(BEFORE),
            (Actor::OtherSync, _) => assert_eq!(errno, case.status.to_errno(), "{case:?}"),
            _ => {}
        }
    }

    fn finish(mut self, rises: u32) {
        while let Some(id) = { self.bench.disk.lock().first_held() } {
            let owner = [Actor::Change, Actor::OtherSync, Actor::Flush];
            let owner = owner.into_iter().find(|actor| self.of(*actor).held == Some(id));
            self.turn(owner.expect("an IO of an actor"));
        }
        let case = self.case;
        let flush = self.of(Actor::Flush).answer.expect("an answer to the flush");
        let change = self.of(Actor::Change).answer.expect("an answer to the change");
        let preflush = case.form == Form::Preflush && change != 0;
        let reported = |place: usize| {
            flush != 0 && self.covered[place] || preflush && place == BEFORE && case.before
        };
        let acknowledged = self.acknowledged();
        let fates = self.bench.disk.lock().fates;
        let lost = |place: &usize| acknowledged[*place] && fates[*place] == Fate::Lost;
        let unreported = (0..2).filter(lost).any(|place| !reported(place));
        let last = self.bench.flush_at_once();
        assert!(!unreported || last != 0, "a loss is not reported: {fates:?}, {case:?}");
        assert_eq!(self.bench.flush_at_once(), 0, "a loss is reported once: {case:?}");
        if !case.loses() {
            let refused = if case.other { IoStatus::Ok } else { case.status };
            let answers = (change, flush, last, self.bench.epoch.rises());
            assert_eq!(answers, (refused.to_errno(), 0, 0, rises), "no loss: {case:?}");
        }
    }
}

/// Runs a case in every order; `vary` changes the case for each. Returns the number of runs.
fn explore(bench: &mut Bench, case: &Case, vary: impl Fn(usize) -> Case) -> usize {
    let schedules = case.schedules();
    for (number, schedule) in schedules.iter().enumerate() {
        let case = vary(number);
        bench.runs += 1;
        if bench.runs > RUNS_MAX {
            *bench = Bench { runs: 1, ..Bench::new(bench.fua) };
        }
        bench.disk.lock().reset();
        if case.before {
            bench.write_before();
        }
        let (rises, seen) = (bench.epoch.rises(), bench.disk.lock().taken);
        let (actors, covered, preflush_covers) = Default::default();
        let mut run = Run { bench, case, actors, seen, covered, preflush_covers };
        schedule.iter().for_each(|actor| run.turn(*actor));
        run.finish(rises);
    }
    schedules.len()
}

fn explore_all(op: IoOp) {
    let mut runs = 0;
    for form in [Form::Plain, Form::Fua, Form::FuaByFlush, Form::Preflush] {
        let bench = &mut Bench::new(form != Form::FuaByFlush);
        for before in [false, true] {
            let (status, conns) = (IoStatus::Io, [1, 1]);
            let case = Case { op, form, before, status, other: true, conns };
            runs += explore(bench, &case, |number| {
                let conns = [1, 1 + number / STATUSES.len() % 2];
                Case { status: STATUSES[number % STATUSES.len()], conns, ..case }
            });
            for status in STATUSES.into_iter().filter(|_| form != Form::Plain) {
                let case = Case { status, other: false, ..case };
                runs += explore(bench, &case, |number| Case { conns: [1 + number % 2, 1], ..case });
            }
        }
        bench.one.leave(&mut bench.fixture);
        bench.two.leave(&mut bench.fixture);
        bench.fixture.assert_empty();
    }
    assert_eq!(runs, 4280);
}

#[test]
fn lost_writes_are_reported_in_every_order() {
    explore_all(IoOp::Write);
}

#[test]
fn lost_discards_are_reported_in_every_order() {
    explore_all(IoOp::Discard);
}

#[test]
fn lost_zeroes_are_reported_in_every_order() {
    explore_all(IoOp::WriteZeroes);
}
