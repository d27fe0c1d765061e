//! Tests of former paths' memory: its reuse and its limits.

use rtrs_core::fabric::Access;
use rtrs_core::fabric::sim::BindMode;
use rtrs_core::settings::AutoSwitch;
use rtrs_core::time::Duration;
use rtrs_core::wire::{Rw, SgDesc};

use super::fixture::{DeviceOptions, Fixture, StandOptions};
use super::peer::{Peer, PeerOptions, io};

/// Path of session 1 with this number; number 0 creates the session.
fn path(n: u8, recon_cnt: u16) -> PeerOptions {
    let first_conn = n == 0 && recon_cnt == 1;
    PeerOptions { path: n + 1, local: n, first_conn, recon_cnt, ..PeerOptions::default() }
}

/// A session of `paths` paths with its device open.
fn session(options: StandOptions, paths: u8) -> (Fixture, Vec<Peer>) {
    let mut fixture = Fixture::new(options);
    let mut peers = vec![Peer::open(&mut fixture, path(0, 1))];
    peers.extend((1..paths).map(|n| Peer::up(&mut fixture, path(n, 1), "sess")));
    (fixture, peers)
}

fn with_device(device: DeviceOptions) -> StandOptions {
    StandOptions { device, ..StandOptions::default() }
}

/// Writes over a path and reads the data back.
fn works(fixture: &mut Fixture, peer: &mut Peer, byte: u8) {
    peer.send_write((1, 3), io(Rw::WRITE, 8, 512), &[byte; 512]);
    assert_eq!(peer.reply(fixture).errno, 0);
    peer.clear_result();
    peer.send_read((1, 4), io(Rw::READ, 8, 512));
    assert_eq!(peer.reply(fixture).errno, 0);
    assert_eq!(peer.result(512), [byte; 512]);
}

/// Reconnects path 0 and checks that using a key of the previous connect ends the path.
fn old_key_is_dead(fixture: &mut Fixture, mut peer: Peer, life: u16) {
    let old = peer.chunks[6];
    peer.leave(fixture);
    let mut back = Peer::up(fixture, path(0, life), "sess");
    back.chunks[6] = old;
    back.send_flush((1, 6));
    assert_eq!(back.closed(fixture), 3, "a key of the previous connect");
}

fn addresses(chunks: &[SgDesc]) -> Vec<u64> {
    chunks.iter().map(|chunk| chunk.addr).collect()
}

#[test]
fn a_reconnecting_path_gets_its_memory_with_new_keys() {
    for bind in [BindMode::Done, BindMode::Pending] {
        for pins_memory in [false, true] {
            let device = DeviceOptions { pins_memory, ..DeviceOptions::default() };
            let options = StandOptions { bind, ..with_device(device) };
            let (mut fixture, mut peers) = session(options, 2);
            assert_eq!(fixture.pools().len(), 2);
            let (bytes, mut back) = (fixture.registered(), peers.remove(0));
            for life in 2..6 {
                let old = back.chunks.clone();
                back.leave(&mut fixture);
                back = Peer::up(&mut fixture, path(0, life), "sess");
                assert_eq!(fixture.pools(), [], "nothing was registered");
                assert_eq!(addresses(&back.chunks), addresses(&old));
                for chunk in &back.chunks {
                    assert!(old.iter().all(|old| old.key != chunk.key), "an old key works");
                }
                works(&mut fixture, &mut back, life as u8);
                assert_eq!(fixture.registered(), bytes);
            }
            old_key_is_dead(&mut fixture, back, 6);
            peers.remove(0).leave(&mut fixture);
            fixture.assert_empty();
            assert_eq!(fixture.registered(), 0, "kept memory is freed with the session");
        }
    }
}

#[test]
fn any_path_of_the_session_may_reuse_a_pool() {
    let (mut fixture, mut peers) = session(StandOptions::default(), 2);
    let old = addresses(&peers[0].chunks);
    peers.remove(0).leave(&mut fixture);
    fixture.pools();
    let mut other = Peer::up(&mut fixture, path(3, 1), "sess");
    assert_eq!((fixture.pools(), addresses(&other.chunks)), (vec![], old));
    works(&mut fixture, &mut other, 7);
    // No pool is left now.
    let mut third = Peer::up(&mut fixture, path(0, 2), "sess");
    assert_eq!(fixture.pools().len(), 1);
    works(&mut fixture, &mut third, 8);
}

