//! Checks flushes against a model while the server crashes: a write that was acknowledged before a
//! successful flush is durable, unless a flush has since failed or the process was killed.

use std::sync::Arc;
use std::thread;

use rtrs_core::block::{BlockSource, Io, IoOp};
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::rt::Clock;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Duration;

use super::store::{BLOCK, Store};
use super::{Scratch, WAIT_MAX, wait_for};
use crate::backend::conformance::Rig;
use crate::backend::nbd::{NbdOptions, NbdSource};

const BLOCKS: usize = 6;
const SHARDS: usize = 3;
const STEPS: u32 = 40;

/// Kinds of crashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Crashes {
    /// Connections close when the server crashes.
    Noticed,
    /// Connections may stay up, but no request is answered.
    Silent,
}

impl Crashes {
    /// Time limit for answers: a delay after a noticed crash must not cause a loss; a silent one
    /// must time out.
    fn answer_max(self) -> Duration {
        match self {
            Self::Noticed => WAIT_MAX * 10,
            Self::Silent => Duration::from_millis(60),
        }
    }
}

struct Model {
    random: Prng,
    crashes: Crashes,
    store: Store,
    how: NbdOptions,
    source: Arc<NbdSource>,
    /// Devices, each opened by its shard's first IO.
    shards: [Option<Rig>; SHARDS],
    /// Latest write to each block that was acknowledged and is not covered by a reported loss.
    acknowledged: [u64; BLOCKS],
    next: u64,
    /// Whether a crash has happened since the last flush.
    suspect: bool,
    losses: u32,
}

impl Model {
    fn new(scratch: &Scratch, seed: u64, crashes: Crashes) -> Self {
        let random = Prng::new(seed);
        let socket = scratch.text(&format!("model-{seed}"));
        let store = Store::start(&socket, BLOCKS, seed % 4 != 3);
        let how = NbdOptions {
            address: nbd_bridge::ServerAddress::Unix(socket.into()),
            name: "x".into(),
            read_only: false,
            block: None,
            open_max: WAIT_MAX,
        };
        let source = Self::open(&how, crashes);
        Self {
            random,
            crashes,
            store,
            how,
            source,
            shards: [const { None }; SHARDS],
            acknowledged: [0; BLOCKS],
            next: 1,
            suspect: false,
            losses: 0,
        }
    }

    fn open(how: &NbdOptions, crashes: Crashes) -> Arc<NbdSource> {
        Arc::new(NbdSource::open_within("x", how.clone(), crashes.answer_max()).unwrap())
    }

    fn turn(&mut self) {
        for rig in self.shards.iter_mut().flatten() {
            rig.ring.turn().unwrap();
            rig.device.poll(Clock.now());
        }
        thread::yield_now();
    }

    /// Runs a shard's IO while polling all shards. Connections left by a silent crash are closed
    /// when an IO is slow.
    fn run(&mut self, shard: usize, make: impl FnOnce(&mut Rig) -> Io) -> IoStatus {
        let rig = self.shards[shard].get_or_insert_with(|| {
            let index = u16::try_from(shard).unwrap();
            Rig::new(&*self.source, index)
        });
        let io = make(rig);
        rig.device.submit(io).unwrap();
        let begun = Clock.now();
        let mut status = None;
        wait_for("an IO", || {
            self.turn();
            if Clock.now() > begun + self.crashes.answer_max() * 3 {
                self.store.reset_silent();
            }
            let done = self.shards[shard].as_mut().and_then(|rig| rig.device.reap());
            status = done.map(|done| done.status);
            status.is_some()
        });
        status.unwrap()
    }

    fn write(&mut self) {
        let (shard, block) = (self.random.index(SHARDS), self.random.index(BLOCKS));
        let fua = self.random.chance(Ratio::new(1, 4));
        let number = self.next;
        self.next += 1;
        let status = self.run(shard, |rig| {
            rig.region.copy_in(0, &number.to_be_bytes());
            let mut io = rig.transfer(IoOp::Write, (block * BLOCK) as u64, 0, BLOCK);
            io.flags.fua = fua;
            io
        });
        assert_eq!(status, IoStatus::Ok);
        self.acknowledged[block] = number;
        if fua {
            assert_eq!(self.store.stable()[block], number, "written with FUA");
        }
    }

