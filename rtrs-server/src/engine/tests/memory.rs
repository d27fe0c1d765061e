//! Memory of chunks: what peers may write to before OPEN, and what counts against the limit.

use rtrs_core::fabric::RemoteMem;
use rtrs_core::limits::Limits;
use rtrs_core::wire::{AccessMode, SgDesc};

use super::fixture::{Fixture, StandOptions};
use super::peer::{Peer, PeerOptions};
use crate::path::chunks::CHUNKS_BEFORE_OPEN;

/// Chunks of 256 KiB, each of which counts by itself.
fn options(always_invalidate: bool) -> StandOptions {
    let mut options = StandOptions::default();
    options.params.limits = Limits::new(16, 256 << 10).unwrap();
    options.params.always_invalidate = always_invalidate;
    options
}

/// Writes into a chunk, without a request.
fn write(peer: &mut Peer, fixture: &mut Fixture, chunk: usize) -> bool {
    let SgDesc { addr, key, .. } = peer.chunks[chunk];
    peer.write_remote(1, RemoteMem { addr, rkey: key }, &[7; 600]);
    peer.closed(fixture) == 0
}

#[test]
fn before_its_first_open_a_session_may_write_to_few_chunks() {
    let few = usize::try_from(CHUNKS_BEFORE_OPEN).unwrap();
    for always_invalidate in [true, false] {
        let mut fixture = Fixture::new(options(always_invalidate));
        // Whichever they are, and however often.
        let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
        for chunk in (16 - few..16).chain(16 - few..16) {
            assert!(write(&mut peer, &mut fixture, chunk), "chunk {chunk}");
        }
        assert!(!write(&mut peer, &mut fixture, 0), "one more");
        assert_eq!(peer.closed(&mut fixture), 3, "the path ends");
        fixture.assert_empty();

        // An open that fails changes nothing; one that succeeds, all.
        for (export, opens) in [("none", false), ("vol", true)] {
            let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
            let opened = peer.open_device(&mut fixture, export, AccessMode::ReadWrite);
            assert_eq!(opened.is_ok(), opens);
            // A path that was there before, and one that comes later.
            let second = PeerOptions { path: 2, local: 1, ..PeerOptions::default() };
            let mut second = Peer::up(&mut fixture, second, "sess");
            for peer in [&mut peer, &mut second] {
                let written = (0..16).take_while(|chunk| write(peer, &mut fixture, *chunk)).count();
                // The open over the first path took a chunk, too.
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
