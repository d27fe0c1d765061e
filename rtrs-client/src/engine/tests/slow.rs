//! Tests of a disk that does not answer, behind a path that works: the path stays up, and the
//! request is reported.

use rtrs_core::block::IoOp;
use rtrs_core::ids::PathId;
use rtrs_core::status::IoStatus;
use rtrs_core::wire::{ConnRsp, Extensions};

use super::fixture::{Fixture, MS, SEC, SECRET, Setup};
use super::server::Seen;
use crate::engine::io::slow_requests::SlowReport;
use crate::engine::{Change, Failover, Leaving, NoPath, SessionFailure, SlowIo};
use crate::path::state::PathState;

/// Opens two paths to a server on which requests hang from now on.
fn hanging(change: impl FnOnce(&mut Setup)) -> Fixture {
    let mut fixture = Fixture::open(|s| {
        (s.paths, s.how.fence) = (2, true);
        s.config.io_timeout = 2 * SEC;
        change(s);
    });
    fixture.server.how.hold = true;
    fixture
}

/// Whether all paths have stayed up since the session began.
fn is_undisturbed(fixture: &Fixture) -> bool {
    let status = fixture.client.control.view().paths();
    status
        .iter()
        .all(|path| path.state == PathState::Connected && (path.ends, path.reconnects) == (0, 0))
}

/// Reads successfully while other requests hang.
fn read(fixture: &mut Fixture, shard: usize) {
    let tag = fixture.submit(shard, IoOp::Read, 8192, 4096);
    fixture.until("a read", 100 * MS, |s| s.client.status(tag) == Some(IoStatus::Ok));
}

fn report(fixture: &Fixture) -> SlowReport {
    fixture.client.slow_requests(fixture.now())
}

fn probes(fixture: &Fixture) -> usize {
    let requests = fixture.server.seen.iter().filter(|seen| matches!(seen, Seen::Request(_)));
    requests.count() - fixture.server.ios().count()
}

#[test]
fn a_request_that_hangs_keeps_its_path_and_other_requests_continue() {
    // With the default slow-io, for each way of handling IO without a path.
    for no_path in [NoPath::Queue, NoPath::QueueFor(5 * SEC), NoPath::Fail] {
        let mut fixture = hanging(|s| s.config.no_path = no_path);
        let tag = fixture.submit(0, IoOp::Read, 0, 4096);
        fixture.until("the request", SEC, |s| s.server.held.len() == 1);
        fixture.server.how.hold = false;
        fixture.run(1900 * MS);
        assert_eq!(report(&fixture), SlowReport::default(), "not yet");
        let start = fixture.now();
        for _ in 0..60 {
            fixture.run(SEC);
            read(&mut fixture, 0);
            read(&mut fixture, 1);
        }
        assert!(is_undisturbed(&fixture), "{no_path}: {}", fixture.client.last_error(0));
        let slow = report(&fixture);
        assert_eq!((slow.now, slow.total), (1, 1));
        let age = slow.oldest.expect("there is one");
        assert!(age > fixture.now().since(start) && age < 65 * SEC, "{age:?}");
        assert_eq!((fixture.client.status(tag), fixture.client.given_up.len()), (None, 0));
        fixture.server.release();
        fixture.drain(MS * 10);
        assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok), "however late");
        assert_eq!(report(&fixture), SlowReport { now: 0, total: 1, oldest: None });
        assert!(is_undisturbed(&fixture));
        let slow: u64 = fixture.client.stats(0).paths.iter().map(|path| path.slow_requests).sum();
        assert_eq!(slow, 1);
    }
}

#[test]
fn requests_that_hold_every_permit_and_hang_keep_their_paths() {
    // A probe has its own permit. IO that waits for permits waits just as long.
    let mut fixture = hanging(|_| {});
    let tags: Vec<_> = (0..40).map(|at| fixture.submit(at % 2, IoOp::Read, 0, 512)).collect();
    let connects = fixture.server.connects().len();
    fixture.run(120 * SEC);
    assert!(is_undisturbed(&fixture), "{}", fixture.client.last_error(0));
    assert_eq!(fixture.server.connects().len(), connects, "no path reconnects");
    let held = fixture.server.held.len();
    assert!(held >= 12 && report(&fixture).now == held, "{held}: {:?}", report(&fixture));
    // Each connection is probed at most once per sweep.
    let asked = probes(&fixture);
    assert!((100..=4 * 4 * 125).contains(&asked), "{asked} probes");
    fixture.server.how.hold = false;
    fixture.server.release();
    fixture.drain(SEC);
    assert!(tags.iter().all(|tag| fixture.client.status(*tag) == Some(IoStatus::Ok)));
    assert_eq!(report(&fixture).now, 0);
}

