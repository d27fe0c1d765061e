//! Opens that need other threads: searches for names not exported, and examinations of targets.

use std::fmt;

use rtrs_core::wire::{AccessMode, Name, OpenFlags, OpenRspTail};

use super::reply_to::ReplyTo;

/// State of the target of an export that is about to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Examined {
    /// Not examined for this open.
    No,
    /// Examined; the export is to be opened in its current state.
    Yes,
    /// Examined; the path leads elsewhere, and an ongoing change to exports prevented the export
    /// from being reopened in time.
    Outdated,
}

/// Mode in which an export is to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenMode {
    /// Requested access.
    pub access: AccessMode,
    /// Whether the client compares cache IDs: it has room for the long response, unlike a kernel
    /// client.
    pub compares: bool,
    /// Flags of a client that compares; none of any other.
    pub flags: OpenFlags,
    /// Whether the target was examined for this open, and with which result.
    pub examined: Examined,
}

impl OpenMode {
    /// Creates the mode of an open with `room` bytes for its response.
    pub fn new(access: AccessMode, flags: OpenFlags, room: u32) -> Self {
        let compares = room as usize >= OpenRspTail::LONG_LEN;
        // The byte of a client that does not compare may have any value.
        let flags = if compares { flags } else { OpenFlags::default() };
        Self { access, compares, flags, examined: Examined::No }
    }
}

/// Open of a name that is not exported, passed to a [`Finder`] and back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Search {
    /// Destination of the answer.
    pub reply_to: ReplyTo,
    /// Mode of the open.
    pub mode: OpenMode,
    /// Name of the session.
    pub session: Name,
    /// Requested name; neither empty nor containing `..`.
    pub name: Name,
}

/// Examines targets of named exports before the first session opens them, because by then a path
/// may lead to a different file.
pub trait Examiner: fmt::Debug + Send + Sync {
    /// Takes an open without blocking. Later, the open is sent back to the control shard with the
    /// result of the examination. Returns false if the open was not taken.
    fn examine(&self, reply_to: ReplyTo, name: &Name, mode: OpenMode) -> bool;
}

/// Searches for names that are not exported.
pub trait Finder: fmt::Debug + Send + Sync {
    /// Takes a search without blocking; the result arrives as a message to the control shard.
    /// Returns false if there will be no result.
    fn find(&self, search: Search) -> bool;
}
