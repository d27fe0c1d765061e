//! Tests of what an intruder can do to a session's client if the intruder can reach the port and
//! knows the UUIDs of the session and its paths, but has no key.

use rtrs_core::identity::ServerProcess;
use rtrs_core::ids::PathUuid;
use rtrs_core::limits::Limits;
use rtrs_core::wire::{AccessMode, Challenge, ClientExtensions, Fence, Rw, WriteMsg, errno};

use super::authenticate::{
    AuthQueue, auth, challenge, client_config, proof, prove, proved, proving,
};
use super::authenticate::{facts, unproved};
use super::fixture::{DeviceOptions, Fixture, StandOptions, client_ip};
use super::peer::{Data, Peer, PeerOptions, io};
use crate::audit::{AuditEvent, AuditKind, AuditResult};
use crate::engine::message::{AdminRequest, ControlMessage, Message};
use crate::export::ExportIndex;
use crate::path::chunks::ChunkPool;

const RW: AccessMode = AccessMode::ReadWrite;
/// An address that only the intruder has.
const OUTSIDE: u8 = 25;

pub(super) fn at(path: u8, local: u8) -> PeerOptions {
    PeerOptions { path, local, first_conn: false, ..PeerOptions::default() }
}

pub(super) fn first(path: u8, local: u8) -> PeerOptions {
    PeerOptions { first_conn: true, ..at(path, local) }
}

pub(super) fn with_depth(queue_depth: u16, options: PeerOptions) -> PeerOptions {
    let extensions = ClientExtensions { queue_depth, smaller_depth: true, ..options.extensions };
    PeerOptions { extensions, ..options }
}

pub(super) fn write(fixture: &mut Fixture, peer: &mut Peer) {
    peer.send_write((1, 3), io(Rw::WRITE, 8, 512), &[8; 512]);
    assert_eq!(peer.reply(fixture).errno, 0);
}

/// A client with `vol` open over path 1.
pub(super) fn owner(options: StandOptions) -> (Fixture, AuthQueue, Peer) {
    let mut fixture = Fixture::new(options);
    let queue = AuthQueue::install(&mut fixture, &[1, 2]);
    let mut owner = proved(&mut fixture, &queue, PeerOptions::default(), 1);
    owner.open_device(&mut fixture, "vol", RW).unwrap();
    (fixture, queue, owner)
}

#[test]
fn a_session_ends_with_its_client() {
    let (mut fixture, queue, mut owner) = owner(StandOptions::default());
    let mut peers = vec![unproved(&mut fixture, at(10, OUTSIDE))];
    owner.leave(&mut fixture);
    assert_eq!(fixture.open_names(), ["vol"], "its client may reconnect");
    for n in 11..15 {
        fixture.pass(fixture.params.handshake_timeout / 3);
        peers.push(unproved(&mut fixture, first(n, OUTSIDE)));
    }
    assert!(fixture.sessions().iter().all(|session| session.opens.is_empty()));
    // The next client does not share the session.
    let other = PeerOptions { session: 2, ..first(2, 2) };
    let mut other = proved(&mut fixture, &queue, other, 2);
    other.open_device(&mut fixture, "vol", RW).unwrap();
    // The previous client starts again, regardless of other sessions.
    let again = PeerOptions { recon_cnt: 2, ..first(1, 0) };
    let mut again = proved(&mut fixture, &queue, again, 1);
    again.open_device(&mut fixture, "other", RW).unwrap();
    other.leave(&mut fixture);
    again.leave(&mut fixture);
    fixture.pass(fixture.params.handshake_timeout);
    fixture.pass(fixture.params.handshake_timeout);
    fixture.assert_empty();
}

