//! Binds the session's engine to providers, a ring and a front end: one shard's turn.
//!
//! Every shard runs the same [`ClientShard`] over a [`ClientEngine`], the engine that the simulator
//! runs too. A turn goes: messages, fabric events, front end, issue what waits, one flush. Nothing
//! here knows of the protocol, of paths, or what the front end is.

use std::rc::Rc;
use std::sync::{Arc, mpsc};

use nbd_bridge::BridgeStats;
use rtrs_core::block::{BlockDevice, Geometry};
use rtrs_core::fabric::{Fabric, FabricCounters};
use rtrs_core::identity::Identity;
use rtrs_core::ids::{CoreIndex, ProviderIndex};
use rtrs_core::rt::{Clock, Inbox, Mailbox, PollPolicy, Ring, Sender, Shard, pin_to, run};
use rtrs_core::settings::Scheme;
use rtrs_core::time::{Duration, Instant, earliest};

use super::fabrics::{FabricRegistry, provider_of};
use crate::engine::{
    Change, ClientEngine, ClientMessage, EngineReport, SessionConfig, SessionFailure,
};
use crate::frontend::{FrontEnd, FrontRequest, FrontSocket, MakeFrontEnd, Place};

/// How long after a shutdown's deadline the paths wait for the shards to count what still ran. A
/// shard counts when it wakes at that deadline, so only one that is stuck takes longer.
const COUNT_PATIENCE: Duration = Duration::from_secs(1);
/// Bound of the paths' end after a shutdown's deadline.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// A message to a shard: from another one, or from the rest of the process.
pub(crate) enum Message {
    Engine(ClientMessage),
    /// For the front end.
    Socket(FrontSocket),
    /// Report what the shard did.
    Query(mpsc::Sender<ClientShardReport>),
    /// To shard 0: change paths or policy.
    Change {
        change: Change,
        reply: mpsc::Sender<Result<(), String>>,
    },
    /// Make a provider of this scheme, and reply with its index.
    Provide {
        scheme: Scheme,
        reply: mpsc::Sender<Result<ProviderIndex, String>>,
    },
    /// To shard 0: something in the host's network is up or new.
    Network {
        what: String,
    },
    /// To shard 0: finish what is in flight within the bound, close everything, end.
    Shutdown {
        grace: Duration,
    },
    /// Stop the front end; in flight is finished until the deadline.
    StopFront {
        deadline: Instant,
    },
    /// To shard 0: a shard's front end has stopped. So many IOs had not ended by its deadline.
    FrontStopped {
        abandoned: usize,
    },
    /// Turn the front end, which then looks at its connections.
    Look,
    /// End the thread.
    Exit,
}

