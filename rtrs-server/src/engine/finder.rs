//! Opens of what is not exported by name: what is searched for, and who searches.

use std::fmt;

use rtrs_core::wire::{AccessMode, Name, OpenRspTail};

use super::reply_to::ReplyTo;

/// How an export is to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenMode {
    /// What for.
    pub access: AccessMode,
    /// The client compares cache ids: it has room for the long response, which kernels have not.
    pub compares: bool,
    /// The target was examined for this open.
    pub examined: bool,
}

impl OpenMode {
    /// An open with so much room for its response.
    pub const fn new(access: AccessMode, room: u32) -> Self {
        let compares = room as usize >= OpenRspTail::LONG_LEN;
        Self { access, compares, examined: false }
    }
}

/// An open of something that is not exported by name, on its way to a [`Finder`] and back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Search {
    /// Where the answer goes.
    pub reply_to: ReplyTo,
    /// How.
    pub mode: OpenMode,
    /// The name of the session.
    pub session: Name,
    /// The name that is wanted; neither empty nor with `..` in it.
    pub name: Name,
}

/// Examines targets of named exports before their first session opens them: a path may lead to
/// another file by then.
pub trait Examiner: fmt::Debug + Send + Sync {
    /// Takes an open and returns at once; the open comes back to the control shard as a request,
    /// marked as examined. Returns false if it will not.
    fn examine(&self, reply_to: ReplyTo, name: &Name, mode: OpenMode) -> bool;
}

/// Looks for what is not exported by name.
pub trait Finder: fmt::Debug + Send + Sync {
    /// Takes a search and returns at once; its answer is a message to the control shard. False
    /// when there will be none.
    fn find(&self, search: Search) -> bool;
}
