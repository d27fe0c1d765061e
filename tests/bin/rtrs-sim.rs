//! Runs the simulator: one seed, showing its log, or many, showing progress.
//!
//! Exit codes: 0 all seeds passed, 1 a seed failed, 2 usage error.
#![forbid(unsafe_code)]

#[path = "rtrs-sim/mutants.rs"]
mod mutants;

use std::cell::Cell;
use std::collections::VecDeque;
use std::io::{IsTerminal, Write};
use std::ops::Range;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use parking_lot::Mutex;
use rtrs_core::prng::Prng;
use rtrs_tests::sim::{
    Options, Outcome, Plant, Sink, Stats, kept_seeds, run_held, run_idle, run_machine, run_moving,
    run_shares, run_with,
};
use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
}

/// Runs client and server of RTRS in a simulated world, faults and all, from a seed.
#[derive(Clone, Debug, Parser)]
#[command(name = "rtrs-sim", version)]
struct Args {
    /// Run one seed and print its events.
    #[arg(long, value_name = "N", conflicts_with_all = ["seeds", "minutes"])]
    seed: Option<u64>,
    /// Run the seeds from A up to B (B excluded), after the seeds that failed before.
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    seeds: Option<Range<u64>>,
    /// Run consecutive seeds from a random one for N minutes, after the seeds that failed before.
    #[arg(long, value_name = "N", conflicts_with = "seeds")]
    minutes: Option<u64>,
    /// Continue after a failed seed.
    #[arg(long)]
    keep_going: bool,
    /// Print no log of a single seed, no progress of many, and only surviving mutants.
    #[arg(short, long)]
    quiet: bool,
    /// Output format.
    #[arg(short, long, value_enum, default_value = "text")]
    output: Format,
    /// Print the log of the engines on stderr.
    #[arg(long)]
    trace: bool,
    /// Instead of load under faults: a write that its disk delays while its path dies, and a newer
    /// write.
    #[arg(long, conflicts_with_all = ["plant", "shares"])]
    held: bool,
    /// Instead of load under faults: the shares of equal paths one second after a stall.
    #[arg(long)]
    shares: bool,
    /// Instead of load under faults: a session that was idle for minutes, and its next events.
    #[arg(long, conflicts_with_all = ["plant", "shares", "held"])]
    idle: bool,
    /// Instead of load under faults: a virtual machine whose client dies and returns.
    #[arg(long, conflicts_with_all = ["plant", "shares", "held", "idle"])]
    machine: bool,
    /// Instead of load under faults: a virtual machine that moves to another host.
    #[arg(long, conflicts_with_all = ["plant", "shares", "held", "idle", "machine"])]
    moving: bool,
    /// Disable safety rules of the engines, one at a time, and show that each is detected: a
    /// mutant's name, `all`, `machines` for those of virtual machines, `quick` for the most
    /// important ones, or `list`.
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "all")]
    #[arg(conflicts_with_all = ["minutes", "keep_going", "held", "idle", "plant", "shares"])]
    #[arg(conflicts_with_all = ["machine", "moving"])]
    mutants: Option<String>,
    /// Plant a bug that a checker must detect.
    #[arg(long, hide = true, value_name = "NAME")]
    plant: Option<Plant>,
}

fn parse_range(text: &str) -> Result<Range<u64>, String> {
    let parts =
        text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    parts
        .filter(|range: &Range<u64>| !range.is_empty())
        .ok_or_else(|| format!("'{text}' is not a range of seeds; use A..B with A below B"))
}

/// Seed that failed.
#[derive(Clone, Debug, Serialize)]
struct Failed {
    seed: u64,
    checker: String,
    text: String,
    replay: String,
}

/// Result of a run of this program.
#[derive(Debug, Default, Serialize)]
struct Summary {
    seeds: u64,
    passed: u64,
    failed: Vec<Failed>,
    seconds: f64,
    seeds_per_minute: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    fingerprint: Option<String>,
    stats: Stats,
}

thread_local! {
    /// Seed that is running, for the message printed when an engine panics.
    static RUNNING: Cell<u64> = const { Cell::new(0) };
}

/// Returns the command that runs a seed again.
fn replay(seed: u64, args: &Args) -> String {
    let mut command = std::env::args().next().unwrap_or_else(|| "rtrs-sim".into());
    command += &format!(" --seed {seed}");
    command += if args.held { " --held" } else { "" };
    command += if args.idle { " --idle" } else { "" };
    command += if args.machine { " --machine" } else { "" };
    command += if args.moving { " --moving" } else { "" };
    command += if args.shares { " --shares" } else { "" };
    if let Some(plant) = args.plant {
        command += &format!(" --plant {}", plant.name());
    }
    command
}

fn run_one(seed: u64, args: &Args, log: bool) -> Outcome {
    RUNNING.set(seed);
    let sink: Option<Sink> = if log {
        Some(Box::new(|line: &str| {
            // Closed output is not a reason to stop.
            let _ = writeln!(std::io::stdout().lock(), "{line}");
        }))
    } else {
        None
    };
    if args.held {
        return run_held(seed, sink);
    }
    if args.idle {
        return run_idle(seed, sink);
    }
    if args.machine {
        return run_machine(seed, sink);
    }
    if args.moving {
        return run_moving(seed, sink);
    }
    if args.shares {
        return run_shares(seed, args.plant.unwrap_or_default(), sink);
    }
    run_with(&Options::draw(seed), args.plant.unwrap_or_default(), sink)
}

