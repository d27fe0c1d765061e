//! Tests of exports that are added or removed while clients use them: no write reaches the wrong
//! disk, no loss goes unreported, and removed exports are released.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rtrs_core::identity::ExportId;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Duration;
use rtrs_core::wire::{AccessMode, OpenRsp, OpenRspTail, Rw, errno};

use super::fixture::{DeviceState, Fixture, StandOptions, TestSource};
use super::peer::{Peer, PeerOptions, io};
use crate::engine::message::{AdminReply, AdminRequest};
use crate::export::Export;
use crate::stats::{ExportSnapshot, ExportState};

const RW: AccessMode = AccessMode::ReadWrite;

impl Fixture {
    /// Exports another disk.
    fn export(&self, name: &str, id: &str, disk: &Arc<Mutex<DeviceState>>) {
        let geometry = self.held("fixed").source.geometry();
        let source = TestSource {
            geometry,
            volatile: false,
            exclusive: true,
            sole_writer: false,
            state: Arc::clone(disk),
        };
        let id = Some(ExportId::of_name(id));
        let export = Export { id, ..Export::new(name, Arc::new(source)) };
        self.exports.add(&Arc::new(export)).unwrap();
    }

    /// Creates an empty disk.
    fn disk(&self) -> Arc<Mutex<DeviceState>> {
        let bytes = vec![0; self.device.lock().bytes.len()];
        Arc::new(Mutex::new(DeviceState { bytes, room: 64, ..DeviceState::default() }))
    }

    pub(super) fn held(&self, name: &str) -> Arc<Export> {
        let found = self.exports.find(name.as_bytes()).and_then(|at| self.exports.get(at));
        found.expect("an export")
    }

    /// Weak reference to an export, for counting its holders: the table, and shards that have the
    /// device open.
    fn holders(&self, name: &str) -> Weak<Export> {
        Arc::downgrade(&self.held(name))
    }
}

fn remove(fixture: &mut Fixture, name: &str, force: bool) -> Result<Vec<String>, String> {
    let request = AdminRequest::ExportRemove { name: name.into(), force };
    let answer = fixture.admin(request).lock().take();
    match answer {
        Some(AdminReply::ExportRemoved { ended }) => Ok(ended),
        Some(AdminReply::Refused(why)) => Err(why),
        other => panic!("{other:?}"),
    }
}

fn freeze(fixture: &mut Fixture, name: &str, frozen: bool) -> Result<(), String> {
    let request = AdminRequest::ExportFreeze { name: name.into(), frozen };
    let answer = fixture.admin(request).lock().take();
    match answer {
        Some(AdminReply::Done) => Ok(()),
        Some(AdminReply::Refused(why)) => Err(why),
        other => panic!("{other:?}"),
    }
}

fn list(fixture: &mut Fixture) -> Vec<ExportSnapshot> {
    let answer = fixture.admin(AdminRequest::Exports).lock().take();
    match answer {
        Some(AdminReply::Exports(all)) => all,
        other => panic!("{other:?}"),
    }
}

fn write(fixture: &mut Fixture, peer: &mut Peer, byte: u8) -> u16 {
    peer.send_write((1, 6), io(Rw::WRITE, 0, 512), &[byte; 512]);
    peer.reply(fixture).errno
}

fn flush(fixture: &mut Fixture, peer: &mut Peer) -> u16 {
    peer.send_flush((2, 7));
    peer.reply(fixture).errno
}

fn other() -> PeerOptions {
    PeerOptions { session: 2, path: 2, local: 2, ..PeerOptions::default() }
}

fn second_path() -> PeerOptions {
    PeerOptions { path: 2, local: 1, first_conn: false, ..PeerOptions::default() }
}

fn again() -> PeerOptions {
    PeerOptions { recon_cnt: 2, ..PeerOptions::default() }
}

