//! CHALLENGE and AUTH: requests of a client that authenticates over a path. `authenticate.rs`
//! processes the results.

use std::sync::Arc;

use rtrs_core::fabric::ProofError;
use rtrs_core::tls::ProofFacts;
use rtrs_core::wire::{AUTH_VERSION, Challenge, errno};

use super::registry::Registry;
use crate::engine::authenticator::{Authenticator, ProofTask, ProofWork};
use crate::engine::message::{ControlAnswer, ReplyTo};

/// Answer to every failed proof, without a reason.
pub(super) const NOT_PROVED: Option<ControlAnswer> = Some(ControlAnswer::Refused(errno::EACCES));

/// Proofs of the server and of its clients, which the [`Authenticator`] creates and verifies.
#[derive(Debug, Default)]
pub(super) struct Proofs {
    /// Set if clients can authenticate.
    authenticator: Option<Arc<dyn Authenticator>>,
}

impl Proofs {
    pub(super) fn set_authenticator(&mut self, authenticator: Arc<dyn Authenticator>) {
        self.authenticator = Some(authenticator);
    }

    /// Whether clients can authenticate.
    pub(super) fn are_possible(&self) -> bool {
        self.authenticator.is_some()
    }

    /// Processes CHALLENGE: a client asks for the server's proof before it sends its own. Returns
    /// `None` if the answer comes later.
    pub(super) fn challenge(
        &self,
        reply_to: ReplyTo,
        challenge: Challenge,
        room: u32,
        registry: &mut Registry,
    ) -> Option<ControlAnswer> {
        let path = registry.path_mut(reply_to.path)?;
        let origin = &path.shared().origin;
        let facts = ProofFacts {
            session: path.shared().session.id,
            path: origin.uuid,
            client: origin.peer.ip(),
            server: origin.local.ip(),
        };
        let Some(proving) = path.proving_mut() else {
            return Some(ControlAnswer::Refused(errno::EINVAL));
        };
        if !proving.challenge() {
            return NOT_PROVED;
        }
        self.begin(reply_to, ProofWork::Prove { facts, challenge, room }, registry)
    }

    /// Processes AUTH: a client sends its proof. Returns `None` if the answer comes later, and an
    /// error if the proof is refused without being verified.
    pub(super) fn auth(
        &self,
        reply_to: ReplyTo,
        version: u16,
        data: Box<[u8]>,
        registry: &mut Registry,
    ) -> Result<Option<ControlAnswer>, ProofError> {
        let Some(path) = registry.path_mut(reply_to.path) else { return Ok(None) };
        let Some(proving) = path.proving_mut() else {
            return Ok(Some(ControlAnswer::Refused(errno::EINVAL)));
        };
        match proving.answered() {
            Some(exchange) if version == AUTH_VERSION => {
                Ok(self.begin(reply_to, ProofWork::Check { exchange, data }, registry))
            }
            Some(_) => {
                proving.failed();
                let text = format!("AUTH has version {version}, expected {AUTH_VERSION}");
                Err(ProofError::new("AUTH has another version", text))
            }
            None => Err(ProofError::from("AUTH answers no challenge")),
        }
    }

    fn begin(
        &self,
        reply_to: ReplyTo,
        work: ProofWork,
        registry: &mut Registry,
    ) -> Option<ControlAnswer> {
        let proving = registry.path_mut(reply_to.path)?.proving_mut()?;
        let task = ProofTask { reply_to, wanted: proving.wanted(), work };
        if self.authenticator.as_ref().is_some_and(|by| by.begin(task)) {
            return None;
        }
        proving.failed();
        Some(ControlAnswer::Refused(errno::EBUSY))
    }
}
