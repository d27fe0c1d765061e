//! Tests of heartbeats on an idle path to a server that accepts announcements: infrequent while
//! idle, and at the usual rate after the first request.

use rtrs_core::block::IoOp;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::{Extensions, Imm};

use super::fixture::{Fixture, MS, SEC, Setup};
use super::server::{How, Seen};
use crate::path::state::PathState;

/// Lets the server accept this heartbeat interval for idle paths.
fn accept_idle(how: &mut How, idle: Duration) {
    let idle_ms = Some(u32::try_from(idle.as_millis()).expect("short"));
    how.con_rsp = Some(Box::new(move |_, mut rsp| {
        rsp.ext = Extensions { idle_ms, ..Extensions::decode(&rsp.ext) }.encode();
        rsp.encode().to_vec()
    }));
}

/// Opens a session with `rtrs-server` that has been idle for a minute.
fn idle(change: impl FnOnce(&mut Setup)) -> Fixture {
    let mut fixture = Fixture::open(|s| {
        (s.how.fence, s.world.link.detect) = (true, None);
        accept_idle(&mut s.how, 30 * SEC);
        change(s);
    });
    fixture.run(60 * SEC);
    fixture.server.seen.clear();
    fixture
}

/// Returns the arrival times of heartbeats and the intervals that they announced.
fn beats(fixture: &Fixture) -> Vec<(Instant, u32)> {
    let seen = fixture.server.seen.iter();
    let beat = |seen: &Seen| match seen {
        Seen::Heartbeat { at, next_ms } => Some((*at, *next_ms)),
        _ => None,
    };
    seen.filter_map(beat).collect()
}

#[test]
fn heartbeats_of_an_idle_path_slow_down_as_announced() {
    // The lower of the client's setting and the server's limit applies.
    for (ours, theirs) in [(30, 8), (8, 30)] {
        let mut fixture = Fixture::open(|s| {
            s.how.fence = true;
            s.heartbeat.idle_max = ours * SEC;
            accept_idle(&mut s.how, theirs * SEC);
        });
        let begin = fixture.now();
        fixture.run(120 * SEC);
        let beats = beats(&fixture);
        assert!((20..40).contains(&beats.len()), "{}", beats.len());
        let first = beats.iter().position(|(_, next)| *next > 100).expect("it is idle");
        let waited = beats[first].0.since(begin);
        assert!((SEC..SEC + 200 * MS).contains(&waited), "not at once: {waited:?}");
        for pair in beats.windows(2) {
            let (gap, announced) = (pair[1].0.since(pair[0].0), MS * pair[0].1);
            let range = announced..announced + 5 * MS;
            assert!(range.contains(&gap), "{gap:?}, announced {announced:?}");
            assert!(pair[1].1 == pair[0].1 || pair[1].1 == (pair[0].1 * 2).min(8000));
        }
        assert_eq!(beats.last().map(|beat| beat.1), Some(8000));
        let status = fixture.client.control.view().paths();
        assert_eq!((status[0].reconnects, status[0].heartbeats.missed), (0, 0));
    }
}

#[test]
fn a_server_that_accepts_no_announcements_gets_none() {
    for fence in [true, false] {
        let mut fixture = Fixture::open(|s| s.how.fence = fence);
        fixture.run(60 * SEC);
        let beats = beats(&fixture);
        assert!(beats.len() > 550, "{} in a minute", beats.len());
        assert!(beats.iter().all(|(_, next)| *next == 0));
    }
}

#[test]
fn the_first_request_ends_the_idle_time_at_both_ends() {
    // The request may come from any shard.
    for shard in 0..2 {
        let mut fixture = idle(|_| {});
        let begin = fixture.now();
        fixture.read(shard, 0, 512);
        fixture.run(SEC);
        let beats = beats(&fixture);
        assert!(beats[0].0.since(begin) < 2 * MS, "at once: {:?}", beats[0].0.since(begin));
        assert_eq!(beats[0].1, 100);
        assert!(beats[1].0.since(beats[0].0) < 105 * MS, "and then as usual");
        // Only the path's first request sends a heartbeat.
        fixture.server.seen.clear();
        for _ in 0..20 {
            fixture.read(shard, 0, 512);
            fixture.run(20 * MS);
        }
        assert_eq!(self::beats(&fixture), []);
    }
}