/// What a shard reports.
#[derive(Debug)]
pub(crate) struct ClientShardReport {
    pub(crate) engine: EngineReport,
    /// What each provider did, by scheme.
    pub(crate) fabrics: Vec<(&'static str, FabricCounters)>,
    pub(crate) bridge: BridgeStats,
}

/// From shard 0 to the process.
#[derive(Debug)]
pub(crate) enum Event {
    /// The device is open and clients can connect.
    Ready(Box<Geometry>),
    /// The session cannot come about.
    Failed(SessionFailure),
    /// The device has another size.
    Resized(u64),
    /// The NBD front end could not start.
    FrontFailed(std::io::Error),
    /// The kernel has closed this shard's socket.
    KernelGone(CoreIndex),
    /// A shard's thread ended with this error.
    ShardFailed(CoreIndex, String),
    /// What whoever takes over from this process has to know: the epoch of the server's cache.
    SavedEpoch(u64),
    /// The same: which server's export it is.
    Pinned(Identity),
    /// Everything ended.
    Done {
        /// IOs that had not when their time was over.
        abandoned: usize,
    },
}

/// Everything a shard starts with.
pub(crate) struct ShardStart {
    pub(crate) shard: CoreIndex,
    pub(crate) config: Arc<SessionConfig>,
    pub(crate) uuids: Arc<[[u8; 16]]>,
    pub(crate) inbox: Mailbox<Message>,
    pub(crate) shards: Vec<Sender<Message>>,
    pub(crate) registry: Arc<FabricRegistry>,
    pub(crate) front: MakeFrontEnd,
    pub(crate) events: Option<mpsc::Sender<Event>>,
    pub(crate) poll: PollPolicy,
    pub(crate) pin: Option<usize>,
}

/// Runs a shard until its session ends. The body of a shard's thread.
pub(crate) fn run_shard(start: ShardStart) -> std::io::Result<()> {
    if let Some(cpu) = start.pin
        && let Err(error) = pin_to(cpu)
    {
        tracing::warn!("shard {} is not pinned to CPU {cpu}: {error}", start.shard);
    }
    let poll = start.poll;
    let ring = Ring::new(512)?;
    let mut shard = ClientShard::new(start, &ring)?;
    run(&ring, poll, &mut shard)?;
    Ok(())
}

struct ClientShard {
    shard: CoreIndex,
    ring: Rc<Ring>,
    config: Arc<SessionConfig>,
    /// In the order that `PathTarget::provider` counts.
    fabrics: Vec<Box<dyn Fabric>>,
    /// Of `fabrics`.
    schemes: Vec<Scheme>,
    registry: Arc<FabricRegistry>,
    inbox: Inbox<Message>,
    shards: Vec<Sender<Message>>,
    engine: ClientEngine,
    front: Box<dyn FrontEnd>,
    /// The front end has the device.
    opened: bool,
    events: Option<mpsc::Sender<Event>>,
    reported_failure: bool,
    saved_epoch: Option<u64>,
    size: Option<u64>,
    identity: Option<Identity>,
    /// Deadline of a front end that is stopping.
    stopping: Option<Instant>,
    /// It has stopped.
    front_stopped: bool,
    /// On shard 0: when the shutdown has to be over, and how many fronts still run.
    shutdown: Option<(Instant, usize)>,
    /// On shard 0: IOs of all shards that had not ended when their time was over.
    abandoned: usize,
    done: bool,
}

impl ClientShard {
    fn new(start: ShardStart, ring: &Rc<Ring>) -> std::io::Result<Self> {
        let inbox = start.inbox.arm(ring)?;
        let (schemes, fabrics) = start.registry.first(ring)?.into_iter().unzip();
        let engine = ClientEngine::new(Clock.now(), start.shard, &start.config, &start.uuids);
        Ok(Self {
            shard: start.shard,
            ring: Rc::clone(ring),
            config: start.config,
            fabrics,
            schemes,
            registry: start.registry,
            inbox,
            shards: start.shards,
            engine,
            front: (start.front)(),
            opened: false,
            events: start.events,
            reported_failure: false,
            saved_epoch: None,
            size: None,
            identity: None,
            stopping: None,
            front_stopped: false,
            shutdown: None,
            abandoned: 0,
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

    fn take_messages(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some(message) = self.inbox.take() {
            any = true;
            match message {
                Message::Engine(message) => {
                    self.engine.handle_message(now, message, &mut self.fabrics);
                    self.look_at_device(now);
                }
                Message::Socket(socket) => self.front.take_socket(now, socket),
                Message::Query(reply) => {
                    let report = self.report(now);
                    if reply.send(report).is_err() {
                        tracing::debug!("nobody waits for a report any more");
                    }
                }
                Message::Change { change, reply } => {
                    let done = self.engine.change(now, change, &mut self.fabrics);
                    if reply.send(done).is_err() {
                        tracing::debug!("nobody waits for a change any more");
                    }
                }
                Message::Provide { scheme, reply } => {
                    if reply.send(self.provide(scheme)).is_err() {
                        tracing::debug!("nobody waits for a provider any more");
                    }
                }
                Message::Network { what } => {
                    self.engine.on_network_change(now, &what, &mut self.fabrics);
                }
                Message::Shutdown { grace } => self.on_shutdown(now, grace),
                Message::StopFront { deadline } => {
                    self.front.stop();
                    if !self.front_stopped {
                        self.stopping = Some(deadline);
                    }
                }
                Message::FrontStopped { abandoned } => {
                    self.abandoned += abandoned;
                    if let Some((_, running)) = self.shutdown.as_mut() {
                        *running = running.saturating_sub(1);
                    }
                }
                Message::Look => {}
                Message::Exit => self.done = true,
            }
        }
        any
    }

    /// This scheme's provider, which is made if there is none.
    fn provide(&mut self, scheme: Scheme) -> Result<ProviderIndex, String> {
        if let Some(provider) = provider_of(&self.schemes, scheme) {
            return Ok(provider);
        }
        let fabric = self.registry.make(scheme, &self.ring).map_err(|e| e.to_string())?;
        self.fabrics.push(fabric);
        self.schemes.push(scheme);
        provider_of(&self.schemes, scheme).ok_or_else(|| "too many providers".to_owned())
    }

    /// Gives the front end the device once it is open.
    fn look_at_device(&mut self, now: Instant) {
        if self.opened {
            return;
        }
        let Some(device) = self.engine.device() else { return };
        self.opened = true;
        let geometry = device.geometry().clone();
        let place = Place { shard: self.shard, ring: &self.ring, export: &self.config.export };
        match self.front.open(now, &place, device) {
            Ok(()) if self.shard.0 == 0 => {
                self.size = Some(geometry.size);
                self.event(Event::Ready(Box::new(geometry)));
            }
            Ok(()) => {}
            Err(error) => {
                tracing::error!("shard {}: {error}", self.shard);
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
                    self.shards[shard.index()].send(Message::Socket(FrontSocket::Client(socket)));
                }
                FrontRequest::KernelGone => self.event(Event::KernelGone(self.shard)),
            }
        }
        any
    }

    fn report(&self, now: Instant) -> ClientShardReport {
        ClientShardReport {
            engine: self.engine.report(now),
            fabrics: self.fabrics.iter().map(|one| (one.scheme(), one.counters())).collect(),
            bridge: self.front.stats(),
        }
    }

    /// Begins the end, or hurries one that has begun.
    fn on_shutdown(&mut self, now: Instant, grace: Duration) {
        let deadline = now + grace;
        let running = match self.shutdown {
            Some((before, _)) if before <= deadline => return,
            Some((_, running)) => running,
            None => self.shards.len(),
        };
        self.shutdown = Some((deadline, running));
        for shard in &self.shards {
            shard.send(Message::StopFront { deadline });
        }
    }

    /// Moves a stopping front end and, on shard 0, the shutdown on.
    fn poll_stopping(&mut self, now: Instant) -> bool {
        let mut any = false;
        if let Some(deadline) = self.stopping {
            let over = now >= deadline;
            // Also those whose client is gone.
            let running = self.engine.inflight();
            if over {
                self.front.abort();
            }
            if over || (running == 0 && self.front.is_idle()) {
                self.stopping = None;
                self.front_stopped = true;
                self.shards[0].send(Message::FrontStopped { abandoned: running });
                any = true;
            }
        }
        let Some((deadline, running)) = self.shutdown else { return any };
        // That fails what is in flight on every shard, so each of them counts its own before.
        if running == 0 || now >= deadline + COUNT_PATIENCE {
            self.engine.detach(now, &mut self.fabrics);
        }
        // The end of all paths has bounds of its own; this one is for a provider that fails them.
        let is_done = self.engine.is_done() && running == 0;
        if is_done || now >= deadline + END_PATIENCE {
            self.shutdown = None;
            self.event(Event::Done { abandoned: self.abandoned });
            for shard in &self.shards {
                shard.send(Message::Exit);
            }
            any = true;
        }
        any
    }

    fn poll_fabrics(&mut self, now: Instant) -> bool {
        let mut any = false;
        for provider in ProviderIndex::all(self.fabrics.len()) {
            any |= self.fabrics[provider.index()].poll(now);
            while let Some(event) = self.fabrics[provider.index()].next_event() {
                any = true;
                self.engine.handle_event(now, provider, event, &mut self.fabrics);
            }
        }
        any
    }

    /// Hands the engine's messages to the other shards. True when there was one.
    fn deliver(&mut self) -> bool {
        let mut any = false;
        while let Some((shard, message)) = self.engine.take_message() {
            any = true;
            self.shards[shard.index()].send(Message::Engine(message));
        }
        any
    }

    /// Notifies the process of what has changed in the session.
    fn notify_process(&mut self) {
        if !self.reported_failure
            && let Some(failure) = self.engine.failure().cloned()
        {
            self.reported_failure = true;
            self.event(Event::Failed(failure));
        }
        let epoch = self.engine.saved_epoch();
        if self.saved_epoch != epoch {
            self.saved_epoch = epoch;
            epoch.into_iter().for_each(|epoch| self.event(Event::SavedEpoch(epoch)));
        }
        if self.size.is_some() && self.shard.0 == 0 {
            let size = self.engine.size();
            if self.size != size {
                self.size = size;
                size.into_iter().for_each(|size| self.event(Event::Resized(size)));
            }
        }
        let identity = self.engine.pinned_identity();
        if self.identity != identity {
            self.identity = identity;
            identity.into_iter().for_each(|identity| self.event(Event::Pinned(identity)));
        }
    }
}

impl Shard for ClientShard {
    type Message = Message;

    fn turn(&mut self, now: Instant) -> bool {
        let mut any = self.take_messages(now);
        any |= self.poll_fabrics(now);
        any |= self.engine.poll(now, &mut self.fabrics);
        self.notify_process();
        self.look_at_device(now);
        any |= self.deliver();
        let submitted = self.turn_front(now);
        any |= submitted;
        // Taking many requests from a front end takes time.
        let now = if submitted { Clock.now() } else { now };
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
            .map(|(at, running)| at + if running == 0 { END_PATIENCE } else { COUNT_PATIENCE });
        earliest(soonest, shutdown)
    }

    fn inflight(&self) -> usize {
        self.engine.inflight()
    }

    fn is_done(&self) -> bool {
        self.done
    }

    fn inbox(&mut self) -> Option<&mut Inbox<Message>> {
        Some(&mut self.inbox)
    }
}
