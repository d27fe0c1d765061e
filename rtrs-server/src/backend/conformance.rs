//! Conformance suite for all backends.
//!
//! [`run`] drives a source as the server does, on its own shards, and panics with a message if the
//! source violates the contract of `BlockDevice`. The suite follows the geometry: operations that
//! the geometry does not promise must be refused with the right status, and promised ones must
//! work. Every wait is bounded. Tests in this crate and in the workspace run the suite.

use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;

use rtrs_core::block::{BlockDevice, BlockSource, Core, Io, IoFlags, IoOp, WakeHandle};
use rtrs_core::extents::{self, Extent};
use rtrs_core::ids::CoreIndex;
use rtrs_core::mem::{MemSlice, Region};
use rtrs_core::rt::{Clock, Inbox, Ring, mailbox};
use rtrs_core::status::IoStatus;
use rtrs_core::time::Duration;

const WAIT_MAX: Duration = Duration::from_secs(60);
/// Number of bytes at each end of the device that the suite uses.
const WINDOW: u64 = 1 << 20;

/// Whether a backend keeps written data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    /// The backend keeps data like a disk.
    Data,
    /// Every read returns zeroes.
    Nothing,
}

/// A shard with a device and memory, for tests.
#[derive(Debug)]
pub struct Rig {
    /// The device under test.
    pub device: Box<dyn BlockDevice>,
    /// Ring of the shard.
    pub ring: Rc<Ring>,
    /// Wake-ups from the device.
    woken: Inbox<()>,
    /// Memory attached to the device; 4 MiB long.
    pub region: Arc<Region>,
    next_tag: u64,
}

impl Rig {
    /// Opens a source on a new shard.
    pub fn new(source: &dyn BlockSource, index: u16) -> Self {
        let ring = Ring::new(256).expect("a ring");
        Self::on(ring, source, index)
    }

    /// Opens a source on an existing ring.
    pub fn on(ring: Rc<Ring>, source: &dyn BlockSource, index: u16) -> Self {
        let (sender, mailbox) = mailbox().expect("an eventfd");
        let woken = mailbox.arm(&ring).expect("memory");
        let wake = WakeHandle::new(move || sender.send(()));
        let core = Core { index: CoreIndex(index), ring: Some(Rc::clone(&ring)), wake };
        let mut device = source.open(&core).expect("the source opens");
        let region = Region::new(4 << 20).expect("memory");
        device.attach_region(&region).expect("memory attaches");
        Self { device, ring, woken, region, next_tag: 1 }
    }

    /// Creates an IO without a buffer.
    pub fn io(&mut self, op: IoOp, offset: u64, len: u32) -> Io {
        self.next_tag += 1;
        Io { tag: self.next_tag, op, flags: IoFlags::default(), offset, len, buf: None }
    }

    /// Creates a read or write with a buffer at `at` in the region.
    pub fn transfer(&mut self, op: IoOp, offset: u64, at: usize, len: usize) -> Io {
        let buf = Some(self.region.slice(at, len).expect("within the region"));
        Io { buf, ..self.io(op, offset, u32::try_from(len).expect("a short IO")) }
    }

    /// Runs one turn of the shard; sleeps briefly if there is nothing to do.
    pub fn turn(&mut self) {
        let now = Clock.now();
        let mut busy = self.ring.turn().expect("the ring turns");
        busy |= self.device.poll(now);
        let nap = Duration::from_millis(5);
        let nap = self.device.deadline().map_or(nap, |at| nap.min(at.since(now)));
        if !busy && !nap.is_zero() {
            self.ring.turn_or_sleep(Some(nap)).expect("the ring sleeps");
            self.device.poll(Clock.now());
        }
    }

    /// Sleeps until the device wakes the shard, for at most `most`. Returns false if that time
    /// elapses first.
    pub fn sleep(&mut self, most: Duration) -> bool {
        if self.woken.prepare_sleep() {
            self.ring.turn_or_sleep(Some(most)).expect("the ring sleeps");
        }
        self.woken.awake();
        self.woken.take().is_some()
    }

    /// Submits an IO and waits for its completion.
    pub fn run(&mut self, io: Io) -> IoStatus {
        let tag = io.tag;
        self.device.submit(io).expect("an idle device takes an IO");
        let end = Clock.now() + WAIT_MAX;
        loop {
            if let Some(done) = self.device.reap() {
                assert_eq!(done.tag, tag, "the completion of another IO");
                assert_eq!(self.device.inflight(), 0, "one IO, one completion");
                return done.status;
            }
            assert!(Clock.now() < end, "IO {tag} did not complete");
            self.turn();
        }
    }

