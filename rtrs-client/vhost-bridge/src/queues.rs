//! Rings of a device on one shard: takes requests from the driver, and answers them.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;

use rtrs_core::block::{BlockDevice, Geometry, IoOp};
use rtrs_core::front_end::FrontEndStats;
use rtrs_core::mutated;
use rtrs_core::rt::{Clock, Inbox, Ring};
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant, earliest};

use crate::bells::{Bell, Kick};
use crate::chain::Chain;
use crate::command::{Action, Command, RingStart, Stopped};
use crate::config::RINGS_MAX;
use crate::fault::Fault;
use crate::ios::{Answer, Ios, Unanswered};
use crate::lines::Line;
use crate::loss_reports::LossReports;
use crate::request::{Parsed, Status, Work, parse, put_name};
use crate::service::{Seat, Service};
use crate::shared::Shared;
use crate::vring::Vring;

/// Maximum number of requests that a turn takes from a ring: a driver that offers requests as fast
/// as they are answered must not keep the shard from its other work.
const TAKEN_MAX: usize = 256;

/// Pause between checks for the end of changes that were given up.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Use of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Serving,
    /// No new requests are taken.
    Stopping,
    /// Requests in flight end without their IO.
    Aborted,
}

/// Rings of a device on one shard.
#[derive(Debug)]
pub struct Queues {
    shared: Arc<Shared>,
    shard: u16,
    ring: Rc<Ring>,
    inbox: Inbox<Command>,
    /// Service of the socket, on shard 0 until the end.
    service: Option<Service>,
    /// Rings by number; those of other shards are never started.
    slots: Vec<Slot>,
    ios: Ios,
    chain: Chain,
    phase: Phase,
    /// First ring of the next turn, which rotates so that no ring takes all buffers.
    first: usize,
    /// Geometry that the monitor sees; on shard 0.
    geometry: Geometry,
    /// Whether a started ring waits for the device to become exclusive.
    is_held: bool,
}

/// Slot of a ring.
#[derive(Debug, Default)]
struct Slot {
    kick: Option<Kick>,
    call: Option<Bell>,
    fault: Option<Bell>,
    vring: Option<Vring>,
    is_enabled: bool,
    /// Whether the driver has broken the rules: the ring is not used until it is started again.
    is_broken: bool,
    /// Request that was submitted only in part.
    current: Option<u32>,
    stop: Option<Stop>,
    /// Index of the next available request of a ring that could not be started.
    next: u16,
    reports: LossReports,
}

/// Stop of a ring that waits for its requests.
#[derive(Debug)]
struct Stop {
    by: Instant,
    reply: mpsc::Sender<Stopped>,
}

impl Slot {
    /// Returns the ring if it takes requests.
    fn active(&mut self) -> Option<&mut Vring> {
        let is_active = self.is_active();
        self.vring.as_mut().filter(|_| is_active)
    }

    fn is_active(&self) -> bool {
        // Requests of an earlier process count as in flight.
        let takes = |vring: &Vring| self.stop.is_none() || vring.has_repeated();
        self.is_enabled && !self.is_broken && self.vring.as_ref().is_some_and(takes)
    }

    /// Resets the slot. Returns its pending stop.
    fn take_stop(&mut self) -> Option<Stop> {
        let stop = self.stop.take();
        *self = Self::default();
        stop
    }

    /// Stops the ring because of a fault of its driver.
    fn break_ring(&mut self, shared: &Shared, number: usize, fault: Fault) {
        if !std::mem::replace(&mut self.is_broken, true) {
            if let Some(repeated) = shared.admit(fault) {
                tracing::warn!(repeated, "{}: ring {number} is stopped: {fault}", shared.name);
            }
            self.fault.iter_mut().for_each(Bell::ring);
        }
    }

    /// Whether requests of an earlier process are repeated, now or later.
    fn repeats(&self, phase: Phase) -> bool {
        self.is_enabled && !self.is_broken && phase == Phase::Serving
    }

    /// Whether nothing is in flight. Requests of an earlier process count if they are repeated.
    fn is_drained(&self, phase: Phase) -> bool {
        let repeats = self.repeats(phase);
        let is_done = |vring: &Vring| vring.inflight() == 0 && !(repeats && vring.has_repeated());
        self.vring.as_ref().is_none_or(is_done)
    }
}

