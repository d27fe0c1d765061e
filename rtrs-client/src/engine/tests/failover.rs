//! Tests of failover: requests in flight on a dying path are resent on another path, once, in
//! order, after the fence.

use std::cell::RefCell;

use rtrs_core::block::IoOp;
use rtrs_core::fabric::sim::BindMode;
use rtrs_core::identity::ServerProcess;
use rtrs_core::status::IoStatus;
use rtrs_core::wire::{ConnReq, ConnRsp, Extensions, Fence};

use super::fixture::{Fixture, MS, SEC, TestIo};
use super::server::Seen;
use crate::engine::{Change, DeviceIndex, Failover, Leaving, NoPath, PathEnd};
use crate::path::state::PathState;

fn submit(fixture: &mut Fixture, shard: usize, op: IoOp, slot: usize) -> u64 {
    fixture.submit_io(shard, TestIo::new(op, slot as u64 * 8192, 4096).at(slot * 4096))
}

fn sectors(fixture: &Fixture) -> Vec<u64> {
    fixture.server.ios().map(|r| r.io.expect("an IO").1.sector).collect()
}

fn lose(fixture: &mut Fixture, path: usize) {
    fixture.link_down(path);
    fixture.until("the path's end", 2 * SEC, |s| s.client.states()[path] != PathState::Connected);
}

#[test]
fn a_link_that_goes_down_ends_its_path_at_once() {
    let mut fixture = Fixture::open(|s| {
        s.paths = 2;
        (s.how.hold, s.how.fence) = (true, true);
    });
    for slot in 0..4 {
        submit(&mut fixture, slot % 2, IoOp::Write, slot);
    }
    fixture.until("all held", SEC, |s| s.server.held.len() == 4);
    fixture.link_down(0);
    fixture.link_down_reported(&[0]);
    assert_ne!(fixture.client.states()[0], PathState::Connected);
    assert_eq!(fixture.client.states()[1], PathState::Connected);
    let status = fixture.client.control.view().paths();
    assert_eq!(status[0].last_end, Some(PathEnd::LinkDown("link sim0 is down".into())));
    fixture.server.how.hold = false;
    fixture.server.release();
    fixture.drain(SEC);
    assert!(fixture.client.done.iter().all(|done| done.status.is_ok()));
    assert_eq!(fixture.server.fences.len(), 1, "behind the fence");
    fixture.link_up(0);
    fixture.until("both paths", 5 * SEC, Fixture::is_whole);
}

#[test]
fn a_link_that_goes_down_leaves_the_last_paths_to_their_heartbeats() {
    for count in [1, 2] {
        let mut fixture = Fixture::open(|s| s.paths = count);
        let all: Vec<_> = (0..count).collect();
        fixture.link_down_reported(&all);
        assert!(fixture.is_whole(), "{count}: {:?}", fixture.client.states());
        fixture.run(SEC);
        let status = fixture.client.control.view().paths();
        assert!(status.iter().all(|path| path.reconnects == 0), "{count}: {status:?}");
    }
}

#[test]
fn a_leaving_path_does_not_replace_one_whose_link_fails() {
    let mut fixture = Fixture::open(|s| {
        s.paths = 2;
        s.how.hold = true;
    });
    for slot in 0..4 {
        submit(&mut fixture, slot % 2, IoOp::Read, slot);
    }
    fixture.until("all held", SEC, |s| s.server.held.len() == 4);
    let leaving = Leaving { path: "path1".into(), within: SEC, force: false };
    fixture.change(Change::Remove(leaving)).expect("it may leave");
    fixture.link_down_reported(&[0]);
    assert_eq!(fixture.client.states()[0], PathState::Connected);
    fixture.server.how.hold = false;
    fixture.server.release();
    fixture.drain(SEC);
    assert!(fixture.client.done.iter().all(|done| done.status.is_ok()));
}

