//! Actions that are due on a path, and the ways in which it ends.

use crate::engine::path_end::PathEnd;

/// Reason and manner of a path's end.
#[derive(Debug)]
pub(super) struct End {
    /// Reason that is shown and logged; None for a requested end.
    pub(super) why: Option<PathEnd>,
    /// Whether messages that the server has already sent on other connections are processed first.
    pub(super) in_order: bool,
}

impl End {
    /// End after a failure.
    pub(super) fn failed(why: impl Into<PathEnd>) -> Self {
        Self { why: Some(why.into()), in_order: false }
    }

    /// Requested end.
    pub(super) const ASKED: Self = Self { why: None, in_order: true };
    /// End of an attempt that is replaced by another.
    pub(super) const RESTART: Self = Self { why: None, in_order: false };
}

/// Next action of a path.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    /// Finish leaving.
    Leave,
    /// Start the next attempt.
    Start,
    /// Check the heartbeats.
    Heartbeat,
    /// Abort the connections once more.
    Close,
    /// End for this reason.
    End(PathEnd),
}