#[test]
fn a_client_that_reconnects_in_time_keeps_its_session() {
    let (mut fixture, queue, mut owner) = owner(StandOptions::default());
    // The client notices the end of its path before the server does.
    let again = PeerOptions { recon_cnt: 2, ..at(1, 0) };
    let mut back = unproved(&mut fixture, again);
    owner.leave(&mut fixture);
    fixture.pass(fixture.params.handshake_timeout / 2);
    assert_eq!(prove(&mut fixture, &queue, &mut back, 1), 0);
    write(&mut fixture, &mut back);
    fixture.pass(fixture.params.handshake_timeout);
    write(&mut fixture, &mut back);
    assert_eq!(fixture.open_names(), ["vol"]);
}

#[test]
fn an_unauthenticated_path_does_not_fix_the_session_parameters() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let mut squatter = unproved(&mut fixture, with_depth(4, first(1, OUTSIDE)));
    assert_eq!(squatter.queue_depth, 4);
    // The client knows the depth of its session, or accepts any available depth.
    for asked in [16, 0] {
        let mut owner = proved(&mut fixture, &queue, with_depth(asked, first(1, 0)), 1);
        assert_eq!(owner.queue_depth, 16);
        owner.open_device(&mut fixture, "vol", RW).unwrap();
        assert!(squatter.closed(&mut fixture) > 0, "it would be another session");
        write(&mut fixture, &mut owner);
        let depths: Vec<_> = fixture.sessions().iter().map(|one| one.queue_depth).collect();
        assert_eq!(depths, [16]);
        // From now on, the depth is fixed.
        let mut other = Peer::new(&fixture, proving(with_depth(8, at(3, 3))));
        assert_eq!(other.connect(&mut fixture, 0), Err(-104));
        owner.leave(&mut fixture);
        squatter = unproved(&mut fixture, with_depth(8, first(1, OUTSIDE)));
    }
    // If two paths could authenticate the same client, the first to do so determines the depth.
    let mut one = unproved(&mut fixture, with_depth(8, first(1, 0)));
    let mut two = unproved(&mut fixture, with_depth(16, first(2, 1)));
    let late = proof(&mut fixture, &queue, &mut one, &client_config(1));
    assert_eq!(prove(&mut fixture, &queue, &mut two, 1), 0);
    one.send_auth((0, 0), &late);
    queue.run_all(&mut fixture);
    assert!(one.closed(&mut fixture) > 0);
    assert_eq!(squatter.closed(&mut fixture), 3);
    two.open_device(&mut fixture, "vol", RW).unwrap();
}

#[test]
fn a_client_may_have_paths_with_and_without_tls() {
    let device = DeviceOptions { tls_from: Some(client_ip(4)), ..DeviceOptions::default() };
    for tls_first in [true, false] {
        let mut fixture = Fixture::new(StandOptions { device, ..StandOptions::default() });
        let queue = AuthQueue::install(&mut fixture, &[1]);
        let squatter = unproved(&mut fixture, with_depth(4, first(5, 3)));
        let tls = |fixture: &mut Fixture| Peer::up(fixture, proving(first(5, 4)), "sess1");
        let rdma = |fixture: &mut Fixture| unproved(fixture, first(1, 0));
        let (mut tls, mut rdma) = match tls_first {
            true => (tls(&mut fixture), rdma(&mut fixture)),
            false => {
                let rdma = rdma(&mut fixture);
                (tls(&mut fixture), rdma)
            }
        };
        assert!(!tls.proof_wanted);
        tls.open_device(&mut fixture, "vol", RW).unwrap();
        assert_eq!(prove(&mut fixture, &queue, &mut rdma, 1), 0);
        let sessions = fixture.sessions();
        assert_eq!((sessions.len(), &*sessions[0].identity), (1, "key:db1"));
        for peer in [&mut tls, &mut rdma] {
            write(&mut fixture, peer);
            assert_eq!(peer.closed(&mut fixture), 0);
        }
        drop(squatter);
    }
}

