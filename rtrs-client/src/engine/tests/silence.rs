//! Tests of heartbeats: they are sent, answered and measured, and missed ones are detected in time.

use rtrs_core::block::IoOp;
use rtrs_core::fabric::sim::LinkOptions;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Duration;
use rtrs_core::wire::Imm;

use super::fixture::{Fixture, MS, SEC, Setup, client_ip, server_ip};
use super::server::{How, Seen};
use crate::engine::HeartbeatSettings;
use crate::path::state::PathState;

fn beats(fixture: &Fixture) -> usize {
    fixture.server.seen.iter().filter(|seen| matches!(seen, Seen::Heartbeat { .. })).count()
}

#[test]
fn a_silent_server_is_detected_in_time() {
    // This must hold after any number of heartbeats.
    for before in 0..20 {
        let mut fixture = Fixture::open(|_| {});
        fixture.run(100 * MS * before);
        fixture.server.how.heartbeats = false;
        let count = fixture.server.seen.len();
        fixture.until("the path's end", SEC, |s| s.client.states()[0] != PathState::Connected);
        let asked: Vec<_> = fixture.server.seen[count..]
            .iter()
            .filter_map(|seen| match seen {
                Seen::Heartbeat { at, .. } => Some(*at),
                _ => None,
            })
            .collect();
        assert_eq!(asked.len(), 1, "asked once, after {before} heartbeats");
        let took = fixture.now().since(asked[0]);
        assert!(took >= 290 * MS && took <= 310 * MS, "after {before} heartbeats: {took:?}");
        let error = fixture.client.last_error(0);
        assert!(error.contains("silent for 40"), "{error}");
        let count = fixture.client.control.view().paths()[0].heartbeats;
        assert_eq!((count.sent, count.missed), (beats(&fixture) as u64, 3));
        fixture.server.how.heartbeats = true;
        fixture.until("the path", 5 * SEC, Fixture::is_whole);
    }
}

#[test]
fn io_on_a_silently_dead_link_continues_in_time() {
    let mut fixture = Fixture::open(|s| {
        s.paths = 2;
        s.world.link.detect = None;
    });
    fixture.link_down(0);
    let tags: Vec<_> = (0..4).map(|_| fixture.submit(0, IoOp::Read, 0, 512)).collect();
    fixture.drain(410 * MS);
    let good = tags.iter().filter(|t| fixture.client.status(**t) == Some(IoStatus::Ok));
    assert_eq!(good.count(), 4);
    assert_eq!(fixture.spread(), [0, 4], "two were resent");
}

#[test]
fn a_server_that_falls_silent_while_the_device_opens_is_noticed() {
    // `rtrs-server` answers heartbeats while it opens a device; a kernel server does not, and is
    // given more time.
    for (fence, least, most) in [(true, 290 * MS, 410 * MS), (false, 9 * SEC, 11 * SEC)] {
        let mut fixture = Fixture::new(|s| {
            (s.how.fence, s.how.hold_control, s.how.heartbeats) = (fence, true, false);
        });
        fixture.until("the open", SEC, |s| s.client.states()[0] == PathState::Opening);
        let start = fixture.now();
        fixture.until("the path's end", 12 * SEC, |s| s.client.states()[0] != PathState::Opening);
        let took = fixture.now().since(start);
        assert!(took >= least && took <= most, "{fence}: {took:?}");

        // A slow open alone ends no path.
        let mut fixture = Fixture::new(|s| (s.how.fence, s.how.hold_control) = (fence, true));
        fixture.run(5 * SEC);
        assert_eq!(fixture.client.states()[0], PathState::Opening);
        fixture.server.how.hold_control = false;
        fixture.server.release();
        fixture.until("the path", SEC, Fixture::is_whole);
    }
}

#[test]
fn an_unanswered_info_req_ends_at_the_connect_timeout() {
    let mute = |how: &mut How| how.info_rsp = Some(Box::new(|_| Vec::new()));
    let mut fixture = Fixture::spoiled(|_| {}, mute);
    fixture.until("INFO_REQ", SEC, |s| s.client.states()[0] == PathState::InfoExchange);
    let start = fixture.now();
    fixture
        .until("the attempt's end", 5 * SEC, |s| s.client.states()[0] != PathState::InfoExchange);
    let took = fixture.now().since(start);
    assert!(took >= 1900 * MS && took <= 2 * SEC, "{took:?}");
    fixture.server.how.info_rsp = None;
    fixture.until("the path", 10 * SEC, Fixture::is_whole);
}

#[test]
fn io_counts_as_a_sign_of_life() {
    let mut fixture = Fixture::open(|_| {});
    let before = beats(&fixture);
    for _ in 0..40 {
        fixture.read(1, 0, 512);
        fixture.run(50 * MS);
    }
    assert_eq!(beats(&fixture), before, "no heartbeat while answers come");
}

