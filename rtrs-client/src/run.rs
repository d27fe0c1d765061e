//! From a judged plan to its execution: one function per command.
//!
//! `attach` starts a copy of this program in the background that holds the session (`hold`), waits
//! until it says that the device is ready, and returns; with `--foreground` it is that copy itself.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use parking_lot::Mutex;
use rtrs_core::block::Geometry;
use rtrs_core::ids::SessionId;
use rtrs_core::rt::{Log, PollPolicy, SettleAtEnd};
use rtrs_core::wire::AccessMode;

use crate::cli::Output;
use crate::config::{self, Access};
use crate::control::{Detach, ask};
use crate::device;
use crate::driver::Event;
use crate::error::{Error, ErrorKind};
use crate::frontend::MakeFrontEnds;
use crate::frontend::bench::{self, JobResult, Workload};
use crate::hold::hold;
use crate::kept::Kept;
use crate::launch::{self, Running};
use crate::plan::{AttachPlan, BenchPlan, Plan, RunDir, SessionPlan};
use crate::provide::{Providers, path_target, schemes};
use crate::report::{self, Ask};
use crate::session::{Failover, NoPath, Policy, SessionConfig};

/// Set in the environment of the background copy: where it logs to.
pub(crate) const DAEMON_LOG: &str = "RTRS_CLIENT_LOG";
/// How a background copy begins its only word, before what it has attached, or why it failed.
pub(crate) const READY: &str = "ready ";
const FAILED: &str = "failed ";
/// How long a session that ends may hold its log.
const LOG_PATIENCE: Duration = Duration::from_secs(1);
/// Bound of opening the device, the first connections included.
const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// Does what the plan says.
///
/// # Errors
/// What the command failed at, by kind.
pub fn run(plan: &Plan) -> Result<(), Error> {
    match plan {
        Plan::Attach(attach) if attach.foreground => hold(attach).inspect_err(tell_failure),
        Plan::Attach(attach) => attach_in_background(attach),
        Plan::Bench(bench) => run_bench(bench),
        Plan::List { run_dir, output } => list(run_dir, *output),
        Plan::Status { name, run_dir, output } => {
            let value = ask_session(run_dir, name, &Ask::Status)?;
            show(&value, *output, report::status_text)
        }
        Plan::Stats { name, run_dir, output } => {
            let value = ask_session(run_dir, name, &Ask::Stats)?;
            show(&value, *output, report::stats_text)
        }
        Plan::Detach { name, run_dir, within_ms, force, output } => {
            detach(run_dir, name, *within_ms, *force, *output)
        }
        Plan::Path(path) => crate::online::path(path),
        Plan::Policy { name, policy, run_dir, output } => {
            crate::online::policy(run_dir, name, *policy, *output)
        }
        Plan::Ping(ping) => crate::ping::run(ping),
        Plan::Doctor(doctor) => crate::doctor::run(doctor),
        Plan::OpenDevice { path, exclusive } => device::open(path, *exclusive),
    }
}

pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::with_source(ErrorKind::System, what, source)
}

pub(crate) fn show(
    value: &serde_json::Value,
    output: Output,
    text: impl FnOnce(&serde_json::Value) -> String,
) -> Result<(), Error> {
    let shown = match output {
        Output::Json => format!("{value:#}\n"),
        Output::Text => text(value),
    };
    print(&shown)
}

