//! An in-memory block device with switches: slow, out of order, failing, with a short queue, held.
//!
//! Bytes move when an IO completes, not when it is submitted, so a buffer that is reused too early
//! shows up as wrong data.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rtrs_core::block::{BlockDevice, Completion, Geometry, Io, IoOp};
use rtrs_core::extents::{Extent, ExtentList};
use rtrs_core::losses::Losses;
use rtrs_core::mem::MemSlice;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

/// Switches and counters shared with the test.
#[derive(Debug, Default)]
pub(crate) struct Switches {
    /// May be shared by several devices.
    pub(crate) disk: Arc<Mutex<Vec<u8>>>,
    /// Nothing completes while this is set.
    pub(crate) hold: AtomicBool,
    /// IO in flight is reported as abandoned; cleared after the report.
    pub(crate) give_up: AtomicBool,
    /// Every IO completes twice, and IOs that were never submitted are reported as abandoned.
    pub(crate) lie: AtomicBool,
    /// The newest IO completes first.
    pub(crate) reverse: AtomicBool,
    /// Every n-th data IO fails; 0 for none.
    pub(crate) fail_every: AtomicU32,
    /// Queue depth of the device; 0 for no limit.
    pub(crate) fill: AtomicU32,
    pub(crate) delay_us: AtomicU64,
    pub(crate) submitted: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) durable: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) len_max: AtomicU32,
    pub(crate) zeroed: AtomicU64,
    pub(crate) discards: AtomicU64,
    pub(crate) kept_allocated: AtomicU64,
    pub(crate) losses: Arc<Losses>,
    /// Answer to extents requests in place of the real one: 1 not supported, 2 garbage, 3 a hole up
    /// to the end of the device.
    pub(crate) extents: AtomicU32,
    /// Number of bytes available for the answer to the last extents request.
    pub(crate) extents_room: AtomicUsize,
    /// Size in bytes that takes effect in the next turn; 0 for no change.
    pub(crate) resize: AtomicU64,
    /// Block size in bytes that takes effect in the next turn; 0 for no change.
    pub(crate) reblock: AtomicU32,
    /// Partial writes are refused, regardless of the geometry.
    pub(crate) no_partial: AtomicBool,
}

impl Switches {
    /// Records the memory of an extents request. Returns the kind of answer to give.
    fn asked_extents(&self, room: &MemSlice) -> u32 {
        self.extents_room.store(room.len(), SeqCst);
        self.extents.load(SeqCst)
    }
}

#[derive(Debug)]
pub(crate) struct TestDevice {
    geometry: Geometry,
    switches: Arc<Switches>,
    queue: VecDeque<(Instant, Io)>,
    done: VecDeque<Completion>,
    given_up: VecDeque<u64>,
    now: Instant,
    count: u32,
}

impl TestDevice {
    pub(crate) fn new(geometry: Geometry, switches: Arc<Switches>) -> Self {
        // Beyond the first 64 MiB, a huge device contains only zeroes.
        let real = if geometry.size > 1 << 30 { 64 << 20 } else { geometry.size };
        switches.disk.lock().unwrap().resize(usize::try_from(real).unwrap(), 0);
        let (queue, done, given_up) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        Self { geometry, switches, queue, done, given_up, now: Instant::ZERO, count: 0 }
    }

