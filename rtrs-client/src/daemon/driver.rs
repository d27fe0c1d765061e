//! Driver for one shard: connects the session's engine to providers, a ring and front ends.
//!
//! Every shard runs the same [`ClientShard`] with a [`ClientEngine`], the engine that also runs in
//! the simulator. Each turn handles messages and fabric events, runs the front ends, issues queued
//! IO and flushes once. The driver knows nothing about the protocol, paths, or kinds of front ends.

use std::io;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

use rtrs_core::fabric::FabricCounters;
use rtrs_core::front_end::FrontEndStats;
use rtrs_core::ids::{CoreIndex, ProviderIndex};
use rtrs_core::rt::{
    Clock, Inbox, Mailbox, PollPolicy, Ring, Sender, Shard, become_io_flusher, pin_to, run,
};
use rtrs_core::settings::Scheme;
use rtrs_core::time::{Duration, Instant, earliest};

use super::endings::{Endings, FrontsStopped};
use super::fabrics::FabricRegistry;
use super::fronts::{Fronts, NewFront, Opened};
use super::link_watcher::NetworkChange;
use super::notices::{Event, Notices};
use super::providers::Providers;
use super::shutdown::Shutdown;
use crate::engine::{
    Change, ClientEngine, ClientMessage, DeviceIndex, EngineReport, Reported, Resolved,
    SessionConfig,
};
use crate::frontend::{Complaint, FrontEndClient, FrontRequest, FrontSocket, MemoryChange};

/// Message to a shard, from another shard or from the rest of the process.
pub(crate) enum Message {
    Engine(ClientMessage),
    /// Passes a socket to the front end of a device.
    Socket(DeviceIndex, FrontSocket),
    /// Registers or deregisters memory of a device's user.
    Memory(DeviceIndex, MemoryChange),
    /// Adds the front end of an added device, which may carry the kernel's IO.
    AddFront {
        front: NewFront,
        carries_kernel: bool,
    },
    /// Lets the front end of a device accept clients.
    ServeFront(DeviceIndex),
    /// Removes the front end of a removed device.
    RemoveFront(DeviceIndex),
    /// Requests an event when a path next makes progress; for shard 0.
    WatchPaths,
    /// Stops watching the paths: the watch costs shard 0 a comparison each turn.
    IgnorePaths,
    /// Requests the shard's report.
    Query(Reported, mpsc::Sender<ClientShardReport>),
    /// Requests a list of the device's clients whose connections a detach would cut.
    Clients(DeviceIndex, mpsc::Sender<Vec<FrontEndClient>>),
    /// Changes the paths or the policy; for shard 0.
    Change {
        change: Change,
        reply: mpsc::Sender<Result<(), String>>,
    },
    /// Reports the addresses of a path's host, or the reason why the host has none; for shard 0.
    Resolved {
        path: String,
        found: Resolved,
    },
    /// Creates a provider of this scheme, and replies with its index.
    Provide {
        scheme: Scheme,
        reply: mpsc::Sender<Result<ProviderIndex, String>>,
    },
    /// Reports a change in the host's network; for shard 0.
    Network(NetworkChange),
    /// Finishes requests in flight within the time limit, closes everything and ends; for shard 0.
    Shutdown {
        grace: Duration,
    },
    /// Stops the front end of a device, or all; requests in flight must finish by the deadline.
    StopFront {
        device: Option<DeviceIndex>,
        deadline: Instant,
    },
    /// Reports that a shard's front end of a device, or all its front ends, have stopped; for shard
    /// 0.
    FrontStopped {
        device: Option<DeviceIndex>,
        stopped: FrontsStopped,
    },
    /// Runs a turn of the front ends, so that they check their connections.
    Look,
    /// Ends the thread.
    Exit,
}

