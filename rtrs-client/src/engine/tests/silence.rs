//! Heartbeats: asked, answered, measured, and missed within the configured bound.

use rtrs_core::block::IoOp;
use rtrs_core::fabric::sim::LinkOptions;
use rtrs_core::status::IoStatus;
use rtrs_core::wire::Imm;

use super::server::{How, Seen};
use super::stand::{MS, SEC, Setup, Stand, client_ip, server_ip};
use crate::engine::HeartbeatSettings;
use crate::path::state::PathState;

fn beats(stand: &Stand) -> usize {
    stand.server.seen.iter().filter(|seen| matches!(seen, Seen::Heartbeat { .. })).count()
}

#[test]
fn a_silent_server_is_noticed_in_the_bound() {
    // Whatever number of heartbeats went before.
    for before in 0..20 {
        let mut stand = Stand::open(|_| {});
        stand.run(100 * MS * before);
        stand.server.how.heartbeats = false;
        let count = stand.server.seen.len();
        stand.until("the path's end", SEC, |s| s.client.states()[0] != PathState::Connected);
        let asked: Vec<_> = stand.server.seen[count..]
            .iter()
            .filter_map(|seen| match seen {
                Seen::Heartbeat { at } => Some(*at),
                _ => None,
            })
            .collect();
        assert_eq!(asked.len(), 1, "asked once, after {before} heartbeats");
        let took = stand.now().since(asked[0]);
        assert!(took >= 290 * MS && took <= 310 * MS, "after {before} heartbeats: {took:?}");
        let error = stand.client.last_error(0);
        assert!(error.contains("silent for 40"), "{error}");
        let count = stand.client.control.status()[0].heartbeats;
        assert_eq!((count.sent, count.missed), (beats(&stand) as u64, 3));
        stand.server.how.heartbeats = true;
        stand.until("the path", 5 * SEC, Stand::is_whole);
    }
}

#[test]
fn io_on_a_link_gone_without_a_word_goes_on_in_the_bound() {
    let mut stand = Stand::open(|s| {
        s.paths = 2;
        s.world.link.detect = None;
    });
    stand.link_down(0);
    let tags: Vec<_> = (0..4).map(|_| stand.submit(0, IoOp::Read, 0, 512)).collect();
    stand.drain(410 * MS);
    let good = tags.iter().filter(|t| stand.client.status(**t) == Some(IoStatus::Ok));
    assert_eq!(good.count(), 4);
    assert_eq!(stand.spread(), [0, 4], "two of them were sent again");
}

#[test]
fn a_server_that_falls_silent_while_the_device_opens_is_noticed() {
    // Ours answers heartbeats while it opens; a kernel's does not, and gets more time.
    for (fence, least, most) in [(true, 290 * MS, 410 * MS), (false, 9 * SEC, 11 * SEC)] {
        let mut stand = Stand::new(|s| {
            (s.how.fence, s.how.hold_control, s.how.heartbeats) = (fence, true, false);
        });
        stand.until("the open", SEC, |s| s.client.states()[0] == PathState::Opening);
        let start = stand.now();
        stand.until("the path's end", 12 * SEC, |s| s.client.states()[0] != PathState::Opening);
        let took = stand.now().since(start);
        assert!(took >= least && took <= most, "{fence}: {took:?}");

        // A slow open alone ends nothing.
        let mut stand = Stand::new(|s| (s.how.fence, s.how.hold_control) = (fence, true));
        stand.run(5 * SEC);
        assert_eq!(stand.client.states()[0], PathState::Opening);
        stand.server.how.hold_control = false;
        stand.server.release();
        stand.until("the path", SEC, Stand::is_whole);
    }
}

#[test]
fn an_introduction_without_answer_ends_with_the_connect_timeout() {
    let mute = |how: &mut How| how.info_rsp = Some(Box::new(|_| Vec::new()));
    let mut stand = Stand::spoiled(|_| {}, mute);
    stand.until("INFO_REQ", SEC, |s| s.client.states()[0] == PathState::InfoExchange);
    let start = stand.now();
    stand.until("the attempt's end", 5 * SEC, |s| s.client.states()[0] != PathState::InfoExchange);
    let took = stand.now().since(start);
    assert!(took >= 1900 * MS && took <= 2 * SEC, "{took:?}");
    stand.server.how.info_rsp = None;
    stand.until("the path", 10 * SEC, Stand::is_whole);
}

#[test]
fn io_counts_as_a_sign_of_life() {
    let mut stand = Stand::open(|_| {});
    let before = beats(&stand);
    for _ in 0..40 {
        stand.read(1, 0, 512);
        stand.run(50 * MS);
    }
    assert_eq!(beats(&stand), before, "no heartbeat while answers come");
}

