//! News of the host's network: paths that are down are tried at once, and the bounds of that.

use rtrs_core::fabric::sim::LinkOptions;
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::ConnRsp;

use super::server::How;
use super::stand::{MS, SEC, Setup, Stand, client_ip, server_ip};
use crate::engine::control::network::{ATTEMPT_MIN, SPACING_MAX, SPACING_MIN};
use crate::engine::{Change, Leaving};
use crate::path::state::PathState;

fn refusing(how: &mut How) {
    how.refuse = Some(ConnRsp::reject(104).encode().to_vec());
}

/// When attempts reached the server, since it was spoiled.
fn attempts(stand: &Stand) -> Vec<Instant> {
    let connects = stand.server.connects();
    connects.iter().filter(|(req, ..)| req.cid.0 == 0).map(|(.., at)| *at).collect()
}

/// News each 10 ms for so long.
fn storm(stand: &mut Stand, time: Duration) {
    let end = stand.now() + time;
    while stand.now() < end {
        stand.network_change();
        stand.run(10 * MS);
    }
}

/// All that goes either way takes so long.
fn delay(stand: &Stand, delay: Duration) {
    let (there, here) = (server_ip(0), client_ip(0));
    for (from, to) in [(there, here), (here, there)] {
        let options = LinkOptions { delay, ..stand.world.link(from, to) };
        stand.world.set_link(from, to, options);
    }
}

/// Waits of 10 to 20 s, always.
fn long_waits(setup: &mut Setup) {
    (setup.config.reconnect_min, setup.config.reconnect_max) = (20 * SEC, 20 * SEC);
}

#[test]
fn a_path_that_waits_is_tried_at_once_and_its_waits_begin_anew() {
    let patient = |s: &mut Setup| s.config.reconnect_max = 100 * SEC;
    let mut stand = Stand::spoiled(patient, refusing);
    stand.run(120 * SEC);
    let before = attempts(&stand);
    let waited = before[before.len() - 1].since(before[before.len() - 2]);
    assert!(waited >= 20 * SEC, "its waits were long: {waited:?}");
    stand.until("a wait", SEC, |s| s.client.states()[0] == PathState::Waiting);
    stand.run(SEC);
    assert_eq!(attempts(&stand).len(), before.len(), "no attempt is due");

    let news = stand.now();
    stand.network_change();
    stand.run(20 * SEC);
    let after = attempts(&stand).split_off(before.len());
    assert!(after[0].since(news) <= MS, "at once: {:?}", after[0].since(news));
    let mut bound = 100 * MS;
    for pair in after.windows(2) {
        let wait = pair[1].since(pair[0]);
        assert!(wait >= bound / 2 && wait <= bound + MS, "{wait:?} for {bound:?}");
        bound *= 2;
    }
    assert!(bound >= 5 * SEC, "{after:?}");

    stand.server.how.refuse = None;
    stand.network_change();
    stand.until("the path", 10 * MS, Stand::is_whole);
}

#[test]
fn news_without_end_do_not_make_a_storm() {
    let mut stand = Stand::spoiled(|s| s.config.reconnect_max = 10 * SEC, refusing);
    storm(&mut stand, 60 * SEC);
    let count = attempts(&stand).len();
    // Six thousand news. Each that counts is followed by some short waits.
    assert!((60..=150).contains(&count), "{count} attempts");
    // When there were none for a while, the next one counts as the first did.
    stand.run(30 * SEC);
    let (before, news) = (attempts(&stand).len(), stand.now());
    stand.network_change();
    stand.run(MS);
    let all = attempts(&stand);
    assert_eq!(all.len(), before + 1);
    assert!(all[before] >= news);
}

#[test]
fn what_news_cause_keeps_its_distance_and_nothing_is_lost() {
    let mut stand = Stand::spoiled(long_waits, refusing);
    stand.until("a wait", SEC, |s| s.client.states()[0] == PathState::Waiting);
    stand.run(MS);
    let start = stand.now();
    storm(&mut stand, 20 * SEC);
    let all = attempts(&stand);
    let mut distance = SPACING_MIN;
    for pair in all.windows(2) {
        let wait = pair[1].since(pair[0]);
        assert!(wait >= distance - MS && wait <= distance + 20 * MS, "{wait:?}: {all:?}");
        distance = (distance * 2).min(SPACING_MAX);
    }
    assert!(all[0].since(start) <= MS && all.len() >= 8, "{all:?}");

    // The second comes too early, and counts later.
    stand.run(30 * SEC);
    let before = attempts(&stand).len();
    stand.network_change();
    stand.run(50 * MS);
    assert_eq!(attempts(&stand).len(), before + 1);
    stand.server.how.refuse = None;
    stand.network_change();
    stand.run(100 * MS);
    assert_eq!(attempts(&stand).len(), before + 1, "not yet");
    stand.until("the path", 60 * MS, Stand::is_whole);
}

fn ends(stand: &Stand) -> Vec<u64> {
    stand.client.control.status().iter().map(|path| path.ends).collect()
}

/// A stand whose link went down, and an attempt that just began.
fn stuck() -> Stand {
    let mut stand = Stand::open(|s| s.config.connect_timeout = 20 * SEC);
    stand.link_down(0);
    stand.until("an attempt", SEC, |s| s.client.states()[0] == PathState::Connecting);
    stand
}

