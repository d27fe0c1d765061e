//! Tests of connecting: the successful case, and every refusal with its errno.

use rtrs_core::limits::Limits;
use rtrs_core::settings::AutoSwitch;
use rtrs_core::time::Duration;
use rtrs_core::wire::ClientExtensions;

use super::fixture::{DeviceOptions, Fixture, StandOptions};
use super::peer::{Peer, PeerOptions};
use crate::engine::session::SessionParams;
use crate::stats::PathStage;

fn small(change: impl Fn(&mut SessionParams)) -> Fixture {
    let mut options = StandOptions::default();
    change(&mut options.params);
    Fixture::new(options)
}

#[test]
fn a_path_comes_up_with_any_number_of_connections() {
    for cid_num in [1, 2, 3, 9] {
        for always_invalidate in [false, true] {
            let mut fixture = small(|params| params.always_invalidate = always_invalidate.into());
            let options = PeerOptions { cid_num, ..PeerOptions::default() };
            let mut peer = Peer::up(&mut fixture, options, "sess");
            assert_eq!(peer.new_rkey, always_invalidate);
            let keys: Vec<_> = peer.chunks.iter().map(|chunk| chunk.key).collect();
            let same = keys.iter().all(|key| *key == keys[0]);
            assert_eq!(same, !always_invalidate, "a key per chunk, or one for all");
            let sessions = fixture.sessions();
            assert_eq!(sessions.len(), 1);
            assert_eq!(sessions[0].name.as_deref(), Some("sess"));
            assert_eq!(sessions[0].paths[0].state, PathStage::Connected);
            assert_eq!(fixture.load().0, usize::from(cid_num));
            peer.leave(&mut fixture);
            fixture.assert_empty();
        }
    }
}

#[test]
fn info_rsp_is_the_first_send_and_the_only_one() {
    let mut fixture = small(|params| params.limits = Limits::new(4, 8192).unwrap());
    let options = PeerOptions::default();
    let mut peer = Peer::new(&fixture, options);
    for cid in 0..3 {
        peer.connect(&mut fixture, cid).unwrap();
    }
    assert_eq!(fixture.posted(), []);
    peer.info(&mut fixture, "sess");
    let posted = fixture.posted();
    assert_eq!(posted.len(), 1);
    assert_eq!(posted[0].bytes.len(), 8 + 4 * 16);
    assert_eq!(posted[0].bytes[..8], [1, 0, 4, 0, 0, 0, 0, 0]);
}

#[test]
fn every_invalid_con_req_is_refused_with_its_errno() {
    let reset = -104;
    let good = PeerOptions::default();
    let bytes = |change: &dyn Fn(&mut [u8; 56])| {
        let mut bytes = good.request(0).encode();
        change(&mut bytes);
        bytes.to_vec()
    };
    let cases: [(&str, Vec<u8>, i16); 9] = [
        ("short", bytes(&|_| ())[..55].to_vec(), reset),
        ("empty", Vec::new(), reset),
        ("magic", bytes(&|b| b[2] = 0), reset),
        ("major version", bytes(&|b| b[5] = 3), reset),
        ("no connections", bytes(&|b| b[8..10].fill(0)), reset),
        ("4097 connections", bytes(&|b| b[8..10].copy_from_slice(&[1, 16])), reset),
        ("cid as large as the count", bytes(&|b| b[6] = 3), reset),
        ("no session and none asked for", bytes(&|b| b[44] = 0), -6),
        ("no session, garbage in other flags", bytes(&|b| b[44] = 0xfe), -6),
    ];
    for (what, private_data, errno) in cases {
        let mut fixture = Fixture::new(StandOptions::default());
        let mut peer = Peer::new(&fixture, good);
        let failure = peer.connect_raw(&mut fixture, &private_data).unwrap_err();
        assert_eq!(failure, errno, "{what}");
        fixture.assert_empty();
    }
    // A newer minor version, and padding after the message, are accepted.
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::new(&fixture, good);
    peer.connect_raw(&mut fixture, &bytes(&|b| b[4] = 9)).unwrap();
}

