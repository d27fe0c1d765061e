//! Tests of opening names that are not exported: searches, sharing, closing, late results.

use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::block::{BlockDevice, BlockSource, Core, Geometry, TargetName};
use rtrs_core::identity::ExportId;
use rtrs_core::ids::{CoreIndex, PermitId};
use rtrs_core::time::Duration;
use rtrs_core::wire::{
    AccessMode, IoHeader, Name, Open, OpenFlags, OpenRefusal, OpenRsp, OpenRspTail, Rw, errno,
};

use super::fixture::{Fixture, StandOptions};
use super::peer::{Peer, PeerOptions, io};
use crate::backend::MemorySource;
use crate::engine::finder::{Examined, Examiner, OpenMode};
use crate::engine::message::{ControlMessage, ControlRequest, Message, ReplyTo};
use crate::engine::session::ServerInstance;
use crate::export::Export;
use crate::path::PathKey;

fn searching() -> Fixture {
    Fixture::new(StandOptions { search: true, ..StandOptions::default() })
}

fn other_session() -> PeerOptions {
    PeerOptions { session: 2, path: 9, local: 1, ..PeerOptions::default() }
}

/// Opens an export that the finder returns.
fn open_found(fixture: &mut Fixture, peer: &mut Peer, name: &str) -> Result<OpenRsp, u16> {
    peer.clear_result();
    peer.send_open(15, name, AccessMode::ReadWrite);
    let search = fixture.search().expect("a search");
    let found = Arc::clone(fixture.found.as_ref().unwrap());
    fixture.answer(search, Ok(found));
    match peer.reply(fixture).errno {
        0 => Ok(OpenRsp::decode(&peer.result(OpenRsp::LEN)).unwrap()),
        errno => Err(errno),
    }
}

#[test]
fn the_cache_id_follows_the_durability_of_unflushed_writes() {
    let instance = ServerInstance { boot: 5, process: 6 };
    for (volatile, write_cache, expected) in [
        (false, true, Some(5)),
        (false, false, None),
        (true, true, Some(6)),
        (true, false, Some(6)),
    ] {
        let mut options = StandOptions { volatile, ..StandOptions::default() };
        options.params.instance = instance;
        options.geometry.write_cache = write_cache;
        let mut fixture = Fixture::new(options);
        let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
        let opened = peer.open_device(&mut fixture, "vol", AccessMode::ReadWrite).unwrap();
        assert_eq!(opened.volatile, volatile);
        match expected {
            Some(expected) => assert_eq!(opened.cache_id, expected),
            // The ID is the same in every process until the host restarts.
            None => assert!(![0, 5, 6].contains(&opened.cache_id)),
        }
        peer.leave(&mut fixture);
    }
}

#[test]
fn the_long_answer_is_sent_only_to_clients_with_space() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
    let session = PeerOptions::default().request(0).session_id;
    let secret = fixture.params.eviction_key.secret(session);
    let mut open = |room: usize| {
        peer.clear_result();
        peer.send_open_for(15, "vol", AccessMode::ReadWrite, room);
        assert_eq!(peer.reply(&mut fixture).errno, 0);
        peer.result(192)
    };
    // This is exactly the answer that a kernel client gets.
    let short = open(OpenRsp::LEN);
    assert_eq!(short[56..], [0xee; 136]);
    for room in [57, 72, 127] {
        let padded = open(room);
        assert_eq!(padded[..56], short[..56]);
        assert!(padded[56..room].iter().all(|byte| *byte == 0), "room for {room}");
    }
    for room in [128, 192] {
        let long = open(room);
        assert_eq!((long[46], short[46]), (8, 0), "it accepts partial writes");
        assert_eq!((&long[..46], &long[47..56]), (&short[..46], &short[47..56]));
        let tail = OpenRspTail::decode(&long).unwrap();
        assert_eq!(tail.export, Some(ExportId::of_name("vol")));
        assert_eq!(tail.secret, secret);
        assert!(long[96..room].iter().all(|byte| *byte == 0), "room for {room}");
    }
}

