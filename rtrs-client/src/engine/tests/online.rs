//! Paths that are added, removed, disconnected and connected again under load, and the policy.

use rtrs_core::block::{IoFlags, IoOp};
use rtrs_core::status::IoStatus;

use super::stand::{MS, SEC, Stand, target};
use crate::engine::{Change, Failover, Leaving, NoPath, Policy};
use crate::path::state::PathState;

fn leaving(path: usize, within: rtrs_core::time::Duration) -> Leaving {
    Leaving { path: format!("path{path}"), within, force: false }
}

fn remove(path: usize) -> Change {
    Change::Remove(leaving(path, 5 * SEC))
}

fn add(path: usize, life: u8) -> Change {
    Change::Add { target: target(path), uuid: [0xa0 + path as u8 + 16 * life; 16] }
}

fn submit(stand: &mut Stand, core: usize, op: IoOp, slot: usize) -> u64 {
    let range = (slot as u64 * 8192, 4096);
    stand.submit_with(core, (op, IoFlags::default()), range, slot * 4096)
}

/// IO requests that came over the path of this identity.
fn over(stand: &Stand, uuid: u8) -> usize {
    stand.server.ios().filter(|r| r.path.0[0] == uuid).count()
}

fn names(stand: &Stand) -> Vec<String> {
    stand.client.control.status().into_iter().map(|path| path.path).collect()
}

/// Ends all IO and demands that it ended well.
fn all_well(stand: &mut Stand) {
    stand.server.how.hold = false;
    stand.server.release();
    stand.drain(10 * SEC);
    let bad: Vec<_> = stand.client.done.iter().filter(|done| !done.status.is_ok()).collect();
    assert!(bad.is_empty(), "{bad:?}");
}

#[test]
fn a_path_that_is_added_carries_io() {
    let mut stand = Stand::open(|s| s.spare = 1);
    stand.server.how.hold = true;
    let before = submit(&mut stand, 0, IoOp::Write, 0);
    assert_eq!(stand.change(add(1, 0)), Ok(()));
    let again = stand.change(add(1, 1)).expect_err("twice");
    assert_eq!(again, "path path1 already exists");
    stand.until("the path", SEC, Stand::is_whole);
    assert_eq!(names(&stand), ["path0", "path1"]);
    for slot in 1..9 {
        submit(&mut stand, slot % 2, IoOp::Read, slot);
    }
    stand.until("all held", SEC, |s| s.server.held.len() == 9);
    assert_eq!((over(&stand, 0xa0), over(&stand, 0xa1)), (5, 4));
    all_well(&mut stand);
    assert_eq!(stand.client.status(before), Some(IoStatus::Ok));
}

#[test]
fn a_path_leaves_when_its_requests_have_come_home() {
    for change in [remove(0), Change::Disconnect(leaving(0, 5 * SEC))] {
        let mut stand = Stand::open(|s| (s.paths, s.how.hold, s.how.fence) = (2, true, true));
        for slot in 0..6 {
            submit(&mut stand, slot % 2, IoOp::Write, slot);
        }
        stand.until("all held", SEC, |s| s.server.held.len() == 6);
        assert_eq!((over(&stand, 0xa0), over(&stand, 0xa1)), (4, 2));
        stand.change(change.clone()).expect("another path is left");
        stand.run(SEC);
        assert_eq!(stand.client.states()[0], PathState::Connected, "it still waits");
        assert!(stand.client.control.status()[0].leaving.is_some());
        for slot in 6..9 {
            submit(&mut stand, 0, IoOp::Read, slot);
        }
        stand.until("the other path takes it", SEC, |s| s.server.held.len() == 9);
        assert_eq!((over(&stand, 0xa0), over(&stand, 0xa1)), (4, 5));
        all_well(&mut stand);
        let gone = |s: &Stand| match change {
            Change::Remove(_) => names(s) == ["path1"],
            _ => s.client.states() == [PathState::Disconnected, PathState::Connected],
        };
        stand.until("it left", SEC, gone);
        stand.run(5 * SEC);
        assert!(gone(&stand), "it stays away");
        assert!(stand.server.fences.is_empty(), "nothing was left to fence off");
        assert_eq!(stand.server.ios().count(), 9, "nothing was sent again");
        assert_eq!(stand.server.opens, 1, "the device stayed open");
    }
}

