//! A store shared by two gateways: blocks on a few OSDs, a lock, and a blocklist that reaches the
//! OSDs late. The gateways themselves are also modeled here. Each write is checked when it takes
//! effect.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::block::{BlockDevice, BlockSource, Completion, Core, Geometry, Io, IoOp};
use rtrs_core::gateway::{Gateway, GatewayBusy, GatewayEvent, GatewayNotify, Standing};
use rtrs_core::ids::SessionId;
use rtrs_core::prng::Prng;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant};

use super::GatewayPlant;
use crate::sim::Failure;
use crate::sim::options::MS;

pub(super) const BLOCKS: usize = 8;
pub(super) const BLOCK: u32 = 4096;
const OSDS: usize = 3;
/// Maximum number of IOs in flight at a gateway.
const ROOM: usize = 64;

/// A client of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rados(u32);

/// IO in transit to an OSD.
#[derive(Debug)]
struct Flight {
    due: Instant,
    from: Rados,
    /// Epoch of the sender's OSD map.
    map: u32,
    io: Io,
    /// Value that a write stores.
    value: u64,
}

/// State shared by the gateways.
#[derive(Debug)]
pub(super) struct Store {
    now: Instant,
    prng: Prng,
    plant: GatewayPlant,
    blocks: [u64; BLOCKS],
    /// Last acknowledged and last submitted write to each block.
    pub(super) acked: [u64; BLOCKS],
    pub(super) submitted: [u64; BLOCKS],
    lock: Option<Rados>,
    term: u64,
    last: u32,
    /// Epoch of the latest map and, for each refused client, the first epoch in which the client is
    /// refused.
    map: u32,
    refused: BTreeMap<Rados, u32>,
    /// Map epoch of each OSD, and the updates in transit.
    osds: [u32; OSDS],
    spreading: Vec<(Instant, usize, u32)>,
    flights: Vec<Flight>,
    ended: Vec<(Rados, Completion, bool)>,
    failure: Option<Failure>,
    pub(super) counts: Counts,
}

/// Counters of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of times the lock was taken.
    pub terms: u64,
    /// Number of times the previous owner was blocklisted so that the lock could be taken.
    pub forced: u64,
    /// Number of late IOs from previous owners that were refused.
    pub late: u64,
    /// Number of replies to the user.
    pub ios: u64,
}

impl Store {
    pub(super) fn new(prng: Prng, plant: GatewayPlant) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self {
            now: Instant::ZERO,
            prng,
            plant,
            blocks: [0; BLOCKS],
            acked: [0; BLOCKS],
            submitted: [0; BLOCKS],
            lock: None,
            term: 0,
            last: 0,
            map: 1,
            refused: BTreeMap::new(),
            osds: [1; OSDS],
            spreading: Vec::new(),
            flights: Vec::new(),
            ended: Vec::new(),
            failure: None,
            counts: Counts::default(),
        }))
    }

    fn client(&mut self) -> (Rados, u32) {
        self.last += 1;
        (Rados(self.last), self.map)
    }

    /// Makes each OSD refuse a client, after a random delay.
    fn refuse(&mut self, client: Rados) {
        self.map += 1;
        self.refused.insert(client, self.map);
        for osd in 0..OSDS {
            let at = self.now + self.prng.duration(Duration::ZERO..=3000 * MS);
            self.spreading.push((at, osd, self.map));
        }
    }

    fn is_refused(&self, client: Rados) -> bool {
        self.refused.contains_key(&client)
    }

    /// Advances the time. Returns whether any IO arrived, or an error if a checker found a
    /// violation.
    pub(super) fn advance(&mut self, now: Instant) -> Result<bool, Failure> {
        self.now = now;
        let osds = &mut self.osds;
        self.spreading.retain(|(at, osd, map)| {
            if *at <= now {
                osds[*osd] = osds[*osd].max(*map);
            }
            *at > now
        });
        let (due, rest) = std::mem::take(&mut self.flights).into_iter().partition(|f| f.due <= now);
        self.flights = rest;
        let mut due: Vec<Flight> = due;
        due.sort_by_key(|flight| flight.due);
        let any = !due.is_empty();
        due.into_iter().for_each(|flight| self.arrive(flight));
        self.failure.take().map_or(Ok(any), Err)
    }

    fn arrive(&mut self, Flight { from, map, io, value, .. }: Flight) {
        let block = (io.offset / u64::from(BLOCK)) as usize;
        let osd = &mut self.osds[block % OSDS];
        *osd = map.max(*osd);
        let refused = self.refused.get(&from).is_some_and(|since| since <= osd);
        let status = if refused { IoStatus::Moved } else { IoStatus::Ok };
        self.counts.late += u64::from(refused);
        match (io.op, &io.buf) {
            (IoOp::Write, _) if !refused => {
                if value < self.acked[block] {
                    let acked = self.acked[block];
                    let text =
                        format!("block {block}: write {value} lands after {acked} was acked");
                    self.failure = Some(Failure::new("ghost", text));
                }
                self.blocks[block] = value;
            }
            (IoOp::Read, Some(buf)) if !refused => {
                buf.fill(0);
                buf.copy_in(0, &self.blocks[block].to_le_bytes());
            }
            _ => {}
        }
        self.ended.push((from, Completion::new(io.tag, status), refused));
    }

    /// Records an acknowledged write. Fails if the write was not stored.
    pub(super) fn acked(&mut self, block: usize, value: u64) -> Result<(), Failure> {
        self.acked[block] = value;
        if self.blocks[block] == value {
            return Ok(());
        }
        let has = self.blocks[block];
        Err(Failure::new("lost", format!("block {block}: {value} was acked, but it has {has}")))
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let spreading = self.spreading.iter().map(|(at, ..)| *at);
        self.flights.iter().map(|flight| flight.due).chain(spreading).min()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Standby,
    Active,
    Leaving,
}

