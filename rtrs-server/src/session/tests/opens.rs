//! Opens of what is not exported by name: searched for, shared, closed, found too late.

use std::sync::Arc;

use rtrs_core::wire::{AccessMode, OpenRsp, Rw, errno};

use super::peer::{Peer, PeerOptions, io};
use super::stand::{Stand, StandOptions};
use crate::session::ServerLife;

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
    for (volatile, write_cache, told) in
        [(false, true, 5), (false, false, 0), (true, true, 6), (true, false, 6)]
    {
        let mut options = StandOptions { volatile, ..StandOptions::default() };
        options.params.life = life;
        options.geometry.write_cache = write_cache;
        let mut stand = Stand::new(options);
        let mut peer = Peer::up(&mut stand, PeerOptions::default(), "sess");
        let opened = peer.open_device(&mut stand, "vol", AccessMode::ReadWrite).unwrap();
        assert_eq!((opened.cache_id, opened.volatile), (told, volatile));
        peer.leave(&mut stand);
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
    assert_eq!((search.name.as_bytes(), search.access), (&b"dir/disk"[..], AccessMode::ReadOnly));
    assert_eq!(peer.replies(&mut stand), [], "not before it is found");
    stand.answer(search, Err(errno::ENOTBLK));
    assert_eq!(peer.reply(&mut stand).errno, errno::ENOTBLK);

    let opened = open_found(&mut stand, &mut peer, "disk").unwrap();
    assert_eq!(opened.device_id, 1);
    let write = rtrs_core::wire::IoHeader { device_id: 1, ..io(Rw::WRITE, 0, 512) };
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
