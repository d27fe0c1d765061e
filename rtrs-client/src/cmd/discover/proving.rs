//! Authentication of both ends, for commands whose session has only one connection.

use std::net::IpAddr;

use rtrs_core::fabric::Fabric;
use rtrs_core::ids::{PathUuid, SessionId};
use rtrs_core::tls::ProofFacts;
use rtrs_core::wire::{Challenge, ChallengeRsp, Extensions};

use crate::engine::{AuthError, PathEnd, Prover};
use crate::path::handshake::ServiceConnection;

/// State of the authentication.
pub(super) struct Proving {
    pub(super) prover: Option<Prover>,
    pub(super) session: SessionId,
    pub(super) path: PathUuid,
    pub(super) server: IpAddr,
    pub(super) challenge: Option<Challenge>,
}

impl Proving {
    /// Checks that both ends require proofs, or neither.
    pub(super) fn check(&self, extensions: Extensions) -> Result<(), AuthError> {
        match (extensions.authenticate, self.prover.is_some()) {
            (true, false) => Err(AuthError::NoKeys),
            (false, true) => Err(AuthError::NoProof),
            _ => Ok(()),
        }
    }

    /// Challenges the server. Returns false when there is nothing to prove.
    pub(super) fn begin(
        &mut self,
        conn: &mut ServiceConnection,
        fabric: &mut dyn Fabric,
    ) -> Result<bool, PathEnd> {
        let Some(prover) = &self.prover else { return Ok(false) };
        let challenge = prover.challenge()?;
        self.challenge = Some(challenge);
        conn.post_challenge(&challenge, fabric)?;
        Ok(true)
    }

    /// Handles the server's proof.
    pub(super) fn answer(
        &mut self,
        answer: &ChallengeRsp,
        conn: &mut ServiceConnection,
        fabric: &mut dyn Fabric,
    ) -> Result<(), PathEnd> {
        let proving = self.prover.as_ref().zip(self.challenge.take());
        let (prover, challenge) = proving.ok_or(AuthError::NoKeys)?;
        let client = fabric.local_ip(conn.qp());
        let facts = ProofFacts {
            session: self.session,
            path: self.path,
            client: client.ok_or(AuthError::NoLocalAddress)?,
            server: self.server,
        };
        let proof = prover.answer(facts, None, &challenge, answer)?;
        Ok(conn.post_auth(&proof, fabric)?)
    }
}