#[test]
fn the_servers_heartbeats_are_answered_at_once() {
    let mut fixture = Fixture::open(|_| {});
    for _ in 0..100 {
        let sent = fixture.now();
        fixture.server.immediate(0, 0, Imm::Heartbeat { next_ms: 0 }.encode());
        fixture.until(
            "the answer",
            MS,
            |s| matches!(s.server.seen.last(), Some(Seen::HeartbeatAck { at }) if *at > sent),
        );
    }
    assert_eq!(fixture.client.states(), [PathState::Connected]);
}

#[test]
fn the_servers_heartbeats_do_not_prove_that_it_receives() {
    let mut fixture = Fixture::open(|_| {});
    // As if nothing from the client arrived: the server does not answer, and sends its own
    // heartbeats, even between the client's.
    fixture.server.how.heartbeats = false;
    let start = fixture.now();
    while fixture.client.states()[0] == PathState::Connected {
        assert!(fixture.now().since(start) <= 500 * MS, "the path is kept alive");
        fixture.server.immediate(0, 0, Imm::Heartbeat { next_ms: 0 }.encode());
        fixture.run(30 * MS);
    }
    let error = fixture.client.last_error(0);
    assert!(error.contains("silent for 4"), "{error}");
}

#[test]
fn the_round_trip_is_measured() {
    let mut fixture = Fixture::open(|_| {});
    assert_eq!(fixture.client.control.view().paths()[0].heartbeat_us, None);
    let slow = LinkOptions { delay: 3 * MS, jitter: MS / 100, ..LinkOptions::default() };
    fixture.world.set_link(client_ip(0), server_ip(0), slow);
    fixture.world.set_link(server_ip(0), client_ip(0), slow);
    fixture.run(300 * MS);
    let latency = fixture.client.control.view().paths()[0].heartbeat_us.expect("measured");
    assert!((6000..6100).contains(&latency), "{latency}");
    fixture.server.end_path(fixture.now(), 0);
    fixture.run(10 * MS);
    assert_eq!(fixture.client.control.view().paths()[0].heartbeat_us, None, "the path is down");
}

#[test]
fn unrequested_heartbeat_answers_measure_nothing() {
    let mut fixture = Fixture::open(|_| {});
    fixture.server.immediate(0, 0, Imm::HeartbeatAck.encode());
    fixture.run(10 * MS);
    assert_eq!(fixture.client.control.view().paths()[0].heartbeat_us, None);
    assert_eq!(fixture.client.states(), [PathState::Connected]);
}

#[test]
fn an_idle_session_does_next_to_nothing() {
    let mut fixture = Fixture::open(|s| s.config.heartbeat.interval = SEC);
    let before = fixture.server.seen.len();
    fixture.run(60 * SEC);
    let seen = fixture.server.seen.len() - before;
    assert!((55..=60).contains(&seen), "{seen} messages in a minute");
}

fn usual(interval: Duration, missed_max: u32, confirmed_missed_max: u32) -> HeartbeatSettings {
    HeartbeatSettings { interval, missed_max, confirmed_missed_max, idle_max: 30 * SEC }
}

/// Uses the program's defaults for TCP.
fn defaults(s: &mut Setup) {
    s.heartbeat = usual(100 * MS, 3, 3);
    s.config.heartbeat = usual(500 * MS, 5, 5);
}

#[test]
fn a_silent_rtrs_server_is_noticed_within_500_ms_and_a_kernel_server_within_3_s() {
    for (fence, bound) in [(true, 300 * MS..500 * MS), (false, 2500 * MS..3010 * MS)] {
        for before in 0..12 {
            let mut fixture = Fixture::open(|s| {
                defaults(s);
                (s.paths, s.how.fence, s.world.link.detect) = (2, fence, None);
            });
            fixture.run(61 * MS * before);
            let begin = fixture.now();
            fixture.link_down(0);
            fixture
                .until("the path's end", 4 * SEC, |s| s.client.states()[0] != PathState::Connected);
            let took = fixture.now().since(begin);
            assert!(took < bound.end && took + 600 * MS > bound.start, "fence {fence}: {took:?}");
            assert_eq!(fixture.client.states()[1], PathState::Connected);
        }
    }
}

/// Uses the program's defaults for RDMA.
fn rdma_defaults(s: &mut Setup) {
    defaults(s);
    s.heartbeat = usual(100 * MS, 8, 6);
    (s.paths, s.how.fence, s.world.link.detect) = (2, true, None);
}

