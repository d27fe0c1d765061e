//! Taking a path out of use at the operator's request.

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

/// State of a path that is finishing its requests before leaving.
#[derive(Clone, Debug)]
pub(super) struct Leave {
    why: Why,
    deadline: Instant,
    /// For each shard, whether it no longer has any of the path's requests in flight.
    retired: Vec<bool>,
}

impl Leave {
    pub(super) fn new(why: Why, deadline: Instant, shards: u16) -> Self {
        Self { why, deadline, retired: vec![false; usize::from(shards)] }
    }

    pub(super) fn why(&self) -> Why {
        self.why
    }
}

/// Progress of taking a path out of use.
#[derive(Debug, Default)]
pub(super) struct Departure {
    leave: Option<Leave>,
    /// Whether the path was permanently removed: no longer listed, and the slot may be reused.
    removed: bool,
}

impl Departure {
    /// Whether the path is leaving.
    pub(super) fn is_begun(&self) -> bool {
        self.leave.is_some()
    }

    /// Whether the path is permanently removed.
    pub(super) fn is_final(&self) -> bool {
        self.removed
    }

    /// Reason for leaving, if the path is leaving.
    pub(super) fn why(&self) -> Option<Why> {
        self.leave.as_ref().map(Leave::why)
    }

    /// Time at which the remaining requests are moved to other paths, if the path is leaving.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.leave.as_ref().map(|leave| leave.deadline)
    }

    /// Begins or ends the leave, replacing an earlier one.
    pub(super) fn set(&mut self, leave: Option<Leave>) {
        self.leave = leave;
    }

    /// Begins the leave of a path whose requests the shards retire. If a leave has already begun,
    /// replaces only its reason and deadline, and returns true.
    pub(super) fn begin_or_replace(&mut self, leave: Leave) -> bool {
        if let Some(before) = &mut self.leave {
            (before.why, before.deadline) = (leave.why, leave.deadline);
            return true;
        }
        self.leave = Some(leave);
        false
    }

    /// Records that a shard has none of the path's requests in flight. Returns whether the path is
    /// leaving and no shard has any.
    pub(super) fn retired(&mut self, shard: CoreIndex) -> bool {
        let Some(leave) = &mut self.leave else { return false };
        leave.retired[shard.index()] = true;
        leave.retired.iter().all(|retired| *retired)
    }

    /// Removes the path permanently.
    pub(super) fn remove(&mut self) {
        self.removed = true;
    }
}

#[cfg(test)]
mod tests {
    use rtrs_core::time::Duration;

    use super::*;

    #[test]
    fn a_path_has_retired_when_all_shards_have() {
        let leave = |why, s| Leave::new(why, Instant::ZERO + Duration::from_secs(s), 2);
        let mut departure = Departure::default();
        assert!(!departure.retired(CoreIndex(0)), "the path stays");
        assert!(!departure.begin_or_replace(leave(Why::Disconnect, 30)));
        assert!(!departure.retired(CoreIndex(0)));
        assert!(departure.begin_or_replace(leave(Why::Remove, 10)));
        assert_eq!(departure.why(), Some(Why::Remove));
        assert_eq!(departure.deadline(), Some(Instant::ZERO + Duration::from_secs(10)));
        assert!(departure.retired(CoreIndex(1)), "the first shard has not started over");
        departure.set(None);
        assert!(!departure.is_begun() && !departure.is_final());
    }
}
