//! Device in memory, served by threads that act like the client's shards.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use rtrs_core::block::{BlockDevice, Completion, Geometry, Io, IoOp};
use rtrs_core::mem::Region;
use rtrs_core::rt::{Inbox, PollPolicy, Ring, Sender, Shard, mailbox, run};
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant};

use crate::shared::Shared;
use crate::{Bound, Queues};

/// Size of a shard's buffers: so small that requests wait for them.
const BUFFERS: usize = 2 << 20;

/// IO that the device has run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ran {
    pub(super) op: IoOp,
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) fua: bool,
    pub(super) no_unmap: bool,
}

/// Disk, and switches for the behavior of its devices.
#[derive(Debug, Default)]
pub(super) struct Disk {
    pub(super) bytes: Mutex<Vec<u8>>,
    pub(super) ran: Mutex<Vec<Ran>>,
    /// Whether submitted IO is held.
    pub(super) holds: AtomicBool,
    /// Size of the IOs that fail; 0 for none.
    pub(super) fails: AtomicU32,
    /// Queue depth; 0 for no limit.
    pub(super) depth: AtomicU32,
    /// New size in bytes, adopted on the next turn; 0 for no change.
    pub(super) size: AtomicU64,
    /// Whether the device no longer supports discard and write zeroes.
    pub(super) is_plain: AtomicBool,
    /// Whether cancels are ignored.
    pub(super) keeps: AtomicBool,
    /// Whether another session may still write.
    pub(super) is_shared: AtomicBool,
    /// Number of times that the device was claimed.
    pub(super) claims: AtomicU32,
    /// Number of times that a claim was withdrawn.
    pub(super) releases: AtomicU32,
    /// Number of IOs submitted.
    pub(super) submitted: AtomicU32,
    /// Number of cancel calls.
    pub(super) cancels: AtomicU32,
}

impl Disk {
    pub(super) fn new(geometry: &Geometry) -> Arc<Self> {
        let disk = Arc::new(Self::default());
        *disk.bytes.lock().unwrap() = vec![0; geometry.size as usize];
        disk
    }

    /// Number of IOs executed.
    pub(super) fn count(&self) -> usize {
        self.ran.lock().unwrap().len()
    }

    pub(super) fn take_ran(&self) -> Vec<Ran> {
        std::mem::take(&mut self.ran.lock().unwrap())
    }
}

#[derive(Debug)]
struct Device {
    geometry: Geometry,
    disk: Arc<Disk>,
    queue: VecDeque<Io>,
    done: VecDeque<Completion>,
}

impl Device {
    fn run(&self, io: &Io) -> IoStatus {
        let status = self.geometry.check(io);
        let Io { op, flags, offset, len, .. } = *io;
        let ran = Ran { op, offset, len, fua: flags.fua, no_unmap: flags.no_unmap };
        self.disk.ran.lock().unwrap().push(ran);
        if !status.is_ok() {
            return status;
        }
        if self.disk.fails.load(Ordering::SeqCst) == len && len > 0 {
            return IoStatus::Io;
        }
        let mut bytes = self.disk.bytes.lock().unwrap();
        let range = offset as usize..offset as usize + len as usize;
        match (op, &io.buf) {
            (IoOp::Read, Some(buf)) => buf.copy_in(0, &bytes[range]),
            (IoOp::Write, Some(buf)) => buf.copy_out(0, &mut bytes[range]),
            (IoOp::WriteZeroes | IoOp::Discard, None) => bytes[range].fill(0),
            _ => {}
        }
        IoStatus::Ok
    }
}

