//! Tests of paths that are added, removed, disconnected and reconnected under load, and of policy
//! changes.

use std::net::{IpAddr, SocketAddr};

use rtrs_core::block::IoOp;
use rtrs_core::status::IoStatus;

use super::fixture::{Fixture, MS, SEC, TestIo, server_ip, target};
use crate::engine::{
    Change, Failover, HeartbeatSettings, Leaving, NoPath, PathTarget, Policy, Tuning, Unresolved,
};
use crate::path::state::PathState;

fn leaving(path: usize, within: rtrs_core::time::Duration) -> Leaving {
    Leaving { path: format!("path{path}"), within, force: false }
}

fn remove(path: usize) -> Change {
    Change::Remove(leaving(path, 5 * SEC))
}

fn add(path: usize, life: u8) -> Change {
    let uuid = [0xa0 + path as u8 + 16 * life; 16];
    Change::Add { target: target(path), uuid, replaces: Vec::new() }
}

fn submit(fixture: &mut Fixture, shard: usize, op: IoOp, slot: usize) -> u64 {
    fixture.submit_io(shard, TestIo::new(op, slot as u64 * 8192, 4096).at(slot * 4096))
}

fn tune(fixture: &mut Fixture, change: impl FnOnce(&mut Tuning)) {
    let mut tuning = fixture.client.control.view().config().tuning();
    change(&mut tuning);
    fixture.change(Change::Tune(Box::new(tuning))).expect("allowed");
    // Gives all shards time to apply the change.
    fixture.run(MS);
}

/// Number of IO requests on the path with this identity.
fn over(fixture: &Fixture, uuid: u8) -> usize {
    fixture.server.ios().filter(|r| r.path.0[0] == uuid).count()
}

fn names(fixture: &Fixture) -> Vec<String> {
    fixture.client.control.view().paths().into_iter().map(|path| path.path).collect()
}

/// Lets all IO complete, and checks that it has succeeded.
fn all_well(fixture: &mut Fixture) {
    fixture.server.how.hold = false;
    fixture.server.release();
    fixture.drain(10 * SEC);
    let bad: Vec<_> = fixture.client.done.iter().filter(|done| !done.status.is_ok()).collect();
    assert!(bad.is_empty(), "{bad:?}");
}

#[test]
fn a_path_that_is_added_carries_io() {
    let mut fixture = Fixture::open(|s| s.spare = 1);
    fixture.server.how.hold = true;
    let before = submit(&mut fixture, 0, IoOp::Write, 0);
    assert_eq!(fixture.change(add(1, 0)), Ok(()));
    let again = fixture.change(add(1, 1)).expect_err("twice").to_string();
    assert_eq!(again, "path path1 already exists");
    fixture.until("the path", SEC, Fixture::is_whole);
    assert_eq!(names(&fixture), ["path0", "path1"]);
    for slot in 1..9 {
        submit(&mut fixture, slot % 2, IoOp::Read, slot);
    }
    fixture.until("all held", SEC, |s| s.server.held.len() == 9);
    assert_eq!((over(&fixture, 0xa0), over(&fixture, 0xa1)), (5, 4));
    all_well(&mut fixture);
    assert_eq!(fixture.client.status(before), Some(IoStatus::Ok));
}

#[test]
fn a_path_leaves_when_its_requests_are_answered() {
    for change in [remove(0), Change::Disconnect(leaving(0, 5 * SEC))] {
        let mut fixture = Fixture::open(|s| (s.paths, s.how.hold, s.how.fence) = (2, true, true));
        for slot in 0..6 {
            submit(&mut fixture, slot % 2, IoOp::Write, slot);
        }
        fixture.until("all held", SEC, |s| s.server.held.len() == 6);
        assert_eq!((over(&fixture, 0xa0), over(&fixture, 0xa1)), (4, 2));
        fixture.change(change.clone()).expect("another path is left");
        fixture.run(SEC);
        assert_eq!(fixture.client.states()[0], PathState::Connected, "it still waits");
        assert!(fixture.client.control.view().paths()[0].leaving.is_some());
        for slot in 6..9 {
            submit(&mut fixture, 0, IoOp::Read, slot);
        }
        fixture.until("the other path takes it", SEC, |s| s.server.held.len() == 9);
        assert_eq!((over(&fixture, 0xa0), over(&fixture, 0xa1)), (4, 5));
        all_well(&mut fixture);
        let gone = |s: &Fixture| match change {
            Change::Remove(_) => names(s) == ["path1"],
            _ => s.client.states() == [PathState::Disconnected, PathState::Connected],
        };
        fixture.until("it left", SEC, gone);
        fixture.run(5 * SEC);
        assert!(gone(&fixture), "it stays away");
        assert!(fixture.server.fences.is_empty(), "nothing was left to fence off");
        assert_eq!(fixture.server.ios().count(), 9, "nothing was resent");
        assert_eq!(fixture.server.opens, 1, "the device stayed open");
    }
}

