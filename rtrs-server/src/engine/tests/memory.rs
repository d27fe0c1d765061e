//! Tests of chunk memory: peers' writes before OPEN, and accounting against the limit.

use rtrs_core::fabric::RemoteMem;
use rtrs_core::limits::Limits;
use rtrs_core::mutant::{self, Mutant};
use rtrs_core::wire::{AccessMode, ClientExtensions, SgDesc};

use super::fixture::{DeviceOptions, Fixture, StandOptions};
use super::peer::{Peer, PeerOptions};
use crate::engine::message::{AdminReply, AdminRequest};
use crate::path::chunks::{CHUNKS_BEFORE_OPEN, ChunkPool};
use crate::stats::MemorySnapshot;

/// Distance between the chunks below.
const STRIDE: u64 = (256 << 10) + 4096;
const ENOMEM: i16 = -12;

/// Options for chunks of 256 KiB, each of which is counted separately.
fn options(always_invalidate: bool) -> StandOptions {
    let mut options = StandOptions::default();
    options.params.limits = Limits::new(16, 256 << 10).unwrap();
    options.params.always_invalidate = always_invalidate.into();
    options
}

/// A server with memory for this number of chunks, pinned or not.
fn short_of(chunks: u64, pins_memory: bool) -> Fixture {
    let mut options = options(true);
    options.params.memory_max = chunks * STRIDE;
    options.device = DeviceOptions { pins_memory, ..DeviceOptions::default() };
    Fixture::new(options)
}

/// Chunk memory as the operator sees it, in total and per session.
fn memory(fixture: &mut Fixture) -> (MemorySnapshot, Vec<u64>) {
    let answer = fixture.admin(AdminRequest::Sessions);
    let Some(AdminReply::Sessions { sessions, memory, .. }) = answer.lock().take() else {
        panic!("no list of sessions");
    };
    (memory, sessions.iter().map(|session| session.memory_bytes).collect())
}

/// A path of the session with this number, whose client accepts a smaller depth and states
/// `queue_depth`.
fn ours(session: u8, queue_depth: u16) -> PeerOptions {
    let extensions =
        ClientExtensions { smaller_depth: true, queue_depth, ..ClientExtensions::default() };
    let local = session % 4;
    PeerOptions { session, path: session, local, extensions, ..PeerOptions::default() }
}

/// A path of a kernel client.
fn kernels(session: u8) -> PeerOptions {
    PeerOptions { extensions: ClientExtensions::default(), ..ours(session, 0) }
}

/// Writes into a chunk, without a request.
fn write(peer: &mut Peer, fixture: &mut Fixture, chunk: usize) -> bool {
    let SgDesc { addr, key, .. } = peer.chunks[chunk];
    peer.write_remote(1, RemoteMem { addr, rkey: key }, &[7; 600]);
    peer.closed(fixture) == 0
}

#[test]
fn a_session_may_write_to_few_chunks_before_its_first_open() {
    let few = usize::try_from(CHUNKS_BEFORE_OPEN).unwrap();
    for always_invalidate in [true, false] {
        let mut fixture = Fixture::new(options(always_invalidate));
        // Any chunks may be written, any number of times.
        let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
        for chunk in (16 - few..16).chain(16 - few..16) {
            assert!(write(&mut peer, &mut fixture, chunk), "chunk {chunk}");
        }
        assert!(!write(&mut peer, &mut fixture, 0), "one more");
        assert_eq!(peer.closed(&mut fixture), 3, "the path ends");
        fixture.assert_empty();

        // A failed open changes nothing; a successful one permits all chunks.
        for (export, opens) in [("none", false), ("vol", true)] {
            let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
            let opened = peer.open_device(&mut fixture, export, AccessMode::ReadWrite);
            assert_eq!(opened.is_ok(), opens);
            // A path that exists before the open, and one that connects later.
            let second = PeerOptions { path: 2, local: 1, ..PeerOptions::default() };
            let mut second = Peer::up(&mut fixture, second, "sess");
            for peer in [&mut peer, &mut second] {
                let written = (0..16).take_while(|chunk| write(peer, &mut fixture, *chunk)).count();
                // The open over the first path also used a chunk.
                let took = usize::from(peer.options.path == 1);
                assert_eq!(written, if opens { 16 } else { few - took });
            }
            if opens {
                peer.leave(&mut fixture);
                second.leave(&mut fixture);
            }
            fixture.assert_empty();
        }
    }
}

