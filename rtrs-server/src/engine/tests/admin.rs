//! Tests of the operator's commands: listing, ending paths, evicting and draining, also with a
//! backend that never answers.

use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::time::Duration;
use rtrs_core::wire::{AccessMode, Rw, errno};

use super::fixture::{Fixture, StandOptions};
use super::peer::{Peer, PeerOptions, io};
use crate::audit::AuditKind;
use crate::engine::message::{AdminReply, AdminRequest};
use crate::stats::{Access, PathStage, SessionState};

const ESTALE: i16 = -116;

fn second_path() -> PeerOptions {
    PeerOptions { path: 2, local: 1, first_conn: false, ..PeerOptions::default() }
}

/// Options for a path of another session.
fn other(session: u8) -> PeerOptions {
    PeerOptions { session, path: session, local: session, ..PeerOptions::default() }
}

fn disconnect(session: &str, path: Option<u64>) -> AdminRequest {
    AdminRequest::Disconnect { session: session.to_owned(), path }
}

fn evict(session: &str) -> AdminRequest {
    AdminRequest::Evict { session: session.to_owned() }
}

fn drain(ms: u64) -> AdminRequest {
    AdminRequest::Drain { within: Duration::from_millis(ms) }
}

/// Returns the paths that an answer reports as ending.
fn ended(answer: &Mutex<Option<AdminReply>>) -> Vec<u64> {
    match answer.lock().take() {
        Some(AdminReply::Ended { paths, .. }) => paths,
        other => panic!("{other:?}"),
    }
}

fn refused(answer: &Mutex<Option<AdminReply>>) -> String {
    match answer.lock().take() {
        Some(AdminReply::Refused(why)) => why,
        other => panic!("{other:?}"),
    }
}

fn states(fixture: &Fixture) -> Vec<PathStage> {
    fixture.sessions().iter().flat_map(|session| &session.paths).map(|path| path.state).collect()
}

#[test]
fn sessions_are_listed_with_their_counters() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut a = Peer::open(&mut fixture, PeerOptions::default());
    let _b = Peer::up(&mut fixture, second_path(), "sess");
    a.send_write((1, 6), io(Rw::WRITE, 0, 4096), &[1; 4096]);
    assert_eq!(a.reply(&mut fixture).errno, 0);
    fixture.device.lock().hold = true;
    a.send_read((1, 6), io(Rw::READ, 0, 512));
    fixture.pass(Duration::from_millis(1500));
    let answer = fixture.admin(AdminRequest::Sessions);
    let Some(AdminReply::Sessions { sessions: list, .. }) = answer.lock().take() else {
        panic!("no list")
    };
    assert_eq!(list.len(), 1);
    let session = &list[0];
    assert_eq!(session.id, "01010101-0101-0101-0101-010101010101");
    assert_eq!(session.name.as_deref(), Some("sess"));
    assert_eq!(session.state, SessionState::Up);
    assert_eq!(session.age_ms / 1000, 1);
    let open = &session.opens[..];
    assert_eq!((open.len(), &*open[0].export, open[0].access), (1, "vol", Access::Rw));
    assert_eq!((session.io.writes, session.io.write_bytes, session.io.inflight), (1, 4096, 1));
    let paths = &session.paths;
    assert_eq!((paths.len(), paths[0].path, paths[1].path), (2, 1, 2));
    assert_eq!((paths[0].connections, &*paths[0].transport), (3, "sim"));
    assert_eq!((paths[0].io.inflight, paths[1].io.inflight), (1, 0));
    // The counters of an ended path are kept with its session.
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    a.leave(&mut fixture);
    let session = fixture.sessions().swap_remove(0);
    assert_eq!((session.paths.len(), session.io.writes, session.io.inflight), (1, 1, 0));
}

