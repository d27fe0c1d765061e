//! Authentication of clients of a running server: threads of the TLS endpoint compute the proofs
//! with the certificates or keys currently in use.

use std::sync::Arc;

use rtrs_core::rt::Sender;
use rtrs_core::tls::{TlsEndpoint, nonce};

use crate::engine::authenticator::{Authenticator, ProofDone, ProofTask};
use crate::engine::message::{ControlMessage, Message};

/// Passes tasks to threads, and their results to the control shard.
#[derive(Debug)]
pub(super) struct Proofs {
    endpoint: Arc<TlsEndpoint>,
    control: Sender<Message>,
}

impl Proofs {
    /// Creates the authenticator for the control shard of this mailbox.
    pub(super) fn new(endpoint: Arc<TlsEndpoint>, control: Sender<Message>) -> Arc<Self> {
        Arc::new(Self { endpoint, control })
    }
}

impl Authenticator for Proofs {
    fn begin(&self, task: ProofTask) -> bool {
        let control = self.control.clone();
        self.endpoint.compute(move |config| {
            if !task.is_wanted() {
                return;
            }
            let reply_to = task.reply_to;
            let done = match nonce() {
                Ok(nonce) => task.run(config, nonce),
                Err(error) => ProofDone { reply_to, result: Err(error) },
            };
            control.send(Message::Control(ControlMessage::Proof(Box::new(done))));
        })
    }
}
