//! Answers of the fuzz target's server: OPEN_RSP, and its proofs to a client that requires them.

use std::sync::{Arc, OnceLock};

use rtrs_core::identity::EvictionSecret;
use rtrs_core::tls::{
    Clients, Exchange, PrivateKey, ProofError, ProofFacts, TlsClientConfig, TlsServerConfig,
};
use rtrs_core::wire::{Challenge, OpenRsp, OpenRspTail};

use super::{MAX_IO, SECTORS};
use crate::engine::{Nonces, Prover};

/// Builds a long OPEN_RSP; a client that expects the short one reads less.
pub(super) fn open_rsp(device_id: u32) -> Vec<u8> {
    let rsp = OpenRsp {
        device_id,
        nsectors: SECTORS,
        max_hw_sectors: MAX_IO / 512,
        max_write_zeroes_sectors: 1 << 10,
        max_discard_sectors: 1 << 10,
        discard_granularity: 512,
        physical_block_size: 4096,
        logical_block_size: 512,
        max_segments: 128,
        fua: true,
        write_cache: true,
        cache_id: 1,
        ..OpenRsp::default()
    };
    let secret = EvictionSecret([3; 16]);
    OpenRspTail { export: None, secret, standing: None }.encode(&rsp).to_vec()
}

/// Whether both ends authenticate in a program with this setup.
pub(super) const fn proves(setup: u8) -> bool {
    setup & 0xa0 == 0x20
}

fn key(seed: u8) -> PrivateKey {
    PrivateKey::from_seed([seed; 32]).expect("a key")
}

#[derive(Debug)]
struct Sevens;

impl Nonces for Sevens {
    fn next(&self) -> Result<[u8; 32], ProofError> {
        Ok([7; 32])
    }
}

/// Returns the client's keys.
pub(super) fn prover() -> Prover {
    static CONFIG: OnceLock<TlsClientConfig> = OnceLock::new();
    let config = CONFIG
        .get_or_init(|| TlsClientConfig::with_keys(&key(1), &[key(2).public()]).expect("a key"));
    Prover::new(config.clone(), Arc::new(Sevens))
}

fn config() -> &'static TlsServerConfig {
    static CONFIG: OnceLock<TlsServerConfig> = OnceLock::new();
    CONFIG.get_or_init(|| {
        let mut clients = Clients::default();
        clients.add("db1", key(1).public());
        TlsServerConfig::with_keys(&key(2), clients).expect("a key")
    })
}

/// Server's state of an outstanding client proof.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    exchange: Exchange,
    /// Whether the server's own proof was spoiled.
    spoiled: bool,
}

/// Builds the server's proof, with some bits of a byte flipped if `spoil` is not 0.
pub(super) fn challenge_rsp(
    facts: ProofFacts,
    challenge: &Challenge,
    spoil: u8,
) -> Option<(Vec<u8>, Asked)> {
    let (answer, exchange) = config().prove(facts, challenge, [8; 32]).ok()?;
    let mut bytes = answer.encode();
    if spoil > 0 {
        // After the reserved bytes.
        let at = 8 + usize::from(spoil) * 17 % (bytes.len() - 8);
        bytes[at] ^= spoil;
    }
    Some((bytes, Asked { exchange, spoiled: spoil > 0 }))
}

/// Panics if the client accepts a spoiled proof, or provides none itself.
pub(super) fn check_auth(asked: &Asked, proof: &[u8]) {
    assert!(!asked.spoiled, "the client trusts a server that has proved nothing");
    config().check(&asked.exchange, proof).expect("a good proof of the client");
}