#[test]
fn requests_unanswered_at_the_deadline_move_to_the_other_path() {
    let mut fixture = Fixture::open(|s| (s.paths, s.how.hold, s.how.fence) = (2, true, true));
    for slot in 0..6 {
        submit(&mut fixture, slot % 2, IoOp::Write, slot);
    }
    fixture.until("all held", SEC, |s| s.server.held.len() == 6);
    fixture.change(Change::Remove(leaving(0, 300 * MS))).expect("another path is left");
    fixture.run(290 * MS);
    assert_eq!(fixture.server.ios().count(), 6);
    fixture.until("it left", 100 * MS, |s| names(s) == ["path1"]);
    fixture.run(100 * MS);
    assert_eq!((over(&fixture, 0xa0), over(&fixture, 0xa1)), (4, 6), "the four moved");
    assert_eq!(fixture.server.fences.len(), 1, "behind a fence");
    all_well(&mut fixture);
    assert_eq!(fixture.client.done.len(), 6);
}

#[test]
fn losing_the_link_of_a_leaving_path_causes_a_failover() {
    let mut fixture = Fixture::open(|s| (s.paths, s.how.hold, s.how.fence) = (2, true, true));
    for slot in 0..6 {
        submit(&mut fixture, slot % 2, IoOp::Write, slot);
    }
    fixture.until("all held", SEC, |s| s.server.held.len() == 6);
    fixture.change(remove(0)).expect("another path is left");
    fixture.link_down(0);
    fixture.until("it left", 2 * SEC, |s| names(s) == ["path1"]);
    fixture.until("the requests to move", SEC, |s| over(s, 0xa1) == 6);
    all_well(&mut fixture);
    // The path's slot is free once the path is fenced off, and a different path then takes the
    // slot.
    fixture.link_up(0);
    fixture.change(add(0, 1)).expect("the name is free");
    fixture.until("both", 5 * SEC, Fixture::is_whole);
    assert_eq!(names(&fixture), ["path0", "path1"]);
    for slot in 0..8 {
        submit(&mut fixture, 0, IoOp::Read, slot);
    }
    all_well(&mut fixture);
    assert_eq!(over(&fixture, 0xb0), 4);
}

#[test]
fn paths_reconnect_on_request() {
    let mut fixture = Fixture::open(|s| s.paths = 2);
    fixture.change(Change::Disconnect(leaving(1, SEC))).expect("one is left");
    fixture.until("it is down", SEC, |s| s.client.states()[1] == PathState::Disconnected);
    let refused =
        fixture.change(Change::Disconnect(leaving(0, SEC))).expect_err("the last").to_string();
    assert!(refused.contains("only connected path"), "{refused}");
    fixture.change(Change::Reconnect(leaving(1, SEC))).expect("allowed");
    fixture.until("it is up", 100 * MS, Fixture::is_whole);
    // Paths are reconnected one after another, including the last, without losing a request.
    for round in 0..6 {
        for slot in 0..8 {
            submit(&mut fixture, slot % 2, IoOp::Write, slot);
        }
        fixture.change(Change::Reconnect(leaving(round % 2, SEC))).expect("allowed");
        fixture.until("both are up", SEC, Fixture::is_whole);
        all_well(&mut fixture);
    }
    let reconnects =
        fixture.client.control.view().paths().iter().map(|p| p.reconnects).sum::<u64>();
    assert_eq!(reconnects, 7);
    assert_eq!(fixture.server.fences.len(), 0);
}

