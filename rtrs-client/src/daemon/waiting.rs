//! Requests of commands that wait until the process has done what they ask for.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;

use rtrs_core::local::reply;
use rtrs_core::time::Duration;

use crate::control_protocol::{Attached, Detached};

/// A detach of a volume, and the command that waits for its end.
#[derive(Debug)]
pub(crate) struct Detach {
    /// Whose socket took it.
    pub(crate) name: String,
    pub(crate) within: Duration,
    pub(crate) stream: UnixStream,
}

impl Detach {
    /// Replies that the volume is detached, and what there is to say about it. Its name must be
    /// free before.
    pub(crate) fn reply(self, detached: &Detached) {
        reply(&self.stream, Ok(detached));
    }
}

/// A volume to add, and the command that waits until it is attached.
#[derive(Debug)]
pub(crate) struct Add {
    pub(crate) name: String,
    /// What it has of its own.
    pub(crate) settings: BTreeMap<String, String>,
    pub(crate) stream: UnixStream,
}

impl Add {
    /// Replies what it is attached as, or why it is not.
    pub(crate) fn reply(self, attached: Result<Attached, String>) {
        reply(&self.stream, attached);
    }
}