impl Queues {
    /// Takes over the device of a shard. `memory` is the size of the buffers.
    ///
    /// # Errors
    /// The system's error if memory or a descriptor cannot be allocated.
    pub fn new(
        ring: &Rc<Ring>,
        device: Box<dyn BlockDevice>,
        seat: Seat,
        memory: usize,
    ) -> io::Result<Self> {
        let Seat { shared, shard, mailbox, service } = seat;
        let geometry = device.geometry().clone();
        if shard == 0 {
            *shared.geometry.lock() = geometry.clone();
        }
        let rings = usize::from(RINGS_MAX.div_ceil(shared.shards.max(1)));
        Ok(Self {
            inbox: mailbox.arm(ring)?,
            ios: Ios::new(device, memory, rings, &shared.given_up)?,
            ring: Rc::clone(ring),
            service,
            slots: Vec::with_capacity(rings),
            chain: Chain::default(),
            phase: Phase::Serving,
            first: 0,
            geometry,
            is_held: false,
            shared,
            shard,
        })
    }

    /// Lets a monitor connect. Does nothing on shards without the socket.
    ///
    /// # Errors
    /// The system's error if no thread can be started.
    pub fn serve(&mut self) -> io::Result<()> {
        self.service.as_mut().map_or(Ok(()), Service::start)
    }

    /// Does all pending work. Returns whether anything happened.
    pub fn turn(&mut self, now: Instant) -> bool {
        let mut any = self.take_commands(now);
        any |= self.ios.device_mut().poll(now);
        self.look_at_geometry();
        any |= self.ios.retry();
        any |= self.reap();
        self.note_reports();
        any |= self.take_requests(now);
        self.end_stops(now);
        self.call();
        any | self.ios.has_ended()
    }

    /// Whether a request is available that no event of the kernel's ring reports.
    pub fn has_input(&self) -> bool {
        let has_input =
            |slot: &Slot| slot.is_active() && slot.vring.as_ref().is_some_and(Vring::has_input);
        self.may_take() && self.slots.iter().any(has_input)
    }

    /// Asks the drivers for kicks. Returns false if a request is available.
    pub fn prepare_sleep(&mut self) -> bool {
        if !self.may_take() {
            return true;
        }
        let mut is_quiet = true;
        for at in 0..self.slots.len() {
            let number = self.number(at);
            let slot = &mut self.slots[at];
            match slot.active().map_or(Ok(false), Vring::ask_kicks) {
                Ok(has_more) => is_quiet &= !has_more,
                Err(fault) => slot.break_ring(&self.shared, number, fault),
            }
        }
        is_quiet
    }

    /// Whether requests can be taken now. An event reports when that changes.
    fn may_take(&self) -> bool {
        self.phase == Phase::Serving && !self.is_held && self.ios.has_room()
    }

