//! Starts and runs the server from a validated plan.
//!
//! Defines [`serve`], the last function that the binary calls: it opens the exports, starts a
//! thread per shard, opens the control socket, prints the addresses, and runs until a signal or a
//! drain ends it. Each thread creates its own ring, providers and engine; if any shard fails, the
//! others are stopped and the error is returned. With `user`, the server switches to that user
//! after it has begun to listen and before it serves any client.

use std::fs;
use std::io::{self, Read};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rtrs_core::block::BlockSource;
use rtrs_core::identity::EvictionKey;
use rtrs_core::limits::Limits;
use rtrs_core::local::{ServiceManager, SocketRenewal};
use rtrs_core::logging::log_to_stderr;
use rtrs_core::metrics::MetricsServer;
use rtrs_core::proto::ping::PingServerConfig;
use rtrs_core::rt::{
    Forwarding, PollPolicy, Sender, Signal, Signals, boot_number, pin_plan, random_number,
};
use rtrs_core::settings::announce;

use crate::daemon::access::ServerAccess;
use crate::daemon::audit;
use crate::daemon::control_shard::ControlShard;
use crate::daemon::control_socket::{Served, ServerControl};
use crate::daemon::expiry;
use crate::daemon::exports::startup::{Stalled, Started, open_all};
use crate::daemon::exports::{Exports, OpenError, Opener, wait_saved};
use crate::daemon::identity::Sources;
use crate::daemon::metrics::ServerMetrics;
use crate::daemon::open_files;
use crate::daemon::portals::{Portals, passed};
use crate::daemon::privileges::RunAs;
use crate::daemon::reload::{Accepts, Changes, Reload, Reread};
use crate::daemon::retry;
use crate::daemon::search::{FlushingCloser, SearchPath, Searcher};
use crate::daemon::shards::{Setup, ShardThreads, mailboxes};
use crate::daemon::sizes;
use crate::daemon::targets;
use crate::daemon::warnings::{warn, warnings};
use crate::engine::finder::Finder;
use crate::engine::message::{ControlMessage, Message};
use crate::engine::session::{ServerInstance, SessionParams};
use crate::error::{Error, ErrorKind, failed};
use crate::export::{Export, ExportTable};
use crate::plan::Plan;
use crate::settings::{ExportSpec, Id, OnMissing, SearchSpec, Settings};
use crate::state::StateDir;

/// Maximum time for the flushes when the process exits.
const FLUSH_MAX: Duration = Duration::from_secs(10);
/// Maximum time to save the last writers when the process exits.
const WRITERS_MAX: Duration = Duration::from_secs(2);

/// Runs the server until SIGTERM or SIGINT, or until it is drained. `reread` reads the settings
/// again at the operator's request.
///
/// # Errors
/// [`ErrorKind::Export`] for a target that cannot be opened, [`ErrorKind::Listen`] for a portal
/// that cannot be listened on, [`ErrorKind::InUse`] if the control socket is in use,
/// [`ErrorKind::System`] for system errors and for an incomplete drain.
pub fn serve(plan: &Plan, reread: Reread) -> Result<(), Error> {
    run_server(plan, |source| source, reread)
}

/// Runs the server like [`serve`], with a layer over each export's block source. Used by test
/// servers that delay, hold or break IO on command.
///
/// # Errors
/// The errors of [`serve`].
pub fn serve_over(
    plan: &Plan,
    over: impl Fn(Arc<dyn BlockSource>) -> Arc<dyn BlockSource>,
) -> Result<(), Error> {
    // Missing exports stop the start, because an export that is opened later would lack the layer.
    let mut plan = plan.clone();
    plan.settings.on_missing = OnMissing::Refuse;
    let same = plan.clone();
    run_server(&plan, over, Box::new(move || Ok(same.clone())))
}