#[test]
fn the_servers_heartbeats_are_answered_at_once() {
    let mut stand = Stand::open(|_| {});
    for _ in 0..100 {
        let sent = stand.now();
        stand.server.immediate(0, 0, Imm::Heartbeat.encode());
        stand.until(
            "the answer",
            MS,
            |s| matches!(s.server.seen.last(), Some(Seen::HeartbeatAck { at }) if *at > sent),
        );
    }
    assert_eq!(stand.client.states(), [PathState::Connected]);
}

#[test]
fn the_servers_own_heartbeats_do_not_show_that_it_hears() {
    let mut stand = Stand::open(|_| {});
    // As if nothing of ours arrived: no answers, and the server asks, also between our questions.
    stand.server.how.heartbeats = false;
    let start = stand.now();
    while stand.client.states()[0] == PathState::Connected {
        assert!(stand.now().since(start) <= 500 * MS, "the path is held up");
        stand.server.immediate(0, 0, Imm::Heartbeat.encode());
        stand.run(30 * MS);
    }
    let error = stand.client.last_error(0);
    assert!(error.contains("silent for 4"), "{error}");
}

#[test]
fn the_round_trip_is_measured() {
    let mut stand = Stand::open(|_| {});
    assert_eq!(stand.client.control.status()[0].heartbeat_us, None);
    let slow = LinkOptions { delay: 3 * MS, jitter: MS / 100, ..LinkOptions::default() };
    stand.world.set_link(client_ip(0), server_ip(0), slow);
    stand.world.set_link(server_ip(0), client_ip(0), slow);
    stand.run(300 * MS);
    let latency = stand.client.control.status()[0].heartbeat_us.expect("measured");
    assert!((6000..6100).contains(&latency), "{latency}");
    stand.server.end_path(stand.now(), 0);
    stand.run(10 * MS);
    assert_eq!(stand.client.control.status()[0].heartbeat_us, None, "of a path that is down");
}

#[test]
fn answers_to_no_question_measure_nothing() {
    let mut stand = Stand::open(|_| {});
    stand.server.immediate(0, 0, Imm::HeartbeatAck.encode());
    stand.run(10 * MS);
    assert_eq!(stand.client.control.status()[0].heartbeat_us, None);
    assert_eq!(stand.client.states(), [PathState::Connected]);
}

#[test]
fn an_idle_session_does_next_to_nothing() {
    let mut stand = Stand::open(|s| s.config.heartbeat.interval = SEC);
    let before = stand.server.seen.len();
    stand.run(60 * SEC);
    let seen = stand.server.seen.len() - before;
    assert!((55..=60).contains(&seen), "{seen} messages in a minute");
}

/// As the program's defaults are, over TCP.
fn defaults(s: &mut Setup) {
    s.heartbeat = HeartbeatSettings { interval: 100 * MS, missed_max: 3, confirmed_missed_max: 3 };
    s.config.heartbeat =
        HeartbeatSettings { interval: 500 * MS, missed_max: 5, confirmed_missed_max: 5 };
}

#[test]
fn a_silent_path_of_our_own_server_is_noticed_within_500_ms_and_a_kernels_in_3_s() {
    for (fence, bound) in [(true, 300 * MS..500 * MS), (false, 2500 * MS..3010 * MS)] {
        for before in 0..12 {
            let mut stand = Stand::open(|s| {
                defaults(s);
                (s.paths, s.how.fence, s.world.link.detect) = (2, fence, None);
            });
            stand.run(61 * MS * before);
            let begin = stand.now();
            stand.link_down(0);
            stand
                .until("the path's end", 4 * SEC, |s| s.client.states()[0] != PathState::Connected);
            let took = stand.now().since(begin);
            assert!(took < bound.end && took + 600 * MS > bound.start, "fence {fence}: {took:?}");
            assert_eq!(stand.client.states()[1], PathState::Connected);
        }
    }
}

/// As the program's defaults are, over RDMA.
fn rdma_defaults(s: &mut Setup) {
    defaults(s);
    s.heartbeat = HeartbeatSettings { interval: 100 * MS, missed_max: 8, confirmed_missed_max: 6 };
    (s.paths, s.how.fence, s.world.link.detect) = (2, true, None);
}

