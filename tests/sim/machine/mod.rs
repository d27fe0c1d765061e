//! Virtual machine as the user of a device: a driver that operates its rings by hand, over the
//! front end for vhost-user-blk.
//!
//! Each core of the client has one ring, whose driver is the core's workload. The rings, the
//! guest's memory and the record of requests in flight outlive the client; the front end, its
//! shards' state and the monitor's connection end with the process. Everything runs on the thread
//! of the simulation: `Process` plays the monitor, and a turn of a core runs the ring and the front
//! end until neither has work left.
//!
//! A process that *tears* dies at an access to the guest's memory or to the record, chosen by the
//! seed: between any two steps of taking or answering a request. The cluster then ends the client.
//!
//! The driver looks for answers only when the device calls, as a guest does, and checks for itself
//! what no oracle sees: each request is answered once, with a status and the right length, and a
//! new process repeats requests in the order in which they were offered.

mod order;

use std::cell::{RefCell, RefMut};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use rtrs_client::SessionDevice;
use rtrs_core::block::{BlockDevice, Completion, Geometry, Io, IoOp};
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::rt::Ring as KernelRing;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;
use vhost_bridge::Queues;
use vhost_bridge::driver::{Guest, GuestRing, Request, kind};
use vhost_bridge::stepped::{Process, SteppedRing, run_until_death};

use super::Failure;
use super::disk::SECTOR;
use super::options::MachineOptions;
use order::{Order, Watched};

/// Number of descriptors per ring: four for each slot of the guest's memory.
const RING_SIZE: u16 = 256;
/// Number of slots per core.
const SLOTS: u16 = 24;
/// Size of a buffer of the front end.
const BUFFER: usize = 256 << 10;
/// Maximum rounds of one turn before the ring and front end are considered to be looping.
const ROUNDS_MAX: u32 = 100_000;
/// Feature of rings with events.
const EVENT_IDX: u32 = 29;

/// Returns the bytes of the front end's buffers on one core.
pub(super) const fn buffer_bytes(options: MachineOptions) -> usize {
    options.buffers as usize * BUFFER
}

/// Virtual machine; clones refer to the same one.
#[derive(Clone)]
pub(super) struct Machine(Rc<RefCell<State>>);

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Machine").finish_non_exhaustive()
    }
}

/// Counters of a machine.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MachineStats {
    /// Processes that died while accessing memory.
    pub(super) torn: u64,
    /// Requests that a later process repeated or took over unanswered.
    pub(super) left: u64,
}

struct State {
    options: MachineOptions,
    guest: Guest,
    rings: Vec<SteppedRing>,
    process: Option<Process>,
    /// Number of accesses until the process dies.
    accesses: Option<u32>,
    /// Whether later processes die at accesses.
    tears: bool,
    is_dead: bool,
    prng: Prng,
    stats: MachineStats,
}

impl Machine {
    /// Starts a machine with a ring for each core.
    pub(super) fn new(options: MachineOptions, cores: u16, mut prng: Prng) -> Self {
        let mut guest = Guest::default();
        if !options.events {
            guest.wanted = !(1 << EVENT_IDX);
        }
        let first = options.first;
        let ring = |index| SteppedRing::new(index, RING_SIZE, first).expect("eventfds");
        let rings: Vec<_> = (0..cores).map(ring).collect();
        for ring in &rings {
            ring.ring.reset(&guest);
            ring.ring.ask_call(&guest);
        }
        let prng = prng.fork();
        Self(Rc::new(RefCell::new(State {
            options,
            guest,
            rings,
            process: None,
            accesses: None,
            tears: options.tears,
            is_dead: false,
            prng,
            stats: MachineStats::default(),
        })))
    }

    fn state(&self) -> RefMut<'_, State> {
        self.0.borrow_mut()
    }

    /// Starts a process of the client. The guest connects once its first core is open.
    pub(super) fn begin_life(&self) {
        let state = &mut *self.state();
        let shards = state.rings.len() as u16;
        state.process = Some(Process::new("vol", shards).expect("eventfds"));
        state.is_dead = false;
        state.accesses = None;
        if state.tears && state.prng.chance(Ratio::new(2, 3)) {
            let most = 1 << state.prng.range(4..=14);
            state.accesses = Some(1 + state.prng.below(most) as u32);
        }
    }

    /// Whether the process has died while accessing memory.
    pub(super) fn is_dead(&self) -> bool {
        self.state().is_dead
    }

    /// Prevents further processes from dying.
    pub(super) fn calm(&self) {
        let state = &mut *self.state();
        (state.tears, state.accesses) = (false, None);
    }

    pub(super) fn stats(&self) -> MachineStats {
        self.state().stats
    }
}

