//! Tests of chunks that are registered asynchronously: only connections wait for them.

use rtrs_core::limits::Limits;
use rtrs_core::settings::AutoSwitch;
use rtrs_core::time::Duration;
use rtrs_core::wire::AccessMode;

use super::fixture::{DeviceOptions, Fixture, StandOptions};
use super::peer::{Peer, PeerOptions};
use crate::stats::PathStage;

const ASIDE: DeviceOptions = DeviceOptions {
    pins_memory: true,
    register_max: 0,
    no_windows: false,
    connection_bytes: 0,
    undead: false,
    many: false,
    slow: false,
    aside: true,
    takes_no_proofs: false,
    tls_from: None,
};

fn fixture(device: DeviceOptions) -> Fixture {
    Fixture::new(StandOptions { device, ..StandOptions::default() })
}

/// Creates a path and requests its first connection.
fn ask(fixture: &Fixture, options: PeerOptions) -> (Peer, rtrs_core::ids::QpNum) {
    let mut peer = Peer::new(fixture, options);
    let qp = peer.ask(fixture, &options.request(0).encode());
    (peer, qp)
}

/// Connects the rest of a path and opens its device.
fn finish_path(fixture: &mut Fixture, peer: &mut Peer, name: &str, device: &str) {
    for cid in 1..3 {
        peer.connect(fixture, cid).unwrap();
    }
    peer.info(fixture, name);
    peer.open_device(fixture, device, AccessMode::ReadWrite).unwrap();
}

#[test]
fn connections_wait_only_for_their_own_chunks() {
    let mut fixture = fixture(ASIDE);
    let (mut first, asked) = ask(&fixture, PeerOptions::default());
    assert_eq!(first.answer(&mut fixture, asked), None, "its chunks are not registered");
    assert_eq!(fixture.sessions()[0].paths[0].state, PathStage::Connecting);
    assert_eq!(fixture.make(), 1);
    assert_eq!(first.answer(&mut fixture, asked), Some(Ok(())));
    finish_path(&mut fixture, &mut first, "one", "vol");
    assert_eq!(fixture.make(), 0, "once for the path");

    let other = PeerOptions { session: 2, path: 2, local: 1, ..PeerOptions::default() };
    let (mut second, asked) = ask(&fixture, other);
    assert_eq!(second.answer(&mut fixture, asked), None);
    first.send_flush((1, 0));
    assert_eq!(first.reply(&mut fixture).errno, 0, "a connected path is unaffected");
    assert_eq!(fixture.make(), 1);
    assert_eq!(second.answer(&mut fixture, asked), Some(Ok(())));
    finish_path(&mut fixture, &mut second, "two", "other");
    first.leave(&mut fixture);
    second.leave(&mut fixture);
    fixture.assert_empty();
    assert_eq!(fixture.registered(), 0);
}

#[test]
fn all_connections_arriving_meanwhile_wait() {
    let mut fixture = fixture(ASIDE);
    let options = PeerOptions::default();
    let mut peer = Peer::new(&fixture, options);
    let asked: Vec<_> =
        (0..3).map(|cid| peer.ask(&fixture, &options.request(cid).encode())).collect();
    for qp in &asked {
        assert_eq!(peer.answer(&mut fixture, *qp), None);
    }
    assert_eq!(peer.connect(&mut fixture, 1), Err(-104), "one is already waiting");
    assert_eq!(fixture.make(), 1);
    for qp in &asked {
        assert_eq!(peer.answer(&mut fixture, *qp), Some(Ok(())));
    }
    peer.info(&mut fixture, "sess");
    peer.open_device(&mut fixture, "vol", AccessMode::ReadWrite).unwrap();
}

#[test]
fn a_reconnecting_path_waits_only_for_its_windows() {
    let mut fixture = fixture(ASIDE);
    let path = |n, recon_cnt| PeerOptions {
        path: n + 1,
        local: n,
        first_conn: n == 0,
        recon_cnt,
        ..PeerOptions::default()
    };
    let mut peers = Vec::new();
    for n in 0..2 {
        let (mut peer, asked) = ask(&fixture, path(n, 1));
        fixture.make();
        assert_eq!(peer.answer(&mut fixture, asked), Some(Ok(())));
        for cid in 1..3 {
            peer.connect(&mut fixture, cid).unwrap();
        }
        peer.info(&mut fixture, "sess");
        peers.push(peer);
    }
    let bytes = fixture.registered();
    peers.remove(1).leave(&mut fixture);
    fixture.pools();
    let (mut back, asked) = ask(&fixture, path(1, 2));
    assert_eq!(back.answer(&mut fixture, asked), None);
    assert_eq!(fixture.make(), 1);
    assert_eq!(back.answer(&mut fixture, asked), Some(Ok(())));
    finish_path(&mut fixture, &mut back, "sess", "vol");
    assert_eq!((fixture.pools(), fixture.registered()), (vec![], bytes));
}

#[test]
fn a_failed_registration_is_reported() {
    let poor = DeviceOptions { register_max: 128 << 10, ..ASIDE };
    for (device, errno) in [(poor, -12), (DeviceOptions { no_windows: true, ..ASIDE }, -95)] {
        let mut options = StandOptions { device, ..StandOptions::default() };
        options.params.always_invalidate = AutoSwitch::On;
        let mut fixture = Fixture::new(options);
        let (mut peer, asked) = ask(&fixture, PeerOptions::default());
        assert_eq!(peer.answer(&mut fixture, asked), None);
        assert_eq!(fixture.make(), 1);
        assert_eq!(peer.answer(&mut fixture, asked), Some(Err(errno)));
        fixture.assert_empty();
        assert_eq!(fixture.registered(), 0);
    }
}

#[test]
fn a_registration_for_an_ended_path_is_released() {
    let mut fixture = fixture(ASIDE);
    let (_peer, _) = ask(&fixture, PeerOptions::default());
    fixture.pass(Duration::from_secs(6));
    fixture.assert_empty();
    assert_eq!(fixture.make(), 1);
    assert_eq!(fixture.registered(), 0);
    // The same with small chunks, which are registered when the server is shut down.
    let mut options = StandOptions { device: ASIDE, ..StandOptions::default() };
    options.params.limits = Limits::new(4, 8192).unwrap();
    let mut fixture = Fixture::new(options);
    let (_peer, _) = ask(&fixture, PeerOptions::default());
    fixture.settle();
    fixture.shutdown();
    fixture.settle();
    assert_eq!(fixture.make(), 1);
    fixture.assert_empty();
    assert!(fixture.all_done());
    assert_eq!(fixture.registered(), 0);
}
