//! Tests of proofs: valid proofs, and every way in which a proof can be invalid for a path.

use super::*;
use crate::fabric::Who;
use crate::tests::certificates::{TestDir, Wanted, certificates};
use crate::tls::{Clients, PrivateKey, TlsDir};

fn facts() -> ProofFacts {
    ProofFacts {
        session: SessionId([1; 16]),
        path: PathUuid([2; 16]),
        client: IpAddr::from([10, 0, 0, 1]),
        server: IpAddr::from([127, 0, 0, 1]),
    }
}

fn key(seed: u8) -> PrivateKey {
    PrivateKey::from_seed([seed; 32]).unwrap()
}

fn by_keys() -> (TlsClientConfig, TlsServerConfig) {
    let mut clients = Clients::default();
    clients.add("db1", key(1).public());
    let client = TlsClientConfig::with_keys(&key(1), &[key(2).public()]).unwrap();
    (client, TlsServerConfig::with_keys(&key(2), clients).unwrap())
}

fn by_certificates(dir: &TestDir) -> (TlsClientConfig, TlsServerConfig) {
    let dir = TlsDir(dir.0.clone());
    let client = TlsClientConfig::with_certificates(&dir, None).unwrap();
    (client, TlsServerConfig::with_certificates(&dir).unwrap())
}

/// Runs a complete exchange between a client and a server, each with its own view of the facts.
fn exchange(
    client: &TlsClientConfig,
    server: &TlsServerConfig,
    at_client: ProofFacts,
    at_server: ProofFacts,
) -> Result<PeerIdentity, String> {
    let challenge = client.challenge([7; 32]);
    let text = |error: ProofError| error.to_string();
    let (answer, exchange) = server.prove(at_server, &challenge, [8; 32]).map_err(text)?;
    let data = client.answer(at_client, None, &challenge, &answer).map_err(text)?;
    server.check(&exchange, &data).map_err(text)
}

#[test]
fn both_kinds_prove_a_clients_name() {
    let (client, server) = by_keys();
    let found = exchange(&client, &server, facts(), facts()).unwrap();
    assert_eq!((&found.who, found.cipher), (&Who::Key("db1".into()), None));
    assert!(server.still_knows(&found));
    let dir = TestDir::new("proof");
    certificates(&dir.0);
    let (client, server) = by_certificates(&dir);
    let found = exchange(&client, &server, facts(), facts()).unwrap();
    assert_eq!(found.who, Who::Certificate("db1".into()));
    assert!(server.still_knows(&found));
}

/// Checks that each end refuses a proof made for a different session, path or address; the client
/// does so before it signs.
#[test]
fn a_proof_is_valid_only_for_its_path() {
    let dir = TestDir::new("proof");
    certificates(&dir.0);
    for (client, server) in [by_keys(), by_certificates(&dir)] {
        for other in [
            ProofFacts { session: SessionId([3; 16]), ..facts() },
            ProofFacts { path: PathUuid([3; 16]), ..facts() },
            ProofFacts { client: IpAddr::from([10, 0, 0, 2]), ..facts() },
            ProofFacts { server: IpAddr::from([127, 0, 0, 2]), ..facts() },
            // The path's own facts, with the addresses swapped.
            ProofFacts { client: facts().server, server: facts().client, ..facts() },
        ] {
            let error = exchange(&client, &server, facts(), other).unwrap_err();
            assert!(error.contains("signature is not valid for this path"), "{error}");
            // The server checks this too, in case the client does not.
            let challenge = client.challenge([7; 32]);
            let (answer, _) = server.prove(facts(), &challenge, [8; 32]).unwrap();
            let data = client.answer(facts(), None, &challenge, &answer).unwrap();
            let (_, expected) = server.prove(other, &challenge, [8; 32]).unwrap();
            let error = server.check(&expected, &data).unwrap_err().to_string();
            assert!(error.contains("signature is not valid for this path"), "{error}");
        }
    }
}

#[test]
fn ipv4_mapped_addresses_are_equal() {
    let (client, server) = by_keys();
    let mapped = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => IpAddr::from(v4.to_ipv6_mapped()),
        IpAddr::V6(_) => ip,
    };
    let other = ProofFacts { client: mapped(facts().client), ..facts() };
    exchange(&client, &server, facts(), other).unwrap();
}

