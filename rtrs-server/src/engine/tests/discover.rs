//! Tests of DISCOVER: listed exports, paging, and refusals.

use rtrs_core::identity::ExportId;
use rtrs_core::time::Duration;
use rtrs_core::wire::{AccessMode, Discover, Page, WriteMsg, errno};

use super::fixture::{Fixture, StandOptions};
use super::peer::{Data, Peer, PeerOptions, read_message};
use crate::engine::message::AdminRequest;

/// Connects like `rtrs-client discover`.
fn asking(fixture: &mut Fixture) -> Peer {
    let options = PeerOptions { session: 9, path: 9, local: 2, cid_num: 1, ..Default::default() };
    Peer::up(fixture, options, "asking")
}

fn page(fixture: &mut Fixture, peer: &mut Peer, after: &str, room: usize) -> Result<Page, u16> {
    peer.clear_result();
    peer.send_discover((0, 0), after, room);
    match peer.reply(fixture).errno {
        0 => Ok(Page::decode(&peer.result(room)).unwrap()),
        errno => Err(errno),
    }
}

fn names(page: &Page) -> Vec<String> {
    page.exports.iter().map(|export| export.name.to_string()).collect()
}

#[test]
fn named_exports_are_listed_with_their_users() {
    let mut fixture = Fixture::new(StandOptions { search: true, ..StandOptions::default() });
    let mut user = Peer::open(&mut fixture, PeerOptions::default());
    user.open_device(&mut fixture, "other", AccessMode::ReadOnly).unwrap();
    let mut peer = asking(&mut fixture);
    let all = page(&mut fixture, &mut peer, "", Page::LEN_MAX).unwrap();
    assert_eq!(
        (names(&all), all.more),
        (["fixed", "other", "vol"].map(str::to_owned).into(), false)
    );
    let [fixed, other, vol] = all.exports[..] else { panic!("{all:?}") };
    assert_eq!((vol.sectors, vol.block_size), (2048, 512));
    assert_eq!((fixed.read_only, vol.read_only), (true, false));
    assert_eq!((fixed.written, other.written, vol.written), (false, false, true));
    assert_eq!(vol.id, Some(ExportId::of_name("vol")));
    // A client does not block itself, and a removed export is not listed.
    let own = |page: Page| page.exports.last().map(|export| export.written);
    assert_eq!(own(page(&mut fixture, &mut user, "other", Page::LEN_MIN).unwrap()), Some(false));
    let remove = AdminRequest::ExportRemove { name: "vol".into(), force: true };
    let _ = fixture.admin(remove);
    let left = page(&mut fixture, &mut peer, "", Page::LEN_MAX).unwrap();
    assert_eq!(names(&left), ["fixed", "other"]);
    assert_eq!(fixture.search(), None, "nothing is searched for");
}

#[test]
fn a_list_is_paged() {
    let mut fixture = Fixture::new(StandOptions::default());
    for n in 0..120 {
        let export = crate::export::Export::new(
            format!("{n:03}-{}", "x".repeat(n * 2)),
            std::sync::Arc::new(crate::backend::NullSource::new(4096, 512)),
        );
        fixture.exports.add(&std::sync::Arc::new(export)).unwrap();
    }
    for room in [Page::LEN_MIN, 1000, Page::LEN_MAX, 12_000] {
        // A played client sends at most 256 requests.
        let mut peer = asking(&mut fixture);
        let (mut found, mut after, mut pages) = (Vec::new(), String::new(), 0);
        loop {
            let next = page(&mut fixture, &mut peer, &after, room).unwrap();
            pages += 1;
            assert!(!next.exports.is_empty() && next.encode().len() <= room.min(Page::LEN_MAX));
            found.extend(names(&next));
            if !next.more {
                break;
            }
            after = found.last().unwrap().clone();
        }
        peer.leave(&mut fixture);
        assert_eq!(found.len(), 123, "room for {room}");
        assert!(found.is_sorted());
        assert!(pages > 120 * (36 + 119) / Page::LEN_MAX, "{pages} pages");
    }
    // A cursor that names no export, or sorts after all exports.
    let mut peer = asking(&mut fixture);
    let between = page(&mut fixture, &mut peer, "zz", Page::LEN_MAX).unwrap();
    assert_eq!(between, Page::default());
    let slash = page(&mut fixture, &mut peer, "/fixed", Page::LEN_MAX).unwrap();
    assert_eq!(names(&slash), ["other", "vol"]);
}

#[test]
fn an_invalid_discover_is_answered() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = asking(&mut fixture);
    for room in [0, 1, 56, Page::LEN_MIN - 1] {
        let answer = page(&mut fixture, &mut peer, "", room);
        assert_eq!(answer, Err(errno::EINVAL), "room for {room}");
    }
    let mut endless = Discover::default().encode();
    endless[6..261].fill(b'v');
    peer.send_discover_raw((0, 0), &endless, 512);
    assert_eq!(peer.reply(&mut fixture).errno, errno::EINVAL, "an unterminated name");
    peer.send_discover_raw((0, 0), &endless[..263], 512);
    assert_eq!(peer.reply(&mut fixture).errno, errno::EINVAL, "a short one");
    let good = Discover::default().encode();
    peer.request((0, 0), Data::None, &good, &WriteMsg { usr_len: 264 }.encode());
    assert_eq!(peer.reply(&mut fixture).errno, errno::EINVAL, "as a WRITE");
    let other = read_message(264, Some(peer.result_desc(1024)), false);
    peer.request((0, 0), Data::Room(512), &good, &other);
    assert_eq!(peer.reply(&mut fixture).errno, errno::EINVAL, "less room than announced");
    // Arbitrary bytes in unused fields.
    let mut dirty = good;
    dirty[2..6].fill(0xa5);
    dirty[7..].fill(0xa5);
    peer.send_discover_raw((0, 0), &dirty, 512);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    assert_eq!(names(&Page::decode(&peer.result(512)).unwrap()), ["fixed", "other", "vol"]);
}

#[test]
fn many_concurrent_requests_are_all_answered() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = asking(&mut fixture);
    for _ in 0..60 {
        for permit in 0..4 {
            peer.send_discover((0, permit), "", Page::LEN_MAX);
        }
        let replies = peer.replies(&mut fixture);
        assert_eq!(
            (replies.len(), replies.iter().filter(|reply| reply.errno == 0).count()),
            (4, 4)
        );
    }
}

#[test]
fn a_server_with_listing_disabled_refuses_discover() {
    let mut options = StandOptions::default();
    options.params.discovery = false;
    let mut fixture = Fixture::new(options);
    let mut peer = asking(&mut fixture);
    assert_eq!(page(&mut fixture, &mut peer, "", Page::LEN_MAX), Err(errno::EINVAL));
    peer.open_device(&mut fixture, "vol", AccessMode::ReadOnly).unwrap();
}

#[test]
fn a_session_that_only_lists_stays_unproven() {
    let second = Duration::from_secs(1);
    let mut options = StandOptions::default();
    options.params.open_timeout = second * 12;
    options.params.heartbeat_interval = second * 5;
    let mut fixture = Fixture::new(options);
    let mut peer = asking(&mut fixture);
    for _ in 0..5 {
        fixture.pass(second * 2);
        assert!(page(&mut fixture, &mut peer, "", Page::LEN_MAX).is_ok());
    }
    fixture.pass(second * 7);
    assert_eq!(peer.closed(&mut fixture), 1, "asking for a list is not opening");
    fixture.assert_empty();
}
