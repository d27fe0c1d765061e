//! Bugs on purpose: each shows that a checker sees what it is for.
//!
//! They live in the simulator, at the borders of the machines (the backend, the fabric, the
//! device as its user sees it), never in the machines themselves.

use std::str::FromStr;

/// A bug to plant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Plant {
    /// None.
    #[default]
    None,
    /// The backend acknowledges a write and does not do it.
    LostWrite,
    /// The backend does a write of a path that died once more, after newer ones.
    GhostWrite,
    /// The backend does a write that its user was told has failed at any later time, whatever the
    /// server lets wait for it.
    LateError,
    /// The server lets the next client write while the backend still has writes of the one that
    /// died.
    EarlyOpen,
    /// The backend answers a read from before the last write.
    StaleRead,
    /// The client does not close the window of a read that is answered, and the server writes to
    /// it once more.
    OpenWindow,
    /// The fabric tells the client that a connection has ended which still reaches its memory.
    EarlyClosed,
    /// The backend does half of a write.
    TornWrite,
    /// The backend takes a flush for nothing.
    NoFlush,
    /// The backend takes durable writes for plain ones.
    NoFua,
    /// The device completes an IO twice.
    Twice,
    /// The device forgets an IO.
    Never,
    /// The server does not see that connections ended, when the session is detached.
    LostClose,
    /// The device ends an IO with an error that nothing brought about.
    BadStatus,
    /// The server's answer to a request gets lost on a connection that stays.
    LostAnswer,
    /// A link stays down after the faults stopped.
    DeadLink,
    /// The server does not tell that its host started anew.
    SameLife,
    /// Another server, with another disk, says that it is the session's.
    SameIdentity,
    /// Each life of a connection leaves registered memory behind.
    Leak,
    /// The front end does not see that an NBD connection was closed.
    UnseenClose,
    /// A path stays slow, in the scenario of equal paths.
    LimpingPath,
    /// The backend loses writes on their way out of its cache, and no sync says so.
    QuietSync,
    /// A write of the backend that takes longer than the client waits for an answer ends before it
    /// happens.
    LateEffect,
    /// A backing file that was made shorter has its old data again when it has its length again.
    OldTail,
    /// The backend writes beyond the end of a file that was made shorter.
    GrownWrite,
    /// A backing file is made shorter, and no flush says so.
    QuietCut,
    /// A server that is killed before the epoch of an export is saved has left nothing of it.
    LateSave,
    /// The backend loses writes of the second session.
    LostGuestWrite,
}

/// All of them, with their names and the checker that each is planted for.
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
    /// All bugs there are.
    pub fn all() -> impl Iterator<Item = Self> {
        PLANTS.iter().map(|(plant, ..)| *plant)
    }

    /// The checker that has to see it.
    pub fn seen_by(self) -> &'static str {
        PLANTS.iter().find(|(plant, ..)| *plant == self).map_or("none", |(.., by)| by)
    }

    /// Its name.
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
