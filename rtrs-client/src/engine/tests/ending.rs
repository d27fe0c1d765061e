//! Tests of detaching: a detach closes the device, then every connection, in bounded time whatever
//! the server does.

use rtrs_core::block::IoOp;
use rtrs_core::fabric::CloseReason;
use rtrs_core::status::IoStatus;
use rtrs_core::wire::{ConnRsp, Imm};

use super::fixture::{Fixture, MS, SEC, client_ip, server_ip};
use super::server::Seen;
use crate::path::state::PathState;

#[test]
fn the_device_is_closed_before_the_connections_end() {
    let mut fixture = Fixture::open(|s| (s.paths, s.config.shards) = (2, 3));
    fixture.read(1, 0, 4096);
    let before = fixture.server.seen.len();
    fixture.detach();
    fixture.until("the end", 100 * MS, |s| s.client.control.view().is_done());
    fixture.run(100 * MS);
    let after = &fixture.server.seen[before..];
    assert!(matches!(&after[0], Seen::Request(r) if r.tail[0] == 5), "CLOSE is first: {after:?}");
    let closed: Vec<_> = after[1..]
        .iter()
        .map(|seen| match seen {
            Seen::Closed { reason, .. } => reason.clone(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(closed, vec![CloseReason::Peer; 8], "two paths of four connections");
    assert!(fixture.server.paths.is_empty());
    assert_eq!(fixture.client.states(), [PathState::Gone; 2]);
    fixture.run(5 * SEC);
    assert_eq!(fixture.server.seen.len(), before + 9, "nothing reconnects");
}

#[test]
fn a_detach_while_a_path_reopens_closes_the_device() {
    for paths in [1, 2] {
        let mut fixture = Fixture::open(|s| s.paths = paths);
        fixture.server.how.hold_control = true;
        let device = fixture.server.device.expect("an open device");
        fixture.server.immediate(0, 0, Imm::Changed { device }.encode());
        fixture.until("the open", SEC, |s| s.server.held.len() == 1);
        let before = fixture.server.seen.len();
        fixture.detach();
        fixture.run(10 * MS);
        assert_eq!(fixture.server.seen.len(), before, "all opens and the close use one permit");
        fixture.server.how.hold_control = false;
        fixture.server.release();
        fixture.until("the end", SEC, |s| s.client.control.view().is_done());
        let closes = fixture.server.seen[before..].iter();
        let closes = closes.filter(|seen| matches!(seen, Seen::Request(r) if r.tail[0] == 5));
        assert_eq!(closes.count(), 1, "over {paths} paths");
    }
    // An answer that never arrives does not delay the detach.
    let mut fixture = Fixture::open(|_| {});
    fixture.server.how.hold_control = true;
    let device = fixture.server.device.expect("an open device");
    fixture.server.immediate(0, 0, Imm::Changed { device }.encode());
    fixture.until("the open", SEC, |s| s.server.held.len() == 1);
    fixture.detach();
    fixture.until("the end", 3 * SEC, |s| s.client.control.view().is_done());
}

#[test]
fn a_server_that_does_not_answer_does_not_delay_a_detach() {
    let mut fixture = Fixture::open(|_| {});
    fixture.server.how.hold_control = true;
    fixture.detach();
    fixture.until("the end", 3 * SEC, |s| s.client.control.view().is_done());
}

#[test]
fn an_unreachable_server_does_not_delay_a_detach() {
    for detect in [false, true] {
        let mut fixture = Fixture::open(|s| {
            s.paths = 2;
            if !detect {
                s.world.link.detect = None;
            }
        });
        fixture.world.silence(server_ip(0), client_ip(0));
        fixture.link_down(1);
        fixture.detach();
        fixture.until("the end", 8 * SEC, |s| s.client.control.view().is_done());
    }
}

#[test]
fn detach_works_in_every_state() {
    // Detach while connecting, after each number of steps.
    for steps in 0..60 {
        let mut fixture = Fixture::new(|s| s.paths = 2);
        fixture.run(MS / 100 * steps);
        fixture.detach();
        fixture.until("the end", 8 * SEC, |s| s.client.control.view().is_done());
        fixture.run(8 * SEC);
        assert!(fixture.server.paths.is_empty(), "after {steps}");
        assert_eq!(fixture.client.states(), [PathState::Gone; 2]);
    }
    // Detach between attempts.
    let mut fixture = Fixture::new(|s| s.how.refuse = Some(ConnRsp::reject(104).encode().to_vec()));
    fixture.until("a wait", SEC, |s| s.client.states() == [PathState::Waiting]);
    fixture.detach();
    fixture.until("the end", MS, |s| s.client.control.view().is_done());
    // Detach without a reachable server.
    let mut fixture = Fixture::new(|_| {});
    fixture.link_down(0);
    fixture.run(10 * MS);
    fixture.detach();
    fixture.until("the end", MS, |s| s.client.control.view().is_done());
}

#[test]
fn io_in_flight_at_a_detach_ends_once() {
    let mut fixture = Fixture::open(|s| {
        s.how.hold = true;
        s.how.queue_depth = 5;
        s.config.io_timeout = 2 * SEC;
    });
    let tags: Vec<_> = (0..5).map(|_| fixture.submit(0, IoOp::Read, 0, 512)).collect();
    fixture.until("requests", SEC, |s| s.server.held.len() == 2);
    fixture.detach();
    fixture.until("the end", 3 * SEC, |s| s.client.control.view().is_done());
    fixture.drain(3 * SEC);
    for tag in &tags[..2] {
        assert_eq!(fixture.client.status(*tag), Some(IoStatus::Aborted));
    }
    for tag in &tags[2..] {
        assert_eq!(fixture.client.status(*tag), Some(IoStatus::TimedOut));
    }
    assert_eq!(fixture.client.done.len(), 5);
}

#[test]
fn a_path_that_dies_while_the_device_is_closing_does_not_stop_the_detach() {
    let mut fixture = Fixture::open(|s| s.paths = 2);
    fixture.server.how.hold_control = true;
    fixture.detach();
    fixture.run(10 * MS);
    fixture.server.end_path(fixture.now(), 0);
    fixture.until("the end", 3 * SEC, |s| s.client.control.view().is_done());
}
