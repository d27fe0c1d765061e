//! Binds the session's engine to providers, a ring and a front end: one core's turn.
//!
//! Every core runs the same [`ClientShard`] over a [`ClientCore`], the engine that the simulator
//! runs too; core 0 also has the listening socket. A turn goes: mail, fabric events, front end (NBD
//! or bench), issue what waits, one flush. Nothing here knows of the protocol or of paths.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

use nbd_bridge::{Bound, Bridge, BridgeConfig, BridgeStats, Group, Listener, Seat, export_info};
use rtrs_core::block::{BlockDevice, Geometry};
use rtrs_core::config::Scheme;
use rtrs_core::fabric::{Fabric, FabricCounters};
use rtrs_core::identity::Identity;
use rtrs_core::ids::CoreIndex;
use rtrs_core::rt::{Clock, Inbox, Mailbox, PollPolicy, Ring, Sender, Shard, pin_to, run};
use rtrs_core::time::{Duration, Instant, earliest};

use crate::bench::Workload;
use crate::machine::{ClientCore, EngineReport, Letter};
use crate::provide::Providers;
use crate::session::device::SessionFailure;
use crate::session::{Change, SessionConfig, SessionDevice};

/// Messages between the cores of a session, and to them.
pub(crate) enum Mail {
    Engine(Letter),
    /// To core 0: the socket that NBD clients connect to, served once the device is open.
    Listen(Bound),
    /// An NBD client for this core.
    Adopt(OwnedFd),
    /// The other end of a socket that the kernel will send this core's requests to. Who waits is
    /// told when it is served, or sees the sender go.
    AdoptKernel {
        socket: OwnedFd,
        adopted: mpsc::Sender<()>,
    },
    /// Report what you did.
    Query(mpsc::Sender<CoreReport>),
    /// To core 0: change paths or policy.
    Change {
        change: Change,
        reply: mpsc::Sender<Result<(), String>>,
    },
    /// Have a provider of this scheme; answer its place.
    Provide {
        scheme: Scheme,
        reply: mpsc::Sender<Result<usize, String>>,
    },
    /// To core 0: something in the host's network is up or new.
    Network {
        what: String,
    },
    /// To core 0: finish what is in flight within the bound, close everything, end.
    Shutdown {
        grace: Duration,
    },
    /// Stop the front end; in flight is finished until the deadline.
    StopFront {
        deadline: Instant,
    },
    /// To core 0: a core's front end has stopped.
    FrontStopped,
    /// Turn the front end: it is to look at its connections.
    Look,
    /// End the thread.
    Exit,
}

