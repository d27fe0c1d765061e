//! Test of the report on peers that messages wait for.

use rtrs_tests::wait_for;

use crate::stand::{LIMIT, Stand};

#[test]
fn an_unreachable_peer_is_shown_with_its_waiting_time() {
    let stand = Stand::new(1);
    let _sender = stand.begin(&["send", "127.0.0.9", "4000", "-m", "x", "-I", "127.0.0.1"]);
    wait_for("the peer to be stuck", LIMIT, || {
        let reports = stand.rds(&["node", "info", "127.0.0.1", "-o", "json"]).ok().json();
        let peer = reports[0]["nodes"][0]["peers"][0].clone();
        let seconds = peer["stuck_seconds"].as_u64();
        (peer["address"] == "127.0.0.9" && seconds >= Some(1)).then_some(())
    });
    let text = stand.rds(&["node", "info", "127.0.0.1"]).ok().stdout;
    assert!(text.contains("    nothing acknowledged for "), "{text}");
}