    /// Waits until all IOs have completed. Returns their tags and statuses in order of completion.
    pub fn drain(&mut self) -> Vec<(u64, IoStatus)> {
        let end = Clock.now() + WAIT_MAX;
        let mut all = Vec::new();
        loop {
            while let Some(done) = self.device.reap() {
                all.push((done.tag, done.status));
            }
            if self.device.inflight() == 0 {
                return all;
            }
            assert!(Clock.now() < end, "{} IOs did not complete", self.device.inflight());
            self.turn();
        }
    }

    /// Writes bytes, from memory at `at` in the region.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8], at: usize, fua: bool) -> IoStatus {
        self.region.copy_in(at, bytes);
        let mut io = self.transfer(IoOp::Write, offset, at, bytes.len());
        io.flags.fua = fua;
        self.run(io)
    }

    /// Writes bytes.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> IoStatus {
        self.write_at(offset, bytes, 0, false)
    }

    /// Reads bytes, into memory at `at` in the region.
    pub fn read_at(&mut self, offset: u64, len: usize, at: usize) -> Vec<u8> {
        let buf: MemSlice = self.region.slice(at, len).expect("within the region");
        buf.fill(0xa5);
        let io = self.transfer(IoOp::Read, offset, at, len);
        assert_eq!(self.run(io), IoStatus::Ok, "read {offset}+{len}");
        buf.to_vec()
    }

    /// Reads bytes.
    pub fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        self.read_at(offset, len, 0)
    }

    /// Runs a discard or a write of zeroes.
    pub fn clear(&mut self, op: IoOp, offset: u64, len: u64, flags: IoFlags) -> IoStatus {
        let io = self.io(op, offset, u32::try_from(len).expect("a short range"));
        self.run(Io { flags, ..io })
    }
}

/// A small random number generator (SplitMix64), so that the suite is the same in every run.
#[derive(Debug)]
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }

    #[allow(clippy::cast_possible_truncation, reason = "the low byte is wanted")]
    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let start = self.roll(256) as usize;
        (0..len).map(|i| (start + i + i / 251) as u8 | 1).collect()
    }
}

/// Runs the whole suite. Overwrites data at both ends of the device.
pub fn run(source: &Arc<dyn BlockSource>, keeps: Keeps) {
    geometry_is_valid(&**source);
    invalid_io_is_refused(&**source);
    flush_succeeds(&**source);
    every_io_ends_once_and_a_full_device_returns_it(&**source);
    if source.geometry().read_only {
        read_only_devices_are_not_changed(&**source);
    } else {
        both_ends_of_the_device_are_written(&**source, keeps);
        random_io_matches_a_model(&**source, keeps);
        cleared_ranges_read_as_specified(&**source, keeps);
        holes_read_as_zeroes(&**source);
        cores_see_each_others_writes(source, keeps);
    }
    a_dropped_device_releases_memory(&**source);
}

fn geometry_is_valid(source: &dyn BlockSource) {
    let g = source.geometry();
    assert!(g.logical_block.is_power_of_two() && g.logical_block >= 512, "{g:?}");
    assert!(g.physical_block.is_power_of_two() && g.physical_block >= g.logical_block, "{g:?}");
    assert!(g.size >= u64::from(g.logical_block), "{g:?}");
    assert!(g.size.is_multiple_of(u64::from(g.logical_block)), "{g:?}");
    let least = g.io_max.min(g.discard_max).min(g.zeroes_max);
    assert!(least >= g.logical_block, "{g:?}");
    assert!(!g.discard || g.discard_granularity >= g.logical_block, "{g:?}");
    assert!(!g.fast_zero || g.write_zeroes, "{g:?}");
    assert!(!g.read_only || !(g.discard || g.write_zeroes), "{g:?}");
    assert!(g.extents, "every backend reports extents");
    let rig = Rig::new(source, 0);
    assert_eq!(*rig.device.geometry(), g, "device and source agree");
    assert_eq!((rig.device.inflight(), rig.device.deadline()), (0, None), "an idle device");
}

