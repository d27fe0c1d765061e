//! What a path is due for, and how it ends.

/// How a path ends.
#[derive(Debug)]
pub(super) struct End {
    /// Shown and logged, unless it ends as it is asked to.
    pub(super) why: Option<String>,
    /// What the server has sent on other connections still counts.
    pub(super) in_order: bool,
}

impl End {
    /// It failed.
    pub(super) fn failed(why: impl Into<String>) -> Self {
        Self { why: Some(why.into()), in_order: false }
    }

    /// As asked.
    pub(super) const ASKED: Self = Self { why: None, in_order: true };
    /// The attempt gives way to another.
    pub(super) const RESTART: Self = Self { why: None, in_order: false };
}

/// What a path is due for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    /// It may leave.
    Leave,
    /// The next attempt.
    Start,
    /// A look at its heartbeats.
    Heartbeat,
    /// Another abort of its connections.
    Close,
    /// Its end, for this reason.
    End(&'static str),
}
