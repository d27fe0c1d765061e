//! Simulator tests: seeds pass, runs are reproducible, and planted bugs are caught.
#![forbid(unsafe_code)]

use rtrs_core::mutant::{Mutant, choose};
use rtrs_tests::sim::{
    GatewayPlant, Memory, Options, Plant, hunt, kept_seeds, run, run_away, run_gateways, run_held,
    run_idle, run_machine, run_moving, run_proofs, run_shares, run_with,
};

/// Number of seeds within which a planted bug must be caught.
const PLANT_SEEDS: u64 = 100;
/// Seed that exposes a bug that can occur in few runs.
const LATE_SAVE_SEED: u64 = 344;

/// Seeds that once failed, and a few others; `scripts/test.sh` runs more.
#[test]
fn seeds_pass() {
    let kept = kept_seeds().into_iter().map(|(seed, _)| seed);
    for seed in kept.chain(0..40) {
        let outcome = run(seed);
        assert_eq!(outcome.failure, None, "replay: rtrs-sim --seed {seed}");
    }
}

/// The disk holds a write while its path dies, or while all paths die and the write fails; a newer
/// write to the same sectors follows.
#[test]
fn a_newer_write_overrides_a_held_one() {
    let (mut replays, mut failed) = (0, 0);
    for seed in 0..1000 {
        let outcome = run_held(seed, None);
        assert_eq!(outcome.failure, None, "replay: rtrs-sim --held --seed {seed}");
        let stats = outcome.stats;
        replays += u64::from(stats.replays > 0);
        failed += u64::from(stats.blocked > 0 && stats.io_errors > 0);
    }
    assert!(replays >= 400, "a copy met its original in only {replays} of 1000 variations");
    assert!(failed >= 200, "a write met a failed one in only {failed} of 1000 variations");
}

/// A client's host sleeps with writes in flight, while another client writes and then leaves.
#[test]
fn a_client_that_returns_after_another_writer_is_refused() {
    let mut late = 0;
    for seed in 0..200 {
        let outcome = run_away(seed, Memory::Kept, None);
        assert_eq!(outcome.failure, None, "seed {seed}");
        if seed < 10 {
            assert_eq!(run_away(seed, Memory::Kept, None), outcome, "seed {seed} repeats itself");
        }
        late += u64::from(outcome.stats.io_errors > 0);
    }
    assert!(late >= 100, "a client returned with requests in only {late} of 200 variations");
    let forgetful = (0..20).filter_map(|seed| run_away(seed, Memory::Lost, None).failure);
    let checkers: Vec<_> = forgetful.map(|failure| failure.checker).collect();
    assert!(checkers.contains(&"blocks"), "old requests of a client change nothing: {checkers:?}");
}

/// A virtual machine moves to a host whose session waits for exclusive access, while the old host
/// ends in any way.
#[test]
fn a_new_host_writes_only_after_the_old_one() {
    let mut late = 0;
    for seed in 0..200 {
        let outcome = run_moving(seed, None);
        assert_eq!(outcome.failure, None, "seed {seed}");
        if seed < 10 {
            assert_eq!(run_moving(seed, None), outcome, "seed {seed} repeats itself");
        }
        late += u64::from(outcome.stats.io_errors > 0);
    }
    assert!(late >= 40, "an old host returned with requests in only {late} of 200 variations");
    let planted = [
        (Mutant::SecondWriter, "blocks"),
        (Mutant::ClaimKept, "live"),
        (Mutant::ArrivalForgotten, "durable"),
    ];
    for (mutant, checker) in planted {
        choose(Some(mutant));
        let caught = (0..60).filter_map(|seed| run_moving(seed, None).failure);
        let checkers: Vec<_> = caught.map(|failure| failure.checker).collect();
        choose(None);
        assert!(checkers.contains(&checker), "{mutant} is not noticed: {checkers:?}");
    }
}

/// For minutes, nothing happens but slow idle heartbeats, until an event. `scripts/test.sh` runs
/// more seeds.
#[test]
fn failures_after_idle_minutes_are_detected_in_time() {
    for seed in 0..20 {
        let outcome = run_idle(seed, None);
        assert_eq!(outcome.failure, None, "replay: rtrs-sim --idle --seed {seed}");
        if seed < 10 {
            assert_eq!(run_idle(seed, None), outcome, "seed {seed} repeats itself");
        }
    }
}

/// A virtual machine's client dies at any step of its requests, and the next client repeats them.
/// `scripts/test.sh` runs more seeds.
#[test]
fn a_machine_survives_deaths_of_its_client_at_any_step() {
    let (mut torn, mut left) = (0, 0);
    for seed in 0..60 {
        let outcome = run_machine(seed, None);
        assert_eq!(outcome.failure, None, "replay: rtrs-sim --machine --seed {seed}");
        if seed < 10 {
            assert_eq!(run_machine(seed, None), outcome, "seed {seed} repeats itself");
        }
        torn += outcome.stats.torn;
        left += outcome.stats.left;
    }
    assert!(torn >= 100 && left >= 1000, "{torn} deaths between steps, {left} repeated requests");
}