#[test]
fn requests_of_a_dead_path_go_to_the_other_and_end_once() {
    for (bind, acknowledged) in [(BindMode::Done, false), (BindMode::Pending, true)] {
        for fence in [false, true] {
            let mut fixture = Fixture::open(|s| {
                s.paths = 2;
                (s.how.hold, s.how.fence) = (true, fence);
                (s.world.bind, s.world.acknowledged) = (bind, acknowledged);
            });
            for slot in 0..6 {
                let op = if slot % 3 == 0 { IoOp::Write } else { IoOp::Read };
                submit(&mut fixture, slot % 2, op, slot);
            }
            fixture.until("all held", SEC, |s| s.server.held.len() == 6);
            assert_eq!(fixture.spread(), [4, 2], "each shard goes 0, 1, 0");
            lose(&mut fixture, 0);
            fixture.run(200 * MS);
            assert!(fixture.client.done.is_empty(), "nothing ends: {:?}", fixture.client.done);
            assert_eq!(fixture.spread(), [4, 6], "the four moved");
            let waits = [0, 1].map(|shard| fixture.client.stats(shard).paths[0].fence_waits);
            assert_eq!(waits, [2, 2], "each waited for the fence, or for nothing");
            assert_eq!(fixture.client.states()[1], PathState::Connected);
            assert!(fixture.client.control.view().is_open(DeviceIndex::FIRST), "one path is left");

            fixture.server.how.hold = false;
            fixture.server.release();
            fixture.drain(SEC);
            assert_eq!(fixture.client.done.len(), 6);
            assert!(fixture.client.done.iter().all(|done| done.status.is_ok()));
            let times = [0, 1].map(|shard| {
                let report = fixture.client.device_report(fixture.now(), shard, DeviceIndex::FIRST);
                report.expect("its device").stats.times
            });
            assert_eq!(times.map(|ops| ops[0].count() + ops[1].count()), [3, 3]);
            assert!(times[0][0].nanos >= 200_000_000, "reads took the time of the failover");
            let path = fixture.server.connects()[0].0.path_uuid;
            let fences: &[Fence] = if fence {
                &[Fence { path, recon_cnt: 1, process: ServerProcess::NONE }]
            } else {
                &[]
            };
            assert_eq!(fixture.server.fences, fences);
            fixture.link_up(0);
            fixture.until("both paths", 5 * SEC, Fixture::is_whole);
            assert_eq!(fixture.server.opens, 1, "the device stayed open");
            assert_eq!(fixture.client.control.view().paths()[0].reconnects, 1);
        }
    }
}

/// Encoder of accept messages.
type Accept = Box<dyn Fn(&ConnReq, ConnRsp) -> Vec<u8>>;

/// Connects each path to its own server process, in the order in which the paths first connect.
fn processes() -> Accept {
    let known = RefCell::new(Vec::new());
    Box::new(move |req, mut rsp| {
        let mut known = known.borrow_mut();
        let at = known.iter().position(|path| *path == req.path_uuid).unwrap_or_else(|| {
            known.push(req.path_uuid);
            known.len() - 1
        });
        let process = Some(ServerProcess::new(at as u64 + 1));
        rsp.ext = Extensions { process, ..Extensions::decode(&rsp.ext) }.encode();
        rsp.encode().to_vec()
    })
}

#[test]
fn a_process_that_cannot_answer_for_another_leaves_the_path_unfenced() {
    for refuses in [false, true] {
        let mut fixture = Fixture::open(|s| {
            s.paths = 2;
            (s.how.hold, s.how.fence, s.how.refuse_fences) = (true, true, refuses);
            s.how.con_rsp = Some(processes());
        });
        for slot in 0..6 {
            submit(&mut fixture, slot % 2, IoOp::Write, slot);
        }
        fixture.until("all held", SEC, |s| s.server.held.len() == 6);
        assert_eq!(fixture.spread(), [4, 2], "each shard goes 0, 1, 0");
        lose(&mut fixture, 0);
        fixture.run(20 * SEC);
        let path = fixture.server.connects()[0].0.path_uuid;
        let fence = Fence { path, recon_cnt: 1, process: ServerProcess::new(1) };
        assert_eq!(fixture.server.fences, [fence], "asked once, with the process of the path");
        assert_eq!(fixture.client.states()[1], PathState::Connected);
        assert_eq!(fixture.spread(), [4, if refuses { 2 } else { 6 }]);
        fixture.server.how.hold = false;
        fixture.server.release();
        // Reconnecting a path fences off its earlier connections.
        fixture.link_up(0);
        fixture.until("both paths", 5 * SEC, Fixture::is_whole);
        fixture.drain(SEC);
        assert_eq!(fixture.client.done.len(), 6);
        assert!(fixture.client.done.iter().all(|done| done.status.is_ok()));
    }
}