#[test]
fn nonces_are_signed_in_order() {
    let (client, server) = by_keys();
    let challenge = client.challenge([7; 32]);
    let (answer, good) = server.prove(facts(), &challenge, [8; 32]).unwrap();
    let data = client.answer(facts(), None, &challenge, &answer).unwrap();
    server.check(&good, &data).unwrap();
    let swapped = Challenge { nonce: [8; 32], ..challenge };
    for (challenge, nonce) in [(swapped, [7; 32]), (challenge, [9; 32]), (swapped, [8; 32])] {
        let (answer, other) = server.prove(facts(), &challenge, nonce).unwrap();
        server.check(&other, &data).expect_err("a replay");
        // Nor does the client accept an answer to a different challenge.
        let error = client.answer(
            facts(),
            None,
            &client.challenge([7; 32]),
            &ChallengeRsp { nonce: [8; 32], ..answer },
        );
        error.expect_err("an old answer");
    }
}

/// Checks that the signature of one end is invalid for the other end, even if both have the same
/// key.
#[test]
fn a_reflected_proof_is_refused() {
    let mut clients = Clients::default();
    clients.add("mirror", key(2).public());
    let server = TlsServerConfig::with_keys(&key(2), clients).unwrap();
    let client = TlsClientConfig::with_keys(&key(2), &[key(2).public()]).unwrap();
    let challenge = client.challenge([7; 32]);
    let (answer, exchange) = server.prove(facts(), &challenge, [8; 32]).unwrap();
    let error = server.check(&exchange, &answer.proof.encode()).unwrap_err();
    assert!(error.to_string().contains("signature is not valid"), "{error}");
    let own = client.answer(facts(), None, &challenge, &answer).unwrap();
    let reflected = ChallengeRsp { proof: SignedProof::decode(&own).unwrap(), ..answer };
    client.answer(facts(), None, &challenge, &reflected).expect_err("the client's own proof");
}

#[test]
fn an_unknown_client_proves_nothing() {
    let (client, server) = by_keys();
    let stranger = TlsClientConfig::with_keys(&key(9), &[key(2).public()]).unwrap();
    let error = exchange(&stranger, &server, facts(), facts()).unwrap_err();
    assert!(error.contains("key is not known here"), "{error}");
    let pins_another = TlsClientConfig::with_keys(&key(1), &[key(9).public()]).unwrap();
    let error = exchange(&pins_another, &server, facts(), facts()).unwrap_err();
    assert!(error.contains("key is not known here"), "{error}");
    // A known key is presented by a peer that does not have its private key.
    let challenge = client.challenge([7; 32]);
    let (answer, exchange) = server.prove(facts(), &challenge, [8; 32]).unwrap();
    let data = client.answer(facts(), None, &challenge, &answer).unwrap();
    let mut forged = SignedProof::decode(&data).unwrap();
    forged.signature = stranger.own.sign(&exchange.message(CLIENT)).unwrap().signature;
    let error = server.check(&exchange, &forged.encode()).unwrap_err();
    assert!(error.to_string().contains("signature is not valid"), "{error}");
}

#[test]
fn certificates_are_checked_as_for_tls() {
    let dir = TestDir::new("proof");
    let authority = certificates(&dir.0);
    let (client, server) = by_certificates(&dir);
    let other = TestDir::new("proof");
    certificates(&other.0);
    let (stranger, impostor) = by_certificates(&other);
    let error = exchange(&stranger, &server, facts(), facts()).unwrap_err();
    assert!(error.contains("not signed by the CA"), "{error}");
    let error = exchange(&client, &impostor, facts(), facts()).unwrap_err();
    assert!(error.contains("not signed by the CA"), "{error}");
    // The server at this address has a certificate from the CA, but for a different address.
    let elsewhere = IpAddr::from([10, 9, 9, 9]);
    let there = ProofFacts { server: elsewhere, ..facts() };
    let error = exchange(&client, &server, there, there).unwrap_err();
    assert!(error.contains("is not for"), "{error}");
    authority.issue(&dir.0, &Wanted { years: (2001, 2002), ..Wanted::CLIENT });
    let error = exchange(&by_certificates(&dir).0, &server, facts(), facts()).unwrap_err();
    assert!(error.contains("has expired"), "{error}");
    authority.revoke(&dir.0, &[2]);
    let error = exchange(&client, &by_certificates(&dir).1, facts(), facts()).unwrap_err();
    assert!(error.contains("revoked"), "{error}");
}

