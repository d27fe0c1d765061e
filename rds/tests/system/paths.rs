//! Tests of daemons that use several connections for a pair of nodes.

use rtrs_tests::{free_port, wait_for};
use serde_json::Value;

use crate::stand::{LIMIT, Stand};

/// Returns the paths of a node to its only peer, as its daemon reports them.
fn paths(stand: &Stand, node: &str) -> Vec<Value> {
    let dir = stand.dir();
    let args = ["node", "info", "-o", "json", "--socket-dir", dir.to_str().unwrap()];
    let info: Value = serde_json::from_str(&stand.rds(&args).ok().stdout).unwrap();
    let daemons = info.as_array().unwrap();
    let mut nodes = daemons.iter().flat_map(|daemon| daemon["nodes"].as_array().unwrap());
    let node = nodes.find(|it| it["address"] == node).unwrap();
    node["peers"][0]["paths"].as_array().cloned().unwrap_or_default()
}

fn count_up(paths: &[Value]) -> usize {
    paths.iter().filter(|path| path["state"] == "up").count()
}

#[test]
fn a_load_uses_all_paths_and_survives_their_resets() {
    let stand = Stand::with(2, &["--paths", "8", "--reconnect-max", "20ms"]);
    let port = free_port().to_string();
    let mut server = stand.begin(&["stress", "--listen", "-I", "127.0.0.2", "-p", &port]);
    server.wait_lines("listening", 1, LIMIT);
    // Runs until the signal, then until everything is answered.
    let args = ["stress", "127.0.0.2", "-p", &port, "-I", "127.0.0.1", "-s", "64", "-t", "24h"];
    let load = stand.begin(&[&args[..], &["-W", "1h", "-o", "json"]].concat());
    let all_up = || {
        wait_for("8 paths", LIMIT, || {
            let up = ["127.0.0.1", "127.0.0.2"].map(|node| count_up(&paths(&stand, node)));
            (up == [8, 8]).then_some(())
        });
    };
    all_up();
    let info = stand.rds(&["info", "-n", "-I", "127.0.0.1"]).ok();
    assert_eq!(info.stdout.matches("127.0.0.2").count(), 8, "{}", info.stdout);
    let dir = stand.dir();
    for _ in 0..5 {
        let reset = ["node", "reset", "127.0.0.1", "127.0.0.2", "--socket-dir"];
        let _ = stand.rds(&[&reset[..], &[dir.to_str().unwrap()]].concat()).ok();
        all_up();
    }
    wait_for("messages on most paths", LIMIT, || {
        let carried = paths(&stand, "127.0.0.1");
        let used = carried.iter().filter(|path| path["next_tx"].as_u64() > Some(20)).count();
        (used > 4).then_some(())
    });
    let summary = load.terminate(LIMIT).ok().json();
    assert!(summary["answered"].as_u64() > Some(0), "{summary}");
    assert_eq!((&summary["lost"], &summary["wrong"]), (&0.into(), &0.into()), "{summary}");
}
