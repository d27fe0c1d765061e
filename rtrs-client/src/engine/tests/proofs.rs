//! Tests of missing proofs: a client does not use a path if either end requires a proof that is
//! missing. Proofs themselves are tested in `tests/sim/proofs.rs`, with the real server.

use std::sync::Arc;

use rtrs_core::tls::{PrivateKey, ProofError, TlsClientConfig};
use rtrs_core::wire::{ClientExtensions, ConnRsp, Extensions};

use super::fixture::{Fixture, SEC, Setup};
use super::server::Seen;
use crate::engine::prover::{Nonces, Prover};

#[derive(Debug)]
struct Zeroes;

impl Nonces for Zeroes {
    fn next(&self) -> Result<[u8; 32], ProofError> {
        Ok([0; 32])
    }
}

fn prover() -> Prover {
    let key = |seed| PrivateKey::from_seed([seed; 32]).unwrap();
    let config = TlsClientConfig::with_keys(&key(1), &[key(2).public()]).unwrap();
    Prover::new(config, Arc::new(Zeroes))
}

/// Makes the server require a proof.
fn demanding(setup: &mut Setup) {
    setup.how.con_rsp = Some(Box::new(|_, rsp| {
        let says = Extensions { authenticate: true, ..Extensions::decode(&rsp.ext) };
        ConnRsp { ext: says.encode(), ..rsp }.encode().to_vec()
    }));
}

fn refused(change: impl FnOnce(&mut Setup), words: &str, proves: bool) {
    let mut fixture = Fixture::new(change);
    fixture.run(SEC / 2);
    let why = fixture.client.last_error(0);
    assert!(why.contains(words), "{why}");
    let asked = fixture.server.seen.iter().filter_map(|seen| match seen {
        Seen::Connect { req, .. } => Some(ClientExtensions::decode(&req.ext).authenticates),
        _ => None,
    });
    let asked: Vec<bool> = asked.collect();
    assert!(!asked.is_empty() && asked.iter().all(|asked| *asked == proves), "{asked:?}");
    assert_eq!((fixture.server.opens, fixture.server.requests().count()), (0, 0));
}

#[test]
fn a_client_without_keys_does_not_use_a_server_that_requires_a_proof() {
    refused(demanding, "set key-file and server-key, or tls-dir", false);
}

#[test]
fn a_client_with_keys_does_not_use_a_server_that_proves_nothing() {
    let has_keys = |setup: &mut Setup| setup.config.prover = Some(prover());
    refused(has_keys, "the server does not prove its identity", true);
}
