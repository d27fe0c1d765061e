//! The simulator as a test: seeds that pass, runs that repeat, planted bugs that are seen.
#![forbid(unsafe_code)]

use rtrs_tests::sim::{Options, Plant, kept_seeds, run, run_with};

/// Seeds in which a planted bug has to show.
const PLANT_SEEDS: u64 = 60;

#[test]
fn seeds_pass() {
    let kept = kept_seeds().into_iter().map(|(seed, _)| seed);
    for seed in kept.chain(0..400) {
        let outcome = run(seed);
        assert_eq!(outcome.failure, None, "replay: rtrs-sim --seed {seed}");
    }
}

#[test]
fn a_run_repeats_itself() {
    for seed in 0..20 {
        let (first, second) = (run(seed), run(seed));
        assert!(first.stats.events > 20, "seed {seed}: {:?}", first.stats);
        assert_eq!(first, second, "seed {seed}");
    }
}

#[test]
fn every_planted_bug_is_seen_by_its_checker() {
    for plant in Plant::all() {
        let mut seen = (0..PLANT_SEEDS)
            .filter_map(|seed| run_with(&Options::draw(seed), plant, None).failure)
            .map(|failure| failure.checker);
        assert!(seen.any(|checker| checker == plant.seen_by()), "{plant:?}");
    }
}

#[test]
fn every_checker_has_a_planted_bug() {
    for checker in ["blocks", "durable", "once", "errors", "home", "memory", "live"] {
        assert!(Plant::all().any(|plant| plant.seen_by() == checker), "{checker}");
    }
}
