//! Detaching: the device first, then every connection, within its bound whatever the server does.

use rtrs_core::block::IoOp;
use rtrs_core::fabric::CloseReason;
use rtrs_core::status::IoStatus;
use rtrs_core::wire::ConnRsp;

use super::server::Seen;
use super::stand::{MS, SEC, Stand, client_ip, server_ip};
use crate::path::state::PathState;

#[test]
fn the_device_is_closed_before_the_connections_end() {
    let mut stand = Stand::open(|s| (s.paths, s.config.cores) = (2, 3));
    stand.read(1, 0, 4096);
    let before = stand.server.seen.len();
    stand.detach();
    stand.until("the end", 100 * MS, |s| s.client.control.is_done());
    stand.run(100 * MS);
    let after = &stand.server.seen[before..];
    assert!(matches!(&after[0], Seen::Request(r) if r.tail[0] == 5), "CLOSE is first: {after:?}");
    let closed: Vec<_> = after[1..]
        .iter()
        .map(|seen| match seen {
            Seen::Closed { reason, .. } => reason.clone(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(closed, vec![CloseReason::Peer; 8], "two paths of four, in order");
    assert!(stand.server.paths.is_empty());
    assert_eq!(stand.client.states(), [PathState::Gone; 2]);
    stand.run(5 * SEC);
    assert_eq!(stand.server.seen.len(), before + 9, "and nothing comes back");
}

#[test]
fn a_server_that_does_not_answer_holds_nothing_up() {
    let mut stand = Stand::open(|_| {});
    stand.server.how.hold_control = true;
    stand.detach();
    stand.until("the end", 3 * SEC, |s| s.client.control.is_done());
}

#[test]
fn a_server_that_is_gone_holds_nothing_up() {
    for detect in [false, true] {
        let mut stand = Stand::open(|s| {
            s.paths = 2;
            if !detect {
                s.world.link.detect = None;
            }
        });
        stand.world.silence(server_ip(0), client_ip(0));
        stand.link_down(1);
        stand.detach();
        stand.until("the end", 8 * SEC, |s| s.client.control.is_done());
    }
}

#[test]
fn detach_works_in_every_state() {
    // While connecting: stop after each count of events.
    for steps in 0..60 {
        let mut stand = Stand::new(|s| s.paths = 2);
        stand.run(MS / 100 * steps);
        stand.detach();
        stand.until("the end", 8 * SEC, |s| s.client.control.is_done());
        stand.run(8 * SEC);
        assert!(stand.server.paths.is_empty(), "after {steps}");
        assert_eq!(stand.client.states(), [PathState::Gone; 2]);
    }
    // Between attempts.
    let mut stand = Stand::new(|s| s.how.refuse = Some(ConnRsp::reject(104).encode().to_vec()));
    stand.until("a wait", SEC, |s| s.client.states() == [PathState::Waiting]);
    stand.detach();
    stand.until("the end", MS, |s| s.client.control.is_done());
    // With nobody there.
    let mut stand = Stand::new(|_| {});
    stand.link_down(0);
    stand.run(10 * MS);
    stand.detach();
    stand.until("the end", MS, |s| s.client.control.is_done());
}

#[test]
fn io_in_flight_at_a_detach_ends_once() {
    let mut stand = Stand::open(|s| {
        s.how.hold = true;
        s.how.queue_depth = 5;
        s.config.io_timeout = 2 * SEC;
    });
    let tags: Vec<_> = (0..5).map(|_| stand.submit(0, IoOp::Read, 0, 512)).collect();
    stand.until("requests", SEC, |s| s.server.held.len() == 2);
    stand.detach();
    stand.until("the end", 3 * SEC, |s| s.client.control.is_done());
    stand.drain(3 * SEC);
    for tag in &tags[..2] {
        assert_eq!(stand.client.status(*tag), Some(IoStatus::Aborted));
    }
    for tag in &tags[2..] {
        assert_eq!(stand.client.status(*tag), Some(IoStatus::TimedOut));
    }
    assert_eq!(stand.client.done.len(), 5);
}

#[test]
fn a_path_that_dies_while_the_device_is_closing_does_not_stop_the_end() {
    let mut stand = Stand::open(|s| s.paths = 2);
    stand.server.how.hold_control = true;
    stand.detach();
    stand.run(10 * MS);
    stand.server.end_path(stand.now(), 0);
    stand.until("the end", 3 * SEC, |s| s.client.control.is_done());
}