/// Report of a shard.
#[derive(Debug)]
pub(crate) struct ClientShardReport {
    pub(crate) engine: EngineReport,
    /// Counters of each provider, by scheme.
    pub(crate) fabrics: Vec<(&'static str, FabricCounters)>,
    /// Counters of the front ends, by device.
    pub(crate) fronts: Vec<(DeviceIndex, FrontEndStats)>,
    /// Complaints of the front ends about clients, by device.
    pub(crate) complaints: Vec<(DeviceIndex, Complaint)>,
}

/// Parameters of a shard.
pub(crate) struct ShardStart {
    pub(crate) shard: CoreIndex,
    pub(crate) config: Arc<SessionConfig>,
    pub(crate) uuids: Arc<[[u8; 16]]>,
    pub(crate) inbox: Mailbox<Message>,
    pub(crate) shards: Vec<Sender<Message>>,
    pub(crate) registry: Arc<FabricRegistry>,
    pub(crate) fronts: Vec<NewFront>,
    pub(crate) events: Option<mpsc::Sender<Event>>,
    pub(crate) poll: PollPolicy,
    pub(crate) pin: Option<usize>,
}

/// Number of submission entries of a shard's ring.
const RING_ENTRIES: u32 = 512;

fn new_ring() -> io::Result<Rc<Ring>> {
    Ring::new(RING_ENTRIES)
        .map_err(|error| io::Error::new(error.kind(), format!("cannot set up io_uring: {error}")))
}

/// Sets up the rings of this many shards, all at the same time because they share the limit on
/// locked memory, and releases them.
///
/// # Errors
/// The system's error, with the limit and a remedy.
pub(crate) fn check_rings(shards: u16) -> io::Result<()> {
    (0..shards).map(|_| new_ring()).collect::<io::Result<Vec<_>>>().map(drop)
}

/// Runs a shard until its session ends. This is the body of a shard's thread.
pub(crate) fn run_shard(start: ShardStart) -> io::Result<()> {
    if let Some(cpu) = start.pin
        && let Err(error) = pin_to(cpu)
    {
        tracing::warn!("shard {} is not pinned to CPU {cpu}: {error}", start.shard);
    }
    let poll = start.poll;
    let ring = new_ring()?;
    let mut shard = ClientShard::new(start, &ring)?;
    run(&ring, poll, &mut shard)?;
    Ok(())
}

struct ClientShard {
    shard: CoreIndex,
    providers: Providers,
    inbox: Inbox<Message>,
    shards: Vec<Sender<Message>>,
    engine: ClientEngine,
    fronts: Fronts,
    events: Option<mpsc::Sender<Event>>,
    /// State of each volume as known to the process; on shard 0.
    notices: Notices,
    /// Whether all front ends must stop.
    stopping: bool,
    /// Whether all front ends have stopped.
    fronts_stopped: bool,
    /// Progress of the session's shutdown; on shard 0.
    shutdown: Shutdown,
    /// Front ends that have stopped, over all shards; on shard 0.
    endings: Endings,
    done: bool,
}

impl ClientShard {
    fn new(start: ShardStart, ring: &Rc<Ring>) -> io::Result<Self> {
        let inbox = start.inbox.arm(ring)?;
        let providers = Providers::new(start.registry, ring)?;
        let engine = ClientEngine::new(Clock.now(), start.shard, &start.config, &start.uuids);
        Ok(Self {
            shard: start.shard,
            providers,
            inbox,
            shards: start.shards,
            engine,
            fronts: Fronts::new(start.shard, ring, start.fronts),
            events: start.events,
            notices: Notices::default(),
            stopping: false,
            fronts_stopped: false,
            shutdown: Shutdown::default(),
            endings: Endings::default(),
            done: false,
        })
    }

    fn event(&self, event: Event) {
        if let Some(events) = &self.events
            && events.send(event).is_err()
        {
            tracing::debug!("event dropped: the session's main thread has ended");
        }
    }

    fn take_messages(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some(message) = self.inbox.take() {
            any = true;
            self.handle_message(now, message);
        }
        any
    }

