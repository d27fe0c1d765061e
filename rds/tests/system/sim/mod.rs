//! Simulator of RDS nodes: the daemon's engines, on connections that pass bytes in pieces, stall
//! and break, under load, with checkers that know the legal results for each message.
//!
//! A run is one thread on a virtual clock and is determined by its seed. `plan` chooses the
//! settings, `net` contains the connections, `host` a node with its users, `world` the clock and
//! the faults, `checker` the rules.

mod checker;
mod host;
mod net;
mod plan;
mod world;

use rtrs_core::mutant;
use rtrs_core::mutant::Mutant;

use self::world::{Outcome, run};

/// Number of seeds within which the simulator must detect a removed rule.
const MUTANT_SEEDS: u64 = 8000;

#[test]
fn seeds_pass() -> Result<(), String> {
    let mut sum = Outcome::default();
    for seed in 0..2000 {
        let outcome = run(seed).map_err(|why| format!("seed {seed}: {why}"))?;
        sum.add(&outcome);
    }
    // Ensures that the faults happen and affect messages.
    assert!(sum.messages > 200_000 && sum.cuts > 5_000 && sum.restarts > 1_000, "{sum:?}");
    assert!(sum.retransmitted > 2_000 && sum.doubles > 200 && sum.raced > 300, "{sum:?}");
    assert!(sum.congested > 2_000 && sum.full > 2_000 && sum.stalls > 1_000, "{sum:?}");
    assert!(sum.refusals > 400 && sum.paths > 1_000, "{sum:?}");
    Ok(())
}

#[test]
fn a_run_is_reproducible() {
    for seed in 0..20 {
        assert_eq!(run(seed), run(seed), "seed {seed}");
    }
}

#[test]
fn every_disabled_rule_is_detected() {
    std::panic::set_hook(Box::new(|_| {}));
    let mut survived = Vec::new();
    for rule in Mutant::RDS {
        let caught = (0..MUTANT_SEEDS).find(|seed| {
            mutant::choose(Some(*rule));
            let outcome = std::panic::catch_unwind(|| run(*seed));
            mutant::choose(None);
            !matches!(outcome, Ok(Ok(_)))
        });
        match caught {
            Some(seed) => println!("{rule}: seed {seed}"),
            None => survived.push(rule.name()),
        }
    }
    drop(std::panic::take_hook());
    assert!(survived.is_empty(), "not detected: {survived:?}");
}
