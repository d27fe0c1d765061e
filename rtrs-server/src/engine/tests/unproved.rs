//! Tests of unauthenticated paths: the answers they receive, and that they do not disturb other
//! paths even if they use the UUIDs of an existing session.

use rtrs_core::identity::ServerProcess;
use rtrs_core::ids::PathUuid;
use rtrs_core::wire::{AccessMode, Fence, Page, Rw, errno};

use super::authenticate::{AuthQueue, auth, proof, prove, proved, proving, unproved};
use super::fixture::{Fixture, StandOptions};
use super::peer::{Peer, PeerOptions, io};
use crate::engine::tests::authenticate::client_config;
use crate::stats::PathStage;

const RW: AccessMode = AccessMode::ReadWrite;

fn second_path(path: u8, local: u8) -> PeerOptions {
    PeerOptions { path, local, first_conn: false, ..PeerOptions::default() }
}

#[test]
fn other_requests_are_answered_with_eacces() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let mut owner = proved(&mut fixture, &queue, PeerOptions::default(), 1);
    owner.open_device(&mut fixture, "vol", RW).unwrap();
    let mut peer = unproved(&mut fixture, second_path(2, 1));
    peer.send_sess_info((0, 0), 2);
    peer.send_open(1, "vol", RW);
    peer.send_close(2, 0);
    peer.send_fence(
        3,
        Fence { path: PathUuid([1; 16]), recon_cnt: 1, process: ServerProcess::NONE },
    );
    peer.send_discover((0, 4), "", Page::LEN_MAX);
    peer.send_read((1, 5), io(Rw::READ, 0, 512));
    peer.send_write((1, 6), io(Rw::WRITE, 0, 512), &[7; 512]);
    peer.send_flush((2, 7));
    peer.request((0, 8), super::peer::Data::None, &[0xff; 9], &[2, 0, 9, 0]);
    let replies = peer.replies(&mut fixture);
    assert_eq!(replies.len(), 9);
    assert!(replies.iter().all(|reply| reply.errno == errno::EACCES), "{replies:?}");
    assert_eq!(owner.closed(&mut fixture), 0, "it was not fenced off");
    assert!(fixture.device.lock().log.is_empty(), "the device has seen nothing");
    assert_eq!(fixture.open_names(), ["vol"], "it was not closed");
}

#[test]
fn permits_are_separate_until_authentication() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let mut owner = proved(&mut fixture, &queue, PeerOptions::default(), 1);
    owner.open_device(&mut fixture, "vol", RW).unwrap();
    let mut peer = unproved(&mut fixture, second_path(2, 1));
    fixture.device.lock().hold = true;
    for permit in 0..16 {
        owner.send_write((1, permit), io(Rw::WRITE, 0, 512), &[7; 512]);
    }
    fixture.settle();
    for permit in 0..16 {
        peer.send_write((1, permit), io(Rw::WRITE, 0, 512), &[8; 512]);
    }
    let replies = peer.replies(&mut fixture);
    assert!(replies.len() == 16 && replies.iter().all(|reply| reply.errno == errno::EACCES));
    assert_eq!(owner.closed(&mut fixture), 0, "its permits are its own");
    fixture.device.lock().hold = false;
    assert_eq!(owner.replies(&mut fixture).iter().filter(|reply| reply.errno == 0).count(), 16);
    // Once the path has authenticated, its permits are the session's.
    assert_eq!(prove(&mut fixture, &queue, &mut peer, 1), 0);
    peer.send_write((1, 3), io(Rw::WRITE, 8, 512), &[8; 512]);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
}

#[test]
fn an_unproved_path_changes_nothing_in_its_session() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let mut owner = proved(&mut fixture, &queue, PeerOptions::default(), 1);
    owner.open_device(&mut fixture, "vol", RW).unwrap();
    fixture.known.borrow_mut().clear();
    let peer = Peer::up(&mut fixture, proving(second_path(2, 1)), "renamed");
    assert!(peer.proof_wanted);
    assert_eq!(fixture.sessions()[0].name.as_deref(), Some("sess1"));
    assert_eq!(fixture.known.borrow_mut().len(), 0, "no room is reserved for its address");
    // The access checks of its session ignore the unauthenticated path.
    owner.open_device(&mut fixture, "other", RW).unwrap();
    fixture.pass(fixture.params.handshake_timeout);
    let shown = fixture.sessions().swap_remove(0);
    let states: Vec<_> = shown.paths.iter().map(|path| path.state).collect();
    assert_eq!(states, [PathStage::Connected], "its time has run out");
}