#[test]
fn a_path_between_attempts_is_tried_at_once_on_request() {
    let mut fixture = Fixture::open(|s| {
        s.paths = 2;
        (s.config.reconnect_min, s.config.reconnect_max) = (100 * SEC, 100 * SEC);
    });
    fixture.link_down(1);
    fixture.until("it is down", 2 * SEC, |s| s.client.states()[1] == PathState::Waiting);
    fixture.link_up(1);
    fixture.run(SEC);
    assert_eq!(fixture.client.states()[1], PathState::Waiting);
    fixture.change(Change::Reconnect(leaving(1, SEC))).expect("allowed");
    fixture.until("it is up", 100 * MS, Fixture::is_whole);
}

#[test]
fn the_last_path_is_removed_only_by_force_and_io_waits_for_the_next() {
    let mut fixture = Fixture::open(|s| (s.spare, s.how.fence) = (1, true));
    let refused = fixture.change(remove(0)).expect_err("the last").to_string();
    assert!(refused.contains("last path of the session") && refused.contains("--force"));
    let refused = fixture.change(remove(7)).expect_err("unknown").to_string();
    assert!(refused.contains("no path path7"), "{refused}");
    fixture.server.how.hold = true;
    submit(&mut fixture, 0, IoOp::Write, 0);
    fixture.until("it is held", SEC, |s| s.server.held.len() == 1);
    let forced = Leaving { force: true, ..leaving(0, 100 * MS) };
    fixture.change(Change::Remove(forced)).expect("forced");
    fixture.until("no path", SEC, |s| names(s).is_empty());
    submit(&mut fixture, 1, IoOp::Write, 1);
    fixture.run(SEC);
    assert_eq!(fixture.client.pending(), 2);
    fixture.change(add(1, 0)).expect("the first");
    fixture.until("the path", SEC, Fixture::is_whole);
    all_well(&mut fixture);
    assert_eq!(fixture.client.done.len(), 2);
    assert_eq!(fixture.server.fences.len(), 1, "what was in flight was fenced off first");
}

#[test]
fn no_path_fail_keeps_the_only_connected_path_from_a_reconnect() {
    let mut fixture = Fixture::open(|s| s.config.no_path = NoPath::Fail);
    let refused =
        fixture.change(Change::Reconnect(leaving(0, SEC))).expect_err("IO would fail").to_string();
    assert!(refused.contains("no-path fail"), "{refused}");
    assert_eq!(fixture.client.states(), [PathState::Connected]);
}

#[test]
fn with_strict_failover_a_removed_path_reconnects_once_as_proof() {
    let mut fixture = Fixture::open(|s| {
        (s.paths, s.how.hold) = (2, true);
        s.config.failover = Failover::Strict;
    });
    let tags = [0, 1].map(|slot| submit(&mut fixture, 0, IoOp::Write, slot));
    fixture.until("both held", SEC, |s| s.server.held.len() == 2);
    fixture.change(Change::Remove(leaving(0, 100 * MS))).expect("one is left");
    fixture.link_down(0);
    fixture.run(2 * SEC);
    assert_eq!(fixture.server.ios().count(), 2, "no proof yet");
    assert_eq!(names(&fixture), ["path0", "path1"]);
    fixture.link_up(0);
    fixture.until("it left", 5 * SEC, |s| names(s) == ["path1"]);
    all_well(&mut fixture);
    assert_eq!(over(&fixture, 0xa1), 2, "{tags:?}");
    assert_eq!(over(&fixture, 0xa0), 1, "it carried nothing when it came back");
}

#[test]
fn the_policy_changes_under_load() {
    let mut fixture = Fixture::open(|s| s.paths = 2);
    let alone = |fixture: &mut Fixture| {
        for slot in 0..6 {
            submit(fixture, 0, IoOp::Read, slot);
            all_well(fixture);
        }
        (over(fixture, 0xa0), over(fixture, 0xa1))
    };
    assert_eq!(alone(&mut fixture), (3, 3));
    tune(&mut fixture, |tuning| tuning.policy = Policy::MinLatency);
    let spread = alone(&mut fixture);
    assert!(spread == (9, 3) || spread == (3, 9), "the quicker one: {spread:?}");
    assert_eq!(fixture.client.control.view().config().policy, Policy::MinLatency);
}