/// What a core tells who asks.
#[derive(Debug)]
pub(crate) struct CoreReport {
    pub(crate) engine: EngineReport,
    /// What each provider did, by scheme.
    pub(crate) fabrics: Vec<(&'static str, FabricCounters)>,
    pub(crate) bridge: BridgeStats,
    /// `None` until the device was open once.
    pub(crate) geometry: Option<Geometry>,
}

/// From core 0 to the process.
#[derive(Debug)]
pub(crate) enum Event {
    /// The device is open and clients can connect.
    Ready(Box<Geometry>),
    /// The session cannot come about.
    Failed(SessionFailure),
    /// The NBD front end could not start.
    FrontFailed(std::io::Error),
    /// The kernel has closed this core's socket.
    KernelGone(CoreIndex),
    /// A core's thread ended with this error.
    CoreFailed(CoreIndex, String),
    /// What whoever takes over from this process has to know: the life of the server's cache.
    KeptLife(u64),
    /// The same: which server's export it is.
    Pinned(Identity),
    /// Everything ended.
    Done,
}

/// What the session is opened for.
pub(crate) enum Purpose {
    /// Serve NBD clients.
    Nbd(BridgeConfig, Arc<Group>),
    /// Run a workload.
    Bench(Arc<Workload>),
}

/// The socket of the kernel on a core.
enum KernelEnd {
    /// There is none, or no more.
    None,
    /// It waits until the device is open here.
    Waiting(OwnedFd, mpsc::Sender<()>),
    /// The bridge serves it.
    Served,
}

enum Front {
    None,
    Nbd(Box<Bridge>),
    Bench(Box<crate::bench::Job>),
}

/// Everything a core starts with.
pub(crate) struct ShardStart {
    pub(crate) core: CoreIndex,
    pub(crate) config: Arc<SessionConfig>,
    pub(crate) uuids: Arc<[[u8; 16]]>,
    pub(crate) inbox: Mailbox<Mail>,
    pub(crate) cores: Vec<Sender<Mail>>,
    pub(crate) providers: Arc<Providers>,
    pub(crate) purpose: Purpose,
    pub(crate) events: Option<mpsc::Sender<Event>>,
    pub(crate) poll: PollPolicy,
    pub(crate) pin: Option<usize>,
}

/// Runs a core until its session ends. The body of a core's thread.
pub(crate) fn run_shard(start: ShardStart) -> std::io::Result<()> {
    if let Some(cpu) = start.pin
        && let Err(error) = pin_to(cpu)
    {
        tracing::warn!("core {} is not pinned to CPU {cpu}: {error}", start.core);
    }
    let poll = start.poll;
    let ring = Ring::new(512)?;
    let mut shard = ClientShard::new(start, &ring)?;
    run(&ring, poll, &mut shard)?;
    Ok(())
}

struct ClientShard {
    core: CoreIndex,
    ring: Rc<Ring>,
    config: Arc<SessionConfig>,
    /// In the order that `PathTarget::provider` counts.
    fabrics: Vec<Box<dyn Fabric>>,
    /// Of `fabrics`.
    schemes: Vec<Scheme>,
    providers: Arc<Providers>,
    inbox: Inbox<Mail>,
    cores: Vec<Sender<Mail>>,
    engine: ClientCore,
    purpose: Purpose,
    front: Front,
    /// The device's shape since it was first open; it does not change when paths go.
    geometry: Option<Geometry>,
    /// The NBD socket until the device is open.
    bound: Option<Bound>,
    listener: Option<Listener>,
    kernel: KernelEnd,
    next_core: usize,
    events: Option<mpsc::Sender<Event>>,
    reported_failure: bool,
    kept_life: Option<u64>,
    identity: Option<Identity>,
    /// Deadline of a front end that is stopping.
    stopping: Option<Instant>,
    /// It has stopped.
    front_stopped: bool,
    /// On core 0: when the shutdown has to be over, and how many fronts still run.
    shutdown: Option<(Instant, usize)>,
    done: bool,
}

impl ClientShard {
    fn new(start: ShardStart, ring: &Rc<Ring>) -> std::io::Result<Self> {
        let inbox = start.inbox.arm(ring)?;
        let (schemes, fabrics) = start.providers.first(ring)?.into_iter().unzip();
        let engine = ClientCore::new(Clock.now(), start.core, &start.config, &start.uuids);
        Ok(Self {
            core: start.core,
            ring: Rc::clone(ring),
            config: start.config,
            fabrics,
            schemes,
            providers: start.providers,
            inbox,
            cores: start.cores,
            engine,
            purpose: start.purpose,
            front: Front::None,
            geometry: None,
            bound: None,
            listener: None,
            kernel: KernelEnd::None,
            next_core: 0,
            events: start.events,
            reported_failure: false,
            kept_life: None,
            identity: None,
            stopping: None,
            front_stopped: false,
            shutdown: None,
            done: false,
        })
    }

    fn event(&self, event: Event) {
        if let Some(events) = &self.events
            && events.send(event).is_err()
        {
            tracing::debug!("nobody listens to the session's events any more");
        }
    }

    fn take_mail(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some(mail) = self.inbox.take() {
            any = true;
            match mail {
                Mail::Engine(letter) => {
                    self.engine.handle_letter(now, letter, &mut self.fabrics);
                    self.look_at_device(now);
                }
                Mail::Listen(bound) => match self.front {
                    Front::Nbd(_) => self.listener = Some(bound.serve(&self.ring)),
                    _ => self.bound = Some(bound),
                },
                Mail::Adopt(socket) => {
                    if let Front::Nbd(bridge) = &mut self.front {
                        bridge.adopt(now, socket);
                    }
                }
                Mail::AdoptKernel { socket, adopted } => {
                    self.kernel = KernelEnd::Waiting(socket, adopted);
                    self.adopt_kernel(now);
                }
                Mail::Query(reply) => {
                    let report = self.report(now);
                    if reply.send(report).is_err() {
                        tracing::debug!("who asked for a report is gone");
                    }
                }
                Mail::Change { change, reply } => {
                    let done = self.engine.change(now, change, &mut self.fabrics);
                    if reply.send(done).is_err() {
                        tracing::debug!("who asked for a change is gone");
                    }
                }
                Mail::Provide { scheme, reply } => {
                    if reply.send(self.provide(scheme)).is_err() {
                        tracing::debug!("who asked for a provider is gone");
                    }
                }
                Mail::Network { what } => {
                    self.engine.on_network_change(now, &what, &mut self.fabrics);
                }
                Mail::Shutdown { grace } => self.on_shutdown(now, grace),
                Mail::StopFront { deadline } => {
                    if let Front::Nbd(bridge) = &mut self.front {
                        bridge.stop();
                    }
                    if let Front::Bench(job) = &mut self.front {
                        job.stop();
                    }
                    if !self.front_stopped {
                        self.stopping = Some(deadline);
                    }
                }
                Mail::FrontStopped => {
                    if let Some((_, running)) = self.shutdown.as_mut() {
                        *running = running.saturating_sub(1);
                    }
                }
                Mail::Look => {}
                Mail::Exit => self.done = true,
            }
        }
        any
    }

