//! Tests of CHALLENGE and AUTH: accepted and refused proofs on a path.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::ids::{PathUuid, SessionId};
use rtrs_core::tls::{Clients, PrivateKey, ProofFacts, TlsClientConfig, TlsServerConfig};
use rtrs_core::wire::{
    AccessMode, Challenge, ChallengeRsp, ClientExtensions, ConnRsp, Extensions, Rw, errno,
};

use super::fixture::{DeviceOptions, Fixture, StandOptions, client_ip};
use super::peer::{Peer, PeerOptions, io};
use crate::access_list::{AccessPolicy, AccessRule, Unlisted};
use crate::audit::{AuditKind, AuditResult};
use crate::engine::authenticator::{Authenticator, ProofTask};
use crate::engine::message::{AdminReply, AdminRequest, ControlMessage, Message};
use crate::path::PathKey;
use crate::stats::{PathAuth, PathStage, SessionState};

const RW: AccessMode = AccessMode::ReadWrite;

fn key(seed: u8) -> PrivateKey {
    PrivateKey::from_seed([seed; 32]).unwrap()
}

/// Configuration with the server's key and the keys of the clients with these numbers (`db1` etc.).
pub(super) fn server_config(clients: &[u8]) -> TlsServerConfig {
    let mut list = Clients::default();
    clients.iter().for_each(|n| list.add(&format!("db{n}"), key(*n).public()));
    TlsServerConfig::with_keys(&key(100), list).unwrap()
}

pub(super) fn client_config(n: u8) -> TlsClientConfig {
    TlsClientConfig::with_keys(&key(n), &[key(100).public()]).unwrap()
}

#[derive(Debug)]
struct Backlog {
    config: TlsServerConfig,
    tasks: VecDeque<ProofTask>,
    nonce: u8,
    room: usize,
}

/// An authenticator whose tasks are queued until the test runs them.
#[derive(Clone, Debug)]
pub(super) struct AuthQueue(Arc<Mutex<Backlog>>);

impl Authenticator for AuthQueue {
    fn begin(&self, task: ProofTask) -> bool {
        let mut backlog = self.0.lock();
        let has_room = backlog.tasks.len() < backlog.room;
        if has_room {
            backlog.tasks.push_back(task);
        }
        has_room
    }
}

impl AuthQueue {
    /// Installs an authenticator on a server that knows these clients.
    pub(super) fn install(fixture: &mut Fixture, clients: &[u8]) -> Self {
        let (tasks, config) = (VecDeque::new(), server_config(clients));
        let queue = Self(Arc::new(Mutex::new(Backlog { config, tasks, nonce: 0x40, room: 64 })));
        fixture.control().set_authenticator(Arc::new(queue.clone()));
        let nobody = AccessPolicy::new(&[], [].into_iter(), Unlisted::Named);
        fixture.exports.set_access(nobody);
        queue
    }

    /// Runs all queued tasks, and lets the server continue.
    pub(super) fn run_all(&self, fixture: &mut Fixture) -> usize {
        fixture.settle();
        let mut count = 0;
        while let Some(done) = {
            let mut backlog = self.0.lock();
            backlog.nonce = backlog.nonce.wrapping_add(1);
            let nonce = [backlog.nonce; 32];
            backlog.tasks.retain(ProofTask::is_wanted);
            let task = backlog.tasks.pop_front();
            task.map(|task| task.run(&backlog.config, nonce))
        } {
            count += 1;
            fixture.send(Message::Control(ControlMessage::Proof(Box::new(done))));
        }
        fixture.settle();
        count
    }
}

/// Options for paths from clients that can authenticate.
pub(super) fn proving(options: PeerOptions) -> PeerOptions {
    let extensions = ClientExtensions { authenticates: true, ..options.extensions };
    PeerOptions { extensions, ..options }
}

/// A path that has completed its handshake without a proof.
pub(super) fn unproved(fixture: &mut Fixture, options: PeerOptions) -> Peer {
    let peer = Peer::up(fixture, proving(options), &format!("sess{}", options.session));
    assert!(peer.proof_wanted);
    peer
}

pub(super) fn facts(fixture: &Fixture, options: &PeerOptions) -> ProofFacts {
    ProofFacts {
        session: SessionId([options.session; 16]),
        path: PathUuid([options.path; 16]),
        client: client_ip(options.local),
        server: fixture.address.ip(),
    }
}