#[test]
fn memory_in_use_by_block_io_is_not_reused() {
    let (mut fixture, mut peers) = session(StandOptions::default(), 2);
    let (bytes, mut first) = (fixture.registered(), peers.remove(0));
    fixture.pools();
    fixture.device.lock().hold = true;
    first.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    first.leave(&mut fixture);
    let mut back = Peer::up(&mut fixture, path(0, 2), "sess");
    assert_eq!(fixture.pools().len(), 1, "memory of its own");
    assert!(addresses(&back.chunks) != addresses(&first.chunks));
    // This write is as large as the running one, and at the same offset in its chunk.
    back.send_write((1, 7), io(Rw::WRITE, 8, 512), &[2; 512]);
    fixture.settle();
    assert!(fixture.registered() > bytes);
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    assert_eq!(back.reply(&mut fixture).errno, 0);
    assert_eq!(fixture.device.lock().bytes[..512], [1; 512]);
    assert_eq!(fixture.registered(), bytes, "no more pools than the session had paths");
    back.leave(&mut fixture);
    let mut again = Peer::up(&mut fixture, path(0, 3), "sess");
    assert_eq!((fixture.pools(), fixture.registered()), (vec![], bytes));
    works(&mut fixture, &mut again, 9);
}

#[test]
fn memory_still_reachable_by_connections_is_not_reused() {
    for always_invalidate in [false, true] {
        let mut options = StandOptions::default();
        options.params.always_invalidate = always_invalidate.into();
        let (mut fixture, mut peers) = session(options, 2);
        let (bytes, first) = (fixture.registered(), fixture.pools()[0]);
        fixture.world.linger(fixture.address.ip(), Duration::from_secs(9));
        let mut old = peers.remove(0);
        let mut new = Peer::new(&fixture, path(0, 2));
        assert_eq!(new.connect(&mut fixture, 0), Err(-104), "it ends the old one");
        assert_eq!(old.closed(&mut fixture), 3);
        // No work of the former connect can start now, so the path may reconnect, although the old
        // queue pairs still exist.
        let mut back = Peer::up(&mut fixture, path(0, 3), "sess");
        let pools = fixture.pools();
        assert!(pools.len() == 1 && pools[0] != first, "{pools:?}");
        works(&mut fixture, &mut back, 5);
        fixture.pass(Duration::from_secs(9));
        assert_eq!(fixture.registered(), bytes, "no more pools than the session had paths");
    }
}

#[test]
fn as_many_pools_are_kept_as_the_session_had_paths() {
    let (mut fixture, mut peers) = session(StandOptions::default(), 3);
    let bytes = fixture.registered();
    let pool = bytes / 3;
    for (life, n) in (2..).zip([1, 2, 1, 1, 2]) {
        let at = usize::from(n);
        peers[at].leave(&mut fixture);
        assert!(fixture.registered() > bytes - pool / 2 && fixture.registered() <= bytes);
        peers[at] = Peer::up(&mut fixture, path(n, life), "sess");
        assert_eq!(fixture.registered(), bytes);
    }
    peers.remove(2).leave(&mut fixture);
    peers.remove(1).leave(&mut fixture);
    assert!(fixture.registered() > bytes - pool, "both are kept");
    fixture.pools();
    let _two: Vec<Peer> = (1..3).map(|n| Peer::up(&mut fixture, path(n, 20), "sess")).collect();
    assert_eq!((fixture.pools(), fixture.registered()), (vec![], bytes));
}

#[test]
fn a_pool_never_leaves_its_session() {
    let (mut fixture, mut peers) = session(StandOptions::default(), 2);
    let mine = addresses(&peers[0].chunks);
    peers.remove(0).leave(&mut fixture);
    let bytes = fixture.registered();
    fixture.pools();
    let foreign = PeerOptions { session: 2, path: 9, local: 3, ..PeerOptions::default() };
    let mut other = Peer::up(&mut fixture, foreign, "other");
    assert_eq!(fixture.pools().len(), 1, "another session's path has memory of its own");
    assert!(addresses(&other.chunks) != mine);
    let back = Peer::up(&mut fixture, path(0, 2), "sess");
    assert_eq!((fixture.pools(), addresses(&back.chunks)), (vec![], mine));
    drop(back);
    peers.remove(0).leave(&mut fixture);
    fixture.settle();
    assert_eq!(fixture.sessions().len(), 1);
    assert!(fixture.registered() < bytes, "nothing of the session is left");
    other.leave(&mut fixture);
    assert_eq!(fixture.registered(), 0);
}