#[test]
fn what_has_not_come_home_in_time_goes_to_the_other_path() {
    let mut stand = Stand::open(|s| (s.paths, s.how.hold, s.how.fence) = (2, true, true));
    for slot in 0..6 {
        submit(&mut stand, slot % 2, IoOp::Write, slot);
    }
    stand.until("all held", SEC, |s| s.server.held.len() == 6);
    stand.change(Change::Remove(leaving(0, 300 * MS))).expect("another path is left");
    stand.run(290 * MS);
    assert_eq!(stand.server.ios().count(), 6);
    stand.until("it left", 100 * MS, |s| names(s) == ["path1"]);
    stand.run(100 * MS);
    assert_eq!((over(&stand, 0xa0), over(&stand, 0xa1)), (4, 6), "the four went over");
    assert_eq!(stand.server.fences.len(), 1, "behind a fence");
    all_well(&mut stand);
    assert_eq!(stand.client.done.len(), 6);
}

#[test]
fn a_link_that_is_lost_while_its_path_leaves_is_a_failover() {
    let mut stand = Stand::open(|s| (s.paths, s.how.hold, s.how.fence) = (2, true, true));
    for slot in 0..6 {
        submit(&mut stand, slot % 2, IoOp::Write, slot);
    }
    stand.until("all held", SEC, |s| s.server.held.len() == 6);
    stand.change(remove(0)).expect("another path is left");
    stand.link_down(0);
    stand.until("it left", 2 * SEC, |s| names(s) == ["path1"]);
    stand.until("the others go over", SEC, |s| over(s, 0xa1) == 6);
    all_well(&mut stand);
    // Its place is free once it is fenced off, and then another takes it.
    stand.link_up(0);
    stand.change(add(0, 1)).expect("there is none of that name");
    stand.until("both", 5 * SEC, Stand::is_whole);
    assert_eq!(names(&stand), ["path0", "path1"]);
    for slot in 0..8 {
        submit(&mut stand, 0, IoOp::Read, slot);
    }
    all_well(&mut stand);
    assert_eq!(over(&stand, 0xb0), 4);
}

#[test]
fn a_disconnected_path_comes_back_when_told_and_a_connected_one_anew() {
    let mut stand = Stand::open(|s| s.paths = 2);
    stand.change(Change::Disconnect(leaving(1, SEC))).expect("one is left");
    stand.until("it is down", SEC, |s| s.client.states()[1] == PathState::Disconnected);
    let refused = stand.change(Change::Disconnect(leaving(0, SEC))).expect_err("the last");
    assert!(refused.contains("only connected path"), "{refused}");
    stand.change(Change::Reconnect(leaving(1, SEC))).expect("it may");
    stand.until("it is up", 100 * MS, Stand::is_whole);
    // Connected ones come back without a request lost, one after the other, and the last too.
    for round in 0..6 {
        for slot in 0..8 {
            submit(&mut stand, slot % 2, IoOp::Write, slot);
        }
        stand.change(Change::Reconnect(leaving(round % 2, SEC))).expect("it may");
        stand.until("both are up", SEC, Stand::is_whole);
        all_well(&mut stand);
    }
    let reconnects = stand.client.control.status().iter().map(|p| p.reconnects).sum::<u64>();
    assert_eq!(reconnects, 7);
    assert_eq!(stand.server.fences.len(), 0);
}

#[test]
fn a_path_between_attempts_is_tried_at_once_when_told() {
    let mut stand = Stand::open(|s| {
        s.paths = 2;
        (s.config.reconnect_min, s.config.reconnect_max) = (100 * SEC, 100 * SEC);
    });
    stand.link_down(1);
    stand.until("it is down", 2 * SEC, |s| s.client.states()[1] == PathState::Waiting);
    stand.link_up(1);
    stand.run(SEC);
    assert_eq!(stand.client.states()[1], PathState::Waiting);
    stand.change(Change::Reconnect(leaving(1, SEC))).expect("it may");
    stand.until("it is up", 100 * MS, Stand::is_whole);
}

