//! Tests of paths that fail and reconnect while they carry IO.

use rtrs_core::block::IoOp;
use rtrs_core::fabric::sim::{BindMode, LinkOptions};
use rtrs_core::identity::ExportId;
use rtrs_core::status::IoStatus;
use rtrs_core::wire::{ConnRsp, Extensions, OpenRsp, errno};

use super::fixture::{Fixture, MS, SEC, SECRET, TestIo, client_ip, server_ip};
use super::server::Request;
use crate::engine::{Change, Failover, Leaving, NoPath, SlowIo};
use crate::engine::{DeviceIndex, SessionFailure};
use crate::path::state::PathState;

fn submit(fixture: &mut Fixture, shard: usize, op: IoOp, slot: usize) -> u64 {
    fixture.submit_io(shard, TestIo::new(op, slot as u64 * 8192, 4096).at(slot * 4096))
}

#[test]
fn the_last_path_closes_the_device_and_reopens_it() {
    let mut fixture = Fixture::open(|_| {});
    fixture.link_down(0);
    fixture.until("the end of the path", SEC, |s| {
        !s.client.control.view().is_open(DeviceIndex::FIRST)
    });
    let waiting = [submit(&mut fixture, 0, IoOp::Read, 0), submit(&mut fixture, 1, IoOp::Write, 1)];
    fixture.run(SEC);
    assert_eq!(fixture.client.pending(), 2, "it waits");
    fixture.link_up(0);
    fixture.until("the device", 5 * SEC, |s| s.client.control.view().is_open(DeviceIndex::FIRST));
    fixture.drain(SEC);
    for tag in waiting {
        assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    }
    assert_eq!(fixture.server.opens, 2);
    let ids: Vec<_> = fixture.server.ios().filter_map(|r| r.io).map(|(_, h)| h.device_id).collect();
    assert_eq!(ids, [1, 1], "requests name the new device");
    let connects = fixture.server.connects();
    let last = connects.last().expect("connects").0;
    assert!(last.recon_cnt > 1 && last.first_conn);
    assert!(connects.iter().all(|c| c.0.path_uuid == last.path_uuid));
}

#[test]
fn a_path_that_the_server_ends_reconnects_every_time() {
    let mut fixture = Fixture::open(|s| s.paths = 2);
    for round in 1..=10 {
        for slot in 0..4 {
            submit(&mut fixture, slot % 2, IoOp::Read, slot);
        }
        let first = fixture.server.paths.iter().position(|p| p.uuid.0[0] == 0xa0).expect("path 0");
        fixture.server.end_path(fixture.now(), first);
        fixture.drain(SEC);
        fixture.until("both paths", 5 * SEC, Fixture::is_whole);
        assert_eq!(fixture.client.control.view().paths()[0].reconnects, round);
        assert_eq!(fixture.client.control.view().paths()[1].reconnects, 0);
    }
    assert_eq!(fixture.client.done.len(), 40);
}

/// Ends a path on the server, and waits until it reconnects.
fn reconnect(fixture: &mut Fixture, path: usize) {
    let reconnects = fixture.client.control.view().paths()[path].reconnects;
    let uuid = 0xa0 + path as u8;
    let at = fixture.server.paths.iter().position(|p| p.uuid.0[0] == uuid).expect("the path");
    fixture.server.end_path(fixture.now(), at);
    fixture.until("the path", 5 * SEC, |s| {
        s.client.control.view().paths()[path].reconnects > reconnects
    });
}

#[test]
fn a_reconnected_path_keeps_its_errors() {
    let mut fixture = Fixture::open(|s| s.paths = 2);
    (0..6).for_each(|_| reconnect(&mut fixture, 0));
    let status = fixture.client.control.view().paths().remove(0);
    let (at, why) = status.errors.last.expect("the reason is kept");
    assert_eq!((status.errors.count, status.last_end), (6, None));
    assert!(at < fixture.now() && why.to_string().contains("reset by the peer"), "{why}");
}