    fn run(&mut self, io: &Io) -> IoStatus {
        let status = self.geometry.check(io);
        if status != IoStatus::Ok {
            return status;
        }
        if io.flags.partial && self.switches.no_partial.load(SeqCst) {
            return IoStatus::Unsupported;
        }
        self.count += 1;
        let every = self.switches.fail_every.load(SeqCst);
        if every > 0 && self.count.is_multiple_of(every) {
            return IoStatus::Io;
        }
        let mut disk = self.switches.disk.lock().unwrap();
        let from = usize::try_from(io.offset).unwrap();
        let range = from.min(disk.len())..(from + io.len as usize).min(disk.len());
        match (io.op, &io.buf) {
            (IoOp::Read, Some(buf)) => buf.copy_in(0, &disk[range]),
            (IoOp::Write, Some(buf)) => buf.copy_out(0, &mut disk[range]),
            (IoOp::WriteZeroes, _) => {
                disk[range].fill(0);
                self.switches.zeroed.fetch_add(u64::from(io.len), SeqCst);
            }
            (IoOp::Discard, _) => {
                self.switches.discards.fetch_add(1, SeqCst);
            }
            (IoOp::Extents, Some(room)) => match self.switches.asked_extents(room) {
                1 => return IoStatus::Unsupported,
                2 => room.fill(0),
                3 => {
                    let len = self.geometry.size - io.offset;
                    ExtentList::new(room).push(Extent { len, hole: true });
                }
                _ => {
                    // A block of zeroes counts as a hole.
                    let mut list = ExtentList::new(room);
                    let block = self.geometry.logical_block as usize;
                    for block in disk[range].chunks(block) {
                        let hole = block.iter().all(|byte| *byte == 0);
                        if !list.push(Extent { len: block.len() as u64, hole }) {
                            break;
                        }
                    }
                }
            },
            (IoOp::Flush, _) => {
                self.switches.flushes.fetch_add(1, SeqCst);
            }
            _ => return IoStatus::Invalid,
        }
        if io.flags.fua {
            self.switches.durable.fetch_add(1, SeqCst);
        }
        if io.flags.no_unmap {
            self.switches.kept_allocated.fetch_add(1, SeqCst);
        }
        IoStatus::Ok
    }

    fn step(&mut self) -> bool {
        if self.switches.hold.load(SeqCst) || self.switches.give_up.load(SeqCst) {
            return false;
        }
        let mut any = false;
        while self.queue.iter().any(|(at, _)| *at <= self.now) {
            let reverse = self.switches.reverse.load(SeqCst);
            let next =
                if reverse { self.queue.pop_back() } else { self.queue.pop_front() }.unwrap();
            let status = self.run(&next.1);
            let done = Completion::new(next.1.tag, status);
            self.done.push_back(done);
            if self.switches.lie.load(SeqCst) {
                self.done.push_back(done);
                self.given_up.extend([done.tag, 3 << 32, u64::from(u32::MAX)]);
            }
            any = true;
        }
        any
    }
}

impl BlockDevice for TestDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        let fill = self.switches.fill.load(SeqCst) as usize;
        if fill > 0 && self.queue.len() + self.done.len() >= fill {
            self.switches.refused.fetch_add(1, SeqCst);
            return Err(io);
        }
        self.switches.submitted.fetch_add(1, SeqCst);
        self.switches.len_max.fetch_max(io.len, SeqCst);
        let delay = Duration::from_micros(self.switches.delay_us.load(SeqCst));
        self.queue.push_back((self.now + delay, io));
        Ok(())
    }

    fn poll(&mut self, now: Instant) -> bool {
        self.now = now;
        let size = self.switches.resize.load(SeqCst);
        if size > 0 && size != self.geometry.size {
            self.geometry.size = size;
            self.switches.disk.lock().unwrap().resize(usize::try_from(size).unwrap(), 0);
        }
        let block = self.switches.reblock.load(SeqCst);
        if block > 0 {
            self.geometry.logical_block = block;
        }
        self.step()
    }

    fn take_given_up(&mut self) -> Option<u64> {
        if self.switches.give_up.swap(false, SeqCst) {
            self.given_up.extend(self.queue.iter().map(|(_, io)| io.tag));
        }
        self.given_up.pop_front()
    }

    fn reap(&mut self) -> Option<Completion> {
        if self.done.is_empty() && self.switches.delay_us.load(SeqCst) == 0 {
            self.step();
        }
        self.done.pop_front()
    }

    fn inflight(&self) -> usize {
        self.queue.len() + self.done.len()
    }

    fn take_losses(&mut self) -> Option<Arc<Losses>> {
        Some(Arc::clone(&self.switches.losses))
    }

    fn deadline(&self) -> Option<Instant> {
        (!self.queue.is_empty()).then(|| self.now + Duration::from_micros(200))
    }
}