#[test]
fn there_is_always_capacity_for_a_client() {
    let (mut fixture, queue, mut owner) = owner(StandOptions::default());
    let joins = |fixture: &mut Fixture, path, local| {
        let mut peer = Peer::new(fixture, proving(at(path, local)));
        peer.connect(fixture, 0).is_ok().then_some(peer)
    };
    let mut crowd = Vec::new();
    for n in 0..40 {
        crowd.extend(joins(&mut fixture, 40 + n, OUTSIDE - n % 2));
    }
    let there = |fixture: &mut Fixture, crowd: &mut [Peer]| {
        crowd.iter_mut().map(|peer| usize::from(peer.closed(fixture) == 0)).sum::<usize>()
    };
    assert_eq!(there(&mut fixture, &mut crowd), 32);
    // The client connects from a new address, and from the address of a path that is up.
    let mut paths = Vec::new();
    for (path, local) in [(2, 1), (1, 0)] {
        let options = PeerOptions { recon_cnt: 2, ..at(path, local) };
        let mut next = proved(&mut fixture, &queue, options, 1);
        write(&mut fixture, &mut next);
        if path == 2 {
            write(&mut fixture, &mut owner);
        }
        paths.push(next);
        for n in 0..3 {
            crowd.extend(joins(&mut fixture, 90 + n, OUTSIDE));
        }
    }
    assert!(there(&mut fixture, &mut crowd) <= 32);
    // Nor do paths that leave repeatedly lock out others.
    crowd.into_iter().for_each(|mut peer| peer.leave(&mut fixture));
    for n in 0..100 {
        let mut peer = Peer::new(&fixture, proving(at(50 + n, OUTSIDE)));
        peer.connect(&mut fixture, 0).unwrap();
        peer.leave(&mut fixture);
    }
    let mut next = proved(&mut fixture, &queue, at(3, 3), 1);
    write(&mut fixture, &mut next);
}

#[test]
fn a_client_may_have_many_paths() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let mut paths: Vec<Peer> = (0..20).map(|n| unproved(&mut fixture, first(n, n))).collect();
    for path in &mut paths {
        assert_eq!(prove(&mut fixture, &queue, path, 1), 0);
    }
    paths[0].open_device(&mut fixture, "vol", RW).unwrap();
    paths.iter_mut().for_each(|path| write(&mut fixture, path));
}

#[test]
fn connections_from_another_address_are_another_path() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    // The intruder knows the number of the next connect, and connects first.
    let mut thief = unproved(&mut fixture, first(1, OUTSIDE));
    let mut owner = proved(&mut fixture, &queue, first(1, 0), 1);
    owner.open_device(&mut fixture, "vol", RW).unwrap();
    write(&mut fixture, &mut owner);
    assert_eq!(prove(&mut fixture, &queue, &mut thief, 2), errno::EACCES);
    // One of two paths between the same addresses is enough.
    let (mut one, mut two) = (unproved(&mut fixture, at(7, 1)), unproved(&mut fixture, at(8, 1)));
    assert_eq!(prove(&mut fixture, &queue, &mut one, 1), 0);
    assert_eq!(prove(&mut fixture, &queue, &mut two, 1), errno::EACCES);
}

/// Options for a server that pins chunks, with memory for `paths` paths.
pub(super) fn short_of(paths: u64) -> StandOptions {
    let mut options = StandOptions::default();
    options.device.pins_memory = true;
    options.params.limits = Limits::new(16, 256 << 10).unwrap();
    let bytes = ChunkPool::bytes(options.params.limits) as u64;
    options.params.memory_max = paths * bytes;
    options
}

