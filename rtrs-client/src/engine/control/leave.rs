//! Administrative removal of a path from use.

use rtrs_core::ids::CoreIndex;
use rtrs_core::time::Instant;

/// Reason for taking a path out of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    Remove,
    Disconnect,
    Reconnect,
}

impl Why {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Remove => "remove",
            Self::Disconnect => "disconnect",
            Self::Reconnect => "reconnect",
        }
    }
}

/// State of a path that finishes its requests before it leaves.
#[derive(Clone, Debug)]
pub(super) struct Leave {
    why: Why,
    deadline: Instant,
    /// For each shard, whether the path has no requests in flight there anymore.
    retired: Vec<bool>,
}

impl Leave {
    pub(super) fn new(why: Why, deadline: Instant, shards: u16) -> Self {
        Self { why, deadline, retired: vec![false; usize::from(shards)] }
    }

    pub(super) fn why(&self) -> Why {
        self.why
    }

    /// Time at which the remaining requests move to other paths.
    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Replaces reason and deadline when the same path is asked to leave again.
    pub(super) fn replace(&mut self, other: &Self) {
        (self.why, self.deadline) = (other.why, other.deadline);
    }

    /// Records that a shard has no requests of the path in flight. Returns whether that holds for
    /// all shards.
    pub(super) fn retired(&mut self, shard: CoreIndex) -> bool {
        self.retired[shard.index()] = true;
        self.retired.iter().all(|retired| *retired)
    }
}
