//! Body of the fuzz target `auth`: proofs on paths without TLS.
//!
//! The first byte of the input selects the kind: the rest is either sent by an end without a key,
//! or is a list of changes to the messages of two conforming ends. The target fails on a panic, or
//! if an end accepts a wrong identity from its peer.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

use super::config::{TlsClientConfig, TlsServerConfig};
use super::keys::{Clients, PrivateKey};
use super::proof::ProofFacts;
use crate::fabric::Who;
use crate::ids::{PathUuid, SessionId};
use crate::wire::{Challenge, ChallengeRsp};

fn configs() -> &'static (TlsClientConfig, TlsServerConfig) {
    static CONFIGS: OnceLock<(TlsClientConfig, TlsServerConfig)> = OnceLock::new();
    CONFIGS.get_or_init(|| {
        // Keys are constant, so that a corpus stays valid.
        let key = |seed| PrivateKey::from_seed([seed; 32]).expect("a key");
        let (client, server) = (key(1), key(2));
        let mut clients = Clients::default();
        clients.add("db1", client.public());
        let known = TlsClientConfig::with_keys(&client, &[server.public()]).expect("a key");
        (known, TlsServerConfig::with_keys(&server, clients).expect("a key"))
    })
}

fn facts() -> ProofFacts {
    ProofFacts {
        session: SessionId([1; 16]),
        path: PathUuid([2; 16]),
        client: IpAddr::from([10, 0, 0, 1]),
        server: IpAddr::from([10, 0, 0, 2]),
    }
}

/// Applies changes of four bytes each: the message, the offset in it (two bytes), and the bits to
/// flip. Returns true if a significant byte was changed.
fn change(data: &[u8], message: u8, bytes: &mut [u8]) -> bool {
    let before = bytes.to_vec();
    for change in data.chunks_exact(4) {
        let at = usize::from(u16::from_be_bytes([change[1], change[2]]));
        if change[0] % 3 == message && at < bytes.len() {
            bytes[at] ^= change[3];
        }
    }
    // These are the reserved bytes of CHALLENGE and CHALLENGE_RSP.
    let means = |at: usize| message == 2 || !(4..8).contains(&at);
    bytes.iter().zip(&before).enumerate().any(|(at, (now, was))| now != was && means(at))
}

/// Runs the proofs for an input.
///
/// # Panics
/// Panics if an end misbehaves.
#[doc(hidden)]
pub fn fuzz_auth(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    let (client, server) = configs();
    let challenge = client.challenge([7; 32]);
    match kind % 3 {
        0 => {
            let (_, exchange) = server.prove(facts(), &challenge, [8; 32]).expect("a good one");
            assert!(server.check(&exchange, rest).is_err(), "an unknown client is accepted");
        }
        1 => {
            let Ok(answer) = ChallengeRsp::decode(rest) else { return };
            let proof = client.answer(facts(), None, &challenge, &answer);
            assert!(proof.is_err(), "an unknown peer is accepted as the server");
        }
        _ => changed(rest),
    }
}

/// Runs both ends, with changes in transit.
fn changed(data: &[u8]) {
    let (client, server) = configs();
    let challenge = client.challenge([7; 32]);
    let mut bytes = challenge.encode();
    let mut any = change(data, 0, &mut bytes);
    let Ok(asked) = Challenge::decode(&bytes) else { return };
    let Ok((answer, exchange)) = server.prove(facts(), &asked, [8; 32]) else { return };
    let mut bytes = answer.encode();
    any |= change(data, 1, &mut bytes);
    let Ok(answer) = ChallengeRsp::decode(&bytes) else { return };
    let Ok(mut proof) = client.answer(facts(), None, &challenge, &answer) else { return };
    assert!(!any, "the client accepts changed messages");
    any |= change(data, 2, &mut proof);
    match server.check(&exchange, &proof) {
        Ok(peer) => {
            assert!(!any, "the server accepts changed messages");
            assert_eq!(peer.who, Who::Key(Arc::from("db1")));
        }
        Err(error) => assert!(any, "unchanged messages are refused: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_corpus_replays() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/auth");
        let mut seen = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let bytes = std::fs::read(entry.unwrap().path()).unwrap();
            (0..=bytes.len()).for_each(|cut| fuzz_auth(&bytes[..cut]));
            seen += 1;
        }
        assert!(seen >= 4, "the corpus is missing");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

        #[test]
        fn random_programs_hold_invariants(data in proptest::collection::vec(any::<u8>(), 0..300)) {
            fuzz_auth(&data);
        }
    }
}