pub(crate) fn tell(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

/// Tells whoever started this process in the background why it ends. The log says it too, if its
/// disk has room.
fn tell_failure(error: &Error) {
    if std::env::var_os(DAEMON_LOG).is_some() {
        let why = error.chain().to_string().replace('\n', " ");
        if let Err(error) = tell(&format!("{FAILED}{why}\n")) {
            tracing::debug!("who started the attach is gone: {error}");
        }
    }
}

pub(crate) fn print(text: &str) -> Result<(), Error> {
    match tell(text) {
        // Who reads may stop early, as head does.
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(system("cannot print")(e)),
        _ => Ok(()),
    }
}

pub(crate) fn ask_session(
    run_dir: &RunDir,
    name: &str,
    question: &Ask,
) -> Result<serde_json::Value, Error> {
    let timeout = match question {
        Ask::Detach { within_ms } => Duration::from_millis(*within_ms) + Duration::from_secs(25),
        _ => Duration::from_secs(10),
    };
    let path = run_dir.control_socket(name);
    let value = ask(&path, question, timeout).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Error::new(
            ErrorKind::NotAttached,
            format!("{name:?} is not attached (no session at {})", path.display()),
        ),
        io::ErrorKind::TimedOut => Error::with_source(
            ErrorKind::System,
            format!(
                "the process of {name:?} does not answer at {} within {} s; if it hangs or is \
                 stopped, end it with kill -9 and detach {name} then",
                path.display(),
                timeout.as_secs()
            ),
            error,
        ),
        _ => system(format!("cannot ask the session at {}", path.display()))(error),
    })?;
    match value["error"].as_str() {
        Some(error) => Err(Error::new(ErrorKind::System, format!("{name}: {error}"))),
        None => Ok(value),
    }
}

fn detach(
    run_dir: &RunDir,
    name: &str,
    within_ms: u64,
    force: bool,
    output: Output,
) -> Result<(), Error> {
    let status = match ask_session(run_dir, name, &Ask::Status) {
        // A session whose process is gone may have left a device.
        Err(error) if error.kind() == ErrorKind::NotAttached => {
            let freed = device::free(name)?;
            Kept::new(run_dir, name).forget();
            if freed.is_empty() {
                return Err(error);
            }
            let value = serde_json::json!({ "detached": false, "freed": freed });
            return show(&value, output, |_| {
                format!("{name} was not attached; freed what it had left behind: {freed:?}\n")
            });
        }
        status => status?,
    };
    if let Some(path) = status["device"].as_str()
        && !force
    {
        device::refuse_if_used(name, Path::new(path))?;
    }
    let value = ask_session(run_dir, name, &Ask::Detach { within_ms })?;
    if let Some(warning) = value["warning"].as_str() {
        remark(warning);
    }
    show(&value, output, |_| format!("{name} detached\n"))
}

fn list(run_dir: &RunDir, output: Output) -> Result<(), Error> {
    let mut sessions = Vec::new();
    let entries = match fs::read_dir(run_dir.path()) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return show(&serde_json::json!([]), output, |_| report::list_text(&[]));
        }
        Err(e) => return Err(system(format!("cannot read {}", run_dir.path().display()))(e)),
    };
    let mut paths: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| path.extension().is_some_and(|ext| ext == "ctl"))
        .collect();
    paths.sort();
    for path in paths {
        match ask(&path, &Ask::Status, Duration::from_secs(5)) {
            Ok(status) => sessions.push(status),
            // Left behind by a session that was killed; the next attach replaces it.
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => remark(format_args!("{}: {e}", path.display())),
        }
    }
    let text = report::list_text(&sessions);
    show(&serde_json::Value::Array(sessions), output, |_| text)
}

/// Starts the copy that holds the session and waits for its word.
fn attach_in_background(plan: &AttachPlan) -> Result<(), Error> {
    plan.run_dir.make()?;
    let log = plan.run_dir.control_socket(&plan.session.export_name).with_extension("log");
    let exe = std::env::current_exe().map_err(system("cannot find this program"))?;
    let errors = own_log(plan, &log)?;
    let mut child = Command::new(exe)
        .args(std::env::args_os().skip(1))
        .arg("--foreground")
        .env(DAEMON_LOG, &log)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(errors)
        .spawn()
        .map_err(system("cannot start the session's process"))?;
    let Some(out) = child.stdout.take() else {
        return Err(Error::new(ErrorKind::System, "no pipe to the session's process"));
    };
    // The copy bounds its own start; its word or its end comes.
    let mut word = String::new();
    BufReader::new(out).read_line(&mut word).map_err(system("cannot hear the session"))?;
    if let Some(attached) = word.strip_prefix(READY).map(serde_json::from_str) {
        let attached = attached.map_err(|error| {
            let what = "the session's process is there, but its word is not understood";
            Error::with_source(ErrorKind::System, what, error)
        })?;
        let name = &plan.session.export_name;
        let shown = show(&attached, plan.output, |attached| {
            format!("{name} attached: {}\n", report::served(attached))
        });
        return shown.map_err(|error| {
            let text = format!("{name} is attached, but that cannot be told; detach it to undo it");
            Error::with_source(error.kind(), text, error)
        });
    }
    let status = child.wait().map_err(system("cannot wait for the session's process"))?;
    let why = word.trim_end().strip_prefix(FAILED).map(str::to_owned);
    let why = why.or_else(|| last_error(&log));
    let last = why.unwrap_or_else(|| format!("the session's process ended with {status}"));
    let kind = if status.code() == Some(2) { ErrorKind::Usage } else { ErrorKind::Path };
    Err(Error::new(kind, last))
}