impl BlockDevice for Device {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn attach_region(&mut self, _region: &Arc<Region>) -> std::io::Result<()> {
        Ok(())
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        let depth = self.disk.depth.load(Ordering::SeqCst) as usize;
        if depth > 0 && self.inflight() >= depth {
            return Err(io);
        }
        self.queue.push_back(io);
        self.disk.submitted.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Executes queued IO, newest first.
    fn poll(&mut self, _now: Instant) -> bool {
        let size = self.disk.size.load(Ordering::SeqCst);
        self.geometry.size = if size > 0 { size } else { self.geometry.size };
        if self.disk.is_plain.load(Ordering::SeqCst) {
            (self.geometry.discard, self.geometry.write_zeroes) = (false, false);
        }
        let any = !self.queue.is_empty() && !self.disk.holds.load(Ordering::SeqCst);
        while any && let Some(io) = self.queue.pop_back() {
            let status = self.run(&io);
            self.done.push_back(Completion::new(io.tag, status));
        }
        any
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    fn cancel(&mut self, fits: &dyn Fn(u64) -> bool) {
        self.disk.cancels.fetch_add(1, Ordering::SeqCst);
        if self.disk.keeps.load(Ordering::SeqCst) {
            return;
        }
        let done = &mut self.done;
        self.queue.retain(|io| {
            let is_kept = !fits(io.tag);
            if !is_kept {
                done.push_back(Completion::new(io.tag, IoStatus::Aborted));
            }
            is_kept
        });
    }

    fn claim(&mut self) -> bool {
        self.disk.claims.fetch_add(1, Ordering::SeqCst);
        !self.disk.is_shared.load(Ordering::SeqCst)
    }

    fn release_claim(&mut self) {
        self.disk.releases.fetch_add(1, Ordering::SeqCst);
    }

    fn inflight(&self) -> usize {
        self.queue.len() + self.done.len()
    }
}

/// Command to a shard.
enum Order {
    /// Run one more turn.
    Look,
    /// End like a process that is killed.
    Kill,
    /// End like a process that detaches the volume.
    Stop,
    /// End like a process that detaches the volume and has no time left.
    Abort,
}

struct TestShard {
    queues: Queues,
    inbox: Inbox<Order>,
    is_stopping: bool,
    is_done: bool,
}

impl Shard for TestShard {
    type Message = Order;

    fn turn(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some(order) = self.inbox.take() {
            any = true;
            match order {
                Order::Look => {}
                Order::Kill => self.is_done = true,
                Order::Stop => {
                    self.queues.stop();
                    self.is_stopping = true;
                }
                Order::Abort => {
                    self.queues.stop();
                    self.queues.abort();
                    self.is_stopping = true;
                }
            }
        }
        if self.is_done {
            return true;
        }
        any |= self.queues.turn(now);
        self.is_done = self.is_stopping && self.queues.is_idle();
        any
    }

    fn deadline(&self) -> Option<Instant> {
        self.queues.deadline()
    }

    fn has_input(&self) -> bool {
        self.queues.has_input()
    }

    fn prepare_sleep(&mut self) -> bool {
        self.queues.prepare_sleep()
    }

    fn is_done(&self) -> bool {
        self.is_done
    }

    fn inbox(&mut self) -> Option<&mut Inbox<Order>> {
        Some(&mut self.inbox)
    }
}

/// Device that is served on a socket.
pub(super) struct Rig {
    pub(super) socket: PathBuf,
    pub(super) disk: Arc<Disk>,
    shared: Arc<Shared>,
    shards: Vec<(Sender<Order>, JoinHandle<()>)>,
}

impl Rig {
    /// Serves a new disk on `shards` shards.
    pub(super) fn new(name: &str, geometry: &Geometry, shards: u16) -> Self {
        Self::on(name, geometry, shards, Disk::new(geometry))
    }

    /// Serves a disk.
    pub(super) fn on(name: &str, geometry: &Geometry, shards: u16, disk: Arc<Disk>) -> Self {
        Self::of(name, geometry, disk, Shared::new("volume", shards).unwrap())
    }