#[test]
fn an_unknown_name_is_searched_for() {
    let mut fixture = searching();
    let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
    // Named exports need no search, and names with `..` are not searched for.
    assert_eq!(peer.open_device(&mut fixture, "vol", AccessMode::ReadWrite).unwrap().device_id, 0);
    for name in ["", "../vol", "a..b"] {
        let opened = peer.open_device(&mut fixture, name, AccessMode::ReadWrite);
        assert_eq!(opened.unwrap_err(), errno::EINVAL);
    }
    assert_eq!(fixture.search(), None);

    peer.send_open(15, "dir/disk", AccessMode::ReadOnly);
    let search = fixture.search().unwrap();
    assert_eq!(search.session.as_bytes(), b"sess");
    assert_eq!(
        (search.name.as_bytes(), search.mode.access),
        (&b"dir/disk"[..], AccessMode::ReadOnly)
    );
    assert_eq!(peer.replies(&mut fixture), [], "not before it is found");
    fixture.answer(search, Err(errno::ENOTBLK));
    assert_eq!(peer.reply(&mut fixture).errno, errno::ENOTBLK);

    let opened = open_found(&mut fixture, &mut peer, "disk").unwrap();
    assert_eq!(opened.device_id, 1);
    let write = IoHeader { device_id: 1, ..io(Rw::WRITE, 0, 512) };
    peer.send_write((2, 3), write, &[7; 512]);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    assert_eq!(fixture.open_names(), ["vol", "found"]);
    peer.leave(&mut fixture);
    fixture.assert_empty();
}

#[test]
fn a_found_export_is_shared_and_closed_with_its_last_session() {
    let mut fixture = searching();
    let mut one = Peer::up(&mut fixture, PeerOptions::default(), "one");
    let mut two = Peer::up(&mut fixture, other_session(), "two");
    open_found(&mut fixture, &mut one, "disk").unwrap();
    assert_eq!(open_found(&mut fixture, &mut two, "disk").unwrap_err(), errno::EPERM);
    one.send_read((1, 0), io(Rw::READ, 0, 512));
    one.send_read((2, 1), io(Rw::READ, 0, 512));
    assert_eq!(one.replies(&mut fixture).len(), 2, "open on both cores");
    let held = || Arc::strong_count(fixture.found.as_ref().unwrap());
    assert_eq!(held(), 1 + 1 + 2, "the test, the table and both cores");
    one.send_close(0, 0);
    assert_eq!(one.reply(&mut fixture).errno, 0);
    let held = |fixture: &Fixture| Arc::strong_count(fixture.found.as_ref().unwrap());
    assert_eq!(held(&fixture), 1, "closed everywhere");
    open_found(&mut fixture, &mut two, "disk").unwrap();
    two.leave(&mut fixture);
    assert_eq!(held(&fixture), 1);
    one.leave(&mut fixture);
    fixture.assert_empty();
}

#[test]
fn an_export_found_too_late_is_dropped() {
    let mut fixture = searching();
    let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
    peer.send_open(15, "disk", AccessMode::ReadWrite);
    let search = fixture.search().unwrap();
    peer.leave(&mut fixture);
    fixture.assert_empty();
    let found = fixture.found.take().unwrap();
    fixture.answer(search, Ok(Arc::clone(&found)));
    assert_eq!(Arc::strong_count(&found), 1);
    fixture.assert_empty();
}

