//! Tests of many unauthenticated paths from many addresses to a server that pins chunks: their
//! limits, and their effect on others.

use rtrs_core::ids::QpNum;
use rtrs_core::time::Duration;

use super::authenticate::{AuthQueue, proof, prove, proved, proving, unproved};
use super::fixture::{Fixture, StandOptions};
use super::intruders::{at, first, owner, short_of, with_depth, write};
use super::peer::{Peer, PeerOptions};
use crate::engine::tests::authenticate::client_config;
use crate::path::chunks::ChunkPool;

/// An address without an authenticated path.
const STRANGE: u8 = 10;

/// A path of a new session.
fn alone(n: u8, local: u8) -> PeerOptions {
    proving(PeerOptions { session: 100 + n, ..first(100 + n, local) })
}

/// Requests a path from a server whose chunk registrations the test completes, and waits.
fn ask(fixture: &mut Fixture, options: PeerOptions) -> (Peer, QpNum) {
    let mut peer = Peer::new(fixture, proving(options));
    let qp = peer.ask(fixture, &peer.options.request(0).encode());
    fixture.settle();
    (peer, qp)
}

/// Continues the handshake until a proof is due.
fn continue_handshake(fixture: &mut Fixture, peer: &mut Peer, asked: QpNum) {
    assert_eq!(peer.answer(fixture, asked), Some(Ok(())));
    for cid in 1..peer.options.cid_num {
        peer.connect(fixture, cid).unwrap();
    }
    peer.info(fixture, "sess");
}

fn aside() -> StandOptions {
    let mut options = short_of(16);
    options.device.aside = true;
    options
}

/// Creates four paths, the maximum, each from a different address.
fn crowd(fixture: &mut Fixture, n: u8) -> Vec<Peer> {
    (n..n + 4).map(|n| unproved(fixture, alone(n, STRANGE + n % 10))).collect()
}

/// Returns the number of paths that have ended.
fn gone(fixture: &mut Fixture, crowd: &mut [Peer]) -> usize {
    crowd.iter_mut().map(|peer| usize::from(peer.closed(fixture) > 0)).sum()
}

#[test]
fn memory_counts_until_it_is_deregistered() {
    let mut fixture = Fixture::new(aside());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let bytes = ChunkPool::bytes(fixture.params.limits);
    // Unauthenticated peers connect and leave repeatedly.
    for n in 0..40 {
        let (_peer, _) = ask(&mut fixture, alone(n, STRANGE + n % 12));
        fixture.pass(fixture.params.handshake_timeout);
        assert_eq!(fixture.sessions(), []);
        assert!(fixture.waiting() <= 10 * bytes, "{n}: {}", fixture.waiting());
    }
    assert!(fixture.waiting() >= 8 * bytes, "{}", fixture.waiting());
    // Once no unused registration remains, paths are accepted.
    fixture.pools();
    assert!(fixture.make() >= 8);
    assert_eq!((fixture.pools(), fixture.registered(), fixture.waiting()), (vec![], 0, 0));
    for n in 0..4 {
        let (mut peer, asked) = ask(&mut fixture, first(n, n));
        fixture.make();
        continue_handshake(&mut fixture, &mut peer, asked);
        // An authenticated path does not count against others.
        assert_eq!(prove(&mut fixture, &queue, &mut peer, 1), 0);
        peer.leave(&mut fixture);
    }
    assert_eq!(fixture.used_memory(), 0);
}

#[test]
fn authenticated_paths_use_the_servers_memory_budget() {
    let (mut fixture, queue, owner) = owner(short_of(16));
    let bytes = ChunkPool::bytes(fixture.params.limits) as u64;
    let mut paths = vec![owner];
    for n in 1..8 {
        paths.push(proved(&mut fixture, &queue, at(1 + n, n), 1));
        assert_eq!(fixture.used_memory(), bytes * u64::from(n + 1));
    }
    // All the capacity for others is available.
    let mut others = crowd(&mut fixture, 0);
    assert_eq!(gone(&mut fixture, &mut others), 0);
    assert_eq!(fixture.used_memory(), bytes * 12);
    others.iter_mut().chain(&mut paths).for_each(|peer| peer.leave(&mut fixture));
    assert_eq!((fixture.used_memory(), fixture.registered()), (0, 0));
}

