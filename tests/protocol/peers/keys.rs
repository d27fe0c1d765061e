//! Tests of illegal access to the server's memory: stale keys, foreign keys, bounds, reads,
//! invalidations. Each attempt ends its path.

use std::time::Duration;

use rtrs_core::fabric::{CloseReason, RemoteMem};
use rtrs_core::ids::Rkey;
use rtrs_core::wire::{AccessMode, IoHeader, Rw, SgDesc};
use rtrs_tests::{Data, read_message};

use super::*;

/// Checks that the path ended because the server terminated it.
fn assert_terminated(reasons: &[CloseReason], what: &str) {
    let terminated = |reason: &CloseReason| matches!(reason, CloseReason::PeerTerminated(_));
    assert!(reasons.iter().any(terminated), "{what}: {reasons:?}");
}

#[test]
fn writes_through_invalid_keys() {
    let mut scene = Scene::new();
    // The key from before the last answer is used.
    let reasons = scene.fatal("a stale key", |peer| {
        let stale = peer.chunks[6];
        peer.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
        assert_eq!(peer.answer().errno, 0);
        assert_ne!(peer.chunks[6].key, stale.key, "the key did not change");
        peer.write_remote(1, RemoteMem { addr: stale.addr, rkey: stale.key }, &[9; 512]);
    });
    assert_terminated(&reasons, "a stale key");
    // The key is used while its request is in progress.
    let mut peer = scene.peer();
    peer.open("slow", AccessMode::ReadWrite).expect("open slow");
    let chunk = peer.chunks[6];
    peer.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    peer.idle(Duration::from_millis(100));
    peer.write_remote(1, RemoteMem { addr: chunk.addr, rkey: chunk.key }, &[9; 512]);
    assert_terminated(&peer.ended("a key in use", at_once()), "a key in use");
    drop(peer);
    // The key belongs to another path.
    let other = scene.peer();
    let foreign = other.chunks[2];
    let reasons = scene.fatal("the key of another path", |peer| {
        peer.write_remote(1, RemoteMem { addr: foreign.addr, rkey: foreign.key }, &[9; 512]);
    });
    assert_terminated(&reasons, "the key of another path");
    let reasons = scene.fatal("a large write through the key of another path", |peer| {
        peer.write_remote(1, RemoteMem { addr: foreign.addr, rkey: foreign.key }, &[9; 60_000]);
    });
    assert_terminated(&reasons, "a large write through the key of another path");
    drop(other);
    scene.end();
}

#[test]
fn writes_out_of_bounds() {
    for always_invalidate in ["on", "off"] {
        let mut scene = Scene::with(&["--always-invalidate", always_invalidate]);
        let last = usize::from(DEPTH) - 1;
        for (what, at, len) in [
            ("one byte beyond", CHUNK as u64 - 511, 512),
            ("one byte beyond, large", 1, CHUNK),
            ("just beyond", CHUNK as u64, 1),
            ("far beyond", 1 << 40, 512),
            ("around the end of addresses", u64::MAX - 255, 512),
            ("one byte before", u64::MAX, 1),
        ] {
            // The last chunk; without separate windows the address before the first one is the
            // pool's.
            let chunk = if at > 1 << 41 { 0 } else { last };
            let reasons = scene.fatal(what, |peer| {
                let SgDesc { addr, key, .. } = peer.chunks[chunk];
                let addr = if what.starts_with("around") { at } else { addr.wrapping_add(at) };
                peer.write_remote(1, RemoteMem { addr, rkey: key }, &vec![9; len]);
            });
            assert_terminated(&reasons, what);
        }
        // Access to the whole chunks is allowed.
        let mut peer = scene.peer();
        for chunk in [0, last] {
            let SgDesc { addr, key, len } = peer.chunks[chunk];
            assert_eq!(len as usize, CHUNK);
            peer.write_remote(1, RemoteMem { addr, rkey: key }, &vec![9; CHUNK]);
            // The next message is built in the same memory.
            peer.idle(Duration::from_millis(100));
        }
        peer.check_alive("whole chunks");
        drop(peer);
        scene.end();
    }
}

/// Memory that is committed on first write is granted gradually: before OPEN, a client needs no
/// more than two chunks, and four are allowed. Here three chunks count as one.
#[test]
fn writes_to_many_chunks_before_open() {
    if !is_tcp() {
        return;
    }
    for always_invalidate in ["on", "off"] {
        let mut scene = Scene::with(&["--always-invalidate", always_invalidate]);
        let to = |peer: &mut Peer, chunk: usize| {
            let SgDesc { addr, key, .. } = peer.chunks[chunk];
            peer.write_remote(1, RemoteMem { addr, rkey: key }, &[9; 30_000]);
            // The next message is built in the same memory.
            peer.idle(Duration::from_millis(20));
        };
        let mut peer = scene.peer();
        for chunk in [0, 3, 6, 9, 11] {
            to(&mut peer, chunk);
        }
        peer.check_alive("four chunks");
        to(&mut peer, 12);
        assert_terminated(&peer.ended("one more", AT_ONCE), "one more");
        // After the session's first OPEN, all chunks can be used, even on paths without an OPEN.
        let mut peer = scene.writer();
        let options = PeerOptions { path: 200, local: 2, ..peer.options };
        let mut second = Peer::up(scene.server, options, &format!("peer{}", options.session));
        for peer in [&mut peer, &mut second] {
            (0..usize::from(DEPTH)).for_each(|chunk| to(peer, chunk));
            peer.check_alive("all chunks");
        }
        drop((peer, second));
        scene.end();
    }
}

#[test]
fn other_accesses_to_the_servers_memory() {
    let mut scene = Scene::new();
    // Over RDMA, a queue pair that is granted no reads does not send any.
    if is_tcp() {
        let reasons = scene.fatal("a read of a chunk", |peer| {
            let SgDesc { addr, key, .. } = peer.chunks[5];
            peer.read_remote(1, RemoteMem { addr, rkey: key }, 512);
        });
        assert_terminated(&reasons, "a read of a chunk");
    }
    // Keys next to those granted, with any of their low eight bits.
    for change in [0x100_u32, 0x200, 0xffff_ff00, 1, 0xff] {
        let _ = scene.fatal("a guessed key", |peer| {
            let SgDesc { addr, key, .. } = peer.chunks[5];
            let rkey = Rkey(key.0 ^ change);
            if !peer.chunks.iter().any(|chunk| chunk.key == rkey) {
                peer.write_remote(1, RemoteMem { addr, rkey }, &[9; 64]);
            } else {
                peer.send(1, &[1; 8], None);
            }
        });
    }
    // An unexpected message, with and without invalidation of a key.
    for invalidate in [None, Some(5), Some(0)] {
        for conn in [0, 1] {
            for bytes in [&[][..], &[1; 8]] {
                let _ = scene.fatal("a plain message", |peer| {
                    let key = invalidate.map(|at: usize| peer.chunks[at].key);
                    peer.send(conn, bytes, key);
                });
            }
        }
    }
    // Writing an answer to memory that the client has not offered ends only the client's path.
    let _ = scene.fatal("a result for a wrong key", |peer| {
        let desc = SgDesc { key: Rkey(0x1234_5678), ..peer.result_desc(512) };
        let message = read_message(IoHeader::LEN, Some(desc), false);
        peer.request((1, 4), Data::Room(512), &io(Rw::READ, 0, 512).encode(), &message);
    });
    scene.end();
}
