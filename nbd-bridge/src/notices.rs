//! Log lines that NBD clients can trigger, rate limited so that no client can flood the log.
//!
//! The first line of a kind is logged immediately, further ones at growing intervals, each with the
//! number of suppressed lines.

use std::os::fd::AsFd;

use rtrs_core::log_limit::LogLimits;
use rtrs_core::time::Instant;

use crate::peer::Peer;

/// Kind of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    TooManyConnections,
    NoSocket,
    ShardNotResponding,
    NoBuffers,
    UnansweredWrites,
    PoolUnavailable,
    NotReading,
}

impl Notice {
    const fn text(self) -> &'static str {
        match self {
            Self::TooManyConnections => "NBD client turned away: too many connections",
            Self::NoSocket => "NBD client turned away: its connection cannot be set up",
            Self::ShardNotResponding => "NBD client closed: a shard does not serve its connections",
            Self::NoBuffers => "NBD client turned away: all buffers are in use",
            Self::UnansweredWrites => "NBD connection ended with unanswered writes",
            Self::PoolUnavailable => "cannot allocate another pool of NBD buffers",
            Self::NotReading => "NBD client does not read its replies",
        }
    }
}

/// Rate limits for a shard's log lines.
#[derive(Debug, Default)]
pub(crate) struct Notices(LogLimits<Notice>);

impl Notices {
    /// Decides whether to log a line of this kind now. Returns the number of lines suppressed since
    /// the last one, or None to suppress this one.
    pub(crate) fn admit(&mut self, now: Instant, notice: Notice) -> Option<u64> {
        self.0.admit(now, notice)
    }

    /// Logs the number of suppressed lines of kinds that have become quiet.
    pub(crate) fn log_suppressed(&mut self, now: Instant, export: &str) {
        while let Some((notice, repeated)) = self.0.overdue(now) {
            tracing::warn!(export, repeated, "{} (repeated)", notice.text());
        }
    }

    /// Returns the time at which suppressed lines are to be logged.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.0.deadline()
    }
}

/// Describes the other end of a client's socket for the log.
pub(crate) fn peer(fd: &impl AsFd) -> String {
    Peer::of(fd).to_string()
}