    fn handle_message(&mut self, now: Instant, message: Message) {
        match message {
            Message::Engine(message) => {
                self.engine.handle_message(now, message, self.providers.fabrics());
                self.look_at_devices(now);
            }
            Message::Socket(device, socket) => self.fronts.take_socket(now, device, socket),
            Message::Memory(device, change) => self.fronts.change_memory(device, change),
            Message::AddFront { front, carries_kernel } => {
                if carries_kernel && let Err(error) = become_io_flusher() {
                    tracing::debug!("shard {}: {error}", self.shard);
                }
                self.fronts.add(front);
                self.look_at_devices(now);
            }
            Message::ServeFront(device) => self.fronts.serve(device),
            Message::RemoveFront(device) => self.fronts.remove(device),
            Message::WatchPaths => self.notices.watch_paths(&self.engine),
            Message::IgnorePaths => self.notices.ignore_paths(),
            Message::Query(reported, reply) => {
                let report = self.report(now, reported);
                if reply.send(report).is_err() {
                    tracing::debug!("report dropped: its requester has stopped waiting");
                }
            }
            Message::Clients(device, reply) => {
                // Clients that have just disconnected do not count.
                self.turn_fronts(now);
                // The requester may have stopped waiting.
                drop(reply.send(self.fronts.clients(device)));
            }
            Message::Change { change, reply } => self.change(now, change, &reply),
            Message::Resolved { path, found } => self.engine.resolved(&path, found),
            Message::Provide { scheme, reply } => {
                if reply.send(self.providers.provide(scheme)).is_err() {
                    tracing::debug!("provider dropped: its requester has stopped waiting");
                }
            }
            Message::Network(NetworkChange::Up(what)) => {
                self.engine.on_network_change(now, &what, self.providers.fabrics());
            }
            Message::Network(NetworkChange::Down { what, addresses }) => {
                self.engine.on_link_down(now, &what, &addresses, self.providers.fabrics());
            }
            Message::Shutdown { grace } => self.on_shutdown(now, grace),
            Message::StopFront { device: Some(device), deadline } => {
                self.fronts.stop(device, deadline);
            }
            Message::StopFront { device: None, deadline } => {
                self.stopping = true;
                self.fronts.stop_all(deadline);
            }
            Message::FrontStopped { device: Some(device), stopped } => {
                self.on_front_stopped(device, stopped);
            }
            Message::FrontStopped { device: None, stopped } => {
                self.endings.add(stopped);
                self.shutdown.shard_stopped();
            }
            Message::Look => {}
            Message::Exit => self.done = true,
        }
    }

    /// Changes the paths or the policy, and replies with the result.
    fn change(&mut self, now: Instant, change: Change, reply: &mpsc::Sender<Result<(), String>>) {
        let closed = match &change {
            Change::CloseVolume { export } => Some(export.clone()),
            _ => None,
        };
        let done = self.engine.change(now, change, self.providers.fabrics());
        self.notices.await_end(closed.filter(|_| done.is_ok()));
        if reply.send(done.map_err(|error| error.to_string())).is_err() {
            tracing::debug!("answer to a change dropped: its requester has stopped waiting");
        }
    }

    /// Passes newly opened devices to their front ends.
    fn look_at_devices(&mut self, now: Instant) {
        while let Some(opened) = self.fronts.open_next(now, &self.engine) {
            match opened {
                Opened::Ready(device, geometry) if self.shard.0 == 0 => {
                    // Save before the device becomes available.
                    for event in self.notices.ready(device, geometry.size, &self.engine) {
                        self.event(event);
                    }
                    self.event(Event::Ready(device, geometry));
                }
                Opened::Ready(..) => {}
                Opened::Failed(device, error) => {
                    tracing::error!("shard {}: {error}", self.shard);
                    self.event(Event::FrontFailed(device, error));
                }
            }
        }
    }

    /// Runs a turn of the front ends and handles their requests.
    fn turn_fronts(&mut self, now: Instant) -> bool {
        let any = self.fronts.turn(now);
        while let Some((device, request)) = self.fronts.next_request() {
            match request {
                FrontRequest::Client(shard, socket) => {
                    let socket = FrontSocket::Client(socket);
                    self.shards[shard.index()].send(Message::Socket(device, socket));
                }
                FrontRequest::KernelGone => {
                    self.event(Event::KernelGone(device, self.shard));
                }
            }
        }
        any
    }

    /// Counts a device's front end that has stopped on a shard.
    fn on_front_stopped(&mut self, device: DeviceIndex, stopped: FrontsStopped) {
        if let Some(abandoned) = self.endings.add_device(device, stopped, self.shards.len()) {
            let left = self.endings.left(device, &self.engine);
            self.event(Event::FrontStopped { device, abandoned, left });
        }
    }

    /// Returns the event that reports the end of the session. If `running`, some front ends have
    /// not stopped.
    fn done_event(&mut self, running: bool) -> Event {
        let devices: Vec<DeviceIndex> = self.fronts.devices().filter(|_| !running).collect();
        let left = devices.into_iter().filter_map(|device| {
            let left = self.endings.left(device, &self.engine)?;
            Some((device, left))
        });
        Event::Done { left: left.collect(), abandoned: self.endings.abandoned }
    }