#[test]
fn one_lost_connection_ends_its_whole_path() {
    let mut fixture = Fixture::open(|s| s.config.shards = 3);
    // An invalid message on one IO connection breaks only that connection directly.
    fixture.server.how.rkey_rsp = Some(Box::new(|rsp| {
        let mut bytes = rsp.encode().to_vec();
        bytes[0] = if rsp.permit.0 == 0 { bytes[0] } else { 9 };
        bytes
    }));
    let tag = submit(&mut fixture, 2, IoOp::Write, 0);
    fixture.until("the end of the path", SEC, |s| s.client.states()[0] == PathState::Waiting);
    let error = fixture.client.last_error(0);
    assert!(error.starts_with("connection 3: protocol error by the peer"), "{error}");
    fixture.drain(10 * SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Aborted), "not forever");
    assert_eq!(fixture.server.ios().count(), 16);
    fixture.server.how.rkey_rsp = None;
    fixture.until("the path", 5 * SEC, Fixture::is_whole);
    for shard in 0..3 {
        fixture.read(shard, 0, 4096);
    }
}

#[test]
fn an_answer_that_never_comes_ends_a_path_that_cannot_be_probed_and_waiting_io() {
    let mut fixture = Fixture::open(|s| {
        s.how.queue_depth = 5;
        s.how.hold = true;
        (s.config.io_timeout, s.config.slow_io) = (2 * SEC, SlowIo::Fail);
    });
    let start = fixture.now();
    // Shard 0 has two permits: two requests are in flight, three wait.
    let tags: Vec<_> = (0..5).map(|slot| submit(&mut fixture, 0, IoOp::Read, slot)).collect();
    fixture.until("the end of the path", 3 * SEC, |s| s.client.states()[0] == PathState::Waiting);
    assert!(fixture.client.last_error(0).contains("timed out"), "{}", fixture.client.last_error(0));
    fixture.drain(13 * SEC);
    let took = fixture.now().since(start);
    // Twice the request timeout plus the time without a path; requests in flight are failed first.
    assert!(took >= 9 * SEC && took <= 12 * SEC, "{took:?}");
    for tag in &tags {
        assert_eq!(fixture.client.status(*tag), Some(IoStatus::TimedOut));
    }
    assert!(fixture.server.ios().count() >= 6, "the path was ended and retried");
    assert_eq!(fixture.client.done.len(), 5);
    fixture.server.how.hold = false;
    fixture.until("the path", 5 * SEC, Fixture::is_whole);
    fixture.read(0, 0, 4096);
}

#[test]
fn an_io_that_is_sent_late_gets_no_second_full_timeout() {
    for late in 0..5 {
        let mut fixture = Fixture::open(|s| {
            // Both permits of shard 0 are in use, so its connection cannot be probed.
            (s.how.hold, s.how.queue_depth) = (true, 5);
            (s.config.io_timeout, s.config.slow_io) = (4 * SEC, SlowIo::Fail);
        });
        fixture.link_down(0);
        fixture.until("the end of the path", SEC, |s| {
            !s.client.control.view().is_open(DeviceIndex::FIRST)
        });
        let start = fixture.now();
        let tags = [0, 1].map(|slot| submit(&mut fixture, 0, IoOp::Write, slot));
        fixture.run((late + 1) * 700 * MS);
        fixture.link_up(0);
        fixture.drain(20 * SEC);
        assert_eq!(tags.map(|tag| fixture.client.status(tag)), [Some(IoStatus::TimedOut); 2]);
        // The time without a path, twice the request timeout, and a last attempt of one second.
        let took = fixture.now().since(start);
        assert!(took >= 12 * SEC && took <= 14 * SEC + 500 * MS, "{took:?}");
    }
}

