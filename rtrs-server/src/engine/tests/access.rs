//! Tests of access lists: connections, opens, and the disconnection of clients that lose access.

use rtrs_core::wire::{
    AccessMode, InfoReq, Name, OpenRefusal, OpenRsp, OpenRspTail, Page, Rw, errno,
};

use super::fixture::{Fixture, StandOptions, client_ip};
use super::peer::{Peer, PeerOptions, io};
use crate::access_list::{AccessPolicy, AccessRule, Unlisted};
use crate::audit::{AuditEvent, AuditKind, AuditResult};
use crate::engine::message::AdminRequest;

const RO: AccessMode = AccessMode::ReadOnly;
const RW: AccessMode = AccessMode::ReadWrite;

fn rules(texts: &[String]) -> Vec<AccessRule> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn anyone(n: u8, mode: &str) -> String {
    format!("anyone@{}:{mode}", client_ip(n))
}

/// Sets the lists of the server and of the export "vol".
fn set(fixture: &Fixture, server: &[String], vol: &[String]) {
    let vol = rules(vol);
    let exports = [("vol", &vol[..])].into_iter();
    fixture.exports.set_access(AccessPolicy::new(&rules(server), exports, Unlisted::Nobody));
}

fn from(local: u8) -> PeerOptions {
    PeerOptions { local, ..PeerOptions::default() }
}

fn second_path(local: u8) -> PeerOptions {
    PeerOptions { path: 2, first_conn: false, ..from(local) }
}

fn write(fixture: &mut Fixture, peer: &mut Peer) -> u16 {
    peer.send_write((1, 6), io(Rw::WRITE, 0, 512), &[7; 512]);
    peer.reply(fixture).errno
}

#[test]
fn an_unlisted_client_is_refused() {
    let mut fixture = Fixture::new(StandOptions::default());
    set(&fixture, &[], &[anyone(0, "rw")]);
    let mut peer = Peer::new(&fixture, from(1));
    assert_eq!(peer.connect(&mut fixture, 0), Err(-13));
    assert!(fixture.sessions().is_empty());
    let mut peer = Peer::open(&mut fixture, from(0));
    assert_eq!(write(&mut fixture, &mut peer), 0);
}

#[test]
fn a_refused_open_gives_a_reason_if_the_client_has_space() {
    let mut fixture = Fixture::new(StandOptions::default());
    set(&fixture, &[anyone(0, "rw")], &[anyone(0, "ro")]);
    let mut peer = Peer::up(&mut fixture, from(0), "sess");
    for (room, long) in [(OpenRsp::LEN, false), (OpenRspTail::LONG_LEN, true)] {
        peer.clear_result();
        peer.send_open_for(15, "vol", RW, room);
        assert_eq!(peer.reply(&mut fixture).errno, errno::EACCES);
        let result = peer.result(192);
        let why = OpenRefusal::decode(&result);
        if long {
            let text = why.unwrap().text().to_owned();
            assert!(text.ends_with("without a name may not open 'vol' rw"), "{text}");
            assert!(result[128..].iter().all(|byte| *byte == 0xee), "not beyond its room");
        } else {
            assert!(result.iter().all(|byte| *byte == 0xee), "no data, as for a kernel client");
        }
    }
    assert!(peer.open_device(&mut fixture, "vol", RO).is_ok());
    assert!(peer.open_device(&mut fixture, "other", RW).is_ok(), "the server's list");
    // The existence of the export is not revealed.
    set(&fixture, &[], &[anyone(0, "ro")]);
    for name in ["other", "none"] {
        assert_eq!(peer.open_device(&mut fixture, name, RO).unwrap_err(), errno::EACCES);
    }
}

#[test]
fn each_path_of_a_session_must_have_its_access() {
    let mut fixture = Fixture::new(StandOptions::default());
    set(&fixture, &[anyone(1, "rw")], &[anyone(0, "rw")]);
    let mut first = Peer::open(&mut fixture, from(0));
    // The second address may connect, but lacks the access that the session uses.
    let mut second = Peer::new(&fixture, second_path(1));
    assert_eq!(second.connect(&mut fixture, 0), Err(-13));
    set(&fixture, &[], &[anyone(0, "rw"), anyone(1, "ro")]);
    let mut second = Peer::new(&fixture, second_path(1));
    assert_eq!(second.connect(&mut fixture, 0), Err(-13), "the session writes");
    assert_eq!(write(&mut fixture, &mut first), 0);
    set(&fixture, &[], &[anyone(0, "rw"), anyone(1, "rw")]);
    let _second = Peer::up(&mut fixture, second_path(1), "sess");
    // Conversely, a session with a path that lacks access opens nothing.
    set(&fixture, &[anyone(0, "rw")], &[anyone(0, "rw"), anyone(1, "rw")]);
    assert_eq!(first.open_device(&mut fixture, "other", RW).unwrap_err(), errno::EACCES);
    assert!(first.open_device(&mut fixture, "vol", RW).is_ok());
}

