//! Binds the session's engine to providers, a ring and a front end: one core's turn.
//!
//! Every core runs the same [`ClientShard`] over a [`ClientCore`], the engine that the simulator
//! runs too. A turn goes: mail, fabric events, front end, issue what waits, one flush. Nothing here
//! knows of the protocol, of paths, or what the front end is.

use std::rc::Rc;
use std::sync::{Arc, mpsc};

use nbd_bridge::BridgeStats;
use rtrs_core::block::{BlockDevice, Geometry};
use rtrs_core::config::Scheme;
use rtrs_core::fabric::{Fabric, FabricCounters};
use rtrs_core::identity::Identity;
use rtrs_core::ids::CoreIndex;
use rtrs_core::rt::{Clock, Inbox, Mailbox, PollPolicy, Ring, Sender, Shard, pin_to, run};
use rtrs_core::time::{Duration, Instant, earliest};

use crate::frontend::{FrontEnd, FrontRequest, FrontSocket, MakeFrontEnd, Place};
use crate::machine::{ClientCore, ClientMessage, EngineReport};
use crate::provide::Providers;
use crate::session::device::SessionFailure;
use crate::session::{Change, SessionConfig};

/// Messages between the cores of a session, and to them.
pub(crate) enum Mail {
    Engine(ClientMessage),
    /// For the front end.
    Socket(FrontSocket),
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

/// Everything a core starts with.
pub(crate) struct ShardStart {
    pub(crate) core: CoreIndex,
    pub(crate) config: Arc<SessionConfig>,
    pub(crate) uuids: Arc<[[u8; 16]]>,
    pub(crate) inbox: Mailbox<Mail>,
    pub(crate) cores: Vec<Sender<Mail>>,
    pub(crate) providers: Arc<Providers>,
    pub(crate) front: MakeFrontEnd,
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
    front: Box<dyn FrontEnd>,
    /// The device's shape since it was first open; it does not change when paths go.
    geometry: Option<Geometry>,
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
            front: (start.front)(),
            geometry: None,
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
                Mail::Engine(message) => {
                    self.engine.handle_message(now, message, &mut self.fabrics);
                    self.look_at_device(now);
                }
                Mail::Socket(socket) => self.front.take_socket(now, socket),
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
                    self.front.stop();
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

    /// Gives the front end the device once it is open.
    fn look_at_device(&mut self, now: Instant) {
        if self.geometry.is_some() {
            return;
        }
        let Some(device) = self.engine.device() else { return };
        let geometry = device.geometry().clone();
        self.geometry = Some(geometry.clone());
        let place = Place { shard: self.core, ring: &self.ring, export: &self.config.export };
        match self.front.open(now, &place, device) {
            Ok(()) if self.core.0 == 0 => self.event(Event::Ready(Box::new(geometry))),
            Ok(()) => {}
            Err(error) => {
                tracing::error!("core {}: {error}", self.core);
                self.event(Event::FrontFailed(error));
            }
        }
    }

    /// Turns the front end and does what it asks for.
    fn turn_front(&mut self, now: Instant) -> bool {
        let any = self.front.turn(now);
        while let Some(request) = self.front.next_request() {
            match request {
                FrontRequest::Client(shard, socket) => {
                    self.cores[shard.index()].send(Mail::Socket(FrontSocket::Client(socket)));
                }
                FrontRequest::KernelGone => self.event(Event::KernelGone(self.core)),
            }
        }
        any
    }

    fn report(&self, now: Instant) -> CoreReport {
        CoreReport {
            engine: self.engine.report(now),
            fabrics: self.fabrics.iter().map(|one| (one.scheme(), one.counters())).collect(),
            bridge: self.front.stats(),
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
            if over {
                self.front.abort();
            }
            let idle = self.front.is_idle();
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

    /// Hands the engine's messages to the other cores. True when there was one.
    fn deliver(&mut self) -> bool {
        let mut any = false;
        while let Some((core, message)) = self.engine.take_message() {
            any = true;
            self.cores[core.index()].send(Mail::Engine(message));
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
}

impl Shard for ClientShard {
    fn turn(&mut self, now: Instant) -> bool {
        let mut any = self.take_mail(now);
        any |= self.poll_fabrics(now);
        any |= self.engine.poll(now, &mut self.fabrics);
        self.tell_process();
        self.look_at_device(now);
        any |= self.deliver();
        any |= self.turn_front(now);
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
        soonest = earliest(soonest, self.front.deadline());
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
