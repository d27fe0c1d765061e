//! Tests of export rate limits with a real server: which requests wait, in which order, and what
//! may change while they do. No test depends on timing: a request waits for seconds, or until the
//! limit is removed.

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, RawNbd, Reply, STOP_TIME_MAX, Scratch, Server, consts, sparse_file,
    wait_for,
};
use serde_json::{Value, json};

const LEN: u32 = 128 << 10;

fn export(server: &Server) -> Value {
    let list = server.command(&["export", "list", "-o", "json"]).ok().json();
    list["exports"][0].clone()
}

fn set(server: &Server, option: &str) {
    let _ = server.command(&["export", "set", "vol0", option]).ok().says("vol0 changed");
}

/// Sends this many writes, each at its own offset. Returns their cookies.
fn send_writes(raw: &mut RawNbd, count: u64) -> Vec<u64> {
    let bytes = vec![7; LEN as usize];
    let sent = (0..count).map(|at| {
        let cookie = raw.send_request(0, consts::CMD_WRITE, at * u64::from(LEN), LEN);
        raw.send(&bytes);
        cookie
    });
    sent.collect()
}

/// Waits until the server has delayed this many requests. Two writes begin at least two seconds
/// apart.
fn wait_throttled(server: &Server, count: u64) {
    wait_for("a request that waits", COMMAND_TIME_MAX, || {
        let throttled = export(server)["io"]["throttled"].as_u64().expect("a number");
        (throttled >= count).then_some(())
    });
}

#[test]
fn limited_writes_wait_and_reads_pass_until_the_limit_goes() {
    let server = Server::builder().export("vol0=mem:16M,bandwidth-write=64k").start();
    let limits = json!({ "bandwidth_write": 65536, "burst_ms": 100 });
    for (name, value) in limits.as_object().expect("a map") {
        assert_eq!(export(&server)["limits"][name], *value, "{name}");
    }
    assert_eq!(export(&server)["limits"]["iops"], Value::Null);
    let client = Client::attach("vol0").path(server.portal()).args(&["--shards", "1"]).start();
    let mut writer = RawNbd::go(client.front(), "vol0");
    let mut reader = RawNbd::go(client.front(), "vol0");
    let cookies = send_writes(&mut writer, 4);
    wait_throttled(&server, 1);
    // Reads and flushes do not wait for the writes, which take two seconds each.
    let mut bytes = vec![1; 4096];
    assert_eq!(reader.read(8 << 20, &mut bytes), Ok(()));
    assert_eq!(reader.call(0, consts::CMD_FLUSH, 0, 0), Reply::Error(0));
    let listed = server.command(&["export", "list"]).ok();
    let _ = listed.says("  limits: bandwidth-write=64k,burst=100ms; ").says(" delayed for ");
    let _ = server.command(&["session", "list"]).ok().says("vol0 (rw, limited)");
    let metrics = server.command(&["metrics"]).ok();
    let _ = metrics.says("rtrs_server_export_throttled_requests_total{export=\"vol0\"} ");
    set(&server, "bandwidth-write=none");
    writer.take_replies(&cookies, &mut []);
    assert_eq!(export(&server)["limits"], Value::Null);
    let _ = server.command(&["session", "list"]).ok().says("vol0 (rw)");
    let before = export(&server)["io"]["throttled"].clone();
    let cookies = send_writes(&mut writer, 4);
    writer.take_replies(&cookies, &mut []);
    assert_eq!(export(&server)["io"]["throttled"], before, "nothing waits any more");
    let mut written = vec![0; LEN as usize];
    assert_eq!(reader.read(3 * u64::from(LEN), &mut written), Ok(()));
    assert!(written.iter().all(|byte| *byte == 7));
    drop((writer, reader));
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_client_that_dies_while_its_requests_wait_leaves_nothing() {
    let scratch = Scratch::new();
    sparse_file(&scratch.path("a.img"), 16 << 20);
    let spec = format!("vol0={}", scratch.text("a.img"));
    let server = Server::builder().export(spec).start();
    set(&server, "bandwidth=64k");
    let client = Client::attach("vol0").path(server.portal()).start();
    let mut raw = RawNbd::go(client.front(), "vol0");
    send_writes(&mut raw, 8);
    wait_throttled(&server, 1);
    client.signal("KILL");
    wait_for("the end of the session", COMMAND_TIME_MAX, || {
        (server.sessions().is_empty() && export(&server)["state"] == "unused").then_some(())
    });
    // A drain does not wait for the limits either.
    let client = Client::attach("vol0").path(server.portal()).start();
    let mut raw = RawNbd::go(client.front(), "vol0");
    let cookies = send_writes(&mut raw, 8);
    wait_for("the arrival of all requests", COMMAND_TIME_MAX, || {
        let sessions = server.sessions();
        let io = &sessions.first()?["io"];
        let all = io["inflight"].as_u64()? + io["writes"].as_u64()?;
        (all == 8).then_some(())
    });
    let _ = server.command(&["drain"]).ok();
    raw.take_replies(&cookies, &mut []);
    drop(raw);
    client.signal("KILL");
}

#[test]
fn bad_limits_are_refused_with_the_value() {
    let server = Server::builder().export("vol0=mem:16M").start();
    for (option, words) in [
        ("iops=fast", "rate \"fast\" is not a whole number of requests per second"),
        ("bandwidth=10", "rate \"10\" is out of range; use none or 64k to 1T"),
        ("burst=1ms", "time \"1ms\" is out of range; use 10ms to 1m"),
    ] {
        let _ = server.command(&["export", "set", "vol0", option]).code(2).says(words);
    }
    let again = server.command(&["export", "set", "vol0", "iops=0"]).ok();
    let _ = again.says("vol0 already has these options");
    let _ = server.stop(STOP_TIME_MAX);
}
