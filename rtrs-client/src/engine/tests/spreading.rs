//! Tests of the distribution of IO over two paths by each policy.

use rtrs_core::block::IoOp;
use rtrs_core::fabric::sim::LinkOptions;

use super::fixture::{Fixture, MS, SEC, TestIo, client_ip, server_ip};
use crate::engine::Policy;

/// Like [`load`], with rounds so far apart that no run of min-inflight spans two.
fn load_apart(fixture: &mut Fixture, rounds: usize, depth: usize) {
    for _ in 0..rounds {
        load(fixture, 1, depth);
        fixture.run(MS);
    }
}

fn load(fixture: &mut Fixture, rounds: usize, depth: usize) {
    for _ in 0..rounds {
        for slot in 0..depth {
            let read = TestIo::new(IoOp::Read, slot as u64 * 4096, 4096);
            fixture.submit_io(0, read.at(slot * 4096));
        }
        fixture.drain(SEC);
    }
}

#[test]
fn round_robin_takes_turns() {
    let mut fixture = Fixture::open(|s| (s.paths, s.config.policy) = (2, Policy::RoundRobin));
    load(&mut fixture, 20, 5);
    assert_eq!(fixture.spread(), [50, 50]);
}

#[test]
fn min_inflight_fills_the_emptier_path() {
    let mut fixture = Fixture::open(|s| (s.paths, s.config.policy) = (2, Policy::MinInflight));
    load_apart(&mut fixture, 10, 6);
    assert_eq!(fixture.spread(), [30, 30], "both are equally quick");
    // Single IOs are spread equally too.
    load_apart(&mut fixture, 10, 1);
    assert_eq!(fixture.spread(), [35, 35]);
    // Requests stuck on one path shift later runs to the other path.
    fixture.server.how.hold = true;
    load_held(&mut fixture, 4);
    fixture.server.how.hold = false;
    let stuck = fixture.client.path_inflight(0);
    let other = usize::from(stuck[0] > 0);
    assert_eq!((stuck[other], stuck[1 - other]), (0, 4));
    fixture.run(MS);
    for _ in 0..3 {
        let before = fixture.spread();
        let read = TestIo::new(IoOp::Read, 0, 4096);
        fixture.submit_io(0, read.at(1 << 20));
        fixture.submit_io(0, read.at((1 << 20) + 4096));
        fixture.run(MS);
        assert_eq!(fixture.spread()[other], before[other] + 2);
    }
    fixture.server.release();
    fixture.drain(SEC);
}

fn load_held(fixture: &mut Fixture, count: usize) {
    for slot in 0..count {
        fixture.submit_io(0, TestIo::new(IoOp::Read, 0, 4096).at(slot * 4096));
    }
    fixture.until("all held", SEC, |s| s.server.held.len() == count);
}

#[test]
fn min_latency_takes_the_quicker_path() {
    let mut fixture = Fixture::open(|s| (s.paths, s.config.policy) = (2, Policy::MinLatency));
    let slow = LinkOptions { delay: 4 * MS, ..LinkOptions::default() };
    fixture.world.set_link(client_ip(0), server_ip(0), slow);
    fixture.run(500 * MS);
    let status = fixture.client.control.view().paths();
    let latency: Vec<_> = status.iter().map(|p| p.heartbeat_us.expect("measured")).collect();
    assert!((4000..4100).contains(&latency[0]) && latency[1] < 100, "{latency:?}");
    load(&mut fixture, 10, 4);
    assert_eq!(fixture.spread(), [0, 40]);
    fixture.world.set_link(client_ip(0), server_ip(0), LinkOptions::default());
    fixture.world.set_link(client_ip(1), server_ip(1), slow);
    fixture.run(500 * MS);
    load(&mut fixture, 10, 4);
    assert_eq!(fixture.spread(), [40, 40], "it follows the measurements");
}

#[test]
fn a_path_that_is_down_is_skipped_by_every_policy() {
    for policy in [Policy::RoundRobin, Policy::MinInflight, Policy::MinLatency] {
        let mut fixture = Fixture::open(|s| (s.paths, s.config.policy) = (2, policy));
        fixture.run(300 * MS);
        fixture.link_down(0);
        fixture.run(300 * MS);
        load(&mut fixture, 5, 4);
        assert_eq!(fixture.spread(), [0, 20], "{policy:?}");
        assert!(fixture.client.done.iter().all(|done| done.status.is_ok()));
    }
}

