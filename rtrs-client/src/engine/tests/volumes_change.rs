//! Tests of volumes that are added to and closed in a running session.

use rtrs_core::block::{BlockDevice, IoOp};
use rtrs_core::identity::{Identity, ServerId, ServerProcess};
use rtrs_core::status::IoStatus;
use rtrs_core::wire::{Extensions, Fence, errno};

use super::fixture::{Fixture, MS, SEC, client_ip, server_ip, volume};
use super::how::RewriteAccept;
use super::users::{SECOND, Users, new_with_second, with_second};
use crate::engine::{Change, ChangeError, DeviceIndex, NoPath, SessionFailure};
use crate::path::state::PathState;

fn add(fixture: &mut Fixture, export: &str) -> Result<(), ChangeError> {
    fixture.change(Change::AddVolume(volume(export)))
}

fn close(fixture: &mut Fixture, export: &str) -> Result<(), ChangeError> {
    fixture.change(Change::CloseVolume { export: export.into() })
}

/// Opens a session with one volume, on a server with a second export.
fn fixture(paths: usize) -> Fixture {
    let mut fixture = Fixture::open(|s| (s.paths, s.how.fence) = (paths, true));
    fixture.server.more.add("vol1", 1 << 20);
    fixture
}

/// Number of bytes that the client has registered.
fn registered(fixture: &Fixture) -> usize {
    fixture.world.registered(fixture.node)
}

#[test]
fn a_volume_that_is_added_is_opened_on_each_connected_path() {
    let mut fixture = fixture(2);
    let connects = fixture.server.connects().len();
    assert_eq!(add(&mut fixture, "vol1"), Ok(()));
    fixture.until("the volume", SEC, |s| s.serves_all(2));
    assert_eq!(fixture.server.more.named("vol1").opens, 2);
    assert_eq!(fixture.server.connects().len(), connects, "on the existing connections");
    Users::of(&fixture, SECOND).check(&mut fixture, 3);
    assert_eq!(fixture.volumes(), ["vol0", "vol1"]);
    assert_eq!(
        add(&mut fixture, "vol1"),
        Err(ChangeError::VolumeExists { export: "vol1".into(), closing: false })
    );
}

/// A process that dies immediately still leaves the epoch to its successor.
#[test]
fn the_epoch_of_a_volume_that_is_added_is_kept_before_its_first_io() {
    let mut fixture = Fixture::open(|s| (s.paths, s.how.fence, s.how.cache_id) = (1, true, 7));
    fixture.server.more.add("vol1", 1 << 20);
    fixture.server.more.named("vol1").cache_id = 70;
    add(&mut fixture, "vol1").expect("it is there");
    fixture.until("the volume", SEC, |s| s.serves_all(2));
    assert_eq!(fixture.client.control.view().saved_epoch(SECOND), Some(70));
}

#[test]
fn a_volume_that_is_added_without_a_path_is_opened_once_there_is_one() {
    let mut fixture = fixture(2);
    for path in 0..2 {
        fixture.link_down(path);
    }
    fixture.until("no path", 3 * SEC, |s| s.serving(DeviceIndex::FIRST).is_empty());
    assert_eq!(add(&mut fixture, "vol1"), Ok(()));
    fixture.run(20 * SEC);
    assert_eq!(fixture.volumes(), ["vol0", "vol1"], "it waits");
    let failed = |s: &Fixture| s.client.control.view().volumes(s.now())[1].failed;
    assert!(!failed(&fixture) && fixture.server.more.named("vol1").opens == 0);
    for path in 0..2 {
        fixture.link_up(path);
    }
    fixture.until("both", 5 * SEC, |s| s.serves_all(2));
    Users::of(&fixture, SECOND).check(&mut fixture, 3);
}

