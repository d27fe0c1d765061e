//! Tests of the limit on chunk memory (`memory-max`): what it counts, which sessions are granted a
//! smaller queue depth, and which are refused. Chunks of 64 KiB count in groups of three, 204 KiB.

use std::net::SocketAddr;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Innocent, Peer, PeerOptions, RawNbd, Reply, STOP_TIME_MAX, Server,
    ServerBuilder, wait_for,
};
use serde_json::Value;

const ENOMEM: i16 = -12;

fn server(memory_max: &str) -> ServerBuilder {
    let args = ["--queue-depth", "64", "--chunk-size", "64k", "--memory-max", memory_max];
    Server::builder().export("vol0=mem:16M").export("vol1=mem:16M").args(&args)
}

fn attach(server: &Server, export: &str) -> Client {
    Client::attach(export)
        .path(server.portal())
        .args(&["--session-name", export, "--shards", "1"])
        .start()
}

/// Returns the session with this name.
fn session(server: &Server, name: &str) -> Value {
    let found = server.sessions().into_iter().find(|session| session["name"] == name);
    found.unwrap_or_else(|| panic!("no session {name}"))
}

#[test]
fn under_memory_pressure_new_sessions_get_less_and_old_ones_reconnect() {
    // Memory for the chunks of one path and six more groups.
    let server = server("5572k").start();
    let first = attach(&server, "vol0");
    let innocent = Innocent::start(first.front(), "vol0");
    innocent.progress();
    let list = server.list();
    let memory = &list["memory"];
    assert_eq!(memory["max_bytes"], 5572 << 10, "{list}");
    assert_eq!(memory["used_bytes"], list["sessions"][0]["memory_bytes"], "{list}");
    let used = memory["used_bytes"].as_u64().expect("a number");
    assert!(used > 0 && used.is_multiple_of(204 << 10), "{list}");
    assert_eq!(list["sessions"][0]["queue_depth"], 64, "{list}");
    let shown = server.command(&["session", "list"]).ok().stdout;
    assert!(shown.contains(" of 5.4 MiB (memory-max)"), "{shown}");

    // A peer without our extension writes to eight groups: a path of the full depth no longer fits.
    let address: SocketAddr = server.address().parse().expect("an address");
    let mut greedy = Peer::up(address, PeerOptions::new(9, 9), "greedy");
    greedy.open("vol1", rtrs_core::wire::AccessMode::ReadOnly).expect("open vol1");
    for permit in (3..24).step_by(3) {
        greedy.send_sess_info((1, permit), 2);
        assert_eq!(greedy.answer().errno, 0);
    }
    let mut rigid = Peer::new(address, PeerOptions::new(10, 10));
    assert_eq!(rigid.connect(0), Err(ENOMEM));
    let _ = server.wait_output("memory-max (5.4 MiB) has ");
    let second = attach(&server, "vol1");
    assert_eq!(session(&server, "vol1")["queue_depth"], 32);
    let mut raw = RawNbd::go(second.front(), "vol1");
    assert_eq!(raw.write(0, 0, &[7; 61_440]), Reply::Error(0));

    // Both sessions keep their depth on reconnect, whatever memory is left.
    for (name, depth) in [("vol0", 64), ("vol1", 32)] {
        let path = |session: &Value| session["paths"][0]["path"].as_u64();
        let before = path(&session(&server, name));
        let _ = server.command(&["session", "disconnect", name]).ok();
        let again = wait_for("the path to come back", COMMAND_TIME_MAX, || {
            let sessions = server.sessions();
            let found = sessions.into_iter().find(|session| session["name"] == name)?;
            let up = found["paths"][0]["state"] == "connected" && path(&found) != before;
            up.then_some(found)
        });
        assert_eq!(again["queue_depth"], depth, "{again}");
    }
    innocent.progress();
    assert_eq!(raw.read(0, &mut [0; 61_440]), Ok(()));
    innocent.check();
    drop((raw, greedy, rigid));
    second.detach();
    first.detach();
    wait_for("the end of all sessions", COMMAND_TIME_MAX, || {
        (server.list()["memory"]["used_bytes"] == 0).then_some(())
    });
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_session_without_memory_is_refused_with_the_reason() {
    let server = server("1M").start();
    let _ = server.wait_output("memory-max 1M is less than the chunks of one path (4348k)");
    let (_client, done) = Client::attach("vol0").path(server.portal()).try_start();
    let _ = done.code(1).says("ENOMEM (the session's chunks do not fit memory-max at the server");
    let _ = server.wait_output("memory-max (1.0 MiB) has only 1.0 MiB left; raise memory-max");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_session_beyond_the_limit_is_refused_with_the_setting() {
    let server = Server::builder().export("vol0=mem:16M").args(&["--sessions-max", "1"]).start();
    let held = Client::attach("vol0").path(server.portal()).start();
    let words = ["--session-name", "other", "--access", "ro"];
    let (_client, done) = Client::attach("vol0").path(server.portal()).args(&words).try_start();
    let _ = done.code(1).says(
        "EUSERS (the server has reached its maximum number of sessions: raise \
                               sessions-max there, or end sessions)",
    );
    let _ = server.wait_output("there are already 1 sessions (sessions-max)");
    held.detach();
    let _ = server.stop(STOP_TIME_MAX);
}