#[test]
fn a_connection_that_answers_nothing_ends_its_path_though_heartbeats_are_answered() {
    let mut fixture = hanging(|_| {});
    fixture.server.how.hold_probes = true;
    let tag = fixture.submit(0, IoOp::Read, 0, 512);
    fixture.until("the request", SEC, |s| s.server.held.len() == 1);
    fixture.until("the path's end", 3 * SEC, |s| {
        s.client.states().iter().any(|state| *state != PathState::Connected)
    });
    let lost = fixture.client.states().iter().position(|state| *state != PathState::Connected);
    let error = fixture.client.last_error(lost.expect("ended"));
    assert!(error.contains("no answer for"), "{error}");
    assert_eq!(report(&fixture).now, 0);
    (fixture.server.how.hold, fixture.server.how.hold_probes) = (false, false);
    fixture.drain(5 * SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
}

#[test]
fn a_slow_request_goes_to_another_path_when_its_own_dies() {
    // The age of the requests does not matter.
    let mut fixture = hanging(|s| s.config.no_path = NoPath::QueueFor(5 * SEC));
    let tags = [0, 0].map(|shard| fixture.submit(shard, IoOp::Write, 0, 512));
    fixture.run(90 * SEC);
    assert_eq!((report(&fixture).now, is_undisturbed(&fixture)), (2, true));
    fixture.server.how.hold = false;
    fixture.link_down(0);
    fixture.until("the first", 2 * SEC, |s| tags.iter().any(|t| s.client.status(*t).is_some()));
    assert_eq!(report(&fixture).now, 1);
    fixture.server.release();
    fixture.drain(SEC);
    assert!(tags.iter().all(|tag| fixture.client.status(*tag) == Some(IoStatus::Ok)));
}

#[test]
fn a_given_up_io_is_reported_once_and_keeps_its_permit_until_answered() {
    let mut fixture = hanging(|s| s.config.slow_io = SlowIo::Fail);
    let tags = [IoOp::Read, IoOp::Write].map(|op| fixture.submit(0, op, 0, 512));
    fixture.until("the requests", SEC, |s| s.server.held.len() == 2);
    fixture.server.how.hold = false;
    fixture.run(1900 * MS);
    assert!(fixture.client.given_up.is_empty());
    fixture.run(SEC);
    assert_eq!(fixture.client.given_up, tags);
    fixture.run(120 * SEC);
    assert_eq!(fixture.client.given_up, tags, "once");
    assert!(is_undisturbed(&fixture), "{}", fixture.client.last_error(0));
    assert_eq!(fixture.client.permits_held(0), 2);
    assert!(tags.iter().all(|tag| fixture.client.status(*tag).is_none()), "the memory is in use");
    read(&mut fixture, 0);
    fixture.server.release();
    fixture.drain(10 * MS);
    assert_eq!((fixture.client.permits_held(0), report(&fixture).now), (0, 0));
    assert!(tags.iter().all(|tag| fixture.client.status(*tag) == Some(IoStatus::TimedOut)));
    assert_eq!(fixture.client.given_up.len(), 2);
}

#[test]
fn an_io_that_is_given_up_ends_with_the_fence_of_its_path_and_is_not_resent() {
    let mut fixture = hanging(|s| s.config.slow_io = SlowIo::Fail);
    fixture.server.how.hold_fences = true;
    let tag = fixture.submit(0, IoOp::Write, 0, 512);
    fixture.run(3 * SEC);
    assert_eq!(fixture.client.given_up, [tag]);
    let path = fixture.client.path_inflight(0).iter().position(|count| *count == 1);
    let path = PathId(path.expect("in flight") as u16);
    fixture.link_down(path.index());
    fixture
        .until("the path's end", SEC, |s| s.client.states()[path.index()] != PathState::Connected);
    fixture.run(5 * SEC);
    assert_eq!((fixture.client.status(tag), fixture.client.permits_held(0)), (None, 1));
    fixture.server.how.hold_fences = false;
    fixture.server.release();
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::TimedOut));
    assert_eq!((fixture.server.ios().count(), fixture.client.permits_held(0)), (1, 0));
}