#[test]
fn io_waits_or_fails_by_the_current_policy() {
    let mut fixture = Fixture::open(|s| s.config.no_path = NoPath::Fail);
    let mut force = leaving(0, SEC);
    force.force = true;
    fixture.change(Change::Disconnect(force)).expect("forced");
    fixture.until("no path", 2 * SEC, |s| s.client.states()[0] == PathState::Disconnected);
    let failed = submit(&mut fixture, 0, IoOp::Write, 0);
    fixture.until("the error", SEC, |s| s.client.done.iter().any(|done| done.tag == failed));
    // IO submitted under the new policy waits.
    tune(&mut fixture, |tuning| tuning.no_path = NoPath::Queue);
    let waits = submit(&mut fixture, 1, IoOp::Write, 1);
    fixture.run(60 * SEC);
    assert!(fixture.client.done.iter().all(|done| done.tag != waits));
    // Time without a path counts, whatever the policy was at the time.
    tune(&mut fixture, |tuning| tuning.no_path = NoPath::QueueFor(10 * SEC));
    fixture.until("its error", SEC, |s| s.client.done.iter().any(|done| done.tag == waits));
    tune(&mut fixture, |tuning| tuning.no_path = NoPath::Queue);
    let kept = submit(&mut fixture, 0, IoOp::Write, 2);
    fixture.change(Change::Reconnect(leaving(0, SEC))).expect("allowed");
    fixture.until("its answer", 5 * SEC, |s| s.client.done.iter().any(|done| done.tag == kept));
    let last = fixture.client.done.last().map(|done| (done.tag, done.status));
    assert_eq!(last, Some((kept, IoStatus::Ok)));
}

#[test]
fn heartbeats_change_on_connected_and_added_paths() {
    let mut fixture = Fixture::open(|s| s.spare = 1);
    let heartbeat = HeartbeatSettings {
        interval: 20 * MS,
        missed_max: 2,
        confirmed_missed_max: 2,
        idle_max: SEC,
    };
    tune(&mut fixture, |tuning| {
        tuning.heartbeat = heartbeat;
        tuning.own_heartbeats.clear();
    });
    fixture.change(add(1, 0)).expect("allowed");
    fixture.until("the path", SEC, Fixture::is_whole);
    let silence = fixture.client.control.view().paths().into_iter().map(|path| path.silence_max_ms);
    assert_eq!(silence.collect::<Vec<_>>(), [Some(60), Some(60)]);
}

#[test]
fn paths_that_come_and_go_leave_nothing_behind() {
    let mut fixture = Fixture::open(|s| (s.paths, s.spare) = (1, 1));
    for round in 0..40 {
        for slot in 0..8 {
            submit(&mut fixture, slot % 2, IoOp::Write, slot);
        }
        let life = round % 5;
        fixture.change(add(1, life)).expect("the name is free");
        fixture.until("both", SEC, Fixture::is_whole);
        for slot in 0..8 {
            submit(&mut fixture, slot % 2, IoOp::Read, slot);
        }
        fixture.change(remove(1)).expect("one is left");
        fixture.until("it left", SEC, |s| names(s) == ["path0"]);
        all_well(&mut fixture);
    }
    assert_eq!(fixture.client.control.view().path_names().len(), 2, "its slot was reused");
}

#[test]
fn a_session_cannot_be_changed_while_it_attaches_or_detaches() {
    let mut fixture = Fixture::new(|s| s.paths = 2);
    let refused = fixture.change(remove(0)).expect_err("not open").to_string();
    assert!(refused.contains("still attaching"), "{refused}");
    fixture.until("all up", 2 * SEC, Fixture::is_whole);
    fixture.detach();
    let refused = fixture.change(remove(0)).expect_err("detaching").to_string();
    assert!(refused.contains("being detached"), "{refused}");
}

#[test]
fn an_attach_sees_the_progress_of_each_path() {
    let mut fixture = Fixture::open(|s| s.spare = 1);
    let progress = |s: &Fixture| s.client.control.view().progress().collect::<Vec<_>>();
    let before = progress(&fixture);
    fixture.run(SEC);
    assert_eq!(progress(&fixture), before, "nothing has changed");
    fixture.change(add(1, 0)).expect("a new path");
    let added = progress(&fixture);
    assert_ne!(added, before);
    fixture.until("the path", SEC, Fixture::is_whole);
    let connected = progress(&fixture);
    assert_ne!(connected, added);
    fixture.link_down(1);
    fixture.until("a failure", SEC, |s| s.client.states()[1] == PathState::Waiting);
    assert_ne!(progress(&fixture), connected);
    // A later failure of the same kind counts, too.
    let waiting = progress(&fixture);
    let ends = |s: &Fixture| s.client.control.view().paths()[1].ends;
    let failed = ends(&fixture);
    fixture.until("another failure", 10 * SEC, |s| ends(s) > failed);
    assert_ne!(progress(&fixture), waiting);
}