#[test]
fn io_waits_for_a_path_for_a_limited_time() {
    let mut fixture = Fixture::open(|s| s.config.no_path = NoPath::QueueFor(3 * SEC));
    fixture.link_down(0);
    fixture.until("the end of the path", SEC, |s| {
        !s.client.control.view().is_open(DeviceIndex::FIRST)
    });
    fixture.run(SEC);
    let start = fixture.now();
    let tag = submit(&mut fixture, 1, IoOp::Read, 0);
    fixture.drain(5 * SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::TimedOut));
    let took = fixture.now().since(start);
    assert_eq!(took, 2 * SEC, "counted from the loss of the last path");
    // Later IO fails immediately until a path reconnects.
    let tag = submit(&mut fixture, 1, IoOp::Read, 0);
    fixture.run(MS);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::TimedOut));
    fixture.link_up(0);
    fixture.until("the path", 5 * SEC, Fixture::is_whole);
    fixture.read(1, 0, 4096);
}

#[test]
fn io_without_a_path_fails_at_once_or_waits_forever() {
    for (no_path, status) in [(NoPath::Fail, Some(IoStatus::TimedOut)), (NoPath::Queue, None)] {
        let mut fixture = Fixture::open(|s| {
            s.how.hold = true;
            s.config.no_path = no_path;
        });
        let held = submit(&mut fixture, 0, IoOp::Write, 1);
        fixture.until("the request", SEC, |s| s.server.held.len() == 1);
        fixture.link_down(0);
        fixture.until("the end of the path", SEC, |s| {
            !s.client.control.view().is_open(DeviceIndex::FIRST)
        });
        let tag = submit(&mut fixture, 1, IoOp::Read, 0);
        fixture.run(if status.is_none() { 600 * SEC } else { 10 * MS });
        assert_eq!(fixture.client.status(tag), status, "{no_path:?}");
        let ended = fixture.client.status(held);
        assert_eq!(ended.is_none(), status.is_none(), "{no_path:?}: {ended:?}");
        fixture.server.how.hold = false;
        fixture.link_up(0);
        fixture.until("the path", 5 * SEC, Fixture::is_whole);
        fixture.drain(SEC);
        if status.is_none() {
            let ends = [held, tag].map(|tag| fixture.client.status(tag));
            assert_eq!(ends, [Some(IoStatus::Ok); 2]);
        }
    }
}

#[test]
fn the_first_io_after_a_long_idle_time_succeeds() {
    let mut fixture = Fixture::open(|s| {
        s.config.io_timeout = 2 * SEC;
        (s.config.heartbeat.interval, s.heartbeat.interval) = (60 * SEC, 60 * SEC);
    });
    fixture.run(30 * SEC);
    let tag = submit(&mut fixture, 0, IoOp::Read, 0);
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
}

#[test]
fn a_refused_reopen_is_retried() {
    let mut fixture = Fixture::open(|_| {});
    fixture.server.how.open_errno = 1;
    fixture.server.end_path(fixture.now(), 0);
    fixture.run(3 * SEC);
    assert!(!fixture.client.control.view().is_open(DeviceIndex::FIRST));
    assert_eq!(fixture.client.control.failure(), None, "it was open before");
    fixture.server.how.open_errno = 0;
    fixture.until("the device", 5 * SEC, Fixture::is_whole);
}