#[test]
fn only_connected_paths_are_checked_and_later_ones_when_they_connect() {
    let mut fixture = Fixture::new(StandOptions::default());
    let both = [anyone(0, "rw"), anyone(1, "rw")];
    set(&fixture, &[anyone(0, "rw")], &both);
    let mut first = Peer::open(&mut fixture, from(0));
    // The second address has the access that the session uses now, but not what it uses later.
    let mut second = Peer::new(&fixture, second_path(1));
    for cid in 0..second_path(1).cid_num {
        second.connect(&mut fixture, cid).unwrap();
    }
    assert!(first.open_device(&mut fixture, "other", RW).is_ok(), "it is not up");
    let request = InfoReq { session_name: Name::new(b"sess").unwrap() }.encode();
    second.send_info(&mut fixture, &request);
    fixture.settle();
    assert!(second.closed(&mut fixture) > 0, "now it may not");
    assert_eq!(write(&mut fixture, &mut first), 0);
}

#[test]
fn a_list_change_closes_paths_without_access() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut first = Peer::open(&mut fixture, from(0));
    let mut second = Peer::up(&mut fixture, second_path(1), "sess");
    let other = PeerOptions { session: 2, path: 3, ..from(2) };
    let mut third = Peer::up(&mut fixture, other, "third");
    assert!(third.open_device(&mut fixture, "other", RW).is_ok());
    set(&fixture, &[anyone(2, "rw")], &[anyone(0, "rw")]);
    fixture.admin(AdminRequest::CheckAccess);
    assert!(second.closed(&mut fixture) > 0);
    assert_eq!(write(&mut fixture, &mut first), 0, "its path may");
    // The list now allows only reading.
    set(&fixture, &[anyone(2, "rw")], &[anyone(0, "ro")]);
    fixture.admin(AdminRequest::CheckAccess);
    assert!(first.closed(&mut fixture) > 0);
    fixture.settle();
    assert_eq!(fixture.sessions().len(), 1, "the other session stays up");
    assert_eq!(third.closed(&mut fixture), 0);
    let again = PeerOptions { recon_cnt: 2, ..from(0) };
    let mut again = Peer::up(&mut fixture, again, "sess");
    assert_eq!(again.open_device(&mut fixture, "vol", RW).unwrap_err(), errno::EACCES);
    assert!(again.open_device(&mut fixture, "vol", RO).is_ok());
}

#[test]
fn a_client_sees_the_exports_it_may_open() {
    let mut fixture = Fixture::new(StandOptions::default());
    set(&fixture, &[anyone(1, "ro")], &[anyone(0, "ro"), anyone(1, "rw")]);
    let listed = |fixture: &mut Fixture, options: PeerOptions| {
        let name = format!("sess{}", options.session);
        let mut peer = Peer::up(fixture, options, &name);
        peer.clear_result();
        peer.send_discover((0, 0), "", Page::LEN_MAX);
        assert_eq!(peer.reply(fixture).errno, 0);
        let page = Page::decode(&peer.result(Page::LEN_MAX)).unwrap();
        assert!(!page.more);
        let mode = |ro| if ro { "ro" } else { "rw" };
        let shown =
            page.exports.iter().map(|export| format!("{} {}", export.name, mode(export.read_only)));
        shown.collect::<Vec<_>>()
    };
    assert_eq!(listed(&mut fixture, from(0)), ["vol ro"]);
    let other = PeerOptions { session: 2, path: 3, ..from(1) };
    assert_eq!(listed(&mut fixture, other), ["fixed ro", "other ro", "vol rw"]);
}

