//! Tests of the memory and null backends and of the layers, including the conformance suite.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, mpsc};

use crossbeam_queue::SegQueue;
use rtrs_core::block::{BlockDevice, BlockSource, Completion, Core, Geometry, Io, IoFlags, IoOp};
use rtrs_core::rt::Clock;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant};

use super::conformance::{Keeps, Rig, run};
use super::layer::{ErrorPlan, delay as delayed, errors, pause, read_only};
use super::memory::CHUNK;
use super::{INFLIGHT_MAX, MemorySource, NullSource, Target, open_target};
use crate::settings::ExportSpec;

fn memory(size: u64) -> Arc<dyn BlockSource> {
    Arc::new(MemorySource::new(size, 512))
}

#[test]
fn memory_conforms() {
    for size in [512, 4096 + 512, CHUNK as u64 + 512, 64 << 20, 1 << 40] {
        run(&memory(size), Keeps::Data);
    }
    let large: Arc<dyn BlockSource> = Arc::new(MemorySource::new(1 << 30, 4096));
    run(&large, Keeps::Data);
}

/// Memory whose IOs run on a separate thread, like those of a library with callbacks.
#[derive(Debug)]
struct ThreadSource(Arc<dyn BlockSource>);

impl BlockSource for ThreadSource {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn open(&self, core: &Core) -> io::Result<Box<dyn BlockDevice>> {
        let (ios, inbox) = mpsc::channel::<Io>();
        let ended = Arc::new(SegQueue::new());
        let (source, queue) = (Arc::clone(&self.0), Arc::clone(&ended));
        let (index, wake) = (core.index, core.wake.clone());
        std::thread::spawn(move || {
            let here = Core::without_ring(index);
            let mut device = source.open(&here).unwrap();
            for io in inbox {
                device.submit(io).unwrap();
                queue.push(device.reap().unwrap());
                wake.wake();
            }
        });
        let geometry = self.geometry();
        Ok(Box::new(ThreadDevice { geometry, ios, ended, done: VecDeque::new(), inflight: 0 }))
    }
}

#[derive(Debug)]
struct ThreadDevice {
    geometry: Geometry,
    ios: mpsc::Sender<Io>,
    ended: Arc<SegQueue<Completion>>,
    done: VecDeque<Completion>,
    inflight: usize,
}

impl BlockDevice for ThreadDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.inflight == INFLIGHT_MAX {
            return Err(io);
        }
        self.inflight += 1;
        self.ios.send(io).map_err(|error| error.0)
    }

    fn poll(&mut self, _now: Instant) -> bool {
        let before = self.done.len();
        self.done.extend(std::iter::from_fn(|| self.ended.pop()));
        self.done.len() > before
    }

    fn reap(&mut self) -> Option<Completion> {
        let done = self.done.pop_front();
        self.inflight -= usize::from(done.is_some());
        done
    }

    fn inflight(&self) -> usize {
        self.inflight
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }
}

#[test]
fn a_device_on_another_thread_conforms() {
    run(&(Arc::new(ThreadSource(memory(8 << 20))) as Arc<dyn BlockSource>), Keeps::Data);
}

#[test]
fn a_device_on_another_thread_wakes_its_core() {
    let source = ThreadSource(memory(1 << 20));
    let mut rig = Rig::new(&source, 0);
    for _ in 0..100 {
        let io = rig.transfer(IoOp::Read, 0, 0, 512);
        rig.device.submit(io).unwrap();
        assert!(rig.sleep(Duration::from_secs(60)), "not woken");
        assert!(rig.device.poll(Clock.now()) && rig.device.reap().is_some(), "woken for nothing");
    }
}

#[test]
fn null_conforms() {
    for size in [512, 1 << 40] {
        let source: Arc<dyn BlockSource> = Arc::new(NullSource::new(size, 512));
        run(&source, Keeps::Nothing);
    }
}