    /// Time at which [`Self::turn`] must be called even if nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        let stops = self.slots.iter().filter_map(|slot| Some(slot.stop.as_ref()?.by));
        let kicks = self.slots.iter().filter_map(|slot| slot.kick.as_ref()?.deadline());
        // No event reports that the changes given up on another shard have ended.
        let look = self.shared.given_up.any().then(|| Clock.now() + LOOK_AGAIN);
        stops.chain(kicks).fold(look, |at, by| earliest(at, Some(by)))
    }

    /// Stops taking requests; those in flight end. The monitor is disconnected after that.
    pub fn stop(&mut self) {
        if self.phase == Phase::Serving {
            self.phase = Phase::Stopping;
        }
        self.service = None;
    }

    /// Ends the requests in flight without their IO.
    pub fn abort(&mut self) {
        self.phase = Phase::Aborted;
        self.service = None;
        self.ios.cancel_all();
    }

    /// Whether no request is in flight.
    pub fn is_idle(&self) -> bool {
        self.ios.inflight() == 0
    }

    /// Whether a guest uses the device, and will connect to the next process. False on shards
    /// without the socket.
    pub fn is_in_use(&self) -> bool {
        self.shard == 0 && self.shared.is_in_use()
    }

    /// Returns the process of the connected monitor, if there is a monitor: 0 if the process is
    /// unknown. None on shards without the socket.
    pub fn monitor(&self) -> Option<u32> {
        self.shared.monitor().filter(|_| self.shard == 0)
    }

    /// Whether a started ring waits for the device to become exclusive.
    pub fn is_held(&self) -> bool {
        self.is_held
    }

    /// Whether the guest kicks its rings, and no request appears in them: its memory is not shared.
    /// False on shards without the socket.
    pub fn has_only_kicks(&self) -> bool {
        self.shard == 0 && self.shared.has_only_kicks()
    }

    /// Returns the counters.
    pub fn stats(&self) -> FrontEndStats {
        let io = self.ios.counters();
        let monitors = u64::from(self.monitor().is_some());
        FrontEndStats {
            connections: monitors,
            clients: monitors,
            completed: io.completed,
            failed: io.failed,
            bytes_received: io.bytes_written,
            bytes_sent: io.bytes_read,
            ..FrontEndStats::default()
        }
    }

    /// Number of the ring in a slot.
    fn number(&self, at: usize) -> usize {
        at * usize::from(self.shared.shards) + usize::from(self.shard)
    }

    fn look_at_geometry(&mut self) {
        let geometry = self.ios.device().geometry();
        if self.shard == 0 && self.geometry != *geometry {
            self.geometry = geometry.clone();
            self.shared.set_geometry(geometry);
        }
    }

    fn take_commands(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some(Command { ring, action }) = self.inbox.take_or_watch() {
            any = true;
            let at = usize::from(ring / self.shared.shards);
            while self.slots.len() <= at {
                self.slots.push(Slot::default());
            }
            if let Err(error) = self.handle(now, at, action) {
                if let Some(repeated) = self.shared.admit(Line::RingNotServed) {
                    let name = &self.shared.name;
                    tracing::warn!(repeated, "{name}: ring {ring} cannot be served: {error}");
                }
                self.slots[at].is_broken = true;
            }
        }
        any
    }

    fn handle(&mut self, now: Instant, at: usize, action: Action) -> io::Result<()> {
        let number = self.number(at);
        let (ring, slot) = (&self.ring, &mut self.slots[at]);
        let bell = |fd: Option<_>| fd.map(|fd| Bell::new(ring, fd)).transpose();
        match action {
            Action::Start(start) => return self.start(at, *start),
            Action::Kick(fd) => slot.kick = Some(Kick::new(ring, fd)?),
            Action::Call(fd) => {
                slot.call = bell(fd)?;
                // The last event may not have been written to the earlier descriptor.
                slot.call.iter_mut().for_each(Bell::ring);
            }
            Action::Fault(fd) => slot.fault = bell(fd)?,
            Action::Enable(is_enabled) => slot.is_enabled = is_enabled,
            Action::Memory(memory) => {
                let set = slot.vring.as_mut().map_or(Ok(()), |vring| vring.set_memory(memory));
                if let Err(fault) = set {
                    slot.break_ring(&self.shared, number, fault);
                }
            }
            Action::Log { log, reply } => {
                slot.vring.iter_mut().for_each(|vring| vring.set_log(log.clone()));
                drop(reply);
            }
            Action::Stop { within, reply } => {
                slot.stop = Some(Stop { by: now + within, reply });
            }
        }
        Ok(())
    }

    fn start(&mut self, at: usize, start: RingStart) -> io::Result<()> {
        let number = self.number(at);
        let RingStart { setup, kick, call, fault, is_enabled } = start;
        let bell = |fd: Option<_>| fd.map(|fd| Bell::new(&self.ring, fd)).transpose();
        let next = setup.base;
        let mut slot = Slot {
            kick: Some(Kick::new(&self.ring, kick)?),
            call: bell(call)?,
            fault: bell(fault)?,
            is_enabled,
            next,
            ..Slot::default()
        };
        match Vring::start(setup) {
            Ok(vring) => {
                if vring.refused() > 0
                    && let Some(repeated) = self.shared.admit(Line::LeftOut)
                {
                    let (name, count) = (&self.shared.name, vring.refused());
                    let text = "requests of an earlier process are malformed and were skipped";
                    tracing::warn!(repeated, "{name}: ring {number}: {count} {text}");
                }
                if vring.is_continued() {
                    self.shared.activity.requested();
                }
                let available = || vring.available().unwrap_or(next);
                slot.reports = LossReports::new(self.ios.losses(), available);
                slot.vring = Some(vring);
            }
            Err(fault) => slot.break_ring(&self.shared, number, fault),
        }
        self.slots[at] = slot;
        Ok(())
    }

    /// Answers requests whose IO has ended. Returns whether there were any.
    fn reap(&mut self) -> bool {
        let mut any = false;
        while let Some(id) = self.ios.reap() {
            any = true;
            let number = self.number(self.ios.request(id).ring);
            let request = self.ios.request(id);
            let slot = &mut self.slots[request.ring];
            if slot.current == Some(id) {
                slot.current = None;
            }
            if let Some(vring) = slot.vring.as_mut().filter(|_| !request.is_abandoned) {
                // The next process repeats recorded requests.
                let is_left = self.phase == Phase::Aborted && vring.is_recorded();
                let answered = match request.outcome {
                    IoStatus::Aborted if is_left => {
                        vring.drop_request(request.head());
                        Ok(())
                    }
                    outcome => {
                        let answered = request.answer(vring, outcome.into());
                        self.ios.note_answered(id);
                        answered
                    }
                };
                if let Err(fault) = answered {
                    slot.break_ring(&self.shared, number, fault);
                }
            }
            self.ios.end(id);
        }
        self.ios.submit_due() | any
    }

    /// Notes which requests were offered before a loss was reported to the guest.
    fn note_reports(&mut self) {
        let Self { slots, ios, .. } = self;
        let Some(losses) = ios.losses() else { return };
        for Slot { vring, reports, .. } in slots {
            if let Some(vring) = vring {
                reports.note_reported(losses, vring.next_available(), || vring.available());
            }
        }
    }

    /// Takes requests from all rings while there is room. Returns whether any were taken.
    fn take_requests(&mut self, now: Instant) -> bool {
        let count = self.slots.len();
        let mut any = false;
        // A guest that has moved here may run before the session of its old host has ended.
        self.claim();
        for turn in 0..count {
            let at = (self.first + turn) % count;
            any |= self.take_from(now, at);
        }
        self.first = if count > 0 { (self.first + 1) % count } else { 0 };
        any
    }

    /// Claims the device while a ring is started.
    fn claim(&mut self) {
        let is_active = self.slots.iter().any(Slot::is_active);
        let is_held = is_active && !self.ios.device_mut().claim();
        match std::mem::replace(&mut self.is_held, is_held) {
            true if !is_active => self.ios.device_mut().release_claim(),
            _ if is_active && !is_held => self.shared.arrived(),
            _ => {}
        }
    }

    fn take_from(&mut self, now: Instant, at: usize) -> bool {
        let number = self.number(at);
        let Self { slots, ios, chain, shared, phase, is_held, .. } = self;
        let slot = &mut slots[at];
        let mut any = false;
        match slot.kick.as_mut().map_or(Ok(false), |kick| kick.take(now)) {
            Ok(true) => {
                any = true;
                // Requests behind these kicks wait, and prove nothing about the guest's memory.
                if !*is_held {
                    shared.activity.kicked();
                }
            }
            Ok(false) => {}
            Err(fault) => slot.break_ring(shared, number, fault),
        }
        if let Some(id) = slot.current {
            if !ios.advance(id) {
                return any;
            }
            slot.current = None;
        }
        for _ in 0..TAKEN_MAX {
            let may_take = *phase == Phase::Serving && !*is_held;
            if !may_take || slot.current.is_some() || !ios.has_room() {
                break;
            }
            let reports = slot.reports;
            let Some(vring) = slot.active() else { break };
            let reported = reports.reported_before_next(vring);
            let taken = match vring.take(chain) {
                Ok(None) => break,
                Ok(Some(head)) => {
                    let from = Origin { at, head, reported };
                    begin(vring, from, &mut Place { chain, ios, shared })
                }
                Err(fault) => Err(fault),
            };
            any = true;
            slot.kick.iter_mut().for_each(Kick::note_request);
            shared.activity.requested();
            match taken {
                Ok(id) => slot.current = id.filter(|id| !ios.advance(*id)),
                Err(fault) => slot.break_ring(shared, number, fault),
            }
        }
        // A chain that is kept would keep the memory of the guest mapped.
        chain.clear();
        any
    }

    /// Completes stops whose requests have ended, or whose time limit has passed.
    fn end_stops(&mut self, now: Instant) {
        for at in 0..self.slots.len() {
            let number = self.number(at);
            let slot = &self.slots[at];
            let Some(by) = slot.stop.as_ref().map(|stop| stop.by) else { continue };
            if !slot.is_drained(self.phase) {
                if by > now {
                    continue;
                }
                self.fail_requests(at);
            }
            let slot = &mut self.slots[at];
            call(slot, &self.shared, number);
            let next = slot.vring.as_ref().map_or(slot.next, Vring::next_available);
            let call = slot.call.take();
            // Releases the memory of the ring first: the next connection may need its share.
            if let Some(Stop { reply, .. }) = slot.take_stop() {
                // The thread of the socket may have ended.
                let _ = reply.send(Stopped { next });
            }
            // Writes to this descriptor may not have started, so it stays open.
            slot.call = call;
        }
    }

    /// Fails the requests of a ring that stops before they have ended, including those of an
    /// earlier process that were not repeated: the monitor counts them as answered from now on.
    fn fail_requests(&mut self, at: usize) {
        let number = self.number(at);
        let Self { slots, ios, chain, shared, phase, .. } = self;
        let slot = &mut slots[at];
        let repeats = slot.repeats(*phase);
        let Some(vring) = slot.vring.as_mut() else { return };
        let left = match repeats {
            true => fail_repeated(vring, chain, ios.device().geometry()),
            false => Ok(0),
        };
        // A chain that is kept would keep the memory of the guest mapped.
        chain.clear();
        let count = vring.inflight() + left.unwrap_or(0);
        if let Some(repeated) = shared.admit(Line::Failed) {
            let name = &shared.name;
            tracing::warn!(repeated, "{name}: ring {number}: {count} requests failed");
        }
        let mut fault = left.err();
        if vring.inflight() > 0 {
            ios.abandon(at, |request| {
                fault = request.answer(vring, Status::Failed).err().or(fault);
            });
        }
        fault.into_iter().for_each(|fault| slot.break_ring(shared, number, fault));
    }

    /// Calls drivers that have answers.
    fn call(&mut self) {
        for at in 0..self.slots.len() {
            let number = self.number(at);
            let slot = &mut self.slots[at];
            slot.call.iter_mut().chain(&mut slot.fault).for_each(Bell::turn);
            call(slot, &self.shared, number);
        }
    }
}

