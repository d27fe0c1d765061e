//! Opens of what is not exported by name: searched for, shared, closed, found too late.

use std::sync::Arc;

use rtrs_core::identity::ExportId;
use rtrs_core::time::Duration;
use rtrs_core::wire::{AccessMode, IoHeader, OpenRsp, OpenRspTail, Rw, errno};

use super::peer::{Peer, PeerOptions, io};
use super::stand::{Stand, StandOptions};
use crate::engine::session::ServerLife;

fn searching() -> Stand {
    Stand::new(StandOptions { search: true, ..StandOptions::default() })
}

fn other_session() -> PeerOptions {
    PeerOptions { session: 2, path: 9, local: 1, ..PeerOptions::default() }
}

/// Opens what the finder finds.
fn open_found(stand: &mut Stand, peer: &mut Peer, name: &str) -> Result<OpenRsp, u16> {
    peer.clear_result();
    peer.send_open(stand, 15, name, AccessMode::ReadWrite);
    let search = stand.search().expect("a search");
    let found = Arc::clone(stand.found.as_ref().unwrap());
    stand.answer(search, Ok(found));
    match peer.reply(stand).errno {
        0 => Ok(OpenRsp::decode(&peer.result(OpenRsp::LEN)).unwrap()),
        errno => Err(errno),
    }
}

#[test]
fn a_device_says_what_its_unflushed_writes_hang_on() {
    let life = ServerLife { boot: 5, process: 6 };
    for (volatile, write_cache, told) in [
        (false, true, Some(5)),
        (false, false, None),
        (true, true, Some(6)),
        (true, false, Some(6)),
    ] {
        let mut options = StandOptions { volatile, ..StandOptions::default() };
        options.params.life = life;
        options.geometry.write_cache = write_cache;
        let mut stand = Stand::new(options);
        let mut peer = Peer::up(&mut stand, PeerOptions::default(), "sess");
        let opened = peer.open_device(&mut stand, "vol", AccessMode::ReadWrite).unwrap();
        assert_eq!(opened.volatile, volatile);
        match told {
            Some(told) => assert_eq!(opened.cache_id, told),
            // One for all starts of the host.
            None => assert!(![0, 5, 6].contains(&opened.cache_id)),
        }
        peer.leave(&mut stand);
    }
}

#[test]
fn only_who_has_room_for_the_long_answer_gets_it() {
    let mut stand = Stand::new(StandOptions::default());
    let mut peer = Peer::up(&mut stand, PeerOptions::default(), "sess");
    let session = PeerOptions::default().request(0).session_id;
    let secret = stand.params.eviction_key.secret(session);
    let mut open = |room: usize| {
        peer.clear_result();
        peer.send_open_for(&stand, 15, ("vol", AccessMode::ReadWrite), room);
        assert_eq!(peer.reply(&mut stand).errno, 0);
        peer.result(192)
    };
    // What a kernel's client gets, to the last byte.
    let short = open(OpenRsp::LEN);
    assert_eq!(short[56..], [0xee; 136]);
    for room in [57, 72, 127] {
        let padded = open(room);
        assert_eq!(padded[..56], short[..56]);
        assert!(padded[56..room].iter().all(|byte| *byte == 0), "room for {room}");
    }
    for room in [128, 192] {
        let long = open(room);
        assert_eq!(long[..56], short[..56]);
        let tail = OpenRspTail::decode(&long).unwrap();
        assert_eq!(tail.export, Some(ExportId::of_name("vol")));
        assert_eq!(tail.secret, secret);
        assert!(long[96..room].iter().all(|byte| *byte == 0), "room for {room}");
    }
}

#[test]
fn a_name_that_is_not_exported_is_searched_for() {
    let mut stand = searching();
    let mut peer = Peer::up(&mut stand, PeerOptions::default(), "sess");
    // Named exports need no search, and what goes up is not searched for.
    assert_eq!(peer.open_device(&mut stand, "vol", AccessMode::ReadWrite).unwrap().device_id, 0);
    for name in ["", "../vol", "a..b"] {
        let opened = peer.open_device(&mut stand, name, AccessMode::ReadWrite);
        assert_eq!(opened.unwrap_err(), errno::EINVAL);
    }
    assert_eq!(stand.search(), None);

    peer.send_open(&stand, 15, "dir/disk", AccessMode::ReadOnly);
    let search = stand.search().unwrap();
    assert_eq!(search.session.as_bytes(), b"sess");
    assert_eq!(
        (search.name.as_bytes(), search.mode.access),
        (&b"dir/disk"[..], AccessMode::ReadOnly)
    );
    assert_eq!(peer.replies(&mut stand), [], "not before it is found");
    stand.answer(search, Err(errno::ENOTBLK));
    assert_eq!(peer.reply(&mut stand).errno, errno::ENOTBLK);

    let opened = open_found(&mut stand, &mut peer, "disk").unwrap();
    assert_eq!(opened.device_id, 1);
    let write = IoHeader { device_id: 1, ..io(Rw::WRITE, 0, 512) };
    peer.send_write(&stand, (2, 3), write, &[7; 512]);
    assert_eq!(peer.reply(&mut stand).errno, 0);
    assert_eq!(stand.open_names(), ["vol", "found"]);
    peer.leave(&mut stand);
    stand.assert_empty();
}