#[test]
fn memory_never_exceeds_its_size_and_is_freed() {
    let source = MemorySource::new(3 * CHUNK as u64 + 512, 512);
    let mut rig = Rig::new(&source, 0);
    assert_eq!(source.allocated(), 0);
    rig.read(0, 3 * CHUNK);
    assert_eq!(source.allocated(), 0, "reading allocates nothing");
    let all = vec![9; 3 * CHUNK + 512];
    for _ in 0..3 {
        assert_eq!(rig.write(0, &all), IoStatus::Ok);
        assert_eq!(source.allocated(), all.len() as u64);
    }
    let (chunk, plain) = (CHUNK as u64, IoFlags::default());
    assert_eq!(rig.clear(IoOp::Discard, 512, 2 * chunk, plain), IoStatus::Ok);
    assert_eq!(source.allocated(), 2 * chunk + 512, "one whole chunk was in the range");
    assert_eq!(rig.clear(IoOp::WriteZeroes, 3 * chunk, 512, plain), IoStatus::Ok);
    assert_eq!(source.allocated(), 2 * chunk, "the short last chunk is whole too");
    let keep = IoFlags { no_unmap: true, ..plain };
    assert_eq!(rig.clear(IoOp::WriteZeroes, 0, 3 * chunk, keep), IoStatus::Ok);
    assert_eq!(source.allocated(), 3 * chunk, "requested to stay allocated");
    assert!(rig.read(0, 3 * CHUNK).iter().all(|b| *b == 0));
}

#[test]
fn wrappers_conform() {
    let delay = Duration::from_micros(20);
    let sources: [Arc<dyn BlockSource>; 5] = [
        Arc::new(read_only(memory(1 << 20))),
        Arc::new(delayed(memory(1 << 20), delay)),
        Arc::new(errors(memory(1 << 20), ErrorPlan::default())),
        Arc::new(pause(memory(1 << 20)).0),
        Arc::new(delayed(Arc::new(pause(memory(8192)).0), delay)),
    ];
    for source in &sources {
        run(source, Keeps::Data);
    }
}

#[test]
fn a_delay_holds_io_and_keeps_its_order() {
    const COUNT: u32 = 40;
    let delay = Duration::from_secs(1);
    let source = delayed(memory(1 << 20), delay);
    let mut rig = Rig::new(&source, 0);
    let begin = Clock.now();
    let mut tags = Vec::new();
    for i in 0..u64::from(COUNT) {
        let io = rig.transfer(IoOp::Read, i * 512, 0, 512);
        tags.push(io.tag);
        rig.device.submit(io).unwrap();
    }
    let ended: Vec<u64> = rig.drain().into_iter().map(|(tag, _)| tag).collect();
    let took = Clock.now().since(begin);
    assert_eq!(ended, tags);
    assert!(took >= delay, "{took:?}");
    assert!(took < delay * COUNT, "IOs wait concurrently, not one after another: {took:?}");
}

#[test]
fn planned_errors_occur_and_change_nothing() {
    let every = ErrorPlan { every: 3, ops: vec![IoOp::Write], ..ErrorPlan::default() };
    let source = errors(memory(1 << 20), every);
    let mut rig = Rig::new(&source, 0);
    let statuses: Vec<_> = (1..=9).map(|i| rig.write(i * 512, &[7; 512])).collect();
    for (i, status) in (1u64..).zip(statuses) {
        let failed = i % 3 == 0;
        assert_eq!(status, if failed { IoStatus::Io } else { IoStatus::Ok });
        let byte = if failed { 0 } else { 7 };
        assert_eq!(rig.read(i * 512, 512), vec![byte; 512], "a failed write has no effect");
    }

    let (range, status) = (4096..4097, IoStatus::NoSpace);
    let bad = ErrorPlan { range, status, ..ErrorPlan::default() };
    let source = errors(memory(1 << 20), bad);
    let mut rig = Rig::new(&source, 0);
    assert_eq!(rig.write(4096, &[1; 512]), IoStatus::NoSpace);
    assert_eq!(rig.write(3584, &[1; 1024]), IoStatus::NoSpace);
    assert_eq!(rig.write(3584, &[1; 512]), IoStatus::Ok);
    assert_eq!(rig.write(4608, &[1; 512]), IoStatus::Ok);

    let count = |seed| {
        let plan = ErrorPlan { seed, ..ErrorPlan::per_million(100_000) };
        let source = errors(memory(1 << 20), plan);
        let mut rig = Rig::new(&source, 0);
        (0..2000).map(|_| !rig.write(0, &[1; 512]).is_ok()).collect::<Vec<bool>>()
    };
    let first = count(5);
    let failed = first.iter().filter(|failed| **failed).count();
    assert!((100..300).contains(&failed), "about a tenth of 2000: {failed}");
    assert!(first == count(5) && first != count(6), "a seed repeats a run");
}

