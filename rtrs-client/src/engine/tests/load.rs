//! Random IO under random link faults: every IO completes exactly once, and reads return what
//! was written.

use std::collections::{BTreeMap, BTreeSet};

use rtrs_core::block::{IoFlags, IoOp};
use rtrs_core::fabric::sim::{BindMode, FaultOptions};
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::status::IoStatus;
use rtrs_core::time::Duration;

use super::fixture::{Fixture, MS, SEC, TestIo, client_ip, server_ip};
use crate::engine::Policy;

const BLOCK: usize = 4096;
const BLOCKS: u64 = 128;
const BUFFER: usize = 32 << 10;

/// Possible content of a block: the last acknowledged write, or any write of unknown outcome.
#[derive(Clone, Debug, Default)]
struct Model {
    last: u64,
    unknown: BTreeSet<u64>,
}

/// IO in flight, on blocks that no other IO uses in the meantime.
#[derive(Debug)]
struct Flying {
    shard: usize,
    slot: usize,
    op: IoOp,
    blocks: std::ops::Range<u64>,
    value: u64,
}

struct Load {
    fixture: Fixture,
    prng: Prng,
    model: Vec<Model>,
    flying: BTreeMap<u64, Flying>,
    slots: Vec<Vec<usize>>,
    reaped: usize,
    next_value: u64,
    ok: usize,
}

fn stamp(value: u64, block: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    if value != 0 {
        for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&(value << 24 | block << 10 | index as u64).to_le_bytes());
        }
    }
    bytes
}

impl Load {
    fn new(seed: u64) -> Self {
        let mut prng = Prng::new(seed);
        let policies = [Policy::RoundRobin, Policy::MinInflight, Policy::MinLatency];
        let policy = policies[prng.index(3)];
        let paths = 1 + prng.index(3);
        let (rekey, pending) = (prng.chance(Ratio::new(1, 2)), prng.chance(Ratio::new(1, 2)));
        let acknowledged = prng.chance(Ratio::new(1, 2));
        let shards = 1 + prng.below(3) as u16;
        let depth = shards + 1 + prng.below(16) as u16;
        let fixture = Fixture::open(|s| {
            (s.seed, s.paths) = (seed, paths);
            (s.config.policy, s.config.shards, s.config.seed) = (policy, shards, seed);
            (s.config.io_timeout, s.config.reconnect_max) = (2 * SEC, 200 * MS);
            s.config.reconnect_min = 20 * MS;
            (s.how.new_rkey, s.how.queue_depth) = (rekey, depth);
            (s.how.max_io, s.how.size) = (12288, BLOCKS as usize * BLOCK);
            s.world.bind = if pending { BindMode::Pending } else { BindMode::Done };
            s.world.acknowledged = acknowledged;
        });
        let links: Vec<_> = (0..paths).map(|path| (client_ip(path), server_ip(path))).collect();
        let mut load = Self {
            fixture,
            prng,
            model: vec![Model::default(); BLOCKS as usize],
            flying: BTreeMap::new(),
            slots: vec![(0..24).collect(); usize::from(shards)],
            reaped: 0,
            next_value: 1,
            ok: 0,
        };
        load.fixture.server.disk.fill(0);
        load.fixture.client.lazy = load.prng.chance(Ratio::new(1, 2)).then(|| load.prng.fork());
        let mut faults = FaultOptions::new(links);
        faults.gap = 50 * MS..=300 * MS;
        faults.lasts = MS..=400 * MS;
        faults.spare = 0;
        let now = load.fixture.now();
        let plan = faults.plan(&mut load.prng, now, now + 2 * SEC);
        load.fixture.world.inject(&plan);
        load
    }

