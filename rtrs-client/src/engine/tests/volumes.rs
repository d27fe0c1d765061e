//! Tests of several volumes in one session: an event on one volume does not affect the others.

use rtrs_core::block::IoOp;
use rtrs_core::identity::{ExportId, Identity, ServerId};
use rtrs_core::status::IoStatus;
use rtrs_core::wire::{Imm, OpenRsp, errno};

use super::fixture::{Fixture, MS, SEC, client_ip, server_ip, volume};
use super::server::Request;
use super::users::{SECOND, Users, new_with_second, with_second};
use crate::engine::control::no_path::NoPathWait;
use crate::engine::control::status::VolumeStatus;
use crate::engine::io::devices::Reported;
use crate::engine::{DeviceIndex, NoPath, SessionFailure, VOLUMES_MAX};
use crate::path::state::PathState;

fn status(fixture: &Fixture, device: DeviceIndex) -> VolumeStatus {
    let volumes = fixture.client.control.view().volumes(fixture.now());
    volumes.into_iter().find(|volume| volume.device == device).expect("a volume")
}

/// Returns the device IDs in requests on the path whose UUID begins with this byte.
fn ids_over(fixture: &Fixture, path: u8) -> Vec<u32> {
    let over = fixture.server.ios().filter(|request| request.path.0[0] == path);
    let mut ids: Vec<u32> = over.filter_map(|r| r.io.map(|io| io.1.device_id)).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

fn send_changed(fixture: &mut Fixture, device: u32) {
    for path in 0..fixture.server.paths.len() {
        fixture.server.immediate(path, 0, Imm::Changed { device }.encode());
    }
}

#[test]
fn a_report_has_the_requested_devices() {
    let fixture = with_second(|_| {});
    let devices = |reported| {
        let reports = fixture.client.device_reports(fixture.now(), 1, reported);
        reports.iter().map(|report| report.device).collect::<Vec<_>>()
    };
    assert_eq!(devices(Reported::All), [DeviceIndex::FIRST, SECOND]);
    assert_eq!(devices(Reported::One(SECOND)), [SECOND]);
    assert_eq!(devices(Reported::None), []);
}

#[test]
fn each_path_opens_every_volume_and_carries_io_of_each() {
    let mut fixture = with_second(|s| s.paths = 2);
    let mut second = Users::of(&fixture, SECOND);
    for round in 0..4 {
        second.check(&mut fixture, round);
        fixture.read(1, 0, 4096);
    }
    let ids = [fixture.server.device, fixture.server.more.named("vol1").device].map(Option::unwrap);
    assert_eq!(ids_over(&fixture, 0xa0), ids);
    assert_eq!(ids_over(&fixture, 0xa1), ids);
    assert_eq!(fixture.server.more.named("vol1").opens, 2, "on each path");
    assert_eq!(fixture.server.connects().len(), 6, "two paths of three connections");
    let read = fixture.read(0, 4096, 4096);
    assert_eq!(fixture.server.disk[4096..8192], read);
    assert_eq!(fixture.server.more.named("vol1").disk[4096..8192], [3; 4096]);
    fixture.detach();
    fixture.until("the end", SEC, |s| s.client.control.view().is_done());
    assert_eq!(fixture.server.more.named("vol1").closes, 1, "each is closed in order, once");
}

#[test]
fn a_session_can_have_the_maximum_number_of_volumes() {
    let mut fixture = Fixture::new(|s| {
        s.config.volumes.extend((1..VOLUMES_MAX).map(|at| volume(&format!("vol{at}"))));
    });
    (1..VOLUMES_MAX).for_each(|at| fixture.server.more.add(&format!("vol{at}"), 1 << 20));
    let all = u16::try_from(VOLUMES_MAX).unwrap();
    fixture.until("all volumes", 2 * SEC, |s| s.serves_all(all));
    let mut last = Users::of(&fixture, DeviceIndex(all - 1));
    last.check(&mut fixture, 0x77);
    fixture.server.more.add("more", 1 << 20);
    let refused = fixture.change(crate::engine::Change::AddVolume(volume("more")));
    assert_eq!(
        refused.unwrap_err().to_string(),
        "the session already has 128 volumes, the maximum"
    );
}

#[test]
#[should_panic(expected = "a session of 129 volumes")]
fn too_many_volumes_panic() {
    Fixture::new(|s| {
        s.config.volumes.extend((0..VOLUMES_MAX).map(|at| volume(&format!("more{at}"))));
    });
}

#[test]
fn a_refused_volume_is_omitted_and_the_others_continue() {
    // The volume is refused before it was ever open.
    let mut fixture = new_with_second(|s| s.paths = 2);
    fixture.server.more.named("vol1").open_errno = errno::ENOENT;
    fixture.until("the first", 2 * SEC, Fixture::is_whole);
    fixture.read(0, 0, 4096);
    let left_out = status(&fixture, SECOND);
    assert!(left_out.failed && !left_out.open);
    assert!(left_out.obstacle.unwrap().to_string().contains("refused to open \"vol1\": ENOENT"));
    assert!(!status(&fixture, DeviceIndex::FIRST).failed);
    assert_eq!(fixture.client.control.failure(), None);
    fixture.run(20 * SEC);
    assert_eq!(fixture.server.more.named("vol1").opens, 1, "its attach has failed");

    // The first volume is refused, and the second one works.
    let mut fixture = new_with_second(|s| s.paths = 2);
    fixture.server.how.open_errno = errno::ENOENT;
    fixture.until("the paths", 2 * SEC, |s| s.serving(SECOND).len() == 2);
    Users::of(&fixture, SECOND).check(&mut fixture, 1);
    assert_eq!(fixture.client.control.failure(), None);

    // All volumes are refused.
    let mut fixture = new_with_second(|_| {});
    fixture.server.how.open_errno = errno::ENOENT;
    fixture.server.more.named("vol1").open_errno = errno::EACCES;
    fixture.until("the end", 2 * SEC, |s| s.client.control.failure().is_some());
    let error = fixture.client.last_error(0);
    assert!(error.contains("vol0: the server refused") && error.contains("vol1: the"), "{error}");
    fixture.until("its end", SEC, |s| s.client.states() == [PathState::Waiting]);
}

#[test]
fn a_volume_that_was_open_is_retried_on_the_path_that_lacks_it() {
    let mut fixture = with_second(|s| s.paths = 2);
    let mut second = Users::of(&fixture, SECOND);
    fixture.server.more.named("vol1").open_errno = errno::EBUSY;
    fixture.restart_path(1);
    fixture.run(SEC);
    assert_eq!(fixture.serving(SECOND), [0], "the other path carries it");
    second.check(&mut fixture, 1);
    let refusals = status(&fixture, SECOND).refusals;
    assert_eq!(refusals.len(), 1, "{refusals:?}");
    assert!(
        refusals[0].0 == "path1" && refusals[0].1.to_string().contains("EBUSY"),
        "{refusals:?}"
    );
    let tries = fixture.server.more.named("vol1").opens;
    fixture.run(10 * SEC);
    let more = fixture.server.more.named("vol1").opens - tries;
    assert!((8..=21).contains(&more), "{more} within ten waits of a second");
    let connects = fixture.server.connects().len();
    fixture.server.more.named("vol1").open_errno = 0;
    fixture.until("it is back", 2 * SEC, |s| s.serves_all(2));
    assert_eq!(fixture.server.connects().len(), connects, "on the same connection");
    assert!(status(&fixture, SECOND).refusals.is_empty());
}

#[test]
fn another_disk_under_a_volumes_name_takes_only_that_volume_off_the_path() {
    let mut fixture = new_with_second(|s| {
        s.paths = 2;
        (s.how.server_id, s.how.export_id) = (Some([1; 16]), Some(ExportId::of_name("a")));
    });
    fixture.server.more.named("vol1").export_id = Some(ExportId::of_name("b"));
    fixture.until("both volumes", 2 * SEC, |s| s.serves_all(2));
    let mut second = Users::of(&fixture, SECOND);
    let server = ServerId::from_bytes([1; 16]);
    let pinned = |export| Some(Identity { server, export: Some(ExportId::of_name(export)) });
    assert_eq!(fixture.client.control.view().pinned_identity(DeviceIndex::FIRST), pinned("a"));
    assert_eq!(fixture.client.control.view().pinned_identity(SECOND), pinned("b"));
    fixture.server.more.named("vol1").export_id = Some(ExportId::of_name("c"));
    fixture.restart_path(1);
    fixture.run(SEC);
    assert_eq!(
        (fixture.serving(DeviceIndex::FIRST), fixture.serving(SECOND)),
        (vec![0, 1], vec![0])
    );
    assert!(status(&fixture, SECOND).refusals[0].1.to_string().contains("different disk or file"));
    assert_eq!(fixture.client.control.view().pinned_identity(SECOND), pinned("b"));
    // The second volume's IO uses the path that has the right export.
    second.check(&mut fixture, 5);
    fixture.server.more.named("vol1").export_id = Some(ExportId::of_name("b"));
    fixture.until("it is back", 5 * SEC, |s| s.serves_all(2));

    // A different server is of no use to any volume.
    fixture.server.how.server_id = Some([2; 16]);
    fixture.server.end_path(fixture.now(), 1);
    fixture.until("the error", 5 * SEC, |s| {
        s.client.last_error(1).contains("it leads to server 0202")
    });
    assert_eq!(fixture.client.states()[0], PathState::Connected);
}

#[test]
fn two_names_of_one_export_are_not_two_volumes() {
    let mut fixture = new_with_second(|s| s.paths = 2);
    // `rtrs-server` does this with "vol0" and "/vol0".
    fixture.server.more.named("vol1").next_id = Some(0);
    fixture.until("the first", 2 * SEC, Fixture::is_whole);
    fixture.run(SEC);
    let twin = status(&fixture, SECOND);
    let why = "it is the same export as volume vol0 of this session";
    assert_eq!(twin.obstacle, Some(SessionFailure::Unusable(why.into())));
    fixture.read(0, 0, 4096);
}

#[test]
fn requests_use_the_device_ids_of_their_path() {
    let mut fixture = with_second(|s| s.paths = 2);
    let mut second = Users::of(&fixture, SECOND);
    let old = fixture.server.more.named("vol1").device.unwrap();
    // The server on the other path was restarted, though the path seems alive. It assigns new
    // numbers, and gives the second volume the first one's old number.
    let first = fixture.server.device.unwrap();
    fixture.server.more.named("vol1").device = None;
    fixture.server.more.named("vol1").next_id = Some(first);
    fixture.server.device = Some(7);
    fixture.restart_path(1);
    fixture.until("both volumes", SEC, |s| s.serves_all(2));
    fixture.server.seen.clear();
    for _ in 0..4 {
        second.run(&mut fixture, IoOp::Read);
        // Paths take turns; with an odd number of requests per round, each path carries all
        // volumes.
        fixture.submit(0, IoOp::Read, 0, 4096);
        fixture.submit(0, IoOp::Read, 0, 4096);
        fixture.drain(SEC);
    }
    let sorted = |mut ids: Vec<u32>| {
        ids.sort_unstable();
        ids
    };
    assert_eq!(ids_over(&fixture, 0xa0), sorted(vec![first, old]), "the old IDs");
    assert_eq!(ids_over(&fixture, 0xa1), sorted(vec![first, 7]), "the new IDs");
    // Requests that are resent over the other path use the device ID of that path.
    fixture.server.how.hold = true;
    let tags: Vec<u64> =
        (0..2).map(|_| second.submit(&mut fixture, 0, IoOp::Read, 0, 4096)).collect();
    fixture.until("both", SEC, |s| s.server.held.len() == 2);
    fixture.server.seen.clear();
    fixture.server.how.hold = false;
    fixture.server.end_path(fixture.now(), 0);
    fixture.server.release();
    fixture.run(50 * MS);
    assert_eq!(ids_over(&fixture, 0xa1), [first], "that of the second volume");
    assert!(tags.iter().all(|tag| second.status(*tag).is_some()));
}

#[test]
fn a_path_that_lacks_a_volume_does_not_stop_the_volumes_clock() {
    let mut fixture = with_second(|s| s.config.no_path = NoPath::QueueFor(5 * SEC));
    let mut second = Users::of(&fixture, SECOND);
    fixture.server.more.named("vol1").open_errno = errno::EBUSY;
    fixture.server.end_path(fixture.now(), 0);
    fixture.until("the path's end", SEC, |s| s.serving(DeviceIndex::FIRST).is_empty());
    let tag = second.submit(&mut fixture, 0, IoOp::Write, 0, 4096);
    fixture.until("the path", 2 * SEC, Fixture::is_whole);
    fixture.read(0, 0, 4096);
    assert_eq!(status(&fixture, DeviceIndex::FIRST).no_path, None);
    assert!(matches!(status(&fixture, SECOND).no_path, Some(NoPathWait::QueuesFor(_))));
    assert_eq!(second.status(tag), None, "it waits");
    fixture.run(6 * SEC);
    assert_eq!(second.status(tag), Some(IoStatus::TimedOut));
    assert_eq!(status(&fixture, SECOND).no_path, Some(NoPathWait::Fails));
    assert_eq!(second.run(&mut fixture, IoOp::Read), IoStatus::TimedOut, "at once");
    fixture.read(1, 0, 4096);
    // The server opens the volume on a connected path, and the volume's IO continues.
    fixture.server.more.named("vol1").open_errno = 0;
    fixture.until("the volume", 2 * SEC, |s| s.serves_all(2));
    assert_eq!(status(&fixture, SECOND).no_path, None);
    second.check(&mut fixture, 9);
}

#[test]
fn io_waits_for_a_path_that_serves_its_volume() {
    let mut fixture = with_second(|s| (s.paths, s.how.fence) = (2, true));
    let mut second = Users::of(&fixture, SECOND);
    fixture.server.more.named("vol1").open_errno = errno::EBUSY;
    fixture.restart_path(1);
    // Requests in flight on the only path with the volume wait; the other volume's IO continues.
    fixture.server.how.hold = true;
    let held = second.submit(&mut fixture, 0, IoOp::Write, 0, 4096);
    let own = fixture.submit(0, IoOp::Write, 0, 4096);
    fixture.until("both", SEC, |s| s.server.held.len() == 2);
    fixture.server.how.hold = false;
    fixture.world.silence(server_ip(0), client_ip(0));
    fixture.world.silence(client_ip(0), server_ip(0));
    let over = |request: &Request| request.path.0[0] == 0xa1;
    let others: Vec<Request> = fixture.server.held.iter().filter(|r| over(r)).cloned().collect();
    others.iter().for_each(|request| fixture.server.serve(request));
    fixture.until("the end of the path", 3 * SEC, |s| s.serving(SECOND).is_empty());
    let waits = second.submit(&mut fixture, 0, IoOp::Read, 0, 4096);
    fixture.until("the other's end", 3 * SEC, |s| s.client.status(own).is_some());
    assert_eq!(fixture.client.status(own), Some(IoStatus::Ok));
    fixture.read(0, 0, 4096);
    assert_eq!((second.status(held), second.status(waits)), (None, None));
    assert!(fixture.client.control.view().is_open(DeviceIndex::FIRST));
    assert!(!fixture.client.control.view().is_open(SECOND));
    fixture.server.more.named("vol1").open_errno = 0;
    fixture.run(2 * SEC);
    assert_eq!(
        (second.status(held), second.status(waits)),
        (Some(IoStatus::Ok), Some(IoStatus::Ok))
    );
}

#[test]
fn a_removed_export_ends_its_volume_and_no_other() {
    let mut fixture = with_second(|s| s.paths = 2);
    let mut second = Users::of(&fixture, SECOND);
    fixture.server.more.named("vol1").io_errno = errno::EIDRM;
    assert!(!second.run(&mut fixture, IoOp::Read).is_ok());
    fixture.run(10 * MS);
    assert_eq!(status(&fixture, SECOND).obstacle, Some(SessionFailure::Removed));
    assert!(!status(&fixture, SECOND).open, "no path serves it");
    assert_eq!(status(&fixture, SECOND).refusals.len(), 2, "each path says why");
    assert_eq!(second.run(&mut fixture, IoOp::Read), IoStatus::TimedOut);
    assert_eq!(fixture.client.control.failure(), None);
    assert_eq!(fixture.client.states(), [PathState::Connected; 2]);
    fixture.read(0, 0, 4096);
    // Paths that return do not reopen the volume.
    let opens = fixture.server.more.named("vol1").opens;
    fixture.restart_path(0);
    fixture.read(1, 0, 4096);
    assert_eq!(fixture.server.more.named("vol1").opens, opens);
    assert!(!status(&fixture, SECOND).open, "nor a path that has reconnected");

    // An idle volume learns about the removal from CHANGED.
    let mut fixture = with_second(|s| s.paths = 2);
    let id = fixture.server.more.named("vol1").device.unwrap();
    fixture.server.more.named("vol1").open_errno = errno::EIDRM;
    send_changed(&mut fixture, id);
    fixture
        .until("the failure", SEC, |s| status(s, SECOND).obstacle == Some(SessionFailure::Removed));
    assert_eq!(fixture.client.states(), [PathState::Connected; 2]);
    assert!(!status(&fixture, SECOND).open, "no path serves it");
    // The session ends along with its other volume.
    let first = fixture.server.device.unwrap();
    fixture.server.how.open_errno = errno::EIDRM;
    send_changed(&mut fixture, first);
    fixture.until("the end", SEC, |s| s.client.control.failure().is_some());
    assert_eq!(fixture.client.control.failure(), Some(&SessionFailure::Removed));
}

#[test]
fn only_the_volume_that_grows_is_reopened() {
    let mut fixture = new_with_second(|s| {
        s.paths = 2;
        (s.how.server_id, s.how.export_id) = (Some([1; 16]), Some(ExportId::of_name("a")));
    });
    fixture.server.more.named("vol1").export_id = Some(ExportId::of_name("b"));
    fixture.until("both volumes", 2 * SEC, |s| s.serves_all(2));
    let size = fixture.client.info(0, DeviceIndex::FIRST).geometry.size;
    let opens = |fixture: &Fixture| {
        fixture.server.requests().filter(|r| r.io.is_none() && r.cid.0 == 0).count() / 2
    };
    let before = opens(&fixture);
    fixture.server.more.named("vol1").disk.resize(2 << 20, 0);
    let id = fixture.server.more.named("vol1").device.unwrap();
    send_changed(&mut fixture, id);
    fixture.run(50 * MS);
    assert_eq!(opens(&fixture), before + 2, "on each path");
    for shard in 0..2 {
        assert_eq!(fixture.client.info(shard, SECOND).geometry.size, 2 << 20);
        assert_eq!(fixture.client.info(shard, DeviceIndex::FIRST).geometry.size, size);
    }
    // A report of a different device takes that volume off the path.
    fixture.server.more.named("vol1").export_id = Some(ExportId::of_name("other"));
    fixture.server.immediate(0, 0, Imm::Changed { device: id }.encode());
    fixture.run(250 * MS);
    fixture.run(MS);
    assert_eq!(fixture.client.states(), [PathState::Connected; 2]);
    assert_eq!(fixture.serving(SECOND), [1]);
    assert_eq!(fixture.serving(DeviceIndex::FIRST), [0, 1]);
    // The path ends when the first volume, now the only one that it serves, also changes.
    fixture.server.how.open_rsp =
        Some(Box::new(|rsp| OpenRsp { device_id: rsp.device_id + 40, ..rsp }));
    let first = fixture.server.device.unwrap();
    fixture.server.immediate(0, 0, Imm::Changed { device: first }.encode());
    fixture.until("the end of that path", SEC, |s| s.client.states()[0] != PathState::Connected);
    assert!(fixture.client.last_error(0).contains("vol0: the server returned another device"));
}

#[test]
fn a_flush_and_its_reports_concern_only_its_volume() {
    let mut fixture = with_second(|s| {
        s.paths = 2;
        (s.how.fence, s.how.cache_id) = (true, 7);
    });
    let mut second = Users::of(&fixture, SECOND);
    let flush = |fixture: &mut Fixture| {
        let tag = fixture.submit(0, IoOp::Flush, 0, 4096);
        fixture.drain(SEC);
        fixture.client.status(tag)
    };
    // A failed flush is a loss only for its volume; its paths and the other volume are unaffected.
    fixture.submit(0, IoOp::Write, 0, 4096);
    fixture.drain(SEC);
    assert_eq!(second.run(&mut fixture, IoOp::Write), IoStatus::Ok);
    fixture.server.more.named("vol1").flush_errno = 5;
    assert_eq!(second.run(&mut fixture, IoOp::Flush), IoStatus::Io);
    assert_eq!(flush(&mut fixture), Some(IoStatus::Ok));
    fixture.server.more.named("vol1").flush_errno = 0;
    assert_eq!(second.run(&mut fixture, IoOp::Flush), IoStatus::Ok, "it was reported");
    assert!(fixture.serves_all(2), "{:?}", fixture.client.states());
    let losses = |fixture: &Fixture, device| {
        let report = fixture.client.device_report(fixture.now(), 1, device);
        report.map(|report| report.cache_losses)
    };
    assert_eq!(
        (losses(&fixture, DeviceIndex::FIRST), losses(&fixture, SECOND)),
        (Some(0), Some(1))
    );

    // The cache epoch of one volume changes, so only that volume's writes are lost.
    fixture.submit(0, IoOp::Write, 0, 4096);
    fixture.drain(SEC);
    assert_eq!(second.run(&mut fixture, IoOp::Write), IoStatus::Ok);
    fixture.server.more.named("vol1").cache_id = 70;
    for path in (0..2).rev() {
        fixture.server.end_path(fixture.now(), path);
    }
    fixture.until("the paths' end", SEC, |s| s.serving(SECOND).is_empty());
    fixture.until("both volumes", 5 * SEC, |s| s.serves_all(2));
    assert_eq!(flush(&mut fixture), Some(IoStatus::Ok), "the same epoch");
    assert_eq!(second.run(&mut fixture, IoOp::Flush), IoStatus::Io);
    assert_eq!(second.run(&mut fixture, IoOp::Flush), IoStatus::Ok, "once");
    assert_eq!(second.run(&mut fixture, IoOp::Write), IoStatus::Ok);
    assert_eq!(second.run(&mut fixture, IoOp::Flush), IoStatus::Ok, "a write in the new epoch");
    fixture.run(3 * SEC);
    let kept = |device| fixture.client.control.view().saved_epoch(device);
    assert_eq!((kept(DeviceIndex::FIRST), kept(SECOND)), (Some(7), Some(70)));
}

#[test]
fn an_unanswered_open_ends_its_path_and_goes_last_the_next_time() {
    let mut fixture = with_second(|s| (s.paths, s.how.fence) = (2, true));
    let mut second = Users::of(&fixture, SECOND);
    fixture.server.how.hold_volume = Some("vol0");
    fixture.server.end_path(fixture.now(), 1);
    fixture.until("the end of the attempt", 15 * SEC, |s| {
        s.client.last_error(1).contains("the server did not answer the open of the device")
    });
    // The path opens the other volume before it waits again, and carries that volume's IO.
    fixture.until("the other volume", 2 * SEC, |s| s.serving(SECOND) == [0, 1]);
    assert_eq!(fixture.serving(DeviceIndex::FIRST), [0]);
    second.check(&mut fixture, 2);
    fixture.read(0, 0, 4096);
    fixture.server.how.hold_volume = None;
    fixture.server.release();
    fixture.until("all", 30 * SEC, |s| s.serves_all(2));
}

#[test]
fn a_session_that_takes_over_waits_for_each_volume() {
    let mut fixture = new_with_second(|s| {
        s.config.open_patience = 20 * SEC;
        s.config.volumes[1].inherited_epoch = Some(7);
        (s.how.fence, s.how.cache_id) = (true, 8);
    });
    fixture.server.more.named("vol1").open_errno = errno::EPERM;
    fixture.until("the first", 2 * SEC, Fixture::is_whole);
    fixture.run(10 * SEC);
    assert!(!status(&fixture, SECOND).failed, "the previous client may still have it");
    fixture.server.more.named("vol1").open_errno = 0;
    fixture.until("both volumes", 2 * SEC, |s| s.serves_all(2));
    let mut second = Users::of(&fixture, SECOND);
    assert_eq!(
        second.run(&mut fixture, IoOp::Flush),
        IoStatus::Io,
        "what the previous client left"
    );
    let tag = fixture.submit(0, IoOp::Flush, 0, 0);
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok), "the first volume is new");
}