    /// The place of this scheme's provider, which is made if there is none.
    fn provide(&mut self, scheme: Scheme) -> Result<usize, String> {
        if let Some(place) = self.schemes.iter().position(|known| *known == scheme) {
            return Ok(place);
        }
        let fabric = self.providers.make(scheme, &self.ring).map_err(|e| e.to_string())?;
        self.fabrics.push(fabric);
        self.schemes.push(scheme);
        Ok(self.schemes.len() - 1)
    }

    /// Starts the front end once the device is open.
    fn look_at_device(&mut self, now: Instant) {
        if matches!(self.front, Front::None)
            && let Some(device) = self.engine.device()
        {
            self.start_front(now, Box::new(device));
        }
    }

    fn start_front(&mut self, now: Instant, device: Box<SessionDevice>) {
        let geometry = device.geometry().clone();
        self.geometry = Some(geometry.clone());
        let started = match &self.purpose {
            Purpose::Nbd(config, group) => {
                let export = export_info(&self.config.export, &geometry);
                let seat = Seat { group: Arc::clone(group), shard: self.core.index() };
                Bridge::seated(&self.ring, device, export, *config, seat).map(|bridge| {
                    self.front = Front::Nbd(Box::new(bridge));
                    self.listener = self.bound.take().map(|b| b.serve(&self.ring));
                })
            }
            Purpose::Bench(workload) => {
                crate::bench::Job::new(now, self.core, Arc::clone(workload), device)
                    .map(|job| self.front = Front::Bench(Box::new(job)))
            }
        };
        self.adopt_kernel(now);
        match started {
            Ok(()) if self.core.0 == 0 => self.event(Event::Ready(Box::new(geometry))),
            Ok(()) => {}
            Err(error) => {
                tracing::error!("core {}: {error}", self.core);
                self.kernel = KernelEnd::None;
                self.event(Event::FrontFailed(error));
            }
        }
    }

    /// Serves the kernel's socket if it is here and the device is open.
    fn adopt_kernel(&mut self, now: Instant) {
        let Front::Nbd(bridge) = &mut self.front else { return };
        match std::mem::replace(&mut self.kernel, KernelEnd::None) {
            KernelEnd::Waiting(socket, adopted) => {
                if bridge.adopt_kernel(now, socket) && adopted.send(()).is_ok() {
                    self.kernel = KernelEnd::Served;
                }
            }
            other => self.kernel = other,
        }
    }

    /// Tells when the kernel has closed its socket before this end stopped.
    fn watch_kernel(&mut self) {
        if let (KernelEnd::Served, Front::Nbd(bridge)) = (&self.kernel, &self.front)
            && bridge.connections() == 0
        {
            self.kernel = KernelEnd::None;
            self.event(Event::KernelGone(self.core));
        }
    }

    fn report(&self, now: Instant) -> CoreReport {
        let bridge = match &self.front {
            Front::Nbd(bridge) => bridge.stats(),
            _ => BridgeStats::default(),
        };
        CoreReport {
            engine: self.engine.report(now),
            fabrics: self.fabrics.iter().map(|one| (one.scheme(), one.counters())).collect(),
            bridge,
            geometry: self.geometry.clone(),
        }
    }

    /// Begins the end, or hurries one that has begun.
    fn on_shutdown(&mut self, now: Instant, grace: Duration) {
        let deadline = now + grace;
        let running = match self.shutdown {
            Some((before, _)) if before <= deadline => return,
            Some((_, running)) => running,
            None => self.cores.len(),
        };
        self.listener = None;
        self.bound = None;
        self.shutdown = Some((deadline, running));
        for core in &self.cores {
            core.send(Mail::StopFront { deadline });
        }
    }

