//! Mutual authentication of client and server on paths without TLS.
//!
//! The control shard does this inline: it creates one signature and verifies one per connection
//! attempt (docs/explanation/security-model.md gives the cost). The engine generates no random
//! numbers itself; [`Nonces`] provides them.

use std::fmt;
use std::sync::Arc;

use rtrs_core::tls::{ProofError, ProofFacts, TlsClientConfig};
use rtrs_core::wire::{Challenge, ChallengeRsp, errno, errno_name};

/// Source of nonces.
pub trait Nonces: fmt::Debug + Send + Sync {
    /// Returns bytes that have never been used before.
    ///
    /// # Errors
    /// The system cannot provide random numbers.
    fn next(&self) -> Result<[u8; 32], ProofError>;
}

/// The system's random numbers.
#[derive(Clone, Copy, Debug)]
struct SystemNonces;

impl Nonces for SystemNonces {
    fn next(&self) -> Result<[u8; 32], ProofError> {
        rtrs_core::tls::nonce()
    }
}

/// A client's certificates or keys, for paths without TLS.
#[derive(Clone, Debug)]
pub struct Prover {
    config: Arc<TlsClientConfig>,
    nonces: Arc<dyn Nonces>,
}

impl Prover {
    /// Creates a prover with these certificates or keys and this source of nonces.
    pub fn new(config: TlsClientConfig, nonces: Arc<dyn Nonces>) -> Self {
        Self { config: Arc::new(config), nonces }
    }

    /// Creates a prover that uses the system's random numbers.
    pub(crate) fn of_system(config: TlsClientConfig) -> Self {
        Self::new(config, Arc::new(SystemNonces))
    }

    /// Returns a challenge for a server.
    pub(crate) fn challenge(&self) -> Result<Challenge, AuthError> {
        let nonce = self.nonces.next().map_err(AuthError::NoNonce)?;
        Ok(self.config.challenge(nonce))
    }

    /// Returns the answer to a server that has proved to be the intended one.
    pub(crate) fn answer(
        &self,
        facts: ProofFacts,
        peer_name: Option<&str>,
        challenge: &Challenge,
        answer: &ChallengeRsp,
    ) -> Result<Vec<u8>, AuthError> {
        let proof = self.config.answer(facts, peer_name, challenge, answer);
        proof.map_err(AuthError::Impostor)
    }
}

/// Reason why client and server cannot authenticate each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AuthError {
    /// The server requires a proof that this client cannot give.
    #[error(
        "the server requires this client to authenticate: set key-file and server-key, or tls-dir"
    )]
    NoKeys,
    /// The server offers no proof to a client that requires one.
    #[error(
        "the server does not prove its identity: it has no certificates or keys, is too old for \
         proofs over this transport, or is a kernel server; to trust it without proof, unset \
         key-file and tls-dir"
    )]
    NoProof,
    /// No nonce can be generated for the challenge.
    #[error("{0}")]
    NoNonce(ProofError),
    /// The client's address, which is part of its proof, is unknown.
    #[error("cannot determine which local address is used")]
    NoLocalAddress,
    /// The server is not the intended one.
    #[error("the server is not the intended one: {0}")]
    Impostor(ProofError),
    /// The server refused this client. `asked` means that the client was waiting for the server's
    /// proof.
    #[error("{}", describe_refusal(*.errno, *.asked))]
    Refused { errno: u16, asked: bool },
}

fn describe_refusal(errno: u16, asked: bool) -> String {
    match errno {
        errno::EACCES if asked => "the server does not prove its identity; see its log".to_owned(),
        errno::EACCES => {
            "the server does not accept this client: the client's key or certificate is unknown to \
             it, or no access list names the client; see the server's log"
                .to_owned()
        }
        errno::EBUSY => "the server is busy authenticating other clients".to_owned(),
        errno => format!("the server did not authenticate: {}", errno_name(errno)),
    }
}