/// Each rule of the front end for virtual machines is necessary.
#[test]
fn broken_rules_of_machines_are_detected() {
    for mutant in Mutant::MACHINES {
        let caught = hunt(*mutant, 0..0, |_| true).caught;
        assert!(caught.is_some(), "{mutant}: no seed of tests/sim/mutants.txt catches it");
    }
}

/// A core, a path, the disk or memory registration stalls, and then recovers. `scripts/test.sh`
/// runs more seeds.
#[test]
fn equal_paths_share_the_load_within_a_second_after_a_stall() {
    for seed in 0..10 {
        let outcome = run_shares(seed, Plant::None, None);
        assert_eq!(outcome.failure, None, "replay: rtrs-sim --shares --seed {seed}");
    }
}

/// Two clients prove their identity, while an intruder tries to impersonate a client.
#[test]
fn an_intruder_proves_nothing_and_disturbs_nothing() {
    intrude(0..10);
}

/// A separate test, because each seed takes seconds of processor time.
#[test]
fn an_intruder_proves_nothing_in_other_seeds() {
    intrude(10..20);
}

fn intrude(seeds: std::ops::Range<u64>) {
    let mut sum = (0, 0, 0);
    for seed in seeds {
        let outcome = run_proofs(seed).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        assert!(outcome.ios > 500 && outcome.attacks > 20, "seed {seed}: {outcome:?}");
        if seed % 4 == 0 {
            assert_eq!(run_proofs(seed), Ok(outcome), "seed {seed}");
        }
        sum = (sum.0 + outcome.refused, sum.1 + outcome.computed, sum.2 + outcome.crowd);
    }
    assert!(sum.0 > 250 && sum.1 > 500 && sum.2 > 250, "{sum:?}");
}

/// Two gateways are frozen, killed, cut off and moved; no write from one gateway lands after writes
/// from the next, none is lost, and in the end all IO continues.
#[test]
fn an_export_moves_between_gateways_without_a_ghost_write() {
    let mut sum = (0, 0, 0);
    for seed in 0..150 {
        let counts = run_gateways(seed, GatewayPlant::None);
        let counts = counts.unwrap_or_else(|why| panic!("seed {seed}: {why:?}"));
        if seed % 10 == 0 {
            assert_eq!(run_gateways(seed, GatewayPlant::None), Ok(counts), "seed {seed}");
        }
        sum = (sum.0 + counts.terms, sum.1 + counts.forced, sum.2 + counts.late);
    }
    assert!(sum.0 > 500 && sum.1 > 200 && sum.2 > 50, "{sum:?}");
}

#[test]
fn gateway_mutants_are_detected() {
    for plant in [GatewayPlant::NoBlocklist, GatewayPlant::ActiveEarly] {
        let mut seen = (0..150).filter_map(|seed| run_gateways(seed, plant).err());
        assert!(seen.any(|failure| ["ghost", "lost"].contains(&failure.checker)), "{plant:?}");
    }
    // The client mistakes a standby for an active gateway.
    for mutant in Mutant::GATEWAYS {
        choose(Some(*mutant));
        let seen = (0..150).find_map(|seed| run_gateways(seed, GatewayPlant::None).err());
        choose(None);
        assert!(seen.is_some(), "{mutant}");
    }
}

#[test]
fn a_run_is_reproducible() {
    for seed in 0..20 {
        let (first, second) = (run(seed), run(seed));
        assert!(first.stats.events > 20, "seed {seed}: {:?}", first.stats);
        assert_eq!(first, second, "seed {seed}");
    }
}

/// Tests one rule of the engines; `rtrs-sim --mutants` removes every rule in turn
/// (docs/explanation/simulator.md).
#[test]
fn a_resend_before_the_fence_is_detected() {
    let verdict = hunt(Mutant::ResendBeforeFence, 0..0, |_| true);
    let caught = verdict.caught.expect("a seed of tests/sim/mutants.txt catches it");
    assert_eq!(caught.checker, "blocks", "{}", caught.text);
}

/// Tests the rules that make idle heartbeats safe.
#[test]
fn permanently_rare_heartbeats_are_detected() {
    for mutant in [Mutant::IdleKept, Mutant::IdleSessionUnprobed] {
        let caught = hunt(mutant, 0..0, |_| true).caught;
        let caught = caught.expect("a seed of tests/sim/mutants.txt catches it");
        assert_eq!(caught.checker, "live", "{mutant:?}: {}", caught.text);
    }
}

#[test]
fn every_mutant_is_detected_by_its_checker() {
    for plant in Plant::all() {
        let seeds = match plant {
            Plant::LateSave => LATE_SAVE_SEED..LATE_SAVE_SEED + 1,
            _ => 0..PLANT_SEEDS,
        };
        let mut seen = seeds
            .filter_map(|seed| match plant {
                Plant::LimpingPath => run_shares(seed, plant, None).failure,
                _ => run_with(&Options::draw(seed), plant, None).failure,
            })
            .map(|failure| failure.checker);
        assert!(seen.any(|checker| checker == plant.seen_by()), "{plant:?}");
    }
}

#[test]
fn every_checker_has_a_mutant() {
    let all = ["blocks", "buffers", "durable", "once", "errors", "home", "memory", "live", "share"];
    for checker in all {
        assert!(Plant::all().any(|plant| plant.seen_by() == checker), "{checker}");
    }
}
