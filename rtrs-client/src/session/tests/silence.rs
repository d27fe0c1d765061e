//! Heartbeats: asked, answered, measured, and missed within the configured bound.

use rtrs_core::block::IoOp;
use rtrs_core::fabric::sim::LinkOptions;
use rtrs_core::status::IoStatus;
use rtrs_core::wire::Imm;

use super::server::{How, Seen};
use super::stand::{MS, SEC, Stand, client_ip, server_ip};
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
    stand.until("INFO_REQ", SEC, |s| s.client.states()[0] == PathState::Introducing);
    let start = stand.now();
    stand.until("the attempt's end", 5 * SEC, |s| s.client.states()[0] != PathState::Introducing);
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
    let mut stand = Stand::open(|s| s.config.heartbeat_interval = SEC);
    let before = stand.server.seen.len();
    stand.run(60 * SEC);
    let seen = stand.server.seen.len() - before;
    assert!((55..=60).contains(&seen), "{seen} messages in a minute");
}
