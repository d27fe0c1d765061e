//! The corpus of `server_paths`, random programs, and that what keeps the rules works at all.

use proptest::prelude::*;

use super::{Input, Rig, fuzz_paths};

#[test]
fn clients_that_keep_the_rules_are_served() {
    for setup in 0..16 {
        let mut rig = Rig::new(setup).unwrap();
        rig.come_up(1, 1);
        let sessions = rig.hosts[0].core.snapshot(rig.world.now());
        assert_eq!(sessions.len(), 1, "setup {setup}");
        assert_eq!(sessions[0].opens.len(), 1, "setup {setup}: {sessions:?}");
        // A write over the second connection.
        let before = rig.clients.received;
        let mut write = Input(&[1, 1, 0, 0, 1, 0, 0, 8, 1]);
        rig.request(12, &mut write).unwrap();
        rig.settle();
        assert_eq!(rig.clients.received, before + 1, "setup {setup}: an answer");
        rig.end();
    }
}

#[test]
fn the_corpus_replays() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/server_paths");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        fuzz_paths(&std::fs::read(entry.unwrap().path()).unwrap());
        seen += 1;
    }
    assert!(seen >= 8, "the corpus is missing");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn random_programs_hold(data in proptest::collection::vec(any::<u8>(), 0..300)) {
        fuzz_paths(&data);
    }
}