/// Answers requests of an earlier process with an error instead of repeating them. Returns their
/// number.
fn fail_repeated(
    vring: &mut Vring,
    chain: &mut Chain,
    geometry: &Geometry,
) -> Result<usize, Fault> {
    let mut count = 0;
    while vring.has_repeated() {
        let Some(head) = vring.take(chain)? else { break };
        let Parsed { status, .. } = parse(chain, geometry).inspect_err(|_| vring.refuse(head))?;
        let unanswered = Unanswered { head, status, memory: vring.memory(), reported: 0 };
        unanswered.answer(vring, Answer::of(Status::Failed))?;
        count += 1;
    }
    Ok(count)
}

/// Calls the driver of a ring if it has answers.
fn call(slot: &mut Slot, shared: &Shared, number: usize) {
    match slot.vring.as_mut().map_or(Ok(false), Vring::needs_call) {
        Ok(true) => slot.call.iter_mut().for_each(Bell::ring),
        Ok(false) => {}
        Err(fault) => slot.break_ring(shared, number, fault),
    }
}

/// Environment of a request besides its ring.
struct Place<'a> {
    chain: &'a mut Chain,
    ios: &'a mut Ios,
    shared: &'a Shared,
}

/// Origin of a request.
#[derive(Clone, Copy)]
struct Origin {
    /// Ring of the shard.
    at: usize,
    head: u16,
    /// Losses that had been reported to the guest when it offered the request.
    reported: u64,
}

