//! Tests of faults in real daemons on loopback, under load: a server that is stopped or killed,
//! networks that drop, delay, cut off and corrupt messages, and a disk that holds a write. No IO
//! fails within the time limit of the no-path policy, and every read returns the acknowledged data.
//!
//! The tests assert outcomes, counts and order. The duration of IO stalls is only printed, as one
//! table row for each fault: `cargo test -p rtrs-tests --test system faults:: -- --nocapture`. With
//! `RTRS_FAULT_ROUNDS=9` each fault strikes nine times as often.

mod ghost;
mod held;
mod load;
pub(crate) mod proxy;
mod scene;

use std::thread::sleep;
use std::time::{Duration, Instant};

use proxy::{BOTH, Harm, PLACES, Place, Way};
use rtrs_tests::{RawNbd, Reply, consts, quick, wait_for};
use scene::{PATH_TIME_MAX, Scene, print_longest, rounds};
use serde_json::Value;

use super::online::lost_paths;

const SECOND: Duration = Duration::from_secs(1);
const EIO: u32 = 5;

/// Checks that no IO beyond `answered` was answered, except IO whose answers were in transit. The
/// load has at most 8 requests in flight, and a busy machine may count their answers late.
fn check_unanswered(scene: &Scene, answered: u64) {
    let since = scene.load.good() - answered;
    assert!(since <= 8, "{since} answers without a server");
}

/// Pauses the server process for 3 s in each round.
fn stopped(paths: usize, what: &str) {
    let mut scene = Scene::direct(paths, &[]);
    let mut longest = Vec::new();
    for _ in 0..rounds(1) {
        scene.load.forget();
        scene.signal("STOP");
        sleep(SECOND);
        let answered = scene.load.good();
        sleep(2 * SECOND);
        check_unanswered(&scene, answered);
        scene.signal("CONT");
        longest.push(scene.load.longest());
        scene.wait_connected();
    }
    print_longest(what, longest);
    scene.end();
}

#[test]
fn a_stopped_server_on_one_path() {
    stopped(1, "server stopped for 3 s, one path");
}

#[test]
fn a_stopped_server_on_two_paths() {
    stopped(2, "server stopped for 3 s, two paths");
}

#[test]
fn a_server_kill_and_restart_causes_only_a_pause() {
    let mut scene = Scene::direct(2, &[]);
    let (before, mut longest) = (scene.status(), Vec::new());
    // An idle connection must stay open too.
    let mut idle = RawNbd::go(scene.client.front(), "vol0");
    for round in 1..=rounds(4) {
        scene.load.forget();
        scene.crash();
        let answered = scene.load.good();
        wait_for("the session to notice", PATH_TIME_MAX, || {
            (scene.status()["state"] == "no-path").then_some(())
        });
        check_unanswered(&scene, answered);
        scene.restart();
        for path in 0..2 {
            scene.wait_reconnected(path, round as u64);
        }
        longest.push(scene.load.longest());
    }
    print_longest("server killed and restarted, two paths", longest);
    let after = scene.status();
    for key in ["session_id", "pid", "size"] {
        assert_eq!(before[key], after[key], "{key}");
    }
    // The server's host was not restarted: nothing is lost, and no flush reports a loss.
    assert_eq!(idle.call(0, consts::CMD_FLUSH, 0, 0), Reply::Error(0));
    drop(idle);
    scene.end();
}

/// Blocks the first of two paths in these directions until it is given up on, then unblocks it.
fn silent(ways: &[Way], what: &str) {
    let scene = Scene::proxied(2, &[]);
    let mut longest = Vec::new();
    for _ in 0..rounds(1) {
        let (reconnects, failovers) = (scene.reconnects(0), scene.failovers(0));
        scene.load.forget();
        scene.proxies[0].shut(ways);
        scene.wait_path(0, "to be detected as dead", |path| path["state"] != "connected");
        // All IO now uses the other path.
        longest.push(scene.load.longest());
        assert!(scene.failovers(0) > failovers, "nothing was in flight on the path that died");
        assert_eq!(scene.reconnects(0), reconnects, "over a path that is shut");
        // Messages that both ends have given up on arrive late, during new IO.
        scene.proxies[0].open();
        scene.wait_reconnected(0, reconnects + 1);
        scene.load.progress();
    }
    print_longest(what, longest);
    scene.check_undisturbed(1);
    scene.end();
}