fn run_server(
    plan: &Plan,
    over: impl Fn(Arc<dyn BlockSource>) -> Arc<dyn BlockSource>,
    reread: Reread,
) -> Result<(), Error> {
    let set = &plan.settings;
    let user = RunAs::find(set)?;
    user.iter().try_for_each(|user| user.prepare(set))?;
    let _log = log_to_stderr(&set.log, set.log_format)
        .map_err(failed(ErrorKind::System, "cannot start the logging thread"))?;
    // Collect the warnings while still root, which can read all files.
    let warnings = warnings(set);
    open_files::prepare(set, set.shards.count());
    let Opened { sources, state, opener, exports, failures } =
        open_exports(set, user.as_ref(), over)?;
    let portals = Portals::new(plan, passed()?)?;
    let cores = set.shards.count();
    let server_id = sources.server(set.server_id.as_ref().get().map(Id::get));
    let params = SessionParams { server_id, ..session_params(plan, cores)? };
    let (senders, mailboxes) = mailboxes(cores)?;
    let finder = start_finder(set, &sources, &state, &senders)?;
    let exports = ExportTable::with_finder(exports, finder);
    exports.set_closer(Box::new(FlushingCloser));
    exports.set_access(ServerAccess::new(set).policy());
    let signals = Signals::take().map_err(failed(ErrorKind::System, "cannot handle signals"))?;

    // The thread guard is dropped after the sources of events, and waits until all events are
    // written.
    let (audit, _audit_thread) = audit::start(set)?;
    let setup = Arc::new(Setup {
        params,
        exports,
        portals,
        policy: PollPolicy { budget_max: set.poll.get() },
        cpus: pin_plan(set.pin, cores),
        senders,
        audit,
        released: OnceLock::new(),
    });
    let shards = ShardThreads::start(&setup, mailboxes)?;
    let listening = shards.listening().and_then(|portals| {
        user.iter().try_for_each(|user| user.enter(setup.portals.pins_memory()))?;
        Ok(portals)
    });
    let manager = ServiceManager::from_env();
    let changes = watch_changes(set, reread, opener, failures, &setup);
    changes.exports.note_dangling(&plan.dangling);
    let endpoints =
        listening.and_then(|portals| Endpoints::open(set, portals, &setup, &changes, &manager));
    let socket = endpoints.as_ref().ok().and_then(Endpoints::control_renewal);
    let signaled = Signaled { control: setup.control(), changes, manager: manager.clone(), socket };
    let forwarding = signaled.forward(signals);
    let started = endpoints.and_then(|endpoints| forwarding.map(|signals| (endpoints, signals)));
    // Signals are forwarded, and metrics served, until the threads have ended.
    let (outcome, control, _until_the_end) = match started {
        Ok((Endpoints { portals, control, metrics }, forwarding)) => {
            setup.release();
            announce_start(&setup, &portals, warnings, &manager);
            (Ok(()), control, Some((forwarding, metrics)))
        }
        Err(error) => {
            setup.stop();
            (Err(error), None, None)
        }
    };
    let ended = shards.join();
    let closed = control.map_or(Ok(()), ServerControl::close);
    stop_cleanly(&setup.exports, &state);
    // Other references to the table may exist until the process exits.
    setup.exports.clear();
    outcome.and(ended).and(closed)
}

/// Exports defined by the settings, and the parts that open further exports.
struct Opened {
    sources: Sources,
    state: Arc<StateDir>,
    opener: Arc<Opener>,
    exports: Vec<Export>,
    /// Exports that could not be opened, with the reasons.
    failures: Vec<(ExportSpec, OpenError)>,
}

/// Opens the exports of the settings, wrapping the block source of each with `over`.
fn open_exports(
    set: &Settings,
    user: Option<&RunAs>,
    over: impl Fn(Arc<dyn BlockSource>) -> Arc<dyn BlockSource>,
) -> Result<Opened, Error> {
    let sources = Sources::system();
    let state = Arc::new(StateDir::open(set.state_dir.as_deref(), user.map(RunAs::account)));
    let opener = Arc::new(Opener::new(sources.clone(), Arc::clone(&state)));
    // Targets are opened as root. Switching to the user waits for all threads, so no attempt may
    // still be running then.
    let stalled = if user.is_some() { Stalled::Refused } else { Stalled::Left };
    let Started { mut exports, failures } = open_all(set, &opener, stalled)?;
    for export in &mut exports {
        export.source = over(Arc::clone(&export.source));
    }
    Ok(Opened { sources, state, opener, exports, failures })
}

