//! Tests of the attribution of IO time to the network or the disk, as `stats` and the metrics show
//! it.

use std::time::{Duration, Instant};

use rtrs_tests::{Client, Exposition, RawNbd, STOP_TIME_MAX, Server, wait_for};
use serde_json::Value;

use super::faults::proxy::Proxy;

/// Delay of the disk.
const DISK_DELAY: Duration = Duration::from_millis(100);
const DISK_DELAY_US: u64 = 100_000;
/// Delay of the network in each direction.
const DELAY: Duration = Duration::from_millis(20);
const DELAY_US: u64 = 20_000;
const READS: u32 = 8;

fn server(export: &str, args: &[&str]) -> Server {
    Server::builder().export(export).args(args).start()
}

/// Attaches a session of one shard over this path and reads; `slow` runs before the reads. Returns
/// the client and the total time of all reads.
fn read_over(path: &str, slow: impl FnOnce()) -> (Client, Duration) {
    let client = Client::attach("vol0").path(path).args(&["--shards", "1"]).start();
    let mut raw = RawNbd::go(client.front(), "vol0");
    slow();
    let begin = Instant::now();
    for at in 0..READS {
        raw.read(u64::from(at) * 4096, &mut [0; 4096]).expect("a read");
    }
    (client, begin.elapsed())
}

fn stats(client: &Client) -> Value {
    client.command(&["stats", "vol0", "-o", "json"]).ok().json()
}

/// Returns the names of these parts.
fn names(parts: &Value) -> Vec<&str> {
    let parts = parts.as_array().expect("parts").iter();
    parts.map(|part| part["part"].as_str().expect("a name")).collect()
}

/// Returns the median of a part in microseconds.
fn p50(parts: &Value, name: &str) -> u64 {
    let mut parts = parts.as_array().expect("parts").iter();
    let part = parts.find(|part| part["part"] == name).expect(name);
    part["p50"].as_u64().expect("microseconds")
}

const DIVIDED: [&str; 4] = ["client_queue", "network", "server_queue", "backend"];

/// Checks that a delay of at least `least` appears in one part and in no other. On a busy machine
/// any part can be long, but together they are no longer than the reads took.
fn assert_only_in(client: &Client, part: &str, least: Duration, all: Duration) {
    let metrics = Exposition::parse(&client.command(&["metrics"]).ok().stdout).expect("metrics");
    let name = "rtrs_client_io_part_seconds_sum";
    let sums = DIVIDED.map(|part| metrics.value(name, &[("export", "vol0"), ("part", part)]));
    let of_part = DIVIDED.iter().zip(sums).find(|(name, _)| **name == part).expect("a part").1;
    assert!(of_part >= least.as_secs_f64(), "{part}: {sums:?}");
    assert!(sums.iter().sum::<f64>() <= all.as_secs_f64(), "{sums:?} in {all:?}");
}

#[test]
fn a_slow_disk_appears_as_backend_time() {
    let server = server("vol0=mem:16M,delay=100ms", &[]);
    let begin = Instant::now();
    let (client, took) = read_over(server.portal(), || {});
    let all = stats(&client);
    let answers = &all["paths"][0]["answers"];
    for parts in [&all["parts_us"], &all["paths"][0]["parts_us"]] {
        assert_eq!(names(parts), DIVIDED, "{all}");
        let counts = parts.as_array().expect("parts").iter().map(|part| &part["count"]);
        assert!(counts.into_iter().all(|count| count == answers), "{all}");
        assert!(p50(parts, "backend") >= DISK_DELAY_US, "{all}");
    }
    let printed = client.command(&["stats", "vol0"]).ok();
    let printed = DIVIDED.into_iter().fold(printed.says("P99 US"), |all, part| all.says(part));
    let _ = printed.says("  all");

    let least = READS * DISK_DELAY;
    assert_only_in(&client, "backend", least, took);
    let metrics = Exposition::parse(&client.command(&["metrics"]).ok().stdout).expect("metrics");
    let ten_ms = [("export", "vol0"), ("part", "backend"), ("le", "0.01")];
    assert_eq!(metrics.value("rtrs_client_io_part_seconds_bucket", &ten_ms), 0.0);
    let metrics = Exposition::parse(&server.command(&["metrics"]).ok().stdout).expect("metrics");
    let labels = |part| [("export", "vol0"), ("part", part)];
    let sum = |part| metrics.value("rtrs_server_io_part_seconds_sum", &labels(part));
    let (both, all) = (sum("backend") + sum("server_queue"), begin.elapsed());
    assert!(sum("backend") >= least.as_secs_f64() && both <= all.as_secs_f64(), "{both} {all:?}");
    let sessions = server.command(&["session", "list", "-o", "json"]).ok().json();
    let io = &sessions["sessions"][0]["io"];
    let backend = io["backend_ns"].as_u64().expect("nanoseconds");
    assert!(backend >= u64::from(READS) * DISK_DELAY_US * 1000, "{io}");
    assert!(backend <= io["busy_ns"].as_u64().expect("nanoseconds"), "{io}");
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_slow_network_appears_as_network_time() {
    let server = server("vol0=mem:16M", &[]);
    let proxy = Proxy::start("127.0.0.1", server.portal());
    let (client, took) = read_over(&proxy.portal(), || proxy.delay(DELAY));
    let all = stats(&client);
    let parts = &all["parts_us"];
    assert_eq!(names(parts), DIVIDED, "{all}");
    assert!(p50(parts, "network") >= 2 * DELAY_US, "{all}");
    assert_only_in(&client, "network", 2 * READS * DELAY, took);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn each_path_has_separate_times() {
    let server = server("vol0=mem:16M", &["--listen", "tcp://127.0.0.2:0"]);
    let proxy = Proxy::start("127.0.0.1", server.portal());
    let paths = [proxy.portal(), server.portals()[1].clone()];
    let args = ["--shards", "1", "--policy", "round-robin", "--heartbeat", "1m"];
    let client = Client::attach("vol0").path(&paths[0]).path(&paths[1]).args(&args).start();
    wait_for("both paths", STOP_TIME_MAX, || {
        let status = client.status();
        let paths = status["paths"].as_array().expect("paths");
        paths.iter().all(|path| path["state"] == "connected").then_some(())
    });
    let mut raw = RawNbd::go(client.front(), "vol0");
    // Long enough that the other path is not just as slow on a busy machine.
    let delay = Duration::from_millis(500);
    proxy.delay(delay);
    for at in 0..6 {
        raw.read(at * 4096, &mut [0; 4096]).expect("a read");
    }
    let all = stats(&client);
    let (slow, quick) = (&all["paths"][0], &all["paths"][1]);
    let network = |path: &Value| p50(&path["parts_us"], "network");
    assert!(u128::from(network(slow)) >= 2 * delay.as_micros(), "{all}");
    assert!(network(quick) < network(slow), "{all}");
    let count = |parts: &Value| parts["parts_us"][0]["count"].as_u64().expect("a count");
    assert_eq!(count(slow) + count(quick), count(&all), "{all}");
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn network_and_server_times_are_combined_without_fresh_keys() {
    let server = server("vol0=mem:16M,delay=100ms", &["--always-invalidate", "off"]);
    let (client, _) = read_over(server.portal(), || {});
    let all = stats(&client);
    assert_eq!(names(&all["parts_us"]), ["client_queue", "round_trip"], "{all}");
    assert!(p50(&all["parts_us"], "round_trip") >= DISK_DELAY_US, "{all}");
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}
