//! A path whose client has still to prove who it is: how far it is, and what it may still try.

use std::sync::{Arc, Weak};

use rtrs_core::fabric::PeerIdentity;
use rtrs_core::time::Instant;
use rtrs_core::tls::Exchange;
use rtrs_core::wire::Name;

use crate::engine::message::ReplyTo;

/// CHALLENGEs that a path may send: each costs a signature. A second one helps a client that met a
/// change of the server's keys.
pub(super) const CHALLENGES_MAX: u8 = 2;

/// How far a path is.
#[derive(Debug, Default)]
enum Step {
    /// A CHALLENGE is awaited.
    #[default]
    Idle,
    /// Another thread signs, or checks a signature.
    Working,
    /// The AUTH to this exchange is awaited. It is good for one.
    Challenged(Exchange),
    /// The client has proved this. The answer waits until older connects of the path have stopped.
    Proved(PeerIdentity, ReplyTo),
}

/// What is known of such a path.
#[derive(Debug)]
pub(super) struct Proving {
    /// When the proof has to be there.
    deadline: Instant,
    /// What its client calls the session, from INFO_REQ on.
    name: Option<Name>,
    challenges: u8,
    step: Step,
    /// For as long as anything of it is wanted.
    wanted: Arc<()>,
}

impl Proving {
    /// Of a path that connects.
    pub(super) fn new(deadline: Instant) -> Self {
        let (name, challenges, step) = (None, 0, Step::default());
        Self { deadline, name, challenges, step, wanted: Arc::default() }
    }

    /// INFO_REQ came.
    pub(super) fn begin(&mut self, name: Name) {
        self.name = Some(name);
    }

    pub(super) fn name(&self) -> Option<Name> {
        self.name
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The path's connections are accepted later than when it connected.
    pub(super) fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    /// A CHALLENGE came. False when it is one too many, or nobody can want it now.
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

    /// The answer to a CHALLENGE goes out.
    pub(super) fn challenged(&mut self, exchange: Exchange) {
        self.step = Step::Challenged(exchange);
    }

    /// An AUTH came. None when there is no challenge that it could answer.
    pub(super) fn answered(&mut self) -> Option<Exchange> {
        let Step::Challenged(exchange) = self.step else { return None };
        self.step = Step::Working;
        Some(exchange)
    }

    /// Gone when the path ends.
    pub(super) fn wanted(&self) -> Weak<()> {
        Arc::downgrade(&self.wanted)
    }

    /// The path ends: what is computed for it is for nobody.
    pub(super) fn end(&mut self) {
        self.wanted = Arc::default();
    }

    /// Nothing came of it.
    pub(super) fn failed(&mut self) {
        self.step = Step::Idle;
    }

    /// The client has proved who it is.
    pub(super) fn proved(&mut self, identity: PeerIdentity, reply_to: ReplyTo) {
        self.step = Step::Proved(identity, reply_to);
    }

    /// The proof that waits, with where the answer goes.
    pub(super) fn waiting(&self) -> Option<(&PeerIdentity, ReplyTo)> {
        match &self.step {
            Step::Proved(identity, reply_to) => Some((identity, *reply_to)),
            _ => None,
        }
    }
}
