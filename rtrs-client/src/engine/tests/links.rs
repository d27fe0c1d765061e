//! Tests of network changes on the host: paths that are down are retried at once, within limits.

use rtrs_core::fabric::sim::LinkOptions;
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::ConnRsp;

use super::fixture::{Fixture, MS, SEC, Setup, client_ip, server_ip};
use super::server::How;
use crate::engine::control::network::{ATTEMPT_MIN, SPACING_MAX, SPACING_MIN};
use crate::engine::{Change, Leaving};
use crate::path::state::PathState;

fn refusing(how: &mut How) {
    how.refuse = Some(ConnRsp::reject(104).encode().to_vec());
}

/// Returns the times at which attempts have reached the server since the setup.
fn attempts(fixture: &Fixture) -> Vec<Instant> {
    let connects = fixture.server.connects();
    connects.iter().filter(|(req, ..)| req.cid.0 == 0).map(|(.., at)| *at).collect()
}

/// Reports a network change every 10 ms for this long.
fn storm(fixture: &mut Fixture, time: Duration) {
    let end = fixture.now() + time;
    while fixture.now() < end {
        fixture.network_change();
        fixture.run(10 * MS);
    }
}

/// Delays packets in both directions by this time.
fn delay(fixture: &Fixture, delay: Duration) {
    let (there, here) = (server_ip(0), client_ip(0));
    for (from, to) in [(there, here), (here, there)] {
        let options = LinkOptions { delay, ..fixture.world.link(from, to) };
        fixture.world.set_link(from, to, options);
    }
}

/// Makes all waits 10 to 20 s.
fn long_waits(setup: &mut Setup) {
    (setup.config.reconnect_min, setup.config.reconnect_max) = (20 * SEC, 20 * SEC);
}

#[test]
fn a_waiting_path_is_tried_at_once_and_its_backoff_restarts() {
    let patient = |s: &mut Setup| s.config.reconnect_max = 100 * SEC;
    let mut fixture = Fixture::spoiled(patient, refusing);
    fixture.run(120 * SEC);
    let before = attempts(&fixture);
    let waited = before[before.len() - 1].since(before[before.len() - 2]);
    assert!(waited >= 20 * SEC, "its waits were long: {waited:?}");
    fixture.until("a wait", SEC, |s| s.client.states()[0] == PathState::Waiting);
    fixture.run(SEC);
    assert_eq!(attempts(&fixture).len(), before.len(), "no attempt is due");

    let changed = fixture.now();
    fixture.network_change();
    fixture.run(20 * SEC);
    let after = attempts(&fixture).split_off(before.len());
    assert!(after[0].since(changed) <= MS, "at once: {:?}", after[0].since(changed));
    let mut bound = 100 * MS;
    for pair in after.windows(2) {
        let wait = pair[1].since(pair[0]);
        assert!(wait >= bound / 2 && wait <= bound + MS, "{wait:?} for {bound:?}");
        bound *= 2;
    }
    assert!(bound >= 5 * SEC, "{after:?}");

    fixture.server.how.refuse = None;
    fixture.network_change();
    fixture.until("the path", 10 * MS, Fixture::is_whole);
}

#[test]
fn endless_changes_cause_no_storm_of_attempts() {
    let mut fixture = Fixture::spoiled(|s| s.config.reconnect_max = 10 * SEC, refusing);
    storm(&mut fixture, 60 * SEC);
    let count = attempts(&fixture).len();
    // There are six thousand changes; each one that takes effect is followed by some short waits.
    assert!((60..=150).contains(&count), "{count} attempts");
    // After a while without changes, the next one is treated like the first.
    fixture.run(30 * SEC);
    let (before, changed) = (attempts(&fixture).len(), fixture.now());
    fixture.network_change();
    fixture.run(MS);
    let all = attempts(&fixture);
    assert_eq!(all.len(), before + 1);
    assert!(all[before] >= changed);
}

#[test]
fn reactions_are_spaced_and_no_change_is_lost() {
    let mut fixture = Fixture::spoiled(long_waits, refusing);
    fixture.until("a wait", SEC, |s| s.client.states()[0] == PathState::Waiting);
    fixture.run(MS);
    let start = fixture.now();
    storm(&mut fixture, 20 * SEC);
    let all = attempts(&fixture);
    let mut distance = SPACING_MIN;
    for pair in all.windows(2) {
        let wait = pair[1].since(pair[0]);
        assert!(wait >= distance - MS && wait <= distance + 20 * MS, "{wait:?}: {all:?}");
        distance = (distance * 2).min(SPACING_MAX);
    }
    assert!(all[0].since(start) <= MS && all.len() >= 8, "{all:?}");

    // The second change comes too early, and takes effect later.
    fixture.run(30 * SEC);
    let before = attempts(&fixture).len();
    fixture.network_change();
    fixture.run(50 * MS);
    assert_eq!(attempts(&fixture).len(), before + 1);
    fixture.server.how.refuse = None;
    fixture.network_change();
    fixture.run(100 * MS);
    assert_eq!(attempts(&fixture).len(), before + 1, "not yet");
    fixture.until("the path", 60 * MS, Fixture::is_whole);
}

fn ends(fixture: &Fixture) -> Vec<u64> {
    fixture.client.control.view().paths().iter().map(|path| path.ends).collect()
}

/// Creates a fixture whose link is down and whose path has just begun an attempt.
fn stuck() -> Fixture {
    let mut fixture = Fixture::open(|s| s.config.connect_timeout = 20 * SEC);
    fixture.link_down(0);
    fixture.until("an attempt", SEC, |s| s.client.states()[0] == PathState::Connecting);
    fixture
}