/// Creates a session that closed `vol` while one of its writes was still running, and a second one.
fn closed_over_a_write(fixture: &mut Fixture) -> (Peer, Peer) {
    let mut old = Peer::open(fixture, PeerOptions::default());
    let mut new = Peer::up(fixture, other_session(), "two");
    fixture.device.lock().hold = true;
    old.send_write((2, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    old.send_close(7, 0);
    assert_eq!(old.replies(fixture), [], "one of its writes still runs");
    let opened = new.open_device(fixture, "vol", AccessMode::ReadWrite);
    assert_eq!(opened.unwrap_err(), errno::EPERM, "that write could land after newer ones");
    (old, new)
}

/// Opens for writing, and writes.
fn overwrite(fixture: &mut Fixture, new: &mut Peer) {
    let opened = new.open_device(fixture, "vol", AccessMode::ReadWrite).unwrap();
    let write = IoHeader { device_id: opened.device_id, ..io(Rw::WRITE, 0, 512) };
    new.send_write((1, 3), write, &[2; 512]);
    assert_eq!(new.reply(fixture).errno, 0);
    assert_eq!(fixture.device.lock().bytes[..512], [2; 512]);
    assert_eq!(fixture.device.lock().log.len(), 2);
}

#[test]
fn an_export_is_released_when_the_last_write_before_the_close_ended() {
    let mut fixture = Fixture::new(StandOptions::default());
    let (mut old, mut new) = closed_over_a_write(&mut fixture);
    // Until that write ends, the session can neither start requests nor reopen the export.
    old.send_write((2, 8), io(Rw::WRITE, 0, 512), &[3; 512]);
    assert_eq!(old.reply(&mut fixture).errno, errno::ENOTCONN);
    let opened = old.open_device(&mut fixture, "vol", AccessMode::ReadOnly);
    assert_eq!(opened.unwrap_err(), errno::EBUSY);
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    let mut ended: Vec<_> =
        old.replies(&mut fixture).iter().map(|reply| (reply.permit, reply.errno)).collect();
    ended.sort_unstable();
    assert_eq!(ended, [(6, 0), (7, 0)], "the write and the close");
    overwrite(&mut fixture, &mut new);
    assert_eq!(old.open_device(&mut fixture, "vol", AccessMode::ReadOnly).unwrap().device_id, 0);
    for peer in [&mut old, &mut new] {
        peer.leave(&mut fixture);
    }
    fixture.assert_empty();
}

#[test]
fn a_session_ending_before_its_close_is_answered_releases_the_export() {
    let mut fixture = Fixture::new(StandOptions::default());
    let (mut old, mut new) = closed_over_a_write(&mut fixture);
    old.leave(&mut fixture);
    let opened = new.open_device(&mut fixture, "vol", AccessMode::ReadWrite);
    assert_eq!(opened.unwrap_err(), errno::EPERM);
    assert_eq!(fixture.sessions().len(), 2, "it ends with its write");
    assert_eq!(fixture.open_names(), ["vol"], "which the operator sees");
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    assert_eq!(fixture.sessions().len(), 1);
    overwrite(&mut fixture, &mut new);
    new.leave(&mut fixture);
    fixture.assert_empty();
}

/// Opens `vol` as a client that had it open before, with `room` bytes for the answer.
fn open_again(fixture: &mut Fixture, peer: &mut Peer, access: AccessMode, room: usize) -> u16 {
    let flags = OpenFlags { returns: true, waits: false };
    let open = Open { access, flags, dev_name: Name::new(b"vol").unwrap() };
    peer.send_open_raw(15, &open.encode(), room);
    peer.reply(fixture).errno
}

#[test]
fn a_client_that_returns_after_another_writer_is_refused() {
    const RW: AccessMode = AccessMode::ReadWrite;
    let mut fixture = Fixture::new(StandOptions::default());
    let connects = |n| PeerOptions { recon_cnt: n, ..PeerOptions::default() };
    let mut first = Peer::open(&mut fixture, connects(1));
    first.leave(&mut fixture);
    let mut first = Peer::up(&mut fixture, connects(2), "sess");
    assert_eq!(open_again(&mut fixture, &mut first, RW, 128), 0, "nobody else came");
    first.leave(&mut fixture);
    let mut reader = Peer::up(&mut fixture, other_session(), "other");
    reader.open_device(&mut fixture, "vol", AccessMode::ReadOnly).unwrap();
    let mut first = Peer::up(&mut fixture, connects(3), "sess");
    assert_eq!(open_again(&mut fixture, &mut first, RW, 128), 0, "the other one only reads");
    first.leave(&mut fixture);
    reader.leave(&mut fixture);

    let mut second = Peer::up(&mut fixture, other_session(), "other");
    second.open_device(&mut fixture, "vol", RW).unwrap();
    let mut first = Peer::up(&mut fixture, connects(4), "sess");
    assert_eq!(open_again(&mut fixture, &mut first, RW, 128), errno::EBADE);
    second.leave(&mut fixture);
    assert_eq!(open_again(&mut fixture, &mut first, RW, 128), errno::EBADE, "it may have written");
    assert_eq!(open_again(&mut fixture, &mut first, AccessMode::ReadOnly, 128), 0);
    // A kernel client does not set the byte.
    assert_eq!(open_again(&mut fixture, &mut first, RW, 56), 0);
    assert_eq!(open_again(&mut fixture, &mut first, RW, 128), 0, "it is the last writer now");
    first.leave(&mut fixture);
    fixture.assert_empty();
}

/// Time at which the export loses unflushed writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    Never,
    /// Before the session of the new host attaches, and before the old host has flushed.
    Before,
    /// After the old host has ended.
    After,
}

/// Moment at which the session of the new host loses its connections and returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reconnect {
    Never,
    /// Between the end of the old session and the grant.
    Waiting,
    /// After the grant.
    Promoted,
}