#[test]
fn connections_must_fit_their_path() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::new(&fixture, PeerOptions::default());
    peer.connect(&mut fixture, 0).unwrap();
    let again = peer.connect(&mut fixture, 0).unwrap_err();
    assert_eq!(again, -104, "the same connection twice");
    peer.options.cid_num = 4;
    let other = peer.connect(&mut fixture, 1).unwrap_err();
    assert_eq!(other, -104, "another count");
    peer.options.cid_num = 3;
    peer.connect(&mut fixture, 2).unwrap();
    peer.connect(&mut fixture, 1).unwrap();
    peer.info(&mut fixture, "sess");
    peer.options.cid_num = 3;
    let late = peer.connect(&mut fixture, 1).unwrap_err();
    assert_eq!(late, -104, "the path is complete");
    assert_eq!(fixture.sessions()[0].paths[0].state, PathStage::Connected);
}

#[test]
fn two_paths_between_the_same_addresses_are_refused() {
    let mut fixture = Fixture::new(StandOptions::default());
    let one = PeerOptions::default();
    let _first = Peer::up(&mut fixture, one, "sess");
    let mut same = Peer::new(&fixture, PeerOptions { path: 2, first_conn: false, ..one });
    assert_eq!(same.connect(&mut fixture, 0).unwrap_err(), -17);
    let elsewhere = PeerOptions { path: 2, local: 1, first_conn: false, ..one };
    let mut second = Peer::up(&mut fixture, elsewhere, "sess");
    assert_eq!(fixture.sessions()[0].paths.len(), 2);
    second.leave(&mut fixture);
    assert_eq!(fixture.sessions()[0].paths.len(), 1);
}

#[test]
fn a_reconnect_replaces_a_path_the_server_considers_alive() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut old = Peer::up(&mut fixture, PeerOptions::default(), "sess");
    let mut same = Peer::new(&fixture, PeerOptions::default());
    assert_eq!(same.connect(&mut fixture, 0).unwrap_err(), -104);
    assert_eq!(old.closed(&mut fixture), 0, "a mere copy ends nothing");
    let mut new = Peer::new(&fixture, PeerOptions { recon_cnt: 2, ..PeerOptions::default() });
    assert_eq!(new.connect(&mut fixture, 0).unwrap_err(), -104);
    assert_eq!(old.closed(&mut fixture), 3);
    let again = PeerOptions { recon_cnt: 3, ..PeerOptions::default() };
    let _up = Peer::up(&mut fixture, again, "sess");
}

#[test]
fn limits_on_sessions_and_half_open_connections_apply() {
    let mut fixture = small(|params| params.sessions_max = 1);
    let _one = Peer::open(&mut fixture, PeerOptions::default());
    let mut two = Peer::new(&fixture, PeerOptions { session: 2, ..PeerOptions::default() });
    assert_eq!(two.connect(&mut fixture, 0).unwrap_err(), -87);

    let mut fixture = small(|params| params.half_open_max = 2);
    let mut peer = Peer::new(&fixture, PeerOptions::default());
    peer.connect(&mut fixture, 0).unwrap();
    peer.connect(&mut fixture, 1).unwrap();
    // A session is not evicted to make room for its own connection.
    assert_eq!(peer.connect(&mut fixture, 2).unwrap_err(), -122);
    fixture.pass(Duration::from_secs(6));
    fixture.assert_empty();
    let _fits = Peer::up(&mut fixture, PeerOptions { cid_num: 2, ..PeerOptions::default() }, "s");
}

#[test]
fn a_path_that_stays_half_open_is_closed() {
    for connections in 1..=3 {
        let mut fixture = Fixture::new(StandOptions::default());
        let mut peer = Peer::new(&fixture, PeerOptions::default());
        for cid in 0..connections {
            peer.connect(&mut fixture, cid).unwrap();
        }
        fixture.pass(Duration::from_millis(4900));
        assert_eq!(peer.closed(&mut fixture), 0);
        fixture.pass(Duration::from_millis(200));
        assert_eq!(peer.closed(&mut fixture), usize::from(connections));
        fixture.assert_empty();
    }
}

#[test]
fn invalid_info_requests_end_only_their_path() {
    let mut fixture = Fixture::new(StandOptions::default());
    let one = PeerOptions::default();
    let mut taken = Peer::open(&mut fixture, one);
    let message = info_req;
    let mut wrong_type = message(b"x");
    wrong_type[0] = 4;
    let cases: [(&str, Vec<u8>); 8] = [
        ("slash", message(b"a/b")),
        ("dot", message(b"a.b")),
        ("empty name", message(b"")),
        ("no end of name", message(&[b'x'; 255])),
        ("name of another session", message(b"sess")),
        ("wrong type", wrong_type),
        ("short", message(b"x")[..271].to_vec()),
        ("one byte", vec![0]),
    ];
    for (what, bytes) in cases {
        let mut peer = Peer::new(&fixture, PeerOptions { session: 9, local: 1, ..one });
        for cid in 0..3 {
            peer.connect(&mut fixture, cid).unwrap();
        }
        peer.send_info(&mut fixture, &bytes);
        assert_eq!(peer.closed(&mut fixture), 3, "{what}");
        assert_eq!(fixture.sessions().len(), 1, "{what}");
    }
    taken.send_flush((1, 0));
    assert_eq!(taken.reply(&mut fixture).errno, 0);
}

