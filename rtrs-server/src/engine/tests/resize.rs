//! Tests of exports that change size while clients use them, and of the announcements to
//! clients.

use rtrs_core::block::Geometry;
use rtrs_core::wire::{AccessMode, ClientExtensions, Imm, OpenRspTail, Rw, errno};

use super::fixture::{Fixture, StandOptions};
use super::peer::{Peer, PeerOptions, io};
use crate::engine::message::{AdminReply, AdminRequest, ControlMessage, Message};
use crate::export::ExportIndex;

const OLD: u64 = 1 << 20;
const RW: AccessMode = AccessMode::ReadWrite;

impl Fixture {
    /// Changes the size of `vol` without an announcement.
    fn set_size(&mut self, size: u64) {
        let mut state = self.device.lock();
        state.size = Some(size);
        state.bytes.resize(usize::try_from(size.max(2 * OLD)).unwrap(), 0);
    }

    /// Changes the size of `vol`.
    fn resize(&mut self, size: u64) {
        self.set_size(size);
        self.send(Message::Control(ControlMessage::Resized(ExportIndex(0))));
        self.settle();
    }

    fn remove_vol(&mut self) {
        let request = AdminRequest::ExportRemove { name: "vol".into(), force: true };
        let answer = self.admin(request).lock().take();
        assert!(matches!(answer, Some(AdminReply::ExportRemoved { .. })), "{answer:?}");
    }
}

/// A path of a client that accepts CHANGED.
fn accepts_changed(session: u8, path: u8) -> PeerOptions {
    let extensions = ClientExtensions { changed: true, ..ClientExtensions::default() };
    PeerOptions { session, path, local: path, extensions, ..PeerOptions::default() }
}

const CHANGED: (usize, Imm) = (0, Imm::Changed { device: 0 });

/// Opens `vol` again. Returns its size, or the errno.
fn open_again(peer: &mut Peer, fixture: &mut Fixture) -> Result<u64, u16> {
    peer.open_device(fixture, "vol", RW).map(|opened| opened.nsectors * 512)
}

#[test]
fn every_path_is_notified_once_until_it_reopens() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut first = Peer::open(&mut fixture, accepts_changed(1, 1));
    let mut second = Peer::up(&mut fixture, accepts_changed(1, 2), "sess");
    let mut other = Peer::up(&mut fixture, accepts_changed(2, 3), "other");
    other.open_device(&mut fixture, "other", RW).unwrap();
    fixture.resize(2 * OLD);
    for peer in [&mut first, &mut second] {
        assert_eq!(peer.immediates(&mut fixture), [CHANGED]);
    }
    assert_eq!(other.immediates(&mut fixture), [], "it has another export");
    // The size changes again before the client asks, and the answer reports the new size.
    fixture.resize(3 * OLD);
    fixture.resize(4 * OLD);
    assert_eq!(first.immediates(&mut fixture), []);
    assert_eq!(open_again(&mut first, &mut fixture), Ok(4 * OLD));
    // A later change is announced only on this path.
    fixture.resize(5 * OLD);
    assert_eq!(first.immediates(&mut fixture), [CHANGED]);
    assert_eq!(second.immediates(&mut fixture), []);
    assert_eq!(open_again(&mut second, &mut fixture), Ok(5 * OLD));
}

#[test]
fn an_open_by_another_spelling_acknowledges_a_resize_too() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::up(&mut fixture, accepts_changed(1, 1), "sess");
    for (name, size) in [("//vol", 2), ("/vol", 3), ("vol", 4)] {
        peer.open_device(&mut fixture, name, RW).unwrap();
        fixture.resize(size * OLD);
        assert_eq!(peer.immediates(&mut fixture), [CHANGED], "{name}");
    }
    peer.open_device(&mut fixture, "//vol", RW).unwrap();
    fixture.remove_vol();
    assert_eq!(peer.immediates(&mut fixture), [CHANGED], "an idle client hears of a removal");
}

#[test]
fn clients_without_the_extension_are_not_notified() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut kernel = Peer::open(&mut fixture, PeerOptions::default());
    fixture.resize(2 * OLD);
    fixture.remove_vol();
    assert_eq!(kernel.immediates(&mut fixture), []);
}

#[test]
fn a_path_is_not_notified_before_info_rsp() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut first = Peer::open(&mut fixture, accepts_changed(1, 1));
    let mut second = Peer::new(&fixture, accepts_changed(1, 2));
    for cid in 0..3 {
        second.connect(&mut fixture, cid).unwrap();
    }
    fixture.resize(2 * OLD);
    assert_eq!(first.immediates(&mut fixture), [CHANGED]);
    second.info(&mut fixture, "sess");
    assert_eq!(second.immediates(&mut fixture), []);
    assert_eq!(open_again(&mut second, &mut fixture), Ok(2 * OLD));
}

#[test]
fn io_follows_the_size() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, accepts_changed(1, 1));
    let end = OLD / 512;
    let mut write = |fixture: &mut Fixture, conn: usize, sector| {
        peer.send_write((conn, 6), io(Rw::WRITE, sector, 512), &[7; 512]);
        peer.reply(fixture).errno
    };
    assert_eq!(write(&mut fixture, 1, end), errno::ENOSPC);
    // The new size applies on both shards before any announcement.
    fixture.set_size(2 * OLD);
    assert_eq!((write(&mut fixture, 1, end), write(&mut fixture, 2, end + 1)), (0, 0));
    assert_eq!(write(&mut fixture, 1, 2 * end), errno::ENOSPC);
    fixture.set_size(OLD);
    assert_eq!((write(&mut fixture, 1, end), write(&mut fixture, 2, 0)), (errno::ENOSPC, 0));
    let desc = peer.result_desc(512);
    let message = super::peer::read_message(32, Some(desc), false);
    drop(message);
    peer.send_read((1, 6), io(Rw::READ, end, 512));
    assert_eq!(peer.reply(&mut fixture).errno, errno::EINVAL);
}

#[test]
fn a_forced_removal_is_announced_at_once() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::up(&mut fixture, accepts_changed(1, 1), "sess");
    peer.send_open_for(15, "vol", RW, OpenRspTail::LONG_LEN);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    fixture.remove_vol();
    assert_eq!(peer.immediates(&mut fixture), [CHANGED]);
    peer.send_open_for(15, "vol", RW, OpenRspTail::LONG_LEN);
    assert_eq!(peer.reply(&mut fixture).errno, errno::EIDRM);
    // The refusal was the answer; nothing is outstanding.
    fixture.resize(2 * OLD);
    assert_eq!(peer.immediates(&mut fixture), []);
}

#[test]
fn an_unacknowledged_notification_ends_with_its_path() {
    let mut fixture =
        Fixture::new(StandOptions { geometry: Geometry::plain(OLD), ..StandOptions::default() });
    let mut silent = Peer::open(&mut fixture, accepts_changed(1, 1));
    for round in 2..2000 {
        fixture.resize(round * 4096);
    }
    assert_eq!(silent.immediates(&mut fixture), [CHANGED]);
    silent.leave(&mut fixture);
    fixture.assert_empty();
    let mut peer = Peer::open(&mut fixture, PeerOptions { recon_cnt: 2, ..accepts_changed(1, 1) });
    assert_eq!(peer.immediates(&mut fixture), []);
}