#[test]
fn memory_before_authentication_is_bounded_and_separate() {
    let (mut fixture, queue, mut owner) = owner(short_of(8));
    let path_bytes = fixture.registered();
    let smaller = |session, path, local| {
        let options = PeerOptions { session, ..first(path, local) };
        let extensions = ClientExtensions { smaller_depth: true, ..options.extensions };
        PeerOptions { extensions, ..options }
    };
    // Paths of the session that the intruder knows, and paths of other sessions.
    let mut crowd = Vec::new();
    for n in 0..20 {
        let session = if n % 2 == 0 { 1 } else { 100 + n };
        let mut peer = Peer::new(&fixture, proving(smaller(session, 40 + n, OUTSIDE)));
        if peer.connect(&mut fixture, 0).is_ok() {
            crowd.push(peer);
        }
        assert!(fixture.registered() <= 4 * path_bytes, "{n}: {}", fixture.registered());
    }
    assert!(fixture.registered() >= 3 * path_bytes, "{}", fixture.registered());
    // A path of the client, then sessions until the memory for sessions is used up.
    let mut second = proved(&mut fixture, &queue, at(2, 1), 1);
    let mut others = Vec::new();
    for n in 2..8 {
        let next = proved(&mut fixture, &queue, smaller(n, n, n), 2);
        assert_eq!(next.queue_depth, 16, "session {n} gets less");
        others.push(next);
    }
    let mut ninth = Peer::new(&fixture, proving(smaller(9, 9, 9)));
    assert_eq!(ninth.connect(&mut fixture, 0), Err(-12));
    for peer in [&mut owner, &mut second] {
        write(&mut fixture, peer);
    }
}

#[test]
fn memory_kept_for_a_client_is_not_given_to_others() {
    let (mut fixture, queue, mut owner) = owner(short_of(100));
    let mut second = proved(&mut fixture, &queue, at(2, 1), 1);
    let two = fixture.registered();
    let old: Vec<u64> = second.chunks.iter().map(|chunk| chunk.addr).collect();
    second.leave(&mut fixture);
    let kept = fixture.registered();
    assert!(two - kept < 1 << 20, "its chunks are kept");
    // A path from elsewhere gets its own memory, and leaves nothing behind.
    for n in 0..3 {
        let mut peer = unproved(&mut fixture, at(40 + n, OUTSIDE));
        assert!(peer.chunks.iter().all(|chunk| !old.contains(&chunk.addr)));
        peer.leave(&mut fixture);
        assert_eq!(fixture.registered(), kept);
    }
    for recon_cnt in 2..5 {
        let again = PeerOptions { recon_cnt, ..at(2, 1) };
        let mut back = proved(&mut fixture, &queue, again, 1);
        let new: Vec<u64> = back.chunks.iter().map(|chunk| chunk.addr).collect();
        assert_eq!(new, old);
        write(&mut fixture, &mut back);
        assert_eq!(fixture.registered(), two);
        back.leave(&mut fixture);
    }
    // A reconnect in parallel with the previous connect does not count as an additional path.
    let next = proved(&mut fixture, &queue, PeerOptions { recon_cnt: 2, ..at(1, 0) }, 1);
    assert!(owner.closed(&mut fixture) > 0);
    assert_eq!(fixture.registered(), kept);
    drop(next);
}

#[test]
fn unauthenticated_paths_get_no_size_changes_or_name_conflicts() {
    let (mut fixture, _queue, _owner) = owner(StandOptions::default());
    let extensions = ClientExtensions { changed: true, ..ClientExtensions::default() };
    let mut peer = unproved(&mut fixture, PeerOptions { extensions, ..at(10, OUTSIDE) });
    fixture.device.lock().size = Some(1 << 19);
    fixture.send(Message::Control(ControlMessage::Resized(ExportIndex(0))));
    assert_eq!(peer.immediates(&mut fixture), []);
    // The name of the client's session, and a free name.
    for (n, name) in [(2, "sess1"), (3, "free")] {
        let elsewhere = PeerOptions { session: n, ..first(n, n) };
        let mut peer = Peer::up(&mut fixture, proving(elsewhere), name);
        assert_eq!(peer.closed(&mut fixture), 0, "{name}");
    }
}

