//! Memory of paths that are gone: what gets it again, and what never does.

use rtrs_core::fabric::Access;
use rtrs_core::fabric::sim::BindMode;
use rtrs_core::time::Duration;
use rtrs_core::wire::{Rw, SgDesc};

use super::peer::{Peer, PeerOptions, io};
use super::stand::{DeviceOptions, Stand, StandOptions};

/// A path of session 1, by its number; number 0 makes the session.
fn path(n: u8, recon_cnt: u16) -> PeerOptions {
    let first_conn = n == 0 && recon_cnt == 1;
    PeerOptions { path: n + 1, local: n, first_conn, recon_cnt, ..PeerOptions::default() }
}

/// A session of so many paths with its device open.
fn session(options: StandOptions, paths: u8) -> (Stand, Vec<Peer>) {
    let mut stand = Stand::new(options);
    let mut peers = vec![Peer::open(&mut stand, path(0, 1))];
    peers.extend((1..paths).map(|n| Peer::up(&mut stand, path(n, 1), "sess")));
    (stand, peers)
}

fn with_device(device: DeviceOptions) -> StandOptions {
    StandOptions { device, ..StandOptions::default() }
}

/// Writes over a path and reads that back.
fn works(stand: &mut Stand, peer: &mut Peer, byte: u8) {
    peer.send_write(stand, (1, 3), io(Rw::WRITE, 8, 512), &[byte; 512]);
    assert_eq!(peer.reply(stand).errno, 0);
    peer.clear_result();
    peer.send_read(stand, (1, 4), io(Rw::READ, 8, 512));
    assert_eq!(peer.reply(stand).errno, 0);
    assert_eq!(peer.result(512), [byte; 512]);
}

/// Connects path 0 once more; there a key of the life before ends it.
fn old_key_is_dead(stand: &mut Stand, mut peer: Peer, life: u16) {
    let old = peer.chunks[6];
    peer.leave(stand);
    let mut back = Peer::up(stand, path(0, life), "sess");
    back.chunks[6] = old;
    back.send_flush(stand, (1, 6));
    assert_eq!(back.closed(stand), 3, "a key of the life before");
}

fn addresses(chunks: &[SgDesc]) -> Vec<u64> {
    chunks.iter().map(|chunk| chunk.addr).collect()
}

#[test]
fn a_path_that_comes_back_gets_its_memory_and_new_keys() {
    for bind in [BindMode::Done, BindMode::Pending] {
        for pins_memory in [false, true] {
            let device = DeviceOptions { pins_memory, ..DeviceOptions::default() };
            let options = StandOptions { bind, ..with_device(device) };
            let (mut stand, mut peers) = session(options, 2);
            assert_eq!(stand.pools().len(), 2);
            let (bytes, mut back) = (stand.registered(), peers.remove(0));
            for life in 2..6 {
                let old = back.chunks.clone();
                back.leave(&mut stand);
                back = Peer::up(&mut stand, path(0, life), "sess");
                assert_eq!(stand.pools(), [], "nothing was registered");
                assert_eq!(addresses(&back.chunks), addresses(&old));
                for chunk in &back.chunks {
                    assert!(old.iter().all(|old| old.key != chunk.key), "a key lives on");
                }
                works(&mut stand, &mut back, life as u8);
                assert_eq!(stand.registered(), bytes);
            }
            old_key_is_dead(&mut stand, back, 6);
            peers.remove(0).leave(&mut stand);
            stand.assert_empty();
            assert_eq!(stand.registered(), 0, "what is kept goes with the session");
        }
    }
}

#[test]
fn any_path_of_the_session_may_take_it() {
    let (mut stand, mut peers) = session(StandOptions::default(), 2);
    let old = addresses(&peers[0].chunks);
    peers.remove(0).leave(&mut stand);
    stand.pools();
    let mut other = Peer::up(&mut stand, path(3, 1), "sess");
    assert_eq!((stand.pools(), addresses(&other.chunks)), (vec![], old));
    works(&mut stand, &mut other, 7);
    // Now there is none left.
    let mut third = Peer::up(&mut stand, path(0, 2), "sess");
    assert_eq!(stand.pools().len(), 1);
    works(&mut stand, &mut third, 8);
}