/// The session's log, emptied and locked. The lock is the session's as long as its process has
/// the log open, so of two attaches at once one is refused, and neither empties the other's log.
fn own_log(attach: &AttachPlan, path: &Path) -> Result<File, Error> {
    let failed = || system(format!("cannot write the log {}", path.display()));
    let log = OpenOptions::new().create(true).write(true).truncate(false).open(path);
    let log = log.map_err(|e| failed()(e))?;
    let deadline = Instant::now() + LOG_PATIENCE;
    loop {
        match log.try_lock() {
            Ok(()) => {
                log.set_len(0).map_err(failed())?;
                return Ok(log);
            }
            Err(TryLockError::Error(error)) => return Err(failed()(error)),
            // A session that is gone for others may still be about to end its process.
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                attach.check()?;
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(TryLockError::WouldBlock) => {
                let name = &attach.session.export_name;
                let text = format!("{name:?} is being attached or detached by another process");
                return Err(Error::new(ErrorKind::InUse, text));
            }
        }
    }
}

/// The last line that the background copy wrote as its error.
fn last_error(log: &Path) -> Option<String> {
    let text = fs::read_to_string(log).ok()?;
    let line = text.lines().rev().find_map(|line| line.strip_prefix("rtrs-client: "))?;
    Some(line.to_owned())
}

/// Starts the log; keep what comes back until the end.
pub(crate) fn log_to_stderr(filter: &str) -> Result<SettleAtEnd, Error> {
    let filter = tracing_subscriber::EnvFilter::new(filter);
    let log = Log::start(io::stderr()).map_err(system("cannot start the log's thread"))?;
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || writer.clone())
        .log_internal_errors(false);
    if subscriber.try_init().is_err() {
        tracing::debug!("a log was set up already");
    }
    Ok(SettleAtEnd(log))
}

/// A word for people beside the output. Nobody may be there to read it.
fn remark(text: impl std::fmt::Display) {
    let _ = writeln!(io::stderr(), "rtrs-client: {text}");
}

