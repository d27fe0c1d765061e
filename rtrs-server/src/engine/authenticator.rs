//! What the control shard leaves to others of the proofs of clients: signatures take too long for a
//! shard, and an engine has no random numbers.
//!
//! [`Authenticator`] is the daemon's, or a test's. It gets a [`ProofTask`] and some time later
//! leaves what [`ProofTask::run`] returns with the control shard.

use std::fmt;
use std::sync::Weak;

use rtrs_core::tls::{Exchange, ProofFacts, TlsServerConfig};
use rtrs_core::wire::Challenge;

use rtrs_core::fabric::{PeerIdentity, ProofError};

use crate::engine::reply_to::ReplyTo;

/// Signs, and checks signatures. It must not wait: the control shard calls it.
pub trait Authenticator: fmt::Debug + Send + Sync {
    /// Begins a task. False when there is too much to do; then nothing comes of it.
    fn begin(&self, task: ProofTask) -> bool;
}

/// What is to be computed for a path.
#[derive(Debug)]
pub struct ProofTask {
    /// Where the answer to the client goes.
    pub reply_to: ReplyTo,
    /// Gone when the path ends.
    pub wanted: Weak<()>,
    /// What.
    pub work: ProofWork,
}

/// What is to be computed.
#[derive(Debug)]
pub enum ProofWork {
    /// A client asks who this server is.
    Prove {
        /// What the server knows of the path.
        facts: ProofFacts,
        /// What the client sent.
        challenge: Challenge,
        /// Room for the answer.
        room: u32,
    },
    /// A client says who it is.
    Check {
        /// What it has to have signed.
        exchange: Exchange,
        /// What it sent.
        data: Box<[u8]>,
    },
}

/// What came of a task.
#[derive(Debug)]
pub struct ProofDone {
    /// Where the answer to the client goes.
    pub reply_to: ReplyTo,
    /// How it went. The error is for the operator.
    pub result: Result<ProofResult, ProofError>,
}

/// What was computed.
#[derive(Debug)]
pub enum ProofResult {
    /// The answer to a challenge, and what the client has to sign.
    Proved(Box<[u8]>, Exchange),
    /// Who the client is.
    Checked(PeerIdentity),
}

impl ProofTask {
    /// False when its path has ended meanwhile, and nothing is to be done.
    pub fn is_wanted(&self) -> bool {
        self.wanted.strong_count() > 0
    }

    /// Does it, with this configuration and nonce.
    pub fn run(self, config: &TlsServerConfig, nonce: [u8; 32]) -> ProofDone {
        let Self { reply_to, work, .. } = self;
        let result = match work {
            ProofWork::Prove { facts, challenge, room } => {
                prove(config, (facts, &challenge, room), nonce)
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
    (facts, challenge, room): (ProofFacts, &Challenge, u32),
    nonce: [u8; 32],
) -> Result<ProofResult, ProofError> {
    let (answer, exchange) = config.prove(facts, challenge, nonce)?;
    let answer = answer.encode().into_boxed_slice();
    if answer.len() > room as usize {
        let len = answer.len();
        let text = format!("our certificates need {len} bytes, and the client has room for {room}");
        return Err(ProofError::new("the client has no room for our certificates", text));
    }
    Ok(ProofResult::Proved(answer, exchange))
}