#[test]
fn an_attempt_that_began_while_the_link_was_down_is_restarted() {
    let mut fixture = stuck();
    fixture.run(8 * SEC);
    let before = ends(&fixture)[0];
    fixture.link_up(0);
    fixture.run(SEC);
    assert_eq!(fixture.client.states()[0], PathState::Connecting, "what it sent is lost");
    fixture.network_change();
    fixture.until("the path", 10 * MS, Fixture::is_whole);
    assert_eq!(ends(&fixture), [before + 1], "one attempt was given up");
    assert_eq!(fixture.client.last_error(0), "");
}

#[test]
fn an_attempt_gets_a_minimum_time_and_its_replacement_the_full_time() {
    let mut fixture = stuck();
    let before = ends(&fixture)[0];
    fixture.run(ATTEMPT_MIN / 3);
    fixture.network_change();
    fixture.run(ATTEMPT_MIN / 3);
    assert_eq!(ends(&fixture), [before], "it has only begun");
    fixture.run(ATTEMPT_MIN);
    assert_eq!(ends(&fixture), [before + 1], "it began before the change");
    storm(&mut fixture, 19 * SEC);
    assert_eq!(ends(&fixture), [before + 1], "the next one began after a change");
    storm(&mut fixture, 2 * SEC);
    assert!(ends(&fixture)[0] > before + 1, "its time has run out");
}

#[test]
fn an_info_exchange_is_restarted_too() {
    let mut fixture = Fixture::open(|s| s.config.connect_timeout = 20 * SEC);
    fixture.server.how.info_rsp = Some(Box::new(|_| Vec::new()));
    fixture.server.end_path(fixture.now(), 0);
    fixture.until("INFO_REQ", SEC, |s| s.client.states()[0] == PathState::InfoExchange);
    fixture.run(SEC);
    fixture.server.how.info_rsp = None;
    fixture.network_change();
    // The server may still have its state for the path, and refuse the path once.
    fixture.until("the path", 120 * MS, Fixture::is_whole);
}

#[test]
fn a_slow_server_is_connected_despite_changes() {
    let mut fixture = Fixture::open(|s| {
        s.config.connect_timeout = 5 * SEC;
        s.config.heartbeat.interval = 20 * SEC;
        s.heartbeat.interval = 20 * SEC;
    });
    // An attempt needs round trips of two seconds each for three connections and for the rest.
    delay(&fixture, SEC);
    fixture.server.end_path(fixture.now(), 0);
    fixture.until("the loss", 5 * SEC, |s| s.client.states()[0] != PathState::Connected);
    storm(&mut fixture, 30 * SEC);
    assert_eq!(fixture.client.states()[0], PathState::Connected, "{:?}", attempts(&fixture));
}

#[test]
fn a_server_whose_answers_are_lost_gets_time_for_each_attempt() {
    let mut fixture = Fixture::open(|s| s.config.connect_timeout = 5 * SEC);
    let before = attempts(&fixture).len();
    // The server receives everything, but its answers are lost.
    fixture.world.silence(server_ip(0), client_ip(0));
    fixture.until("the loss", 5 * SEC, |s| s.client.states()[0] != PathState::Connected);
    storm(&mut fixture, 60 * SEC);
    let count = attempts(&fixture).len() - before;
    assert!((12..=26).contains(&count), "{count} attempts");
}

#[test]
fn the_first_attempts_of_a_session_are_left_alone() {
    let mut fixture = Fixture::new(|s| {
        s.config.connect_timeout = 5 * SEC;
        s.config.heartbeat.interval = 20 * SEC;
        s.heartbeat.interval = 20 * SEC;
    });
    delay(&fixture, SEC);
    storm(&mut fixture, 20 * SEC);
    assert_eq!(fixture.client.control.failure(), None);
    assert!(fixture.is_whole(), "{:?}", fixture.client.control.view().paths());
    assert_eq!(ends(&fixture), [0]);
}

#[test]
fn a_change_while_a_path_closes_skips_its_wait() {
    let mut fixture = Fixture::open(long_waits);
    fixture.server.end_path(fixture.now(), 0);
    fixture.until("the end", SEC, |s| s.client.states()[0] == PathState::Closing);
    fixture.network_change();
    fixture.until("the path", 10 * MS, Fixture::is_whole);
    // The change skips only one wait.
    fixture.server.end_path(fixture.now(), 0);
    fixture.run(SEC);
    assert_eq!(fixture.client.states()[0], PathState::Waiting);
}

#[test]
fn paths_that_are_up_or_kept_down_are_left_alone() {
    let mut fixture = Fixture::open(|s| s.paths = 3);
    let kept_down = Leaving { path: "path1".into(), within: SEC, force: false };
    fixture.change(Change::Disconnect(kept_down)).expect("others are left");
    fixture.until("the leave", SEC, |s| {
        s.server.paths.len() == 2 && s.client.states()[1] == PathState::Disconnected
    });
    fixture.server.end_path(fixture.now(), 1);
    fixture.until("the end", SEC, |s| s.client.states()[2] == PathState::Waiting);
    let before = ends(&fixture);
    storm(&mut fixture, 5 * SEC);
    let states = [PathState::Connected, PathState::Disconnected, PathState::Connected];
    assert_eq!(fixture.client.states(), states);
    assert_eq!(ends(&fixture), before);
    let seen = fixture.server.connects().len();
    fixture.detach();
    storm(&mut fixture, SEC);
    fixture.until("the end", 5 * SEC, |s| s.client.control.view().is_done());
    storm(&mut fixture, SEC);
    assert_eq!(fixture.client.states(), [PathState::Gone; 3]);
    assert_eq!(fixture.server.connects().len(), seen, "no path reconnects");
}
