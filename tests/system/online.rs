//! Tests of changes that real commands make to an attached session's paths and policy under load:
//! no IO fails. Also tests events that must not change the paths: a machine without a free
//! processor, and a server that pauses.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Finished, Innocent, STOP_TIME_MAX, Server, quick, wait_for,
};
use serde_json::{Value, json};

/// Number of clients under load while the session is changed.
const CLIENTS: u64 = 4;

/// A server that listens on three addresses, and a session under load over the first two.
struct Changed {
    server: Server,
    client: Client,
    paths: Vec<String>,
    load: Vec<Innocent>,
}

impl Changed {
    fn start() -> Self {
        let listens = ["127.0.0.1", "127.0.0.2", "127.0.0.3"];
        let server = listens.iter().fold(Server::builder().export("vol0=mem:64M"), |server, ip| {
            server.listen(format!("tcp://{ip}:0"))
        });
        let server = server.start();
        let paths = server.portals().to_vec();
        let client =
            Client::attach("vol0").path(&paths[0]).path(&paths[1]).args(&["--shards=2"]).start();
        client.wait_paths(2);
        let load = (0..CLIENTS).map(|at| Innocent::start_at(client.front(), "vol0", at << 20));
        Self { load: load.collect(), client, server, paths }
    }

    fn path(&self, what: &str, path: usize, more: &[&str]) -> Finished {
        let words = [&["path", what, "vol0", &self.paths[path]], more].concat();
        self.client.command(&words)
    }

    /// Returns the states of all paths, in order of their numbers.
    fn states(&self) -> Vec<Option<String>> {
        let list = self.client.command(&["path", "list", "vol0", "-o", "json"]).ok().json();
        let listed = list.as_array().expect("a list of paths");
        let state = |path: &String| {
            let found = listed.iter().find(|one| one["path"] == **path)?;
            found["state"].as_str().map(str::to_owned)
        };
        assert_eq!(listed.len(), self.paths.iter().filter_map(state).count(), "{list}");
        self.paths.iter().map(state).collect()
    }

    fn stats(&self) -> Value {
        stats_of(&self.client)
    }

    /// Checks that no client has seen an error.
    fn end(self) -> Value {
        let stats_text = self.client.command(&["stats", "vol0"]).ok();
        let _ = stats_text.says("heartbeats");
        for client in self.load {
            client.check();
        }
        let stats = stats_of(&self.client);
        for (op, count) in stats["ops"].as_object().expect("operations") {
            assert_eq!(count["errors"], 0, "{op} in {stats}");
        }
        self.client.detach();
        let _ = self.server.stop(STOP_TIME_MAX);
        stats
    }
}

fn stats_of(client: &Client) -> Value {
    client.command(&["stats", "vol0", "-o", "json"]).ok().json()
}

/// Waits until the paths are in these states. The server may refuse a path that was removed and
/// added again until it has released the old path; the client then tries again.
fn are(session: &Changed, wanted: [Option<&str>; 3]) {
    wait_for(&format!("paths in the states {wanted:?}"), COMMAND_TIME_MAX, || {
        let states = session.states();
        let states: Vec<Option<&str>> = states.iter().map(Option::as_deref).collect();
        (states == wanted).then_some(())
    });
}

const UP: Option<&str> = Some("connected");
const DOWN: Option<&str> = Some("disconnected");

#[test]
fn paths_are_added_and_removed_under_load_without_errors() {
    let session = Changed::start();
    let paths_of_get = || {
        let got = session.client.command(&["get", "vol0", "path", "-o", "json"]).ok().json();
        got["settings"][0]["value"].clone()
    };
    let [first, second, third] = &session.paths[..] else { panic!("three paths") };
    assert_eq!(paths_of_get(), json!([first, second]));
    for round in 0..3 {
        let _ = session.path("add", 2, &[]).ok().says("connected");
        are(&session, [UP, UP, UP]);
        let _ = session.path("remove", round % 2, &[]).ok().says("removed");
        let mut left = paths_of_get().as_array().expect("paths").clone();
        left.sort_by_key(ToString::to_string);
        assert_eq!(left, [[second, first][round % 2], third].map(|path| json!(path)));
        let _ = session.path("disconnect", 2, &[]).ok().says("disconnected");
        let _ = session.path("reconnect", 2, &[]).ok().says("connected");
        // Reconnect the path while it is up.
        let _ = session.path("reconnect", 2, &[]).ok().says("connected");
        let _ = session.path("add", round % 2, &["-o", "json"]).ok();
        let _ = session.path("disconnect", 2, &[]).ok();
        are(&session, [UP, UP, DOWN]);
        let _ = session.path("remove", 2, &[]).ok().says("removed");
        are(&session, [UP, UP, None]);
    }
    let stats = session.end();
    let paths = stats["paths"].as_array().expect("paths");
    let sum = |key: &str| paths.iter().filter_map(|path| path[key].as_u64()).sum::<u64>();
    assert_eq!(sum("failovers"), 0, "removing a path is not a failover: {stats}");
    assert!(sum("answers") > 0 && sum("inflight") == 0 && sum("errors") == 0, "{stats}");
    for path in paths {
        let latency = &path["latency_us"];
        assert_eq!(latency["count"], path["answers"], "{stats}");
        assert!(latency["p50"].as_f64() <= latency["max"].as_f64(), "{stats}");
        assert!(path["heartbeats"]["sent"].is_u64() && path["heartbeats"]["missed"].is_u64());
    }
}