#[test]
fn a_link_that_died_while_idle_is_noticed_as_soon_as_under_load() {
    let mut fixture = idle(|s| s.paths = 2);
    fixture.link_down(0);
    fixture.run(10 * SEC);
    assert_eq!(fixture.client.states(), [PathState::Connected; 2], "no heartbeat was sent yet");
    let tags: Vec<_> = (0..4).map(|_| fixture.submit(1, IoOp::Read, 0, 512)).collect();
    // The same limit as in `io_on_a_silently_dead_link_continues_in_time`, where no path
    // is idle.
    fixture.drain(410 * MS);
    assert!(tags.iter().all(|tag| fixture.client.status(*tag) == Some(IoStatus::Ok)));
    let error = fixture.client.last_error(0);
    assert!(error.starts_with("silent for "), "{error}");
}

#[test]
fn a_link_that_died_while_idle_is_noticed_after_the_idle_time() {
    let mut fixture = idle(|_| {});
    fixture.link_down(0);
    fixture.until("the path's end", 30 * SEC + 410 * MS, |s| {
        s.client.states()[0] != PathState::Connected
    });
}

#[test]
fn a_path_that_owes_an_answer_is_in_use() {
    for shard in 0..2 {
        let mut fixture = idle(|_| {});
        (fixture.server.how.hold, fixture.server.how.hold_probes) = (true, false);
        let tag = fixture.submit(shard, IoOp::Read, 0, 512);
        fixture.run(4 * SEC);
        let many = beats(&fixture).len();
        assert!(many > 30, "{many} heartbeats in 4 s");
        fixture.server.how.hold = false;
        fixture.server.release();
        fixture.drain(SEC);
        assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    }
}

#[test]
fn a_request_of_the_control_shard_ends_the_idle_time_too() {
    // One path ends with requests in flight, and the other, which has to carry FENCE, is dead.
    let mut fixture = idle(|s| s.paths = 2);
    fixture.server.how.hold = true;
    fixture.submit(0, IoOp::Write, 0, 512);
    fixture.submit(0, IoOp::Write, 512, 512);
    fixture.run(30 * MS);
    fixture.link_down(1);
    fixture.server.end_path(fixture.now(), 0);
    fixture
        .until("the other path's end", 450 * MS, |s| s.client.states()[1] != PathState::Connected);
}

#[test]
fn the_servers_heartbeats_are_answered_and_change_nothing() {
    let mut fixture = idle(|_| {});
    for _ in 0..10 {
        fixture.server.immediate(0, 0, Imm::Heartbeat { next_ms: 7 }.encode());
        fixture.run(SEC);
    }
    let acks = fixture.server.seen.iter().filter(|seen| matches!(seen, Seen::HeartbeatAck { .. }));
    assert_eq!(acks.count(), 10);
    assert!(beats(&fixture).len() <= 1);
    assert_eq!(fixture.client.states(), [PathState::Connected]);
}

#[test]
fn all_paths_of_a_session_in_use_are_watched() {
    let mut fixture = idle(|s| s.paths = 2);
    let begin = fixture.now();
    let over = |fixture: &Fixture| fixture.spread();
    let before = over(&fixture);
    fixture.read(0, 0, 512);
    let after = over(&fixture);
    let used = (0..2).find(|path| after[*path] > before[*path]).expect("a path was used");
    // The path without requests has died.
    fixture.link_down(1 - used);
    let dead = |s: &Fixture| s.client.states()[1 - used] != PathState::Connected;
    while !dead(&fixture) {
        assert!(fixture.now().since(begin) < 500 * MS, "it is not noticed");
        fixture.run(10 * MS);
    }
    assert_eq!(fixture.client.states()[used], PathState::Connected);
}