#[test]
fn key_and_certificate_proofs_do_not_mix() {
    let dir = TestDir::new("proof");
    certificates(&dir.0);
    let (keys, certificates) = (by_keys(), by_certificates(&dir));
    for ends in [(&keys.0, &certificates.1), (&certificates.0, &keys.1)] {
        let error = exchange(ends.0, ends.1, facts(), facts()).unwrap_err();
        assert!(error.contains("kind of certificate in common"), "{error}");
    }
}

/// Checks that the presented credential must be the credential that was announced and signed.
#[test]
fn credentials_are_bound_to_the_proof() {
    let (client, server) = by_keys();
    let mut clients = Clients::default();
    clients.add("db1", key(1).public());
    clients.add("db2", key(3).public());
    let both = TlsServerConfig::with_keys(&key(2), clients).unwrap();
    let db2 = TlsClientConfig::with_keys(&key(3), &[key(2).public()]).unwrap();
    let challenge = client.challenge([7; 32]);
    let (answer, exchange) = both.prove(facts(), &challenge, [8; 32]).unwrap();
    let announced_as_db2 = Challenge { credential: db2.own.hash(), ..challenge };
    let (_, as_db2) = both.prove(facts(), &announced_as_db2, [8; 32]).unwrap();
    let data = client.answer(facts(), None, &challenge, &answer).unwrap();
    both.check(&exchange, &data).unwrap();
    let error = both.check(&as_db2, &data).unwrap_err();
    assert!(error.to_string().contains("a key other than the announced one"), "{error}");
    // A signature that is valid except for the hash of one end's credential.
    for other in [
        Exchange { client_credential: [0; 32], ..exchange },
        Exchange { server_credential: [0; 32], ..exchange },
    ] {
        let message = other.message(CLIENT);
        let data = client.own.sign(&message).unwrap().encode();
        let error = server.check(&exchange, &data).unwrap_err();
        assert!(error.to_string().contains("signature is not valid"), "{error}");
    }
}

#[test]
fn other_versions_and_signature_schemes_are_refused() {
    let (client, server) = by_keys();
    let challenge = client.challenge([7; 32]);
    let later = Challenge { version: 2, ..challenge };
    server.prove(facts(), &later, [8; 32]).expect_err("a later version");
    let (answer, exchange) = server.prove(facts(), &challenge, [8; 32]).unwrap();
    let later = ChallengeRsp { version: 2, ..answer.clone() };
    client.answer(facts(), None, &challenge, &later).expect_err("a later version");
    let good = client.answer(facts(), None, &challenge, &answer).unwrap();
    // RSA with PKCS#1, which TLS 1.3 permits only for certificates; the wrong curve; invalid
    // values.
    for scheme in [0x0401, 0x0403, 0x0000, 0xffff_u16] {
        let proof = SignedProof { scheme, ..SignedProof::decode(&good).unwrap() };
        server.check(&exchange, &proof.encode()).expect_err("another scheme");
    }
}

/// Checks that every bit of a proof is significant.
#[test]
fn a_flipped_bit_invalidates_a_proof() {
    let (client, server) = by_keys();
    let challenge = client.challenge([7; 32]);
    let (answer, exchange) = server.prove(facts(), &challenge, [8; 32]).unwrap();
    let good = client.answer(facts(), None, &challenge, &answer).unwrap();
    for at in 0..good.len() * 8 {
        let mut bytes = good.clone();
        bytes[at / 8] ^= 1 << (at % 8);
        server.check(&exchange, &bytes).expect_err("a flipped bit");
    }
    let good = answer.encode();
    for at in 0..good.len() * 8 {
        let mut bytes = good.clone();
        bytes[at / 8] ^= 1 << (at % 8);
        // Reserved bytes have no meaning.
        if let Ok(answer) = ChallengeRsp::decode(&bytes).as_ref()
            && !(4..8).contains(&(at / 8))
        {
            client.answer(facts(), None, &challenge, answer).expect_err("a flipped bit");
        }
    }
}
