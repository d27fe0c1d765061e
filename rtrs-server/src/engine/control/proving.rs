//! Authentication state of a path: its progress and the remaining attempts.

use std::sync::{Arc, Weak};

use rtrs_core::fabric::PeerIdentity;
use rtrs_core::time::Instant;
use rtrs_core::tls::Exchange;
use rtrs_core::wire::Name;

use crate::engine::message::ReplyTo;

/// Maximum number of CHALLENGEs per path, because each costs a signature. A second CHALLENGE helps
/// a client that was affected by a change of the server's keys.
pub(super) const CHALLENGES_MAX: u8 = 2;

/// Progress of the authentication.
#[derive(Debug, Default)]
enum Step {
    /// Waiting for a CHALLENGE.
    #[default]
    Idle,
    /// Another thread is creating or verifying a signature.
    Working,
    /// Waiting for the AUTH for this exchange, which may be used only once.
    Challenged(Exchange),
    /// The client has proved this identity. The answer waits until older connection attempts of the
    /// path have ended.
    Proved(PeerIdentity, ReplyTo),
}

/// Authentication state of a path.
#[derive(Debug)]
pub(super) struct Proving {
    /// Deadline for the proof.
    deadline: Instant,
    /// Name of the session from INFO_REQ.
    name: Option<Name>,
    challenges: u8,
    step: Step,
    /// Dropped when results are no longer needed.
    wanted: Arc<()>,
}

impl Proving {
    /// Creates the state for a connecting path.
    pub(super) fn new(deadline: Instant) -> Self {
        let (name, challenges, step) = (None, 0, Step::default());
        Self { deadline, name, challenges, step, wanted: Arc::default() }
    }

    /// Records the name from INFO_REQ.
    pub(super) fn begin(&mut self, name: Name) {
        self.name = Some(name);
    }

    pub(super) fn name(&self) -> Option<Name> {
        self.name
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Sets a later deadline when the path's connections are accepted late.
    pub(super) fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    /// Records a CHALLENGE. Returns false if it exceeds the limit or is invalid in this state.
    pub(super) fn challenge(&mut self) -> bool {
        if matches!(self.step, Step::Working | Step::Proved(..))
            || self.challenges >= CHALLENGES_MAX
        {
            return false;
        }
        self.challenges += 1;
        self.step = Step::Working;
        true
    }

    /// Records that the answer to a CHALLENGE is being sent.
    pub(super) fn challenged(&mut self, exchange: Exchange) {
        self.step = Step::Challenged(exchange);
    }

    /// Takes the exchange that an AUTH answers. Returns None if there is no challenge to answer.
    pub(super) fn answered(&mut self) -> Option<Exchange> {
        let Step::Challenged(exchange) = self.step else { return None };
        self.step = Step::Working;
        Some(exchange)
    }

    /// Reference that expires when the path ends.
    pub(super) fn wanted(&self) -> Weak<()> {
        Arc::downgrade(&self.wanted)
    }

    /// Cancels pending computations when the path ends.
    pub(super) fn end(&mut self) {
        self.wanted = Arc::default();
    }

    /// Records that an attempt failed.
    pub(super) fn failed(&mut self) {
        self.step = Step::Idle;
    }

    /// Records the identity that the client proved.
    pub(super) fn proved(&mut self, identity: PeerIdentity, reply_to: ReplyTo) {
        self.step = Step::Proved(identity, reply_to);
    }

    /// Proof whose answer is waiting, with the destination of the answer.
    pub(super) fn waiting(&self) -> Option<(&PeerIdentity, ReplyTo)> {
        match &self.step {
            Step::Proved(identity, reply_to) => Some((identity, *reply_to)),
            _ => None,
        }
    }
}