#[test]
fn the_last_path_goes_only_by_force_and_io_waits_for_the_next() {
    let mut stand = Stand::open(|s| (s.spare, s.how.fence) = (1, true));
    let refused = stand.change(remove(0)).expect_err("the last");
    assert!(refused.contains("last path of the session") && refused.contains("--force"));
    let refused = stand.change(remove(7)).expect_err("unknown");
    assert!(refused.contains("no path path7"), "{refused}");
    stand.server.how.hold = true;
    submit(&mut stand, 0, IoOp::Write, 0);
    stand.until("it is held", SEC, |s| s.server.held.len() == 1);
    let forced = Leaving { force: true, ..leaving(0, 100 * MS) };
    stand.change(Change::Remove(forced)).expect("forced");
    stand.until("no path", SEC, |s| names(s).is_empty());
    submit(&mut stand, 1, IoOp::Write, 1);
    stand.run(SEC);
    assert_eq!(stand.client.pending(), 2);
    stand.change(add(1, 0)).expect("the first");
    stand.until("the path", SEC, Stand::is_whole);
    all_well(&mut stand);
    assert_eq!(stand.client.done.len(), 2);
    assert_eq!(stand.server.fences.len(), 1, "what was in flight was fenced off first");
}

#[test]
fn no_path_fail_keeps_the_only_connected_path_from_a_reconnect() {
    let mut stand = Stand::open(|s| s.config.no_path = NoPath::Fail);
    let refused = stand.change(Change::Reconnect(leaving(0, SEC))).expect_err("IO would fail");
    assert!(refused.contains("no-path fail"), "{refused}");
    assert_eq!(stand.client.states(), [PathState::Connected]);
}

#[test]
fn with_strict_failover_a_path_comes_back_once_as_proof_before_it_goes() {
    let mut stand = Stand::open(|s| {
        (s.paths, s.how.hold) = (2, true);
        s.config.failover = Failover::Strict;
    });
    let tags = [0, 1].map(|slot| submit(&mut stand, 0, IoOp::Write, slot));
    stand.until("both held", SEC, |s| s.server.held.len() == 2);
    stand.change(Change::Remove(leaving(0, 100 * MS))).expect("one is left");
    stand.link_down(0);
    stand.run(2 * SEC);
    assert_eq!(stand.server.ios().count(), 2, "no proof yet");
    assert_eq!(names(&stand), ["path0", "path1"]);
    stand.link_up(0);
    stand.until("it left", 5 * SEC, |s| names(s) == ["path1"]);
    all_well(&mut stand);
    assert_eq!(over(&stand, 0xa1), 2, "{tags:?}");
    assert_eq!(over(&stand, 0xa0), 1, "it carried nothing when it came back");
}

#[test]
fn the_policy_changes_under_load() {
    let mut stand = Stand::open(|s| s.paths = 2);
    let alone = |stand: &mut Stand| {
        for slot in 0..6 {
            submit(stand, 0, IoOp::Read, slot);
            all_well(stand);
        }
        (over(stand, 0xa0), over(stand, 0xa1))
    };
    assert_eq!(alone(&mut stand), (3, 3));
    stand.change(Change::Policy(Policy::MinLatency)).expect("it may");
    let spread = alone(&mut stand);
    assert!(spread == (9, 3) || spread == (3, 9), "the quicker one: {spread:?}");
    assert_eq!(stand.client.control.policy(), Policy::MinLatency);
}

#[test]
fn paths_that_come_and_go_leave_nothing_behind() {
    let mut stand = Stand::open(|s| (s.paths, s.spare) = (1, 1));
    for round in 0..40 {
        for slot in 0..8 {
            submit(&mut stand, slot % 2, IoOp::Write, slot);
        }
        let life = round % 5;
        stand.change(add(1, life)).expect("there is none of that name");
        stand.until("both", SEC, Stand::is_whole);
        for slot in 0..8 {
            submit(&mut stand, slot % 2, IoOp::Read, slot);
        }
        stand.change(remove(1)).expect("one is left");
        stand.until("it left", SEC, |s| names(s) == ["path0"]);
        all_well(&mut stand);
    }
    assert_eq!(stand.client.control.path_names().len(), 2, "its place was used again");
}

#[test]
fn a_session_that_attaches_or_detaches_is_not_changed() {
    let mut stand = Stand::new(|s| s.paths = 2);
    let refused = stand.change(remove(0)).expect_err("not open");
    assert!(refused.contains("still attaching"), "{refused}");
    stand.until("all up", 2 * SEC, Stand::is_whole);
    stand.detach();
    let refused = stand.change(remove(0)).expect_err("detaching");
    assert!(refused.contains("being detached"), "{refused}");
}