#[test]
fn the_first_authenticated_client_gets_the_name() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1, 2]);
    let elsewhere = PeerOptions { session: 9, first_conn: true, ..second_path(9, 2) };
    let squatter = Peer::up(&mut fixture, proving(elsewhere), "sess1");
    let owner = proved(&mut fixture, &queue, PeerOptions::default(), 1);
    assert_eq!(owner.chunks.len(), 16);
    let mut late = squatter;
    // The name was free when the late client arrived, but no longer is.
    let data = proof(&mut fixture, &queue, &mut late, &client_config(2));
    late.send_auth((0, 0), &data);
    queue.run_all(&mut fixture);
    assert!(late.closed(&mut fixture) > 0);
    assert_eq!(fixture.sessions()[0].identity, "key:db1");
}

#[test]
fn a_path_is_replaced_only_by_its_authenticated_client() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1, 2]);
    let mut owner = proved(&mut fixture, &queue, PeerOptions::default(), 1);
    owner.open_device(&mut fixture, "vol", RW).unwrap();
    // An attacker who knows both UUIDs reconnects the path.
    let again = PeerOptions { recon_cnt: 2, ..PeerOptions::default() };
    let mut thief = unproved(&mut fixture, again);
    assert_eq!(prove(&mut fixture, &queue, &mut thief, 2), errno::EACCES);
    owner.send_write((1, 3), io(Rw::WRITE, 8, 512), &[8; 512]);
    assert_eq!(owner.reply(&mut fixture).errno, 0, "it continues");
    // The path's client reconnects it in parallel; the disk still holds a write of the old connect.
    fixture.device.lock().hold = true;
    owner.send_write((1, 4), io(Rw::WRITE, 8, 512), &[9; 512]);
    fixture.settle();
    let mut next = unproved(&mut fixture, PeerOptions { recon_cnt: 3, ..PeerOptions::default() });
    assert_eq!(prove(&mut fixture, &queue, &mut next, 1), 0);
    assert!(owner.closed(&mut fixture) > 0, "its earlier connect ends");
    assert!(thief.closed(&mut fixture) > 0);
    next.open_device(&mut fixture, "vol", RW).unwrap();
    next.send_write((1, 3), io(Rw::WRITE, 8, 512), &[1; 512]);
    assert_eq!(next.replies(&mut fixture), [], "it waits for the older write");
    fixture.device.lock().hold = false;
    assert_eq!(next.reply(&mut fixture).errno, 0);
    assert_eq!(fixture.device.lock().bytes[8 * 512], 1);
    // An earlier connect arrives too late.
    let mut late = unproved(&mut fixture, PeerOptions { recon_cnt: 2, ..PeerOptions::default() });
    assert_eq!(prove(&mut fixture, &queue, &mut late, 1), errno::EACCES);
    assert_eq!(next.closed(&mut fixture), 0);
}

#[test]
fn a_fence_applies_to_unproved_connects() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let mut owner = proved(&mut fixture, &queue, PeerOptions::default(), 1);
    owner.open_device(&mut fixture, "vol", RW).unwrap();
    let mut other = proved(&mut fixture, &queue, second_path(2, 1), 1);
    let again = PeerOptions { recon_cnt: 2, ..second_path(2, 1) };
    let mut late = unproved(&mut fixture, again);
    let data = proof(&mut fixture, &queue, &mut late, &client_config(1));
    owner.send_fence(
        1,
        Fence { path: PathUuid([2; 16]), recon_cnt: 2, process: ServerProcess::NONE },
    );
    assert_eq!(owner.reply(&mut fixture).errno, 0);
    assert!(other.closed(&mut fixture) > 0);
    late.send_auth((0, 0), &data);
    queue.run_all(&mut fixture);
    assert!(late.closed(&mut fixture) > 0, "it begins no more work");
    // The fence does not apply to a later connect.
    let mut next = unproved(&mut fixture, PeerOptions { recon_cnt: 3, ..second_path(2, 1) });
    owner.send_fence(
        1,
        Fence { path: PathUuid([2; 16]), recon_cnt: 2, process: ServerProcess::NONE },
    );
    assert_eq!(owner.reply(&mut fixture).errno, 0);
    assert_eq!(prove(&mut fixture, &queue, &mut next, 1), 0);
}

#[test]
fn a_request_sent_before_the_proof_stays_refused() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let mut peer = unproved(&mut fixture, PeerOptions::default());
    let data = proof(&mut fixture, &queue, &mut peer, &client_config(1));
    peer.send_auth((0, 0), &data);
    fixture.settle();
    // The signature is being checked.
    peer.send_open(1, "vol", RW);
    assert_eq!(peer.reply(&mut fixture).errno, errno::EACCES);
    queue.run_all(&mut fixture);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    assert_eq!(auth(&mut fixture, &queue, &mut peer, &data), errno::EINVAL);
    peer.open_device(&mut fixture, "vol", RW).unwrap();
}