#[test]
fn an_evicted_session_ends_its_io_and_does_not_come_back() {
    let mut fixture = Fixture::open(|s| {
        s.paths = 2;
        s.config.no_path = NoPath::Queue;
        s.how.server_id = Some([1; 16]);
    });
    // Requests are in flight on both paths, and the server stops answering.
    fixture.server.how.hold = true;
    let flying: Vec<_> = (0..8).map(|n| submit(&mut fixture, n % 2, IoOp::Write, n)).collect();
    fixture.run(50 * MS);
    let identity = Some(SECRET.0);
    let ext = Extensions { identity, ..Extensions::default() }.encode();
    let evicted = ConnRsp { ext, ..ConnRsp::reject(116) };
    fixture.server.how.refuse = Some(evicted.encode().to_vec());
    while !fixture.server.paths.is_empty() {
        fixture.server.end_path(fixture.now(), 0);
        fixture.run(MS);
    }
    fixture.drain(2 * SEC);
    let late = submit(&mut fixture, 0, IoOp::Read, 0);
    fixture.drain(10 * MS);
    for tag in flying.into_iter().chain([late]) {
        let status = fixture.client.status(tag);
        assert!(status.is_some_and(|status| !status.is_ok()), "{status:?}");
    }
    assert_eq!(fixture.client.control.failure(), Some(&SessionFailure::Evicted));
    let got: Vec<_> = (0..2).map(|path| fixture.client.last_error(path)).collect();
    assert!(got.iter().any(|why| why.contains("operator evicted this session")), "{got:?}");
    let tried = fixture.server.connects().len();
    fixture.run(60 * SEC);
    assert_eq!(fixture.server.connects().len(), tried, "no path tries again");
    let path = Leaving { path: "path0".into(), within: SEC, force: false };
    let refused = fixture.change(Change::Reconnect(path)).expect_err("no path is retried");
    let refused = refused.to_string();
    assert!(refused.starts_with("evicted by the server's operator"), "{refused}");
    fixture.detach();
    fixture.until("the detach", SEC, |s| s.client.control.view().is_done());
}

/// Checks that IO fails, no path is retried, and the removal is reported as the reason.
fn assert_removed(fixture: &mut Fixture, tags: &[u64]) {
    assert_ended(fixture, tags, &SessionFailure::Removed, "operator removed the export");
}

/// Checks that requests fail and the session does not recover.
fn assert_ended(fixture: &mut Fixture, tags: &[u64], failure: &SessionFailure, text: &str) {
    fixture.drain(2 * SEC);
    let late = submit(fixture, 0, IoOp::Read, 0);
    fixture.drain(10 * MS);
    for tag in tags.iter().chain([&late]) {
        let status = fixture.client.status(*tag);
        assert!(status.is_some_and(|status| !status.is_ok()), "{status:?}");
    }
    assert_eq!(fixture.client.control.failure(), Some(failure));
    let got = fixture.client.last_error(0);
    assert!(got.contains(text), "{got}");
    let tried = fixture.server.connects().len();
    fixture.server.how.open_errno = 0;
    fixture.server.how.io_errno = None;
    fixture.run(60 * SEC);
    assert_eq!(fixture.server.connects().len(), tried, "no path tries again");
    fixture.detach();
    fixture.until("the detach", SEC, |s| s.client.control.view().is_done());
}

#[test]
fn a_removed_export_ends_its_io_permanently() {
    let mut fixture = Fixture::open(|s| {
        s.paths = 2;
        s.config.no_path = NoPath::Queue;
    });
    fixture.server.how.io_errno = Some(Box::new(|_| errno::EIDRM));
    let tags: Vec<_> = (0..8).map(|n| submit(&mut fixture, n % 2, IoOp::Write, n)).collect();
    assert_removed(&mut fixture, &tags);
}

#[test]
fn an_export_that_was_removed_meanwhile_is_not_reopened() {
    let mut fixture = Fixture::open(|s| s.config.no_path = NoPath::Queue);
    fixture.server.how.open_errno = errno::EIDRM;
    fixture.server.end_path(fixture.now(), 0);
    let waiting = submit(&mut fixture, 0, IoOp::Write, 0);
    fixture.run(3 * SEC);
    assert_removed(&mut fixture, &[waiting]);
}

