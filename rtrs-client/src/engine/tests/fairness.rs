//! Tests of each device's share of permits and IO rows while others use as much as they can.

use rtrs_core::block::IoOp;
use rtrs_core::status::IoStatus;

use super::fixture::{Fixture, MS, SEC, volume};
use super::server::Request;
use super::users::{SECOND, Users, with_second};
use crate::engine::device_table::IOS_MAX;
use crate::engine::{Change, DeviceIndex};

/// Number of a device's requests that the server holds.
fn held(fixture: &Fixture, device: u32) -> usize {
    let of = |request: &&Request| request.io.is_some_and(|io| io.1.device_id == device);
    fixture.server.held.iter().filter(of).count()
}

/// Opens a session with two volumes on one shard, with a server that holds all IO.
fn fixture(queue_depth: u16) -> (Fixture, Users, Users) {
    let mut fixture = with_second(|s| {
        s.config.shards = 1;
        (s.how.queue_depth, s.how.hold) = (queue_depth, true);
        s.config.io_timeout = 100 * SEC;
    });
    fixture.client.is_idle = true;
    let (first, second) = (Users::of(&fixture, DeviceIndex::FIRST), Users::of(&fixture, SECOND));
    (fixture, first, second)
}

#[test]
fn a_greedy_device_leaves_each_other_half_of_its_share() {
    // Sixty permits for requests, besides those of the control shard and of probes.
    let (mut fixture, mut greedy, mut modest) = fixture(62);
    let (first, second) = (0, fixture.server.more.named("vol1").device.unwrap());
    let mut taken = 0;
    while taken < 1024 && greedy.try_submit(&mut fixture, 0, IoOp::Read, 0, 512).is_some() {
        taken += 1;
    }
    assert_eq!(taken, IOS_MAX * 3 / 4, "half of the rows is kept in equal shares too");
    fixture.run(10 * MS);
    assert_eq!((held(&fixture, first), held(&fixture, second)), (45, 0));
    // The disk of the first device hangs and holds all its permits; the other device has its own.
    let tags: Vec<u64> =
        (0..8).map(|_| modest.submit(&mut fixture, 0, IoOp::Write, 0, 512)).collect();
    fixture.run(10 * MS);
    assert_eq!((held(&fixture, first), held(&fixture, second)), (45, 8));
    let own = |request: &&Request| request.io.is_some_and(|io| io.1.device_id == second);
    let answered: Vec<Request> = fixture.server.held.iter().filter(own).cloned().collect();
    answered.iter().for_each(|request| fixture.server.serve(request));
    fixture.server.held.retain(|request| !own(&request));
    fixture.run(10 * MS);
    assert!(tags.iter().all(|tag| modest.status(*tag) == Some(IoStatus::Ok)));
    assert_eq!(greedy.ended(), 0);
    // The greedy device does not get what the modest one leaves unused: a quarter stays reserved.
    assert_eq!(held(&fixture, first), 45);
    let mut more = 0;
    while modest.try_submit(&mut fixture, 0, IoOp::Read, 0, 512).is_some() {
        more += 1;
    }
    assert_eq!(more, IOS_MAX / 4);
    fixture.run(10 * MS);
    assert_eq!((held(&fixture, first), held(&fixture, second)), (45, 15));
}

#[test]
fn devices_take_turns_for_permits() {
    let (mut fixture, mut greedy, mut modest) = fixture(62);
    let second = fixture.server.more.named("vol1").device.unwrap();
    for _ in 0..700 {
        greedy.submit(&mut fixture, 0, IoOp::Read, 0, 512);
    }
    for _ in 0..200 {
        modest.submit(&mut fixture, 0, IoOp::Read, 0, 512);
    }
    fixture.run(10 * MS);
    // One request is answered at a time; both devices wait for each free permit.
    let mut served = [0, 0];
    for _ in 0..200 {
        let request = fixture.server.held.remove(0);
        served[usize::from(request.io.unwrap().1.device_id == second)] += 1;
        fixture.server.serve(&request);
        fixture.run(MS / 10);
    }
    let share = served[1] as f64 / 200.0;
    assert!((0.25..=0.55).contains(&share), "{served:?}: at least half of its share");
    assert_eq!((greedy.ended(), modest.ended()), (served[0], served[1]));
}

