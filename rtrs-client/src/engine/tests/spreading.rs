//! Two paths: where each policy sends IO.

use rtrs_core::block::{IoFlags, IoOp};
use rtrs_core::fabric::sim::LinkOptions;

use super::stand::{MS, SEC, Stand, client_ip, server_ip};
use crate::engine::Policy;

fn load(stand: &mut Stand, rounds: usize, depth: usize) {
    for _ in 0..rounds {
        for slot in 0..depth {
            let range = (slot as u64 * 4096, 4096);
            stand.submit_with(0, (IoOp::Read, IoFlags::default()), range, slot * 4096);
        }
        stand.drain(SEC);
    }
}

#[test]
fn round_robin_takes_turns() {
    let mut stand = Stand::open(|s| (s.paths, s.config.policy) = (2, Policy::RoundRobin));
    load(&mut stand, 20, 5);
    assert_eq!(stand.spread(), [50, 50]);
}

#[test]
fn min_inflight_fills_the_emptier_path() {
    let mut stand = Stand::open(|s| (s.paths, s.config.policy) = (2, Policy::MinInflight));
    load(&mut stand, 10, 6);
    assert_eq!(stand.spread(), [30, 30], "both are as quick");
    // Alone, an IO takes one of two empty ones after the other.
    load(&mut stand, 10, 1);
    assert_eq!(stand.spread(), [35, 35]);
    // Requests stuck on the first path drive others to the second.
    stand.server.how.hold = true;
    load_held(&mut stand, 6);
    stand.server.how.hold = false;
    let stuck: Vec<_> = std::mem::take(&mut stand.server.held);
    let (first, second): (Vec<_>, Vec<_>) = stuck.into_iter().partition(|r| r.path.0[0] == 0xa0);
    assert_eq!((first.len(), second.len()), (3, 3));
    stand.server.held = first;
    for request in second {
        stand.server.serve(&request);
    }
    stand.run(MS);
    let before = stand.spread();
    stand.submit_with(0, (IoOp::Read, IoFlags::default()), (0, 4096), 1 << 20);
    stand.submit_with(0, (IoOp::Read, IoFlags::default()), (0, 4096), (1 << 20) + 4096);
    stand.run(MS);
    assert_eq!(stand.spread(), [before[0], before[1] + 2]);
    stand.server.release();
    stand.drain(SEC);
}

fn load_held(stand: &mut Stand, count: usize) {
    for slot in 0..count {
        stand.submit_with(0, (IoOp::Read, IoFlags::default()), (0, 4096), slot * 4096);
    }
    stand.until("all held", SEC, |s| s.server.held.len() == count);
}

#[test]
fn min_latency_takes_the_quicker_path() {
    let mut stand = Stand::open(|s| (s.paths, s.config.policy) = (2, Policy::MinLatency));
    let slow = LinkOptions { delay: 4 * MS, ..LinkOptions::default() };
    stand.world.set_link(client_ip(0), server_ip(0), slow);
    stand.run(500 * MS);
    let status = stand.client.control.status();
    let latency: Vec<_> = status.iter().map(|p| p.heartbeat_us.expect("measured")).collect();
    assert!((4000..4100).contains(&latency[0]) && latency[1] < 100, "{latency:?}");
    load(&mut stand, 10, 4);
    assert_eq!(stand.spread(), [0, 40]);
    stand.world.set_link(client_ip(0), server_ip(0), LinkOptions::default());
    stand.world.set_link(client_ip(1), server_ip(1), slow);
    stand.run(500 * MS);
    load(&mut stand, 10, 4);
    assert_eq!(stand.spread(), [40, 40], "it follows the measurements");
}

#[test]
fn a_path_that_is_down_is_skipped_by_every_policy() {
    for policy in [Policy::RoundRobin, Policy::MinInflight, Policy::MinLatency] {
        let mut stand = Stand::open(|s| (s.paths, s.config.policy) = (2, policy));
        stand.run(300 * MS);
        stand.link_down(0);
        stand.run(300 * MS);
        load(&mut stand, 5, 4);
        assert_eq!(stand.spread(), [0, 20], "{policy:?}");
        assert!(stand.client.done.iter().all(|done| done.status.is_ok()));
    }
}

