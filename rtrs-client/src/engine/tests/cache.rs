//! Tests of a server that lost its cache with acknowledged writes: a flush reports the loss once.

use rtrs_core::block::{IoFlags, IoOp};
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

use super::fixture::{Fixture, MS, SEC, TestIo};
use crate::engine::{DeviceIndex, NoPath, SlowIo};
use crate::path::state::PathState;

fn run(fixture: &mut Fixture, shard: usize, op: IoOp, fua: bool) -> Option<IoStatus> {
    let flags = IoFlags { fua, ..IoFlags::default() };
    let tag = fixture.submit_io(shard, TestIo::new(op, 0, 4096).flags(flags));
    fixture.drain(SEC);
    fixture.client.status(tag)
}

/// Ends all paths; the server then returns with this cache epoch.
fn restart(fixture: &mut Fixture, cache_id: u64) {
    fixture.server.how.cache_id = cache_id;
    for path in 0..fixture.server.paths.len() {
        fixture.server.end_path(fixture.now(), path);
    }
    fixture.until("the paths' end", SEC, |s| {
        s.client.states().iter().all(|state| *state != PathState::Connected)
    });
    fixture.until("the paths", 5 * SEC, Fixture::is_whole);
}

fn fixture(cache_id: u64) -> Fixture {
    Fixture::open(|s| {
        s.paths = 2;
        (s.how.fence, s.how.cache_id) = (true, cache_id);
    })
}

#[test]
fn a_flush_fails_once_after_a_lost_cache() {
    for op in [IoOp::Write, IoOp::Discard, IoOp::WriteZeroes] {
        let mut fixture = fixture(7);
        assert_eq!(run(&mut fixture, 1, op, false), Some(IoStatus::Ok));
        restart(&mut fixture, 8);
        assert_eq!(run(&mut fixture, 0, IoOp::Read, false), Some(IoStatus::Ok), "reads continue");
        assert_eq!(run(&mut fixture, 1, IoOp::Write, true), Some(IoStatus::Ok), "so do FUA writes");
        assert_eq!(run(&mut fixture, 0, IoOp::Flush, false), Some(IoStatus::Io), "{op:?}");
        for shard in [0, 1] {
            assert_eq!(run(&mut fixture, shard, IoOp::Flush, false), Some(IoStatus::Ok), "once");
        }
        // Later writes count towards the next loss.
        assert_eq!(run(&mut fixture, 0, op, false), Some(IoStatus::Ok));
        restart(&mut fixture, 9);
        assert_eq!(run(&mut fixture, 1, IoOp::Flush, false), Some(IoStatus::Io));
    }
}

#[test]
fn flushes_succeed_if_nothing_was_lost() {
    let mut fixture = fixture(7);
    assert_eq!(run(&mut fixture, 0, IoOp::Write, false), Some(IoStatus::Ok));
    restart(&mut fixture, 7);
    assert_eq!(run(&mut fixture, 0, IoOp::Flush, false), Some(IoStatus::Ok), "the same epoch");
    assert_eq!(run(&mut fixture, 1, IoOp::Write, true), Some(IoStatus::Ok));
    restart(&mut fixture, 8);
    assert_eq!(run(&mut fixture, 1, IoOp::Flush, false), Some(IoStatus::Ok), "all was durable");
    // The server, which lost nothing, held the flush.
    fixture.server.how.hold = true;
    let flush = fixture.submit(0, IoOp::Flush, 0, 4096);
    fixture.until("the flush", SEC, |s| s.server.held.len() == 1);
    fixture.server.how.hold = false;
    restart(&mut fixture, 9);
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(flush), Some(IoStatus::Ok));
}

#[test]
fn a_flush_in_flight_during_a_loss_fails() {
    let mut fixture = fixture(7);
    assert_eq!(run(&mut fixture, 0, IoOp::Write, false), Some(IoStatus::Ok));
    fixture.server.how.hold = true;
    let flush = TestIo::new(IoOp::Flush, 0, 4096);
    let flushes = [0, 1].map(|shard| fixture.submit_io(shard, flush.at(shard * 4096)));
    fixture.until("the flushes", SEC, |s| s.server.held.len() == 2);
    fixture.server.how.hold = false;
    restart(&mut fixture, 8);
    fixture.drain(SEC);
    for flush in flushes {
        assert_eq!(fixture.client.status(flush), Some(IoStatus::Io));
    }
    assert_eq!(run(&mut fixture, 0, IoOp::Flush, false), Some(IoStatus::Ok));
}