/// Moves a guest with an unflushed write to another session. Returns the results of its first two
/// flushes there. The old session closes the export, or else loses its connections.
fn flushes_after_a_move(loss: Loss, closes: bool, reconnect: Reconnect) -> [u16; 2] {
    let mut options = StandOptions::default();
    options.params.instance = ServerInstance { boot: 5, process: 6 };
    options.geometry.write_cache = true;
    let mut fixture = Fixture::new(options);
    let mut old = Peer::open(&mut fixture, PeerOptions::default());
    old.send_write((1, 3), io(Rw::WRITE, 0, 512), &[1; 512]);
    assert_eq!(old.reply(&mut fixture).errno, 0);
    let epoch = Arc::clone(&fixture.held("vol").epoch);
    let fails = |at| (loss == at).then(|| epoch.raise());
    fails(Loss::Before);
    let mut new = Peer::up(&mut fixture, other_session(), "other");
    let open = |fixture: &mut Fixture, new: &mut Peer, access, flags| {
        let dev_name = Name::new(b"vol").unwrap();
        new.send_open_raw(15, &Open { access, flags, dev_name }.encode(), OpenRspTail::LONG_LEN);
        assert_eq!(new.reply(fixture).errno, 0);
    };
    let returns = OpenFlags { returns: true, waits: false };
    open(&mut fixture, &mut new, AccessMode::Migration, OpenFlags { returns: false, waits: true });
    if closes {
        old.send_close(15, 0);
        assert_eq!(old.reply(&mut fixture).errno, 0);
    } else {
        old.leave(&mut fixture);
    }
    let again = PeerOptions { recon_cnt: 2, ..other_session() };
    if reconnect == Reconnect::Waiting {
        new.leave(&mut fixture);
        new = Peer::up(&mut fixture, again, "other");
        let flags = OpenFlags { waits: true, ..returns };
        open(&mut fixture, &mut new, AccessMode::Migration, flags);
    }
    fails(Loss::After);
    open(&mut fixture, &mut new, AccessMode::ReadWrite, returns);
    if reconnect == Reconnect::Promoted {
        new.leave(&mut fixture);
        new = Peer::up(&mut fixture, again, "other");
        open(&mut fixture, &mut new, AccessMode::ReadWrite, returns);
    }
    [4, 5].map(|permit| {
        new.send_flush((1, permit));
        new.reply(&mut fixture).errno
    })
}