    /// Serves a disk with the given shared state.
    pub(super) fn of(name: &str, geometry: &Geometry, disk: Arc<Disk>, shared: Shared) -> Self {
        let file = format!("rtrs-vhost-{name}-{}", std::process::id());
        let socket = std::env::temp_dir().join(file);
        let seats = Bound::new(&socket).unwrap().seats_of(shared).unwrap();
        let shared = Arc::clone(&seats[0].shared);
        let start = |seat| {
            let (sender, mailbox) = mailbox().unwrap();
            let device = Device {
                geometry: geometry.clone(),
                disk: Arc::clone(&disk),
                queue: VecDeque::new(),
                done: VecDeque::new(),
            };
            let run = move || {
                let ring = Ring::new(64).unwrap();
                let inbox = mailbox.arm(&ring).unwrap();
                let mut queues = Queues::new(&ring, Box::new(device), seat, BUFFERS).unwrap();
                queues.serve().unwrap();
                let mut shard = TestShard { queues, inbox, is_stopping: false, is_done: false };
                let poll = PollPolicy { budget_max: Duration::from_micros(50) };
                run(&ring, poll, &mut shard).unwrap();
            };
            (sender, thread::spawn(run))
        };
        let shards = seats.into_iter().map(start).collect();
        Self { socket, disk, shared, shards }
    }

    pub(super) fn has_only_kicks(&self) -> bool {
        self.shared.has_only_kicks()
    }

    /// Makes the device hold IO, or releases it.
    pub(super) fn hold(&self, holds: bool) {
        self.disk.holds.store(holds, Ordering::SeqCst);
        self.look();
    }

    /// Waits until a ring has claimed the device.
    pub(super) fn wait_for_claim(&self) {
        wait_for(&self.disk.claims, 1);
    }

    /// Waits until the claim has been withdrawn.
    pub(super) fn wait_for_release(&self) {
        wait_for(&self.disk.releases, 1);
    }

    /// Lets the device be exclusive.
    pub(super) fn promote(&self) {
        self.disk.is_shared.store(false, Ordering::SeqCst);
        self.look();
    }

    /// Waits until `submitted` IOs have been submitted since the start.
    pub(super) fn wait_for(&self, submitted: u32) {
        wait_for(&self.disk.submitted, submitted);
    }

    /// Makes each shard run one more turn.
    pub(super) fn look(&self) {
        self.shards.iter().for_each(|(orders, _)| orders.send(Order::Look));
    }

    /// Ends the shards like those of a process that is killed.
    pub(super) fn kill(self) -> Arc<Disk> {
        self.end(|| Order::Kill)
    }

    /// Ends the shards like those of a process that detaches the volume.
    pub(super) fn stop(self) -> Arc<Disk> {
        self.end(|| Order::Stop)
    }

    /// Ends the shards like those of a process that has no time left.
    pub(super) fn abort(self) -> Arc<Disk> {
        self.end(|| Order::Abort)
    }

    /// Aborts the device of a rig with one shard, and lets its held IO end only after the abort.
    pub(super) fn abort_held(self) -> Arc<Disk> {
        self.disk.keeps.store(true, Ordering::SeqCst);
        self.shards[0].0.send(Order::Abort);
        wait_for(&self.disk.cancels, 1);
        self.hold(false);
        self.end(|| Order::Look)
    }

    fn end(self, order: fn() -> Order) -> Arc<Disk> {
        for (orders, thread) in self.shards {
            orders.send(order());
            thread.join().unwrap();
        }
        self.disk
    }
}

fn wait_for(counter: &AtomicU32, count: u32) {
    let begin = std::time::Instant::now();
    while counter.load(Ordering::SeqCst) < count {
        assert!(begin.elapsed().as_secs() < 60, "the counter does not reach {count}");
        thread::yield_now();
    }
}

/// Returns the geometry of a disk that supports discard and write zeroes.
pub(super) fn geometry() -> Geometry {
    Geometry {
        discard: true,
        discard_granularity: 512,
        write_zeroes: true,
        ..Geometry::plain(16 << 20)
    }
}
