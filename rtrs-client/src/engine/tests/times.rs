//! Tests of the breakdown of an IO's time, part of which the server reports.

use rtrs_core::block::IoOp;
use rtrs_core::status::IoStatus;
use rtrs_core::wire::{Extensions, RkeyRsp, TimedRkeyRsp};

use super::fixture::{Fixture, MS, SEC, Setup};
use super::server::How;
use crate::parts::Part::{self, Backend, ClientQueue, Network, RoundTrip, ServerQueue};
use crate::path::state::PathState;

/// Makes the server agree to report times.
fn agree(how: &mut How) {
    how.con_rsp = Some(Box::new(|_, mut rsp| {
        rsp.ext = Extensions { times: true, ..Extensions::decode(&rsp.ext) }.encode();
        rsp.encode().to_vec()
    }));
}

/// Makes the server report these times.
fn set_times(how: &mut How, queue_us: u32, backend_us: u32) {
    how.rkey_rsp = Some(Box::new(move |RkeyRsp { permit, rkey }| {
        TimedRkeyRsp { permit, rkey, queue_us, backend_us }.encode().to_vec()
    }));
}

fn timed(setup: &mut Setup) {
    setup.how.hold = true;
    agree(&mut setup.how);
    set_times(&mut setup.how, 3000, 10_000);
}

/// Performs a read whose answer the server holds for 20 ms.
fn read_held(fixture: &mut Fixture) {
    let tag = fixture.submit(0, IoOp::Read, 0, 4096);
    fixture.until("the request", SEC, |s| s.server.held.len() == 1);
    fixture.run(20 * MS);
    fixture.server.release();
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
}

/// Returns the maximum of each part on a path, in milliseconds.
fn parts_ms(fixture: &Fixture, path: usize) -> Vec<(Part, u64)> {
    let stats = fixture.client.stats(0);
    stats.path_parts[path].iter().map(|(part, times)| (part, times.max_us() / 1000)).collect()
}

#[test]
fn a_round_trip_is_divided_by_the_reported_times() {
    let mut fixture = Fixture::open(timed);
    read_held(&mut fixture);
    let expected = [(ClientQueue, 0), (Network, 7), (ServerQueue, 3), (Backend, 10)];
    assert_eq!(parts_ms(&fixture, 0), expected);
    assert_eq!(fixture.client.stats(0).parts().iter().count(), 4);
}

#[test]
fn huge_times_count_as_the_whole_round_trip() {
    let mut fixture = Fixture::open(timed);
    set_times(&mut fixture.server.how, u32::MAX, u32::MAX);
    read_held(&mut fixture);
    let expected = [(ClientQueue, 0), (Network, 0), (ServerQueue, 0), (Backend, 20)];
    assert_eq!(parts_ms(&fixture, 0), expected);
}

#[test]
fn without_fresh_keys_the_round_trip_is_one_part() {
    // Times are invalid from a server that did not agree to report them.
    for lies in [false, true] {
        let mut fixture = Fixture::open(|s| {
            (s.how.hold, s.how.new_rkey) = (true, false);
            if lies {
                agree(&mut s.how);
            }
        });
        read_held(&mut fixture);
        assert_eq!(parts_ms(&fixture, 0), [(ClientQueue, 0), (RoundTrip, 20)], "{lies}");
    }
}

#[test]
fn waiting_for_a_permit_is_queueing_at_the_client() {
    let mut fixture = Fixture::open(|s| {
        timed(s);
        s.how.queue_depth = 4;
    });
    let tags: Vec<u64> = (0..4).map(|_| fixture.submit(0, IoOp::Write, 0, 4096)).collect();
    fixture.until("the first requests", SEC, |s| !s.server.held.is_empty());
    for _ in tags {
        fixture.run(20 * MS);
        fixture.server.release();
    }
    fixture.drain(SEC);
    let parts = parts_ms(&fixture, 0);
    assert!(parts[0].0 == ClientQueue && parts[0].1 >= 20, "{parts:?}");
    assert!(parts[1].0 == Network && parts[1].1 < 10, "{parts:?}");
}

/// All time before the last attempt counts as queueing, on the path of that attempt.
#[test]
fn a_resent_request_counts_once() {
    let mut fixture = Fixture::open(|s| {
        timed(s);
        s.paths = 2;
    });
    let tag = fixture.submit(0, IoOp::Write, 0, 4096);
    fixture.until("the request", SEC, |s| s.server.held.len() == 1);
    let first = fixture.server.held.pop().expect("held");
    fixture.run(20 * MS);
    let index = fixture.server.paths.iter().position(|path| path.uuid == first.path);
    let now = fixture.now();
    fixture.server.end_path(now, index.expect("its path"));
    fixture.until("the copy", 10 * SEC, |s| s.server.held.len() == 1);
    fixture.run(20 * MS);
    fixture.server.release();
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    let (mut counted, mut queued) = (0, 0);
    for path in 0..2 {
        let parts = parts_ms(&fixture, path);
        counted += usize::from(!parts.is_empty());
        queued += parts.first().map_or(0, |(_, ms)| *ms);
    }
    assert!(counted == 1 && queued >= 20, "{counted} {queued}");
}

#[test]
fn an_answer_in_the_wrong_format_ends_the_path() {
    for (agreed, word) in [(true, "RKEY_RSP with times"), (false, "")] {
        let mut fixture = Fixture::open(|s| {
            if agreed {
                agree(&mut s.how);
                set_times(&mut s.how, 0, 0);
            }
        });
        match agreed {
            true => fixture.server.how.rkey_rsp = None,
            false => set_times(&mut fixture.server.how, 0, 0),
        }
        let tag = fixture.submit(0, IoOp::Write, 0, 4096);
        fixture.until("the end", SEC, |s| s.client.states()[0] == PathState::Waiting);
        assert_eq!(fixture.client.status(tag), None);
        let error = fixture.client.last_error(0);
        assert!(error.starts_with("connection 1: ") && error.contains(word), "{error}");
        match agreed {
            true => set_times(&mut fixture.server.how, 0, 0),
            false => fixture.server.how.rkey_rsp = None,
        }
        fixture.drain(5 * SEC);
        assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    }
}
