//! Actions that are due on a path, and how a path ends.

use crate::engine::path_end::PathEnd;

/// Why and how a path ends.
#[derive(Debug)]
pub(super) struct End {
    /// Reason to show and log; None for a requested end.
    pub(super) why: Option<PathEnd>,
    /// Whether messages already sent by the server on other connections are processed first.
    pub(super) in_order: bool,
}

impl End {
    /// Returns the end for a path that has failed.
    pub(super) fn failed(why: impl Into<PathEnd>) -> Self {
        Self { why: Some(why.into()), in_order: false }
    }

    /// A requested end.
    pub(super) const ASKED: Self = Self { why: None, in_order: true };
    /// The end of an attempt that is replaced by a new one.
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
    /// Abort the connections again.
    Close,
    /// End the path for this reason.
    End(PathEnd),
}