#[test]
fn the_proof_timeout_starts_when_the_client_can_answer() {
    let time = fixture_time();
    // INFO_REQ does not start the timeout.
    let (mut fixture, queue, _owner) = owner(StandOptions::default());
    let mut peer = Peer::new(&fixture, proving(at(2, 1)));
    for cid in 0..peer.options.cid_num {
        peer.connect(&mut fixture, cid).unwrap();
    }
    fixture.pass(time * 3 / 4);
    peer.info(&mut fixture, "sess1");
    let late = proof(&mut fixture, &queue, &mut peer, &client_config(1));
    fixture.pass(time / 2);
    assert!(peer.closed(&mut fixture) > 0, "{} bytes come too late", late.len());
    // The time limit starts when the chunks are registered.
    let mut fixture = Fixture::new(aside());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let (mut peer, asked) = ask(&mut fixture, first(1, 0));
    fixture.pass(time * 3 / 4);
    fixture.make();
    fixture.pass(time * 3 / 4);
    continue_handshake(&mut fixture, &mut peer, asked);
    assert_eq!(prove(&mut fixture, &queue, &mut peer, 1), 0);
    // Until then, no path is evicted for being slow.
    let mut waiting: Vec<_> = (0..4).map(|n| ask(&mut fixture, alone(n, STRANGE + n))).collect();
    fixture.pass(Duration::from_secs(2));
    let (mut other, refused) = ask(&mut fixture, alone(8, STRANGE + 8));
    assert_eq!(other.answer(&mut fixture, refused), Some(Err(-122)));
    fixture.make();
    for (peer, asked) in &mut waiting {
        continue_handshake(&mut fixture, peer, *asked);
    }
}

fn fixture_time() -> Duration {
    StandOptions::default().params.handshake_timeout
}

#[test]
fn unauthenticated_peers_do_not_prevent_a_reconnect() {
    let (mut fixture, queue, mut owner) = owner(short_of(16));
    let mut strangers = crowd(&mut fixture, 0);
    let mut late = Peer::new(&fixture, alone(8, STRANGE + 8));
    assert_eq!(late.connect(&mut fixture, 0), Err(-122));
    assert_eq!(gone(&mut fixture, &mut strangers), 0);
    // A client whose path is up, and a client that has just lost its last path.
    let again = |recon_cnt| PeerOptions { recon_cnt, ..first(1, 0) };
    let mut back = proved(&mut fixture, &queue, again(2), 1);
    assert!(owner.closed(&mut fixture) > 0);
    write(&mut fixture, &mut back);
    assert_eq!(gone(&mut fixture, &mut strangers), 1);
    back.leave(&mut fixture);
    assert!(fixture.sessions().iter().all(|session| session.identity == "unproved"));
    strangers.push(unproved(&mut fixture, alone(9, STRANGE + 9)));
    let mut back = proved(&mut fixture, &queue, again(3), 1);
    assert_eq!(gone(&mut fixture, &mut strangers), 2);
    back.leave(&mut fixture);
    // After some time, the client is unknown again.
    fixture.pass(Duration::from_secs(601));
    let mut strangers = crowd(&mut fixture, 20);
    let mut back = Peer::new(&fixture, proving(again(5)));
    assert_eq!(back.connect(&mut fixture, 0), Err(-122));
    assert_eq!(gone(&mut fixture, &mut strangers), 0);
}

