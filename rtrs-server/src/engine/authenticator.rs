//! Client authentication work outside the control shard: signatures take too long for a shard, and
//! the engine has no source of random numbers.
//!
//! The daemon, or a test, implements [`Authenticator`]. It receives a [`ProofTask`] and later sends
//! the result of [`ProofTask::run`] to the control shard.

use std::fmt;
use std::sync::Weak;

use rtrs_core::tls::{Exchange, ProofFacts, TlsServerConfig};
use rtrs_core::wire::Challenge;

use rtrs_core::fabric::{PeerIdentity, ProofError};

use crate::engine::reply_to::ReplyTo;

/// Creates and verifies signatures. Must not block, because the control shard calls it.
pub trait Authenticator: fmt::Debug + Send + Sync {
    /// Begins a task. Returns false if too many tasks are pending; the task is then dropped.
    fn begin(&self, task: ProofTask) -> bool;
}

/// A computation for a path.
#[derive(Debug)]
pub struct ProofTask {
    /// Destination of the answer to the client.
    pub reply_to: ReplyTo,
    /// Expires when the path ends.
    pub wanted: Weak<()>,
    /// Computation to perform.
    pub work: ProofWork,
}

/// The computation of a [`ProofTask`].
#[derive(Debug)]
pub enum ProofWork {
    /// Proves the server's identity to a client.
    Prove {
        /// Facts that the server knows about the path.
        facts: ProofFacts,
        /// Challenge from the client.
        challenge: Challenge,
        /// Space for the answer, in bytes.
        room: u32,
    },
    /// Verifies a client's proof of its identity.
    Check {
        /// Exchange that the client should have signed.
        exchange: Exchange,
        /// Proof from the client.
        data: Box<[u8]>,
    },
}

/// Result of a [`ProofTask`].
#[derive(Debug)]
pub struct ProofDone {
    /// Destination of the answer to the client.
    pub reply_to: ReplyTo,
    /// Outcome of the computation. The error is for the operator.
    pub result: Result<ProofResult, ProofError>,
}

/// Outcome of a successful computation.
#[derive(Debug)]
pub enum ProofResult {
    /// Answer to the challenge, and the exchange that the client must sign.
    Proved(Box<[u8]>, Exchange),
    /// Identity of the client.
    Checked(PeerIdentity),
}

impl ProofTask {
    /// Whether the task's path still exists.
    pub fn is_wanted(&self) -> bool {
        self.wanted.strong_count() > 0
    }

    /// Runs the task with this configuration and nonce.
    pub fn run(self, config: &TlsServerConfig, nonce: [u8; 32]) -> ProofDone {
        let Self { reply_to, work, .. } = self;
        let result = match work {
            ProofWork::Prove { facts, challenge, room } => {
                prove(config, facts, &challenge, room, nonce)
            }
            ProofWork::Check { exchange, data } => {
                config.check(&exchange, &data).map(ProofResult::Checked)
            }
        };
        ProofDone { reply_to, result }
    }
}

fn prove(
    config: &TlsServerConfig,
    facts: ProofFacts,
    challenge: &Challenge,
    room: u32,
    nonce: [u8; 32],
) -> Result<ProofResult, ProofError> {
    let (answer, exchange) = config.prove(facts, challenge, nonce)?;
    let answer = answer.encode().into_boxed_slice();
    if answer.len() > room as usize {
        let len = answer.len();
        let text = format!(
            "the server's certificates need {len} bytes, but the client has room for {room}"
        );
        return Err(ProofError::new("the client has no room for the server's certificates", text));
    }
    Ok(ProofResult::Proved(answer, exchange))
}