#[test]
fn a_client_does_not_return_after_another_writer() {
    let mut fixture = Fixture::open(|s| {
        // The first open is not refused: nothing is stale yet.
        (s.how.displaced, s.how.server_id) = (true, Some([1; 16]));
        s.config.no_path = NoPath::Queue;
    });
    fixture.server.end_path(fixture.now(), 0);
    let waiting = submit(&mut fixture, 0, IoOp::Write, 0);
    fixture.run(3 * SEC);
    let text = "another client has opened the export for writing";
    assert_ended(&mut fixture, &[waiting], &SessionFailure::Displaced, text);
}

#[test]
fn a_device_of_a_different_size_is_a_different_device() {
    let mut fixture = Fixture::open(|_| {});
    fixture.server.how.open_rsp = Some(Box::new(|rsp| OpenRsp { nsectors: 16, ..rsp }));
    fixture.server.end_path(fixture.now(), 0);
    fixture.until("the error", 3 * SEC, |s| s.client.last_error(0).contains("8192 bytes"));
    let tag = submit(&mut fixture, 0, IoOp::Read, 0);
    fixture.drain(10 * SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::TimedOut), "bounded anyway");
    fixture.server.how.open_rsp = None;
    fixture.until("the old device", 5 * SEC, Fixture::is_whole);
}

#[test]
fn a_device_with_stricter_requirements_is_a_different_device() {
    for (was, lie, words) in [
        (false, None, "now has a write cache"),
        (true, Some(4096), "changed from 512 to 4096 bytes"),
    ] {
        let before = move |rsp| OpenRsp { write_cache: was, ..rsp };
        let mut fixture = Fixture::open(|s| s.how.open_rsp = Some(Box::new(before)));
        fixture.server.how.open_rsp = Some(Box::new(move |rsp| OpenRsp {
            logical_block_size: lie.unwrap_or(rsp.logical_block_size),
            ..rsp
        }));
        fixture.server.end_path(fixture.now(), 0);
        fixture.until("the error", 3 * SEC, |s| s.client.last_error(0).contains(words));
        let tag = submit(&mut fixture, 0, IoOp::Write, 0);
        fixture.drain(10 * SEC);
        assert_eq!(fixture.client.status(tag), Some(IoStatus::TimedOut), "{words}");
        fixture.server.how.open_rsp = Some(Box::new(before));
        fixture.until("the old device", 5 * SEC, Fixture::is_whole);
    }
}

#[test]
fn a_session_survives_a_server_crash() {
    let mut fixture = Fixture::open(|s| s.how.hold = true);
    let tag = submit(&mut fixture, 0, IoOp::Write, 0);
    fixture.until("the request", SEC, |s| s.server.held.len() == 1);
    for path in (0..fixture.server.paths.len()).rev() {
        fixture.server.end_path(fixture.now(), path);
    }
    fixture.server.how.hold = false;
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok), "a restart is a pause");
    fixture.until("the path", 5 * SEC, Fixture::is_whole);
    fixture.read(1, 0, 4096);
}

#[test]
fn a_session_the_server_forgot_is_reopened() {
    let mut fixture = Fixture::open(|s| {
        s.paths = 2;
        (s.config.heartbeat.interval, s.heartbeat.interval) = (2 * SEC, 2 * SEC);
        (s.how.queue_depth, s.how.max_io) = (1000, 4096);
    });
    // The server lost everything, but the client does not notice on the second path. The first path
    // is slow, so that IO is sent at every step of its reconnect.
    let slow = LinkOptions { delay: 3 * MS, ..LinkOptions::default() };
    fixture.world.set_link(client_ip(0), server_ip(0), slow);
    fixture.world.silence(server_ip(1), client_ip(1));
    for path in (0..2).rev() {
        fixture.server.end_path(fixture.now(), path);
    }
    fixture.run(MS);
    for _ in 0..300 {
        fixture.submit(0, IoOp::Read, 0, 512);
        fixture.run(MS);
    }
    assert_eq!(fixture.client.states(), [PathState::Connected; 2], "as far as the client knows");
    assert_eq!(fixture.server.opens, 2);
    let good = fixture.client.done.iter().filter(|done| done.status.is_ok()).count();
    assert!(good > 50, "{good}");
    assert_eq!(fixture.client.done.len(), good, "the server knows every device");
    fixture.drain(10 * SEC);
    fixture.world.unsilence(server_ip(1), client_ip(1));
    fixture.until("both paths", 10 * SEC, Fixture::is_whole);
    fixture.read(1, 0, 4096);
    assert_eq!(fixture.server.opens, 2);
}

