//! The bounded queue of finished IOs that every backend keeps for `reap`.

use std::collections::VecDeque;

use rtrs_core::block::Completion;
use rtrs_core::status::IoStatus;

use super::target::INFLIGHT_MAX;

/// Completions that wait to be reaped; room for every IO a device takes.
#[derive(Debug)]
pub(crate) struct Done(VecDeque<Completion>);

impl Done {
    pub(crate) fn new() -> Self {
        Self(VecDeque::with_capacity(INFLIGHT_MAX))
    }

    /// True when an IO that completes at once must wait for a `reap` first.
    pub(crate) fn is_full(&self) -> bool {
        self.0.len() >= INFLIGHT_MAX
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn push(&mut self, tag: u64, status: IoStatus) {
        self.0.push_back(Completion { tag, status });
    }

    pub(crate) fn pop(&mut self) -> Option<Completion> {
        self.0.pop_front()
    }
}
