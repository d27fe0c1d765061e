//! Tests of a different server or disk behind the session's address, and of the proof that an
//! eviction needs.

use rtrs_core::block::IoOp;
use rtrs_core::identity::{ExportId, Identity, ServerId};
use rtrs_core::status::IoStatus;
use rtrs_core::wire::{ConnRsp, Extensions};

use super::fixture::{Fixture, SEC, SECRET};
use super::server::How;
use crate::engine::{DeviceIndex, NoPath, SessionFailure};
use crate::path::state::PathState;

const HOME: [u8; 16] = [1; 16];
const OTHER: [u8; 16] = [2; 16];

fn export(name: &str) -> Option<ExportId> {
    Some(ExportId::of_name(name))
}

fn weak(boot: u64, name: &str) -> Option<ExportId> {
    Some(ExportId::weak(boot, "test", &[name.as_bytes()]))
}

fn fixture(server_id: Option<[u8; 16]>, export_id: Option<ExportId>) -> Fixture {
    Fixture::open(|s| {
        s.paths = 2;
        (s.how.server_id, s.how.export_id) = (server_id, export_id);
    })
}

/// Ends all paths, and makes a changed server answer from now on.
fn replace(fixture: &mut Fixture, change: impl FnOnce(&mut How)) {
    change(&mut fixture.server.how);
    for path in 0..fixture.server.paths.len() {
        fixture.server.end_path(fixture.now(), path);
    }
    fixture.until("the paths' end", SEC, |s| {
        s.client.states().iter().all(|state| *state != PathState::Connected)
    });
}

/// Checks that both paths stay down for this reason, and that IO fails as it does without a path.
fn assert_refused(fixture: &mut Fixture, why: &str) {
    fixture.until(why, 5 * SEC, |s| (0..2).all(|path| s.client.last_error(path).contains(why)));
    for path in 0..2 {
        let error = fixture.client.last_error(path);
        assert!(error.starts_with("cannot use this path: "), "{error}");
    }
    let tag = fixture.submit(0, IoOp::Read, 0, 4096);
    fixture.drain(10 * SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::TimedOut), "{why}");
    assert!(fixture.client.states().iter().all(|state| *state != PathState::Connected));
}

fn assert_back(fixture: &mut Fixture, change: impl FnOnce(&mut How)) {
    change(&mut fixture.server.how);
    fixture.until("the paths", 10 * SEC, Fixture::is_whole);
    fixture.read(0, 0, 4096);
}

#[test]
fn another_server_is_not_used_and_the_right_one_is_found_again() {
    let ours = (Some(HOME), export("a"));
    let mut fixture = fixture(ours.0, ours.1);
    for (other, why) in [
        ((Some(OTHER), export("a")), "it leads to server 0202"),
        ((Some([0; 16]), export("a")), "this server reports no ID"),
        ((None, None), "this server reports no ID"),
        ((Some(HOME), export("b")), "the export is a different disk or file"),
        ((Some(HOME), weak(1, "a")), "the export is a different disk or file"),
        ((Some(HOME), None), "the server reports no ID for the export"),
    ] {
        replace(&mut fixture, |how| (how.server_id, how.export_id) = other);
        assert_refused(&mut fixture, why);
        assert_back(&mut fixture, |how| (how.server_id, how.export_id) = ours);
    }
}

#[test]
fn one_path_to_another_server_stays_down_while_the_other_carries_on() {
    let mut fixture = fixture(Some(HOME), export("a"));
    fixture.server.how.server_id = Some(OTHER);
    fixture.server.end_path(fixture.now(), 1);
    fixture.until("the error", 5 * SEC, |s| {
        s.client.last_error(1).contains("it leads to server 0202")
    });
    assert_eq!(fixture.client.states()[0], PathState::Connected);
    fixture.read(0, 0, 4096);
    fixture.server.how.server_id = Some(HOME);
    fixture.until("the paths", 10 * SEC, Fixture::is_whole);
}

#[test]
fn an_id_that_appears_is_pinned() {
    // The server was upgraded.
    let mut fixture = fixture(None, None);
    let pinned = |s: &Fixture| s.client.control.view().pinned_identity(DeviceIndex::FIRST);
    assert_eq!(pinned(&fixture), None);
    replace(&mut fixture, |how| how.server_id = Some(HOME));
    assert_back(&mut fixture, |_| {});
    let server = ServerId::from_bytes(HOME);
    assert_eq!(pinned(&fixture), Some(Identity { server, export: None }));
    replace(&mut fixture, |how| how.export_id = export("a"));
    assert_back(&mut fixture, |_| {});
    assert_eq!(pinned(&fixture), Some(Identity { server, export: export("a") }));
    replace(&mut fixture, |how| how.server_id = None);
    assert_refused(&mut fixture, "this server reports no ID");
}