#[test]
fn a_volume_that_cannot_be_added_is_reported_and_leaves_the_others_alone() {
    let mut fixture = fixture(2);
    assert_eq!(add(&mut fixture, "nothing"), Ok(()));
    fixture.until("the failure", SEC, |s| s.client.control.view().volumes(s.now())[1].failed);
    let obstacle = fixture.client.control.view().volumes(fixture.now())[1].obstacle.clone();
    assert!(matches!(obstacle, Some(SessionFailure::OpenRefused { .. })), "{obstacle:?}");
    fixture.read(0, 0, 4096);
    close(&mut fixture, "nothing").expect("another is left");
    fixture.until("its end", SEC, |s| s.all_volumes() == ["vol0"]);
    // The index is reused.
    add(&mut fixture, "vol1").expect("room");
    fixture.until("the volume", SEC, |s| s.serves_all(2));

    // The volume is on a different server, or on a different disk over every path.
    let mut fixture = Fixture::open(|s| s.how.server_id = Some([1; 16]));
    fixture.server.more.add("vol1", 1 << 20);
    let mut other = volume("vol1");
    other.identity = Some(Identity { server: ServerId::from_bytes([2; 16]), export: None });
    let refused = fixture.change(Change::AddVolume(other)).unwrap_err().to_string();
    assert!(refused.contains("all volumes of a session must be on one server"), "{refused}");
    let mut other = volume("vol1");
    other.identity = Some(Identity {
        server: None,
        export: Some(rtrs_core::identity::ExportId::of_name("else")),
    });
    fixture.change(Change::AddVolume(other)).expect("room");
    fixture.until("the failure", SEC, |s| s.client.control.view().volumes(s.now())[1].failed);
    let obstacle = fixture.client.control.view().volumes(fixture.now())[1].obstacle.clone();
    let Some(SessionFailure::Unreachable(why)) = obstacle else { panic!("{obstacle:?}") };
    assert!(why.starts_with("path0: cannot use this path: the server reports no ID"), "{why}");
    fixture.read(0, 0, 4096);
}

#[test]
fn a_volume_is_closed_once_and_its_index_is_reused() {
    let mut fixture = with_second(|s| s.paths = 2);
    let mut second = Users::of(&fixture, SECOND);
    second.check(&mut fixture, 1);
    let before = registered(&fixture);
    drop(second);
    for round in 0..20 {
        close(&mut fixture, "vol1").expect("another is left");
        assert_eq!(fixture.volumes(), ["vol0"], "at once");
        fixture.until("its end", SEC, |s| s.all_volumes() == ["vol0"]);
        assert_eq!(fixture.server.more.named("vol1").closes, round + 1);
        assert!(fixture.serving(SECOND).is_empty());
        fixture.read(0, 0, 4096);
        add(&mut fixture, "vol1").expect("it is gone");
        fixture.until("it is back", SEC, |s| s.serves_all(2));
        Users::of(&fixture, SECOND).check(&mut fixture, 2);
    }
    assert_eq!(registered(&fixture), before);
    assert_eq!(close(&mut fixture, "vol7"), Err(ChangeError::NoVolume("vol7".into())));
    close(&mut fixture, "vol1").expect("another is left");
    let last = close(&mut fixture, "vol0").unwrap_err().to_string();
    assert_eq!(last, "vol0 is the last volume of the session; detach the session");
}

#[test]
fn memory_of_a_closed_volume_is_released() {
    let mut fixture = with_second(|_| {});
    let before = registered(&fixture);
    let region = rtrs_core::mem::Region::new(1 << 20).expect("memory");
    let mut device = fixture.client.device(0, SECOND);
    device.attach_region(&region).expect("memory is registered");
    assert!(registered(&fixture) >= before + (1 << 20));
    let weak = std::sync::Arc::downgrade(&region);
    drop((device, region));
    close(&mut fixture, "vol1").expect("another is left");
    fixture.until("its end", SEC, |s| s.all_volumes() == ["vol0"]);
    assert_eq!(registered(&fixture), before);
    assert!(weak.upgrade().is_none(), "released");
    fixture.read(0, 0, 4096);
}

