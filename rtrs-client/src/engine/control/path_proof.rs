//! CHALLENGE and AUTH on a path without TLS: prove the client's identity and check the server's
//! before the path opens the device.

use rtrs_core::ids::SessionId;
use rtrs_core::tls::ProofFacts;
use rtrs_core::wire::{Challenge, ChallengeRsp, Extensions};

use super::channel::Channel;
use crate::engine::ctx::Ctx;
use crate::engine::path_end::PathEnd;
use crate::engine::prover::{AuthError, Prover};

/// Prover of a path, and its outstanding challenge to the server.
#[derive(Debug)]
pub(super) struct PathProof {
    /// None if the path needs no proofs.
    prover: Option<Prover>,
    challenge: Option<Challenge>,
}

impl PathProof {
    pub(super) fn new(prover: Option<Prover>) -> Self {
        Self { prover, challenge: None }
    }

    /// Whether both ends must prove their identity.
    pub(super) fn is_needed(&self) -> bool {
        self.prover.is_some()
    }

    /// Checks that both ends agree on authentication. A connection without it is refused if either
    /// end requires it.
    pub(super) fn check(&self, extensions: Extensions) -> Result<(), AuthError> {
        match (extensions.authenticate, self.is_needed()) {
            (true, false) => Err(AuthError::NoKeys),
            (false, true) => Err(AuthError::NoProof),
            _ => Ok(()),
        }
    }

    /// Challenges the server.
    pub(super) fn challenge(
        &mut self,
        channel: &mut Channel,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        let challenge = self.prover.as_ref().ok_or(AuthError::NoKeys)?.challenge()?;
        self.challenge = Some(challenge);
        channel.post(ctx, |service, fabric| service.post_challenge(&challenge, fabric))
    }

    /// Whether the server's answer to the challenge is outstanding.
    pub(super) fn is_asked(&self) -> bool {
        self.challenge.is_some()
    }

    /// Checks the server's proof, and sends the client's.
    pub(super) fn challenged(
        &mut self,
        session: SessionId,
        answer: &ChallengeRsp,
        channel: &mut Channel,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        let Some(challenge) = self.challenge.take() else {
            return Err(channel.internal_error("an answer without a challenge"));
        };
        let facts = ProofFacts {
            session,
            path: channel.uuid(),
            client: channel.local_ip(ctx).ok_or(AuthError::NoLocalAddress)?,
            server: channel.remote().ip(),
        };
        let name = channel.target().peer_name.as_deref();
        let prover = self.prover.as_ref().ok_or(AuthError::NoKeys)?;
        let proof = prover.answer(facts, name, &challenge, answer)?;
        channel.post(ctx, |service, fabric| service.post_auth(&proof, fabric))
    }

    /// Forgets the challenge of a connection that has ended.
    pub(super) fn end(&mut self) {
        self.challenge = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_without_keys_refuses_a_server_that_requires_proofs() {
        let proof = PathProof::new(None);
        let requires = |authenticate| Extensions { authenticate, ..Extensions::default() };
        assert_eq!(proof.check(requires(false)), Ok(()));
        assert_eq!(proof.check(requires(true)), Err(AuthError::NoKeys));
        assert!(!proof.is_needed() && !proof.is_asked());
    }
}