#[test]
fn each_path_has_counters_and_latencies_of_its_own() {
    let mut fixture = Fixture::open(|s| (s.paths, s.config.policy) = (2, Policy::RoundRobin));
    for (from, to) in [(client_ip(1), server_ip(1)), (server_ip(1), client_ip(1))] {
        let slow = LinkOptions { delay: 20 * MS, jitter: MS / 100, ..LinkOptions::default() };
        fixture.world.set_link(from, to, slow);
    }
    load(&mut fixture, 20, 4);
    let stats = fixture.client.stats(0);
    for path in 0..2 {
        assert_eq!((stats.paths[path].requests, stats.paths[path].answers), (40, 40));
        assert_eq!((stats.paths[path].bytes, stats.paths[path].errors), (40 * 4096, 0));
        assert_eq!(stats.path_latency[path].len(), 40);
    }
    let max = |path: usize| stats.path_latency[path].max() / 1_000_000;
    assert!(max(0) < 2 && (39..45).contains(&max(1)), "{} and {} ms", max(0), max(1));
    // Requests in flight are reported per path until they complete.
    fixture.server.how.hold = true;
    load_held(&mut fixture, 3);
    assert_eq!(fixture.client.path_inflight(0), [2, 1]);
    fixture.server.how.hold = false;
    fixture.server.release();
    fixture.drain(SEC);
    assert_eq!(fixture.client.path_inflight(0), [0, 0]);
}

#[test]
fn a_far_slower_path_is_excluded_tried_and_readmitted() {
    for policy in [Policy::RoundRobin, Policy::MinInflight] {
        let mut fixture = Fixture::open(|s| (s.paths, s.config.policy) = (2, policy));
        let usual = LinkOptions::default();
        let slow = LinkOptions { delay: 20 * MS, ..usual };
        let set = |fixture: &Fixture, link| {
            fixture.world.set_link(client_ip(1), server_ip(1), link);
            fixture.world.set_link(server_ip(1), client_ip(1), link);
        };
        load(&mut fixture, 50, 4);
        set(&fixture, slow);
        let begin = fixture.now();
        while !fixture.client.path_slow(0)[1] {
            assert!(fixture.now().since(begin) < 4 * SEC, "{policy:?}: never left out");
            load(&mut fixture, 1, 4);
        }
        assert!(fixture.now().since(begin) >= 2 * SEC, "{policy:?}: not at the first late answer");
        assert_eq!(fixture.client.path_slow(1), [false; 2], "a shard judges what it sees");

        // The path is excluded, but still gets at least ten requests a second.
        let (before, begin) = (fixture.spread(), fixture.now());
        while fixture.now().since(begin) < 5 * SEC {
            load(&mut fixture, 1, 4);
            fixture.run(MS);
        }
        let after = fixture.spread();
        let [quick, tried] = [after[0] - before[0], after[1] - before[1]];
        assert!((50..=101).contains(&tried), "{policy:?}: tried {tried} times in 5 s");
        assert!(quick > 5 * tried, "{policy:?}: {quick} over the quick one");

        set(&fixture, usual);
        let begin = fixture.now();
        while fixture.client.path_slow(0)[1] {
            assert!(fixture.now().since(begin) < SEC, "{policy:?}: not back within a second");
            load(&mut fixture, 1, 4);
            fixture.run(10 * MS);
        }
        assert!(
            fixture.now().since(begin) >= 300 * MS,
            "{policy:?}: not at the first quick answer"
        );
        let before = fixture.spread();
        load_apart(&mut fixture, 20, 4);
        let after = fixture.spread();
        assert_eq!([after[0] - before[0], after[1] - before[1]], [40, 40], "{policy:?}");
    }
}

#[test]
fn the_only_path_left_is_used_however_slow_it_is() {
    let mut fixture = Fixture::open(|s| (s.paths, s.config.policy) = (2, Policy::RoundRobin));
    let slow = LinkOptions { delay: 20 * MS, ..LinkOptions::default() };
    fixture.world.set_link(client_ip(1), server_ip(1), slow);
    while !fixture.client.path_slow(0)[1] {
        assert!(fixture.now().as_nanos() < 9_000_000_000, "never left out");
        load(&mut fixture, 1, 4);
    }
    fixture.link_down(0);
    load(&mut fixture, 3, 4);
    assert!(fixture.client.path_slow(0)[1], "it is still slow");
    // A reconnect clears the verdict.
    let there = fixture.server.paths.len() - 1;
    fixture.server.end_path(fixture.now(), there);
    fixture.run(SEC);
    assert!(!fixture.client.path_slow(0)[1]);
}
