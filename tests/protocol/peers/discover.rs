//! Tests of DISCOVER: invalid cursors, no room for an answer, floods.

use rtrs_core::wire::{AccessMode, Discover, Page, WriteMsg, errno};
use rtrs_tests::{Data, PeerOptions, read_message};

use super::*;

impl Scene {
    /// Connects a path of one connection, as `rtrs-client discover` does.
    fn asking(&mut self) -> Peer {
        let options = PeerOptions { cid_num: 1, ..self.options() };
        Peer::up(self.server, options, &format!("peer{}", options.session))
    }
}

fn page(peer: &mut Peer, after: &str) -> Page {
    peer.send_discover((0, 0), after, Page::LEN_MAX);
    assert_eq!(peer.answer().errno, 0, "after {after:?}");
    Page::decode(&peer.result(Page::LEN_MAX)).expect("a page")
}

fn names(page: &Page) -> Vec<String> {
    page.exports.iter().map(|export| export.name.to_string()).collect()
}

#[test]
fn invalid_discover_requests() {
    for always_invalidate in ["on", "off"] {
        let mut scene = Scene::with(&["--always-invalidate", always_invalidate]);
        let mut peer = scene.asking();
        let all = page(&mut peer, "");
        assert_eq!(names(&all), ["ro", "slow", "vol0", "vol1", "vol2"]);
        let vol0 = all.exports[2];
        assert!(vol0.written && !vol0.read_only && all.exports[0].read_only, "{all:?}");
        assert_eq!(names(&page(&mut peer, "slow")), ["vol0", "vol1", "vol2"]);
        for after in ["vol2", "zzz", "\u{7f}\u{1}%s%n", &"z".repeat(254)] {
            assert_eq!(page(&mut peer, after), Page::default(), "after {after:?}");
        }
        assert_eq!(names(&page(&mut peer, "///\u{1}../../etc/passwd")).len(), 5);
        let mut endless = Discover::default().encode();
        endless[6..261].fill(0xff);
        let mut bytes = endless;
        bytes[260] = 0;
        peer.send_discover_raw((0, 0), &bytes, 512);
        assert_eq!(peer.answer().errno, 0, "a name that is not UTF-8");
        for (what, message, room) in [
            ("an unterminated name", &endless[..], 512),
            ("a short message", &endless[..263], 512),
            ("no room", &Discover::default().encode()[..], Page::LEN_MIN - 1),
            ("room for nothing", &Discover::default().encode()[..], 0),
        ] {
            peer.send_discover_raw((0, 0), message, room);
            assert_eq!(peer.answer().errno, errno::EINVAL, "{what}");
        }
        let good = Discover::default().encode();
        peer.request((0, 0), Data::None, &good, &WriteMsg { usr_len: 264 }.encode());
        assert_eq!(peer.answer().errno, errno::EINVAL, "as a WRITE");
        let huge = rtrs_core::wire::SgDesc { len: u32::MAX, ..peer.result_desc(512) };
        peer.request((0, 0), Data::Room(512), &good, &read_message(264, Some(huge), false));
        assert_eq!(peer.answer().errno, errno::EINVAL, "a huge descriptor");
        peer.check_alive("invalid discover requests");
        drop(peer);
        scene.end();
    }
}

#[test]
fn a_flood_of_discover_requests() {
    let mut scene = Scene::new();
    let mut peers: Vec<Peer> = (0..4).map(|_| scene.asking()).collect();
    for _ in 0..250 {
        for peer in &mut peers {
            (0..4).for_each(|permit| peer.send_discover((0, permit), "", Page::LEN_MAX));
        }
        for peer in &mut peers {
            assert!((0..4).all(|_| peer.answer().errno == 0));
        }
    }
    // A client that only sends DISCOVER is granted four pieces of memory. Chunks this far apart
    // share none.
    if is_tcp() {
        let mut greedy = scene.asking();
        for permit in [0, 6, 12, 18] {
            greedy.send_discover((0, permit), "", Page::LEN_MAX);
            assert_eq!(greedy.answer().errno, 0, "permit {permit}");
        }
        greedy.send_discover((0, 23), "", Page::LEN_MAX);
        let _ = greedy.ended("a fifth chunk", at_once());
    }
    drop(peers);
    let mut twice = scene.asking();
    twice.send_discover((0, 1), "", Page::LEN_MAX);
    twice.send_discover((0, 1), "", Page::LEN_MAX);
    // Either the first is answered before the second arrives, or the path ends: both are correct.
    twice.idle(Duration::from_millis(100));
    drop(twice);
    scene.end();
}

#[test]
fn a_server_with_listing_disabled() {
    let mut scene = Scene::with(&["--discovery", "off"]);
    let mut peer = scene.asking();
    peer.send_discover((0, 0), "", Page::LEN_MAX);
    assert_eq!(peer.answer().errno, errno::EINVAL);
    assert!(peer.open("vol1", AccessMode::ReadOnly).is_ok(), "a known name can be opened");
    drop(peer);
    scene.end();
}