/// Sends a challenge. Returns the server's answer, or its errno.
pub(super) fn challenge(
    fixture: &mut Fixture,
    queue: &AuthQueue,
    peer: &mut Peer,
    challenge: &Challenge,
) -> Result<ChallengeRsp, u16> {
    peer.clear_result();
    peer.send_challenge((0, 0), challenge, 4096);
    queue.run_all(fixture);
    match peer.reply(fixture).errno {
        0 => Ok(ChallengeRsp::decode(&peer.result(4096)).unwrap()),
        errno => Err(errno),
    }
}

/// Sends a proof. Returns the errno in the answer.
pub(super) fn auth(fixture: &mut Fixture, queue: &AuthQueue, peer: &mut Peer, data: &[u8]) -> u16 {
    peer.send_auth((0, 0), data);
    queue.run_all(fixture);
    peer.reply(fixture).errno
}

/// Creates a client's proof on a path, for a challenge that it sends.
pub(super) fn proof(
    fixture: &mut Fixture,
    queue: &AuthQueue,
    peer: &mut Peer,
    client: &TlsClientConfig,
) -> Vec<u8> {
    let asked = client.challenge([7; 32]);
    let facts = facts(fixture, &peer.options);
    let answer = challenge(fixture, queue, peer, &asked).unwrap();
    client.answer(facts, None, &asked, &answer).unwrap()
}

/// Authenticates the client of a path. Returns the errno in the answer.
pub(super) fn prove(fixture: &mut Fixture, queue: &AuthQueue, peer: &mut Peer, n: u8) -> u16 {
    let data = proof(fixture, queue, peer, &client_config(n));
    auth(fixture, queue, peer, &data)
}

/// A path from client `n` with full access.
pub(super) fn proved(
    fixture: &mut Fixture,
    queue: &AuthQueue,
    options: PeerOptions,
    n: u8,
) -> Peer {
    let mut peer = unproved(fixture, options);
    assert_eq!(prove(fixture, queue, &mut peer, n), 0);
    peer
}

fn list(fixture: &Fixture, rules: &[&str]) {
    let rules: Vec<AccessRule> = rules.iter().map(|text| text.parse().unwrap()).collect();
    let policy = AccessPolicy::new(&rules, [].into_iter(), Unlisted::Nobody);
    fixture.exports.set_access(policy);
}

#[test]
fn a_proof_names_the_client_of_a_path() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1, 2]);
    list(&fixture, &["db1:rw"]);
    let mut peer = unproved(&mut fixture, PeerOptions::default());
    let shown = fixture.sessions().swap_remove(0);
    assert_eq!((&*shown.identity, shown.name), ("unproved", None), "not yet a client's name");
    assert_eq!(shown.paths[0].auth, Some(PathAuth::Pending));
    assert_eq!(shown.paths[0].state, PathStage::Authenticating);
    assert_eq!(shown.state, SessionState::Connecting, "it is not up");
    assert_eq!(prove(&mut fixture, &queue, &mut peer, 1), 0);
    let shown = fixture.sessions().swap_remove(0);
    assert_eq!((&*shown.identity, shown.name.as_deref()), ("key:db1", Some("sess1")));
    assert_eq!((shown.paths[0].auth, &shown.paths[0].cipher), (Some(PathAuth::Signed), &None));
    peer.open_device(&mut fixture, "vol", RW).unwrap();
    peer.send_write((1, 6), io(Rw::WRITE, 0, 512), &[7; 512]);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    // An authenticated client has nothing left to prove.
    let asked = client_config(1).challenge([9; 32]);
    assert_eq!(challenge(&mut fixture, &queue, &mut peer, &asked), Err(errno::EINVAL));
    assert_eq!(auth(&mut fixture, &queue, &mut peer, &[1; 60]), errno::EINVAL);
    assert_eq!(queue.run_all(&mut fixture), 0);
    // A client that is in no list gains nothing from a valid proof.
    let other = PeerOptions { session: 2, path: 2, local: 1, ..PeerOptions::default() };
    let mut stranger = unproved(&mut fixture, other);
    assert_eq!(prove(&mut fixture, &queue, &mut stranger, 2), errno::EACCES);
    assert!(stranger.open_device(&mut fixture, "vol", AccessMode::ReadOnly).is_err());
}