#[test]
fn a_disconnected_path_can_reconnect() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut a = Peer::open(&mut fixture, PeerOptions::default());
    let mut b = Peer::up(&mut fixture, second_path(), "sess");
    let answer = fixture.admin(disconnect("sess", Some(1)));
    assert_eq!(ended(&answer), [1]);
    assert_eq!((a.closed(&mut fixture), b.closed(&mut fixture)), (3, 0));
    assert_eq!(states(&fixture), [PathStage::Connected]);
    let again = PeerOptions { recon_cnt: 2, ..PeerOptions::default() };
    let mut a = Peer::up(&mut fixture, again, "sess");
    // Disconnect all paths by the session's ID.
    let answer = fixture.admin(disconnect("01010101-0101-0101-0101-010101010101", None));
    assert_eq!(ended(&answer), [2, 3]);
    assert_eq!((a.closed(&mut fixture), b.closed(&mut fixture)), (3, 3));
    fixture.assert_empty();
    let last = PeerOptions { recon_cnt: 3, ..PeerOptions::default() };
    let _last = Peer::open(&mut fixture, last);
    let why = refused(&fixture.admin(disconnect("sess", Some(2))));
    assert!(why.contains("no path 2 that is up"), "{why}");
    let why = refused(&fixture.admin(disconnect("none", None)));
    assert!(why.contains("there is no session none"), "{why}");
    assert_eq!(states(&fixture), [PathStage::Connected]);
}

#[test]
fn an_evicted_session_stays_away_and_its_export_is_free() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut dead = Peer::open(&mut fixture, PeerOptions::default());
    // The client's host was restarted: same name, different ID.
    let mut early = Peer::new(&fixture, other(2));
    for cid in 0..3 {
        early.connect(&mut fixture, cid).unwrap();
    }
    let info =
        rtrs_core::wire::InfoReq { session_name: rtrs_core::wire::Name::new(b"sess").unwrap() };
    early.send_info(&mut fixture, &info.encode());
    assert_eq!(early.closed(&mut fixture), 3, "the dead session still has the name");
    let answer = fixture.admin(evict("sess"));
    assert_eq!(ended(&answer), [1]);
    assert_eq!(dead.closed(&mut fixture), 3);
    fixture.assert_empty();
    for recon_cnt in 2..5 {
        let again = PeerOptions { recon_cnt, ..PeerOptions::default() };
        let refused = Peer::new(&fixture, again).connect(&mut fixture, 0).unwrap_err();
        assert_eq!(refused, ESTALE);
    }
    let mut new = Peer::up(&mut fixture, other(3), "sess");
    new.open_device(&mut fixture, "vol", AccessMode::ReadWrite).unwrap();
    let why = refused(&fixture.admin(evict("no one")));
    assert!(why.contains("there is no session no one"), "{why}");
}

#[test]
fn an_evicted_session_keeps_its_export_while_its_io_runs() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut dead = Peer::open(&mut fixture, PeerOptions::default());
    fixture.device.lock().hold = true;
    dead.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    let _ = ended(&fixture.admin(evict("sess")));
    assert_eq!(dead.closed(&mut fixture), 3);
    let list = fixture.sessions();
    assert_eq!((list[0].state, list[0].io.inflight), (SessionState::Evicted, 1));
    // Its name can be used again, but not yet the export that it may still write to.
    let mut new = Peer::up(&mut fixture, other(2), "sess");
    let open = |fixture: &mut Fixture, new: &mut Peer| {
        new.open_device(fixture, "vol", AccessMode::ReadWrite).map(|_| ())
    };
    assert_eq!(open(&mut fixture, &mut new), Err(errno::EPERM));
    new.open_device(&mut fixture, "other", AccessMode::ReadWrite).unwrap();
    // The name refers to the session that is still alive.
    let _ = ended(&fixture.admin(disconnect("sess", Some(2))));
    assert_eq!(new.closed(&mut fixture), 3);
    let mut new = Peer::up(&mut fixture, PeerOptions { recon_cnt: 2, ..other(2) }, "sess");
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    assert_eq!(open(&mut fixture, &mut new), Ok(()));
    assert_eq!(fixture.sessions().len(), 1);
    assert_eq!(fixture.device.lock().bytes[..512], [1; 512]);
}

#[test]
fn a_session_reopening_for_reading_keeps_its_export_while_its_writes_run() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut old = Peer::open(&mut fixture, PeerOptions::default());
    fixture.device.lock().hold = true;
    old.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    let (open, less) = (AccessMode::ReadWrite, AccessMode::ReadOnly);
    let device = old.open_device(&mut fixture, "vol", less).unwrap().device_id;
    // Its write would land after those of another writer.
    let mut new = Peer::up(&mut fixture, other(2), "new");
    assert_eq!(new.open_device(&mut fixture, "vol", open).map(|_| ()), Err(errno::EPERM));
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    assert_eq!(old.reply(&mut fixture).errno, 0);
    old.send_write((1, 6), io(Rw::WRITE, 0, 512), &[2; 512]);
    assert_eq!(old.reply(&mut fixture).errno, errno::EPERM, "it may only read");
    old.send_close(0, device);
    assert_eq!(old.reply(&mut fixture).errno, 0);
    new.open_device(&mut fixture, "vol", open).unwrap();
}

