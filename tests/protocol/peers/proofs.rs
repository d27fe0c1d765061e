//! Tests of CHALLENGE and AUTH with a real server: over RDMA, valid and invalid proofs, and a
//! `reload` that removes a key from the list; over TCP, there are no proofs.

use std::fs;
use std::path::Path;

use rtrs_core::ids::{PathUuid, SessionId};
use rtrs_core::tls::{PrivateKey, ProofFacts, TlsClientConfig};
use rtrs_core::wire::{ChallengeRsp, ClientExtensions};

use super::*;

const ROOM: usize = 4096;

/// Key files of a server and of its client `db1`.
struct Keys {
    scratch: Scratch,
    client: PrivateKey,
    server: PrivateKey,
}

impl Keys {
    fn new() -> Self {
        let key = || PrivateKey::generate().expect("random numbers");
        let keys = Self { scratch: Scratch::new(), client: key(), server: key() };
        keys.server.write_new(Path::new(&keys.scratch.text("server.key"))).expect("a file");
        keys.list(&format!("db1 {}\n", keys.client.public()));
        keys
    }

    /// Writes the list of clients.
    fn list(&self, text: &str) {
        fs::write(self.scratch.path("clients"), text).expect("a file");
    }

    /// Returns the server's arguments, which also admit unlisted clients, but without a name.
    fn args(&self) -> [String; 8] {
        let (key, clients) = (self.scratch.text("server.key"), self.scratch.text("clients"));
        let keys = ["--key-file", &key, "--clients-file", &clients];
        let all = ["--access", "anyone:rw", "--access", "kernel@0.0.0.0/0:rw"];
        [keys, all].concat().try_into().map(|all: [&str; 8]| all.map(str::to_owned)).expect("8")
    }

    fn config(&self) -> TlsClientConfig {
        TlsClientConfig::with_keys(&self.client, &[self.server.public()]).expect("keys")
    }
}

/// Connects a path of a client that supports proofs; returns whether the server requires one.
fn able(server: SocketAddr, options: PeerOptions) -> (Peer, bool) {
    let extensions = ClientExtensions { authenticates: true, ..options.extensions };
    let options = PeerOptions { extensions, ..options };
    let peer = Peer::up(server, options, &format!("peer{}", options.session));
    let wanted = peer.proof_wanted;
    (peer, wanted)
}

/// Connects a path of a client that must prove its identity.
fn proving(server: SocketAddr, options: PeerOptions) -> Peer {
    let (peer, wanted) = able(server, options);
    assert!(wanted, "no proof is wanted");
    peer
}

fn facts(peer: &Peer, server: SocketAddr) -> ProofFacts {
    ProofFacts {
        session: SessionId([peer.options.session; 16]),
        path: PathUuid([peer.options.path; 16]),
        client: peer.fabric.local_ip(peer.conns[0]).expect("an address"),
        server: server.ip(),
    }
}

/// Returns the proof that a path's client would send, computed from these values.
fn proof_for(
    peer: &mut Peer,
    config: &TlsClientConfig,
    server: SocketAddr,
    change: impl Fn(ProofFacts) -> ProofFacts,
) -> Result<Vec<u8>, String> {
    let challenge = config.challenge([7; 32]);
    peer.send_challenge((0, 0), &challenge, ROOM);
    let errno = peer.answer().errno;
    assert_eq!(errno, 0, "the answer to a challenge");
    let answer = ChallengeRsp::decode(&peer.result(ROOM)).expect("a proof of the server");
    let facts = change(facts(peer, server));
    config.answer(facts, None, &challenge, &answer).map_err(|error| error.to_string())
}

/// Sends a proof and returns the errno of the answer.
fn auth(peer: &mut Peer, proof: &[u8]) -> u16 {
    peer.send_auth((0, 0), proof);
    peer.answer().errno
}

impl Scene {
    fn with_keys(keys: &Keys) -> Self {
        let args = keys.args();
        Self::with(&args.each_ref().map(String::as_str))
    }
}

/// An attacker on the network path could take over the connection after the proof.
#[test]
fn over_tcp_proofs_are_refused() {
    if !is_tcp() {
        return skip("this is about TCP");
    }
    let keys = Keys::new();
    let mut scene = Scene::with_keys(&keys);
    let (mut peer, wanted) = able(scene.server, scene.options());
    assert!(!wanted, "the server wants a proof over TCP");
    peer.send_challenge((0, 0), &keys.config().challenge([7; 32]), ROOM);
    assert_eq!(peer.answer().errno, errno::EINVAL, "a challenge");
    assert_eq!(auth(&mut peer, &[0; 64]), errno::EINVAL, "a proof");
    peer.open("vol1", AccessMode::ReadWrite).expect("the list admits anyone");
    let shown = scene.stand.server.list();
    assert!(!shown.to_string().contains("key:db1"), "{shown}");
    peer.check_alive("a proof over TCP");
    drop(peer);
    scene.end();
}

#[test]
fn only_a_proof_opens_a_path_over_rdma() {
    if is_tcp() {
        return skip("proofs are for RDMA; the lab runs it (interop-ks-hostile-requests)");
    }
    let keys = Keys::new();
    let mut scene = Scene::with_keys(&keys);
    let (config, at) = (keys.config(), scene.server);
    let mut peer = proving(at, scene.options());
    assert_eq!(peer.open("vol1", AccessMode::ReadOnly).map(|_| ()), Err(errno::EACCES));
    let good = proof_for(&mut peer, &config, at, |facts| facts).expect("the server is known");
    assert_eq!(auth(&mut peer, &good), 0);
    peer.open("vol1", AccessMode::ReadWrite).expect("it is known");
    peer.check_alive("a proof");
    let shown = scene.stand.server.list();
    let sessions = shown["sessions"].as_array().expect("sessions");
    let found = sessions.iter().find(|session| session["identity"] == "key:db1");
    assert_eq!(found.expect("its session")["paths"][0]["auth"], "signed", "{shown}");
    // A different path sends the first path's proof, then garbage, then one CHALLENGE too many.
    let mut other = proving(at, scene.options());
    assert_eq!(auth(&mut other, &good), errno::EACCES, "without a challenge");
    proof_for(&mut other, &config, at, |facts| facts).expect("the server is known");
    assert_eq!(auth(&mut other, &good), errno::EACCES, "of another path");
    proof_for(&mut other, &config, at, |facts| facts).expect("the server is known");
    assert_eq!(auth(&mut other, &vec![0xff; 16 << 10]), errno::EACCES, "garbage");
    assert_eq!(auth(&mut other, &[0; (16 << 10) + 1]), errno::EACCES, "too long");
    other.send_challenge((0, 0), &config.challenge([7; 32]), ROOM);
    assert_eq!(other.answer().errno, errno::EACCES, "a third one");
    // Its handshake timeout has passed.
    let _ = other.ended("no proof", handshake() + PATIENCE);
    // The proof of a server at an address that the client does not expect is invalid.
    let mut third = proving(at, scene.options());
    let elsewhere = |facts| ProofFacts { server: [10, 9, 9, 9].into(), ..facts };
    let error = proof_for(&mut third, &config, at, elsewhere).expect_err("another address");
    assert!(error.contains("not valid for this path"), "{error}");
    peer.check_alive("proofs of others");
    // The client's key is removed from the list.
    keys.list("# nobody\n");
    let _ = scene.stand.server.command(&["reload"]).ok();
    let _ = peer.ended("a reload", at_once());
    drop((other, third));
    scene.end();
}