#[test]
fn an_attempt_that_began_while_the_link_was_down_begins_anew() {
    let mut stand = stuck();
    stand.run(8 * SEC);
    let before = ends(&stand)[0];
    stand.link_up(0);
    stand.run(SEC);
    assert_eq!(stand.client.states()[0], PathState::Connecting, "what it sent is lost");
    stand.network_change();
    stand.until("the path", 10 * MS, Stand::is_whole);
    assert_eq!(ends(&stand), [before + 1], "one attempt was given up");
    assert_eq!(stand.client.last_error(0), "");
}

#[test]
fn an_attempt_has_some_time_to_itself_and_the_next_one_has_all() {
    let mut stand = stuck();
    let before = ends(&stand)[0];
    stand.run(ATTEMPT_MIN / 3);
    stand.network_change();
    stand.run(ATTEMPT_MIN / 3);
    assert_eq!(ends(&stand), [before], "it has only begun");
    stand.run(ATTEMPT_MIN);
    assert_eq!(ends(&stand), [before + 1], "it began before the news");
    storm(&mut stand, 19 * SEC);
    assert_eq!(ends(&stand), [before + 1], "the next one began after news");
    storm(&mut stand, 2 * SEC);
    assert!(ends(&stand)[0] > before + 1, "its time is over");
}

#[test]
fn an_introduction_begins_anew_too() {
    let mut stand = Stand::open(|s| s.config.connect_timeout = 20 * SEC);
    stand.server.how.info_rsp = Some(Box::new(|_| Vec::new()));
    stand.server.end_path(stand.now(), 0);
    stand.until("INFO_REQ", SEC, |s| s.client.states()[0] == PathState::InfoExchange);
    stand.run(SEC);
    stand.server.how.info_rsp = None;
    stand.network_change();
    // The server may still hold what it knew of the path, and refuse it once.
    stand.until("the path", 120 * MS, Stand::is_whole);
}

#[test]
fn a_slow_server_is_connected_whatever_is_heard() {
    let mut stand = Stand::open(|s| {
        s.config.connect_timeout = 5 * SEC;
        s.config.heartbeat.interval = 20 * SEC;
        s.heartbeat.interval = 20 * SEC;
    });
    // Three connections and the rest: each round trip takes two seconds.
    delay(&stand, SEC);
    stand.server.end_path(stand.now(), 0);
    stand.until("the loss", 5 * SEC, |s| s.client.states()[0] != PathState::Connected);
    storm(&mut stand, 30 * SEC);
    assert_eq!(stand.client.states()[0], PathState::Connected, "{:?}", attempts(&stand));
}

#[test]
fn a_mute_server_is_not_asked_more_often_than_it_has_time_to_answer() {
    let mut stand = Stand::open(|s| s.config.connect_timeout = 5 * SEC);
    let before = attempts(&stand).len();
    // It hears all, and its answers stay on the way.
    stand.world.silence(server_ip(0), client_ip(0));
    stand.until("the loss", 5 * SEC, |s| s.client.states()[0] != PathState::Connected);
    storm(&mut stand, 60 * SEC);
    let count = attempts(&stand).len() - before;
    assert!((12..=26).contains(&count), "{count} attempts");
}

#[test]
fn the_first_attempts_of_a_session_are_left_alone() {
    let mut stand = Stand::new(|s| {
        s.config.connect_timeout = 5 * SEC;
        s.config.heartbeat.interval = 20 * SEC;
        s.heartbeat.interval = 20 * SEC;
    });
    delay(&stand, SEC);
    storm(&mut stand, 20 * SEC);
    assert_eq!(stand.client.control.failure(), None);
    assert!(stand.is_whole(), "{:?}", stand.client.control.status());
    assert_eq!(ends(&stand), [0]);
}

#[test]
fn news_while_a_path_closes_spare_it_the_wait() {
    let mut stand = Stand::open(long_waits);
    stand.server.end_path(stand.now(), 0);
    stand.until("the end", SEC, |s| s.client.states()[0] == PathState::Closing);
    stand.network_change();
    stand.until("the path", 10 * MS, Stand::is_whole);
    // Only that once.
    stand.server.end_path(stand.now(), 0);
    stand.run(SEC);
    assert_eq!(stand.client.states()[0], PathState::Waiting);
}

#[test]
fn paths_that_are_up_or_kept_down_are_left_alone() {
    let mut stand = Stand::open(|s| s.paths = 3);
    let kept_down = Leaving { path: "path1".into(), within: SEC, force: false };
    stand.change(Change::Disconnect(kept_down)).expect("others are left");
    stand.until("the leave", SEC, |s| {
        s.server.paths.len() == 2 && s.client.states()[1] == PathState::Disconnected
    });
    stand.server.end_path(stand.now(), 1);
    stand.until("the end", SEC, |s| s.client.states()[2] == PathState::Waiting);
    let before = ends(&stand);
    storm(&mut stand, 5 * SEC);
    let states = [PathState::Connected, PathState::Disconnected, PathState::Connected];
    assert_eq!(stand.client.states(), states);
    assert_eq!(ends(&stand), before);
    let seen = stand.server.connects().len();
    stand.detach();
    storm(&mut stand, SEC);
    stand.until("the end", 5 * SEC, |s| s.client.control.is_done());
    storm(&mut stand, SEC);
    assert_eq!(stand.client.states(), [PathState::Gone; 3]);
    assert_eq!(stand.server.connects().len(), seen, "nobody comes back");
}