#[test]
fn nothing_is_resent_before_the_fence_is_answered() {
    let mut fixture = Fixture::open(|s| {
        s.paths = 3;
        (s.how.hold, s.how.fence, s.how.queue_depth) = (true, true, 32);
    });
    for slot in 0..9 {
        submit(&mut fixture, 0, IoOp::Write, slot);
    }
    fixture.until("all held", SEC, |s| s.server.held.len() == 9);
    fixture.server.how.hold_control = true;
    lose(&mut fixture, 0);
    fixture.until("the fence", SEC, |s| s.server.held.len() == 10);
    fixture.run(500 * MS);
    assert_eq!(sectors(&fixture).len(), 9, "nothing before the answer");
    // The path that carries the fence request dies as well: the third path carries the request, for
    // both dead paths.
    fixture.server.how.hold_control = false;
    lose(&mut fixture, 1);
    fixture.until("everything on the third", SEC, |s| s.spread()[2] == 9);
    let mut fenced: Vec<u8> = fixture.server.fences.iter().map(|f| f.path.0[0]).collect();
    fenced.sort_unstable();
    assert_eq!(fenced, [0xa0, 0xa1]);
    // Requests are resent in the order in which they were first sent: 0, 3, 6 on path 0 and 1, 4, 7
    // on path 1.
    let again = sectors(&fixture).split_off(9);
    let order: Vec<u64> = again.iter().map(|sector| sector / 16).collect();
    for path in [[0, 3, 6], [1, 4, 7]] {
        let of_path: Vec<u64> = order.iter().copied().filter(|o| path.contains(o)).collect();
        assert_eq!(of_path, path, "{order:?}");
    }
    fixture.server.how.hold = false;
    fixture.server.release();
    fixture.drain(SEC);
    assert!(fixture.client.done.iter().all(|done| done.status.is_ok()));
}

#[test]
fn a_fence_does_not_wait_for_an_open_over_another_path() {
    let mut fixture = Fixture::open(|s| {
        s.paths = 3;
        (s.how.hold, s.how.fence) = (true, true);
    });
    lose(&mut fixture, 2);
    let tag = submit(&mut fixture, 0, IoOp::Write, 0);
    fixture.until("the write", SEC, |s| s.server.held.len() == 1);
    fixture.server.how.hold_control = true;
    fixture.link_up(2);
    fixture.until("path 2 to ask", 5 * SEC, |s| s.server.held.len() == 2);
    fixture.server.how.hold_control = false;
    fixture.server.how.hold = false;
    lose(&mut fixture, 0);
    fixture.until("the write over path 1", SEC, |s| s.client.status(tag).is_some());
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    assert_eq!(fixture.client.states()[2], PathState::Opening, "it still waits for its answer");
    fixture.server.release();
    fixture.link_up(0);
    fixture.until("all paths", 5 * SEC, Fixture::is_whole);
}

#[test]
fn a_fence_that_is_never_answered_ends_its_path() {
    let mut fixture = Fixture::open(|s| {
        s.paths = 2;
        (s.how.hold, s.how.fence) = (true, true);
        s.config.no_path = NoPath::Queue;
        s.config.io_timeout = 60 * SEC;
    });
    let tags = [0, 1].map(|slot| submit(&mut fixture, 0, IoOp::Write, slot));
    fixture.until("both held", SEC, |s| s.server.held.len() == 2);
    fixture.server.how.hold_control = true;
    lose(&mut fixture, 0);
    fixture.until("the end of the other", 11 * SEC, |s| {
        s.client.last_error(1).contains("did not answer a fence")
    });
    (fixture.server.how.hold, fixture.server.how.hold_control) = (false, false);
    fixture.drain(5 * SEC);
    for tag in tags {
        assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    }
}

#[test]
fn io_waits_a_limited_time_for_unanswered_fences() {
    let mut fixture = Fixture::open(|s| {
        s.paths = 3;
        (s.how.hold, s.how.fence, s.how.hold_fences) = (true, true, true);
        s.config.no_path = NoPath::QueueFor(30 * SEC);
    });
    let tag = submit(&mut fixture, 0, IoOp::Write, 0);
    fixture.until("the write", SEC, |s| s.server.held.len() == 1);
    lose(&mut fixture, 0);
    // The other paths carry the request in turn and reconnect, so that one path is connected at any
    // time.
    fixture.until("both asked in vain", 25 * SEC, |s| {
        s.client.control.view().paths()[1..].iter().all(|path| path.ends > 0)
    });
    assert_eq!(fixture.client.status(tag), None);
    fixture.drain(35 * SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::TimedOut));
    (fixture.server.how.hold, fixture.server.how.hold_fences) = (false, false);
    fixture.link_up(0);
    fixture.until("all paths", 15 * SEC, Fixture::is_whole);
    fixture.read(0, 0, 4096);
}