#[test]
fn an_open_in_progress_is_not_completed_for_an_evicted_session() {
    let mut fixture = Fixture::new(StandOptions { search: true, ..StandOptions::default() });
    let mut dead = Peer::open(&mut fixture, PeerOptions::default());
    // Running IO keeps the session alive, so that it can still be found.
    fixture.device.lock().hold = true;
    dead.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    dead.send_open(0, "found", AccessMode::ReadWrite);
    let search = fixture.search().unwrap();
    let _ = ended(&fixture.admin(evict("sess")));
    let found = Arc::clone(fixture.found.as_ref().unwrap());
    fixture.answer(search, Ok(found));
    assert_eq!(fixture.open_names(), ["vol"]);
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    fixture.assert_empty();
}

#[test]
fn a_hanging_backend_blocks_no_other_session() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut stuck = Peer::open(&mut fixture, PeerOptions::default());
    fixture.device.lock().hold = true;
    stuck.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    // Another path of the session, and another session: both work, on an export that responds.
    let mut second = Peer::up(&mut fixture, second_path(), "sess");
    second.open_device(&mut fixture, "other", AccessMode::ReadWrite).unwrap();
    let at = |device| rtrs_core::wire::IoHeader { device_id: device, ..io(Rw::WRITE, 0, 512) };
    second.send_write((1, 7), at(1), &[7; 512]);
    assert_eq!(second.reply(&mut fixture).errno, 0);
    let mut neighbor = Peer::up(&mut fixture, other(3), "neighbor");
    neighbor.open_device(&mut fixture, "other", AccessMode::ReadOnly).unwrap();
    neighbor.send_read((2, 6), io(Rw::READ, 0, 512));
    assert_eq!(neighbor.reply(&mut fixture).errno, 0);
    // The path ends, and reconnects, while its write is still running.
    let _ = ended(&fixture.admin(disconnect("sess", Some(1))));
    assert_eq!(stuck.closed(&mut fixture), 3);
    let again = PeerOptions { recon_cnt: 2, first_conn: false, ..PeerOptions::default() };
    let mut back = Peer::up(&mut fixture, again, "sess");
    back.send_write((1, 7), at(1), &[8; 512]);
    assert_eq!(back.reply(&mut fixture).errno, 0);
    let list = fixture.sessions();
    assert_eq!(list[0].paths[0].state, PathStage::Draining);
    assert_eq!((list[0].io.inflight, list[1].io.inflight), (1, 0));
    // Nor does evicting wait for the write.
    assert_eq!(ended(&fixture.admin(evict("sess"))), [1, 2, 4]);
    assert_eq!((back.closed(&mut fixture), second.closed(&mut fixture)), (3, 3));
    neighbor.send_read((2, 6), io(Rw::READ, 0, 512));
    assert_eq!(neighbor.reply(&mut fixture).errno, 0);
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    assert_eq!(fixture.sessions().len(), 1);
}

#[test]
fn paths_ended_by_the_operator_are_recorded_by_command() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    let events = fixture.audited();
    let recorded = |fixture: &mut Fixture, peer: &mut Peer| {
        assert!(peer.closed(fixture) > 0);
        let events = std::mem::take(&mut *events.lock());
        // A connect event that was held back is recorded first.
        let end = events.iter().find(|event| event.event != AuditKind::Connect).unwrap();
        assert_eq!(end.session_name.as_deref(), Some("sess"));
        end.event
    };
    let _ = ended(&fixture.admin(disconnect("sess", None)));
    assert_eq!(recorded(&mut fixture, &mut peer), AuditKind::SessionDisconnect);
    let again = PeerOptions { recon_cnt: 2, ..PeerOptions::default() };
    peer = Peer::up(&mut fixture, again, "sess");
    events.lock().clear();
    let _ = ended(&fixture.admin(evict("sess")));
    assert_eq!(recorded(&mut fixture, &mut peer), AuditKind::Evict);
}