/// Starts the threads that watch exports and certificates for changes. A failure to start a thread
/// is only logged.
fn watch_changes(
    set: &Settings,
    reread: Reread,
    opener: Arc<Opener>,
    failures: Vec<(ExportSpec, OpenError)>,
    setup: &Setup,
) -> Arc<Changes> {
    let table = &setup.exports;
    if let Err(error) = sizes::watch(table, setup.control()) {
        tracing::error!("cannot watch for exports that grow: cannot start a thread: {error}");
    }
    let tls = setup.portals.tls();
    if let Some(Err(error)) = tls.as_ref().map(expiry::watch) {
        tracing::error!("cannot watch for expiring certificates: cannot start a thread: {error}");
    }
    let (control, audit) = (setup.control(), setup.audit.clone());
    let exports = Exports::new(Arc::clone(table), opener, control, tls.clone(), set, audit);
    let reload = Reload::new(set, reread, setup.audit.clone(), tls);
    let changes = Arc::new(Changes::new(exports, reload));
    if let Err(error) = retry::watch(&changes, failures) {
        tracing::error!("cannot retry failed exports: cannot start a thread: {error}");
    }
    match targets::watch(&changes, setup.control()) {
        Ok(examiner) => table.set_examiner(examiner),
        Err(error) => {
            tracing::error!("cannot watch for replaced targets: cannot start a thread: {error}");
        }
    }
    changes
}

/// Portals of a server, with the server's control and metrics sockets.
struct Endpoints {
    portals: Vec<String>,
    control: Option<ServerControl>,
    metrics: Option<MetricsServer>,
}

impl Endpoints {
    /// Starts the watchdog and the metrics server, then opens the control socket.
    fn open(
        set: &Settings,
        portals: Vec<String>,
        setup: &Setup,
        changes: &Arc<Changes>,
        manager: &ServiceManager,
    ) -> Result<Self, Error> {
        let metrics = ServerMetrics::new(&setup.senders, &setup.exports, setup.portals.tls());
        let answering = Arc::clone(&metrics);
        manager
            .watch(move || answering.all_shards_answer())
            .map_err(failed(ErrorKind::System, "cannot start a thread"))?;
        let serving = set.metrics.as_ref().map(|at| metrics.serve(at)).transpose()?;
        let served = Served {
            exports: Arc::clone(&setup.exports),
            changes: Arc::clone(changes),
            control: setup.control(),
            metrics,
            metrics_at: serving.as_ref().map(|server| server.at().to_owned()),
            activated: setup.portals.activated(),
        };
        let control = ServerControl::open(set, &portals, served)?;
        Ok(Self { portals, control, metrics: serving })
    }

    /// Handle that recreates the path of the control socket.
    fn control_renewal(&self) -> Option<SocketRenewal> {
        self.control.as_ref().map(ServerControl::renewal)
    }
}

/// Parts of the server that signals affect.
struct Signaled {
    control: ControlShard,
    changes: Arc<Changes>,
    manager: ServiceManager,
    socket: Option<SocketRenewal>,
}

impl Signaled {
    /// Starts the thread that handles the signals of the process.
    fn forward(self, signals: Signals) -> Result<Forwarding, Error> {
        signals
            .forward(move |signal| self.take(signal))
            .map_err(failed(ErrorKind::System, "cannot start a thread"))
    }

    fn take(&self, signal: Signal) {
        match signal {
            Signal::Stop => {
                self.manager.stopping();
                self.control.0.send(Message::Control(ControlMessage::Shutdown));
            }
            Signal::Reload => {
                let (changes, socket) = (Arc::clone(&self.changes), self.socket.clone());
                let thread = thread::Builder::new().name("reload".into());
                let started = thread.spawn(move || {
                    socket.iter().for_each(SocketRenewal::renew);
                    // Nobody waits for a reply to a signal, and the error has been logged.
                    drop(changes.reload(Accepts::LostAccess));
                });
                if let Err(error) = started {
                    tracing::error!("SIGHUP: cannot start a thread: {error}");
                }
            }
            Signal::Dump => self.control.dump(),
        }
    }
}

/// Logs and prints that the server is ready, and notifies the service manager.
fn announce_start(
    setup: &Setup,
    portals: &[String],
    warnings: Vec<String>,
    manager: &ServiceManager,
) {
    log_start(setup, portals);
    warn(warnings);
    let lines = portals.iter().map(|portal| format!("listening on {portal}\n")).collect();
    if let Err(error) = announce(lines) {
        // Not fatal: the server runs without this output.
        tracing::debug!("cannot print the portals: {error}");
    }
    manager.ready(&format!("listening on {}", portals.join(" ")));
}