#[test]
fn strict_failover_fails_no_io_that_still_awaits_a_fence() {
    let mut fixture = Fixture::open(|s| {
        s.paths = 2;
        (s.how.hold, s.how.fence, s.how.hold_fences) = (true, true, true);
        (s.config.failover, s.config.no_path) = (Failover::Strict, NoPath::Fail);
        s.config.io_timeout = SEC;
    });
    let tag = submit(&mut fixture, 0, IoOp::Write, 0);
    fixture.until("the write", SEC, |s| s.server.held.len() == 1);
    lose(&mut fixture, 0);
    fixture.server.how.hold = false;
    // Later writes use the other path: if this write failed now, it could take effect after them.
    fixture.run(5 * SEC);
    let later = submit(&mut fixture, 0, IoOp::Write, 0);
    fixture.run(SEC);
    assert_eq!(fixture.client.status(later), Some(IoStatus::Ok));
    assert_eq!(fixture.client.status(tag), None);
    fixture.server.how.hold_fences = false;
    fixture.server.release();
    fixture.drain(SEC);
    assert!(fixture.client.status(tag).is_some());
}

#[test]
fn a_path_that_comes_back_carries_nothing_before_the_others_are_fenced_off() {
    let mut fixture = Fixture::open(|s| {
        s.paths = 2;
        (s.how.hold, s.how.fence) = (true, true);
    });
    let tags = [0, 1].map(|slot| submit(&mut fixture, 0, IoOp::Write, slot));
    fixture.until("both held", SEC, |s| s.server.held.len() == 2);
    for path in [0, 1] {
        lose(&mut fixture, path);
    }
    fixture
        .until("the device's end", SEC, |s| !s.client.control.view().is_open(DeviceIndex::FIRST));
    fixture.server.how.hold = false;
    fixture.server.seen.clear();
    fixture.link_up(1);
    fixture.drain(5 * SEC);
    for tag in tags {
        assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    }
    let kinds: Vec<bool> = fixture
        .server
        .seen
        .iter()
        .filter_map(|seen| match seen {
            Seen::Request(request) if request.io.is_some() => Some(true),
            Seen::Request(request) if request.tail[..2] == [1, 0x80] => Some(false),
            _ => None,
        })
        .collect();
    assert_eq!(kinds, [false, true, true], "FENCE for path 0 first");
    assert_eq!(fixture.server.fences.len(), 1, "path 1 was fenced off by its return");
}

#[test]
fn strict_failover_waits_for_the_path_if_there_is_no_fence() {
    let mut fixture = Fixture::open(|s| {
        s.paths = 2;
        s.how.hold = true;
        s.config.failover = Failover::Strict;
        s.config.no_path = NoPath::Queue;
    });
    let tags = [0, 1].map(|slot| submit(&mut fixture, 0, IoOp::Write, slot));
    fixture.until("both held", SEC, |s| s.server.held.len() == 2);
    lose(&mut fixture, 0);
    fixture.run(3 * SEC);
    assert_eq!(fixture.spread(), [1, 1], "it waits");
    fixture.server.how.hold = false;
    fixture.server.release();
    let later = submit(&mut fixture, 0, IoOp::Read, 2);
    fixture.run(100 * MS);
    assert_eq!(fixture.client.status(later), Some(IoStatus::Ok), "other IO continues");
    fixture.link_up(0);
    fixture.drain(5 * SEC);
    for tag in tags {
        assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    }
}

#[test]
fn io_in_flight_on_the_only_path_continues_when_it_returns() {
    for fence in [false, true] {
        let mut fixture = Fixture::open(|s| (s.how.hold, s.how.fence) = (true, fence));
        let tags = [0, 1].map(|shard| submit(&mut fixture, shard, IoOp::Write, shard));
        fixture.until("both held", SEC, |s| s.server.held.len() == 2);
        lose(&mut fixture, 0);
        fixture.run(SEC);
        assert!(fixture.client.done.is_empty());
        fixture.server.how.hold = false;
        fixture.link_up(0);
        fixture.drain(5 * SEC);
        for tag in tags {
            assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
        }
        let permits: Vec<_> = fixture.server.ios().map(|r| r.permit).collect();
        assert_eq!(permits.len(), 4);
        for permit in &permits {
            assert_eq!(permits.iter().filter(|p| *p == permit).count(), 2, "the same permit");
        }
        assert!(fixture.server.fences.is_empty(), "its return is its fence");
    }
}
