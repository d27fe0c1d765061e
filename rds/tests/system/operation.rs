//! Tests of the operation of daemons: settings that change while nodes run, and metrics.

use std::os::unix::net::UnixStream;

use rtrs_tests::{Exposition, Finished, Scratch, scrape, wait_for};

use crate::stand::{LIMIT, Stand};

/// Runs `rds node` with these arguments in the stand's directory.
fn node(stand: &Stand, args: &[&str]) -> Finished {
    let dir = stand.dir();
    let dir = ["--socket-dir", dir.to_str().unwrap()];
    stand.rds(&[&["node"], args, &dir[..]].concat())
}

#[test]
fn settings_change_while_a_node_runs() {
    let stand = Stand::new(2);
    let get = |address, key| node(&stand, &["get", address, key]).ok().stdout;
    assert_eq!(get("127.0.0.1", "reconnect-max"), "reconnect-max: 1s\n");
    assert_eq!(get("127.0.0.1", "paths"), "paths: 1  # needs a restart\n");
    // The new buffer sizes also apply to the established connection.
    let _ = stand.rds(&["ping", "127.0.0.2", "-I", "127.0.0.1", "-c", "1", "-W", "60s"]).ok();
    let changes = ["reconnect-max=5s", "max-unacked-packets=100", "tcp-rcvbuf=64k", "log=info"];
    let changed = node(&stand, &[&["set", "127.0.0.1"], &changes[..]].concat()).ok().stdout;
    let lines = "log: info\nmax-unacked-packets: 100\nreconnect-max: 5s\ntcp-rcvbuf: 64k\n";
    assert_eq!(changed, lines);
    assert_eq!(get("127.0.0.1", "reconnect-max"), "reconnect-max: 5s\n");
    assert_eq!(get("127.0.0.2", "reconnect-max"), "reconnect-max: 1s\n", "another daemon");
    for (changes, text) in [
        (&["paths=2"][..], "paths cannot change while a node runs; log, max-unacked-bytes,"),
        (&["reconnect-max=5"], "reconnect-max: time \"5\" has no unit"),
        (&["reconnect-max=1s", "reconnect-min=2s"], "reconnect-min 2s is more than reconnect-max"),
        (&["reconnect=1s"], "there is no setting reconnect; `rds node get ADDRESS` prints all"),
    ] {
        let args = [&["set", "127.0.0.1"], changes].concat();
        let _ = node(&stand, &args).code(2).says(text);
    }
    // More than the system allows, if its limit is visible.
    for (name, limit) in [("tcp-sndbuf", "wmem_max"), ("tcp-rcvbuf", "rmem_max")] {
        let most = std::fs::read_to_string(format!("/proc/sys/net/core/{limit}"));
        if most.is_ok_and(|most| most.trim().parse::<u64>().unwrap() < 1 << 30) {
            let text = format!("net.core.{limit}");
            let change = format!("{name}=1G");
            let _ = node(&stand, &["set", "127.0.0.1", &change]).code(2).says(&text);
        }
    }
    assert_eq!(get("127.0.0.1", "tcp-sndbuf"), "tcp-sndbuf: 0\n", "nothing has changed");
    assert_eq!(get("127.0.0.1", "reconnect-max"), "reconnect-max: 5s\n", "nothing has changed");
    let _ = node(&stand, &["get", "127.0.0.9"]).code(1).says("127.0.0.9");
    let _ = stand.rds(&["ping", "127.0.0.2", "-I", "127.0.0.1", "-c", "1", "-W", "60s"]).ok();
}

#[test]
fn a_reset_reports_how_many_connections_it_ended() {
    for (paths, text) in [("1", "connection reset\n"), ("3", "3 connections reset\n")] {
        let stand = Stand::with(2, &["--paths", paths]);
        let reset = ["reset", "127.0.0.1", "127.0.0.2"];
        let _ = node(&stand, &reset).code(1).says("has no connection to 127.0.0.2");
        let _ = stand.rds(&["ping", "127.0.0.2", "-I", "127.0.0.1", "-c", "1", "-W", "60s"]).ok();
        wait_for("all connections", LIMIT, || {
            let reports = node(&stand, &["info", "127.0.0.1", "-o", "json"]).ok().json();
            let all = reports[0]["nodes"][0]["peers"][0]["paths"].clone();
            let up = all.as_array()?.iter().filter(|path| path["state"] == "up").count();
            (up == paths.parse::<usize>().unwrap()).then_some(())
        });
        assert_eq!(node(&stand, &reset).ok().stdout, text);
    }
}

#[test]
fn the_metrics_of_nodes_are_scraped() {
    let dir = Scratch::new();
    let socket = dir.dir().join("m.sock");
    let at = format!("unix:{}", socket.display());
    let stand = Stand::with(1, &["--metrics", &at]);
    let _sender = stand.begin(&["send", "127.0.0.9", "4000", "-m", "x", "-I", "127.0.0.1"]);
    let text = wait_for("a stuck peer", LIMIT, || {
        let text = scrape(UnixStream::connect(&socket).unwrap());
        let stuck = "rds_peer_stuck_seconds{node=\"127.0.0.1\",peer=\"127.0.0.9\"} ";
        let (_, seconds) = text.split_once(stuck)?;
        seconds.split('\n').next()?.parse::<u64>().ok().filter(|seconds| *seconds > 0)?;
        Some(text)
    });
    let exposition = Exposition::parse(&text).unwrap();
    let metrics = rds::metrics::all();
    for family in &exposition.0 {
        let metric = metrics.iter().find(|metric| metric.name == family.name);
        let metric = metric.unwrap_or_else(|| panic!("{} is not declared", family.name));
        assert_eq!(family.kind, metric.kind.name(), "{}", family.name);
    }
    assert_eq!(exposition.0.len(), metrics.len());
    assert!(text.contains("rds_sockets{node=\"127.0.0.1\"} 1\n"), "{text}");
}