#[test]
fn a_large_io_does_not_keep_the_others_waiting() {
    let (mut fixture, mut large, mut small) = fixture(6);
    let second = fixture.server.more.named("vol1").device.unwrap();
    // Four permits for requests, and eight requests for each IO.
    let tags: Vec<u64> =
        (0..4).map(|_| large.submit(&mut fixture, 0, IoOp::Read, 0, 8 * 126_976)).collect();
    let one = small.submit(&mut fixture, 0, IoOp::Read, 0, 512);
    fixture.run(10 * MS);
    assert_eq!((held(&fixture, 0), held(&fixture, second)), (3, 1));
    fixture.server.how.hold = false;
    fixture.server.release();
    fixture.run(SEC);
    assert_eq!(small.status(one), Some(IoStatus::Ok));
    assert!(tags.iter().all(|tag| large.status(*tag) == Some(IoStatus::Ok)));
}

#[test]
fn shares_follow_the_number_of_volumes() {
    let (mut fixture, mut first, _) = fixture(62);
    let fill = |fixture: &mut Fixture, users: &mut Users| {
        for _ in 0..100 {
            users.submit(fixture, 0, IoOp::Read, 0, 512);
        }
        fixture.run(10 * MS);
        held(fixture, 0)
    };
    assert_eq!(fill(&mut fixture, &mut first), 45);
    fixture.change(Change::CloseVolume { export: "vol1".into() }).expect("another is left");
    fixture.until("its end", SEC, |s| s.all_volumes() == ["vol0"]);
    assert_eq!(fill(&mut fixture, &mut first), 60, "all of them");
    // A new device gets its share as soon as the other one has less.
    fixture.server.more.add("vol2", 1 << 20);
    fixture.change(Change::AddVolume(volume("vol2"))).expect("room");
    fixture.until("the volume", SEC, |s| s.serves_all(2));
    let id = fixture.server.more.named("vol2").device.unwrap();
    let mut second = Users::of(&fixture, SECOND);
    for _ in 0..20 {
        second.submit(&mut fixture, 0, IoOp::Read, 0, 512);
    }
    fixture.run(10 * MS);
    assert_eq!((held(&fixture, 0), held(&fixture, id)), (60, 0));
    for answered in 1..=60 {
        let oldest = fixture.server.held.remove(0);
        fixture.server.serve(&oldest);
        fixture.run(MS / 10);
        let has = held(&fixture, id);
        assert!(has >= answered.min(15), "{has} after {answered} answers");
    }
}

#[test]
fn a_device_without_a_path_holds_no_more_than_its_share() {
    let mut fixture = with_second(|s| {
        (s.config.shards, s.paths) = (1, 2);
        (s.how.queue_depth, s.how.hold, s.how.fence) = (62, true, true);
        s.config.io_timeout = 100 * SEC;
    });
    let mut second = Users::of(&fixture, SECOND);
    // One path serves both volumes, the other only the second.
    fixture.client.is_idle = true;
    fixture.server.how.open_errno = 16;
    fixture.restart_path(1);
    assert_eq!(
        (fixture.serving(DeviceIndex::FIRST), fixture.serving(SECOND)),
        (vec![0], vec![0, 1])
    );
    let mut first = Users::of(&fixture, DeviceIndex::FIRST);
    for _ in 0..60 {
        first.submit(&mut fixture, 0, IoOp::Write, 0, 512);
    }
    fixture.run(10 * MS);
    assert_eq!(held(&fixture, 0), 45);
    fixture.server.held.clear();
    fixture.server.end_path(fixture.now(), 0);
    fixture.until("its end", SEC, |s| s.serving(DeviceIndex::FIRST).is_empty());
    fixture.server.how.hold = false;
    for _ in 0..4 {
        second.check(&mut fixture, 4);
    }
    assert_eq!(first.ended(), 0, "they wait for a path");
    fixture.server.how.open_errno = 0;
    fixture.until("all", 5 * SEC, |s| s.serves_all(2));
    fixture.run(SEC);
    assert_eq!(first.ended(), 60);
}