#[test]
fn a_path_that_falls_silent() {
    silent(&BOTH, "one of two paths silent, both directions");
}

#[test]
fn a_path_that_falls_silent_to_the_server() {
    silent(&[Way::ToServer], "one of two paths silent, to the server only");
}

#[test]
fn a_path_that_falls_silent_to_the_client() {
    silent(&[Way::ToClient], "one of two paths silent, to the client only");
}

#[test]
fn a_path_that_is_slow_is_not_dead() {
    let scene = Scene::proxied(2, &[]);
    let mut longest = Vec::new();
    for _ in 0..rounds(1) {
        scene.load.forget();
        scene.proxies[0].delay(Duration::from_millis(50));
        let requests = |scene: &Scene| scene.path(&scene.stats(), 0)["requests"].as_u64();
        let before = requests(&scene);
        wait_for("requests over the slow path", PATH_TIME_MAX, || {
            (requests(&scene) > before.map(|before| before + 20)).then_some(())
        });
        scene.proxies[0].delay(Duration::ZERO);
        longest.push(scene.load.longest());
    }
    print_longest("one of two paths 50 ms late each way", longest);
    scene.check_undisturbed(0);
    scene.check_undisturbed(1);
    scene.end();
}

/// Delays the first path by 2 s in each round, for as long as `during` takes.
fn late(scene: &Scene, what: &str, during: impl Fn(u64), after: impl Fn(u64)) {
    let mut longest = Vec::new();
    for round in 1..=rounds(1) as u64 {
        scene.load.forget();
        scene.proxies[0].delay(2 * SECOND);
        during(round);
        scene.proxies[0].delay(Duration::ZERO);
        longest.push(scene.load.longest());
        after(round);
    }
    print_longest(what, longest);
}

#[test]
fn the_only_path_is_kept_while_packets_are_acknowledged() {
    let scene = Scene::proxied(1, &[]);
    // A starved machine makes the path more than 2 s late, and the path may end after 3 s.
    let is_kept = |_| {
        if lost_paths(&scene.client).is_empty() {
            scene.check_undisturbed(0);
        }
    };
    late(&scene, "the only path 2 s late, once", |_| sleep(2 * SECOND), is_kept);
    scene.end();
}

#[test]
fn a_late_path_is_abandoned_if_the_server_answers_on_another() {
    let scene = Scene::proxied(2, &[]);
    let is_abandoned = |round| {
        scene.wait_path(0, "to be abandoned", |path| {
            path["state"] != "connected" || path["reconnects"].as_u64() >= Some(round)
        });
    };
    let what = "one of two paths 2 s late, once";
    late(&scene, what, is_abandoned, |round| scene.wait_reconnected(0, round));
    assert!(scene.failovers(0) > 0, "late requests moved to the other path");
    assert!(scene.log().contains("while another path received answers"), "the log says why");
    scene.check_undisturbed(1);
    scene.end();
}

/// Returns every position in a frame in both directions; in quick runs, one per direction.
fn strikes() -> Vec<(Way, Place)> {
    let all = BOTH.iter().flat_map(|way| PLACES.map(|place| (*way, place)));
    let once: Vec<_> = all.filter(|(_, place)| !quick() || *place == Place::Payload).collect();
    once.repeat(rounds(1))
}

#[test]
fn a_connection_cut_in_the_middle_of_a_frame() {
    let scene = Scene::proxied(2, &[]);
    let mut longest = Vec::new();
    for (round, (way, place)) in (1..).zip(strikes()) {
        let failovers = scene.failovers(0);
        scene.load.forget();
        scene.proxies[0].harm(way, Harm::Cut(place));
        scene.wait_reconnected(0, round);
        longest.push(scene.load.longest());
        assert_eq!(scene.reconnects(0), round, "{way:?} {place:?}");
        assert!(scene.failovers(0) > failovers, "{way:?} {place:?}: what was cut is resent");
    }
    print_longest("one of two paths cut in the middle of a frame", longest);
    scene.check_undisturbed(1);
    scene.end();
}

/// Returns the number of damaged frames that the receiver found.
fn damaged(scene: &Scene, receiver: Way) -> u64 {
    match receiver {
        Way::ToServer => {
            let output = scene.server().output();
            let found =
                |line: &&str| line.contains("terminating") && line.contains("damaged frame");
            output.lines().filter(found).count() as u64
        }
        Way::ToClient => scene.stats()["fabric"]["crc_errors"].as_u64().expect("a number"),
    }
}