#[test]
fn the_last_path_is_removed_only_by_force_and_io_waits_for_the_next() {
    let session = Changed::start();
    let _ = session.path("remove", 0, &[]).ok();
    let _ = session.path("remove", 1, &[]).code(1).says("last path of the session");
    // If the path is down right now because the machine stalled, the disconnect succeeds.
    let refused = wait_for("a refused disconnect", COMMAND_TIME_MAX, || {
        let done = session.path("disconnect", 1, &[]);
        if done.code == Some(0) {
            let _ = session.path("reconnect", 1, &[]);
            return None;
        }
        Some(done)
    });
    let _ = refused.code(1).says("only connected path");
    let _ = session.path("remove", 2, &[]).code(1).says("no path");
    let _ = session.path("add", 1, &[]).code(1).says("already exists");
    are(&session, [None, UP, None]);
    let _ = session.path("remove", 1, &["--force", "--within", "1s"]).ok();
    are(&session, [None, None, None]);
    let status = session.client.status();
    assert_eq!(status["state"], "no-path");
    let left = status["no_path_left_ms"].as_u64().expect("what is left of a minute");
    assert!((1..=60_000).contains(&left), "{status}");
    let _ = session.client.command(&["status", "vol0"]).code(3).says("at most ");
    // No server listens there: the path stays, and is retried.
    let wrong = session.client.command(&["path", "add", "vol0", "tcp://127.0.0.1:1"]);
    let _ = wrong.ok().says("not connected yet");
    let _ = session.path("add", 2, &[]).ok().says("connected");
    // A busy shard may not report in time; the volume is then `unresponsive`.
    wait_for("the state of the volume", COMMAND_TIME_MAX, || {
        (session.client.status()["state"] == "degraded").then_some(())
    });
    let _ = session.client.command(&["status", "vol0"]).ok().says("degraded (1/2 paths)");
    let _ = session.client.command(&["path", "remove", "vol0", "tcp://127.0.0.1:1"]).ok();
    // A requested reconnect also fails, and gives the reason.
    let _ = session.client.command(&["path", "add", "vol0", "tcp://127.0.0.1:1"]).ok();
    let again = ["path", "reconnect", "vol0", "tcp://127.0.0.1:1", "-o", "json"];
    let refused = session.client.command(&again).code(1);
    let error: Value = serde_json::from_str(&refused.stderr).expect("JSON on stderr");
    assert_eq!(error["exit_code"], 1, "{error}");
    let error = error["error"].as_str().expect("a text");
    assert!(error.contains("cannot connect path tcp://127.0.0.1:1"), "{error}");
    assert!(error.contains("onnection refused"), "{error}");
    let _ = session.client.command(&["path", "remove", "vol0", "tcp://127.0.0.1:1"]).ok();
    are(&session, [None, None, UP]);
    let _ = session.end();
}

#[test]
fn the_policy_changes_under_load() {
    let session = Changed::start();
    for policy in ["round-robin", "min-latency", "min-inflight"] {
        let _ = session.client.command(&["policy", "vol0", policy]).ok().says(policy);
        let status = session.client.status();
        assert_eq!(status["policy"], policy);
    }
    let set = ["set", "vol0", "no-path=queue", "reconnect-max=1s"];
    let printed = session.client.command(&set).ok().stdout;
    assert_eq!(printed, "no-path: queue\nreconnect-max: 1s\n");
    let printed = session.client.command(&["get", "vol0", "crc", "no-path"]).ok().stdout;
    assert_eq!(printed, "crc: on  # fixed until detach\nno-path: queue\n");
    // The transports keep the timeout with which they started.
    let set = ["set", "vol0", "connect-timeout=1s", "io-timeout=20s"];
    let note = "  # the transport timeout of tcp:// stays 5000 ms until detach";
    let printed = session.client.command(&set).ok().stdout;
    assert_eq!(printed, format!("connect-timeout: 1s{note}\nio-timeout: 20s\n"));
    let printed = session.client.command(&["get", "vol0", "heartbeat"]).ok().stdout;
    assert_eq!(printed, format!("heartbeat: auto{note}\n"));
    let _ = session.client.command(&["set", "vol0", "connect-timeout=5s"]).ok();
    let printed = session.client.command(&["get", "vol0", "heartbeat"]).ok().stdout;
    assert_eq!(printed, "heartbeat: auto\n");
    let no_path = |session: &Changed| {
        let status = session.client.command(&["status", "vol0", "-o", "json"]).ok().json();
        status["no_path"].clone()
    };
    assert_eq!(no_path(&session), "queue");
    let all = session.client.command(&["get", "vol0", "-o", "json"]).ok().stdout;
    assert!(all.contains("\"name\": \"log-format\""), "{all}");
    for (bad, why) in [("no-path=fail crc=off", "crc cannot change"), ("policy=best", "best")] {
        let words = ["set", "vol0"].into_iter().chain(bad.split(' ')).collect::<Vec<_>>();
        let _ = session.client.command(&words).code(2).says(why);
    }
    for words in [&["set", "vol0", "bogus=1"][..], &["get", "vol0", "bogus"]] {
        let _ = session.client.command(words).code(2).says("there is no setting bogus");
    }
    assert_eq!(no_path(&session), "queue", "all or none");
    let _ = session.client.command(&["policy", "vol0", "best"]).code(2);
    let _ = session.client.command(&["policy", "vol9", "round-robin"]).code(1);
    assert!(session.stats()["paths"].as_array().is_some_and(|paths| paths.len() == 2));
    let _ = session.end();
}

