//! Tests of `server_paths`: its corpus replays, random programs uphold the invariants, and clients
//! that follow the rules are served.

use proptest::prelude::*;

use rtrs_core::wire::AccessMode;

use super::{Input, Rig, fuzz_paths};

#[test]
fn well_behaved_clients_are_served() {
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
fn an_authenticating_client_is_served() {
    for setup in 16..32 {
        let mut rig = Rig::new(setup).unwrap();
        rig.come_up(3, 1);
        let shown = rig.hosts[0].core.snapshot(rig.world.now());
        assert_eq!((&*shown[0].identity, shown[0].opens.len()), ("unproved", 0), "setup {setup}");
        for fields in [0x80, 0x81] {
            rig.request(15, &mut Input(&[0, 0, fields, 0, 0, 0, 0, 0])).unwrap();
            rig.settle();
        }
        rig.clients.open(0, 0, "vol", AccessMode::ReadWrite);
        rig.settle();
        let shown = rig.hosts[0].core.snapshot(rig.world.now());
        assert_eq!((&*shown[0].identity, shown[0].opens.len()), ("key:db1", 1), "setup {setup}");
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
    fn random_programs_hold_invariants(data in proptest::collection::vec(any::<u8>(), 0..300)) {
        fuzz_paths(&data);
    }
}