#[test]
fn what_was_found_is_shared_and_let_go_with_its_last_session() {
    let mut stand = searching();
    let mut one = Peer::up(&mut stand, PeerOptions::default(), "one");
    let mut two = Peer::up(&mut stand, other_session(), "two");
    open_found(&mut stand, &mut one, "disk").unwrap();
    assert_eq!(open_found(&mut stand, &mut two, "disk").unwrap_err(), errno::EPERM);
    one.send_read(&stand, (1, 0), io(Rw::READ, 0, 512));
    one.send_read(&stand, (2, 1), io(Rw::READ, 0, 512));
    assert_eq!(one.replies(&mut stand).len(), 2, "open on both cores");
    let held = || Arc::strong_count(stand.found.as_ref().unwrap());
    assert_eq!(held(), 1 + 1 + 2, "the test, the table and both cores");
    one.send_close(&stand, 0, 0);
    assert_eq!(one.reply(&mut stand).errno, 0);
    let held = |stand: &Stand| Arc::strong_count(stand.found.as_ref().unwrap());
    assert_eq!(held(&stand), 1, "closed everywhere");
    open_found(&mut stand, &mut two, "disk").unwrap();
    two.leave(&mut stand);
    assert_eq!(held(&stand), 1);
    one.leave(&mut stand);
    stand.assert_empty();
}

#[test]
fn what_is_found_too_late_is_dropped() {
    let mut stand = searching();
    let mut peer = Peer::up(&mut stand, PeerOptions::default(), "sess");
    peer.send_open(&stand, 15, "disk", AccessMode::ReadWrite);
    let search = stand.search().unwrap();
    peer.leave(&mut stand);
    stand.assert_empty();
    let found = stand.found.take().unwrap();
    stand.answer(search, Ok(Arc::clone(&found)));
    assert_eq!(Arc::strong_count(&found), 1);
    stand.assert_empty();
}

/// A session that has closed `vol`, at which a write of it still runs; and another session.
fn closed_over_a_write(stand: &mut Stand) -> (Peer, Peer) {
    let mut old = Peer::open(stand, PeerOptions::default());
    let mut new = Peer::up(stand, other_session(), "two");
    stand.device.lock().hold = true;
    old.send_write(stand, (2, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    stand.settle();
    old.send_close(stand, 7, 0);
    assert_eq!(old.replies(stand), [], "a write of it still runs");
    let opened = new.open_device(stand, "vol", AccessMode::ReadWrite);
    assert_eq!(opened.unwrap_err(), errno::EPERM, "that write could land after newer ones");
    (old, new)
}

/// Opens for writing, writes.
fn overwrite(stand: &mut Stand, new: &mut Peer) {
    let opened = new.open_device(stand, "vol", AccessMode::ReadWrite).unwrap();
    let write = IoHeader { device_id: opened.device_id, ..io(Rw::WRITE, 0, 512) };
    new.send_write(stand, (1, 3), write, &[2; 512]);
    assert_eq!(new.reply(stand).errno, 0);
    assert_eq!(stand.device.lock().bytes[..512], [2; 512]);
    assert_eq!(stand.device.lock().log.len(), 2);
}

#[test]
fn an_export_is_given_back_when_the_last_write_before_the_close_has_ended() {
    let mut stand = Stand::new(StandOptions::default());
    let (mut old, mut new) = closed_over_a_write(&mut stand);
    // Nothing more of it begins, and it cannot have the export again before.
    old.send_write(&stand, (2, 8), io(Rw::WRITE, 0, 512), &[3; 512]);
    assert_eq!(old.reply(&mut stand).errno, errno::ENOTCONN);
    let opened = old.open_device(&mut stand, "vol", AccessMode::ReadOnly);
    assert_eq!(opened.unwrap_err(), errno::EBUSY);
    stand.device.lock().hold = false;
    stand.pass(Duration::from_millis(5));
    let mut ended: Vec<_> =
        old.replies(&mut stand).iter().map(|reply| (reply.permit, reply.errno)).collect();
    ended.sort_unstable();
    assert_eq!(ended, [(6, 0), (7, 0)], "the write and the close");
    overwrite(&mut stand, &mut new);
    assert_eq!(old.open_device(&mut stand, "vol", AccessMode::ReadOnly).unwrap().device_id, 0);
    for peer in [&mut old, &mut new] {
        peer.leave(&mut stand);
    }
    stand.assert_empty();
}

#[test]
fn a_session_that_goes_before_its_close_is_answered_gives_the_export_back_in_the_end() {
    let mut stand = Stand::new(StandOptions::default());
    let (mut old, mut new) = closed_over_a_write(&mut stand);
    old.leave(&mut stand);
    let opened = new.open_device(&mut stand, "vol", AccessMode::ReadWrite);
    assert_eq!(opened.unwrap_err(), errno::EPERM);
    assert_eq!(stand.sessions().len(), 2, "it ends with its write");
    assert_eq!(stand.open_names(), ["vol"], "which the operator sees");
    stand.device.lock().hold = false;
    stand.pass(Duration::from_millis(5));
    assert_eq!(stand.sessions().len(), 1);
    overwrite(&mut stand, &mut new);
    new.leave(&mut stand);
    stand.assert_empty();
}