#[test]
fn a_closed_volume_keeps_its_index_until_all_its_io_has_ended_on_all_shards() {
    let mut fixture = with_second(|s| s.how.hold = true);
    let mut second = Users::of(&fixture, SECOND);
    let tags = [0, 1].map(|shard| second.submit(&mut fixture, shard, IoOp::Write, 0, 4096));
    let own = fixture.submit(0, IoOp::Write, 0, 4096);
    fixture.until("all", SEC, |s| s.server.held.len() == 3);
    close(&mut fixture, "vol1").expect("another is left");
    let late = second.submit(&mut fixture, 0, IoOp::Write, 8192, 4096);
    fixture.run(SEC);
    assert_eq!(second.status(late), Some(IoStatus::Aborted));
    assert_eq!(fixture.all_volumes(), ["vol0", "vol1"]);
    assert_eq!(fixture.server.more.named("vol1").closes, 0, "the server still works on it");
    let refused = add(&mut fixture, "vol1").unwrap_err().to_string();
    assert_eq!(refused, "volume vol1 already exists and is still being closed");
    fixture.server.more.add("vol2", 1 << 20);
    add(&mut fixture, "vol2").expect("room");
    fixture.run(100 * MS);
    assert_eq!(fixture.client.control.view().volumes(fixture.now())[2].device, DeviceIndex(2));
    // One shard has received its answer.
    let of_first = |r: &super::server::Request| {
        r.cid.0 == 1
            && r.io.is_some_and(|io| Some(io.1.device_id) == fixture.server.more.0[0].device)
    };
    let request = fixture.server.held.iter().find(|r| of_first(r)).cloned().expect("held");
    fixture.server.serve(&request);
    fixture.server.held.retain(|r| r.permit != request.permit);
    fixture.run(100 * MS);
    assert_eq!(fixture.server.more.named("vol1").closes, 0, "the other shard has one left");
    fixture.server.how.hold = false;
    fixture.server.release();
    // The volume also stays until its user has taken the last completion.
    fixture.run(100 * MS);
    assert_eq!(fixture.server.more.named("vol1").closes, 0);
    assert!(tags.iter().all(|tag| second.status(*tag) == Some(IoStatus::Ok)));
    fixture.until("its end", SEC, |s| s.all_volumes() == ["vol0", "vol2"]);
    assert_eq!(fixture.server.more.named("vol1").closes, 1);
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(own), Some(IoStatus::Ok));
    add(&mut fixture, "vol1").expect("it is gone");
    fixture.until("it is back", SEC, |s| s.serves_all(3));
}

#[test]
fn a_closed_volume_without_a_path_keeps_its_permits_only_as_long_as_an_open_one() {
    let mut fixture = with_second(|s| {
        (s.paths, s.how.hold) = (2, true);
        s.config.no_path = NoPath::QueueFor(3 * SEC);
    });
    let mut second = Users::of(&fixture, SECOND);
    let tag = second.submit(&mut fixture, 0, IoOp::Write, 0, 4096);
    fixture.until("the write", SEC, |s| s.server.held.len() == 1);
    close(&mut fixture, "vol1").expect("another is left");
    for path in 0..2 {
        fixture.link_down(path);
    }
    fixture.until("no path", 5 * SEC, |s| s.serving(DeviceIndex::FIRST).is_empty());
    assert_eq!(fixture.client.permits_held(0), 1);
    fixture.until("the end of the write", 5 * SEC, |s| s.client.permits_held(0) == 0);
    assert!(second.status(tag).is_some_and(|status| !status.is_ok()));
}

#[test]
fn unreaped_completions_of_a_closed_volume_do_not_keep_a_shard_busy() {
    let mut fixture = with_second(|s| s.how.hold = true);
    let mut second = Users::of(&fixture, SECOND);
    for _ in 0..2 {
        second.submit(&mut fixture, 0, IoOp::Write, 0, 4096);
    }
    fixture.until("both", SEC, |s| s.server.held.len() == 2);
    drop(second);
    close(&mut fixture, "vol1").expect("another is left");
    let answered = fixture.server.held.remove(0);
    fixture.server.serve(&answered);
    fixture.run(100 * MS);
    assert_eq!(fixture.all_volumes(), ["vol0", "vol1"], "the server still works on the other one");
    assert!(!fixture.client.has_completions(0));
    fixture.server.release();
    fixture.until("its end", SEC, |s| s.all_volumes() == ["vol0"]);
}

/// The user is dropped before the shard learns of the close.
#[test]
fn completions_without_a_user_do_not_keep_a_shard_busy_before_the_close() {
    let mut fixture = with_second(|s| s.how.hold = true);
    let mut second = Users::of(&fixture, SECOND);
    second.submit(&mut fixture, 0, IoOp::Write, 0, 4096);
    fixture.until("the write", SEC, |s| s.server.held.len() == 1);
    drop(second);
    fixture.server.release();
    fixture.run(100 * MS);
    assert_eq!(fixture.all_volumes(), ["vol0", "vol1"]);
    assert!(!fixture.client.has_completions(0));
}