#[test]
fn one_key_for_all_chunks_is_dropped_with_its_path() {
    let mut options = StandOptions::default();
    options.params.always_invalidate = AutoSwitch::Off;
    let (mut fixture, mut peers) = session(options, 2);
    let first = fixture.pools()[0];
    let (bytes, mut back) = (fixture.registered(), peers.remove(0));
    for life in 2..5 {
        let old = back.chunks[6];
        back.leave(&mut fixture);
        back = Peer::up(&mut fixture, path(0, life), "sess");
        assert_eq!(fixture.pools(), [first], "the same memory, reregistered");
        assert_ne!(back.chunks[6].key, old.key);
        works(&mut fixture, &mut back, life as u8);
        assert_eq!(fixture.registered(), bytes);
    }
    old_key_is_dead(&mut fixture, back, 6);
}

#[test]
fn a_path_that_never_connected_returns_its_pool() {
    let device = DeviceOptions { pins_memory: true, ..DeviceOptions::default() };
    let (mut fixture, mut peers) = session(with_device(device), 2);
    let bytes = fixture.registered();
    peers.remove(0).leave(&mut fixture);
    fixture.pools();
    let mut half = Peer::new(&fixture, path(0, 2));
    half.connect(&mut fixture, 0).unwrap();
    fixture.pass(Duration::from_secs(6));
    assert_eq!(half.closed(&mut fixture), 1);
    let mut back = Peer::up(&mut fixture, path(0, 3), "sess");
    assert_eq!((fixture.pools(), fixture.registered()), (vec![], bytes));
    works(&mut fixture, &mut back, 5);
}

#[test]
fn a_pool_freed_while_a_path_connects_is_reused() {
    let (mut fixture, mut peers) = session(StandOptions::default(), 2);
    let (bytes, mut first) = (fixture.registered(), peers.remove(0));
    let pool = fixture.pools()[0];
    fixture.device.lock().hold = true;
    first.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    first.leave(&mut fixture);
    let mut back = Peer::new(&fixture, path(0, 2));
    for cid in 0..3 {
        back.connect(&mut fixture, cid).unwrap();
    }
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    back.info(&mut fixture, "sess");
    assert_eq!((fixture.pools(), fixture.registered()), (vec![pool], bytes));
    works(&mut fixture, &mut back, 3);
}

#[test]
fn a_pool_is_registered_again_on_another_device() {
    let device = DeviceOptions { many: true, ..DeviceOptions::default() };
    let (mut fixture, mut peers) = session(with_device(device), 2);
    let (first, bytes) = (fixture.pools()[0], fixture.registered());
    assert_eq!(first.1, Access::LOCAL);
    peers.remove(0).leave(&mut fixture);
    let mut back = Peer::up(&mut fixture, path(0, 2), "sess");
    assert_eq!((fixture.pools(), fixture.registered()), (vec![first], bytes));
    works(&mut fixture, &mut back, 5);
}

#[test]
fn a_registration_with_pending_windows_is_not_reused() {
    let device = DeviceOptions { slow: true, ..DeviceOptions::default() };
    let (mut fixture, mut peers) = session(with_device(device), 2);
    let first = fixture.pools()[0];
    peers.remove(0).leave(&mut fixture);
    let mut back = Peer::up(&mut fixture, path(0, 2), "sess");
    assert_eq!(fixture.pools(), [first]);
    works(&mut fixture, &mut back, 5);
}

#[test]
fn no_pool_is_kept_if_connections_could_not_be_closed() {
    let device = DeviceOptions { undead: true, ..DeviceOptions::default() };
    let (mut fixture, mut peers) = session(with_device(device), 2);
    let (first, bytes) = (fixture.pools()[0], fixture.registered());
    peers.remove(0).leave(&mut fixture);
    assert!(fixture.registered() < bytes);
    let mut back = Peer::up(&mut fixture, path(0, 2), "sess");
    let pools = fixture.pools();
    assert!(pools.len() == 1 && pools[0] != first, "{pools:?}");
    works(&mut fixture, &mut back, 5);
}
