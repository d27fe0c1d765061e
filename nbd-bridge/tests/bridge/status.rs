//! Block status: reporting of holes to clients.

use std::sync::atomic::Ordering::SeqCst;

use rtrs_core::block::Geometry;

use crate::client::{Client, STATUS};
use crate::fixture::{Fixture, config, geometry};

const REQ_ONE: u16 = 8;
const HOLE: u32 = 3;
const EIO: u32 = 5;
const EINVAL: u32 = 22;

fn client(fixture: &Fixture) -> Client {
    Client::knowing_holes(fixture.socket()).expect("the context is offered")
}

#[test]
fn holes_are_reported_within_the_requested_range() {
    let fixture = Fixture::new();
    let mut client = client(&fixture);
    assert_eq!(client.status(0, 0, 64 << 20), Ok(vec![(64 << 20, HOLE)]));
    client.write(4096, &[1; 1024]);
    client.write(8192, &[1; 512]);
    let all = vec![(4096, HOLE), (1024, 0), (3072, HOLE), (512, 0), (57_344 - 512, HOLE)];
    assert_eq!(client.status(0, 0, 64 << 10), Ok(all));
    assert_eq!(client.status(REQ_ONE, 0, 64 << 10), Ok(vec![(4096, HOLE)]));
    assert_eq!(client.status(0, 4096, 512), Ok(vec![(512, 0)]));
    // Partial blocks.
    assert_eq!(client.status(0, 4000, 200), Ok(vec![(96, HOLE), (104, 0)]));
    assert_eq!(client.status(0, 5119, 2), Ok(vec![(1, 0), (1, HOLE)]));
    for (at, len) in [(0, 0), (64 << 20, 512), (0, (64 << 20) + 1)] {
        assert_eq!(client.status(0, at, len), Err(EINVAL));
    }
    client.disconnect();
    fixture.finish();
}

#[test]
fn a_status_list_is_limited_by_its_buffer() {
    let fixture = Fixture::new();
    let mut client = client(&fixture);
    for at in 0..600 {
        client.write(1024 * at, &[1; 512]);
    }
    let part = client.status(0, 512, 8 << 20).unwrap();
    assert_eq!((part.len(), part[0], part[510]), (511, (512, HOLE), (512, HOLE)));
    client.disconnect();
    fixture.finish();
}

#[test]
fn unknown_extents_are_reported_as_data_and_invalid_ones_fail() {
    let fixture = Fixture::new();
    let mut client = client(&fixture);
    fixture.switches.extents.store(1, SeqCst);
    assert_eq!(client.status(0, 100, 1 << 20), Ok(vec![(1 << 20, 0)]));
    fixture.switches.extents.store(2, SeqCst);
    assert_eq!(client.status(0, 0, 1 << 20), Err(EIO));
    fixture.switches.fail_every.store(1, SeqCst);
    assert_eq!(client.status(0, 0, 1 << 20), Err(EIO));
    fixture.switches.fail_every.store(0, SeqCst);
    fixture.switches.extents.store(0, SeqCst);
    assert_eq!(client.status(0, 0, 512), Ok(vec![(512, HOLE)]));
    client.disconnect();
    fixture.finish();
}

#[test]
fn block_status_is_not_offered_without_extents() {
    let fixture = Fixture::with(Geometry { extents: false, ..geometry() }, config());
    assert!(Client::knowing_holes(fixture.socket()).is_none());
    let mut client = fixture.client(true);
    assert_eq!(client.error_of(STATUS, 0, 0, 512), EINVAL);
    client.disconnect();
    fixture.finish();
}

#[test]
fn a_closing_client_leaves_nothing() {
    let fixture = Fixture::new();
    let mut gone = client(&fixture);
    fixture.switches.hold.store(true, SeqCst);
    gone.send(STATUS, 0, 1, 0, 4096);
    fixture.wait("the request", |report| report.inflight == 1);
    drop(gone);
    fixture.wait("the end of the connection", |report| report.connections <= 1);
    fixture.switches.hold.store(false, SeqCst);
    fixture.finish();
}
