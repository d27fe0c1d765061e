//! `bench`: measures a session without NBD.

use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use clap::Args;
use hdrhistogram::Histogram;
use parking_lot::Mutex;
use rtrs_core::logging::log_to_stderr;
use rtrs_core::rt::Signal;
use rtrs_core::settings::{ByteSize, Flags, Int, Output, Portal, printable};
use serde::Serialize;

use super::apply::running;
use super::discover::listed_size;
use super::global::GlobalArgs;
use super::link::LinkOptions;
use super::session::Session;
use super::source::SourceArgs;
use super::text::{progress, size_text};
use crate::daemon::config::{session_config, volume_config};
use crate::daemon::events::{READY_TIMEOUT, SavedFiles, Wake, forward_events, wait_ready};
use crate::daemon::fabrics::FabricRegistry;
use crate::daemon::launch::{self, VolumeFronts};
use crate::daemon::notices::Event;
use crate::daemon::signals::forward_signals;
use crate::error::{Error, ErrorKind, system, usage};
use crate::frontend::bench::{JobResult, Workload, workload};
use crate::plan::BenchPlan;
use crate::settings::{BenchMode, BenchSettings, SessionSettings, Settings};

/// Time limit for querying the size of an export that is to be overwritten.
const SIZE_TIMEOUT: Duration = Duration::from_secs(2);

/// The arguments.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Name of the export at the server; without a path, of an attached volume
    ///
    /// The paths, keys, other settings and the export are then those of the volume. With --config,
    /// a key export in the file is the name of the export, as with attach.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// Refused: nothing is attached.
    #[arg(long = "as", value_name = "NAME", hide = true)]
    pub local_name: Option<String>,

    /// Overwrite the data of the export without asking
    ///
    /// Required if rw is write, randwrite or randrw. On a terminal, bench asks instead.
    #[arg(long)]
    pub yes: bool,

    /// Settings of the benchmark.
    #[command(flatten)]
    pub bench: Flags<BenchSettings>,

    /// The settings of the session.
    #[command(flatten)]
    pub session: Flags<SessionSettings>,

    /// Source of the settings.
    #[command(flatten)]
    pub source: SourceArgs,
}

impl BenchArgs {
    /// Returns the settings of the configuration file, overridden by the flags.
    ///
    /// # Errors
    /// Returns errors in the file, and for flags with old names.
    pub fn settings(&self, global: &GlobalArgs) -> Result<Settings, Error> {
        let mut settings = self.source.settings(&self.session, global)?;
        self.bench.apply(&mut settings.bench)?;
        Ok(settings)
    }

    pub(super) fn plan(&self, global: &GlobalArgs) -> Result<BenchPlan, Error> {
        if self.local_name.is_some() {
            return Err(usage(
                "bench attaches nothing, so omit --as; name the export with --path, or an attached \
                 volume without --path",
            ));
        }
        let mut settings = self.settings(global)?;
        if settings.session.path.is_empty() {
            self.use_attached(&mut settings, global)?;
        }
        BenchPlan::new(&self.name, settings, global.output)
    }

    /// Takes the export and the session from the attached volume of this name, if there is one. The
    /// access mode remains the benchmark's.
    fn use_attached(&self, settings: &mut Settings, global: &GlobalArgs) -> Result<(), Error> {
        let session = Session::find(&self.name, global)?;
        let status = match session.status() {
            Err(error) if error.kind() == ErrorKind::NotAttached => return Ok(()),
            found => found?,
        };
        let running = running(&status, &session.run_dir, global)?.plan.session;
        let SessionSettings { access, read_only, .. } = settings.session;
        settings.session = SessionSettings { access, read_only, ..running.settings };
        self.session.apply(&mut settings.session)?;
        settings.attach.export = Some(running.export_name);
        Ok(())
    }
}

pub(super) fn run(args: &BenchArgs, global: &GlobalArgs) -> Result<(), Error> {
    let plan = args.plan(global)?;
    if args.source.check_and_print(global, || plan.session.check(), || plan.printed())? {
        if plan.settings.rw.writes() && !args.yes {
            confirm(&plan)?;
        }
        measure(&plan)?;
    }
    Ok(())
}

/// Asks the user whether the export's data may be overwritten.
///
/// # Errors
/// [`ErrorKind::Usage`] if the user does not agree, or there is no terminal.
fn confirm(plan: &BenchPlan) -> Result<(), Error> {
    let (session, rw) = (&plan.session, plan.settings.rw);
    let (name, paths, crc) =
        (&session.export_name, &session.settings.path, session.settings.crc.is_on());
    let options = LinkOptions { crc, plain: false, timeout: SIZE_TIMEOUT };
    let listed =
        paths.first().and_then(|path| listed_size(name, path, &session.tls_sources(), options));
    let used = plan.settings.size.map(ByteSize::bytes);
    let size = listed.into_iter().chain(used).min();
    let size = size.map(|bytes| format!(" ({})", size_text(bytes))).unwrap_or_default();
    let paths: Vec<String> = paths.iter().map(Portal::to_string).collect();
    let what = format!("bench --rw {rw} overwrites {name} on {}{size}", paths.join(", "));
    if io::stdin().is_terminal() && io::stderr().is_terminal() {
        progress(&format!("{}; type y to continue: ", printable(&what)));
        let mut answer = String::new();
        io::stdin().read_line(&mut answer).map_err(system("cannot read the answer"))?;
        if answer.trim() == "y" {
            return Ok(());
        }
    }
    Err(usage(format!("{what}; pass --yes if that data is not needed")))
}

