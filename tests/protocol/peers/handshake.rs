//! Tests of CON_REQ and INFO_REQ: each check in docs/PROTOCOL.md, with its errno or the end of the
//! path.

use rtrs_core::wire::{ConnReq, errno};
use rtrs_tests::{Peer, PeerOptions, wait_for};

use super::*;

#[test]
fn invalid_connection_requests_are_refused() {
    let mut scene = Scene::new();
    let good = scene.options().request(0).encode();
    let with = |at: usize, bytes: [u8; 2]| {
        let mut changed = good;
        changed[at..at + 2].copy_from_slice(&bytes);
        changed.to_vec()
    };
    for (what, data) in [
        ("nothing", Vec::new()),
        ("10 bytes", good[..10].to_vec()),
        ("55 bytes", good[..55].to_vec()),
        ("a wrong magic", with(2, [0xbd, 0x1c])),
        ("byte-swapped magic", with(2, [0x1b, 0xbd])),
        ("version 1", with(4, [0, 1])),
        ("version 3", with(4, [0, 3])),
        ("no connections", with(8, [0, 0])),
        ("cid equal to cid_num", with(6, [2, 0])),
        ("cid above cid_num", with(6, [0xff, 0xff])),
        ("4097 connections", with(8, [0x01, 0x10])),
        ("65535 connections", with(8, [0xff, 0xff])),
    ] {
        // RDMA CM pads with zeroes, so these are 56 bytes and valid.
        if matches!(what, "10 bytes" | "55 bytes") && !is_tcp() {
            continue;
        }
        let options = scene.options();
        let mut peer = Peer::new(scene.server, options);
        assert_eq!(peer.connect_raw(&data), Err(RESET), "{what}");
    }
    let stranger = PeerOptions { first_conn: false, ..scene.options() };
    let enxio = -(errno::ENXIO.cast_signed());
    assert_eq!(Peer::new(scene.server, stranger).connect(0), Err(enxio));
    // Longer data is accepted, as RDMA CM pads it; so is a different minor version.
    let options = PeerOptions { cid_num: 1, ..scene.options() };
    // RDMA CM itself has no room for more, and pads on the receiving end.
    let mut padded = vec![0; if is_tcp() { 92 } else { ConnReq::LEN }];
    padded[..ConnReq::LEN].copy_from_slice(&options.request(0).encode());
    padded[4] = 0x77;
    let mut peer = Peer::new(scene.server, options);
    assert_eq!(peer.connect_raw(&padded), Ok(()));
    peer.introduce("padded");
    peer.check_alive("a padded request");
    drop(peer);
    scene.end();
}

#[test]
fn a_path_with_more_connections_than_its_memory_allows() {
    let mut scene = Scene::new();
    let edquot = -(errno::EDQUOT.cast_signed());
    for (cid_num, answer) in [(257, Err(edquot)), (4096, Err(edquot)), (256, Ok(()))] {
        let options = PeerOptions { cid_num, ..scene.options() };
        assert_eq!(Peer::new(scene.server, options).connect(0), answer, "{cid_num} connections");
    }
    scene.end();
}

#[test]
fn connections_that_do_not_match_their_path() {
    let mut scene = Scene::new();
    // While the path is connecting: a repeated connection, and a different number of connections.
    let options = PeerOptions { cid_num: 3, ..scene.options() };
    let mut peer = Peer::new(scene.server, options);
    peer.connect(0).expect("connection 0");
    assert_eq!(peer.connect(0), Err(RESET), "connection 0 twice");
    peer.options.cid_num = 4;
    assert_eq!(peer.connect(1), Err(RESET), "a different number of connections");
    peer.options = options;
    peer.connect(1).expect("connection 1");
    peer.connect(2).expect("connection 2");
    assert_eq!(peer.connect(2), Err(RESET), "connection 2 twice");
    peer.introduce("fits");
    peer.check_alive("refused connections");
    // When the path is up: each connection again.
    for cid in 0..3 {
        assert_eq!(peer.connect(cid), Err(RESET), "connection {cid} of a path that is up");
    }
    // The same addresses again for a different path of the session; other addresses are accepted.
    let second = PeerOptions { path: 200, ..options };
    let eexist = -(errno::EEXIST.cast_signed());
    assert_eq!(Peer::new(scene.server, second).connect(0), Err(eexist));
    let mut beside = Peer::up(scene.server, PeerOptions { local: 9, ..second }, "fits");
    beside.check_alive("a second path");
    peer.check_alive("a second path");
    // The path's UUID in another session identifies a different path.
    let other = PeerOptions { path: options.path, ..scene.options() };
    let mut other = Peer::up(scene.server, other, "other");
    other.check_alive("a uuid that another session has too");
    peer.check_alive("a uuid that another session has too");
    assert_eq!(other.close(5), 0, "a close of what is not open");
    drop(other);
    beside.check_alive("the end of another session");
    drop(beside);
    peer.check_alive("the end of a second path");
    // A reconnect that the client announces: the old path ends, and the next attempt is admitted.
    let mut again = Peer::new(scene.server, PeerOptions { recon_cnt: 2, ..options });
    assert_eq!(again.connect(0), Err(RESET));
    let _ = peer.ended("the client reconnects", at_once());
    drop(peer);
    drop(again);
    let options = PeerOptions { recon_cnt: 3, ..options };
    let mut again = wait_for("the path to be free", PATIENCE, || {
        let mut again = Peer::new(scene.server, options);
        again.connect(0).ok().map(|()| again)
    });
    again.connect(1).expect("connection 1");
    again.connect(2).expect("connection 2");
    again.introduce("fits");
    again.check_alive("a reconnected path");
    drop(again);
    scene.end();
}