#[test]
fn each_path_has_counters_and_latencies_of_its_own() {
    let mut stand = Stand::open(|s| (s.paths, s.config.policy) = (2, Policy::RoundRobin));
    for (from, to) in [(client_ip(1), server_ip(1)), (server_ip(1), client_ip(1))] {
        let slow = LinkOptions { delay: 20 * MS, jitter: MS / 100, ..LinkOptions::default() };
        stand.world.set_link(from, to, slow);
    }
    load(&mut stand, 20, 4);
    let stats = stand.client.stats(0);
    for path in 0..2 {
        assert_eq!((stats.paths[path].requests, stats.paths[path].answers), (40, 40));
        assert_eq!((stats.paths[path].bytes, stats.paths[path].errors), (40 * 4096, 0));
        assert_eq!(stats.path_latency[path].len(), 40);
    }
    let max = |path: usize| stats.path_latency[path].max() / 1_000_000;
    assert!(max(0) < 2 && (39..45).contains(&max(1)), "{} and {} ms", max(0), max(1));
    // What is in flight is told by path, until it is home.
    stand.server.how.hold = true;
    load_held(&mut stand, 3);
    assert_eq!(stand.client.path_inflight(0), [2, 1]);
    stand.server.how.hold = false;
    stand.server.release();
    stand.drain(SEC);
    assert_eq!(stand.client.path_inflight(0), [0, 0]);
}

#[test]
fn a_path_that_is_far_slower_is_left_out_tried_and_taken_back() {
    for policy in [Policy::RoundRobin, Policy::MinInflight] {
        let mut stand = Stand::open(|s| (s.paths, s.config.policy) = (2, policy));
        let usual = LinkOptions::default();
        let slow = LinkOptions { delay: 20 * MS, ..usual };
        let set = |stand: &Stand, link| {
            stand.world.set_link(client_ip(1), server_ip(1), link);
            stand.world.set_link(server_ip(1), client_ip(1), link);
        };
        load(&mut stand, 50, 4);
        set(&stand, slow);
        let begin = stand.now();
        while !stand.client.path_slow(0)[1] {
            assert!(stand.now().since(begin) < 4 * SEC, "{policy:?}: never left out");
            load(&mut stand, 1, 4);
        }
        assert!(stand.now().since(begin) >= 2 * SEC, "{policy:?}: not at the first late answer");
        assert_eq!(stand.client.path_slow(1), [false; 2], "a core judges what it sees");

        // Left out, but for ten requests a second at least.
        let (before, begin) = (stand.spread(), stand.now());
        while stand.now().since(begin) < 5 * SEC {
            load(&mut stand, 1, 4);
            stand.run(MS);
        }
        let after = stand.spread();
        let [quick, tried] = [after[0] - before[0], after[1] - before[1]];
        assert!((50..=101).contains(&tried), "{policy:?}: tried {tried} times in 5 s");
        assert!(quick > 5 * tried, "{policy:?}: {quick} over the quick one");

        set(&stand, usual);
        let begin = stand.now();
        while stand.client.path_slow(0)[1] {
            assert!(stand.now().since(begin) < SEC, "{policy:?}: not back within a second");
            load(&mut stand, 1, 4);
            stand.run(10 * MS);
        }
        assert!(stand.now().since(begin) >= 300 * MS, "{policy:?}: not at the first quick answer");
        let before = stand.spread();
        load(&mut stand, 20, 4);
        let after = stand.spread();
        assert_eq!([after[0] - before[0], after[1] - before[1]], [40, 40], "{policy:?}");
    }
}

#[test]
fn the_only_path_left_is_used_however_slow_it_is() {
    let mut stand = Stand::open(|s| (s.paths, s.config.policy) = (2, Policy::RoundRobin));
    let slow = LinkOptions { delay: 20 * MS, ..LinkOptions::default() };
    stand.world.set_link(client_ip(1), server_ip(1), slow);
    while !stand.client.path_slow(0)[1] {
        assert!(stand.now().as_nanos() < 9_000_000_000, "never left out");
        load(&mut stand, 1, 4);
    }
    stand.link_down(0);
    load(&mut stand, 3, 4);
    assert!(stand.client.path_slow(0)[1], "it is still slow");
    // Connected anew, nothing is held against it.
    let there = stand.server.paths.len() - 1;
    stand.server.end_path(stand.now(), there);
    stand.run(SEC);
    assert!(!stand.client.path_slow(0)[1]);
}