#[test]
fn held_io_has_no_effect_until_released() {
    let (source, handle) = pause(memory(1 << 20));
    let mut rig = Rig::new(&source, 0);
    handle.hold(&[IoOp::Write]);
    for i in 0..4 {
        rig.region.copy_in(4096, &[1; 512]);
        let io = rig.transfer(IoOp::Write, i * 512, 4096, 512);
        rig.device.submit(io).unwrap();
    }
    let io = rig.transfer(IoOp::Read, 0, 0, 512);
    let read = io.tag;
    rig.device.submit(io).unwrap();
    for _ in 0..3 {
        rig.turn();
    }
    let done = rig.device.reap().unwrap();
    assert_eq!((done.tag, rig.device.reap()), (read, None), "only the read passes");
    assert_eq!(rig.region.slice(0, 512).unwrap().to_vec(), vec![0; 512]);
    assert_eq!((handle.held(), rig.device.inflight()), (4, 4));
    handle.release(1);
    rig.turn();
    assert!(rig.device.reap().is_some() && rig.device.reap().is_none());
    assert_eq!(handle.held(), 3);
    handle.release_all();
    let ended = rig.drain();
    assert_eq!((ended.len(), handle.held()), (3, 0));
    assert_eq!(rig.read(0, 2048), vec![1; 2048]);
    handle.hold_range(&[], 4096..8192);
    assert_eq!(rig.write(0, &[2; 4096]), IoStatus::Ok, "outside the range");
    let io = rig.transfer(IoOp::Read, 4096, 0, 512);
    rig.device.submit(io).unwrap();
    assert_eq!(handle.held(), 1);
    drop(rig);
    assert_eq!(handle.held(), 0, "a dropped device drops its IOs");
}

fn spec(text: &str) -> ExportSpec {
    text.parse().unwrap()
}

#[test]
fn a_spec_builds_a_stack_of_devices() {
    let source = open_target(&spec("mem:10000,block-size=4096")).unwrap();
    let g = source.geometry();
    assert_eq!((g.size, g.logical_block), (8192, 4096), "whole blocks only");

    let source = open_target(&spec("null:1T,ro")).unwrap();
    assert!(source.geometry().read_only);
    run(&source, Keeps::Nothing);

    let source = open_target(&spec("mem:4k,delay=1ms,error-rate=1")).unwrap();
    let mut rig = Rig::new(&*source, 0);
    assert_eq!(rig.write(0, &[0; 512]), IoStatus::Io);

    let all = spec("x=mem:1M,ro,direct=off,block-size=4096,delay=5ms,error-rate=0.25");
    let g = open_target(&all).unwrap().geometry();
    assert!(g.read_only && g.logical_block == 4096);
}

#[test]
fn invalid_specs_are_refused_with_a_reason() {
    let refuse = |text: &str| open_target(&spec(text)).unwrap_err().to_string();
    let text = refuse("mem:100");
    assert!(text.starts_with("mem:100 is smaller than one block of 512"), "{text}");
    let text = open_target(&ExportSpec::new(None, Target::Null(u64::MAX))).unwrap_err().to_string();
    assert!(text.contains("too large"), "{text}");
    for bytes in ["0", "100", "511", "8192", "4294967295"] {
        assert!(format!("mem:1M,block-size={bytes}").parse::<ExportSpec>().is_err(), "{bytes}");
    }
    let text = refuse("/nonexistent/disk");
    assert!(text.contains("/nonexistent/disk does not exist: No such file"), "{text}");
}