/// A path of a client that, unlike a kernel client, checks the identity of the export it opens.
fn comparing(fixture: &mut Fixture, options: PeerOptions, name: &str) -> (Peer, Result<u32, u16>) {
    let mut peer = Peer::up(fixture, options, "sess");
    peer.clear_result();
    peer.send_open_for(15, name, RW, OpenRspTail::LONG_LEN);
    let opened = match peer.reply(fixture).errno {
        0 => Ok(OpenRsp::decode(&peer.result(OpenRsp::LEN)).unwrap().device_id),
        errno => Err(errno),
    };
    (peer, opened)
}

#[test]
fn an_unused_export_is_removed_and_one_in_use_is_not() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    assert_eq!(write(&mut fixture, &mut peer, 1), 0);
    assert_eq!(
        remove(&mut fixture, "vol", false).unwrap_err(),
        "export \"vol\" is open by sess (rw)"
    );
    let unknown = remove(&mut fixture, "none", true).unwrap_err();
    assert!(unknown.starts_with("there is no export \"none\""), "{unknown}");
    assert_eq!(remove(&mut fixture, "other", false), Ok(Vec::new()));
    assert_eq!(peer.open_device(&mut fixture, "other", RW).unwrap_err(), errno::ENOENT);
    assert_eq!(write(&mut fixture, &mut peer, 2), 0, "other exports still work");
    let held = fixture.holders("vol");
    peer.send_close(0, 0);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    assert_eq!(remove(&mut fixture, "vol", false), Ok(Vec::new()));
    fixture.settle();
    assert_eq!(held.strong_count(), 0, "no reference is left");
    let names: Vec<String> = list(&mut fixture).into_iter().map(|export| export.name).collect();
    assert_eq!(names, ["fixed"]);
}

#[test]
fn a_forced_removal_ends_devices_once_their_io_ended() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    peer.open_device(&mut fixture, "other", RW).unwrap();
    let held = fixture.holders("vol");
    fixture.device.lock().hold = true;
    peer.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    assert_eq!(remove(&mut fixture, "vol", true), Ok(vec!["sess".to_owned()]));
    let vol = list(&mut fixture).swap_remove(0);
    assert_eq!((&*vol.name, vol.state, vol.open_by.len()), ("vol", ExportState::Removing, 1));
    // New requests are refused, and those in flight are answered as they complete.
    peer.send_read((2, 8), io(Rw::READ, 0, 512));
    assert_eq!(peer.reply(&mut fixture).errno, errno::EIDRM);
    assert!(held.strong_count() > 0, "its write still runs");
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    assert_eq!(peer.reply(&mut fixture).errno, 0, "it was written");
    assert_eq!(fixture.device.lock().bytes[..512], [1; 512]);
    fixture.pass(Duration::from_millis(5));
    assert_eq!(held.strong_count(), 0, "it is released");
    assert_eq!(write(&mut fixture, &mut peer, 2), errno::EIDRM);
    assert_eq!(fixture.open_names(), ["other"]);
    peer.leave(&mut fixture);
    fixture.assert_empty();
}

#[test]
fn the_id_of_a_removed_export_is_not_reused_for_another_disk() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    let _ = remove(&mut fixture, "vol", true).unwrap();
    let disk = fixture.disk();
    fixture.export("vol", "another", &disk);
    // A kernel client maps another disk, and one under the old name, before it has noticed the
    // removal.
    assert_eq!(peer.open_device(&mut fixture, "other", RW).unwrap().device_id, 1);
    assert_eq!(peer.open_device(&mut fixture, "vol", RW).unwrap().device_id, 2);
    assert_eq!(write(&mut fixture, &mut peer, 1), errno::EIDRM);
    assert_eq!(disk.lock().bytes[..512], [0; 512]);
    peer.send_close(0, 0);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    assert_eq!(write(&mut fixture, &mut peer, 1), errno::ENOTCONN);
    assert_eq!(peer.open_device(&mut fixture, "fixed", AccessMode::ReadOnly).unwrap().device_id, 0);
}

