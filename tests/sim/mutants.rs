//! Mutation testing: the machines with one safety rule taken out, run until a checker sees it.
//!
//! The rules stand in `rtrs_core::mutant`. A seed that fails counts only if it passes without the
//! mutant. A machine that panics, because a law of its own does not hold any more, is seen too.
//! Seeds that are known to find a mutant stand in `mutants.txt` and are tried first, so that the
//! gate takes seconds; where none does, others are searched, load, held writes and idle sessions
//! in turn.

use std::cell::RefCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rtrs_core::mutant::{self, Mutant};
use serde::Serialize;

use super::{Failure, Options, Plant, run_held, run_idle, run_with};

/// Every n-th seed of a search is run as a held write too, and another as an idle session.
const OTHERS_EVERY: u64 = 4;

/// What a run is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scenario {
    /// Load under faults.
    Load,
    /// A held write.
    Held,
    /// What happens after idle minutes.
    Idle,
}

/// A run of the simulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Scene {
    /// Its seed.
    pub seed: u64,
    /// What it is about.
    pub scenario: Scenario,
}

/// How a mutant was caught.
#[derive(Clone, Debug, Serialize)]
pub struct Caught {
    /// By which run.
    #[serde(flatten)]
    pub scene: Scene,
    /// It was known to.
    pub known: bool,
    /// Which checker saw it: one of [`Failure::checker`], or `panic` for a law of the machines.
    pub checker: String,
    /// What it saw.
    pub text: String,
}

/// What became of a mutant.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// Its name.
    pub mutant: &'static str,
    /// The rule that was taken out.
    pub rule: &'static str,
    /// Nothing, if it survived.
    pub caught: Option<Caught>,
    /// Runs that it took.
    pub runs: u64,
}

thread_local! {
    /// What the machine that panicked last on this thread said.
    static SAID: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Keeps what panics say, for [`hunt`], instead of printing it.
pub fn keep_panics() {
    std::panic::set_hook(Box::new(|info| SAID.set(Some(info.to_string()))));
}

/// Scenes that are known to catch a mutant.
///
/// # Panics
/// When `mutants.txt` is not what it should be.
fn known_scenes(mutant: Mutant) -> Vec<Scene> {
    let lines = include_str!("mutants.txt").lines().filter(|line| !line.starts_with('#'));
    let mut found = Vec::new();
    for line in lines {
        let mut words = line.split_whitespace();
        let Some(name) = words.next() else { continue };
        let of: Mutant = name.parse().unwrap_or_else(|error| panic!("mutants.txt: {error}"));
        for word in words.filter(|_| of == mutant) {
            let (scenario, number) = match (word.strip_prefix('h'), word.strip_prefix('i')) {
                (Some(number), _) => (Scenario::Held, number),
                (_, Some(number)) => (Scenario::Idle, number),
                _ => (Scenario::Load, word),
            };
            let seed = number.parse().unwrap_or_else(|_| panic!("mutants.txt: '{word}'"));
            found.push(Scene { seed, scenario });
        }
    }
    found
}

/// Runs a scene with a mutant or without.
fn play(scene: Scene, mutant: Option<Mutant>) -> Option<Failure> {
    mutant::choose(mutant);
    let outcome = catch_unwind(AssertUnwindSafe(|| match scene.scenario {
        Scenario::Load => run_with(&Options::draw(scene.seed), Plant::None, None).failure,
        Scenario::Held => run_held(scene.seed, None).failure,
        Scenario::Idle => run_idle(scene.seed, None).failure,
    }));
    mutant::choose(None);
    outcome.unwrap_or_else(|_| {
        let said = SAID.take().unwrap_or_else(|| "a machine panicked".to_owned());
        Some(Failure::new("panic", said.replace('\n', " ")))
    })
}

/// Runs a mutant until it is caught: what is known to catch it, then all of `seeds`.
/// `go_on` is called before each run and may end the hunt.
pub fn hunt(mutant: Mutant, seeds: Range<u64>, mut go_on: impl FnMut(Scene) -> bool) -> Verdict {
    let known = known_scenes(mutant);
    let count = known.len() as u64;
    let others = seeds.flat_map(|seed| {
        let other = match seed % OTHERS_EVERY {
            0 => Some(Scenario::Held),
            2 => Some(Scenario::Idle),
            _ => None,
        };
        let scene = move |scenario| Scene { seed, scenario };
        [Some(scene(Scenario::Load)), other.map(scene)].into_iter().flatten()
    });
    let mut verdict = Verdict { mutant: mutant.name(), rule: mutant.rule(), caught: None, runs: 0 };
    for scene in known.into_iter().chain(others) {
        if !go_on(scene) {
            break;
        }
        verdict.runs += 1;
        let Some(failure) = play(scene, Some(mutant)) else { continue };
        // What fails anyway says nothing about the mutant.
        if play(scene, None).is_none() {
            let Failure { checker, text } = failure;
            let known = verdict.runs <= count;
            verdict.caught = Some(Caught { scene, known, checker: checker.to_owned(), text });
            break;
        }
    }
    verdict
}