    fn submit(&mut self) {
        let shard = self.prng.index(self.slots.len());
        let Some(&slot) = self.slots[shard].last() else { return };
        let op = match self.prng.below(20) {
            0 => IoOp::Flush,
            1 => IoOp::Discard,
            2 => IoOp::WriteZeroes,
            3..=11 => IoOp::Write,
            _ => IoOp::Read,
        };
        let count = 1 + self.prng.below((BUFFER / BLOCK) as u64);
        let first = self.prng.below(BLOCKS - count + 1);
        let blocks = if op == IoOp::Flush { 0..0 } else { first..first + count };
        let overlaps = |f: &Flying| f.blocks.start < blocks.end && blocks.start < f.blocks.end;
        if self.flying.values().any(overlaps) {
            return;
        }
        self.slots[shard].pop();
        let at = slot * BUFFER;
        let value = if op == IoOp::Write {
            self.next_value += 1;
            for (index, block) in blocks.clone().enumerate() {
                let bytes = stamp(self.next_value, block);
                self.fixture.client.buffer(shard, at + index * BLOCK, BLOCK).copy_in(0, &bytes);
            }
            self.next_value
        } else {
            0
        };
        let fua = op != IoOp::Read && self.prng.chance(Ratio::new(1, 4));
        let flags = IoFlags { fua, ..IoFlags::default() };
        let len = ((blocks.end - blocks.start) as usize * BLOCK) as u32;
        let io = TestIo::new(op, blocks.start * BLOCK as u64, len).flags(flags).at(at);
        let tag = self.fixture.submit_io(shard, io);
        self.flying.insert(tag, Flying { shard, slot, op, blocks, value });
    }

    fn reap(&mut self) {
        while let Some(&done) = self.fixture.client.done.get(self.reaped) {
            self.reaped += 1;
            let io = self.flying.remove(&done.tag).expect("an IO in flight");
            self.slots[io.shard].push(io.slot);
            self.ok += usize::from(done.status.is_ok());
            match (io.op, done.status) {
                (IoOp::Read, IoStatus::Ok) => self.check_read(&io),
                (IoOp::Read | IoOp::Flush, _) => {}
                (_, IoStatus::Ok) => {
                    for block in io.blocks {
                        self.model[block as usize].last = io.value;
                    }
                }
                (_, IoStatus::Aborted | IoStatus::TimedOut) => {
                    for block in io.blocks {
                        self.model[block as usize].unknown.insert(io.value);
                    }
                }
                (op, status) => panic!("{op:?} ended with {status:?}"),
            }
        }
    }

    fn check_read(&self, io: &Flying) {
        for (index, block) in io.blocks.clone().enumerate() {
            let at = io.slot * BUFFER + index * BLOCK;
            let got = self.fixture.client.buffer(io.shard, at, BLOCK).to_vec();
            let model = &self.model[block as usize];
            let fits = |value: &u64| got == stamp(*value, block);
            assert!(
                fits(&model.last) || model.unknown.iter().any(fits),
                "block {block}: {model:?}, read {:x?}",
                &got[..8]
            );
        }
    }

    fn work(&mut self, time: Duration) {
        let end = self.fixture.now() + time;
        while self.fixture.now() < end {
            for _ in 0..self.prng.below(6) {
                self.submit();
            }
            let pause = self.prng.duration(Duration::ZERO..=10 * MS);
            self.fixture.run(pause);
            self.reap();
            let paths = self.fixture.server.paths.len();
            if paths > 0 && self.prng.chance(Ratio::new(1, 100)) {
                let now = self.fixture.now();
                self.fixture.server.end_path(now, self.prng.index(paths));
            }
        }
    }

    fn run(mut self) -> usize {
        self.work(2 * SEC);
        // After the last faults, all IO completes, every path comes back, and reads agree.
        self.fixture.run(SEC);
        self.fixture.drain(10 * SEC);
        self.reap();
        assert!(self.flying.is_empty());
        self.fixture.until("all paths", 20 * SEC, Fixture::is_whole);
        let before = self.ok;
        for block in 0..BLOCKS {
            self.fixture.read(0, block * BLOCK as u64, BLOCK as u32);
            let io =
                Flying { shard: 0, slot: 0, op: IoOp::Read, blocks: block..block + 1, value: 0 };
            self.check_read(&io);
        }
        self.fixture.detach();
        self.fixture.until("the end", 8 * SEC, |s| s.client.control.view().is_done());
        before
    }
}

#[test]
fn every_io_ends_exactly_once_under_faults() {
    let mut ok = 0;
    for seed in 0..50 {
        ok += Load::new(seed).run();
    }
    assert!(ok > 10_000, "{ok}: too little got through to mean anything");
}

#[test]
fn a_detach_under_faults_ends_everything() {
    for seed in 100..140 {
        let mut load = Load::new(seed);
        let time = load.prng.duration(Duration::ZERO..=800 * MS);
        load.work(time);
        load.fixture.detach();
        load.fixture.until("the end", 9 * SEC, |s| s.client.control.view().is_done());
        load.fixture.drain(3 * SEC);
        load.reap();
        assert!(load.flying.is_empty());
    }
}