/// Seeds still to run.
#[derive(Debug)]
struct Seeds {
    /// Seeds that failed earlier; these come first.
    kept: VecDeque<u64>,
    next: u64,
    last: Option<u64>,
    until: Option<Instant>,
}

impl Iterator for Seeds {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        if let Some(seed) = self.kept.pop_front() {
            return Some(seed);
        }
        let over = self.last.is_some_and(|last| self.next >= last)
            || self.until.is_some_and(|until| Instant::now() >= until);
        let seed = self.next;
        self.next += 1;
        (!over).then_some(seed)
    }
}

impl Summary {
    /// Adds the result of a seed. Returns false if no more seeds are to be run.
    fn note(&mut self, seed: u64, outcome: Outcome, args: &Args) -> bool {
        self.seeds += 1;
        self.stats.add(&outcome.stats);
        self.fingerprint = args.seed.is_some().then(|| format!("{:016x}", outcome.fingerprint));
        let Some(failure) = outcome.failure else {
            self.passed += 1;
            return true;
        };
        let replay = replay(seed, args);
        let (checker, text) = (failure.checker.to_owned(), failure.text);
        eprintln!("seed {seed} FAILED: {checker}: {text}\nreplay: {replay}");
        self.failed.push(Failed { seed, checker, text, replay });
        args.keep_going
    }
}

/// Runs `seeds` on all processors, one world on each, and shows the progress.
fn run_all(args: &Args, seeds: Seeds, log: bool) -> Summary {
    let shared = Mutex::new((Some(seeds), Summary::default(), Instant::now()));
    let work = || {
        loop {
            let Some(seed) = shared.lock().0.as_mut().and_then(Iterator::next) else { return };
            let outcome = run_one(seed, args, log);
            let (seeds, summary, shown) = &mut *shared.lock();
            if !summary.note(seed, outcome, args) {
                *seeds = None;
            }
            if !args.quiet && !log && shown.elapsed() > Duration::from_secs(2) {
                *shown = Instant::now();
                let end = if std::io::stderr().is_terminal() { "\r" } else { "\n" };
                let (done, failed) = (summary.seeds, summary.failed.len());
                eprint!("rtrs-sim: {done} seeds, {failed} failed, at {seed}{end}");
            }
        }
    };
    let others = thread::available_parallelism().map_or(0, |count| count.get() - 1);
    thread::scope(|scope| {
        for _ in 0..if args.seed.is_some() { 0 } else { others } {
            scope.spawn(work);
        }
        work();
    });
    shared.into_inner().1
}

/// Returns the first seed, which differs between processes, even two started at the same time.
fn random_seed() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let nanos = since.map_or(1, |since| since.as_nanos() as u64);
    Prng::new(nanos ^ u64::from(std::process::id()) << 48).next_u64() >> 16
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.trace {
        tracing_subscriber::fmt()
            .with_writer(std::io::stderr)
            .with_env_filter(tracing_subscriber::EnvFilter::new("debug"))
            .without_time()
            .init();
    }
    if let Some(which) = &args.mutants {
        let format = mutants::ReportFormat { json: args.output == Format::Json, quiet: args.quiet };
        return mutants::main(which, args.seed, args.seeds.clone(), format);
    }
    let plant = args.plant.unwrap_or_default();
    // A panic in an engine also counts as a failed seed; later seeds have no result.
    let again = args.clone();
    std::panic::set_hook(Box::new(move |info| {
        let seed = RUNNING.get();
        eprintln!("seed {seed} FAILED: {info}\nreplay: {}", replay(seed, &again));
        std::process::exit(1);
    }));
    let start = Instant::now();
    let (first, last, until) = match (args.seed, args.seeds.clone(), args.minutes) {
        (Some(seed), ..) => (seed, Some(seed + 1), None),
        (_, Some(seeds), _) => (seeds.start, Some(seeds.end), None),
        (_, _, Some(minutes)) => {
            (random_seed(), None, Some(start + Duration::from_secs(minutes * 60)))
        }
        _ => {
            eprintln!("rtrs-sim: no seeds given; use --seed N, --seeds A..B or --minutes N");
            return ExitCode::from(2);
        }
    };
    let log = args.seed.is_some() && !args.quiet && args.output == Format::Text;
    let own = args.held || args.idle || args.machine || args.moving || args.shares;
    if log && !own {
        println!("{:#?}", Options::draw(first));
    }
    let kept =
        if args.seed.is_none() && plant == Plant::None && !own { kept_seeds() } else { Vec::new() };
    let kept = kept.iter().map(|&(seed, _)| seed).collect();
    let mut summary = run_all(&args, Seeds { kept, next: first, last, until }, log);
    summary.seconds = start.elapsed().as_secs_f64();
    summary.seeds_per_minute = (summary.seeds as f64 * 60.0 / summary.seconds.max(1e-9)) as u64;
    match args.output {
        Format::Json => {
            println!("{}", serde_json::to_string_pretty(&summary).unwrap_or_default());
        }
        Format::Text => {
            println!("{:?}", summary.stats);
            if let Some(fingerprint) = &summary.fingerprint {
                println!("fingerprint {fingerprint}");
            }
            println!(
                "{} seeds in {:.1} s ({} a minute): {} passed, {} failed",
                summary.seeds,
                summary.seconds,
                summary.seeds_per_minute,
                summary.passed,
                summary.failed.len()
            );
        }
    }
    ExitCode::from(u8::from(!summary.failed.is_empty()))
}