#[test]
fn a_client_with_an_identity_does_not_get_a_later_export_of_the_same_name() {
    let mut fixture = Fixture::new(StandOptions::default());
    let (mut peer, opened) = comparing(&mut fixture, PeerOptions::default(), "vol");
    assert_eq!(opened, Ok(0));
    let _ = remove(&mut fixture, "vol", true).unwrap();
    let disk = fixture.disk();
    fixture.export("vol", "another", &disk);
    // The open is also refused over another path, and after all paths have been lost.
    let (mut second, opened) = comparing(&mut fixture, second_path(), "/vol");
    assert_eq!(opened, Err(errno::EIDRM));
    second.leave(&mut fixture);
    peer.leave(&mut fixture);
    fixture.assert_empty();
    let (mut peer, opened) = comparing(&mut fixture, again(), "vol");
    assert_eq!(opened, Err(errno::EIDRM));
    peer.leave(&mut fixture);
    // A client that attaches again can open the export.
    let (_new, opened) = comparing(&mut fixture, other(), "vol");
    assert_eq!(opened, Ok(0));
}

/// Removes `vol` under a kernel client with an unflushed write, exports this disk in its place, and
/// reconnects the client. Returns the results of its first two flushes.
fn flushes_after(id: &str, fails: bool) -> [u16; 2] {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    assert_eq!(write(&mut fixture, &mut peer, 1), 0);
    if fails {
        // Another session receives the disk's error.
        let mut beside = Peer::up(&mut fixture, other(), "beside");
        beside.open_device(&mut fixture, "vol", AccessMode::Migration).unwrap();
        fixture.device.lock().lost = Some(IoStatus::Io);
        assert_eq!(flush(&mut fixture, &mut beside), errno::EIO);
        beside.leave(&mut fixture);
    }
    let _ = remove(&mut fixture, "vol", true).unwrap();
    let disk = fixture.device.clone();
    fixture.export("vol", id, &disk);
    peer.leave(&mut fixture);
    let mut peer = Peer::up(&mut fixture, again(), "sess");
    peer.open_device(&mut fixture, "vol", RW).unwrap();
    [flush(&mut fixture, &mut peer), flush(&mut fixture, &mut peer)]
}

#[test]
fn unflushed_writes_at_a_removal_are_reported_later() {
    // The fixture's epoch is not saved, so whether it rose is unknown, which counts as a loss.
    assert_eq!(flushes_after("vol", true), [errno::EIO, 0]);
    assert_eq!(flushes_after("vol", false), [errno::EIO, 0]);
    assert_eq!(flushes_after("another", false), [errno::EIO, 0], "it was written elsewhere");
}

#[test]
fn a_session_ending_during_a_removal_leaves_nothing() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    let held = fixture.holders("vol");
    fixture.device.lock().hold = true;
    peer.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    let _ = remove(&mut fixture, "vol", true).unwrap();
    peer.leave(&mut fixture);
    fixture.pass(Duration::from_millis(20));
    assert!(held.strong_count() > 0, "the disk still has a write");
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(20));
    assert_eq!(held.strong_count(), 0);
    fixture.assert_empty();
    // The removed export's slot is free for another one.
    let disk = fixture.disk();
    fixture.export("new", "new", &disk);
    let mut peer = Peer::up(&mut fixture, other(), "sess");
    peer.open_device(&mut fixture, "new", RW).unwrap();
    assert_eq!(write(&mut fixture, &mut peer, 3), 0);
    assert_eq!(disk.lock().bytes[..512], [3; 512]);
}

#[test]
fn a_frozen_export_opens_for_reading_only() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    let why = freeze(&mut fixture, "vol", true).unwrap_err();
    assert!(why.starts_with("export \"vol\" is open for writing by sess (rw)"), "{why}");
    peer.send_close(0, 0);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    peer.open_device(&mut fixture, "vol", AccessMode::ReadOnly).unwrap();
    freeze(&mut fixture, "vol", true).unwrap();
    assert_eq!(peer.open_device(&mut fixture, "vol", RW).unwrap_err(), errno::EACCES);
    assert!(list(&mut fixture)[0].read_only);
    freeze(&mut fixture, "vol", false).unwrap();
    peer.open_device(&mut fixture, "vol", RW).unwrap();
    assert_eq!(write(&mut fixture, &mut peer, 1), 0);
}
