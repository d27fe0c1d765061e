//! Commands that wait for the process to complete their requests.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;

use rtrs_core::local::reply;
use rtrs_core::time::Duration;

use crate::control_protocol::{Attached, Detached};

/// Detach of a volume, and the command waiting for it.
#[derive(Debug)]
pub(crate) struct Detach {
    /// Volume whose socket received the request.
    pub(crate) name: String,
    pub(crate) within: Duration,
    pub(crate) stream: UnixStream,
}

impl Detach {
    /// Replies that the volume was detached. The volume's name must already be free.
    pub(crate) fn reply(self, detached: &Detached) {
        reply(&self.stream, Ok(detached));
    }
}

/// Volume to add, and the command waiting for its attach.
#[derive(Debug)]
pub(crate) struct Add {
    pub(crate) name: String,
    /// The volume's own settings.
    pub(crate) settings: BTreeMap<String, String>,
    pub(crate) stream: UnixStream,
}

impl Add {
    /// Replies with the attached volume or an error.
    pub(crate) fn reply(self, attached: Result<Attached, String>) {
        reply(&self.stream, attached);
    }
}
