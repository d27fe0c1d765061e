//! Cores of both ends as held by the cluster, with their messages and settings.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use nbd_bridge::BufferPools;
use rtrs_client::engine::{ClientEngine, ClientMessage};
use rtrs_client::{
    Change, Failover, HeartbeatSettings, PathTarget, Policy, SessionConfig, Tuning, VolumeConfig,
};
use rtrs_core::fabric::Fabric;
use rtrs_core::fabric::sim::sim_ip;
use rtrs_core::identity::Identity;
use rtrs_core::ids::{CoreIndex, ProviderIndex, SessionId};
use rtrs_core::limits::Limits;
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::AccessMode;
use rtrs_server::engine::message::{AdminReplyTo, AdminRequest, ControlMessage, Message};
use rtrs_server::path::chunks::ChunkPool;
use rtrs_server::{ServerEngine, ServerInstance, SessionParams};

use super::options::{Guest, MS, Options};
use super::workload::{Workload, resent_for};

/// Port of the portal.
pub(super) const PORT: u16 = 1234;
/// Time at which a core may next run, and whether it has to.
#[derive(Debug)]
pub(super) struct Pace {
    pub(super) free_at: Instant,
    pub(super) due: bool,
    pub(super) turns: u64,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self { free_at: Instant::ZERO, due: true, turns: 0 }
    }
}

/// Messages in transit to a core, in order, each with the time of its arrival.
#[derive(Debug)]
pub(super) struct Inbox<T>(VecDeque<(Instant, T)>);

impl<T> Inbox<T> {
    pub(super) const fn new() -> Self {
        Self(VecDeque::new())
    }

    pub(super) fn push(&mut self, at: Instant, message: T) {
        let last = self.0.back().map_or(at, |(last, _)| *last);
        self.0.push_back((at.max(last), message));
    }

    pub(super) fn pop(&mut self, now: Instant) -> Option<T> {
        if self.deadline()? > now {
            return None;
        }
        self.0.pop_front().map(|(_, message)| message)
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.0.front().map(|(at, _)| *at)
    }
}

/// Lets a client's core handle the messages and events that have arrived. Returns whether anything
/// happened.
pub(super) fn take_arrived(
    now: Instant,
    core: &mut ClientEngine,
    fabrics: &mut [Box<dyn Fabric>],
    inbox: &mut Inbox<ClientMessage>,
) -> bool {
    let mut busy = false;
    while let Some(message) = inbox.pop(now) {
        busy = true;
        core.handle_message(now, message, fabrics);
    }
    busy |= fabrics[0].poll(now);
    while let Some(event) = fabrics[0].next_event() {
        busy = true;
        core.handle_event(now, ProviderIndex(0), event, fabrics);
    }
    busy | core.poll(now, fabrics)
}

#[derive(Debug)]
pub(super) struct ClientHost {
    pub(super) core: ClientEngine,
    pub(super) fabrics: Vec<Box<dyn Fabric>>,
    pub(super) inbox: Inbox<ClientMessage>,
    pub(super) work: Workload,
    /// Memory of the front ends of its volumes.
    pub(super) pools: BufferPools,
    pub(super) pace: Pace,
}

impl ClientHost {
    /// Handles messages and events that have arrived. Returns whether anything happened.
    // Instruction counts refer to these two functions by name.
    #[inline(never)]
    pub(super) fn begin_turn(&mut self, now: Instant) -> bool {
        take_arrived(now, &mut self.core, &mut self.fabrics, &mut self.inbox)
    }

    /// Sends what the workload has submitted. Returns whether anything happened.
    #[inline(never)]
    pub(super) fn end_turn(&mut self, now: Instant) -> bool {
        let busy = self.core.pump(now, &mut self.fabrics);
        self.fabrics[0].flush(now);
        busy
    }

    /// Returns the change that sets its session's path selection policy.
    pub(super) fn choose(&self, policy: Policy) -> Option<Change> {
        let tuning = self.core.tuning()?;
        Some(Change::Tune(Box::new(Tuning { policy, ..tuning })))
    }

    /// Returns when the core needs a turn even without events.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let messages = earliest(self.inbox.deadline(), self.work.deadline());
        earliest(self.core.deadline(), messages)
    }
}

#[derive(Debug)]
pub(super) struct ServerHost {
    pub(super) core: ServerEngine,
    pub(super) fabrics: Vec<Box<dyn Fabric>>,
    pub(super) inbox: Inbox<Message>,
    pub(super) pace: Pace,
}

impl ServerHost {
    /// Runs a turn of the core. Returns whether anything happened, and the core's messages.
    pub(super) fn turn(&mut self, now: Instant) -> (bool, Vec<(CoreIndex, Message)>) {
        let Self { core, fabrics, inbox, pace } = self;
        let mut busy = false;
        while let Some(mail) = inbox.pop(now) {
            busy = true;
            core.handle_message(now, mail, fabrics);
        }
        busy |= fabrics[0].poll(now);
        while !core.is_turn_full()
            && let Some(event) = fabrics[0].next_event()
        {
            busy = true;
            core.handle_event(now, ProviderIndex(0), event, fabrics);
        }
        busy |= core.poll(now, fabrics);
        if core.is_stopping() {
            fabrics[0].stop_listening();
        }
        pace.turns += u64::from(busy);
        if busy && pace.turns.is_multiple_of(16) {
            core.check();
        }
        let messages = std::iter::from_fn(|| core.take_message()).collect();
        fabrics[0].flush(now);
        (busy, messages)
    }

