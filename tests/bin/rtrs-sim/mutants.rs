//! `rtrs-sim --mutants`: runs each mutant until it is caught, on all processors.

use std::io::IsTerminal;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rtrs_core::mutant::{self, Mutant};
use rtrs_tests::sim::{Scenario, Scene, Verdict, hunt, keep_panics};
use serde::Serialize;

/// Default seeds; a mutant that none of them catches has survived.
const SEEDS: Range<u64> = 0..3000;
/// Mutants that `quick` runs: each loses data silently, and has survived the simulator in the past.
const QUICK: [Mutant; 9] = [
    Mutant::ResendBeforeFence,
    Mutant::SecondWriter,
    Mutant::CloseWhileBusy,
    Mutant::GivenUpBeforeFence,
    Mutant::FlushCoversLater,
    Mutant::OldEpochAnswer,
    Mutant::ReplayWithoutPermit,
    Mutant::PreflushDropped,
    Mutant::ReadWindowKept,
];

#[derive(Debug, Serialize)]
struct Summary {
    mutants: usize,
    caught: usize,
    survived: Vec<&'static str>,
    seconds: f64,
    verdicts: Vec<Verdict>,
}

/// One line of `list`.
#[derive(Debug, Serialize)]
struct Listed {
    mutant: &'static str,
    rule: &'static str,
    quick: bool,
}

/// Returns all mutants that the simulator runs.
fn every() -> impl Iterator<Item = Mutant> {
    Mutant::ALL.iter().chain(Mutant::MACHINES).copied()
}

fn list(json: bool) -> ExitCode {
    let listed = every().map(|mutant| Listed {
        mutant: mutant.name(),
        rule: mutant.rule(),
        quick: QUICK.contains(&mutant),
    });
    if json {
        let listed: Vec<Listed> = listed.collect();
        println!("{}", serde_json::to_string_pretty(&listed).unwrap_or_default());
        return ExitCode::SUCCESS;
    }
    for Listed { mutant, rule, quick } in listed {
        println!("{mutant:24} {}{rule}", if quick { "(quick) " } else { "" });
    }
    ExitCode::SUCCESS
}

/// Form of the report on the mutants.
#[derive(Clone, Copy)]
pub(crate) struct ReportFormat {
    pub(crate) json: bool,
    /// Prints only the surviving mutants, and the count.
    pub(crate) quiet: bool,
}

/// Runs the selected mutants.
pub(crate) fn main(
    which: &str,
    seed: Option<u64>,
    seeds: Option<Range<u64>>,
    format: ReportFormat,
) -> ExitCode {
    let ReportFormat { json, quiet } = format;
    let chosen: Vec<Mutant> = match which {
        "list" => return list(json),
        "all" => every().collect(),
        "machines" => Mutant::MACHINES.to_vec(),
        "quick" => QUICK.to_vec(),
        name => match name.parse() {
            Ok(mutant) => vec![mutant],
            Err(error) => {
                eprintln!("rtrs-sim: {error}");
                return ExitCode::from(2);
            }
        },
    };
    if !mutant::choose(Some(chosen[0])) || !mutant::choose(None) {
        eprintln!("rtrs-sim: cannot run mutants: this build has none; build without --release");
        return ExitCode::from(2);
    }
    let seeds = seed.map(|seed| seed..seed + 1).or(seeds).unwrap_or(SEEDS);
    keep_panics();
    let start = Instant::now();
    let next = AtomicUsize::new(0);
    let verdicts: Mutex<Vec<(usize, Verdict)>> = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(chosen.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(&mutant) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut shown = Instant::now();
                    let verdict = hunt(mutant, seeds.clone(), |scene| {
                        if !quiet && shown.elapsed() > Duration::from_secs(5) {
                            shown = Instant::now();
                            let end = if std::io::stderr().is_terminal() { "\r" } else { "\n" };
                            eprint!("rtrs-sim: {mutant}: not caught yet, at {}{end}", scene.seed);
                        }
                        true
                    });
                    let at = chosen.iter().position(|other| *other == mutant).unwrap_or(0);
                    if !json && (!quiet || verdict.caught.is_none()) {
                        println!("{}", line(&verdict));
                    }
                    verdicts.lock().push((at, verdict));
                }
            });
        }
    });
    let mut verdicts = verdicts.into_inner();
    verdicts.sort_by_key(|(at, _)| *at);
    let verdicts: Vec<Verdict> = verdicts.into_iter().map(|(_, verdict)| verdict).collect();
    let survived: Vec<&'static str> =
        verdicts.iter().filter(|one| one.caught.is_none()).map(|one| one.mutant).collect();
    let caught = verdicts.len() - survived.len();
    let seconds = start.elapsed().as_secs_f64();
    let code = ExitCode::from(u8::from(!survived.is_empty()));
    let mutants = verdicts.len();
    if json {
        let summary = Summary { mutants, caught, survived, seconds, verdicts };
        println!("{}", serde_json::to_string_pretty(&summary).unwrap_or_default());
    } else {
        println!("caught: {caught} of {mutants} mutants, in {seconds:.1} s");
        for name in survived {
            println!("SURVIVED: {name}");
        }
    }
    code
}

/// Formats a verdict as one line.
fn line(verdict: &Verdict) -> String {
    let Some(caught) = &verdict.caught else {
        return format!("{:24} SURVIVED {} runs: {}", verdict.mutant, verdict.runs, verdict.rule);
    };
    let Scene { seed, scenario } = caught.scene;
    let scenario = match scenario {
        Scenario::Load => "",
        Scenario::Held => "--held ",
        Scenario::Idle => "--idle ",
        Scenario::Machine => "--machine ",
        Scenario::Moving => "--moving ",
    };
    let known = if caught.known { "" } else { " (not in tests/sim/mutants.txt)" };
    let text: String = caught.text.chars().take(110).collect();
    let (mutant, checker) = (verdict.mutant, &caught.checker);
    format!("{mutant:24} {checker:8} {scenario}seed {seed}{known}: {text}")
}
