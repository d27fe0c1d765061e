//! Queue of client requests to the control shard.
//!
//! Every request to the control shard takes time away from all clients, including their heartbeats,
//! and from the operator's commands. Requests are therefore queued here, and each turn serves up to
//! [`TURN`] units of cost, one request per client in rotation; heartbeats, timers and commands are
//! served first. A client is a session that has opened an export, or a source of sessions that have
//! opened none. The queue is bounded by the paths' queue depth, because a request holds its permit
//! until it is answered. The requests of a path are dropped with the path.
//!
//! Connection requests and INFO_REQ are served immediately, but their cost counts: a turn that is
//! full takes no more events.

use std::collections::{BTreeMap, VecDeque};

use rtrs_core::ids::SessionId;
use rtrs_core::proto::quota::Source;

use super::discover::Draft;
use super::registry::Registry;
use crate::engine::finder::Examined;
use crate::engine::message::{ControlRequest, ReplyTo};
use crate::path::PathKey;

/// Cost limit of a turn. A unit is about the time it takes to examine one export.
pub(super) const TURN: u32 = 512;
/// Cost of taking a request from the queue.
pub(super) const TAKE: u32 = 1;
/// Cost of a connection request, and of an INFO_REQ.
pub(super) const CONNECT: u32 = 32;

/// Cost of a request, excluding the part that depends on the number of exports.
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

/// Unit of fairness in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Asker {
    /// A session that has opened an export.
    Session(SessionId),
    /// A source of sessions that have opened nothing.
    Source(Source),
}

/// A queued request.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) reply_to: ReplyTo,
    pub(super) request: ControlRequest,
    /// List of a DISCOVER that takes more than one turn.
    pub(super) draft: Option<Box<Draft>>,
}

/// Queued requests, and the remaining budget of the turn.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    queues: BTreeMap<Asker, VecDeque<Waiting>>,
    /// Askers with queued requests, in service order.
    order: VecDeque<Asker>,
    /// Cost of the current turn so far.
    spent: u32,
}

impl Backlog {
    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Counts work that is not queued.
    pub(super) fn spend(&mut self, cost: u32) {
        self.spent = self.spent.saturating_add(cost);
    }

    /// Whether the turn must take no more events.
    pub(super) fn is_turn_full(&self) -> bool {
        self.spent >= TURN && !rtrs_core::mutated!(ControlUnbounded)
    }

    pub(super) fn begin_turn(&mut self) {
        self.spent = 0;
    }

    /// Queues a request from a client. A request from an ending path is dropped, because no new
    /// work of the path may begin once its end has been reported.
    pub(super) fn put_off(&mut self, waiting: Waiting, registry: &mut Registry) {
        let from = waiting.reply_to.path;
        let examined = |request: &ControlRequest| match request {
            ControlRequest::Open { mode, .. } => mode.examined != Examined::No,
            _ => false,
        };
        // Its export's target was examined on another thread; the path may have ended since.
        if examined(&waiting.request) && registry.path(from).is_none() {
            return;
        }
        let Some(path) = registry.live_path(from) else { return };
        if path.state().is_ending() {
            return;
        }
        let (session, peer) = (&path.shared().session, path.shared().origin.peer);
        let asker = match session.has_opened() && !path.is_unproved() {
            true => Asker::Session(session.id),
            false => Asker::Source(Source::of(peer.ip())),
        };
        self.push(asker, waiting);
    }

    pub(super) fn push(&mut self, asker: Asker, waiting: Waiting) {
        let queue = self.queues.entry(asker).or_default();
        if queue.is_empty() {
            self.order.push_back(asker);
        }
        queue.push_back(waiting);
    }

    /// Takes the next request of the next asker, which then moves to the end of the rotation.
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

    /// Puts a request that needs more than one turn back at the front of its queue.
    pub(super) fn put_back(&mut self, asker: Asker, waiting: Waiting) {
        let queue = self.queues.entry(asker).or_default();
        if queue.is_empty() {
            self.order.push_back(asker);
        }
        queue.push_front(waiting);
    }

    /// Drops the requests of a closing path.
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
    fn clients_take_turns() {
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
    fn requests_are_dropped_with_their_path() {
        let mut backlog = Backlog::default();
        backlog.push(asker(1), waiting(1, 0));
        backlog.push(asker(1), waiting(2, 0));
        backlog.push(asker(2), waiting(1, 1));
        backlog.forget(PathKey(1));
        assert_eq!(backlog.take().map(|(_, left)| left.reply_to.path), Some(PathKey(2)));
        assert!(backlog.take().is_none() && backlog.is_empty());
    }
}