#[test]
fn a_path_is_given_up_sooner_if_the_server_answers_on_another() {
    for before in 0..12 {
        let mut fixture = Fixture::open(rdma_defaults);
        fixture.run(61 * MS * before);
        let begin = fixture.now();
        fixture.link_down(0);
        fixture.until("the path's end", SEC, |s| s.client.states()[0] != PathState::Connected);
        let took = fixture.now().since(begin);
        assert!((600 * MS..710 * MS).contains(&took), "{took:?}");
        let error = fixture.client.last_error(0);
        assert!(
            error.starts_with("silent for 70") && error.ends_with("another path received answers")
        );
        assert_eq!(fixture.client.states()[1], PathState::Connected);
    }
}

#[test]
fn a_server_that_answers_on_no_path_gets_its_full_time() {
    let mut fixture = Fixture::open(rdma_defaults);
    fixture.run(SEC);
    fixture.server.how.heartbeats = false;
    let begin = fixture.now();
    fixture.run(790 * MS);
    assert_eq!(fixture.client.states(), [PathState::Connected; 2]);
    let lost = |s: &Fixture| s.client.states().iter().position(|at| *at != PathState::Connected);
    fixture.until("an end", SEC, |s| lost(s).is_some());
    let took = fixture.now().since(begin);
    assert!((800 * MS..910 * MS).contains(&took), "{took:?}");
    let error = fixture.client.last_error(lost(&fixture).expect("ended"));
    assert!(error.starts_with("silent for 90") && error.ends_with("ms"), "{error}");
}

#[test]
fn a_running_server_may_answer_one_path_a_little_later() {
    for answers in [true, false] {
        let mut fixture = Fixture::open(rdma_defaults);
        fixture.run(SEC);
        fixture.server.how.heartbeats = false;
        fixture.run(650 * MS);
        // The server was stopped and is running again: it is about to answer the heartbeats.
        fixture.server.immediate(1, 0, Imm::HeartbeatAck.encode());
        fixture.server.how.heartbeats = true;
        fixture.run(95 * MS);
        assert_eq!(fixture.client.states(), [PathState::Connected; 2]);
        if answers {
            fixture.server.immediate(0, 0, Imm::HeartbeatAck.encode());
        }
        fixture.run(200 * MS);
        let alive = fixture.client.states()[0] == PathState::Connected;
        assert_eq!(alive, answers, "{}", fixture.client.last_error(0));
    }
}

#[test]
fn a_late_shard_ends_no_path() {
    let mut fixture = Fixture::open(|s| {
        defaults(s);
        (s.paths, s.how.fence) = (2, true);
    });
    let tags: Vec<_> = (0..100)
        .map(|round| {
            let tag = fixture.submit(round % 2, IoOp::Read, 0, 512);
            fixture.run(7 * MS * (round as u32 % 20));
            fixture.stall(37 * MS * (round as u32 % 30));
            tag
        })
        .collect();
    fixture.drain(SEC);
    assert!(tags.iter().all(|tag| fixture.client.status(*tag) == Some(IoStatus::Ok)));
    assert_eq!(fixture.client.states(), [PathState::Connected; 2]);
    let status = fixture.client.control.view().paths();
    assert!(status.iter().all(|path| path.reconnects == 0 && path.ends == 0), "{status:?}");
}

#[test]
fn a_server_that_is_as_late_as_we_are_loses_no_path() {
    // Both ends share a busy machine: for 160 ms neither runs; then the client does, then the
    // server.
    let mut fixture = Fixture::open(|s| {
        defaults(s);
        s.how.fence = true;
    });
    for _ in 0..10 {
        fixture.until("a heartbeat is due", SEC, |s| {
            s.client.control.view().paths()[0].heartbeats.sent > 0
        });
        fixture.server.how.heartbeats = false;
        for _ in 0..6 {
            fixture.stall(160 * MS);
            fixture.run(MS);
            assert_eq!(fixture.client.states(), [PathState::Connected]);
        }
        fixture.server.how.heartbeats = true;
        fixture.server.immediate(0, 0, Imm::HeartbeatAck.encode());
        fixture.run(10 * MS);
    }
    // Once turns are on time again, silence counts again.
    fixture.server.how.heartbeats = false;
    fixture.until("the path's end", 500 * MS, |s| s.client.states() != [PathState::Connected]);
}

#[test]
fn a_late_shard_does_not_mistake_its_pause_for_an_unanswered_probe() {
    let mut fixture = Fixture::open(|s| (s.how.hold, s.how.hold_probes) = (true, true));
    fixture.submit(1, IoOp::Read, 0, 512);
    fixture.until("the probe", SEC, |s| s.server.held.len() == 2);
    fixture.stall(2 * SEC);
    fixture.run(20 * MS);
    assert_eq!(fixture.client.states(), [PathState::Connected]);
    fixture.until("the path's end", 2 * SEC, |s| s.client.states() != [PathState::Connected]);
    let error = fixture.client.last_error(0);
    assert!(error.contains("no answer for"), "{error}");
}