#[test]
fn a_path_is_given_up_sooner_where_the_server_answers_on_another() {
    for before in 0..12 {
        let mut stand = Stand::open(rdma_defaults);
        stand.run(61 * MS * before);
        let begin = stand.now();
        stand.link_down(0);
        stand.until("the path's end", SEC, |s| s.client.states()[0] != PathState::Connected);
        let took = stand.now().since(begin);
        assert!((600 * MS..710 * MS).contains(&took), "{took:?}");
        let error = stand.client.last_error(0);
        assert!(error.starts_with("silent for 70") && error.ends_with("another path was answered"));
        assert_eq!(stand.client.states()[1], PathState::Connected);
    }
}

#[test]
fn a_server_that_answers_nowhere_gets_all_its_time() {
    let mut stand = Stand::open(rdma_defaults);
    stand.run(SEC);
    stand.server.how.heartbeats = false;
    let begin = stand.now();
    stand.run(790 * MS);
    assert_eq!(stand.client.states(), [PathState::Connected; 2]);
    let lost = |s: &Stand| s.client.states().iter().position(|at| *at != PathState::Connected);
    stand.until("an end", SEC, |s| lost(s).is_some());
    let took = stand.now().since(begin);
    assert!((800 * MS..910 * MS).contains(&took), "{took:?}");
    let error = stand.client.last_error(lost(&stand).expect("ended"));
    assert!(error.starts_with("silent for 90") && error.ends_with("ms"), "{error}");
}

#[test]
fn a_server_that_goes_on_may_answer_one_path_a_little_later() {
    for answers in [true, false] {
        let mut stand = Stand::open(rdma_defaults);
        stand.run(SEC);
        stand.server.how.heartbeats = false;
        stand.run(650 * MS);
        // It was stopped and runs again: it is about to answer what it was asked.
        stand.server.immediate(1, 0, Imm::HeartbeatAck.encode());
        stand.server.how.heartbeats = true;
        stand.run(95 * MS);
        assert_eq!(stand.client.states(), [PathState::Connected; 2]);
        if answers {
            stand.server.immediate(0, 0, Imm::HeartbeatAck.encode());
        }
        stand.run(200 * MS);
        let alive = stand.client.states()[0] == PathState::Connected;
        assert_eq!(alive, answers, "{}", stand.client.last_error(0));
    }
}

#[test]
fn a_core_that_comes_late_ends_no_path() {
    let mut stand = Stand::open(|s| {
        defaults(s);
        (s.paths, s.how.fence) = (2, true);
    });
    let tags: Vec<_> = (0..100)
        .map(|round| {
            let tag = stand.submit(round % 2, IoOp::Read, 0, 512);
            stand.run(7 * MS * (round as u32 % 20));
            stand.stall(37 * MS * (round as u32 % 30));
            tag
        })
        .collect();
    stand.drain(SEC);
    assert!(tags.iter().all(|tag| stand.client.status(*tag) == Some(IoStatus::Ok)));
    assert_eq!(stand.client.states(), [PathState::Connected; 2]);
    let status = stand.client.control.status();
    assert!(status.iter().all(|path| path.reconnects == 0 && path.ends == 0), "{status:?}");
}

#[test]
fn a_server_that_is_as_late_as_we_are_loses_no_path() {
    // One machine, both ends starved: nobody runs for 160 ms, then we do, then the server.
    let mut stand = Stand::open(|s| {
        defaults(s);
        s.how.fence = true;
    });
    for _ in 0..10 {
        stand
            .until("a heartbeat is due", SEC, |s| s.client.control.status()[0].heartbeats.sent > 0);
        stand.server.how.heartbeats = false;
        for _ in 0..6 {
            stand.stall(160 * MS);
            stand.run(MS);
            assert_eq!(stand.client.states(), [PathState::Connected]);
        }
        stand.server.how.heartbeats = true;
        stand.server.immediate(0, 0, Imm::HeartbeatAck.encode());
        stand.run(10 * MS);
    }
    // On time again, silence is silence.
    stand.server.how.heartbeats = false;
    stand.until("the path's end", 500 * MS, |s| s.client.states() != [PathState::Connected]);
}

#[test]
fn a_late_core_does_not_take_its_own_pause_for_an_unanswered_probe() {
    let mut stand = Stand::open(|s| (s.how.hold, s.how.hold_probes) = (true, true));
    stand.submit(1, IoOp::Read, 0, 512);
    stand.until("the probe", SEC, |s| s.server.held.len() == 2);
    stand.stall(2 * SEC);
    stand.run(20 * MS);
    assert_eq!(stand.client.states(), [PathState::Connected]);
    stand.until("the path's end", 2 * SEC, |s| s.client.states() != [PathState::Connected]);
    let error = stand.client.last_error(0);
    assert!(error.contains("no answer for"), "{error}");
}
