//! The simulator as a test: seeds that pass, runs that repeat, planted bugs that are seen.
#![forbid(unsafe_code)]

use rtrs_tests::sim::{Options, Plant, kept_seeds, run, run_held, run_with};

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

/// The disk holds a write while its path dies, or all do and it fails; a newer one to the same
/// place follows it.
#[test]
fn the_newest_write_stays_behind_one_that_was_held() {
    let (mut replays, mut failed) = (0, 0);
    for seed in 0..1000 {
        let outcome = run_held(seed, None);
        assert_eq!(outcome.failure, None, "replay: rtrs-sim --held --seed {seed}");
        let stats = outcome.stats;
        replays += u64::from(stats.replays > 0);
        failed += u64::from(stats.barred > 0 && stats.io_errors > 0);
    }
    assert!(replays >= 400, "a copy met its original in {replays} of 1000 variations only");
    assert!(failed >= 200, "one met a write that had failed in {failed} of 1000 variations only");
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
    for checker in ["blocks", "buffers", "durable", "once", "errors", "home", "memory", "live"] {
        assert!(Plant::all().any(|plant| plant.seen_by() == checker), "{checker}");
    }
}