#[test]
fn only_written_memory_counts_unless_it_is_pinned() {
    let whole = ChunkPool::bytes(options(true).params.limits) as u64;
    for pins in [false, true] {
        let mut fixture = short_of(1000, pins);
        let used = |units: u64| if pins { whole } else { units * STRIDE };
        assert_eq!(
            memory(&mut fixture).0,
            MemorySnapshot { used_bytes: 0, max_bytes: 1000 * STRIDE }
        );
        let mut peer = Peer::new(&fixture, PeerOptions::default());
        peer.connect(&mut fixture, 0).unwrap();
        assert_eq!(memory(&mut fixture).0.used_bytes, used(0), "at the first connection");
        (1..3).for_each(|cid| peer.connect(&mut fixture, cid).unwrap());
        peer.info(&mut fixture, "sess");
        peer.send_open(2, "vol", AccessMode::ReadWrite);
        assert_eq!(peer.reply(&mut fixture).errno, 0);
        assert_eq!(memory(&mut fixture).1, [used(1)]);
        for chunk in [2, 7, 7, 9] {
            assert!(write(&mut peer, &mut fixture, chunk));
        }
        assert_eq!(memory(&mut fixture).1, [used(3)]);

        // Another session; a removed path counts while its chunks are cached.
        let mut other = Peer::up(&mut fixture, kernels(2), "other");
        let second = PeerOptions { path: 9, local: 3, ..kernels(2) };
        let mut second = Peer::up(&mut fixture, second, "other");
        assert!(write(&mut second, &mut fixture, 1) && write(&mut second, &mut fixture, 2));
        let both = if pins { 2 * whole } else { 2 * STRIDE };
        for _ in 0..2 {
            let (all, each) = memory(&mut fixture);
            assert_eq!((all.used_bytes, each), (used(3) + both, vec![used(3), both]));
            second.leave(&mut fixture);
        }
        other.leave(&mut fixture);
        assert_eq!(memory(&mut fixture).1, [used(3)]);
        peer.leave(&mut fixture);
        assert_eq!(memory(&mut fixture).0.used_bytes, 0);
    }
}

#[test]
fn a_new_session_may_be_refused_but_not_a_reconnecting_path() {
    for pins in [false, true] {
        let mut fixture = short_of(24, pins);
        let mut first = Peer::open(&mut fixture, kernels(1));
        assert!((0..16).all(|chunk| write(&mut first, &mut fixture, chunk)));
        let mut second = Peer::new(&fixture, kernels(2));
        assert_eq!(second.connect(&mut fixture, 0), Err(ENOMEM));
        // The existing session cannot have more paths than fit either.
        let other = PeerOptions { path: 9, local: 3, ..kernels(1) };
        for _ in 0..3 {
            let mut further = Peer::new(&fixture, other);
            assert_eq!(further.connect(&mut fixture, 0), Err(ENOMEM));
        }
        let (all, _) = memory(&mut fixture);
        assert!(all.used_bytes <= all.max_bytes);
        first.leave(&mut fixture);
        let mut second = Peer::up(&mut fixture, kernels(2), "second");
        second.leave(&mut fixture);
        fixture.assert_empty();
    }
}

/// A server whose memory is filled by a session with two paths, with the options and peers of both.
fn full_of_two_paths(pins: bool) -> (Fixture, [PeerOptions; 2], [Peer; 2]) {
    let mut fixture = short_of(40, pins);
    let paths = [kernels(1), PeerOptions { path: 9, local: 3, ..kernels(1) }];
    let mut first = Peer::open(&mut fixture, paths[0]);
    let mut second = Peer::up(&mut fixture, paths[1], "sess");
    for peer in [&mut first, &mut second] {
        assert!((0..16).all(|chunk| write(peer, &mut fixture, chunk)));
    }
    (fixture, paths, [first, second])
}

#[test]
fn existing_paths_of_a_session_always_get_memory() {
    for pins in [false, true] {
        let (mut fixture, paths, mut peers) = full_of_two_paths(pins);
        for round in 0..3 {
            for at in 0..2 {
                let third = PeerOptions { path: 10, local: 2, ..kernels(1) };
                let mut third = Peer::new(&fixture, third);
                assert_eq!(third.connect(&mut fixture, 0), Err(ENOMEM), "one more");
                peers[at].leave(&mut fixture);
                // The memory of a removed path is not available to others.
                let mut other = Peer::new(&fixture, ours(2, 0));
                assert_eq!(other.connect(&mut fixture, 0), Err(ENOMEM), "pinned: {pins}");
                let again = PeerOptions { recon_cnt: round + 2, ..paths[at] };
                peers[at] = Peer::up(&mut fixture, again, "sess");
                assert!((0..16).all(|chunk| write(&mut peers[at], &mut fixture, chunk)));
                let (all, _) = memory(&mut fixture);
                assert!(all.used_bytes <= all.max_bytes, "{all:?}");
            }
        }
        peers.iter_mut().for_each(|peer| peer.leave(&mut fixture));
        let mut other = Peer::up(&mut fixture, kernels(2), "other");
        other.leave(&mut fixture);
        fixture.assert_empty();
    }
}