/// Next step of a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Job {
    /// Find the lock's owner and make the OSDs refuse it.
    Break,
    /// Take the lock, if it is free or still owned by this refused client.
    Take(Option<Rados>),
    /// Connect as a new client.
    Reopen,
}

#[derive(Debug)]
struct Inner {
    state: State,
    client: Rados,
    map: u32,
    term: u64,
    job: Option<(Instant, Job)>,
    left_until: Instant,
    look: Instant,
    events: VecDeque<GatewayEvent>,
}

/// The gateway of one server.
#[derive(Clone, Debug)]
pub(super) struct SimGateway {
    store: Arc<Mutex<Store>>,
    inner: Arc<Mutex<Inner>>,
}

impl SimGateway {
    pub(super) fn new(store: &Arc<Mutex<Store>>) -> Self {
        let (client, map) = store.lock().client();
        let inner = Inner {
            state: State::Standby,
            client,
            map,
            term: 0,
            job: None,
            left_until: Instant::ZERO,
            look: Instant::ZERO,
            events: VecDeque::new(),
        };
        Self { store: Arc::clone(store), inner: Arc::new(Mutex::new(inner)) }
    }

    /// Advances the gateway, whose process must not be frozen. Returns the next event, if any.
    pub(super) fn tick(&self) -> Option<GatewayEvent> {
        let (mut store, mut inner) = (self.store.lock(), self.inner.lock());
        let now = store.now;
        if inner.state == State::Active && now >= inner.look {
            inner.look = now + 2000 * MS;
            if store.lock != Some(inner.client) || store.is_refused(inner.client) {
                inner.lose(now);
            }
        }
        let own = |flight: &Flight| flight.from == inner.client;
        if inner.state == State::Leaving && !store.flights.iter().any(own) {
            if store.lock == Some(inner.client) {
                store.lock = None;
            }
            inner.state = State::Standby;
            inner.left_until = now + 2000 * MS;
            inner.events.push_back(GatewayEvent::Standby);
        }
        if let Some((_, job)) = inner.job.take_if(|(at, _)| *at <= now) {
            inner.run(job, &mut store);
        }
        inner.events.pop_front()
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let inner = self.inner.lock();
        let job = inner.job.map(|(at, _)| at);
        let look = (inner.state == State::Active).then_some(inner.look);
        let event = (!inner.events.is_empty()).then_some(Instant::ZERO);
        [job, look, event].into_iter().flatten().min()
    }
}

impl Inner {
    fn lose(&mut self, now: Instant) {
        if self.state != State::Standby {
            self.events.push_back(GatewayEvent::Standby);
        }
        self.state = State::Standby;
        self.job = Some((now + 50 * MS, Job::Reopen));
    }

    fn run(&mut self, job: Job, store: &mut Store) {
        let soon = store.now + store.prng.duration(5 * MS..=400 * MS);
        match job {
            Job::Reopen => (self.client, self.map) = store.client(),
            Job::Break => {
                let owner = store.lock.filter(|owner| *owner != self.client);
                if let Some(owner) = owner.filter(|_| store.plant != GatewayPlant::NoBlocklist) {
                    store.refuse(owner);
                    store.counts.forced += 1;
                    self.map = store.map;
                }
                if store.plant == GatewayPlant::ActiveEarly {
                    self.map = store.map - u32::from(owner.is_some());
                    self.activate(store.term + 1, store.now);
                }
                self.job = Some((soon, Job::Take(owner)));
            }
            Job::Take(broken) => {
                if store.is_refused(self.client) {
                    return self.lose(store.now);
                }
                if store.lock.is_none() || store.lock == broken {
                    store.lock = Some(self.client);
                    store.term += 1;
                    store.counts.terms += 1;
                    self.activate(store.term, store.now);
                }
            }
        }
    }

