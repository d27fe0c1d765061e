//! Tests of the device table as the only source of geometry, and a shard's behavior for removed
//! devices.

use std::sync::Arc;

use rtrs_core::block::{BlockDevice, Geometry, IoOp};
use rtrs_core::status::IoStatus;

use super::fixture::{Fixture, SEC};
use super::users::{SECOND, Users, with_second};
use crate::engine::device_table::OpenDevice;
use crate::engine::message::ShardMessage;
use crate::engine::{Change, DeviceIndex};

#[test]
fn a_device_sees_geometry_changes_in_the_device_table() {
    let mut fixture = Fixture::open(|_| {});
    let before = fixture.client.info(0, DeviceIndex::FIRST);
    let mut device = fixture.client.device(0, DeviceIndex::FIRST);
    let size = device.geometry().size;
    let refused = fixture.submit(0, IoOp::Write, size, 4096);
    let geometry = Geometry { size: size + 4096, ..before.geometry.clone() };
    let info = Arc::new(OpenDevice { geometry, ..(*before).clone() });
    fixture.client.notify_all(fixture.world.now(), &ShardMessage::Open(DeviceIndex::FIRST, info));
    device.poll(fixture.now());
    assert_eq!(device.geometry().size, size + 4096);
    let taken = fixture.submit(0, IoOp::Write, size, 4096);
    fixture.drain(SEC);
    assert!(!fixture.client.status(refused).expect("ended").is_ok());
    assert!(fixture.client.status(taken).is_some());
    assert_eq!(fixture.server.ios().count(), 1, "what fits is sent");
}

#[test]
fn the_user_of_a_removed_device_gets_nothing_from_its_successor() {
    let mut fixture = with_second(|_| {});
    let mut before = Users::of(&fixture, SECOND);
    fixture.change(Change::CloseVolume { export: "vol1".into() }).expect("another is left");
    fixture.until("its end", SEC, |s| s.all_volumes() == ["vol0"]);
    fixture.server.more.add("vol2", 1 << 20);
    fixture.change(Change::AddVolume(super::fixture::volume("vol2"))).expect("room");
    fixture.until("the new one", SEC, |s| s.client.control.view().is_open(SECOND));
    fixture.run(SEC / 100);
    let mut after = Users::of(&fixture, SECOND);
    let ended = before.submit(&mut fixture, 0, IoOp::Write, 0, 4096);
    let done = after.submit(&mut fixture, 0, IoOp::Write, 0, 4096);
    fixture.run(SEC / 10);
    before.reap();
    after.reap();
    assert_eq!(before.status(ended), Some(IoStatus::Aborted));
    assert_eq!(after.status(done), Some(IoStatus::Ok));
    assert_eq!(fixture.server.ios().count(), 1);
}