#[test]
fn a_name_that_another_session_has_is_refused_after_the_proof() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let _holder = proved(&mut fixture, &queue, PeerOptions::default(), 1);
    for info_refusals in [true, false] {
        let extensions = ClientExtensions { info_refusals, ..ClientExtensions::default() };
        let options = PeerOptions { session: 2, path: 2, local: 1, ..PeerOptions::default() };
        let options = proving(PeerOptions { extensions, ..options });
        let mut second = Peer::up(&mut fixture, options, "sess1");
        let data = proof(&mut fixture, &queue, &mut second, &client_config(1));
        second.send_auth((0, 0), &data);
        queue.run_all(&mut fixture);
        if info_refusals {
            assert_eq!(second.reply(&mut fixture).errno, errno::EEXIST);
            assert_eq!(second.closed(&mut fixture), 0, "the client closes the path");
            second.leave(&mut fixture);
        } else {
            assert_eq!(second.closed(&mut fixture), 3, "no answer");
        }
        assert_eq!(fixture.sessions().len(), 1);
    }
}

#[test]
fn a_client_that_cannot_authenticate_is_anonymous() {
    let mut fixture = Fixture::new(StandOptions::default());
    let _queue = AuthQueue::install(&mut fixture, &[1]);
    let mut kernel = Peer::new(&fixture, PeerOptions::default());
    let request = kernel.options.request(0).encode();
    let qp = kernel.ask(&fixture, &request);
    assert_eq!(kernel.answer(&mut fixture, qp), Some(Err(-13)));
    list(&fixture, &[&format!("kernel@{}:rw", client_ip(0))]);
    let mut kernel = Peer::open(&mut fixture, PeerOptions::default());
    assert!(!kernel.proof_wanted);
    kernel.send_write((1, 6), io(Rw::WRITE, 0, 512), &[7; 512]);
    assert_eq!(kernel.reply(&mut fixture).errno, 0);
    assert_eq!(fixture.sessions()[0].identity, "anonymous");
    // A client with a name cannot join its session.
    let join = PeerOptions { path: 2, local: 1, ..PeerOptions::default() };
    let mut peer = Peer::new(&fixture, proving(join));
    assert_eq!(peer.connect(&mut fixture, 0), Err(-13));
}

#[test]
fn a_reject_indicates_that_a_proof_is_required() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let reject = |fixture: &mut Fixture| {
        let mut peer = Peer::new(fixture, PeerOptions::default());
        let request = peer.options.request(0).encode();
        peer.ask(fixture, &request);
        fixture.settle();
        peer.drain();
        let data = peer.take(|event| match event {
            rtrs_core::fabric::FabricEvent::ConnectFailed {
                failure: rtrs_core::fabric::ConnectFailure::Rejected(data),
                ..
            } => Some(data.clone()),
            _ => None,
        });
        Extensions::decode(&ConnRsp::decode(data.unwrap().as_bytes()).unwrap().ext)
    };
    assert!(reject(&mut fixture).authenticate);
    drop(queue);
    // If the server has no keys, a proof would not help.
    let mut fixture = Fixture::new(StandOptions::default());
    list(&fixture, &["db1:rw"]);
    assert_eq!(reject(&mut fixture), Extensions::default());
}

#[test]
fn an_invalid_proof_opens_nothing() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let client = client_config(1);
    let at = |path, session, local| PeerOptions { session, path, local, ..PeerOptions::default() };
    let mut victim = unproved(&mut fixture, at(1, 1, 0));
    let replay = proof(&mut fixture, &queue, &mut victim, &client);
    assert_eq!(auth(&mut fixture, &queue, &mut victim, &replay), 0);
    victim.open_device(&mut fixture, "vol", RW).unwrap();

    let mut next = 10;
    let mut refused = |fixture: &mut Fixture, data: &dyn Fn(&mut Fixture, &mut Peer) -> Vec<u8>| {
        next += 1;
        let mut peer = unproved(fixture, at(next, next, 1));
        let data = data(fixture, &mut peer);
        assert_eq!(auth(fixture, &queue, &mut peer, &data), errno::EACCES);
        let open = peer.open_device(fixture, "other", AccessMode::ReadOnly);
        assert_eq!(open.map(|_| ()), Err(errno::EACCES), "it is still closed");
        assert_eq!(fixture.sessions().last().unwrap().identity, "unproved");
        peer.leave(fixture);
    };
    let asked = client.challenge([7; 32]);
    // Proofs without a challenge, and for a challenge other than the path's own.
    refused(&mut fixture, &|_, _| replay.clone());
    refused(&mut fixture, &|fixture, peer| {
        challenge(fixture, &queue, peer, &asked).unwrap();
        replay.clone()
    });
    // Proofs made for a different path, a different session or different addresses.
    for wrong in [
        |facts: ProofFacts| ProofFacts { path: PathUuid([1; 16]), ..facts },
        |facts: ProofFacts| ProofFacts { session: SessionId([1; 16]), ..facts },
        |facts: ProofFacts| ProofFacts { client: client_ip(0), ..facts },
        |facts: ProofFacts| ProofFacts { server: client_ip(0), ..facts },
    ] {
        refused(&mut fixture, &|fixture, peer| {
            let facts = wrong(facts(fixture, &peer.options));
            let answer = challenge(fixture, &queue, peer, &asked).unwrap();
            // Answers as a server with those facts would, so that the client signs.
            let config = server_config(&[1]);
            let (theirs, _) = config.prove(facts, &asked, answer.nonce).unwrap();
            client.answer(facts, None, &asked, &theirs).unwrap()
        });
    }
    // A proof with the nonces swapped.
    refused(&mut fixture, &|fixture, peer| {
        let facts = facts(fixture, &peer.options);
        let answer = challenge(fixture, &queue, peer, &asked).unwrap();
        let swapped = client.challenge(answer.nonce);
        let (theirs, _) = server_config(&[1]).prove(facts, &swapped, asked.nonce).unwrap();
        client.answer(facts, None, &swapped, &theirs).unwrap()
    });
    // A proof with an unknown key, and one without a key.
    refused(&mut fixture, &|fixture, peer| proof(fixture, &queue, peer, &client_config(9)));
    refused(&mut fixture, &|fixture, peer| {
        challenge(fixture, &queue, peer, &asked).unwrap();
        vec![0; 300]
    });
    victim.send_write((1, 6), io(Rw::WRITE, 0, 512), &[7; 512]);
    assert_eq!(victim.reply(&mut fixture).errno, 0, "the victim is unaffected");
}