#[test]
fn memory_that_block_io_uses_is_left_alone() {
    let (mut stand, mut peers) = session(StandOptions::default(), 2);
    let (bytes, mut first) = (stand.registered(), peers.remove(0));
    stand.pools();
    stand.device.lock().hold = true;
    first.send_write(&stand, (1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    stand.settle();
    first.leave(&mut stand);
    let mut back = Peer::up(&mut stand, path(0, 2), "sess");
    assert_eq!(stand.pools().len(), 1, "memory of its own");
    assert!(addresses(&back.chunks) != addresses(&first.chunks));
    // As much as the one that runs, and in the same place of its chunk.
    back.send_write(&stand, (1, 7), io(Rw::WRITE, 8, 512), &[2; 512]);
    stand.settle();
    assert!(stand.registered() > bytes);
    stand.device.lock().hold = false;
    stand.pass(Duration::from_millis(5));
    assert_eq!(back.reply(&mut stand).errno, 0);
    assert_eq!(stand.device.lock().bytes[..512], [1; 512]);
    assert_eq!(stand.registered(), bytes, "no more than the session had paths");
    back.leave(&mut stand);
    let mut again = Peer::up(&mut stand, path(0, 3), "sess");
    assert_eq!((stand.pools(), stand.registered()), (vec![], bytes));
    works(&mut stand, &mut again, 9);
}

#[test]
fn memory_that_connections_may_still_reach_is_left_alone() {
    for always_invalidate in [false, true] {
        let mut options = StandOptions::default();
        options.params.always_invalidate = always_invalidate;
        let (mut stand, mut peers) = session(options, 2);
        let (bytes, first) = (stand.registered(), stand.pools()[0]);
        stand.world.linger(stand.address.ip(), Duration::from_secs(9));
        let mut old = peers.remove(0);
        let mut new = Peer::new(&stand, path(0, 2));
        assert_eq!(new.connect(&mut stand, 0), Err(-104), "it ends the old one");
        assert_eq!(old.closed(&mut stand), 3);
        // Nothing of that begins any more, so it may come back; its queue pairs are still there.
        let mut back = Peer::up(&mut stand, path(0, 3), "sess");
        let pools = stand.pools();
        assert!(pools.len() == 1 && pools[0] != first, "{pools:?}");
        works(&mut stand, &mut back, 5);
        stand.pass(Duration::from_secs(9));
        assert_eq!(stand.registered(), bytes, "no more than the session had paths");
    }
}

#[test]
fn as_much_is_kept_as_the_session_had_paths_at_once() {
    let (mut stand, mut peers) = session(StandOptions::default(), 3);
    let bytes = stand.registered();
    let pool = bytes / 3;
    for (life, n) in (2..).zip([1, 2, 1, 1, 2]) {
        let at = usize::from(n);
        peers[at].leave(&mut stand);
        assert!(stand.registered() > bytes - pool / 2 && stand.registered() <= bytes);
        peers[at] = Peer::up(&mut stand, path(n, life), "sess");
        assert_eq!(stand.registered(), bytes);
    }
    peers.remove(2).leave(&mut stand);
    peers.remove(1).leave(&mut stand);
    assert!(stand.registered() > bytes - pool, "both are kept");
    stand.pools();
    let _two: Vec<Peer> = (1..3).map(|n| Peer::up(&mut stand, path(n, 20), "sess")).collect();
    assert_eq!((stand.pools(), stand.registered()), (vec![], bytes));
}

#[test]
fn it_never_leaves_its_session() {
    let (mut stand, mut peers) = session(StandOptions::default(), 2);
    let mine = addresses(&peers[0].chunks);
    peers.remove(0).leave(&mut stand);
    let bytes = stand.registered();
    stand.pools();
    let foreign = PeerOptions { session: 2, path: 9, local: 3, ..PeerOptions::default() };
    let mut other = Peer::up(&mut stand, foreign, "other");
    assert_eq!(stand.pools().len(), 1, "another session's path has memory of its own");
    assert!(addresses(&other.chunks) != mine);
    let back = Peer::up(&mut stand, path(0, 2), "sess");
    assert_eq!((stand.pools(), addresses(&back.chunks)), (vec![], mine));
    drop(back);
    peers.remove(0).leave(&mut stand);
    stand.settle();
    assert_eq!(stand.sessions().len(), 1);
    assert!(stand.registered() < bytes, "nothing of the session is left");
    other.leave(&mut stand);
    assert_eq!(stand.registered(), 0);
}

#[test]
fn one_key_to_all_chunks_dies_with_its_path() {
    let mut options = StandOptions::default();
    options.params.always_invalidate = false;
    let (mut stand, mut peers) = session(options, 2);
    let first = stand.pools()[0];
    let (bytes, mut back) = (stand.registered(), peers.remove(0));
    for life in 2..5 {
        let old = back.chunks[6];
        back.leave(&mut stand);
        back = Peer::up(&mut stand, path(0, life), "sess");
        assert_eq!(stand.pools(), [first], "the same memory, registered anew");
        assert_ne!(back.chunks[6].key, old.key);
        works(&mut stand, &mut back, life as u8);
        assert_eq!(stand.registered(), bytes);
    }
    old_key_is_dead(&mut stand, back, 6);
}

#[test]
fn a_path_that_never_came_up_gives_it_back() {
    let device = DeviceOptions { pins_memory: true, ..DeviceOptions::default() };
    let (mut stand, mut peers) = session(with_device(device), 2);
    let bytes = stand.registered();
    peers.remove(0).leave(&mut stand);
    stand.pools();
    let mut half = Peer::new(&stand, path(0, 2));
    half.connect(&mut stand, 0).unwrap();
    stand.pass(Duration::from_secs(6));
    assert_eq!(half.closed(&mut stand), 1);
    let mut back = Peer::up(&mut stand, path(0, 3), "sess");
    assert_eq!((stand.pools(), stand.registered()), (vec![], bytes));
    works(&mut stand, &mut back, 5);
}

#[test]
fn what_is_kept_while_a_path_connects_serves_it_too() {
    let (mut stand, mut peers) = session(StandOptions::default(), 2);
    let (bytes, mut first) = (stand.registered(), peers.remove(0));
    let pool = stand.pools()[0];
    stand.device.lock().hold = true;
    first.send_write(&stand, (1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    stand.settle();
    first.leave(&mut stand);
    let mut back = Peer::new(&stand, path(0, 2));
    for cid in 0..3 {
        back.connect(&mut stand, cid).unwrap();
    }
    stand.device.lock().hold = false;
    stand.pass(Duration::from_millis(5));
    back.info(&mut stand, "sess");
    assert_eq!((stand.pools(), stand.registered()), (vec![pool], bytes));
    works(&mut stand, &mut back, 3);
}

#[test]
fn over_another_device_it_is_registered_anew() {
    let device = DeviceOptions { many: true, ..DeviceOptions::default() };
    let (mut stand, mut peers) = session(with_device(device), 2);
    let (first, bytes) = (stand.pools()[0], stand.registered());
    assert_eq!(first.1, Access::LOCAL);
    peers.remove(0).leave(&mut stand);
    let mut back = Peer::up(&mut stand, path(0, 2), "sess");
    assert_eq!((stand.pools(), stand.registered()), (vec![first], bytes));
    works(&mut stand, &mut back, 5);
}

#[test]
fn a_registration_whose_windows_are_not_gone_yet_is_not_used_again() {
    let device = DeviceOptions { slow: true, ..DeviceOptions::default() };
    let (mut stand, mut peers) = session(with_device(device), 2);
    let first = stand.pools()[0];
    peers.remove(0).leave(&mut stand);
    let mut back = Peer::up(&mut stand, path(0, 2), "sess");
    assert_eq!(stand.pools(), [first]);
    works(&mut stand, &mut back, 5);
}

#[test]
fn nothing_is_kept_of_a_path_whose_connections_could_not_be_ended() {
    let device = DeviceOptions { undead: true, ..DeviceOptions::default() };
    let (mut stand, mut peers) = session(with_device(device), 2);
    let (first, bytes) = (stand.pools()[0], stand.registered());
    peers.remove(0).leave(&mut stand);
    assert!(stand.registered() < bytes);
    let mut back = Peer::up(&mut stand, path(0, 2), "sess");
    let pools = stand.pools();
    assert!(pools.len() == 1 && pools[0] != first, "{pools:?}");
    works(&mut stand, &mut back, 5);
}