/// A flush that fails during the write does not report the loss to the user that wrote.
#[test]
fn a_loss_between_the_parts_of_a_write_is_reported_after_its_end() {
    let mut fixture = Fixture::open(|s| {
        s.paths = 2;
        (s.how.fence, s.how.cache_id, s.how.max_io) = (true, 7, 4096);
    });
    fixture.server.how.hold = true;
    let write = fixture.submit(0, IoOp::Write, 0, 8192);
    fixture.until("both parts", SEC, |s| s.server.held.len() == 2);
    let first = fixture.server.held.remove(0);
    fixture.server.serve(&first);
    fixture.run(10 * MS);
    restart(&mut fixture, 8);
    fixture.until("the other part again", SEC, |s| s.server.held.len() == 1);
    let flush = fixture.submit(1, IoOp::Flush, 0, 0);
    fixture.until("the flush", SEC, |s| s.server.held.len() == 2);
    let held = fixture.server.held.remove(1);
    fixture.server.serve(&held);
    fixture.until("its end", SEC, |s| s.client.status(flush).is_some());
    let status = |fixture: &Fixture, tag| fixture.client.status(tag);
    assert_eq!((status(&fixture, flush), status(&fixture, write)), (Some(IoStatus::Io), None));
    fixture.server.how.hold = false;
    fixture.server.release();
    fixture.drain(SEC);
    assert_eq!(status(&fixture, write), Some(IoStatus::Ok));
    assert_eq!(run(&mut fixture, 1, IoOp::Flush, false), Some(IoStatus::Io));
    assert_eq!(run(&mut fixture, 1, IoOp::Flush, false), Some(IoStatus::Ok), "once");
}

#[test]
fn a_server_without_an_epoch_is_trusted() {
    let mut fixture = fixture(0);
    for _ in 0..3 {
        assert_eq!(run(&mut fixture, 0, IoOp::Write, false), Some(IoStatus::Ok));
        restart(&mut fixture, 0);
        assert_eq!(run(&mut fixture, 0, IoOp::Flush, false), Some(IoStatus::Ok));
    }
}

#[test]
fn a_successor_reports_the_losses_of_its_predecessor() {
    let inheriting = |cache_id, inherited| {
        Fixture::open(|s| {
            s.paths = 2;
            (s.how.fence, s.how.cache_id) = (true, cache_id);
            s.config.volumes[0].inherited_epoch = Some(inherited);
        })
    };
    let flush = |fixture: &mut Fixture| run(fixture, 1, IoOp::Flush, false);
    let kept = |fixture: &Fixture| fixture.client.control.view().saved_epoch(DeviceIndex::FIRST);
    // The loss happens between the two processes.
    let mut over = inheriting(8, 7);
    assert_eq!(run(&mut over, 0, IoOp::Write, true), Some(IoStatus::Ok));
    over.until("longer than it takes to save an epoch", 9 * SEC, |s| {
        s.now() >= Instant::ZERO + 5 * SEC
    });
    assert_eq!(kept(&over), None, "the loss is not reported yet");
    assert_eq!((flush(&mut over), flush(&mut over)), (Some(IoStatus::Io), Some(IoStatus::Ok)));
    assert_eq!(kept(&over), None, "the answer may not have left");
    over.until("the epoch to be kept", 3 * SEC, |s| kept(s) == Some(8));
    // A resent flush of the earlier process looks like a flush that begins now.
    let mut over = Fixture::open(|s| {
        (s.how.fence, s.how.cache_id) = (true, 8);
        (s.config.volumes[0].inherited_epoch, s.config.resent_for) = (Some(7), 4 * SEC);
    });
    assert_eq!((flush(&mut over), flush(&mut over)), (Some(IoStatus::Io), Some(IoStatus::Io)));
    over.until("the end of resent_for", 9 * SEC, |s| {
        assert_eq!(kept(s), None);
        s.now() >= Instant::ZERO + 5 * SEC
    });
    assert_eq!(flush(&mut over), Some(IoStatus::Ok));
    over.until("the epoch to be kept", 3 * SEC, |s| kept(s) == Some(8));
    // The loss happens after the takeover.
    for inherited in [7, 0] {
        let mut over = inheriting(7, inherited);
        restart(&mut over, 8);
        assert_eq!((flush(&mut over), flush(&mut over)), (Some(IoStatus::Io), Some(IoStatus::Ok)));
    }
    // The writes were flushed before the loss.
    let mut over = inheriting(7, 7);
    assert_eq!(flush(&mut over), Some(IoStatus::Ok));
    restart(&mut over, 8);
    assert_eq!(flush(&mut over), Some(IoStatus::Ok));
    // There was no earlier process.
    let mut first = fixture(7);
    assert_eq!(kept(&first), Some(7));
    restart(&mut first, 8);
    assert_eq!(flush(&mut first), Some(IoStatus::Ok));
}