/// Threads that keep all processors busy.
struct Hogs {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<u64>>,
}

impl Hogs {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let count = 4 * std::thread::available_parallelism().map_or(2, usize::from);
        let hog = |stop: Arc<AtomicBool>| {
            let mut round = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                round = std::hint::black_box(round.wrapping_mul(3).wrapping_add(1));
            }
            round
        };
        let threads = (0..count).map(|_| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || hog(stop))
        });
        Self { threads: threads.collect(), stop }
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            assert!(thread.join().is_ok(), "a thread that only counts");
        }
    }
}

#[test]
fn a_starved_machine_keeps_its_paths_with_the_default_settings() {
    let session = Changed::start();
    // Another session is idle, so that its paths carry only heartbeats.
    let idle = Client::attach("vol0")
        .path(&session.paths[2])
        .path(&session.paths[0])
        .args(&["--session-name", "idle", "--access", "ro"])
        .start();
    let hogs = Hogs::start();
    std::thread::sleep(Duration::from_secs(if quick() { 4 } else { 15 }));
    drop(hogs);
    let beats: u64 = paths_of(&stats_of(&idle))
        .iter()
        .filter_map(|path| path["heartbeats"]["sent"].as_u64())
        .sum();
    assert!(beats > 0, "nothing was asked of the idle paths");
    for path in paths_of(&idle.status()) {
        assert_eq!(path["silence_max_ms"], 400, "the default, at a server of ours: {path}");
    }
    let reconnects: u64 = [stats_of(&idle), session.stats()]
        .iter()
        .flat_map(paths_of)
        .filter_map(|path| path["reconnects"].as_u64())
        .sum();
    // A path that has just been lost has not reconnected yet.
    let lost = [lost_paths(&idle), lost_paths(&session.client)].concat();
    assert!(reconnects <= lost.len() as u64, "{reconnects} reconnects: {lost:?}");
    idle.detach();
    let _ = session.end();
}

/// Returns the lines in a session's log that report that a path ended. Each must report that the
/// server had not answered for 3 s, which is as long as a starved server may take
/// (docs/explanation/failover.md, "How a dead path is noticed"). When other tests are running, this
/// machine is sometimes starved for longer.
pub(crate) fn lost_paths(client: &Client) -> Vec<String> {
    let log = std::fs::read_to_string(client.run_dir().join("vol0.log")).expect("a log");
    let lost = log.lines().filter(|line| line.contains("path down")).map(str::to_owned);
    lost.inspect(|line| {
        let silent = line.split_once("silent for ").and_then(|(_, rest)| rest.split_once(" ms"));
        let silent = silent.and_then(|(ms, _)| ms.parse::<u64>().ok());
        assert!(silent.is_some_and(|ms| ms >= 3000), "lost early: {line}\n{log}");
    })
    .collect()
}

#[test]
fn a_server_stopped_for_a_second_keeps_its_paths() {
    let mut session = Changed::start();
    // The server's system still acknowledges received data, so the link is not dead.
    session.server.signal("STOP");
    std::thread::sleep(Duration::from_millis(1200));
    session.server.signal("CONT");
    let stats = session.stats();
    let sum =
        |key: &str| -> u64 { paths_of(&stats).iter().filter_map(|path| path[key].as_u64()).sum() };
    let lost = lost_paths(&session.client);
    assert!(sum("reconnects") <= lost.len() as u64, "{lost:?} {stats}");
    assert!(sum("failovers") == 0 || !lost.is_empty(), "{stats}");
    let _ = session.end();
}

fn paths_of(value: &Value) -> &[Value] {
    value["paths"].as_array().expect("paths")
}