/// Flushes exports whose unflushed changes are known only to this process, so that the next process
/// can keep their cache IDs. Saves the last writers.
fn stop_cleanly(exports: &Arc<ExportTable>, state: &StateDir) {
    let tied = exports.all().into_iter().filter(|(_, export)| export.epoch.is_tied());
    let flushing = tied.filter_map(|(_, export)| {
        let (done, flushed) = mpsc::channel();
        let flushes = Arc::clone(&export);
        let thread = thread::Builder::new().name("rtrs-flush".into());
        // The main thread may have stopped waiting.
        let started = thread.spawn(move || drop(done.send(flushes.source.settle())));
        started.ok().map(|_| (export, flushed))
    });
    let flushing: Vec<_> = flushing.collect();
    let until = Instant::now() + FLUSH_MAX;
    for (export, flushed) in flushing {
        let late = || Err(io::ErrorKind::TimedOut.into());
        let left = until.saturating_duration_since(Instant::now());
        match flushed.recv_timeout(left).unwrap_or_else(|_| late()) {
            Ok(()) => {
                wait_saved(&export.epoch, export.epoch.rises());
                export.epoch.note_clean_stop();
            }
            Err(error) => tracing::error!(
                export = &*export.name,
                %error,
                "the final flush failed; clients with unflushed writes will be notified of a loss"
            ),
        }
    }
    if !state.save_writers(WRITERS_MAX) {
        tracing::warn!(
            "cannot save the last writers in state-dir; after this restart, a returning client may \
             write even though another client has written in the meantime"
        );
    }
}

/// Logs the portals and limits of the server.
fn log_start(setup: &Setup, portals: &[String]) {
    let (params, activated) = (&setup.params, setup.portals.activated());
    for portal in portals {
        match activated.contains(portal) {
            true => tracing::info!(%portal, "listening on a socket of the service manager"),
            false => tracing::info!(%portal, "listening"),
        }
    }
    let limits = params.limits;
    tracing::info!(
        version = env!("RTRS_VERSION"),
        queue_depth = limits.queue_depth(),
        chunk_size = limits.chunk_size(),
        shards = params.cores,
        sessions_max = params.sessions_max,
        half_open_max = params.half_open_max,
        memory_max = params.memory_max,
        "the server is ready"
    );
}

/// Starts the thread that finds exports under the search path, if one is configured.
fn start_finder(
    set: &Settings,
    sources: &Sources,
    state: &Arc<StateDir>,
    senders: &[Sender<Message>],
) -> Result<Option<Box<dyn Finder>>, Error> {
    let SearchSpec::Below { prefix, by_session } = set.search_path.clone() else {
        return Ok(None);
    };
    if set.ping_only {
        return Ok(None);
    }
    let path = SearchPath { prefix, by_session };
    let searcher = Searcher::start(path, sources.clone(), Arc::clone(state), senders[0].clone());
    let searcher = searcher.map_err(failed(ErrorKind::System, "cannot start a thread"))?;
    Ok(Some(Box::new(searcher)))
}

pub(super) fn session_params(plan: &Plan, cores: u16) -> Result<SessionParams, Error> {
    let set = &plan.settings;
    let depth = u32::from(set.queue_depth.get());
    let limits = Limits::new(depth, plan.chunk_bytes())
        .map_err(failed(ErrorKind::Usage, "queue-depth and chunk-size cannot be used together"))?;
    Ok(SessionParams {
        limits,
        always_invalidate: set.always_invalidate,
        heartbeat_interval: set.heartbeat.get(),
        heartbeat_missed_max: set.heartbeat_missed_max.get(),
        heartbeat_idle_max: set.heartbeat_idle_max.get(),
        handshake_timeout: set.handshake_timeout.get(),
        open_timeout: set.open_timeout.get(),
        half_open_max: set.half_open_max(),
        sessions_max: set.sessions_max.get(),
        memory_max: super::memory_max::of(set, limits),
        ping_only: set.ping_only,
        discovery: set.discovery.is_on(),
        pings: PingServerConfig {
            enabled: !set.no_ping,
            rping: set.rping,
            ..PingServerConfig::default()
        },
        shutdown_grace: set.shutdown_grace.get(),
        cores,
        instance: ServerInstance { boot: boot_number().unwrap_or(0), process: random_number() },
        server_id: None,
        eviction_key: eviction_key()?,
    })
}

/// Generates the eviction key of this process from random bytes.
fn eviction_key() -> Result<EvictionKey, Error> {
    let mut key = EvictionKey::default();
    let read = fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut key.0));
    read.map_err(failed(ErrorKind::System, "cannot read /dev/urandom"))?;
    Ok(key)
}