#[test]
fn an_auth_is_valid_once_and_a_path_has_two_challenges() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let mut peer = unproved(&mut fixture, PeerOptions::default());
    let stale = proof(&mut fixture, &queue, &mut peer, &client_config(1));
    assert_eq!(auth(&mut fixture, &queue, &mut peer, &[5; 99]), errno::EACCES);
    assert_eq!(auth(&mut fixture, &queue, &mut peer, &stale), errno::EACCES, "spent");
    let second = proof(&mut fixture, &queue, &mut peer, &client_config(1));
    assert_eq!(auth(&mut fixture, &queue, &mut peer, &stale), errno::EACCES, "another nonce");
    assert_eq!(auth(&mut fixture, &queue, &mut peer, &second), errno::EACCES, "spent too");
    let asked = client_config(1).challenge([7; 32]);
    assert_eq!(challenge(&mut fixture, &queue, &mut peer, &asked), Err(errno::EACCES));
    assert_eq!(queue.run_all(&mut fixture), 0, "a third costs no signature");
    fixture.pass(fixture.params.handshake_timeout);
    assert!(peer.closed(&mut fixture) > 0, "its time has run out");
    fixture.assert_empty();
}

#[test]
fn a_session_has_a_single_client() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1, 2]);
    let mut first = proved(&mut fixture, &queue, PeerOptions::default(), 1);
    first.open_device(&mut fixture, "vol", RW).unwrap();
    let second = PeerOptions { path: 2, local: 1, first_conn: false, ..PeerOptions::default() };
    let mut other = unproved(&mut fixture, second);
    assert_eq!(prove(&mut fixture, &queue, &mut other, 2), errno::EACCES);
    // The same client authenticates another path.
    assert_eq!(prove(&mut fixture, &queue, &mut other, 1), 0);
    assert_eq!(fixture.sessions()[0].identity, "key:db1");
    other.send_write((1, 6), io(Rw::WRITE, 0, 512), &[7; 512]);
    assert_eq!(other.reply(&mut fixture).errno, 0);
    assert_eq!(first.closed(&mut fixture), 0);
    // A client without a name cannot join.
    let third = PeerOptions { path: 3, local: 2, ..second };
    list(&fixture, &["db1:rw", "kernel:rw"]);
    let mut kernel = Peer::new(&fixture, third);
    assert_eq!(kernel.connect(&mut fixture, 0), Err(-13));
}

#[test]
fn a_reload_rechecks_proofs() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1, 2]);
    let other = PeerOptions { session: 2, path: 2, local: 1, ..PeerOptions::default() };
    let mut first = proved(&mut fixture, &queue, PeerOptions::default(), 1);
    let mut second = Peer::up(&mut fixture, proving(other), "other");
    assert_eq!(prove(&mut fixture, &queue, &mut second, 2), 0);
    let identities = |fixture: &mut Fixture| {
        let answer = fixture.admin(AdminRequest::Identities).lock().take();
        let Some(AdminReply::Identities(found)) = answer else { panic!("{answer:?}") };
        found
    };
    let found = identities(&mut fixture);
    let later = server_config(&[2]);
    let unknown: Vec<PathKey> = found
        .iter()
        .filter(|(_, identity)| !later.still_knows(identity))
        .map(|(key, _)| *key)
        .collect();
    assert_eq!((found.len(), unknown.len()), (2, 1));
    let _ = fixture.admin(AdminRequest::EndUnknown(unknown));
    assert!(first.closed(&mut fixture) > 0);
    assert_eq!(second.closed(&mut fixture), 0);
    assert_eq!(identities(&mut fixture).len(), 1);
}

