//! Control shard's handling of CHALLENGE and AUTH answers on paths without TLS.

use rtrs_core::ids::PathId;
use rtrs_core::time::Instant;

use super::SessionControl;
use super::path::STEP_TIMEOUT;
use crate::engine::ctx::Ctx;
use crate::engine::path_end::PathEnd;
use crate::engine::prover::AuthError;
use crate::path::handshake::Proof;

impl SessionControl {
    /// Handles an answer to CHALLENGE or AUTH. An error ends the path.
    pub(super) fn on_proof(
        &mut self,
        id: PathId,
        proof: Proof,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        match proof {
            Proof::Server(answer) => self.paths[id].challenged(&answer, ctx),
            Proof::Accepted => {
                let until = self.turn_until(ctx.now);
                self.paths[id].authenticated(until)?;
                self.open_next(ctx);
                Ok(())
            }
            Proof::Refused(errno) => {
                Err(AuthError::Refused { errno, asked: self.paths[id].is_asking() }.into())
            }
        }
    }

    /// Latest time for a path to get its turn to open the device. Every path ahead has its own
    /// timeout.
    pub(super) fn turn_until(&self, now: Instant) -> Instant {
        let turns = u32::try_from(self.paths.iter().count()).unwrap_or(u32::MAX);
        now + STEP_TIMEOUT * turns
    }
}