#[test]
fn a_guest_that_moves_learns_of_writes_that_were_lost() {
    use Reconnect::{Never, Promoted, Waiting};
    for (closes, reconnect) in [true, false]
        .into_iter()
        .flat_map(|closes| [Never, Waiting, Promoted].map(move |reconnect| (closes, reconnect)))
    {
        let flushes = |loss| flushes_after_a_move(loss, closes, reconnect);
        let what = format!("closes: {closes}, {reconnect:?}");
        assert_eq!(flushes(Loss::Never), [0; 2], "{what}");
        for loss in [Loss::Before, Loss::After] {
            assert_eq!(flushes(loss), [errno::EIO, 0], "{loss:?}, {what}");
        }
    }
}

/// The session of a guest's new host, before the guest runs there.
#[test]
fn a_session_that_waits_cannot_write_until_it_is_alone() {
    const WAITS: OpenFlags = OpenFlags { returns: false, waits: true };
    let mut fixture = Fixture::new(StandOptions::default());
    let mut old = Peer::open(&mut fixture, PeerOptions::default());
    let mut new = Peer::up(&mut fixture, other_session(), "other");
    let dev_name = Name::new(b"vol").unwrap();
    let open = |fixture: &mut Fixture, peer: &mut Peer, access, flags| {
        peer.send_open_raw(15, &Open { access, flags, dev_name }.encode(), OpenRspTail::LONG_LEN);
        peer.reply(fixture).errno
    };
    assert_eq!(open(&mut fixture, &mut new, AccessMode::Migration, WAITS), 0);
    new.send_write((1, 3), io(Rw::WRITE, 0, 512), &[2; 512]);
    assert_eq!(new.reply(&mut fixture).errno, errno::EPERM);
    let returns = OpenFlags { returns: true, waits: false };
    assert_eq!(open(&mut fixture, &mut new, AccessMode::ReadWrite, returns), errno::EPERM);
    // The session of the old host ends and returns meanwhile.
    old.leave(&mut fixture);
    let again = PeerOptions { recon_cnt: 2, ..PeerOptions::default() };
    let mut old = Peer::up(&mut fixture, again, "sess");
    assert_eq!(open(&mut fixture, &mut old, AccessMode::ReadWrite, returns), 0);
    assert_eq!(open(&mut fixture, &mut new, AccessMode::ReadWrite, returns), errno::EPERM);
    old.leave(&mut fixture);
    assert_eq!(open(&mut fixture, &mut new, AccessMode::ReadWrite, returns), 0);
    new.send_write((1, 4), io(Rw::WRITE, 0, 512), &[2; 512]);
    assert_eq!(new.reply(&mut fixture).errno, 0);
    let again = PeerOptions { recon_cnt: 3, ..PeerOptions::default() };
    let mut old = Peer::up(&mut fixture, again, "sess");
    assert_eq!(open(&mut fixture, &mut old, AccessMode::ReadWrite, returns), errno::EBADE);
    new.leave(&mut fixture);
    old.leave(&mut fixture);
    fixture.assert_empty();
}

#[test]
fn an_examined_open_may_return_after_its_path_ended() {
    let mut fixture = Fixture::new(StandOptions::default());
    let reply_to = ReplyTo { path: PathKey(77), core: CoreIndex(0), permit: PermitId(3) };
    let mode = OpenMode::new(AccessMode::ReadOnly, OpenFlags::default(), 128);
    let mode = OpenMode { examined: Examined::Yes, ..mode };
    let request = ControlRequest::Open { name: Box::new(Name::new(b"vol").unwrap()), mode };
    fixture.send(Message::Control(ControlMessage::Request { reply_to, request }));
    // No internal error occurs.
    fixture.settle();
    fixture.assert_empty();
}

/// Examiner that records opens and leaves it to the test to answer them.
#[derive(Debug, Default)]
struct Kept(Arc<Mutex<Vec<(ReplyTo, Name, OpenMode)>>>);

impl Examiner for Kept {
    fn examine(&self, reply_to: ReplyTo, name: &Name, mode: OpenMode) -> bool {
        self.0.lock().push((reply_to, *name, mode));
        true
    }
}

