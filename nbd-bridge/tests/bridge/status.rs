//! Tests of block status: reporting holes to clients.

use std::sync::atomic::Ordering::SeqCst;

use rtrs_core::block::Geometry;

use crate::client::{Client, FLUSH, READ, STATUS, TRIM, WRITE, ZEROES, pattern};
use crate::fixture::{Fixture, config, geometry};

const REQ_ONE: u16 = 8;
const HOLE: u32 = 3;
const EIO: u32 = 5;
const EINVAL: u32 = 22;

fn client(fixture: &Fixture) -> Client {
    Client::knowing_holes(fixture.socket()).expect("the context is offered")
}

#[test]
fn holes_are_reported_from_the_requested_offset() {
    let fixture = Fixture::new();
    let mut client = client(&fixture);
    assert_eq!(client.status(0, 0, 64 << 20), Ok(vec![(64 << 20, HOLE)]));
    client.write(4096, &[1; 1024]);
    client.write(8192, &[1; 512]);
    let all = vec![(4096, HOLE), (1024, 0), (3072, HOLE), (512, 0), (57_344 - 512, HOLE)];
    assert_eq!(client.status(0, 0, 64 << 10), Ok(all));
    assert_eq!(fixture.switches.extents_room.load(SeqCst), 4096);
    assert_eq!(client.status(REQ_ONE, 0, 64 << 10), Ok(vec![(4096, HOLE)]));
    assert_eq!(fixture.switches.extents_room.load(SeqCst), 16, "only one is searched for");
    assert_eq!(client.status(0, 4096, 512), Ok(vec![(512, 0)]));
    // Partial blocks: the last extent goes to the end of its block.
    assert_eq!(client.status(0, 4000, 200), Ok(vec![(96, HOLE), (512, 0)]));
    assert_eq!(client.status(0, 5119, 2), Ok(vec![(1, 0), (512, HOLE)]));
    assert_eq!(client.status(REQ_ONE, 4100, 200), Ok(vec![(200, 0)]));
    for (at, len) in [(0, 0), (64 << 20, 512), (0, (64 << 20) + 1)] {
        assert_eq!(client.status(0, at, len), Err(EINVAL));
    }
    client.disconnect();
    fixture.finish();
}

/// The device's list of extents goes beyond the requested range.
#[test]
fn one_answer_covers_as_much_as_the_protocol_can_express() {
    const TIB: u64 = 1 << 40;
    let fixture = Fixture::with(Geometry { size: 15 * TIB, ..geometry() }, config());
    let most = (1u64 << 32) - (1 << 16);
    let mut narrow = client(&fixture);
    // As many extents as cover the range; the last one ends beyond it.
    let len = u32::MAX - 4095;
    let part = u32::try_from(most).unwrap();
    fixture.switches.extents.store(3, SeqCst);
    assert_eq!(narrow.status(0, 0, len), Ok(vec![(part, HOLE), (part, HOLE)]));
    assert_eq!(narrow.status(0, 0, 1 << 30), Ok(vec![(part, HOLE)]));
    assert_eq!(narrow.status(REQ_ONE, 0, 1 << 30), Ok(vec![(1 << 30, HOLE)]));
    assert_eq!(narrow.status(0, 15 * TIB - 8192, 4096), Ok(vec![(8192, HOLE)]), "not beyond it");
    narrow.disconnect();
    let mut wide = Client::extended(fixture.socket());
    let mut extents = |flags, at, len| {
        let (kind, data) = wide.ask(STATUS, flags, at, len, &[]);
        assert_eq!((kind, &data[..8]), (6, &[0, 0, 0, 1, 0, 0, 0, 1][..]));
        let number = |at: usize| u64::from_be_bytes(data[at..at + 8].try_into().unwrap());
        (number(8), number(16))
    };
    let before = fixture.switches.submitted.load(SeqCst);
    assert_eq!(extents(REQ_ONE, 0, 15 * TIB), (15 * TIB, HOLE.into()));
    assert_eq!(extents(0, TIB, 4096), (14 * TIB, HOLE.into()));
    assert_eq!(extents(REQ_ONE, 100, 9 * TIB), (9 * TIB, HOLE.into()));
    assert_eq!(fixture.switches.submitted.load(SeqCst) - before, 3, "one IO each");
    drop(wide);
    fixture.finish();
}

#[test]
fn extended_headers_carry_every_command() {
    let fixture = Fixture::with(Geometry { size: 6 << 30, ..geometry() }, config());
    let mut client = Client::extended(fixture.socket());
    let none = (0, Vec::new());
    let data = pattern(1, 300 << 10);
    assert_eq!(client.ask(WRITE, 32, 4096, data.len() as u64, &data), none);
    let (kind, read) = client.ask(READ, 0, 4096, data.len() as u64, &[]);
    assert!(kind == 1 && read[..8] == 4096u64.to_be_bytes() && read[8..] == data);
    assert_eq!(client.ask(FLUSH, 0, 0, 0, &[]), none);
    // A payload that a command does not take is dropped.
    let (kind, error) = client.ask(TRIM, 32, 0, 4096, &data[..4096]);
    assert_eq!((kind, &error[..4]), (0x8001, &EINVAL.to_be_bytes()[..]));
    // Longer than 32 bits can express.
    assert_eq!(client.ask(ZEROES, 0, 0, 6 << 30, &[]), none);
    assert_eq!(fixture.switches.zeroed.load(SeqCst), 6 << 30);
    assert_eq!(client.ask(TRIM, 0, 0, 6 << 30, &[]), none);
    let (_, read) = client.ask(READ, 0, 4096, 4096, &[]);
    assert!(read[8..].iter().all(|byte| *byte == 0));
    drop(client);
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
    assert_eq!(client.status(0, 100, 1 << 20), Ok(vec![((64 << 20) - 100, 0)]));
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