/// Begins a request whose memory is in the chain, or answers it. Returns the number of the request
/// if it has IO.
fn begin(vring: &mut Vring, from: Origin, place: &mut Place<'_>) -> Result<Option<u32>, Fault> {
    let Origin { at, head, reported } = from;
    let Place { chain, ios, shared } = place;
    let parsed = parse(chain, ios.device().geometry());
    let Parsed { work, status } = parsed.inspect_err(|_| vring.refuse(head))?;
    let unanswered = Unanswered { head, status, memory: vring.memory(), reported };
    let mut command = match work {
        Work::Io(command) if command.op == IoOp::Flush && mutated!(VhostFlushSkipped) => {
            return unanswered.answer(vring, Answer::of(Status::Ok)).map(|()| None);
        }
        Work::Io(command) => command,
        Work::Name => {
            let written = put_name(&shared.name, &chain.writable);
            let answer = Answer { status: Status::Ok, written, data: &chain.writable };
            return unanswered.answer(vring, answer).map(|()| None);
        }
        Work::Answer(status) => return unanswered.answer(vring, Answer::of(status)).map(|()| None),
    };
    let is_durable = !shared.is_writeback() && !mutated!(VhostThroughDropped);
    command.flags.fua = command.op.changes() && is_durable;
    let data = match command.op.changes() {
        true => &mut chain.readable,
        false => &mut chain.writable,
    };
    match ios.begin(at, command, unanswered, data) {
        Ok(id) => Ok(Some(id)),
        Err(unanswered) => unanswered.answer(vring, Answer::of(Status::Failed)).map(|()| None),
    }
}
