//! Requests of clients that wait for the control shard.
//!
//! Everything that a client can ask of the control shard costs time that all clients share, their
//! heartbeats and the operator's commands included. So requests wait here, and each turn serves
//! [`TURN`] of them in units of cost, one request of each client after the other; heartbeats,
//! timers and commands come before. A client is a session that has opened an export, or a source of
//! sessions that have not. What waits is bounded by the queue depth of paths: a request holds its
//! permit until it is answered. Requests of a path go with the path.
//!
//! Connection requests and INFO_REQ are served when they come, and count: a turn takes no more
//! events when it is full.

use std::collections::{BTreeMap, VecDeque};

use rtrs_core::ids::SessionId;
use rtrs_core::proto::quota::Source;

use super::discover::Draft;
use crate::engine::message::{ControlRequest, ReplyTo};
use crate::path::PathKey;

/// Cost that a turn serves. A unit is about the time that a look at one export takes.
pub(super) const TURN: u32 = 512;
/// Cost of taking a request that waits.
pub(super) const TAKE: u32 = 1;
/// Cost of a connection request, and of an INFO_REQ.
pub(super) const CONNECT: u32 = 32;

/// Cost of a request, without what depends on the number of exports.
pub(super) fn cost(request: &ControlRequest) -> u32 {
    match request {
        ControlRequest::Open { .. } | ControlRequest::Discover { .. } => 64,
        ControlRequest::Close { .. }
        | ControlRequest::Fence(_)
        | ControlRequest::Challenge { .. }
        | ControlRequest::Auth { .. } => 32,
        ControlRequest::Move(_) => 16,
    }
}

/// Who shares a place in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Asker {
    /// Session that has opened an export.
    Session(SessionId),
    /// Source of sessions that have opened nothing.
    Source(Source),
}

/// A request that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) reply_to: ReplyTo,
    pub(super) request: ControlRequest,
    /// List of a DISCOVER that takes more than one turn.
    pub(super) draft: Option<Box<Draft>>,
}

/// Requests that wait, and what is left of the turn.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    queues: BTreeMap<Asker, VecDeque<Waiting>>,
    /// Askers with requests, the next to be served first.
    order: VecDeque<Asker>,
    /// Cost of the present turn so far.
    spent: u32,
}

impl Backlog {
    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Counts work that is done at once.
    pub(super) fn spend(&mut self, cost: u32) {
        self.spent = self.spent.saturating_add(cost);
    }

    /// Whether the turn is to take no more events.
    pub(super) fn is_turn_full(&self) -> bool {
        self.spent >= TURN && !rtrs_core::mutated!(ControlUnbounded)
    }

    pub(super) fn begin_turn(&mut self) {
        self.spent = 0;
    }

    pub(super) fn push(&mut self, asker: Asker, waiting: Waiting) {
        let queue = self.queues.entry(asker).or_default();
        if queue.is_empty() {
            self.order.push_back(asker);
        }
        queue.push_back(waiting);
    }

    /// Takes the next request of the next asker, who then comes last.
    pub(super) fn take(&mut self) -> Option<(Asker, Waiting)> {
        let asker = self.order.pop_front()?;
        let queue = self.queues.get_mut(&asker)?;
        let waiting = queue.pop_front()?;
        match queue.is_empty() {
            true => drop(self.queues.remove(&asker)),
            false => self.order.push_back(asker),
        }
        Some((asker, waiting))
    }

    /// Puts a request back that needs more than one turn.
    pub(super) fn put_back(&mut self, asker: Asker, waiting: Waiting) {
        let queue = self.queues.entry(asker).or_default();
        if queue.is_empty() {
            self.order.push_back(asker);
        }
        queue.push_front(waiting);
    }

    /// Drops the requests of a path that ends.
    pub(super) fn forget(&mut self, path: PathKey) {
        self.queues.retain(|_, queue| {
            queue.retain(|waiting| waiting.reply_to.path != path);
            !queue.is_empty()
        });
        self.order.retain(|asker| self.queues.contains_key(asker));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rtrs_core::ids::{CoreIndex, PermitId};
    use rtrs_core::wire::Move;

    fn waiting(path: u64, permit: u16) -> Waiting {
        let reply_to =
            ReplyTo { path: PathKey(path), core: CoreIndex(0), permit: PermitId(permit) };
        Waiting { reply_to, request: ControlRequest::Move(Move::default()), draft: None }
    }

    fn asker(n: u8) -> Asker {
        Asker::Session(SessionId([n; 16]))
    }

    #[test]
    fn each_asker_has_its_turn() {
        let mut backlog = Backlog::default();
        (0..3).for_each(|permit| backlog.push(asker(1), waiting(1, permit)));
        backlog.push(asker(2), waiting(2, 0));
        let (who, first) = backlog.take().unwrap();
        backlog.put_back(who, first);
        let order: Vec<(u64, u16)> = std::iter::from_fn(|| backlog.take())
            .map(|(_, waiting)| (waiting.reply_to.path.0, waiting.reply_to.permit.0))
            .collect();
        assert_eq!(order, [(2, 0), (1, 0), (1, 1), (1, 2)]);
        assert!(backlog.is_empty() && backlog.queues.is_empty());
    }

    #[test]
    fn requests_go_with_their_path() {
        let mut backlog = Backlog::default();
        backlog.push(asker(1), waiting(1, 0));
        backlog.push(asker(1), waiting(2, 0));
        backlog.push(asker(2), waiting(1, 1));
        backlog.forget(PathKey(1));
        assert_eq!(backlog.take().map(|(_, left)| left.reply_to.path), Some(PathKey(2)));
        assert!(backlog.take().is_none() && backlog.is_empty());
    }
}
