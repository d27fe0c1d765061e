//! With what paths without TLS prove who this client is, and learn who the server is.
//!
//! The proof is made on the control shard, inline: a signature made and one checked, once for each
//! attempt of a path (docs/SECURITY.md says what that takes). The engine has no random numbers;
//! [`Nonces`] is where they come from.

use std::fmt;
use std::sync::Arc;

use rtrs_core::tls::{ProofFacts, TlsClientConfig};
use rtrs_core::wire::{Challenge, ChallengeRsp};

/// Where nonces come from.
pub trait Nonces: fmt::Debug + Send + Sync {
    /// Bytes that were never used before.
    ///
    /// # Errors
    /// There are none.
    fn next(&self) -> Result<[u8; 32], String>;
}

/// The system's random numbers.
#[derive(Clone, Copy, Debug)]
struct SystemNonces;

impl Nonces for SystemNonces {
    fn next(&self) -> Result<[u8; 32], String> {
        rtrs_core::tls::nonce().map_err(|error| error.to_string())
    }
}

/// The certificates or keys of a client, for paths without TLS.
#[derive(Clone, Debug)]
pub struct Prover {
    config: Arc<TlsClientConfig>,
    nonces: Arc<dyn Nonces>,
}

impl Prover {
    /// With these.
    pub fn new(config: TlsClientConfig, nonces: Arc<dyn Nonces>) -> Self {
        Self { config: Arc::new(config), nonces }
    }

    /// With these, and the system's random numbers.
    pub(crate) fn of_system(config: TlsClientConfig) -> Self {
        Self::new(config, Arc::new(SystemNonces))
    }

    /// What to ask a server. The error says why nothing can be asked.
    pub(crate) fn challenge(&self) -> Result<Challenge, String> {
        Ok(self.config.challenge(self.nonces.next()?))
    }

    /// What to answer a server that has proved to be the one which is meant. The error says why it
    /// has not.
    pub(crate) fn answer(
        &self,
        (facts, peer_name): (ProofFacts, Option<&str>),
        challenge: &Challenge,
        answer: &ChallengeRsp,
    ) -> Result<Vec<u8>, String> {
        let proof = self.config.answer((facts, peer_name), challenge, answer);
        proof.map_err(|error| error.to_string())
    }
}

/// Why a path ends whose server wants a proof that this client cannot give.
pub(crate) const NO_KEYS: &str = "the server wants this client to prove who it is: set key-file \
                                  and server-key, or tls-dir";
/// Why a path ends whose server proves nothing to a client that wants to know.
pub(crate) const NO_PROOF: &str = concat!(
    "the server does not prove who it is: it has no certificates or keys, is too old for that ",
    "over this transport, or is a kernel's; leave key-file or tls-dir out to trust it",
);

/// What a server has against this client: one that was asked who it is, or has proved that.
pub(crate) fn describe_refusal(errno: u16, asked: bool) -> String {
    use rtrs_core::wire::errno::{EACCES, EBUSY};
    match errno {
        EACCES if asked => "the server does not prove who it is; its log says why".to_owned(),
        EACCES => "the server does not accept this client: its key or certificate is not known \
                   there, or no access list names it; the server's log says why"
            .to_owned(),
        EBUSY => "the server has too many proofs of other clients to check".to_owned(),
        errno => {
            format!("the server did not authenticate: {}", rtrs_core::wire::errno_name(errno))
        }
    }
}

/// What a client has against the server that answers.
pub(crate) fn describe_impostor(why: &str) -> String {
    format!("the server is not the one that is meant: {why}")
}