#[test]
fn a_session_with_many_paths_stays_below_the_limit() {
    for (mutant, kept) in [(None, true), (Some(Mutant::PathsUnbounded), false)] {
        mutant::choose(mutant);
        let mut fixture = short_of(40, false);
        let mut peers = vec![Peer::open(&mut fixture, kernels(1))];
        for path in 5..25 {
            let options = PeerOptions { path, local: path, ..kernels(1) };
            let mut peer = Peer::new(&fixture, options);
            if (0..options.cid_num).all(|cid| peer.connect(&mut fixture, cid).is_ok()) {
                peer.info(&mut fixture, "sess");
                peers.push(peer);
            }
        }
        for peer in &mut peers {
            assert!((0..16).all(|chunk| write(peer, &mut fixture, chunk)));
        }
        let (all, _) = memory(&mut fixture);
        mutant::choose(None);
        assert_eq!(all.used_bytes <= all.max_bytes, kept, "{} paths: {all:?}", peers.len());
    }
}

#[test]
fn a_client_may_accept_a_smaller_depth_and_keeps_it() {
    for pins in [false, true] {
        // 40 chunks of 256 KiB.
        let server = || {
            let mut options = options(true);
            options.params.limits = Limits::new(64, 256 << 10).unwrap();
            options.params.memory_max = 40 * STRIDE;
            options.device = DeviceOptions { pins_memory: pins, ..DeviceOptions::default() };
            Fixture::new(options)
        };
        let mut fixture = server();
        let mut peer = Peer::new(&fixture, kernels(1));
        assert_eq!(peer.connect(&mut fixture, 0), Err(ENOMEM));
        let mut peer = Peer::open(&mut fixture, ours(2, 0));
        assert_eq!((peer.queue_depth, fixture.sessions()[0].queue_depth), (32, 32));
        // All of its permits are valid, and no others.
        for permit in 0..32 {
            peer.send_flush((1, permit));
            assert_eq!(peer.reply(&mut fixture).errno, 0, "permit {permit}");
        }
        // Now at most 8 chunks are left.
        let mut small = Peer::new(&fixture, ours(3, 0));
        assert_eq!(small.connect(&mut fixture, 0), Err(ENOMEM));
        // An additional path has the same depth, whether or not its client states it.
        let path =
            |path, extensions| PeerOptions { path, local: path - 4, extensions, ..ours(2, 0) };
        let says = |queue_depth| ClientExtensions {
            smaller_depth: true,
            queue_depth,
            ..ClientExtensions::default()
        };
        for (number, asked) in [(7, 32), (8, 0)] {
            let mut further = Peer::new(&fixture, path(number, says(asked)));
            assert_eq!(further.connect(&mut fixture, 0), Err(ENOMEM), "it does not fit");
        }
        for asked in [16, 33, 64] {
            let mut other = Peer::new(&fixture, path(9, says(asked)));
            assert_eq!(other.connect(&mut fixture, 0), Err(-104), "retried later");
        }
        // The offset now takes 23 bits of an immediate.
        peer.send_imm(1, 31 << 23 | 256 << 10);
        assert_eq!(peer.closed(&mut fixture), 3, "beyond the last chunk");
        fixture.assert_empty();

        // A restarted server grants the client's existing depth, or none.
        let mut fixture = server();
        let mut peer = Peer::up(&mut fixture, ours(2, 12), "sess");
        assert_eq!(peer.queue_depth, 12);
        let mut peer2 = Peer::new(&fixture, ours(3, 41));
        assert_eq!(peer2.connect(&mut fixture, 0), Err(ENOMEM));
        // A request for a depth above the limit is granted the available depth.
        peer.leave(&mut fixture);
        let mut roomy = options(true);
        roomy.device.pins_memory = pins;
        let mut fixture = Fixture::new(roomy);
        let mut peer = Peer::up(&mut fixture, ours(2, 65), "sess");
        assert_eq!(peer.queue_depth, 16);
        peer.leave(&mut fixture);
        fixture.assert_empty();
    }
}