fn measure(plan: &BenchPlan) -> Result<(), Error> {
    let settings = &plan.session.settings;
    let _log = log_to_stderr(&settings.log, settings.log_format)
        .map_err(system("cannot start the logging thread"))?;
    let mut config = session_config(&plan.session, vec![volume_config(&plan.session)])?;
    config.name = format!("{}-bench-{}", config.name, std::process::id());
    let jobs = u32::from(config.shards);
    let set = &plan.settings;
    let (results, finished) = mpsc::channel();
    let work = Arc::new(Workload {
        mode: set.rw,
        block: plan.block_bytes,
        iodepth: u32::from(set.iodepth.get()),
        runtime: set.runtime.get(),
        size: set.size.map(ByteSize::bytes),
        pieces: u32::from(set.pieces.get()),
        read_percent: u32::from(set.rwmixread.get()),
        jobs,
        finished: AtomicU64::new(0),
        results: Mutex::new(results),
    });
    let registry = Arc::new(FabricRegistry::new(&plan.session)?);
    let fronts = workload(Arc::clone(&work));
    let fronts = vec![VolumeFronts { name: plan.session.name.clone(), make: fronts }];
    let running = launch::start(&plan.session.settings, config, fronts, &registry)?;
    let (wakes, inbox) = mpsc::channel();
    let to_follow = wakes.clone();
    let _forwarding = forward_signals(move |signal| {
        // Closing the terminal also ends the run.
        if signal != Signal::Dump {
            drop(to_follow.send(Wake::Signal));
        }
    })?;
    let running = forward_events(running, wakes, SavedFiles::default());
    let shards = running.shards();
    let what = format!("bench {}", plan.session.export_name);
    if let Err(error) = wait_ready(&inbox, &shards, &what, READY_TIMEOUT) {
        running.join();
        return Err(error);
    }
    let live = plan.output == Output::Text && io::stderr().is_terminal();
    let outcome = follow(plan, &work, &inbox, &finished, live);
    if live {
        // End the progress line, however the run ended.
        progress("\n");
    }
    // After Ctrl-C, wait only briefly for answers.
    shards.shut_down(Duration::from_secs(if outcome.is_ok() { 5 } else { 1 }));
    let deadline = Instant::now() + Duration::from_secs(20);
    while let Ok(wake) = inbox.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        if matches!(wake, Wake::Session(Event::Done { .. } | Event::ShardFailed(..))) {
            break;
        }
    }
    running.join();
    let results = outcome?;
    let summary = summarize(plan, &results)?;
    plan.output.print(&summary, Summary::text)?;
    match summary.errors {
        0 => Ok(()),
        errors => Err(Error::new(ErrorKind::System, format!("{errors} of the requests failed"))),
    }
}

/// Collects the jobs' results and shows a progress line.
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
    let io_timeout = plan.session.settings.io_timeout.get();
    let bound = plan.settings.runtime.get() + io_timeout + Duration::from_secs(10);
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
            Ok(Wake::Session(Event::FrontFailed(_, error))) => {
                return Err(Error::new(ErrorKind::Usage, format!("cannot run: {error}")));
            }
            Ok(Wake::Session(Event::ShardFailed(shard, error))) => {
                return failed(format!("shard {shard} ended: {error}"));
            }
            Ok(Wake::Signal) => {
                return failed("ended by a signal".into());
            }
            _ => {}
        }
        if begin.elapsed() > bound {
            return failed("the requests in flight did not finish in time".into());
        }
    }
    Ok(results)
}

/// Result of the measurement.
#[derive(Serialize)]
struct Summary<'a> {
    name: &'a str,
    rw: BenchMode,
    bs: u32,
    iodepth: Int<u16, 1, 65535>,
    pieces: Int<u8, 1, 128>,
    jobs: usize,
    paths: &'a [Portal],
    runtime_ms: u64,
    reads: u64,
    writes: u64,
    errors: u64,
    iops: f64,
    bw_bytes: f64,
    lat_us: Latency,
}

/// Times in microseconds.
#[derive(Serialize)]
struct Latency {
    mean: f64,
    p50: f64,
    p90: f64,
    p99: f64,
    p999: f64,
    max: f64,
}

fn summarize<'a>(plan: &'a BenchPlan, results: &[JobResult]) -> Result<Summary<'a>, Error> {
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
    let at = |quantile| latency.value_at_quantile(quantile) as f64 / 1000.0;
    Ok(Summary {
        name: &plan.session.export_name,
        rw: plan.settings.rw,
        bs: plan.block_bytes,
        iodepth: plan.settings.iodepth,
        pieces: plan.settings.pieces,
        jobs: results.len(),
        paths: &plan.session.settings.path,
        runtime_ms: plan.settings.runtime.millis(),
        reads,
        writes,
        errors,
        iops,
        bw_bytes: iops * f64::from(plan.block_bytes),
        lat_us: Latency {
            mean: latency.mean() / 1000.0,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: latency.max() as f64 / 1000.0,
        },
    })
}

impl Summary<'_> {
    fn text(&self) -> String {
        let Self { rw, bs, iodepth, jobs, iops, errors, lat_us, .. } = self;
        let Latency { mean, p50, p90, p99, p999, max } = lat_us;
        let paths: Vec<String> = self.paths.iter().map(Portal::to_string).collect();
        format!(
            "{rw} bs={bs} iodepth={iodepth} jobs={jobs} over {}: {iops:.0} IOPS, {:.1} MiB/s, \
             {errors} errors\nlatency us: mean {mean:.1} p50 {p50:.1} p90 {p90:.1} p99 {p99:.1} \
             p99.9 {p999:.1} max {max:.1}\n",
            paths.join(", "),
            self.bw_bytes / f64::from(1 << 20),
        )
    }
}