#[test]
fn a_volume_is_not_used_over_a_path_before_the_dead_path_is_fenced() {
    let mut fixture = with_second(|s| {
        s.paths = 2;
        (s.how.fence, s.config.no_path) = (true, NoPath::Fail);
    });
    let mut second = Users::of(&fixture, SECOND);
    // The other path serves the first volume and is still opening the second one.
    fixture.server.how.hold_volume = Some("vol1");
    let at = fixture.server.paths.iter().position(|p| p.uuid.0[0] == 0xa1).expect("path 1");
    fixture.server.end_path(fixture.now(), at);
    fixture.until("the open", 5 * SEC, |s| s.server.held.len() == 1 && s.serving(SECOND) == [0]);
    assert_eq!(fixture.serving(DeviceIndex::FIRST), [0, 1]);
    // A write is lost along with the only path that serves the second volume.
    (fixture.server.how.hold, fixture.server.how.hold_fences) = (true, true);
    let tag = second.submit(&mut fixture, 0, IoOp::Write, 4096, 4096);
    fixture.until("the write", SEC, |s| s.server.held.len() == 2);
    fixture.link_down(0);
    fixture.until("the end of the path", 5 * SEC, |s| s.serving(SECOND).is_empty());
    fixture.run(SEC);
    assert!(second.status(tag).is_some_and(|status| !status.is_ok()), "its user has the error");
    let at = fixture.server.held.iter().position(|request| request.io.is_none());
    let open = fixture.server.held.remove(at.expect("the open"));
    fixture.server.serve(&open);
    let is_fence = |request: &Request| request.io.is_none() && request.permit.0 == 1;
    fixture.until("the fence", SEC, |s| s.server.held.iter().any(is_fence));
    fixture.run(SEC);
    assert!(fixture.serving(SECOND).is_empty(), "the write may still begin");
    assert!(status(&fixture, SECOND).no_path.is_some(), "no path carries it");
    fixture.server.how.hold = false;
    (fixture.server.how.hold_fences, fixture.server.how.hold_volume) = (false, None);
    fixture.server.release();
    fixture.until("the volume", SEC, |s| s.serving(SECOND) == [1]);
    second.check(&mut fixture, 7);
}