#[test]
fn a_proof_by_keys_from_before_a_reload_is_refused() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let mut peer = unproved(&mut fixture, PeerOptions::default());
    let data = proof(&mut fixture, &queue, &mut peer, &client_config(1));
    let policy = AccessPolicy::new(&[], [].into_iter(), Unlisted::Named).with_generation(1);
    fixture.exports.set_access(policy);
    assert_eq!(auth(&mut fixture, &queue, &mut peer, &data), errno::EACCES);
    // The lists may also change while the signature is being checked.
    let _ = fixture.admin(AdminRequest::CheckAccess);
    assert_eq!(peer.closed(&mut fixture), 0, "an unauthenticated client still has time");
}

#[test]
fn a_proof_that_cannot_be_checked_now_is_refused_and_may_be_retried() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let mut peer = unproved(&mut fixture, PeerOptions::default());
    queue.0.lock().room = 0;
    let asked = client_config(1).challenge([7; 32]);
    assert_eq!(challenge(&mut fixture, &queue, &mut peer, &asked), Err(errno::EBUSY));
    queue.0.lock().room = 1;
    // While one proof is being checked, a second one is refused.
    peer.send_challenge((0, 0), &asked, 4096);
    peer.send_challenge((0, 1), &asked, 4096);
    fixture.settle();
    assert_eq!(peer.reply(&mut fixture).errno, errno::EACCES);
    assert_eq!(queue.run_all(&mut fixture), 1);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    // A client leaves no room for the answer, and the result for a path that has ended is dropped.
    let other = PeerOptions { session: 2, path: 2, local: 1, ..PeerOptions::default() };
    let mut small = unproved(&mut fixture, other);
    small.send_challenge((0, 0), &asked, 511);
    assert_eq!(small.reply(&mut fixture).errno, errno::EACCES);
    small.send_challenge((0, 0), &asked, 4096);
    fixture.settle();
    small.leave(&mut fixture);
    peer.leave(&mut fixture);
    fixture.pass(fixture.params.handshake_timeout);
    assert_eq!(queue.run_all(&mut fixture), 0, "it is no longer wanted");
    fixture.assert_empty();
}

#[test]
fn proofs_are_recorded() {
    let mut fixture = Fixture::new(StandOptions::default());
    let queue = AuthQueue::install(&mut fixture, &[1]);
    let events = fixture.audited();
    let mut peer = unproved(&mut fixture, PeerOptions::default());
    assert_eq!(prove(&mut fixture, &queue, &mut peer, 9), errno::EACCES);
    assert_eq!(prove(&mut fixture, &queue, &mut peer, 1), 0);
    let events = std::mem::take(&mut *events.lock());
    let kinds: Vec<_> = events.iter().map(|event| (event.event, event.result)).collect();
    let expected = [
        (AuditKind::Authenticate, AuditResult::Refused),
        (AuditKind::Authenticate, AuditResult::Ok),
        (AuditKind::Connect, AuditResult::Ok),
    ];
    assert_eq!(kinds, expected);
    let reason = events[0].reason.as_deref().unwrap();
    assert!(reason.contains("key is not known here"), "{reason}");
    assert_eq!((events[0].identity.as_deref(), events[1].identity.as_deref()), (None, Some("db1")));
    assert!(events.iter().all(|event| event.address.unwrap().ip() == client_ip(0)));
    assert_eq!(fixture.sessions()[0].log_id, events[1].session.clone().unwrap());
    assert!(events[1].session_name.is_some() && events[1].session_name == events[2].session_name);
}

#[test]
fn proofs_are_refused_over_tcp() {
    let device = DeviceOptions { takes_no_proofs: true, ..DeviceOptions::default() };
    let mut fixture = Fixture::new(StandOptions { device, ..StandOptions::default() });
    let _queue = AuthQueue::install(&mut fixture, &[1]);
    let mut peer = Peer::new(&fixture, proving(PeerOptions::default()));
    assert_eq!(peer.connect(&mut fixture, 0), Err(-13), "a client without a name is refused");
    fixture.assert_empty();
}