/// Front end of one core while its process lives.
#[derive(Debug)]
struct Running {
    queues: Queues,
    ring: Rc<KernelRing>,
    order: Rc<RefCell<Order>>,
}

/// Ring of one core, with its driver.
#[derive(Debug)]
pub(super) struct Front {
    machine: Machine,
    core: usize,
    geometry: Geometry,
    running: Option<Running>,
    /// Requests in the ring by slot, each with its number in the order in which they were offered.
    asked: BTreeMap<u16, (u64, Io)>,
    offered: u64,
    free: Vec<u16>,
    done: VecDeque<Completion>,
    failure: Option<Failure>,
}

impl Front {
    pub(super) fn new(machine: &Machine, core: usize) -> Self {
        let first = core as u16 * SLOTS;
        Self {
            machine: machine.clone(),
            core,
            geometry: Geometry::default(),
            running: None,
            asked: BTreeMap::new(),
            offered: 0,
            free: (first..first + SLOTS).rev().collect(),
            done: VecDeque::new(),
            failure: None,
        }
    }

    /// Starts the front end of a new process on this core.
    pub(super) fn start(&mut self, device: SessionDevice) {
        self.geometry = device.geometry().clone();
        let state = &mut *self.machine.state();
        let State { process, rings, guest, options, stats, .. } = state;
        let Some(process) = process else { return };
        let answered = rings[self.core].unseen(guest);
        let is_left = |(slot, _): &(&u16, &(u64, Io))| {
            !answered.iter().any(|head| GuestRing::slot(*head) == **slot)
        };
        let mut left: Vec<_> =
            self.asked.iter().filter(is_left).map(|(_, (at, io))| (*at, io.clone())).collect();
        left.sort_by_key(|(at, _)| *at);
        stats.left += left.len() as u64;
        let order = Order::new(left.into_iter().map(|(_, io)| io));
        let order = Rc::new(RefCell::new(order));
        let ring = KernelRing::new(64).expect("io_uring");
        let seat = process.take_seat(self.core).expect("a core opens its device once");
        let device = Box::new(Watched::new(device, Rc::clone(&order)));
        let queues = Queues::new(&ring, device, seat, buffer_bytes(*options))
            .expect("a session's device can be served");
        self.running = Some(Running { queues, ring, order });
        if self.core == 0 {
            let is_first = guest.kept_features.is_none();
            process.connect(guest, rings).expect("a guest that keeps to the rules");
            if is_first && options.through {
                process.set_writeback(false).expect("the cache mode");
            }
        }
    }

    /// Ends the front end as if its process had died.
    pub(super) fn stop(&mut self) {
        self.running = None;
    }

    /// Returns a violation that the driver has found.
    pub(super) fn take_failure(&mut self) -> Option<Failure> {
        self.failure.take()
    }

    /// Runs the front end until it has no more work, or dies. Returns whether anything happened.
    fn run(&mut self, now: Instant) -> bool {
        let Some(Running { queues, ring, .. }) = &mut self.running else { return false };
        let mut rounds = 0;
        loop {
            let mut accesses = self.machine.state().accesses;
            let mut any = ring.turn().expect("io_uring");
            accesses = run_until_death(accesses, || any |= queues.turn(now));
            if !any && !ring.has_submissions() {
                let mut is_quiet = false;
                accesses = run_until_death(accesses, || is_quiet = queues.prepare_sleep());
                any = !is_quiet;
            }
            let state = &mut *self.machine.state();
            (state.accesses, state.is_dead) = (accesses, accesses == Some(0));
            if state.is_dead {
                state.stats.torn += 1;
                return true;
            }
            if !any && !ring.has_submissions() {
                return rounds > 0;
            }
            rounds += 1;
            assert!(rounds < ROUNDS_MAX, "ring and front end do not become idle");
        }
    }