    /// Returns when the core needs a turn even without events.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let messages = earliest(self.core.deadline(), self.inbox.deadline());
        earliest(messages, self.fabrics[0].deadline())
    }
}

/// Returns the address of the server on a path.
pub(super) fn server_ip(path: usize) -> IpAddr {
    sim_ip(1 + path as u8)
}

/// Returns the address of the client on a path.
pub(super) fn client_ip(path: usize) -> IpAddr {
    sim_ip(11 + path as u8)
}

fn heartbeat(options: &Options) -> HeartbeatSettings {
    HeartbeatSettings {
        interval: options.heartbeat,
        missed_max: 3,
        confirmed_missed_max: 2,
        idle_max: options.extra.idle.client,
    }
}

/// Returns the name of a path.
pub(super) fn path_name(path: usize) -> String {
    format!("path{path}")
}

pub(super) fn path_target(options: &Options, path: usize) -> PathTarget {
    PathTarget {
        peer_name: None,
        name: path_name(path),
        local: Some(client_ip(path)),
        remotes: vec![SocketAddr::new(server_ip(path), PORT)],
        unresolved: None,
        transport: "sim",
        provider: ProviderIndex(0),
        invalidate_reads: options.invalidate_reads,
        heartbeat: heartbeat(options),
        proves: true,
    }
}

/// Returns the settings of a volume opened for writing by a session without an earlier epoch.
pub(super) fn volume(export: &str) -> VolumeConfig {
    VolumeConfig {
        export: export.into(),
        access: AccessMode::ReadWrite,
        read_only_fallback: false,
        promotes: false,
        inherited_epoch: None,
        inherited_export: None,
        identity: None,
    }
}

/// Returns the settings of client number `client`, with the state that it takes over, if any.
pub(super) fn session_config(
    options: &Options,
    client: u8,
    kept: Option<u64>,
    identity: Option<Identity>,
) -> SessionConfig {
    SessionConfig {
        // A client that returns before its predecessor has ended uses a different name.
        name: if options.renamed { format!("sim{client}") } else { "sim".into() },
        volumes: vec![VolumeConfig {
            access: match options.guest {
                Some(Guest::Writer) => AccessMode::Migration,
                _ => AccessMode::ReadWrite,
            },
            inherited_epoch: kept.filter(|_| options.takeover.is_some()),
            identity,
            ..volume("vol")
        }],
        // A client that takes over waits until the server has ended the dead client's session.
        open_patience: match options.takeover {
            Some(_) if client > 1 => Duration::from_secs(60),
            None if client > 1 && options.faults.client_leave > 0 => Duration::from_secs(60),
            _ => Duration::ZERO,
        },
        resent_for: resent_for(options.takeover),
        id: SessionId([client; 16]),
        paths: (0..options.paths).map(|path| path_target(options, path)).collect(),
        shards: options.client_cores,
        policy: options.policy,
        path_run: options.path_run,
        heartbeat: heartbeat(options),
        connect_timeout: 500 * MS,
        reconnect_min: 20 * MS,
        reconnect_max: 500 * MS,
        io_timeout: options.io_timeout,
        slow_io: options.slow_io,
        no_path: options.no_path,
        failover: options.kernel.unwrap_or(Failover::Fast),
        queue_depth_limit: u16::MAX,
        prover: None,
        seed: options.seed,
    }
}

/// Returns the message that asks a server to end: an operator's drain, or a signal.
pub(super) fn ask_to_stop(drain: bool) -> Message {
    if !drain {
        return Message::Control(ControlMessage::Shutdown);
    }
    let request = AdminRequest::Drain { within: 1000 * MS };
    // Whether the drain finished in time does not matter; here the server starts again anyway.
    Message::Control(ControlMessage::Admin { request, reply: AdminReplyTo::new(drop) })
}

pub(super) fn server_params(options: &Options, instance: ServerInstance) -> SessionParams {
    let limits = Limits::new(u32::from(options.queue_depth), options.chunk_size)
        .expect("a seed draws sound limits");
    SessionParams {
        limits,
        memory_max: match options.extra.little_memory {
            // Just less than the memory of a path with the full depth.
            true => ChunkPool::bytes(limits) as u64 - 1,
            false => u64::MAX,
        },
        always_invalidate: options.always_invalidate.into(),
        heartbeat_interval: options.server_heartbeat,
        heartbeat_missed_max: 3,
        heartbeat_idle_max: options.extra.idle.server,
        handshake_timeout: 1000 * MS,
        shutdown_grace: 1000 * MS,
        cores: options.server_cores,
        instance,
        ..SessionParams::default()
    }
}