fn losses(fixture: &Fixture) -> Option<u64> {
    let report = fixture.client.device_report(fixture.now(), 0, DeviceIndex::FIRST);
    report.map(|report| report.cache_losses)
}

#[test]
fn a_flush_that_the_server_answers_with_any_error_is_a_loss() {
    for code in [1, 5, 12, 13, 16, 19, 22, 25, 28, 30, 38, 95, 103, 104, 107, 110, 133] {
        let mut fixture = fixture(7);
        assert_eq!(run(&mut fixture, 0, IoOp::Write, false), Some(IoStatus::Ok));
        fixture.server.how.io_errno = Some(Box::new(move |_| code));
        assert!(run(&mut fixture, 0, IoOp::Flush, false).is_some_and(|status| !status.is_ok()));
        assert_eq!(losses(&fixture), Some(1), "errno {code}");
    }
}

#[test]
fn a_flush_without_an_answer_is_not_a_loss() {
    let mut fixture = Fixture::open(|s| {
        (s.how.fence, s.how.cache_id) = (true, 7);
        s.config.no_path = NoPath::QueueFor(SEC);
    });
    assert_eq!(run(&mut fixture, 0, IoOp::Write, false), Some(IoStatus::Ok));
    fixture.server.how.hold = true;
    let flush = fixture.submit(0, IoOp::Flush, 0, 4096);
    fixture.until("the flush", SEC, |s| s.server.held.len() == 1);
    fixture.link_down(0);
    fixture.drain(20 * SEC);
    assert!(fixture.client.status(flush).is_some_and(|status| !status.is_ok()));
    assert_eq!(losses(&fixture), Some(0));
}

/// Submits two overlapping flushes; the second succeeds and is answered first.
fn overlapping_flushes(fixture: &mut Fixture) -> [u64; 2] {
    assert_eq!(run(fixture, 0, IoOp::Write, false), Some(IoStatus::Ok));
    fixture.server.how.hold = true;
    let flushes = [0, 1].map(|shard| {
        let flush = fixture.submit(shard, IoOp::Flush, 0, 0);
        fixture.until("the flush", SEC, |s| s.server.held.len() == shard + 1);
        flush
    });
    let second = fixture.server.held.remove(1);
    fixture.server.serve(&second);
    fixture.run(100 * MS);
    assert_eq!(fixture.client.status(flushes[1]), None, "the first may report a loss");
    flushes
}

#[test]
fn a_good_flush_waits_for_the_loss_that_an_earlier_one_reports() {
    for (errno, status) in [(5, IoStatus::Io), (0, IoStatus::Ok)] {
        let mut fixture = fixture(7);
        let flushes = overlapping_flushes(&mut fixture);
        let first = fixture.server.held.remove(0);
        fixture.server.answer(&first, errno);
        fixture.drain(SEC);
        assert_eq!(flushes.map(|flush| fixture.client.status(flush)), [Some(status); 2]);
        fixture.server.how.hold = false;
        assert_eq!(run(&mut fixture, 1, IoOp::Flush, false), Some(IoStatus::Ok), "once");
    }
}

#[test]
fn a_good_flush_fails_if_an_overlapping_one_ends_unanswered() {
    let mut fixture = Fixture::open(|s| {
        (s.paths, s.how.fence, s.how.cache_id) = (2, true, 7);
        s.config.no_path = NoPath::QueueFor(SEC);
    });
    let flushes = overlapping_flushes(&mut fixture);
    fixture.link_down(0);
    fixture.link_down(1);
    fixture.drain(20 * SEC);
    assert_eq!(fixture.client.status(flushes[1]), Some(IoStatus::TimedOut));
}

#[test]
fn a_good_flush_waits_for_a_slow_one_no_longer_than_for_the_disk() {
    let mut fixture = Fixture::open(|s| {
        (s.paths, s.how.fence, s.how.cache_id) = (2, true, 7);
        (s.config.io_timeout, s.config.slow_io) = (SEC, SlowIo::Fail);
    });
    let flushes = overlapping_flushes(&mut fixture);
    fixture.until("its end", 5 * SEC, |s| s.client.status(flushes[1]).is_some());
    assert_eq!(fixture.client.status(flushes[1]), Some(IoStatus::TimedOut));
    fixture.server.release();
    fixture.drain(SEC);
}

#[test]
fn an_epoch_change_during_a_held_flush_is_a_loss() {
    let mut fixture = fixture(7);
    let flushes = overlapping_flushes(&mut fixture);
    fixture.server.how.hold = false;
    restart(&mut fixture, 8);
    fixture.drain(SEC);
    assert_eq!(flushes.map(|flush| fixture.client.status(flush)), [Some(IoStatus::Io); 2]);
}