/// An INFO_REQ with this name.
fn info_req(name: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 272];
    bytes[2..2 + name.len()].copy_from_slice(name);
    bytes
}

/// Options for a client that supports refusals in INFO_RSP.
fn takes_refusals() -> PeerOptions {
    let extensions = ClientExtensions { info_refusals: true, ..ClientExtensions::default() };
    PeerOptions { session: 9, path: 9, local: 1, extensions, ..PeerOptions::default() }
}

#[test]
fn refused_info_requests_are_answered_for_clients_that_support_it() {
    let mut fixture = Fixture::new(StandOptions::default());
    let _taken = Peer::open(&mut fixture, PeerOptions::default());
    for (name, errno) in [(&b"sess"[..], 17), (b"a/b", 22), (b"", 22)] {
        let mut peer = Peer::new(&fixture, takes_refusals());
        (0..3).for_each(|cid| peer.connect(&mut fixture, cid).unwrap());
        fixture.posted();
        peer.send_info(&mut fixture, &info_req(name));
        // The holder of the name receives a heartbeat, which has no payload.
        let posted = fixture.posted().into_iter().map(|posted| posted.bytes);
        let answers: Vec<_> = posted.filter(|bytes| !bytes.is_empty()).collect();
        assert_eq!(answers, [[1, 0, 0, 0, errno, 0, 0, 0]]);
        peer.take_info().expect("a refusal");
        assert_eq!(peer.info_refused, Some(errno.into()));
        assert_eq!(peer.closed(&mut fixture), 0, "the client closes the path");
        assert_eq!(fixture.sessions().len(), 2);
        peer.leave(&mut fixture);
        assert_eq!(fixture.sessions().len(), 1);
    }
    // A client that sends requests anyway loses the path.
    let mut eager = Peer::new(&fixture, takes_refusals());
    (0..3).for_each(|cid| eager.connect(&mut fixture, cid).unwrap());
    eager.send_info(&mut fixture, &info_req(b"a/b"));
    eager.send_imm(1, 72);
    assert_eq!(eager.closed(&mut fixture), 3);
    // A message other than INFO_REQ is not answered.
    let mut wrong = Peer::new(&fixture, takes_refusals());
    (0..3).for_each(|cid| wrong.connect(&mut fixture, cid).unwrap());
    fixture.posted();
    wrong.send_info(&mut fixture, &info_req(b"x")[..271]);
    assert_eq!(wrong.closed(&mut fixture), 3);
    assert!(fixture.posted().iter().all(|posted| posted.bytes.is_empty()));
    assert_eq!(fixture.sessions().len(), 1);
    // A client that does not close the path loses it at the handshake timeout.
    let mut idle = Peer::new(&fixture, takes_refusals());
    (0..3).for_each(|cid| idle.connect(&mut fixture, cid).unwrap());
    idle.send_info(&mut fixture, &info_req(b"a/b"));
    fixture.pass(Duration::from_secs(6));
    assert_eq!(idle.closed(&mut fixture), 3);
}

#[test]
fn an_info_request_before_all_connections_ends_the_path() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::new(&fixture, PeerOptions::default());
    peer.connect(&mut fixture, 0).unwrap();
    peer.connect(&mut fixture, 1).unwrap();
    let mut bytes = vec![0; 272];
    bytes[2] = b'x';
    peer.send_info(&mut fixture, &bytes);
    assert_eq!(peer.closed(&mut fixture), 2);
    fixture.assert_empty();
}

#[test]
fn an_immediate_instead_of_info_req_ends_the_path() {
    for conn in [0, 1] {
        let mut fixture = Fixture::new(StandOptions::default());
        let mut peer = Peer::new(&fixture, PeerOptions::default());
        for cid in 0..3 {
            peer.connect(&mut fixture, cid).unwrap();
        }
        // A heartbeat on connection 0 consumes the receive for INFO_REQ; a request is too early on
        // any connection.
        peer.send_imm(conn, if conn == 0 { 0x8000_0000 } else { 72 });
        assert_eq!(peer.closed(&mut fixture), 3, "connection {conn}");
        fixture.assert_empty();
    }
}