#[test]
fn a_second_path_to_the_same_address_is_refused() {
    let mut fixture = Fixture::open(|s| s.spare = 1);
    let alias = |path: usize, replaces: &[&str]| Change::Add {
        target: PathTarget { name: "alias".into(), ..target(path) },
        uuid: [0xb0; 16],
        replaces: replaces.iter().map(ToString::to_string).collect(),
    };
    let refused = fixture.change(alias(0, &["other"])).expect_err("a duplicate").to_string();
    assert!(refused.starts_with("path alias would duplicate path path0"), "{refused}");
    assert_eq!(names(&fixture), ["path0"]);
    // A path from a different address on this host is a different path, and so is a path to more
    // addresses.
    let other = PathTarget { local: None, ..target(0) };
    assert!(!other.duplicates(&target(0)) && !target(0).duplicates(&other));
    let both = [target(0), target(1)].iter().flat_map(|path| path.remotes.clone()).collect();
    let both = PathTarget { remotes: both, ..target(0) };
    assert!(!both.duplicates(&target(0)) && target(0).duplicates(&both));
    // A path that is about to be replaced does not count.
    assert_eq!(fixture.change(alias(0, &["path0"])), Ok(()));
    assert_eq!(names(&fixture), ["path0", "alias"]);
}

#[test]
fn an_unreached_path_uses_new_addresses_of_its_host() {
    let unused = SocketAddr::new(IpAddr::from([10, 99, 0, 1]), 1234);
    for (remotes, unresolved) in [(Vec::new(), Some("no such host")), (vec![unused], None)] {
        // Only a different address can be tried in time.
        let mut fixture = Fixture::open(|s| {
            (s.config.reconnect_min, s.config.reconnect_max) = (60 * SEC, 60 * SEC);
            s.spare = 1;
        });
        let unresolved = unresolved.map(|why: &str| Unresolved(why.to_owned()));
        let target = PathTarget { remotes: remotes.clone(), unresolved, ..target(1) };
        fixture
            .change(Change::Add { target, uuid: [0xa1; 16], replaces: Vec::new() })
            .expect("allowed");
        // The path also waits before its first attempt.
        fixture.until("a failure", 20 * SEC, |s| {
            s.client.states()[1] == PathState::Waiting && !s.client.last_error(1).is_empty()
        });
        assert_eq!(fixture.client.control.hosts.take_unreached().as_deref(), Some("path1"));
        assert_eq!(fixture.client.control.hosts.take_unreached(), None);
        if remotes.is_empty() {
            assert_eq!(fixture.client.last_error(1), "no such host");
            assert_eq!(fixture.client.control.view().paths()[1].address, "");
        }
        let hosts = &mut fixture.client.control.hosts;
        hosts.resolved("path1", Err(Unresolved("no answer".into())));
        hosts.resolved("other", Ok(vec![unused]));
        fixture.run(SEC);
        assert_eq!(fixture.client.states()[1], PathState::Waiting);
        let found = SocketAddr::new(server_ip(1), 1234);
        fixture.client.control.hosts.resolved("path1", Ok(vec![found]));
        fixture.until("the path", 2 * SEC, Fixture::is_whole);
        assert_eq!(fixture.client.control.view().paths()[1].address, found.to_string());
    }
}

#[test]
fn addresses_in_another_order_are_not_a_change() {
    let remotes: Vec<SocketAddr> =
        [1, 2].map(|path| SocketAddr::new(server_ip(path), 1234)).to_vec();
    let mut target = PathTarget { remotes: remotes.clone(), ..target(1) };
    assert!(!target.resolved(Ok(remotes.iter().rev().copied().collect())));
    assert!(
        !target.resolved(Err(Unresolved("no answer".into()))) && !target.resolved(Ok(Vec::new()))
    );
    assert_eq!((&target.remotes, &target.unresolved), (&remotes, &None));
    assert!(target.resolved(Ok(remotes[1..].to_vec())));
    assert_eq!(target.remotes, remotes[1..]);
}
