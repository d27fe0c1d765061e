//! From a judged plan to a running server.
//!
//! Owns [`serve`], the binary's last call: it opens the exports, starts a thread per shard, opens
//! the control socket, says where it listens, and runs until a signal or a drain ends it. Each
//! thread makes its own ring, providers and machine; if one of them fails, the others are told to
//! end and the error is returned.

use std::fs;
use std::io::{self, Read, Write};
use std::path;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;

use rtrs_core::block::{BlockSource, Core, WakeHandle};
use rtrs_core::config::AutoSwitch;
use rtrs_core::identity::EvictionKey;
use rtrs_core::ids::CoreIndex;
use rtrs_core::limits::Limits;
use rtrs_core::proto::ping::PingServerConfig;
use rtrs_core::rt::{
    Log, Mailbox, PollPolicy, Ring, Sender, SettleAtEnd, boot_number, mailbox, pin_plan, pin_to,
    random_number, run,
};
use rtrs_core::time::Duration;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::admin::Desk;
use crate::backend::{self, TargetSpec, open_target};
use crate::config::{SearchSpec, Target};
use crate::driver::ServerShard;
use crate::engine::ServerEngine;
use crate::engine::message::{ControlMessage, Message, ShardMessage};
use crate::engine::session::{ServerLife, SessionParams};
use crate::error::{Error, ErrorKind};
use crate::export::{Export, ExportTable};
use crate::finder::Finder;
use crate::identity::Sources;
use crate::plan::{ExportPlan, Plan};
use crate::portals::Portals;
use crate::search::{SearchPath, Searcher};
use crate::state::StateDir;

/// Submissions a shard's ring takes per turn before it has to hand them over early.
const RING_ENTRIES: u32 = 1024;

/// Runs the server until SIGTERM or SIGINT, or until it is drained.
///
/// # Errors
/// [`ErrorKind::Export`] for a target that cannot be opened, [`ErrorKind::Listen`] for a portal
/// that cannot be listened on, [`ErrorKind::InUse`] for the control socket,
/// [`ErrorKind::System`] for what the system refuses and for a drain that was not complete.
pub fn serve(plan: &Plan) -> Result<(), Error> {
    serve_over(plan, |source| source)
}

/// The same, with something put over what each export of the plan is made of: for servers of tests
/// that slow, hold or break on command what runs there.
///
/// # Errors
/// Those of [`serve`].
pub fn serve_over(
    plan: &Plan,
    over: impl Fn(Arc<dyn BlockSource>) -> Arc<dyn BlockSource>,
) -> Result<(), Error> {
    let _log = start_log(&plan.log)?;
    let exports = if plan.ping_only { &[][..] } else { &plan.exports };
    let sources = Sources::system();
    let state = Arc::new(StateDir::open(plan.state_dir.as_deref()));
    let open = |plan| open_export(plan, &sources, &state);
    let mut exports = exports.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    for export in &mut exports {
        export.source = over(Arc::clone(&export.source));
    }
    let portals = Portals::new(plan)?;
    let cores = u16::try_from(plan.shards.count()).unwrap_or(u16::MAX).max(1);
    let server_id = sources.server(plan.server_id.as_deref());
    let params = SessionParams { server_id, ..session_params(plan, cores)? };
    let (senders, mailboxes) = mailboxes(cores)?;
    let finder = start_finder(plan, &sources, &state, &senders)?;
    let exports = ExportTable::with_finder(exports, finder);
    let mut signals = Signals::new([SIGTERM, SIGINT])
        .map_err(|e| Error::with_source(ErrorKind::System, "cannot take signals", e))?;

    let setup = Arc::new(Setup {
        params,
        exports,
        portals,
        policy: PollPolicy { budget_max: Duration::from_micros(plan.poll_us.into()) },
        cpus: pin_plan(plan.pin, cores),
        senders,
    });
    let (report, started) = mpsc::channel();
    let mut threads = Vec::new();
    for (core, mailbox) in (0..cores).zip(mailboxes) {
        let (setup_of, report) = (Arc::clone(&setup), report.clone());
        let thread = thread::Builder::new()
            .name(format!("shard-{core}"))
            .spawn(move || run_shard(&setup_of, CoreIndex(core), mailbox, &report));
        match thread {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                stop_all(&setup.senders);
                return Err(Error::with_source(ErrorKind::System, "cannot start a thread", error));
            }
        }
    }
    drop(report);
    let listening = started.iter().take(usize::from(cores)).collect::<Result<Vec<_>, _>>();
    let signal_handle = signals.handle();
    let desk = listening.and_then(|portals| {
        let portals: Vec<String> = portals.into_iter().flatten().collect();
        let desk = Desk::open(plan, &portals, &setup.exports, &setup.senders[0])?;
        Ok((portals, desk))
    });
    let (mut outcome, desk) = match desk {
        Ok((portals, desk)) => {
            let to_control = setup.senders[0].clone();
            let forward = thread::Builder::new().name("signals".into()).spawn(move || {
                for _ in signals.forever() {
                    to_control.send(Message::Control(ControlMessage::Shutdown));
                }
            });
            if forward.is_err() {
                stop_all(&setup.senders);
            }
            announce(&portals);
            (Ok(()), desk)
        }
        Err(error) => {
            stop_all(&setup.senders);
            (Err(error), None)
        }
    };
    for thread in threads {
        let ended = thread.join().unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::System, "a shard panicked; see the message above"))
        });
        outcome = outcome.and(ended);
    }
    signal_handle.close();
    match desk {
        Some(desk) => {
            let closed = desk.close();
            outcome.and(closed)
        }
        None => outcome,
    }
}