#[test]
fn every_spelling_of_a_name_has_the_rights_of_its_export() {
    const SPELLINGS: [&str; 3] = ["vol", "/vol", "//vol"];
    let both = SPELLINGS.iter().flat_map(|listed| SPELLINGS.map(|asked| (*listed, asked)));
    for (listed, asked) in both {
        let mut fixture = Fixture::new(StandOptions::default());
        // The server's list would allow the second client, but the export's own does not.
        let set = |fixture: &Fixture, own: &str| {
            let (server, own) = (rules(&[anyone(1, "rw")]), rules(&[anyone(0, own)]));
            let exports = [(listed, &own[..])].into_iter();
            fixture.exports.set_access(AccessPolicy::new(&server, exports, Unlisted::Nobody));
        };
        set(&fixture, "rw");
        let mut member = Peer::up(&mut fixture, from(0), "sess1");
        assert!(member.open_device(&mut fixture, asked, RW).is_ok(), "{listed}, {asked}");
        let other = PeerOptions { session: 2, path: 3, ..from(1) };
        let mut stranger = Peer::up(&mut fixture, other, "sess2");
        for mode in [RO, RW] {
            let opened = stranger.open_device(&mut fixture, asked, mode);
            assert_eq!(opened.map(drop), Err(errno::EACCES), "{listed}, {asked}");
        }
        stranger.clear_result();
        stranger.send_discover((0, 0), "", Page::LEN_MAX);
        assert_eq!(stranger.reply(&mut fixture).errno, 0);
        let page = Page::decode(&stranger.result(Page::LEN_MAX)).unwrap();
        assert!(page.exports.iter().all(|export| export.name.as_bytes() != b"vol"), "{listed}");
        let mut second = Peer::new(&fixture, second_path(1));
        assert_eq!(second.connect(&mut fixture, 0), Err(-13), "{listed}, {asked}");
        set(&fixture, "ro");
        fixture.admin(AdminRequest::CheckAccess);
        assert!(member.closed(&mut fixture) > 0, "{listed}, {asked}: the session writes");
        assert_eq!(stranger.closed(&mut fixture), 0);
    }
}

#[test]
fn a_forced_removal_keeps_paths_of_the_session() {
    let mut fixture = Fixture::new(StandOptions::default());
    set(&fixture, &[], &[anyone(0, "rw")]);
    let mut peer = Peer::open(&mut fixture, from(0));
    fixture.admin(AdminRequest::ExportRemove { name: "vol".into(), force: true });
    // A different list now applies; the session continues and learns of the removal.
    set(&fixture, &[anyone(0, "ro")], &[]);
    fixture.admin(AdminRequest::CheckAccess);
    assert_eq!(peer.closed(&mut fixture), 0);
    assert_eq!(peer.open_device(&mut fixture, "other", RO).map(|_| ()), Ok(()));
}

#[test]
fn client_actions_are_recorded() {
    let mut fixture = Fixture::new(StandOptions::default());
    let events = fixture.audited();
    set(&fixture, &[], &[anyone(0, "rw")]);
    let mut stranger = Peer::new(&fixture, PeerOptions { session: 2, path: 3, ..from(1) });
    assert_eq!(stranger.connect(&mut fixture, 0), Err(-13));
    let mut peer = Peer::up(&mut fixture, from(0), "sess");
    assert_eq!(peer.open_device(&mut fixture, "other", RO).unwrap_err(), errno::EACCES);
    assert!(peer.open_device(&mut fixture, "vol", RW).is_ok());
    set(&fixture, &[], &[anyone(1, "rw")]);
    fixture.admin(AdminRequest::CheckAccess);
    fixture.settle();
    assert!(peer.closed(&mut fixture) > 0);
    let events = std::mem::take(&mut *events.lock());
    let kinds: Vec<_> = events.iter().map(|event| (event.event, event.result)).collect();
    use AuditKind::{Close, Connect, Disconnect, Evict, Open};
    let expected = [
        (Connect, AuditResult::Refused),
        (Connect, AuditResult::Ok),
        (Open, AuditResult::Refused),
        (Open, AuditResult::Ok),
        (Evict, AuditResult::Ok),
        (Close, AuditResult::Ok),
        (Disconnect, AuditResult::Ok),
    ];
    assert_eq!(kinds, expected);
    assert!(events[0].reason.as_deref().unwrap().contains("is in no access list"));
    assert!(events[2].reason.as_deref().unwrap().ends_with("may not open 'other' ro"));
    assert_eq!(events[3].export.as_deref(), Some("vol"));
    assert_eq!(events[3].mode, Some(crate::stats::Access::Rw));
    assert_eq!(events[3].address.unwrap().ip(), client_ip(0));
    assert_eq!(events[5].export.as_deref(), Some("vol"));
    // The event contains a hash, which is shorter than the UUID.
    assert_eq!(events[1].session.as_ref().map(String::len), Some(12));
    assert!(events[1..].iter().all(|event| event.session == events[1].session));
}