fn holes_read_as_zeroes(source: &dyn BlockSource) {
    let mut rig = Rig::new(source, 0);
    let window = WINDOW.min(source.geometry().size);
    let block = source.geometry().logical_block as usize;
    let io = rig.transfer(IoOp::Write, 0, 0, block);
    rig.region.fill(0, block, 7);
    assert_eq!(rig.run(io), IoStatus::Ok);
    let room = 2 << 20;
    let answer = rig.region.slice(room, extents::LEN_MAX).expect("within the region");
    let mut at = 0;
    while at < window {
        let len = u32::try_from(window - at).expect("a short window");
        let io = Io { len, ..rig.transfer(IoOp::Extents, at, room, answer.len()) };
        assert_eq!(rig.run(io), IoStatus::Ok);
        let mut list = Vec::new();
        let good = extents::read(&answer, len, |extent| {
            list.push(extent);
            true
        });
        assert!(good, "no extents at {at}");
        for Extent { len, hole } in list {
            assert!(len.is_multiple_of(block as u64) && !(hole && at == 0), "{len} bytes at {at}");
            let len = usize::try_from(len).expect("a short extent");
            let io = rig.transfer(IoOp::Read, at, 0, len);
            if hole {
                assert_eq!(rig.run(io), IoStatus::Ok);
                let data = rig.region.slice(0, len).expect("within the region").to_vec();
                assert!(data.iter().all(|byte| *byte == 0), "a hole at {at} has data");
            }
            at += len as u64;
        }
    }
}

fn invalid_io_is_refused(source: &dyn BlockSource) {
    let mut rig = Rig::new(source, 0);
    let g = source.geometry();
    let block = g.logical_block as usize;
    let writes = if g.read_only { IoStatus::ReadOnly } else { IoStatus::NoSpace };
    for offset in [g.size, g.size + (1 << 40), u64::MAX - g.size % 4096 - 4095] {
        let offset = offset / block as u64 * block as u64;
        let io = rig.transfer(IoOp::Read, offset, 0, block);
        assert_eq!(rig.run(io), IoStatus::Invalid, "read at {offset}");
        let io = rig.transfer(IoOp::Write, offset, 0, block);
        assert_eq!(rig.run(io), writes, "write at {offset}");
        for op in [IoOp::Discard, IoOp::WriteZeroes] {
            let status = rig.clear(op, offset, block as u64, IoFlags::default());
            assert_eq!(status, writes, "{op:?} at {offset}");
        }
    }
    let last = g.size - block as u64;
    let io = rig.transfer(IoOp::Read, last, 0, 2 * block);
    assert_eq!(rig.run(io), IoStatus::Invalid, "a read beyond the end");
    let io = rig.transfer(IoOp::Write, last, 0, 2 * block);
    assert_eq!(rig.run(io), writes, "a write beyond the end");
    for (offset, len) in [(1, block), (0, block - 1), (0, 0), (0, 1)] {
        let io = rig.transfer(IoOp::Read, offset, 0, len);
        assert_eq!(rig.run(io), IoStatus::Invalid, "read {offset}+{len}");
    }
    let io = rig.io(IoOp::Read, 0, g.logical_block);
    assert_eq!(rig.run(io), IoStatus::Invalid, "a read without a buffer");
    let mut io = rig.transfer(IoOp::Read, 0, 0, block);
    io.buf = rig.region.slice(0, block - 1);
    assert_eq!(rig.run(io), IoStatus::Invalid, "a buffer of another length");
    assert!(rig.read(0, block).len() == block, "valid IO is still served");
}

fn flush_succeeds(source: &dyn BlockSource) {
    let mut rig = Rig::new(source, 0);
    let io = rig.io(IoOp::Flush, 0, 0);
    assert_eq!(rig.run(io), IoStatus::Ok);
}

fn read_only_devices_are_not_changed(source: &dyn BlockSource) {
    let mut rig = Rig::new(source, 0);
    let block = source.geometry().logical_block;
    let before = rig.read(0, block as usize);
    assert_eq!(rig.write(0, &vec![0x5a; block as usize]), IoStatus::ReadOnly);
    for op in [IoOp::Discard, IoOp::WriteZeroes] {
        let status = rig.clear(op, 0, u64::from(block), IoFlags::default());
        assert_eq!(status, IoStatus::ReadOnly);
    }
    assert_eq!(rig.read(0, block as usize), before);
}