    fn report(&self, now: Instant, reported: Reported) -> ClientShardReport {
        ClientShardReport {
            engine: self.engine.report(now, reported),
            fabrics: self.providers.counters(),
            fronts: self.fronts.stats(),
            complaints: self.fronts.complaints(),
        }
    }

    /// Starts the shutdown, or shortens one in progress.
    fn on_shutdown(&mut self, now: Instant, grace: Duration) {
        let deadline = now + grace;
        if !self.shutdown.begin(deadline, self.shards.len()) {
            return;
        }
        for shard in &self.shards {
            shard.send(Message::StopFront { device: None, deadline });
        }
    }

    /// Advances stopping front ends and, on shard 0, the shutdown.
    fn poll_stopping(&mut self, now: Instant) -> bool {
        let mut any = self.fronts.poll_stopping(now, &self.engine);
        while let Some((device, stopped)) = self.fronts.next_stopped() {
            let device = Some(device);
            self.shards[0].send(Message::FrontStopped { device, stopped });
        }
        if self.stopping
            && !self.fronts_stopped
            && let Some(stopped) = self.fronts.all_stopped()
        {
            self.fronts_stopped = true;
            self.shards[0].send(Message::FrontStopped { device: None, stopped });
            any = true;
        }
        if self.shutdown.ends_paths(now) {
            self.engine.detach(now, self.providers.fabrics());
        }
        if let Some(running) = self.shutdown.finish(now, self.engine.is_done()) {
            let done = self.done_event(running);
            self.event(done);
            for shard in &self.shards {
                shard.send(Message::Exit);
            }
            any = true;
        }
        any
    }

    fn poll_fabrics(&mut self, now: Instant) -> bool {
        let mut any = false;
        for provider in self.providers.all() {
            any |= self.providers.poll(provider, now);
            while let Some(event) = self.providers.next_event(provider) {
                any = true;
                self.engine.handle_event(now, provider, event, self.providers.fabrics());
            }
        }
        any
    }

    /// Sends the engine's messages to the other shards. Returns whether there were any.
    fn deliver(&mut self) -> bool {
        let mut any = false;
        while let Some((shard, message)) = self.engine.take_message() {
            any = true;
            self.shards[shard.index()].send(Message::Engine(message));
        }
        any
    }

    /// Notifies the process of changes in the session.
    fn notify_process(&mut self, now: Instant) {
        if self.shard.0 == 0 {
            let devices = self.fronts.devices();
            for event in self.notices.changes(now, devices, &self.engine) {
                self.event(event);
            }
            while let Some(path) = self.engine.take_unreached() {
                self.event(Event::Unreached(path));
            }
        }
    }
}

impl Shard for ClientShard {
    type Message = Message;

    fn turn(&mut self, now: Instant) -> bool {
        let mut any = self.take_messages(now);
        any |= self.poll_fabrics(now);
        any |= self.engine.poll(now, self.providers.fabrics());
        self.notify_process(now);
        self.look_at_devices(now);
        any |= self.deliver();
        let submitted = self.turn_fronts(now);
        any |= submitted;
        // Taking many requests from a front end takes time.
        let now = if submitted { Clock.now() } else { now };
        any |= self.engine.pump(now, self.providers.fabrics());
        self.providers.flush(now);
        any |= self.poll_stopping(now);
        any | self.deliver()
    }

    fn deadline(&self) -> Option<Instant> {
        let mut soonest = self.engine.deadline();
        soonest = earliest(soonest, self.providers.deadline());
        soonest = earliest(soonest, self.fronts.deadline());
        soonest = earliest(soonest, self.notices.deadline());
        earliest(soonest, self.shutdown.deadline())
    }

    fn inflight(&self) -> usize {
        self.engine.inflight()
    }

    fn has_input(&self) -> bool {
        self.fronts.has_input()
    }

    fn prepare_sleep(&mut self) -> bool {
        self.fronts.prepare_sleep()
    }

    fn is_done(&self) -> bool {
        self.done
    }

    fn inbox(&mut self) -> Option<&mut Inbox<Message>> {
        Some(&mut self.inbox)
    }
}