    /// Moves a stopping front end and, on core 0, the shutdown on.
    fn poll_stopping(&mut self, now: Instant) -> bool {
        let mut any = false;
        if let Some(deadline) = self.stopping {
            let over = now >= deadline;
            let idle = match &mut self.front {
                Front::None => true,
                Front::Nbd(bridge) => {
                    if over {
                        bridge.abort();
                    }
                    bridge.connections() == 0
                }
                Front::Bench(job) => job.is_idle(),
            };
            if idle || over {
                self.stopping = None;
                self.front_stopped = true;
                self.cores[0].send(Mail::FrontStopped);
                any = true;
            }
        }
        let Some((deadline, running)) = self.shutdown else { return any };
        if running == 0 || now >= deadline {
            self.engine.detach(now, &mut self.fabrics);
        }
        // The end of all paths has bounds of its own; this one is for a provider that fails them.
        if self.engine.is_done() || now >= deadline + Duration::from_secs(10) {
            self.shutdown = None;
            self.event(Event::Done);
            for core in &self.cores {
                core.send(Mail::Exit);
            }
            any = true;
        }
        any
    }

    fn poll_fabrics(&mut self, now: Instant) -> bool {
        let mut any = false;
        for provider in 0..self.fabrics.len() {
            any |= self.fabrics[provider].poll(now);
            while let Some(event) = self.fabrics[provider].next_event() {
                any = true;
                self.engine.handle_event(now, provider, event, &mut self.fabrics);
            }
        }
        any
    }

    /// Hands the engine's letters to the other cores. True when there was one.
    fn deliver(&mut self) -> bool {
        let mut any = false;
        while let Some((core, letter)) = self.engine.take_letter() {
            any = true;
            self.cores[core.index()].send(Mail::Engine(letter));
        }
        any
    }

    /// Tells the process what it has to know of the session, when that has changed.
    fn tell_process(&mut self) {
        if !self.reported_failure
            && let Some(failure) = self.engine.failure().cloned()
        {
            self.reported_failure = true;
            self.event(Event::Failed(failure));
        }
        let life = self.engine.kept_life();
        if self.kept_life != life {
            self.kept_life = life;
            life.into_iter().for_each(|life| self.event(Event::KeptLife(life)));
        }
        let identity = self.engine.pinned_identity();
        if self.identity != identity {
            self.identity = identity;
            identity.into_iter().for_each(|identity| self.event(Event::Pinned(identity)));
        }
    }

    fn accept_clients(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some(socket) = self.listener.as_mut().and_then(|l| l.take(now)) {
            any = true;
            let core = self.next_core % self.cores.len();
            self.next_core += 1;
            match &mut self.front {
                Front::Nbd(bridge) if core == 0 => bridge.adopt(now, socket),
                _ => self.cores[core].send(Mail::Adopt(socket)),
            }
        }
        any
    }
}

impl Shard for ClientShard {
    fn turn(&mut self, now: Instant) -> bool {
        let mut any = self.take_mail(now);
        any |= self.poll_fabrics(now);
        any |= self.engine.poll(now, &mut self.fabrics);
        self.tell_process();
        self.look_at_device(now);
        any |= self.deliver();
        any |= self.accept_clients(now);
        any |= match &mut self.front {
            Front::None => false,
            Front::Nbd(bridge) => bridge.turn(now),
            Front::Bench(job) => job.turn(now),
        };
        self.watch_kernel();
        any |= self.engine.pump(now, &mut self.fabrics);
        for fabric in &mut self.fabrics {
            fabric.flush(now);
        }
        any |= self.poll_stopping(now);
        any | self.deliver()
    }

    fn deadline(&self) -> Option<Instant> {
        let mut soonest = self.engine.deadline();
        for fabric in &self.fabrics {
            soonest = earliest(soonest, fabric.deadline());
        }
        soonest = match &self.front {
            Front::None => soonest,
            Front::Nbd(bridge) => earliest(soonest, bridge.deadline()),
            Front::Bench(job) => earliest(soonest, job.deadline()),
        };
        soonest = earliest(soonest, self.listener.as_ref().and_then(Listener::deadline));
        soonest = earliest(soonest, self.stopping);
        let shutdown = self
            .shutdown
            .map(|(at, running)| if running == 0 { at + Duration::from_secs(10) } else { at });
        earliest(soonest, shutdown)
    }

    fn inflight(&self) -> usize {
        self.engine.inflight()
    }

    fn is_done(&self) -> bool {
        self.done
    }

    fn has_mail(&self) -> bool {
        !self.inbox.is_empty()
    }

    fn prepare_sleep(&mut self) -> bool {
        self.inbox.prepare_sleep()
    }

    fn awake(&mut self) {
        self.inbox.awake();
    }
}