    /// Takes answers, if the device has called.
    fn take_answers(&mut self) -> bool {
        let state = &mut *self.machine.state();
        let ring = &mut state.rings[self.core];
        if !ring.take_call() {
            return false;
        }
        loop {
            while let Some((head, len)) = ring.ring.answer(&state.guest) {
                let slot = GuestRing::slot(head);
                let Some((_, io)) = self.asked.remove(&slot) else {
                    let text = format!("head {head} was answered but is not in the ring");
                    self.failure.get_or_insert_with(|| Failure::new("once", text));
                    continue;
                };
                self.free.push(slot);
                match judge(&state.guest, slot, len, &io) {
                    Ok(status) => self.done.push_back(Completion::new(io.tag, status)),
                    Err(failure) => {
                        self.failure.get_or_insert(failure);
                    }
                }
            }
            ring.ring.ask_call(&state.guest);
            if ring.unseen(&state.guest).is_empty() {
                return true;
            }
        }
    }
}

/// Returns the outcome of an answered request, and copies the data of a read to its memory.
fn judge(guest: &Guest, slot: u16, len: u32, io: &Io) -> Result<IoStatus, Failure> {
    let wrong =
        |what: String| Failure::new("once", format!("io {:#x} was answered {what}", io.tag));
    let status = match GuestRing::status(guest, slot) {
        0 => IoStatus::Ok,
        1 => IoStatus::Io,
        2 => IoStatus::Unsupported,
        other => return Err(wrong(format!("with status {other:#x}"))),
    };
    let data = if status.is_ok() && io.op == IoOp::Read { io.len } else { 0 };
    if len != data + 1 {
        return Err(wrong(format!("with {len} bytes instead of {}", data + 1)));
    }
    if let (IoOp::Read, IoStatus::Ok, Some(buf)) = (io.op, status, &io.buf) {
        buf.copy_in(0, &guest.read(GuestRing::data_at(slot), io.len as usize));
    }
    Ok(status)
}

impl BlockDevice for Front {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        let Some(slot) = self.free.pop() else { return Err(io) };
        let state = &mut *self.machine.state();
        let State { guest, rings, options, .. } = state;
        let ring = &mut rings[self.core];
        let sector = io.offset / SECTOR as u64;
        let range = |guest: &Guest| {
            let sectors = io.len / SECTOR as u32;
            let bytes = [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat();
            guest.write(GuestRing::data_at(slot), &bytes);
        };
        let request = match io.op {
            IoOp::Read => {
                guest.write(GuestRing::data_at(slot), &vec![0xdd; io.len as usize]);
                Request { kind: kind::READ, sector, len: io.len }
            }
            IoOp::Write => {
                let bytes = io.buf.as_ref().map(|buf| buf.to_vec()).unwrap_or_default();
                guest.write(GuestRing::data_at(slot), &bytes);
                Request { kind: kind::WRITE, sector, len: io.len }
            }
            IoOp::Discard | IoOp::WriteZeroes => {
                range(guest);
                let is_discard = io.op == IoOp::Discard;
                let kind = if is_discard { kind::DISCARD } else { kind::ZEROES };
                Request { kind, sector: 0, len: 16 }
            }
            _ => Request { kind: kind::FLUSH, sector: 0, len: 0 },
        };
        match options.indirect && request.len > 0 {
            true => ring.ring.start_cut(guest, slot, request, options.piece_max),
            false => ring.ring.start(guest, slot, request),
        }
        ring.kick(guest);
        if let Some(running) = &self.running {
            running.order.borrow_mut().offer(io.clone());
        }
        self.asked.insert(slot, (self.offered, io));
        self.offered += 1;
        Ok(())
    }

    fn poll(&mut self, now: Instant) -> bool {
        if self.machine.is_dead() {
            return false;
        }
        let mut any = self.run(now);
        if self.machine.is_dead() {
            return any;
        }
        any |= self.take_answers();
        if let Some(failure) = self.running.as_ref().and_then(|it| it.order.borrow_mut().take()) {
            self.failure.get_or_insert(failure);
        }
        any
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    fn inflight(&self) -> usize {
        self.asked.len() + self.done.len()
    }

    fn deadline(&self) -> Option<Instant> {
        self.running.as_ref().and_then(|running| running.queues.deadline())
    }
}