/// Shows how far something is. The terminal may be gone.
pub(crate) fn progress(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

/// A policy as sessions know it.
pub(crate) fn policy(policy: config::Policy) -> Policy {
    match policy {
        config::Policy::RoundRobin => Policy::RoundRobin,
        config::Policy::MinInflight => Policy::MinInflight,
        config::Policy::MinLatency => Policy::MinLatency,
    }
}

pub(crate) fn session_config(plan: &SessionPlan) -> Result<SessionConfig, Error> {
    let id = launch::random_uuid().map_err(system("no random numbers"))?;
    let mut seed = [0; 8];
    seed.copy_from_slice(&id[8..]);
    let schemes = schemes(plan);
    Ok(SessionConfig {
        name: plan.session_name.clone(),
        export: plan.export_name.clone(),
        access: match plan.access {
            Access::Ro => AccessMode::ReadOnly,
            Access::Auto | Access::Rw => AccessMode::ReadWrite,
            Access::Migration => AccessMode::Migration,
        },
        read_only_fallback: plan.access == Access::Auto,
        open_patience: Duration::ZERO,
        inherited_life: None,
        resent_for: Duration::ZERO,
        identity: plan.identity,
        id: SessionId(id),
        paths: plan
            .paths
            .iter()
            .map(|path| {
                let place = schemes.iter().position(|scheme| *scheme == path.scheme());
                let heartbeat = plan.own_heartbeat(path.scheme());
                path_target(path, place.unwrap_or(0), plan.invalidate_reads, heartbeat)
            })
            .collect::<Result<_, _>>()?,
        cores: plan.cores(),
        policy: policy(plan.policy),
        heartbeat: plan.heartbeat(),
        connect_timeout: Duration::from_millis(plan.connect_timeout_ms),
        reconnect_min: Duration::from_millis(plan.reconnect_min_ms),
        reconnect_max: Duration::from_millis(plan.reconnect_max_ms),
        io_timeout: Duration::from_millis(plan.io_timeout_ms),
        no_path: match plan.no_path {
            config::NoPath::Queue => NoPath::Queue,
            config::NoPath::QueueFor(time) => {
                NoPath::QueueFor(Duration::from_millis(time.millis()))
            }
            config::NoPath::Fail => NoPath::Fail,
        },
        failover: match plan.failover {
            config::Failover::Fast => Failover::Fast,
            config::Failover::Strict => Failover::Strict,
        },
        queue_depth_limit: plan.queue_depth_limit,
        seed: u64::from_le_bytes(seed),
    })
}

pub(crate) fn start(
    plan: &SessionPlan,
    config: SessionConfig,
    fronts: MakeFrontEnds,
    providers: &Arc<Providers>,
) -> Result<Running, Error> {
    let poll = PollPolicy { budget_max: Duration::from_micros(u64::from(plan.poll_us)) };
    launch::start(config, fronts, providers, poll, plan.pin)
        .map_err(system("cannot start the session's threads"))
}

/// A value as configuration files write it.
pub(crate) fn plain(value: &impl serde::Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(text)) => text,
        _ => "?".to_owned(),
    }
}

/// What the process waits for.
pub(crate) enum Wake {
    Core(Event),
    Signal,
    Detach(Detach),
}

pub(crate) fn forward_detaches(wakes: mpsc::Sender<Wake>) -> mpsc::Sender<Detach> {
    let (detaches, asked) = mpsc::channel();
    std::thread::spawn(move || {
        while let Ok(detach) = asked.recv() {
            if wakes.send(Wake::Detach(detach)).is_err() {
                return;
            }
        }
    });
    detaches
}

pub(crate) fn forward_signals(wakes: mpsc::Sender<Wake>) -> Result<(), Error> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP])
        .map_err(system("cannot handle signals"))?;
    std::thread::spawn(move || {
        for _ in signals.forever() {
            if wakes.send(Wake::Signal).is_err() {
                return;
            }
        }
    });
    Ok(())
}

/// Lets the session's events wake who waits; what it keeps goes to `kept`, if that is given.
pub(crate) fn forward_events(
    mut running: Running,
    wakes: mpsc::Sender<Wake>,
    kept: Option<Kept>,
) -> Running {
    let (_, nothing) = mpsc::channel();
    let events = std::mem::replace(&mut running.events, nothing);
    std::thread::spawn(move || {
        while let Ok(event) = events.recv() {
            if let Event::KeptLife(life) = event {
                kept.iter().for_each(|kept| kept.keep(life));
            } else if let Event::Pinned(identity) = event {
                kept.iter().for_each(|kept| kept.keep_identity(identity));
            } else if wakes.send(Wake::Core(event)).is_err() {
                return;
            }
        }
    });
    running
}

