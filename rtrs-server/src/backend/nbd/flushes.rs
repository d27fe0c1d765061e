//! Flushes of a connection, each of which covers changes over all connections to its export.

use std::collections::VecDeque;
use std::sync::Arc;

use rtrs_core::block::WakeHandle;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant};

use super::changes::{Account, Peers};
use super::shared::Shared;
use crate::backend::immediate::Done;
use crate::backend::target::INFLIGHT_MAX;

/// Interval between checks of a flush that waits for other connections.
const WAIT_STEP: Duration = Duration::from_millis(500);

/// A flush that has been answered, but waits for the flushes of other connections.
struct WaitingFlush {
    tag: u64,
    mark: u64,
    /// Time for which the shard has waited. A pause of the process counts as one step: the shards
    /// of the other connections were paused too.
    waited: Duration,
    /// Time of the last check.
    seen: Option<Instant>,
}

/// Changes and flushes of one connection.
pub(super) struct Flushes {
    account: Arc<Account>,
    peers: Peers,
    waiting: VecDeque<WaitingFlush>,
}

impl Flushes {
    pub(super) fn new(shared: &Shared, wake: WakeHandle) -> Self {
        let account = shared.changes.join(wake);
        let waiting = VecDeque::with_capacity(INFLIGHT_MAX);
        Self { account, peers: Peers::default(), waiting }
    }

    /// Unsettled changes of the connection.
    pub(super) fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Number of answered flushes waiting for other connections.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Completes a flush for a server that has no write cache.
    pub(super) fn without_cache(&mut self, shared: &Shared, mark: u64) -> IoStatus {
        self.peers.settle(&shared.changes, mark);
        if shared.changes.report() { IoStatus::Ok } else { IoStatus::Io }
    }

    /// Requests flushes over the other connections when one is sent over this one.
    pub(super) fn begin(&mut self, shared: &Shared, mark: u64) {
        self.peers.request(&shared.changes, &self.account, mark);
    }

    /// Records a successful change that is not durable.
    pub(super) fn add_change(&self, shared: &Shared) {
        shared.changes.add(&self.account);
    }

    /// Records a successful flush over this connection.
    pub(super) fn settle(&self, shared: &Shared, mark: u64) {
        self.account.settle(mark);
        shared.changes.wake_waiting();
    }

    /// Makes a successful flush wait for other connections.
    pub(super) fn hold(&mut self, shared: &Shared, tag: u64, mark: u64) {
        shared.changes.count_waiting(true);
        self.waiting.push_back(WaitingFlush { tag, mark, waited: Duration::ZERO, seen: None });
    }

    /// Counts unsettled changes of the connection as lost.
    pub(super) fn lose(&self, shared: &Shared, why: &str) {
        shared.log_loss(&self.account, why);
        shared.changes.wake_waiting();
    }

    /// Completes flushes whose changes are settled on all connections or that have waited too long.
    pub(super) fn end_settled(&mut self, shared: &Shared, now: Instant, done: &mut Done) -> bool {
        let changes = &shared.changes;
        let before = done.len();
        while let Some(flush) = self.waiting.front_mut() {
            let step = now.since(flush.seen.unwrap_or(now)).min(WAIT_STEP);
            (flush.waited, flush.seen) = (flush.waited + step, Some(now));
            if !self.peers.are_settled(changes, flush.mark) {
                if flush.waited < changes.answer_max {
                    break;
                }
                let silent = self.peers.give_up(changes, flush.mark);
                tracing::error!(
                    "{}: flush failed: answered on one connection, but not on {silent} others; \
                     unflushed writes may be lost",
                    shared.text
                );
            }
            let status = if changes.report() { IoStatus::Ok } else { IoStatus::Io };
            done.push(flush.tag, status);
            self.waiting.pop_front();
            changes.count_waiting(false);
        }
        done.len() > before
    }

    /// Forgets all waiting flushes.
    pub(super) fn cancel(&mut self, shared: &Shared) {
        for _ in self.waiting.drain(..) {
            shared.changes.count_waiting(false);
        }
    }

    /// Time of the next check of a waiting flush.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let seen = self.waiting.front().and_then(|flush| flush.seen);
        seen.map(|seen| seen + WAIT_STEP)
    }
}
