//! Planted bugs: each shows that a checker detects its kind of bug.
//!
//! The bugs are in the simulator, at the boundaries of the engines (the backend, the fabric, the
//! device as its user sees it), never in the engines themselves.

use std::str::FromStr;

/// Bug to plant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Plant {
    /// No bug.
    #[default]
    None,
    /// The backend acknowledges a write without performing it.
    LostWrite,
    /// The backend repeats a write from a dead path after newer writes.
    GhostWrite,
    /// The backend performs a write that was reported as failed, at any later time, although the
    /// server makes other writes wait for it.
    LateError,
    /// The server lets the next client write while the backend still has writes from the dead one.
    EarlyOpen,
    /// The backend answers a read with data from before the last write.
    StaleRead,
    /// The client does not close the window of an answered read, and the server writes through the
    /// window once more.
    OpenWindow,
    /// The fabric reports the end of a connection to the client while the connection can still
    /// reach the client's memory.
    EarlyClosed,
    /// The backend performs half of a write.
    TornWrite,
    /// The backend ignores flushes.
    NoFlush,
    /// The backend treats durable writes as plain ones.
    NoFua,
    /// The device completes an IO twice.
    Twice,
    /// The device forgets an IO.
    Never,
    /// The server does not notice that connections ended when the session was detached.
    LostClose,
    /// The device ends an IO with an error that has no cause.
    BadStatus,
    /// The server's answer to a request is lost on a connection that stays open.
    LostAnswer,
    /// A link stays down after the faults have stopped.
    DeadLink,
    /// The server does not report that its host was restarted.
    SameLife,
    /// A different server, with a different disk, reports the identity of the session's server.
    SameIdentity,
    /// Each connection leaves registered memory behind.
    Leak,
    /// The front end does not notice that an NBD connection was closed.
    UnseenClose,
    /// A path stays slow, in the equal-paths scenario.
    LimpingPath,
    /// The backend loses writes during cache writeback, and no sync reports the loss.
    QuietSync,
    /// A backend write that takes longer than the client waits for an answer ends before it takes
    /// effect.
    LateEffect,
    /// A truncated backing file gets its old data back once its length is restored.
    OldTail,
    /// The backend writes past the end of a truncated file.
    GrownWrite,
    /// A backing file is truncated, and no flush reports it.
    QuietCut,
    /// A server that is killed while saving an export's epoch leaves no trace of the save.
    LateSave,
    /// The backend loses writes of the second session.
    LostGuestWrite,
}

/// All planted bugs, each with its name and the checker that must detect it.
pub(super) const PLANTS: &[(Plant, &str, &str)] = &[
    (Plant::LostWrite, "lost-write", "blocks"),
    (Plant::GhostWrite, "ghost-write", "blocks"),
    (Plant::LateError, "late-error", "blocks"),
    (Plant::EarlyOpen, "early-open", "blocks"),
    (Plant::StaleRead, "stale-read", "blocks"),
    (Plant::OpenWindow, "open-window", "buffers"),
    (Plant::EarlyClosed, "early-closed", "buffers"),
    (Plant::TornWrite, "torn-write", "blocks"),
    (Plant::NoFlush, "no-flush", "durable"),
    (Plant::NoFua, "no-fua", "durable"),
    (Plant::Twice, "twice", "once"),
    (Plant::Never, "never", "live"),
    (Plant::LostClose, "lost-close", "home"),
    (Plant::BadStatus, "bad-status", "errors"),
    (Plant::LostAnswer, "lost-answer", "live"),
    (Plant::DeadLink, "dead-link", "live"),
    (Plant::SameLife, "same-life", "durable"),
    (Plant::SameIdentity, "same-identity", "blocks"),
    (Plant::Leak, "leak", "memory"),
    (Plant::UnseenClose, "unseen-close", "blocks"),
    (Plant::LimpingPath, "limping-path", "share"),
    (Plant::QuietSync, "quiet-sync", "durable"),
    (Plant::LateEffect, "late-effect", "blocks"),
    (Plant::OldTail, "old-tail", "blocks"),
    (Plant::GrownWrite, "grown-write", "blocks"),
    (Plant::QuietCut, "quiet-cut", "durable"),
    (Plant::LateSave, "late-save", "durable"),
    (Plant::LostGuestWrite, "lost-guest-write", "blocks"),
];

impl Plant {
    /// Returns all planted bugs.
    pub fn all() -> impl Iterator<Item = Self> {
        PLANTS.iter().map(|(plant, ..)| *plant)
    }

    /// Returns the checker that must detect the bug.
    pub fn seen_by(self) -> &'static str {
        PLANTS.iter().find(|(plant, ..)| *plant == self).map_or("none", |(.., by)| by)
    }

    /// Returns the name of the bug.
    pub fn name(self) -> &'static str {
        PLANTS.iter().find(|(plant, ..)| *plant == self).map_or("none", |(_, name, _)| name)
    }
}

impl FromStr for Plant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = PLANTS.iter().find(|(_, name, _)| *name == text);
        found.map(|(plant, ..)| *plant).ok_or_else(|| {
            let names: Vec<&str> = PLANTS.iter().map(|(_, name, _)| *name).collect();
            format!("no bug is called '{text}': use one of {}", names.join(", "))
        })
    }
}