#[test]
fn events_of_unauthenticated_paths_are_recorded_as_such() {
    let (mut fixture, queue, mut owner) = owner(StandOptions::default());
    let events = fixture.audited();
    let _silent = unproved(&mut fixture, at(10, OUTSIDE));
    fixture.pass(fixture.params.handshake_timeout);
    let taken = std::mem::take(&mut *events.lock());
    assert_eq!(taken.len(), 1);
    let event = &taken[0];
    assert_eq!((event.event, event.result), (AuditKind::Authenticate, AuditResult::Refused));
    assert_eq!(event.address.unwrap().ip(), client_ip(OUTSIDE));
    // A client that has proven a different identity does not count as unauthenticated.
    let mut other = unproved(&mut fixture, at(11, 3));
    assert_eq!(prove(&mut fixture, &queue, &mut other, 2), errno::EACCES);
    let taken = std::mem::take(&mut *events.lock());
    assert_eq!(taken.len(), 1);
    assert_eq!((taken[0].event, taken[0].identity.as_deref()), (AuditKind::Connect, Some("db2")));
    // The operator ends the paths of the client, and a path that belongs to no client.
    let session = fixture.sessions()[0].id.clone();
    let _answer = fixture.admin(AdminRequest::Disconnect { session, path: None });
    assert!(owner.closed(&mut fixture) > 0 && other.closed(&mut fixture) > 0);
    let mut evicted: Vec<_> = std::mem::take(&mut *events.lock())
        .into_iter()
        .map(|one| (one.event, one.address.unwrap().ip(), one.identity))
        .collect();
    evicted.sort_by_key(|(_, address, _)| *address);
    let db1 = || Some("db1".to_owned());
    let kinds = [AuditKind::SessionDisconnect, AuditKind::Close, AuditKind::Disconnect];
    let mut expected: Vec<_> = kinds.map(|kind| (kind, client_ip(0), db1())).into();
    expected.push((AuditKind::SessionDisconnect, client_ip(3), None));
    assert_eq!(evicted, expected);
}

#[test]
fn an_auth_of_another_version_leaves_the_second_challenge() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let mut peer = unproved(&mut fixture, PeerOptions::default());
    let asked = client_config(1).challenge([7; 32]);
    challenge(&mut fixture, &queue, &mut peer, &asked).unwrap();
    let newer = rtrs_core::wire::Auth { version: 2 }.encode();
    let usr_len = u16::try_from(newer.len()).unwrap();
    peer.request((0, 0), Data::Bytes(&[1; 60]), &newer, &WriteMsg { usr_len }.encode());
    assert_eq!(peer.reply(&mut fixture).errno, errno::EACCES);
    let answer = challenge(&mut fixture, &queue, &mut peer, &asked).unwrap();
    let facts = facts(&fixture, &peer.options);
    let data = client_config(1).answer(facts, None, &asked, &answer).unwrap();
    assert_eq!(auth(&mut fixture, &queue, &mut peer, &data), 0);
}

#[test]
fn a_fence_by_the_client_applies_to_unauthenticated_paths() {
    let (mut fixture, _queue, mut owner) = owner(StandOptions::default());
    let mut peer = unproved(&mut fixture, at(2, OUTSIDE));
    owner.send_fence(
        1,
        Fence { path: PathUuid([2; 16]), recon_cnt: 5, process: ServerProcess::NONE },
    );
    assert_eq!(owner.reply(&mut fixture).errno, 0);
    assert!(peer.closed(&mut fixture) > 0);
}

#[test]
fn invented_data_does_not_fill_the_logs() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let events = fixture.audited();
    for n in 0..100 {
        let options = PeerOptions { session: 2, ..first(n, OUTSIDE) };
        let mut peer = unproved(&mut fixture, options);
        let version = 100 + u16::from(n);
        let made_up = Challenge { version, nonce: [n; 32], credential: [n; 32] };
        assert!(challenge(&mut fixture, &queue, &mut peer, &made_up).is_err());
        peer.leave(&mut fixture);
    }
    let refused = |event: &&AuditEvent| event.event == AuditKind::Authenticate;
    assert_eq!(events.lock().iter().filter(refused).count(), 1, "the others are counted");
}