#[test]
fn io_of_a_closed_volume_on_a_dead_path_ends_at_its_fence() {
    let mut fixture = with_second(|s| {
        s.paths = 2;
        (s.how.hold, s.how.fence) = (true, true);
    });
    let mut second = Users::of(&fixture, SECOND);
    let tags: Vec<u64> =
        (0..4).map(|_| second.submit(&mut fixture, 0, IoOp::Write, 0, 4096)).collect();
    fixture.until("all", SEC, |s| s.server.held.len() == 4);
    fixture.server.how.hold_fences = true;
    fixture.link_down(0);
    fixture.until("the end of the path", 3 * SEC, |s| s.client.states()[0] != PathState::Connected);
    close(&mut fixture, "vol1").expect("another is left");
    fixture.server.how.hold = false;
    fixture.server.release();
    fixture.server.how.hold_fences = true;
    fixture.run(20 * MS);
    let left = tags.iter().filter(|tag| second.status(**tag).is_none()).count();
    if left > 0 {
        assert_eq!(fixture.server.more.named("vol1").closes, 0);
    }
    fixture.server.how.hold_fences = false;
    fixture.server.release();
    fixture.run(200 * MS);
    assert!(tags.iter().all(|tag| second.status(*tag).is_some()));
    fixture.until("its end", SEC, |s| s.all_volumes() == ["vol0"]);
    assert!(fixture.server.ios().count() <= 5, "no request is resent");
    fixture.link_up(0);
    fixture.until("the path", 5 * SEC, Fixture::is_whole);
}

/// Accepts connections as the process with this number.
fn process(number: u64) -> RewriteAccept {
    Box::new(move |_, mut rsp| {
        let process = Some(ServerProcess::new(number));
        rsp.ext = Extensions { process, ..Extensions::decode(&rsp.ext) }.encode();
        rsp.encode().to_vec()
    })
}

#[test]
fn a_restarted_server_fences_a_path_whose_volume_it_does_not_open() {
    for closes in [false, true] {
        let mut fixture = with_second(|s| {
            s.paths = 2;
            (s.how.hold, s.how.fence) = (true, true);
            s.how.con_rsp = Some(process(1));
        });
        let mut second = Users::of(&fixture, SECOND);
        for at in 0..2 {
            second.submit(&mut fixture, 0, IoOp::Write, at * 4096, 4096);
            fixture.submit(0, IoOp::Write, at * 4096, 4096);
        }
        fixture.until("all", SEC, |s| s.server.held.len() == 4);
        let path = fixture.server.connects()[0].0.path_uuid;

        fixture.link_down(0);
        fixture.link_down(1);
        let lost = |s: &Fixture| s.client.states().iter().all(|at| *at != PathState::Connected);
        fixture.until("the end of both paths", 3 * SEC, lost);
        fixture.server.held.clear();
        fixture.server.how.hold = false;
        fixture.server.how.con_rsp = Some(process(2));
        fixture.server.more.named("vol1").open_errno = 2;
        if closes {
            close(&mut fixture, "vol1").expect("another is left");
        }
        fixture.link_up(1);
        fixture.drain(5 * SEC);
        let fence = Fence { path, recon_cnt: 1, process: ServerProcess::new(1) };
        assert_eq!(fixture.server.fences, [fence], "closes: {closes}");
        assert_eq!(fixture.client.done.len(), 2);
        assert!(fixture.client.done.iter().all(|done| done.status.is_ok()));
    }
}

#[test]
fn a_close_whose_path_dies_is_resent_and_nothing_is_opened_meanwhile() {
    for answered in [false, true] {
        let mut fixture = with_second(|s| (s.paths, s.how.fence) = (2, true));
        fixture.server.more.add("vol2", 1 << 20);
        let id = fixture.server.more.named("vol1").device;
        fixture.server.how.hold_control = true;
        close(&mut fixture, "vol1").expect("another is left");
        fixture.until("the close", SEC, |s| s.server.held.len() == 1);
        add(&mut fixture, "vol2").expect("room");
        let request = fixture.server.held.remove(0);
        if answered {
            // The server has closed the volume but the answer is lost, so the next volume may get
            // its number.
            fixture.server.more.close(id.expect("it is open"));
            fixture.server.more.named("vol2").next_id = id;
        }
        fixture.server.how.hold_control = false;
        fixture.server.how.hold_fences = true;
        let over = fixture.server.paths.iter().position(|p| p.uuid == request.path).unwrap();
        fixture.server.end_path(fixture.now(), over);
        fixture.run(20 * MS);
        assert_eq!(fixture.server.more.named("vol2").opens, 0, "not before the close is settled");
        fixture.server.how.hold_fences = false;
        fixture.server.release();
        fixture.until("both", 5 * SEC, |s| {
            s.all_volumes() == ["vol0", "vol2"]
                && s.serves_all(1)
                && s.serving(DeviceIndex(2)).len() == 2
        });
        assert_eq!(fixture.server.more.named("vol1").device, None);
        assert_eq!(fixture.server.more.named("vol2").closes, 0, "the close was not for this one");
        Users::of(&fixture, DeviceIndex(2)).check(&mut fixture, 6);
    }
}