/// Waits until the device is open. `what` is what the session is for, `asked` gets a detach that
/// came meanwhile and has to be answered.
pub(crate) fn wait_ready(
    inbox: &mpsc::Receiver<Wake>,
    cores: &launch::Cores,
    what: &str,
    patience: Duration,
    asked: &mut Option<Detach>,
) -> Result<Box<Geometry>, Error> {
    let limit = READY_TIMEOUT + patience;
    let failed = match inbox.recv_timeout(limit) {
        Ok(Wake::Core(Event::Ready(geometry))) => return Ok(geometry),
        Ok(Wake::Core(Event::Failed(failure))) => failure.to_string(),
        Ok(Wake::Core(Event::FrontFailed(error))) => error.to_string(),
        Ok(Wake::Core(Event::CoreFailed(core, error))) => format!("core {core}: {error}"),
        Ok(Wake::Core(
            Event::Done | Event::KernelGone(_) | Event::KeptLife(_) | Event::Pinned(_),
        )) => "the session ended before it began".to_owned(),
        Ok(Wake::Signal) => "ended by a signal".to_owned(),
        Ok(Wake::Detach(detach)) => {
            *asked = Some(detach);
            "detached before it was open".to_owned()
        }
        Err(_) => {
            let why = cores
                .reports()
                .first()
                .and_then(|r| r.engine.paths.as_ref())
                .map(|paths| {
                    let told = paths
                        .iter()
                        .filter_map(|p| p.last_error.as_ref().map(|e| format!("{}: {e}", p.path)));
                    told.collect::<Vec<_>>().join("; ")
                })
                .unwrap_or_default();
            let seconds = limit.as_secs();
            format!("no path to the server within {seconds} s ({why})")
        }
    };
    cores.shut_down(Duration::ZERO);
    Err(Error::new(ErrorKind::Path, format!("cannot {what}: {failed}")))
}

fn run_bench(plan: &BenchPlan) -> Result<(), Error> {
    let _log = log_to_stderr(&plan.session.log)?;
    let mut config = session_config(&plan.session)?;
    config.name = format!("{}-bench-{}", config.name, std::process::id());
    let jobs = u32::from(config.cores);
    let (results, finished) = mpsc::channel();
    let workload = Arc::new(Workload {
        mode: plan.mode,
        block: plan.block_bytes,
        iodepth: u32::from(plan.iodepth),
        runtime: Duration::from_millis(plan.runtime_ms),
        size: plan.size_bytes,
        read_percent: u32::from(plan.read_percent),
        jobs,
        finished: AtomicU64::new(0),
        results: Mutex::new(results),
    });
    let providers = Arc::new(Providers::new(&plan.session)?);
    let fronts = bench::workload(Arc::clone(&workload));
    let running = start(&plan.session, config, fronts, &providers)?;
    let (wakes, inbox) = mpsc::channel();
    forward_signals(wakes.clone())?;
    let running = forward_events(running, wakes, None);
    let cores = running.cores();
    let what = format!("bench {}", plan.session.export_name);
    if let Err(error) = wait_ready(&inbox, &cores, &what, Duration::ZERO, &mut None) {
        running.join();
        return Err(error);
    }
    let live = plan.output == Output::Text && io::stderr().is_terminal();
    let outcome = follow(plan, &workload, &inbox, &finished, live);
    if live {
        // The progress line ends here, whatever ended it.
        progress("\n");
    }
    // Who pressed Ctrl-C does not want to wait for answers.
    cores.shut_down(Duration::from_secs(if outcome.is_ok() { 5 } else { 1 }));
    let deadline = Instant::now() + Duration::from_secs(20);
    while let Ok(wake) = inbox.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        if matches!(wake, Wake::Core(Event::Done | Event::CoreFailed(..))) {
            break;
        }
    }
    running.join();
    let results = outcome?;
    let summary = summarize(plan, &results)?;
    show(&summary, plan.output, bench_text)?;
    match summary["errors"].as_u64() {
        Some(0) => Ok(()),
        errors => Err(Error::new(
            ErrorKind::System,
            format!("{} of the requests failed", errors.unwrap_or(0)),
        )),
    }
}