/// A fixture whose device has limited capabilities.
fn poor(device: DeviceOptions, change: impl Fn(&mut SessionParams)) -> Fixture {
    let mut options = StandOptions { device, ..StandOptions::default() };
    change(&mut options.params);
    Fixture::new(options)
}

#[test]
fn insufficient_memory_is_reported_with_the_first_connection() {
    // 16 chunks of 16 KiB and their gaps do not fit; the small messages do.
    let device =
        DeviceOptions { pins_memory: true, register_max: 128 << 10, ..DeviceOptions::default() };
    let mut fixture = poor(device, |_| ());
    let mut peer = Peer::new(&fixture, PeerOptions::default());
    assert_eq!(peer.connect(&mut fixture, 0).unwrap_err(), -12);
    fixture.assert_empty();
    // If less memory is registered, the path comes up with and without fresh keys.
    for always_invalidate in [false, true] {
        let mut fixture = poor(device, |params| {
            params.limits = Limits::new(4, 16384).unwrap();
            params.always_invalidate = always_invalidate.into();
        });
        let mut peer = Peer::open(&mut fixture, PeerOptions::default());
        peer.leave(&mut fixture);
        fixture.assert_empty();
    }
    // On other devices, memory is registered once the path is complete; a refusal ends the path.
    let mut fixture = poor(DeviceOptions { pins_memory: false, ..device }, |_| ());
    let mut peer = Peer::new(&fixture, PeerOptions { cid_num: 1, ..PeerOptions::default() });
    peer.connect(&mut fixture, 0).unwrap();
    let mut bytes = vec![0; 272];
    bytes[2] = b'x';
    peer.send_info(&mut fixture, &bytes);
    assert_eq!(peer.closed(&mut fixture), 1);
    fixture.assert_empty();
    let mut peer = Peer::new(&fixture, PeerOptions { cid_num: 1, ..takes_refusals() });
    peer.connect(&mut fixture, 0).unwrap();
    peer.send_info(&mut fixture, &bytes);
    peer.take_info().expect("a refusal");
    assert_eq!(peer.info_refused, Some(12));
    peer.leave(&mut fixture);
    fixture.assert_empty();
}

#[test]
fn a_device_without_windows_is_used_unless_fresh_keys_are_required() {
    for pins_memory in [false, true] {
        let device = DeviceOptions { pins_memory, no_windows: true, ..DeviceOptions::default() };
        for always_invalidate in [AutoSwitch::Auto, AutoSwitch::Off] {
            let mut fixture = poor(device, |params| params.always_invalidate = always_invalidate);
            let mut peer = Peer::open(&mut fixture, PeerOptions::default());
            assert!(!peer.new_rkey, "the response says that keys stay");
            assert!(!fixture.sessions()[0].paths[0].fresh_keys);
            peer.leave(&mut fixture);
            fixture.assert_empty();
        }
    }
    // A device with windows uses fresh keys.
    let mut fixture = small(|params| params.always_invalidate = AutoSwitch::Auto);
    let peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
    assert!(peer.new_rkey && fixture.sessions()[0].paths[0].fresh_keys);
    // If fresh keys are required, they are not silently omitted.
    let device = DeviceOptions { pins_memory: true, no_windows: true, ..DeviceOptions::default() };
    let mut fixture = poor(device, |params| params.always_invalidate = AutoSwitch::On);
    let mut peer = Peer::new(&fixture, PeerOptions::default());
    assert_eq!(peer.connect(&mut fixture, 0).unwrap_err(), -95);
    fixture.assert_empty();
}

#[test]
fn the_number_of_connections_per_path_is_limited() {
    let device = DeviceOptions { connection_bytes: 1 << 20, ..DeviceOptions::default() };
    let mut fixture = poor(device, |_| ());
    for (cid_num, fits) in [(33, false), (4096, false), (32, true)] {
        let mut peer = Peer::new(&fixture, PeerOptions { cid_num, ..PeerOptions::default() });
        assert_eq!(
            peer.connect(&mut fixture, 0),
            if fits { Ok(()) } else { Err(-122) },
            "{cid_num}"
        );
    }
}