fn both_ends_of_the_device_are_written(source: &dyn BlockSource, keeps: Keeps) {
    let mut rig = Rig::new(source, 0);
    let mut dice = Dice(1);
    let g = source.geometry();
    let block = u64::from(g.logical_block);
    let largest = g.size.min(WINDOW) / block * block;
    for len in [block, largest] {
        for offset in [0, g.size - len] {
            for fua in [false, g.fua] {
                // A buffer at an odd address must work too.
                for at in [0, 8192, 8192 + 512, 8192 + 3] {
                    let bytes = dice.bytes(usize::try_from(len).expect("short"));
                    assert_eq!(rig.write_at(offset, &bytes, at, fua), IoStatus::Ok);
                    let got = rig.read_at(offset, bytes.len(), at);
                    match keeps {
                        Keeps::Data => assert!(got == bytes, "{offset}+{len} from {at}"),
                        Keeps::Nothing => assert!(got.iter().all(|b| *b == 0)),
                    }
                }
            }
        }
    }
}

/// Compares the results of random operations with a plain vector. In the model, `None` is discarded
/// data, whose content is unknown.
#[allow(clippy::cast_possible_truncation, reason = "all numbers are below the window")]
fn random_io_matches_a_model(source: &dyn BlockSource, keeps: Keeps) {
    let g = source.geometry();
    let block = u64::from(g.logical_block);
    let window = g.size.min(WINDOW) / block * block;
    for base in [0, g.size - window] {
        let mut rig = Rig::new(source, 0);
        let mut dice = Dice(base ^ 7);
        let mut model: Vec<Option<u8>> = vec![None; window as usize];
        for step in 0..400 {
            let from = dice.roll(window / block) * block;
            let len = (1 + dice.roll(((window - from) / block).min(129))) * block;
            let (len, from) = (len.min(window - from), from as usize);
            let range = from..from + len as usize;
            let flags = IoFlags {
                fua: g.fua && dice.roll(8) == 0,
                no_unmap: dice.roll(2) == 0,
                fast_only: false,
                partial: false,
            };
            let offset = base + from as u64;
            match dice.roll(8) {
                0..=2 => {
                    let bytes = dice.bytes(len as usize);
                    let at = dice.roll(4096) as usize;
                    assert_eq!(rig.write_at(offset, &bytes, at, flags.fua), IoStatus::Ok);
                    for (m, b) in model[range].iter_mut().zip(bytes) {
                        *m = Some(if keeps == Keeps::Data { b } else { 0 });
                    }
                }
                3 if g.write_zeroes => {
                    let status = rig.clear(IoOp::WriteZeroes, offset, len, flags);
                    assert_eq!(status, IoStatus::Ok, "step {step}: zeroes {offset}+{len}");
                    model[range].fill(Some(0));
                }
                4 if g.discard => {
                    let status = rig.clear(IoOp::Discard, offset, len, flags);
                    assert_eq!(status, IoStatus::Ok, "step {step}: discard {offset}+{len}");
                    model[range].fill(None);
                }
                _ => {
                    let at = dice.roll(4096) as usize;
                    let got = rig.read_at(offset, len as usize, at);
                    let wrong =
                        got.iter().zip(&model[range]).position(|(g, m)| m.is_some_and(|m| m != *g));
                    assert_eq!(wrong, None, "step {step}: read {offset}+{len}");
                }
            }
        }
    }
}

fn cleared_ranges_read_as_specified(source: &dyn BlockSource, keeps: Keeps) {
    let mut rig = Rig::new(source, 0);
    let g = source.geometry();
    let block = u64::from(g.logical_block);
    let plain = IoFlags::default();
    if !g.discard {
        assert_eq!(rig.clear(IoOp::Discard, 0, block, plain), IoStatus::Unsupported);
    }
    if !g.write_zeroes {
        assert_eq!(rig.clear(IoOp::WriteZeroes, 0, block, plain), IoStatus::Unsupported);
    }
    let window = g.size.min(WINDOW) / block * block;
    if window < 3 * block {
        return;
    }
    let inner = block..window - block;
    let full = vec![0x77; usize::try_from(window).expect("short")];
    for op in [IoOp::Discard, IoOp::WriteZeroes] {
        if !(if op == IoOp::Discard { g.discard } else { g.write_zeroes }) {
            continue;
        }
        for bits in 0..8 {
            let flags = IoFlags {
                fua: g.fua && bits & 1 != 0,
                no_unmap: bits & 2 != 0,
                fast_only: bits & 4 != 0,
                partial: false,
            };
            assert_eq!(rig.write(0, &full), IoStatus::Ok);
            let status = rig.clear(op, inner.start, inner.end - inner.start, flags);
            if op == IoOp::WriteZeroes && flags.fast_only && status == IoStatus::Unsupported {
                // Keeping the range allocated may be slow even if holes are fast.
                assert!(!g.fast_zero || flags.no_unmap, "fast zeroes were promised");
                continue;
            }
            assert_eq!(status, IoStatus::Ok, "{op:?} {flags:?}");
            let got = rig.read(0, full.len());
            let (first, last) = (inner.start as usize, inner.end as usize);
            if op == IoOp::WriteZeroes {
                assert!(got[first..last].iter().all(|b| *b == 0), "{flags:?}");
            }
            if keeps == Keeps::Data {
                let outside = got[..first].iter().chain(&got[last..]);
                assert!(outside.copied().all(|b| b == 0x77), "{op:?} {flags:?} exceeded its range");
            }
        }
    }
}