#[test]
fn a_close_that_waits_does_not_keep_a_path_from_connecting() {
    let mut fixture = with_second(|s| s.how.fence = true);
    fixture.server.how.hold_control = true;
    close(&mut fixture, "vol1").expect("another is left");
    fixture.until("the close", SEC, |s| s.server.held.len() == 1);
    // The server is still executing requests from the last open.
    fixture.server.more.named("vol1").open_errno = errno::EBUSY;
    fixture.server.how.hold_control = false;
    fixture.server.end_path(fixture.now(), 0);
    fixture.until("the path's end", SEC, |s| s.serving(DeviceIndex::FIRST).is_empty());
    fixture.until("the path", 2 * SEC, |s| s.serving(DeviceIndex::FIRST).len() == 1);
    fixture.read(0, 0, 4096);
    fixture.until("its end", 2 * SEC, |s| s.all_volumes() == ["vol0"]);
}

#[test]
fn a_volume_that_is_closed_without_a_path_is_closed_once_there_is_one() {
    let mut fixture = with_second(|s| (s.paths, s.how.fence) = (2, true));
    for path in 0..2 {
        fixture.world.silence(client_ip(path), server_ip(path));
        fixture.world.silence(server_ip(path), client_ip(path));
    }
    fixture.until("no path", 5 * SEC, |s| s.serving(SECOND).is_empty());
    close(&mut fixture, "vol1").expect("another is left");
    fixture.run(SEC);
    assert_eq!(fixture.volumes(), ["vol0"], "its user does not wait");
    assert!(fixture.server.more.named("vol1").device.is_some(), "the server does not know yet");
    for path in 0..2 {
        fixture.world.unsilence(client_ip(path), server_ip(path));
        fixture.world.unsilence(server_ip(path), client_ip(path));
    }
    fixture.until("its end", 10 * SEC, |s| s.all_volumes() == ["vol0"]);
    assert_eq!(fixture.server.more.named("vol1").device, None);
    fixture.until("the paths", 5 * SEC, Fixture::is_whole);
    fixture.read(0, 0, 4096);
    // A different volume gets the index, but no path serves it under the old number.
    fixture.server.more.add("vol2", 1 << 20);
    fixture.server.how.hold_volume = Some("vol2");
    add(&mut fixture, "vol2").expect("room");
    fixture.run(20 * MS);
    assert_eq!(fixture.all_volumes(), ["vol0", "vol2"]);
    assert!(fixture.serving(SECOND).is_empty());
    fixture.server.how.hold_volume = None;
    fixture.server.release();
    fixture.until("the volume", SEC, |s| s.serves_all(2));
    Users::of(&fixture, SECOND).check(&mut fixture, 3);
}

#[test]
fn a_volume_may_be_closed_while_it_is_opened() {
    for steps in 0..40 {
        let mut fixture = fixture(2);
        add(&mut fixture, "vol1").expect("room");
        fixture.run(MS / 200 * steps);
        close(&mut fixture, "vol1").expect("another is left");
        fixture.until("its end", SEC, |s| s.all_volumes() == ["vol0"]);
        fixture.run(SEC);
        let left = fixture.server.more.named("vol1");
        assert_eq!(left.device, None, "after {steps}: opened {} times", left.opens);
        assert!(fixture.is_whole());
        fixture.read(1, 0, 4096);
    }
}

#[test]
fn a_detach_ends_volumes_that_are_being_added_or_closed() {
    for steps in 0..40 {
        let mut fixture = new_with_second(|s| s.paths = 2);
        fixture.server.more.add("vol2", 1 << 20);
        fixture
            .until("the first", 2 * SEC, |s| s.client.control.view().is_open(DeviceIndex::FIRST));
        add(&mut fixture, "vol2").expect("room");
        close(&mut fixture, "vol1").expect("others are left");
        fixture.run(MS / 100 * steps);
        fixture.detach();
        fixture.until("the end", 8 * SEC, |s| s.client.control.view().is_done());
        fixture.run(SEC);
        assert!(fixture.server.paths.is_empty(), "after {steps}");
    }
    let mut fixture = with_second(|s| s.config.no_path = NoPath::Fail);
    fixture.detach();
    assert_eq!(add(&mut fixture, "vol7"), Err(ChangeError::Detaching));
}