/// What every shard is made from.
struct Setup {
    params: SessionParams,
    exports: Arc<ExportTable>,
    portals: Portals,
    policy: PollPolicy,
    cpus: Vec<usize>,
    senders: Arc<[Sender<Message>]>,
}

/// Tells the others to end when a shard ends otherwise than it was told to.
struct Alarm {
    core: CoreIndex,
    senders: Arc<[Sender<Message>]>,
    armed: bool,
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if !self.armed {
            return;
        }
        if self.core.0 == 0 {
            stop_all(&self.senders);
        } else {
            self.senders[0].send(Message::Control(ControlMessage::Shutdown));
        }
    }
}

fn stop_all(senders: &[Sender<Message>]) {
    for sender in senders {
        sender.send(Message::Shard(ShardMessage::Exit));
    }
}

/// A shard's thread: makes what it needs, reports, runs.
fn run_shard(
    setup: &Setup,
    core: CoreIndex,
    mailbox: Mailbox<Message>,
    report: &mpsc::Sender<Result<Vec<String>, Error>>,
) -> Result<(), Error> {
    let senders = Arc::clone(&setup.senders);
    let mut alarm = Alarm { core, senders, armed: true };
    let (ring, mut shard) = match start_shard(setup, core, mailbox) {
        Ok((ring, shard, listening)) => {
            let _ = report.send(Ok(listening));
            (ring, shard)
        }
        Err(error) => {
            // The main thread ends the others and returns this error.
            alarm.armed = false;
            let _ = report.send(Err(error));
            return Ok(());
        }
    };
    let stats = run(&ring, setup.policy, &mut shard).map_err(|error| {
        Error::with_source(ErrorKind::System, format!("shard {core} failed"), error)
    })?;
    tracing::debug!(%core, ?stats, "a shard ended");
    alarm.armed = false;
    Ok(())
}

type Started = (std::rc::Rc<Ring>, ServerShard, Vec<String>);

fn start_shard(
    setup: &Setup,
    core: CoreIndex,
    mailbox: Mailbox<Message>,
) -> Result<Started, Error> {
    let system = |what: &str, error: io::Error| Error::with_source(ErrorKind::System, what, error);
    if let Some(cpu) = setup.cpus.get(core.index())
        && let Err(error) = pin_to(*cpu)
    {
        tracing::warn!(%core, cpu, %error, "cannot bind the shard to its CPU");
    }
    let ring = Ring::new(RING_ENTRIES).map_err(|e| system("cannot set up io_uring", e))?;
    let inbox = mailbox.arm(&ring).map_err(|e| system("cannot set up a mailbox", e))?;
    let mut fabrics = setup.portals.fabrics(&ring)?;
    let listening = if core.0 == 0 { setup.portals.listen(&mut fabrics)? } else { Vec::new() };
    let senders = Arc::clone(&setup.senders);
    let wake = WakeHandle::new(move || senders[core.index()].send(Message::Wake));
    let place = Core { index: core, ring: Some(std::rc::Rc::clone(&ring)), wake };
    let machine = ServerEngine::new(setup.params, place, &setup.exports);
    let senders = Arc::clone(&setup.senders);
    Ok((ring, ServerShard::new(machine, fabrics, inbox, senders), listening))
}

/// Says on stdout where the server listens, a line each.
fn announce(portals: &[String]) {
    let mut out = io::stdout().lock();
    for portal in portals {
        // Nobody may be reading; the server serves all the same.
        let _ = writeln!(out, "listening on {portal}");
    }
    let _ = out.flush();
}

/// Starts the log; keep what comes back until the end.
fn start_log(filter: &str) -> Result<SettleAtEnd, Error> {
    let filter = tracing_subscriber::EnvFilter::new(filter);
    let log = Log::start(io::stderr()).map_err(|error| {
        Error::with_source(ErrorKind::System, "cannot start the log's thread", error)
    })?;
    let writer = log.clone();
    // A second server in one process, as in tests, finds the log started.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || writer.clone())
        .log_internal_errors(false)
        .with_ansi(false)
        .try_init();
    Ok(SettleAtEnd(log))
}

