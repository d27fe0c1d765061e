//! Mutual authentication of client and server on paths without TLS.
//!
//! The control shard makes the proof inline: it makes one signature and checks one for each attempt
//! of a path (docs/explanation/security-model.md gives the cost). The engine has no random numbers
//! of its own; [`Nonces`] provides them.

use std::fmt;
use std::sync::Arc;

use rtrs_core::tls::{ProofFacts, TlsClientConfig};
use rtrs_core::wire::{Challenge, ChallengeRsp};

/// Source of nonces.
pub trait Nonces: fmt::Debug + Send + Sync {
    /// Returns bytes that were never used before.
    ///
    /// # Errors
    /// Fails when the system has no random numbers.
    fn next(&self) -> Result<[u8; 32], String>;
}

/// Random numbers of the system.
#[derive(Clone, Copy, Debug)]
struct SystemNonces;

impl Nonces for SystemNonces {
    fn next(&self) -> Result<[u8; 32], String> {
        rtrs_core::tls::nonce().map_err(|error| error.to_string())
    }
}

/// Certificates or keys of a client, for paths without TLS.
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

    /// Returns the challenge for a server. The error says why there is none.
    pub(crate) fn challenge(&self) -> Result<Challenge, String> {
        Ok(self.config.challenge(self.nonces.next()?))
    }

    /// Returns the answer to a server that has proved to be the intended one. The error says why it
    /// has not.
    pub(crate) fn answer(
        &self,
        facts: ProofFacts,
        peer_name: Option<&str>,
        challenge: &Challenge,
        answer: &ChallengeRsp,
    ) -> Result<Vec<u8>, String> {
        let proof = self.config.answer(facts, peer_name, challenge, answer);
        proof.map_err(|error| error.to_string())
    }
}

/// Reason for the end of a path whose server requires a proof that this client cannot give.
pub(crate) const NO_KEYS: &str = "the server requires this client to authenticate: set key-file \
                                  and server-key, or tls-dir";
/// Reason for the end of a path whose server gives no proof to a client that requires one.
pub(crate) const NO_PROOF: &str = concat!(
    "the server does not prove its identity: it has no certificates or keys, is too old for that ",
    "over this transport, or is a kernel server; to trust it without proof, unset key-file and ",
    "tls-dir",
);

/// Describes a server's refusal of this client. `asked` says that the client was waiting for the
/// server's proof.
pub(crate) fn describe_refusal(errno: u16, asked: bool) -> String {
    use rtrs_core::wire::errno::{EACCES, EBUSY};
    match errno {
        EACCES if asked => "the server does not prove its identity; its log says why".to_owned(),
        EACCES => "the server does not accept this client: its key or certificate is not known \
                   there, or no access list names it; the server's log says why"
            .to_owned(),
        EBUSY => "the server is busy authenticating other clients".to_owned(),
        errno => {
            format!("the server did not authenticate: {}", rtrs_core::wire::errno_name(errno))
        }
    }
}

/// Describes a server that is not the intended one.
pub(crate) fn describe_impostor(why: &str) -> String {
    format!("the server is not the intended one: {why}")
}