/// Collects the jobs' results and shows a progress line meanwhile.
fn follow(
    plan: &BenchPlan,
    workload: &Workload,
    inbox: &mpsc::Receiver<Wake>,
    finished: &mpsc::Receiver<JobResult>,
    live: bool,
) -> Result<Vec<JobResult>, Error> {
    let mut results = Vec::new();
    let begin = Instant::now();
    let mut before = 0;
    let bound = Duration::from_millis(plan.runtime_ms + plan.session.io_timeout_ms)
        + Duration::from_secs(10);
    let failed = |text: String| Err(Error::new(ErrorKind::System, text));
    while results.len() < workload.jobs as usize {
        match finished.recv_timeout(Duration::from_millis(500)) {
            Ok(result) => results.push(result),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return failed("the jobs ended without a result".into());
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let now = workload.finished.load(Ordering::Relaxed);
                if live {
                    progress(&format!(
                        "\r{:>4} s  {:>9} IOPS  {:>12} done ",
                        begin.elapsed().as_secs(),
                        (now - before) * 2,
                        now
                    ));
                }
                before = now;
            }
        }
        match inbox.try_recv() {
            Ok(Wake::Core(Event::FrontFailed(error))) => {
                return Err(Error::new(ErrorKind::Usage, format!("cannot run: {error}")));
            }
            Ok(Wake::Core(Event::CoreFailed(core, error))) => {
                return failed(format!("core {core} ended: {error}"));
            }
            Ok(Wake::Signal) => {
                return failed("ended by a signal".into());
            }
            _ => {}
        }
        if begin.elapsed() > bound {
            return failed("the requests in flight did not end in time".into());
        }
    }
    Ok(results)
}

fn summarize(plan: &BenchPlan, results: &[JobResult]) -> Result<serde_json::Value, Error> {
    let mut latency = Histogram::<u64>::new_with_bounds(1_000, 100_000_000_000, 3)
        .map_err(|e| Error::new(ErrorKind::System, e.to_string()))?;
    let (mut reads, mut writes, mut errors) = (0, 0, 0);
    let mut iops = 0.0;
    for result in results {
        reads += result.reads;
        writes += result.writes;
        errors += result.errors;
        let seconds = result.elapsed.as_secs_f64().max(1e-9);
        iops += (result.reads + result.writes) as f64 / seconds;
        latency.add(&result.latency).map_err(|e| Error::new(ErrorKind::System, e.to_string()))?;
    }
    let us = |nanos: u64| nanos as f64 / 1000.0;
    Ok(serde_json::json!({
        "name": plan.session.export_name,
        "rw": plan.mode,
        "bs": plan.block_bytes,
        "iodepth": plan.iodepth,
        "jobs": results.len(),
        "paths": plan.session.paths,
        "runtime_ms": plan.runtime_ms,
        "reads": reads,
        "writes": writes,
        "errors": errors,
        "iops": iops,
        "bw_bytes": iops * f64::from(plan.block_bytes),
        "lat_us": {
            "mean": latency.mean() / 1000.0,
            "p50": us(latency.value_at_quantile(0.5)),
            "p90": us(latency.value_at_quantile(0.9)),
            "p99": us(latency.value_at_quantile(0.99)),
            "p999": us(latency.value_at_quantile(0.999)),
            "max": us(latency.max()),
        },
    }))
}

fn bench_text(summary: &serde_json::Value) -> String {
    let number = |value: &serde_json::Value| value.as_f64().unwrap_or(0.0);
    let lat = &summary["lat_us"];
    let paths: Vec<&str> = summary["paths"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|path| path.as_str())
        .collect();
    format!(
        "{} bs={} iodepth={} jobs={} over {}: {:.0} IOPS, {:.1} MiB/s, {} errors\n\
         latency us: mean {:.1} p50 {:.1} p90 {:.1} p99 {:.1} p99.9 {:.1} max {:.1}\n",
        summary["rw"].as_str().unwrap_or("?"),
        summary["bs"],
        summary["iodepth"],
        summary["jobs"],
        paths.join(", "),
        number(&summary["iops"]),
        number(&summary["bw_bytes"]) / f64::from(1 << 20),
        summary["errors"],
        number(&lat["mean"]),
        number(&lat["p50"]),
        number(&lat["p90"]),
        number(&lat["p99"]),
        number(&lat["p999"]),
        number(&lat["max"]),
    )
}