#[test]
fn a_corrupted_byte() {
    let scene = Scene::proxied(2, &[]);
    let (mut longest, mut lengths) = (Vec::new(), Vec::new());
    for (round, (way, place)) in (1..).zip(strikes()) {
        let (caught, failovers) = (damaged(&scene, way), scene.failovers(0));
        scene.load.forget();
        scene.proxies[0].harm(way, Harm::Corrupt(place));
        scene.wait_reconnected(0, round);
        let stood = scene.load.longest();
        // An increased length makes the receiver wait for that many bytes.
        if place == Place::Length { &mut lengths } else { &mut longest }.push(stood);
        assert_eq!(scene.reconnects(0), round, "{way:?} {place:?}");
        assert!(scene.failovers(0) > failovers, "{way:?} {place:?}: what was lost is resent");
        if [Place::Payload, Place::Checksum].contains(&place) {
            let what = format!("{way:?} {place:?}: the checksum to catch it");
            let found = || Some(damaged(&scene, way) - caught).filter(|found| *found > 0);
            assert_eq!(wait_for(&what, PATH_TIME_MAX, found), 1, "{way:?} {place:?}");
        }
    }
    print_longest("a byte corrupted on one of two paths", longest);
    if !lengths.is_empty() {
        print_longest("the same, in the length of a frame", lengths);
    }
    let reported = "terminated by the peer: wrong CRC";
    wait_for("the reason in the client's log", PATH_TIME_MAX, || {
        scene.log().contains(reported).then_some(())
    });
    scene.check_undisturbed(1);
    scene.end();
}

#[test]
fn no_path_for_longer_than_the_io_timeout() {
    let scene = Scene::proxied(2, &["--no-path", "queue-for=5s"]);
    let begin = Instant::now();
    scene.proxies.iter().for_each(|proxy| proxy.shut(&BOTH));
    wait_for("an error for every client", PATH_TIME_MAX, || {
        scene.load.first_errors().iter().all(Option::is_some).then_some(())
    });
    for failed in scene.load.first_errors().into_iter().flatten() {
        assert_eq!(failed.errno, EIO);
        let waited = failed.ended - begin;
        assert!(waited >= 5 * SECOND, "an error after {waited:?}, and IO waits 5 s for a path");
    }
    assert_eq!(scene.status()["state"], "no-path");
    // Log lines reach the file after a short delay.
    let log = wait_for("the errors in the log", PATH_TIME_MAX, || {
        Some(scene.log()).filter(|log| log.contains("IO fails now"))
    });
    for proxy in &scene.proxies {
        // The cause is missed heartbeats or an unanswered request, whichever came first.
        let why = |line: &str| line.contains("silent for") || line.contains("no answer for");
        let down = |line: &str| line.contains("path down") && line.contains(&proxy.portal());
        assert!(log.lines().any(|line| down(line) && why(line)), "why a path is down: {log}");
    }
    scene.proxies.iter().for_each(proxy::Proxy::open);
    scene.wait_connected();
    // Abandoned requests now reach the server, and must not undo later writes.
    scene.load.progress();
    let errors = scene.load.errors();
    scene.load.progress();
    assert_eq!(scene.load.errors(), errors, "errors with both paths connected");
    scene.end_after_errors();
}

#[test]
fn no_path_for_a_while_causes_only_a_pause() {
    let scene = Scene::proxied(2, &[]);
    scene.load.forget();
    scene.proxies.iter().for_each(|proxy| proxy.shut(&BOTH));
    wait_for("the session to notice", PATH_TIME_MAX, || {
        (scene.status()["state"] == "no-path").then_some(())
    });
    let answered = scene.load.good();
    sleep(if quick() { 2 } else { 6 } * SECOND);
    let oldest = &scene.status()["oldest_io"];
    // IO in flight waits for confirmation that its path is fenced, all other IO for a path.
    assert!(["path", "fence"].map(Value::from).contains(&oldest["waits_for"]), "{oldest}");
    assert!(oldest["age_ms"].is_u64(), "{oldest}");
    check_unanswered(&scene, answered);
    scene.proxies.iter().for_each(proxy::Proxy::open);
    let longest = scene.load.longest();
    scene.wait_connected();
    print_longest("both paths silent for 9 s", vec![longest]);
    scene.end();
}
