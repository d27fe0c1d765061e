//! Proofs of identity for paths without TLS: the data that each end signs, and its verification.
//!
//! Both ends sign the same facts about the path and both nonces, each with its own context string
//! and its TLS key. This module is independent of connections: it takes and returns messages. The
//! server proves its identity first, so that a client connected to the wrong server reveals only
//! the hash of its credential.
//!
//! The signed data begins as in TLS 1.3 (RFC 8446 section 4.4.3): 64 spaces, a unique context
//! string and a zero byte. So a signature made for one purpose is invalid for any other, including
//! TLS 1.2, where a peer chooses the first bytes. All subsequent fields have a fixed length.

use std::net::IpAddr;
use std::sync::Arc;

use ring::rand::{SecureRandom, SystemRandom};
use rustls::SignatureScheme;
use rustls::pki_types::{CertificateDer, SubjectPublicKeyInfoDer, UnixTime};
use webpki::{EndEntityCert, RawPublicKeyEntity};

use super::config::{TlsClientConfig, TlsServerConfig, provider};
use super::credential::{OwnCredential, SCHEMES, hash};
use super::explain::NO_NAME;
use crate::fabric::peer::{PeerIdentity, Proof, ProofError};
use crate::ids::{PathUuid, SessionId};
use crate::wire::{AUTH_VERSION, Challenge, ChallengeRsp, CredentialKind, SignedProof, VERSION};

/// Context strings of a client and of a server.
const CLIENT: &str = "RTRS path authentication, client";
const SERVER: &str = "RTRS path authentication, server";

fn refuse<T>(why: &'static str) -> Result<T, ProofError> {
    Err(ProofError::from(why))
}

/// Facts that identify a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProofFacts {
    /// ID of the session.
    pub session: SessionId,
    /// UUID of the path.
    pub path: PathUuid,
    /// Address of the client.
    pub client: IpAddr,
    /// Address of the server.
    pub server: IpAddr,
}

/// An exchange that a server has begun: everything that both ends sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    facts: ProofFacts,
    client_nonce: [u8; 32],
    server_nonce: [u8; 32],
    client_credential: [u8; 32],
    server_credential: [u8; 32],
}

impl Exchange {
    /// Returns the data signed by the end with this context string.
    fn message(&self, words: &str) -> Vec<u8> {
        let address = |ip: IpAddr| match ip.to_canonical() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        let mut message = vec![b' '; 64];
        message.extend(words.as_bytes());
        message.push(0);
        message.extend(VERSION.to_be_bytes());
        message.extend(AUTH_VERSION.to_be_bytes());
        message.extend(self.client_nonce);
        message.extend(self.server_nonce);
        message.extend(self.facts.session.0);
        message.extend(self.facts.path.0);
        message.extend(address(self.facts.client));
        message.extend(address(self.facts.server));
        message.extend(self.client_credential);
        message.extend(self.server_credential);
        message
    }
}

/// Returns random bytes from the system.
///
/// # Errors
/// Returns an error if the system cannot provide any.
pub fn nonce() -> Result<[u8; 32], ProofError> {
    let mut nonce = [0; 32];
    let filled = SystemRandom::new().fill(&mut nonce);
    filled.map_err(|_| ProofError::from("the system has no random numbers"))?;
    Ok(nonce)
}

/// Returns the certificates, or the key, of a proof, which must be of the same kind as this end's.
fn chain(
    proof: &SignedProof,
    own: &OwnCredential,
) -> Result<Vec<CertificateDer<'static>>, ProofError> {
    match (proof.credential.kind, own.kind()) {
        (CredentialKind::RawKey, CredentialKind::Certificates) => {
            return refuse(
                "the peer uses a key, but this end uses certificates: there is no kind of \
                 certificate in common",
            );
        }
        (CredentialKind::Certificates, CredentialKind::RawKey) => {
            return refuse(
                "the peer uses certificates, but this end uses a key: there is no kind of \
                 certificate in common",
            );
        }
        _ => {}
    }
    Ok(proof.credential.chain.iter().cloned().map(CertificateDer::from).collect())
}

