//! Handling of CHALLENGE and AUTH on a path without TLS: proves the client's identity and checks
//! the server's before the path opens the device.

use rtrs_core::time::Instant;
use rtrs_core::tls::ProofFacts;
use rtrs_core::wire::{ChallengeRsp, Extensions, errno};

use super::{Path, STEP_TIMEOUT};
use crate::engine::ctx::Ctx;
use crate::engine::path_end::PathEnd;
use crate::engine::prover::{AuthError, Prover};
use crate::path::handshake::Proof;
use crate::path::state::PathState;

impl Path {
    /// Prover of the client's identity, if this path needs one.
    pub(super) fn prover(&self) -> Option<&Prover> {
        self.config.prover.as_ref().filter(|_| self.target.proves)
    }

    /// Checks that both ends agree on authentication. A connection without it is refused if either
    /// end requires it.
    pub(super) fn check_proofs(&self, extensions: Extensions) -> Result<(), AuthError> {
        match (extensions.authenticate, self.prover().is_some()) {
            (true, false) => Err(AuthError::NoKeys),
            (false, true) => Err(AuthError::NoProof),
            _ => Ok(()),
        }
    }

    /// Challenges the server after INFO_RSP.
    pub(super) fn challenge(&mut self, ctx: &mut Ctx<'_>) -> Result<(), PathEnd> {
        self.state.advance(PathState::Authenticating);
        self.until = ctx.now + STEP_TIMEOUT;
        let challenge = self.prover().ok_or(AuthError::NoKeys)?.challenge()?;
        self.challenge = Some(challenge);
        self.post(ctx, |service, fabric| service.post_challenge(&challenge, fabric))
    }

    /// Handles an answer to CHALLENGE or AUTH. Returns whether the server has accepted the client:
    /// the path then opens the device when its turn comes, at `until` at the latest.
    pub(in crate::engine::control) fn on_proof(
        &mut self,
        proof: Proof,
        until: Instant,
        ctx: &mut Ctx<'_>,
    ) -> Result<bool, PathEnd> {
        match proof {
            Proof::Server(answer) => self.challenged(&answer, ctx).map(|()| false),
            Proof::Accepted => self.authenticated(until).map(|()| true),
            // Only then does the server compare the name of the session with others.
            Proof::Refused(errno @ errno::EEXIST) => {
                Err(PathEnd::SessionRefused { errno, session: self.config.name.clone() })
            }
            Proof::Refused(errno) => {
                let asked = self.challenge.is_some();
                Err(AuthError::Refused { errno, asked }.into())
            }
        }
    }

    /// Checks the server's proof, and sends that of the client.
    fn challenged(&mut self, answer: &ChallengeRsp, ctx: &mut Ctx<'_>) -> Result<(), PathEnd> {
        let challenge = self.challenge.take().filter(|_| self.state == PathState::Authenticating);
        let Some(challenge) = challenge else {
            return Err(self.internal_error("an answer without a challenge"));
        };
        let fabric = ctx.fabrics[self.target.provider.index()].as_ref();
        let service = self.connections.service();
        let client = service.and_then(|service| fabric.local_ip(service.qp()));
        let facts = ProofFacts {
            session: self.config.id,
            path: self.uuid(),
            client: client.ok_or(AuthError::NoLocalAddress)?,
            server: self.connections.remote().ip(),
        };
        let name = self.target.peer_name.as_deref();
        let prover = self.prover().ok_or(AuthError::NoKeys)?;
        let proof = prover.answer(facts, name, &challenge, answer)?;
        self.post(ctx, |service, fabric| service.post_auth(&proof, fabric))
    }

    fn authenticated(&mut self, until: Instant) -> Result<(), PathEnd> {
        if self.state != PathState::Authenticating {
            return Err(self.internal_error("an answer without a proof"));
        }
        self.state.advance(PathState::Opening);
        self.until = until;
        Ok(())
    }
}