#[test]
fn sessions_beyond_the_limit() {
    let mut scene = Scene::with(&["--sessions-max", "3"]);
    // A session that opens nothing could be evicted.
    let mut held = [scene.peer(), scene.peer()];
    for peer in &mut held {
        peer.open("ro", AccessMode::ReadOnly).expect("open ro");
    }
    let eusers = -(errno::EUSERS.cast_signed());
    let options = scene.options();
    assert_eq!(Peer::new(scene.server, options).connect(0), Err(eusers));
    // A further path does not count as a session.
    let options = PeerOptions { path: 99, local: 7, ..held[0].options };
    Peer::up(scene.server, options, "peer1").check_alive("a second path");
    for peer in &mut held {
        peer.check_alive("a session too many");
    }
    drop(held);
    wait_for("a free session slot", PATIENCE, || Peer::new(scene.server, options).connect(0).ok());
    scene.end();
}

#[test]
fn invalid_introductions_end_the_path() {
    let mut scene = Scene::new();
    let mut alpha = Peer::up(scene.server, scene.options(), "alpha");
    let wrong_type = |kind: u8| {
        let mut bytes = info_req(b"name");
        bytes[0] = kind;
        bytes.to_vec()
    };
    let mut endless = info_req(b"");
    endless[2..257].fill(b'n');
    for (what, bytes) in [
        ("nothing", Vec::new()),
        ("one byte", vec![0]),
        ("271 bytes", info_req(b"name")[..271].to_vec()),
        ("273 bytes", [&info_req(b"name")[..], &[0]].concat()),
        ("64 KiB", vec![0; 65536]),
        ("a name without end", endless.to_vec()),
        ("no name", info_req(b"").to_vec()),
        ("a slash", info_req(b"a/b").to_vec()),
        ("a dot", info_req(b"a.b").to_vec()),
        ("two dots", info_req(b"..").to_vec()),
        ("the name of another session", info_req(b"alpha").to_vec()),
        ("INFO_RSP", wrong_type(1)),
        ("WRITE", wrong_type(2)),
        ("an unknown type", wrong_type(99)),
    ] {
        let mut peer = Peer::connected(scene.server, scene.options());
        peer.send_info(&bytes);
        let _ = peer.ended(what, at_once());
        alpha.check_alive(what);
    }
    // INFO_REQ while a connection is missing.
    let mut peer = Peer::new(scene.server, scene.options());
    peer.connect(0).expect("connection 0");
    peer.send_info(&info_req(b"early"));
    let _ = peer.ended("an early INFO_REQ", at_once());
    // INFO_REQ twice, immediately and later, and on a different connection.
    let mut peer = Peer::connected(scene.server, scene.options());
    peer.send_info(&info_req(b"twice"));
    peer.send(0, &info_req(b"twice"), None);
    let _ = peer.ended("INFO_REQ twice at once", at_once());
    let mut peer = scene.peer();
    peer.send(0, &info_req(b"later"), None);
    let _ = peer.ended("INFO_REQ twice", at_once());
    alpha.check_alive("INFO_REQ twice");
    let mut peer = Peer::connected(scene.server, scene.options());
    peer.send(1, &info_req(b"wrong"), None);
    let _ = peer.ended("INFO_REQ on connection 1", at_once());
    // Heartbeats and requests before INFO_REQ.
    for (conn, imm) in [(0, 0x8000_0000), (0, 0x9000_0000), (0, 0x20), (1, 0x20)] {
        let mut peer = Peer::connected(scene.server, scene.options());
        peer.send_imm(conn, imm);
        let _ = peer.ended("an early immediate", at_once());
        alpha.check_alive("an early immediate");
    }
    drop(alpha);
    scene.end();
}