/// Checks that the owner of the first certificate, or of the key, has signed `message`.
fn check_signature(
    proof: &SignedProof,
    first: &CertificateDer<'_>,
    message: &[u8],
) -> Result<(), ProofError> {
    let scheme = SignatureScheme::from(proof.scheme);
    let provider = provider();
    let known = provider.signature_verification_algorithms.mapping.iter();
    let mut known = known.filter(|(known, _)| SCHEMES.contains(known) && *known == scheme);
    // As in TLS 1.3, a scheme determines the curve.
    let Some(algorithm) = known.next().and_then(|(_, algorithms)| algorithms.first()) else {
        let kind = "the peer used an unknown signature scheme";
        return Err(ProofError::new(kind, format!("{kind} ({scheme:?})")));
    };
    let verified = match proof.credential.kind {
        CredentialKind::RawKey => {
            let key = SubjectPublicKeyInfoDer::from(first.as_ref());
            RawPublicKeyEntity::try_from(&key)
                .and_then(|key| key.verify_signature(*algorithm, message, &proof.signature))
        }
        CredentialKind::Certificates => EndEntityCert::try_from(first)
            .and_then(|owner| owner.verify_signature(*algorithm, message, &proof.signature)),
    };
    verified.map_err(|_| ProofError::from("the peer's signature is not valid for this path"))
}

impl TlsServerConfig {
    /// Answers a challenge with this nonce: returns the message for the client, and the exchange
    /// that the client must sign. Takes a fraction of a millisecond.
    ///
    /// # Errors
    /// Returns an error for a different version, or for a key that cannot sign.
    pub fn prove(
        &self,
        facts: ProofFacts,
        challenge: &Challenge,
        nonce: [u8; 32],
    ) -> Result<(ChallengeRsp, Exchange), ProofError> {
        if challenge.version != AUTH_VERSION {
            let text = format!("the client speaks version {}", challenge.version);
            return Err(ProofError::new("the client speaks another version", text));
        }
        let exchange = Exchange {
            facts,
            client_nonce: challenge.nonce,
            server_nonce: nonce,
            client_credential: challenge.credential,
            server_credential: self.own.hash(),
        };
        let proof = self.own.sign(&exchange.message(SERVER))?;
        Ok((ChallengeRsp { version: AUTH_VERSION, nonce, proof }, exchange))
    }

    /// Checks the data of an AUTH message and returns the identity of the client. Takes a fraction
    /// of a millisecond.
    ///
    /// # Errors
    /// Returns the reason why the proof is invalid.
    pub fn check(&self, exchange: &Exchange, data: &[u8]) -> Result<PeerIdentity, ProofError> {
        let proof = SignedProof::decode(data);
        let proof =
            proof.map_err(|error| ProofError::new("no proof was sent", error.to_string()))?;
        if hash(&proof.credential) != exchange.client_credential {
            return refuse("the client presented a key other than the announced one");
        }
        let chain = chain(&proof, &self.own)?;
        let Some((first, others)) = chain.split_first() else {
            return refuse("no credential was presented");
        };
        self.verifier.verify_client_cert(first, others, UnixTime::now())?;
        check_signature(&proof, first, &exchange.message(CLIENT))?;
        let Some(who) = self.who(&chain) else {
            return refuse(NO_NAME);
        };
        let proof = Some(Arc::new(Proof { chain, generation: self.generation }));
        Ok(PeerIdentity { who, proof, cipher: None })
    }
}

impl TlsClientConfig {
    /// Creates the challenge with this nonce.
    #[must_use]
    pub fn challenge(&self, nonce: [u8; 32]) -> Challenge {
        Challenge { version: AUTH_VERSION, nonce, credential: self.own.hash() }
    }

    /// Checks the answer to a challenge, which must come from the intended server. Returns the data
    /// of the AUTH message. Takes a fraction of a millisecond.
    ///
    /// # Errors
    /// Returns the reason why the answer is not from that server.
    pub fn answer(
        &self,
        facts: ProofFacts,
        peer_name: Option<&str>,
        challenge: &Challenge,
        answer: &ChallengeRsp,
    ) -> Result<Vec<u8>, ProofError> {
        if answer.version != AUTH_VERSION {
            let text = format!("the server speaks version {}", answer.version);
            return Err(ProofError::new("the server speaks another version", text));
        }
        let chain = chain(&answer.proof, &self.own)?;
        let Some((first, others)) = chain.split_first() else {
            return refuse("no credential was presented");
        };
        let name = self.server_name(facts.server, peer_name);
        self.verifier.verify_server_cert(first, others, &name, &[], UnixTime::now())?;
        let exchange = Exchange {
            facts,
            client_nonce: challenge.nonce,
            server_nonce: answer.nonce,
            client_credential: challenge.credential,
            server_credential: hash(&answer.proof.credential),
        };
        check_signature(&answer.proof, first, &exchange.message(SERVER))?;
        Ok(self.own.sign(&exchange.message(CLIENT))?.encode())
    }
}

#[cfg(test)]
#[path = "tests/proof.rs"]
mod tests;
