//! Tests of CHANGED: a device that grows or shrinks, or whose export is removed, during a connected
//! session.

use rtrs_core::block::IoOp;
use rtrs_core::identity::ExportId;
use rtrs_core::status::IoStatus;
use rtrs_core::wire::{Imm, OpenRsp, errno};

use super::fixture::{Fixture, MS, SEC, Setup};
use crate::engine::SessionFailure;
use crate::path::state::PathState;

const OLD: u64 = 1 << 20;

/// Opens a session over two paths with an export that the server can prove to be the same.
fn fixture(change: impl FnOnce(&mut Setup)) -> Fixture {
    Fixture::open(|s| {
        (s.paths, s.how.size) = (2, 1 << 20);
        (s.how.server_id, s.how.export_id) = (Some([1; 16]), Some(ExportId::of_name("vol")));
        change(s);
    })
}

impl Fixture {
    fn set_size(&mut self, size: u64) {
        self.server.how.size = usize::try_from(size).unwrap();
        self.server.disk.resize(self.server.how.size, 0);
    }

    fn send_changed(&mut self, path: usize) {
        let device = self.server.device.expect("an open device");
        self.server.immediate(path, 0, Imm::Changed { device }.encode());
    }

    fn send_changed_to_all(&mut self) {
        (0..self.server.paths.len()).for_each(|path| self.send_changed(path));
    }

    /// Number of opens so far: two control requests each.
    fn opens(&self) -> usize {
        self.server.requests().filter(|r| r.io.is_none() && r.cid.0 == 0).count() / 2
    }

    fn end_of(&mut self, op: IoOp, offset: u64) -> Option<IoStatus> {
        let tags = [0, 1].map(|shard| self.submit(shard, op, offset, 4096));
        self.drain(5 * SEC);
        let [first, second] = tags.map(|tag| self.client.status(tag));
        assert_eq!(first, second, "both shards");
        first
    }
}

#[test]
fn a_device_that_grows_is_used_at_once() {
    let mut fixture = fixture(|_| {});
    assert_eq!(fixture.end_of(IoOp::Write, OLD), Some(IoStatus::NoSpace));
    let before = fixture.opens();
    fixture.set_size(2 * OLD);
    fixture.send_changed_to_all();
    fixture.run(20 * MS);
    assert_eq!(fixture.opens(), before + 2, "on each path, one after the other");
    assert_eq!(fixture.end_of(IoOp::Write, OLD), Some(IoStatus::Ok));
    fixture.read(1, 2 * OLD - 4096, 4096);
    assert_eq!(fixture.client.states(), [PathState::Connected; 2]);
    // Notified over only one path, as if the other notification had been lost.
    fixture.set_size(3 * OLD);
    fixture.send_changed(1);
    fixture.run(200 * MS);
    assert_eq!(fixture.end_of(IoOp::Read, 2 * OLD), Some(IoStatus::Ok));
}

#[test]
fn a_device_without_an_id_keeps_its_size_and_its_paths() {
    let mut fixture = fixture(|s| s.how.export_id = None);
    for size in [2 * OLD, OLD / 2] {
        fixture.set_size(size);
        fixture.send_changed_to_all();
        fixture.run(20 * MS);
        assert_eq!(fixture.client.states(), [PathState::Connected; 2], "{size}");
        assert_eq!(fixture.end_of(IoOp::Write, OLD), Some(IoStatus::NoSpace), "{size}");
        assert_eq!(fixture.end_of(IoOp::Write, 0), Some(IoStatus::Ok), "{size}");
    }
}

#[test]
fn a_device_that_shrinks_fails_io_beyond_its_end() {
    let mut fixture = fixture(|_| {});
    fixture.set_size(OLD / 2);
    fixture.send_changed(0);
    fixture.run(20 * MS);
    assert_eq!(fixture.end_of(IoOp::Write, OLD / 2), Some(IoStatus::NoSpace));
    assert_eq!(fixture.end_of(IoOp::Read, OLD / 2), Some(IoStatus::Invalid));
    assert_eq!(fixture.end_of(IoOp::Write, 0), Some(IoStatus::Ok));
    assert_eq!(fixture.client.states(), [PathState::Connected; 2]);
}

#[test]
fn a_device_that_shrank_while_no_path_was_up_reports_a_loss() {
    let mut fixture = fixture(|s| s.how.cache_id = 7);
    assert_eq!(fixture.end_of(IoOp::Write, OLD - 4096), Some(IoStatus::Ok));
    fixture.set_size(OLD / 2);
    for path in (0..2).rev() {
        fixture.server.end_path(fixture.now(), path);
    }
    fixture.run(20 * MS);
    fixture.until("both", 5 * SEC, Fixture::is_whole);
    let flush = |fixture: &mut Fixture| {
        let tag = fixture.submit(0, IoOp::Flush, 0, 0);
        fixture.drain(SEC);
        fixture.client.status(tag)
    };
    assert_eq!(flush(&mut fixture), Some(IoStatus::Io));
    assert_eq!(flush(&mut fixture), Some(IoStatus::Ok));
}