#[test]
fn io_waiting_for_permits_of_given_up_io_fails_too() {
    let mut fixture = hanging(|s| {
        (s.config.slow_io, s.config.no_path) = (SlowIo::Fail, NoPath::Queue);
    });
    let tags: Vec<_> = (0..20).map(|_| fixture.submit(0, IoOp::Read, 0, 512)).collect();
    fixture.run(5 * SEC);
    let sent = fixture.server.held.len();
    assert_eq!(fixture.client.given_up, tags[..sent]);
    assert!(tags[sent..].iter().all(|t| fixture.client.status(*t) == Some(IoStatus::TimedOut)));
    assert!(is_undisturbed(&fixture) && sent < 20);
}

/// Returns the path of this shard's only request.
fn path_in_use(fixture: &Fixture, shard: usize) -> usize {
    fixture.client.path_inflight(shard).iter().position(|count| *count == 1).expect("in flight")
}

/// Hangs a write on one of two paths; its user learns only what `slow_io` reports.
fn slow_write(slow_io: SlowIo, change: impl FnOnce(&mut Setup)) -> (Fixture, u64) {
    let mut fixture = hanging(|s| {
        s.config.slow_io = slow_io;
        change(s);
    });
    let tag = fixture.submit(0, IoOp::Write, 0, 512);
    fixture.run(30 * SEC);
    assert_eq!((report(&fixture).now, is_undisturbed(&fixture)), (1, true));
    let reported = fixture.client.given_up.contains(&tag);
    assert_eq!((reported, fixture.client.status(tag)), (slow_io == SlowIo::Fail, None));
    (fixture, tag)
}

#[test]
fn a_slow_request_is_resent_only_when_its_path_is_fenced() {
    let (mut fixture, tag) = slow_write(SlowIo::Wait, |s| s.how.hold_fences = true);
    fixture.server.how.hold = false;
    fixture.link_down(path_in_use(&fixture, 0));
    // Shorter than the time within which a path must answer a fence.
    fixture.run(8 * SEC);
    assert_eq!((fixture.server.ios().count(), fixture.client.status(tag)), (1, None));
    fixture.server.how.hold_fences = false;
    fixture.server.release();
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    assert_eq!(fixture.server.ios().count(), 2);
}

#[test]
fn the_time_without_a_path_begins_when_the_path_of_a_slow_request_ends() {
    // Without any path and, if the server does not support fences, without the path that carried
    // the request.
    for strict in [false, true] {
        for (away, status) in [(3 * SEC, IoStatus::Ok), (30 * SEC, IoStatus::TimedOut)] {
            let (mut fixture, tag) = slow_write(SlowIo::Wait, |s| {
                s.paths = 1 + usize::from(strict);
                if strict {
                    (s.config.failover, s.how.fence) = (Failover::Strict, false);
                }
            });
            fixture.server.how.hold = false;
            let path = path_in_use(&fixture, 0);
            fixture.link_down(path);
            fixture.run(away);
            let early = fixture.client.status(tag);
            assert_eq!(early, (status != IoStatus::Ok).then_some(status), "{strict} {away:?}");
            fixture.link_up(path);
            fixture.drain(10 * SEC);
            assert_eq!(fixture.client.status(tag), Some(status), "{strict} {away:?}");
        }
    }
}

#[test]
fn a_slow_request_fails_with_the_last_path_under_no_path_fail() {
    for slow_io in [SlowIo::Wait, SlowIo::Fail] {
        let (mut fixture, tag) = slow_write(slow_io, |s| s.config.no_path = NoPath::Fail);
        (0..2).for_each(|path| fixture.link_down(path));
        fixture.drain(2 * SEC);
        assert!(fixture.client.status(tag).is_some_and(|status| !status.is_ok()));
        assert_eq!((report(&fixture).now, fixture.client.permits_held(0)), (0, 0));
        fixture.server.how.hold = false;
        (0..2).for_each(|path| fixture.link_up(path));
        fixture.until("the paths", 10 * SEC, Fixture::is_whole);
        let writes = fixture.server.ios().count();
        read(&mut fixture, 0);
        assert_eq!(fixture.server.ios().count(), writes + 1, "it is not resent");
    }
}