/// The thread that finds exports below the search path, if there is one.
fn start_finder(
    plan: &Plan,
    sources: &Sources,
    state: &Arc<StateDir>,
    senders: &[Sender<Message>],
) -> Result<Option<Box<dyn Finder>>, Error> {
    let SearchSpec::Below { prefix, by_session } = plan.search_path.clone() else {
        return Ok(None);
    };
    if plan.ping_only {
        return Ok(None);
    }
    let path = SearchPath { prefix, by_session };
    let searcher = Searcher::start(path, sources.clone(), Arc::clone(state), senders[0].clone());
    let searcher =
        searcher.map_err(|e| Error::with_source(ErrorKind::System, "cannot start a thread", e))?;
    Ok(Some(Box::new(searcher)))
}

fn session_params(plan: &Plan, cores: u16) -> Result<SessionParams, Error> {
    let limits = Limits::new(u32::from(plan.queue_depth), plan.chunk_bytes).map_err(|error| {
        Error::with_source(ErrorKind::Usage, "queue-depth and chunk-size cannot be used", error)
    })?;
    Ok(SessionParams {
        limits,
        always_invalidate: plan.always_invalidate,
        heartbeat_interval: Duration::from_millis(plan.heartbeat_ms),
        heartbeat_missed_max: plan.heartbeat_missed_max,
        handshake_timeout: Duration::from_millis(plan.handshake_timeout_ms),
        half_open_max: plan.half_open_max,
        sessions_max: plan.sessions_max,
        ping_only: plan.ping_only,
        pings: PingServerConfig {
            enabled: !plan.no_ping,
            rping: plan.rping,
            ..PingServerConfig::default()
        },
        shutdown_grace: Duration::from_millis(plan.shutdown_grace_ms),
        cores,
        life: ServerLife { boot: boot_number().unwrap_or(0), process: random_number() },
        server_id: None,
        eviction_key: eviction_key()?,
    })
}

/// Random bytes of this process.
fn eviction_key() -> Result<EvictionKey, Error> {
    let mut key = EvictionKey::default();
    let read = fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut key.0));
    read.map_err(|e| Error::with_source(ErrorKind::System, "cannot read /dev/urandom", e))?;
    Ok(key)
}

fn open_export(plan: &ExportPlan, sources: &Sources, state: &StateDir) -> Result<Export, Error> {
    let target = match &plan.target {
        Target::Path(path) => backend::Target::Path(path.clone()),
        Target::Memory(size) => backend::Target::Memory(size.bytes()),
        Target::Null(size) => backend::Target::Null(size.bytes()),
    };
    let spec = TargetSpec {
        target,
        read_only: plan.read_only,
        direct: match plan.direct {
            AutoSwitch::Auto => backend::Direct::Auto,
            AutoSwitch::On => backend::Direct::On,
            AutoSwitch::Off => backend::Direct::Off,
        },
        block_size: plan.block_size.bytes(),
        delay: Duration::from_millis(plan.delay_ms),
        errors_per_million: plan.error_rate.per_million(),
    };
    let source: Arc<dyn BlockSource> = open_target(&spec).map_err(|error| {
        Error::with_source(ErrorKind::Export, format!("cannot export {:?}", plan.name), error)
    })?;
    let id = sources.export(&plan.name, plan.id.as_deref(), &plan.target);
    if let Some(id) = id {
        tracing::info!(export = %plan.name, %id, "exported");
    }
    let epoch = match &plan.target {
        Target::Path(path) => {
            // Two servers may have been started in two directories.
            let path = path::absolute(path).unwrap_or_else(|_| path.clone());
            let key = format!("{}={}", plan.name, path.display());
            state.epoch(&key, plan.read_only).map_err(|error| {
                let text = format!("cannot export {:?}", plan.name);
                Error::with_source(ErrorKind::InUse, text, error)
            })?
        }
        // What is in memory ends with the process, and so does what was lost of it.
        Target::Memory(_) | Target::Null(_) => Arc::default(),
    };
    Ok(Export { name: plan.name.clone(), source, read_only: plan.read_only, id, epoch })
}

type Mailboxes = (Arc<[Sender<Message>]>, Vec<Mailbox<Message>>);

fn mailboxes(cores: u16) -> Result<Mailboxes, Error> {
    let pairs = (0..cores)
        .map(|_| mailbox())
        .collect::<io::Result<Vec<_>>>()
        .map_err(|e| Error::with_source(ErrorKind::System, "cannot make mailboxes", e))?;
    let (senders, boxes): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    Ok((senders.into(), boxes))
}