#[test]
fn clients_are_evicted_last() {
    let (mut fixture, _queue, _owner) = owner(short_of(16));
    // A client authenticates slowly, twice.
    let mut slow = [
        unproved(&mut fixture, PeerOptions { recon_cnt: 2, ..at(1, 0) }),
        unproved(&mut fixture, proving(alone(0, 0))),
    ];
    let mut strangers: Vec<Peer> =
        (1..3).map(|n| unproved(&mut fixture, alone(n, STRANGE + n))).collect();
    let mut next = Peer::new(&fixture, alone(8, STRANGE + 8));
    assert_eq!(
        next.connect(&mut fixture, 0),
        Err(-122),
        "a known source with more paths is refused"
    );
    fixture.pass(Duration::from_millis(1100));
    assert_eq!(next.connect(&mut fixture, 0), Ok(()));
    assert_eq!((gone(&mut fixture, &mut slow), gone(&mut fixture, &mut strangers)), (0, 1));
    // Half of the memory is reserved for known sources; beyond that, all are equal.
    let mut third = Peer::new(&fixture, proving(alone(9, 0)));
    fixture.pass(Duration::from_millis(100));
    assert_eq!(third.connect(&mut fixture, 0), Ok(()), "one more path is old enough to be evicted");
    let mut fourth = Peer::new(&fixture, proving(alone(10, 0)));
    assert_eq!(fourth.connect(&mut fixture, 0), Ok(()), "its own path is evicted");
    assert_eq!((gone(&mut fixture, &mut slow), gone(&mut fixture, &mut strangers)), (1, 2));
    assert_eq!(next.closed(&mut fixture), 0);
}

#[test]
fn a_known_address_has_half_of_the_memory() {
    let (mut fixture, _queue, _owner) = owner(short_of(16));
    let mut slow: Vec<Peer> =
        (0..4).map(|n| unproved(&mut fixture, proving(alone(n, 0)))).collect();
    let mut strangers = Vec::new();
    for n in 1..3 {
        let mut next = Peer::new(&fixture, alone(7 + n, STRANGE + n));
        assert_eq!(next.connect(&mut fixture, 0), Ok(()), "{n}");
        assert_eq!(gone(&mut fixture, &mut slow), usize::from(n));
        strangers.push(next);
    }
    let mut third = Peer::new(&fixture, alone(10, STRANGE + 3));
    assert_eq!(third.connect(&mut fixture, 0), Err(-122));
    assert_eq!(gone(&mut fixture, &mut slow), 2);
    drop(strangers);
}

#[test]
fn a_refused_path_evicts_nothing() {
    let (mut fixture, _queue, _owner) = owner(short_of(16));
    let mut strangers = crowd(&mut fixture, 0);
    // The unauthenticated paths are old enough to be evicted.
    fixture.pass(Duration::from_millis(1100));
    let mut twice = Peer::new(&fixture, proving(at(7, 0)));
    assert_eq!(twice.connect(&mut fixture, 0), Err(-17), "there is such a path");
    let unknown = PeerOptions { session: 99, ..at(8, 8) };
    let mut unknown = Peer::new(&fixture, proving(unknown));
    assert_eq!(unknown.connect(&mut fixture, 0), Err(-6), "there is no such session");
    assert_eq!(gone(&mut fixture, &mut strangers), 0);
}

#[test]
fn a_path_that_would_not_fit_evicts_nothing() {
    let mut fixture = Fixture::new(short_of(16));
    let _queue = AuthQueue::install(&mut fixture, &[1]);
    // Six addresses have one path at half depth each; at quarter depth, the seventh has three paths
    // and the eighth has one.
    let mut strangers = Vec::new();
    for n in 0..10 {
        let depth = if n < 6 { 8 } else { 4 };
        let local = STRANGE
            + if n < 6 {
                n
            } else if n < 9 {
                6
            } else {
                7
            };
        strangers.push(unproved(&mut fixture, with_depth(depth, alone(n, local))));
    }
    // The seventh address uses more memory than any of the six, and as much after one eviction.
    let half = with_depth(8, alone(10, STRANGE + 10));
    let mut next = Peer::new(&fixture, half);
    assert_eq!(next.connect(&mut fixture, 0), Err(-122));
    assert_eq!(gone(&mut fixture, &mut strangers), 0);
    // Two paths are evicted if that makes room.
    let mut peer = unproved(&mut fixture, with_depth(4, alone(11, STRANGE + 11)));
    assert_eq!(gone(&mut fixture, &mut strangers), 1);
    fixture.pass(Duration::from_millis(1100));
    assert_eq!(next.connect(&mut fixture, 0), Ok(()));
    assert!(gone(&mut fixture, &mut strangers) >= 2);
    assert_eq!(peer.closed(&mut fixture), 0);
}
