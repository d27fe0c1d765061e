//! Several devices on one session, and where their geometry is read.

use std::sync::Arc;

use rtrs_core::block::{BlockDevice, Completion, Geometry, Io, IoFlags, IoOp};
use rtrs_core::status::IoStatus;

use super::fixture::{Fixture, MS, SEC};
use crate::engine::SessionDevice;
use crate::engine::device_table::{DeviceIndex, OpenDevice};
use crate::engine::message::ShardMessage;

const SECOND: DeviceIndex = DeviceIndex(1);
/// What the server calls the second device.
const SECOND_ID: u32 = 7;

/// All shards learn that the second device is open.
fn open_second(fixture: &mut Fixture) -> SessionDevice {
    let geometry = Geometry::plain(1 << 20);
    let info = OpenDevice {
        device_id: SECOND_ID,
        geometry,
        writes_zeroes: true,
        cache_id: 0,
        volatile: false,
        export_id: None,
    };
    fixture.client.tell_shards(fixture.world.now(), &ShardMessage::Open(SECOND, Arc::new(info)));
    fixture.client.device(0, SECOND)
}

fn write(fixture: &Fixture, device: &mut SessionDevice, offset: u64) {
    let buf = Some(fixture.client.buffer(0, 0, 4096));
    let (op, flags) = (IoOp::Write, IoFlags::default());
    device.poll(fixture.now());
    device.submit(Io { tag: 1, op, flags, offset, len: 4096, buf }).expect("room");
}

#[test]
fn two_devices_of_a_session_do_io_and_one_closes() {
    let mut fixture = Fixture::open(|_| {});
    let first = fixture.server.device;
    let mut second = open_second(&mut fixture);
    // The played server knows one device at a time: requests for the other one fail.
    for (known, statuses) in
        [(Some(SECOND_ID), [IoStatus::Io, IoStatus::Ok]), (first, [IoStatus::Ok, IoStatus::Io])]
    {
        fixture.server.device = known;
        let tag = fixture.submit(0, IoOp::Write, 0, 4096);
        write(&fixture, &mut second, 8192);
        fixture.run(10 * MS);
        assert_eq!(fixture.client.status(tag).map(|s| s.is_ok()), Some(statuses[0].is_ok()));
        let done = second.reap().expect("its own completion");
        assert_eq!((done.tag, done.status.is_ok()), (1, statuses[1].is_ok()));
        assert_eq!(second.inflight(), 0);
    }
    let named: Vec<u32> =
        fixture.server.ios().filter_map(|r| r.io.as_ref()).map(|io| io.1.device_id).collect();
    assert_eq!(named.len(), 4);
    assert_eq!(named.iter().filter(|id| **id == SECOND_ID).count(), 2);

    // One closes: what waits for it ends, what comes is not taken, and the other goes on.
    write(&fixture, &mut second, 0);
    second.close();
    let aborted = Completion { tag: 1, status: IoStatus::Aborted };
    assert_eq!(second.reap(), Some(aborted));
    write(&fixture, &mut second, 0);
    assert_eq!(second.reap(), Some(aborted));
    let tag = fixture.submit(0, IoOp::Write, 0, 4096);
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    assert_eq!(fixture.server.ios().count(), 5);
}

#[test]
fn a_geometry_that_changes_in_the_device_table_is_seen_by_the_device() {
    let mut fixture = Fixture::open(|_| {});
    let before = Arc::clone(fixture.client.control.device().expect("open"));
    let mut device = fixture.client.device(0, DeviceIndex::FIRST);
    let size = device.geometry().size;
    let refused = fixture.submit(0, IoOp::Write, size, 4096);
    let geometry = Geometry { size: size + 4096, ..before.geometry.clone() };
    let info = Arc::new(OpenDevice { geometry, ..(*before).clone() });
    fixture.client.tell_shards(fixture.world.now(), &ShardMessage::Open(DeviceIndex::FIRST, info));
    device.poll(fixture.now());
    assert_eq!(device.geometry().size, size + 4096);
    let taken = fixture.submit(0, IoOp::Write, size, 4096);
    fixture.drain(SEC);
    assert!(!fixture.client.status(refused).expect("ended").is_ok());
    assert!(fixture.client.status(taken).is_some());
    assert_eq!(fixture.server.ios().count(), 1, "what fits is sent");
}