#[test]
fn a_grown_device_is_used_in_full() {
    let mut fixture = Fixture::open(|s| {
        s.how.size = 1 << 20;
        // Without IDs, it could be any device.
        (s.how.server_id, s.how.export_id) = (Some([1; 16]), Some(ExportId::of_name("vol")));
    });
    fixture.server.how.size = 2 << 20;
    fixture.server.disk.resize(2 << 20, 0);
    fixture.server.end_path(fixture.now(), 0);
    fixture.run(10 * MS);
    fixture.until("the path", 5 * SEC, Fixture::is_whole);
    fixture.read(0, (1 << 20) - 4096, 4096);
    let tag = fixture.submit(0, IoOp::Read, 1 << 20, 4096);
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
}

/// Number of probes: requests on IO connections that belong to no device.
fn probes(fixture: &Fixture) -> usize {
    fixture.server.requests().filter(|r| r.io.is_none() && r.cid.0 > 0).count()
}

#[test]
fn a_connection_that_dies_on_its_own_is_found_long_before_its_requests_time_out() {
    // One shard's connection answers no requests; heartbeats and the other shard's connection work.
    let mut fixture = Fixture::open(|s| s.paths = 2);
    (fixture.server.how.hold, fixture.server.how.hold_probes) = (true, true);
    let start = fixture.now();
    let tag = submit(&mut fixture, 0, IoOp::Read, 0);
    fixture.until("the end of its path", SEC, |s| {
        s.client.states().iter().any(|state| *state != PathState::Connected)
    });
    let took = fixture.now().since(start);
    assert!(took >= 400 * MS && took <= 900 * MS, "a period and three more: {took:?}");
    assert_eq!(probes(&fixture), 1, "asked once");
    assert!(
        fixture.client.last_error(0).contains("no answer for"),
        "{}",
        fixture.client.last_error(0)
    );
    assert_eq!(fixture.client.states()[1], PathState::Connected);
    fixture.server.held.clear();
    (fixture.server.how.hold, fixture.server.how.hold_probes) = (false, false);
    fixture.until("both paths", 5 * SEC, Fixture::is_whole);
    fixture.drain(SEC);
    assert!(fixture.client.status(tag).is_some());
    fixture.read(0, 0, 4096);
}

#[test]
fn a_slow_disk_is_not_a_dead_connection() {
    for depth in [16, 3] {
        let mut fixture = Fixture::open(|s| s.how.queue_depth = depth);
        fixture.server.how.hold = true;
        let tag = submit(&mut fixture, 0, IoOp::Write, 0);
        fixture.run(3 * SEC);
        // Without a free permit there are no probes.
        assert_eq!(probes(&fixture) > 3, depth > 3, "{} probes", probes(&fixture));
        fixture.server.how.hold = false;
        fixture.server.release();
        fixture.drain(SEC);
        assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
        assert_eq!(fixture.client.control.view().paths()[0].reconnects, 0);
        assert!(fixture.client.control.view().is_open(DeviceIndex::FIRST), "no device was closed");
        let before = probes(&fixture);
        fixture.run(SEC);
        assert_eq!(probes(&fixture), before, "an idle connection is not probed");
    }
}

