//! Mutation testing: the engines with one safety rule removed, run until a checker notices.
//!
//! The rules are listed in `rtrs_core::mutant`. A failing seed counts only if it passes without the
//! mutant. An engine that panics because one of its own invariants is violated counts as caught
//! too. Seeds that are known to catch a mutant are listed in `mutants.txt` and tried first, so that
//! the gate takes seconds. If none of them catches it, more seeds are tried, alternating between
//! load, held writes, idle sessions and machines that move; for the rules of the virtual machine
//! front end, runs with a machine.

use std::cell::RefCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rtrs_core::mutant::{self, Mutant};
use serde::Serialize;

use super::{Failure, Options, Plant, run_held, run_idle, run_machine, run_moving, run_with};

/// Number of seeds after which a search also runs a held write; the other scenarios run as often.
const OTHERS_EVERY: u64 = 4;

/// Scenario of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scenario {
    /// Load under faults.
    Load,
    /// Held write.
    Held,
    /// Events after idle minutes.
    Idle,
    /// Virtual machine whose client dies and returns.
    Machine,
    /// Virtual machine that moves to another host.
    Moving,
}

/// Run of the simulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Scene {
    /// Seed of the run.
    pub seed: u64,
    /// Scenario of the run.
    pub scenario: Scenario,
}

/// Evidence that a mutant was caught.
#[derive(Clone, Debug, Serialize)]
pub struct Caught {
    /// Run that caught the mutant.
    #[serde(flatten)]
    pub scene: Scene,
    /// Whether this run was known to catch the mutant.
    pub known: bool,
    /// Checker that caught the mutant: one of [`Failure::checker`], or `panic` for an engine's
    /// invariant.
    pub checker: String,
    /// Description of the violation.
    pub text: String,
}

/// Result for one mutant.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// Name of the mutant.
    pub mutant: &'static str,
    /// Rule that was removed.
    pub rule: &'static str,
    /// Evidence; none if the mutant survived.
    pub caught: Option<Caught>,
    /// Number of runs needed.
    pub runs: u64,
}

thread_local! {
    /// Message of the last engine panic on this thread.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Keeps panic messages for [`hunt`] instead of printing them.
pub fn keep_panics() {
    std::panic::set_hook(Box::new(|info| PANIC.set(Some(info.to_string()))));
}

/// Returns scenes that are known to catch a mutant.
///
/// # Panics
/// Panics if `mutants.txt` is malformed.
fn known_scenes(mutant: Mutant) -> Vec<Scene> {
    let lines = include_str!("mutants.txt").lines().filter(|line| !line.starts_with('#'));
    let mut found = Vec::new();
    for line in lines {
        let mut words = line.split_whitespace();
        let Some(name) = words.next() else { continue };
        let of: Mutant = name.parse().unwrap_or_else(|error| panic!("mutants.txt: {error}"));
        for word in words.filter(|_| of == mutant) {
            let (scenario, number) = match word.split_at_checked(1) {
                Some(("h", number)) => (Scenario::Held, number),
                Some(("i", number)) => (Scenario::Idle, number),
                Some(("v", number)) => (Scenario::Machine, number),
                Some(("m", number)) => (Scenario::Moving, number),
                _ => (Scenario::Load, word),
            };
            let seed = number.parse().unwrap_or_else(|_| panic!("mutants.txt: '{word}'"));
            found.push(Scene { seed, scenario });
        }
    }
    found
}

/// Runs a scene with or without a mutant.
fn play(scene: Scene, mutant: Option<Mutant>) -> Option<Failure> {
    mutant::choose(mutant);
    let outcome = catch_unwind(AssertUnwindSafe(|| match scene.scenario {
        Scenario::Load => run_with(&Options::draw(scene.seed), Plant::None, None).failure,
        Scenario::Held => run_held(scene.seed, None).failure,
        Scenario::Idle => run_idle(scene.seed, None).failure,
        Scenario::Machine => run_machine(scene.seed, None).failure,
        Scenario::Moving => run_moving(scene.seed, None).failure,
    }));
    mutant::choose(None);
    outcome.unwrap_or_else(|_| {
        let reason = PANIC.take().unwrap_or_else(|| "an engine panicked".to_owned());
        Some(Failure::new("panic", reason.replace('\n', " ")))
    })
}

/// Runs a mutant until it is caught: first the scenes known to catch it, then all of `seeds`.
/// `go_on` is called before each run and may end the hunt.
pub fn hunt(mutant: Mutant, seeds: Range<u64>, mut go_on: impl FnMut(Scene) -> bool) -> Verdict {
    let known = known_scenes(mutant);
    let count = known.len() as u64;
    let of_machines = Mutant::MACHINES.contains(&mutant);
    let others = seeds.flat_map(|seed| {
        let scene = move |scenario| Scene { seed, scenario };
        if of_machines {
            return [Some(scene(Scenario::Machine)), None].into_iter().flatten();
        }
        let other = match seed % OTHERS_EVERY {
            0 => Some(Scenario::Held),
            2 => Some(Scenario::Idle),
            3 => Some(Scenario::Moving),
            _ => None,
        };
        [Some(scene(Scenario::Load)), other.map(scene)].into_iter().flatten()
    });
    let mut verdict = Verdict { mutant: mutant.name(), rule: mutant.rule(), caught: None, runs: 0 };
    for scene in known.into_iter().chain(others) {
        if !go_on(scene) {
            break;
        }
        verdict.runs += 1;
        let Some(failure) = play(scene, Some(mutant)) else { continue };
        // A seed that fails without the mutant proves nothing.
        if play(scene, None).is_none() {
            let Failure { checker, text } = failure;
            let known = verdict.runs <= count;
            verdict.caught = Some(Caught { scene, known, checker: checker.to_owned(), text });
            break;
        }
    }
    verdict
}