#[test]
fn another_device_in_the_answer_ends_the_path() {
    let other: [fn(OpenRsp) -> OpenRsp; 3] = [
        |rsp| OpenRsp { device_id: rsp.device_id + 1, ..rsp },
        |rsp| OpenRsp { logical_block_size: 4096, ..rsp },
        |rsp| OpenRsp { nsectors: 0, ..rsp },
    ];
    for lie in other {
        let mut fixture = fixture(|_| {});
        fixture.server.how.open_rsp = Some(Box::new(lie));
        fixture.send_changed(0);
        fixture.run(20 * MS);
        assert_ne!(fixture.client.states()[0], PathState::Connected);
        assert_eq!(fixture.client.states()[1], PathState::Connected);
        fixture.read(0, 0, 4096);
    }
    let mut fixture = fixture(|_| {});
    fixture.server.how.export_id = Some(ExportId::of_name("other"));
    fixture.set_size(2 * OLD);
    fixture.send_changed(0);
    fixture.run(20 * MS);
    assert!(fixture.client.last_error(0).contains("different disk or file"));
    assert_eq!(fixture.end_of(IoOp::Write, OLD), Some(IoStatus::NoSpace));
}

#[test]
fn a_flood_of_changed_costs_ten_opens_a_second() {
    let mut fixture = fixture(|_| {});
    let before = fixture.opens();
    for round in 0..1000 {
        for path in 0..2 {
            fixture.send_changed(path);
            let unknown = Imm::Changed { device: 77 + round };
            fixture.server.immediate(path, 0, unknown.encode());
        }
        fixture.run(MS);
    }
    let opens = fixture.opens() - before;
    assert!((18..=22).contains(&opens), "{opens} over two paths");
    assert_eq!(fixture.client.states(), [PathState::Connected; 2]);
    fixture.read(0, 0, 4096);
    fixture.run(SEC);
    assert!(fixture.opens() - before <= opens + 2, "it ends with the flood");
}

#[test]
fn changes_of_other_devices_are_ignored() {
    let mut fixture = fixture(|_| {});
    let before = fixture.opens();
    for device in [1, 77, (1 << 28) - 1] {
        fixture.server.immediate(0, 0, Imm::Changed { device }.encode());
    }
    fixture.run(SEC);
    assert_eq!(fixture.opens(), before);
}

#[test]
fn changed_before_the_open_is_remembered() {
    let mut fixture = Fixture::new(|s| {
        s.how.hold_control = true;
        (s.how.server_id, s.how.export_id) = (Some([1; 16]), Some(ExportId::of_name("vol")));
    });
    fixture.until("the request", SEC, |s| s.server.held.len() == 1);
    fixture.server.immediate(0, 0, Imm::Changed { device: 0 }.encode());
    fixture.run(20 * MS);
    fixture.server.how.hold_control = false;
    fixture.server.release();
    fixture.until("the device", SEC, Fixture::is_whole);
    fixture.run(200 * MS);
    assert_eq!(fixture.opens(), 2, "one open and one reopen");
}

#[test]
fn an_idle_session_learns_of_its_exports_removal() {
    let mut fixture = fixture(|_| {});
    fixture.server.how.open_errno = errno::EIDRM;
    fixture.send_changed(1);
    fixture.until("the failure", 100 * MS, |s| {
        s.client.control.failure() == Some(&SessionFailure::Removed)
    });
    assert_eq!(fixture.end_of(IoOp::Read, 0), Some(IoStatus::TimedOut));
}

#[test]
fn another_refusal_leaves_the_path_as_it_is() {
    let mut fixture = fixture(|_| {});
    fixture.server.how.open_errno = errno::ENOENT;
    fixture.send_changed_to_all();
    fixture.run(SEC);
    assert_eq!(fixture.client.states(), [PathState::Connected; 2]);
    fixture.read(0, 0, 4096);
    fixture.server.how.open_errno = 0;
    fixture.set_size(2 * OLD);
    fixture.send_changed(0);
    fixture.run(200 * MS);
    assert_eq!(fixture.end_of(IoOp::Read, OLD), Some(IoStatus::Ok));
}

#[test]
fn a_reopen_lost_with_its_path_is_repeated_on_another() {
    let mut fixture = fixture(|s| s.how.fence = true);
    fixture.server.how.hold_control = true;
    fixture.set_size(2 * OLD);
    fixture.send_changed_to_all();
    fixture.until("the request", SEC, |s| s.server.held.len() == 1);
    fixture.server.how.hold_control = false;
    let asked = fixture.server.paths.iter().position(|p| p.uuid == fixture.server.held[0].path);
    fixture.server.end_path(fixture.now(), asked.expect("a path"));
    fixture.server.held.clear();
    fixture.run(20 * MS);
    assert_eq!(fixture.end_of(IoOp::Read, OLD), Some(IoStatus::Ok), "over the other path");
    fixture.until("both", 5 * SEC, Fixture::is_whole);
}

#[test]
fn an_open_that_is_never_answered_ends_its_path() {
    let mut fixture = fixture(|_| {});
    fixture.server.how.hold_control = true;
    fixture.send_changed(0);
    fixture.run(9 * SEC);
    assert_eq!(fixture.client.states(), [PathState::Connected; 2]);
    fixture.until("its end", 2 * SEC, |s| {
        s.client.last_error(0).contains("the server did not answer the open of the device")
    });
    fixture.server.how.hold_control = false;
    fixture.until("both", 5 * SEC, Fixture::is_whole);
}