    fn flush(&mut self) {
        let shard = self.random.index(SHARDS);
        let status = self.run(shard, |rig| rig.io(IoOp::Flush, 0, 0));
        self.flushed(status.is_ok());
    }

    /// Processes the result of a flush, or of a process's last flush.
    fn flushed(&mut self, good: bool) {
        if !good {
            assert!(self.suspect || self.crashes == Crashes::Silent, "nothing was lost");
            self.forget();
        }
        self.suspect = false;
        for (block, (stable, number)) in
            self.store.stable().iter().zip(&self.acknowledged).enumerate()
        {
            assert!(stable >= number, "block {block} lost {number}, and holds {stable}");
        }
    }

    /// Records that the user knows that all writes so far may be lost.
    fn forget(&mut self) {
        self.losses += 1;
        self.acknowledged = [0; BLOCKS];
    }

    fn settle(&mut self) -> bool {
        let source = Arc::clone(&self.source);
        let settling = thread::spawn(move || source.settle().is_ok());
        wait_for("settle", || {
            self.turn();
            settling.is_finished()
        });
        let good = settling.join().unwrap();
        self.flushed(good);
        good
    }

    /// Stops the process, and starts the next one.
    fn restart(&mut self, cleanly: bool) {
        // The cache ID informs clients of an unclean stop.
        if !(cleanly && self.settle()) {
            self.forget();
        }
        self.shards = [const { None }; SHARDS];
        self.source = Self::open(&self.how, self.crashes);
    }

    fn step(&mut self) {
        match self.random.below(20) {
            0..9 => self.write(),
            9..13 => self.flush(),
            13..16 => {
                let silent =
                    self.crashes == Crashes::Silent && self.random.chance(Ratio::new(1, 2));
                self.store.crash(silent);
                self.suspect = true;
            }
            16 | 17 => {
                let shard = self.random.index(SHARDS);
                self.shards[shard] = None;
            }
            18 => drop(self.settle()),
            _ => {
                let cleanly = self.random.chance(Ratio::new(1, 2));
                self.restart(cleanly);
            }
        }
    }
}

#[test]
fn no_flush_succeeds_after_a_lost_write() {
    let scratch = Scratch::new("model");
    let mut losses = 0;
    for (seed, crashes) in (0..24)
        .map(|seed| (seed, Crashes::Noticed))
        .chain((100..106).map(|seed| (seed, Crashes::Silent)))
    {
        let mut model = Model::new(&scratch, seed, crashes);
        for step in 0..STEPS {
            let before = model.losses;
            let run = std::panic::AssertUnwindSafe(|| model.step());
            if let Err(panic) = std::panic::catch_unwind(run) {
                eprintln!("seed {seed} ({crashes:?}), step {step}");
                std::panic::resume_unwind(panic);
            }
            losses += model.losses - before;
        }
    }
    assert!(losses > 20, "{losses} losses were reported");
}

#[test]
fn a_server_allowing_one_connection_is_refused() {
    let scratch = Scratch::new("one");
    let mut model = Model::new(&scratch, 0, Crashes::Noticed);
    model.write();
    model.store.set_multi(false);
    model.store.crash(false);
    let mut rig = Rig::new(&*model.source, 9);
    let io = rig.transfer(IoOp::Read, 0, 0, BLOCK);
    rig.device.submit(io).unwrap();
    // Long enough for some attempts; a time that is too short cannot make the test fail.
    let end = Clock.now() + Duration::from_millis(300);
    while Clock.now() < end {
        rig.turn();
    }
    assert_eq!(rig.device.inflight(), 1, "it waits");
    model.store.set_multi(true);
    assert!(matches!(rig.drain()[..], [(_, IoStatus::Ok)]));
}