/// A source whose path now leads to a different file.
#[derive(Debug)]
struct Replaced(MemorySource);

impl BlockSource for Replaced {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn target_name(&self) -> Option<TargetName> {
        Some(TargetName::Replaced)
    }

    fn open(&self, core: &Core) -> std::io::Result<Box<dyn BlockDevice>> {
        self.0.open(core)
    }
}

#[test]
fn no_session_starts_on_a_replaced_target_that_could_not_be_reopened_in_time() {
    let mut fixture = Fixture::new(StandOptions::default());
    let kept = Kept::default();
    let opens = Arc::clone(&kept.0);
    fixture.exports.set_examiner(Box::new(kept));
    let source = Replaced(MemorySource::new(1 << 20, 512));
    fixture.exports.add(&Arc::new(Export::new("old", Arc::new(source)))).expect("room");
    let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
    for (examined, errno) in
        [(Examined::Outdated, errno::EBUSY), (Examined::Yes, 0), (Examined::Outdated, 0)]
    {
        peer.send_open(14, "old", AccessMode::ReadWrite);
        // Once a session has the export open, its target is not examined.
        fixture.settle();
        let examines = opens.lock().pop();
        if let Some((reply_to, name, mode)) = examines {
            let mode = OpenMode { examined, ..mode };
            let request = ControlRequest::Open { name: Box::new(name), mode };
            fixture.send(Message::Control(ControlMessage::Request { reply_to, request }));
        }
        assert_eq!(peer.reply(&mut fixture).errno, errno, "{examined:?}");
    }
}

#[test]
fn an_export_that_is_not_open_yet_is_refused_with_the_reason() {
    let mut fixture = Fixture::new(StandOptions::default());
    fixture.exports.set_failed("slow", true);
    let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
    for (name, room, is_explained) in [
        ("slow", OpenRspTail::LONG_LEN, true),
        // A kernel client sees the same as for a missing export.
        ("slow", OpenRsp::LEN, false),
        ("none", OpenRsp::LEN, false),
        ("none", OpenRspTail::LONG_LEN, false),
    ] {
        peer.clear_result();
        peer.send_open_for(15, name, AccessMode::ReadWrite, room);
        assert_eq!(peer.reply(&mut fixture).errno, errno::ENOENT);
        let result = peer.result(192);
        let why = OpenRefusal::decode(&result).map(|why| why.text().to_owned());
        let expected = "the server cannot open this export yet (rtrs-server export list shows the \
                        reason)";
        assert_eq!(why.as_deref(), is_explained.then_some(expected), "{name} {room}");
        assert!(is_explained || result.iter().all(|byte| *byte == 0xee), "no data");
    }
}

#[test]
fn an_open_waits_while_its_export_is_replaced() {
    let mut fixture = Fixture::new(StandOptions::default());
    let kept = Kept::default();
    let opens = Arc::clone(&kept.0);
    fixture.exports.set_examiner(Box::new(kept));
    let at = fixture.exports.find(b"vol").expect("an export");
    let export = fixture.exports.remove(at, false).expect("a named export");
    let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
    let refused = peer.open_device(&mut fixture, "vol", AccessMode::ReadOnly);
    assert_eq!(refused.unwrap_err(), errno::ENOENT, "nothing replaces it");
    let reserved = fixture.exports.reserve("vol");
    peer.send_open(14, "vol", AccessMode::ReadOnly);
    assert!(peer.replies(&mut fixture).is_empty());
    fixture.exports.add(&export).expect("room");
    drop(reserved);
    let (reply_to, name, mode) = opens.lock().pop().expect("the open");
    let mode = OpenMode { examined: Examined::Yes, ..mode };
    let request = ControlRequest::Open { name: Box::new(name), mode };
    fixture.send(Message::Control(ControlMessage::Request { reply_to, request }));
    assert_eq!(peer.reply(&mut fixture).errno, 0);
}