#[test]
fn a_slow_request_ends_with_its_session() {
    for slow_io in [SlowIo::Wait, SlowIo::Fail] {
        // The session is detached, whether or not the server can close the device.
        for hold_control in [false, true] {
            let (mut fixture, tag) = slow_write(slow_io, |_| {});
            fixture.server.how.hold_control = hold_control;
            let waits = fixture.submit(0, IoOp::Read, 0, 512);
            fixture.detach();
            fixture.until("the detach", 4 * SEC, |s| s.client.control.view().is_done());
            fixture.drain(SEC);
            for tag in [tag, waits] {
                assert!(fixture.client.status(tag).is_some_and(|status| !status.is_ok()));
            }
            assert_eq!((report(&fixture).now, fixture.client.permits_held(0)), (0, 0));
        }
        // The session is evicted.
        let (mut fixture, tag) = slow_write(slow_io, |s| {
            (s.config.no_path, s.how.server_id) = (NoPath::Queue, Some([1; 16]));
        });
        let ext = Extensions { identity: Some(SECRET.0), ..Extensions::default() }.encode();
        let refusal = ConnRsp { ext, ..ConnRsp::reject(116) };
        fixture.server.how.refuse = Some(refusal.encode().to_vec());
        while !fixture.server.paths.is_empty() {
            fixture.server.end_path(fixture.now(), 0);
            fixture.run(MS);
        }
        fixture.drain(2 * SEC);
        assert!(fixture.client.status(tag).is_some_and(|status| !status.is_ok()));
        fixture.until("the eviction", SEC, |s| {
            s.client.control.failure() == Some(&SessionFailure::Evicted)
        });
        assert_eq!((report(&fixture).now, fixture.client.permits_held(0)), (0, 0));
    }
}

#[test]
fn a_path_with_a_slow_request_is_removed_within_its_time() {
    for slow_io in [SlowIo::Wait, SlowIo::Fail] {
        let (mut fixture, tag) = slow_write(slow_io, |_| {});
        fixture.server.how.hold = false;
        let path = format!("path{}", path_in_use(&fixture, 0));
        let leaving = Leaving { path, within: 300 * MS, force: false };
        fixture.change(Change::Remove(leaving)).expect("the other path is left");
        fixture.drain(SEC);
        let (status, sent) = match slow_io {
            SlowIo::Wait => (IoStatus::Ok, 2),
            SlowIo::Fail => (IoStatus::TimedOut, 1),
        };
        assert_eq!(fixture.client.status(tag), Some(status));
        assert_eq!(fixture.server.ios().count(), sent);
        assert_eq!(report(&fixture).now, 0);
    }
}

#[test]
fn a_short_io_timeout_still_distinguishes_slow_from_dead() {
    for slow_io in [SlowIo::Wait, SlowIo::Fail] {
        for dead in [false, true] {
            let mut fixture = hanging(|s| {
                (s.config.slow_io, s.config.io_timeout) = (slow_io, 500 * MS);
                s.config.heartbeat.interval = 2 * SEC;
                s.heartbeat.interval = 2 * SEC;
            });
            fixture.server.how.hold_probes = dead;
            let tag = fixture.submit(0, IoOp::Write, 0, 512);
            fixture.until("the request", SEC, |s| s.server.held.len() == 1);
            fixture.run(10 * SEC);
            let lost = fixture.client.control.view().paths().iter().any(|path| path.ends > 0);
            assert_eq!(lost, dead, "{}", fixture.client.last_error(0));
            if !dead {
                assert_eq!((report(&fixture).now, report(&fixture).total), (1, 1));
            }
            let reported = usize::from(slow_io == SlowIo::Fail && !dead);
            assert_eq!(fixture.client.given_up.len(), reported);
            (fixture.server.how.hold, fixture.server.how.hold_probes) = (false, false);
            fixture.server.release();
            fixture.drain(10 * SEC);
            assert!(fixture.client.status(tag).is_some());
        }
    }
}

#[test]
fn no_part_of_a_given_up_io_is_resent() {
    // Two parts, one on each path.
    let mut fixture = hanging(|s| {
        (s.how.max_io, s.config.slow_io, s.config.no_path) = (4096, SlowIo::Fail, NoPath::Queue);
    });
    let tag = fixture.submit(0, IoOp::Write, 0, 8192);
    fixture.until("both parts", SEC, |s| s.server.held.len() == 2);
    assert_eq!(fixture.client.path_inflight(0), [1, 1]);
    // One path dies, and the other, being removed with a long time limit, takes no new requests.
    let leaving = Leaving { path: "path1".into(), within: 60 * SEC, force: false };
    fixture.change(Change::Remove(leaving)).expect("another path is left");
    fixture.link_down(0);
    fixture.run(5 * SEC);
    assert_eq!(
        (fixture.client.given_up.as_slice(), fixture.client.status(tag)),
        (&[tag][..], None)
    );
    fixture.server.how.hold = false;
    fixture.link_up(0);
    fixture.until("the path", 5 * SEC, |s| s.client.states()[0] == PathState::Connected);
    fixture.run(SEC);
    fixture.server.release();
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::TimedOut));
    assert_eq!(fixture.server.ios().count(), 2, "neither part is resent");
}