#[test]
fn an_id_is_not_pinned_alongside_a_path_that_did_not_report_it() {
    let nothing = (None, None);
    for (before, beside) in [
        (nothing, (Some(HOME), None)),
        (nothing, (Some(HOME), export("a"))),
        ((Some(HOME), None), (Some(HOME), export("a"))),
        // Two cloned machines have the same machine ID.
        ((Some(HOME), weak(1, "a")), (Some(HOME), weak(2, "a"))),
    ] {
        let mut fixture = fixture(before.0, before.1);
        let pinned = fixture.client.control.view().pinned_identity(DeviceIndex::FIRST);
        (fixture.server.how.server_id, fixture.server.how.export_id) = beside;
        fixture.server.end_path(fixture.now(), 1);
        let down = |s: &Fixture| {
            s.client.last_error(1).contains("an ID that the connected paths did not report")
        };
        fixture.until("the error", 5 * SEC, down);
        fixture.run(10 * SEC);
        assert_eq!(fixture.client.states()[0], PathState::Connected);
        assert_ne!(fixture.client.states()[1], PathState::Connected, "two disks");
        assert_eq!(fixture.client.control.view().pinned_identity(DeviceIndex::FIRST), pinned);
        fixture.read(0, 0, 4096);
        // Both paths led to the same server, so the older one ends too.
        fixture.server.end_path(fixture.now(), 0);
        fixture.until("the paths", 10 * SEC, Fixture::is_whole);
        assert_ne!(fixture.client.control.view().pinned_identity(DeviceIndex::FIRST), pinned);
    }
}

#[test]
fn a_weak_id_holds_until_the_servers_host_reboots() {
    let mut fixture = fixture(Some(HOME), weak(1, "a"));
    replace(&mut fixture, |_| {});
    assert_back(&mut fixture, |_| {});
    replace(&mut fixture, |how| how.export_id = weak(1, "b"));
    assert_refused(&mut fixture, "the export is a different disk or file");
    // After a reboot, the device's geometry decides, as for a kernel server.
    assert_back(&mut fixture, |how| how.export_id = weak(2, "b"));
    replace(&mut fixture, |how| how.export_id = weak(2, "a"));
    assert_refused(&mut fixture, "the export is a different disk or file");
    replace(&mut fixture, |how| (how.export_id, how.size) = (weak(3, "a"), how.size * 2));
    assert_refused(&mut fixture, "no ID proves that it is the same");
}

#[test]
fn a_configured_identity_is_required_even_of_the_first_path() {
    let asked = |server: [u8; 16], name: &str| {
        let identity = Identity { server: ServerId::from_bytes(server), export: export(name) };
        Fixture::new(|s| {
            s.paths = 2;
            (s.how.server_id, s.how.export_id) = (Some(HOME), export("a"));
            s.config.volumes[0].identity = Some(identity);
        })
    };
    let mut right = asked(HOME, "a");
    right.until("the device", 5 * SEC, Fixture::is_whole);
    for mut wrong in [asked(OTHER, "a"), asked(HOME, "b")] {
        wrong.until("the failure", 5 * SEC, |s| s.client.control.failure().is_some());
        let failure = wrong.client.control.failure().map(ToString::to_string).unwrap_or_default();
        assert!(failure.contains("cannot use this path: "), "{failure}");
    }
}

/// Builds a reject that ends the session, with the proof if one is given.
fn estale(identity: Option<[u8; 16]>) -> Option<Vec<u8>> {
    let ext = Extensions { identity, ..Extensions::default() }.encode();
    Some(ConnRsp { ext, ..ConnRsp::reject(116) }.encode().to_vec())
}

#[test]
fn only_the_proven_server_can_end_a_session() {
    let mut fixture = Fixture::open(|s| {
        s.paths = 2;
        s.config.no_path = NoPath::Queue;
        s.how.server_id = Some(HOME);
    });
    for lie in [estale(None), estale(Some([0; 16])), estale(Some([0xaa; 16]))] {
        replace(&mut fixture, |how| how.refuse = lie);
        let tag = fixture.submit(0, IoOp::Write, 0, 4096);
        fixture.until("the error", 5 * SEC, |s| {
            (0..2).all(|path| s.client.last_error(path).contains("does not prove"))
        });
        fixture.run(30 * SEC);
        assert_eq!(fixture.client.control.failure(), None);
        assert_eq!(fixture.client.status(tag), None, "it waits");
        assert_back(&mut fixture, |how| how.refuse = None);
        fixture.drain(SEC);
        assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    }
    let proof = estale(Some(SECRET.0));
    replace(&mut fixture, |how| how.refuse = proof);
    fixture.until("the end", 5 * SEC, |s| {
        s.client.control.failure() == Some(&SessionFailure::Evicted)
    });
}

#[test]
fn no_reject_evicts_a_session_whose_server_gave_no_secret() {
    // The server predates the extension, or is a kernel server.
    let mut fixture = fixture(None, None);
    replace(&mut fixture, |how| how.refuse = estale(None));
    fixture.run(5 * SEC);
    assert_eq!(fixture.client.control.failure(), None);
    assert_back(&mut fixture, |how| how.refuse = None);
}

#[test]
fn a_successor_does_not_wait_for_the_wrong_disk() {
    for (server_id, name) in [(OTHER, "a"), (HOME, "b")] {
        let mut fixture = Fixture::new(|s| {
            s.paths = 2;
            (s.how.server_id, s.how.export_id) = (Some(server_id), export(name));
            s.config.open_patience = 60 * SEC;
            s.config.volumes[0].identity =
                Some(Identity { server: ServerId::from_bytes(HOME), export: export("a") });
        });
        fixture.until("the failure", 2 * SEC, |s| s.client.control.failure().is_some());
        let why = fixture.client.control.failure().map(ToString::to_string);
        assert!(why.is_some_and(|why| why.contains("cannot use this path: ")));
    }
}
