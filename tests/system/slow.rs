//! Tests of a disk that does not answer behind working paths: `slow-io`.

use rtrs_tests::{COMMAND_TIME_MAX, Client, RawNbd, Reply, STOP_TIME_MAX, Server, wait_for};
use serde_json::Value;

const EIO: u32 = 5;

/// Starts a server whose disk takes `delay` for every operation, and a session over two paths.
fn slow_disk(delay: &str, args: &[&str]) -> (Server, Client) {
    let server = Server::builder().export(format!("vol0=mem:16M,delay={delay}"));
    let server = server.listen("tcp://127.0.0.1:0").listen("tcp://127.0.0.2:0");
    // With such heartbeats, silence ends no path on a busy machine.
    let server = server.args(&["--heartbeat", "1m"]).start();
    let args = [&["--io-timeout", "2s", "--heartbeat", "1m", "--shards", "1"], args].concat();
    let paths = server.portals();
    let client = Client::attach("vol0").path(&paths[0]).path(&paths[1]).args(&args).start();
    (server, client)
}

fn json(client: &Client, command: &str) -> Value {
    client.command(&[command, "vol0", "-o", "json"]).ok().json()
}

/// Checks that both paths are connected and have stayed so since the attach.
fn assert_undisturbed(client: &Client) {
    let status = json(client, "status");
    let paths = status["paths"].as_array().expect("paths");
    let is_fine = |path: &Value| {
        (&path["state"], &path["ends"], &path["reconnects"])
            == (&"connected".into(), &0.into(), &0.into())
    };
    assert!(paths.len() == 2 && paths.iter().all(is_fine), "{status}");
}

fn wait_slow(client: &Client, now: u64) -> Value {
    wait_for("slow requests", COMMAND_TIME_MAX, || {
        let slow = json(client, "status")["slow_requests"].clone();
        (slow["now"] == now).then_some(slow)
    })
}

#[test]
fn a_hanging_read_is_reported_and_eventually_answered() {
    let (server, client) = slow_disk("12s", &[]);
    wait_for("both paths", COMMAND_TIME_MAX, || {
        let status = json(&client, "status");
        let states = status["paths"].as_array().expect("paths");
        states.iter().all(|path| path["state"] == "connected").then_some(())
    });
    let mut raw = RawNbd::go(client.front(), "vol0");
    let reading = std::thread::spawn(move || {
        let mut bytes = [1; 4096];
        (raw.read(0, &mut bytes), bytes, raw)
    });
    let slow = wait_slow(&client, 1);
    assert!(slow["oldest_ms"].as_u64().expect("an age") >= 2000 && slow["total"] == 1, "{slow}");
    let _ = client.command(&["list"]).ok().says("slow requests: 1, the oldest for");
    let _ = client.command(&["status", "vol0"]).ok().says("1 since attach").says("wait");
    let (read, bytes, raw) = reading.join().expect("a reader");
    assert_eq!((read, bytes), (Ok(()), [0; 4096]));
    let slow = wait_slow(&client, 0);
    assert!(slow["oldest_ms"].is_null() && slow["total"] == 1, "{slow}");
    let stats = json(&client, "stats");
    let counts = stats["paths"].as_array().expect("paths").iter();
    assert_eq!(counts.filter_map(|path| path["slow_requests"].as_u64()).sum::<u64>(), 1, "{stats}");
    assert_undisturbed(&client);
    drop(raw);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_hanging_disk_fails_io_and_keeps_the_paths() {
    let (server, client) = slow_disk("10m", &["--slow-io", "fail"]);
    let mut raw = RawNbd::go(client.front(), "vol0");
    // More than four operations, since a server allows four paths to end slowly.
    for at in 1..=6 {
        let mut bytes = [0; 4096];
        assert_eq!(raw.read(at * 4096, &mut bytes), Err(Reply::Error(EIO)));
    }
    assert_eq!(raw.write(0, 0, &[1; 4096]), Reply::Error(EIO));
    wait_slow(&client, 7);
    // The first write may still land, so this one is not started.
    assert_eq!(raw.write(0, 0, &[2; 4096]), Reply::Error(EIO));
    assert_undisturbed(&client);
    let stats = json(&client, "stats");
    assert_eq!((&stats["nbd"]["given_up"], &stats["nbd"]["deferred"]), (&7.into(), &1.into()));
    // A second session of another process connects normally.
    let portal = &server.portals()[0];
    let args = ["--access", "ro", "--session-name", "other"];
    let other = Client::attach("vol0").path(portal).args(&args).start();
    other.detach();
    drop(raw);
    let detach = client.command_without_users(&["detach", "vol0", "--within", "500ms"]);
    let _ = detach.code(1).says("detached").says("7 IO requests did not end in time");
    client.wait_gone(STOP_TIME_MAX);
    server.crash();
}
