//! Tests of `always-invalidate` from a hand-driven peer's point of view: with it on, the key of a
//! chunk is valid for one request, and a peer that reuses it loses its path without having changed
//! any data; with it off, keys stay valid.
//!
//! Runs over TCP loopback, or over the RDMA device that `RTRS_TEST_RDMA` names, as in the lab
//! scenario `invalidate`.

use std::net::SocketAddr;
use std::time::Duration;

use rtrs_core::wire::{AccessMode, IoHeader, Rw, errno};
use rtrs_tests::{Peer, PeerOptions, Server, wait_for};

/// Maximum wait for a refusal; heartbeats would end the path only much later.
const PATIENCE: Duration = Duration::from_secs(60);
const BLOCK: u32 = 512;
/// Connection and permit that the test uses.
const AT: (usize, u16) = (1, 6);

fn server(always_invalidate: &str) -> (Server, SocketAddr) {
    let server = Server::builder()
        .export("vol0=mem:1M")
        .args(&["--always-invalidate", always_invalidate, "--queue-depth", "24"])
        .args(&["--heartbeat", "1m"])
        .start();
    let address = server.address().parse().expect("an address");
    (server, address)
}

/// Opens a session that has the export open for writing.
fn peer(server: SocketAddr, number: u8) -> Peer {
    let mut peer = Peer::up(server, PeerOptions::new(number, number), &format!("peer{number}"));
    // The previous session may have only just ended.
    let opened = wait_for("the export to be free", PATIENCE, || {
        match peer.open("vol0", AccessMode::ReadWrite) {
            Err(errno::EPERM) => None,
            other => Some(other),
        }
    });
    assert_eq!(opened.expect("open vol0").device_id, 0);
    peer
}

fn header(rw: Rw) -> IoHeader {
    IoHeader { rw, sector: 0, bi_size: BLOCK, ..IoHeader::default() }
}

fn write(peer: &mut Peer, byte: u8) {
    peer.send_write(AT, header(Rw::WRITE), &[byte; BLOCK as usize]);
}

fn read(peer: &mut Peer) -> Vec<u8> {
    peer.send_read((1, 7), header(Rw::READ));
    assert_eq!(peer.answer().errno, 0);
    peer.result(BLOCK as usize)
}

#[test]
fn a_used_key_is_refused_when_on() {
    let (server, address) = server("on");
    let mut first = peer(address, 1);
    let before = first.chunks[usize::from(AT.1)];
    write(&mut first, 1);
    assert_eq!(first.answer().errno, 0);
    let after = first.chunks[usize::from(AT.1)];
    assert_ne!(after.key, before.key, "the key did not change");
    // A complete request, valid except for its key.
    first.chunks[usize::from(AT.1)] = before;
    write(&mut first, 9);
    let reasons = first.ended("a stale key", PATIENCE);
    assert_eq!(reasons.len(), 2, "every connection of the path: {reasons:?}");
    drop(first);
    let mut second = peer(address, 2);
    assert_eq!(read(&mut second), [1; BLOCK as usize], "the refused request wrote");
    write(&mut second, 2);
    assert_eq!(second.answer().errno, 0, "the server continues to serve");
    drop(second);
    let _ = server.stop(PATIENCE);
}

#[test]
fn keys_stay_when_off() {
    let (server, address) = server("off");
    let mut peer = peer(address, 1);
    let before = peer.chunks[usize::from(AT.1)];
    for byte in 1..4 {
        write(&mut peer, byte);
        assert_eq!(peer.answer().errno, 0);
        assert_eq!(peer.chunks[usize::from(AT.1)].key, before.key);
        assert_eq!(read(&mut peer), [byte; BLOCK as usize]);
    }
    peer.check_alive("requests with one key");
    drop(peer);
    let _ = server.stop(PATIENCE);
}