#[test]
fn a_probes_permit_is_reused_only_when_its_path_is_fenced_off() {
    // A server with fences, and a kernel server, whose only fence is the path's reconnect.
    for fence in [true, false] {
        let mut fixture = Fixture::open(|s| {
            (s.paths, s.how.fence, s.how.queue_depth) = (2, fence, 8);
            s.config.failover = Failover::Strict;
        });
        let how = &mut fixture.server.how;
        (how.hold, how.hold_probes, how.hold_fences) = (true, true, true);
        submit(&mut fixture, 0, IoOp::Read, 0);
        let is_up = |state: &PathState| *state == PathState::Connected;
        fixture.until("the end of its path", SEC, |s| !s.client.states().iter().all(is_up));
        let dead = fixture.client.states().iter().position(|state| !is_up(state)).unwrap();
        fixture.link_down(dead);
        let probe = fixture.server.requests().find(|r| r.io.is_none() && r.cid.0 > 0).unwrap();
        let (path, permit) = (probe.path, probe.permit);
        let others = |fixture: &Fixture| {
            let on_other = |r: &&Request| r.cid.0 == 1 && r.path != path;
            fixture.server.requests().filter(on_other).map(|r| r.permit).collect::<Vec<_>>()
        };
        fixture.server.how.hold = false;
        for at in 0..16 {
            submit(&mut fixture, 0, IoOp::Read, at);
        }
        fixture.run(100 * MS);
        let used = others(&fixture);
        assert!(used.len() >= 16, "the other path carries IO: {used:?}");
        assert!(!used.contains(&permit), "permit {permit} is used before the fence: {used:?}");
        fixture.server.how.hold_fences = false;
        fixture.server.release();
        fixture.link_up(dead);
        fixture.until("both paths", 10 * SEC, Fixture::is_whole);
        for at in 0..16 {
            submit(&mut fixture, 0, IoOp::Read, at);
        }
        fixture.drain(SEC);
        let requests = fixture.server.requests().filter(|r| r.cid.0 == 1 && r.permit == permit);
        assert!(requests.count() > 1, "permit {permit} is withheld forever");
    }
}

#[test]
fn io_is_canceled_only_if_no_part_was_sent() {
    let mut fixture = Fixture::open(|s| s.how.queue_depth = 4);
    fixture.server.how.hold = true;
    let tags: Vec<u64> = (0..4).map(|at| submit(&mut fixture, 0, IoOp::Write, at)).collect();
    fixture.run(10 * MS);
    let sent = fixture.server.held.len();
    assert!((1..4).contains(&sent), "{sent} sent");
    fixture.client.cancel(0, &|_| true);
    fixture.run(10 * MS);
    for (at, tag) in tags.iter().enumerate() {
        let wanted = (at >= sent).then_some(IoStatus::Aborted);
        assert_eq!(fixture.client.status(*tag), wanted, "IO {at}, {sent} sent");
    }
    // Requests in flight are resent when their path dies.
    fixture.server.held.clear();
    fixture.server.end_path(fixture.now(), 0);
    fixture.server.how.hold = false;
    fixture.until("the path", 5 * SEC, |s| s.client.pending() == 0);
    assert!(tags[..sent].iter().all(|tag| fixture.client.status(*tag) == Some(IoStatus::Ok)));
}

#[test]
fn a_read_whose_window_does_not_close_is_resent_and_never_succeeds() {
    let mut fixture = Fixture::open(|s| {
        (s.paths, s.how.fence, s.world.bind) = (2, true, BindMode::InUse);
    });
    let write = submit(&mut fixture, 0, IoOp::Write, 0);
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(write), Some(IoStatus::Ok), "a write has no window");
    let read = submit(&mut fixture, 0, IoOp::Read, 1);
    fixture.until("the end of a path", SEC, |s| {
        s.client.states().iter().any(|state| *state != PathState::Connected)
    });
    assert_eq!(fixture.client.status(read), None);
    fixture.drain(60 * SEC);
    assert_eq!(fixture.client.status(read), Some(IoStatus::Aborted), "not forever");
    let reads = fixture.server.ios().count() - 1;
    assert!(reads > 1, "it was resent");
}
