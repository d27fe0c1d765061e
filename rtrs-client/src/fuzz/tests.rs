//! Corpus of `client_paths`, random programs, and a check that a correct server works at all.

use proptest::prelude::*;

use super::{Rig, fuzz_paths};
use crate::engine::DeviceIndex;

#[test]
fn the_corpus_replays() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/client_paths");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        fuzz_paths(&std::fs::read(entry.unwrap().path()).unwrap());
        seen += 1;
    }
    assert!(seen >= 8, "the corpus is missing");
}

#[test]
fn a_well_behaved_server_is_usable() {
    for setup in [0, 1, 8 | 16, 64, 128, 32 | 8] {
        let mut rig = Rig::new(setup).unwrap();
        rig.pass(super::Duration::from_millis(50));
        let paths = rig.hosts[0].engine.paths();
        assert!(rig.hosts[0].engine.is_open(DeviceIndex::FIRST), "setup {setup}: {paths:?}");
        // The session gets a second volume, again after each close.
        for round in 0..3 {
            rig.second(true);
            rig.pass(super::Duration::from_millis(50));
            assert_eq!(rig.hosts[0].users.len(), 2, "setup {setup} round {round}");
            for op in 0..10 {
                rig.submit(0, op, 1, 3);
            }
            rig.settle();
            assert_eq!(rig.next_tag, 11 + 10 * round, "setup {setup}: all were taken");
            assert!(rig.hosts[0].users.iter().all(|user| user.waiting.is_empty()), "setup {setup}");
            rig.second(false);
            rig.pass(super::Duration::from_millis(50));
            assert_eq!(rig.hosts[0].users.len(), 1, "setup {setup} round {round}");
        }
        rig.end();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn random_programs_hold_invariants(data in proptest::collection::vec(any::<u8>(), 0..300)) {
        fuzz_paths(&data);
    }
}
