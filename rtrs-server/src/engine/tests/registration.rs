//! Chunks that are made aside: connections wait for them, and nothing else does.

use rtrs_core::limits::Limits;
use rtrs_core::time::Duration;
use rtrs_core::wire::AccessMode;

use super::peer::{Peer, PeerOptions};
use super::stand::{DeviceOptions, Stand, StandOptions};
use crate::path::state::PathState;

const ASIDE: DeviceOptions = DeviceOptions {
    pins_memory: true,
    register_max: 0,
    no_windows: false,
    connection_bytes: 0,
    undead: false,
    many: false,
    slow: false,
    aside: true,
};

fn stand(device: DeviceOptions) -> Stand {
    Stand::new(StandOptions { device, ..StandOptions::default() })
}

/// A path whose first connection was asked for, and what is asked.
fn asks(stand: &Stand, options: PeerOptions) -> (Peer, rtrs_core::ids::QpNum) {
    let mut peer = Peer::new(stand, options);
    let qp = peer.ask(stand, &options.request(0).encode());
    (peer, qp)
}

/// Connects the rest of a path and opens its device.
fn goes_on(stand: &mut Stand, peer: &mut Peer, name: &str, device: &str) {
    for cid in 1..3 {
        peer.connect(stand, cid).unwrap();
    }
    peer.info(stand, name);
    peer.open_device(stand, device, AccessMode::ReadWrite).unwrap();
}

#[test]
fn connections_wait_for_their_chunks_and_for_no_others() {
    let mut stand = stand(ASIDE);
    let (mut first, asked) = asks(&stand, PeerOptions::default());
    assert_eq!(first.answer(&mut stand, asked), None, "its chunks are not there");
    assert_eq!(stand.sessions()[0].paths[0].state, PathState::Connecting);
    assert_eq!(stand.make(), 1);
    assert_eq!(first.answer(&mut stand, asked), Some(Ok(())));
    goes_on(&mut stand, &mut first, "one", "vol");
    assert_eq!(stand.make(), 0, "once for the path");

    let other = PeerOptions { session: 2, path: 2, local: 1, ..PeerOptions::default() };
    let (mut second, asked) = asks(&stand, other);
    assert_eq!(second.answer(&mut stand, asked), None);
    first.send_flush(&stand, (1, 0));
    assert_eq!(first.reply(&mut stand).errno, 0, "who is up goes on");
    assert_eq!(stand.make(), 1);
    assert_eq!(second.answer(&mut stand, asked), Some(Ok(())));
    goes_on(&mut stand, &mut second, "two", "other");
    first.leave(&mut stand);
    second.leave(&mut stand);
    stand.assert_empty();
    assert_eq!(stand.registered(), 0);
}

#[test]
fn all_connections_that_come_meanwhile_wait() {
    let mut stand = stand(ASIDE);
    let options = PeerOptions::default();
    let mut peer = Peer::new(&stand, options);
    let asked: Vec<_> =
        (0..3).map(|cid| peer.ask(&stand, &options.request(cid).encode())).collect();
    for qp in &asked {
        assert_eq!(peer.answer(&mut stand, *qp), None);
    }
    assert_eq!(peer.connect(&mut stand, 1), Err(-104), "one that waits is there already");
    assert_eq!(stand.make(), 1);
    for qp in &asked {
        assert_eq!(peer.answer(&mut stand, *qp), Some(Ok(())));
    }
    peer.info(&mut stand, "sess");
    peer.open_device(&mut stand, "vol", AccessMode::ReadWrite).unwrap();
}

#[test]
fn a_path_that_comes_back_waits_for_its_windows_only() {
    let mut stand = stand(ASIDE);
    let path = |n, recon_cnt| PeerOptions {
        path: n + 1,
        local: n,
        first_conn: n == 0,
        recon_cnt,
        ..PeerOptions::default()
    };
    let mut peers = Vec::new();
    for n in 0..2 {
        let (mut peer, asked) = asks(&stand, path(n, 1));
        stand.make();
        assert_eq!(peer.answer(&mut stand, asked), Some(Ok(())));
        for cid in 1..3 {
            peer.connect(&mut stand, cid).unwrap();
        }
        peer.info(&mut stand, "sess");
        peers.push(peer);
    }
    let bytes = stand.registered();
    peers.remove(1).leave(&mut stand);
    stand.pools();
    let (mut back, asked) = asks(&stand, path(1, 2));
    assert_eq!(back.answer(&mut stand, asked), None);
    assert_eq!(stand.make(), 1);
    assert_eq!(back.answer(&mut stand, asked), Some(Ok(())));
    goes_on(&mut stand, &mut back, "sess", "vol");
    assert_eq!((stand.pools(), stand.registered()), (vec![], bytes));
}

#[test]
fn what_is_refused_is_told() {
    let poor = DeviceOptions { register_max: 128 << 10, ..ASIDE };
    for (device, errno) in [(poor, -12), (DeviceOptions { no_windows: true, ..ASIDE }, -95)] {
        let mut stand = stand(device);
        let (mut peer, asked) = asks(&stand, PeerOptions::default());
        assert_eq!(peer.answer(&mut stand, asked), None);
        assert_eq!(stand.make(), 1);
        assert_eq!(peer.answer(&mut stand, asked), Some(Err(errno)));
        stand.assert_empty();
        assert_eq!(stand.registered(), 0);
    }
}

#[test]
fn what_is_made_for_a_path_that_has_ended_is_let_go_of() {
    let mut stand = stand(ASIDE);
    let (_peer, _) = asks(&stand, PeerOptions::default());
    stand.pass(Duration::from_secs(6));
    stand.assert_empty();
    assert_eq!(stand.make(), 1);
    assert_eq!(stand.registered(), 0);
    // The same with small chunks, which are there when the server is told to stop.
    let mut options = StandOptions { device: ASIDE, ..StandOptions::default() };
    options.params.limits = Limits::new(4, 8192).unwrap();
    let mut stand = Stand::new(options);
    let (_peer, _) = asks(&stand, PeerOptions::default());
    stand.settle();
    stand.shutdown();
    stand.settle();
    assert_eq!(stand.make(), 1);
    stand.assert_empty();
    assert!(stand.all_done());
    assert_eq!(stand.registered(), 0);
}