#[test]
fn a_hanging_request_does_not_exhaust_reconnects() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    fixture.device.lock().hold = true;
    for recon_cnt in 2..12 {
        // The request is sent again each time, as a client that got no answer would.
        peer.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
        fixture.pass(Duration::from_millis(5));
        let _ = ended(&fixture.admin(disconnect("sess", None)));
        assert_eq!(peer.closed(&mut fixture), 3);
        assert_eq!(states(&fixture), [PathStage::Draining], "only that of the first copy");
        let again = PeerOptions { recon_cnt, ..PeerOptions::default() };
        peer = Peer::up(&mut fixture, again, "sess");
    }
    peer.send_write((1, 6), io(Rw::WRITE, 0, 512), &[2; 512]);
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    assert_eq!(fixture.device.lock().log.len(), 2, "the first copy and the last");
    assert_eq!(fixture.device.lock().bytes[..512], [2; 512]);
}

#[test]
fn a_drain_closes_the_paths_of_a_session_one_by_one() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut a = Peer::open(&mut fixture, PeerOptions::default());
    let mut b = Peer::up(&mut fixture, second_path(), "sess");
    let mut alone = Peer::up(&mut fixture, other(3), "alone");
    fixture.device.lock().hold = true;
    a.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    let answer = fixture.admin(drain(60_000));
    use PathStage::{Connected, Finishing};
    assert_eq!(states(&fixture), [Finishing, Connected]);
    assert_eq!(alone.closed(&mut fixture), 3, "it has nothing in flight");
    let status = Peer::new(&fixture, other(4)).connect(&mut fixture, 0).unwrap_err();
    assert_eq!(status, -104, "no other client is admitted");
    let why = refused(&fixture.admin(drain(1)));
    assert!(why.contains("already stopping"), "{why}");
    // The other path carries new requests in the meantime.
    b.send_flush((2, 9));
    fixture.settle();
    assert_eq!(fixture.load().1, 2, "the flush was accepted");
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    assert_eq!(a.reply(&mut fixture).errno, 0, "running requests are answered");
    assert_eq!(b.reply(&mut fixture).errno, 0);
    fixture.settle();
    assert_eq!((a.closed(&mut fixture), b.closed(&mut fixture)), (3, 3));
    assert_eq!(*answer.lock(), Some(AdminReply::Drained { unfinished: 0 }));
    assert!(fixture.all_done());
    fixture.assert_empty();
}

#[test]
fn a_draining_path_answers_connection_tests() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    fixture.device.lock().hold = true;
    peer.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    let answer = fixture.admin(drain(60_000));
    assert_eq!(states(&fixture), [PathStage::Finishing]);
    peer.send_flush((2, 9));
    peer.send_close(7, 99);
    assert_eq!(peer.reply(&mut fixture).permit, 7, "the test");
    assert_eq!(fixture.load().1, 1, "the flush is not accepted");
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    assert_eq!(peer.closed(&mut fixture), 3);
    assert_eq!(*answer.lock(), Some(AdminReply::Drained { unfinished: 0 }));
    assert!(fixture.all_done());
    fixture.assert_empty();
}

#[test]
fn a_drain_is_bounded() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut a = Peer::open(&mut fixture, PeerOptions::default());
    let mut b = Peer::up(&mut fixture, second_path(), "sess");
    fixture.device.lock().hold = true;
    a.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    let answer = fixture.admin(drain(10_000));
    fixture.pass(Duration::from_millis(4_900));
    assert_eq!((a.closed(&mut fixture), b.closed(&mut fixture)), (0, 0));
    // A path whose IO never ends does not delay the next one for more than half the time.
    fixture.pass(Duration::from_millis(200));
    assert_eq!((a.closed(&mut fixture), b.closed(&mut fixture)), (0, 3));
    fixture.pass(Duration::from_millis(4_800));
    assert_eq!((a.closed(&mut fixture), &*answer.lock()), (0, &None));
    fixture.pass(Duration::from_millis(200));
    assert_eq!(a.closed(&mut fixture), 3);
    fixture.pass(Duration::from_millis(2_100));
    assert_eq!(*answer.lock(), Some(AdminReply::Drained { unfinished: 1 }));
    assert!(fixture.all_done());
}

#[test]
fn a_signal_shortens_a_drain() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut a = Peer::open(&mut fixture, PeerOptions::default());
    fixture.device.lock().hold = true;
    a.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    let answer = fixture.admin(drain(600_000));
    fixture.shutdown();
    fixture.pass(Duration::from_millis(5_100));
    assert_eq!(a.closed(&mut fixture), 3, "after the grace time of a signal");
    fixture.pass(Duration::from_millis(2_100));
    assert_eq!(*answer.lock(), Some(AdminReply::Drained { unfinished: 1 }));
    assert!(fixture.all_done());
}