fn every_io_ends_once_and_a_full_device_returns_it(source: &dyn BlockSource) {
    let mut rig = Rig::new(source, 0);
    let g = source.geometry();
    let block = g.logical_block as usize;
    let blocks = (g.size.min(WINDOW) / block as u64).max(1);
    let (mut taken, mut refused) = (HashSet::new(), None);
    for i in 0..1 << 16 {
        let offset = i % blocks * block as u64;
        let io = rig.transfer(IoOp::Read, offset, (i as usize % 512) * block, block);
        let tag = io.tag;
        match rig.device.submit(io) {
            Ok(()) => assert!(taken.insert(tag)),
            Err(back) => {
                assert_eq!((back.tag, back.offset), (tag, offset), "the same IO comes back");
                assert!(back.buf.is_some());
                refused = Some(back);
                break;
            }
        }
    }
    let refused = refused.expect("a bound on what is in flight");
    assert_eq!(rig.device.inflight(), taken.len());
    assert!(taken.len() >= 16, "room for several IOs");
    for (tag, status) in rig.drain() {
        assert_eq!(status, IoStatus::Ok);
        assert!(taken.remove(&tag), "a completion without its IO: {tag}");
    }
    assert!(taken.is_empty(), "IOs without completion: {taken:?}");
    assert_eq!(rig.run(refused), IoStatus::Ok, "there is room again");
}

/// Two shards write interleaved blocks concurrently; each then reads all of them.
fn cores_see_each_others_writes(source: &Arc<dyn BlockSource>, keeps: Keeps) {
    let g = source.geometry();
    let block = g.logical_block as usize;
    let blocks = (g.size / block as u64).min(256);
    let expected = move |index: u64, core: u64| vec![(index * 2 + core) as u8 | 1; block];
    let write = |core: u64| {
        let source = Arc::clone(source);
        std::thread::spawn(move || {
            let mut rig = Rig::new(&*source, u16::try_from(core).expect("0 or 1"));
            let mut count = 0;
            for round in 0..4 {
                for index in (0..blocks).filter(|i| i % 2 == core) {
                    let at = usize::try_from(index).expect("small") * block;
                    rig.region.copy_in(at, &expected(index + round, core));
                    let io = rig.transfer(IoOp::Write, index * block as u64, at, block);
                    rig.device.submit(io).expect("room for 256 IOs");
                    count += 1;
                }
                for (_, status) in rig.drain() {
                    assert_eq!(status, IoStatus::Ok);
                    count -= 1;
                }
                assert_eq!(count, 0, "one completion per IO");
            }
        })
    };
    let threads = [write(0), write(1)];
    for thread in threads {
        thread.join().expect("a core's writes");
    }
    for core in 0..2 {
        let mut rig = Rig::new(&**source, core);
        for index in 0..blocks {
            let got = rig.read(index * block as u64, block);
            match keeps {
                Keeps::Data => assert_eq!(got, expected(index + 3, index % 2), "block {index}"),
                Keeps::Nothing => assert!(got.iter().all(|b| *b == 0)),
            }
        }
    }
}

fn a_dropped_device_releases_memory(source: &dyn BlockSource) {
    let mut rig = Rig::new(source, 0);
    let block = source.geometry().logical_block as usize;
    for i in 0..64 {
        let io = rig.transfer(IoOp::Read, 0, i * block, block);
        rig.device.submit(io).expect("room for 64 IOs");
    }
    let Rig { device, ring, region, woken, .. } = rig;
    drop((device, woken));
    let end = Clock.now() + WAIT_MAX;
    while ring.running() > 0 || Arc::strong_count(&region) > 1 {
        assert!(Clock.now() < end, "a dropped device keeps operations or buffers");
        ring.turn_or_sleep(Some(Duration::from_millis(5))).expect("the ring turns");
    }
    let mut again = Rig::on(ring, source, 0);
    assert_eq!(again.read(0, block).len(), block, "the core can reopen it");
}