    fn activate(&mut self, term: u64, now: Instant) {
        (self.state, self.term, self.look) = (State::Active, term, now + 2000 * MS);
        self.events.push_back(GatewayEvent::Active);
    }
}

impl Gateway for SimGateway {
    fn standing(&self) -> Standing {
        let inner = self.inner.lock();
        Standing { active: inner.state != State::Standby, term: inner.term }
    }
    fn take_over(&self, _session: SessionId) -> Result<(), GatewayBusy> {
        let (mut store, mut inner) = (self.store.lock(), self.inner.lock());
        if inner.state != State::Standby {
            return Ok(());
        }
        if inner.job.is_some() || store.now < inner.left_until {
            return Err(GatewayBusy);
        }
        let soon = store.now + store.prng.duration(Duration::ZERO..=100 * MS);
        inner.job = Some((soon, Job::Break));
        Ok(())
    }
    fn opened_by(&self, _session: SessionId) {}
    fn begin_release(&self) {
        let mut inner = self.inner.lock();
        if inner.state == State::Active {
            inner.state = State::Leaving;
        }
    }
    fn release(&self, _within: Duration) -> io::Result<()> {
        self.begin_release();
        Ok(())
    }
    fn on_change(&self, _notify: GatewayNotify) {}
}

impl BlockSource for SimGateway {
    fn geometry(&self) -> Geometry {
        let write_cache = false;
        Geometry { write_cache, ..Geometry::plain(u64::from(BLOCK) * BLOCKS as u64) }
    }
    fn gateway(&self) -> Option<&dyn Gateway> {
        Some(self)
    }
    fn open(&self, _core: &Core) -> io::Result<Box<dyn BlockDevice>> {
        Ok(Box::new(SimDevice {
            gateway: self.clone(),
            geometry: self.geometry(),
            senders: BTreeMap::new(),
            held: VecDeque::new(),
            done: VecDeque::new(),
        }))
    }
}

#[derive(Debug)]
struct SimDevice {
    gateway: SimGateway,
    geometry: Geometry,
    /// Tags in flight and their senders.
    senders: BTreeMap<u64, Rados>,
    held: VecDeque<Io>,
    done: VecDeque<Completion>,
}

impl BlockDevice for SimDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }
    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.inflight() >= ROOM {
            return Err(io);
        }
        let (mut store, inner) = (self.gateway.store.lock(), self.gateway.inner.lock());
        match inner.state {
            State::Active => {}
            State::Leaving => {
                self.held.push_back(io);
                return Ok(());
            }
            State::Standby => {
                self.done.push_back(Completion::new(io.tag, IoStatus::Moved));
                return Ok(());
            }
        }
        let mut value = [0; 8];
        if let (IoOp::Write, Some(buf)) = (io.op, &io.buf) {
            buf.copy_out(0, &mut value);
        }
        // A few IOs are in transit for a long time.
        let most = if store.prng.index(20) == 0 { 2500 * MS } else { 20 * MS };
        let due = store.now + store.prng.duration(Duration::ZERO..=most);
        let (from, map) = (inner.client, inner.map);
        self.senders.insert(io.tag, from);
        store.flights.push(Flight { due, from, map, io, value: u64::from_le_bytes(value) });
        Ok(())
    }
    fn poll(&mut self, now: Instant) -> bool {
        let before = self.done.len();
        let leaving = self.gateway.inner.lock().state == State::Leaving;
        for io in if leaving { VecDeque::new() } else { std::mem::take(&mut self.held) } {
            self.submit(io).expect("it had room before");
        }
        let (mut store, mut inner) = (self.gateway.store.lock(), self.gateway.inner.lock());
        let ended = std::mem::take(&mut store.ended);
        for (from, completion, refused) in ended {
            if self.senders.get(&completion.tag) != Some(&from) {
                store.ended.push((from, completion, refused));
                continue;
            }
            self.senders.remove(&completion.tag);
            if refused && from == inner.client && inner.state != State::Standby {
                inner.lose(now);
            }
            self.done.push_back(completion);
        }
        self.done.len() > before
    }
    fn reap(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }
    fn inflight(&self) -> usize {
        self.senders.len() + self.held.len() + self.done.len()
    }
    fn deadline(&self) -> Option<Instant> {
        (!self.done.is_empty()).then_some(Instant::ZERO)
    }
}
