//! A path that is being taken out of use by hand.

use rtrs_core::ids::CoreIndex;
use rtrs_core::time::Instant;

/// Why a path is taken out of use.
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

/// A path that finishes its requests, and then is gone for this reason.
#[derive(Clone, Debug)]
pub(super) struct Leave {
    why: Why,
    deadline: Instant,
    /// By shard: nothing of the path is in flight there any more.
    retired: Vec<bool>,
}

impl Leave {
    pub(super) fn new(why: Why, deadline: Instant, shards: u16) -> Self {
        Self { why, deadline, retired: vec![false; usize::from(shards)] }
    }

    pub(super) fn why(&self) -> Why {
        self.why
    }

    /// When the requests that are left go to other paths.
    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The same path is asked to leave again, perhaps for another reason.
    pub(super) fn replace(&mut self, other: &Self) {
        (self.why, self.deadline) = (other.why, other.deadline);
    }

    /// A shard has nothing of the path in flight. True when that holds for all.
    pub(super) fn retired(&mut self, shard: CoreIndex) -> bool {
        self.retired[shard.index()] = true;
        self.retired.iter().all(|retired| *retired)
    }
}