#[test]
fn repeated_events_are_counted_and_the_count_is_recorded() {
    let mut fixture = Fixture::new(StandOptions::default());
    let events = fixture.audited();
    set(&fixture, &[], &[anyone(0, "ro")]);
    let mut peer = Peer::up(&mut fixture, from(0), "sess");
    for _ in 0..4 {
        assert_eq!(peer.open_device(&mut fixture, "vol", RW).unwrap_err(), errno::EACCES);
    }
    // The same errno, but for a different export.
    assert_eq!(peer.open_device(&mut fixture, "other", RO).unwrap_err(), errno::EACCES);
    let opens = |events: &[AuditEvent]| -> Vec<(String, u64)> {
        let opens = events.iter().filter(|event| event.event == AuditKind::Open);
        let shown = |event: &AuditEvent| (event.export.clone().unwrap_or_default(), event.left_out);
        opens.map(shown).collect()
    };
    assert_eq!(opens(&events.lock()), [("vol".to_owned(), 0), ("other".to_owned(), 0)]);
    // No more events follow, so the suppressed ones are reported: one line represents three.
    fixture.pass(std::time::Duration::from_secs(5));
    let all = opens(&events.lock());
    assert_eq!(all[2..], [("vol".to_owned(), 2)], "{all:?}");
    fixture.pass(std::time::Duration::from_secs(60));
    assert_eq!(opens(&events.lock()).len(), 3);
}

#[test]
fn the_end_of_a_session_without_opens_is_recorded() {
    let mut fixture = Fixture::new(StandOptions::default());
    let events = fixture.audited();
    let mut peer = Peer::up(&mut fixture, from(0), "sess");
    peer.leave(&mut fixture);
    let other = PeerOptions { session: 2, path: 2, ..from(1) };
    let _kept = Peer::up(&mut fixture, other, "sess");
    let third = PeerOptions { session: 3, path: 3, ..from(2) };
    let mut peer = Peer::new(&fixture, third);
    (0..third.cid_num).for_each(|cid| peer.connect(&mut fixture, cid).unwrap());
    let request = InfoReq { session_name: Name::new(b"sess").unwrap() }.encode();
    peer.send_info(&mut fixture, &request);
    fixture.settle();
    assert!(peer.closed(&mut fixture) > 0);
    let kinds: Vec<_> = events.lock().iter().map(|event| (event.event, event.result)).collect();
    use AuditKind::{Connect, Disconnect};
    let expected = [
        (Connect, AuditResult::Ok),
        (Disconnect, AuditResult::Ok),
        (Connect, AuditResult::Ok),
        (Connect, AuditResult::Refused),
    ];
    assert_eq!(kinds, expected);
    let why = events.lock()[3].reason.clone();
    assert_eq!(why.as_deref(), Some("another session has the name \"sess\" (session-name)"));
}

#[test]
fn connects_of_anonymous_clients_are_counted_together() {
    let mut fixture = Fixture::new(StandOptions::default());
    let events = fixture.audited();
    for session in 1..=3 {
        let options = PeerOptions { session, path: session, ..from(0) };
        let _ = Peer::up(&mut fixture, options, "sess");
    }
    fixture.pass(std::time::Duration::from_secs(5));
    let events = events.lock();
    let connects: Vec<_> = events.iter().filter(|e| e.event == AuditKind::Connect).collect();
    assert_eq!(connects.len(), 2, "{connects:?}");
    assert_eq!((connects[0].left_out, connects[1].left_out), (0, 1));
}

#[test]
fn the_events_of_a_session_that_opens_an_export_are_recorded_in_order() {
    let mut fixture = Fixture::new(StandOptions::default());
    let events = fixture.audited();
    let _first = Peer::up(&mut fixture, from(0), "first");
    // Its connect event repeats that of the first session, and is suppressed.
    let options = PeerOptions { session: 2, path: 2, ..from(0) };
    let mut second = Peer::up(&mut fixture, options, "second");
    assert!(second.open_device(&mut fixture, "vol", RO).is_ok());
    second.leave(&mut fixture);
    fixture.pass(std::time::Duration::from_secs(5));
    let events = events.lock();
    let second = events.iter().filter(|event| event.session_name.as_deref() == Some("second"));
    let kinds: Vec<_> = second.map(|event| event.event).collect();
    use AuditKind::{Close, Connect, Disconnect, Open};
    assert_eq!(kinds, [Connect, Open, Close, Disconnect]);
}
